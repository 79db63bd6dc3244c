"""Events from outside a running training: signals, and requests for a save."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import get_args

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.control.requests import Request, Requests
from holdfast.engine.control.stop import Promote, Stop
from holdfast.errors import UsageError
from holdfast.policy.savers import Due
from holdfast.policy.triggers import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """New requests for a save, from users and other processes."""

    requests: tuple[Request, ...] = ()

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
_NO_REQUESTS = Asked()
_NOT_ASKED = "a run of {} ranks cannot be asked for a save yet; it saves at its own steps"


class Outside:
    """Poller of signals and save requests for one manager; also answers the requests.

    With several ranks requests are refused: the other ranks would not save at the same step.
    """

    def __init__(
        self, requests: Requests, stop: Stop | None, promote: Promote, *, num_ranks: int = 1
    ) -> None:
        """Register `promote`, which finishes the save under way when a stop's grace nearly ends."""
        self._requests = requests
        self._num_ranks = num_ranks
        self._stop = stop
        self._promote = promote
        if stop is not None:
            stop.register(promote)

    @property
    def has_signal(self) -> bool:
        """Whether a signal was received that is not yet handled."""
        return self._stop is not None and self._stop.is_asked

    def look(self, event: Event | Sequence[Event], *, is_owner: bool) -> tuple[list[Event], Asked]:
        """Collect events for triggers, including `event`, and new requests.

        Only the owner reads requests: no other process can save the run.

        Raises:
            UsageError: `event` is not a known event.
        """
        events: list[Event] = [event] if isinstance(event, str) else list(event)
        if not _EVENTS.issuperset(events):
            raise UsageError(f"event={event!r}: must be one or several of {get_args(Event)}")
        requests = self._requests.poll() if is_owner else ()
        if requests and self._num_ranks > 1:
            self.refuse(Asked(requests=requests), UsageError(_NOT_ASKED.format(self._num_ranks)))
            requests = ()
        is_asked = bool(requests)
        if self._stop is not None:
            if self._stop.requested is not None:
                events.append("signal")
            is_asked = self._stop.take_save_request() or is_asked
        if is_asked:
            events.append("demand")
        return events, Asked(requests=requests) if requests else _NO_REQUESTS

    def tell(self, asked: Asked, outcome: Future[Checkpoint]) -> None:
        """Answer the requests with the outcome of their save, once it is known."""
        if asked.requests:
            outcome.add_done_callback(lambda ended: self._answer(asked, ended))

    def refuse(self, asked: Asked, error: BaseException) -> None:
        """Answer the requests with an error."""
        for request in asked.requests:
            self._requests.answer(request, error=str(error) or repr(error))

    def close(self) -> None:
        """Stop polling for requests, and unregister from the signals."""
        if self._stop is not None:
            self._stop.forget(self._promote)
        self._requests.close()

    def _answer(self, asked: Asked, ended: Future[Checkpoint]) -> None:
        error = ended.exception()
        if error is not None:
            self.refuse(asked, error)
            return
        for request in asked.requests:
            self._requests.answer(request, folder=ended.result().folder)
