"""Save and resume runs of torchtitan: a checkpoint manager for its `checkpoint` setting.

torchtitan builds the checkpoint manager that its configuration names, and calls it after each step.
This one hands model, optimizers and schedulers to a `CheckpointManager`, with torchtitan's ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.bridges.parts import (
    allow_other_trainers,
    is_leader,
    name_components,
    needs_library,
    note_other_framework,
    say_start,
)
from holdfast.checkpoints import Checkpoints, StateHooks
from holdfast.control.stop import Stop
from holdfast.data.loader import Loader
from holdfast.data.stream import Stream
from holdfast.errors import NoCheckpoint, UsageError, listing
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.results import Checkpoint
from holdfast.state.components import TRAINER, PerRank

with needs_library("torchtitan", "torchtitan"):
    from torchtitan.components.checkpointer import BaseCheckpointManager

logger = logging.getLogger("holdfast")

# Names of torchtitan.
_OF_THEIR_TRAINER = "train_state"  # its name among the `states` that torchtitan gives
_STEP, _TOKENS = "step", "ntokens_seen"  # its counters
_CALLED = ("_close", "_load", "_maybe_wait_for_staging", "_save", "_wait_for_saving")
"""Methods of the base class that call ours."""
_SUPPORTED = "0.3.0"

_FRAMEWORK = "torchtitan"
_BY_RANK = "each rank has a different part of the model, which a component does not support"


class HoldfastManager(BaseCheckpointManager):
    """Checkpoint manager of torchtitan that saves and resumes through Holdfast.

        config.checkpoint = HoldfastManager.Config(enable=True, interval=500, keep_latest_k=3)

    A run that was killed goes on from its newest checkpoint when it is started again. After a
    signal (SIGTERM, SIGINT, SIGUSR1) the step is saved, and `save` raises `SystemExit(75)`, or
    `KeyboardInterrupt` after SIGINT.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The settings of torchtitan's checkpoints: `folder`, `interval`, `keep_latest_k`, ….

        The last checkpoint has the whole state, of which `last_save_model_only` wants a part.
        """

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        """Make the manager of a run; torchtitan calls this.

        Raises:
            UsageError: settings ask for what this manager does not do, or the model has several
                parts, as with pipeline parallelism; all of them are listed.
        """
        self.enable, self.save_future = config.enable, None
        if not self.enable:
            return
        _check_version(states)
        _check_settings(config, model_parts)
        self._is_load_only = config.load_only
        self._saves_first = config.enable_first_step_checkpoint
        self._counters = _Counters(states[_OF_THEIR_TRAINER])
        others = {name: one for name, one in states.items() if name != _OF_THEIR_TRAINER}
        # torchtitan's own loaders have a position for each rank.
        data = dataloader if isinstance(dataloader, Loader | Stream) else PerRank(dataloader)
        self._closing = contextlib.ExitStack()
        self._stop = self._closing.enter_context(Stop())
        self._checkpoints = _options(config, base_folder)
        self.manager = CheckpointManager(
            self._checkpoints,
            {
                "model": model_parts[0],
                **name_components("optimizer", list(optimizers)),
                **name_components("scheduler", list(lr_schedulers)),
                **({} if dataloader is None else {"data": data}),
                TRAINER: self._counters,
                **others,
            },
            hooks=allow_other_trainers(StateHooks()),
            stop=self._stop,
        )
        self._closing.push(self.manager)

    def _load(self, step: int = -1) -> bool:
        self._counters.are_loaded = False
        which = "latest" if step == -1 else step
        found = self._read(which) if self._is_load_only else self.manager.resume(which)
        say_start(self._checkpoints, self.manager, found)
        if found is not None and not self._counters.are_loaded:
            self._counters.take_over(found.timestamp)
        return found is not None

    def _read(self, which: str | int) -> Checkpoint | None:
        """Load without claiming the run, which another process may be training."""
        try:
            return self.manager.load(which)
        except NoCheckpoint:
            return None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._is_load_only:
            return False
        tokens = self._counters.tokens
        pending = self.manager.maybe_save(curr_step, tokens=tokens)
        if last_step or self._stop.requested or (curr_step == 1 and self._saves_first):
            pending = self.manager.save(curr_step, tokens=tokens, wait=last_step)
        if self._stop.requested:
            self._close()  # raises what ends the program
        return pending is not None

    def _wait_for_saving(self) -> None:
        self.manager.wait(uploads=False)

    def _maybe_wait_for_staging(self) -> None:
        self.manager.fence()

    def _close(self) -> None:
        # torchtitan closes after an error, too, which then comes out.
        self._closing.__exit__(*sys.exc_info())


class _Counters:
    """Component `trainer`: step and tokens of torchtitan's Trainer."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self.are_loaded = False
        """Whether a checkpoint of torchtitan was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {"of": _FRAMEWORK, **self._theirs.state_dict()}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept any state, so that torchtitan loads it once and not on trial."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counters, unless another trainer has saved the state."""
        note = note_other_framework(state, _FRAMEWORK)
        if note is not None:
            if is_leader():
                logger.warning("%s", note)
        else:
            self._theirs.load_state_dict({n: one for n, one in state.items() if n != "of"})
            self.are_loaded = True

    def take_over(self, timestamp: Timestamp) -> None:
        """Set the counters to those of a checkpoint of another trainer."""
        counted = {_STEP: timestamp.step}
        if timestamp.tokens is not None:
            counted[_TOKENS] = timestamp.tokens
        self._theirs.load_state_dict({**self._theirs.state_dict(), **counted})

    @property
    def tokens(self) -> int | None:
        """Tokens that were trained on; None: not counted."""
        count: int | None = self._theirs.state_dict().get(_TOKENS)
        return count


def _options(config: Any, base_folder: str) -> Checkpoints:
    is_url = "://" in config.folder  # which a path before it would turn into a local folder
    return Checkpoints(
        config.folder if is_url else os.path.join(base_folder, config.folder),
        every=f"{config.interval}step",
        keep=Last(config.keep_latest_k) if config.keep_latest_k else None,
    )


def _check_version(states: Mapping[str, Any]) -> None:
    """Raise `UsageError` if torchtitan does not call this manager as it did."""
    missing = [n for n in _CALLED if n not in BaseCheckpointManager.__abstractmethods__]
    if missing or _OF_THEIR_TRAINER not in states:
        what = f"does not call {', '.join(missing)}" if missing else f"gives {sorted(states)} only"
        raise UsageError(
            f"torchtitan: its BaseCheckpointManager {what}; this bridge is tested with {_SUPPORTED}"
        )


def _check_settings(config: Any, model_parts: list[Any]) -> None:
    """Raise `UsageError` for settings that would be ignored."""
    reasons = {
        "initial_load_path": (config.initial_load_path, "load the weights into the model first"),
        "last_save_in_hf": (config.last_save_in_hf, "export the checkpoint afterwards"),
        "exclude_from_loading": (config.exclude_from_loading, "a resume loads the whole state"),
        "create_seed_checkpoint": (config.create_seed_checkpoint, "not supported"),
        "pipeline parallelism": (len(model_parts) > 1, _BY_RANK),
    }
    wrong = [f"{name}: {why}" for name, (is_set, why) in reasons.items() if is_set]
    if wrong:
        raise UsageError("torchtitan's settings:\n" + listing(wrong))
