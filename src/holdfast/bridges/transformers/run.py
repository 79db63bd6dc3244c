"""Mixin that makes transformers' Trainer resume its whole state and save it after steps.

The Trainer has no seam that replaces saving, and fixes its place in the epoch before its first
callback. So it is given a folder with nothing but a step, takes its place from that, and gets the
state itself from the checkpoint when its optimizer and scheduler exist. Saves come after the
logs and evaluations of a step, so none of them is lost by a resume. A new method of the mixin must
not replace one of a Trainer by accident (tests/bridges/test_transformers.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
import transformers.trainer as theirs
from accelerate.utils import send_to_device
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from holdfast.bridges.accelerate import agree_on_data, check_distributed_type
from holdfast.bridges.parts import (
    BridgeValidations,
    allow_other_trainers,
    describe_ended_run,
    make_leader_emitter,
    note_other_framework,
    run_on_leader,
    say_start,
    warn_without_interval,
)
from holdfast.bridges.transformers.seams import (
    FRAMEWORK,
    STATE_FILE,
    SUMMARY,
    Epochs,
    OtherInterval,
    beside_bar,
    broadcast,
    check_names,
    check_place,
    check_windows,
    find_best_rule,
    leave_skipping_to_epochs,
    loader_of,
    measured_at,
    translate_arguments,
)
from holdfast.checkpoints import Checkpoints, StateHooks
from holdfast.control.stop import Stop
from holdfast.data.loader import Loader
from holdfast.data.stream import Stream
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.manager import CheckpointManager
from holdfast.policy.savers import Due
from holdfast.policy.triggers import Event
from holdfast.results import Checkpoint
from holdfast.root.address import split_folder
from holdfast.state.components import PerRank

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # a mixin comes before the trainer that it is mixed into

_ONE_SIDED = ("scheduler", "scaler")


class OtherStepResumed(Exception):
    """Raised in the Trainer's loop: the resume has used a checkpoint of another step."""

    def __init__(self, step: int) -> None:
        self.step = step


class TransformersRun(TrainerCallback):
    """A training of a Trainer: its data, its manager, and the place of its loop.

    The Trainer holds it under one name, so that no name of ours can be one of a subclass.
    """

    def __init__(
        self,
        trainer: Any,
        checkpoints: Checkpoints,
        data: Loader | Stream | None,
        stop: Stop | None,
    ) -> None:
        self.trainer, self.checkpoints = trainer, checkpoints
        self.emit = make_leader_emitter(checkpoints)
        self.data = cast("Loader | Stream", data)
        self.has_own_data = data is not None
        self.manager: CheckpointManager | None = None
        self.given_stop, self.stop = stop, stop or Stop()
        self.epochs: Epochs
        self.counters = TransformersCounters(self)
        self.is_asked = False
        """Whether the Trainer wants a save."""
        self.was_done = False
        """Whether the run had ended when it was resumed."""
        self.has_stopped = False
        """Whether a callback has ended the run before its goal."""
        self._is_signaled = self._has_warned = False
        self.pending_loss: torch.Tensor | None = None
        self.carried_loss: float | None = None
        self.initial_folder = ""
        """The folder of the Trainer's own that the run begins with."""
        self.best_path: str | None = None
        """The checkpoint whose weights the model has at the end, if it is the best."""
        self._event = "step"
        self._which: str | int = "latest"
        self._folder: Path | None = None
        self._validations: BridgeValidations | None = None

    # What the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resume, with the intervals of the arguments, which a resume by the Trainer would set."""
        loader = kwargs.get("train_dataloader")
        if loader is not None and loader is not getattr(self, "epochs", None):
            raise UsageError(
                f"get_train_dataloader() returns a {type(loader).__name__}, whose position is not "
                "in the checkpoints: remove the method, and pass a Loader as `data`"
            )
        for name in INTERVALS:
            number = getattr(args, name)
            if number is not None:
                setattr(state, name, math.ceil(state.max_steps * number) if number < 1 else number)
        self._begin()
        control.should_training_stop |= self.was_done

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that logs and evaluations of a step follow."""
        self._event = "step"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that logs and evaluations of an epoch follow."""
        self._event = "epoch"

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note an evaluation, for saves of its step."""
        if self._validations is not None:
            metrics = kwargs.get("metrics") or {}
            found = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
            self._validations.ended(state.global_step, found)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse an evaluation that takes the batches of the training."""
        if self.manager is not None and kwargs.get("eval_dataloader") in (self.data, self.epochs):
            raise UsageError(
                "the evaluation has the Loader of the training, whose position it would move: "
                "give it a Loader of its own"
            )

    # What the mixin calls

    def choose_checkpoint(self, given: str | int | bool | None, step: int | None) -> str | None:
        """Note which checkpoint to resume; return a folder of the Trainer's own to begin with."""
        root, self._which = self.checkpoints.root, "latest"
        if step is not None and given is False:
            raise UsageError(
                f"resume_from_checkpoint=False: {root} has checkpoints, the newest from step "
                f"{step}; to start a new run, pass another root"
            )
        if given is None or given is False or (given is True and step is None):
            return None
        if not isinstance(given, str) or not os.path.isdir(given):
            if step is None:
                raise UsageError(
                    f"resume_from_checkpoint={given!r}: {root} has no checkpoint; omit it for a "
                    "new run, or pass the path of a folder that the Trainer itself has saved"
                )
            self._which = "latest" if given is True else given
            return None
        _, folder = split_folder(given)
        if not folder and step is None:
            return given
        is_root = isinstance(root, str | os.PathLike) and Path(given).samefile(root)
        if not folder and not is_root:
            self.emit("warning", f"resuming {root}, not resume_from_checkpoint={given!r}")
        self._which = folder or "latest"
        return None

    def set_start_step(self, step: int | None, folder: str | None) -> None:
        """Write the step that the Trainer's loop is to begin at into a folder for it."""
        self._folder = None if step is None else Path(str(folder))
        if self._folder is not None:
            self._write_step(self._folder, step or 0)

    def _begin(self) -> None:
        """Resume from the newest checkpoint, with all the Trainer has made of its arguments."""
        counters, self.best_path = self.counters, None
        agree_on_data(self.trainer.accelerator, self.data)
        state: dict[str, Any] = {
            "model": self.trainer.model,
            "optimizer": self.trainer.optimizer,
            "scheduler": self.trainer.lr_scheduler,
            "data": self.data,
            # Each rank has its own losses that were not logged yet.
            "trainer": PerRank(counters) if self.trainer.args.world_size > 1 else counters,
        }
        scaler = self.trainer.accelerator.scaler
        if scaler is not None:
            state["scaler"] = scaler
        if getattr(self.trainer.args, "sync_ref_model", False):  # TRL updates that model
            state["ref_model"] = self.trainer.ref_model
        self.manager = CheckpointManager(
            self.checkpoints,
            state,
            hooks=allow_other_trainers(StateHooks(one_sided=_ONE_SIDED.__contains__)),
            stop=self.stop,
            max_duration=f"{self.trainer.state.max_steps}step",
            config=self.trainer.args.to_dict(),
        )
        if str(getattr(self.trainer.args.save_strategy, "value", "no")) == "no":
            warn_without_interval(self.checkpoints, self.emit)
        self.carried_loss = None
        counters.loaded = None
        found = self.manager.resume(self._which)
        begins_at = counters.losses_since = self.trainer.state.global_step
        self._is_signaled = False
        self.has_stopped = self._which == "latest" and counters.has_stopped
        self.was_done = found is not None and (self.has_stopped or self.is_done())
        step = 0 if found is None else found.step
        if (found is not None or self._folder is not None) and step != begins_at:
            raise OtherStepResumed(step)
        validates = str(getattr(self.trainer.args.eval_strategy, "value", "no")) != "no"
        self._validations = BridgeValidations(
            self.checkpoints, self.manager, broadcast, resumed=found, validates=validates
        )
        say_start(
            self.checkpoints, self.manager, found, begun_with=self.initial_folder, write=beside_bar
        )
        if found is None:
            return
        if getattr(self.trainer.args, "overwrite_output_dir", False):
            self.emit(
                "warning", "overwrite_output_dir: has no effect; for a new run use another root"
            )
        self.trainer.args.eval_on_start = False  # it was evaluated when the run began
        if self.has_stopped and not self.is_done():
            self.emit("warning", describe_ended_run(step, f"train(resume_from_checkpoint={step})"))
        counters.restore_counters(found)
        check_place(self.data, found, self.trainer.args)
        self.epochs.keep_generators()

    def _save(self) -> None:
        """Save what is due, after all that belongs to a step; and at the end in any case."""
        assert self.manager is not None
        assert self._validations is not None
        step, control = self.trainer.state.global_step, self.trainer.control
        is_asked_to_end = control.should_training_stop and not self._is_signaled
        self.has_stopped = is_asked_to_end and not self.is_done()
        # Before transformers 5, the Trainer asks for a batch after the last, which ends the epoch.
        is_at_end = self.data.at_epoch_end or not self.data.batch
        is_epoch = self._event == "epoch" and is_at_end
        is_cut = self._event == "epoch" and not (is_epoch or control.should_training_stop)
        if is_cut and not self.is_done() and not self._has_warned:
            self._has_warned = True
            self.emit(
                "warning",
                f"a callback has ended an epoch at step {step} (should_epoch_stop): the Trainer "
                "does not record where its epochs end, so no checkpoint of a later step can be "
                "resumed. Give a Loader(…, batches_per_epoch=…) as `data` for shorter epochs",
            )
        self.trainer.store_flos()
        wanted = Due("permanent", "trainer") if self.is_asked else None
        self.is_asked = False
        epochs = self.data.epoch + (is_epoch and self.data.at_epoch_end)
        metrics = measured_at(step, self.trainer.state.log_history)
        events: list[Event] = ["step", "epoch"] if is_epoch else ["step"]
        self._validations.maybe_save(
            step, events=events, metrics=metrics, wanted=wanted, epoch=epochs
        )
        if self.stop.requested:
            control.should_training_stop = self._is_signaled = True
        if self._event == "epoch" and control.should_training_stop:
            self.manager.save(step, epoch=epochs, metrics=metrics, reason="final")

    def load_best(self) -> None:
        """Load the weights of the best checkpoint, unless a signal has ended the training."""
        best = find_best_rule(self.trainer.args)
        if self._is_signaled or self.manager is None or best is None:
            return
        self.manager.wait(uploads=False)
        which = f"best:{best.metric}:{best.mode}"
        try:
            self.best_path = self.manager.load(which, components=["model"]).path
        except NoCheckpoint as error:
            self.emit("warning", f"load_best_model_at_end: the last weights are kept: {error}")

    def save_after_step(self, *, is_last: bool) -> None:
        """Save, unless the logs and evaluations of the epoch's end come next."""
        if self._event == "epoch" or not (is_last or self.data.at_epoch_end):
            self._save()

    def is_over(self) -> bool:
        """Whether the current training is finished."""
        return self.manager is not None and (self.was_done or self.is_done())

    def is_done(self) -> bool:
        """Whether the training has reached its goal."""
        return bool(self.trainer.state.global_step >= self.trainer.state.max_steps)

    @property
    def resumes(self) -> bool:
        """Whether the state is resumed here, so that the Trainer loads nothing of a folder."""
        return self._folder is not None

    def _write_step(self, folder: Path, step: int) -> None:
        args = self.trainer.args
        TrainerState(
            global_step=step,
            train_batch_size=args.train_batch_size,
            **{name: getattr(args, name) for name in INTERVALS if getattr(args, name) is not None},
        ).save_to_json(str(folder / getattr(theirs, STATE_FILE)))

    def close(self, *error: Any) -> None:
        """End the manager, with the error of the training if there is one."""
        manager, self.manager, self._validations = self.manager, None, None
        if manager is not None:
            manager.__exit__(*error)

    def clear_start_step(self) -> None:
        """Let the Trainer load its own folders again."""
        self._folder = None


def newest_step(checkpoints: Checkpoints) -> int | None:
    """Return the step of the newest whole checkpoint of a root; None if there is none."""
    reading = Checkpoints(checkpoints.root, encrypt=checkpoints.encrypt, sinks=())
    with CheckpointManager(reading, {"trainer": {}}, ranks=None) as manager:
        return next((one.step for one in manager.list() if not one.left_out), None)


INTERVALS = ("logging_steps", "eval_steps", "save_steps")
"""Arguments that the TrainerState repeats."""
_PROGRESS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
)
"""Fields of the TrainerState that a checkpoint restores; others follow from the arguments."""

_GENERATED = "_buffered_inputs"
_OF_TRL = ("_total_train_tokens", "_step", "_last_world_entropy")
"""Numbers that TRL's trainers count, and that are not in the TrainerState."""
_UNLOGGED = ("_metrics", "_stored_metrics", "accum_loss_components")
"""Metrics that TRL's and sentence-transformers' trainers collect for their next log."""


class TransformersCounters:
    """Component `trainer`: counters, logs, callbacks and losses that were not logged yet.

    They are those of a `Run`.
    """

    def __init__(self, run: Any) -> None:
        self._run, self._trainer = run, run.trainer
        self.loaded: Mapping[str, Any] | None = None
        """What the last resume found; None if the checkpoint has none of this trainer."""
        self.losses_since = 0
        """Step from which on the losses are summed up, for their mean at the end."""

    @property
    def has_stopped(self) -> bool:
        """Whether a callback had ended the run whose state was loaded."""
        return self.loaded is not None and bool(self.loaded.get("has_stopped"))

    def state_dict(self) -> dict[str, Any]:
        """Return them as plain values."""
        trainer, unlogged = self._trainer, _find_unlogged(self._trainer)
        pending = self._run.pending_loss
        return {
            "of": FRAMEWORK,
            "state": {
                name: getattr(trainer.state, name)
                for name in _PROGRESS
                if hasattr(trainer.state, name)
            },
            "arguments": {
                name: getattr(trainer.state, name, None)
                for name in (*INTERVALS, "train_batch_size")
            },
            "callbacks": [
                [type(callback).__name__, callback.state()["attributes"]]
                for callback in _stateful(trainer)
            ],
            "pending_loss": 0.0 if pending is None else pending.item(),
            "logged_loss": trainer._total_loss_scalar,
            "losses_since": self.losses_since,
            "last_logged_step": trainer._globalstep_last_logged,
            "has_stopped": self._run.has_stopped,
            **({} if unlogged is None else {"unlogged": dict(unlogged)}),
            **_find_numbers(trainer),
            **_find_generations(trainer),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return notes on what cannot be taken over."""
        note = note_other_framework(state, FRAMEWORK)
        return [] if note is None else [note]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a stored state until `restore_counters`."""
        note = note_other_framework(state, FRAMEWORK)
        if note is not None:
            self._run.emit("warning", note)
        self.loaded = state if note is None else None

    def restore_counters(self, found: Checkpoint) -> None:
        """Set counters, callbacks and losses of the Trainer to those loaded."""
        trainer, loaded = self._trainer, self.loaded
        if loaded is None:
            self.losses_since = found.step
            return
        for name, value in loaded["state"].items():
            if hasattr(trainer.state, name):
                setattr(trainer.state, name, value)
        left = list(loaded["callbacks"])
        for callback in _stateful(trainer):
            match = next((one for one in left if one[0] == type(callback).__name__), None)
            if match is not None:
                left.remove(match)
                vars(callback).update(match[1])
        if left:
            names = ", ".join(name for name, _ in left)
            text = f"{found.folder}: ignoring states of missing callbacks: {names}"
            self._run.emit("warning", text)
        if hasattr(trainer, "_initial_num_input_tokens_seen"):  # for tokens per second
            trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        unlogged = _find_unlogged(trainer)
        if unlogged is not None:
            unlogged.update(loaded.get("unlogged", {}))
        for name in _find_numbers(trainer).keys() & loaded.keys():
            setattr(trainer, name, loaded[name])
        if _GENERATED in loaded and hasattr(trainer, _GENERATED):
            batches = send_to_device(loaded[_GENERATED], trainer.accelerator.device)
            setattr(trainer, _GENERATED, batches)
        trainer._globalstep_last_logged = loaded["last_logged_step"]
        self.losses_since = loaded.get("losses_since", found.step)
        pending = loaded["pending_loss"]
        trainer._total_loss_scalar = loaded["logged_loss"] if "losses_since" in loaded else -pending
        if hasattr(trainer, "_tr_loss"):
            trainer._tr_loss += pending
        else:  # before transformers 5: a local variable
            self._run.carried_loss = pending
            if self._run.was_done:
                trainer._total_loss_scalar += pending

    def mean_loss(self) -> float:
        """Return the mean loss of all steps of the run, once the Trainer has summed it up."""
        num_steps = self._trainer.state.global_step - self.losses_since
        mean: float = self._trainer._total_loss_scalar / max(num_steps, 0.001)
        return mean


def _find_unlogged(trainer: Any) -> Any:
    """Return the metrics of the training that a trainer holds for its next log, or None."""
    found = [one for name in _UNLOGGED if isinstance(one := getattr(trainer, name, None), dict)]
    for metrics in found:
        # One of these begins empty, and makes a part of itself when that is asked for.
        of_train = metrics["train"] if isinstance(metrics, defaultdict) else metrics.get("train")
        if isinstance(of_train, dict):
            return of_train
    return None


def _find_numbers(trainer: Any) -> dict[str, int | float]:
    values = {name: getattr(trainer, name, None) for name in _OF_TRL}
    if getattr(trainer, "use_adaptive_entropy", False):
        values["entropy_coef"] = trainer.entropy_coef
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _find_generations(trainer: Any) -> dict[str, Any]:
    """Batches that a trainer of TRL has generated and still trains on, by their name."""
    batches, step = getattr(trainer, _GENERATED, None), getattr(trainer, "_step", 0)
    window = getattr(trainer.args, "steps_per_generation", None)
    if window is None:
        window = trainer.args.gradient_accumulation_steps
    is_done = step % (window * getattr(trainer, "num_iterations", 1)) == 0
    return {} if batches is None or is_done else {_GENERATED: batches}


def _stateful(trainer: Any) -> list[Any]:
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]


class CheckpointedMixin(_Trainer):
    """Mixin that gives transformers' Trainer, or a subclass, checkpoints that resume exactly.

        class MyTrainer(CheckpointedMixin, SFTTrainer): ...

        trainer = MyTrainer(model, args, train_dataset=…, checkpoints=Checkpoints("runs/sft", …))
        trainer.train()  # resumes by itself

    Everything but `checkpoints`, `data` and `stop` goes to the Trainer. It saves as `every` says,
    or without it `save_strategy`; when a callback sets `should_save` or a signal asks for it; and
    at the end. A signal ends training after its step; `train` then
    raises `SystemExit(75)`, or `KeyboardInterrupt` after SIGINT.
    """

    def __init__(
        self,
        *args: Any,
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        data: Loader | Stream | None = None,
        stop: Stop | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the Trainer.

        Args:
            args: those of the Trainer.
            checkpoints: the root, or a `Checkpoints` with when to save and what to keep. None: the
                root is `output_dir`. Where it does not say when or what, TrainingArguments do.
            data: batches of the training. None: a `Loader` of `train_dataset`, with the batch
                size, collator, sampler and workers that the Trainer has for it.
            stop: the signals that end training. None: SIGTERM, SIGINT and SIGUSR1.
            kwargs: those of the Trainer.

        Raises:
            UsageError: the version of transformers is not supported, or an argument asks for what
                cannot be resumed exactly; all of them are listed.
        """
        check_names()
        super().__init__(*args, **kwargs)
        check_distributed_type(self.accelerator)
        given = Checkpoints.of(self.args.output_dir if checkpoints is None else checkpoints, {})
        if given.root is None:
            raise UsageError("checkpoints: the root is None; give a path to save in")
        self.checkpoints = translate_arguments(self.args, given, make_leader_emitter(given))
        if given.every is not None:
            OtherInterval.insert_into(self.callback_handler.callbacks)
        self._holdfast = TransformersRun(self, self.checkpoints, data, stop)
        self.add_callback(self._holdfast)

    @property
    def manager(self) -> CheckpointManager | None:
        """The manager of the training under way; None: there is none."""
        return self._holdfast.manager

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
                own begins the run with that, while the root has no checkpoint. True: the newest
                one, or a new run, as without it.
            trial: must be None.
            args: as for the Trainer.
            kwargs: as for the Trainer.

        Raises:
            UsageError: False, while the root has checkpoints; a name while it has none; or a
                `trial`.
            NoUsableCheckpoint: the root has checkpoints, and none can be used.
        """
        if trial is not None:
            raise UsageError("trial: each trial of a search needs a root and a Trainer of its own")
        look = partial(newest_step, self.checkpoints)
        step = broadcast(run_on_leader(broadcast, "looking for checkpoints", look))
        own = self._holdfast.choose_checkpoint(resume_from_checkpoint, step)
        with self._holdfast.given_stop or Stop() as stop:
            self._holdfast.stop = stop
            while True:
                try:
                    return self._holdfast_train(step, own, *args, **kwargs)
                except OtherStepResumed as found:
                    step = found.step

    def _holdfast_train(self, step: int | None, own: str | None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as closing:
            folder, self._holdfast.initial_folder = own, own or ""
            if step is not None:
                folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
            self._holdfast.set_start_step(step, folder)
            closing.callback(self._holdfast.clear_start_step)
            for name in ("eval_on_start", "ignore_data_skip"):
                closing.callback(setattr, self.args, name, getattr(self.args, name))
            self.args.ignore_data_skip = False  # nothing is read to skip it
            closing.enter_context(leave_skipping_to_epochs())
            closing.push(self._holdfast.close)
            output = super().train(folder, None, *args, **kwargs)
            self.state.best_model_checkpoint = self._holdfast.best_path
            loss = output.metrics.get("train_loss", output.training_loss)
            return output._replace(training_loss=loss)

    def get_train_dataloader(self) -> Any:
        """Return the `Loader` in a form that the Trainer can count and set to an epoch.

        During the training, it is the Trainer's own DataLoader, which moves no position.
        """
        run = self._holdfast
        if run.manager is not None:
            return super().get_train_dataloader()
        if not run.has_own_data:
            run.data = loader_of(self, super().get_train_dataloader())
        check_windows(run.data, self.args)
        run.epochs = Epochs(run.data, self.args, run.is_over)
        return run.epochs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch; the first loss after a resume may have those not yet logged added."""
        loss = super().training_step(*args, **kwargs)
        if self._holdfast.carried_loss is None:
            return loss
        carried, self._holdfast.carried_loss = self._holdfast.carried_loss, None
        return torch.tensor(carried, device=loss.device) + loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log values; the last mean loss is of all lives of the run, and the best model follows."""
        is_summary = self.manager is not None and logs.keys() >= SUMMARY
        if is_summary:
            logs["train_loss"] = self._holdfast.counters.mean_loss()
        super().log(logs, *args, **kwargs)
        if is_summary and self.args.load_best_model_at_end:
            self._holdfast.load_best()

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not self._holdfast.resumes:
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._holdfast.resumes:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._holdfast.resumes:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if not self._holdfast.resumes:
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Note that the Trainer wants a save; it comes after all that belongs to the step."""
        self._holdfast.is_asked = True

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self._holdfast.was_done:
            return  # it was evaluated in an earlier life
        self._holdfast.pending_loss = tr_loss
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        control = self.control
        is_last = control.should_training_stop or control.should_epoch_stop
        self._holdfast.save_after_step(is_last=is_last)


class CheckpointedTrainer(CheckpointedMixin, transformers.Trainer):
    """`transformers.Trainer` whose checkpoints are Holdfast's; see `CheckpointedMixin`."""
