"""Encryption of checkpoints: a store that encrypts what it writes and decrypts what it reads."""
