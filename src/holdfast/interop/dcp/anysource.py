"""A source of any format as DCP sees it: flat names of tensors and of pickled values."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.errors import FormatError
from holdfast.interop.exporting.values import PlacedTensor, Values
from holdfast.interop.reading import read_whole
from holdfast.interop.source import Source
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.state.shards import Box

_Path = tuple[str | int, ...]


class SourceState:
    """The components of a source as the items of one state; tensors are read when asked for."""

    def __init__(self, source: Source) -> None:
        """Name all values, as DCP flattens a dict."""
        self._source = source
        self.notes: list[str] = []
        """What is in another form than in the source."""
        values = Values(source, self.notes)
        self._items: dict[str, tuple[_Path, Any]] = {}
        for path, value in _flatten_state(
            {name: values.read_component(name) for name in source.parts}, ()
        ):
            name = ".".join(map(str, path))
            if name in self._items:
                raise FormatError(f"{source.url}: DCP would call two of its values {name!r:.200}")
            self._items[name] = path, value

    @property
    def metadata(self) -> Metadata:
        """DCP's metadata of the state."""
        return Metadata(
            state_dict_metadata={
                name: _make_storage_metadata(value) if isinstance(value, PlacedTensor) else _BYTES
                for name, (_, value) in self._items.items()
            },
            planner_data={name: path for name, (path, _) in self._items.items()},
        )

    def read_boxes(self, wanted: Mapping[str, list[Box]]) -> dict[str, list[Tensor]]:
        """Read whole tensors, by DCP's names."""
        return {name: [self._read_placed_tensor(self._items[name][1])] for name in wanted}

    def pickled(self, name: str) -> io.BytesIO:
        """Return the pickle of an item that is no tensor."""
        found = io.BytesIO()
        torch.save(self._with_tensors(self._items[name][1]), found)
        found.seek(0)
        return found

    def _with_tensors(self, value: Any) -> Any:
        """Return a value with its tensors, which a tuple may hold."""
        if isinstance(value, PlacedTensor):
            return self._read_placed_tensor(value)
        if isinstance(value, Mapping):
            return {key: self._with_tensors(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(map(self._with_tensors, value))
        return value

    def _read_placed_tensor(self, one: PlacedTensor) -> Tensor:
        dtype, spec = TORCH_DTYPES[one.spec.dtype], one.spec
        found = torch.empty(spec.shape, dtype=dtype)
        if spec.nbytes:
            raw: Any = found.reshape(-1).view(torch.uint8).numpy()
            read_whole(self._source, one.component, spec.key, 0, memoryview(raw))
        return found


_BYTES = BytesStorageMetadata()


def _make_storage_metadata(one: PlacedTensor) -> TensorStorageMetadata:
    size = torch.Size(one.spec.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=TORCH_DTYPES[one.spec.dtype]),
        size=size,
        chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
    )


def _flatten_state(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Yield the leaves of a state as DCP does since torch 2.4: by name, and an empty dict as none.

    Tuples are leaves, and so are lists without tensors and dicts.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten_state(inner, (*path, str(key)))
    elif isinstance(value, list) and not _is_leaf(value):
        for number, inner in enumerate(value):
            yield from _flatten_state(inner, (*path, number))
    else:
        yield path, value


def _is_leaf(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_leaf, value))
    return not isinstance(value, Mapping | PlacedTensor)
