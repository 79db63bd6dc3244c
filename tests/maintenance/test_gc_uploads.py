"""What a killed writer had begun to upload and no list of objects shows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.errors import AccessDenied
from holdfast.maintenance import gc
from holdfast.maintenance.gc import collect_garbage
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.remote.writes import PART_NBYTES
from holdfast.testing.faulty import Fault, FaultyStore
from runs import new_run
from servers.client import keys, uploads
from servers.fixtures import on
from servers.program import Service

SLOW_SAVE = """
import sys, torch
from holdfast import CheckpointManager
from holdfast.store.remote import RemoteStore
from holdfast.store.remote.opening import RemoteOptions
store = RemoteStore(sys.argv[1], options=RemoteOptions(max_upload_mb_s=1))
manager = CheckpointManager(store, {"tree": {"x": torch.ones(12 << 20)}}, preflight=False)
manager.save(1).wait()
"""
"""48 MiB in one file, at a rate at which it takes most of a minute."""


@contextmanager
def saving(root: str, service: Service, prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the middle of the first upload of its first save."""
    process = subprocess.Popen([sys.executable, "-c", SLOW_SAVE, root])
    try:
        deadline = time.monotonic() + 120
        while not uploads(service, prefix):
            assert process.poll() is None
            assert time.monotonic() < deadline
        yield process
    finally:
        process.kill()
        process.wait()


@on("moto", "gcs")
def test_gc_ends_what_a_killed_writer_had_begun_to_upload(service: Service, root: str) -> None:
    """R26, R9: of its attempt there is nothing but an upload that no list of objects shows."""
    prefix = root.removeprefix(service.root(""))
    store = open_store(root)
    with saving(root, service, prefix) as writer:
        ours = {name.partition("/")[0] for name in keys(service, f"{prefix}/step-00000001")}
        collect_garbage(store)
        assert len(uploads(service, prefix)) == 1  # its writer is alive
        writer.kill()
        writer.wait()
        report = collect_garbage(store)
    assert uploads(service, prefix) == []
    assert len(report.marked) == 1
    assert len(Catalog(store).attempts()) == 1  # the marker, for a put that may still arrive
    assert ours <= {str(name) for name in Catalog(store).attempts()}
    collect_garbage(store, dead_epochs=[1])
    assert Catalog(store).attempts() == ()


@on("moto", "gcs")
def test_gc_ends_what_is_left_in_a_checkpoint(service: Service, root: str) -> None:
    """R26: a first try whose reply was lost, of a file that is there."""
    prefix = root.removeprefix(service.root(""))
    store = open_store(root)
    run = new_run()
    with run.manager(root, preflight=False) as manager:
        folder = manager.save(1).wait().folder
    writer = store.create(f"{folder}/second-try", 3 * PART_NBYTES)
    writer.write(0, memoryview(bytes(PART_NBYTES)))
    while not uploads(service, prefix):
        pass
    assert collect_garbage(store).failed == []
    assert uploads(service, prefix) == []
    assert [entry.folder for entry in Catalog(store).checkpoints()] == [folder]
    writer.abort()


@on("moto")
def test_a_gc_that_looks_for_no_uploads_is_caught(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R26: the test above fails without the line of ours that it is for."""
    monkeypatch.setattr(gc, "_find_open_uploads", lambda store, report: ())
    with pytest.raises(AssertionError):
        test_gc_ends_what_is_left_in_a_checkpoint(service, root)


@on("moto")
def test_without_the_right_to_list_uploads_gc_says_so_and_does_the_rest(root: str) -> None:
    """R26: then a lifecycle rule has to end them."""
    denied = AccessDenied("uploads: 403. Needed: s3:ListBucketMultipartUploads")
    store: Store = FaultyStore(
        open_store(root),
        [
            Fault(kind="fail", op="uploads", error=denied, times=None),
            Fault(kind="fail", op="abort_uploads", error=denied, times=None),
        ],
    )
    run = new_run()
    with run.manager(store, preflight=False) as manager:
        manager.save(1).wait()
    folder = Catalog(store).attempts()[0]
    for key in (f"{folder}/manifest.json", f"{folder}/index.json", "latest"):
        store.delete(key)
    report = collect_garbage(store)
    assert [name for name, _ in report.failed] == ["uploads"]
    assert len(report.removed) == 1
    assert Catalog(store).attempts() == ()
