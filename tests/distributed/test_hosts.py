"""Hosts with a disk each, here folders: saves on all of them, and resumes from what is left."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import make
from distributed.run import run_ranks
from holdfast import CheckpointManager, Encryption, HostTiers, Tiered, errors
from holdfast.events import Event
from holdfast.format import layout
from holdfast.keys import SecretKey
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
    return found.step, state, [f"{event.kind}: {event.message}" for event in seen]


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
    [
        ("aabb", True),
        pytest.param("ab", False, marks=pytest.mark.full),
        pytest.param("abc", True, marks=pytest.mark.full),
    ],
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
        ("a", "b"),
        pytest.param("a", "ab", marks=pytest.mark.full),
        pytest.param("b", "ab", marks=pytest.mark.full),
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
    for attempt in (tmp_path / "remote").glob("step-*"):  # as without time for uploads
        shutil.rmtree(attempt)
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
    expect_resumed(tmp_path, "ab", 1, states[0], f"/{lost}", "warning: passed over step-00000002")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a", "model"),
        pytest.param("a", "manifest.json", marks=pytest.mark.full),
        pytest.param("b", "model", marks=pytest.mark.full),
        pytest.param("a", "optimizer-00000.json", marks=pytest.mark.full),
        pytest.param("b", "optimizer-00000.json", marks=pytest.mark.full),
        pytest.param("a", "index.json", marks=pytest.mark.full),
        pytest.param("b", "index.json", marks=pytest.mark.full),
        pytest.param("b", "manifest.json", marks=pytest.mark.full),
    ],
)
def test_a_flipped_bit_is_found_and_another_host_or_the_remote_tier_is_read(
    name: str, host: str, tmp_path: Path
) -> None:
    """Of tensors the partner has a copy, and each host has the documents."""
    ((states, _), *_) = run_ranks(2, partial(save, tmp_path, "ab", True))
    attempt = attempt_of(tmp_path / host, NUM_STEPS)
    first = "00000" if host == "a" else "00001"
    own = attempt / (name if "." in name else f"{name}-{first}.safetensors")
    flip(own)
    told = expect_resumed(tmp_path, "ab", NUM_STEPS, states[-1])
    if name == "manifest.json" and host == "a":
        assert any("repaired" in text for text in told), told
    else:
        assert any(own.name in text and f"/{host}" in text for text in told), told


def test_of_two_flipped_files_on_one_host_the_partner_has_both(tmp_path: Path) -> None:
    """The second one is found when the first was read from the partner."""
    ((states, _), *_) = run_ranks(2, partial(save, tmp_path, "ab", True))
    for name in ("model", "optimizer"):
        flip(attempt_of(tmp_path / "b", NUM_STEPS) / f"{name}-00001.safetensors")
    told = expect_resumed(tmp_path, "ab", NUM_STEPS, states[-1])
    for name in ("model", "optimizer"):
        assert any(f"{name}-00001.safetensors is damaged" in text for text in told), told


@pytest.mark.full
@pytest.mark.parametrize("num_flips", [1, 2, 3])
def test_each_flipped_copy_leads_to_the_next_source_and_at_last_to_an_older_checkpoint(
    num_flips: int, tmp_path: Path
) -> None:
    ((states, _), *_) = run_ranks(2, partial(save, tmp_path, "ab", True))
    put_remotely(tmp_path, "ab", NUM_STEPS)
    for place in ("a", "b", "remote")[:num_flips]:
        flip(attempt_of(tmp_path / place, NUM_STEPS) / "model-00000.safetensors")
    step = NUM_STEPS if num_flips < 3 else 1
    told = "\n".join(expect_resumed(tmp_path, "ab", step, states[step - 1]))
    for place in ("a", "b", "remote")[:num_flips]:
        assert "model-00000.safetensors is damaged or missing on" in told
        assert f"/{place}" in told, told


@pytest.mark.parametrize("now", ["a", *full("abc", "ba")])
def test_other_hosts_and_numbers_of_ranks_resume(now: str, tmp_path: Path) -> None:
    ((states, _), *_) = run_ranks(2, partial(save, tmp_path, "ab", False))
    put_remotely(tmp_path, "ab", NUM_STEPS)
    expect_resumed(tmp_path, now, NUM_STEPS, states[-1])


def save_as_if_shared(folder: Path, rank: int) -> str:
    job = make("fsdp", seed=1)
    root = Tiered(folder / f"{rank}", folder / "remote")
    with CheckpointManager(root, job.state) as manager, pytest.raises(errors.RanksError) as caught:
        manager.save(1, wait=True)
    return str(caught.value)


def test_tiers_on_disks_that_are_not_shared_propose_these(tmp_path: Path) -> None:
    said = run_ranks(2, partial(save_as_if_shared, tmp_path))
    assert all("HostTiers" in str(one) for one in said), said


def make_differing(folder: Path, name: str, rank: int) -> str:
    """Make a manager with another option on rank 2, which must fail; returns the error."""
    odd = rank == 2
    remote = folder / ("other" if odd and name == "remote" else "remote")
    root = HostTiers(folder / f"{rank}", remote, partner=odd and name == "partner")
    with pytest.raises(errors.UsageError) as caught:
        CheckpointManager(root, make("fsdp", seed=1).state)
    return str(caught.value)


@pytest.mark.parametrize("name", ["remote", "partner"])
def test_options_that_differ_by_rank_are_refused_on_all(name: str, tmp_path: Path) -> None:
    said = run_ranks(4, partial(make_differing, tmp_path, name))
    values = {"remote": (tmp_path / "remote", tmp_path / "other"), "partner": (False, True)}[name]
    expected = f"{name} is {values[0]} on ranks 0 to 1 and 3, {values[1]} on rank 2."
    assert all(expected in str(one) for one in said), said


@pytest.mark.parametrize("name", ["broadcast", "memory_budget", "encrypt"])
def test_options_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    keys = Encryption(keys=SecretKey(bytes(range(32))))
    options: dict[str, Any] = {"broadcast": True, "memory_budget": "1GB", "encrypt": keys}
    root = HostTiers(tmp_path / "a", tmp_path / "remote")
    with pytest.raises(errors.UsageError, match=name):
        CheckpointManager(root, {"data": {"batches": 0}}, **{name: options[name]})
