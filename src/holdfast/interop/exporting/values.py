"""Converts a source's trees to values that torch can pickle, with placeholders for tensors."""

from __future__ import annotations

import datetime
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.errors import LimitExceeded
from holdfast.format.nodes import (
    ArrayRef,
    DeviceName,
    DtypeName,
    EnumValue,
    GeneratorState,
    SizeTuple,
    TensorRef,
)
from holdfast.format.objects import join_path
from holdfast.format.tensors import TensorSpec
from holdfast.interop.optimizers import number_parameters
from holdfast.interop.source import Source

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
            return self._export_array(component, node, path)
        if isinstance(node, GeneratorState):
            return self._export_generator(component, node, path)
        if isinstance(node, Mapping):
            return self._mapping(component, node, path)
        if isinstance(node, list | tuple):
            items = [
                self.value(component, item, join_path(path, place))
                for place, item in enumerate(node)
            ]
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

    def _export_array(self, component: str, ref: ArrayRef, path: str) -> Any:
        made = self._place_tensor(component, ref.key, None)
        return self._note_change(path, "a numpy array", "a tensor", made)

    def _read_array(self, component: str, key: str) -> np.ndarray[Any, Any]:
        spec = self._source.get_component(component).specs[key]
        if spec.nbytes > _MAX_ARRAY_NBYTES:
            raise LimitExceeded(f"{self._source.url}: {key!r}: an array of {spec.nbytes:,} bytes")
        data = memoryview(bytearray(spec.nbytes))
        self._source.read_into(component, key, 0, data)
        names = {"U8": "u1", "U32": "<u4", "U64": "<u8", "I64": "<i8", "F64": "<f8", "F32": "<f4"}
        return np.frombuffer(data, names.get(spec.dtype, "u1")).reshape(spec.shape)

    def _export_generator(self, component: str, node: GeneratorState, path: str) -> Any:
        members = node.members
        if node.kind == "torch":
            return self.value(component, members["state"], path)
        if node.kind == "python":
            words = tuple(self._read_array(component, members["state"].key).tolist())
            return (members["version"], words, members["gauss_next"])
        return self.value(component, members["state"], path)
