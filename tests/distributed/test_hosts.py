"""Hosts with a disk each, here folders: saves on all of them, and resumes from what is left."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from distributed.jobs import make
from distributed.run import run_ranks
from holdfast import CheckpointManager, HostTiers, errors
from holdfast.events import Event
from holdfast.format import layout
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from marks import full

NUM_STEPS = 2

Saved = dict[str, bytes]


def root_of(folder: Path, hosts: str, rank: int, *, partner: bool = False) -> HostTiers:
    """The root of a rank, whose host is a folder with one letter."""
    return HostTiers(folder / hosts[rank], folder / "remote", partner=partner, close_timeout_s=0.0)


def save(folder: Path, hosts: str, partner: bool, rank: int) -> tuple[list[Saved], list[str]]:
    """Save some steps; returns the state of each, and warnings."""
    job, seen, states = make("fsdp", seed=1), list[Event](), list[Saved]()
    root = root_of(folder, hosts, rank, partner=partner)
    with CheckpointManager(root, job.state, sinks=[seen.append]) as manager:
        for step in range(1, NUM_STEPS + 1):
            job.step()
            manager.save(step, wait=True)
            states.append(job.whole())
    return states, [event.message for event in seen if event.kind == "warning"]


def resume(folder: Path, hosts: str, rank: int) -> tuple[int, Saved, list[str]]:
    """Resume, and save a further step; returns the step, the state, and what was said."""
    job, seen = make("fsdp", seed=2), list[Event]()
    with CheckpointManager(root_of(folder, hosts, rank), job.state, sinks=[seen.append]) as manager:
        found = manager.resume()
        assert found is not None
        state = job.whole()
        job.step()
        manager.save(found.step + 1, wait=True)
    return found.step, state, [event.message for event in seen]


def refuse(folder: Path, hosts: str, rank: int) -> str:
    """Resume, which must fail; returns the error."""
    job = make("fsdp", seed=2)
    before = job.whole()
    with CheckpointManager(root_of(folder, hosts, rank), job.state) as manager:
        with pytest.raises(errors.HoldfastError) as caught:
            manager.resume()
        assert job.whole() == before
    return str(caught.value)


def put_remotely(folder: Path, hosts: str, *steps: int) -> None:
    """Make the remote tier have these steps, as after uploads."""
    for step in steps:
        for host in sorted(set(hosts)):
            for attempt in (folder / host).glob(f"step-*{step}.0*"):
                shutil.copytree(attempt, folder / "remote" / attempt.name, dirs_exist_ok=True)


def flip(path: Path) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def attempt_of(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-*{step}.0*")
    return found


def expect_resumed(folder: Path, hosts: str, step: int, state: Saved, *words: str) -> list[str]:
    """Resume on these hosts, and expect this state on all ranks."""
    found = run_ranks(len(hosts), partial(resume, folder, hosts))
    assert all(one is not None and one[:2] == (step, state) for one in found)
    assert found[0] is not None
    told = "\n".join(found[0][2])
    assert [word for word in words if word not in told] == [], told
    return found[0][2]


@pytest.mark.parametrize(
    ("hosts", "partner"),
    [("ab", False), ("aabb", True), pytest.param("abc", True, marks=pytest.mark.full)],
)
def test_each_root_has_the_files_of_its_ranks_and_all_documents(
    hosts: str, partner: bool, tmp_path: Path
) -> None:
    ((states, told), *_) = run_ranks(len(hosts), partial(save, tmp_path, hosts, partner))
    assert told == []
    names = sorted(set(hosts))
    for number, host in enumerate(names):
        store = LocalStore(tmp_path / host)
        entries = Catalog(store).checkpoints()
        assert [entry.step for entry in entries] == [2, 1]
        for entry in entries:
            manifest = entry.manifest
            own, before = (f":{tmp_path}/{names[number - back]}" for back in (0, 1))
            listed = {n: files for n, files in manifest.hosts.items() if n.endswith(own)}
            if partner:
                listed |= {n: f for n, f in manifest.hosts.items() if n.endswith(before)}
            assert len(listed) == 1 + partner
            expected = {name for files in listed.values() for name in files}
            expected |= {name for name in manifest.files if layout.is_document(name)}
            there = {*store.children(entry.folder)} - {layout.MANIFEST}
            assert there == expected
            leading = tmp_path / "a" / entry.folder / layout.MANIFEST
            assert store.get(f"{entry.folder}/{layout.MANIFEST}") == leading.read_bytes()
    expect_resumed(tmp_path, hosts, NUM_STEPS, states[-1])


@pytest.mark.parametrize(
    ("lost", "now"),
    [
        ("a", "ab"),
        pytest.param("b", "ab", marks=pytest.mark.full),
        ("a", "b"),
        pytest.param("b", "aabb", marks=pytest.mark.full),
    ],
)
def test_with_partners_any_lost_disk_loses_nothing(lost: str, now: str, tmp_path: Path) -> None:
    ((states, _), *_) = run_ranks(2, partial(save, tmp_path, "ab", True))
    shutil.rmtree(tmp_path / lost)
    expect_resumed(tmp_path, now, NUM_STEPS, states[-1])


@pytest.mark.parametrize("lost", ["b", *full("a")])
def test_a_lost_host_is_named_and_what_is_uploaded_is_used(lost: str, tmp_path: Path) -> None:
    ((states, _), *_) = run_ranks(2, partial(save, tmp_path, "ab", False))
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path, whole, symlinks=True)
    shutil.rmtree(tmp_path / lost)
    said = run_ranks(2, partial(refuse, tmp_path, "ab"))
    assert all("written by" in str(one) and f"/{lost}" in str(one) for one in said), said
    put_remotely(whole, "ab", 1)
    shutil.copytree(
        attempt_of(whole / "remote", 1),
        tmp_path / "remote" / attempt_of(whole / "remote", 1).name,
        dirs_exist_ok=True,
    )
    expect_resumed(tmp_path, "ab", 1, states[0], f"/{lost}")
