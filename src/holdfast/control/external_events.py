"""Events from outside a running training: signals, and requests for a save.

With several ranks, the leader sees them, and all ranks get them at the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import get_args

import msgspec
from typing_extensions import override

from holdfast.control.agreement import SaveStepAgreement, SignalAlarm
from holdfast.control.save_requests import Request, Requests
from holdfast.control.stop import Promote, Stop
from holdfast.errors import RanksError, SaveSkipped, UsageError
from holdfast.format.strictjson import describe_once
from holdfast.policy.savers import Due
from holdfast.policy.schedule import covers, together
from holdfast.policy.triggers import Event
from holdfast.ranks.coordinator import Coordinator
from holdfast.results import Checkpoint, PendingSave


class Failed(msgspec.Struct, frozen=True):
    """A save that has failed."""

    due: Due
    step: int

    def is_replaced_by(self, due: Due, step: int) -> bool:
        """Whether the save that was begun last, or failed to begin, is a later one that has all."""
        return step > self.step and covers(due, self.due)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequests:
    """New requests for a save, from users and other processes."""

    requests: tuple[Request, ...] = ()
    is_of_leader: bool = False
    """Whether there are requests that only the leader has."""
    due: Due | None = None
    """Save that the leader has found due, for all ranks."""
    failed: Failed | None = None
    """Save that has failed, to be made again unless a later one has replaced it."""

    @property
    def is_needed(self) -> bool:
        """Whether a save has to be made, also of a step that is saved already."""
        return bool(self.requests) or self.is_of_leader

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that the requests ask for on the checkpoint."""
        return tuple(tag for request in self.requests for tag in request.tags)

    def added_to(self, due: Due) -> Due:
        """Return a due save with the reasons and tags of the requests added."""
        reasons = dict.fromkeys((due.reason, *(request.reason for request in self.requests)))
        if len(reasons) > 1:
            reasons.pop("demand", None)
        return replace(
            due, reason=", ".join(reasons), tags=tuple(dict.fromkeys(due.tags + self.tags))
        )


_EVENTS = frozenset(get_args(Event))
_NO_REQUESTS = SaveRequests()
_SIGNAL_S = 10.0
"""Limit on the answers of other ranks after a signal."""


class ExternalEvents:
    """Poller of signals and save requests for one manager; also answers the requests."""

    def __init__(self, requests: Requests, stop: Stop | None, promote: Promote) -> None:
        """Register `promote`, which finishes the save under way when a stop's grace nearly ends."""
        self._requests = requests
        self._stop = stop
        self._promote = promote
        if stop is not None:
            stop.register(promote)

    @property
    def has_signal(self) -> bool:
        """Whether a signal was received that is not yet handled."""
        return self._stop is not None and self._stop.is_asked

    def collect_events(
        self, event: Event | Sequence[Event], *, is_owner: bool
    ) -> tuple[list[Event], SaveRequests]:
        """Collect events for triggers, and new requests, which only the run's owner reads."""
        events = _check_events(event)
        requests = self._requests.poll() if is_owner else ()
        is_asked = bool(requests)
        if self._stop is not None:
            if self._stop.requested is not None:
                events.append("signal")
            is_asked = self._stop.take_save_request() or is_asked
        if is_asked:
            events.append("demand")
        return events, SaveRequests(requests=requests) if requests else _NO_REQUESTS

    def propose_save(
        self, due: Due | None, pending: PendingSave | None = None, *, is_owner: bool
    ) -> None:
        """No-op: what is due by this rank alone is saved at once."""

    @contextmanager
    def counted_call(self) -> Iterator[None]:
        """Count the call of `maybe_save` in the `with` block, with several ranks."""
        yield

    def answer_when_saved(self, asked: SaveRequests, outcome: Future[Checkpoint]) -> None:
        """Answer the requests with the outcome of their save, once it is known."""
        if asked.requests:
            outcome.add_done_callback(lambda ended: self._answer_requests(asked, ended))

    def answer_with_error(self, asked: SaveRequests, error: BaseException) -> None:
        """Answer the requests with an error."""
        for request in asked.requests:
            self._requests.answer(request, error=str(error) or repr(error))

    def stop_polling(self) -> None:
        """Stop polling for requests, and unregister from the signals."""
        if self._stop is not None:
            self._stop.forget(self._promote)
        self._requests.stop_answering()

    def _answer_requests(self, asked: SaveRequests, ended: Future[Checkpoint]) -> None:
        error = ended.exception()
        if error is not None:
            self.answer_with_error(asked, error)
            return
        for request in asked.requests:
            self._requests.answer(request, folder=ended.result().folder)


class _SaveProposal(msgspec.Struct, frozen=True):
    """Message of the leader to all ranks: events, and a save that is due."""

    due: Due | None
    failed: Failed | None
    signal: str | None
    is_demand: bool
    has_requests: bool


class DistributedEvents(ExternalEvents):
    """Poller of the leader, whose events and requests all ranks get at the same call."""

    def __init__(
        self,
        requests: Requests,
        stop: Stop | None,
        promote: Promote,
        ranks: Coordinator,
        *,
        timeout_s: float,
        warn: Callable[[str], object],
    ) -> None:
        super().__init__(requests, stop, promote)
        self._agreed = SaveStepAgreement(ranks, timeout_s=timeout_s, warn=warn)
        self._alarm = None if stop is None else SignalAlarm(ranks)
        self._held: tuple[Request, ...] = ()
        """Requests whose wish is on its way."""
        self._under_way: Due | None = None
        self._has_looked = True
        """Whether `collect_events` was reached in this call of `maybe_save`."""
        self._asked_again: PendingSave | None = None
        """Failed save that the leader has asked for again."""
        self._next: Due | None = None
        """What became due while another wish was on its way."""
        self._failed: Failed | None = None
        if stop is not None:
            stop.share()

    @override
    def collect_events(
        self, event: Event | Sequence[Event], *, is_owner: bool
    ) -> tuple[list[Event], SaveRequests]:
        self._has_looked = True
        data = self._agreed.count_call()
        events, asked = _check_events(event), _NO_REQUESTS
        if data is not None:
            with describe_once(_SaveProposal):
                wish = msgspec.msgpack.decode(data, type=_SaveProposal)
            if wish.signal is not None and self._stop is not None:
                self._stop.agree(wish.signal)
            if wish.is_demand:
                events.append("demand")
            asked = SaveRequests(
                requests=self._held,
                is_of_leader=wish.has_requests,
                due=wish.due,
                failed=wish.failed,
            )
            self._held = ()
        if self._stop is not None and self._alarm is not None:
            self._alarm.share_signal(self._stop.received)
            if self._stop.requested is not None:
                events.append("signal")
        return events, asked

    @override
    @contextmanager
    def counted_call(self) -> Iterator[None]:
        self._has_looked = False
        try:
            yield
        finally:
            if not self._has_looked:
                self._agreed.skip()

    @override
    def propose_save(
        self, due: Due | None, pending: PendingSave | None = None, *, is_owner: bool
    ) -> None:
        """Pass on, in the leader, saves that are due, signals, requests, and failed saves."""
        failed = self._failed_since(pending)
        if failed is not None:
            both = together([failed.due, *([] if self._failed is None else [self._failed.due])])
            self._failed = Failed(both or failed.due, failed.step)
        is_covered = self._under_way is not None and due and covers(self._under_way, due)
        if due is not None and not (self._agreed.is_asking and is_covered):
            self._next = together([due] if self._next is None else [self._next, due])
        if self._agreed.is_asking:
            return
        self._held = self._requests.poll() if is_owner else ()
        stop = self._stop
        is_demand = (stop is not None and stop.take_save_request()) or bool(self._held)
        signal = self._signal()
        if self._next is None and self._failed is None and not is_demand and signal is None:
            return
        wish = _SaveProposal(self._next, self._failed, signal, is_demand, bool(self._held))
        self._under_way, self._next, self._failed = self._next, None, None
        data = msgspec.msgpack.encode(wish)
        # A rank that a scheduler has ended does not answer, and the others have little time.
        self._agreed.propose_wish(data, timeout_s=inf if signal is None else _SIGNAL_S)

    def _failed_since(self, pending: PendingSave | None) -> PendingSave | None:
        """Return the save that was begun last if it has failed since the last call."""
        if pending is None or pending is self._asked_again or pending.failure() is None:
            return None
        self._asked_again = pending
        return None if isinstance(pending.failure(), SaveSkipped) else pending

    def _signal(self) -> str | None:
        """Return the signal of any rank that was not passed on yet."""
        if self._stop is None or self._alarm is None or self._stop.requested is not None:
            return None
        return self._stop.received or self._alarm.received

    @override
    def stop_polling(self) -> None:
        held, self._held = self._held, ()
        self.answer_with_error(
            SaveRequests(requests=held), RanksError("the training ended before all ranks saved")
        )
        self._agreed.leave_agreement()
        if self._alarm is not None:
            self._alarm.post_signal_once(None)
        super().stop_polling()


def _check_events(event: Event | Sequence[Event]) -> list[Event]:
    events: list[Event] = [event] if isinstance(event, str) else list(event)
    if not _EVENTS.issuperset(events):
        raise UsageError(f"event={event!r}: must be one or several of {get_args(Event)}")
    return events


def make_external_events(
    ranks: Coordinator,
    requests: Requests,
    stop: Stop | None,
    promote: Promote,
    *,
    timeout_s: float,
    warn: Callable[[str], object],
) -> ExternalEvents:
    """Make the poller of one rank of a manager, which waits up to `timeout_s` for others."""
    if ranks.world_size == 1:
        return ExternalEvents(requests, stop, promote)
    return DistributedEvents(requests, stop, promote, ranks, timeout_s=timeout_s, warn=warn)
