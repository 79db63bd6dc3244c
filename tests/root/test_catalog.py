"""What is read of a root, and what of it may be remembered."""

from __future__ import annotations

import pytest

from holdfast.errors import CorruptData
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.records import Retired
from holdfast.loading.search import CheckpointSearch, Search
from holdfast.maintenance.retention import Deleter
from holdfast.ownership.claim import Claim, claim_run
from holdfast.policy.rules import All, Last
from holdfast.root.catalog import Catalog
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import FaultyStore
from holdfast.threads.workers import Threads
from runs import ReadsNoted, Recorder, begun, new_run, retracted


def a_run(num_saves: int, store: ReadsNoted) -> list[str]:
    """The folders of one process that saved so often, newest first."""
    run = new_run()
    with run.manager(store, preflight=False) as manager:
        folders = []
        for step in range(1, num_saves + 1):
            run.train()
            folders.append(manager.save(step).wait().folder)
    store.manifests()
    return folders[::-1]


def test_a_resume_decides_on_the_newest_manifest_alone() -> None:
    """However many there are: to look for it, to take it, to claim the run, to look again."""
    store = ReadsNoted()
    folders = a_run(12, store)
    threads = Threads()
    search = Search(
        CheckpointSearch(
            catalog=Catalog(store),
            state=new_run().state,
            threads=threads,
            timeout_s=60.0,
        ),
        "latest",
        walks=True,
    )
    claim_run(store, search.choices(), takeover=False, emit=Emitter(()))
    threads.close_pools()
    assert search.candidate is not None
    assert search.candidate.entry.folder == folders[0]
    assert set(store.manifests()) == {folders[0]}


def test_a_resume_past_a_damaged_one_reads_the_next_and_no_more() -> None:
    store = ReadsNoted()
    folders = a_run(12, store)
    store.delete(f"{folders[0]}/model-00000.safetensors")
    run, recorder = new_run(), Recorder()
    with run.manager(store, preflight=False, sinks=(recorder,)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.folder == folders[1]


def test_a_resume_looks_twice_at_each_attempt_that_did_not_commit() -> None:
    """Line 26 of the review: it looked five times. Once before its claim and once after."""
    store = ReadsNoted()
    a_run(2, store)
    left = [begun(store, label="x", epoch=1, sequence=number).folder for number in range(3, 40)]
    for folder in left:
        store.put(f"{folder}/model-00000.json", b"{}")
    store.delete(layout.closed_key(1))
    noted = FaultyStore(store)
    reader = CheckpointSearch(
        catalog=Catalog(noted), state=new_run().state, threads=Threads(), timeout_s=60.0
    )
    search = Search(reader, "latest", walks=True)
    claim_run(noted, search.choices(), takeover=True, emit=Emitter(()))
    reader.threads.close_pools()
    looks = [key.split("/")[0] for op, key in noted.ops if op == "head"]
    assert {folder: looks.count(folder) for folder in left} == dict.fromkeys(left, 2)


def reads_of_the_oldest(num_saves: int) -> int:
    """How often a process that resumes, saves so often and closes reads the oldest manifest."""
    store = ReadsNoted()
    oldest = a_run(3, store)[-1]
    run = new_run()
    with run.manager(store, preflight=False, keep=Last(100)) as manager:
        manager.resume()
        for step in range(4, 4 + num_saves):
            run.train()
            manager.save(step).wait()
    return store.manifests().count(oldest)


def test_retention_reads_a_manifest_once_in_a_process() -> None:
    assert reads_of_the_oldest(2) == reads_of_the_oldest(6) > 0


def claims_read(num_lives: int, num_saves: int) -> int:
    """How often claims are read by the last of so many processes, which resumes and saves."""
    store = MemoryStore()
    for life in range(num_lives):
        noted, run = FaultyStore(store), new_run()
        with run.manager(noted, preflight=False, keep=Last(2)) as manager:
            manager.resume()
            for step in range(num_saves if life == num_lives - 1 else 1):
                run.train()
                manager.save(10 * life + step + 1).wait()
                manager.wait()
    own = layout.writer_key(num_lives)
    return sum(
        op == "get" and key in set(map(layout.writer_key, range(99))) - {own}
        for op, key in noted.ops
    )


def test_the_claims_of_a_run_that_was_resumed_often_are_read_once_in_a_process() -> None:
    """Each is a request to an object store, and they never change."""
    assert claims_read(6, 1) == claims_read(6, 9) > 0


def test_claims_are_read_again_once_the_run_was_claimed_anew() -> None:
    """Where two tiers had been claimed apart, one of two claims of an epoch gives way then."""
    store = FaultyStore(MemoryStore())
    for _ in range(2):
        with new_run().manager(store, preflight=False) as manager:
            manager.resume()
            manager.save(1).wait()
    events: list[Event] = []
    deleter = Deleter(store, All(), Emitter((events.append,)))

    def num_read(epoch: int) -> int:
        before = len(store.ops)
        claim = Claim(epoch=epoch, nonce="", resumed_from=None)
        deleter.carry_out(claim, has_committed=True)
        assert events == []
        return store.ops[before:].count(("get", layout.writer_key(1)))

    assert [num_read(epoch) for epoch in (2, 2, 3, 3)] == [1, 0, 1, 0]


def test_a_known_manifest_is_read_again_once_somebody_begins_to_delete() -> None:
    """Rule 4: the mark comes before the tombstone and goes after the files."""
    store = ReadsNoted()
    folder, older = a_run(2, store)
    catalog = Catalog(store)
    name = layout.parse_attempt(folder)
    assert name is not None
    entry = catalog.entry(name)
    assert entry is not None
    store.manifests()
    assert catalog.entry(name, known=entry.manifest) == entry
    assert store.manifests() == []
    store.put(f"{folder}/{layout.retired_name(1)}", Retired(by="x", reason="y").encode())
    marked = catalog.entry(name, known=entry.manifest)
    assert marked is not None
    assert marked.marks.retired
    assert store.manifests() == [folder]
    assert retracted(store, folder)
    assert catalog.entry(name, known=entry.manifest) is None
    assert [e.folder for e in catalog.checkpoints(known={folder: entry.manifest})] == [older]


def test_attempts_come_in_the_order_of_commits_whatever_their_labels() -> None:
    """Later ones first: neither text nor numbers in labels count."""
    store = MemoryStore()
    for sequence, label in enumerate(("step-9", "step-10", "final", "step-2"), 1):
        store.put(f"{layout.attempt_name(label, 1, sequence, '0' * 32)}/x", b"")
    store.put(f"{layout.attempt_name('a', 2, 1, '0' * 32)}/x", b"")
    found = Catalog(store).attempts()
    assert [name.order for name in found] == [(2, 1), (1, 4), (1, 3), (1, 2), (1, 1)]


class LaggingStore(MemoryStore):
    """A store whose lists of a folder end with the first name."""

    def children(self, folder: str = "") -> tuple[str, ...]:
        return super().children(folder)[:1]


def test_claims_that_a_list_does_not_show_yet_are_found_by_name() -> None:
    store = LaggingStore()
    for epoch in (1, 2, 3):
        store.put(layout.writer_key(epoch), b"{}")
    assert Catalog(store).claims() == (3, 2, 1)


def test_a_manifest_in_the_folder_of_another_checkpoint_is_damage() -> None:
    store = ReadsNoted()
    new, old = a_run(2, store)
    store.put(f"{new}/{layout.MANIFEST}", store.get(f"{old}/{layout.MANIFEST}"))
    with pytest.raises(CorruptData, match="belongs to another folder"):
        Catalog(store).read(new)
