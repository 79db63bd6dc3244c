"""A store that does something at one point of a save or a load, such as kill its process."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import Any

from typing_extensions import override

from holdfast.store.base import BlockWriter, Buffer, WrappedStore
from holdfast.store.local import LocalStore


class Losing(WrappedStore):
    """Calls a function once, before it writes or reads a key, or after it puts it.

    `list FOLDER` is the key of a list of the children of a folder.
    """

    def __init__(
        self, root: Path, key: str, lose: Callable[[], object], *, after: bool = False
    ) -> None:
        super().__init__(LocalStore(root))
        self._key, self._lose, self._after = key, lose, after
        self._not_met = Lock()

    def _meet(self, key: str) -> None:
        if fnmatch(key, self._key) and self._not_met.acquire(blocking=False):
            self._lose()

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        if not self._after:
            self._meet(key)
        self.inner.put(key, data, if_absent=if_absent)
        if self._after:
            self._meet(key)

    @override
    def read_into(self, key: str, start: int, buffer: memoryview, **options: Any) -> None:
        self._meet(key)
        self.inner.read_into(key, start, buffer, **options)

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        self._meet(key)
        return self.inner.create(key, nbytes, at_most=at_most)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        self._meet(f"list {folder}")
        return self.inner.children(folder)
