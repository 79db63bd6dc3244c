"""Contents of a root: found and read, written and deleted, named and marked."""
