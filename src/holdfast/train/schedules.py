"""Schedulers of a Trainer, and when they step: after each step, by epochs, tokens or validations.

Counters decide, which are saved with the schedulers, so a resume steps none twice. There may be
several schedulers for one optimizer, or one for each parameter group.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from holdfast.arguments import check_arguments, shown
from holdfast.errors import UsageError
from holdfast.format.manifest import Mode, Timestamp
from holdfast.policy.clock import ALL_UNITS, Time, Unit, parse
from holdfast.policy.direction import direction, mode_for
from holdfast.policy.triggers import Every
from holdfast.train.argument_checks import check_counted
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.curves import Curve, CurveScheduler, EpochLength
from holdfast.train.training import OF_VALIDATION, Counters, Metrics

logger = logging.getLogger("holdfast")


@check_arguments(but=("every",))
@dataclass(frozen=True, slots=True)
class Schedule:
    """A scheduler, and when it steps.

    Schedule(lambda optimizer: StepLR(optimizer, 30), every="1ep")
    Schedule(ReduceLROnPlateau, every="evaluation", metric="val/loss")
    """

    scheduler: Any
    """The scheduler, or a function that makes it of the optimizer."""
    every: str | Time = "step"
    """When it steps: "step", an interval such as "1ep" or "1e6tok", or "evaluation": after each
    regular validation, but not after one that is made only because the goal was reached."""
    metric: str | None = None
    """Name of the metric that its `step` gets, as in the log: of the validation, or of the step."""
    mode: Mode | None = None
    """For ReduceLROnPlateau, whether low ("min") or high values ("max") of the metric are good.
    None: as the name of the metric shows."""

    def __post_init__(self) -> None:
        if isinstance(self.scheduler, Curve | CurveScheduler) and self.every != "step":
            raise UsageError(
                f"Schedule: every={self.every!r}: a curve follows the counters by itself; its "
                'lengths have units, such as cosine("3ep")'
            )
        if self.every not in ("step", "evaluation") and self.interval.unit is Unit.SECOND:
            raise UsageError(
                f"Schedule: every='{self.every}': by the clock it would not be the same after a "
                "resume"
            )
        is_late = self.metric is not None and self.metric.startswith(OF_VALIDATION)
        if is_late and self.every != "evaluation":
            raise UsageError(
                f"Schedule: metric={self.metric!r} is known after a validation: give "
                'every="evaluation", and its interval to the Validation'
            )

    @property
    def interval(self) -> Time:
        """The interval of a schedule that is counted."""
        if self.every == "step":
            return Time(1, Unit.STEP)
        return parse(self.every, what="Schedule: every", units=ALL_UNITS, parts=True)

    def made(self, scheduler: Any) -> Schedule:
        """Return this schedule with the scheduler that was made for it."""
        if not callable(getattr(scheduler, "step", None)):
            raise UsageError(f"scheduler: {scheduler!r} has no step()")
        needs_metric = isinstance(scheduler, ReduceLROnPlateau)
        if needs_metric and self.metric is None:
            raise UsageError(
                "scheduler: ReduceLROnPlateau steps on a metric: give "
                'Schedule(ReduceLROnPlateau, every="evaluation", metric="val/loss")'
            )
        if self.metric is not None and isinstance(scheduler, LRScheduler) and not needs_metric:
            raise UsageError(
                f"scheduler: {type(scheduler).__name__} steps on no metric: omit "
                f"metric={self.metric!r}"
            )
        if needs_metric:
            self._check_mode(scheduler)
        elif self.mode is not None:
            raise UsageError(f"Schedule: mode={self.mode!r} is only for ReduceLROnPlateau")
        return Schedule(scheduler, self.every, self.metric, self.mode)

    def _check_mode(self, scheduler: ReduceLROnPlateau) -> None:
        """Raise `UsageError` unless the scheduler improves in the direction of its metric."""
        assert self.metric is not None, "it was checked"
        given = self.mode
        if given is None and scheduler.mode == "max":
            # Not torch's default, so the caller has said it.
            given = direction(self.metric) or "max"
        say = "give Schedule(…, mode='max') or mode='min', and the same mode to ReduceLROnPlateau"
        mode = mode_for(self.metric, given, what="Schedule", say=say)
        if scheduler.mode != mode:
            raise UsageError(
                f"Schedule: ReduceLROnPlateau has mode={scheduler.mode!r}, and good values of "
                f"{self.metric!r} are {'low' if mode == 'min' else 'high'}: make it with "
                f"mode={mode!r}, or give Schedule(…, mode={scheduler.mode!r})"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the scheduler steps in each step of training, and needs no metric or counters."""
        is_curve = isinstance(self.scheduler, CurveScheduler)
        return self.every == "step" and self.metric is None and not is_curve


class Schedules:
    """Schedulers of a Trainer by component name, and their steps."""

    def __init__(self, made: Mapping[str, Schedule], callbacks: Callbacks) -> None:
        self._made = made
        self._callbacks = callbacks
        others = {name: item for name, item in made.items() if not item.is_plain}
        self._curves = {
            name: item.scheduler
            for name, item in others.items()
            if isinstance(item.scheduler, CurveScheduler)
        }
        self._late = {name: item for name, item in others.items() if item.every == "evaluation"}
        self._counted = {
            name: item
            for name, item in others.items()
            if name not in self._curves and name not in self._late
        }
        self._intervals: dict[str, tuple[Unit, Any]] = {}
        self._before = Timestamp(step=0)
        self._seen: set[str] = set()

    @property
    def components(self) -> dict[str, Any]:
        """Schedulers by component name."""
        return {name: item.scheduler for name, item in self._made.items()}

    @property
    def plain_schedulers(self) -> tuple[Any, ...]:
        """Schedulers that step within each step of training."""
        return tuple(item.scheduler for item in self._made.values() if item.is_plain)

    @property
    def steps_after_validation(self) -> bool:
        """Whether any scheduler steps after validations."""
        return bool(self._late)

    def check_steppable(self, units: Collection[Unit], *, validates: bool) -> None:
        """Check that each scheduler can step; the Trainer counts steps, epochs and `units`."""
        if self._late and not validates:
            raise UsageError(
                'Schedule: every="evaluation": there is nothing to validate on; give validate=…'
            )
        for item in self._counted.values():
            check_counted(item.interval.unit, f"Schedule: every='{item.every}'", units)
        for name, curve in self._curves.items():
            for unit in curve.units:
                check_counted(unit, name, units)

    def compute_lengths(self, goal: Time, epoch: EpochLength) -> None:
        """Compute all lengths and intervals for a goal; warn of a unit that is probably wrong."""
        for curve in self._curves.values():
            curve.resolve(goal, epoch)
        for name, item in self._counted.items():
            every = epoch.resolved(Every(item.interval), name).resolve(goal)
            self._intervals[name] = (every.unit, every.size)
        for name, item in self._made.items():
            if item.every == "step":
                _warn_if_in_epochs(name, item.scheduler, goal, epoch)

    def apply_counters(self, counters: Counters) -> None:
        """Set the schedulers to the counters of the run; called after a load."""
        self._before = counters.timestamp
        for name, curve in self._curves.items():
            curve.begin(name, counters)

    def advance(self, counters: Counters, metrics: Metrics) -> None:
        """Step the schedulers due since the last call; `metrics` are those of the step."""
        if not self._curves and not self._counted:
            return
        before, now = self._before, counters.timestamp
        self._before = now
        for name, item in self._counted.items():
            unit, size = self._intervals[name]
            passed = [(unit.read_progress(stamp) or 0) // size for stamp in (before, now)]
            for _ in range(int(passed[1] - passed[0])):
                self._step_scheduler(name, item, metrics)
        for curve in self._curves.values():
            self._run_with_hooks(curve, partial(curve.step, counters))

    def advance_after_validation(
        self, regular: Collection[str], metrics: Metrics, owner_of: Callable[[str], str | None]
    ) -> None:
        """Step schedulers that follow validations, by `metrics`; `regular` parts were due."""
        if not regular:
            return
        for name, item in self._late.items():
            owner = None if item.metric is None else owner_of(item.metric)
            if owner is None or owner in regular:
                self._step_scheduler(name, item, metrics)

    def _step_scheduler(self, name: str, item: Schedule, metrics: Metrics) -> None:
        if item.metric is None:
            self._run_with_hooks(item.scheduler, item.scheduler.step)
            return
        if item.metric in metrics:
            self._seen.add(name)
            self._run_with_hooks(item.scheduler, partial(item.scheduler.step, metrics[item.metric]))
        elif name not in self._seen and (
            "loss" in metrics or item.metric.startswith(OF_VALIDATION)
        ):
            raise UsageError(
                f"{name}: there is no metric {item.metric!r}, on which it steps; there are "
                + ", ".join(map(repr, metrics))
            )
        elif metrics:
            logger.warning("%s: no %r this time, so it does not step", name, item.metric)

    def _run_with_hooks(self, scheduler: Any, step: Callable[[], Any]) -> None:
        self._callbacks.call_hook(Callback.before_scheduler_step, scheduler)
        with warnings.catch_warnings():
            # An update that was skipped is a step, too.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            step()
        self._callbacks.call_hook(Callback.after_scheduler_step, scheduler)


def _warn_if_in_epochs(name: str, scheduler: Any, goal: Time, epoch: EpochLength) -> None:
    """Warn of a scheduler whose length fits the epochs, and ends early in the first one."""
    lengths: Sequence[tuple[type, str, Callable[[Any], float]]] = (
        (StepLR, "step_size", lambda item: item.step_size),
        (MultiStepLR, "milestones", lambda item: max(item.milestones, default=0)),
        (CosineAnnealingLR, "T_max", lambda item: item.T_max),
    )
    if goal.unit not in (Unit.STEP, Unit.EPOCH):
        return
    num_epochs = epoch.convert(float(goal.value), goal.unit, Unit.EPOCH)
    num_steps = epoch.num_steps
    for kind, argument, length_of in lengths:
        if not isinstance(scheduler, kind) or num_epochs is None or num_steps is None:
            continue
        length = length_of(scheduler)
        if 0 < length <= num_epochs and num_epochs >= 2 and 3 * length <= num_steps:
            logger.warning(
                "%s: %s advances at each optimizer step, so its %s ends after %d of the %d steps "
                'of the first epoch. To advance per epoch: Schedule(…, every="1ep")',
                *(name, kind.__name__, argument, length, num_steps),
            )


Make = Callable[[torch.optim.Optimizer], Any]


def for_group(group: int, make: Make) -> Make:
    """Make a factory for a scheduler that sees only one group of the optimizer's parameters.

        Trainer(…, scheduler=[
            for_group(0, lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000)),
            for_group(1, lambda optimizer: ConstantLR(optimizer, factor=0.1)),
        ])

    Args:
        group: index in `optimizer.param_groups`.
        make: makes the scheduler from an optimizer.
    """

    def make_for_group(optimizer: torch.optim.Optimizer) -> Any:
        if not 0 <= group < len(optimizer.param_groups):
            raise UsageError(
                f"for_group({group}): the optimizer has {len(optimizer.param_groups)} groups"
            )
        one = _OneGroup(optimizer, group)
        scheduler = make(one)
        # torch's schedulers warn if their optimizer has not stepped before they do.
        one.step()
        return scheduler

    return make_for_group


def make_schedulers(given: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Schedule]:
    """Make the schedulers of the argument `scheduler`, and when they step, by component name."""
    if given is None:
        return {}
    if optimizer is None:
        raise UsageError("scheduler: there is no optimizer whose learning rate it could set")
    if isinstance(optimizer, Mapping):
        return _make_by_name(given, optimizer)
    several = isinstance(given, Iterable) and not (isinstance(given, str) or hasattr(given, "step"))
    made = [_make_scheduler(item, optimizer) for item in (given if several else [given])]
    if not several:
        return {"scheduler": made[0]}
    _check_apart([item.scheduler for item in made], len(optimizer.param_groups))
    return {f"scheduler-{number}": scheduler for number, scheduler in enumerate(made)}


def _make_by_name(
    given: Any, optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Schedule]:
    """Make the schedulers of several optimizers, given by their names."""
    if not isinstance(given, Mapping) or not set(given) <= set(optimizers):
        raise UsageError(
            f"scheduler={shown(given)}: with several optimizers give a mapping from their names, "
            f"{[*optimizers]}"
        )
    return {
        name.replace("scheduler", f"scheduler-{of}", 1): made
        for of, item in given.items()
        for name, made in make_schedulers(item, optimizers[of]).items()
    }


def _make_scheduler(item: Any, optimizer: torch.optim.Optimizer) -> Schedule:
    plan = item if isinstance(item, Schedule) else Schedule(item)
    given = plan.scheduler
    is_factory = isinstance(given, type) or (callable(given) and not hasattr(given, "step"))
    return plan.made(given(optimizer) if is_factory else given)


def _check_apart(schedulers: list[Any], num_groups: int) -> None:
    """Check that no two torch schedulers set the learning rate of the same parameter group."""
    taken: dict[int, int] = {}
    for number, scheduler in enumerate(schedulers):
        if not isinstance(scheduler, LRScheduler):
            continue
        sees = scheduler.optimizer
        for group in [sees.group] if isinstance(sees, _OneGroup) else range(num_groups):
            first = taken.setdefault(group, number)
            if first != number:
                raise UsageError(
                    f"scheduler: numbers {first} and {number} both set the learning rate of group "
                    f"{group}; combine them in torch's ChainedScheduler or SequentialLR"
                )


class _OneGroup(torch.optim.Optimizer):
    """View of an optimizer with only one of its parameter groups, for schedulers."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: int) -> None:
        # Without super().__init__(), which would set up the group as its own; this is a view.
        self._optimizer = optimizer
        self.group = group
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The group, read each time, as a load may put new groups into the optimizer."""
        return [self._optimizer.param_groups[self.group]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No-op: the optimizer itself steps."""
