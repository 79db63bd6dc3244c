"""R38: checkpoints of several ranks whose index is in parts: saved, loaded, kept and copied."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.encryption.test_store import SEALS

from allranks import Member, all_of, on_ranks, save_on
from holdfast import Last, Tiered, errors
from holdfast.encryption.store import sealing
from holdfast.format import index_parts, layout
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify, verify_root
from holdfast.policy.rules import parse_rule
from holdfast.ranks.chosen import SingleProcess
from holdfast.ranks.coordinator import Coordinator
from holdfast.root.catalog import Catalog, Entry
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.testing.ranks import ThreadCoordinator
from marks import diagonal


@pytest.fixture(autouse=True)
def one_rank_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """From three files on the index is in parts, with the files of one rank in each."""
    monkeypatch.setattr(index_parts, "MAX_FILES", 2)
    monkeypatch.setattr(index_parts, "PART_WRITERS", 1)


def coordinators(num_ranks: int) -> Sequence[Coordinator]:
    return [SingleProcess()] if num_ranks == 1 else ThreadCoordinator.for_ranks(num_ranks)


def parts_in(entry: Entry) -> list[str]:
    return [name for name in entry.manifest.files if layout.parse_part(name) is not None]


def whole(store: Store) -> list[tuple[int, int]]:
    """Step and number of parts of each checkpoint, oldest first, after a check of every byte."""
    entries = Catalog(store).checkpoints()
    for entry in entries:
        report = verify(store, entry.folder)
        assert report.ok, report.problems
        assert report.notes == ()
    return sorted((entry.step, len(parts_in(entry))) for entry in entries)


@pytest.mark.parametrize(("num_before", "kind"), diagonal([2, 3], ["local", "memory"]))
def test_any_number_of_ranks_resumes_bit_for_bit(
    num_before: int, kind: str, ram_path: Path
) -> None:
    store: Store = MemoryStore() if kind == "memory" else LocalStore(ram_path / "run")
    (bits, *_) = save_on(num_before, store, [1, 2])
    assert whole(store) == [(1, num_before), (2, num_before)]
    for num_ranks in (1, 2, 4):

        def work(member: Member) -> dict[str, bytes]:
            with torch.no_grad():
                member.model[0].weight.zero_()
            with member.manager(store) as manager:
                assert manager.resume(2) is not None
                loaded = member.bits()
                member.train()
                manager.save(3).wait()
            return loaded

        assert all_of(on_ranks(coordinators(num_ranks), work)) == [bits] * num_ranks
        newest = max(Catalog(store).checkpoints(), key=lambda entry: entry.manifest.order)
        # One process alone writes one document.
        assert len(parts_in(newest)) == (num_ranks if num_ranks > 1 else 0)


def test_each_rank_reads_only_the_parts_with_its_files() -> None:
    """Tensors of all ranks are in the files of the first; those of one rank in its own."""
    store = MemoryStore()
    save_on(4, store, [1])
    views = [FaultyStore(store) for _ in range(4)]

    def work(member: Member) -> None:
        with member.manager(views[member.rank]) as manager:
            assert manager.resume() is not None

    all_of(on_ranks(4, work))
    for rank, view in enumerate(views):
        names = {key.rpartition("/")[2] for _, key in view.ops}
        read = {name for name in names if layout.parse_part(name) is not None}
        assert read == {layout.part_name(1), layout.part_name(rank + 1)}


def test_one_process_reads_all_parts_that_it_needs() -> None:
    store = MemoryStore()
    save_on(3, store, [1])
    view = FaultyStore(store)

    def work(member: Member) -> None:
        with member.manager(view) as manager:
            assert manager.resume() is not None

    all_of(on_ranks(coordinators(1), work))
    names = {key.rpartition("/")[2] for _, key in view.ops}
    assert layout.part_name(1) in names
    assert layout.part_name(3) not in names  # the generators of other ranks


@pytest.mark.parametrize("options", [{"encrypt": SEALS}, {"compress": "zstd"}])
def test_encrypted_and_compressed_checkpoints(options: dict[str, Any]) -> None:
    store = MemoryStore()
    (bits, *_) = save_on(3, store, [1], **options)
    opened = sealing(store, options.get("encrypt"))
    report = verify_root(opened)
    assert report.ok, report
    (entry,) = Catalog(opened).checkpoints()
    assert len(parts_in(entry)) == 3
    if "compress" in options:
        part = json.loads(store.get(f"{entry.folder}/{layout.part_name(1)}"))
        assert part["stored"].keys() == part["blocks"].keys()
    else:
        names = store.children(entry.folder)
        assert not [name for name in names if name.startswith("index")]

    def work(member: Member) -> dict[str, bytes]:
        with member.manager(store, **options) as manager:
            assert manager.resume() is not None
        return member.bits()

    assert all_of(on_ranks(2, work)) == [bits] * 2


def test_retention_deletes_parts_and_thinning_keeps_them(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    rule = parse_rule("last:1, every:2step without optimizer")
    save_on(3, store, [1, 2, 3, 4], keep=rule)
    thinned, newest = sorted(Catalog(store).checkpoints(), key=lambda entry: entry.step)
    assert (thinned.step, newest.step) == (2, 4)
    assert len([*store.children()]) < 8
    assert not [name for name in store.children(thinned.folder) if name.startswith("optimizer")]
    for entry in (thinned, newest):
        assert {*parts_in(entry)} <= {*store.children(entry.folder)}
        assert verify(store, entry.folder).ok

    def work(member: Member) -> None:
        with member.manager(store) as manager:
            manager.load(2, components=["model"])

    all_of(on_ranks(2, work))


def test_both_tiers_have_all_parts(tmp_path: Path) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    tiers = Tiered(local, remote, keep_local=Last(1), keep_remote=Last(2))
    (bits, *_) = save_on(3, tiers, [1, 2])
    assert [step for step, _ in whole(LocalStore(remote))] == [1, 2]
    shutil.rmtree(local)

    def work(member: Member) -> dict[str, bytes]:
        with member.manager(tiers) as manager:
            assert manager.resume() is not None
        return member.bits()

    assert all_of(on_ranks(3, work)) == [bits] * 3


def test_a_damaged_part_rejects_the_checkpoint_on_all_ranks(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    save_on(3, store, [1, 2])
    newest = max(Catalog(store).checkpoints(), key=lambda entry: entry.step)
    path = tmp_path / "run" / newest.folder / layout.part_name(3)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    report = verify(store, newest.folder)
    assert [problem.file for problem in report.problems] == [path.name]

    def work(member: Member) -> int:
        with member.manager(store) as manager:
            found = manager.resume()
            assert found is not None
        return found.step

    assert all_of(on_ranks(3, work)) == [1] * 3
    assert verify(store, newest.folder).problems


@pytest.mark.parametrize("lost", ["manifest.json", "index-0002.json", "index.json"])
def test_a_lost_document_is_damage(lost: str, tmp_path: Path) -> None:
    """Without the manifest, the root alone lists all files, also the parts."""
    store = LocalStore(tmp_path / "run")
    save_on(2, store, [1])
    (entry,) = Catalog(store).checkpoints()
    (tmp_path / "run" / entry.folder / lost).unlink()
    if lost != "manifest.json":
        (problem,) = verify(store, entry.folder).problems
        assert (problem.file, problem.message) == (lost, "is missing")
        return
    assert not verify_root(store).ok
    collect_garbage(store)
    assert layout.part_name(2) in store.children(entry.folder)


def test_a_failed_save_leaves_no_part() -> None:
    store = MemoryStore()
    full = Fault(kind="fail", op="put", key="*/index.json", error=errors.StoreError("no room"))
    views = [FaultyStore(store, [full]), FaultyStore(store)]

    def work(member: Member) -> str:
        with member.manager(views[member.rank]) as manager:
            try:
                manager.save(1, wait=True)
            except errors.HoldfastError as error:
                return str(error.__cause__)
        return "committed"

    said = all_of(on_ranks(2, work))
    assert all("no room" in one for one in said)
    assert not [info.key for info in store.list("") if "index" in info.key]


def test_too_many_files_are_refused_before_the_folder_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    monkeypatch.setattr(index_parts, "MAX_MANIFEST_NBYTES", 1399)

    def work(member: Member) -> str:
        with member.manager(store) as manager, pytest.raises(errors.HoldfastError) as caught:
            manager.save(1, wait=True)
        return f"{caught.value} {caught.value.__cause__}"

    said = all_of(on_ranks(6, work))
    assert all("7 tensor files" in one and "Nothing was written" in one for one in said), said
    assert Catalog(store).attempts() == ()


def test_a_second_save_of_a_step_is_the_first_if_nothing_has_changed() -> None:
    store = MemoryStore()
    # The threads share their generators, from which those that make a model draw.
    all_have_models = threading.Barrier(3)

    def work(member: Member) -> list[str]:
        with member.manager(store) as manager:
            all_have_models.wait(60)
            return [manager.save(1).wait().folder for _ in range(2)]

    for first, second in all_of(on_ranks(3, work)):
        assert first == second
    (entry,) = Catalog(store).checkpoints()
    assert len(parts_in(entry)) == 3
