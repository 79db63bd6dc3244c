"""The Trainer: a training loop that resumes by itself and saves where it is safe to.

It owns the order of things in a run; what a step is, is in `loop`, when to save, in `saving`.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.data.foreign import describe_inexact
from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.manager import CheckpointManager
from holdfast.policy.clock import Time, Unit, argument_name, parse, reading
from holdfast.policy.retention import Rule
from holdfast.policy.triggers import Every
from holdfast.state.capture import check_state
from holdfast.store.base import Store
from holdfast.train.callbacks import Callback, Callbacks, Metrics
from holdfast.train.counters import Counters
from holdfast.train.loggers import JsonLines
from holdfast.train.loop import LossFunction, Update, next_window
from holdfast.train.progress import ProgressBar
from holdfast.train.saving import Saver

logger = logging.getLogger("holdfast")


class Trainer:
    """Trains a model to a goal, over as many processes as it takes.

        trainer = Trainer(model, optimizer=optimizer, data=loader, loss=loss,
                          root="runs/gpt", every="500step", keep=Last(3))
        trainer.fit("10_000step")      # killed? run the script again

    A step is one window of `accumulate` batches (fewer where an epoch ends), and saves are made
    between steps only, after the `step_end` hooks. An epoch whose end is known (as
    `holdfast.data.Loader` tells it) ends within its last step. A save that fails is warned of and
    tried again after the next step; the third failure in a row is raised.
    """

    goal: Time
    """Where the present or last `fit` goes."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        data: Any,
        loss: LossFunction,
        root: str | os.PathLike[str] | Store,
        scheduler: Any = None,
        state: Mapping[str, Any] | None = None,
        every: str | Every | None = None,
        keep: Rule | None = None,
        takeover: bool = False,
        accumulate: int = 1,
        clip_norm: float | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        callbacks: Iterable[Callback] = (),
        count_samples: Callable[[Any], int] | None = None,
        count_tokens: Callable[[Any], int] | None = None,
        log: bool | str | os.PathLike[str] = True,
        progress: bool = True,
    ) -> None:
        """Nothing is read, written or claimed before `fit`.

        Args:
            model: is put into training mode by `fit`.
            data: batches with a position: a `holdfast.data.Loader`, or an iterable with
                `state_dict` and `load_state_dict` whose iteration gives the rest of an epoch.
            loss: called with the model and a batch; gives the batch's mean loss, or that and a
                dict of metrics.
            root, every, keep, takeover: as for `CheckpointManager`; the last step is always saved.
            scheduler: has `step()`, called after each step, and is saved.
            state: further components to save.
            accumulate: batches of a step.
            clip_norm: largest norm of all gradients together.
            seed: of the global generators, when training begins afresh.
            device: where batches are moved; None: not at all.
            callbacks: see `Callback`.
            count_samples, count_tokens: how many a batch has, for goals and triggers in them.
            log: write one JSON line a step, to the root's `log/train.jsonl` or the file named.
            progress: show a progress bar on a terminal.

        Raises:
            UsageError: an argument is wrong.
        """
        _check_data(data)
        _check_range("accumulate", accumulate, 1, 2**31)
        _check_range("seed", seed, 0, 2**32)
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm={clip_norm!r}: must be above zero, or None")
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.data = data
        self.root = root
        self.counters = Counters()
        self.manager: CheckpointManager | None = None
        """The manager while `fit` runs."""
        self._every = Every(every) if isinstance(every, str) else every
        self._keep = keep
        self._takeover = takeover
        self._accumulate = accumulate
        self._seed = seed
        self._count_samples = count_samples
        self._count_tokens = count_tokens
        if self._every is not None:
            self._check_counted(self._every.interval.unit, f"every='{self._every.interval}'")
        self._callbacks = Callbacks([*callbacks, *_own_loggers(root, log, progress)])
        self._update = Update(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            loss=loss,
            clip_norm=clip_norm,
            device=None if device is None else torch.device(device),
        )
        self.state = self._components(state or {})
        check_state(self.state)

    def fit(self, until: str | int) -> None:
        """Train until the whole run has come to `until`: a number of steps, or "10_000step",
        "2ep", "1e9tok". What was done by earlier processes counts.

        Resumes from the newest usable checkpoint of the root. When the goal is reached already,
        says so and neither trains nor saves. On return the last step is durable.

        Raises:
            UsageError: `until` is not a goal, or counts what is not counted here.
            SaveFailed: saving failed three times in a row.
            OwnershipError: another process trains this run.
        """
        self.goal = self._checked_goal(until)
        with CheckpointManager(
            self.root, self.state, every=self._every, keep=self._keep, takeover=self._takeover
        ) as manager:
            self.manager = manager
            try:
                self._fit(manager)
            except BaseException as error:
                self._callbacks.exception(self, error)
                raise
            finally:
                self.manager = None

    def _fit(self, manager: CheckpointManager) -> None:
        found = manager.resume()
        if found is None:
            self._seed_generators()
        else:
            self._callbacks.resumed(self, found)
        self._begin_counting()
        if self._is_done():
            logger.info("%s is reached already, at step %d", self.goal, self.counters.step)
            self._callbacks.already_done(self)
            return
        saver = Saver(
            manager,
            self,
            self._callbacks,
            saved_step=None if found is None else found.step,
        )
        self._callbacks.fit_start(self)
        self.model.train()
        metrics: Metrics = {}
        for metrics in self._steps():
            if not self._is_done():
                saver.after_step(metrics)
        saver.finish(metrics)
        self._callbacks.fit_end(self)

    def _steps(self) -> Iterator[Metrics]:
        """Do the steps up to the goal; gives the metrics of each when it is done and counted."""
        while not self._is_done():
            begun_at = self.counters.batch
            if begun_at == 0:
                self._callbacks.epoch_start(self)
            with preserved():
                # Beginning an iteration of torch's own loaders draws from the global generator.
                batches = iter(self.data)
            epoch = self.counters.epoch
            while not self._is_done() and self.counters.epoch == epoch:
                window = next_window(batches, self._accumulate)
                if window:
                    yield self._step(window, batches)
                elif begun_at == self.counters.batch == 0:
                    raise UsageError("data gave no batch in a whole epoch")
                else:
                    self.counters.end_epoch()
                    self._callbacks.epoch_end(self)

    def _step(self, window: list[Any], batches: Iterator[Any]) -> Metrics:
        metrics = self._update(window, lambda: self._callbacks.before_step(self))
        self.counters.add_step(
            len(window), _total(self._count_samples, window), _total(self._count_tokens, window)
        )
        # What is saved after the epoch's last step is to say that the epoch is over.
        is_over = len(window) < self._accumulate or self._ends_now(batches)
        if is_over:
            self.counters.end_epoch()
        self._callbacks.step_end(self, metrics)
        if is_over:
            self._callbacks.epoch_end(self)
        return metrics

    def _ends_now(self, batches: Iterator[Any]) -> bool:
        """Ends the epoch of data that knows its end; asking for more than the last batch does."""
        if not getattr(self.data, "at_epoch_end", False):
            return False
        return next(batches, None) is None

    def _begin_counting(self) -> None:
        now = self.counters
        for name, count, total in (
            ("samples", self._count_samples, now.samples),
            ("tokens", self._count_tokens, now.tokens),
        ):
            if count is not None and total is None and now.step:
                logger.warning("%s were not counted before step %d", name, now.step)
        now.samples = None if self._count_samples is None else now.samples or 0
        now.tokens = None if self._count_tokens is None else now.tokens or 0

    def _is_done(self) -> bool:
        value = reading(self.counters.timestamp, self.goal.unit)
        return value is not None and value >= self.goal.value

    def _seed_generators(self) -> None:
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)

    def _checked_goal(self, until: str | int) -> Time:
        if isinstance(until, int):
            _check_range("until", until, 1, 2**63)
            return Time(until, Unit.STEP)
        goal = parse(until, what="until")
        if goal.unit is Unit.SECOND:
            raise UsageError(f"until={until!r}: a goal is counted, such as '10_000step' or '2ep'")
        self._check_counted(goal.unit, f"until={until!r}")
        return goal

    def _check_counted(self, unit: Unit, what: str) -> None:
        counts = {Unit.SAMPLE: self._count_samples, Unit.TOKEN: self._count_tokens}
        if unit in counts and counts[unit] is None:
            name = argument_name(unit)
            raise UsageError(f"{what}: {name} are not counted; give count_{name}")

    def _components(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        own = {"model": self.model, "optimizer": self.optimizer}
        if self.scheduler is not None:
            own["scheduler"] = self.scheduler
        own |= {"data": self.data, "progress": self.counters, **self._callbacks.components}
        taken = [name for name in extra if name in own]
        if taken:
            raise UsageError(f"state: the Trainer has components named {taken} itself")
        return own | dict(extra)


def _total(count: Callable[[Any], int] | None, window: list[Any]) -> int | None:
    return None if count is None else sum(map(count, window))


def _own_loggers(
    root: str | os.PathLike[str] | Store, log: bool | str | os.PathLike[str], progress: bool
) -> list[Callback]:
    loggers: list[Callback] = []
    if log is True:
        if not isinstance(root, str | os.PathLike) or "://" in os.fspath(root):
            raise UsageError("log=True needs a local root: name a file, or pass log=False")
        loggers.append(JsonLines(Path(root) / "log" / "train.jsonl"))
    elif log is not False:
        loggers.append(JsonLines(log))
    if progress:
        loggers.append(ProgressBar())
    return loggers


def _check_data(data: Any) -> None:
    missing = [
        name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(data, name)
    ]
    if missing:
        raise UsageError(
            f"data is a {type(data).__name__} without {', '.join(missing)}, so it has no position "
            "to resume from: use holdfast.data.Loader"
        )
    inexact = describe_inexact(data)
    if inexact is not None:
        logger.warning("data: %s", inexact)


def _check_range(name: str, value: Any, lowest: int, beyond: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < beyond:
        raise UsageError(f"{name}={value!r}: must be a whole number, at least {lowest}")
