"""Files on a web server, read at positions by Range requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from typing_extensions import override

from holdfast.errors import StoreError
from holdfast.interop.files import ReadableFile, copy_bytes
from holdfast.store.base import expect_at_least
from holdfast.store.remote.api import Api
from holdfast.store.remote.opening import RemoteOptions
from holdfast.store.remote.reading import parse_web

_BLOCK_NBYTES = 4 << 20
_NUM_BLOCKS = 8
"""Most blocks that are kept: small tensors lie side by side, and headers are read in pieces."""


class WebFile(ReadableFile):
    """A file at an `http(s)://` address, read in blocks, of which the last few are kept."""

    def __init__(self, url: str) -> None:
        """Read the first block; its reply has the length of the file.

        Raises:
            NotFound: there is no such file.
            UnsupportedStore: the server does not answer Range requests.
            StoreError: it cannot be read.
        """
        place = parse_web(url)
        self.name = place.url
        self._api = Api(place, RemoteOptions())
        first, meta = self._api.read_up_to("", 0, _BLOCK_NBYTES, least=0)
        self.nbytes = meta["size"]
        self._version = _version(meta)
        self._blocks: OrderedDict[int, Any] = OrderedDict({0: first})
        self._lock = threading.Lock()

    @override
    def read_into(self, start: int, memory: memoryview) -> None:
        memory = memory.cast("B")
        stop = start + memory.nbytes
        expect_at_least(self.nbytes, stop, what=self.name)
        at = start
        while at < stop:
            number = at // _BLOCK_NBYTES
            begin = number * _BLOCK_NBYTES
            end = min(begin + _BLOCK_NBYTES, stop)
            block = memoryview(self._fetch_block(number))
            copy_bytes(block[at - begin : end - begin], memory[at - start : end - start])
            at = end

    @override
    def close(self) -> None:
        self._blocks.clear()

    def _fetch_block(self, number: int) -> Any:
        with self._lock:
            if number in self._blocks:
                self._blocks.move_to_end(number)
                return self._blocks[number]
        begin = number * _BLOCK_NBYTES
        end = min(begin + _BLOCK_NBYTES, self.nbytes)
        data, meta = self._api.read_up_to("", begin, end, least=0)
        if _version(meta) != self._version:
            raise StoreError(
                f"{self.name}: was changed while it was read. Read it again when its writer is done"
            )
        with self._lock:
            self._blocks[number] = data
            while len(self._blocks) > _NUM_BLOCKS:
                self._blocks.popitem(last=False)
        return data


def _version(meta: Any) -> tuple[Any, ...]:
    return meta["size"], meta["e_tag"], meta["last_modified"]
