"""The Trainer that saves and resumes through Holdfast: the methods that it replaces.

Their state is in one object, a `TransformersRun`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers

from holdfast.bridges.accelerate import check_distributed_type
from holdfast.bridges.parts import only_leader, reporting
from holdfast.bridges.transformers.run import Elsewhere, TransformersRun, newest_step
from holdfast.bridges.transformers.seams import (
    SUMMARY,
    Epochs,
    OtherInterval,
    check_names,
    check_windows,
    leaders,
    loader_of,
    loaders_skip_by_themselves,
    translate_arguments,
)
from holdfast.checkpoints import Checkpoints
from holdfast.control.stop import Stop
from holdfast.data.loader import Loader
from holdfast.data.stream import Stream
from holdfast.errors import UsageError
from holdfast.manager import CheckpointManager

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # a mixin comes before the trainer that it is mixed into


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
        self.checkpoints = translate_arguments(self.args, given, reporting(given))
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
        step = leaders(only_leader(leaders, "looking for checkpoints", look))
        own = self._holdfast.choose(resume_from_checkpoint, step)
        with self._holdfast.given_stop or Stop() as stop:
            self._holdfast.stop = stop
            while True:
                try:
                    return self._holdfast_train(step, own, *args, **kwargs)
                except Elsewhere as found:
                    step = found.step

    def _holdfast_train(self, step: int | None, own: str | None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as closing:
            folder, self._holdfast.own_begin = own, own or ""
            if step is not None:
                folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
            self._holdfast.stand_at(step, folder)
            closing.callback(self._holdfast.forget)
            for name in ("eval_on_start", "ignore_data_skip"):
                closing.callback(setattr, self.args, name, getattr(self.args, name))
            self.args.ignore_data_skip = False  # nothing is read to skip it
            closing.enter_context(loaders_skip_by_themselves())
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
        self._holdfast.step_ended(is_last=is_last)


class CheckpointedTrainer(CheckpointedMixin, transformers.Trainer):
    """`transformers.Trainer` whose checkpoints are Holdfast's; see `CheckpointedMixin`."""
