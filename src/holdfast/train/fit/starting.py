"""Start of a new run from a checkpoint of another root: `start_from="old@step=3"`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.engine.access import place_of
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.hooks import StateHooks
from holdfast.engine.tiers.tiered import Tiered
from holdfast.errors import UsageError
from holdfast.format.layout import parse_attempt
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
        self, state: Mapping[str, Any], hooks: StateHooks, encryption: Encryption | None
    ) -> Checkpoint:
        """Load the whole state into the live objects; claims nothing.

        Raises:
            HoldfastError: as for `CheckpointManager.load`.
        """
        with CheckpointManager(self.store, state, hooks=hooks, encrypt=encryption) as other:
            return other.load(self.which, in_place=True)
