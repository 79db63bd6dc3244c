"""Position of a training: inside or between steps, for saves and for the step of logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import UsageError
from holdfast.train.counters import Counters


class StepPosition:
    """Tracks whether training is between two steps, where the state is consistent."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self.is_between = False
        """Whether a save can be begun."""
        self.is_under_way = False
        """Whether logged metrics belong to the next step."""
        self.has_begun = False
        """Whether any data was taken since the Trainer was made."""

    @property
    def present_step(self) -> int:
        """The step under way; between steps, the last completed one."""
        return self._counters.step + self.is_under_way

    def enter_step(self) -> None:
        """Record that a step has begun."""
        self.is_between, self.is_under_way = False, True

    def leave_step(self) -> None:
        """Record that the step is complete and counted, and the state consistent."""
        self.is_between, self.is_under_way = True, False

    @contextmanager
    def left(self) -> Iterator[None]:
        """Refuse saves during the block."""
        before, self.is_between = self.is_between, False
        try:
            yield
        finally:
            self.is_between = before

    def check(self, step: int) -> None:
        """Check that a save of `step` may begin.

        Raises:
            UsageError: within a step, a validation or a save, or of another step.
        """
        if not self.is_between:
            raise UsageError(
                "a checkpoint can be made between steps only, where all parts of the state belong "
                "together: in fit_start, step_end, epoch_end, log or fit_end, and in none of them "
                "within a validation"
            )
        if step != self._counters.step:
            raise UsageError(f"step={step!r}: the state is that of step {self._counters.step}")
