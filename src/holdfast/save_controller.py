"""Training-thread part of saves: decides whether one is due, captures and stages the state.

Then `saving.saver` writes and commits in the save thread. All ranks must find the same saves due,
and count them alike even if a call raises on one of them (tests/saving/test_call_counter.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from holdfast.arguments import escaped
from holdfast.control.external_events import SaveRequests
from holdfast.control.save_requests import POLL_S
from holdfast.errors import DeadlineExceeded, HoldfastError, SaveSkipped, UploadFailed, UsageError
from holdfast.format.manifest import Timestamp
from holdfast.ownership.annotations import checked_metrics, checked_reasons, checked_tags
from holdfast.policy.savers import Due
from holdfast.policy.schedule import together
from holdfast.policy.triggers import Event
from holdfast.results import PendingSave, SavePhase
from holdfast.saving.participants import SaveParticipant
from holdfast.saving.save import SaveRequest
from holdfast.saving.settings_history import numerics
from holdfast.session import NEVER_QUIET, Session
from holdfast.staging.device import refuse_capture
from holdfast.state.capture.capture import Captured
from holdfast.state.components import RNG
from holdfast.state.modules import is_loaded
from holdfast.threads.buffers import collector_paused
from holdfast.version import environment


def check_saved_components(
    components: Iterable[str] | None, state: Iterable[str]
) -> tuple[str, ...] | None:
    """Return names of components to save; None: all of `state`; raise `UsageError` for others."""
    if components is None:
        return None
    names = (components,) if isinstance(components, str) else tuple(components)
    known = [*state, RNG]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"components={components!r}: must be some of {known}")
    return names


class SaveController:
    """Decides what is due at a step, and starts saves. In the training thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._newest: tuple[Due, int] | None = None
        """Last save of several ranks, and its step; it may have failed to begin on this one."""
        self.knows_exceptions = not session.schedule.asks_for("exception")
        """Whether the caller reports errors to `maybe_save`, or no trigger is for them."""
        self._upload_error: HoldfastError | None = None
        """Error of uploads to raise once the save that met it has been begun."""

    def raise_upload_error(self) -> None:
        """Raise the error of uploads that the last save met, once."""
        error, self._upload_error = self._upload_error, None
        if error is not None:
            raise error

    # What is due

    def save_if_due(
        self,
        step: int,
        counters: Mapping[str, int | None],
        metrics: Mapping[str, float] | None,
        event: Event | Sequence[Event],
        vetoes: Collection[str],
        wanted: Due | None,
    ) -> PendingSave | None:
        """Save if something is due at this step; the arguments are those of `maybe_save`."""
        session = self._session
        session.quiet, session.is_unused = NEVER_QUIET, False
        is_alone = session.ranks.world_size == 1
        if event == "start" and is_alone and any(map(is_loaded, session.state.values())):
            # Ranks would decide otherwise than each other if one loads and sends the weights.
            session.clock.loaded()
        now = session.clock.now(step, **counters)
        session.check_usable()
        session.expect_savable()
        if isinstance(event, str):
            session.warnings.of_setup(session.stop, has_interval=bool(session.schedule.policies))
            session.warnings.positions.note_first_step(step)
        pending = session.saver.pending
        if is_alone:
            if pending is not None and pending.failure() is not None:
                session.schedule.undo_failed_save()
            session.raise_failure()
        session.measurements.note_writing(pending is not None and not pending.done())
        self.knows_exceptions |= "exception" in ((event,) if isinstance(event, str) else event)
        events, asked = session.events.collect_events(event, is_owner=session.is_owner)
        # Metrics are passed unread: to read a tensor's value makes each step wait for the device.
        values = metrics or {}
        due: Due | None = None
        try:
            best = None
            if isinstance(event, str) and session.validated:
                best = session.validated.find_due_save(now.step, values, event)
            due = self._find_due(now, values, events, vetoes, asked, [wanted, best])
            session.distributed.note_due(due is not None)
            if session.ranks.is_leader and not is_alone:
                by_leader = session.schedule.due_by_leader(
                    now, values, events, vetoes=vetoes, but=due
                )
                session.events.propose_save(by_leader, pending, is_owner=session.is_owner)
            if due is None and best is None and isinstance(event, str):
                session.validated.not_due(now.step, values)
            if due is None:
                session.recorder.record_metrics(now.step, metrics)
            else:
                is_last = "end" in events or "signal" in events
                pending = self.start_save(now, asked.added_to(due), metrics, is_last=is_last)
                session.events.answer_when_saved(asked, pending.committed)
        except BaseException as error:
            if is_alone or due is None:
                session.schedule.undo_decision()
            else:
                self._count_as_begun(due, now)  # as the other ranks do, which save at this call
            session.events.answer_with_error(asked, error)
            raise
        if due is not None:
            self.raise_upload_error()
            return pending
        if not is_alone:
            # Ranks learn of a failure at different steps, and the leader alone of that of an
            # upload. One that raised it in place of a save would count one save less than the
            # others.
            session.raise_failure()
            return None
        session.uploads.raise_failure()
        is_watching = isinstance(event, str) and bool(session.validated)
        if not is_watching and (pending is None or pending.done()):
            session.quiet = (session.schedule.quiet_until(now), time.monotonic() + POLL_S)
        return None

    def _find_due(
        self,
        now: Timestamp,
        metrics: Mapping[str, float],
        events: Sequence[Event],
        vetoes: Collection[str],
        asked: SaveRequests,
        wanted: Sequence[Due | None],
    ) -> Due | None:
        """Merge what is due by the schedule, wanted by the caller and asked for from outside."""
        schedule, again = self._session.schedule, asked.failed
        if again is not None and self._newest and again.is_replaced_by(*self._newest):
            again = None
        wishes = [*wanted, asked.due, None if again is None else again.due]
        due = schedule.merge_due_saves(
            now,
            metrics,
            events,
            vetoes=vetoes,
            wanted=together([wish for wish in wishes if wish is not None]),
        )
        if due is None and asked.is_needed:
            # The present step is saved already: the request gets that checkpoint, tags added.
            due = Due(schedule.asked_class(vetoes), "demand")
        return due

    def _count_as_begun(self, due: Due, now: Timestamp) -> None:
        """Record a save of several ranks, whether it can begin or not.

        Each rank learns of that at another moment, and all must find the same saves due afterwards.
        """
        self._session.schedule.began(due, now)
        self._newest = (due, now.step)

    # One save

    def start_save(
        self,
        now: Timestamp,
        due: Due,
        metrics: Mapping[str, float] | None = None,
        *,
        tags: Iterable[str] = (),
        is_awaited: bool = False,
        is_last: bool = False,
    ) -> PendingSave:
        """Start a save of all ranks; returns when the state was copied."""
        session = self._session
        session.quiet, session.is_unused = NEVER_QUIET, False
        is_last = is_last or (session.stop is not None and session.stop.requested is not None)
        # Whatever fails from here on fails the save of all ranks, which count their saves alike.
        call = (due.save_class, now.epoch, now.cycle, now.samples, now.tokens)
        joint = (
            SaveParticipant()
            if session.ranks.world_size == 1
            else session.distributed.start_joint_save(now.step, *call)
        )
        with joint:
            try:
                given = checked_tags(tags)
                due = replace(due, tags=(*due.tags, *given))
            finally:
                if joint.world_size > 1:
                    self._count_as_begun(due, now)
            measured = checked_metrics(metrics)
            session.recorder.record_metrics(now.step, measured)
            session.recorder.read_devices()
            joint.note_arguments(given, measured, session.history.given)
            session.check_usable()
            refuse_capture("save()")
            try:
                hook = session.hooks.before_save
                unhealthy = checked_reasons(None if hook is None else hook(now, measured))
            except SaveSkipped as error:
                joint.report_failure(error, SavePhase.HOOK)
                session.emit("save_skipped", str(error), step=now.step)
                return PendingSave.skipped(now.step, due, error)
            if not is_last:
                self._wait_for_uploads(now, joint)
            # The last save's arenas are needed; its housekeeping must end only for a preflight.
            but_housekeeping = not session.first_save.preflight_due
            session.wait_for_save(session.saver.limit_s, but_housekeeping=but_housekeeping)
            session.raise_failure()
            pending = self._capture_and_stage(now, due, measured, unhealthy, joint, is_awaited)
            session.validated.began(pending, measured)
        pending.stall_s = time.perf_counter() - joint.began_s
        text = f"the save of step {now.step} stopped training for {pending.stall_s:.3f} s"
        session.emit("stalled", text, step=now.step, stall_s=pending.stall_s)
        if session.hooks.save_begun is not None:
            session.hooks.save_begun(pending)
        return pending

    def _wait_for_uploads(self, now: Timestamp, joint: SaveParticipant) -> None:
        """Wait while uploads lag too far behind.

        With one process an error of uploads is raised after the save (`raise_upload_error`), as a
        remote tier that fails must not cost the local copy of a step. Several ranks raise it here.
        """
        uploads, stop = self._session.uploads, self._session.stop
        try:
            uploads.raise_failure()
            uploads.expect_room(
                now, joint.announce_wait, lambda: stop is not None and stop.received is not None
            )
        except (UploadFailed, DeadlineExceeded) as error:
            if joint.world_size > 1:
                raise
            self._upload_error = error

    def _capture_and_stage(
        self,
        now: Timestamp,
        due: Due,
        measured: Mapping[str, float],
        unhealthy: tuple[str, ...],
        joint: SaveParticipant,
        is_awaited: bool,
    ) -> PendingSave:
        session, saver = self._session, self._session.saver
        current = saver.standing
        if session.refuses_existing and session.ranks.is_leader:
            session.first_save.refuse_existing(now.step, current)
        captured = session.capture(due.components)
        captured_s = time.perf_counter() - joint.began_s
        unhealthy = (*unhealthy, *self._check_captured(captured, due, now.step))
        if current is not None and current.step == now.step:
            joint.set_known_checkpoint(current.folder)
        joint.note_warnings(session.warnings.found)
        joint.propose(captured)
        session.warnings.found.clear()
        if session.ranks.is_leader:
            session.first_save.check_first_save(
                joint.estimate_size(captured),
                current,
                is_rollback=saver.is_rollback,
                ask=joint.probe_followers,
            )
        part = joint.select_own_part(captured, session.owner)
        preparing = time.perf_counter()
        with collector_paused():
            staged = saver.prepare_save(part, is_awaited=is_awaited)
        timings = {"capture_s": captured_s, "stage_s": time.perf_counter() - preparing}
        request = self._make_request(now, due, measured, unhealthy, captured, timings)
        if joint.world_size == 1:
            session.schedule.began(due, now)
        session.clock.unsaved = None
        # Freeing its many tensors offers the GIL to other threads; harmless while none is awake.
        # Later, another thread may keep the GIL, and the core, for milliseconds.
        del captured, part
        return saver.start_save(staged, request, due, joint)

    def _check_captured(self, captured: Captured, due: Due, step: int) -> tuple[str, ...]:
        """Warn of mistakes in the script; return reasons not to resume from what was captured."""
        session, is_whole = self._session, due.components is None
        session.first_save.compare_clocks(session.saver.standing)
        session.warnings.of_capture(captured, is_whole=is_whole)
        frozen = session.capturer.frozen
        session.warnings.of_frozen(None if frozen is None else frozen.written)
        if is_whole:
            session.warnings.of_omitted(captured, session.boundary.stepped())
        unhealthy = session.boundary.check_captured_step(captured, step)
        session.warnings.of_position(step)
        return tuple(unhealthy)

    def _make_request(
        self,
        now: Timestamp,
        due: Due,
        measured: Mapping[str, float],
        unhealthy: tuple[str, ...],
        captured: Captured,
        timings: dict[str, float],
    ) -> SaveRequest:
        """Make the metadata of a save for its manifest."""
        session, claim = self._session, self._session.owner.claim
        assert claim is not None, "the first save has claimed the run"
        return SaveRequest(
            label=session.label(now),
            claim=claim,
            sequence=session.owner.next_sequence(),
            timestamp=now,
            save_class=due.save_class,
            reason=escaped(due.reason),
            tags=due.tags,
            metrics=measured,
            numerics=numerics(session.ranks.world_size),
            environment=environment(),
            savers=session.schedule.savers_of(due),
            left_out=tuple(n for n in (*session.state, RNG) if n not in captured.components),
            unhealthy=unhealthy,
            best=session.best,
            config=session.history.config_of(session.state),
            changes=session.history.changes,
            policy=session.policy,
            timings=timings,
        )
