"""Warnings of likely mistakes in a training script, each logged once by a manager.

Among them are checks of positions in the data against the steps that were trained, at each save.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from holdfast.control.stop import Stop
from holdfast.events import Emitter, Kind
from holdfast.root.catalog import Entry
from holdfast.state.capture.capture import Captured
from holdfast.state.capture.lacking import (
    NO_DATA_POSITION,
    NO_OPTIMIZER,
    OMITTED,
    PERSISTENT_WORKERS,
    Stepped,
    describe_parameters,
    has_loader_that_draws_once,
    lacks_data_position,
    lacks_optimizer,
    list_omitted_classes,
    unsaved_averages,
)
from holdfast.state.capture.outside import OutsideState, format_outside_state
from holdfast.state.components import ParameterNames, is_of_trainer, kind_of
from holdfast.state.foreign import describe_inexact
from holdfast.state.modules import count_frozen
from holdfast.state.probing import SourceCheck
from holdfast.state.selection import shortened

SUGGESTED_NBYTES = 1 << 30
"""Least bytes of frozen parameters for which digests are suggested."""


class ScriptWarnings:
    """Checks of what a script gives to its manager and what it leaves out; logs what it finds.

    Ranks mostly find the same. So the leader logs, and a follower's texts go with its next save to
    the leader, which logs those that are not its own.
    """

    _omitted_due = _are_known_due = _digests_due = True

    def __init__(
        self, url: str, state: Mapping[str, Any], emit: Emitter, *, is_leader: bool = True
    ) -> None:
        self._url = url
        self._state = state
        self._emit_here = emit
        self._is_leader = is_leader
        self.found: list[str] = []
        """Texts since the last save, for `SaveParticipant.note_warnings`."""
        self._not_saved_due = self._lacks_due = self._setup_due = self._workers_due = True
        self._children: set[int | None] | None = None
        """Ids of this process's children when loaders with persistent workers were looked for."""
        self.positions = PositionChecks(state)
        self._outside = OutsideState(state)
        self._num_saves = 0
        self._averages = WeakKeyDictionary[AveragedModel, int]()
        """Averages of weights that are not saved, with their updates when last looked for."""
        self._sources = list(_find_sources(state))
        self._stepping: Sequence[int] | None = None
        """Ids of the optimizers' parameters at the last search for parameters in no component."""
        self._names: ParameterNames | None = None
        self._written: dict[str, str] = {}
        """Parameters that are saved although they are frozen, and why."""

    def of_capture(self, captured: Captured, *, is_whole: bool) -> None:
        """Warn of values that a save leaves out, and of a state that lacks something."""
        if self._not_saved_due and captured.not_saved:
            self._emit_here("not_saved", "not saved: " + "; ".join(captured.not_saved))
        self._not_saved_due = False
        if is_whole:
            self._of_unheld(captured)
            self._of_outside(captured)
            self.of_lacks()
            self.of_workers()
            self._of_sources()

    def of_frozen(self, written: Mapping[str, str] | None) -> None:
        """Warn of frozen parameters that are saved, although their digest was wanted.

        `written` has their names and the reasons. None: the option was not set; an event suggests
        it, once, if most of a checkpoint is frozen.
        """
        if written is None:
            frozen, nbytes = count_frozen(self._state) if self._digests_due else (0, 0)
            self._digests_due = False
            if frozen >= max(SUGGESTED_NBYTES, 0.75 * nbytes):
                self._emit(
                    "frozen",
                    f"{self._url}: {frozen / 2**30:.1f} GiB of each checkpoint are parameters "
                    "without gradient. If the script loads the same values at each start, "
                    'frozen="by digest" saves only their digests (docs/saving.md)',
                )
            return
        new = {name: why for name, why in written.items() if name not in self._written}
        self._written.update(new)
        if new:
            shown = shortened([f"{name} ({why})" for name, why in new.items()])
            self._emit(
                "warning",
                f'{self._url}: frozen="by digest": {len(new)} parameters without gradient are '
                f"saved in full, not by digest: {shown}",
            )

    def of_lacks(self) -> None:
        """Warn if no component is a position in the data, or none an optimizer."""
        if self._lacks_due and lacks_data_position(self._state):
            self._emit("no_position", NO_DATA_POSITION)
        if self._lacks_due and lacks_optimizer(self._state):
            self._emit("warning", NO_OPTIMIZER)
            self._omitted_due = False
        self._lacks_due = False

    def of_omitted(self, captured: Captured, stepped: Sequence[Stepped]) -> None:
        """Warn, once, of trained objects that are not saved, averages at ever rarer saves."""
        if self._omitted_due and not is_of_trainer(self._state):
            saved, grown = captured.addresses, list[AveragedModel]()
            self._num_saves += 1
            if self._num_saves & (self._num_saves - 1) == 0:
                found, before = unsaved_averages(self._state, saved), self._averages
                grown = [one for one, num in found.items() if num > before.get(one, num)]
                self._averages = WeakKeyDictionary(found)
            classes = list_omitted_classes(self._state, stepped, saved, grown)
            self._omitted_due = not classes
            if classes:
                self._emit("warning", f"{self._url}: {OMITTED.format(', '.join(classes))}")

    def of_workers(self) -> None:
        """Warn, once, of workers whose seed is drawn in each process anew, also at later saves."""
        # Trainers put the generators back after a validation.
        if not self._workers_due or is_of_trainer(self._state):
            return
        before, children = self._children, {one.pid for one in multiprocessing.active_children()}
        self._children = children
        if (before is None or children - before) and has_loader_that_draws_once(self._state):
            self._emit("warning", PERSISTENT_WORKERS)
            self._workers_due = False

    def _of_sources(self) -> None:
        """Warn of data whose state is incomplete, or whose epochs are the same."""
        if self._are_known_due and not is_of_trainer(self._state):  # a Trainer says so at its start
            for name, value in self._state.items():
                inexact = describe_inexact(value)
                if inexact is not None:
                    self._emit("warning", f"{self._url}: {name}: {inexact}")
        self._are_known_due = False
        for source in self._sources:
            for text in source.find_faults():
                self._emit("warning", f"{self._url}: {text}")

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
                f"resume() has replaced the state of step {step}, which was not saved, with the "
                f"state of step {entry.step}",
            )

    def of_exception(self, error: BaseException, step: int) -> None:
        """Warn that an error has ended the loop, and that the trigger for it saved nothing."""
        self._emit_here(
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

    def _emit(self, kind: Kind, text: str, *, step: int | None = None) -> None:
        self.found.append(text)
        if self._is_leader:
            self._emit_here(kind, text, step=step)

    def _of_outside(self, captured: Captured) -> None:
        names = self._outside.find_uncaptured(captured)
        if names:
            self._emit("warning", f"{self._url}: {format_outside_state(names)}")

    def _of_unheld(self, captured: Captured) -> None:
        if captured.stepping == self._stepping and captured.names is self._names:
            return
        self._stepping, self._names = captured.stepping, captured.names
        unsaved = captured.find_unsaved_parameters()
        if unsaved:
            self._emit(
                "warning",
                f"{self._url}: parameters that no component holds are trained and not saved: "
                f"{describe_parameters(unsaved)}. After a resume they have their initial values "
                "again: add the object with them to `state`",
            )


READ_AHEAD = (
    ". The loop or a wrapper around the loader, such as a prefetcher, holds them in hand, and a "
    "resume skips them. Let the loader's workers read ahead (num_workers=, prefetch_factor=), or "
    "iterate over data.iterate_through(prefetcher), which counts yielded batches (docs/data.md)"
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


def _find_sources(state: Mapping[str, Any]) -> Iterator[SourceCheck]:
    """Yield checks of the components that give data, except Holdfast's loaders and torch's."""
    ours = {name for name, _ in loaders(state)}
    for name, value in state.items():
        is_source = name not in ours and hasattr(type(value), "__iter__")
        if is_source and kind_of(value) == "object" and not isinstance(value, DataLoader):
            others = [other for key, other in state.items() if key != name]
            held = [one for other in others for one in _parts_of(other)]
            yield SourceCheck(name, value, {id(one) for one in (*others, *held)})


def _parts_of(component: Any) -> Iterable[Any]:
    if isinstance(component, list):
        return component
    return (
        component if isinstance(component, dict) else getattr(component, "__dict__", {})
    ).values()
