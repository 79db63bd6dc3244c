"""Several hosts with a disk each: they send their files, and the leader commits in the remote tier.

Hosts are folders, and ranks are threads.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks import Member, all_of, on_ranks
from holdfast import HostTiers, Last, errors
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.manifest import MAX_MANIFEST_NBYTES
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.loading.hosts import MAX_ASKED
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.ownership.annotations import annotate
from holdfast.ownership.claim import claim_run, put_closed, settled_choice
from holdfast.ownership.leases import leased
from holdfast.ranks.messages import MAX_NUM_PIECES, PIECE_NBYTES
from holdfast.root.catalog import Catalog
from holdfast.root.commit import mark_aborted
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from tiers import Noted, Switch, steps_in, without_backoff

Work = Callable[[Member, CheckpointManager], None]


def on_hosts(
    path: Path,
    hosts: str,
    remote: Store | Sequence[Store],
    work: Work,
    *,
    sinks: Mapping[int, Any] = {},
    given: Mapping[str, Any] = {},
    **options: Any,
) -> list[Noted]:
    """Resume on ranks of these hosts, which are folders, and work; returns what each emitted.

    `remote` may be a view of the remote tier for each rank; `given` are options of the managers.
    """
    noted = [Noted() for _ in hosts]

    def run(member: Member) -> None:
        rank = member.rank
        view = remote if isinstance(remote, Store) else remote[rank]
        root = HostTiers(path / hosts[rank], view, **options)
        # A plain tree is written by the leader, and generators by each rank.
        state = {**member.state, "noise": torch.Generator().manual_seed(rank)}
        own = (noted[rank], *sinks.get(rank, ()))
        with member.manager(root, state=state, sinks=own, **given) as manager:
            manager.resume()
            work(member, manager)

    all_of(on_ranks(len(hosts), run))
    return noted


def saves(*steps: int, wait: bool = True) -> Work:
    """Train and save at these steps, and with `wait` wait for the uploads."""

    def work(member: Member, manager: CheckpointManager) -> None:
        for step in steps:
            member.train()
            manager.save(step).wait()
        if wait:
            manager.wait()

    return work


def resumes(member: Member, manager: CheckpointManager) -> None:
    """Wait for the uploads that an earlier run has left."""
    manager.wait()


def entries_of(path: Path, host: str) -> dict[int, str]:
    """Step → folder of the checkpoints in the root of a host, all intact, newest first."""
    store = LocalStore(path / host)
    found = Catalog(store).checkpoints()
    for entry in found:
        report = verify(store, entry.folder)
        assert report.ok, report.problems
    return {entry.step: entry.folder for entry in found}


def copy_files(source: Path, target: Path) -> None:
    """Copy what the host of one root has written into that of its partner."""
    for path in source.glob("step*/*.safetensors"):
        shutil.copyfile(path, target / path.relative_to(source))


def flip(root: Path) -> None:
    """Damage the generators that rank 1 has saved."""
    for path in root.glob("step*/noise-00001.safetensors"):
        path.chmod(0o644)
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def expect_calm(noted: Sequence[Noted]) -> None:
    """Expect that no rank has warned of anything."""
    for one in noted:
        bad = one.of("warning") + one.of("housekeeping_failed") + one.of("upload_failed")
        assert not bad, bad


@pytest.mark.parametrize(("hosts", "partner"), [("ab", False), ("aabb", True), ("abc", True)])
def test_each_host_sends_its_files_and_the_leader_commits(
    hosts: str, partner: bool, tmp_path: Path
) -> None:
    remote = MemoryStore("remote")
    views = [FaultyStore(remote) for _ in hosts]
    noted = on_hosts(tmp_path, hosts, views, saves(1, 2, 3), partner=partner)
    expect_calm(noted)
    assert steps_in(remote) == [3, 2, 1]
    made = Counter(
        key
        for view in views
        for op, key in view.ops
        if op in {"put", "create"} and key.startswith("step") and not key.endswith("manifest.json")
    )
    assert {*made.values()} == {1}, made
    for host in {*hosts}:
        assert [*entries_of(tmp_path, host)] == [3, 2, 1]


def test_no_manifest_is_put_before_all_hosts_have_sent_and_a_restart_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_backoff(monkeypatch)
    remote = Switch()
    cut_off = Switch()
    cut_off._objects, cut_off._lock = remote._objects, remote._lock

    def work(member: Member, manager: CheckpointManager) -> None:
        if member.rank == 1:
            cut_off.error = errors.TransientStoreError("no network on b")
        saves(1, 2, wait=False)(member, manager)

    noted = on_hosts(tmp_path, "ab", [remote, cut_off], work, close_timeout_s=1.0)
    assert steps_in(remote) == []
    sent = {info.key for info in remote.list() if info.key.startswith("step")}
    assert sent, "the leader has sent its files"
    assert any("no network on b" in event.message for event in noted[1].of("upload_failed"))
    assert any("not uploaded" in event.message for event in noted[0].of("upload_failed"))
    views = [FaultyStore(remote), FaultyStore(remote)]
    expect_calm(on_hosts(tmp_path, "ab", views, resumes))
    assert steps_in(remote) == [2, 1]
    made = {key for view in views for op, key in view.ops if op in {"put", "create"}}
    assert not sent & made, "what is there is not sent again"


def save_without_remote(
    path: Path, hosts: str, remote: Switch, *steps: int, partner: bool = False
) -> None:
    """Save while the remote tier cannot be reached, so that all is left to be uploaded."""

    def work(member: Member, manager: CheckpointManager) -> None:
        remote.error = errors.TransientStoreError("no network")
        saves(*steps, wait=False)(member, manager)

    on_hosts(path, hosts, remote, work, partner=partner, close_timeout_s=0.0)
    remote.error = None


def test_files_of_a_lost_host_are_sent_by_its_partner(tmp_path: Path) -> None:
    remote = Switch()
    save_without_remote(tmp_path, "abc", remote, 1)
    assert steps_in(remote) == []
    copy_files(tmp_path / "b", tmp_path / "c")
    shutil.rmtree(tmp_path / "b")
    expect_calm(on_hosts(tmp_path, "ac", remote, resumes))
    assert steps_in(remote) == [1]


@pytest.mark.parametrize("partner", ["a", "c"], ids=["the-leader", "another-host"])
def test_a_copy_is_sent_of_what_a_host_has_damaged(
    partner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.replication.upload.COPIES_QUIET_S", 0.5)
    remote = Switch()
    save_without_remote(tmp_path, "abc", remote, 1)
    copy_files(tmp_path / "b", tmp_path / partner)
    flip(tmp_path / "b")
    noted = on_hosts(tmp_path, "abc", remote, resumes)
    assert steps_in(remote) == [1]
    (failed,) = noted[1].of("upload_failed")[:1]
    assert "do not match their digest" in failed.message


def test_a_checkpoint_of_which_a_file_is_lost_is_named_and_not_sent(tmp_path: Path) -> None:
    remote = Switch()
    on_hosts(tmp_path, "ab", remote, saves(1))
    save_without_remote(tmp_path, "ab", remote, 2)
    shutil.rmtree(tmp_path / "b")
    noted = on_hosts(tmp_path, "ab", remote, saves(3), keep_local=Last(3))
    assert steps_in(remote) == [3, 1]
    (warning,) = (e for e in noted[0].of("warning") if "cannot be uploaded" in e.message)
    assert "noise-00001.safetensors" in warning.message
    assert "written by" in warning.message


@pytest.mark.parametrize(("keep", "left"), [(Last(1), [4]), (Last(2), [4, 3]), (0, [4])])
def test_retention_takes_effect_on_all_hosts(keep: Any, left: list[int], tmp_path: Path) -> None:
    remote = MemoryStore("remote")
    noted = on_hosts(tmp_path, "aab", remote, saves(1, 2, 3), keep_local=keep)
    expect_calm(noted)
    expect_calm(on_hosts(tmp_path, "aab", remote, saves(4), keep_local=keep))
    assert steps_in(remote) == [4, 3, 2, 1]
    for host in "ab":
        # With keep_local=0 the newest goes, too, if it was sent before the last order.
        assert [*entries_of(tmp_path, host)] in (left, [] if keep == 0 else left)
    folders = [{p.name for p in (tmp_path / host).glob("step*")} for host in "ab"]
    assert folders[0] == folders[1]


def test_nothing_is_deleted_while_a_host_cannot_read_the_newer_one_back(tmp_path: Path) -> None:
    remote = MemoryStore("remote")

    def damage(event: Event) -> None:
        if event.kind == "committed" and event.step == 2:
            flip(tmp_path / "b")

    def work(member: Member, manager: CheckpointManager) -> None:
        saves(1)(member, manager)
        saves(2, wait=False)(member, manager)

    noted = on_hosts(
        tmp_path, "ab", remote, work, sinks={1: (damage,)}, keep_local=Last(1), close_timeout_s=1.0
    )
    for host in "ab":
        found = Catalog(LocalStore(tmp_path / host)).checkpoints()
        assert [entry.step for entry in found] == [2, 1]
    texts = [event.message for event in noted[0].of("housekeeping_failed")]
    assert any("noise-00001" in text and "read back" in text for text in texts), texts


def test_a_host_that_lost_a_manifest_gets_it_back_and_sends_its_files(tmp_path: Path) -> None:
    remote = Switch()
    save_without_remote(tmp_path, "ab", remote, 1)
    (folder,) = (tmp_path / "b").glob("step*")
    for name in ("manifest.json", "index.json"):
        (folder / name).chmod(0o644)
        (folder / name).unlink()
    leftover = folder.parent / "notes.txt"
    leftover.write_text("a file of the user")
    expect_calm(on_hosts(tmp_path, "ab", remote, resumes))
    assert steps_in(remote) == [1]
    assert [*entries_of(tmp_path, "b")] == [1]
    assert leftover.exists()


def test_a_failed_upload_of_one_host_is_raised_by_the_next_save_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_backoff(monkeypatch)
    remote, cut_off = Switch(), Switch()
    cut_off._objects, cut_off._lock = remote._objects, remote._lock
    noted, said = Noted(), {}

    def work(member: Member, manager: CheckpointManager) -> None:
        saves(1)(member, manager)
        if member.rank == 1:
            cut_off.error = errors.TransientStoreError("no network on b")
        saves(2, wait=False)(member, manager)
        noted.wait_for("upload_failed")
        with pytest.raises(errors.HoldfastError) as caught:
            saves(3, wait=False)(member, manager)
        said[member.rank] = str(caught.value)
        cut_off.error = None
        saves(4)(member, manager)

    on_hosts(
        tmp_path,
        "ab",
        [remote, cut_off],
        work,
        sinks={1: (noted,)},
        on_upload_failure="raise",
        tries=1,
    )
    assert "no network on b" in said[1]
    assert "rank 1" in said[0]
    assert "no network on b" in said[0]
    assert steps_in(remote) == [4, 2, 1]


def test_max_lag_counts_what_another_host_has_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_backoff(monkeypatch)
    remote, cut_off = Switch(), Switch()
    cut_off._objects, cut_off._lock = remote._objects, remote._lock

    def work(member: Member, manager: CheckpointManager) -> None:
        saves(1)(member, manager)
        if member.rank == 1:
            cut_off.error = errors.TransientStoreError("no network on b")
        saves(2, wait=False)(member, manager)
        with pytest.raises(errors.HoldfastError, match="further behind than max_lag allows"):
            saves(9, wait=False)(member, manager)

    on_hosts(
        tmp_path,
        "ab",
        [remote, cut_off],
        work,
        given={"save_timeout_s": 3.0},
        max_lag="1step",
        close_timeout_s=0.5,
    )
    assert steps_in(remote) == [1]
    assert [*entries_of(tmp_path, "b")] == [2, 1]


def test_leftovers_of_a_save_that_failed_are_removed_on_each_host(tmp_path: Path) -> None:
    remote = MemoryStore("remote")
    on_hosts(tmp_path, "ab", remote, saves(1))
    (folder,) = (tmp_path / "b").glob("step*")
    claim = Catalog(LocalStore(tmp_path / "b")).writer(1)
    assert claim is not None
    own = layout.attempt_name(
        "step-00000002", 1, 2, layout.first_digits("step-00000002", 1, 2, claim.nonce) + "0" * 24
    )
    for name in (str(own), "step-00000003.0001-000003-00000000"):
        shutil.copytree(folder, tmp_path / "b" / name)
        (tmp_path / "b" / name / "manifest.json").unlink()
    on_hosts(tmp_path, "ab", remote, saves(4))
    names = {path.name for path in (tmp_path / "b" / str(own)).glob("*.safetensors")}
    assert not names, "no root has its manifest"
    left = tmp_path / "b" / "step-00000003.0001-000003-00000000"
    assert [*left.glob("*.safetensors")], "no claim has made this one"


def test_a_checkpoint_that_is_read_on_a_host_is_deleted_there_later(tmp_path: Path) -> None:
    remote = MemoryStore("remote")

    def work(member: Member, manager: CheckpointManager) -> None:
        saves(1)(member, manager)
        store = LocalStore(tmp_path / "b")
        if member.rank == 1:
            (entry,) = Catalog(store).checkpoints()
            with leased(store, entry.folder):
                saves(2)(member, manager)
                saves(3)(member, manager)
                assert {1} <= {entry.step for entry in Catalog(store).checkpoints()}
                saves(4)(member, manager)
        else:
            saves(2)(member, manager)
            saves(3)(member, manager)
            saves(4)(member, manager)
        saves(5)(member, manager)

    on_hosts(tmp_path, "ab", remote, work, keep_local=Last(1))
    assert [*entries_of(tmp_path, "a")] == [*entries_of(tmp_path, "b")] == [5]


def resume_steps(path: Path, hosts: str, remote: Store) -> tuple[list[Any], list[Noted]]:
    """Resume on these hosts; returns the step or the error of each rank, and what each emitted."""
    noted = [Noted() for _ in hosts]

    def run(member: Member) -> int | None:
        root = HostTiers(path / hosts[member.rank], remote, close_timeout_s=0.0)
        state = {**member.state, "noise": torch.Generator().manual_seed(member.rank)}
        with member.manager(root, state=state, sinks=(noted[member.rank],)) as manager:
            found = manager.resume()
        return None if found is None else found.step

    return on_ranks(len(hosts), run), noted


@pytest.mark.parametrize("hosts", ["ab", "ba", "db"], ids=["follower", "leader", "new-leader"])
def test_a_disk_of_another_run_is_refused_before_anything_is_copied(
    hosts: str, tmp_path: Path
) -> None:
    """The other run has more claims, and each of its files has a copy on this disk."""
    remote, other = MemoryStore("remote"), MemoryStore("other")
    for step in (100, 200):
        on_hosts(tmp_path / "old", "bc", other, saves(step), partner=True)
    on_hosts(tmp_path, "ac", remote, saves(1, 2))
    shutil.copytree(tmp_path / "old" / "b", tmp_path / "b")
    names = {path.name for path in (tmp_path / "a").glob("step*")}
    found, _ = resume_steps(tmp_path, hosts, remote)
    assert isinstance(found[0], errors.Diverged), found
    assert all(isinstance(one, errors.HoldfastError) for one in found)
    assert f"{tmp_path}/b" in str(found[0])
    assert Catalog(remote).claims() == (1,)
    assert {path.name for path in (tmp_path / "a").glob("step*")} == names
    assert not [*(tmp_path / "d").glob("step*")]


@pytest.mark.parametrize("hosts", ["ab", "ba"])
def test_claims_without_saves_that_one_host_has_alone_are_replaced(
    hosts: str, tmp_path: Path
) -> None:
    remote = MemoryStore("remote")
    on_hosts(tmp_path, "ab", remote, saves(1))
    alone = LocalStore(tmp_path / "b")
    choice = settled_choice(Catalog(alone).checkpoints()[0], is_rollback=False)
    put_closed(alone, claim_run(alone, choice, takeover=False, emit=Emitter(()), tiered=True))
    on_hosts(tmp_path, "ac", remote, saves(2))
    found, noted = resume_steps(tmp_path, hosts, remote)
    assert found == [2, 2], noted[0].events
    assert any("ignored" in event.message for event in noted[0].of("warning"))
    assert Catalog(LocalStore(tmp_path / hosts[0])).claims() == (3, 2, 1)


def test_a_damaged_manifest_is_not_replaced_by_an_abort_marker(tmp_path: Path) -> None:
    on_hosts(tmp_path, "ab", MemoryStore("remote"), saves(1, 2))
    folder = next((tmp_path / "a").glob("step-00000002*")).name
    manifest = tmp_path / "a" / folder / "manifest.json"
    damaged = manifest.read_bytes()[:-9]
    manifest.unlink()
    manifest.write_bytes(damaged)
    (tmp_path / "b" / folder / "manifest.json").unlink()
    assert mark_aborted(LocalStore(tmp_path / "b"), folder, by="gc", reason="not committed")
    found, _ = resume_steps(tmp_path, "ab", MemoryStore("other"))
    assert found == [1, 1]
    assert manifest.read_bytes() == damaged


@pytest.mark.parametrize(
    ("damaged", "step"), [("a", 2), ("ab", 2), ("abd", 1)], ids=["one", "two", "all"]
)
def test_a_sound_index_is_found_for_a_host_that_has_none(
    damaged: str, step: int, tmp_path: Path
) -> None:
    remote = Switch()
    on_hosts(tmp_path, "abd", remote, saves(1), partner=True)
    save_without_remote(tmp_path, "abd", remote, 2, partner=True)
    for host in damaged:
        (path,) = (tmp_path / host).glob("step-00000002*/index.json")
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data.replace(b"1", b"2"))
    found, noted = resume_steps(tmp_path, "abcd", remote)
    assert found == [step] * 4
    assert not noted[0].of("rejected")
    texts = [event.message for event in noted[0].of("warning")]
    for host in damaged:
        assert any("index.json is damaged" in t and f"/{host}," in t for t in texts), texts


def test_a_remote_tier_that_cannot_be_read_now_takes_no_run_back(tmp_path: Path) -> None:
    remote = Switch()
    on_hosts(tmp_path, "ab", remote, saves(1, 2))
    copy_files(tmp_path / "b", tmp_path / "a")
    for path in (tmp_path / "a").glob("step-00000002*/*-00001.safetensors"):
        path.unlink()
    shutil.rmtree(tmp_path / "b")
    remote.error = errors.TransientStoreError("no network")
    found, _ = resume_steps(tmp_path, "ac", remote)
    assert isinstance(found[0], errors.TransientStoreError), found
    assert "no network" in str(found[0])
    assert "written by" in str(found[0])
    remote.error = None
    assert resume_steps(tmp_path, "ac", remote)[0] == [2, 2]


def test_disks_that_hosts_have_exchanged_are_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of pods with the names of before, on other nodes."""
    monkeypatch.setattr("holdfast.replication.upload.COPIES_QUIET_S", 0.5)
    remote = Switch()
    save_without_remote(tmp_path, "abc", remote, 1)
    for now, before in (("d", "b"), ("b", "c"), ("c", "d")):
        (tmp_path / before).rename(tmp_path / now)
    expect_calm(on_hosts(tmp_path, "abc", remote, resumes))
    assert steps_in(remote) == [1]


def test_copies_are_sent_although_the_host_cannot_send_its_own_files_or_look_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_backoff(monkeypatch)
    monkeypatch.setattr("holdfast.replication.upload.COPIES_QUIET_S", 0.5)
    remote = Switch()
    save_without_remote(tmp_path, "abc", remote, 1)
    copy_files(tmp_path / "b", tmp_path / "c")
    copy_files(tmp_path / "c", tmp_path / "b")
    flip(tmp_path / "b")
    for path in (tmp_path / "c").glob("step*/noise-00002.safetensors"):
        path.unlink()
        path.write_bytes(b"damaged")
    list_once = Fault(kind="fail", op="list", key="step*", at=2)
    views = [remote, remote, FaultyStore(remote, [list_once])]
    on_hosts(tmp_path, "abc", views, resumes)
    assert steps_in(remote) == [1]


class Mounted(LocalStore):
    """A folder that has the same path on each host."""

    @property
    def url(self) -> str:
        return "/mnt/remote"


def test_a_remote_folder_that_hosts_do_not_share_is_refused_at_the_start(tmp_path: Path) -> None:
    views = [Mounted(tmp_path / "remote" / host) for host in "aab"]
    with pytest.raises(errors.NotShared, match="Mount the same storage on all hosts"):
        on_hosts(tmp_path, "aab", views, saves(1))
    assert not [*tmp_path.glob("*/step*")]
    assert not [*(tmp_path / "remote").glob("*/*")]
    shared = Mounted(tmp_path / "shared")
    expect_calm(on_hosts(tmp_path, "aab", shared, saves(1)))
    assert steps_in(shared) == [1]
    assert not [key for key in shared.children() if layout.is_scratch(key.rstrip("/"))]


def test_hosts_of_one_name_and_path_send_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of containers that all have the name `localhost`."""
    monkeypatch.setattr(LocalStore, "url", property(lambda store: "/nvme/run"))
    remote = MemoryStore("remote")
    expect_calm(on_hosts(tmp_path, "abc", remote, saves(1)))
    assert steps_in(remote) == [1]
    (entry,) = Catalog(remote).checkpoints()
    assert len(entry.manifest.hosts) == 3


def test_a_pin_counts_when_another_host_leads(tmp_path: Path) -> None:
    remote = MemoryStore("remote")
    keep = {"keep_local": Last(1), "keep_remote": Last(1)}
    on_hosts(tmp_path, "ab", remote, saves(1), **keep)
    store = LocalStore(tmp_path / "a")
    (entry,) = Catalog(store).checkpoints()
    annotate(store, entry, pinned=True, metrics={"acc": 0.5})
    expect_calm(on_hosts(tmp_path, "ba", remote, saves(2, 3), **keep))
    assert steps_in(remote) == [3, 1]
    for host in "ab":
        assert {3, 1} <= {*entries_of(tmp_path, host)}
    copy = Catalog(remote).entry(entry.name)
    assert copy is not None
    assert copy.metrics["acc"] == 0.5


def test_files_of_a_save_stay_while_the_disk_with_its_outcome_is_absent(tmp_path: Path) -> None:
    remote = Switch()
    on_hosts(tmp_path, "ab", remote, saves(1))
    save_without_remote(tmp_path, "ab", remote, 2)
    (folder,) = (tmp_path / "b").glob("step-00000002*")
    for path in (*folder.glob("*.json"), *(tmp_path / "b" / "uploads").glob("step-00000002*")):
        path.unlink()  # as if it was killed before it heard of the commit
    files = {*folder.iterdir()}
    (tmp_path / "a").rename(tmp_path / "absent")
    found, noted = resume_steps(tmp_path, "bc", remote)
    assert found == [1, 1]
    assert {*folder.iterdir()} == files
    assert any("not in this run" in event.message for event in noted[0].of("warning"))
    (tmp_path / "absent").rename(tmp_path / "a")
    assert resume_steps(tmp_path, "ab", remote)[0] == [2, 2]


def test_they_are_removed_after_a_resume_from_a_newer_checkpoint(tmp_path: Path) -> None:
    remote = Switch()
    on_hosts(tmp_path, "ab", remote, saves(1))
    save_without_remote(tmp_path, "ab", remote, 2)
    (folder,) = (tmp_path / "b").glob("step-00000002*")
    for path in (*folder.glob("*.json"), *(tmp_path / "b" / "uploads").glob("step-00000002*")):
        path.unlink()
    shutil.rmtree(tmp_path / "a")
    on_hosts(tmp_path, "bc", remote, saves(3))
    assert [*folder.glob("*.safetensors")]
    on_hosts(tmp_path, "bc", remote, saves(4))
    assert not [*folder.glob("*.safetensors")]


def test_an_upload_that_is_not_wanted_any_more_ends_on_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader has begun to wait for the files of another host, which has sent none yet."""
    without_backoff(monkeypatch)
    remote, cut_off = Switch(), Switch()
    cut_off._objects, cut_off._lock = remote._objects, remote._lock

    def work(member: Member, manager: CheckpointManager) -> None:
        if member.rank == 1:
            cut_off.error = errors.TransientStoreError("no network on b")
        saves(1, wait=False)(member, manager)
        while not remote.children(next(iter(entries_of(tmp_path, "a").values()))):
            time.sleep(0.01)
        saves(2, wait=False)(member, manager)
        cut_off.error = None
        manager.wait()

    on_hosts(tmp_path, "ab", [remote, cut_off], work, keep_remote=Last(1))
    assert steps_in(remote) == [2]


def test_a_lost_index_delays_no_upload_of_another_checkpoint(tmp_path: Path) -> None:
    remote = Switch()
    save_without_remote(tmp_path, "ab", remote, 1, 2)
    for host in "ab":
        next((tmp_path / host).glob("step-00000001*/index.json")).unlink()
    next((tmp_path / "b").glob("step-00000001*/manifest.json")).unlink()
    on_hosts(tmp_path, "ab", remote, resumes)
    assert steps_in(remote) == [2]


def test_planted_files_on_a_host_are_left_alone(tmp_path: Path) -> None:
    remote = MemoryStore("remote")
    on_hosts(tmp_path, "ab", remote, saves(1, 2))
    outside, root = tmp_path / "outside", tmp_path / "b"
    outside.mkdir()
    (outside / "manifest.json").write_text("{}")
    (root / "step-00000009.0001-000009-00000000").symlink_to(outside)
    odd = root / "step-00000008.0001-000008-00000000"
    odd.mkdir()
    os.mkfifo(odd / "manifest.json")
    with (odd / "index.json").open("wb") as large:
        large.truncate(1 << 40)
    (root / "writers" / "00000007.json").symlink_to(outside / "manifest.json")
    (root / "writers" / "00000008.json").mkdir()
    os.mkfifo(root / "writers" / "00000009.json")
    with (root / "writers" / "00000010.json").open("wb") as large:
        large.truncate(1 << 40)
    found, _ = resume_steps(tmp_path, "ab", remote)
    assert found == [2, 2]
    assert {path.name for path in outside.iterdir()} == {"manifest.json"}
    assert odd.exists()
    assert Catalog(LocalStore(tmp_path / "a")).claims() == (2, 1)


def test_records_of_one_round_fit_into_a_message() -> None:
    most = max(MAX_MANIFEST_NBYTES, MAX_CHECKED_NBYTES)
    assert MAX_ASKED * most < PIECE_NBYTES * MAX_NUM_PIECES
