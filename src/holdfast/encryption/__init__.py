"""Encryption of checkpoints: a store that encrypts its writes and decrypts its reads."""
