"""Warnings of likely mistakes in a training script, each logged once by a manager."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.control.stop import Stop
from holdfast.events import Emitter
from holdfast.root.catalog import Entry
from holdfast.saving.positions import PositionChecks
from holdfast.state.capture.capture import Captured
from holdfast.state.capture.lacking import (
    NO_OPTIMIZER,
    OMITTED,
    OUTSIDE,
    PERSISTENT,
    Stepped,
    describe_parameters,
    draws_once,
    is_outside,
    lacks_optimizer,
    omitted,
)
from holdfast.state.capture.outside import OutsideState, format_outside_state
from holdfast.state.components import ParameterNames, is_of_trainer


class ScriptWarnings:
    """Checks of what a script gives to its manager and what it leaves out; logs what it finds."""

    _omitted_due = True

    def __init__(self, url: str, state: Mapping[str, Any], emit: Emitter) -> None:
        self._url = url
        self._state = state
        self._emit = emit
        self._not_saved_due = self._lacks_due = self._setup_due = self._workers_due = True
        self._children: set[int | None] | None = None
        """Ids of this process's children when loaders with persistent workers were looked for."""
        self.positions = PositionChecks(state)
        self._outside = OutsideState(state)
        self._stepping: Sequence[int] | None = None
        """Ids of the optimizers' parameters at the last search for parameters in no component."""
        self._names: ParameterNames | None = None
        """Homes of the parameters at that search."""

    def of_capture(self, captured: Captured, *, is_whole: bool) -> None:
        """Warn of values that a save leaves out, and of a state that lacks something."""
        if self._not_saved_due and captured.not_saved:
            self._emit("not_saved", "not saved: " + "; ".join(captured.not_saved))
        self._not_saved_due = False
        if is_whole:
            self._of_unheld(captured)
            self._of_outside(captured)
            self.of_lacks()
            self.of_workers()

    def of_lacks(self) -> None:
        """Warn if no component is a position in the data, or none an optimizer."""
        if self._lacks_due and is_outside(self._state):
            self._emit("no_position", OUTSIDE)
        if self._lacks_due and lacks_optimizer(self._state):
            self._emit("warning", NO_OPTIMIZER)
            self._omitted_due = False
        self._lacks_due = False

    def of_omitted(self, captured: Captured, stepped: Sequence[Stepped]) -> None:
        """Warn, once, of optimizers, schedulers and scalers that are used and not saved."""
        if self._omitted_due and stepped and not is_of_trainer(self._state):
            classes = omitted(self._state, stepped, captured.addresses)
            self._omitted_due = not classes
            if classes:
                self._emit("warning", f"{self._url}: {OMITTED.format(', '.join(classes))}")

    def of_workers(self) -> None:
        """Warn, once, of workers whose seed is drawn in each process anew.

        A loader may be made or first used after the first save: look again if processes have begun.
        """
        # Trainers put the generators back after a validation.
        if not self._workers_due or is_of_trainer(self._state):
            return
        before, children = self._children, {one.pid for one in multiprocessing.active_children()}
        self._children = children
        if (before is None or children - before) and draws_once(self._state):
            self._emit("warning", PERSISTENT)
            self._workers_due = False

    def of_position(self, step: int) -> None:
        """Warn, at a save, of batches that the position counts and no step was trained on."""
        for text in self.positions.check_positions(step):
            self._emit("warning", text, step=step)

    def of_setup(self, stop: Stop | None, *, has_interval: bool) -> None:
        """Warn, at the first `maybe_save`, if no interval is set or signals are not handled."""
        if not self._setup_due:
            return
        if not has_interval and stop is None:
            self._emit(
                "warning",
                f"{self._url}: maybe_save() saves only if `holdfast save` asks for it, because "
                'the manager has no `every`, such as every="500step"',
            )
        if stop is not None and not stop.is_entered:
            self._emit(
                "warning",
                f"{self._url}: no signal is handled, because the Stop was not entered: put "
                "the loop into `with stop:`",
            )
        self._setup_due = False

    def of_lost_steps(self, step: int | None, entry: Entry) -> None:
        """Warn if a resume has discarded the steps up to `step`, trained since the last save."""
        if step is not None and step != entry.step:
            self._emit(
                "warning",
                f"resume() has replaced the state of step {step}, which was not saved, by the "
                f"state of step {entry.step}",
            )

    def of_exception(self, error: BaseException, step: int) -> None:
        """Warn that an error has ended the loop, and that the trigger for it saved nothing."""
        self._emit(
            "warning",
            f'{self._url}: every has On("exception"), and step {step} was not saved when '
            f"{type(error).__name__} ended the loop: nothing shows whether the step is "
            'complete. Catch the error and call maybe_save(step, event="exception"), or use the '
            "Trainer, which goes back to the last step",
            step=step,
        )

    def of_untrained(self, resumed: int, changed: Sequence[str], step: int) -> None:
        """Warn, at the end, if a run was resumed with other settings and trained no step."""
        if changed and step == resumed:
            more = f"\n  and {len(changed) - 10} more" if len(changed) > 10 else ""
            self._emit(
                "warning",
                f"{self._url}: step {step} was resumed and no step was trained, with other "
                "settings in `config` than it was saved with. For a new run, use a new root:\n  "
                + "\n  ".join(changed[:10])
                + more,
                step=step,
            )

    def loaded(self) -> None:
        """Compare the next save with the state as it is now, after a load."""
        self._outside.note_attributes()

    def _of_outside(self, captured: Captured) -> None:
        names = self._outside.find_uncaptured(captured)
        if names:
            self._emit("warning", f"{self._url}: {format_outside_state(names)}")

    def _of_unheld(self, captured: Captured) -> None:
        if captured.stepping == self._stepping and captured.names is self._names:
            return
        self._stepping, self._names = captured.stepping, captured.names
        unheld = captured.look_for_unheld()
        if unheld:
            self._emit(
                "warning",
                f"{self._url}: parameters that no component holds are trained and not saved: "
                f"{describe_parameters(unheld)}. After a resume they have their first values "
                "again: add what holds them to `state`",
            )
