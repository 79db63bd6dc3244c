"""Makes all ranks act on a signal, a request or a due save of the leader at the same call.

Positions are counts of calls, which all ranks make in the same order (decision 0035). No rank may
pass the position that it has promised (tests/control/test_agreement.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from threading import Condition, Thread
from typing import TypeVar

import msgspec

from holdfast.errors import HoldfastError, RanksError, RanksSilent
from holdfast.ranks.coordinator import Coordinator, RankFailure, Watch, decode_message

T = TypeVar("T")

MARGIN_S = 1.5
"""Time for which ranks promise to go on: a rank may hear of a question a second late."""
_MIN_MARGIN = 2
_NEVER = sys.maxsize
_LISTEN_S = 10.0
"""Longest time until the thread of a rank sees that the rank was closed."""
_RUN_S = 1e8
"""Limit above the duration of any run: three years."""
_AGREEING = "agreeing on a step to save at"
_FAIL_S = 5.0
"""Limit on saying that this rank failed, or that there will be no more questions."""


class _AgreedStep(msgspec.Struct, frozen=True):
    """Announcement of the call at which all ranks get a wish."""

    position: int
    wish: bytes


class SaveStepAgreement:
    """Gives all ranks the leader's wishes, each at the same `count_call` on every rank.

    The leader's thread asks. The thread of each rank answers with a position that the rank will
    not pass before it has heard more. The leader names the largest of them. So a call waits only
    where its rank has reached the position it promised, and has heard nothing.
    """

    def __init__(
        self, ranks: Coordinator, *, timeout_s: float, warn: Callable[[str], object]
    ) -> None:
        """Make the agreement; a thread starts at the first call, if there are several ranks."""
        self._warn = warn
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._manager = ranks.number()
        self._changed = Condition()
        self._count = 0
        self._limit = _NEVER
        """Position not to pass: the promised one, and the agreed one as soon as it is known."""
        self._asked: bytes | None = None
        self._answer_s = timeout_s
        self._agreed: bytes | None = None
        self._error: HoldfastError | None = None
        self._has_ended = False
        self._started_s: float | None = None

    @property
    def is_asking(self) -> bool:
        """Whether a wish is on its way."""
        return self._asked is not None

    def propose_wish(self, wish: bytes, *, timeout_s: float = inf) -> None:
        """Have all ranks get a wish at one of the next calls; in the leader, one wish at a time."""
        self._ranks.expect_leader()
        with self._changed:
            assert self._asked is None, "one wish is on its way at a time"
            self._asked, self._answer_s = wish, min(timeout_s, self._timeout_s)
            self._changed.notify_all()

    def count_call(self) -> bytes | None:
        """Count a call; return the wish whose position it is, on every rank."""
        if self._started_s is None:
            self._start_thread()
        with self._changed:
            self._count += 1
            if self._count < self._limit and (self._asked is None or self._error is None):
                return None
            return self._reach_limit()

    def skip(self) -> None:
        """Count a call that could not look; its wish is got in the next one."""
        with self._changed:
            self._count += 1

    def leave_agreement(self) -> None:
        """End the agreement of this rank, without waiting for other ranks."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _reach_limit(self) -> bytes | None:
        def has_news() -> bool:
            return self._agreed is not None or self._error is not None

        if not self._changed.wait_for(has_news, self._timeout_s + _FAIL_S):
            raise RanksSilent("agreement on a step to save at", [0])
        if self._error is not None:
            raise self._error
        if self._count < self._limit:
            return None
        agreed, self._agreed, self._asked = self._agreed, None, None
        self._limit = _NEVER
        self._changed.notify_all()
        return agreed

    def _start_thread(self) -> None:
        self._started_s = time.monotonic()
        if self._ranks.world_size > 1:
            Thread(target=self._agree_until_closed, name="holdfast-agreed", daemon=True).start()

    def _agree_until_closed(self) -> None:
        try:
            number = 0
            while (self._lead if self._ranks.is_leader else self._answer_question)(number):
                number += 1
        except HoldfastError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _lead(self, number: int) -> bool:
        """Ask about the next wish; return False when this rank was closed."""
        with self._changed:
            # The former wish is done when this rank has got it.
            self._changed.wait_for(
                lambda: self._has_ended or (self._asked is not None and self._agreed is None)
            )
            wish = self._asked
        question, answers, place = self._tags(number)
        if self._has_ended or wish is None:
            self._ranks.announce(question, b"end", timeout_s=_FAIL_S)
            return False
        try:
            self._ranks.announce(question, b"where", timeout_s=self._timeout_s)
            self._send_promise(answers)
            # Later answers may be late for another reason: a wish that is not reached yet.
            watch = Watch(
                self._warn, "maybe_save", answers if number == 0 else None, phase=_AGREEING
            )
            found = self._ranks.collect(answers, timeout_s=self._answer_s, watch=watch)
            posts = found.expect_all(answers)
            agreed = _AgreedStep(max(decode_message(post, int, answers) for post in posts), wish)
        except HoldfastError as error:
            failure = RankFailure.from_error(error, phase=_AGREEING)
            with suppress(HoldfastError):
                self._ranks.fail(place, failure, timeout_s=_FAIL_S)
            raise
        data = msgspec.msgpack.encode(agreed)
        self._ranks.announce(place, data, timeout_s=self._timeout_s)
        self._set_agreed(agreed)
        return True

    def _answer_question(self, number: int) -> bool:
        """Wait for a question, and answer it; return False when there will be no other."""
        question, answers, place = self._tags(number)
        while True:
            if self._has_ended:
                return False
            try:
                if self._ranks.hear(question, timeout_s=_LISTEN_S) == b"end":
                    return False
                break
            except RanksSilent:
                continue  # nothing is asked
        self._send_promise(answers)
        watch = Watch(self._warn, "maybe_save", phase=_AGREEING)
        said = self._ranks.hear(place, timeout_s=self._timeout_s, watch=watch)
        self._set_agreed(decode_message(said, _AgreedStep, place))
        return True

    def _tags(self, number: int) -> tuple[str, str, str]:
        name = f"question {number} of agreement {self._manager}"
        return name, f"{name}, where the ranks are", f"{name}, where they save"

    def _send_promise(self, tag: str) -> None:
        if self._has_ended:
            failure = RankFailure(_AGREEING, "its manager was closed")
            self._ranks.fail(tag, failure, timeout_s=_FAIL_S)
        else:
            data = msgspec.msgpack.encode(self._promise())
            self._ranks.post(tag, data, timeout_s=self._timeout_s)

    def _promise(self) -> int:
        """Return a position that this rank will not pass before it has heard of an agreement."""
        with self._changed:
            # A wish that this rank has not reached yet must be got first.
            self._changed.wait_for(lambda: self._agreed is None or self._has_ended)
            assert self._started_s is not None, "the thread starts in the first call"
            pace = self._count / max(time.monotonic() - self._started_s, 1e-3)
            self._limit = self._count + max(int(pace * MARGIN_S), _MIN_MARGIN)
            return self._limit

    def _set_agreed(self, agreed: _AgreedStep) -> None:
        with self._changed:
            if agreed.position < self._limit:
                self._error = RanksError(
                    f"rank {self._ranks.rank} had promised to save no earlier than at call "
                    f"{self._limit}; the leader has named call {agreed.position}"
                )
            self._limit, self._agreed = agreed.position, agreed.wish
            self._changed.notify_all()


class SignalAlarm:
    """Tells the leader of a signal that only a follower has received, such as of its host's end."""

    def __init__(self, ranks: Coordinator) -> None:
        self._ranks = ranks
        self._tag = f"signals of manager {ranks.number()}"
        self._has_begun = self._has_said = False
        self.received: str | None = None
        """Name of the first signal of a follower, in the leader."""

    def share_signal(self, received: str | None) -> None:
        """Begin to listen, in the leader; tell it, in a follower, of a signal of this process."""
        if not self._has_begun and self._ranks.is_leader:
            self._has_begun = True
            Thread(target=self._listen, name="holdfast-signals", daemon=True).start()
        elif received is not None and not self._ranks.is_leader:
            self.post_signal_once(received)

    def post_signal_once(self, received: str | None) -> None:
        """Tell the leader of a signal, or that none will come, once and without waiting."""
        if not self._has_said:
            self._has_said = True
            thread = Thread(
                target=self._post, args=(received,), name="holdfast-signals", daemon=True
            )
            with suppress(RuntimeError):  # the interpreter exits, and with it all ranks
                thread.start()

    def _post(self, received: str | None) -> None:
        with suppress(HoldfastError):  # then the leader is lost, or learns it by itself
            if received is None:
                self._ranks.post(self._tag, b"", timeout_s=_FAIL_S)
            else:
                self._ranks.fail(self._tag, RankFailure("signal", received), timeout_s=_FAIL_S)

    def _listen(self) -> None:
        with suppress(HoldfastError):
            # A failure ends the round at once, for which one key of the store is looked at.
            failed = self._ranks.collect(self._tag, timeout_s=_RUN_S).failed
            for failure in failed.values():
                self.received = failure.reason
