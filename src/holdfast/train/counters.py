"""Counters of a training's progress, which checkpoints hold and a resume restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import Time, argument_name


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of the run over all resumes. Only the Trainer changes them."""

    step: int = 0
    """Completed optimizer windows."""
    epoch: int = 0
    """Epochs that have ended."""
    batch: int = 0
    """Batches of the current epoch that were trained on."""
    samples: int | None = None
    """Samples trained on; None: not counted."""
    tokens: int | None = None
    """Tokens trained on; None: not counted."""
    unvalidated: list[str] = field(default_factory=list)
    """Names of validations that are due at this step and are not done; stored only if any are."""
    cycle_length: Time | None = None
    """Length of a cycle, in a counted unit. Not stored: it is an argument of the Trainer."""
    were_loaded: bool = field(default=False, init=False, compare=False, repr=False)
    """Whether a checkpoint was loaded into these counters."""

    @property
    def cycle(self) -> int | None:
        """Number of cycles that have ended; None when the training has no cycles."""
        if self.cycle_length is None:
            return None
        count: int | None = getattr(self, argument_name(self.cycle_length.unit))
        return (count or 0) // int(self.cycle_length.value)

    @property
    def timestamp(self) -> Timestamp:
        """The counters as a checkpoint's manifest records them."""
        return Timestamp(
            step=self.step,
            epoch=self.epoch,
            samples=self.samples,
            tokens=self.tokens,
            cycle=self.cycle,
        )

    @property
    def totals(self) -> dict[str, int | None]:
        """Totals that a save records in addition to its step."""
        return {
            "epoch": self.epoch,
            "cycle": self.cycle,
            "samples": self.samples,
            "tokens": self.tokens,
        }

    def add_step(self, num_batches: int, samples: int | None, tokens: int | None) -> None:
        """Count a completed step. Counts are added unless they or their total are None."""
        self.step += 1
        self.batch += num_batches
        if self.samples is not None and samples is not None:
            self.samples += samples
        if self.tokens is not None and tokens is not None:
            self.tokens += tokens

    def end_epoch(self) -> None:
        """Count a completed epoch."""
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return all counters by name."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _STORED}
        return {**state, "unvalidated": list(self.unvalidated)} if self.unvalidated else state

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if a stored counter is missing, unknown or not a count."""
        if set(state) - {"unvalidated"} != set(_STORED):
            raise UsageError(f"not the counters of a Trainer: {sorted(state)}")
        unvalidated = state.get("unvalidated", [])
        if not _are_texts(unvalidated):
            raise UsageError(f"stored unvalidated={unvalidated!r}: must be a list of names")
        for name, value in state.items():
            if name == "unvalidated" or (value is None and name in ("samples", "tokens")):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"stored {name}={value!r}: must be a whole number, 0 or above")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore stored counters.

        Raises:
            UsageError: a counter is missing, unknown or not a count; nothing is changed then.
        """
        self.check_state_dict(state)
        for name, value in {**state, "unvalidated": [*state.get("unvalidated", [])]}.items():
            setattr(self, name, value)
        self.were_loaded = True


_STORED = ("step", "epoch", "batch", "samples", "tokens")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
