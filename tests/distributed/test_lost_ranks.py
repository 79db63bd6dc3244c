"""R38: processes that are killed or stopped in a save or a load. Invariant 1: one checkpoint, or
none. Invariant 6: a load changes all ranks or none, or says that it is half done.

`tests/saving/test_lost_ranks.py` and that of `loading` do it in every part, to threads.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from allranks import Member
from distributed.losing import Losing
from distributed.run import run_ranks
from holdfast import CheckpointManager, errors
from holdfast.control import exits
from holdfast.control.agreement import SaveStepAgreement
from holdfast.events import Event
from holdfast.maintenance.verify import verify
from holdfast.ownership.process import this_process
from holdfast.ranks import c10d, coordinator
from holdfast.ranks.c10d import C10d
from holdfast.ranks.coordinator import Processes
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

NUM_RANKS = 3
DEADLINE_S = 4.0
HOUR_S = 3600.0
"""Deadline that no test reaches."""
PLACES = {
    "write": "step-00000002*.safetensors",
    "index": "step-00000002*/index.json",
    "commit": "step-00000002*/manifest.json",
}


def losing(root: Path, key: str, how: signal.Signals, *, after: bool = False) -> Losing:
    """Make a store that sends the process a signal where it uses a key."""
    return Losing(root, key, partial(os.kill, os.getpid(), how), after=after)


def save_twice(
    root: Path, odd: int, place: str, how: signal.Signals, after: bool, rank: int
) -> str:
    """Save steps 1 and 2; returns what this rank says of step 2. The last one to be done lets a
    stopped rank go on."""
    member = Member(C10d.of_default_group())
    store = LocalStore(root)
    view = losing(root, PLACES[place], how, after=after) if rank == odd else store
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
    """A module that sends its process a signal when its part of a load is applied.

    Its code is tried once before that (decision 0055).
    """

    def __init__(self, how: signal.Signals | None) -> None:
        super().__init__(2, 2)
        self.how = how
        self.calls = count(1)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if next(self.calls) == 2 and self.how is not None:
            os.kill(os.getpid(), self.how)


def load_after_a_save(
    root: Path, odd: int, place: str, how: signal.Signals, rank: int
) -> tuple[str, bool, bool]:
    """What a rank says of its load; if its state is as it was, if its manager refuses work."""
    member = Member(C10d.of_default_group())
    is_odd = rank == odd
    extra = Lost(how if is_odd and place == "apply" else None)
    view = losing(root, LOADS[place], how) if is_odd else LocalStore(root)
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
        # The first resume reads in place; later, other ranks may have loaded.
        assert is_half, found
        assert is_old or place != "claim", found
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


def be_on_another_host(rank: int) -> Processes:
    """Let each rank be on a host of its own, as far as the others know."""
    name = f"node{rank}"
    own = msgspec.structs.replace(this_process(), host=name, boot_id=name)
    return Processes(own=own, has_ended=lambda process: False)


def lose_in_a_save(root: Path, odd: int, place: str, after: bool, rank: int) -> str:
    """Save step 2, in which rank `odd` is killed; no deadline ends within the test."""
    ranks = C10d.of_default_group(processes=be_on_another_host(rank))
    member = Member(ranks)
    if rank == odd:
        (root.parent / f"pid{odd}").write_text(f"{os.getpid()}")
    view = losing(root, PLACES[place], signal.SIGKILL, after=after) if rank == odd else root
    manager = member.manager(view, save_timeout_s=HOUR_S)
    member.train()
    manager.save(1).wait(60)
    try:
        manager.save(2).wait(100)
    except errors.HoldfastError as error:
        said = f"{error} {error.__cause__}"
    else:
        said = "committed"
    exits.unregister(manager)
    return said.replace((root.parent / f"pid{odd}").read_text(), "PID")


@pytest.mark.parametrize(
    ("num_ranks", "odd", "place", "after", "phase"),
    [
        (2, 1, "write", False, "writing"),
        *(
            pytest.param(num_ranks, odd, *rest, marks=pytest.mark.full)
            for num_ranks in (2, 4)
            for odd, *rest in (
                (num_ranks - 1, "write", False, "writing"),
                (0, "write", False, "committing"),
                (0, "index", False, "committing"),
                (0, "commit", False, "committing"),
                (0, "commit", True, "committing"),
            )
            if (num_ranks, odd) != (2, 1)
        ),
    ],
)
def test_a_rank_of_another_host_that_is_killed_in_a_save_is_named_with_its_phase(
    num_ranks: int, odd: int, place: str, after: bool, phase: str, tmp_path: Path
) -> None:
    lose = partial(lose_in_a_save, tmp_path / "run", odd, place, after)
    said = run_ranks(num_ranks, lose, lost=[odd])
    for rank, one in enumerate(said):
        if rank == odd:
            continue
        if after:
            assert one == "committed"
        else:
            assert f"rank {odd}, in {phase}: process PID on node{odd} has ended" in str(one), said


def lose_in_a_load(root: Path, odd: int, place: str, rank: int) -> str:
    """Save step 1, and resume, in which rank `odd` is killed."""
    ranks = C10d.of_default_group(processes=be_on_another_host(rank))
    member, is_odd = Member(ranks), rank == odd
    extra = Lost(signal.SIGKILL if is_odd and place == "apply" else None)
    member.train()
    state = {**member.state, "extra": extra}
    with member.manager(root, state=state) as manager:
        manager.save(1).wait(60)
    (root.parent / f"pid{rank}").write_text(f"{os.getpid()}")
    view = losing(root, LOADS[place], signal.SIGKILL) if is_odd else LocalStore(root)
    manager = member.manager(view, state=state, save_timeout_s=HOUR_S)
    said = "loaded"
    try:
        manager.resume()
    except errors.HoldfastError as error:
        said = f"{error} {error.__cause__}"
    exits.unregister(manager)
    return said.replace((root.parent / f"pid{odd}").read_text(), "PID")


@pytest.mark.parametrize(
    ("num_ranks", "odd", "place", "phase"),
    [
        (2, 0, "read", "applying"),
        *(
            pytest.param(num_ranks, odd, *rest, marks=pytest.mark.full)
            for num_ranks in (2, 4)
            for odd, *rest in (
                (num_ranks - 1, "read", "applying"),
                (num_ranks - 1, "apply", "applying"),
                (0, "read", "applying"),
                (0, "claim", "reading"),
                (0, "apply", "applying"),
            )
            if (num_ranks, odd, rest[0]) != (2, 0, "read")
        ),
    ],
)
def test_a_rank_of_another_host_that_is_killed_in_a_load_is_named_with_its_phase(
    num_ranks: int, odd: int, place: str, phase: str, tmp_path: Path
) -> None:
    lose = partial(lose_in_a_load, tmp_path / "run", odd, place)
    said = run_ranks(num_ranks, lose, lost=[odd])
    for rank, one in enumerate(said):
        if rank != odd:
            assert f"rank {odd}, in {phase}: process PID on node{odd} has ended" in str(one), said


def lose_before_a_wish(root: Path, odd: int, rank: int) -> str:
    """Agree on a call at which all save, after rank `odd` was killed."""
    ranks = C10d.of_default_group(processes=be_on_another_host(rank))
    agreed = SaveStepAgreement(ranks, timeout_s=HOUR_S, warn=print)
    agreed.count_call()
    if rank == odd:
        root.write_text(f"{os.getpid()}")
    torch.distributed.barrier()
    if rank == odd:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        agreed.propose_wish(b"save")
    try:
        while True:
            agreed.count_call()
            time.sleep(0.01)  # as a step of a training
    except errors.HoldfastError as error:
        return f"{error}".replace(root.read_text(), "PID")


@pytest.mark.full
def test_a_rank_that_was_killed_before_all_agree_on_a_step_is_named(tmp_path: Path) -> None:
    said = run_ranks(3, partial(lose_before_a_wish, tmp_path / "pid", 1), lost=[1])
    for one in (said[0], said[2]):
        assert "rank 1, in agreeing on a step to save at: process PID on node1" in str(one), said
