"""Converts optimizer states between torch's `state_dict` form and Holdfast's.

Torch numbers the parameters in the order of the groups; ours has their names. A name is given to
a number only where nothing else fits: by the names that torch recorded, by shapes that occur
once, or by the order of the model's parameters where that is known and all shapes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop.source import SourceComponent

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of torch's own layers, which no optimizer updates."""
_NOT_OPTIONS = frozenset({"params", "param_names"})
_HOW = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused", "initial_lr"})
"""Options that do not help to recognize an optimizer: of any class, or set by schedulers."""
_DECOUPLED = "decoupled_weight_decay"
_FACTORS = ("row_var", "col_var")
_FLOATS = ("F", "BF")
_GUESSED = (
    "moments of parameters with equal shapes were assigned in the order of the model's parameters, "
    "as the file does not name them; if the optimizer was made with another order, give the names "
    "in its order: --parameters FILE (parameters=[…])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An optimizer's tree of the kind `optimizer`, and which tensor of the source each key is."""

    tree: dict[str, Any]
    keys: Mapping[str, str]
    note: str = ""
    """How names were guessed, if they were."""


def is_torch_form(tree: Any) -> bool:
    """Whether a tree is the `state_dict` of a torch optimizer: state and groups, by number."""
    return (
        isinstance(tree, dict)
        and tree.keys() == {"state", "param_groups"}
        and isinstance(tree["state"], dict)
        and isinstance(tree["param_groups"], list)
        and all(
            isinstance(group, dict) and isinstance(group.get("params"), list)
            for group in tree["param_groups"]
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """Facts about optimizers beside their state, from the file or the user."""

    is_ordered: bool = False
    """Whether the file keeps the order of the model's parameters, as a pickled dict does."""
    order: Sequence[str] = ()
    """Names of the model's parameters in its order, if a user has given them."""
    kind: str | None = None
    """The optimizer's class, such as "AdamW"; None: its options tell it."""
    rename: Callable[[str], str] = str
    """Function from a name of a parameter to its new one."""


def name_parameters(
    part: SourceComponent, modules: Mapping[str, SourceComponent], hints: Hints
) -> Named | str:
    """Name an optimizer's parameters in torch's form; return a reason if that is unsafe."""
    state, groups = part.tree["state"], part.tree["param_groups"]
    name = hints.kind or type_of(groups)
    if name is None:
        return "its options do not tell which optimizer it is; say --optimizer AdamW, for example"
    if len(modules) != 1:
        return f"{len(modules) or 'no'} models are imported, and it belongs to one"
    [(module, model)] = modules.items()
    numbers = [number for group in groups for number in group["params"]]
    if len({*map(str, numbers)}) != len(numbers) or not {*state} <= {*numbers}:
        return "its states and groups do not fit together"
    of_slots = {number: _find_slot_shapes(state.get(number), part.specs) for number in numbers}
    shapes = {number: max(found, key=len, default=None) for number, found in of_slots.items()}
    recorded = _find_recorded_names(groups, of_slots, model, hints.rename)
    names = recorded or _match_parameters(groups, shapes, model, hints)
    if isinstance(names, str):
        return names
    known = [shape for shape in shapes.values() if shape is not None]
    is_guessed = not recorded and not hints.order and len({*known}) < len(known)
    note = _GUESSED if is_guessed else ""
    return _build_named(part, names, module=module, model=model, kind=name, note=note)


def _find_slot_shapes(slots: Any, specs: Mapping[str, TensorSpec]) -> set[tuple[int, ...]]:
    """Return the shapes of a parameter's slots, except its step; of Adafactor's two the product."""
    if not isinstance(slots, dict):
        return set()
    shapes = {
        slot: tuple(specs[ref.key].shape)
        for slot, ref in slots.items()
        if isinstance(ref, TensorRef) and slot != "step"
    }
    if shapes.keys() >= {*_FACTORS}:
        row, column = (shapes.pop(slot) for slot in _FACTORS)
        shapes["variance"] = (*row[:-1], *column[-1:])
    return {*shapes.values()}


def _find_recorded_names(
    groups: Sequence[Any],
    of_slots: Mapping[Any, set[tuple[int, ...]]],
    model: SourceComponent,
    rename: Callable[[str], str],
) -> dict[Any, str] | str | None:
    """Return recorded parameter names by number; None without, a text if they are unusable."""
    found: dict[Any, str] = {}
    for group in groups:
        names = group.get("param_names", group["params"])
        are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not are_names or len(names) != len(group["params"]):
            return None
        found |= zip(group["params"], map(rename, names), strict=True)
    leaves = model.leaves
    if lost := sorted({*found.values()} - {*leaves}):
        return f"it names {lost[0]!r}, which the model does not have"
    if len({*found.values()}) != len(found):
        return "it names a parameter twice"
    for number, name in found.items():
        shapes = of_slots[number]
        if shapes and tuple(model.specs[leaves[name].key].shape) not in shapes:
            return f"it names {name!r}, and no slot has the shape of that one"
    return found


def _match_parameters(
    groups: Sequence[Any],
    shapes: Mapping[Any, tuple[int, ...] | None],
    model: SourceComponent,
    hints: Hints,
) -> dict[Any, str] | str:
    """Name parameters by shapes, which must be of one group, in the model's order if alike."""
    parameters = dict(_list_parameters(model))
    if hints.order:
        lost = [name for name in hints.order if name not in parameters]
        if lost:
            return f"the model has no {lost[0]!r}, which the given order has"
        parameters = {name: parameters[name] for name in hints.order}
    if len(parameters) != len(shapes):
        return f"it has {len(shapes)} parameters and the model {len(parameters)}"
    of_groups = [{shapes[number] for number in group["params"]} for group in groups]
    if len(groups) > 1 and sum(map(len, of_groups)) != len(set[Any]().union(*of_groups)):
        return "its groups share shapes, so the names of their parameters are unknown"
    found: dict[Any, str] = {}
    for group, of_group in zip(groups, of_groups, strict=True):
        fitting = {
            name: shape
            for name, shape in parameters.items()
            if len(groups) == 1 or shape in of_group
        }
        if len(fitting) != len(group["params"]):
            return "its groups do not fit the shapes of the model"
        names = [*fitting]
        by_shape = {shape: name for name, shape in fitting.items()}
        if len(by_shape) == len(fitting) and None not in of_group and not hints.order:
            names = [by_shape.get(shapes[number] or (), "") for number in group["params"]]
        elif not (hints.is_ordered or hints.order):
            return (
                "the file does not keep the order of the model's parameters, and some have "
                "the same shape; give their names in order: --parameters FILE"
            )
        for number, name in zip(group["params"], names, strict=True):
            if shapes[number] not in (None, parameters.get(name)):
                return f"the shape of its parameter {number} is not that of {name or 'any'}"
            found[number] = name
    return found


def _list_parameters(model: SourceComponent) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the tensors that an optimizer may have; of tied ones the first."""
    seen = set()
    for name, ref in model.leaves.items():
        spec = model.specs[ref.key]
        is_float = spec.dtype.startswith(_FLOATS)
        if is_float and ref.key not in seen and name.rpartition(".")[2] not in _BUFFERS:
            seen.add(ref.key)
            yield name, spec.shape


def _build_named(
    part: SourceComponent,
    names: Mapping[Any, str],
    *,
    module: str,
    model: SourceComponent,
    kind: str,
    note: str,
) -> Named:
    """Build the tree in Holdfast's form, with slots and groups by parameter name."""
    table: dict[str, str] = {}
    """Key in the source → key in the tree."""
    slots: dict[str, Any] = {}
    devices: dict[str, str] = {}
    of_model = model.leaves
    shapes = {name: list(model.specs[of_model[name].key].shape) for name in names.values()}
    for number, name in names.items():
        if number not in part.tree["state"]:
            continue
        slots[name] = relabelled(part.tree["state"][number], name, table)
        found = _find_device(part.tree["state"][number], part.specs, shapes[name])
        if found != "cpu":
            devices[name] = found
    groups = part.tree["param_groups"]
    options = [
        {key: value for key, value in group.items() if key not in _NOT_OPTIONS} for group in groups
    ]
    tree = {
        "type": kind,
        "modules": [module],
        "groups": [[names[number] for number in group["params"]] for group in groups],
        "shapes": shapes,
        "devices": devices,
        "param_groups": relabelled(options, "param_groups", table),
        "slots": slots,
        "extra": {},
    }
    return Named(tree=tree, keys={new: old for old, new in table.items()}, note=note)


def _find_device(slots: Any, specs: Mapping[str, TensorSpec], shape: Sequence[int]) -> str:
    """Return the device of a slot with the shape of the parameter; "cpu" if there is none."""
    refs = slots.values() if isinstance(slots, dict) else ()
    for ref in refs:
        if isinstance(ref, TensorRef) and list(specs[ref.key].shape) == [*shape]:
            return ref.device
    return "cpu"


def relabelled(node: Any, path: str, table: dict[str, str]) -> Any:
    """Copy a tree with its tensors called by their paths; `table` gets old key → new key."""
    if isinstance(node, TensorRef):
        key = table.setdefault(node.key, path)
        return TensorRef(key, node.device, node.grad, node.parameter, node.order)
    if isinstance(node, dict):
        return {key: relabelled(item, f"{path}.{key}", table) for key, item in node.items()}
    if isinstance(node, list | tuple):
        items = (relabelled(item, f"{path}.{place}", table) for place, item in enumerate(node))
        return list(items) if isinstance(node, list) else tuple(items)
    return node


def type_of(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the class of torch's own optimizers that has these options; None if several may."""
    import torch

    options = {*groups[0]} - _NOT_OPTIONS - _HOW if groups else set()
    found = []
    for kind in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam",
                 "RAdam", "RMSprop", "Rprop", "SGD"):  # fmt: skip
        made = getattr(torch.optim, kind)([torch.zeros(1, requires_grad=True)], lr=0.1)
        known = {*made.param_groups[0]} - _NOT_OPTIONS - _HOW
        if options - {_DECOUPLED} == known - {_DECOUPLED}:
            found.append(kind)
    if found == ["Adam", "AdamW"] and _DECOUPLED in groups[0]:
        return "AdamW" if groups[0][_DECOUPLED] else "Adam"
    return found[0] if len(found) == 1 else None


def number_parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Holdfast's tree of an optimizer to torch's `state_dict`, with numbered parameters."""
    names = [name for group in tree["groups"] for name in group]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**options, "params": [numbers[name] for name in group]}
        for options, group in zip(tree["param_groups"], tree["groups"], strict=True)
    ]
    state = {numbers[name]: slots for name, slots in tree["slots"].items()}
    return {"state": {**state, **tree["extra"]}, "param_groups": groups}
