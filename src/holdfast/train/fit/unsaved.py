"""The manager of a Trainer that has no root: saving and resuming are no-ops."""

from __future__ import annotations

from typing import Any

from holdfast.engine.checkpoint import CheckpointList
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager


class _NoRoot(UsageError, AttributeError):
    """Use of a manager without a root; an `AttributeError`, so that `hasattr` returns False."""


class Unsaved(CheckpointManager):
    """A manager without a root. Starts no threads and claims nothing.

    The calls that `fit` makes are no-ops; any other one raises `UsageError`.
    """

    def __init__(self) -> None:
        """Set no attributes of a manager, so that using one calls `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        raise _NoRoot(
            "this Trainer has no root (checkpoints=None): it saves nothing, so there is nothing to "
            "save, load, list or mark. Give it a root"
        )

    def resume(self, *_args: Any, **_options: Any) -> None:
        """No-op: there is nothing to resume."""

    def count_from(self, timestamp: Timestamp) -> None:
        """No-op: there are no intervals between saves."""

    def maybe_save(self, step: int, **_options: Any) -> None:
        """No-op: nothing is saved, whatever is due."""

    def is_quiet(self, step: int) -> bool:
        """Always True: no save is ever due."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """No-op: no save is in progress."""

    def fence(self) -> None:
        """No-op: nothing is being copied."""

    def list(self) -> CheckpointList:
        """Always empty: there are no checkpoints."""
        return CheckpointList()

    @property
    def is_owner(self) -> bool:
        """Always False: there is no run to own."""
        return False

    def close(self) -> None:
        """No-op: nothing was opened."""
