"""open_store turns what a user writes into a store."""

import os
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.store import open_store
from holdfast.store.base import Store
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
    store.make_folder("f")
    for key in ("f/a", "f/b"):
        store.put(key, b"the same")
    assert store.link("f/a", "f/c")
    one, other, linked = (store.head(f"f/{name}").identity for name in "abc")
    assert one == linked != other


@pytest.mark.parametrize(
    ("where", "to_write"),
    [
        (Path("s3://bucket/run"), "'s3://bucket/run'"),
        (Path("gs://bucket"), "'gs://bucket'"),
        ("s3:/bucket/run", "'s3://bucket/run'"),
        ("az:", "'az://'"),
        (Path("memory://one"), "'memory://one'"),
        ("dbfs:/mnt/run", "s3://"),
        (Path("hdfs://host/run"), "s3://"),
        (Path("file:///tmp/run"), "s3://"),
    ],
)
def test_what_begins_with_a_scheme_is_no_folder(tmp_path, monkeypatch, where, to_write):
    """Path("s3://bucket/run") is the relative path s3:/bucket/run: a run must not go there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="root") as caught:
        open_store(where)
    assert to_write in str(caught.value)


@pytest.mark.parametrize("where", ["runs/s3:/x", "12:30/run", "lr:0.1", "/s3:/bucket", "./s3:/x"])
def test_a_colon_elsewhere_is_part_of_a_folders_name(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_store(where), LocalStore)
