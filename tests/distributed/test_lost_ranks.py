"""R38: processes that are killed or stopped in a save or a load. Invariant 1: one checkpoint, or
none. Invariant 6: a load changes all ranks or none, or says that it is half done.

`tests/saving/test_lost_ranks.py` and that of `loading` do it in every part, to threads.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from typing_extensions import override

from allranks import Member
from distributed.run import run_ranks
from holdfast import CheckpointManager, errors, manager
from holdfast.control import exits
from holdfast.events import Event
from holdfast.maintenance.verify import verify
from holdfast.ranks import c10d, coordinator
from holdfast.ranks.c10d import C10d
from holdfast.root.catalog import Catalog
from holdfast.store.base import BlockWriter, Buffer, WrappedStore
from holdfast.store.local import LocalStore

NUM_RANKS = 3
DEADLINE_S = 4.0
PLACES = {
    "write": "step-00000002*.safetensors",
    "index": "step-00000002*/index.json",
    "commit": "step-00000002*/manifest.json",
}


class Losing(WrappedStore):
    """Sends the process one signal, before it writes a key or after it."""

    def __init__(self, root: Path, key: str, how: signal.Signals, *, after: bool) -> None:
        super().__init__(LocalStore(root))
        self._key, self._how, self._after = key, how, after
        self._not_met = Lock()

    def _meet(self, key: str) -> None:
        if fnmatch(key, self._key) and self._not_met.acquire(blocking=False):
            os.kill(os.getpid(), self._how)

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        if not self._after:
            self._meet(key)
        self.inner.put(key, data, if_absent=if_absent)
        if self._after:
            self._meet(key)

    @override
    def read_into(self, key: str, start: int, buffer: memoryview, **options: Any) -> None:
        self._meet(key)
        self.inner.read_into(key, start, buffer, **options)

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        self._meet(key)
        return self.inner.create(key, nbytes, at_most=at_most)


def save_twice(
    root: Path, odd: int, place: str, how: signal.Signals, after: bool, rank: int
) -> str:
    """Save steps 1 and 2; returns what this rank says of step 2. The last one to be done lets a
    stopped rank go on."""
    member = Member(C10d.of_default_group())
    store = LocalStore(root)
    view = Losing(root, PLACES[place], how, after=after) if rank == odd else store
    (root.parent / f"pid{rank}").write_text(f"{os.getpid()}")
    manager = member.manager(view, save_timeout_s=DEADLINE_S)
    member.train()
    manager.save(1).wait(60)
    try:
        manager.save(2).wait(60)
    except errors.HoldfastError as error:
        said = f"{error} {error.__cause__}"
    else:
        said = "committed"
    (root.parent / f"done{rank}").touch()
    if len(list(root.parent.glob("done*"))) == NUM_RANKS - 1 and how == signal.SIGSTOP:
        os.kill(int((root.parent / f"pid{odd}").read_text()), signal.SIGCONT)
    exits.unregister(manager)
    return said


def go_on(root: Path, rank: int) -> tuple[int, int]:
    """Resume, and save step 3."""
    member = Member(C10d.of_default_group())
    with member.manager(root, takeover=True) as manager:
        found = manager.resume()
        assert found is not None
        return found.step, manager.save(3).wait().step


def cases() -> Iterator[object]:
    """One of them in `make test`."""
    for how in (signal.SIGKILL, signal.SIGSTOP):
        for odd, place, after in (
            (1, "write", False),
            (0, "write", False),
            (0, "index", False),
            (0, "commit", False),
            (0, "commit", True),
        ):
            is_brief = (how, odd) == (signal.SIGKILL, 1)
            name = f"{how.name}-{odd}-{'after' if after else 'before'}_{place}"
            marks = () if is_brief else pytest.mark.full
            yield pytest.param(how, odd, place, after, marks=marks, id=name)


@pytest.mark.parametrize(("how", "odd", "place", "after"), [*cases()])
def test_the_living_ranks_agree_with_the_register_and_the_run_goes_on(
    how: signal.Signals, odd: int, place: str, after: bool, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    lost = [odd] if how == signal.SIGKILL else []
    said = run_ranks(NUM_RANKS, partial(save_twice, root, odd, place, how, after), lost=lost)
    entries = Catalog(LocalStore(root)).checkpoints()
    assert all(verify(LocalStore(root), entry.folder).ok for entry in entries)
    steps = sorted(entry.step for entry in entries)
    assert steps == ([1, 2] if after else [1])
    for rank, one in enumerate(said):
        if rank == odd and how == signal.SIGKILL:
            continue
        assert (one == "committed") == after, said
        if rank != odd and not after:
            assert f"rank {odd}" in str(one), said
    assert run_ranks(2, partial(go_on, root)) == [(steps[-1], 3)] * 2


LOADS = {"read": "step-00000001*/model*.safetensors", "claim": "writers/*", "apply": ""}


class Lost(nn.Linear):
    """A module that sends its process a signal when its part of a load is applied."""

    def __init__(self, how: signal.Signals | None) -> None:
        super().__init__(2, 2)
        self.how = how

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if self.how is not None:
            os.kill(os.getpid(), self.how)


def load_after_a_save(
    root: Path, odd: int, place: str, how: signal.Signals, rank: int
) -> tuple[str, bool, bool]:
    """What a rank says of its load; if its state is as it was, if its manager refuses work."""
    member = Member(C10d.of_default_group())
    is_odd = rank == odd
    extra = Lost(how if is_odd and place == "apply" else None)
    view = Losing(root, LOADS[place], how, after=False) if is_odd else LocalStore(root)
    (root.parent / f"pid{rank}").write_text(f"{os.getpid()}")
    member.train()
    state = {**member.state, "extra": extra}
    with member.manager(root, state=state) as manager:
        manager.save(1).wait(60)
    member.train()
    before, said = member.bits(), "loaded"
    manager = member.manager(view, state=state, save_timeout_s=DEADLINE_S)
    try:
        manager.resume()
    except errors.HoldfastError as error:
        said = f"{error} {error.__cause__}"
    (root.parent / f"done{rank}").touch()
    if len(list(root.parent.glob("done*"))) == NUM_RANKS - 1 and how == signal.SIGSTOP:
        os.kill(int((root.parent / f"pid{odd}").read_text()), signal.SIGCONT)
    exits.unregister(manager)
    return said, member.bits() == before, manager._session.applier.half_loaded is not None


def load_once_more(root: Path, rank: int) -> int:
    member = Member(C10d.of_default_group())
    with member.manager(
        root, state={**member.state, "extra": Lost(None)}, takeover=True
    ) as manager:
        found = manager.resume()
        return -1 if found is None else found.step


@pytest.mark.parametrize(
    ("how", "odd", "place"),
    [
        pytest.param(
            *(how, odd, place),
            marks=() if (how, odd, place) == (signal.SIGKILL, 1, "read") else pytest.mark.full,
            id=f"{how.name}-{odd}-{place}",
        )
        for how in (signal.SIGKILL, signal.SIGSTOP)
        for odd in (0, 1)
        for place in LOADS
        if not (odd and place == "claim")  # a follower claims nothing
    ],
)
def test_ranks_that_lose_another_in_a_load_have_their_state_or_say_that_it_is_mixed(
    how: signal.Signals, odd: int, place: str, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    lost = [odd] if how == signal.SIGKILL else []
    found = run_ranks(NUM_RANKS, partial(load_after_a_save, root, odd, place, how), lost=lost)
    for rank, one in enumerate(found):
        if rank == odd:
            continue
        assert one is not None
        said, is_old, is_half = one
        assert f"rank {odd}" in said, found
        assert is_half == (place == "apply"), found
        assert is_old or is_half, found
    assert run_ranks(2, partial(load_once_more, root)) == [1, 1]


def save_beside_one_that_is(how: signal.Signals, odd: int, root: Path, rank: int) -> str:
    """Save step 2, before which rank `odd` gets a signal; the limit is that of every manager.

    A warning that names it lets it go on, if it is stopped.
    """
    c10d.LOOK_S = 0.2
    c10d.FIRST_S = coordinator.FIRST_S = 0.5
    pids = root.parent / f"pid{odd}"

    def hear(event: Event) -> None:
        if event.kind == "warning" and f"rank {odd} (process" in event.message:
            os.kill(int(pids.read_text()), signal.SIGCONT)

    saves = CheckpointManager(root, {"model": nn.Linear(2, 2)}, sinks=[hear])
    saves.save(1).wait()
    if rank == odd:
        pids.write_text(f"{os.getpid()}")
    torch.distributed.barrier()
    if rank == odd:
        os.kill(os.getpid(), how)
    try:
        saves.save(2).wait()
    except errors.HoldfastError as error:
        exits.unregister(saves)
        return str(error).replace(pids.read_text(), "PID")
    saves.close()
    return "committed"


@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_rank_is_named_long_before_the_deadline(odd: int, tmp_path: Path) -> None:
    save = partial(save_beside_one_that_is, signal.SIGKILL, odd, tmp_path / "run")
    said = run_ranks(NUM_RANKS, save, lost=[odd])
    for rank, one in enumerate(said):
        if rank != odd:
            assert f"rank {odd}" in str(one), said
            assert "process PID on" in str(one), said


@pytest.mark.parametrize("odd", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_stopped_rank_is_named_and_waited_for(odd: int, tmp_path: Path) -> None:
    save = partial(save_beside_one_that_is, signal.SIGSTOP, odd, tmp_path / "run")
    assert run_ranks(NUM_RANKS, save) == ["committed"] * NUM_RANKS


def lose_one_of_another_host(odd: int, root: Path, rank: int) -> str:
    """Each rank is on a host of its own, as far as the others know; `odd` is killed."""
    c10d.LOOK_S, c10d.BEAT_S, c10d.LOST_S = 0.2, 0.1, 3.0
    name = f"node{rank}"
    own = msgspec.structs.replace(manager.this_process(), host=name, boot_id=name)
    manager.this_process = lambda: own
    return save_beside_one_that_is(signal.SIGKILL, odd, root, rank)


@pytest.mark.full
@pytest.mark.parametrize("odd", [0, 1])
def test_a_killed_rank_of_another_host_is_named_by_its_silence(odd: int, tmp_path: Path) -> None:
    lose = partial(lose_one_of_another_host, odd, tmp_path / "run")
    said = run_ranks(NUM_RANKS, lose, lost=[odd])
    for rank, one in enumerate(said):
        if rank != odd:
            assert f"rank {odd}" in str(one), said
            assert f"process PID on node{odd} has shown no sign of life" in str(one), said
