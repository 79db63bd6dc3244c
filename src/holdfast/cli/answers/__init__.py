"""JSON answers of the commands, as structs: `holdfast schema` prints their fields.

Each module has the answers of a few commands. Other commands keep theirs beside their work.
"""
