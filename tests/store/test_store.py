"""open_store turns what a user writes into a store."""

import os

import pytest

from holdfast.errors import UsageError
from holdfast.store import open_store
from holdfast.store.base import Store, make_folder
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.store.remote import RemoteStore


@pytest.mark.parametrize("as_path", [True, False])
def test_a_path_is_a_local_store_and_is_not_made(tmp_path, as_path):
    where = tmp_path / "runs" / "one"
    store = open_store(where if as_path else str(where))
    assert isinstance(store, LocalStore)
    assert store.url == str(where)
    assert os.listdir(tmp_path) == []


def test_a_relative_path_stays_where_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("runs")
    monkeypatch.chdir("/")
    assert store.url == str(tmp_path / "runs")


def test_memory_stores_go_by_name():
    first = open_store("memory://one")
    assert isinstance(first, MemoryStore)
    assert open_store("memory://one") is first
    assert open_store("memory://two") is not first
    assert open_store(first.url) is first


def test_a_store_is_returned_as_it_is():
    store: Store = MemoryStore()
    assert open_store(store) is store


@pytest.mark.parametrize("where", ["s3://bucket/run", "gs://bucket", "az://container/run"])
def test_urls_of_clouds_are_remote_stores(where):
    store = open_store(where)
    assert isinstance(store, RemoteStore)
    assert store.url == where


@pytest.mark.parametrize("where", ["ftp://host/run", "memory://", "://x", "", "a\0b", None, 3])
def test_anything_else_is_a_usage_error(where):
    with pytest.raises(UsageError, match="root"):
        open_store(where)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_two_names_of_one_file_have_one_identity(tmp_path, kind):
    store = LocalStore(tmp_path) if kind == "local" else MemoryStore()
    make_folder(store, "f")
    for key in ("f/a", "f/b"):
        store.put(key, b"the same")
    assert store.link("f/a", "f/c")
    one, other, linked = (store.head(f"f/{name}").identity for name in "abc")
    assert one == linked != other
