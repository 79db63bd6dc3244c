"""From a checkpoint that can be used to a state: found, read, verified."""
