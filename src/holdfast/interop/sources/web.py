"""Opens a file of weights at an `http(s)://` address, recognised by its first bytes."""

from __future__ import annotations

from pathlib import PurePosixPath

from holdfast.errors import (
    AccessDenied,
    FormatError,
    NoCheckpoint,
    NotFound,
    UnsupportedStore,
)
from holdfast.events import url_without_secrets
from holdfast.format import layout
from holdfast.interop.source import Source
from holdfast.interop.sources import safetensors, torchfile
from holdfast.interop.webfile import WebFile
from holdfast.store.remote import HttpStore

_FIRST_NBYTES = 32


def names_checkpoint(url: str) -> bool:
    """Whether an address is that of a checkpoint's folder, or of its manifest.

    Addresses that end as files of weights do are not asked for.
    """
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
        f"{file.name}: neither a checkpoint, nor a safetensors file, nor one of torch.save. Other "
        "formats are read from a local file; download it"
    )
