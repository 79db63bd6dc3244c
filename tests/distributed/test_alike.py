"""R38: real ranks stay aligned where a call raises on one of them, and sum the room they need."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from allranks import Member
from distributed.run import run_ranks
from holdfast import errors
from holdfast.policy.triggers import Every, When
from holdfast.ranks.c10d import C10d
from holdfast.store.base import FreeSpace, WrappedStore
from holdfast.store.local import LocalStore


def said_by(call: Any, *args: Any, **named: Any) -> str:
    """What a call raises, with its cause."""
    try:
        pending = call(*args, **named)
        if pending is not None and hasattr(pending, "wait"):
            pending.wait(60)
    except errors.HoldfastError as error:
        return f"{error} {error.__cause__}"
    return "done"


def raise_at_40(now: Any, metrics: Any, event: Any) -> bool:
    """Whether to save, as only the leader is asked."""
    if now.step == 40:
        raise errors.UsageError("cannot decide")
    return False


def call_wrongly(root: Path, odd: int, rank: int) -> list[str]:
    """Save, load and save with a wrong argument on one rank, and then as all do.

    At step 40 a save is due, and the leader raises before it begins.
    """
    member = Member(C10d.of_default_group())
    is_odd = rank == odd
    extra: dict[str, object] = {"value": 1}
    state = {**member.state, "extra": extra}
    every = Every("10step") | When(raise_at_40)
    with member.manager(root, state=state, every=every, save_timeout_s=300) as manager:
        said = [said_by(manager.save, 1, tags=["no good"] if is_odd else [])]
        extra["value"] = threading.Lock() if is_odd else 1
        said.append(said_by(manager.save, 1))
        extra["value"] = 1
        said.append(said_by(manager.save, 2))
        said.append(said_by(manager.resume, override=["nothing"] if is_odd else []))
        said.append(said_by(manager.resume))
        said.append(said_by(manager.maybe_save, 10, samples=-1 if is_odd else None))
        said.append(said_by(manager.maybe_save, 20))
        said.append(said_by(manager.resume))
        said.append(said_by(manager.maybe_save, 30))
        said += [said_by(manager.maybe_save, step) for step in (40, 50)]
        assert [one.step for one in manager.list()] == [50, 30, 2]
    return said


@pytest.mark.full
@pytest.mark.parametrize("odd", [0, 1])
def test_a_call_that_raises_on_one_real_rank_fails_on_all_at_once(odd: int, tmp_path: Path) -> None:
    for said in run_ranks(2, partial(call_wrongly, tmp_path / "run", odd)):
        assert said is not None
        assert [one == "done" for one in said] == [
            *(False, False, True, False, True),
            *(False, False, True, True),
            *(False, True),
        ], said


class Cramped(WrappedStore):
    """A view of a root, of which each rank sees a file system of its own."""

    def __init__(self, root: Path, nbytes: int, file_system: str) -> None:
        super().__init__(LocalStore(root))
        self._space = FreeSpace(nbytes, None, file_system)

    @override
    def free_space(self) -> FreeSpace:
        return self._space


def save_into(root: Path, rooms: list[int], rank: int) -> str:
    """Save for the first time; each rank sees so much room."""
    member = Member(C10d.of_default_group(), width=4000)
    view = Cramped(root, rooms[rank], str(rank))
    manager = member.manager(view, preflight=True, save_timeout_s=300)
    said = said_by(manager.save, 1)
    manager.close()
    return said


@pytest.mark.full
def test_real_ranks_need_room_for_what_each_writes(tmp_path: Path) -> None:
    rooms = [1 << 40, 100_000, 5_000]
    for said in run_ranks(3, partial(save_into, tmp_path / "run", rooms)):
        assert said is not None
        assert "of rank 2, and" in said
        assert "of rank 0, and" not in said
    rooms = [1 << 40] * 3
    assert run_ranks(3, partial(save_into, tmp_path / "run", rooms)) == ["done"] * 3
