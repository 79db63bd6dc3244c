"""The Trainer that saves and resumes through Holdfast, and the order of its calls.

The Trainer has no seam that replaces saving, and fixes its place in the epoch before its first
callback. So it is given a folder with nothing but a step, takes its place from that, and gets the
state itself from the checkpoint when its optimizer and scheduler exist. Saves come after the
logs and evaluations of a step, so none of them is lost by a resume.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
import transformers.trainer as theirs
from transformers.trainer_callback import TrainerCallback, TrainerState

from holdfast.bridges.parts import only_leader, reporting, say_start, taking_over
from holdfast.bridges.transformers.counters import INTERVALS, Counters
from holdfast.bridges.transformers.epochs import (
    Epochs,
    check_place,
    check_windows,
    loader_of,
    loaders_skip_by_themselves,
)
from holdfast.bridges.transformers.seams import (
    STATE_FILE,
    SUMMARY,
    beside_bar,
    check_names,
    leaders,
    measured_at,
    refuse_arguments,
)
from holdfast.bridges.validations import Validations, check_direction
from holdfast.data.loader import Loader
from holdfast.data.stream import Stream
from holdfast.engine.control.stop import Stop
from holdfast.engine.hooks import StateHooks
from holdfast.engine.options import Checkpoints
from holdfast.engine.roots.sources import split_folder
from holdfast.errors import UsageError
from holdfast.manager import CheckpointManager
from holdfast.policy.savers import Due
from holdfast.policy.triggers import Event
from holdfast.state.components import PerRank

_ONE_SIDED = ("scheduler", "scaler")


class _Elsewhere(Exception):
    """Raised in the Trainer's loop: the resume has used a checkpoint of another step."""

    def __init__(self, step: int) -> None:
        self.step = step


if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # a mixin comes before the trainer that it is mixed into


class CheckpointedMixin(_Trainer):
    """Mixin that gives transformers' Trainer, or a subclass, checkpoints that resume exactly.

        class MyTrainer(CheckpointedMixin, SFTTrainer): ...

        trainer = MyTrainer(model, args, train_dataset=…, checkpoints=Checkpoints("runs/sft", …))
        trainer.train()  # resumes by itself

    Everything but `checkpoints`, `data` and `stop` goes to the Trainer. It saves when `checkpoints`
    say so, when the Trainer itself would (`save_strategy`, or a callback that sets `should_save`),
    when a signal asks for it, and at the end. A signal ends training after its step; `train` then
    raises `SystemExit(75)`, or `KeyboardInterrupt` after SIGINT.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: Checkpoints | str | os.PathLike[str],
        data: Loader | Stream | None = None,
        stop: Stop | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the Trainer.

        Args:
            args: those of the Trainer.
            checkpoints: the root, or a `Checkpoints` with when to save and what to keep.
            data: batches of the training. None: a `Loader` of `train_dataset`, with the batch
                size, collator, sampler and workers that the Trainer has for it.
            stop: the signals that end training. None: SIGTERM, SIGINT and SIGUSR1.
            kwargs: those of the Trainer.

        Raises:
            UsageError: the version of transformers is not supported, or an argument asks for what
                cannot be resumed exactly; all of them are listed.
        """
        check_names()
        self.checkpoints = Checkpoints.of(checkpoints, {})
        if self.checkpoints.root is None:
            raise UsageError("checkpoints: the root is None; give a path to save in")
        self.manager: CheckpointManager | None = None
        self._emit = reporting(self.checkpoints)
        self._given_data, self._data = data, cast("Loader | Stream", data)
        self._given_stop = stop
        self._trainer_state = Counters(self)
        self._event, self._is_asked, self._was_done = "step", False, False
        self._pending_loss: torch.Tensor | None = None
        self._carried_loss: float | None = None
        self._which: str | int = "latest"
        self._folder: Path | None = None
        self._own_begin = ""
        """The folder of the Trainer's own that the run begins with."""
        self._validations: Validations | None = None
        super().__init__(*args, **kwargs)
        refuse_arguments(self)
        if self.args.metric_for_best_model and self.args.greater_is_better is not None:
            metric = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
            is_high = self.args.greater_is_better
            who = f"greater_is_better={is_high}"
            check_direction(self.checkpoints, self._emit, metric, "max" if is_high else "min", who)
        self.add_callback(_Moments(self))

    # What the Trainer calls

    def train(
        self,
        resume_from_checkpoint: str | int | bool | None = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train, from the newest checkpoint of the root if there is one.

        Args:
            resume_from_checkpoint: another checkpoint of the root: its folder, step or tag, as
                for `CheckpointManager.resume`, or its path. A path of a folder of the Trainer's
                own begins the run with that, where the root has no checkpoint yet.
            trial: must be None.
            args: as for the Trainer.
            kwargs: as for the Trainer.

        Raises:
            UsageError: False, while the root has checkpoints; or a `trial`.
            NoUsableCheckpoint: the root has checkpoints, and none can be used.
        """
        if trial is not None:
            raise UsageError("trial: each trial of a search needs a root and a Trainer of its own")
        look = partial(_newest_step, self.checkpoints)
        step = leaders(only_leader(leaders, "looking for checkpoints", look))
        if step is not None and resume_from_checkpoint is False:
            raise UsageError(
                f"resume_from_checkpoint=False: {self.checkpoints.root} has checkpoints, the "
                f"newest of step {step}; to begin anew give another root"
            )
        own = self._own_folder(resume_from_checkpoint, step)
        with self._given_stop or Stop() as stop:
            self._stop = stop
            while True:
                try:
                    return self._train_from(step, own, *args, **kwargs)
                except _Elsewhere as found:
                    step = found.step

    def _own_folder(self, given: str | int | bool | None, step: int | None) -> str | None:
        """Return the folder of the Trainer's own to begin with; else note what to resume."""
        self._which = "latest"
        if isinstance(given, str) and os.path.isdir(given):
            _, folder = split_folder(given)
            if not folder and step is None:
                return given
            if not folder:
                text = f"{self.checkpoints.root} goes on, and not resume_from_checkpoint={given!r}"
                self._emit("warning", text)
            self._which = folder or "latest"
        elif given is not None and not isinstance(given, bool):
            self._which = given
        return None

    def _train_from(self, step: int | None, own: str | None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as closing:
            folder, self._own_begin = own, own or ""
            if step is not None:
                folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
                self._write_step(Path(folder), step)
            self._folder = None if step is None else Path(str(folder))
            closing.callback(self._forget)
            closing.callback(setattr, self.args, "eval_on_start", self.args.eval_on_start)
            closing.enter_context(loaders_skip_by_themselves())
            closing.push(self._close)
            output = super().train(folder, None, *args, **kwargs)
            loss = output.metrics.get("train_loss", output.training_loss)
            return output._replace(training_loss=loss)

    def get_train_dataloader(self) -> Any:
        """Return the `Loader` in a form that the Trainer can count and set to an epoch."""
        if self._given_data is None:
            self._data = loader_of(self, super().get_train_dataloader())
        check_windows(self._data, self.args)
        self._epochs = Epochs(self._data, self.args, self._is_done)
        return self._epochs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch; the first loss after a resume may have those not yet logged added."""
        loss = super().training_step(*args, **kwargs)
        if self._carried_loss is None:
            return loss
        carried, self._carried_loss = self._carried_loss, None
        return torch.tensor(carried, device=loss.device) + loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values; the mean loss at the end is that of all lives of the run, not of this one."""
        if self.manager is not None and logs.keys() >= SUMMARY:
            logs["train_loss"] = self._trainer_state.mean_loss()
        super().log(logs, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if not self._is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._is_ours(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._is_ours(checkpoint):
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Note that the Trainer wants a save; it comes after all that belongs to the step."""
        self._is_asked = True

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._was_done:
            return  # it was evaluated in an earlier life
        self._pending_loss = tr_loss
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        control = self.control
        is_last = control.should_training_stop or control.should_epoch_stop
        if self._event == "step" and (is_last or self._data.at_epoch_end):
            return  # the logs and evaluations of the epoch's end come next
        self._save()

    # Saving and resuming

    def _begin(self) -> None:
        """Resume from the newest checkpoint, with all that the Trainer has made of its arguments.

        Raises:
            _Elsewhere: the checkpoint that was used is not of the step that the loop begins at.
        """
        counters = self._trainer_state
        state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.lr_scheduler,
            "data": self._data,
            # Each rank has its own losses that were not logged yet.
            "trainer": PerRank(counters) if self.args.world_size > 1 else counters,
        }
        scaler = self.accelerator.scaler
        if scaler is not None:
            state["scaler"] = scaler
        self.manager = CheckpointManager(
            self.checkpoints,
            state,
            hooks=taking_over(StateHooks(one_sided=_ONE_SIDED.__contains__)),
            stop=self._stop,
            max_duration=f"{self.state.max_steps}step",
            config=self.args.to_dict(),
        )
        self._carried_loss = None
        counters.loaded = None
        found = self.manager.resume(self._which)
        begins_at = counters.losses_since = self.state.global_step
        self._was_done = found is not None and self._is_done()
        step = 0 if found is None else found.step
        if (found is not None or self._folder is not None) and step != begins_at:
            raise _Elsewhere(step)
        validates = str(getattr(self.args.eval_strategy, "value", "no")) != "no"
        self._validations = Validations(
            self.checkpoints, self.manager, leaders, resumed=found, to_come=validates
        )
        say_start(
            self.checkpoints, self.manager, found, begun_with=self._own_begin, write=beside_bar
        )
        if found is None:
            return
        self.args.eval_on_start = False  # it was evaluated when the run began
        counters.apply(found)
        check_place(self._data, found, self.args)
        self._epochs.keep_generators()

    def _save(self) -> None:
        assert self.manager is not None
        assert self._validations is not None
        step, control = self.state.global_step, self.control
        is_epoch = self._event == "epoch" and self._data.at_epoch_end
        self.store_flos()
        wanted = Due("permanent", "trainer") if self._is_asked else None
        self._is_asked = False
        epochs = self._data.epoch + is_epoch
        metrics = measured_at(step, self.state.log_history)
        events: list[Event] = ["step", "epoch"] if is_epoch else ["step"]
        self._validations.maybe_save(
            step, events=events, metrics=metrics, wanted=wanted, epoch=epochs
        )
        if self._stop.requested:
            control.should_training_stop = True
        if self._event == "epoch" and control.should_training_stop:
            self.manager.save(step, epoch=epochs, metrics=metrics, reason="final")

    def _is_done(self) -> bool:
        return bool(self.state.global_step >= self.state.max_steps)

    def _is_ours(self, checkpoint: str | None) -> bool:
        return self._folder is not None and checkpoint is not None

    def _write_step(self, folder: Path, step: int) -> None:
        args = self.args
        TrainerState(
            global_step=step,
            train_batch_size=args.train_batch_size,
            **{name: getattr(args, name) for name in INTERVALS if getattr(args, name) is not None},
        ).save_to_json(str(folder / getattr(theirs, STATE_FILE)))

    def _validated(self, metrics: dict[str, Any]) -> None:
        if self._validations is not None:
            found = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
            self._validations.ended(self.state.global_step, found)

    def _close(self, *error: Any) -> None:
        manager, self.manager, self._validations = self.manager, None, None
        if manager is not None:
            manager.__exit__(*error)

    def _forget(self) -> None:
        self._folder = None


class CheckpointedTrainer(CheckpointedMixin, transformers.Trainer):
    """`transformers.Trainer` whose checkpoints are Holdfast's; see `CheckpointedMixin`."""


class _Moments(TrainerCallback):
    """Callback that tells the trainer where in its loop it is."""

    def __init__(self, trainer: CheckpointedMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resume, with the intervals of the arguments, which a resume by the Trainer would set."""
        for name in INTERVALS:
            number = getattr(args, name)
            if number is not None:
                setattr(state, name, math.ceil(state.max_steps * number) if number < 1 else number)
        self._trainer._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that logs and evaluations of a step follow."""
        self._trainer._event = "step"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that logs and evaluations of an epoch follow."""
        self._trainer._event = "epoch"

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note an evaluation, for saves of its step."""
        self._trainer._validated(kwargs.get("metrics") or {})


def _newest_step(checkpoints: Checkpoints) -> int | None:
    """Return the step of the newest whole checkpoint of a root; None if there is none."""
    reading = Checkpoints(checkpoints.root, encrypt=checkpoints.encrypt, sinks=())
    with CheckpointManager(reading, {"trainer": {}}, ranks=None) as manager:
        return next((one.step for one in manager.list() if not one.left_out), None)
