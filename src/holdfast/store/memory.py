"""A store in the memory of this process: flat like an object store, without folders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from holdfast.errors import AlreadyExists, CorruptData, NotFound, StoreError, UsageError
from holdfast.store.base import BlockWriter, Buffer, ObjectInfo, check_key, final_nbytes, ignore


class MemoryStore:
    """Keys and bytes in a dict. For tests, and for trying things out.

    Thread-safe. Folders are mere prefixes of keys here, as in object stores: nothing makes them,
    and one without objects is not there.
    """

    reads_origin = True
    """See `ReadsOrigin`."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes | bytearray] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({self._name!r})"

    @property
    def url(self) -> str:
        """`memory://` and the name."""
        return f"memory://{self._name}"

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        check_key(key)
        content = memoryview(data).tobytes()
        with self._lock:
            if if_absent and key in self._objects:
                raise AlreadyExists(f"put {self._path(key)}: the key is taken")
            self._objects[key] = content

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """See `Store.get`."""
        check_key(key)
        if start < 0 or (nbytes is not None and nbytes < 0):
            raise UsageError(f"get {key}: start {start} and nbytes {nbytes} must not be negative")
        with self._lock:
            found = self._found("get", key)
            stop = max(len(found), start) if nbytes is None else start + nbytes
            if stop > len(found):
                raise CorruptData(
                    f"get {self._path(key)}: has {len(found)} bytes, expected at least {stop}"
                )
            return bytes(memoryview(found)[start:stop])

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        seen: Callable[[memoryview], object] = ignore,
        afresh: bool = False,
    ) -> None:
        """See `ReadsInto.read_into`. There is no cache on the way."""
        data = self.get(key, start, buffer.nbytes)
        if data:
            buffer.cast("B")[:] = data
            seen(buffer.cast("B"))

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        check_key(key)
        with self._lock:
            found = self._found("head", key)
            return ObjectInfo(key=key, nbytes=len(found), identity=str(id(found)))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. The state of one moment."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        with self._lock:
            found = [
                ObjectInfo(key=key, nbytes=len(data))
                for key, data in sorted(self._objects.items())
                if key.startswith(prefix)
            ]
        return iter(found)

    def children(self, folder: str = "") -> tuple[str, ...]:
        """See `Store.children`."""
        if folder:
            check_key(folder)
        inside = f"{folder}/" if folder else ""
        names = set()
        for info in self.list(inside):
            name, slash, _ = info.key[len(inside) :].partition("/")
            names.add(name + slash)
        return tuple(sorted(names))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        check_key(key.removesuffix("/"))
        with self._lock:
            if not key.endswith("/"):
                self._objects.pop(key, None)
                return
            for inside in [name for name in self._objects if name.startswith(key)]:
                del self._objects[inside]

    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        """See `WritesBlocks.create`."""
        check_key(key)
        if nbytes < 0:
            raise UsageError(f"create {key}: nbytes {nbytes} must not be negative")
        content = bytearray(nbytes)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"create {self._path(key)}: the key is taken")
            self._objects[key] = content
        return _MemoryBlockWriter(self, key, content, at_most=at_most)

    def link(self, source: str, key: str) -> bool:
        """See `LinksFiles.link`."""
        check_key(source)
        check_key(key)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"link {self._path(key)}: the key is taken")
            if source in self._objects:
                self._objects[key] = self._objects[source]
            return source in self._objects

    def _path(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _found(self, operation: str, key: str) -> bytes | bytearray:
        found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{operation} {self._path(key)}: there is no such object")
        return found


class _MemoryBlockWriter:
    def __init__(self, store: MemoryStore, key: str, content: bytearray, *, at_most: bool) -> None:
        self._store = store
        self._key = key
        self._content = content
        self._at_most = at_most
        self._lock = threading.Lock()
        self._is_open = True
        self._written_nbytes = 0

    def write(self, start: int, data: memoryview) -> None:
        stop = start + data.nbytes
        if start < 0 or stop > len(self._content):
            raise UsageError(
                f"write {self._key}: bytes {start} to {stop} are not inside "
                f"the {len(self._content)} that were planned"
            )
        with self._lock:
            self._check_open("write")
            self._content[start:stop] = data.tobytes()
            self._written_nbytes += data.nbytes

    def finish(self, nbytes: int | None = None) -> None:
        planned = len(self._content)
        length = final_nbytes(nbytes, planned, at_most=self._at_most, what=self._key)
        with self._lock:
            self._check_open("finish")
            if length != self._written_nbytes:
                raise StoreError(
                    f"finish {self._key}: {length - self._written_nbytes} of {length} bytes "
                    f"were not written"
                )
            del self._content[length:]
            self._is_open = False

    def abort(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._store.delete(self._key)

    def _check_open(self, operation: str) -> None:
        if not self._is_open:
            raise StoreError(f"{operation} {self._key}: this was finished or given up before")


_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def memory_store(name: str) -> MemoryStore:
    """The store of that name: the same one whenever this process asks for it."""
    with _named_lock:
        return _named.setdefault(name, MemoryStore(name))
