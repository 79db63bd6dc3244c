"""Reads pickles as descriptions of what they hold; imports nothing and runs nothing they name."""
