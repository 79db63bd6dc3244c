"""Uploads when things go wrong around them: nothing is lost, and they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast import errors
from holdfast.errors import StoreFull, TransientStoreError
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.loading.apply import CheckpointApplier
from holdfast.loading.search import LoadCandidate
from holdfast.ownership.owner import Ownership
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import All, Last
from holdfast.replication.queue import UploadQueue
from holdfast.root.catalog import Catalog
from holdfast.root.upload_records import Ledger
from holdfast.store.local import LocalStore, folders
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from tiers import LARGE, Noted, Switch, opened, saved, steps_in, unopened, without_backoff
from ways import Tiny


@pytest.fixture
def local(ram_path: Path) -> LocalStore:
    """The local tier."""
    return LocalStore(ram_path / "local")


def test_what_is_being_sent_stays_until_it_is_there(local: LocalStore) -> None:
    """D19: also when newer saves come faster than uploads end; else nothing would ever arrive."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(LARGE), Noted()
    slow = Fault(kind="hang", op="write", at=1)
    tiered = Tiered(
        local, FaultyStore(remote, [slow]), keep_local=Last(1), keep_remote=Last(1), threads=1
    )
    with opened(tiered, tiny, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        assert slow.reached.wait(60)
        saved(manager, tiny, 2)
        manager._session.saver.wait_until_idle(60)
        slow.release.set()
        manager.wait()
    assert noted.of("upload_failed") == []
    assert [event.step for event in noted.of("uploaded")] == [1, 2]
    assert steps_in(local) == steps_in(remote) == [2]


def test_a_full_local_disk_does_not_stop_the_uploads_that_make_room(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_backoff(monkeypatch)
    remote, tiny = Switch(), Tiny()
    full = Fault(kind="fail", op="put", key="uploads/*", times=None, error=StoreFull("no space"))
    with opened(Tiered(local, remote, close_timeout_s=0), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 2, 3)
    remote.error = None
    with opened(Tiered(FaultyStore(local, [full]), remote, keep_local=0), tiny) as manager:
        manager.resume()
        manager.wait(120)
    assert steps_in(remote) == [3, 2, 1]
    assert steps_in(local) == []


def test_a_pin_arrives_though_the_process_ended_before_it_was_sent(local: LocalStore) -> None:
    """R20: the pinned checkpoint is not deleted there in between, either."""
    remote, tiny = MemoryStore("remote"), Tiny()
    broken = FaultyStore(remote, [Fault(kind="fail", op="put", key="*/notes-*", times=None)])
    rules: dict[str, Any] = {"keep_local": Last(1), "keep_remote": Last(1)}
    with opened(Tiered(local, broken, tries=1, close_timeout_s=0, **rules), tiny) as manager:
        manager.resume()
        tiny.become(1)
        manager.save(1, wait=True)
        manager.wait()
    assert steps_in(remote) == [1]
    switch = Switch()
    switch._objects, switch._lock = remote._objects, remote._lock
    noted = Noted()
    faulty = FaultyStore(switch, [Fault(kind="fail", op="put", key="*/notes-*", times=None)])
    with opened(
        Tiered(local, faulty, tries=1, close_timeout_s=0, **rules), tiny, sinks=(noted,)
    ) as manager:
        manager.resume()
        switch.error = TransientStoreError("no network")
        saved(manager, tiny, 2)
        noted.wait_for("upload_failed")
        local_pin(local, 2)
        switch.error = None
        saved(manager, tiny, 3)
        noted.wait_for("upload_failed", 3)
    with opened(Tiered(local, remote, **rules), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 4)
        manager.wait()
    assert steps_in(remote) == [4, 2]


def local_pin(local: LocalStore, step: int) -> None:
    """Pin a checkpoint of the local tier."""
    from holdfast.ownership.annotations import annotate

    entry = next(e for e in Catalog(local).checkpoints() if e.step == step)
    annotate(local, entry, pinned=True)


def test_a_local_copy_stays_while_the_remote_one_lacks_files(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: also when the next process cannot look."""
    without_backoff(monkeypatch)
    remote, tiny, noted = Switch(), Tiny(), Noted()
    with opened(Tiered(local, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    folder = Catalog(local).checkpoints()[0].folder
    remote.delete(f"{folder}/tiny-00000.safetensors")
    with opened(Tiered(local, remote), tiny, sinks=(noted,)) as manager:
        manager.resume()
        manager.wait()
        assert any("lacks" in event.message for event in noted.of("warning"))
    remote.error = TransientStoreError("no network")
    with opened(Tiered(local, remote, keep_local=0, close_timeout_s=0), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 2)
    assert steps_in(local) == [2, 1]


def test_what_a_forerunner_kept_for_its_upload_goes_when_that_has_ended(local: LocalStore) -> None:
    """As when it was killed right after the upload: nothing is sent that would tell so."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    with opened(Tiered(local, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2, 3)
    with opened(Tiered(local, remote, keep_local=0), tiny, sinks=(noted,)) as manager:
        manager.resume()
        manager.wait()
    assert noted.of("uploaded") == []
    assert noted.of("housekeeping_failed") == []
    assert steps_in(remote) == [3, 2, 1]
    assert steps_in(local) == []


def test_no_local_copy_goes_while_the_run_resumes_from_it(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when all that the uploads have to do is done before the state is read."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    with opened(Tiered(local, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    manager = unopened(Tiered(local, remote, keep_local=0), tiny, sinks=(noted,))
    apply = CheckpointApplier._apply_candidate

    def apply_late(self: CheckpointApplier, candidate: LoadCandidate) -> None:
        manager._session.uploads.wait_for_uploads(60)
        apply(self, candidate)

    monkeypatch.setattr(CheckpointApplier, "_apply_candidate", apply_late)
    with manager:
        manager.resume()
        manager.wait()
    assert noted.of("housekeeping_failed") == noted.of("rejected") == []
    assert [event.fields["epoch"] for event in noted.of("claimed")] == [2]
    assert steps_in(remote) == [2, 1]
    assert steps_in(local) == []


class Noticed:
    """A lock that says when a thread has to wait for it."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._lock, self._on_wait = threading.Lock(), on_wait

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._on_wait()
            assert self._lock.acquire(timeout=60)

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_gc_after_a_claim_waits_for_a_deletion_under_way(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes temporary files, and the thread of uploads puts a tombstone through one."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    with opened(Tiered(local, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2, 3)
    gc_ended_or_waits = threading.Event()
    gcs: list[threading.Thread] = []
    replace = folders.replace_with

    def collect_garbage() -> None:
        manager._session.housekeeper.remove_unfinished()
        gc_ended_or_waits.set()

    def beside_gc(folder_fd: int, source: str, name: str) -> None:
        if name == layout.MANIFEST and not gcs:
            gcs.append(threading.Thread(target=collect_garbage, daemon=True))
            gcs[0].start()
            assert gc_ended_or_waits.wait(60)
        replace(folder_fd, source, name)

    monkeypatch.setattr(folders, "replace_with", beside_gc)
    manager = unopened(Tiered(local, remote, keep_local=0), tiny, sinks=(noted,))
    monkeypatch.setattr(manager._session.housekeeper, "_lock", Noticed(gc_ended_or_waits.set))
    with manager:
        manager.resume()
        manager.wait()
    (gc,) = gcs
    gc.join(60)
    assert noted.of("housekeeping_failed") == []
    assert steps_in(local) == []


def test_close_has_a_deadline_though_the_remote_tier_hangs(local: LocalStore) -> None:
    """Invariant 9."""
    others = {*threading.enumerate()}
    remote, tiny = MemoryStore("remote"), Tiny(LARGE)
    hang = Fault(kind="hang", op="write", deadline_s=300)
    tiered = Tiered(local, FaultyStore(remote, [hang]), close_timeout_s=0)
    manager = unopened(tiered, tiny, save_timeout_s=300)
    manager.resume()
    saved(manager, tiny, 1)
    assert hang.reached.wait(60)

    def close() -> None:
        with suppress(errors.DeadlineExceeded):  # raised if step 2 is not followed up in time
            manager.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(60)
    is_closed = not closing.is_alive()
    hang.release.set()
    closing.join(60)
    for thread in {*threading.enumerate()} - others:
        thread.join(60)  # it still writes into the folder
    assert is_closed


def test_a_manifest_that_cannot_be_read_for_a_moment_still_waits_and_is_spared(
    local: LocalStore,
) -> None:
    """D19: gc gives up nothing that was begun there, and nobody forgets that it is to be sent."""
    remote, tiny = Switch(), Tiny()
    with opened(Tiered(local, remote, close_timeout_s=0), tiny) as manager:
        manager.resume()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 1)
    folder = str(Catalog(local).attempts()[0])
    wrong = Fault(kind="flip", op="get", key=f"{folder}/manifest.json")
    store = FaultyStore(local, [wrong])
    owner = Ownership(store, takeover=False, emit=Emitter(()))
    backlog = UploadQueue(store, remote.url, All(), Emitter(()), owner, replaces=False)
    backlog.record_listing({}, ())
    assert wrong.reached.is_set()
    assert backlog.spared == (folder,)
    assert [*Ledger(local).waiting()] == [folder]
    backlog.refresh()
    assert backlog.folders == backlog.spared == (folder,)


def test_who_was_superseded_gives_up_nothing_that_was_begun(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D19: the next owner may want it there, and could not commit it beside an abort marker."""
    without_backoff(monkeypatch)
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    hurt = Fault(kind="fail", op="put", key="step-00000001*/manifest.json", times=None)

    def superseding(event: Event) -> None:
        if event.kind == "uploaded":
            remote.put(layout.writer_key(2), remote.get(layout.writer_key(1)))

    tiered = Tiered(local, FaultyStore(remote, [hurt]), keep_remote=Last(1))
    manager = unopened(tiered, tiny, sinks=(noted, superseding))
    manager.resume()
    saved(manager, tiny, 1)
    noted.wait_for("upload_failed")
    saved(manager, tiny, 2)
    with pytest.raises(errors.Superseded):
        manager.close()
    begun = str(Catalog(local).attempts()[1])
    names = remote.children(begun)
    assert names
    assert "manifest.json" not in names


def test_a_call_that_comes_back_after_close_begins_nothing_more(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: the thread that sends ends then, and does not wait for pieces nobody sends."""
    monkeypatch.setattr("holdfast.replication.upload_thread._END_S", 0.1)
    tiny, noted, remote = Tiny(LARGE), Noted(), MemoryStore("remote")
    slow = Fault(kind="hang", op="create")
    before = {*threading.enumerate()}
    with opened(
        Tiered(local, FaultyStore(remote, [slow]), close_timeout_s=0), tiny, sinks=(noted,)
    ) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        assert slow.reached.wait(60)
        started = {*threading.enumerate()} - before
    (mirror,) = (thread for thread in started if thread.name.startswith("holdfast-mirror"))
    slow.release.set()
    mirror.join(60)
    assert not mirror.is_alive()
    assert [info.key for info in remote.list("step-") if "manifest" in info.key] == []
    assert not any("tried again" in event.message for event in noted.of("upload_failed"))


@pytest.mark.full
def test_nobody_waits_for_ever_for_a_queue_whose_reader_hangs(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: such as on a disk, or for a service that opens keys."""
    reached, release = threading.Event(), threading.Event()

    class Hanging(Catalog):
        def survey(self, **options: Any) -> Any:
            reached.set()
            assert release.wait(200)
            return super().survey(**options)

    tiny = Tiny()
    tiered = Tiered(local, MemoryStore("remote"), max_lag="9step", close_timeout_s=0)
    manager = unopened(tiered, tiny, save_timeout_s=4)
    manager.resume()
    saved(manager, tiny, 1)
    manager.wait(60)
    monkeypatch.setattr("holdfast.replication.queue.Catalog", Hanging)
    reader = threading.Thread(target=manager._session.uploads.queue_new_uploads, daemon=True)
    reader.start()
    assert reached.wait(60)
    with pytest.raises(errors.DeadlineExceeded, match="still being read"):
        manager.save(2)
    # Step 2 is saved all the same, and what follows a save waits for the queue, too.
    with pytest.raises(errors.DeadlineExceeded, match=r"still being read|housekeeping"):
        manager.wait(0.1)

    def close() -> None:
        with suppress(errors.DeadlineExceeded):  # raised if step 2 is not followed up in time
            manager.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(60)
    is_closed = not closing.is_alive()
    release.set()
    for thread in (reader, closing):
        thread.join(60)
    assert is_closed


def test_the_lag_is_that_of_the_line_on_which_the_run_is(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D30: what a rollback left behind does not count as caught up."""
    without_backoff(monkeypatch)
    remote, tiny = Switch(), Tiny()
    tiered = Tiered(local, remote, max_lag="3step", close_timeout_s=0)
    with opened(tiered, tiny, save_timeout_s=4) as manager:
        manager.resume()
        for step in (1, 2, 20):
            saved(manager, tiny, step)
            manager.wait(60)
        manager.resume("step=1")
        manager.wait(60)
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 3, 4)
        with pytest.raises(errors.DeadlineExceeded, match="max_lag"):
            saved(manager, tiny, 5)


def test_latest_does_not_go_to_what_a_rollback_left_behind(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D30, D21."""
    without_backoff(monkeypatch)
    remote, tiny = Switch(), Tiny()
    with opened(Tiered(local, remote, close_timeout_s=0), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 2, 3)
    remote.error = None
    with opened(Tiered(local, remote), tiny) as manager:
        found = manager.resume("step=1")
        assert found is not None
        manager.wait()
        assert steps_in(remote) == [3, 2, 1]
        assert remote.get("latest").decode() == found.folder


def test_what_cannot_be_sent_at_all_is_raised_though_others_arrive(local: LocalStore) -> None:
    remote, tiny, noted = Switch(), Tiny(), Noted()
    tiered = Tiered(local, remote, on_upload_failure="raise", close_timeout_s=0)
    manager = unopened(tiered, tiny, sinks=(noted,))
    manager.resume()
    saved(manager, tiny, 1)
    manager.wait()
    remote.error = TransientStoreError("no network")
    saved(manager, tiny, 2, 3)
    newest = Catalog(local).checkpoints()[0].folder
    path = Path(local.url) / newest / "tiny-00000.json"
    path.chmod(0o644)
    path.write_bytes(b"{}")
    remote.error = None
    noted.wait_for("uploaded", 2)
    with pytest.raises(errors.UploadFailed, match="cannot be sent"):
        manager.save(4)
    noted.wait_for("uploaded", 3)  # step 4 was saved before the error was raised
    with pytest.raises(errors.UploadFailed, match="not uploaded"):
        manager.close()
    assert [n.state for n in Ledger(local).waiting().values() if n] == ["refused"]


def test_what_was_not_sent_is_told_also_after_a_resume_that_failed(local: LocalStore) -> None:
    """Which gives the run up, and with it the uploads."""
    remote, tiny = Switch(), Tiny()
    tiered = Tiered(local, remote, on_upload_failure="raise", close_timeout_s=0.1)
    manager = unopened(tiered, tiny)
    manager.resume()
    remote.error = TransientStoreError("away")
    saved(manager, tiny, 1)
    with pytest.raises(errors.NoCheckpoint):
        manager.resume("mistyped")
    assert not manager.is_owner
    with pytest.raises(errors.UploadFailed, match="not uploaded: 1 checkpoints"):
        manager.close()
