"""The defaults of Store do what the contract says, and a wrapper is never bypassed."""

import pytest

from holdfast.errors import StoreError, TransientStoreError, UsageError
from holdfast.store import open_store
from holdfast.store.base import FreeSpace, Store, WrappedStore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.store_contract import StoreContract

SEVEN = ("url", "put", "get", "head", "list", "children", "delete")


class Least(Store):
    """The seven members that a store must write, and nothing else."""

    url = "least://"

    def __init__(self):
        self._inner = MemoryStore()

    def put(self, key, data, *, if_absent=False):
        self._inner.put(key, data, if_absent=if_absent)

    def get(self, key, start=0, nbytes=None):
        return self._inner.get(key, start, nbytes)

    def head(self, key):
        return self._inner.head(key)

    def list(self, prefix=""):
        return self._inner.list(prefix)

    def children(self, folder=""):
        return self._inner.children(folder)

    def delete(self, key):
        self._inner.delete(key)


class TestLeast(StoreContract):
    @pytest.fixture
    def store(self):
        return Least()


@pytest.mark.full
class TestWrappedMemory(StoreContract):
    @pytest.fixture
    def store(self):
        return WrappedStore(MemoryStore())


@pytest.mark.full
class TestWrappedFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return WrappedStore(LocalStore(tmp_path / "root"))


def test_seven_members_are_to_be_written():
    assert {*Store.__abstractmethods__} == {*SEVEN}


def test_a_store_that_writes_nothing_more_offers_nothing_more():
    store = Least()
    for name in ("has_folders", "has_links", "writes_in_place", "reads_origin"):
        assert not getattr(store, name)
    assert store.uncached() is store
    assert store.free_space() == FreeSpace(None, None)
    assert store.probe() == ""
    assert [*store.uploads()] == []
    assert store.abort_uploads("a") == 0
    store.put("a", b"x")
    assert store.link("a", "b") is False


def test_an_object_in_pieces_is_seen_when_it_is_whole():
    store = Least()
    writer = store.create("a", 4)
    writer.write(2, memoryview(b"34"))
    writer.write(0, memoryview(b"12"))
    assert store.children() == ()
    writer.finish()
    assert store.get("a") == b"1234"


FOLDERS = ("make_folder", "sync_folder", "refresh_folder", "sweep")


@pytest.mark.parametrize(
    ("methods", "promise"),
    [(FOLDERS, "has_folders"), (("link",), "has_links"), (("create",), "writes_in_place")],
)
def test_a_store_that_does_more_is_taken_for_it(methods, promise):
    """Forgotten words must not weaken it: syncs that failed would count, and half files be seen."""
    own = {name: lambda self, *args, **options: None for name in methods}
    assert getattr(type("More", (Least,), own)(), promise)
    assert not getattr(type("Denies", (Least,), own | {promise: False})(), promise)
    assert not getattr(WrappedStore(Least()), promise)


def test_a_store_that_only_makes_folders_does_not_prove_that_puts_have_ended():
    """As one that puts a marker for each into a bucket: a request outlives its process."""
    assert not type("Marks", (Least,), {"make_folder": lambda *args, **options: None})().has_folders


@pytest.mark.parametrize("error", [StoreError, TransientStoreError])
def test_a_pointer_that_can_never_be_read_points_nowhere(error):
    class Unreadable(Least):
        def get(self, key, start=0, nbytes=None):
            raise error("get latest: refused")

    store = Unreadable()
    store.point("latest", "a")
    if error is StoreError:
        assert store.pointed("latest") is None
    else:
        with pytest.raises(error):
            store.pointed("latest")


class Noting(WrappedStore):
    """Writes down what it is asked for."""

    def __init__(self, inner):
        super().__init__(inner)
        self.seen = []

    def put(self, key, data, *, if_absent=False):
        self.seen.append(f"put {key}")
        super().put(key, data, if_absent=if_absent)

    def get(self, key, start=0, nbytes=None):
        self.seen.append(f"get {key}")
        return super().get(key, start, nbytes)

    def delete(self, key):
        self.seen.append(f"delete {key}")
        super().delete(key)


def test_a_wrapper_sees_all_bytes_and_all_removals(tmp_path):
    """The faster ways of the store in it would pass it by."""
    inner = LocalStore(tmp_path)
    store = Noting(inner)
    writer = store.create("a", 1)
    writer.write(0, memoryview(b"x"))
    writer.finish()
    with store.keeping_open():
        assert store.cached("a", 0, 1) is None
        store.read_into("a", 0, memoryview(bytearray(1)))
    store.uncached().read_into("a", 0, memoryview(bytearray(1)))
    assert store.get_whole("a", max_nbytes=1) == b"x"
    store.delete_many(["a"])
    assert store.seen == ["put a", "get a", "get a", "get a", "delete a"]
    assert inner.children() == ()


@pytest.mark.parametrize("later", [b"tombstone", b"a manifest that is longer"])
def test_an_object_that_is_replaced_while_it_is_read_is_read_from_one_version(later):
    """A manifest may become a tombstone between the look at its length and its bytes."""

    class Replacing(WrappedStore):
        def head(self, key):
            found = super().head(key)
            self.inner.put(key, later)
            return found

    store = Replacing(MemoryStore())
    store.put("a", b"a long manifest")
    assert store.get_whole("a", max_nbytes=100) == later


def test_a_store_whose_copies_may_answer_is_read_by_get_alone():
    class Copying(WrappedStore):
        def read_into(self, key, start, buffer, **options):
            buffer[:] = b"?"

    store = Copying(MemoryStore())
    store.put("a", b"x")
    memory = bytearray(1)
    for found, data in ((store, b"?"), (store.uncached(), b"x")):
        found.read_into("a", 0, memoryview(memory))
        assert memory == data


def test_what_is_no_store_is_refused_with_what_to_do():
    with pytest.raises(UsageError, match=r"must subclass holdfast\.store\.base\.Store"):
        open_store({})
