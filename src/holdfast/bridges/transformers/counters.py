"""The component `trainer` of a run under transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import ExportableState

from holdfast.bridges.naming import left_out
from holdfast.bridges.transformers.seams import FRAMEWORK
from holdfast.results import Checkpoint

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
        trainer = self._trainer
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
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return notes on what cannot be taken over."""
        note = left_out(state, FRAMEWORK)
        return [] if note is None else [note]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a stored state until `restore_counters`."""
        note = left_out(state, FRAMEWORK)
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
            text = f"{found.folder}: left out, as there are no such callbacks: {names}"
            self._run.emit("warning", text)
        if hasattr(trainer, "_initial_num_input_tokens_seen"):  # for tokens per second
            trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
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


def _stateful(trainer: Any) -> list[Any]:
    return [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]
