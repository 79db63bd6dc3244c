"""CheckpointManager: the object that a training loop holds.

It owns the order of things in the caller's thread (docs/design.md, section 4) and hands the rest
to the engine. It knows nothing of bytes on disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from holdfast.care.housekeeping import Housekeeper
from holdfast.care.preflight import preflight as run_preflight
from holdfast.engine import exits
from holdfast.engine.catalog import Catalog, Entry
from holdfast.engine.checkpoint import Checkpoint, PendingSave, describe
from holdfast.engine.claim import Choice
from holdfast.engine.fingerprint import differences, environment, numerics
from holdfast.engine.notes import annotate, checked_metrics, checked_tags
from holdfast.engine.owner import Ownership
from holdfast.engine.pause import collector_paused
from holdfast.engine.resume import Candidate, LoadOptions, Reader, Rename, Search, Settled
from holdfast.engine.save import SaveRequest
from holdfast.engine.saver import Saver
from holdfast.errors import (
    FormatError,
    HoldfastError,
    ManagerUnusable,
    MismatchError,
    UsageError,
)
from holdfast.events import Emitter, Sink, log_event
from holdfast.format.manifest import Timestamp
from holdfast.policy.classes import SaveClass, Saved, SavePolicy
from holdfast.policy.clock import Time, parse
from holdfast.policy.naming import DEFAULT_LABEL, LabelFunction, compile_label
from holdfast.policy.retention import All, Rule, quota
from holdfast.policy.rules import named_components
from holdfast.policy.triggers import Event as TriggerEvent
from holdfast.policy.triggers import SaveFunction, Trigger
from holdfast.state.capture import Captured, capture, check_state
from holdfast.store import open_store
from holdfast.store.base import Store


class CheckpointManager:
    """Saves and resumes the state of one run.

    Args:
        root: where this run's checkpoints live: a path, or a Store.
        state: the named components: modules, optimizers, schedulers, generators, anything with
            `state_dict` and `load_state_dict`, dicts and lists of plain values and tensors.
            Generator states of Python, NumPy and torch are added as `rng`.
        every: when `maybe_save` saves: "500step", "30min", a trigger, a function, or a
            `SavePolicy` of permanent and ephemeral saves. None: never by itself.
        max_duration: how long the run is to be, for intervals such as "0.1dur".
        keep: what retention keeps. None: everything.
        takeover: claim the run although another live process owns it.
        label: name for people, a template or a function of the Timestamp.
        run_name: what `{run_name}` in the label stands for.
        sinks: receivers of events; the default logs to the logger `holdfast`.
        save_timeout_s: longest time to wait for one save, in seconds.
        exit_timeout_s: longest time that the interpreter's exit waits for a save under way.
        preflight: whether the first save checks space and rights before anything is claimed.

    One process uses a manager, from one thread. Reading (`list`, `load`) owns nothing; `resume`
    and the first save claim the run.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        state: Mapping[str, Any],
        *,
        every: str | Time | Trigger | SaveFunction | SavePolicy | None = None,
        max_duration: str | Time | None = None,
        keep: Rule | None = None,
        takeover: bool = False,
        label: str | LabelFunction = DEFAULT_LABEL,
        run_name: str | None = None,
        sinks: Sequence[Sink] = (log_event,),
        save_timeout_s: float = 1800.0,
        exit_timeout_s: float = 600.0,
        preflight: bool = True,
    ) -> None:
        check_state(state)
        if keep is not None and not isinstance(keep, Rule):
            raise UsageError(f"keep={keep!r} must be a rule such as Last(3), or None for all")
        unknown = named_components(keep if keep is not None else All()) - {*state, "rng"}
        if unknown:
            raise UsageError(f"keep={keep}: the state has no {', '.join(sorted(unknown))} to drop")
        for name, value in (("save_timeout_s", save_timeout_s), ("exit_timeout_s", exit_timeout_s)):
            if not value > 0:
                raise UsageError(f"{name}={value!r} must be a positive number of seconds")
        self.store = open_store(root)
        self.state = state
        self._every = _policy(every, max_duration)
        self._keep: Rule = keep if keep is not None else All()
        self._label = compile_label(label, run_name=run_name)
        self._exit_timeout_s = exit_timeout_s
        self._emit = Emitter(tuple(sinks))
        self._catalog = Catalog(self.store)
        self._owner = Ownership(self.store, takeover=takeover, emit=self._emit)
        self._housekeeper = Housekeeper(self.store, self._owner, self._keep, self._emit)
        self._saver = Saver(
            self.store,
            self._owner,
            self._emit,
            timeout_s=save_timeout_s,
            after_commit=self._housekeeper.after_commit,
            on_failure=lambda: exits.hold(self),
        )
        self._pid = os.getpid()
        self._closed = False
        self._half_loaded: str | None = None
        self._is_rollback = False
        self._preflight_due = preflight
        self._not_saved_due = True
        self._previous: Timestamp | None = None
        self._saved = Saved()
        self._wall_before_s = 0.0
        self._started = time.monotonic()
        exits.register(self)

    # Saving

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Iterable[str] = (),
        epoch: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        reason: str = "manual",
        save_class: SaveClass = "permanent",
    ) -> PendingSave:
        """Save now. Returns when the state was copied; the rest happens in the background.

        `step` counts completed optimizer windows; `samples` and `tokens` are totals of the run.
        `save_class` says whether later saves may replace it; retention obeys what was recorded.
        Saving again at the step of the checkpoint on which the run stands, with not one byte
        changed, gives that checkpoint and writes nothing.

        Raises:
            SaveFailed: an earlier background save failed; this one was not begun.
            OwnedElsewhere, Superseded: another process owns the run.
            UnsupportedState: something cannot be saved; every path is listed.
            PreflightFailed: the first save would fail; every problem is listed.
            DeadlineExceeded: the save before this one hangs.
        """
        began = time.perf_counter()
        now = self._now(step, epoch, samples, tokens)
        checked, measured = checked_tags(tags), checked_metrics(metrics)
        self._check_usable()
        self._wait_for_the_save_before()
        with collector_paused():
            captured = capture(self.state)
        captured_s = time.perf_counter() - began
        self._announce_not_saved(captured)
        self._ensure_claimed(captured)
        staging = time.perf_counter()
        with collector_paused():
            staged = self._saver.stage(captured)
        timings = {"capture_s": captured_s, "stage_s": time.perf_counter() - staging}
        request = self._request(now, reason, save_class, checked, measured, timings)
        self._saved = self._saved.plus(save_class, now)
        pending = self._saver.start(staged, request)
        pending.stall_s = time.perf_counter() - began
        return pending

    def maybe_save(
        self,
        step: int,
        *,
        epoch: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        metrics: Mapping[str, float] | None = None,
        event: TriggerEvent = "step",
    ) -> PendingSave | None:
        """Save when `every` says so. Call it after each completed step.

        `event` says what has just happened, for triggers that look at more than steps.

        Raises:
            SaveFailed: an earlier background save failed.
            UsageError: `every` counts something that is not given here.
        """
        now = self._now(step, epoch, samples, tokens)
        self._check_usable()
        self._saver.raise_failure()
        if self._every is None:
            return None
        # As they are: to read a tensor's value would make every step wait for the device.
        due = self._every.decide(self._previous, self._saved, now, metrics or {}, event)
        self._previous = now
        if due is None:
            return None
        return self.save(
            step,
            epoch=epoch,
            samples=samples,
            tokens=tokens,
            metrics=metrics,
            reason=due.reason,
            save_class=due.save_class,
        )

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until no save and no housekeeping is under way; raise what went wrong.

        Raises:
            SaveFailed: the background save failed.
            DeadlineExceeded: it takes longer than `timeout_s` (default: the save deadline).
        """
        self._check_process()
        self._saver.settle(timeout_s if timeout_s is not None else self._saver.timeout_s)
        self._saver.raise_failure()

    # Loading

    def resume(self, which: str | int = "latest") -> Checkpoint | None:
        """Claim the run and apply its newest usable checkpoint; None when nothing was saved yet.

        Damaged ones are passed over, listed in `rejected` and kept. With another `which` the run
        goes back to that checkpoint, and what came after it is left behind.

        Raises:
            OwnedElsewhere: a live process owns the run.
            NoUsableCheckpoint: something was saved and nothing can be used.
            MismatchError: the checkpoint does not fit the live state; nothing was changed.
            FormatError: a checkpoint that was named explicitly is damaged.
        """
        self._check_process()
        self._drain()
        reader = self._reader()
        search = Search(reader, which)
        with collector_paused():
            self._owner.take(search)
        found = search.found
        for folder, reason in reader.rejected:
            self._housekeeper.reject(folder, reason)
        self._saver.later(self._housekeeper.after_claim)
        if found is None:
            return None
        self._apply(found, is_rollback=which != "latest")
        self._emit(
            "resumed",
            f"resumed {found.entry.folder}",
            step=found.entry.step,
            folder=found.entry.folder,
            rejected=tuple(reader.rejected),
        )
        return describe(
            self.store.url,
            found.entry,
            rejected=tuple(reader.rejected),
            notes=self._notes(found),
        )

    def load(
        self,
        which: str | int = "latest",
        *,
        components: Iterable[str] | None = None,
        strict: bool = True,
        rename: Rename = None,
        skip: Iterable[str] = (),
        verify: bool = True,
    ) -> Checkpoint:
        """Apply a checkpoint, or parts of it. Owns nothing, unless this manager owns the run.

        `components` names what to load (default: all); `skip` leaves out components or
        `component.path` prefixes; `rename` maps stored paths to live ones. With `strict=False`
        missing and unexpected leaves are reported in `notes` instead of raised. When this manager
        owns the run, a full load makes the run go on from there.

        Raises:
            NoCheckpoint: nothing answers `which`.
            FormatError: it is damaged; names file and tensors.
            MismatchError: it does not fit; nothing was changed.
        """
        self._check_process()
        self._drain()
        options = LoadOptions(
            components=None if components is None else tuple(components),
            strict=strict,
            rename=rename,
            skip=tuple(skip),
            verify=verify,
        )
        with collector_paused():
            found = self._reader().named(which, options)
        is_rollback = which != "latest"
        if options.is_full and self.is_owner:
            self._owner.take(Settled(found.entry, is_rollback=is_rollback))
        self._apply(found, is_rollback=is_rollback)
        self._emit(
            "loaded",
            f"loaded {found.entry.folder}",
            step=found.entry.step,
            folder=found.entry.folder,
        )
        return describe(self.store.url, found.entry, notes=self._notes(found))

    # Looking and marking

    def list(self) -> tuple[Checkpoint, ...]:
        """Every committed checkpoint, newest first."""
        return tuple(describe(self.store.url, entry) for entry in self._catalog.checkpoints())

    def pin(self, which: str | int) -> None:
        """Keep a checkpoint whatever the rule says.

        Raises:
            NoCheckpoint: there is none, or its deletion has begun.
        """
        annotate(self.store, self._catalog.resolve(which), pinned=True)

    def unpin(self, which: str | int) -> None:
        """Let retention decide again."""
        annotate(self.store, self._catalog.resolve(which), pinned=False)

    def tag(self, which: str | int, *tags: str) -> None:
        """Add tags; a tagged checkpoint is kept and can be named by its tag."""
        annotate(self.store, self._catalog.resolve(which), add_tags=tags)

    @property
    def is_owner(self) -> bool:
        """Whether this manager has claimed the run."""
        return self._owner.claim is not None

    # Ending

    def close(self) -> None:
        """Finish what is under way and give the run up cleanly. Closing twice is fine.

        Raises:
            SaveFailed: a background save failed and nobody was told yet.
            DeadlineExceeded: a save hangs; it was given up.
        """
        self._close(self._saver.timeout_s)

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
        try:
            self.close()
        except HoldfastError as closing:
            # The loop's own error is what the caller must see; this one is told beside it.
            self._emit("save_failed", f"while closing after {error!r}: {closing}")

    def finish_at_exit(self) -> str | None:
        """For the interpreter's exit: end the save under way, and say what became of it.

        Raises:
            HoldfastError: a save failed or was given up, and nobody was told.
        """
        if os.getpid() != self._pid:
            return None
        pending = self._saver.pending
        under_way = pending is not None and not pending.done()
        self._close(self._exit_timeout_s)
        if pending is None or not under_way:
            return None
        return f"save of step {pending.step} was committed while the program ended"

    # Parts of the above, in the caller's thread

    def _close(self, timeout_s: float) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._saver.settle(timeout_s)
        finally:
            self._closed = True
            exits.forget(self)
            self._saver.close()
            self._owner.release()
            self._emit("closed", f"{self.store.url}: closed")
        self._saver.raise_failure()

    def _now(
        self, step: int, epoch: int | None, samples: int | None, tokens: int | None
    ) -> Timestamp:
        counters = {"step": step, "epoch": epoch, "samples": samples, "tokens": tokens}
        for name, value in counters.items():
            if value is None and name != "step":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name}={value!r} must be a whole number, at least 0")
        wall_s = self._wall_before_s + time.monotonic() - self._started
        return Timestamp(step=step, epoch=epoch, samples=samples, tokens=tokens, wall_s=wall_s)

    def _check_process(self) -> None:
        if self._closed:
            raise ManagerUnusable(f"{self.store.url}: this manager is closed")
        if os.getpid() != self._pid:
            raise ManagerUnusable(
                f"{self.store.url}: this manager belongs to process {self._pid}; "
                "make one of your own after a fork"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._half_loaded is not None:
            raise ManagerUnusable(
                f"{self.store.url}: {self._half_loaded}; the state is half loaded. "
                "resume() or load() a whole checkpoint first"
            )

    def _wait_for_the_save_before(self) -> None:
        """Its arenas are needed; its housekeeping may go on, but not beside a preflight."""
        if self._preflight_due:
            self._drain()
            return
        self._saver.wait_for_arenas(self._saver.timeout_s)
        exits.told(self)
        self._saver.raise_failure()

    def _drain(self) -> None:
        """Wait for the save before, and raise its error."""
        self._saver.settle(self._saver.timeout_s)
        exits.told(self)
        self._saver.raise_failure()

    def _announce_not_saved(self, captured: Captured) -> None:
        if self._not_saved_due and captured.not_saved:
            self._emit("not_saved", "not saved: " + "; ".join(captured.not_saved))
        self._not_saved_due = False

    def _ensure_claimed(self, captured: Captured) -> None:
        if not self.is_owner:
            self._owner.check()
            self._refuse_accidental_restart()
        if self._preflight_due:
            self._run_preflight(captured)
            self._preflight_due = False
        if not self.is_owner:
            standing = self._saver.standing
            self._owner.take(
                Settled(standing, is_rollback=self._is_rollback)
                if standing is not None
                else self._choose_a_fresh_start
            )

    def _choose_a_fresh_start(self) -> Choice:
        self._refuse_accidental_restart()
        return Choice(point=None)

    def _refuse_accidental_restart(self) -> None:
        """Saving from scratch into a root with checkpoints would let retention eat them."""
        if self._saver.standing is None and self._catalog.ever_committed():
            raise UsageError(
                f"{self.store.url} holds the checkpoints of a run. Call resume() to go on with "
                "it, load() one of them whole to start from there (part of one is not enough), or "
                "give this run a root of its own"
            )

    def _run_preflight(self, captured: Captured) -> None:
        specs = [spec for part in captured.components.values() for spec in part.specs]
        trees = sum(len(part.tree) for part in captured.components.values())
        run_preflight(
            self.store,
            nbytes_per_save=sum(spec.nbytes for spec in specs) + 2 * trees + 200 * len(specs),
            saves_kept=quota(self._keep),
            num_files=2 * len(captured.components) + 2,
        )

    def _request(
        self,
        now: Timestamp,
        reason: str,
        save_class: SaveClass,
        tags: tuple[str, ...],
        metrics: Mapping[str, float],
        timings: dict[str, float],
    ) -> SaveRequest:
        claim = self._owner.claim
        assert claim is not None
        return SaveRequest(
            label=self._label(now),
            claim=claim,
            sequence=self._owner.next_sequence(),
            timestamp=now,
            save_class=save_class,
            reason=reason,
            tags=tags,
            metrics=metrics,
            numerics=numerics(),
            environment=environment(),
            timings=timings,
        )

    def _reader(self) -> Reader:
        return Reader(
            store=self.store,
            state=self.state,
            workers=self._saver.workers,
            timeout_s=self._saver.timeout_s,
        )

    def _apply(self, found: Candidate, *, is_rollback: bool) -> None:
        try:
            with collector_paused():
                found.prepared.apply(found.tensors)
        except (FormatError, MismatchError):
            raise  # found before anything was changed
        except BaseException as error:
            self._half_loaded = f"loading {found.entry.folder} was cut short by {error!r}"
            raise
        if found.options.is_full:
            self._half_loaded = None
            self._stand_on(found.entry, is_rollback=is_rollback)
            if found.options.verify:
                self._housekeeper.trust(found.entry)

    def _stand_on(self, entry: Entry, *, is_rollback: bool) -> None:
        self._saver.standing, self._is_rollback = entry, is_rollback
        now = self._previous = entry.manifest.timestamp
        self._saved = self._saved_before(entry)
        self._wall_before_s, self._started = now.wall_s, time.monotonic()

    def _saved_before(self, entry: Entry) -> Saved:
        """Where the newest save of each class was begun, for cadences of their own."""
        saved = Saved().plus(entry.manifest.save_class, entry.manifest.timestamp)
        if self._every is None or self._every.ephemeral is None:
            return saved
        for older in self._catalog.lineage_entries():
            if older.order < entry.order and older.manifest.save_class != entry.manifest.save_class:
                return saved.plus(older.manifest.save_class, older.manifest.timestamp)
        return saved

    def _notes(self, found: Candidate) -> tuple[str, ...]:
        recorded = found.entry.manifest.numerics
        return (*found.prepared.notes, *differences(recorded, numerics()))


def _policy(
    every: str | Time | Trigger | SaveFunction | SavePolicy | None,
    max_duration: str | Time | None,
) -> SavePolicy | None:
    """What `every` means; fractions of the run are measured by its length."""
    if every is None:
        return None
    length = None if max_duration is None else parse(max_duration, what="max_duration")
    policy = every if isinstance(every, SavePolicy) else SavePolicy(permanent=every)
    return policy.resolve(length)
