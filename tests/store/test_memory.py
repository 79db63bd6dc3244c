"""MemoryStore meets the contract of stores, and stands for stores without folders."""

import pytest

from holdfast.store.base import FreeSpace
from holdfast.store.memory import MemoryStore, memory_store
from holdfast.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        return MemoryStore("test")


def test_it_has_no_folders_like_an_object_store():
    store = MemoryStore()
    assert not store.has_folders
    store.make_folder("a", exclusive=True)
    store.make_folder("a", exclusive=True)
    store.sync_folder("a")
    assert store.sweep("a") == 0
    assert store.children() == ()
    assert store.free_space() == FreeSpace(None, None)
    store.point("latest", "a")
    assert store.get("latest") == b"a"


def test_stores_of_one_name_are_one_store():
    memory_store("shared").put("a", b"x")
    assert memory_store("shared").get("a") == b"x"
    assert memory_store("other").children() == ()


def test_stores_that_are_made_are_private():
    MemoryStore("private").put("a", b"x")
    assert MemoryStore("private").children() == ()
