"""Shared by all bridges: where a run begins, and generators after a trainer's preparations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.hooks import StateHooks
from holdfast.keys import Encryption
from holdfast.manager import CheckpointManager
from holdfast.state import generators
from holdfast.state.components import OF_TRAINERS
from holdfast.store.base import Store


class Generators:
    """States of all global generators, to set them again after a trainer's preparations."""

    def __init__(self) -> None:
        """Read the states."""
        known = generators.global_generators()
        devices = [one for found in known["devices"].values() for one in found]
        live = [known["python"], known["numpy"], known["torch"], *devices]
        self._states = [(one, generators.read(one)[1]) for one in live]

    def put_back(self) -> None:
        """Set the generators to these states."""
        for generator, state in self._states:
            generators.write(generator, state)


def taking_over(hooks: StateHooks) -> StateHooks:
    """Allow that a checkpoint has no component of this trainer, or one of `holdfast.train`."""
    own = hooks.one_sided
    return replace(hooks, one_sided=lambda name: name in OF_TRAINERS or bool(own and own(name)))


def start_from(
    store: Store,
    which: str,
    manager: CheckpointManager,
    components: Mapping[str, Any],
    *,
    hooks: StateHooks,
    encrypt: Encryption | None,
) -> Checkpoint:
    """Begin the run of `manager` with the whole state of a checkpoint in another root.

    Raises:
        HoldfastError: as for `CheckpointManager.load`.
    """
    with CheckpointManager(store, components, hooks=taking_over(hooks), encrypt=encrypt) as other:
        found = other.load(which, in_place=True)
    manager.count_from(found.timestamp)
    return found
