"""A store that fails on purpose, at exactly the operation that a test chooses.

`FaultyStore(inner, [Fault(...)])` behaves like `inner`, records every operation, and injects
the faults. Run a scenario once without faults, then once for each of its operations:

>>> from holdfast.store.memory import MemoryStore
>>> clean = FaultyStore(MemoryStore())
>>> clean.put("a", b"1")
>>> clean.ops
(('put', 'a'),)
>>> broken = FaultyStore(MemoryStore(), [Fault(kind="fail", at=0)])
>>> broken.put("a", b"1")
Traceback (most recent call last):
    ...
holdfast.errors.TransientStoreError: injected: put a failed
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, TypeVar, get_args

from typing_extensions import override

from holdfast.errors import OutcomeUnknown, StoreError, TransientStoreError, UsageError
from holdfast.store.base import (
    BlockWriter,
    Buffer,
    FreeSpace,
    ObjectInfo,
    Seen,
    Store,
    WrappedStore,
    ignore,
)

T = TypeVar("T")

Kind = Literal["fail", "lose_reply", "hang", "truncate", "flip", "stop_before", "stop_after"]
_Object = Literal["put", "get", "head", "list", "delete", "read_into", "link"]
_Folder = Literal["children", "make_folder", "sync_folder", "refresh_folder", "sweep", "unlisted"]
_Upload = Literal["create", "write", "finish", "abort", "uploads", "abort_uploads"]
_Place = Literal["point", "pointed", "free_space", "probe"]
OpName = Literal[_Object, _Folder, _Upload, _Place]
_CARRIES_DATA = frozenset({"put", "write", "get", "read_into"})


class Stopped(BaseException):
    """Simulated death of the process. Not an `Exception`, so that no handler catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Failure to inject into a store, and the operations that it strikes."""

    kind: Kind
    """Kind of failure.

    `fail`: raises `error`; nothing was done. `lose_reply`: done, but raises `error`. `hang`: waits
    until `release` is set, then goes on. `truncate`: the second half of the data is lost, without
    an error (a piece of a block writer keeps its length and loses its bytes). `flip`: one bit of
    the data is wrong, without an error. `stop_before`, `stop_after`: raises `Stopped`, here and at
    every later operation, as if the process had died before or after this one took effect.
    """
    op: OpName | None = None
    """Name of the operations that match; None: any."""
    key: str = "*"
    """Pattern of the keys that match (`fnmatch`)."""
    at: int = 0
    """Number of matching operations that succeed first."""
    times: int | None = 1
    """Number of operations in a row that fail; None: all from then on."""
    error: StoreError | None = None
    """Error; None: `TransientStoreError` for `fail`, `OutcomeUnknown` for `lose_reply`."""
    deadline_s: float = 60.0
    """Seconds that `hang` waits before it raises `TransientStoreError`."""
    reached: threading.Event = field(default_factory=threading.Event, compare=False)
    """Event that is set when the fault strikes, so that a test can wait for it."""
    release: threading.Event = field(default_factory=threading.Event, compare=False)
    """Event that a test sets to let `hang` continue."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"kind={self.kind!r}: choose from {', '.join(get_args(Kind))}")
        if self.op is not None and self.op not in get_args(OpName):
            raise UsageError(f"op={self.op!r}: choose from {', '.join(get_args(OpName))}")
        if self.at < 0 or (self.times is not None and self.times < 1):
            raise UsageError(f"at={self.at}, times={self.times}: at least 0 and at least 1")
        if self._needs_data() and self.op is not None and self.op not in _CARRIES_DATA:
            raise UsageError(f"kind={self.kind!r}: {self.op} carries no data")

    def matches(self, op: str, key: str) -> bool:
        """Whether `op` on `key` is one of the operations that `at` and `times` count."""
        if self._needs_data() and op not in _CARRIES_DATA:
            return False
        return self.op in (None, op) and fnmatchcase(key, self.key)

    def strikes(self, num_before: int) -> bool:
        """Whether the fault strikes an operation after `num_before` matching ones."""
        last = None if self.times is None else self.at + self.times
        return num_before >= self.at and (last is None or num_before < last)

    def _needs_data(self) -> bool:
        return self.kind in ("truncate", "flip")


class FaultyStore(WrappedStore):
    """Wrapper of the store `inner` that injects faults; thread-safe.

    Each part of `get_whole` and `delete_many` is an operation. `keeping_open`, which only makes
    others faster, is not one, nor are those on folders where `inner` has none.

    The methods of a block writer from `create` are operations too, with the key of their object.
    An injected failure of `abort` is silent, since `abort` never raises.
    """

    def __init__(self, inner: Store, faults: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self._faults = tuple(faults)
        self._num_matched = [0] * len(self._faults)
        self._ops: list[tuple[str, str]] = []
        self._is_stopped = False
        self._lock = threading.Lock()

    @property
    def ops(self) -> tuple[tuple[str, str], ...]:
        """Name and key of every operation so far, in the order in which they began."""
        with self._lock:
            return tuple(self._ops)

    @property
    @override
    def reads_origin(self) -> bool:
        return self.inner.reads_origin

    @property
    @override
    def has_links(self) -> bool:
        return self.inner.has_links

    @property
    @override
    def writes_in_place(self) -> bool:
        return self.inner.writes_in_place

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        with _Operation(self, "put", key) as op:
            stored = op.damaged(memoryview(data).tobytes()) if op.damages else data
            self.inner.put(key, stored, if_absent=if_absent)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Return the bytes of an object; wrong ones under a fault that damages data."""
        with _Operation(self, "get", key) as op:
            data = self.inner.get(key, start, nbytes)
        return op.damaged(data)

    @override
    def head(self, key: str) -> ObjectInfo:
        return self._do("head", key, lambda: self.inner.head(key))

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List objects; the call counts as one operation."""
        return self._do("list", prefix, lambda: iter(tuple(self.inner.list(prefix))))

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        return self._do("children", folder, lambda: self.inner.children(folder))

    @override
    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self.inner.delete(key))

    @override
    def make_folder(self, folder: str, *, exclusive: bool = False) -> None:
        if self.has_folders:
            action = partial(self.inner.make_folder, folder, exclusive=exclusive)
            self._do("make_folder", folder, action)

    @override
    def sync_folder(self, folder: str) -> None:
        if self.has_folders:
            self._do("sync_folder", folder, lambda: self.inner.sync_folder(folder))

    @override
    def refresh_folder(self, folder: str) -> None:
        if self.has_folders:
            self._do("refresh_folder", folder, lambda: self.inner.refresh_folder(folder))

    @override
    def sweep(self, folder: str) -> int:
        if not self.has_folders:
            return 0
        return self._do("sweep", folder, lambda: self.inner.sweep(folder))

    @override
    def unlisted(self, folder: str) -> tuple[str, ...]:
        if not self.has_folders:
            return ()
        return self._do("unlisted", folder, lambda: self.inner.unlisted(folder))

    @override
    def read_into(
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        """Fill `buffer`; only its first half under a `truncate` fault."""
        data = bytearray(buffer.nbytes)
        with _Operation(self, "read_into", key) as op:
            self.inner.read_into(key, start, memoryview(data), afresh=afresh)
        damaged = op.damaged(bytes(data))
        if damaged:
            buffer.cast("B")[: len(damaged)] = damaged
        if data:
            seen(buffer.cast("B"))

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        writer = self._do("create", key, lambda: self.inner.create(key, nbytes, at_most=at_most))
        return _FaultyBlockWriter(self, key, writer)

    @override
    def link(self, source: str, key: str) -> bool:
        return self._do("link", key, lambda: self.inner.link(source, key))

    @override
    def uploads(self, folder: str = "") -> Iterator[str]:
        """List the keys of uploads; the call counts as one operation."""
        return self._do("uploads", folder, lambda: iter(tuple(self.inner.uploads(folder))))

    @override
    def abort_uploads(self, folder: str) -> int:
        return self._do("abort_uploads", folder, lambda: self.inner.abort_uploads(folder))

    @override
    def point(self, name: str, target: str) -> None:
        self._do("point", name, lambda: self.inner.point(name, target))

    @override
    def pointed(self, name: str) -> str | None:
        return self._do("pointed", name, lambda: self.inner.pointed(name))

    @override
    def free_space(self) -> FreeSpace:
        return self._do("free_space", "", self.inner.free_space)

    @override
    def probe(self) -> str:
        return self._do("probe", "", self.inner.probe)

    def _do(self, op: OpName, key: str, action: Callable[[], T]) -> T:
        with _Operation(self, op, key):
            return action()

    def _find_fault(self, op: str, key: str) -> Fault | None:
        with self._lock:
            if self._is_stopped:
                raise Stopped(f"{op} {key}: the process is dead")
            self._ops.append((op, key))
            struck = None
            for number, fault in enumerate(self._faults):
                if fault.matches(op, key):
                    if struck is None and fault.strikes(self._num_matched[number]):
                        struck = fault
                    self._num_matched[number] += 1
            return struck

    def _stop(self) -> None:
        with self._lock:
            self._is_stopped = True


class _Operation:
    """Context of one operation: injects faults before and after the block, and damages data."""

    def __init__(self, store: FaultyStore, op: OpName, key: str) -> None:
        self._store = store
        self._what = f"{op} {key}"
        self._fault = store._find_fault(op, key)

    def __enter__(self) -> _Operation:
        fault = self._fault
        if fault is None:
            return self
        fault.reached.set()
        if fault.kind == "fail":
            raise fault.error or TransientStoreError(f"injected: {self._what} failed")
        if fault.kind == "hang" and not fault.release.wait(fault.deadline_s):
            raise TransientStoreError(f"injected: {self._what} hung for {fault.deadline_s} s")
        if fault.kind == "stop_before":
            self._store._stop()
            raise Stopped(f"before {self._what}")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        fault = self._fault
        if fault is not None and fault.kind == "stop_after":
            self._store._stop()
        if self._store._is_stopped:
            raise Stopped(f"after {self._what}") from error
        if fault is not None and fault.kind == "lose_reply" and error is None:
            raise fault.error or OutcomeUnknown(f"injected: the reply to {self._what} was lost")

    @property
    def damages(self) -> bool:
        """Whether the fault damages the data."""
        return self._fault is not None and self._fault.kind in ("truncate", "flip")

    def damaged(self, data: bytes) -> bytes:
        """Return `data`, shortened or with one bit flipped if the fault is of that kind."""
        if self._fault is None or not data:
            return data
        half = len(data) // 2
        if self._fault.kind == "truncate":
            return data[:half]
        if self._fault.kind == "flip":
            return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        return data


class _FaultyBlockWriter:
    def __init__(self, store: FaultyStore, key: str, inner: BlockWriter) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    def write(self, start: int, data: memoryview) -> None:
        with _Operation(self._store, "write", self._key) as op:
            if op.damages:
                data = memoryview(op.damaged(data.tobytes()).ljust(data.nbytes, b"\0"))
            self._inner.write(start, data)

    def finish(self, nbytes: int | None = None) -> None:
        with _Operation(self._store, "finish", self._key):
            self._inner.finish(nbytes)

    def abort(self) -> None:
        with suppress(StoreError), _Operation(self._store, "abort", self._key):
            self._inner.abort()
