"""Replies that break off, or have a wrong bit, cost time and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.maintenance.verify import verify
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.testing.store_contract import noise
from runs import new_run, remove_folder
from servers.faults import FaultProxy, Rule
from servers.fixtures import on, use
from servers.program import Service

NBYTES = 3_000_001


@pytest.fixture
def proxy(service: Service, root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy without faults, through which clients find the server."""
    with FaultProxy(service) as proxy:
        use(proxy.service, monkeypatch)
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, root: str) -> Store:
    return open_store(root)


@on("localstack", "gcs", "azurite")
def test_a_list_whose_pages_break_off_is_complete_and_has_nothing_twice(
    proxy: FaultProxy, store: Store
) -> None:
    """R24: a list that hides something could justify nothing, and one that fails fails a save."""
    names = [f"many/{number:04d}" for number in range(1203)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    for at in (0, 1):
        proxy.add(Rule(kind="truncate", method="GET", path="*prefix=*", at=at))
    assert [info.key for info in store.list()] == names
    proxy.add(Rule(kind="truncate", method="GET", path="*delimiter=*", times=2))
    assert store.children() == ("many/",)
    assert proxy.counts["truncate"] == 4
    remove_folder(store, "many")
    assert list(store.list()) == []


def test_a_read_whose_reply_breaks_off_is_exact(proxy: FaultProxy, store: Store) -> None:
    """R24."""
    data = noise(NBYTES)
    store.put("a", data)
    proxy.add(Rule(kind="truncate", method="GET", path="*/a", times=3))
    assert store.get("a") == data
    buffer = bytearray(NBYTES)
    proxy.add(Rule(kind="truncate", method="GET", path="*/a"))
    store.read_into("a", 0, memoryview(buffer))
    assert buffer == data
    assert proxy.counts["truncate"] == 4


def test_a_bit_that_the_network_flips_is_found_by_our_digests(
    proxy: FaultProxy, store: Store
) -> None:
    """R15, R18, D14: clients notice nothing. Verify does, reads again and blames no checkpoint."""
    with new_run().manager(store, sinks=()) as manager:
        saved = manager.save(0).wait()
    proxy.add(Rule(kind="flip", method="GET", path="*model-00000.safetensors*"))
    report = verify(store, saved.folder)
    assert report.ok
    (note,) = report.notes
    assert note.startswith("model-00000.safetensors")
    assert "network" in note
    assert proxy.counts["flip"] == 1
    assert verify(store, saved.folder).notes == ()
