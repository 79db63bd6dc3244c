"""Hosts that are cut off from the network: namespaces at one switch, a rank on each.

The processes of a lost host live on, and nothing closes their connections.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from children import environment
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

NUM_RANKS = 3


class Network:
    """Network namespaces that a bridge in another one connects."""

    def __init__(self, processes: ExitStack) -> None:
        self._switch, *self._hosts = (_hold_namespace(processes) for _ in range(NUM_RANKS + 1))
        self._run(self._switch, "link add name switch type bridge")
        self._run(self._switch, "link set switch up")
        for number, host in enumerate(self._hosts):
            peer = f"type veth peer name eth0 netns {host}"
            self._run(self._switch, f"link add name port{number} {peer}")
            self._run(self._switch, f"link set port{number} master switch up")
            self._run(host, f"addr add 10.77.0.{number + 1}/24 dev eth0")
            self._run(host, "link set eth0 up")
            self._run(host, "link set lo up")

    def cut_off(self, number: int) -> None:
        """Pull the plug of a host."""
        self._run(self._switch, f"link set port{number} down")

    def enter(self, number: int) -> list[str]:
        """Words before a command that runs on a host."""
        return _enter(self._hosts[number])

    def _run(self, host: int, words: str) -> None:
        subprocess.run([*_enter(host), "ip", *words.split()], check=True, timeout=60)


def _enter(pid: int) -> list[str]:
    return ["nsenter", "--target", f"{pid}", "--net"]


def _hold_namespace(processes: ExitStack) -> int:
    """Return a process in a network namespace of its own, which lives until the test ends."""
    code = "print(flush=True); input()"
    command = ["unshare", "--net", sys.executable, "-c", code]
    pipe = subprocess.PIPE
    holder = processes.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe))
    processes.callback(holder.kill)
    assert holder.stdout is not None
    if not holder.stdout.readline():
        pytest.skip("no network namespaces here, which need root")
    return holder.pid


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.full
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_whose_host_is_cut_off_is_named_long_before_the_deadline(
    odd: int, processes: ExitStack, tmp_path: Path
) -> None:
    """Rank 0 hosts the store, too: then the calls of the others to it hang."""
    network = Network(processes)
    ranks = []
    for rank in range(NUM_RANKS):
        command = [sys.executable, Path(__file__).with_name("on_host.py")]
        started = subprocess.Popen(
            [*network.enter(rank), *command, f"{rank}", f"{NUM_RANKS}", tmp_path / "run"],
            env={**environment(), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ranks.append(processes.enter_context(started))
        processes.callback(started.kill)
    for one in ranks:
        assert one.stdout is not None
        assert one.stdout.readline() == "saved\n"
    network.cut_off(odd)
    for one in ranks:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    said = [one.stdout.readline() for one in ranks if one.stdout is not None]
    for rank, text in enumerate(said):
        lost = (1, 2) if rank == odd == 0 else (0,) if rank == odd else (odd,)
        names = [f"the host of process {ranks[one].pid} on node{one}" for one in lost]
        assert all(f"rank {one}, in " in text for one in lost), said
        assert any(f"{name} does not answer" in text for name in names), said
    assert [entry.step for entry in Catalog(LocalStore(tmp_path / "run")).checkpoints()] == [1]
