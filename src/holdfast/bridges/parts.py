"""Parts that bridges share: start of a run, component names, generators, and validations.

A checkpoint has metrics of a validation only if it has the validated weights, so these are saved if
a rule `Best` would keep them. The leader decides for all ranks (tests/bridges/test_ranks.py).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from holdfast.checkpoints import Checkpoints, StateHooks, best_rules
from holdfast.errors import RanksFailed, SaveSkipped, UsageError
from holdfast.events import Emitter, log_event, shows_info, without_secrets
from holdfast.format.manifest import Mode
from holdfast.keys import Encryption
from holdfast.launched import present_ranks
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.policy.best import BestSaves
from holdfast.policy.direction import direction
from holdfast.policy.savers import Due
from holdfast.policy.schedule import together
from holdfast.policy.triggers import Event
from holdfast.ranks.coordinator import LEADER, RankFailure
from holdfast.results import Checkpoint, PendingSave, metrics_by_step
from holdfast.state import generators
from holdfast.state.components import OF_TRAINERS
from holdfast.store.base import Store

logger = logging.getLogger("holdfast")
T = TypeVar("T")
Agree = Callable[[Any], Any]
"""Function that returns the leader's argument on all ranks, which all call it at the same point.
The argument is a value that JSON can hold."""


class NotInstalled(UsageError, ImportError):
    """The library that a bridge is to is not installed, or too old to be imported."""


@contextmanager
def needs_library(name: str, install: str = "") -> Iterator[None]:
    """Say how to install the library of a bridge, where importing it in the block fails.

    `install` is what pip installs; "": the extra of the library's name.
    """
    try:
        yield
    except ImportError as error:
        raise NotInstalled(
            f"holdfast.bridges.{name}: {error}: pip install "
            + (install or f"'holdfast-torch[{name}]'")
        ) from error


def is_leader() -> bool:
    """Whether this process is the first of its run, which reports for all."""
    return present_ranks().rank == LEADER


def run_on_leader(agree: Agree, what: str, work: Callable[[], T]) -> T | None:
    """Run `work` on the leader alone; return its result there, and None on the other ranks.

    All ranks call it. `what` names the work in errors.
    """
    found, why, error = None, "", None
    if is_leader():
        try:
            found = work()
        except Exception as raised:  # noqa: BLE001 - raised when the other ranks know
            error, why = raised, RankFailure.from_error(raised, phase=what).reason
    why = agree(why)
    if error is not None:
        raise error
    if why:
        raise RanksFailed("the start of the training", {LEADER: (what, why)})
    return found


def make_leader_emitter(checkpoints: Checkpoints) -> Emitter:
    """Return the emitter of a bridge's own events: they are alike on all ranks, so one reports."""
    return Emitter(tuple(checkpoints.sinks) if is_leader() else ())


def say_start(
    checkpoints: Checkpoints,
    manager: CheckpointManager,
    resumed: Checkpoint | None,
    *,
    begun_with: str = "",
    write: Callable[[str], object] | None = None,
) -> None:
    """Say where the run begins, in one line on stderr, as INFO is not shown by default.

    Where the logger `holdfast` shows it, it is logged. Nothing is said where that logger has a
    higher level of its own, or the `sinks` do not log. `begun_with` names a state of elsewhere;
    `write` puts a line on stderr, where a progress bar may be.
    """
    if not is_leader() or log_event not in tuple(checkpoints.sinks):
        return
    is_logged = shows_info(checkpoints.sinks)
    if is_logged and not (resumed is None and begun_with):
        return  # the manager has logged it
    if resumed is not None:
        text = f"resuming from step {resumed.step}: {resumed.path}"
    elif begun_with:
        text = f"starting from {begun_with}: {manager.store.url} has no checkpoint"
    else:
        text = f"starting a new run: {manager.store.url} has no checkpoint to resume from"
    if is_logged:
        logger.info("%s", without_secrets(text))
    elif logger.level <= logging.INFO and sys.stderr is not None:
        line = f"holdfast: {without_secrets(text)}"
        if write is None:
            sys.stderr.write(f"{line}\n")
        else:
            write(line)


def warn_without_interval(checkpoints: Checkpoints, emit: Emitter) -> None:
    """Warn that nothing is saved before the end, as neither `every` nor a rule `Best` says when."""
    if checkpoints.every is None and not BestSaves(best_rules(checkpoints)):
        emit(
            "warning",
            "only the end of the run and signals are saved, so a crash loses all of it: give "
            '`every`, such as every="500step"',
        )


def describe_ended_run(step: int, how: str) -> str:
    """Return the warning that a run which was ended before its goal is not trained further."""
    return f"not training: this run was ended at step {step}, before its goal; to continue: {how}"


class Generators:
    """States of all global generators, to set them again after a trainer's preparations."""

    def __init__(self) -> None:
        """Read the states."""
        known = generators.global_generators()
        devices = [one for found in known["devices"].values() for one in found]
        live = [known["python"], known["numpy"], known["torch"], *devices]
        self._states = [(one, generators.read_generator_state(one)[1]) for one in live]

    def restore_states(self) -> None:
        """Set the generators to these states."""
        for generator, state in self._states:
            generators.write_generator_state(generator, state)


def rewind(loaders: Iterable[Any], emit: Emitter | None = None) -> bool:
    """Set those loaders that are ours to the first batch; return whether one stood elsewhere.

    A new run begins there, also after a search for a learning rate has used the loader. `emit`
    gets a note of it.
    """
    moved = False
    for loader in loaders:
        if not hasattr(loader, "at_epoch_end"):
            continue
        state = loader.state_dict()
        first = {**state, "epoch": 0, "batch": 0}
        if "at_end" in state:
            first["at_end"] = False
        if first != state:
            moved = True
            loader.load_state_dict(first)
            text = f"the data was at batch {state['batch']} of epoch {state['epoch']}"
            if emit is not None:
                emit("changed", f"{text}: the run is new, so it starts at the first batch")
    return moved


def allow_other_trainers(hooks: StateHooks) -> StateHooks:
    """Allow that a checkpoint has no component of this trainer, or one of `holdfast.train`."""
    own = hooks.one_sided
    return replace(hooks, one_sided=lambda name: name in OF_TRAINERS or bool(own and own(name)))


def start_from(
    store: Store,
    which: str,
    manager: CheckpointManager,
    components: Mapping[str, Any],
    *,
    hooks: StateHooks,
    encrypt: Encryption | None,
) -> Checkpoint:
    """Begin the run of `manager` with the whole state of a checkpoint in another root."""
    with CheckpointManager(
        store, components, hooks=allow_other_trainers(hooks), encrypt=encrypt
    ) as other:
        found = other.load(which, in_place=True)
    manager.count_from(found.timestamp)
    return found


def name_components(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """Name several components of a kind: `optimizer`, `optimizer1`, …

    >>> name_components("optimizer", ["a", "b"])
    {'optimizer': 'a', 'optimizer1': 'b'}
    """
    return {f"{name}{number or ''}": value for number, value in enumerate(values)}


def note_other_framework(state: Mapping[str, Any], framework: str) -> str | None:
    """Return a note if a stored component `trainer` is of another framework than the one loading.

    >>> note_other_framework({"of": "ignite"}, "lightning")
    'trainer: saved by ignite, so lightning ignores its counters and callbacks'
    """
    other = state.get("of", "another trainer")
    if other == framework:
        return None
    return f"trainer: saved by {other}, so {framework} ignores its counters and callbacks"


_WORDS = {"min": "lower", "max": "higher"}


def check_direction(
    checkpoints: Checkpoints, emit: Emitter, metric: str, mode: Mode, who: str
) -> None:
    """Compare the direction that a trainer's option or callback has for a metric with ours."""
    for item in best_rules(checkpoints):
        if item.rule.metric == metric and item.rule.mode != mode:
            raise UsageError(
                f"keep={item.rule}: {who} has the opposite direction, {mode!r}: change either"
            )
    shown = direction(metric)
    if shown is not None and shown != mode:
        emit("warning", f"{who} treats a {_WORDS[mode]} {metric!r} as better; is that a mistake?")


class BridgeValidations:
    """Metrics of validations at the present step, and the saves that they make due."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        manager: CheckpointManager,
        agree: Agree,
        *,
        resumed: Checkpoint | None,
        validates: bool,
    ) -> None:
        """Read the metrics of the checkpoints that the run goes on from, and those before.

        All ranks call it, and the leader reads. `validates`: whether the trainer validates at all.
        Until it has done so once, no warning says that a rule's metric is missing.
        """
        self._manager, self._agree = manager, agree
        self._best = BestSaves(best_rules(checkpoints))
        self._step, self._metrics = -1, dict[str, float]()
        self._was_within = False
        """Whether a validation was within the present step."""
        self._begun: list[PendingSave] = []
        """Saves whose outcome is not known yet."""
        self._awaits_first = validates
        if validates:
            manager.expect_metrics()
        if self._best and resumed is not None:
            what = "reading the metrics of earlier checkpoints"
            known = run_on_leader(
                agree, what, lambda: _read_earlier_metrics(checkpoints, resumed.step)
            )
            self._best.set_known_metrics(known or {})  # the leader decides for all

    @property
    def are_watched(self) -> bool:
        """Whether a rule `Best` looks at metrics."""
        return bool(self._best)

    def ended(self, step: int | None, metrics: Mapping[str, float]) -> None:
        """Note the end of a validation of the weights at `step`.

        None: it was within a step, where nothing can be saved.
        """
        self._was_within |= step is None
        if step is not None:
            before = self._metrics if step == self._step else {}
            self._step, self._metrics = step, {**before, **self._best.select_metrics(metrics)}

    def maybe_save(
        self,
        step: int,
        *,
        events: Sequence[Event],
        metrics: Mapping[str, float],
        wanted: Due | None = None,
        **counters: Any,
    ) -> None:
        """Save what is due by the manager's policy, by a rule `Best`, or because it is `wanted`."""
        happened, dues = [*events], [] if wanted is None else [wanted]
        if self.has_validation(step):
            happened.append("evaluation")
            dues += self._find_due_saves(step)
        pending = self._manager.maybe_save(
            step, metrics=metrics, event=happened, wanted=together(dues), **counters
        )
        if self._step == step and self._awaits_first:
            self._awaits_first = False
            self._manager.expect_metrics(step)
        self._step, self._was_within = -1, False
        if self._best and pending is not None and not isinstance(pending.failure(), SaveSkipped):
            self._best.begun(step, metrics)
            self._begun.append(pending)

    def has_validation(self, step: int) -> bool:
        """Whether a validation was at this step or within it, and no call of `maybe_save` since."""
        return self._was_within or self._step == step

    def _find_due_saves(self, step: int) -> list[Due]:
        if not self._best or step != self._step:
            return []
        self._forget_unhealthy()
        due = self._best.save_for(self._agree(self._best.keeping(step, self._metrics)))
        return [] if due is None else [due]

    def _forget_unhealthy(self) -> None:
        ended = [pending for pending in self._begun if pending.done()]
        self._begun = [pending for pending in self._begun if pending not in ended]
        for pending in ended:
            if pending.failure() is not None or pending.committed.result().unhealthy:
                self._best.forget_save(pending.step)


def _read_earlier_metrics(checkpoints: Checkpoints, step: int) -> dict[int, Mapping[str, float]]:
    assert checkpoints.root is not None, "a bridge needs a root"
    catalog = catalog_of(checkpoints.root, Emitter(()), checkpoints.encrypt)
    return metrics_by_step(catalog.lineage_entries(opens_all=False), step)
