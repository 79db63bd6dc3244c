"""Writes the zip files of `torch.save`, with the tensors as a stream.

The pickle names nothing but tensors, containers and plain values, so that
`torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2, _rebuild_tensor_v3

from holdfast.errors import LimitExceeded
from holdfast.format.nodes import (
    NUMPY_DTYPES,
    ArrayRef,
    DeviceName,
    DtypeName,
    EnumValue,
    GeneratorState,
    SizeTuple,
    SubclassRef,
    TensorRef,
)
from holdfast.format.objects import DequeItems, join_path
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.exporting.files import PlannedFile
from holdfast.interop.exporting.weights import Report
from holdfast.interop.optimizers import number_parameters
from holdfast.interop.source import Source, read_pieces
from holdfast.state.leaves import TORCH_DTYPES

_ARCHIVE = "archive"
_ALIGNMENT = 64
_STORAGES = {
    "F64": torch.DoubleStorage,
    "F32": torch.FloatStorage,
    "F16": torch.HalfStorage,
    "BF16": torch.BFloat16Storage,
    "I64": torch.LongStorage,
    "I32": torch.IntStorage,
    "I16": torch.ShortStorage,
    "I8": torch.CharStorage,
    "U8": torch.ByteStorage,
    "BOOL": torch.BoolStorage,
    "C64": torch.ComplexFloatStorage,
    "C128": torch.ComplexDoubleStorage,
}
"""Typed storages, which old versions of torch read, too; others are untyped."""


def plan_torch_file(source: Source, name: str, value: Any, report: Report) -> PlannedFile:
    """Plan a file of `torch.save` that holds a value; its tensors are read when it is written."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(value)
    tensors = [*pickler.tensors]

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            _write_zip_entry(archive, "data.pkl", text.getvalue())
            _write_zip_entry(archive, "byteorder", b"little")
            _put_tensors(archive, source, tensors, report)
            _write_zip_entry(archive, "version", b"3\n")

    nbytes = sum(one.spec.nbytes for one in tensors)
    return PlannedFile(name=name, nbytes=nbytes + len(text.getvalue()), write=write)


def _put_tensors(
    archive: zipfile.ZipFile, source: Source, tensors: list[PlacedTensor], report: Report
) -> None:
    """Write one record for each tensor, in the order of the pickle."""
    stream = read_pieces(source, [(one.component, one.spec.key) for one in tensors])
    for number, one in enumerate(tensors):
        info, is_large = _entry(archive, f"data/{number}", one.spec.nbytes)
        with archive.open(info, "w", force_zip64=is_large) as record:
            left = one.spec.nbytes
            while True:
                piece = next(stream)
                record.write(piece.memory)
                left -= piece.memory.nbytes
                report(piece.memory.nbytes)
                if left <= 0:
                    break


def _write_zip_entry(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info, is_large = _entry(archive, name, len(data))
    with archive.open(info, "w", force_zip64=is_large) as record:
        record.write(data)


def _entry(archive: zipfile.ZipFile, name: str, nbytes: int) -> tuple[zipfile.ZipInfo, bool]:
    """Describe a record whose bytes begin at a multiple of 64, so that it can be mapped."""
    info = zipfile.ZipInfo(f"{_ARCHIVE}/{name}")  # with a fixed date: the same bytes each time
    info.file_size, info.compress_size, info.CRC = nbytes, 0, 0
    is_large = nbytes * 1.05 > zipfile.ZIP64_LIMIT
    start = archive.fp.tell() if archive.fp is not None else 0
    extra_nbytes = 4 + -(start + len(info.FileHeader(is_large)) + 4) % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", extra_nbytes - 4) + b"Z" * (extra_nbytes - 4)
    return info, is_large


class _Storage:
    """Stand-in for the storage of a tensor, which torch pickles as a reference to a record."""

    def __init__(self, spec: TensorSpec, number: int) -> None:
        self.spec = spec
        self.number = number

    @property
    def pickle_reference(self) -> tuple[Any, ...]:
        """The reference that the pickle has in place of the storage."""
        kind = _STORAGES.get(self.spec.dtype)
        count = self.spec.nbytes
        if kind is not None:
            count //= ITEM_NBYTES[self.spec.dtype]
        return ("storage", kind or torch.UntypedStorage, str(self.number), "cpu", count)


class _Pickler(pickle.Pickler):
    """Pickler of values with placed tensors; `tensors` lists these in their order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[PlacedTensor] = []

    def persistent_id(self, value: Any) -> Any:
        """Return the reference to a record for a storage."""
        return value.pickle_reference if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        """Pickle a placed tensor as torch pickles a tensor."""
        if not isinstance(value, PlacedTensor):
            return NotImplemented
        if value.parameter:
            plain = PlacedTensor(value.component, value.spec, False, False)
            return _rebuild_parameter, (plain, value.grad, OrderedDict())
        spec = value.spec
        storage = _Storage(spec, len(self.tensors))
        self.tensors.append(value)
        strides = torch.empty(spec.shape, device="meta").stride()
        arguments: tuple[Any, ...] = (storage, 0, spec.shape, strides, value.grad, OrderedDict())
        if spec.dtype in _STORAGES:
            return _rebuild_tensor_v2, arguments
        return _rebuild_tensor_v3, (*arguments, TORCH_DTYPES[spec.dtype])


_MAX_ARRAY_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """Placeholder for a tensor of a file that is still to be written; tied tensors share one."""

    component: str
    spec: TensorSpec
    grad: bool
    parameter: bool


class Values:
    """Converts a source's trees to values; notes those that `torch.load` would refuse."""

    def __init__(self, source: Source, notes: list[str]) -> None:
        self._source = source
        self._notes = notes
        self._tensors: dict[tuple[str, str], PlacedTensor] = {}

    def read_component(self, name: str) -> Any:
        """Return a component's value; an optimizer's is as torch's `state_dict`."""
        part = self._source.get_component(name)
        tree = (
            number_parameters(part.tree)
            if part.kind == "optimizer" and "slots" in part.tree
            else part.tree
        )
        return self.value(name, tree, name)

    def value(self, component: str, node: Any, path: str) -> Any:
        """Return the value of a node of a component's tree."""
        if isinstance(node, TensorRef):
            return self._place_tensor(component, node.key, node)
        if isinstance(node, ArrayRef):
            made = self._place_tensor(component, node.key, None)
            return self._note_change(path, "a numpy array", "a tensor", made)
        if isinstance(node, GeneratorState):
            return self._export_generator(component, node, path)
        if isinstance(node, SubclassRef):
            inner = self._mapping(component, dict(node.items()), path)
            return self._note_change(path, f"a {node.type}", "a dict of its inner tensors", inner)
        if isinstance(node, Mapping):
            return self._mapping(component, node, path)
        if isinstance(node, list | tuple):
            items = [
                self.value(component, item, join_path(path, place))
                for place, item in enumerate(node)
            ]
            if isinstance(node, DequeItems):
                return self._note_change(path, "a deque", "a list", items)
            return items if isinstance(node, list) else tuple(items)
        if isinstance(node, frozenset):
            return self._note_change(path, "a frozenset", "a set", {*node})
        return self._convert_value(node, path)

    def _mapping(self, component: str, node: Mapping[Any, Any], path: str) -> Any:
        made = {
            key: self.value(component, item, join_path(path, key)) for key, item in node.items()
        }
        if isinstance(node, Counter):
            return Counter(made)
        return OrderedDict(made) if isinstance(node, OrderedDict) else made

    def _convert_value(self, node: Any, path: str) -> Any:
        if isinstance(node, DtypeName):
            return getattr(torch, node.name)
        if isinstance(node, DeviceName):
            return torch.device(node.name)
        if isinstance(node, SizeTuple):
            return torch.Size(node.dims)
        if isinstance(node, EnumValue):
            return self._note_change(path, f"a {node.type}", "its value", node.value)
        if isinstance(node, pathlib.PurePath):
            return self._note_change(path, "a path", "text", str(node))
        if isinstance(node, datetime.timedelta):
            return self._note_change(path, "a time", "seconds", node.total_seconds())
        if isinstance(node, datetime.datetime):
            return self._note_change(path, "a time", "text", node.isoformat())
        if isinstance(node, np.generic):
            return self._note_change(path, f"a numpy {node.dtype}", "a number", node.item())
        return node

    def _note_change(self, path: str, was: str, became: str, value: Any) -> Any:
        self._notes.append(f"{path}: {was} became {became}")
        return value

    def _place_tensor(self, component: str, key: str, ref: TensorRef | None) -> PlacedTensor:
        found = self._tensors.get((component, key))
        if found is None:
            found = self._tensors[component, key] = PlacedTensor(
                component,
                self._source.get_component(component).specs[key],
                ref is not None and ref.grad,
                ref is not None and ref.parameter,
            )
        return found

    def _read_array(self, component: str, key: str) -> np.ndarray[Any, Any]:
        spec = self._source.get_component(component).specs[key]
        if spec.nbytes > _MAX_ARRAY_NBYTES:
            raise LimitExceeded(
                f"{self._source.url}: {key!r}: an array of {spec.nbytes:,} bytes, over "
                f"{_MAX_ARRAY_NBYTES:,}"
            )
        data = memoryview(bytearray(spec.nbytes))
        self._source.read_into(component, key, 0, data)
        return np.frombuffer(data, NUMPY_DTYPES[spec.dtype]).reshape(spec.shape)

    def _export_generator(self, component: str, node: GeneratorState, path: str) -> Any:
        members = node.members
        if node.kind == "torch":
            return self.value(component, members["state"], path)
        if node.kind == "python":
            words = tuple(self._read_array(component, members["state"].key).tolist())
            return (members["version"], words, members["gauss_next"])
        return self.value(component, members["state"], path)
