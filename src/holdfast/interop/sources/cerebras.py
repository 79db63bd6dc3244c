"""Reads a Cerebras checkpoint (`.mdl`): an HDF5 file of tensors, and their tree as JSON.

Objects that it holds as pickles are never opened, and tensors in other files are refused.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.format.nodes import NUMPY_DTYPES, ArrayRef, TensorRef
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec, check_shape
from holdfast.interop.files import LocalFile, first_bytes
from holdfast.interop.pickles.values import LIFTED, bound
from holdfast.interop.source import LeftOut, Source, SourceComponent, expect_none_wrong
from holdfast.interop.sources.hdf5 import SIGNATURE, Chunked, Contiguous, Dataset, Hdf5, read_band
from holdfast.interop.sources.safetensors import MODEL

STATE = "state"
"""Component of the values that belong to no other."""

MAX_LEAVES = 200_000
_MAX_DEPTH = 64
_COMPONENT = re.compile(r"[a-z0-9_-]{1,64}")

_DTYPES = {"bfloat16": "BF16", **{dtype.name: name for name, dtype in NUMPY_DTYPES.items()}}
_CONTAINERS = {
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
    "builtins.list": list,
    "builtins.tuple": tuple,
    "builtins.set": set,
}
_PICKLE = "a pickled object, which is not opened"
_LEFT_OUT = object()
"""Marks a value that cannot be read and is left out of the tree."""


def recognises(path: Path) -> bool:
    """Whether a file is an HDF5 file."""
    return first_bytes(path, len(SIGNATURE)) == SIGNATURE


@dataclass(frozen=True, slots=True)
class _Constant:
    """A tensor whose elements are all one value, the only one that the file stores."""

    item: bytes


_Place = Contiguous | Chunked | _Constant


class CerebrasFile(Source):
    """The components of a Cerebras checkpoint; values that no component has are in `state`."""

    format = "cerebras"

    def __init__(self, path: Path) -> None:
        """Read its tree, and where its tensors are."""
        self.url = str(path)
        self._file = LocalFile.open_regular(path)
        self._lock = threading.Lock()
        self._bands: dict[tuple[str, int], memoryview] = {}
        with self.closing_on_error():
            with Hdf5(self._file) as opened:
                reader = _Reader(opened, self.url)
                tree = reader.tree()
            self.left_out = reader.left_out
            self._places, self._specs = reader.places, reader.specs
            self.parts = self._make_components(tree)
        step = tree.get("global_step")
        self.step = step if type(step) is int and step >= 0 else None

    def _make_components(self, tree: Mapping[Any, Any]) -> dict[str, SourceComponent]:
        components: dict[str, Any] = {}
        state: dict[Any, Any] = {}
        for name, value in tree.items():
            is_own = isinstance(name, str) and isinstance(value, dict | list) and name != STATE
            into = components if is_own and _COMPONENT.fullmatch(name) else state
            into[name] = value
        if state:
            components[STATE] = state
        return {name: self._make_component(name, value) for name, value in components.items()}

    def _make_component(self, name: str, value: Any) -> SourceComponent:
        keys = {
            leaf.key for leaf in SourceComponent(kind="tree", tree=value, specs={}).leaves.values()
        }
        specs = {key: self._specs[key] for key in sorted(keys, key=self._find_start)}
        is_module = name == MODEL and isinstance(value, dict)
        if is_module and all(isinstance(one, TensorRef) for one in value.values()):
            return SourceComponent(kind="module", tree=dict(value), specs=specs)
        return SourceComponent(kind="tree", tree=value, specs=specs)

    def _find_start(self, key: str) -> int:
        place = self._places[key]
        if isinstance(place, Chunked):
            return int(place.start[0])
        return place.start if isinstance(place, Contiguous) else 0

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        place = self._places[key]
        if isinstance(place, Contiguous):
            self._file.read_into(place.start + start, memory)
        elif isinstance(place, _Constant):
            shift, size = start % len(place.item), len(place.item)
            copies = place.item * (-(-(memory.nbytes + shift) // size))
            memory[:] = copies[shift : shift + memory.nbytes]
        else:
            self._read_chunks(place, key, start, memory)

    def _read_chunks(self, place: Chunked, key: str, start: int, memory: memoryview) -> None:
        row = int(np.prod(place.shape[1:], dtype=np.int64)) * place.dtype.itemsize
        step = row * place.chunk[0]
        while memory.nbytes:
            number = start // step
            part = self._decode_chunks(place, key, number)[start - number * step :]
            part = part[: memory.nbytes]
            memory[: part.nbytes] = part
            start, memory = start + part.nbytes, memory[part.nbytes :]

    def _decode_chunks(self, place: Chunked, key: str, number: int) -> memoryview:
        """Decode a row of chunks; cache the last two rows, as several threads read parts."""
        with self._lock:
            band = self._bands.pop((key, number), None)
            if band is None:
                while len(self._bands) > 1:
                    del self._bands[next(iter(self._bands))]
                band = read_band(self._file, place, number, f"dataset {key!r}")
            self._bands[key, number] = band
            return band

    @override
    def close(self) -> None:
        self._file.close()
        self._bands.clear()


@dataclass(slots=True)
class _Reader:
    """Reads the tree of a file, and collects where its tensors are and what is wrong."""

    h5: Hdf5
    url: str
    places: dict[str, _Place] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_leaves: int = 0

    def tree(self) -> Mapping[Any, Any]:
        """Return the tree with references to tensors."""
        names = {*self.h5.attributes()}
        version = self.h5.attribute("__version__") if "__version__" in names else 0
        if "__spec__" in names and isinstance(version, float | int) and version >= 0.5:
            if "__SUCCESS__" not in names or not self.h5.attribute("__SUCCESS__"):
                raise CorruptData(f"{self.url}: incomplete, because its writer did not finish")
            tree: Any = self._read_node(self._parse_spec(self.h5.json("__spec__")), "", 0)
        else:
            tree = self._read_flat_tree()
        expect_none_wrong(self.url, self.wrong)
        return tree if isinstance(tree, dict) else {STATE: [tree]}

    def _parse_spec(self, value: Any) -> Any:
        """Parse the tree of containers, which torch's pytree wrote as a pair."""
        try:
            protocol, spec = json.loads(value[1])
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            raise FormatError(f"{self.url}: `__spec__` is not a tree: {error}") from error
        if protocol != 1:
            raise FormatError(f"{self.url}: `__spec__` of the unknown version {str(protocol)[:20]}")
        return spec

    def _read_node(self, node: Any, path: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise LimitExceeded(f"{self.url}: {path[:80]!r}: deeper than {_MAX_DEPTH} containers")
        try:
            kind, context, children = node["type"], node["context"], node["children_spec"]
            if kind is None:
                return self._read_leaf(path)
            made = _CONTAINERS.get(kind)
            is_dict = made in (dict, OrderedDict)
            keys = json.loads(context) if is_dict else range(len(children))
            pairs = [*zip(keys, children, strict=True)]
        except (TypeError, ValueError, LookupError, RecursionError) as error:
            raise FormatError(f"{self.url}: {path[:80]!r}: no node of a tree: {error}") from error
        if made is None or not all(type(key) in (str, int, float, bool) for key, _ in pairs):
            self.wrong.append(
                f"{path or 'the whole'!r} is of type {str(kind)[:80]!r}, which cannot be expressed"
            )
            return None
        values = [
            (key, self._read_node(child, f"{path}.{key}" if path else str(key), depth + 1))
            for key, child in pairs
        ]
        return self._make_container(made, values, path)

    def _make_container(self, made: type, values: Sequence[tuple[Any, Any]], path: str) -> Any:
        if made in (dict, OrderedDict):
            return made((key, value) for key, value in values if value is not _LEFT_OUT)
        if made is set:
            kept = [value for _, value in values if value is not _LEFT_OUT]
            if not all(type(one) in (str, int, float, bool, type(None)) for one in kept):
                self.wrong.append(f"{path!r} is a set with items other than numbers and text")
                return None
            return {*kept}
        # Positions of the others stay as they are.
        return made(None if value is _LEFT_OUT else value for _, value in values)

    def _read_leaf(self, path: str) -> Any:
        self.num_leaves += 1
        if self.num_leaves > bound(MAX_LEAVES):
            raise LimitExceeded(f"{self.url}: more than {MAX_LEAVES:,} values; {LIFTED}")
        metadata = self._read_metadata(path)
        if metadata.get("__LINKED__"):
            path = metadata.get("key", "")
            if type(path) is not str:
                raise FormatError(f"{self.url}: a link to {str(path)[:80]!r}")
            metadata = self._read_metadata(path)
        return self._read_value(path, path, metadata)

    def _read_metadata(self, path: str) -> Mapping[str, Any]:
        """Return the metadata of a value."""
        found = self.h5.json(f"{path}.__metadata__")
        of_value = found.get(f"{path}.__metadata__") if isinstance(found, dict) else None
        if not isinstance(of_value, dict) or found.get("__objects__") != [path]:
            return {"__TYPE__": "a value that is made of others"}
        return of_value

    def _read_flat_tree(self) -> Mapping[Any, Any]:
        """Return all values by name, for a file whose tree is missing or pickled."""
        tree: dict[str, Any] = {}
        if "__spec__" in self.h5.attributes():
            self.left_out.append(LeftOut(path="__spec__", why=_PICKLE))
        for raw in self.h5.list_datasets():
            names = self.h5.attributes(raw)
            told = {
                name: "" if name == "__BYTES__" else self.h5.attribute(name, raw) for name in names
            }
            value = self._read_value(raw, unquote(raw), _translate_old_attributes(told))
            if value is not _LEFT_OUT:
                component, dot, rest = unquote(raw).partition(".")
                if dot and component in (MODEL, "optimizer"):
                    tree.setdefault(component, {})[rest] = value
                else:
                    tree[unquote(raw)] = value
        return tree

    def _read_value(self, raw: str, path: str, metadata: Mapping[str, Any]) -> Any:
        kind = metadata.get("__TYPE__")
        if kind == "ScalarSerializer":
            return self._check_scalar(path, metadata.get("scalar_value"), (bool, int, float))
        if kind == "StringSerializer":
            return self._check_scalar(path, metadata.get("string_value"), (str,))
        if kind == "NoneSerializer":
            return None
        if kind == "ObjectSerializer" or "__BYTES__" in metadata:
            self.left_out.append(LeftOut(path=path, why=_PICKLE))
            return _LEFT_OUT
        if kind == "DeferredFullTensor":
            return self._add_constant(path, metadata)
        if "__NUMPY__" in metadata and kind in ("TorchTensorSerializer", "NumpyArraySerializer"):
            return self._add_tensor(raw, path, metadata)
        self.wrong.append(f"{path!r} is {str(kind)[:80]!r}, which is not in this file or not known")
        return None

    def _check_scalar(self, path: str, value: Any, kinds: tuple[type, ...]) -> Any:
        if type(value) not in kinds:
            raise FormatError(f"{self.url}: {path!r}: the value is not of the type in its metadata")
        return value

    def _add_tensor(self, raw: str, path: str, metadata: Mapping[str, Any]) -> Any:
        place = self.h5.dataset(raw)
        is_torch = metadata.get("__TYPE__") == "TorchTensorSerializer"
        dtype = self._check_dtype(path, place, metadata)
        self.places[path] = place
        self.specs[path] = TensorSpec(path, dtype, place.shape)
        return TensorRef(path) if is_torch or dtype == "BF16" else ArrayRef(path)

    def _check_dtype(self, path: str, place: Dataset, metadata: Mapping[str, Any]) -> str:
        """Return the type in the metadata. The dataset may hold integers of the same size."""
        told = metadata.get("dtypes")
        name = str(told[0] if isinstance(told, list) and told else told).removeprefix("torch.")
        if metadata.get("is_bfloat16"):
            name = "bfloat16"
        dtype = _DTYPES.get(place.dtype.name if told is None and name != "bfloat16" else name)
        is_same = (dtype == "BF16" and place.dtype.kind in "iu") or dtype == _DTYPES.get(
            place.dtype.name
        )
        if dtype is None or not is_same or ITEM_NBYTES[dtype] != place.dtype.itemsize:
            raise FormatError(
                f"{self.url}: {path!r} is {name[:40]!r} in the metadata but stored as {place.dtype}"
            )
        shapes = metadata.get("shapes")
        if isinstance(shapes, list) and shapes[:1] != [[*place.shape]]:
            raise FormatError(f"{self.url}: {path!r}: its shape is not the one in its metadata")
        return dtype

    def _add_constant(self, path: str, metadata: Mapping[str, Any]) -> Any:
        what = f"{self.url}: {path!r}"
        dtype = _DTYPES.get(str(metadata.get("dtype")).removeprefix("torch."))
        if dtype is None:
            raise FormatError(f"{what}: unknown type {str(metadata.get('dtype'))[:40]!r}")
        shape: Any = metadata.get("shape")
        value: Any = metadata.get("fill_value")
        check_shape(shape, ITEM_NBYTES[dtype], what=what)
        if type(value) not in (bool, int, float):
            raise FormatError(f"{what}: filled with {str(value)[:40]!r}")
        try:
            self.places[path] = _Constant(_bytes_of(dtype, value))
        except (OverflowError, ValueError) as error:
            raise FormatError(f"{what}: filled with {str(value)[:40]}: {error}") from error
        self.specs[path] = TensorSpec(path, dtype, tuple(shape))
        return TensorRef(path)


def _bytes_of(dtype: str, value: float) -> bytes:
    """Return the bytes of a number, rounded as torch does."""
    if dtype != "BF16":
        return np.array(value, NUMPY_DTYPES[dtype]).tobytes()
    if value != value:
        return b"\xc0\x7f"
    bits = int(np.array(value, np.float32).view(np.uint32))
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")


def _translate_old_attributes(told: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the attributes of a dataset in an older file to the current names."""
    found = dict(told)
    old = found.pop("__H5_TYPE__", None)
    if old in ("TorchTensorH5Type", "NumpyArrayH5Type"):
        found |= {"__NUMPY__": True, "__TYPE__": f"{old.removesuffix('H5Type')}Serializer"}
    elif old == "ObjectH5Type":
        found["__BYTES__"] = ""
    elif old == "StringH5Type":
        found["__TYPE__"] = "StringSerializer"
    elif old == "NoneH5Type":
        found["__TYPE__"] = "NoneSerializer"
    return found
