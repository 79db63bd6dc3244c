"""Save and resume runs of transformers' Trainer: `CheckpointedTrainer`, and a mixin for others.

The Trainer has no seam that replaces saving, and fixes its place in the epoch before its first
callback. So it is given a folder with nothing but a step, takes its place from that, and gets the
state itself from the checkpoint when its optimizer and scheduler exist. Saves come after the
logs and evaluations of a step, so none of them is lost by a resume.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
import transformers.trainer as theirs
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from holdfast.bridges.naming import left_out
from holdfast.bridges.parts import Generators, taking_over
from holdfast.data.loader import Loader
from holdfast.data.stream import Stream
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.control.stop import Stop
from holdfast.engine.hooks import StateHooks
from holdfast.engine.options import Checkpoints
from holdfast.errors import UsageError, listing
from holdfast.events import Emitter
from holdfast.manager import CheckpointManager
from holdfast.policy.savers import Due
from holdfast.state.components import PerRank

logger = logging.getLogger("holdfast")

# Names that are not part of transformers' interface.
_METHODS = (
    "_inner_training_loop",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
)
_SET_BY_THE_LOOP = ("_globalstep_last_logged", "_total_loss_scalar")
_SKIP, _STATE_FILE = "skip_first_batches", "TRAINER_STATE_NAME"  # in transformers.trainer
_SUPPORTED = "4.48 to 5.24"
_COUNTS_UNFULL_WINDOWS = 5
"""Major version from which the Trainer counts the last window of an epoch as a step."""

_PROGRESS = (
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
)
"""Fields of the TrainerState that a checkpoint restores; others follow from the arguments."""
_INTERVALS = ("logging_steps", "eval_steps", "save_steps")
_FRAMEWORK = "transformers"
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
        self._emit = Emitter(tuple(self.checkpoints.sinks))
        self._given_data, self._data = data, cast("Loader | Stream", data)
        self._given_stop = stop
        self._trainer_state = _Counters(self)
        self._event, self._is_asked, self._was_done = "step", False, False
        self._pending_loss: torch.Tensor | None = None
        self._carried_loss: float | None = None
        self._which: str | int = "latest"
        self._folder: Path | None = None
        super().__init__(*args, **kwargs)
        _refuse_arguments(self)
        self.add_callback(_Events(self))

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
                for `CheckpointManager.resume`. A path of a folder of the Trainer's own begins the
                run with that, where the root has no checkpoint yet.
            trial: must be None.
            args: as for the Trainer.
            kwargs: as for the Trainer.

        Raises:
            UsageError: False, while the root has checkpoints; or a `trial`.
            NoUsableCheckpoint: the root has checkpoints, and none can be used.
        """
        if trial is not None:
            raise UsageError("trial: each trial of a search needs a root and a Trainer of its own")
        step = _newest_step(self.checkpoints)
        if step is not None and resume_from_checkpoint is False:
            raise UsageError(
                f"resume_from_checkpoint=False: {self.checkpoints.root} has checkpoints, the "
                f"newest of step {step}; to begin anew give another root"
            )
        own = None
        if isinstance(resume_from_checkpoint, str) and os.path.isdir(resume_from_checkpoint):
            own = resume_from_checkpoint if step is None else None
        elif resume_from_checkpoint is not None and not isinstance(resume_from_checkpoint, bool):
            self._which = resume_from_checkpoint
        with self._given_stop or Stop() as stop:
            self._stop = stop
            while True:
                try:
                    return self._train_from(step, own, *args, **kwargs)
                except _Elsewhere as found:
                    step = found.step

    def _train_from(self, step: int | None, own: str | None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as closing:
            folder = own
            if step is not None:
                folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
                self._write_step(Path(folder), step)
            self._folder = None if step is None else Path(str(folder))
            closing.callback(self._forget)
            closing.enter_context(_loaders_skip_by_themselves())
            closing.push(self._close)
            return super().train(folder, None, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the `Loader` in a form that the Trainer can count and set to an epoch."""
        if self._given_data is None:
            self._data = _loader_of(self, super().get_train_dataloader())
        _check_windows(self._data, self.args)
        self._epochs = _Epochs(self._data, self.args, self._is_done)
        return self._epochs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch; the first loss after a resume may have those not yet logged added."""
        loss = super().training_step(*args, **kwargs)
        if self._carried_loss is None:
            return loss
        carried, self._carried_loss = self._carried_loss, None
        return torch.tensor(carried, device=loss.device) + loss

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
        self._trainer_state.loaded = None
        found = self.manager.resume(self._which)
        begins_at = self.state.global_step
        self._was_done = found is not None and self._is_done()
        if found is None and self._folder is None:
            return
        step = 0 if found is None else found.step
        if step != begins_at:
            raise _Elsewhere(step)
        assert found is not None
        self._trainer_state.apply(found)
        _check_place(self._data, found, self.args)
        self._epochs.keep_generators()

    def _save(self) -> None:
        assert self.manager is not None
        step, control = self.state.global_step, self.control
        is_epoch = self._event == "epoch" and self._data.at_epoch_end
        self.store_flos()
        wanted = Due("permanent", "trainer") if self._is_asked else None
        self._is_asked = False
        epochs = self._data.epoch + is_epoch
        metrics = self._metrics()
        self.manager.maybe_save(
            step,
            epoch=epochs,
            metrics=metrics,
            event=("step", "epoch") if is_epoch else ("step",),
            wanted=wanted,
        )
        if self._stop.requested:
            control.should_training_stop = True
        if self._event == "epoch" and control.should_training_stop:
            self.manager.save(step, epoch=epochs, metrics=metrics, reason="final")

    def _metrics(self) -> dict[str, float]:
        """Return the metrics logged at the present step, such as `loss` and `eval_loss`."""
        step, found = self.state.global_step, {}
        for logs in reversed(self.state.log_history):
            if logs.get("step") != step:
                break
            found.update({k: float(v) for k, v in logs.items() if isinstance(v, int | float)})
        return {name: value for name, value in found.items() if name not in ("step", "epoch")}

    def _is_done(self) -> bool:
        return bool(self.state.global_step >= self.state.max_steps)

    def _is_ours(self, checkpoint: str | None) -> bool:
        return self._folder is not None and checkpoint is not None

    def _write_step(self, folder: Path, step: int) -> None:
        args = self.args
        TrainerState(
            global_step=step,
            train_batch_size=args.train_batch_size,
            **{name: getattr(args, name) for name in _INTERVALS if getattr(args, name) is not None},
        ).save_to_json(str(folder / getattr(theirs, _STATE_FILE)))

    def _close(self, *error: Any) -> None:
        manager, self.manager = self.manager, None
        if manager is not None:
            manager.__exit__(*error)

    def _forget(self) -> None:
        self._folder = None


class CheckpointedTrainer(CheckpointedMixin, transformers.Trainer):
    """`transformers.Trainer` whose checkpoints are Holdfast's; see `CheckpointedMixin`."""


class _Events(TrainerCallback):
    """Callback that tells the trainer where in its loop it is."""

    def __init__(self, trainer: CheckpointedMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name in _INTERVALS:
            number = getattr(args, name)
            if number is not None:
                setattr(state, name, math.ceil(state.max_steps * number) if number < 1 else number)
        self._trainer._begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._event = "step"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._event = "epoch"


class _Counters:
    """Component `trainer`: counters, logs, callbacks and losses that were not logged yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded: Mapping[str, Any] | None = None
        """What the last resume found; None if the checkpoint has none of this trainer."""

    def state_dict(self) -> dict[str, Any]:
        """Return them as plain values."""
        trainer = self._trainer
        pending = trainer._pending_loss
        return {
            "of": _FRAMEWORK,
            "state": {
                name: getattr(trainer.state, name)
                for name in _PROGRESS
                if hasattr(trainer.state, name)
            },
            "callbacks": [
                [type(callback).__name__, callback.state()["attributes"]]
                for callback in _stateful(trainer)
            ],
            "pending_loss": 0.0 if pending is None else pending.item(),
            "logged_loss": trainer._total_loss_scalar,
            "last_logged_step": trainer._globalstep_last_logged,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return notes on what cannot be taken over."""
        note = left_out(state, _FRAMEWORK)
        return [] if note is None else [note]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a stored state until `apply`."""
        note = left_out(state, _FRAMEWORK)
        if note is not None:
            self._trainer._emit("warning", note)
        self.loaded = state if note is None else None

    def apply(self, found: Checkpoint) -> None:
        """Set counters, callbacks and losses of the Trainer to those loaded."""
        trainer, loaded = self._trainer, self.loaded
        if loaded is None:
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
            logger.warning("%s: left out, as there are no such callbacks: %s", found.folder, names)
        trainer._globalstep_last_logged = loaded["last_logged_step"]
        pending = loaded["pending_loss"]
        if hasattr(trainer, "_tr_loss"):
            trainer._tr_loss += pending
            trainer._total_loss_scalar = -pending  # the Trainer's mean is over this call's steps
        else:  # before transformers 5: a local variable, and a mean over all steps
            trainer._total_loss_scalar = loaded["logged_loss"]
            trainer._carried_loss = pending
            if trainer._was_done:
                trainer._total_loss_scalar += pending


def _stateful(trainer: Any) -> list[Any]:
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]


class _Epochs:
    """A `Loader` as the Trainer uses it: it names an epoch, may skip batches, and counts."""

    def __init__(self, loader: Any, args: Any, is_done: Callable[[], bool]) -> None:
        self.loader, self.dataset = loader, getattr(loader, "dataset", None)
        self.batch_size = args.train_batch_size
        self._is_done = is_done
        self._epoch, self._num_skipped = 0, 0
        self._generators: Generators | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iterator is of."""
        self._epoch = epoch

    def skip(self, num_batches: int) -> _Epochs:
        """Begin the next iterator after that many batches of its epoch."""
        self._num_skipped = num_batches
        return self

    def keep_generators(self) -> None:
        """Let the next iterator begin with the present state of the global generators."""
        self._generators = Generators()

    def __iter__(self) -> Iterator[Any]:
        if self._generators is not None:
            self._generators.put_back()
        self._generators = None
        place, self._num_skipped = (self._epoch, self._num_skipped), 0
        if self._is_done():
            return iter(())
        loader = self.loader
        if loader.at_epoch_end and place == (loader.epoch + 1, 0):
            next(iter(loader), None)
        if place != (loader.epoch, loader.batch):
            loader.load_state_dict({**loader.state_dict(), "epoch": place[0], "batch": place[1]})
        return iter(loader)


@contextlib.contextmanager
def _loaders_skip_by_themselves() -> Iterator[None]:
    """Let the Trainer leave it to `_Epochs` to skip batches, without reading them."""
    before = getattr(theirs, _SKIP)

    def skip(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, _Epochs):
            return dataloader.skip(num_batches)
        return before(dataloader, num_batches)

    setattr(theirs, _SKIP, skip)
    try:
        yield
    finally:
        setattr(theirs, _SKIP, before)


def _newest_step(checkpoints: Checkpoints) -> int | None:
    """Return the step of the newest whole checkpoint of a root; None if there is none."""
    reading = Checkpoints(checkpoints.root, encrypt=checkpoints.encrypt, sinks=())
    with CheckpointManager(reading, {"trainer": {}}, ranks=None) as manager:
        return next((one.step for one in manager.list() if not one.left_out), None)


def _loader_of(trainer: Any, given: Any) -> Loader:
    """Make the `Loader` of what the Trainer's own DataLoader loads."""
    dataset, args = given.dataset, trainer.args
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            "train_dataset has no length: give `data=holdfast.data.Stream(…)`, which resumes it"
        )
    sampler = _innermost_sampler(given)
    is_shuffled = isinstance(sampler, RandomSampler)
    is_plain = is_shuffled or isinstance(sampler, SequentialSampler)
    return Loader(
        dataset,
        batch_size=args.train_batch_size,
        sampler=None if is_plain else sampler,
        shuffle=is_shuffled or not is_plain,
        seed=args.seed if args.data_seed is None else args.data_seed,
        drop_last=args.dataloader_drop_last,
        collate_fn=given.collate_fn,
        num_workers=given.num_workers,
        pin_memory=given.pin_memory and torch.accelerator.is_available(),
        persistent_workers=given.persistent_workers,
        prefetch_factor=given.prefetch_factor,
    )


def _innermost_sampler(given: Any) -> Any:
    """The sampler of single samples, inside those that accelerate wraps around it."""
    found = given.batch_sampler
    while hasattr(found, "batch_sampler"):
        found = found.batch_sampler
    return getattr(found, "sampler", given.sampler)


def check_names() -> None:
    """Raise `UsageError` unless transformers has all the names that this module needs.

    Raises:
        UsageError: names them, and the versions that have them.
    """
    trainer = transformers.Trainer
    missing = [f"Trainer.{name}" for name in _METHODS if not hasattr(trainer, name)]
    loop = getattr(trainer, "_inner_training_loop", None)
    inner = getattr(loop, "__wrapped__", loop)
    used = getattr(getattr(inner, "__code__", None), "co_names", ())
    missing += [f"Trainer.{name}" for name in _SET_BY_THE_LOOP if name not in used]
    missing += [f"trainer.{name}" for name in (_SKIP, _STATE_FILE) if not hasattr(theirs, name)]
    if missing:
        raise UsageError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}: this bridge is "
            f"tested with {_SUPPORTED}"
        )


def _refuse_arguments(trainer: Any) -> None:
    """Raise `UsageError` for arguments that would be ignored, or cannot be resumed exactly."""
    args = trainer.args
    pushes = args.push_to_hub and str(getattr(args.hub_strategy, "value", "")) != "end"
    reasons = {
        "deepspeed": (args.deepspeed, "its optimizer cannot be a component"),
        "fsdp": (args.fsdp, "not supported by this bridge; see holdfast.train for FSDP2"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a position in the data needs one batch size",
        ),
        "load_best_model_at_end": (
            args.load_best_model_at_end,
            'give Checkpoints(keep="last:1,best:eval_loss") and call '
            "holdfast.load_weights(f'{root}@best', model) after train()",
        ),
        "save_total_limit": (
            args.save_total_limit is not None,
            "give Checkpoints(keep=Last(n))",
        ),
        "save_only_model": (args.save_only_model, "a run cannot resume from weights alone"),
        "ignore_data_skip": (args.ignore_data_skip, "nothing is read to skip it: leave it out"),
        "push_to_hub": (pushes, 'checkpoints are not pushed: set hub_strategy="end"'),
        "past_index": (getattr(args, "past_index", -1) >= 0, "states of the past are not saved"),
        "split_batches": (
            args.accelerator_config.split_batches,
            "batches are of each rank: leave it out",
        ),
    }
    wrong = [f"{name}: {why}" for name, (is_set, why) in reasons.items() if is_set]
    if wrong:
        raise UsageError("TrainingArguments:\n" + listing(wrong))


def _major() -> int:
    return int(transformers.__version__.split(".")[0])


def _check_windows(loader: Any, args: Any) -> None:
    """Raise `UsageError` where the Trainer could not find its place in an epoch again."""
    window = args.gradient_accumulation_steps
    if window > 1 and _major() < _COUNTS_UNFULL_WINDOWS and len(loader) % window:
        raise UsageError(
            f"gradient_accumulation_steps={window}: an epoch has {len(loader)} batches, and before "
            f"transformers {_COUNTS_UNFULL_WINDOWS} the Trainer cannot resume unless they divide; "
            "give Loader(batches_per_epoch=…) as `data`, or use a newer transformers"
        )


def _check_place(loader: Any, found: Checkpoint, args: Any) -> None:
    """Raise `UsageError` where the data's position is not the one of the Trainer's step."""
    window = args.gradient_accumulation_steps
    steps_per_epoch = max(-(-len(loader) // window), 1)
    epoch, step = divmod(found.step, steps_per_epoch)
    at = (epoch, step * window)
    there = (loader.epoch + 1, 0) if loader.at_epoch_end else (loader.epoch, loader.batch)
    if at != there:
        raise UsageError(
            f"{found.path}: its data stands at batch {there[1]} of epoch {there[0]}, and with "
            f"gradient_accumulation_steps={window} step {found.step} is batch {at[1]} of epoch "
            f"{at[0]}. Use the batch size and accumulation of the run that saved it"
        )
