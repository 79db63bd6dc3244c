"""Reads one safetensors file: a header that is checked whole, and bytes at fixed places."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import FormatError
from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import (
    MAX_HEADER_NBYTES,
    TensorSpec,
    from_header,
    header_nbytes,
    parse_header_and_metadata,
)
from holdfast.interop.files import LocalFile, ReadableFile, first_bytes
from holdfast.interop.source import Source, SourceComponent

MODEL = "model"
"""Component of weights that come without a name of their own."""
METADATA = "metadata"
"""Component of the texts that a safetensors file has beside its tensors."""


def recognises(path: Path) -> bool:
    """Whether a file begins as a safetensors file does: a length, and a JSON object."""
    return begins(first_bytes(path, 9))


def begins(first: bytes) -> bool:
    """Whether these are the first bytes of a safetensors file; nine suffice."""
    return (
        len(first) >= 9
        and first[8:9] == b"{"
        and int.from_bytes(first[:8], "little") <= MAX_HEADER_NBYTES
    )


class SafetensorsFile(Source):
    """The weights in one safetensors file, as the component `model`.

    Its metadata is the component `metadata`, without `format`, which names a library.
    """

    format = "safetensors"

    def __init__(self, path: Path | str, *, file: ReadableFile | None = None) -> None:
        """Read the header. With an open `file`, the path is only for messages."""
        self.url = str(path)
        self._file = file or LocalFile.open_regular(Path(path))
        try:
            specs, self._starts, metadata = self._read_header()
        except BaseException:
            self.close()
            raise
        tree = {key: TensorRef(key) for key in specs}
        tree |= {other: TensorRef(key) for other, key in _tied(metadata, specs).items()}
        left = {name: text for name, text in metadata.items() if name not in tree}
        left.pop("format", None)
        self.parts: dict[str, SourceComponent] = {
            MODEL: SourceComponent(kind="module", tree=tree, specs=specs)
        }
        if left:
            self.parts[METADATA] = SourceComponent(kind="tree", tree=left, specs={})

    def _read_header(self) -> tuple[dict[str, TensorSpec], dict[str, int], dict[str, str]]:
        """Return the tensors in the order of their bytes, where each begins, and the metadata."""
        nbytes = self._file.nbytes
        first = self._file.read(0, min(8, nbytes))
        length = header_nbytes(first, file_nbytes=nbytes, what=self.url)
        places, metadata = parse_header_and_metadata(
            self._file.read(0, length), file_nbytes=nbytes, what=self.url
        )
        specs = {
            key: TensorSpec(key, *from_header(dtype, shape))
            for key, (dtype, shape, _, _) in sorted(places.items(), key=lambda one: one[1][2])
        }
        return specs, {key: places[key][2] for key in specs}, _texts(metadata, self.url)

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        self._file.read_into(self._starts[key] + start, memory)

    @override
    def close(self) -> None:
        self._file.close()


def _tied(metadata: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the names that `safetensors.torch.save_model` left out: name -> key that it shares."""
    return {name: key for name, key in metadata.items() if key in specs and name not in specs}


def _texts(metadata: Any, what: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(type(one) is str for one in metadata.values()):
        raise FormatError(f"{what}: `__metadata__` is not an object of texts")
    return metadata
