"""CheckpointManager: the object through which a training loop saves and resumes.

Owns the order of operations in the caller's thread (docs/design.md, section 4) and delegates the
rest to other modules. Knows nothing of bytes on disk.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

from holdfast.arguments import check_arguments, escaped
from holdfast.checkpoints import Checkpoints, OnExisting, StateHooks
from holdfast.checkpoints import best_rules as best_saves_of
from holdfast.control import exits
from holdfast.control.external_events import SaveRequests, outside_of
from holdfast.control.on_commit import CommitFunction, OnCommit, commands_of
from holdfast.control.save_requests import POLL_S, Requests
from holdfast.control.stop import Stop
from holdfast.encryption.messages import encrypted
from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    ManagerUnusable,
    NoCheckpoint,
    SaveSkipped,
    UnsupportedState,
    UploadFailed,
    UsageError,
)
from holdfast.events import Emitter, Sink, log_event
from holdfast.format.manifest import Timestamp, WatchedMetric
from holdfast.keys import Encryption
from holdfast.loading.distributed import applying
from holdfast.loading.optional_components import MissingComponentPolicy
from holdfast.loading.result import ScriptSettings, loaded
from holdfast.loading.search import (
    CheckpointSearch,
    LoadCandidate,
    LoadOptions,
    Rename,
    Search,
    Unhealthy,
)
from holdfast.maintenance.housekeeping import FollowingChores, IntervalMeasurements, PostSaveTasks
from holdfast.maintenance.preflight import FirstSaveChecks, probe_as_follower
from holdfast.ownership.annotations import Marking, checked_metrics, checked_reasons, checked_tags
from holdfast.ownership.owner import left_s
from holdfast.ownership.process import liveness, this_process
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.ownership.tiered_options import Tiered, TierRules
from holdfast.policy.clock import Time, parse
from holdfast.policy.naming import DEFAULT_LABEL, LabelFunction, compile_label
from holdfast.policy.rule import Rule, SaveClass
from holdfast.policy.rules import best_rules
from holdfast.policy.savers import Due, SavePolicy, SideSaver
from holdfast.policy.schedule import SaveSchedule, together
from holdfast.policy.texts import policy_of
from holdfast.policy.triggers import Event as TriggerEvent
from holdfast.policy.triggers import SaveFunction, Trigger
from holdfast.ranks.chosen import GroupAlarm, coordinator_of
from holdfast.ranks.coordinator import Coordinator, Processes
from holdfast.replication.mirror import ownership
from holdfast.results import Checkpoint, CheckpointList, PendingSave, build_checkpoint, parse_seen
from holdfast.root.catalog import Entry
from holdfast.saving.call_counter import Calls, count_calls
from holdfast.saving.compression import Compress, Compressing, resolve_compress
from holdfast.saving.distributed import DistributedSaves
from holdfast.saving.participants import SaveParticipant
from holdfast.saving.progress_counters import Counters, ProgressClock
from holdfast.saving.save import SaveRequest
from holdfast.saving.saver import Saver
from holdfast.saving.script_warnings import ScriptWarnings
from holdfast.saving.settings_history import SettingsHistory, differences, numerics
from holdfast.saving.step_boundary import StepBoundary
from holdfast.saving.validated import ValidatedSaves
from holdfast.staging.device import refuse_capture
from holdfast.staging.overlap import Mode, Overlap
from holdfast.state.capture.capture import Captured, Capturer
from holdfast.state.capture.edits import Edit, edited
from holdfast.state.capture.refusals import refusals, slots_stamp
from holdfast.state.components import RNG, check_state, marked, refuse_fsdp1, unwrapped
from holdfast.state.modules import is_loaded
from holdfast.state.patterns import convert_names
from holdfast.store.base import Store
from holdfast.threads.buffers import collector_paused
from holdfast.version import environment

_UPLOADS_END_S = 6.0
"""Time that a stop's grace keeps for ending the uploads under way, and for releasing the run."""
_OMITTED = (
    "Keep it out of the state, or, if the script makes it anew, let StateHooks(edit_save=…) leave "
    "it out of each save (docs/saving.md)"
)
_NEVER_QUIET = (0, 0.0)  # (step, monotonic seconds) until which `maybe_save` is a no-op


class CheckpointManager(Marking):
    """Saves and resumes the state of one run.

    Args:
        root: where this run's checkpoints live: a path, a URL, a Store, or two of them as `Tiered`.
            Or a `Checkpoints`, which has a root and options; those are then not given here.
        state: the named components: modules, optimizers, schedulers, generators, anything with
            `state_dict` and `load_state_dict`, dicts and lists of plain values and tensors.
            Generator states of Python, NumPy and torch are added as `rng`. The first whole save
            warns of parameters that an optimizer steps and no component holds.
        every: when `maybe_save` saves: "500step", "30min", "auto", a trigger, a function, or a
            `SavePolicy` of permanent and ephemeral saves. None: never by itself.
        max_duration: how long the run is to be, for intervals such as "0.1dur".
        keep: what retention keeps of the whole states, as a rule or as on the command line
            ("last:3,best:loss"). None: everything.
        savers: further savers of some components, with intervals of their own; see `SideSaver`.
        on_existing: what a save does with older checkpoints of the same step, which exist after a
            rollback: "keep" them, "replace" them once the newer one is committed (pinned and
            tagged ones stay), or refuse the save with an "error".
        on_failure: what the saves after a failed one do: "raise" its error, or continue ("warn"),
            so that only an event and `PendingSave.wait` report it. The failure of the last save
            is raised by `wait` and `close` in either case.
        overlap: whether `save` returns before parameters and optimizer slots are copied. Call
            `fence` before they are changed other than by a torch optimizer's step
            (docs/saving.md); "check" also looks for such changes where torch does not count them.
            None: no.
        memory_budget: how much memory a save may take for its copy of the state, in bytes or as
            "256MiB". A larger state is staged in waves: `save` returns when the last wave was
            copied, with most of the state written. A load that is not in place then reads the
            checkpoint twice: to check it, and to load it. None: as much as the state has.
        compress: how files are compressed: "zstd", "lz4", "blosc2", a `Compression`, "auto" for
            what makes saves faster here, if anything does, or one of these for each component that
            is to be compressed (docs/compression.md).
        hooks: callbacks around saves and loads; see `StateHooks`.
        stop: the signals that end the run; `maybe_save` saves after one has arrived.
        encrypt: the keys that checkpoints are encrypted and read with (docs/encryption.md). None:
            they are not encrypted.
        counters: gives `epoch`, `cycle`, `samples` and `tokens` where a call does not.
        config: settings of the script by name, such as `vars(args)`. Checkpoints record them as
            text, and what a later life of the run has changed, which `holdfast log` shows.
        takeover: claim the run although another live process owns it.
        label: readable name of a checkpoint: a template, or a function of the Timestamp.
        run_name: what `{run_name}` in the label stands for.
        sinks: receivers of events; the default logs to the logger `holdfast`.
        on_commit: a command such as "notify {folder} {step}", a function of the `Checkpoint`, or
            an `OnCommit`: run in the background after each commit (docs/trackers.md).
        save_timeout_s: longest time to wait for one save, in seconds.
        exit_timeout_s: longest time that the interpreter's exit waits for a save under way.
        preflight: whether the first save checks space and permissions before it claims the run.
        broadcast: whether several ranks read once, in a load, what they share (docs/ranks.md).
        ranks: the ranks that save and load together (docs/ranks.md): those of torch's default
            process "group", if there is one; a `Coordinator`; or None, for this process alone.

    Use a manager in one process, from one thread at a time: otherwise saves and loads raise
    `ManagerUnusable`. Reading (`list`, `load`) claims nothing;
    `resume` and the first save claim the run.

    Raises:
        UsageError: an argument is wrong.
        UnsupportedState: something in `state` can never be saved; every path is listed.
    """

    @check_arguments(but=("every", "max_duration", "keep"))
    def __init__(
        self,
        root: str | os.PathLike[str] | Store | Tiered | Checkpoints,
        state: Mapping[str, Any],
        *,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None = None,
        max_duration: str | Time | None = None,
        keep: Rule | str | None = None,
        savers: Sequence[SideSaver] = (),
        on_existing: OnExisting = "keep",
        on_failure: Literal["raise", "warn"] = "raise",
        overlap: Mode | None = None,
        memory_budget: int | str | None = None,
        compress: Compress = None,
        hooks: StateHooks | None = None,
        stop: Stop | None = None,
        encrypt: Encryption | None = None,
        counters: Counters | None = None,
        config: Mapping[str, object] | None = None,
        takeover: bool = False,
        label: str | LabelFunction = DEFAULT_LABEL,
        run_name: str | None = None,
        sinks: Iterable[Sink] = (log_event,),
        on_commit: OnCommit | str | Sequence[str] | CommitFunction | None = None,
        save_timeout_s: float = 1800.0,
        exit_timeout_s: float = 600.0,
        preflight: bool = True,
        broadcast: bool = False,
        ranks: Coordinator | Literal["group"] | None = "group",
    ) -> None:
        state, per_rank = marked(state)
        check_state(state)
        refuse_fsdp1(state)
        self.state = state = unwrapped(state)
        self._hooks = hooks if hooks is not None else StateHooks()
        self._judged: object = None
        """Stamp of the optimizer slots that were last looked at."""
        if self._hooks.edit_save is None:  # else the first `maybe_save` looks at what it leaves
            self._expect_savable()
        options = {
            "every": every,
            "keep": keep,
            "savers": savers,
            "on_existing": on_existing,
            "overlap": overlap,
            "memory_budget": memory_budget,
            "compress": compress,
            "encrypt": encrypt,
            "takeover": takeover,
            "label": label,
            "run_name": run_name,
            "sinks": sinks,
            "on_commit": on_commit,
            "save_timeout_s": save_timeout_s,
            "exit_timeout_s": exit_timeout_s,
            "preflight": preflight,
            "broadcast": broadcast,
        }
        checkpoints = Checkpoints.of(root, options)
        if checkpoints.root is None:
            raise UsageError("root=None: a CheckpointManager needs a root to save in")
        rules = TierRules.combine_rules(
            checkpoints.root, checkpoints.keep, checkpoints.savers, {*state, RNG}
        )
        compressions = resolve_compress(checkpoints.compress, {*state, RNG})
        self._emit = Emitter((*checkpoints.sinks, *commands_of(checkpoints.on_commit)))
        length = None if max_duration is None else parse(max_duration, what="max_duration")
        processes = Processes(own=this_process(), has_ended=lambda one: liveness(one) == "dead")
        self._ranks = encrypted(coordinator_of(ranks, self._emit, processes), checkpoints.encrypt)
        self._group_alarm = GroupAlarm(ranks, self._emit)
        self._shares_ranks = isinstance(ranks, Coordinator)
        if not self._ranks.is_leader:
            self._emit.leave_reports()
        is_shared = self._ranks.world_size > 1
        self._schedule = SaveSchedule(
            checkpoints.every, checkpoints.savers, max_duration=length, is_shared=is_shared
        )
        self._catalog = catalog_of(checkpoints.root, self._emit, checkpoints.encrypt)
        self.store = self._catalog.store
        self._capturer = Capturer(
            state,
            is_shared=is_shared,
            per_rank=per_rank,
            is_edited=self._hooks.edit_save is not None,
        )
        self._refuses_existing = checkpoints.on_existing == "error"
        self._raises_failures = on_failure == "raise"
        self._label = compile_label(checkpoints.label, run_name=checkpoints.run_name)
        self._exit_timeout_s = checkpoints.exit_timeout_s
        replaces = checkpoints.on_existing == "replace"
        self._owner, self._uploads, self._housekeeper = ownership(
            checkpoints.root,
            self._catalog,
            rules,
            self._emit,
            takeover=checkpoints.takeover,
            replaces=replaces,
            timeout_s=checkpoints.save_timeout_s,
            leads=self._ranks.is_leader,
        )
        self._together = DistributedSaves(
            self._ranks,
            timeout_s=checkpoints.save_timeout_s,
            look=partial(probe_as_follower, self.store, self._ranks.rank, self._emit),
            warn=partial(self._emit, "warning"),
            may_wait=isinstance(checkpoints.root, Tiered)
            and checkpoints.root.options.max_lag is not None,
        )
        self._moments = ProgressClock(self._catalog, self._schedule, counters, self._emit)
        self._beginning = FirstSaveChecks(
            self._catalog, self._owner, rules, self._emit, preflight=checkpoints.preflight
        )
        self._applying = applying(
            self._ranks,
            self.store,
            self._owner,
            self._emit,
            timeout_s=checkpoints.save_timeout_s,
            broadcasts=checkpoints.broadcast,
        )
        self._tuning = IntervalMeasurements(
            self.store, self._owner, self._emit, self._schedule.auto
        )
        self._outside = outside_of(
            self._ranks,
            Requests(self.store, emit=self._emit),
            stop,
            self._finish_at_stop,
            timeout_s=checkpoints.save_timeout_s,
            warn=partial(self._emit, "warning"),
        )
        self._overlap = Overlap(
            checkpoints.overlap or False, state, self._emit, timeout_s=checkpoints.save_timeout_s
        )
        self._memory_budget = checkpoints.memory_budget_nbytes
        self._saver = Saver(
            self.store,
            self._owner,
            self._emit,
            timeout_s=checkpoints.save_timeout_s,
            memory_budget=self._memory_budget,
            overlap=self._overlap,
            compressing=Compressing(compressions, self._emit),
            chores=(PostSaveTasks if self._ranks.is_leader else FollowingChores)(
                self, self._owner, self._housekeeper, self._uploads, self._tuning
            ),
        )
        self.one_thread = threading.RLock()
        self.calls = Calls.make_counter(self._ranks, self._together, self._outside, self._applying)
        self._pid = os.getpid()
        self._closed = False
        self._is_unused = True
        """Whether this manager has neither loaded nor saved, so that a resume may load in place."""
        self._is_rollback = False
        self._untrained: tuple[int, tuple[str, ...]] = (0, ())
        """The step that was resumed, and the settings that have changed since its save."""
        self._newest: tuple[Due, int] | None = None
        """Last save of several ranks, and its step; it may have failed to begin on this one."""
        self._validated = ValidatedSaves(
            best_saves_of(checkpoints),
            self._catalog,
            self._emit,
            is_alone=not is_shared,
            is_leader=self._ranks.is_leader,
        )
        self._best = tuple(
            WatchedMetric(metric=rule.metric, mode=rule.mode)
            for rule in best_rules(rules.remote, rules.local)
        )
        self._policy = policy_of(
            rules.local,
            rules.remote if isinstance(checkpoints.root, Tiered) else None,
            self._schedule,
            replaces=replaces,
        )
        self._history = SettingsHistory(config, world_size=self._ranks.world_size)
        self._warnings = ScriptWarnings(self.store.url, state, self._emit)
        self._boundary = StepBoundary(state, self._emit)
        self._knows_exceptions = not self._schedule.asks_for("exception")
        """Whether the caller reports errors to `maybe_save`, or no trigger is for them."""
        self._stop = stop
        self._quiet = _NEVER_QUIET
        self._upload_error: HoldfastError | None = None
        """Error of uploads to raise once the save that met it has been begun."""
        exits.register(self)

    def __repr__(self) -> str:
        owning = "closed" if self._closed else "owns the run" if self.is_owner else "owns nothing"
        standing, pending = self._saver.standing, self._saver.pending
        at = "" if standing is None else f", at step {standing.step}"
        is_fine = pending is None or (pending.done() and pending.failure() is None)
        saving = "" if is_fine else f", {pending!r}"
        return f"<CheckpointManager of {self.store.url!r}: {owning}{at}{saving}>"

    # Saving

    @count_calls("save")
    @check_arguments()
    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Iterable[str] = (),
        epoch: int | None = None,
        cycle: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        components: Iterable[str] | None = None,
        reason: str = "manual",
        save_class: SaveClass = "permanent",
        wait: bool = False,
    ) -> PendingSave:
        """Save a checkpoint: copy the state now, and write it in the background.

        Returns when the state was copied (with `overlap`, all but parameters and optimizer slots).
        With `wait` returns when the checkpoint is committed, which is sooner than a `wait()`
        afterwards: writing begins beside the copy.
        `step` counts completed optimizer windows, `epoch` and `cycle` those that have ended;
        `samples` and `tokens` are totals of the run.
        `save_class` says whether later saves may replace it; retention obeys what was recorded.
        `components` names what to save (default: all); a run cannot resume from a part.
        Saving an unchanged state again at the step of the run's latest checkpoint returns that
        checkpoint and writes nothing.

        Raises:
            SaveFailed: an earlier background save failed, so this one was not begun; or, with
                `wait`, this one did not commit.
            OwnedElsewhere, Superseded: another process owns the run.
            UnsupportedState: something cannot be saved; every path is listed.
            PreflightFailed: the first save would fail; every problem is listed.
            DeadlineExceeded: the save before this one hangs.
            UsageError: a CUDA graph is being captured.
        """
        now = self._moments.now(step, epoch=epoch, cycle=cycle, samples=samples, tokens=tokens)
        only = None if components is None else self._check_components(components)
        due = Due(save_class, reason, components=only)
        pending = self._begin_save(now, due, metrics, tags=tags, is_awaited=wait)
        if wait and not isinstance(pending.failure(), SaveSkipped):
            pending.wait()
        self._raise_upload_error()
        return pending

    @count_calls("maybe_save")
    @check_arguments()
    def maybe_save(
        self,
        step: int,
        *,
        epoch: int | None = None,
        cycle: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        metrics: Mapping[str, float] | None = None,
        event: TriggerEvent | Sequence[TriggerEvent] = "step",
        vetoes: Collection[str] = (),
        wanted: Due | None = None,
    ) -> PendingSave | None:
        """Save if `every` or a saver is due, a signal has arrived, or a save was requested.

        Call it after each completed step. A step is also saved if a rule `Best` keeps the
        `metrics` that a validation has measured at it (docs/keeping.md). `event` is what has just
        happened, for triggers that look at more than steps; `vetoes` names what forbids ephemeral
        saves at present; `wanted` is saved in any case, together with what is due.

        Raises:
            SaveFailed: an earlier background save failed.
            UnsupportedState: an optimizer has made a slot that cannot be saved.
            UsageError: `every` counts something that is not given here, or a CUDA graph is being
                captured when a save is due.
        """
        self._quiet, self._is_unused = _NEVER_QUIET, False
        is_alone = self._ranks.world_size == 1
        if event == "start" and is_alone and any(map(is_loaded, self.state.values())):
            # Ranks would decide otherwise than each other if one loads and sends the weights.
            self._moments.loaded()
        now = self._moments.now(step, epoch=epoch, cycle=cycle, samples=samples, tokens=tokens)
        self._check_usable()
        self._expect_savable()
        if isinstance(event, str):
            self._warnings.of_setup(self._stop, has_interval=bool(self._schedule.policies))
            self._warnings.positions.note_first_step(step)
        pending = self._saver.pending
        if is_alone:
            if pending is not None and pending.failure() is not None:
                self._schedule.undo_failed_save()
            self._raise_failure()
        self._tuning.note_writing(pending is not None and not pending.done())
        self._knows_exceptions |= "exception" in ((event,) if isinstance(event, str) else event)
        events, asked = self._outside.collect_events(event, is_owner=self.is_owner)
        due: Due | None = None
        try:
            # Pass metrics unread: to read a tensor's value makes each step wait for the device.
            again = asked.failed
            if again is not None and self._newest and again.is_replaced_by(*self._newest):
                again = None
            best = None
            if isinstance(event, str) and self._validated:
                best = self._validated.find_due_save(now.step, metrics or {}, event)
            wishes = [wanted, best, asked.due, None if again is None else again.due]
            wanted = together([wish for wish in wishes if wish is not None])
            due = self._schedule.merge_due_saves(
                now, metrics or {}, events, vetoes=vetoes, wanted=wanted
            )
            if due is None and asked.is_needed:
                # The present step is saved already: the request gets that checkpoint, tags added.
                due = Due(self._schedule.asked_class(vetoes), "demand")
            self._together.know_due(due is not None)
            if self._ranks.is_leader and not is_alone:
                by_leader = self._schedule.due_by_leader(
                    now, metrics or {}, events, vetoes=vetoes, but=due
                )
                self._outside.propose_save(by_leader, pending, is_owner=self.is_owner)
            if due is None and best is None and isinstance(event, str):
                self._validated.not_due(now.step, metrics or {})
            if due is not None:
                is_last = "end" in events or "signal" in events
                pending = self._save_as_asked(asked, now, due, metrics, is_last=is_last)
        except BaseException as error:
            if is_alone or due is None:
                self._schedule.not_begun()
            else:
                self._count_as_begun(due, now)  # as the other ranks do, which save at this call
            self._outside.answer_with_error(asked, error)
            raise
        if due is not None:
            self._raise_upload_error()
            return pending
        if not is_alone:
            # Ranks learn of a failure at different steps, and the leader alone of that of an
            # upload. One that raised it in place of a save would count one save less than the
            # others.
            self._raise_failure()
            return None
        self._uploads.raise_failure()
        is_watching = isinstance(event, str) and bool(self._validated)
        if not is_watching and (pending is None or pending.done()):
            self._quiet = (self._schedule.quiet_until(now), time.monotonic() + POLL_S)
        return None

    def is_quiet(self, step: int) -> bool:
        """Whether `maybe_save(step)` would certainly be a no-op; a cheap check for short steps.

        No save is due by then or under way, no signal has arrived, and the store was checked for
        requests less than a second ago. Never with several ranks, which count the calls.
        """
        before_step, before_s = self._quiet
        return step < before_step and time.monotonic() < before_s and not self._outside.has_signal

    def wait(self, timeout_s: float | None = None, *, uploads: bool = True) -> None:
        """Block until all saves, uploads and housekeeping have ended; raise their errors.

        `uploads=False`: uploads to a remote tier are not waited for, so a save in the local tier
        counts as done; `close` waits for uploads within a limit of its own.

        Raises:
            SaveFailed: the background save failed.
            UploadFailed: an upload failed, and `on_upload_failure` is "raise".
            DeadlineExceeded: it takes longer than `timeout_s` (default: the save deadline).
        """
        self._check_process()
        limit_s = timeout_s if timeout_s is not None else self._saver.limit_s
        end = time.monotonic() + limit_s
        self._saver.wait_until_idle(limit_s)
        exits.record_raised(self)
        self._saver.raise_failure()
        if uploads:
            self._uploads.wait_for_uploads(max(end - time.monotonic(), 0))
            self._uploads.raise_failure()

    def fence(self) -> None:
        """Wait, with `overlap`, until parameters and optimizer slots may be changed.

        Steps of torch optimizers, `resume` and `load` wait by themselves. On CUDA the current
        stream waits, and the host does not: later work of the stream may change them.

        Raises:
            DeadlineExceeded: the copy of a save under way hangs.
        """
        self._overlap.step_guard.wait_before_change()

    # Loading

    @count_calls("load")
    @check_arguments()
    @collector_paused()
    def resume(
        self,
        which: str | int = "latest",
        *,
        unhealthy: Unhealthy = "avoid",
        seen: str | None = None,
        in_place: bool | None = None,
        new: Iterable[str] = (),
        without: Iterable[str] = (),
        override: Iterable[str] = (),
        required: bool = False,
        strict: bool = True,
    ) -> Checkpoint | None:
        """Claim the run and load its newest usable checkpoint; None if no whole state was saved.

        Checkpoints that are damaged or lack a component of the state are skipped, listed in
        `rejected` and kept; where only `rng` is missing there is a note. Those whose state was
        unhealthy are skipped too, unless no other is left or `unhealthy` is "accept". With another
        `which` the run is rolled back to that checkpoint, and later ones leave its lineage. `seen`
        is that of the newest `Checkpoint` that the caller knows of, kept elsewhere: the latest must
        be that one or a later one.

        `in_place` reads straight into the live tensors, each block once or while it is checked:
        sooner, and without memory for a second copy of the state. Checkpoints found damaged while
        reading are skipped too; but when no usable one is left, the state is mixed and the manager
        refuses to save it. By default it is True for the latest, as long as this manager has loaded
        and saved nothing and `maybe_save` was not called. Otherwise it is False: the state is
        replaced only after all of the checkpoint was read and checked.

        `new` names components of the state that the checkpoint lacks: they stay as they are.
        `without` names components that only the checkpoint has: they are not loaded. All others
        are loaded, and the run continues from there; `skip_notes` lists both.

        `strict=False` resumes with modules that have gained or lost parameters: new ones keep their
        initial values, and optimizers have no state for them; all others are resumed. A warning
        lists both kinds. Whole components are named in `new` or `without` instead.

        `override` names settings that take the script's value: options of optimizers, such as "lr"
        or "optimizer.param_groups.0.lr" of one group, and those of schedulers, such as
        "scheduler.total_steps". All others are the checkpoint's, and a warning names those that the
        script has changed (docs/loading.md).

        With `required`, having nothing to resume from is an error, and no new run is started.

        Raises:
            OwnedElsewhere: a live process owns the run.
            NoCheckpoint: nothing matches `which`, or `required` and there is no checkpoint.
            RolledBack: what was seen before is gone; nothing was claimed or changed.
            SealError: the newest is encrypted for other keys, or not encrypted.
            NoUsableCheckpoint: checkpoints exist, but none is both whole and usable.
            MismatchError: the checkpoint does not fit the live state; nothing was changed.
            FormatError: a checkpoint that was named explicitly is damaged.
            OpaqueLoadFailed: the state was replaced in part when something failed.
            UsageError: a CUDA graph is being captured, nothing has what `override` names, or it
                cannot be applied (the state is loaded then, and not saved), or the checkpoint has a
                component that `new` names, or lacks one that `without` names; or
                with `on_existing="error"` there are checkpoints of later steps.
        """
        self._check_process()
        refuse_capture("resume()")
        self._drain()
        reader, script = self._make_search(), ScriptSettings(self.state, override)
        if in_place is None:
            is_alone = self._ranks.world_size == 1
            in_place = is_alone and which == "latest" and self._is_unused
        options = LoadOptions(
            edit=self._hooks.edit_load,
            in_place=in_place,
            is_grown=not strict,
            sides=MissingComponentPolicy.from_arguments(
                self.state, new, without, self._hooks.one_sided
            ),
        )
        search = Search(
            reader,
            which,
            walks=True,
            options=options,
            unhealthy=unhealthy,
            seen=parse_seen(seen),
            refuse=partial(self._check_start, required=required),
        )
        found = self._applying.apply_checkpoint(search, claims=True)
        self._is_unused = found is None
        if found is not None:
            if not search.is_rollback:
                self._warnings.of_lost_steps(self._moments.unsaved, found.entry)
            replaced = self._continue_from(found, script, is_rollback=search.is_rollback)
            self._compare_lives(found.entry)
        else:
            self._log_fresh_start(script)
        self._saver.queue_claim_chores()
        self._warnings.of_workers()
        if found is None:
            return None
        self._warnings.of_lacks()
        self._emit(
            "resumed",
            f"resuming from step {found.entry.step}: {found.entry.folder}",
            step=found.entry.step,
            folder=found.entry.folder,
            rejected=reader.rejected,
        )
        return loaded(found, reader, (*replaced, *self._numeric_notes(found.entry)))

    @count_calls("load")
    @check_arguments()
    def start_new(self) -> None:
        """Claim the run and start a new one here, beside the checkpoints of the run before.

        Takes the place of `resume`. The state stays as it is. Earlier checkpoints stay, whatever
        `keep` says; `resume` and `"latest"` no longer find them, and `load` takes one by its
        folder's name. A script that always calls this starts from the beginning at each restart.

        Raises:
            OwnedElsewhere: a live process owns the run.
            UsageError: this manager has resumed, saved or loaded a whole state before; or with
                `on_existing="error"` there are checkpoints.
        """
        self._check_process()
        self._drain()
        if self._owner.claim is not None or self._saver.standing is not None:
            raise UsageError(
                f"{self.store.url}: start_new() comes before resume(), a load of the whole state "
                "and the first save; this manager has made one of these calls. Make a new manager"
            )
        search = Search(
            self._make_search(),
            None,
            walks=False,
            refuse=partial(self._check_start, required=False),
        )
        self._applying.apply_checkpoint(search, claims=True)
        self._log_fresh_start(ScriptSettings(self.state, ()))
        self._saver.queue_claim_chores()
        self._warnings.of_workers()

    @count_calls("load")
    @check_arguments()
    @collector_paused()
    def load(
        self,
        which: str | int = "latest",
        *,
        components: Iterable[str] | None = None,
        strict: bool = True,
        rename: Rename = None,
        include: Iterable[str] = (),
        skip: Iterable[str] = (),
        edit: Edit | None = None,
        verify: bool = True,
        in_place: bool = False,
        new: Iterable[str] = (),
        without: Iterable[str] = (),
        override: Iterable[str] = (),
    ) -> Checkpoint:
        """Load a checkpoint, or parts of it, into the live state. Does not claim the run.

        `components` names what to load (default: all); `include` and `skip` choose by paths and
        patterns (docs/loading.md), and what they leave out keeps its live value; `rename` maps
        stored paths to live ones; `edit` changes what is stored before it is compared with the
        live state, in the place of the hook `edit_load`. With `strict=False` missing and
        unexpected leaves are reported in `skip_notes` and a warning instead of raised. When this
        manager owns the run, the run continues from a full load. `in_place`, `new`, `without` and
        `override` as for `resume`: damage in place leaves the state mixed until a whole load
        succeeds.

        Raises:
            UsageError: an argument names nothing, or an edit is not possible.
            NoCheckpoint: no checkpoint matches `which`.
            FormatError: the checkpoint is damaged; names file and tensors.
            MismatchError: the checkpoint does not fit the live state; nothing was changed.
            OpaqueLoadFailed: the state was replaced in part when something failed.
            UsageError: a CUDA graph is being captured.
        """
        self._check_process()
        refuse_capture("load()")
        self._drain()
        options = LoadOptions(
            components=None if components is None else convert_names(components, "components"),
            strict=strict,
            rename=rename,
            include=convert_names(include, "include"),
            skip=convert_names(skip, "skip"),
            verify=verify,
            edit=edit if edit is not None else self._hooks.edit_load,
            in_place=in_place,
            sides=MissingComponentPolicy.from_arguments(
                self.state, new, without, self._hooks.one_sided
            ),
        )
        reader, script = self._make_search(), ScriptSettings(self.state, override)
        self._catalog.look_again()
        with ExitStack() as holding:
            is_read_late = in_place or self._memory_budget is not None
            reader.holding = holding if is_read_late or not self.is_owner else None
            search = Search(reader, which, walks=False, options=options)
            found = self._applying.apply_checkpoint(search, claims=False)
        assert found is not None, "what is named is there, or an error says why not"
        self._is_unused = False
        replaced = self._continue_from(found, script, is_rollback=search.is_rollback)
        self._emit(
            "loaded",
            f"loaded {found.entry.folder}",
            step=found.entry.step,
            folder=found.entry.folder,
        )
        return loaded(found, reader, (*replaced, *self._numeric_notes(found.entry)))

    def count_from(self, timestamp: Timestamp) -> None:
        """Set counters and training time from `timestamp`, for a state loaded from another root.

        Call it before the first save. Intervals continue from there, and no step counts as saved.
        """
        self._quiet = _NEVER_QUIET
        self._moments.count_from(timestamp)
        self._warnings.positions.start_counting(timestamp.step)

    @check_arguments()
    def expect_metrics(self, until: float = math.inf) -> None:
        """Say up to which step metrics that `keep` needs may be missing, as before a validation.

        Up to then no warning says that no checkpoint has them. `inf`: until the next call.
        """
        self._emit.first_metrics_at = until

    # Listing; pins and tags are in `Marking`

    def list(self) -> CheckpointList:
        """List all committed checkpoints, newest first."""
        self._catalog.look_again()
        entries = self._catalog.checkpoints()
        return CheckpointList(build_checkpoint(self._find_store(entry), entry) for entry in entries)

    @property
    def is_owner(self) -> bool:
        """Whether this manager has claimed the run."""
        return self._owner.claim is not None and self._ranks.is_leader

    # Ending

    def close(self) -> None:
        """Finish saves and uploads, and release the run cleanly. A second call is a no-op.

        Ends within `save_timeout_s` and a few seconds, also where the storage hangs; in a follower
        after twice that, if the leader may wait for uploads (`max_lag`). Uploads get at most
        `close_timeout_s` of `Tiered`, and end in time for the `grace` of a `Stop`.

        Raises:
            SaveFailed: a background save failed, and its error was not raised yet.
            UploadFailed: not all was uploaded in time, and `on_upload_failure` is "raise".
            DeadlineExceeded: a save hangs; it was given up.
        """
        self._finish_and_release(self._saver.limit_s)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._untrained = (0, ())  # the loop may have failed at its first step
        if self._moments.unsaved is not None and not self._knows_exceptions:
            self._warnings.of_exception(error, self._moments.unsaved)
        try:
            self.close()
        except HoldfastError as closing:
            # The caller must see the loop's own error; this one is only logged.
            self._emit("save_failed", f"while closing after {error!r}: {closing}")

    def finish_at_exit(self) -> str | None:
        """Close at the interpreter's exit; return the outcome of a save that was under way.

        Raises:
            HoldfastError: a save failed or was given up, and its error was not raised yet.
        """
        if os.getpid() != self._pid:
            return None
        pending = self._saver.pending
        under_way = pending is not None and not pending.done()
        self._finish_and_release(self._exit_timeout_s)
        if pending is None or not under_way:
            return None
        return f"save of step {pending.step} was committed while the program ended"

    def _finish_at_stop(self, timeout_s: float) -> str:
        """Finish the save under way when a stop's time is over, in a thread of the stop."""
        outcome = self._saver.finish_at_stop(timeout_s)
        return "; ".join(text for text in (outcome, self._uploads.unsent()) if text)

    # Steps of the methods above, in the caller's thread

    def _finish_and_release(self, timeout_s: float) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._warnings.of_untrained(*self._untrained, self._moments.newest_step)
        upload_failure: HoldfastError | None = None
        end = time.monotonic() + timeout_s
        try:
            self._saver.wait_until_idle(timeout_s)
        finally:
            self._closed = True
            self._outside.stop_polling()
            exits.unregister(self)
            self._overlap.step_guard.remove_hook()
            self._boundary.stop_watching()
            try:
                free_s = math.inf if self._stop is None else self._stop.free_s
                self._uploads.finish_uploads(min(left_s(end), max(0.0, free_s - _UPLOADS_END_S)))
            except HoldfastError as error:
                upload_failure = error  # raised when everything is closed
            self._saver.close_threads()
            self._owner.release_run(left_s(end))
            if not self._shares_ranks:
                self._ranks.close()
            self._emit("closed", f"{self.store.url}: closed")
        self._saver.raise_failure()
        if upload_failure is not None:
            raise upload_failure

    def _begin_save(
        self,
        now: Timestamp,
        due: Due,
        metrics: Mapping[str, float] | None = None,
        *,
        tags: Iterable[str] = (),
        is_awaited: bool = False,
        is_last: bool = False,
    ) -> PendingSave:
        self._quiet, self._is_unused = _NEVER_QUIET, False
        is_last = is_last or (self._stop is not None and self._stop.requested is not None)
        # Whatever fails from here on fails the save of all ranks, which count their saves alike.
        call = (due.save_class, now.epoch, now.cycle, now.samples, now.tokens)
        with self._together.start_joint_save(now.step, *call) as joint:
            try:
                given = checked_tags(tags)
                due = replace(due, tags=(*due.tags, *given))
            finally:
                if joint.world_size > 1:
                    self._count_as_begun(due, now)
            measured = checked_metrics(metrics)
            joint.note_arguments(given, measured, self._history.given)
            self._check_usable()
            refuse_capture("save()")
            try:
                hook = self._hooks.before_save
                unhealthy = checked_reasons(None if hook is None else hook(now, measured))
            except SaveSkipped as error:
                joint.report_failure(error, "before_save")
                self._emit("save_skipped", str(error), step=now.step)
                return PendingSave.skipped(now.step, due, error)
            if not is_last:
                self._wait_for_uploads(now, joint)
            pending = self._save_jointly(now, due, measured, unhealthy, joint, is_awaited)
            self._validated.began(pending, measured)
        pending.stall_s = time.perf_counter() - joint.began_s
        text = f"the save of step {now.step} stopped training for {pending.stall_s:.3f} s"
        self._emit("stalled", text, step=now.step, stall_s=pending.stall_s)
        if self._hooks.save_begun is not None:
            self._hooks.save_begun(pending)
        return pending

    def _wait_for_uploads(self, now: Timestamp, joint: SaveParticipant) -> None:
        """Wait while uploads lag too far behind.

        With one process an error of uploads is raised after the save (`_raise_upload_error`), as a
        remote tier that fails must not cost the local copy of a step. Several ranks raise it here.
        """
        try:
            self._uploads.raise_failure()
            self._uploads.expect_room(now, joint.announce_wait, self._is_stopping)
        except (UploadFailed, DeadlineExceeded) as error:
            if joint.world_size > 1:
                raise
            self._upload_error = error

    def _raise_upload_error(self) -> None:
        error, self._upload_error = self._upload_error, None
        if error is not None:
            raise error

    def _is_stopping(self) -> bool:
        return self._stop is not None and self._stop.received is not None

    def _count_as_begun(self, due: Due, now: Timestamp) -> None:
        """Record a save of several ranks, whether it can begin or not.

        Each rank learns of that at another moment, and all must find the same saves due afterwards.
        """
        self._schedule.began(due, now)
        self._newest = (due, now.step)

    def _save_jointly(
        self,
        now: Timestamp,
        due: Due,
        measured: Mapping[str, float],
        unhealthy: tuple[str, ...],
        joint: SaveParticipant,
        is_awaited: bool,
    ) -> PendingSave:
        # The previous save's arenas are needed; its housekeeping must end only for a preflight.
        self._drain(but_housekeeping=not self._beginning.preflight_due)
        if self._refuses_existing and self._ranks.is_leader:
            self._beginning.refuse_existing(now.step, self._saver.standing)
        captured = self._capture(due.components)
        captured_s = time.perf_counter() - joint.began_s
        self._beginning.compare_clocks(self._saver.standing)
        self._warnings.of_capture(captured, is_whole=due.components is None)
        if due.components is None:
            self._warnings.of_omitted(captured, self._boundary.stepped())
        unhealthy = (*unhealthy, *self._boundary.check_captured_step(captured, now.step))
        self._warnings.of_position(now.step)
        standing = self._saver.standing
        if standing is not None and standing.step == now.step:
            joint.set_known_checkpoint(standing.folder)
        joint.propose(captured)
        if self._ranks.is_leader:
            self._beginning.check_first_save(
                joint.estimate_size(captured),
                self._saver.standing,
                is_rollback=self._is_rollback,
                ask=joint.probe_followers,
            )
        part = joint.select_own_part(captured, self._owner)
        preparing = time.perf_counter()
        with collector_paused():
            staged = self._saver.prepare_save(part, is_awaited=is_awaited)
        timings = {"capture_s": captured_s, "stage_s": time.perf_counter() - preparing}
        claim = self._owner.claim
        assert claim is not None, "the beginning has claimed the run"
        request = SaveRequest(
            label=self._label(now),
            claim=claim,
            sequence=self._owner.next_sequence(),
            timestamp=now,
            save_class=due.save_class,
            reason=escaped(due.reason),
            tags=due.tags,
            metrics=measured,
            numerics=numerics(self._ranks.world_size),
            environment=environment(),
            savers=self._schedule.savers_of(due),
            left_out=tuple(n for n in (*self.state, RNG) if n not in captured.components),
            unhealthy=unhealthy,
            best=self._best,
            config=self._history.config_of(self.state),
            changes=self._history.changes,
            policy=self._policy,
            timings=timings,
        )
        if joint.world_size == 1:
            self._schedule.began(due, now)
        self._moments.unsaved = None
        # Freeing its many tensors offers the GIL to other threads; harmless while none is awake.
        # Later, another thread may keep the GIL, and the core, for milliseconds.
        del captured, part
        return self._saver.start_save(staged, request, due, joint)

    def _check_components(self, components: Iterable[str]) -> tuple[str, ...]:
        names = (components,) if isinstance(components, str) else tuple(components)
        unknown = [name for name in names if name not in {*self.state, RNG}]
        if unknown or not names:
            raise UsageError(f"components={components!r}: must be some of {[*self.state, RNG]}")
        return names

    def _capture(self, only: Collection[str] | None) -> Captured:
        with collector_paused():
            captured = self._capturer.capture(only)
            edit = self._hooks.edit_save
            return captured if edit is None else edited(captured, edit)

    def _save_as_asked(
        self,
        asked: SaveRequests,
        now: Timestamp,
        due: Due,
        metrics: Mapping[str, float] | None,
        *,
        is_last: bool,
    ) -> PendingSave:
        pending = self._begin_save(now, asked.added_to(due), metrics, is_last=is_last)
        self._outside.answer_when_saved(asked, pending.committed)
        return pending

    def _check_process(self) -> None:
        if self._closed:
            raise ManagerUnusable(f"{self.store.url}: this manager is closed")
        if os.getpid() != self._pid:
            raise ManagerUnusable(
                f"{self.store.url}: this manager belongs to process {self._pid}; "
                "make one of your own after a fork"
            )
        self._group_alarm.warn_if_grouped()

    def _expect_savable(self) -> None:
        """Refuse what no save could hold, as soon as it exists."""
        now = slots_stamp(self.state)
        if now == self._judged:
            return
        self._judged = now
        found = refusals(self.state)
        if found and self._hooks.edit_save is None:
            raise UnsupportedState(found, hint=_OMITTED)
        if found:
            self._capture(None)  # raises it, unless the hook omits all of that

    def _check_usable(self) -> None:
        self._check_process()
        self._applying.expect_whole()

    def _drain(self, *, but_housekeeping: bool = False) -> None:
        """Wait for the previous save, and raise its error."""
        wait = self._saver.wait_for_arenas if but_housekeeping else self._saver.wait_until_idle
        wait(self._saver.limit_s)
        exits.record_raised(self)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._raises_failures:
            self._saver.raise_failure()

    def _check_start(self, entry: Entry | None, *, required: bool) -> None:
        """Raise an error if the run must not start from `entry`, or anew without one."""
        if required and entry is None:
            raise NoCheckpoint(
                f"{self.store.url}: a checkpoint is required, and there is none to resume from. "
                "Check the root"
            )
        if self._refuses_existing:
            self._beginning.refuse_later(entry)

    def _log_fresh_start(self, script: ScriptSettings) -> None:
        """Log the start of a run that loaded nothing."""
        self._history.origins = script.origins()
        self._beginning.look_around()
        self._emit("started", f"starting a new run in {self.store.url}")

    def _find_store(self, entry: Entry) -> Store:
        return self._catalog.find_store(entry.folder)

    def _make_search(self) -> CheckpointSearch:
        return self._applying.make_search(
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            catalog=self._catalog,
            state=self.state,
            threads=self._saver.threads,
            timeout_s=self._saver.timeout_s,
            memory_budget=self._memory_budget,
            is_mixed=self._applying.half_loaded is not None,
        )

    def _compare_lives(self, entry: Entry) -> None:
        """Log the settings that have changed since the process that saved the checkpoint."""
        claim = self._owner.claim
        if claim is None or not self._ranks.is_leader:
            return
        self._untrained = (entry.step, self._history.changed_settings(entry.manifest))
        what = self._history.compare_with_base(entry.manifest, claim.epoch)
        if what:
            text = "\n".join(f"  {line}" for line in what)
            self._emit("changed", f"changed since {entry.folder}:\n{text}", step=entry.step)

    def _continue_from(
        self, found: LoadCandidate, script: ScriptSettings, *, is_rollback: bool
    ) -> tuple[str, ...]:
        """Log notes of a successful load; after a full load, continue the run from it.

        Returns the notes on settings that the script and the checkpoint have otherwise.
        """
        try:
            replaced, origins = script.restore_settings(found)
        except BaseException as error:
            self._applying.half_loaded = f"{found.entry.folder} was loaded without override"
            if not isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{error}\n{found.entry.folder} is loaded without override. Before a save, load "
                "again: with another override, or without one"
            ) from error
        self._boundary.restart_after_load()
        self._warnings.loaded()
        prepared = found.prepared
        for note in (*found.one_sided.skip_notes, *prepared.lost, *prepared.tolerated, *replaced):
            self._emit("warning", f"{found.entry.folder}: {note}", folder=found.entry.folder)
        if not found.options.is_full:
            return replaced
        self._history.origins = origins
        self._quiet = _NEVER_QUIET
        self._saver.standing, self._is_rollback = found.entry, is_rollback
        self._moments.continue_from_entry(found.entry)
        self._validated.start_from_checkpoint(found.entry)
        self._warnings.positions.start_counting(found.entry.step)
        if found.is_proof:
            self._housekeeper.trust(found.entry)
        return replaced

    def _numeric_notes(self, entry: Entry) -> tuple[str, ...]:
        return differences(entry.manifest.numerics, numerics(self._ranks.world_size))
