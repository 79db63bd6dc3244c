"""Hooks into the Trainer: what can be hooked, in which order, and with which state.

A hook is a method of `Callback`; to add one, add it there and to `Callbacks`, which mypy then
holds to the same signature.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import SaveFailed, UsageError

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint
    from holdfast.train.trainer import Trainer

logger = logging.getLogger("holdfast")

Metrics = Mapping[str, float]


class Callback:
    """Something that happens beside training. Override the hooks that matter.

    Hooks run on the training thread, callback by callback in the order of the list, loggers
    last. What a hook raises ends the training, except in `exception`.

    A callback with `state_dict` and `load_state_dict` is saved and resumed with the run, as the
    component `callback-<place in the list>-<class name>`.
    """

    def resumed(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """A checkpoint was applied; before `fit_start`."""

    def already_done(self, trainer: Trainer) -> None:
        """`fit` was asked for what has been reached already; no other hook will follow."""

    def fit_start(self, trainer: Trainer) -> None:
        """Training begins, or goes on."""

    def epoch_start(self, trainer: Trainer) -> None:
        """An epoch begins. Not called again by a resume inside it."""

    def before_step(self, trainer: Trainer) -> None:
        """The window's gradients are complete and clipped; the optimizer is about to step."""

    def step_end(self, trainer: Trainer, metrics: Metrics) -> None:
        """A step is done and counted; its checkpoint, if there is to be one, comes next."""

    def epoch_end(self, trainer: Trainer) -> None:
        """An epoch has ended; `trainer.counters.epoch` counts it already."""

    def checkpoint_saved(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """A checkpoint is durable; told at the end of a later step, or of the training."""

    def checkpoint_failed(self, trainer: Trainer, error: SaveFailed) -> None:
        """A save did not commit; told like `checkpoint_saved`. The next step tries again."""

    def exception(self, trainer: Trainer, error: BaseException) -> None:
        """Training ends by this error, which is raised afterwards whatever a hook does."""

    def fit_end(self, trainer: Trainer) -> None:
        """The goal is reached and the last checkpoint is durable."""


class Logger(Callback):
    """A callback that only records; it runs after those that are not loggers."""


class Callbacks(Callback):
    """Several callbacks as one."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        given = list(callbacks)
        for callback in given:
            if not isinstance(callback, Callback):
                raise UsageError(f"callbacks: {callback!r} is not a holdfast.train.Callback")
        repeated = [item for item, count in Counter(map(id, given)).items() if count > 1]
        if repeated:
            raise UsageError("callbacks: the same object is given twice; it would run twice")
        self._all = sorted(given, key=lambda callback: isinstance(callback, Logger))
        self._components = {
            f"callback-{number}-{_short_name(callback)}": callback
            for number, callback in enumerate(given)
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        }

    @property
    def components(self) -> dict[str, Any]:
        """Those with a state, by the name of their component."""
        return dict(self._components)

    def resumed(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        for callback in self._all:
            callback.resumed(trainer, checkpoint)

    def already_done(self, trainer: Trainer) -> None:
        for callback in self._all:
            callback.already_done(trainer)

    def fit_start(self, trainer: Trainer) -> None:
        for callback in self._all:
            callback.fit_start(trainer)

    def epoch_start(self, trainer: Trainer) -> None:
        for callback in self._all:
            callback.epoch_start(trainer)

    def before_step(self, trainer: Trainer) -> None:
        for callback in self._all:
            callback.before_step(trainer)

    def step_end(self, trainer: Trainer, metrics: Metrics) -> None:
        for callback in self._all:
            callback.step_end(trainer, metrics)

    def epoch_end(self, trainer: Trainer) -> None:
        for callback in self._all:
            callback.epoch_end(trainer)

    def checkpoint_saved(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        for callback in self._all:
            callback.checkpoint_saved(trainer, checkpoint)

    def checkpoint_failed(self, trainer: Trainer, error: SaveFailed) -> None:
        for callback in self._all:
            callback.checkpoint_failed(trainer, error)

    def exception(self, trainer: Trainer, error: BaseException) -> None:
        for callback in self._all:
            try:
                callback.exception(trainer, error)
            except Exception:
                # The error that ends the training is what the caller must see.
                logger.exception("%r failed in its exception hook", callback)

    def fit_end(self, trainer: Trainer) -> None:
        for callback in self._all:
            callback.fit_end(trainer)


def _short_name(callback: Callback) -> str:
    return re.sub(r"[^a-z0-9_]", "_", type(callback).__name__.lower())[:40]
