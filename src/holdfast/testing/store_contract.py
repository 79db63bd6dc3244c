"""Contract of every store, as a test suite to subclass.

A store's own tests subclass `StoreContract` and give it a fixture:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            return MyStore(...)

Every test gets a store that is empty. Tests of folders skip themselves where the store has none.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from holdfast.errors import (
    AlreadyExists,
    CorruptData,
    InvalidKey,
    LimitExceeded,
    NotFound,
    StoreError,
    UsageError,
)
from holdfast.store.base import FreeSpace, ObjectInfo, Store

GOOD_KEYS = (
    *("a", "0", "_", "=x", "+x", "-x", "a.b", "a..b", "a.", "CON", "x" * 255),
    *("manifest.json", "step-00001000.0001-000001-deadbeef"),
)
"""Keys of one segment that every store takes."""

HOSTILE_KEYS = (
    *("", "/", "//", "/a", "a//b", "//a"),
    *(".", "..", "../a", "a/..", "a/../b", "a/./b", "./a"),
    *(".a", "a/.b", ".tmp-0000", "a/..b", "~", "~/a"),
    *("a b", " a", "a ", "a\n", "a\nb", "a\tb", "a\rb", "a\x00", "a\x00b", "\x00", "a\x7f"),
    *("a\\b", "..\\a", "C:", "C:/a", "C:\\a", "a:b", "file:///a"),
    *("a*", "a?", "a%2fb", "a|b", "$a", "a;b"),
    *("é", "a/é", "\u2024\u2024/a", "\uff0e\uff0e", "a\u2215b", "\ud800"),
    *("a/" + "x" * 256, "x" * 256, "/".join(["x" * 100] * 10)),
)
"""Keys that every store refuses with `InvalidKey`, in every operation."""

NUM_RACERS = 64
LARGE_NBYTES = 20 * 1024 * 1024 + 3
PIECE_NBYTES = 8 * 1024 * 1024


def noise(nbytes: int, seed: int = 0) -> bytes:
    """Return pseudo-random bytes without a pattern: the same ones for the same `seed`."""
    return random.Random(seed).randbytes(nbytes)


def _offenders(
    calls: Mapping[Any, Callable[[], object]], expected: type[Exception], match: str = ""
) -> dict[Any, object]:
    """List the calls that do not raise the expected error, with their error or result."""
    found: dict[Any, object] = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except expected as error:
            if match not in str(error):
                found[name] = error
        except Exception as error:  # noqa: BLE001 - it is listed with the others
            found[name] = error
    return found


def _has_cache(store: Store) -> bool:
    return type(store).cached is not Store.cached


class StoreContract:
    """Test suite of a store: subclass it, with a fixture `store` that returns an empty store."""

    @pytest.fixture
    def store(self) -> Store:
        """The store under test, empty. Every subclass overrides this."""
        raise pytest.UsageError(f"{type(self).__name__} must define the fixture `store`")

    @pytest.fixture(autouse=True)
    def _root(self, store: Store) -> None:
        store.make_folder("")

    # put and get

    def test_it_says_where_it_is(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert isinstance(store.url, str)
        assert store.url

    def test_what_is_put_can_be_got(self, store: Store) -> None:
        data = {key: noise(100 + number) for number, key in enumerate(GOOD_KEYS)}
        for key in GOOD_KEYS:
            store.put(key, data[key])
        assert {key: store.get(key) for key in GOOD_KEYS} == data
        infos = {key: ObjectInfo(key=key, nbytes=len(data[key])) for key in GOOD_KEYS}
        assert {key: store.head(key) for key in GOOD_KEYS} == infos

    def test_keys_may_have_many_segments(self, store: Store) -> None:
        store.make_folder("a/b/c")
        store.put("a/b/c/d", b"deep")
        assert store.get("a/b/c/d") == b"deep"

    def test_every_kind_of_buffer_is_stored(self, store: Store) -> None:
        whole = memoryview(b"long view")
        kinds: dict[str, bytes | bytearray | memoryview]
        kinds = {"a": b"bytes", "b": bytearray(b"array"), "c": memoryview(b"view"), "d": whole[2:5]}
        for key, data in kinds.items():
            store.put(key, data)
        assert {key: store.get(key) for key in kinds} == {k: bytes(d) for k, d in kinds.items()}

    def test_buffers_of_other_items_are_stored_as_their_bytes(self, store: Store) -> None:
        words = memoryview(bytes(range(16))).cast("I", (2, 2))
        store.put("a", words)
        assert store.get("a") == bytes(range(16))

    def test_what_is_put_is_a_copy(self, store: Store) -> None:
        data = bytearray(b"before")
        store.put("a", data)
        data[:] = b"after!"
        assert store.get("a") == b"before"

    def test_an_object_may_be_empty(self, store: Store) -> None:
        for key, if_absent in (("a", False), ("b", True)):
            store.put(key, b"", if_absent=if_absent)
            assert store.get(key) == b""
            assert store.get(key, 0, 0) == b""
            assert store.head(key).nbytes == 0
        assert list(store.list()) == [ObjectInfo(key=key, nbytes=0) for key in ("a", "b")]

    def test_an_object_may_be_large(self, store: Store) -> None:
        data = noise(LARGE_NBYTES)
        for key, if_absent in (("a", False), ("b", True)):
            store.put(key, data, if_absent=if_absent)
            assert store.head(key).nbytes == LARGE_NBYTES
            assert store.get(key) == data

    def test_a_put_replaces_whole(self, store: Store) -> None:
        store.put("a", b"a long first value")
        store.put("a", b"short")
        assert store.get("a") == b"short"
        store.put("a", b"a long third value")
        assert store.get("a") == b"a long third value"

    def test_a_put_replaces_what_was_put_if_absent(self, store: Store) -> None:
        store.put("a", b"first", if_absent=True)
        store.put("a", b"second")
        assert store.get("a") == b"second"

    def test_a_missing_object_is_not_found(self, store: Store) -> None:
        store.make_folder("folder")
        for key in ("a", "folder/a", "no-folder/a", "folder"):
            with pytest.raises(NotFound):
                store.get(key)
            with pytest.raises(NotFound):
                store.get(key, 0, 0)
            with pytest.raises(NotFound):
                store.head(key)

    def test_nothing_is_found_below_an_object(self, store: Store) -> None:
        store.put("a", b"object")
        with pytest.raises(NotFound):
            store.get("a/b")
        with pytest.raises(NotFound):
            store.head("a/b")

    # ranges

    def test_a_range_is_exact(self, store: Store) -> None:
        data = noise(10)
        store.put("a", data)
        ranges = [(0, 10), (0, 0), (10, 0), (3, 4), (9, 1)]
        exact: dict[object, bytes] = {(n, size): data[n : n + size] for n, size in ranges}
        found: dict[object, bytes] = {(n, size): store.get("a", n, size) for n, size in ranges}
        rests = [0, 4]
        assert found | {n: store.get("a", n) for n in rests} == exact | {n: data[n:] for n in rests}

    def test_a_range_may_be_empty_at_the_end(self, store: Store) -> None:
        store.put("a", noise(10))
        assert store.get("a", 10) == b""

    def test_a_range_past_the_end_is_corrupt_data(self, store: Store) -> None:
        store.put("a", noise(10))
        ranges = ((0, 11), (5, 6), (10, 1), (11, 0), (11, None), (0, 2**40), (2**40, 1))
        calls = {at: partial(store.get, "a", *at) for at in ranges}
        assert _offenders(calls, CorruptData) == {}

    def test_an_object_may_become_shorter_than_planned(self, store: Store) -> None:
        lengths = (0, 1, 4096, PIECE_NBYTES, 2 * PIECE_NBYTES + 4097)
        all_data = memoryview(noise(max(lengths)))
        wrong = []
        for nbytes in lengths:
            key, data = f"a-{nbytes}", all_data[:nbytes]
            writer = store.create(key, nbytes + 100_000, at_most=True)
            for start in reversed(range(0, nbytes, PIECE_NBYTES)):
                writer.write(start, data[start : start + PIECE_NBYTES])
            writer.finish(nbytes)
            if store.head(key).nbytes != nbytes or store.get(key) != data:
                wrong.append(nbytes)
        assert wrong == []

    def test_the_length_of_a_shorter_object_is_that_of_its_bytes(self, store: Store) -> None:
        """Invariant 2: a writer refuses to finish with a length beyond its written bytes."""
        for key, length in (("a", None), ("b", 11)):
            writer = store.create(key, 10, at_most=True)
            writer.write(0, memoryview(b"12345"))
            with pytest.raises(UsageError, match="10"):
                writer.finish(length)
            writer.abort()
        writer = store.create("c", 10, at_most=True)
        writer.write(0, memoryview(b"12345"))
        with pytest.raises(StoreError, match="1 of 6"):
            writer.finish(6)
        writer.abort()
        writer = store.create("d", 10)
        writer.write(0, memoryview(b"1234567890"))
        with pytest.raises(UsageError, match="10"):
            writer.finish(9)
        writer.abort()

    def test_a_negative_range_is_a_usage_error(self, store: Store) -> None:
        store.put("a", noise(10))
        calls = {at: partial(store.get, "a", *at) for at in ((-1, 1), (-1, None), (0, -1))}
        assert _offenders(calls, ValueError, "negative") == {}

    # put if absent

    def test_the_first_put_if_absent_wins(self, store: Store) -> None:
        store.put("a", b"first", if_absent=True)
        with pytest.raises(AlreadyExists):
            store.put("a", b"second", if_absent=True)
        assert store.get("a") == b"first"

    def test_a_plain_put_takes_the_key_too(self, store: Store) -> None:
        store.put("a", b"first")
        with pytest.raises(AlreadyExists):
            store.put("a", b"second", if_absent=True)
        assert store.get("a") == b"first"

    def test_a_key_that_was_deleted_is_absent(self, store: Store) -> None:
        store.put("a", b"first", if_absent=True)
        store.delete("a")
        store.put("a", b"second", if_absent=True)
        assert store.get("a") == b"second"

    def test_of_64_concurrent_puts_if_absent_exactly_one_wins(self, store: Store) -> None:
        """R10, invariant 1: one put succeeds, and its bytes are stored whole."""
        for round_number in range(3):
            key = f"race-{round_number}"
            start = threading.Barrier(NUM_RACERS)

            def race(racer: int, key: str = key, start: threading.Barrier = start) -> bool:
                start.wait(timeout=60)
                try:
                    store.put(key, noise(5000, seed=racer), if_absent=True)
                except AlreadyExists:
                    return False
                return True

            with ThreadPoolExecutor(NUM_RACERS) as pool:
                won = list(pool.map(race, range(NUM_RACERS)))
            assert won.count(True) == 1
            assert store.get(key) == noise(5000, seed=won.index(True))

    def test_concurrent_replacing_puts_leave_one_of_the_values_whole(self, store: Store) -> None:
        values = [noise(100_000, seed=number) for number in range(8)]
        seen: list[bytes] = []
        store.put("a", values[0])

        def replace(number: int) -> None:
            for _ in range(5):
                store.put("a", values[number])
                seen.append(store.get("a"))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(replace, range(8)))
        assert store.get("a") in values
        assert all(value in values for value in seen)

    def test_concurrent_puts_of_different_keys_all_arrive(self, store: Store) -> None:
        store.make_folder("many")
        keys = [f"many/{number:04d}" for number in range(100)]

        def put(number: int) -> None:
            store.put(keys[number], noise(1000 + number, seed=number), if_absent=number % 2 == 0)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(put, range(100)))
        assert [info.key for info in store.list("many/")] == keys
        for number, key in enumerate(keys):
            assert store.get(key) == noise(1000 + number, seed=number)

    # list and children

    def fill(self, store: Store, *keys: str) -> None:
        """Put objects, each with its key as its bytes, and make their folders."""
        for key in keys:
            store.make_folder(key.rpartition("/")[0])
            store.put(key, key.encode())

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.list()) == []
        assert store.children() == ()

    def test_a_list_is_in_order_of_whole_keys(self, store: Store) -> None:
        keys = ("b", "a/b", "a-b", "a.b", "a/b-c", "a0", "a/b.c/d", "B", "a+b", "a=b", "_", "0/9")
        self.fill(store, *keys)
        found = list(store.list())
        assert [info.key for info in found] == sorted(keys)
        assert all(info.nbytes == len(info.key) for info in found)

    def test_a_list_has_every_object_of_the_prefix(self, store: Store) -> None:
        self.fill(store, "a-b", "a/b", "a/b-c", "ab", "b/a")
        expected = {
            "a": ["a-b", "a/b", "a/b-c", "ab"],
            "a/": ["a/b", "a/b-c"],
            "a/b": ["a/b", "a/b-c"],
            "a/b-": ["a/b-c"],
            "a-": ["a-b"],
            "c": [],
            "c/d": [],
            "ab/": [],
        }
        found = {prefix: [info.key for info in store.list(prefix)] for prefix in expected}
        assert found == expected

    def test_children_are_the_names_directly_inside(self, store: Store) -> None:
        self.fill(store, "b", "a/x", "a/y/z", "a-b", "a.b")
        assert store.children() == ("a-b", "a.b", "a/", "b")
        assert store.children("a") == ("x", "y/")
        assert store.children("a/y") == ("z",)

    def test_a_missing_folder_has_no_children(self, store: Store) -> None:
        self.fill(store, "b")
        assert store.children("a") == ()
        assert store.children("a/b") == ()
        assert store.children("b") == ()

    def test_objects_may_be_deleted_while_they_are_listed(self, store: Store) -> None:
        self.fill(store, "a/1", "a/2", "b/1", "b/2", "c")
        listed = []
        for info in store.list():
            listed.append(info.key)
            store.delete(info.key)
        assert listed == ["a/1", "a/2", "b/1", "b/2", "c"]
        assert list(store.list()) == []

    # whole objects

    def test_a_small_object_is_read_whole(self, store: Store) -> None:
        self.fill(store, "b")
        for nbytes in (0, 1, 100_000):
            data = noise(nbytes)
            store.put("a", data)
            assert store.get_whole("a", max_nbytes=nbytes) == data
            assert store.get_whole("a", max_nbytes=nbytes + 1) == data

    def test_an_object_that_is_larger_than_allowed_is_not_read(self, store: Store) -> None:
        """R28: an object that should be small, but is of any length, must not fill the memory."""
        store.put("a", noise(100_000))
        with pytest.raises(LimitExceeded, match="100000 bytes, at most 99999"):
            store.get_whole("a", max_nbytes=99_999)
        with pytest.raises(NotFound):
            store.get_whole("x", max_nbytes=100_000)

    # delete

    def test_many_objects_are_deleted(self, store: Store) -> None:
        """Missing keys are no error, and do not stop the deletion of the others."""
        keys = [f"a/{number:04d}" for number in range(40)]
        self.fill(store, *keys, "a/b/c", "b")
        store.delete_many(["a/x", *keys[:20], "x/y", keys[0], *keys[20:]])
        assert [info.key for info in store.list()] == ["a/b/c", "b"]
        store.delete_many([])
        store.delete_many(keys)
        assert [info.key for info in store.list()] == ["a/b/c", "b"]

    def test_a_deleted_object_is_gone(self, store: Store) -> None:
        self.fill(store, "a/b", "a/c")
        store.delete("a/b")
        with pytest.raises(NotFound):
            store.get("a/b")
        assert [info.key for info in store.list()] == ["a/c"]

    def test_deleting_what_is_missing_is_fine(self, store: Store) -> None:
        self.fill(store, "a/b")
        for key in ("x", "a/x", "x/y", "a/b/c", "a", "x/", "a/x/", "a/b/"):
            store.delete(key)
            store.delete(key)
        assert store.get("a/b") == b"a/b"

    def test_a_folder_is_deleted_only_when_nothing_is_in_it(self, store: Store) -> None:
        """Deletion of a key leaves all others."""
        keys = ["a-b", "a/b", "a/c/d", "ab"]
        self.fill(store, *keys)
        for folder in ("a/", "a/c/"):
            with pytest.raises(StoreError):
                store.delete(folder)
        assert [info.key for info in store.list()] == keys
        store.delete_many(["a/b", "a/c/d"])
        store.delete("a/c/")
        store.delete("a/")
        assert store.children() == ("a-b", "ab")
        store.make_folder("a", exclusive=True)

    def test_a_folder_may_be_deleted_by_several_at_once(self, store: Store) -> None:
        self.fill(store, "b", "a/x")
        store.delete("a/x")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: store.delete("a/"), range(4)))
        assert [info.key for info in store.list()] == ["b"]

    # keys

    def test_a_hostile_key_is_refused_by_every_operation(self, store: Store) -> None:
        """R28: keys come from manifests, which may be hostile; every operation checks them."""
        calls: dict[object, Callable[[], object]] = {}
        for key in HOSTILE_KEYS:
            for name, call in self._operations(store, key).items():
                calls[name, key] = call
        assert _offenders(calls, InvalidKey) == {}
        assert list(store.list()) == []

    def _operations(self, store: Store, key: str) -> dict[str, Callable[[], object]]:
        """List every operation of the store, as calls on a key."""
        calls: dict[str, Callable[[], object]] = {
            "put": lambda: store.put(key, b"x"),
            "put if absent": lambda: store.put(key, b"x", if_absent=True),
            "get": lambda: store.get(key),
            "head": lambda: store.head(key),
            "get_whole": lambda: store.get_whole(key, max_nbytes=9),
            "read_into": lambda: store.read_into(key, 0, memoryview(bytearray(1))),
            "create": lambda: store.create(key, 1),
            "point": lambda: store.point(key, "target"),
            "point at": lambda: store.point("name", key),
            "pointed": lambda: store.pointed(key),
            "delete_many": lambda: store.delete_many([key]),
            "delete": lambda: store.delete(key),
            "delete a folder": lambda: store.delete(key + "/"),
            "list a folder": lambda: store.list(f"{key}/"),
        }
        if key:
            calls["children"] = lambda: store.children(key)
            calls["children of a folder"] = lambda: store.children(key + "/")
            calls["list"] = lambda: store.list(key)
        if _has_cache(store):
            calls["cached"] = lambda: store.cached(key, 0, 1)
        if store.has_folders and key:
            calls["make_folder"] = lambda: store.make_folder(key)
            calls["sync_folder"] = lambda: store.sync_folder(key)
            calls["sweep"] = lambda: store.sweep(key)
            calls["unlisted"] = lambda: store.unlisted(key)
        return calls

    # folders

    @pytest.fixture
    def folders(self, store: Store) -> Store:
        """Return the store, if it has folders; otherwise skip the test."""
        if not store.has_folders:
            pytest.skip("the store has no folders")
        return store

    def test_a_put_never_makes_a_folder(self, folders: Store) -> None:
        """Rule 5: a put fails if its folder does not exist."""
        for if_absent in (False, True):
            with pytest.raises(NotFound, match="missing"):
                folders.put("missing/a", b"x", if_absent=if_absent)
        assert folders.children() == ()

    def test_make_folder_makes_the_ancestors(self, folders: Store) -> None:
        folders.make_folder("a/b/c")
        assert folders.children() == ("a/",)
        assert folders.children("a/b") == ("c/",)
        assert list(folders.list()) == []

    def test_make_folder_accepts_an_existing_one(self, folders: Store) -> None:
        folders.make_folder("a")
        folders.put("a/b", b"x")
        folders.make_folder("a")
        folders.make_folder("")
        assert folders.get("a/b") == b"x"

    def test_an_exclusive_folder_must_be_new(self, folders: Store) -> None:
        folders.make_folder("a/b", exclusive=True)
        for folder in ("a/b", "a", ""):
            with pytest.raises(AlreadyExists):
                folders.make_folder(folder, exclusive=True)
        folders.put("file", b"x")
        with pytest.raises(AlreadyExists):
            folders.make_folder("file", exclusive=True)

    def test_of_16_exclusive_makers_exactly_one_wins(self, folders: Store) -> None:
        start = threading.Barrier(16)

        def race(_: int) -> bool:
            start.wait(timeout=60)
            try:
                folders.make_folder("a/b", exclusive=True)
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(race, range(16))).count(True) == 1

    def test_sync_folder_needs_the_folder(self, folders: Store) -> None:
        folders.make_folder("a")
        folders.sync_folder("a")
        folders.sync_folder("")
        with pytest.raises(NotFound):
            folders.sync_folder("missing")

    def test_sweep_removes_no_object(self, folders: Store) -> None:
        self.fill(folders, "a/b", "a/c/d")
        assert folders.sweep("a") == 0
        assert folders.sweep("") == 0
        assert folders.sweep("missing") == 0
        assert [info.key for info in folders.list()] == ["a/b", "a/c/d"]

    # reading into memory

    def test_read_into_fills_the_buffer(self, store: Store) -> None:
        data = noise(100_000)
        store.put("a", data)
        for start, nbytes in ((0, 100_000), (0, 0), (100_000, 0), (1, 99_999), (777, 4096)):
            buffer = bytearray(b"#" * (nbytes + 2))
            store.read_into("a", start, memoryview(buffer)[1:-1])
            assert buffer == b"#" + data[start : start + nbytes] + b"#"

    def test_read_into_is_exact(self, store: Store) -> None:
        store.put("a", noise(10))
        calls = {
            (start, nbytes): partial(store.read_into, "a", start, memoryview(bytearray(nbytes)))
            for start, nbytes in ((0, 11), (10, 1), (11, 0), (5, 6))
        }
        assert _offenders(calls, CorruptData) == {}

    def test_read_into_needs_the_object(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.read_into("a", 0, memoryview(bytearray(1)))

    def test_read_into_shows_each_byte_once_and_in_order(self, store: Store) -> None:
        wrong = []
        for nbytes in (0, 1, 3_000_001):
            data = noise(nbytes)
            store.put(f"a-{nbytes}", data)
            for afresh in (False, True):
                buffer, seen = bytearray(nbytes), bytearray()
                store.read_into(
                    f"a-{nbytes}", 0, memoryview(buffer), seen=seen.extend, afresh=afresh
                )
                if not buffer == seen == data:
                    wrong.append((nbytes, afresh))
        assert wrong == []

    def test_read_into_works_from_many_threads(self, store: Store) -> None:
        data = noise(1_000_000)
        store.put("a", data)
        buffer = bytearray(len(data))
        view = memoryview(buffer)

        def read(start: int) -> None:
            store.read_into("a", start, view[start : start + 12_345])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(0, len(data), 12_345)))
        assert buffer == data

    def test_what_stays_open_is_what_is_there(self, store: Store) -> None:
        """Reads within `keeping_open` return the current bytes of the key, not earlier ones."""
        memory = bytearray(4)
        with store.keeping_open():
            for data in (b"1234", b"5678"):
                store.put("a", data)
                for _ in range(2):
                    store.read_into("a", 0, memoryview(memory))
                    assert bytes(memory) == data == store.get("a")
            store.delete("a")
            with pytest.raises(NotFound):
                store.read_into("a", 0, memoryview(memory))

    def test_what_is_at_hand_is_what_is_there(self, store: Store) -> None:
        if not _has_cache(store):
            pytest.skip("the store has nothing at hand")
        for start in (0, 777, 99_999, 100_000):
            self._check_cached(store, start)

    def _check_cached(self, store: Store, start: int) -> None:
        """Check that cached reads from `start` to the end return the current bytes of the key."""
        data, seen = noise(100_000), bytearray()
        nbytes = len(data) - start
        store.put("a", data)
        assert store.cached("a", start, nbytes) is None
        with store.keeping_open():
            fill = store.cached("a", start, nbytes)
            view = memoryview(bytearray(nbytes))
            if fill is not None and fill(
                [view[:0], view[:1], view[1:500], view[500:]], seen.extend
            ):
                assert view == seen == data[start:]
            for too_many in (nbytes + 1, 200_000):
                with pytest.raises(CorruptData):
                    store.cached("a", start, too_many)
            store.put("a", b"other")
            with pytest.raises(CorruptData):
                store.cached("a", start, nbytes + 6)
            store.delete("a")
            with pytest.raises(NotFound):
                store.cached("a", 0, 1)

    # writing in pieces

    def test_pieces_in_any_order_make_the_object(self, store: Store) -> None:
        wrong = []
        for nbytes in (0, 1, 4095, 4096, 4097, 1_000_003):
            key, data = f"a-{nbytes}", memoryview(noise(nbytes))
            writer = store.create(key, nbytes)
            starts = list(range(0, nbytes, 100_001))
            random.Random(1).shuffle(starts)
            for start in starts:
                writer.write(start, data[start : start + 100_001])
            writer.finish()
            if store.head(key).nbytes != nbytes or store.get(key) != data:
                wrong.append(nbytes)
        assert wrong == []

    def test_pieces_may_come_from_many_threads(self, store: Store) -> None:
        data = memoryview(noise(LARGE_NBYTES))
        writer = store.create("a", len(data))

        def write(start: int) -> None:
            writer.write(start, data[start : start + 1_000_000])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(0, len(data), 1_000_000)))
        writer.finish()
        assert store.get("a") == data

    def test_create_refuses_a_key_that_is_taken(self, store: Store) -> None:
        store.put("a", b"first")
        with pytest.raises(AlreadyExists):
            store.create("a", 10)
        assert store.get("a") == b"first"

    def test_create_needs_the_folder(self, folders: Store) -> None:
        with pytest.raises(NotFound, match="missing"):
            folders.create("missing/a", 0).finish()

    def test_a_finished_object_has_its_key(self, store: Store) -> None:
        writer = store.create("a", 1)
        writer.write(0, memoryview(b"x"))
        writer.finish()
        with pytest.raises(AlreadyExists):
            store.put("a", b"y", if_absent=True)

    def test_an_object_with_holes_is_never_finished(self, store: Store) -> None:
        """Invariant 2: a writer refuses to finish before all bytes were written."""
        writer = store.create("a", 10)
        writer.write(0, memoryview(b"12345"))
        with pytest.raises(StoreError, match="5 of 10"):
            writer.finish()
        writer.abort()

    def test_a_piece_outside_the_object_is_refused(self, store: Store) -> None:
        writer = store.create("a", 10)
        calls = {
            (start, nbytes): partial(writer.write, start, memoryview(bytes(nbytes)))
            for start, nbytes in ((-1, 1), (10, 1), (9, 2), (0, 11))
        }
        assert _offenders(calls, ValueError, "not inside") == {}
        writer.abort()

    def test_abort_may_come_at_any_time_and_twice(self, store: Store) -> None:
        writer = store.create("a", 10)
        writer.write(0, memoryview(b"12345"))
        writer.abort()
        writer.abort()
        with pytest.raises(StoreError):
            writer.write(5, memoryview(b"67890"))
        store.create("b", 0).abort()

    def test_abort_after_finish_keeps_the_object(self, store: Store) -> None:
        writer = store.create("a", 3)
        writer.write(0, memoryview(b"abc"))
        writer.finish()
        writer.abort()
        assert store.get("a") == b"abc"

    # the rest

    def test_a_pointer_is_no_object_and_can_be_moved(self, store: Store) -> None:
        self.fill(store, "a/x", "b/x")
        assert store.pointed("latest") is None
        store.point("latest", "a")
        store.point("latest", "b")
        assert store.pointed("latest") == "b"
        assert {info.key for info in store.list()} - {"latest"} == {"a/x", "b/x"}

    def test_free_space_is_told_in_bytes_and_inodes(self, store: Store) -> None:
        free = store.free_space()
        assert isinstance(free, FreeSpace)
        assert free.nbytes is None or free.nbytes > 0
        assert free.inodes is None or free.inodes > 0

    def test_syncing_a_folder_is_harmless_everywhere(self, store: Store) -> None:
        self.fill(store, "a/b")
        store.sync_folder("a")
        assert store.get("a/b") == b"a/b"
