"""Values of DCP that are not tensors: from its pickles to typed trees, and back.

No pickle from elsewhere is opened: of a planner that pickles as torch's own does, the value itself
is taken; of any other its pickle is read as torch reads weights, which runs no code.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from holdfast.errors import UnsupportedState
from holdfast.format.nodes import EnumValue
from holdfast.format.objects import decode_tree
from holdfast.format.tensors import TensorSpec
from holdfast.interop.dcp.items import Item
from holdfast.state.collecting import Leaves
from holdfast.state.leaves import DTYPE_NAMES
from holdfast.state.trees import Lifting, decode_skeleton, encoded, nodes_in

_GLOBAL = re.compile(r"GLOBAL (\S+)")
_MAKERS: list[Any] = [one.__reduce__()[0] for one in (np.empty(0), np.float32(0))]
_PLAIN: list[Any] = [
    frozenset,
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"},
    *(
        (function, f"numpy.{core}.multiarray.{function.__name__}")
        for function in _MAKERS
        for core in ("core", "_core")
    ),
]
"""Types without code of their own that are read beside those that torch allows in weights."""
_UNSAFE = "unsafe_pickle=True saves the pickle as it is, and loading it then runs what is in it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of an item that is no tensor, as one rank sends it to the coordinator."""

    item: Item
    tree: bytes
    """The typed tree, or the pickle if the item `is_pickled`."""
    tensors: Mapping[str, Tensor]
    """The tensors inside it, by key."""

    @property
    def node(self) -> Any:
        """The value as a node of its component's tree."""
        return self.tree if self.item.is_pickled else decode_tree(self.tree, what=self.item.name)


def value_of(item: Item, write_item: WriteItem, planner: SavePlanner) -> Value:
    """Take the value of an item from the planner.

    Raises:
        UnsupportedState: it cannot be saved as a typed tree.
    """
    value = _taken(item, write_item, planner)
    leaves = Leaves(
        component=item.component, key_of=lambda path: f"{item.tensor_key}.{path}".strip(".")
    )
    made = encoded(value, leaves)
    if made is None or leaves.offenders:
        raise UnsupportedState([(path, f"{why}. {_UNSAFE}") for path, why in leaves.offenders])
    specs = {spec.key: spec for spec in leaves.specs}
    nodes = nodes_in(decode_skeleton(made.data, specs, what=item.name).value)
    if any(isinstance(node, EnumValue) for node in nodes):
        raise UnsupportedState(
            [(item.name, f"its Enum would come back as another type. {_UNSAFE}")]
        )
    tensors = {key: tensor.cpu() for key, tensor in leaves.tensors.items()}
    return Value(item=item, tree=made.data, tensors=tensors)


def pickle_of(write_item: WriteItem, planner: SavePlanner) -> bytes:
    """Return the pickle that a planner makes of a value."""
    data = planner.resolve_data(write_item)
    assert isinstance(data, io.BytesIO), "what is no tensor is given as bytes"
    return data.getvalue()


def _taken(item: Item, write_item: WriteItem, planner: SavePlanner) -> Any:
    own = [getattr(type(planner), name, None) for name in ("resolve_data", "transform_object")]
    usual = [DefaultSavePlanner.resolve_data, DefaultSavePlanner.transform_object]
    if isinstance(planner, DefaultSavePlanner) and own == usual:
        return planner.lookup_object(write_item.index)
    data = io.BytesIO(pickle_of(write_item, planner))
    try:
        with torch.serialization.safe_globals(_PLAIN):
            return torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:
        found = _GLOBAL.search(str(error))
        why = f"it holds {found[1]}" if found else type(error).__name__
        raise UnsupportedState(
            [(item.name, f"its pickle cannot be read as weights are: {why}. {_UNSAFE}")]
        ) from error


def pickled(node: Any, tensors: Mapping[str, Tensor]) -> io.BytesIO:
    """Pickle a stored value in memory, as a planner expects it."""
    made = io.BytesIO()
    torch.save(Lifting(tensors).lift_tree(node), made)
    made.seek(0)
    return made


def specs_of(values: Collection[Value]) -> dict[str, list[TensorSpec]]:
    """List the tensors inside values, by component."""
    specs: dict[str, list[TensorSpec]] = {}
    for value in values:
        of_component = specs.setdefault(value.item.component, [])
        for key, tensor in value.tensors.items():
            of_component.append(TensorSpec(key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
    return specs
