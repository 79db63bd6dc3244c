"""End of a fit: its conditions, its result, the best checkpoint, the code for batch systems."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from signal import Signals
from typing import Any, Literal

from holdfast.checkpoints import Checkpoints, best_rules
from holdfast.control.stop import REQUEUE_EXIT_CODE, Stop
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.events import Emitter
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.policy.best import BestSaves
from holdfast.policy.clock import Time, argument_name
from holdfast.results import Checkpoint, build_checkpoint, metrics_by_step
from holdfast.root.best import BEST
from holdfast.train.evaluation.validation import OF_VALIDATION
from holdfast.train.group import Group
from holdfast.train.training import Counters

EndReason = Literal["goal", "max_time", "signal", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a `fit`: the reason of its end and the step."""

    reason: EndReason
    """Cause of the end: the goal, the time limit, a signal, or the request of a callback.

    After a signal `fit` raises the exception that ends the program, and returns nothing."""
    step: int
    """Completed steps of the whole run."""
    detail: str = ""
    """Reason given by the callback, or the signal's name."""
    notes: tuple[str, ...] = ()
    """Notes of the resume: what was not loaded, stayed as it was, or is not restored exactly."""
    find_best: Callable[[], Checkpoint | None] = field(
        default=lambda: None, repr=False, compare=False
    )
    """Function that finds the best checkpoint in the root."""

    @property
    def best(self) -> Checkpoint | None:
        """The checkpoint that `best` names (docs/keeping.md); None: there is none.

        Read from the root whenever it is asked for.
        """
        return self.find_best()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the best checkpoint as it is now, as another process may not have the root."""
        return _restored, (self.reason, self.step, self.detail, self.notes, self.best)

    @property
    def exit_code(self) -> int:
        """Exit code for `sys.exit`: 75 if running the script again would continue, else 0."""
        return REQUEUE_EXIT_CODE if self.reason in ("max_time", "signal") else 0


def _restored(
    reason: EndReason, step: int, detail: str, notes: tuple[str, ...], best: Checkpoint | None
) -> Outcome:
    return Outcome(reason=reason, step=step, detail=detail, notes=notes, find_best=lambda: best)


class FitEnding:
    """Decides when a fit ends: at its goal, by a signal, a request, or the time limit."""

    def __init__(
        self,
        goal: Time,
        counters: Counters,
        *,
        stop: Stop | None,
        max_time_s: float,
        group: Group,
        shares_signals: bool = False,
        find_best: Callable[[], Checkpoint | None] = lambda: None,
    ) -> None:
        """`shares_signals`: the ranks agree here on signals, as no manager does it for them."""
        self.goal = goal
        self.reason: EndReason | None = None
        """Reason of the end; None while training continues."""
        self.begun_at: int | None = None
        """Completed steps when this call began to train; None before that."""
        self._counters = counters
        self._counter = argument_name(goal.unit)
        self._stop = stop
        self._ends_at_s = time.monotonic() + max_time_s
        self._group = group
        self._shares_signals = shares_signals
        self._find_best = find_best
        self._request: str | None = None
        self._agreed: EndReason | None = None
        """With several ranks, the reason on which they agreed when they met."""

    def request_end(self, reason: str) -> None:
        """Request that `fit` ends after the current step, or where the ranks meet next."""
        self._request = self._request or reason or "a request"

    def is_at_goal(self) -> bool:
        """Whether training has reached the goal."""
        value: int | None = getattr(self._counters, self._counter)
        return value is not None and value >= self.goal.value

    def is_beyond_goal(self) -> bool:
        """Whether training is past the goal, not just at it."""
        value: int | None = getattr(self._counters, self._counter)
        return value is not None and value > self.goal.value

    def is_here(self) -> bool:
        """Whether training ends at this step; once True, it stays so."""
        if self.reason is None:
            if self.is_at_goal():
                self.reason = "goal"
            elif self._stop is not None and self._stop.requested is not None:
                self.reason = "signal"
            else:
                self.reason = self._own_reason() if self._group.is_alone else self._agreed
        return self.reason is not None

    def meet(self, num_saves: int) -> int:
        """Agree with the other ranks whether training ends; all ranks call it at the same step.

        Returns how many saves have ended on every rank, where `num_saves` have on this one.
        """
        reasons: list[EndReason | None] = [None, "max_time", "stopped"]
        mine = reasons.index(self._own_reason())
        received = self._stop.received if self._stop is not None and self._shares_signals else None
        signal = Signals[received].value if received else 0
        first, last, number = self._group.max([mine, -num_saves, signal])
        self._agreed = reasons[first]
        if number and self._stop is not None:
            self._stop.agree(Signals(number).name)
        return -last

    def _own_reason(self) -> EndReason | None:
        if self._request is not None:
            return "stopped"
        return "max_time" if time.monotonic() >= self._ends_at_s else None

    def outcome(self, notes: tuple[str, ...]) -> Outcome:
        """Make the outcome of the fit; `notes` are those of the resume."""
        reason = self.reason if self.reason is not None else "goal"
        asked = self._request or "a request on another rank"
        details = {"stopped": asked, "signal": self._stop and self._stop.requested}
        detail = details.get(reason) or ""
        return Outcome(
            reason=reason,
            step=self._counters.step,
            detail=detail,
            notes=notes,
            find_best=self._find_best,
        )


def saves_of_validations(checkpoints: Checkpoints) -> BestSaves:
    """Decide on saves for those rules `Best` that are about metrics of validations."""
    rules = best_rules(checkpoints)
    return BestSaves([item for item in rules if item.rule.metric.startswith(OF_VALIDATION)])


def load_best_metrics(
    best: BestSaves,
    checkpoints: Checkpoints,
    resumed: Checkpoint | None,
    manager: CheckpointManager,
    group: Group,
) -> None:
    """Read the metrics of what the run goes on from; all ranks call it, and use the leader's."""
    if best:
        manager.expect_metrics()  # a validation that does not give them raises an error
        what = "reading the metrics of earlier checkpoints"
        best.set_known_metrics(
            group.from_leader(what, lambda: _read_earlier_metrics(checkpoints, resumed))
        )


def _read_earlier_metrics(
    checkpoints: Checkpoints, resumed: Checkpoint | None
) -> dict[int, Mapping[str, float]]:
    if resumed is None or checkpoints.root is None:
        return {}
    catalog = catalog_of(checkpoints.root, Emitter(), checkpoints.encrypt)
    return metrics_by_step(catalog.lineage_entries(opens_all=False), resumed.step)


def finder(checkpoints: Checkpoints) -> Callable[[], Checkpoint | None]:
    """Return a function that finds the best checkpoint in a root, or None; claims nothing."""
    root = checkpoints.root

    def find() -> Checkpoint | None:
        if root is None:
            return None
        catalog = catalog_of(root, Emitter(), checkpoints.encrypt)
        try:
            entry = catalog.find_checkpoint(BEST)
        except NoCheckpoint:
            return None
        return build_checkpoint(catalog.find_store(entry.folder), entry)

    return find


def check_load_best(checkpoints: Checkpoints, *, validates: bool) -> None:
    """Raise `UsageError` if no checkpoint of this run could be the best."""
    if checkpoints.root is None:
        raise UsageError("load_best=True: nothing is saved (checkpoints=None); give a root")
    if not validates and not best_rules(checkpoints):
        raise UsageError(
            "load_best=True: nothing says which checkpoint is the best; give validate=…, or "
            'keep=Best("loss")'
        )
