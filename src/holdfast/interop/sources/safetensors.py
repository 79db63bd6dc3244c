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
    """Weights in one safetensors file, as `model`; `metadata` is a component, too."""

    format = "safetensors"

    def __init__(self, path: Path | str, *, file: ReadableFile | None = None) -> None:
        """Read the header. With an open `file`, the path is only for messages."""
        self.url = str(path)
        self._file = file or LocalFile.open_regular(Path(path))
        with self.closing_on_error():
            self._starts, specs, metadata = self._read_specs()
        tree = {key: TensorRef(key) for key in specs}
        tree |= {other: TensorRef(key) for other, key in _tied(metadata, specs).items()}
        left = {name: text for name, text in metadata.items() if name not in tree}
        left.pop("format", None)
        self.parts: dict[str, SourceComponent] = {
            MODEL: SourceComponent(kind="module", tree=tree, specs=specs)
        }
        if left:
            self.parts[METADATA] = SourceComponent(kind="tree", tree=left, specs={})

    def _read_specs(self) -> tuple[dict[str, int], dict[str, TensorSpec], dict[str, str]]:
        """Return where tensors begin, and their specs in the order of their bytes; metadata."""
        specs, starts, metadata = read_header(self._file, what=self.url)
        in_order = {key: specs[key] for key in sorted(specs, key=starts.__getitem__)}
        return starts, in_order, _texts(metadata, self.url)

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        self._file.read_into(self._starts[key] + start, memory)

    @override
    def close(self) -> None:
        self._file.close()


def read_header(
    file: ReadableFile, *, what: str
) -> tuple[dict[str, TensorSpec], dict[str, int], Any]:
    """Return the tensors of a file, where the bytes of each begin, and the unchecked metadata."""
    length = header_nbytes(file.read(0, min(8, file.nbytes)), file_nbytes=file.nbytes, what=what)
    places, metadata = parse_header_and_metadata(
        file.read(0, length), file_nbytes=file.nbytes, what=what
    )
    specs = {
        key: TensorSpec(key, *from_header(dtype, shape))
        for key, (dtype, shape, _, _) in places.items()
    }
    return specs, {key: start for key, (_, _, start, _) in places.items()}, metadata


def _tied(metadata: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the names that `safetensors.torch.save_model` left out: name -> key that it shares."""
    return {name: key for name, key in metadata.items() if key in specs and name not in specs}


def _texts(metadata: Any, what: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(type(one) is str for one in metadata.values()):
        raise FormatError(f"{what}: `__metadata__` is not an object of texts")
    return metadata
