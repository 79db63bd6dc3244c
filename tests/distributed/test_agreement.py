"""R38: rounds of processes over the store of their group, and what happens to some of them."""

from __future__ import annotations

import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import warm
from distributed.run import run_ranks
from holdfast.errors import Disconnected, RanksFailed
from holdfast.ranks.c10d import C10d, open_group
from holdfast.ranks.coordinator import RankFailure
from marks import full
from ranks.together import client, new_server

PATIENCE_S = 60.0
BRIEF_S = 1.0


def rounds_beside_collectives(rank: int) -> list[bytes]:
    """Ten rounds in which all agree on the sum of what each posts, between collectives."""
    coordinator = C10d.of_default_group()
    heard = []
    for number in range(10):
        dist.all_reduce(torch.ones(1000))
        coordinator.post(f"{number}", b"%d" % (rank + number), timeout_s=PATIENCE_S)
        if coordinator.is_leader:
            posts = coordinator.collect(f"{number}", timeout_s=PATIENCE_S).expect_all("sum")
            heard.append(b"%d" % sum(map(int, posts)))
            coordinator.announce(f"{number}", heard[-1], timeout_s=PATIENCE_S)
        else:
            heard.append(coordinator.hear(f"{number}", timeout_s=PATIENCE_S))
    return heard


def lose_rank_1(how: signal.Signals, rank: int) -> list[int]:
    """What the leader and another follower say of a rank that is lost before it posts."""
    coordinator = C10d.of_default_group()
    if rank == 1:
        os.kill(os.getpid(), how)
    coordinator.post("save", b"", timeout_s=PATIENCE_S)
    if not coordinator.is_leader:
        return [int(word) for word in coordinator.hear("save", timeout_s=PATIENCE_S).split()]
    silent = coordinator.collect("save", timeout_s=BRIEF_S).silent
    coordinator.announce("save", b" ".join(b"%d" % n for n in silent), timeout_s=PATIENCE_S)
    return [*silent]


def fail_in_rank_1(rank: int) -> str:
    """What the leader says of a rank that fails while another one is busy."""
    coordinator = C10d.of_default_group()
    if rank == 1:
        coordinator.fail("save", RankFailure("fsync", "OSError: I/O error"), timeout_s=PATIENCE_S)
    if not coordinator.is_leader:
        return coordinator.hear("save", timeout_s=PATIENCE_S).decode()
    try:
        coordinator.collect("save", timeout_s=10 * PATIENCE_S).expect_all("save")
    except RanksFailed as error:
        coordinator.announce("save", str(error).encode(), timeout_s=PATIENCE_S)
        return str(error)
    return "nobody failed"


@pytest.mark.parametrize("num_ranks", [2, *full(4)])
def test_rounds_go_on_beside_collectives(num_ranks: int) -> None:
    sums = [b"%d" % (sum(range(num_ranks)) + num_ranks * number) for number in range(10)]
    assert run_ranks(num_ranks, rounds_beside_collectives) == [sums] * num_ranks


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_at_the_deadline(how: signal.Signals) -> None:
    assert run_ranks(3, partial(lose_rank_1, how), lost=[1]) == [[1], None, [1]]


def test_a_rank_that_fails_is_named_in_all_ranks_with_its_phase() -> None:
    said = "save failed in:\n  rank 1, in fsync: OSError: I/O error"
    assert run_ranks(3, fail_in_rank_1) == [said] * 3


def meet_elsewhere(port: int, rank: int) -> None:
    """Form a group of two over another store."""
    dist.destroy_process_group()
    open_group("gloo", timeout_s=PATIENCE_S, store=client(port), rank=rank, world_size=2)


def come_back(port: int, rank: int) -> str:
    """What the first rank is told that finds the addresses of a group whose processes ended."""
    dist.destroy_process_group()
    try:
        open_group("gloo", timeout_s=2.0, store=client(port), rank=rank, world_size=2)
    except Disconnected as error:
        return str(error)
    return "connected"


@pytest.mark.full
def test_a_group_that_finds_the_addresses_of_its_former_life_is_told_what_helps() -> None:
    """So it goes after a restart by torchrun, whose agent keeps the store.

    The connection is refused, or the rank waits for the other one to connect, for gloo's 10 s.
    """
    store = new_server()
    run_ranks(2, partial(meet_elsewhere, store.port))
    (said,) = run_ranks(1, partial(come_back, store.port))
    assert "Gloo connectFullMesh failed" in str(said)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(said)


def test_a_group_whose_store_refuses_the_connection_is_told_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(Disconnected, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        open_group("gloo", timeout_s=1.0)


@pytest.mark.full
def test_a_restart_by_torchrun_reads_nothing_of_the_life_before() -> None:
    """The agent's store is the same, with the keys of the ranks that ended."""
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = Path(__file__).with_name("restarted.py")
    done = warm.run(["-m", "torch.distributed.run", *words, script])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [
        *("life 0, rank 0: posted", "life 0, rank 1: posted"),
        *("life 1, rank 0: nothing, then [b'0', b'1']", "life 1, rank 1: nothing, then b'done'"),
    ]
