"""Which ranks a manager works with, if it is not told."""

from __future__ import annotations

import pytest

from holdfast.events import Emitter, Event
from holdfast.ranks.chosen import SingleProcess, coordinator_of
from holdfast.testing import ThreadCoordinator


def test_a_manager_that_is_made_before_its_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun the other processes are refused by the claim, and this is why."""
    seen: list[Event] = []
    emit = Emitter((seen.append,))
    assert isinstance(coordinator_of("group", emit), SingleProcess)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert isinstance(coordinator_of(None, emit), SingleProcess)
    (leader, _) = ThreadCoordinator.for_ranks(2)
    assert coordinator_of(leader, emit) is leader
    assert seen == []
    assert isinstance(coordinator_of("group", emit), SingleProcess)
    (event,) = seen
    assert (event.kind, "after init_process_group" in event.message) == ("warning", True)
