"""What a Trainer has for a manager when it has no root: nothing is saved."""

from __future__ import annotations

from typing import Any

from holdfast.engine.checkpoint import Checkpoint
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager


class Unsaved(CheckpointManager):
    """A manager without a root. It starts no thread and claims nothing; `fit` asks it as any other
    one, and a call that needs a root raises `UsageError`."""

    def __init__(self) -> None:
        """Nothing is set up: what is not overridden here ends in `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            "this Trainer has root=None: it saves nothing, so there is nothing to save, load, list "
            "or mark. Give it a root"
        )

    def resume(self, *_args: Any, **_options: Any) -> None:
        """Find nothing."""

    def count_from(self, timestamp: Timestamp) -> None:
        """Do nothing: there are no intervals between saves."""

    def maybe_save(self, step: int, **_options: Any) -> None:
        """Save nothing, whatever is due."""

    def is_quiet(self, step: int) -> bool:
        """Answer that no save is due."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """Return: no save is under way."""

    def fence(self) -> None:
        """Return: nothing is being copied."""

    def list(self) -> tuple[Checkpoint, ...]:
        """No checkpoint."""
        return ()

    @property
    def is_owner(self) -> bool:
        """Always False: there is no run to own."""
        return False

    def close(self) -> None:
        """Do nothing."""
