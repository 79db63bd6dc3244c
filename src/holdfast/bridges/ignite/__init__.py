"""Bridge to Ignite 0.5: runs an Engine that resumes, and saves it between its iterations."""

from holdfast.bridges.parts import needs_library

with needs_library("ignite"):
    from holdfast.bridges.ignite.run import HoldfastRun

__all__ = ["HoldfastRun"]
