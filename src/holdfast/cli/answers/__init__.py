"""JSON answers of the commands, as structs: their fields are the members that docs/cli.md lists.

Each module has the answers of a few commands. Other commands keep theirs beside their work.
"""
