"""State of an Engine, what was measured at its iterations, and the parts of it that are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ignite
from ignite.engine import Engine, Events
from ignite.metrics import Metric
from typing_extensions import Self, override

from holdfast.bridges.parts import left_out
from holdfast.errors import UsageError, listing
from holdfast.events import Emitter

SUPPORTED = "0.5.1 to 0.5.5"

_NEEDED = (
    "_event_handlers",
    "add_event_handler",
    "interrupt",
    "last_event_name",
    "load_state_dict",
    "remove_event_handler",
    "should_terminate",
    "state_dict",
)
"""Members of an Engine that are used here."""
_BETWEEN = (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)
"""Events at which an iteration is complete, and the next one has not begun."""

_OURS = "ignite"


class EngineState:
    """The component `trainer`: the counters of an Engine, and its user keys."""

    def __init__(self, engine: Engine, emit: Emitter) -> None:
        self._engine, self._emit = engine, emit
        self.is_loaded = self.has_stopped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the Engine's state, and whether it was terminated before its goal."""
        state = self._engine.state
        is_there = state.max_epochs and state.iteration >= state.max_epochs * state.epoch_length
        return {
            "of": _OURS,
            "has_stopped": bool(self._engine.should_terminate) and not is_there,
            "engine": dict(self._engine.state_dict()),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accept any state, so that Ignite loads it once and not on trial."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the Engine's state, unless another trainer has saved it."""
        note = left_out(state, _OURS)
        self.is_loaded = note is None
        if note is not None:
            self._emit("warning", note)
        else:
            self._engine.load_state_dict(state["engine"])
            self.has_stopped = state["has_stopped"]


class TimedMetrics:
    """Metrics of an Engine, which keeps old ones, with the iteration at which each was set."""

    def __init__(self, engine: Engine, evaluator: Engine | None) -> None:
        """Note what `evaluator` sets, or else `engine` itself, from now on."""
        self._engine, self._is_own = engine, evaluator is None
        source = engine if evaluator is None else evaluator
        self._noted = source.state.metrics = _Noted(source.state.metrics, self._clock)

    @property
    def is_between(self) -> bool:
        """Whether the training stands between two iterations."""
        return self._engine.last_event_name in _BETWEEN

    def now(self) -> dict[str, float]:
        """Return the metrics of the present iteration that are single numbers."""
        return self._noted.at(self._engine.state.iteration)

    def _clock(self) -> int | None:
        """Return the iteration whose weights are measured; None: one that is not complete."""
        is_known = self._is_own or self.is_between
        return int(self._engine.state.iteration) if is_known else None


class _Noted(dict[str, Any]):
    """Dictionary that notes when each of its values was set."""

    def __init__(self, values: Mapping[str, Any], clock: Callable[[], int | None]) -> None:
        super().__init__(values)
        self._clock = clock
        self._set_at: dict[str, int | None] = {}

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._set_at[name] = self._clock()

    @override
    def update(self, *values: Any, **more: Any) -> None:
        """Set values one by one, so that each is noted."""
        for name, value in dict(*values, **more).items():
            self[name] = value

    @override
    def __ior__(self, values: Any) -> Self:  # type: ignore[override]
        self.update(values)
        return self

    def at(self, iteration: int) -> dict[str, float]:
        """Return the numbers that were set at an iteration."""
        set_then = [name for name, at in self._set_at.items() if at == iteration and name in self]
        numbers = {name: _convert_number(self[name]) for name in set_then}
        return {name: one for name, one in numbers.items() if one is not None}


def _convert_number(value: Any) -> float | None:
    """Return a value as a number; None for text, mappings and tensors of several."""
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def stateful_handlers(engine: Engine) -> Iterator[Any]:
    """Yield handlers that have a state, or whose methods are handlers; metrics are left out."""
    seen = set[int]()
    for handlers in engine._event_handlers.values():
        for handler, *_ in handlers:
            inner = getattr(handler, "_parent", lambda: None)() or handler  # below an event filter
            owner = getattr(inner, "__self__", inner)
            is_stateful = hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")
            if is_stateful and not isinstance(owner, Metric) and id(owner) not in seen:
                seen.add(id(owner))
                yield owner


def check_engine(engine: Engine) -> None:
    """Check that the Engine has all that this bridge uses."""
    version = getattr(ignite, "__version__", "unknown")
    wrong = [
        f"engine.{name}: Ignite {version} has none; supported are {SUPPORTED}"
        for name in _NEEDED
        if not hasattr(engine, name)
    ]
    if not engine.interrupt_resume_enabled:
        wrong.append("Engine.interrupt_resume_enabled is False: a signal could not end the run")
    if wrong:
        raise UsageError("HoldfastRun:\n" + listing(wrong))
