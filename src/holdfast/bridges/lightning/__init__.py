"""Bridge to Lightning 2.x: a callback that saves and resumes what its Trainer trains."""

from holdfast.bridges.parts import needs_library

with needs_library("lightning"):
    from holdfast.bridges.lightning.callback import HoldfastCheckpoint

__all__ = ["HoldfastCheckpoint"]
