"""Items of DCP's flat state dicts as leaves of components, and back.

An item is a tensor, or any other value. Its name joins, by dots, the keys and positions on its
path. A component is what is below one key at the top; other items share one component.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from holdfast.errors import FormatError, HoldfastError, UnsupportedState, UsageError
from holdfast.format import strictjson
from holdfast.format.layout import RNG, check_component
from holdfast.format.nodes import EnumValue, TensorRef
from holdfast.format.objects import decode_beside, decode_tree, document
from holdfast.format.tensors import TensorSpec
from holdfast.state.collecting import Leaves
from holdfast.state.leaves import DTYPE_NAMES
from holdfast.state.trees import Lifting, decode_skeleton, encoded, nodes_in

Path: TypeAlias = tuple[str | int, ...]

REST = "state"
"""Component of the items that have none of their own."""
MODEL = "model"
"""Component of the tensors at the top, if no key at the top is called so: torchtitan's models."""
MAX_EMPTY_POSITIONS = 1_000_000
"""Most positions in the lists of a component that hold no item."""
_BESIDE = "dcp"
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Place of one item: its component, and its path from the component's top."""

    component: str
    under: tuple[str, ...]
    """Start of the item's path before `path`: the component's name, or empty."""
    path: Path
    is_tensor: bool
    is_pickled: bool = False
    """Whether its value is kept as the pickle that DCP made of it."""

    @property
    def full_path(self) -> Path:
        """Path from the top of the state."""
        return (*self.under, *self.path)

    @property
    def name(self) -> str:
        """Name of the item in DCP."""
        return _join_path(self.full_path)

    @property
    def tensor_key(self) -> str:
        """Key of the item's tensor in the component."""
        return _join_path(self.path)


def _join_path(path: Path) -> str:
    return ".".join(map(str, path))


def placed(paths: Mapping[str, Path], tensors: Iterable[str]) -> dict[str, Item]:
    """Choose the component of each item; `tensors` are the names of those that are tensors."""
    tops = {path[0] for path in paths.values() if len(path) > 1 and _is_component(path[0])}
    are_tensors = {*tensors}
    items = {}
    for name, path in paths.items():
        top, is_tensor = path[0], name in are_tensors
        if len(path) > 1 and top in tops:
            component: str = str(top)
            under: tuple[str, ...] = (str(top),)
        else:
            is_weight = len(path) == 1 and is_tensor and MODEL not in tops
            component, under = MODEL if is_weight else REST, ()
        items[name] = Item(
            component=component, under=under, path=path[len(under) :], is_tensor=is_tensor
        )
    return items


def _is_component(name: str | int) -> bool:
    if name in (REST, RNG):
        return False
    try:
        check_component(str(name))
    except HoldfastError:
        return False
    return True


def paths_of(names: Iterable[str], planner_data: Any) -> dict[str, Path]:
    """Return the path of each item: as the planner flattened the state, else the name alone."""
    if planner_data is None:
        return {name: (name,) for name in names}
    if not isinstance(planner_data, dict):
        raise UsageError(
            f"the planner keeps a {type(planner_data).__qualname__} in the metadata, and this "
            "writer only the path of each item, as DefaultSavePlanner does"
        )
    paths = {name: tuple(planner_data.get(name, (name,))) for name in names}
    for name, path in paths.items():
        if _join_path(path) != name or not all(type(part) in (str, int) for part in path):
            raise UsageError(f"{name!r}: the planner says that its path is {path!r}")
    return paths


def kind_of(items: Iterable[Item]) -> str:
    """Return the kind of a component: `module` for names with tensors alone, else `tree`."""
    found = [*items]
    is_module = any(item.is_tensor for item in found) and all(
        len(item.path) == 1 and (item.is_tensor or str(item.path[0]).endswith(_EXTRA_STATE))
        for item in found
    )
    return "module" if is_module else "tree"


def tree_of(items: Mapping[Item, Any], *, is_flat: bool) -> bytes:
    """Encode a component's tree; `items`: the node of each. `is_flat`: DCP knew their paths."""
    tree: dict[Any, Any] = {}
    # Each position of a list is that of an item, but for what holds none, such as an empty dict.
    room = MAX_EMPTY_POSITIONS + sum(len(item.path) for item in items)
    for item, node in items.items():
        room = _set(tree, item, node, room)
    listed = [*items]
    beside = {
        "under": list(listed[0].under),
        "flat": is_flat,
        "paths": [list(item.path) for item in listed],
        "pickled": [number for number, item in enumerate(listed) if item.is_pickled],
    }
    return document(tree, beside={_BESIDE: beside}).data


def _set(tree: dict[Any, Any], item: Item, node: Any, room: int) -> int:
    """Put an item in its place; `room`: by how much lists may grow. Returns what is left of it."""
    container: Any = tree
    for part, following in zip(item.path, (*item.path[1:], None), strict=True):
        if isinstance(part, int):
            if not isinstance(container, list):
                raise UsageError(f"{item.name!r}: {part} is a position, but not of a list")
            grown = max(part + 1 - len(container), 0)
            if part < 0 or grown > room:
                raise FormatError(f"{item.name!r}: {part} is no position among so few items")
            container += [None] * grown
            room -= grown
        elif not isinstance(container, dict):
            raise UsageError(f"{item.name!r}: inside another item, or {part!r} is no position")
        if following is None:
            container[part] = node
            break
        empty: Any = [] if isinstance(following, int) else {}
        inner = container[part] if isinstance(part, int) else container.setdefault(part, empty)
        if inner is None:
            inner = container[part] = empty
        container = inner
    return room


class _Beside(msgspec.Struct, forbid_unknown_fields=False):
    """Record beside a stored tree: which of its nodes are DCP's items."""

    under: list[str]
    flat: bool
    paths: list[list[str | int]]
    pickled: list[int]


def items_of(component: str, tree: bytes, value: Any) -> tuple[dict[Item, Any], bool]:
    """Return items of a stored component, with nodes, as DCP saved or would have made them."""
    what = f"{component}'s tree"
    recorded = decode_beside(tree, _BESIDE, what=what) if b'"dcp"' in tree else None
    if recorded is None:
        nodes = flatten(value, (), tensor=TensorRef, keeps_empty=True)
        return {_item(component, (component,), path, node): node for path, node in nodes}, True
    beside = strictjson.convert(recorded, _Beside, what=f"{what}: `{_BESIDE}`")
    found: dict[Item, Any] = {}
    pickled = {*beside.pickled}
    for number, path in enumerate(beside.paths):
        node = _get_value(value, path, what)
        item = _item(component, tuple(beside.under), tuple(path), node)
        if number in pickled and not isinstance(node, bytes):
            raise FormatError(f"{what}: {item.name!r} is recorded as a pickle, but is not one")
        found[replace(item, is_pickled=number in pickled)] = node
    return found, beside.flat


def _item(component: str, under: tuple[str, ...], path: Path, node: Any) -> Item:
    return Item(component=component, under=under, path=path, is_tensor=isinstance(node, TensorRef))


def _get_value(value: Any, path: list[str | int], what: str) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError) as error:
            raise FormatError(f"{what}: has nothing at {path!r:.200}") from error
    return value


def flatten(
    value: Any, path: Path, *, tensor: type, keeps_empty: bool
) -> Iterator[tuple[Path, Any]]:
    """Yield what DCP takes for items: it looks into dicts, and into lists that hold tensors."""
    if isinstance(value, Mapping) and (value or not keeps_empty):
        for key, inner in value.items():
            yield from flatten(inner, (*path, str(key)), tensor=tensor, keeps_empty=keeps_empty)
    elif isinstance(value, list) and _holds_tensors(value, tensor):
        for number, inner in enumerate(value):
            yield from flatten(inner, (*path, number), tensor=tensor, keeps_empty=keeps_empty)
    else:
        yield path, value


def _holds_tensors(value: list[Any], tensor: type) -> bool:
    return any(
        isinstance(one, tensor | Mapping) or (isinstance(one, list) and _holds_tensors(one, tensor))
        for one in value
    )


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
_UNSAFE = "unsafe_pickle=True saves the pickle as it is, and loading it then runs any code in it"


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
    """Take the value of an item from the planner; refuse one that is no typed tree."""
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
