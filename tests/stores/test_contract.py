"""Object stores on real servers meet the contract of stores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.testing.store_contract import LARGE_NBYTES, StoreContract
from runs import remove_folder
from servers.client import broken_uploads, keys
from servers.program import Service


class TestObjectStore(StoreContract):
    @pytest.fixture
    def store(self, root: str) -> Store:
        return open_store(root)

    def test_objects_are_where_the_url_says(
        self, store: Store, root: str, service: Service
    ) -> None:
        store.put("a/b", b"x")
        prefix = root.removeprefix(service.root(""))
        assert keys(service, prefix) == [f"{prefix}/a/b"]

    @pytest.mark.full
    def test_lists_have_more_than_one_page(self, store: Store) -> None:
        """Servers give 1,000 keys at a time."""
        names = [f"many/{number:04d}" for number in range(1203)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b"x"), names))
        assert [info.key for info in store.list()] == names
        assert store.children("many") == tuple(name.removeprefix("many/") for name in names)
        assert store.children() == ("many/",)
        remove_folder(store, "many")
        assert list(store.list()) == []

    def test_two_places_in_one_bucket_are_apart(self, store: Store, root: str) -> None:
        other = open_store(f"{root}-other")
        other.put("a", b"theirs")
        store.put("a", b"ours")
        store.delete("a")
        assert list(store.list()) == []
        assert other.get("a") == b"theirs"
        other.delete("a")

    def test_an_upload_that_is_given_up_leaves_nothing(
        self, store: Store, root: str, service: Service
    ) -> None:
        """R26."""
        writer = store.create("a", LARGE_NBYTES)
        writer.write(0, memoryview(bytes(LARGE_NBYTES - 1)))
        writer.abort()
        prefix = root.removeprefix(service.root(""))
        assert keys(service, prefix) == []
        assert broken_uploads(service, root) == []

    def test_it_has_no_folders_and_offers_what_is_fast(self, store: Store) -> None:
        assert not store.has_folders
        for name in ("read_into", "get_whole", "create", "delete_many"):
            assert getattr(type(store), name) is not getattr(Store, name)
        assert store.probe()
