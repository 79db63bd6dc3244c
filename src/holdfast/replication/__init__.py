"""The second copy of a run: uploads to the remote tier, copies, repairs."""
