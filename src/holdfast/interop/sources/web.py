"""Opens a file of weights at an `http(s)://` address, recognised by its first bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

from typing_extensions import override

from holdfast.errors import (
    AccessDenied,
    FormatError,
    NoCheckpoint,
    NotFound,
    StoreError,
    UnsupportedStore,
)
from holdfast.events import url_without_secrets
from holdfast.format import layout
from holdfast.interop.files import ReadableFile, copy_bytes
from holdfast.interop.source import Source
from holdfast.interop.sources import safetensors, torchfile
from holdfast.store.base import expect_at_least
from holdfast.store.remote import HttpStore
from holdfast.store.remote.api import Api
from holdfast.store.remote.opening import RemoteOptions
from holdfast.store.remote.store import parse_web

_FIRST_NBYTES = 32


def names_checkpoint(url: str) -> bool:
    """Whether an address is that of a checkpoint's folder or manifest, not of a file."""
    address = url.partition("#")[0].partition("?")[0].rstrip("/")
    if address.endswith(f"/{layout.MANIFEST}"):
        return True
    if address.endswith((".safetensors", *torchfile.SUFFIXES)):
        return False
    try:
        HttpStore(url).head(layout.MANIFEST)
    except (NotFound, AccessDenied, UnsupportedStore):
        return False
    return True


def open_web(url: str) -> Source:
    """Open a safetensors file, or one of `torch.save`, by ranges."""
    try:
        file = WebFile(url)
    except NotFound as error:
        raise NoCheckpoint(
            f"{url_without_secrets(url)}: neither the folder of a checkpoint nor a file. A web "
            "server lists no files: name the folder of one checkpoint, not the root of a run"
        ) from error
    try:
        first = file.read(0, min(file.nbytes, _FIRST_NBYTES))
        if safetensors.begins(first):
            return safetensors.SafetensorsFile(file.name, file=file)
        if torchfile.begins(first, file, PurePosixPath(file.name).suffix):
            return torchfile.TorchFile(file.name, file=file)
    except BaseException:
        file.close()
        raise
    raise FormatError(
        f"{file.name}: no checkpoint, no safetensors file and no file of torch.save. Other "
        "formats are read from a local file; download it"
    )


_BLOCK_NBYTES = 4 << 20
_NUM_BLOCKS = 8
"""Most blocks that are kept: small tensors lie side by side, and headers are read in pieces."""


class WebFile(ReadableFile):
    """A file at an `http(s)://` address, read in blocks, of which the last few are kept."""

    def __init__(self, url: str) -> None:
        """Read the first block and the length, or raise; the server must take Range requests."""
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
