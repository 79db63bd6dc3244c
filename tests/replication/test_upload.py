"""Sending one checkpoint: verified on the way, whole or not there, and not twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from holdfast import errors
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.ownership.claim import Choice, claim_run
from holdfast.ownership.tiered import share_claims
from holdfast.replication.upload import Cost, Sender, UploadInterrupted
from holdfast.root.catalog import Catalog
from holdfast.root.commit import mark_aborted
from holdfast.store.base import BlockWriter, Store, WrappedStore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from marks import full
from tiers import LARGE, opened, saved
from ways import Tiny


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """A root with one checkpoint of several blocks a file, and a claim."""
    store, tiny = LocalStore(tmp_path_factory.mktemp("local")), Tiny(LARGE)
    with opened(store, tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    return store


@pytest.fixture(params=["memory", *full("folder")])
def remote(request: pytest.FixtureRequest, ram_path: Path, local: LocalStore) -> Store:
    """A root with the same claim."""
    store: Store = MemoryStore() if request.param == "memory" else LocalStore(ram_path / "remote")
    share_claims(local, store)
    return store


def sender(local: Store, remote: Store, **options: Any) -> Sender:
    return Sender(local, remote, num_threads=2, timeout_s=60, **options)


def send(one: Sender, local: Store, told: Any = lambda cost: None) -> Cost:
    return one.upload_checkpoint(
        Catalog(local).checkpoints()[0].folder, epoch=1, on_progress=told, unclear=set()
    )


def test_what_is_sent_is_counted_and_told(local: LocalStore, remote: Store) -> None:
    heard: list[int] = []
    cost = send(sender(local, remote), local, lambda cost: heard.append(cost.nbytes))
    entry = Catalog(remote).checkpoints()[0]
    assert verify(remote, entry.folder).ok
    assert cost.nbytes == max(heard) > entry.manifest.nbytes
    assert cost.requests >= len(entry.manifest.files) * 2
    again = send(sender(local, remote), local)
    assert again.nbytes == 0


def test_what_is_committed_there_and_lacks_files_is_not_taken_for_sent(
    local: LocalStore, remote: Store
) -> None:
    """I4, D19: the local copy would go for it."""
    send(sender(local, remote), local)
    entry = Catalog(local).checkpoints()[0]
    lost = max(entry.manifest.files)
    remote.delete(f"{entry.folder}/{lost}")
    with pytest.raises(errors.CorruptData, match=f"lacks {lost}"):
        send(sender(local, remote), local)


class Open(WrappedStore):
    """A store of a user's, in which files can be seen while they are written."""

    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        return self.inner.create(key, nbytes, at_most=at_most)


def test_a_half_sent_file_is_not_taken_for_whole_where_it_can_be_seen(local: LocalStore) -> None:
    """I1, D14: of the right length, with zeros where a killed process had not come to."""
    inner = MemoryStore()
    share_claims(local, inner)
    folder = Catalog(local).checkpoints()[0].folder
    largest = max(local.list(f"{folder}/"), key=lambda info: info.nbytes)
    inner.put(largest.key, bytes(largest.nbytes))
    with pytest.raises(errors.CorruptData, match="differs from"):
        send(sender(local, Open(inner)), local)
    assert Catalog(inner).checkpoints() == ()


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_wrong_file_is_replaced_where_files_are_put_as_a_whole(
    local: LocalStore, is_cut: bool
) -> None:
    """Nobody has seen it: nothing is committed there."""
    inner = MemoryStore()
    share_claims(local, inner)
    folder = Catalog(local).checkpoints()[0].folder
    largest = max(local.list(f"{folder}/"), key=lambda info: info.nbytes)
    inner.put(largest.key, bytes(9 if is_cut else largest.nbytes))
    send(sender(local, WrappedStore(inner), reads_back=True), local)
    assert verify(inner, folder).ok


def test_two_processes_that_send_the_same_at_once_do_no_harm(
    local: LocalStore, remote: Store
) -> None:
    """R10: as when one was paused, and another took its place."""
    paused = Fault(kind="hang", op="write", at=1)
    slow = sender(local, FaultyStore(remote, [paused]))
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(send, slow, local)
        assert paused.reached.wait(60)
        send(sender(local, remote), local)
        before = {info.key: info.nbytes for info in remote.list("step-")}
        paused.release.set()
        late.result(60)
    assert before == {info.key: info.nbytes for info in remote.list("step-")}
    assert verify(remote, Catalog(remote).checkpoints()[0].folder).ok


def test_a_superseded_process_does_not_commit(local: LocalStore, remote: Store) -> None:
    """R10."""
    claim_run(remote, repeat(Choice(point=None)), takeover=True, emit=Emitter(()))
    with pytest.raises(errors.Superseded):
        send(sender(local, remote), local)
    assert Catalog(remote).checkpoints() == ()


def test_what_gc_has_given_up_is_not_sent(local: LocalStore, remote: Store) -> None:
    folder = Catalog(local).checkpoints()[0].folder
    if isinstance(remote, LocalStore):
        remote.make_folder(folder)
    mark_aborted(remote, folder, by="gc", reason="not committed")
    with pytest.raises(errors.CommitConflict, match="aborted there by gc"):
        send(sender(local, remote), local)


@pytest.mark.parametrize("is_whole", [False, True])
def test_gc_leaves_the_register_of_what_a_paused_process_sends(
    local: LocalStore, is_whole: bool
) -> None:
    """R10, D20: it sends what another one saved, which had closed. Without the marker its manifest
    would arrive after all, and its files are gone. Where all of them are there, and only the
    manifest is missing, gc takes none of them."""
    remote = MemoryStore()
    share_claims(local, remote)
    key = layout.closed_key(1)
    remote.put(key, local.get(key))
    claim_run(remote, repeat(Choice(point=None)), takeover=True, emit=Emitter(()))
    paused = Fault(kind="hang", op="put", key="*/manifest.json")
    slow = sender(local, FaultyStore(remote, [paused]))
    folder = Catalog(local).checkpoints()[0].folder
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(
            slow.upload_checkpoint, folder, epoch=2, on_progress=lambda cost: None, unclear=set()
        )
        assert paused.reached.wait(60)
        if not is_whole:
            remote.delete(f"{folder}/tiny-00000.json")
        choice = Choice(point=None, passed_over=frozenset([folder]))
        claim_run(remote, repeat(choice), takeover=True, emit=Emitter(()))
        collect_garbage(remote, own_epoch=3)
        paused.release.set()
        with pytest.raises(errors.Superseded if is_whole else errors.CommitConflict):
            late.result(60)
    assert len(Catalog(remote).checkpoints()) == is_whole
    assert not is_whole or verify(remote, folder).ok


def test_it_ends_soon_when_it_is_interrupted_and_goes_on_later(
    local: LocalStore, remote: Store
) -> None:
    one, asked = sender(local, remote), threading.Event()

    def interrupt(cost: Cost) -> None:
        if cost.nbytes > 9 * 1024 * 1024 and not asked.is_set():
            asked.set()
            one.background.ask_to_stop()

    with pytest.raises(UploadInterrupted):
        send(one, local, interrupt)
    assert Catalog(remote).checkpoints() == ()
    one.background.proceed()
    send(one, local)
    assert len(Catalog(remote).checkpoints()) == 1


@pytest.mark.parametrize("name", ["index.json", "tiny-00000.json", "tiny-00000.safetensors"])
def test_damage_that_passes_does_not_stop_it(local: LocalStore, remote: Store, name: str) -> None:
    once = FaultyStore(local, [Fault(kind="flip", op="get", key=f"*/{name}")])
    send(sender(once, remote), local)
    assert verify(remote, Catalog(remote).checkpoints()[0].folder).ok


def test_no_more_blocks_are_in_memory_than_it_was_told(local: LocalStore) -> None:
    """Bounded by its threads, however large a file is."""
    remote, lock = MemoryStore(), threading.Lock()
    share_claims(local, remote)
    now, most = 0, 0

    class Watched(LocalStore):
        def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
            nonlocal now, most
            data = super().get(key, start, nbytes)
            with lock:
                now += 1
                most = max(most, now)
            return data

    real_create = remote.create

    def create(key: str, nbytes: int) -> Any:
        writer, real = real_create(key, nbytes), None
        real = writer.write

        def write(start: int, data: memoryview) -> None:
            nonlocal now
            real(start, data)
            with lock:
                now -= 1

        writer.write = write  # type: ignore[method-assign]
        return writer

    remote.create = create  # type: ignore[method-assign]
    source = Watched(local.url)
    one = Sender(source, remote, num_threads=2, timeout_s=60)
    documents = sum(1 for e in Catalog(local).checkpoints()[0].manifest.files if "json" in e) + 2
    send(one, local)
    assert most <= 2 + documents
