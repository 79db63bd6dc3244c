"""What is special about a remote store; the contract is tested on each server in tests/stores."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.errors import CorruptData
from holdfast.store.base import AbortsUploads
from holdfast.store.remote import RemoteStore
from holdfast.store.remoteopen import RemoteOptions
from holdfast.testing.store_contract import noise
from servers.fixtures import on

LENGTH = 20 * 1024 * 1024 + 3
"""More than two reads of blocks."""

FORK = """
import os, sys
from holdfast.store import open_store
from holdfast.errors import UnsupportedStore
store = open_store(sys.argv[1])
unused = open_store(sys.argv[1] + "-unused")
store.put("a", b"x")
child = os.fork()
if not child:
    for one in (store, unused):
        try:
            one.get("a")
        except UnsupportedStore as error:
            print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.get("a") == b"x"
"""


@on("moto")
def test_a_forked_process_is_told_instead_of_hanging(root: str) -> None:
    """Invariant 9: the threads of the network stay behind in the parent."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, root], capture_output=True, text=True, timeout=120, check=True
    )
    told = done.stdout.splitlines()
    assert len(told) == 2
    assert all("spawn or forkserver" in line for line in told)


@on("moto", "gcs", "azurite")
def test_a_read_of_many_requests_is_exact(root: str) -> None:
    store = RemoteStore(root)
    data = noise(LENGTH)
    store.put("a", data)
    buffer, seen = bytearray(LENGTH - 7), bytearray()
    store.read_into("a", 7, memoryview(buffer), seen=seen.extend)
    assert buffer == seen == data[7:]
    with pytest.raises(CorruptData, match=f"has {LENGTH} bytes"):
        store.read_into("a", 8, memoryview(buffer))
    with pytest.raises(CorruptData, match=f"has {LENGTH} bytes"):
        store.get("a", 8, LENGTH)


@on("moto", "gcs", "azurite")
def test_it_says_how_large_objects_are_written_and_leaves_nothing(root: str) -> None:
    store = RemoteStore(root, options=RemoteOptions(max_concurrency=5))
    told = store.probe()
    assert "up to 16 MiB" in told
    assert "up to 5 at once" in told
    assert list(store.list()) == []
    assert isinstance(store, AbortsUploads)
    assert list(store.uploads()) == []


@on("localstack")
def test_checksums_are_sent_where_they_are_asked_for(root: str) -> None:
    """LocalStack refuses a wrong one, and would refuse one that is missing in a part."""
    store = RemoteStore(root, options=RemoteOptions(checksums=True))
    data = memoryview(noise(LENGTH))
    store.put("a", data[:1000])
    writer = store.create("b", LENGTH)
    writer.write(0, data)
    writer.finish()
    assert store.get("a") == data[:1000]
    assert store.get("b") == data
