"""Coordinator of a run of one process."""

from __future__ import annotations

from typing_extensions import override

from holdfast.errors import UsageError
from holdfast.ranks.coordinator import Collected, Coordinator, RankFailure
from holdfast.ranks.waiting import Watch


class SingleProcess(Coordinator):
    """Coordinator of the only rank of a run: starts no thread, sends nothing and never waits.

    >>> alone = SingleProcess()
    >>> alone.post("save 1", b"written", timeout_s=1)
    >>> alone.collect("save 1", timeout_s=1).came
    {0: b'written'}
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._posts: dict[str, bytes] = {}

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self.check_tag_unused("post", tag)
        self._posts[tag] = data

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        """No-op: no other rank waits for this one."""

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        self.check_tag_unused("collect", tag)
        came = {0: self._posts.pop(tag)} if tag in self._posts else {}
        return Collected(came=came, failed={}, silent=[] if came else [0])

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        """No-op but for the check of the tag: there are no followers."""
        self.check_tag_unused("announce", tag)

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        raise UsageError("a run of one process has no follower that could hear")
