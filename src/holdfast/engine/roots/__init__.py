"""What is in a root: found and read, written and deleted, named and marked."""
