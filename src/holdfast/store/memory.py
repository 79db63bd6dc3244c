"""A store in the memory of this process: flat, without folders, as object stores are."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from typing_extensions import override

from holdfast.errors import AlreadyExists, NotFound, StoreError
from holdfast.store.base import (
    BlockWriter,
    Buffer,
    GatheringWriter,
    ObjectInfo,
    Store,
    check_folder,
    check_key,
    expect_at_least,
    expect_positive,
)


class MemoryStore(Store):
    """Store that keeps its objects in a dict. For tests, and for trying things out.

    Thread-safe. Folders are only prefixes of keys, as in object stores: nothing makes them, and one
    without objects does not exist.
    """

    reads_origin = True
    has_links = True
    writes_in_place = True

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes | bytearray] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({self._name!r})"

    @property
    @override
    def url(self) -> str:
        """The URL: `memory://` and the store's name."""
        return f"memory://{self._name}"

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        check_key(key)
        content = memoryview(data).tobytes()
        with self._lock:
            if if_absent and key in self._objects:
                raise AlreadyExists(f"put {self._format_key_url(key)}: the key is taken")
            self._objects[key] = content

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        check_key(key)
        expect_positive("get", key, start=start, nbytes=nbytes)
        with self._lock:
            found = self._find_object("get", key)
            stop = max(len(found), start) if nbytes is None else start + nbytes
            expect_at_least(len(found), stop, what=f"get {self._format_key_url(key)}")
            return bytes(memoryview(found)[start:stop])

    @override
    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        with self._lock:
            found = self._find_object("head", key)
            return ObjectInfo(key=key, nbytes=len(found), identity=str(id(found)))

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects that exist at the time of the call."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        with self._lock:
            found = [
                ObjectInfo(key=key, nbytes=len(data))
                for key, data in sorted(self._objects.items())
                if key.startswith(prefix)
            ]
        return iter(found)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        check_folder(folder)
        inside = f"{folder}/" if folder else ""
        names = set()
        for info in self.list(inside):
            name, slash, _ = info.key[len(inside) :].partition("/")
            names.add(name + slash)
        return tuple(sorted(names))

    @override
    def delete(self, key: str) -> None:
        check_key(key.removesuffix("/"))
        with self._lock:
            if not key.endswith("/"):
                self._objects.pop(key, None)
                return
            left = next((name for name in self._objects if name.startswith(key)), None)
            if left is not None:
                raise StoreError(f"delete {self._format_key_url(key)}: {left} is still in it")

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        check_key(key)
        expect_positive("create", key, nbytes=nbytes)
        content = bytearray(nbytes)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"create {self._format_key_url(key)}: the key is taken")
            self._objects[key] = content
        return _WriterInPlace(self, key, content, at_most=at_most)

    @override
    def link(self, source: str, key: str) -> bool:
        check_key(source)
        check_key(key)
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"link {self._format_key_url(key)}: the key is taken")
            if source in self._objects:
                self._objects[key] = self._objects[source]
            return source in self._objects

    def _format_key_url(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _find_object(self, operation: str, key: str) -> bytes | bytearray:
        found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{operation} {self._format_key_url(key)}: there is no such object")
        return found


class _WriterInPlace(GatheringWriter):
    """Writer into an object that readers can already see."""

    @override
    def put_content(self, content: bytearray) -> None:
        pass

    @override
    def remove_visible(self) -> None:
        self._store.delete(self._key)


_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def memory_store(name: str) -> MemoryStore:
    """Return the memory store called `name`: the same one at each call in this process."""
    with _named_lock:
        return _named.setdefault(name, MemoryStore(name))
