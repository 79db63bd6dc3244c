"""Bridge to Ignite 0.5: runs an Engine that resumes, and saves it between its iterations.

An iteration has ended when all handlers of it were called, and those of the epoch's end if it is
the epoch's last; only there the state is saved. What is saved, and when, is the manager's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import ignite
import ignite.distributed as idist
from ignite.engine import Engine, Events
from ignite.metrics import Metric
from typing_extensions import Self, override

from holdfast.arguments import check_arguments
from holdfast.bridges.parts import (
    BridgeValidations,
    Generators,
    allow_other_trainers,
    describe_ended_run,
    make_leader_emitter,
    note_other_framework,
    rewind,
    say_start,
    start_from,
    warn_without_interval,
)
from holdfast.checkpoints import Checkpoints, StateHooks
from holdfast.control.stop import Stop
from holdfast.data.samplers import check_whole
from holdfast.errors import UsageError, listing
from holdfast.events import Emitter
from holdfast.manager import CheckpointManager
from holdfast.ownership.access import open_address
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Time
from holdfast.policy.rule import Rule
from holdfast.policy.savers import SavePolicy
from holdfast.policy.triggers import Event, SaveFunction, Trigger
from holdfast.results import Checkpoint
from holdfast.state.components import TRAINER
from holdfast.store.base import Store

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
        note = note_other_framework(state, _OURS)
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
        f"engine.{name}: Ignite {version} has no such attribute; supported: {SUPPORTED}"
        for name in _NEEDED
        if not hasattr(engine, name)
    ]
    if not engine.interrupt_resume_enabled:
        wrong.append("Engine.interrupt_resume_enabled is False: a signal could not end the run")
    if wrong:
        raise UsageError("HoldfastRun:\n" + listing(wrong))


_BEFORE = (Events.STARTED, Events.EPOCH_STARTED)
"""Events that may come before the first iteration of this process."""
_RUNNING: WeakSet[Engine] = WeakSet()
"""Engines that a `HoldfastRun` runs."""


class HoldfastRun:
    """A run of an Engine that goes on where it was when its script is started again.

        run = HoldfastRun(trainer, "runs/gpt", {"model": model, "optimizer": optimizer})
        run.run(loader, max_epochs=3)

    The data is saved as component `data` if it is a `Loader` or a `Stream` of `holdfast.data`, and
    the Engine as `trainer`. Handlers with a state, such as schedulers and `EarlyStopping`, are
    components, too: put them into the state. A step is an iteration, or `accumulate` of them.

    A signal that asks to stop is obeyed after the iteration: saved, then `SystemExit`.
    """

    @check_arguments(but=("every", "max_duration", "keep"))
    def __init__(
        self,
        engine: Engine,
        checkpoints: str | os.PathLike[str] | Store | Tiered | Checkpoints,
        state: Mapping[str, Any],
        *,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None = None,
        keep: Rule | str | None = None,
        max_duration: str | Time | None = None,
        accumulate: int = 1,
        evaluator: Engine | None = None,
        hooks: StateHooks | None = None,
        stop: Stop | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Check the arguments; nothing is read or written before `run`.

        Args:
            engine: the Engine that trains, with all its handlers.
            checkpoints: the root of the run, or a `Checkpoints` with all its options.
            state: the components but `trainer`, such as `model`, `optimizer`, `scheduler`.
            every: when to save, if `checkpoints` is a root: "500step", "1ep", "30min", …; the end
                of a run is saved in any case.
            keep: what retention keeps, if `checkpoints` is a root.
            max_duration: how long the run is to be, for intervals such as "0.1dur".
            accumulate: iterations that make one step of the optimizer.
            evaluator: the Engine that validates, whose metrics checkpoints record, each at the step
                at which it was measured. None: those of the engine.
            hooks: callbacks around saves and loads.
            stop: the signals that end training; None: `Stop()`.
            config: settings of the script, which checkpoints record.

        Raises:
            UsageError: an argument is wrong, or the Engine is of a version that is not known.
        """
        check_engine(engine)
        check_whole("accumulate", accumulate, at_least=1)
        self.checkpoints = Checkpoints.of(checkpoints, {"every": every, "keep": keep})
        if self.checkpoints.root is None:
            raise UsageError("root=None: a HoldfastRun needs a root to save in")
        if TRAINER in state:
            raise UsageError(f"state: {TRAINER!r} is the Engine's own component; use another name")
        self.engine = engine
        self.manager: CheckpointManager | None = None
        """The manager of the run under way, or of the last one."""
        self._components, self._accumulate = dict(state), accumulate
        self._max_duration, self._config = max_duration, config
        self._hooks, self._stop = hooks or StateHooks(), stop or Stop()
        self._emit = make_leader_emitter(self.checkpoints)
        self._state = EngineState(engine, self._emit)
        self._evaluator, self._measured = evaluator, TimedMetrics(engine, evaluator)
        self._validations: BridgeValidations | None = None
        self._has_begun = self._has_trained = self._has_warned = False
        self._has_warned_of_engine = False
        self._resumed: Checkpoint | None = None
        self._generators: Generators | None = None
        """Those that were resumed, until training goes on."""
        engine.add_event_handler(Events.STARTED, self._check_started)

    def run(
        self,
        data: Any,
        max_epochs: int | None = None,
        *,
        epoch_length: int | None = None,
        which: str = "latest",
        begin_from: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Resume, and train until `max_epochs` epochs are done; returns the Engine's state.

        A run that has ended returns at once. `which` names the checkpoint to go back to, as for
        `CheckpointManager.resume`. `begin_from`, as ROOT or ROOT@WHICH, is a checkpoint of another
        root, with whose state the run begins while its own root is empty.

        Raises:
            HoldfastError: the run cannot be resumed, or a save has failed.
            SystemExit: a signal has asked to stop, and the state is saved.
        """
        length = epoch_length or _measure_length(data)
        components = self._add_data(data) | {TRAINER: self._state}
        self._check_handlers(components)
        warn_without_interval(self.checkpoints, self._emit)
        self.manager = manager = CheckpointManager(
            self.checkpoints,
            components,
            max_duration=self._max_duration,
            hooks=allow_other_trainers(self._hooks),
            stop=self._stop,
            config=self._config,
        )
        with self._stop, manager:
            self._resumed = self._resume_run(manager, components, which, begin_from)
            self._validations = BridgeValidations(
                self.checkpoints,
                manager,
                _broadcast,
                resumed=self._resumed,
                validates=self._evaluator is not None,
            )
            if self._resumed is None:
                rewind([components.get("data")], self._emit)
            if self._resumed is not None and not self._state.is_loaded:
                self._set_counters(self._resumed, length, max_epochs)
            self._generators = None if self._resumed is None else Generators()
            if not self._has_reached_end(max_epochs, which):
                self._check_counts(length)
                self._train(data, max_epochs, epoch_length)
            if not self._stop.requested:
                self._save_at_end(manager)
        return self.engine.state

    def _add_data(self, data: Any) -> dict[str, Any]:
        if any(data is one for one in self._components.values()):
            return self._components
        if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
            if "data" in self._components:
                raise UsageError("state: `data` is not the data of run(); omit it")
            return self._components | {"data": data}
        self._emit(
            "no_position",
            f"the position in the data is not saved, as a {type(data).__name__} has none: a resume "
            "within an epoch trains on other samples. Give a holdfast.data.Loader",
        )
        return self._components

    def _check_handlers(self, components: Mapping[str, Any]) -> None:
        """Warn of handlers whose state no checkpoint has."""
        held = [*components.values()]
        for one in components.values():
            inside = one if isinstance(one, Mapping) else getattr(one, "__dict__", {})
            held += one if isinstance(one, list) else inside.values()
        engines = [self.engine, *([] if self._evaluator is None else [self._evaluator])]
        lost = [
            type(handler).__name__
            for engine in engines
            for handler in stateful_handlers(engine)
            if not any(handler is one for one in held)
        ]
        if lost:
            self._emit(
                "warning",
                "no checkpoint has the state of these handlers, so they start from scratch after "
                f"a resume: {', '.join(lost)}. Add them to the state, as components of their own",
            )

    def _resume_run(
        self,
        manager: CheckpointManager,
        components: Mapping[str, Any],
        which: str,
        begin_from: str | os.PathLike[str] | None,
    ) -> Checkpoint | None:
        found = manager.resume(which)
        given = "" if begin_from is None else os.fspath(begin_from)
        say_start(self.checkpoints, manager, found, begun_with=given)
        if found is not None or begin_from is None:
            return found
        store, name, folder = open_address(begin_from)
        return start_from(
            store,
            folder or name,
            manager,
            components,
            hooks=self._hooks,
            encrypt=self.checkpoints.encrypt,
        )

    def _set_counters(self, found: Checkpoint, length: int, max_epochs: int | None) -> None:
        """Set the Engine's counters from a checkpoint of another trainer."""
        iteration = found.step * self._accumulate
        loader = self._components.get("data")
        batch = getattr(loader, "batch", iteration % length) % length
        if batch != iteration % length:
            raise UsageError(
                f"{found.path}: step {found.step} is iteration {iteration}, the "
                f"{iteration % length}th of its epoch, but the data position is batch {batch}. Use "
                "the `accumulate` of the run that saved it"
            )
        self.engine.load_state_dict(
            {"iteration": iteration, "epoch_length": length, "max_epochs": max_epochs or 1}
        )

    def _check_counts(self, length: int) -> None:
        """Check that iterations are counted as by the process that saved the checkpoint."""
        found, state = self._resumed, self.engine.state
        if found is None:
            return
        wrong = []
        if state.iteration != found.step * self._accumulate:
            wrong.append(
                f"accumulate={self._accumulate}: step {found.step} was saved after iteration "
                f"{state.iteration}; use the accumulation of the run that saved it"
            )
        if state.epoch_length != length:
            wrong.append(
                f"an epoch had {state.epoch_length} iterations, and has {length} here; use the "
                "batch size and number of ranks of the run that saved it, or give "
                f"epoch_length={state.epoch_length}"
            )
        if wrong:
            raise UsageError(f"{found.path} cannot be resumed by this run:\n" + listing(wrong))

    def _has_reached_end(self, max_epochs: int | None, which: str) -> bool:
        """Whether the run that was resumed has reached its end before."""
        state = self.engine.state
        if self._resumed is None:
            return False
        goal = max_epochs or state.max_epochs
        if goal is not None and state.iteration >= goal * state.epoch_length:
            return True
        if self._state.has_stopped and which == "latest":
            step = self._resumed.step
            how = f'run(…, which="step={step}") without the handler that terminated it'
            self._emit("warning", describe_ended_run(step, how))
            return True
        return False

    def _train(self, data: Any, max_epochs: int | None, epoch_length: int | None) -> None:
        """Run the Engine, with handlers that come after all others."""
        handlers: list[tuple[Engine, Events, Callable[..., None]]] = [
            (self.engine, Events.STARTED, self._started),
            (self.engine, Events.EPOCH_STARTED, self._epoch_started),
            (self.engine, Events.ITERATION_COMPLETED, self._iteration_completed),
            (self.engine, Events.TERMINATE_SINGLE_EPOCH, self._epoch_terminated),
            (self.engine, Events.EPOCH_COMPLETED, self._epoch_completed),
            (self.engine, Events.EXCEPTION_RAISED, self._raise_error),
        ]
        if self._evaluator is not None:
            handlers.append((self._evaluator, Events.COMPLETED, self._validated))
        for engine, event, handler in handlers:
            engine.add_event_handler(event, handler)
        self._has_begun = self._has_trained = False
        before = self.engine.state.iteration
        _RUNNING.add(self.engine)
        try:
            self.engine.run(data, max_epochs=max_epochs, epoch_length=epoch_length)
            if not self._has_begun and self.engine.state.iteration == before:
                # Once after an error, a run of Ignite's does nothing: it ends the one before.
                self.engine.run(data, max_epochs=max_epochs, epoch_length=epoch_length)
        finally:
            _RUNNING.discard(self.engine)
            for engine, event, handler in handlers:
                engine.remove_event_handler(handler, event)

    def _save_at_end(self, manager: CheckpointManager) -> None:
        if self.engine.state.iteration % self._accumulate:
            self._emit("warning", "the last step is not saved, because it is incomplete")
        elif self.engine.state.iteration:
            manager.save(
                self._completed_steps, epoch=self._epoch, metrics=self._measured.now(), reason="end"
            )
        manager.wait(uploads=False)

    # Handlers

    def _check_started(self, _: Engine) -> None:
        """Warn if the Engine is run by itself, and not by a `HoldfastRun`."""
        if self.engine not in _RUNNING and not self._has_warned_of_engine:
            self._has_warned_of_engine = True
            self._emit(
                "warning",
                "the Engine runs by itself, so nothing is resumed or saved: call run() of the "
                "HoldfastRun instead of run() of the Engine",
            )

    def _started(self, _: Engine) -> None:
        self._has_begun = True
        self._restore_generators()
        if self._is_at_epoch_end:
            self._generators = None

    def _epoch_started(self, _: Engine) -> None:
        self._restore_generators()
        self._generators = None

    def _iteration_completed(self, _: Engine) -> None:
        self._has_trained = True
        if not self._is_at_epoch_end:  # else the handlers of the epoch's end follow
            self._save_if_due("step")

    def _epoch_completed(self, _: Engine) -> None:
        self._save_if_due("step", "epoch")

    def _epoch_terminated(self, *_: Any, **__: Any) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._emit(
                "warning",
                f"terminate_epoch() at iteration {self.engine.state.iteration}: the Engine does "
                "not record where its epochs end, so from here on a resume is not exact",
            )

    def _raise_error(self, _: Engine, error: BaseException) -> None:
        """End the run by the error, also where other handlers have let it pass.

        The state within an iteration is none to go on from, and none to save.
        """
        raise error

    def _validated(self, _: Engine) -> None:
        assert self._validations is not None
        if self.engine.last_event_name in _BEFORE and not self._has_trained:
            return  # validates what was resumed, or an untrained model: not a step of this process
        is_saved = self._measured.is_between and not self.engine.state.iteration % self._accumulate
        self._validations.ended(self._completed_steps if is_saved else None, self._measured.now())

    def _restore_generators(self) -> None:
        """Set the generators again: since the resume, handlers have drawn from them."""
        if self._generators is not None:
            self._generators.restore_states()

    def _save_if_due(self, *events: Event) -> None:
        manager, validations = self.manager, self._validations
        assert manager is not None
        assert validations is not None
        if self.engine.state.iteration % self._accumulate:
            return  # gradients are being accumulated
        metrics = self._measured.now()
        if (
            len(events) > 1
            or validations.has_validation(self._completed_steps)
            or not manager.is_quiet(self._completed_steps)
        ):
            validations.maybe_save(
                self._completed_steps, events=events, metrics=metrics, epoch=self._epoch
            )
        else:
            manager.record_metrics(self._completed_steps, metrics)
        if self._stop.requested:
            manager.save(
                self._completed_steps,
                epoch=self._epoch,
                metrics=metrics,
                reason="signal",
                wait=True,
            )
            self.engine.interrupt()

    @property
    def _completed_steps(self) -> int:
        return int(self.engine.state.iteration) // self._accumulate

    @property
    def _epoch(self) -> int:
        return int(self.engine.state.iteration) // int(self.engine.state.epoch_length)

    @property
    def _is_at_epoch_end(self) -> bool:
        """Whether the Engine stands at the end of an epoch."""
        return int(self.engine.state.iteration) % int(self.engine.state.epoch_length) == 0


def _measure_length(data: Any) -> int:
    if not hasattr(data, "__len__"):
        raise UsageError(
            f"run({type(data).__name__}): it has no length, so give epoch_length, the number of "
            "its batches"
        )
    return len(data)


def _broadcast(value: Any) -> Any:
    """Return the first rank's value on all ranks."""
    if idist.get_world_size() == 1:
        return value
    return json.loads(str(idist.broadcast(json.dumps(value), src=0)))
