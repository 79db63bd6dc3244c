"""Assigns the parts of other trainers' files and folders to components."""
