"""A run in two roots: saves commit in the local one, and are uploaded to the remote one."""
