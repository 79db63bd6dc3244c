"""From a staged state to a committed checkpoint: encoded, written, linked."""
