"""FaultyStore: transparent without faults, and exact about the ones that are asked for."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import (
    NotFound,
    OutcomeUnknown,
    StoreFull,
    TransientStoreError,
    UsageError,
)
from holdfast.store.base import WrappedStore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from holdfast.testing.store_contract import StoreContract

OFFERS = ("has_folders", "has_links", "writes_in_place", "reads_origin")


@pytest.mark.full
class TestFaultyLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return FaultyStore(LocalStore(tmp_path / "root"))


@pytest.mark.full
class TestFaultyMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        return FaultyStore(MemoryStore())


def test_it_offers_what_the_inner_store_offers(tmp_path):
    for inner in (LocalStore(tmp_path), MemoryStore(), WrappedStore(MemoryStore())):
        store = FaultyStore(inner)
        assert store.url == inner.url
        for name in OFFERS:
            assert getattr(store, name) == getattr(inner, name)


def test_it_can_be_wrapped_again():
    inner = MemoryStore()
    store = FaultyStore(FaultyStore(inner), [Fault(kind="fail", op="get")])
    store.put("a", b"x")
    assert inner.get("a") == b"x"
    assert store.has_links


def test_every_operation_is_written_down(tmp_path):
    store = FaultyStore(LocalStore(tmp_path / "root"))
    store.make_folder("f")
    store.put("f/a", b"x", if_absent=True)
    store.get("f/a")
    store.head("f/a")
    store.read_into("f/a", 0, memoryview(bytearray(1)))
    list(store.list("f/"))
    store.children()
    writer = store.create("f/b", 2)
    writer.write(0, memoryview(b"12"))
    writer.finish()
    writer.abort()
    store.sync_folder("f")
    store.sweep("f")
    store.point("latest", "f")
    store.free_space()
    store.delete("f/a")
    store.unlisted("f")
    assert store.ops == (
        ("make_folder", "f"),
        ("put", "f/a"),
        ("get", "f/a"),
        ("head", "f/a"),
        ("read_into", "f/a"),
        ("list", "f/"),
        ("children", ""),
        ("create", "f/b"),
        ("write", "f/b"),
        ("finish", "f/b"),
        ("abort", "f/b"),
        ("sync_folder", "f"),
        ("sweep", "f"),
        ("point", "latest"),
        ("free_space", ""),
        ("delete", "f/a"),
        ("unlisted", "f"),
    )


# which operation is struck


def put_many(store):
    """Put a, b, c, d; the keys whose puts failed."""
    failed = []
    for key in "abcd":
        try:
            store.put(key, b"x")
        except TransientStoreError:
            failed.append(key)
    return failed


@pytest.mark.parametrize(
    ("fault", "failed"),
    [
        (Fault(kind="fail"), ["a"]),
        (Fault(kind="fail", at=2), ["c"]),
        (Fault(kind="fail", at=4), []),
        (Fault(kind="fail", at=1, times=2), ["b", "c"]),
        (Fault(kind="fail", at=1, times=None), ["b", "c", "d"]),
        (Fault(kind="fail", key="c"), ["c"]),
        (Fault(kind="fail", key="[bd]", at=1), ["d"]),
        (Fault(kind="fail", op="put", key="b"), ["b"]),
        (Fault(kind="fail", op="get"), []),
    ],
)
def test_a_fault_strikes_the_operations_that_it_names(fault, failed):
    inner = MemoryStore()
    assert put_many(FaultyStore(inner, [fault])) == failed
    assert inner.children() == tuple(key for key in "abcd" if key not in failed)
    assert fault.reached.is_set() == bool(failed)


def test_each_fault_counts_for_itself():
    store = FaultyStore(MemoryStore(), [Fault(kind="fail", at=1), Fault(kind="fail", at=2)])
    assert put_many(store) == ["b", "c"]


def test_the_first_fault_of_the_list_strikes():
    full = StoreFull("full")
    store = FaultyStore(MemoryStore(), [Fault(kind="fail", error=full), Fault(kind="stop_before")])
    with pytest.raises(StoreFull) as caught:
        store.put("a", b"x")
    assert caught.value is full


def test_operations_of_many_threads_are_all_counted():
    store = FaultyStore(MemoryStore(), [Fault(kind="fail", at=50)])
    with ThreadPoolExecutor(8) as pool:
        failed = sum(pool.map(lambda number: len(put_many(store)), range(25)))
    assert failed == 1
    assert len(store.ops) == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "explode"},
        {"kind": "fail", "op": "rename"},
        {"kind": "fail", "at": -1},
        {"kind": "fail", "times": 0},
        {"kind": "flip", "op": "delete"},
        {"kind": "truncate", "op": "finish"},
    ],
)
def test_a_fault_that_could_never_strike_is_refused(wrong):
    with pytest.raises(UsageError):
        Fault(**wrong)


# what happens


def test_a_lost_reply_is_an_operation_that_was_done():
    inner = MemoryStore()
    store = FaultyStore(inner, [Fault(kind="lose_reply", op="put")])
    with pytest.raises(OutcomeUnknown, match="put a"):
        store.put("a", b"x")
    assert inner.get("a") == b"x"


def test_a_lost_reply_may_look_like_any_error():
    store = FaultyStore(MemoryStore(), [Fault(kind="lose_reply", error=NotFound("proxy"))])
    with pytest.raises(NotFound, match="proxy"):
        store.put("a", b"x")


def test_an_error_of_the_store_itself_is_a_reply_that_arrived():
    store = FaultyStore(MemoryStore(), [Fault(kind="lose_reply")])
    with pytest.raises(NotFound, match="memory"):
        store.get("missing")


def test_a_hang_waits_until_it_is_released():
    fault = Fault(kind="hang", op="put")
    store = FaultyStore(MemoryStore(), [fault])
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(store.put, "a", b"x")
        assert fault.reached.wait(60)
        assert store.children() == ()
        assert not putting.done()
        fault.release.set()
        putting.result(60)
    assert store.get("a") == b"x"


def test_a_hang_has_a_deadline():
    store = FaultyStore(MemoryStore(), [Fault(kind="hang", deadline_s=0.0)])
    with pytest.raises(TransientStoreError, match="hung"):
        store.put("a", b"x")


def test_truncated_data_is_a_silent_loss():
    inner = MemoryStore()
    store = FaultyStore(inner, [Fault(kind="truncate", times=None)])
    store.put("a", b"12345678")
    assert inner.get("a") == b"1234"
    assert store.get("a") == b"12"
    buffer = bytearray(b"####")
    store.read_into("a", 0, memoryview(buffer))
    assert buffer == b"12##"
    writer = store.create("b", 4)
    writer.write(0, memoryview(b"5678"))
    writer.finish()
    assert inner.get("b") == b"56\0\0"


def test_flipped_data_differs_in_one_bit():
    inner = MemoryStore()
    store = FaultyStore(inner, [Fault(kind="flip", op="put"), Fault(kind="flip", op="write")])
    store.put("a", bytes(9))
    writer = store.create("b", 9)
    writer.write(0, memoryview(bytes(9)))
    writer.finish()
    for key in "ab":
        assert sum(byte.bit_count() for byte in inner.get(key)) == 1
    clean = MemoryStore()
    clean.put("a", bytes(9))
    reader = FaultyStore(clean, [Fault(kind="flip", times=None)])
    buffer = bytearray(9)
    reader.read_into("a", 0, memoryview(buffer))
    for data in (reader.get("a"), buffer):
        assert sum(byte.bit_count() for byte in data) == 1
    assert clean.get("a") == bytes(9)


def test_faults_of_data_pass_by_operations_that_carry_none():
    store = FaultyStore(MemoryStore(), [Fault(kind="flip")])
    store.children()
    store.delete("a")
    store.put("a", b"\0")
    assert store.get("a") == b"\1"


@pytest.mark.parametrize("kind", ["stop_before", "stop_after"])
def test_after_a_stop_nothing_happens_any_more(tmp_path, kind):
    inner = LocalStore(tmp_path)
    store = FaultyStore(inner, [Fault(kind=kind, op="write")])
    writer = store.create("a", 2)
    with pytest.raises(Stopped):
        writer.write(0, memoryview(b"xy"))
    for call in (
        writer.finish,
        writer.abort,
        lambda: store.put("b", b"x"),
        lambda: store.get("a"),
        store.children,
        lambda: store.delete("a"),
        lambda: store.make_folder("f"),
    ):
        with pytest.raises(Stopped):
            call()
    assert inner.children() == ("a",)
    assert inner.get("a") == (b"xy" if kind == "stop_after" else b"\0\0")
    assert store.ops == (("create", "a"), ("write", "a"))


def test_a_stop_takes_the_operations_under_way_with_it():
    hang = Fault(kind="hang", key="slow")
    store = FaultyStore(MemoryStore(), [hang, Fault(kind="stop_after", key="last")])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(store.put, "slow", b"x")
        assert hang.reached.wait(60)
        with pytest.raises(Stopped):
            store.put("last", b"x")
        hang.release.set()
        with pytest.raises(Stopped):
            slow.result(60)


def test_no_handler_of_exceptions_mends_a_stop():
    assert not issubclass(Stopped, Exception)


def test_an_abort_that_fails_is_silent_and_does_nothing(tmp_path):
    inner = LocalStore(tmp_path)
    store = FaultyStore(inner, [Fault(kind="fail", op="abort")])
    store.create("a", 1).abort()
    assert inner.children() == ("a",)


def test_faults_can_be_shared_by_stores_that_count_apart():
    fault = Fault(kind="fail", at=1)
    for _ in range(2):
        assert put_many(FaultyStore(MemoryStore(), [fault])) == ["b"]
    assert isinstance(fault.reached, threading.Event)
