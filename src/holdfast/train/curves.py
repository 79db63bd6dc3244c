"""Learning-rate curves as functions of the run's counters: warm-up, cosine, linear, WSD.

A rate follows from the counters and the goal alone. So a resume needs no history, except the points
at which parts with lengths in different units met (tests/train/schedules/test_curves.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Self

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.policy.clock import ALL_UNITS, Time, Unit, parse
from holdfast.train.training import Counters

logger = logging.getLogger("holdfast")

_UNITS = ALL_UNITS - {Unit.SECOND, Unit.CYCLE}
"""Units of lengths: by the clock a curve would not be the same after a resume."""

Position = Mapping[Unit, float]
"""Progress of a run in each unit that is counted; epochs have a fraction."""


def position_of(counters: Counters, num_batches: int | None) -> dict[Unit, float]:
    """Return the progress in each counted unit; `num_batches` is the length of an epoch."""
    found: dict[Unit, float] = {Unit.STEP: counters.step}
    if counters.samples is not None:
        found[Unit.SAMPLE] = counters.samples
    if counters.tokens is not None:
        found[Unit.TOKEN] = counters.tokens
    if num_batches:
        # At most one: a length that is too small must not go past the next epoch.
        found[Unit.EPOCH] = counters.epoch + min(counters.batch / num_batches, 1.0)
    return found


class _NeedsEpoch(Protocol):
    @property
    def needs_epoch(self) -> bool: ...

    def with_epoch(self, epoch: Time) -> Self: ...


_Timed = TypeVar("_Timed", bound=_NeedsEpoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLength:
    """Length of an epoch, as far as the data tells it."""

    num_batches: int | None
    """None: not known, or not the same in all epochs."""
    accumulate: int

    @property
    def num_steps(self) -> int | None:
        """Steps of an epoch; None: not known."""
        return None if self.num_batches is None else math.ceil(self.num_batches / self.accumulate)

    def resolved(self, wanted: _Timed, what: str) -> _Timed:
        """Return triggers with parts of an epoch as steps; `what` names them in the error."""
        if not wanted.needs_epoch:
            return wanted
        if self.num_steps is None:
            raise UsageError(
                f"{what}: a part of an epoch needs its number of steps, and the data has no "
                "length, or not the same in each epoch: give the interval in steps"
            )
        return wanted.with_epoch(Time(self.num_steps, Unit.STEP))

    def convert(self, value: float, unit: Unit, to: Unit) -> float | None:
        """Convert a length; None where that is not known before it is trained."""
        if unit is to:
            return value
        if self.num_steps is None or {unit, to} != {Unit.STEP, Unit.EPOCH}:
            return None
        return value / self.num_steps if to is Unit.EPOCH else value * self.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSegment:
    """A part of a curve, from one factor of the base rate to another."""

    end: float
    start: float | None = None
    """Factor at its beginning; None: the one at which the part before ends, or 1."""
    length: Time | None = None
    """None: all that the other parts leave of the run."""
    scale: float = 1.0
    """Factor of `length`."""
    form: Literal["linear", "cosine"] = "linear"

    def __str__(self) -> str:
        start = "" if self.start is None else f"from {self.start:g} "
        times = "" if self.scale == 1 else f"{self.scale:g} of "
        length = "the rest" if self.length is None else f"{times}{self.length}"
        return f"{self.form} {start}to {self.end:g} in {length}"

    def factor(self, start: float, fraction: float) -> float:
        """Return the factor at a fraction of the part that begins at the factor `start`."""
        if fraction >= 1:
            return self.end
        if self.form == "linear":
            return start + (self.end - start) * fraction
        return self.end + (start - self.end) * (0.5 * (1.0 + math.cos(math.pi * fraction)))


@dataclass(frozen=True, slots=True)
class Curve:
    """Learning rates as factors of the optimizer's own, in parts that follow each other.

        Trainer(…, scheduler=warmup("500step").then(cosine(end=0.1)))

    `warmup`, `cosine`, `linear`, `wsd` and `one_cycle` make them. Called with an optimizer it gives
    the scheduler. After its last part the rate stays.
    """

    parts: tuple[CurveSegment, ...]

    def then(self, other: Curve) -> Curve:
        """Return a curve that goes on with `other`, from the rate at which this one ends."""
        if not isinstance(other, Curve):
            raise UsageError(f"then({other!r}): give another curve, such as cosine()")
        return Curve(_check_segments((*self.parts, *other.parts)))

    def __call__(self, optimizer: torch.optim.Optimizer) -> CurveScheduler:
        """Make the scheduler that sets the rates of an optimizer by this curve."""
        return CurveScheduler(optimizer, self)

    def __str__(self) -> str:
        return "; ".join(map(str, self.parts))


@check_arguments(but=("length",))
def warmup(length: str | Time, *, start: float = 0.0) -> Curve:
    """Raise the rate linearly from `start` times the optimizer's rate to all of it.

        warmup("500step").then(cosine())

    Args:
        length: such as "500step", "1ep", "1e9tok", or a part of the run ("0.05dur").
        start: factor at the first step.
    """
    return _curve(CurveSegment(start=start, end=1.0, length=_parse_length(length)))


@check_arguments(but=("length",))
def cosine(length: str | Time | None = None, *, end: float = 0.0) -> Curve:
    """Lower the rate by half a cosine to `end` times the optimizer's rate.

    Args:
        length: as for `warmup`; None: up to the goal.
        end: factor at the end.
    """
    return _curve(CurveSegment(end=end, length=_parse_length(length), form="cosine"))


@check_arguments(but=("length",))
def linear(length: str | Time | None = None, *, end: float = 0.0) -> Curve:
    """Change the rate linearly to `end` times the optimizer's rate.

    Args:
        length: as for `warmup`; None: up to the goal.
        end: factor at the end.
    """
    return _curve(CurveSegment(end=end, length=_parse_length(length)))


@check_arguments(but=("warmup", "decay"))
def wsd(
    *,
    warmup: str | Time = "0.05dur",
    decay: str | Time = "0.1dur",
    end: float = 0.0,
    form: Literal["linear", "cosine"] = "linear",
) -> Curve:
    """Warm up, keep the rate stable, and lower it before the goal.

    Args:
        warmup: length of the first part.
        decay: length of the last part, counted back from the goal; between the two the rate is
            stable.
        end: factor at the goal.
        form: how the rate is lowered.
    """
    return _curve(
        CurveSegment(start=0.0, end=1.0, length=_parse_length(warmup, "warmup")),
        CurveSegment(end=1.0),
        CurveSegment(end=end, length=_parse_length(decay, "decay"), form=form),
    )


@check_arguments(but=("length",))
def one_cycle(
    length: str | Time | None = None, *, rise: float = 0.3, start: float = 0.04, end: float = 4e-6
) -> Curve:
    """Raise the rate to the optimizer's and lower it again, both by half a cosine.

    The defaults are those of torch's `OneCycleLR`, with the optimizer's rate as `max_lr`; momentum
    stays as it is.

    Args:
        length: of the whole cycle, as for `warmup`; None: up to the goal.
        rise: part of the cycle in which the rate is raised.
        start: factor at the beginning.
        end: factor at the end.
    """
    if not 0 < rise < 1:
        raise UsageError(f"one_cycle: rise={rise!r}: must be between 0 and 1")
    whole = Time(1, Unit.DURATION) if length is None else _parse_length(length)
    assert whole is not None
    rest = None if length is None else whole
    return _curve(
        CurveSegment(start=start, end=1.0, length=whole, scale=rise, form="cosine"),
        CurveSegment(end=end, length=rest, scale=1 - rise, form="cosine"),
    )


def _curve(*parts: CurveSegment) -> Curve:
    return Curve(_check_segments(parts))


def _check_segments(parts: tuple[CurveSegment, ...]) -> tuple[CurveSegment, ...]:
    for part in parts:
        for name in ("start", "end"):
            value = getattr(part, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{name}={value!r}: must be a factor of the rate, 0 or above")
    if sum(part.length is None for part in parts) > 1:
        raise UsageError(
            "curve: two parts have no length, and only one can take the rest of the run: give the "
            "others a length, such as cosine('0.5dur')"
        )
    return parts


def _parse_length(given: str | Time | None, what: str = "length") -> Time | None:
    return None if given is None else parse(given, what=what, units=_UNITS, parts=True)


class CurveScheduler(LRScheduler):
    """Torch scheduler that sets rates by a `Curve`, as the Trainer tells it the time."""

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve) -> None:
        # Without super().__init__(), which would step once and count by itself.
        self.optimizer = optimizer
        self._curve = curve
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", _copied(group["lr"]))
        self._goal: Time | None = None
        self._epoch = EpochLength(num_batches=None, accumulate=1)
        self._lengths: list[tuple[Unit, float | None]] = []
        """Of each part: unit and length; None: up to `_rest_end`."""
        self._rest_end = 0.0
        """Where the part that takes the rest ends, in the unit of the goal."""
        self._marks: list[dict[Unit, float]] = []
        """Where parts ended that are over, to begin the next one in a unit of its own."""
        self._stored: tuple[str, str] | None = None
        """Curve and goal of the checkpoint that was loaded last."""

    @property
    def units(self) -> frozenset[Unit]:
        """Units in which lengths are given."""
        return frozenset(part.length.unit for part in self._curve.parts if part.length is not None)

    def resolve(self, goal: Time, epoch: EpochLength) -> None:
        """Compute the lengths of all parts for a goal."""
        self._goal, self._epoch = goal, epoch
        parts = self._curve.parts
        self._lengths = [self._resolved(part, goal) for part in parts]
        if epoch.num_batches is None and any(unit is Unit.EPOCH for unit, _ in self._lengths):
            raise UsageError(
                f"scheduler: {self._curve}: the goal {goal} needs the length of an epoch, and the "
                "data has none (len in batches), or epochs of several lengths (batch_sampler, "
                "batch_size by epoch): give goal and lengths in steps"
            )
        self._rest_end = float(goal.exact)
        rest = next((at for at, part in enumerate(parts) if part.length is None), len(parts))
        for at in range(rest + 1, len(parts)):
            unit, length = self._lengths[at]
            assert length is not None
            converted = epoch.convert(length, unit, goal.unit)
            if converted is None:
                raise UsageError(
                    f"scheduler: the part '{parts[at]}' is counted back from the goal {goal}: give "
                    f"its length in {goal.unit.value}, or as a part of the run"
                )
            self._lengths[at] = (goal.unit, converted)
            self._rest_end -= converted

    def begin(self, name: str, counters: Counters) -> None:
        """Set the rates for where the run stands; warn if a checkpoint had others."""
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", _copied(group["lr"]))
        before: list[float | Tensor] = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.step(counters)
        rates = self.get_last_lr()
        if self._stored is None or self._stored == (str(self._curve), str(self._goal)):
            return
        curve, goal = self._stored
        what = f"the goal was {goal} and is {self._goal}"
        if curve != str(self._curve):
            what = f"the curve was '{curve}' and is '{self._curve}'"
        if rates != before:
            logger.warning(
                "%s: %s, which is used from now on: at step %d the learning rate continues with "
                "%s, not with %s",
                *(name, what, counters.step, _format_rates(rates), _format_rates(before)),
            )
        self._stored = None

    def step(self, counters: Counters | None = None) -> None:  # type: ignore[override]
        """Set the rates for the counters of a run."""
        if counters is None or self._goal is None:
            raise UsageError("a curve needs the run's counters: give it to a Trainer as scheduler")
        factor = self._factor(position_of(counters, self._epoch.num_batches))
        for group in self.optimizer.param_groups:
            set_rate(group, group["initial_lr"] * factor)

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rate of each group of the optimizer."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return where parts ended, and which curve and goal that was for."""
        return {
            "curve": str(self._curve),
            "goal": str(self._goal),
            "marks": [{unit.value: at for unit, at in mark.items()} for mark in self._marks],
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` if a stored state is not that of a curve."""
        if set(state) != {"curve", "goal", "marks"}:
            raise UsageError(f"saved by another kind of scheduler, not by a curve: {sorted(state)}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore where parts ended."""
        self.check_state_dict(state)
        self._stored = (state["curve"], state["goal"])
        is_same = state["curve"] == str(self._curve)
        marks: Sequence[Mapping[str, float]] = state["marks"] if is_same else ()
        self._marks = [{Unit(unit): at for unit, at in mark.items()} for mark in marks]

    def _resolved(self, part: CurveSegment, goal: Time) -> tuple[Unit, float | None]:
        if part.length is None:
            return goal.unit, None
        if part.length.unit is Unit.DURATION:
            return goal.unit, float(part.length.exact * goal.exact) * part.scale
        return part.length.unit, float(part.length.value) * part.scale

    def _factor(self, now: Position) -> float:
        """Return the factor of the base rates at a position, and note where parts ended."""
        assert self._goal is not None
        began: Position = dict.fromkeys(now, 0.0)
        last = len(self._lengths) - 1
        level = 1.0
        for at, (part, (unit, length)) in enumerate(
            zip(self._curve.parts, self._lengths, strict=True)
        ):
            level = level if part.start is None else part.start
            end = self._rest_end if length is None else began[unit] + length
            if now[unit] < end:
                del self._marks[at:]
                return part.factor(level, (now[unit] - began[unit]) / (end - began[unit]))
            level = part.end
            if at == last:
                break
            if len(self._marks) <= at:
                self._marks.append(dict(now))
            began = {**self._marks[at], unit: end}
        return level


def set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    """Set the learning rate of a group of parameters, in place if it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(float(rate))
    else:
        group["lr"] = rate


def _copied(rate: Any) -> Any:
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


def _format_rates(rates: Sequence[float | Tensor]) -> str:
    return ", ".join(f"{float(rate):.6g}" for rate in dict.fromkeys(rates))
