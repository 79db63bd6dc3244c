"""Encryption of checkpoints: a store that encrypts and decrypts."""
