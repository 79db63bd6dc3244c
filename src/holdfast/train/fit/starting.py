"""Start of a `fit` from a checkpoint of another root, or without any root.

`StartingPoint` is `start_from="old@step=3"`; `Unsaved` is the manager for `checkpoints=None`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.engine.access import place_of
from holdfast.engine.checkpoint import Checkpoint, CheckpointList
from holdfast.engine.hooks import StateHooks
from holdfast.engine.tiers.tiered import Tiered
from holdfast.errors import UsageError
from holdfast.format.layout import parse_attempt
from holdfast.format.manifest import Timestamp
from holdfast.keys import Encryption
from holdfast.manager import CheckpointManager
from holdfast.store import open_store
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """A checkpoint of another root, to start a run from. Nothing is read before `load`."""

    store: Store
    which: str

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str] | None,
        root: str | os.PathLike[str] | Store | Tiered | None,
    ) -> StartingPoint | None:
        """Resolve the checkpoint that `source` names, for a run in `root`; None without a source.

        Raises:
            UsageError: `source` is neither a path nor a URL, or it is in `root` itself.
        """
        if source is None:
            return None
        if not isinstance(source, str | os.PathLike):
            raise UsageError(f"start_from={source!r}: must be ROOT or ROOT@WHICH, a path or a URL")
        store, which, folder = place_of(source)
        if folder and parse_attempt(folder) is None:
            raise UsageError(
                f"start_from={os.fspath(source)!r}: this checkpoint's folder was renamed; give it "
                "its own name again"
            )
        tiers = (root.local, root.remote) if isinstance(root, Tiered) else (root,)
        if any(tier is not None and open_store(tier).url == store.url for tier in tiers):
            raise UsageError(
                f"start_from={os.fspath(source)!r}: this is the run's own root. To go back in it, "
                'call resume("step=…") of a CheckpointManager; to begin another run, give another '
                "root"
            )
        return cls(store=store, which=folder or which)

    def load(
        self,
        state: Mapping[str, Any],
        hooks: StateHooks,
        encryption: Encryption | None,
        ranks: Literal["group"] | None,
        override: Collection[str] = (),
    ) -> Checkpoint:
        """Load the checkpoint's whole state into the live objects of all ranks, without a claim.

        Raises:
            HoldfastError: as for `CheckpointManager.load`.
        """
        with CheckpointManager(
            self.store, state, hooks=hooks, encrypt=encryption, ranks=ranks
        ) as other:
            return other.load(self.which, in_place=True, override=override)


class _NoRoot(UsageError, AttributeError):
    """Error for a manager without a root; an `AttributeError`, so that `hasattr` is False."""


class Unsaved(CheckpointManager):
    """Manager of a Trainer without a root, which saves nothing and starts no threads.

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
