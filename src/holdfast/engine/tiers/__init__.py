"""A run in two roots: saves commit in the local one, and are mirrored to the remote one."""
