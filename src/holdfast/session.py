"""`Session`: the parts of one manager, built from its options, and how they end together.

`save_controller` and `load_controller` share them. `finish` ends saves and uploads before it
releases the run, to record that nothing is in flight. `count_calls` counts the calls that all ranks
make alike (decision 0035), also those that raise on one rank alone, as for a wrong argument.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from holdfast.checkpoints import Checkpoints, StateHooks
from holdfast.checkpoints import best_rules as best_saves_of
from holdfast.control import exits
from holdfast.control.external_events import make_external_events
from holdfast.control.reporter import commands_of
from holdfast.control.save_requests import Requests
from holdfast.control.stop import Stop
from holdfast.encryption.messages import encrypted
from holdfast.errors import HoldfastError, ManagerUnusable, UnsupportedState, UsageError
from holdfast.events import Emitter
from holdfast.format.manifest import WatchedMetric
from holdfast.launched import memory_folder
from holdfast.loading.distributed import make_applier
from holdfast.maintenance.housekeeping import IntervalMeasurements, PostSaveTasks
from holdfast.maintenance.preflight import FirstSaveChecks, probe_as_follower
from holdfast.ownership.owner import left_s
from holdfast.ownership.process import liveness, this_process
from holdfast.ownership.tiered_catalog import TieredCatalog, catalog_of
from holdfast.ownership.tiered_options import HostTiers, Tiered, TierRules
from holdfast.policy.clock import Time, parse
from holdfast.policy.naming import compile_label
from holdfast.policy.rules import best_rules
from holdfast.policy.schedule import SaveSchedule, policy_of
from holdfast.ranks.chosen import GroupAlarm, coordinator_of
from holdfast.ranks.coordinator import Coordinator, Processes
from holdfast.replication.mirror import make_ownership
from holdfast.saving.compression import Compressing, resolve_compress
from holdfast.saving.distributed import DistributedSaves
from holdfast.saving.probe import ProbeResult
from holdfast.saving.progress_counters import Counters, ProgressClock
from holdfast.saving.saver import Saver
from holdfast.saving.script_warnings import ScriptWarnings
from holdfast.saving.settings_history import SettingsHistory, as_text
from holdfast.saving.step_boundary import StepBoundary
from holdfast.saving.validated import ValidatedSaves
from holdfast.staging.overlap import Overlap
from holdfast.staging.stage import Stager
from holdfast.state.capture.capture import Captured, Capturer
from holdfast.state.capture.edits import edited
from holdfast.state.capture.lacking import count_slots, find_unsavable_leaves
from holdfast.state.components import (
    RNG,
    check_state,
    refuse_other_sharding,
    take_per_rank_marks,
    unwrap_accelerate,
)
from holdfast.threads.buffers import collector_paused

if TYPE_CHECKING:
    from holdfast.loading.hosts import HostRecords
    from holdfast.loading.staged_blocks import StagedBlocks
    from holdfast.replication.hosts import HostOrders
    from holdfast.saving.partner_copies import PartnerCopies

_UPLOADS_END_S = 6.0
"""Time that a stop's grace keeps for ending the uploads under way, and for releasing the run."""
_OMITTED = (
    "Convert it by holdfast.Attributes.of(getter, setter), or keep it out of the state. If the "
    "script makes it anew, let StateHooks(edit_save=…) leave it out of each save (docs/saving.md)"
)

NEVER_QUIET = (0, 0.0)


class Session:
    """Parts of one manager, from its construction to its end.

    Methods run in the training thread unless they name another one.
    """

    records: HostRecords | None = None
    """What the hosts have, if each has a disk."""
    _orders: HostOrders | None = None
    _copies: PartnerCopies | None = None

    def __init__(
        self,
        root: Any,
        options: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        max_duration: str | Time | None,
        on_failure: Literal["raise", "warn"],
        hooks: StateHooks | None,
        stop: Stop | None,
        counters: Counters | None,
        config: Mapping[str, object] | None,
        ranks: Coordinator | Literal["group"] | None,
    ) -> None:
        """Build the parts; `options` are those of `Checkpoints`, unless `root` is one."""
        state, per_rank = take_per_rank_marks(state)
        check_state(state)
        refuse_other_sharding(state)
        self.state = state = unwrap_accelerate(state)
        self.hooks = hooks if hooks is not None else StateHooks()
        self._judged: object = None
        if self.hooks.edit_save is None:  # else the first `maybe_save` looks at what it leaves
            self.expect_savable()
        checkpoints = Checkpoints.of(root, options)
        if checkpoints.root is None:
            raise UsageError("root=None: a CheckpointManager needs a root to save in")
        rules = TierRules.combine_rules(
            checkpoints.root, checkpoints.keep, checkpoints.savers, {*state, RNG}
        )
        compressions = resolve_compress(checkpoints.compress, {*state, RNG})
        self.emit = Emitter((*checkpoints.sinks, *commands_of(checkpoints.on_commit)))
        compressing = Compressing(compressions, self.emit)
        length = None if max_duration is None else parse(max_duration, what="max_duration")
        self._join_ranks(ranks, checkpoints)
        is_shared = self.ranks.world_size > 1
        self.schedule = SaveSchedule(
            checkpoints.every, checkpoints.savers, max_duration=length, is_shared=is_shared
        )
        self.catalog = catalog_of(checkpoints.root, self.emit, checkpoints.encrypt)
        self.store = self.catalog.store
        self.capturer = Capturer(
            state,
            records_frozen=checkpoints.frozen is not None,
            is_shared=is_shared,
            per_rank=per_rank,
            is_edited=self.hooks.edit_save is not None,
        )
        self.refuses_existing = checkpoints.on_existing == "error"
        self.raises_failures = on_failure == "raise"
        self.label = compile_label(checkpoints.label, run_name=checkpoints.run_name)
        self._exit_timeout_s = checkpoints.exit_timeout_s
        self.stop = stop
        self._own_root(checkpoints, rules)
        self.applier = make_applier(
            self.ranks,
            self.store,
            self.owner,
            self.emit,
            timeout_s=checkpoints.save_timeout_s,
            broadcasts=checkpoints.broadcast,
            records=self.records,
        )
        self._make_saves(checkpoints, rules, compressing)
        self.clock = ProgressClock(self.catalog, self.schedule, counters, self.emit)
        self.history = SettingsHistory(config, world_size=self.ranks.world_size)
        self.warnings = ScriptWarnings(
            self.store.url, state, self.emit, is_leader=self.ranks.is_leader
        )
        self.boundary = StepBoundary(state, self.emit)
        self._pid = os.getpid()
        self.is_closed = False
        self.is_unused = True
        """Whether this manager has neither loaded nor saved, so that a resume may load in place."""
        self.quiet = NEVER_QUIET
        """Step, and seconds of the monotonic clock, until which `maybe_save` is a no-op."""
        self.untrained: tuple[int, tuple[str, ...]] = (0, ())
        """The step that was resumed, and the settings that have changed since its save."""
        exits.register(self)

    def _join_ranks(
        self, ranks: Coordinator | Literal["group"] | None, checkpoints: Checkpoints
    ) -> None:
        processes = Processes(own=this_process(), has_ended=lambda one: liveness(one) == "dead")
        self.ranks = encrypted(coordinator_of(ranks, self.emit, processes), checkpoints.encrypt)
        self._group_alarm = GroupAlarm(ranks, self.emit)
        self._shares_ranks = isinstance(ranks, Coordinator)
        if not self.ranks.is_leader:
            self.emit.drop_leader_sinks()

    def _probe_root(self, folder: str) -> ProbeResult:
        """Try the root as a follower, before the first save."""
        hosts = None if self.records is None else self.records.hosts
        return probe_as_follower(self.store, self.ranks.rank, self.emit, hosts, folder)

    def _own_root(self, checkpoints: Checkpoints, rules: TierRules) -> None:
        """Make what owns the run in its root, uploads it and cleans it up."""
        assert checkpoints.root is not None
        if isinstance(checkpoints.root, HostTiers):
            self._join_hosts(checkpoints.root, checkpoints.save_timeout_s)
        self.owner, self.uploads, self.housekeeper = make_ownership(
            checkpoints.root,
            self.catalog,
            rules,
            self.emit,
            takeover=checkpoints.takeover,
            replaces=checkpoints.on_existing == "replace",
            timeout_s=checkpoints.save_timeout_s,
            leads=self.ranks.is_leader,
            hosts=self._orders,
        )
        self.first_save = FirstSaveChecks(
            self.catalog, self.owner, rules, self.emit, preflight=checkpoints.preflight
        )
        self.measurements = IntervalMeasurements(
            self.store, self.owner, self.emit, self.schedule.auto
        )

    def _join_hosts(self, root: HostTiers, timeout_s: float) -> None:
        """Make what ranks share about the disks of their hosts, on all ranks at this point."""
        # A root with one disk needs none of this.
        from holdfast.loading.hosts import HostRecords
        from holdfast.ranks.hosts import OPTIONS_S, HostRounds
        from holdfast.replication.hosts import HostOrders
        from holdfast.saving.partner_copies import PartnerCopies

        assert isinstance(self.catalog, TieredCatalog), "there are two tiers"
        # Before the exchange of copies, which would wait for ranks without a partner.
        task = "comparing the options of HostTiers"
        rounds = HostRounds(self.ranks, self.emit, timeout_s=OPTIONS_S, task=task)
        remote = self.catalog.remote.store.url
        rounds.expect_equal_options({"remote": remote, "partner": str(root.partner)})
        self.records = HostRecords(self.ranks, self.catalog, self.emit, timeout_s=timeout_s)
        self._orders = HostOrders(self.ranks, self.records, timeout_s=timeout_s, emit=self.emit)
        if root.partner and self.ranks.world_size == 1:
            self.emit("warning", "partner=True: with one rank there are no second copies")
        elif root.partner:
            self._copies = PartnerCopies(self.ranks.exchange(timeout_s=timeout_s), timeout_s)

    def _make_saves(
        self, checkpoints: Checkpoints, rules: TierRules, compressing: Compressing
    ) -> None:
        """Make what decides on saves, among all ranks, and what makes them."""
        timeout_s, warn = checkpoints.save_timeout_s, partial(self.emit, "warning")
        root, replaces = checkpoints.root, checkpoints.on_existing == "replace"
        self.distributed = DistributedSaves(
            self.ranks,
            timeout_s=timeout_s,
            look=self._probe_root,
            warn=warn,
            may_wait=isinstance(root, Tiered) and root.options.max_lag is not None,
        )
        if self.records is not None:
            self.distributed.records, self.distributed.copies = self.records, self._copies
        self.events = make_external_events(
            self.ranks,
            Requests(self.store, emit=self.emit),
            self.stop,
            self._finish_at_stop,
            timeout_s=timeout_s,
            warn=warn,
        )
        self.overlap = Overlap(
            checkpoints.overlap or False, self.state, self.emit, timeout_s=timeout_s
        )
        self.memory_budget = checkpoints.memory_budget_nbytes
        self.saver = Saver(
            self.store,
            self.owner,
            self.emit,
            timeout_s=timeout_s,
            stager=self._make_stager(checkpoints),
            overlap=self.overlap,
            compressing=compressing,
            chores=PostSaveTasks(
                self,
                self.owner,
                self.housekeeper,
                self.uploads,
                self.measurements,
                leads=self.ranks.is_leader,
            ),
        )
        self.recorder = self.saver.recorder
        if self.ranks.is_leader:
            self.recorder.start_recording()
        self.validated = ValidatedSaves(
            best_saves_of(checkpoints),
            self.catalog,
            self.emit,
            is_alone=self.ranks.world_size == 1,
            is_leader=self.ranks.is_leader,
        )
        self.best = tuple(
            WatchedMetric(metric=rule.metric, mode=rule.mode)
            for rule in best_rules(rules.remote, rules.local)
        )
        self.policy = policy_of(
            rules.local,
            rules.remote if isinstance(root, Tiered) else None,
            self.schedule,
            replaces=replaces,
        )

    def _make_stager(self, checkpoints: Checkpoints) -> Stager:
        if memory_folder() is None:
            return Stager(memory_budget=self.memory_budget)
        from holdfast.saving.handover import stager_of

        return stager_of(
            self.store,
            resolve_compress(checkpoints.compress, {*self.state, RNG}),
            self.emit,
            memory_budget=self.memory_budget,
            is_encrypted=checkpoints.encrypt is not None,
        )

    def find_staged_blocks(self) -> StagedBlocks | None:
        """Find blocks that ended managers have left in the memory of `holdfast run`."""
        from holdfast.loading.staged_blocks import StagedBlocks

        return StagedBlocks.of_ended_managers(self.emit)

    @property
    def is_owner(self) -> bool:
        """Whether this process has claimed the run."""
        return self.owner.claim is not None and self.ranks.is_leader

    # The state

    def capture(self, only: Collection[str] | None) -> Captured:
        """Capture the state, or some components, as the hook `edit_save` leaves it."""
        with collector_paused():
            captured = self.capturer.capture(only)
            edit = self.hooks.edit_save
            return captured if edit is None else edited(captured, edit)

    def expect_savable(self) -> None:
        """Refuse what no save could hold, as soon as it exists."""
        now = count_slots(self.state)
        if now == self._judged:
            return
        self._judged = now
        found = find_unsavable_leaves(self.state)
        if found and self.hooks.edit_save is None:
            raise UnsupportedState(found, hint=_OMITTED)
        if found:
            self.capture(None)  # raises it, unless the hook omits all of that

    # The time between two calls

    def check_process(self) -> None:
        """Raise `ManagerUnusable` if the manager is closed, or is another process's."""
        if self.is_closed:
            raise ManagerUnusable(f"{self.store.url}: this manager is closed")
        if os.getpid() != self._pid:
            raise ManagerUnusable(
                f"{self.store.url}: this manager belongs to process {self._pid}; "
                "make a new manager after a fork"
            )
        self._group_alarm.warn_if_grouped()

    def check_usable(self) -> None:
        """Raise `ManagerUnusable` also if a failed load has left the state half loaded."""
        self.check_process()
        if (why := self.applier.half_loaded) is not None:
            raise ManagerUnusable(
                f"{self.store.url}: {why}; the state is half loaded. "
                "resume() or load() a whole checkpoint first"
            )

    def wait_for_save(self, limit_s: float, *, but_housekeeping: bool = False) -> None:
        """Wait for the save under way, whose error the caller raises next."""
        wait = self.saver.wait_for_arenas if but_housekeeping else self.saver.wait_until_idle
        wait(limit_s)
        exits.record_raised(self)

    def raise_failure(self) -> None:
        """Raise the error of the last save, unless `on_failure` is "warn"."""
        if self.raises_failures:
            self.saver.raise_failure()

    # The end

    def finish(self, timeout_s: float) -> None:
        """Finish saves and uploads, release the run, and raise the first error."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.warnings.of_untrained(*self.untrained, self.clock.newest_step)
        upload_failure: HoldfastError | None = None
        end = time.monotonic() + timeout_s
        try:
            self.saver.wait_until_idle(timeout_s)
            self.recorder.put_at_close(left_s(end))
        finally:
            self.is_closed = True
            self.events.stop_polling()
            exits.unregister(self)
            self.overlap.step_guard.remove_hook()
            self.boundary.stop_watching()
            try:
                free_s = math.inf if self.stop is None else self.stop.free_s
                self.uploads.finish_uploads(min(left_s(end), max(0.0, free_s - _UPLOADS_END_S)))
            except HoldfastError as error:
                upload_failure = error  # raised when everything is closed
            self.saver.close_threads()
            self.owner.release_run(left_s(end))
            if not self._shares_ranks:
                self.ranks.close()
            self.emit("closed", f"{self.store.url}: closed")
        self.saver.raise_failure()
        if upload_failure is not None:
            raise upload_failure

    def finish_at_exit(self) -> str | None:
        """Close at the interpreter's exit; return the outcome of a save that was under way.

        Raises:
            HoldfastError: a save failed or was given up, and its error was not raised yet.
        """
        if os.getpid() != self._pid:
            return None
        pending = self.saver.pending
        under_way = pending is not None and not pending.done()
        self.finish(self._exit_timeout_s)
        if pending is None or not under_way:
            return None
        return f"save of step {pending.step} was committed while the program ended"

    def _finish_at_stop(self, timeout_s: float) -> str:
        """Finish the save under way when a stop's time is over, in a thread of the stop."""
        outcome = self.saver.finish_at_stop(timeout_s)
        return "; ".join(text for text in (outcome, self.uploads.unsent()) if text)


F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["save", "maybe_save", "load"]
_ALIKE = frozenset(
    {
        "which",
        "unhealthy",
        "components",
        "strict",
        "rename",
        "edit",
        "in_place",
        "resize",
        "new",
        "without",
        "override",
        "required",
    }
)
"""Arguments of loads that must be equal on all ranks."""


def count_calls(kind: Kind) -> Callable[[F], F]:
    """Decorator of a manager's method: its calls count on this rank, also if they raise at once.

    A call while another thread is in one raises `ManagerUnusable`: both would claim the run.
    """

    def decorated(method: F) -> F:
        @wraps(method)
        def call(manager: Any, *args: Any, **named: Any) -> Any:
            calls: Calls | None = manager.calls
            if not manager.one_thread.acquire(blocking=False):
                raise ManagerUnusable(
                    f"{method.__name__}(): another thread is in a call of this manager. A manager "
                    "is for one thread at a time: put a lock around the calls, or save in one "
                    "thread"
                )
            try:
                if calls is None:
                    return method(manager, *args, **named)
                if kind != "load":
                    with calls.counted_call(kind):
                        return method(manager, *args, **named)
                with calls.counted_load(method, manager, *args, **named):
                    return method(manager, *args, **named)
            finally:
                manager.one_thread.release()

        return cast(F, call)

    return decorated


class Calls:
    """Counter of the calls of one manager with several ranks."""

    def __init__(self, session: Session) -> None:
        self._distributed = session.distributed
        self._events = session.events
        self._applier = session.applier
        self._edit_load = session.hooks.edit_load

    @contextmanager
    def counted_call(self, kind: Kind) -> Iterator[None]:
        """Count the call in the `with` block."""
        if kind == "save":
            with self._distributed.counted_save():
                yield
        else:
            with self._events.counted_call(), self._distributed.counted_call():
                yield

    @contextmanager
    def counted_load(self, method: Callable[..., Any], *args: Any, **named: Any) -> Iterator[None]:
        """Count the call of a method that loads, with these arguments, in the `with` block."""
        self._distributed.restart_count()
        arguments = _arguments(method, *args, **named)
        arguments["hooks.edit_load"] = _format_argument(self._edit_load)
        with self._applier.counted_load(method.__name__, arguments):
            yield


def _arguments(method: Callable[..., Any], *args: Any, **named: Any) -> dict[str, str]:
    """Return, as text, the arguments of a load that must be equal on all ranks.

    Ranks may choose different leaves, as each may have its own.
    """
    signature = inspect.signature(method)
    try:
        bound = signature.bind(*args, **named)
    except TypeError:
        return {}  # the call raises it
    bound.apply_defaults()
    return {
        name: _format_argument(value) for name, value in bound.arguments.items() if name in _ALIKE
    }


def _format_argument(value: object) -> str:
    if isinstance(value, list | tuple | set | frozenset):
        return repr(sorted(map(str, value)))
    if isinstance(value, Mapping):  # in any order, as of a comprehension over a set
        return repr(dict(sorted(value.items(), key=str)))
    return as_text(value) if callable(value) else repr(value)
