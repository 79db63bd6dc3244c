"""Chooses a manager's coordinator: of torch's process group, the user's, or of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from typing_extensions import override

from holdfast.errors import UsageError
from holdfast.events import Emitter
from holdfast.launched import has_group, present_ranks
from holdfast.ranks.coordinator import Collected, Coordinator, Processes, RankFailure, Watch


def coordinator_of(
    ranks: Coordinator | Literal["group"] | None, emit: Emitter, processes: Processes | None = None
) -> Coordinator:
    """Return a coordinator: that of torch's default process group for "group", if there is one.

    All ranks of the group make theirs at the same point of the program. Warns where a launcher has
    started several processes, and there is no group yet. `processes` is as for `C10d`.
    """
    if isinstance(ranks, Coordinator):
        return ranks
    # Looked up, not imported: a build of torch may lack it.
    group = getattr(torch, "distributed", None)
    if ranks is None or group is None or not group.is_available():
        return SingleProcess()
    if not has_group():
        started = present_ranks().world_size
        if started > 1:
            emit(
                "warning",
                f"WORLD_SIZE is {started}, and torch.distributed has no process group yet, so this "
                "manager saves alone. Make it after init_process_group; where each process has a "
                "root of its own, pass ranks=None",
            )
        return SingleProcess()
    if group.get_world_size() == 1:
        return SingleProcess()
    from holdfast.ranks.c10d import C10d

    return C10d.of_default_group(processes=processes, warn=partial(emit, "warning"))


class GroupAlarm:
    """Warns once if a process group has come after a manager that saves alone was made."""

    def __init__(self, ranks: Coordinator | Literal["group"] | None, emit: Emitter) -> None:
        """Look out for a group, unless there is one, or a warning was logged already."""
        self._emit = emit
        self._looks = ranks == "group" and not has_group() and present_ranks().world_size == 1

    def warn_if_grouped(self) -> None:
        """Warn if there is a group of several ranks now."""
        if not self._looks or not has_group():
            return
        self._looks = False
        if (num := present_ranks().world_size) > 1:
            self._emit(
                "warning",
                f"there is a process group of {num} ranks, and this manager was made before it, so "
                "it saves alone: only what this process holds. Make it after init_process_group, "
                "on all ranks; if each process has a root of its own, pass ranks=None",
            )


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
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        """No-op but for the check of the tag, like `announce`."""
        self.check_tag_unused("announce", tag)

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        raise UsageError("a run of one process has no follower that could hear")
