"""R38: several ranks save into two tiers, of which the leader alone sends, and load from either."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks import Member, all_of, on_ranks, save_on
from holdfast import CachedStore, Encryption, Last, Tiered, errors
from holdfast.encryption.store import sealing
from holdfast.keys import SecretKey
from holdfast.ranks.chosen import SingleProcess
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import FaultyStore
from holdfast.testing.ranks import ThreadCoordinator
from marks import diagonal
from tiers import Noted, Switch, steps_in, without_backoff

SEALS = Encryption(keys=SecretKey(bytes(range(32))))


def resume_on(num_ranks: int, root: Any, **options: Any) -> list[tuple[int, dict[str, bytes]]]:
    """Resume on so many ranks, from other bits; step and bits of each."""
    ranks = [SingleProcess()] if num_ranks == 1 else ThreadCoordinator.for_ranks(num_ranks)

    def work(member: Member) -> tuple[int, dict[str, bytes]]:
        with torch.no_grad():
            member.model[0].weight.zero_()
        with member.manager(root, **options) as manager:
            found = manager.resume()
            assert found is not None
            bits = member.bits()
            manager.wait()
        return found.step, bits

    return all_of(on_ranks(ranks, work))


@pytest.mark.parametrize("encrypt", [None, SEALS], ids=["plain", "encrypted"])
def test_the_leader_alone_sends_and_each_byte_once(encrypt: Any) -> None:
    local, remote = MemoryStore("local"), MemoryStore("remote")
    views = [FaultyStore(remote) for _ in range(3)]

    def work(member: Member) -> dict[str, bytes]:
        root = Tiered(local, views[member.rank], keep_local=Last(1))
        with member.manager(root, encrypt=encrypt, compress="zstd") as manager:
            manager.resume()
            begun = len(views[member.rank].ops)
            for step in (1, 2, 3):
                member.train()
                manager.save(step).wait()
            manager.wait()
            asked[member.rank] = views[member.rank].ops[begun:]
        return member.bits()

    asked: dict[int, Any] = {}
    (bits, *_) = all_of(on_ranks(3, work))
    assert steps_in(sealing(remote, encrypt)) == [3, 2, 1]
    assert steps_in(sealing(local, encrypt)) == [3]
    assert not asked[1] + asked[2], "a follower asks nothing of the remote tier while it saves"
    made = Counter(key for op, key in asked[0] if op in {"put", "create"} and "/" in key)
    files = {key: times for key, times in made.items() if "step-" in key}
    assert {*files.values()} == {1}
    newest = max(entry.folder for entry in Catalog(sealing(local, encrypt)).checkpoints())
    for info in local.list(f"{newest}/"):
        assert remote.get(info.key) == local.get(info.key), "as it is stored"
    for num_ranks in (1, 2, 4):
        watched = FaultyStore(remote)
        found = resume_on(num_ranks, Tiered(local, watched), encrypt=encrypt)
        assert found == [(3, bits)] * num_ranks
        assert not [key for op, key in watched.ops if op == "read_into"], (
            "what is here is read here"
        )
        found = resume_on(num_ranks, Tiered(MemoryStore(), remote), encrypt=encrypt)
        assert found == [(3, bits)] * num_ranks


@pytest.mark.parametrize(
    ("damaged", "which"),
    diagonal([0, 1, 2], ["latest", "step=2"], ids=["of-the-leader", "of-a-follower", "manifest"]),
)
def test_what_is_damaged_locally_for_one_rank_all_read_remotely_and_it_is_mended(
    damaged: int, which: str, tmp_path: Path
) -> None:
    """Rank r reads its own boxes: damage in what another reads is told to the leader."""
    local, remote = LocalStore(tmp_path / "local"), LocalStore(tmp_path / "remote")
    root = Tiered(local, remote)
    layers = {f"l{number}": torch.nn.Linear(200, 200) for number in range(2)}

    def state(member: Member) -> dict[str, Any]:
        # A plain tree is read whole by all, what differs by rank by each.
        noise = torch.Generator().manual_seed(member.rank)
        return {**layers, "noise": noise}

    def save(member: Member) -> None:
        with member.manager(root, state=state(member)) as manager:
            for step in (1, 2):
                manager.save(step, wait=True)
            manager.wait()

    all_of(on_ranks(2, save))
    newest = max(entry.folder for entry in Catalog(local).checkpoints())
    names = {2: "manifest.json"} | {r: f"noise-0000{r}.safetensors" for r in (0, 1)}
    path = tmp_path / "local" / newest / names[damaged]
    path.chmod(0o644)
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes(byte ^ 1 for byte in data[-9:]))
    noted = [Noted(), Noted()]

    def load(member: Member) -> tuple[int, bytes]:
        live = state(member)
        live["noise"].manual_seed(99)
        options = {"state": live, "sinks": (noted[member.rank],)}
        with member.manager(root, **options) as manager:
            found = manager.resume(which)
            assert found is not None
            assert not found.rejected
            manager.wait()
        return found.step, live["noise"].get_state().numpy().tobytes()

    states = [torch.Generator().manual_seed(r).get_state().numpy().tobytes() for r in (0, 1)]
    assert all_of(on_ranks(2, load)) == [(2, states[0]), (2, states[1])]
    assert [event.fields["folder"] for event in noted[0].of("mended")] == [newest]
    assert not noted[1].of("mended")
    assert steps_in(local) == [2, 1]


def test_a_local_tier_of_each_host_is_refused_by_name(tmp_path: Path) -> None:
    """The tier that ranks commit in is shared; what is not is named, and nothing is sent."""
    remote = MemoryStore("remote")

    def work(member: Member) -> None:
        own = LocalStore(tmp_path / f"host{member.rank}")
        with member.manager(Tiered(own, remote)) as manager:
            manager.save(1).wait()

    leader, follower = on_ranks(2, work)
    for error in (leader, follower):
        assert isinstance(error, errors.SaveFailed), error
        assert "does not see" in str(error)
        assert "host1" in str(error)
    assert isinstance(follower, errors.SaveFailed)
    assert isinstance(follower.__cause__, errors.NotShared)
    assert steps_in(remote) == []


def test_a_failed_upload_is_raised_by_the_next_save_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of `maybe_save` that saves nothing raises nothing: ranks would count differently."""
    without_backoff(monkeypatch)
    local, remote = MemoryStore("local"), Switch()
    tiers = Tiered(local, remote, on_upload_failure="raise", tries=1, close_timeout_s=0.5)
    noted = Noted()

    def work(member: Member) -> list[str]:
        said = []
        sinks = (noted,) if member.rank == 0 else ()
        with member.manager(tiers, every="2step", sinks=sinks) as manager:
            manager.resume()
            for step in range(1, 7):
                if step == 3 and member.rank == 0:
                    manager.wait()  # for the upload of step 2
                    remote.error = errors.TransientStoreError("cut off")
                    manager.save(100).wait()
                    noted.wait_for("upload_failed")
                elif step == 3:
                    manager.save(100).wait()
                try:
                    member.train()
                    pending = manager.maybe_save(step)
                    if pending is not None:
                        pending.wait()
                except errors.HoldfastError as error:
                    said.append(f"{step}: {type(error).__name__} {error}")
                    if member.rank == 0:
                        remote.error = None
        return said

    results = all_of(on_ranks(2, work))
    for said in results:
        assert len(said) == 1, results
        assert said[0].startswith("4: ")
    assert "UploadFailed" in results[0][0]
    assert "rank 0" in results[1][0]
    assert "UploadFailed" in results[1][0]
    assert steps_in(remote) == steps_in(local)


def test_a_remote_tier_too_far_behind_makes_all_ranks_wait_and_then_fail() -> None:
    local, remote = MemoryStore("local"), Switch()
    tiers = Tiered(local, remote, max_lag="1step", close_timeout_s=0.5)

    def work(member: Member) -> None:
        with member.manager(tiers, save_timeout_s=2.0) as manager:
            manager.resume()
            manager.save(1).wait()
            manager.wait()
            member.coordinator.post("sent", b"", timeout_s=60)
            if member.rank == 0:
                member.coordinator.collect("sent", timeout_s=60)
                remote.error = errors.TransientStoreError("cut off")
            manager.save(2).wait()
            manager.save(9).wait()

    leader, follower = on_ranks(2, work)
    assert isinstance(leader, errors.DeadlineExceeded), leader
    assert "further behind than max_lag allows" in str(leader)
    assert "further behind than max_lag allows" in str(follower)
    assert "rank 0" in str(follower)
    assert steps_in(local) == [2, 1]


def test_a_rank_that_cannot_reach_the_remote_tier_is_named(tmp_path: Path) -> None:
    local: Store
    local, remote = MemoryStore("local"), Switch()
    save_on(2, Tiered(local, remote), [1, 2])
    assert steps_in(remote) == [2, 1]

    def work(member: Member) -> None:
        there = Switch("remote")
        there._objects, there._lock = remote._objects, remote._lock
        if member.rank == 1:
            there.error = errors.TransientStoreError("cut off from rank 1")
        with member.manager(Tiered(MemoryStore("empty"), there)) as manager:
            manager.resume()

    for error in on_ranks(3, work):
        assert isinstance(error, errors.HoldfastError)
        assert "cut off from rank 1" in str(error) or "does not see" in str(error), error


@pytest.mark.parametrize("encrypt", [None, SEALS], ids=["plain", "encrypted"])
def test_each_byte_crosses_the_network_once_a_host_on_the_way_in(
    encrypt: Any, tmp_path: Path
) -> None:
    """Where the remote tier is a `CachedStore`, whose copies the ranks of a host share."""
    remote = MemoryStore("remote")
    (bits, *_) = save_on(2, Tiered(MemoryStore("local"), remote), encrypt=encrypt)
    views = [FaultyStore(remote) for _ in range(3)]

    def load(member: Member) -> dict[str, bytes]:
        cached = CachedStore(views[member.rank], tmp_path, max_nbytes=1 << 30)
        with torch.no_grad():
            member.model[0].weight.zero_()
        with member.manager(Tiered(MemoryStore("new"), cached), encrypt=encrypt) as manager:
            assert manager.resume() is not None
        return member.bits()

    assert all_of(on_ranks(3, load)) == [bits] * 3
    read = Counter(
        key
        for view in views
        for op, key in view.ops
        if op == "read_into" and key.endswith((".safetensors", ".sealed"))
    )
    assert len(read) > 3
    assert {*read.values()} == {1}
