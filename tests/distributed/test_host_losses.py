"""Hosts with a disk each, here folders: ranks, disks and hosts that are lost in a save or a resume.

Invariant 1: one checkpoint, or none, and all ranks agree. Invariant 7: the run resumes bit for bit.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from distributed.jobs import Job, make
from distributed.losing import Losing
from distributed.run import run_ranks
from holdfast import CheckpointManager, HostTiers, errors
from holdfast.control import exits
from holdfast.maintenance.verify import verify
from holdfast.ranks.c10d import GroupExchange
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from marks import full

SMALL, LARGE = "aabb", "aabbccdd"
"""The host of each rank: its folder."""
NUM_STEPS = 4
DEADLINE_S = 30.0
PLACES = {
    "write": "step-00000002*-{own}.safetensors",
    "copy": "step-00000002*-{source}.safetensors",
    "index": "step-00000002*/index.json",
    "commit": "step-00000002*/manifest.json",
    "search": "list writers",
    "claim": "writers/*",
    "read": "step-*-{own}.safetensors",
    "turns": "step-*-{lost}.safetensors",
}
"""Keys at which the process is killed; `apply` and `exchange` are in no store."""

Saved = dict[str, bytes]


@dataclass(frozen=True)
class Loss:
    """Which ranks are killed, whether the disk of their host is emptied, and where."""

    ranks: tuple[int, ...]
    has_disk: bool
    place: str
    is_after: bool

    @classmethod
    def parse(cls, text: str, hosts: str) -> Loss:
        """Read a loss such as `rank 3 and disk, before write` or `host a, in exchange`."""
        who, _, where = text.partition(", ")
        name = who.split()[1]
        if who.startswith("host"):
            ranks = tuple(rank for rank, host in enumerate(hosts) if host == name)
        else:
            ranks = (int(name),)
        is_after, place = where.startswith("after"), where.split()[-1]
        return cls(ranks, not who.endswith(name), place, is_after)

    def watch(self, folder: Path, hosts: str, rank: int) -> Losing | Path:
        """Return the local tier of a rank, which loses it at its place.

        All ranks call this, as each notes its process.
        """
        local = folder / hosts[rank]
        (folder / f"pid{rank}").write_text(f"{os.getpid()}")
        dist.barrier()
        if rank != self.ranks[0]:
            return local
        lose = partial(self.lose, folder, local)
        if self.place not in PLACES:
            return local
        num_ranks, of_host = len(hosts), hosts.count(hosts[0])
        numbers = {"own": rank, "source": rank - of_host, "lost": rank - of_host}
        key = PLACES[self.place].format(**{k: f"{n % num_ranks:05}" for k, n in numbers.items()})
        return Losing(local, key, lose, after=self.is_after)

    def lose(self, folder: Path, local: Path) -> None:
        (folder / "met").touch()
        for rank in self.ranks[1:]:
            os.kill(int((folder / f"pid{rank}").read_text()), signal.SIGKILL)
        if self.has_disk:
            shutil.rmtree(local, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)


def call_before_exchange(number: int, lose: Callable[[], None]) -> None:
    """Call a function before this process begins its exchange of this number."""
    calls, start = count(1), GroupExchange.start_exchange

    def count_call(self: GroupExchange, *arguments: Any) -> Any:
        if next(calls) == number:
            lose()
        return start(self, *arguments)

    GroupExchange.start_exchange = count_call  # type: ignore[method-assign]


class Applied(nn.Linear):
    """A module that calls a function when its part of a load is applied.

    Its code is tried once before that (decision 0055).
    """

    def __init__(self, lose: Callable[[], None] | None = None) -> None:
        super().__init__(2, 2)
        self._lose = lose
        self._calls = count(1)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if next(self._calls) == 2 and self._lose is not None:
            self._lose()


def manager_of(
    folder: Path, local: Losing | Path, job: Job, extra: Applied | None = None
) -> CheckpointManager:
    root = HostTiers(local, folder / "remote", partner=True, close_timeout_s=0.0)
    state = {**job.state, "extra": extra or Applied()}
    return CheckpointManager(root, state, save_timeout_s=DEADLINE_S, sinks=())


def lose_in_save(folder: Path, hosts: str, loss: Loss, rank: int) -> tuple[str, list[Saved]]:
    """Save steps 1 and 2, with a loss in the second; returns the outcome, and all states."""
    job, states = make("fsdp", seed=1), list[Saved]()
    for _ in range(NUM_STEPS):
        job.step()
        states.append(job.whole())
    job = make("fsdp", seed=1)
    manager = manager_of(folder, loss.watch(folder, hosts, rank), job)
    outcome = ""
    for step in (1, 2):
        job.step()
        if step == 2 and loss.place == "exchange" and rank == loss.ranks[0]:
            # After the list of files, and its length.
            call_before_exchange(3, partial(loss.lose, folder, folder / hosts[rank]))
        try:
            manager.save(step).wait(60)
            outcome = "committed"
        except errors.HoldfastError as error:
            outcome = f"{error} {error.__cause__!r}"
    exits.unregister(manager)
    return outcome, states


def lose_in_resume(folder: Path, hosts: str, loss: Loss, rank: int) -> str:
    """Resume, with a loss; returns the outcome."""
    job = make("fsdp", seed=2)
    local = loss.watch(folder, hosts, rank)
    lose = partial(loss.lose, folder, folder / hosts[rank]) if rank == loss.ranks[0] else None
    if loss.place == "exchange" and lose is not None:
        call_before_exchange(1, lose)
    manager = manager_of(folder, local, job, Applied(lose if loss.place == "apply" else None))
    try:
        found = manager.resume()
        outcome = f"resumed from {found}"
    except errors.HoldfastError as error:
        outcome = f"{error} {error.__cause__!r}"
    exits.unregister(manager)
    return outcome


def resume(folder: Path, hosts: str, states: Sequence[Saved], rank: int) -> int:
    """Resume, and train and save to the end, with the states of a run without losses."""
    job = make("fsdp", seed=2)
    with manager_of(folder, folder / hosts[rank], job) as manager:
        found = manager.resume()
        assert found is not None
        assert job.whole() == states[found.step - 1]
        for step in range(found.step + 1, NUM_STEPS + 1):
            job.step()
            assert job.whole() == states[step - 1]
            manager.save(step, wait=True)
    return found.step


def expect_one_answer(
    folder: Path, hosts: str, loss: Loss, losses: Sequence[tuple[Loss, str]] = ()
) -> None:
    """Lose ranks in a save, and in resumes, before each of which the disk of a host is emptied."""
    run = partial(lose_in_save, folder, hosts, loss)
    found = run_ranks(len(hosts), run, lost=loss.ranks)
    said = [one[0] for one in found if one is not None]
    states = next(one[1] for one in found if one is not None)
    assert len(said) == len(hosts) - len(loss.ranks)
    assert (folder / "met").exists()
    # What certainly failed and what certainly committed exclude each other.
    is_committed = any(text == "committed" for text in said)
    is_failed = any("failed" in text and "may or may not" not in text for text in said)
    assert not (is_committed and is_failed), said
    for other, emptied in losses:
        (folder / "met").unlink()
        if emptied:
            shutil.rmtree(folder / emptied)
        fail = partial(lose_in_resume, folder, hosts, other)
        outcomes = run_ranks(len(hosts), fail, lost=other.ranks)
        assert (folder / "met").exists(), outcomes
        assert not any("resumed" in one for one in outcomes if one is not None), outcomes
    steps = {*run_ranks(len(hosts), partial(resume, folder, hosts, states))}
    assert len(steps) == 1, "all ranks resume from the same step"
    step = next(iter(steps)) or 0
    assert step >= 1 + is_committed
    if is_failed:
        assert step == 1, said
    for host in sorted({*hosts}):
        store = LocalStore(folder / host)
        entries = Catalog(store).checkpoints()
        assert entries[0].step == NUM_STEPS
        for entry in entries:
            assert entry.step <= step or verify(store, entry.folder).ok, entry


BRIEF = "rank 0 and disk, after commit"
SAVES = [
    f"{who}, {where}"
    for who in ("rank 0", "rank 0 and disk", "rank 2", "rank 2 and disk")
    for where in ("before write", "before index", "before commit", "after commit")
]


@pytest.mark.parametrize("text", [BRIEF, *full(*(text for text in SAVES if text != BRIEF))])
def test_what_is_lost_in_any_phase_of_a_save_leaves_one_answer(text: str, tmp_path: Path) -> None:
    expect_one_answer(tmp_path, SMALL, Loss.parse(text, SMALL))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("in_save", "in_resume", "emptied"),
    [
        ("rank 1, before write", "rank 1, in exchange", "c"),
        ("rank 3, before write", "rank 3, in exchange", "a"),
        ("rank 1, in exchange", "rank 0, in exchange", "c"),
        ("rank 2, in exchange", "rank 2, before search", ""),
        ("rank 3, before copy", "rank 1, before read", ""),
        ("rank 3 and disk, before write", "rank 2 and disk, before search", ""),
        ("rank 2, before index", "rank 0, before search", ""),
        ("rank 2, before commit", "rank 2, before turns", "a"),
        ("rank 2, after commit", "rank 3, in apply", ""),
        ("rank 2 and disk, after commit", "rank 1, in apply", "d"),
        ("rank 0, before copy", "rank 0, in apply", "b"),
        ("rank 0, after commit", "rank 0, before turns", "d"),
        ("rank 0, in exchange", "rank 3, before read", ""),
        ("host a and disk, before write", "host a and disk, before search", ""),
        ("host a and disk, in exchange", "host a and disk, before claim", ""),
        ("host a and disk, before commit", "host a and disk, in exchange", ""),
        ("host a and disk, after commit", "host a and disk, in apply", "c"),
        ("host b and disk, in exchange", "host b and disk, in exchange", "d"),
        ("host b and disk, after commit", "host b and disk, in apply", ""),
    ],
)
def test_of_four_hosts_what_is_lost_in_any_phase_of_a_save_or_a_resume_leaves_one_answer(
    in_save: str, in_resume: str, emptied: str, tmp_path: Path
) -> None:
    losses = [(Loss.parse(in_resume, LARGE), emptied)]
    expect_one_answer(tmp_path, LARGE, Loss.parse(in_save, LARGE), losses)
