"""Checks of positions in the data against the steps that were trained, at each save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from holdfast.state.components import is_of_trainer

READ_AHEAD = (
    ". The loop or a wrapper around the loader, such as a prefetcher, holds them in hand, and a "
    "resume skips them. Train on each batch before taking the next one; the loader's workers read "
    "ahead (num_workers=, prefetch_factor=)"
)


class TakenBatches(Protocol):
    """Counts of the batches that were taken from a loader."""

    num_taken: int
    num_evaluated: int
    is_interrupted: bool
    has_begun: bool

    @property
    def is_by_loop(self) -> bool:
        """Whether the loop itself has taken the last batch, and not a wrapper."""

    @property
    def is_by_other_thread(self) -> bool:
        """Whether another thread than this one has taken the last batch."""


class HasTaking(Protocol):
    """A loader whose position counts the batches that were taken."""

    @property
    def batches_taken(self) -> TakenBatches:
        """The counts since its position was loaded."""


class PositionChecks:
    """Finds batches that a position counts, and that no step was trained on."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        # A trainer counts its steps and batches itself.
        found = () if is_of_trainer(state) else loaders(state)
        self._checks = [_Check(name, loader) for name, loader in found]
        self._has_begun = False
        self._unmoved_at: int | None = None
        """Step of a save until which nothing was taken from any loader."""
        self._is_watching = True

    def start_counting(self, step: int) -> None:
        """Count steps from `step`, whose state was loaded."""
        self._has_begun, self._unmoved_at = False, None
        for check in self._checks:
            check.start_counting(step)

    def note_first_step(self, step: int) -> None:
        """Note the first step that is reported."""
        if not self._has_begun:
            for check in self._checks:
                check.note_step_start(step)
        self._has_begun = True

    def check_positions(self, step: int) -> Iterator[str]:
        """Yield warnings, each once."""
        self.note_first_step(step)
        for check in self._checks:
            yield from check.check_position(step)
        if self._is_watching:
            yield from self._find_unmoved(step)

    def _find_unmoved(self, step: int) -> Iterator[str]:
        """Yield a warning if steps are trained, by two saves, and no loader was read from."""
        if not self._checks or any(check.is_read for check in self._checks):
            self._is_watching = False
        elif self._unmoved_at is not None and step > self._unmoved_at:
            self._is_watching = False
            names = ", ".join(check.name for check in self._checks)
            yield (
                f"{names}: steps {self._unmoved_at} to {step} were trained, and no batch was taken "
                "from it, so the position that is saved does not move. Iterate over the loader "
                "itself, and not over a DataLoader made of its dataset or sampler, such as that of "
                "accelerate.skip_first_batches; a resume skips nothing by reading it"
            )
        else:
            self._unmoved_at = step


class _Check:
    def __init__(self, name: str, loader: HasTaking) -> None:
        self.name, self._loader = name, loader
        self._first = 0
        self._begun: tuple[int, int] | None = None
        """Steps and batches at the first step that was reported."""
        self._taking, self._base = loader.batches_taken, loader.batches_taken.num_taken
        self._last: tuple[int, int] | None = None
        self._is_counting = self._is_watching = True

    def start_counting(self, step: int) -> None:
        self._taking, self._base = self._loader.batches_taken, self._loader.batches_taken.num_taken
        self._first, self._last = step, None

    @property
    def is_read(self) -> bool:
        """Whether a batch was asked for, or the position was set, since counting started."""
        taking = self._loader.batches_taken
        return taking is not self._taking or taking.has_begun

    def note_step_start(self, step: int) -> None:
        taken = self._loader.batches_taken.num_taken - self._base
        if step == self._first and taken > 0:
            self._first -= 1  # the script counts its steps from zero
        self._begun = step - self._first, taken

    def check_position(self, step: int) -> Iterator[str]:
        taking = self._loader.batches_taken
        if self._is_watching and taking.num_evaluated:
            self._is_watching = False
            yield (
                f"{self.name}: {taking.num_evaluated} batches were taken with gradients off, as "
                "by an evaluation, and the position counts them as trained. Give the evaluation a "
                "loader of its own"
            )
        if taking is not self._taking or taking.is_interrupted:
            self._is_counting = False  # its position was loaded, or batches were left out
        if self._is_counting:
            yield from self._compare_taken(step - self._first, taking)

    def _compare_taken(self, steps: int, taking: TakenBatches) -> Iterator[str]:
        """Compare the batches of a step, by two saves, with all that was taken."""
        taken = taking.num_taken - self._base
        last, self._last = self._last, (steps, taken)
        if last is None or steps <= last[0]:
            return
        of_step, rest = divmod(taken - last[1], steps - last[0])
        if taking.is_by_other_thread:  # which is sometimes further ahead than at other times
            of_step, rest = max(1, round((taken - last[1]) / (steps - last[0]))), 0
        ahead = min(taken - of_step * steps, last[1] - of_step * last[0])
        if rest or of_step < 1 or (ahead <= 0 and taking.is_by_other_thread):
            return
        self._is_counting = False
        # A loop that is ahead at its very first step did not skip a batch: it holds one.
        if ahead > 0 and not (taking.is_by_loop and self._begun != (1, of_step + ahead)):
            yield (
                f"{self.name}: {taken} batches were taken for {steps} steps of {of_step}, so "
                f"{ahead} more than were trained on, at the last save, too{READ_AHEAD}"
            )


def loaders(state: Mapping[str, Any]) -> Iterator[tuple[str, HasTaking]]:
    """Yield loaders that are components, or attributes of components, with their names."""
    for name, component in state.items():
        inside = getattr(component, "__dict__", {})
        for each in (component, *inside.values()):
            if isinstance(getattr(type(each), "batches_taken", None), property):
                yield name, each
                break
