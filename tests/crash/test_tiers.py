"""Faults at every single operation on the remote tier, and kills while it is written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import warm
from holdfast import errors
from holdfast.encryption.store import sealing
from holdfast.keys import Encryption, SecretKey
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import Last
from holdfast.replication import upload as upload_module
from holdfast.replication import upload_thread
from holdfast.root.catalog import Catalog
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, OpName, Stopped
from marks import full
from storms import harmless, storm
from tiers import Noted, saved, steps_in, unopened
from ways import Tiny

SEALS = Encryption(keys=SecretKey(bytes(range(32))))
SMALL, LARGE = 64, 1024 * 1024
"""Elements of a tensor: files of one block, and of two."""

Worlds = Callable[[int], "World"]


class World:
    """Both tiers of a run that has saved once, and what was acknowledged since."""

    keep_local: Any = Last(1)

    def __init__(self, remote: Store, size: int, encrypt: Encryption | None = None) -> None:
        self.local, self.remote = MemoryStore("local"), remote
        self.size, self.encrypt = size, encrypt
        self.acknowledged: list[int] = []
        self.noted = Noted()
        self.live(remote, 1)

    def live(self, remote: Store, *steps: int, **options: Any) -> None:
        """A process: resume, save, send."""
        tiny = Tiny(self.size)
        root = Tiered(
            self.local,
            remote,
            keep_local=self.keep_local,
            keep_remote=Last(2),
            close_timeout_s=0,
            **options,
        )
        manager = unopened(
            root, tiny, sinks=(self.noted,), save_timeout_s=120, encrypt=self.encrypt
        )
        try:
            manager.resume()
            for step in steps:
                saved(manager, tiny, step)
                self.acknowledged.append(step)
            manager.wait()
        finally:
            with suppress(errors.HoldfastError, Stopped):
                manager.close()

    def steps(self, store: Store) -> list[int]:
        """What is committed in a tier, and whole."""
        return steps_in(sealing(store, self.encrypt))

    def check(self) -> None:
        """Nothing is torn, nothing that was acknowledged is lost, in the tier in which it was."""
        here, there = self.steps(self.local), self.steps(self.remote)
        assert max([*here, *there]) >= max(self.acknowledged)
        sent = [event.step for event in self.noted.of("uploaded") if event.step is not None]
        assert there[0] >= max(sent)

    def check_settled(self) -> None:
        """Each tier has what its rule keeps, and nothing else."""
        newest = max(self.acknowledged)
        assert self.steps(self.local) == ([newest] if self.keep_local else [])
        assert self.steps(self.remote) == [newest, newest - 1][: len(self.acknowledged)]
        assert Ledger(self.local).waiting() == {}
        kept = {one.folder for one in Catalog(sealing(self.remote, self.encrypt)).checkpoints()}
        loose = [
            info.key
            for info in self.remote.list()
            if info.key.partition("/")[0] not in {*kept, "writers", "history", "latest"}
        ]
        assert [key for key in loose if not key.endswith("/manifest.json")] == []


@pytest.fixture(params=["memory", *full("folder")])
def worlds(
    request: pytest.FixtureRequest, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Worlds:
    """New worlds, with either kind of remote tier."""
    monkeypatch.setattr(upload_thread, "BACKOFF_S", 0.0001)

    def make(number: int, size: int = SMALL, encrypt: Encryption | None = None) -> World:
        is_folder = request.param == "folder"
        remote = LocalStore(ram_path / str(number)) if is_folder else MemoryStore("remote")
        return World(remote, size, encrypt)

    return make


@pytest.fixture
def large_worlds(worlds: Any) -> Worlds:
    """The same with large files, which are written aside."""
    return lambda number: worlds(number, LARGE)


@pytest.fixture
def sealed_worlds(worlds: Any) -> Worlds:
    """The same with sealed checkpoints."""
    return lambda number: worlds(number, SMALL, SEALS)


def sweep(
    worlds: Worlds,
    kind: Any,
    *,
    only: str = "*",
    op: OpName | None = None,
    times: int = 1,
    every: int = 1,
) -> Iterator[World]:
    """A world for each operation on keys like these, with the fault in it, and one without."""
    at, num_struck, struck = 0, 0, True
    while struck:
        world = worlds(at)
        fault = Fault(kind=kind, op=op, at=at, key=only, times=times)
        with suppress(Stopped):
            world.live(FaultyStore(world.remote, [fault]), 2, 3)
        world.check()
        yield world
        at, struck = at + every, fault.reached.is_set()
        num_struck += struck
    assert num_struck * every > (20 if op is None else 4)


def stop_at_every_operation(worlds: Worlds, kind: Any, **chosen: Any) -> None:
    for world in sweep(worlds, kind, **chosen):
        world.live(world.remote)
        world.check()
        world.check_settled()
        world.live(world.remote, max(world.acknowledged) + 1)
        world.check_settled()


ALL_OR_SOME = [18, *full(9), pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize("every", ALL_OR_SOME)
@pytest.mark.parametrize("kind", ["stop_after", *full("stop_before")])
def test_a_stop_at_every_operation_on_the_remote_tier_loses_nothing(
    worlds: Worlds, kind: Any, every: int
) -> None:
    """R1, R2, R23; invariants 1, 2, 4: and the next process ends what was begun."""
    stop_at_every_operation(worlds, kind, every=every)


def test_a_stop_loses_nothing_if_no_local_copy_stays(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 4: a local copy goes after the remote one is whole, also the newest."""
    monkeypatch.setattr(World, "keep_local", 0)
    stop_at_every_operation(worlds, "stop_after", every=14)


@pytest.mark.full
@pytest.mark.parametrize("every", ALL_OR_SOME)
@pytest.mark.parametrize("kind", ["stop_before", "stop_after", "lose_reply"])
def test_sealed_tiers_outlive_a_stop_or_a_lost_reply_at_every_operation(
    sealed_worlds: Worlds, kind: Any, every: int
) -> None:
    """R1, R2, R23; invariants 1, 2, 4."""
    stop_at_every_operation(sealed_worlds, kind, every=every)


@pytest.mark.full
@pytest.mark.parametrize(
    "op", ["put", pytest.param(None, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("kind", ["stop_before", "stop_after"])
def test_sealed_tiers_outlive_a_stop_around_the_keys(
    sealed_worlds: Worlds, kind: Any, op: OpName | None
) -> None:
    """R1: what is committed opens; in the long tier also where keys and manifests are read."""
    stop_at_every_operation(sealed_worlds, kind, only="step-*/[km]*", op=op)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["stop_before", "stop_after"])
def test_a_stop_while_a_large_file_is_sent_leaves_no_half_of_it(
    large_worlds: Worlds, kind: Any
) -> None:
    """R1, R2, D8, D20."""
    stop_at_every_operation(large_worlds, kind, only="s*.safetensors")


@pytest.mark.parametrize("every", ALL_OR_SOME)
@pytest.mark.parametrize("kind", ["lose_reply", *full("fail")])
@pytest.mark.parametrize("times", [1, *full(3)])
def test_a_failure_of_every_operation_on_the_remote_tier_is_outlived(
    worlds: Worlds, kind: Any, times: int, every: int
) -> None:
    """Nothing is lost, torn, falsely refused or falsely acknowledged; the same process sends all,
    and what its retention left is for the next."""
    for world in sweep(worlds, kind, times=times, every=every):
        check_outlived(world)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_a_failure_while_a_large_file_is_sent_is_outlived(large_worlds: Worlds, kind: Any) -> None:
    """D8."""
    for world in sweep(large_worlds, kind, only="s*.safetensors"):
        check_outlived(world)


def check_outlived(world: World) -> None:
    assert world.acknowledged == [1, 2, 3]
    assert steps_in(world.remote)[:2] == [3, 2]
    world.live(world.remote)
    world.check_settled()


@pytest.mark.parametrize("kind", ["flip", *full("truncate")])
def test_every_spoiled_transfer_is_found_where_it_is_read_back(worlds: Worlds, kind: Any) -> None:
    """R17: never acknowledged, and the local copy stays."""
    at, struck = 0, True
    while struck:
        world = worlds(at)
        fault = Fault(kind=kind, key="s*", at=at)  # files and manifests, not claims
        with suppress(errors.HoldfastError):
            world.live(FaultyStore(world.remote, [fault]), 2, 3, read_back=True, tries=1)
        newest_sent = max(event.step or 0 for event in world.noted.of("uploaded"))
        there = steps_in(world.remote)
        assert there[0] >= newest_sent
        assert max([*steps_in(world.local), there[0]]) >= max(world.acknowledged)
        at, struck = at + 1, fault.reached.is_set()
    assert at > 8


def manifest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the remote commit comes before the files."""
    real = upload_module.Sender._send_files

    def send_files(self: Any, folder: str, manifest: Any) -> None:
        data, _ = self._listing(folder)
        self._remote.make_folder(folder)
        self._remote.put(f"{folder}/manifest.json", data)
        real(self, folder, manifest)

    monkeypatch.setattr(upload_module.Sender, "_send_files", send_files)
    monkeypatch.setattr(upload_module.Sender, "_commit", lambda *args: None)


def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: large files are written under their final names."""

    def send_aside(self: Any, key: str, nbytes: int, pieces: Any) -> None:
        self._send_pieces(key, key, nbytes, pieces)

    monkeypatch.setattr(upload_module.Sender, "_send_aside", send_aside)


@pytest.mark.full
@pytest.mark.parametrize("mutant", [manifest_first, in_place])
def test_the_check_catches(
    mutant: Callable[[pytest.MonkeyPatch], None],
    large_worlds: Worlds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R1, D8: our own code with its order broken does not pass."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, errors.HoldfastError)) as caught:
        stop_at_every_operation(large_worlds, "stop_before", only="s*.safetensors")
    assert not isinstance(caught.value, errors.DeadlineExceeded)  # a mutant that cannot send at all


@pytest.mark.full
@pytest.mark.parametrize("sealed", [(), ("--sealed",)], ids=["plain", "sealed"])
@pytest.mark.parametrize("machines", ["same", "new"])
def test_kills_during_uploads_and_remote_retention_lose_nothing(
    tmp_path: Path, machines: str, sealed: tuple[str, ...]
) -> None:
    """R1, R9, R23: on one machine, whose local tier stays, and on new ones each time."""
    counts = harmless(storm_in(tmp_path, "--kills", "20", "--machines", machines, *sealed))
    assert counts["killed"] >= 20
    assert counts["uploaded"] >= 3


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machines", ["same", "new"])
@pytest.mark.parametrize("seed", range(2))
def test_more_kills_lose_nothing(tmp_path: Path, machines: str, seed: int) -> None:
    """R1, R9, R23."""
    options = ("--kills", "125", "--machines", machines, "--seed", str(seed + 1))
    assert harmless(storm_in(tmp_path, *options))["killed"] >= 125


@pytest.mark.full
def test_the_storm_catches_a_local_copy_that_goes_too_early(tmp_path: Path) -> None:
    """R1, D19: our own code with its order broken does not pass."""
    counts = storm_in(tmp_path, "--kills", "20", "--mutant", "holds_nothing")
    assert counts["bad"] > 0, counts


def storm_in(folder: Path, *options: str) -> dict[str, Any]:
    """A storm over two tiers in this folder."""
    return storm("tiers_storm", folder / "remote", "--local", str(folder), *options)


LEAVES = """
import sys, torch
from holdfast import CheckpointManager, Tiered
tree = {{"step": 0, "x": torch.zeros(4 * 1024 * 1024)}}
root = Tiered("local", {remote!r}, close_timeout_s={timeout_s}, on_upload_failure="raise")
manager = CheckpointManager(root, {{"tree": tree}}, preflight=False)
manager.resume()
tree["step"] += 1
manager.save(tree["step"])
"""


def leave(folder: Path, **values: Any) -> subprocess.CompletedProcess[str]:
    """A program that saves, and ends without closing anything."""
    return warm.run(["-c", LEAVES.format(**values)], cwd=folder)


def test_the_end_of_a_program_waits_for_its_uploads(tmp_path: Path) -> None:
    """D39."""
    done = leave(tmp_path, remote="remote", timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert steps_in(LocalStore(tmp_path / "remote")) == [1]


def test_a_program_that_could_not_send_says_so_and_does_not_end_well(tmp_path: Path) -> None:
    """D37, D39: if that is wanted; the next one sends it."""
    leave(tmp_path, remote="remote", timeout_s=60)
    (tmp_path / "remote").rename(tmp_path / "away")
    done = leave(tmp_path, remote="remote", timeout_s=0.5)
    assert done.returncode == 1, done.stderr
    assert "not uploaded: 1 checkpoints" in done.stderr
    (tmp_path / "away").rename(tmp_path / "remote")
    assert leave(tmp_path, remote="remote", timeout_s=60).returncode == 0
    assert len(steps_in(LocalStore(tmp_path / "remote"))) == 3
