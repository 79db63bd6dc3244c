"""Torch optimizers: capture and load of `optimizer.state` directly, by parameter name.

`Optimizer.load_state_dict` casts moments to the parameter's type and matches by position, so it
is not used; neither is anything that calls hooks or changes the step count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from holdfast.errors import FormatError
from holdfast.format.nodes import SubclassRef, TensorRef
from holdfast.format.objects import TreeDocument
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.state.collecting import Leaves
from holdfast.state.components import ParameterNames
from holdfast.state.leaves import local_of, refusal
from holdfast.state.planning.copying import Stored
from holdfast.state.planning.inner import make_slots, match_inner
from holdfast.state.planning.livevalues import revive
from holdfast.state.planning.merge import Claims, Merge, Placement
from holdfast.state.planning.plans import LoadPlan, undo_attributes
from holdfast.state.selection import Problems, Wishes
from holdfast.state.trees import Skeleton, encoded, keys_in, nodes_in, owned

# Positions in the live group's list, so they stay with the live group.
_NOT_OPTIONS = frozenset({"params", "param_names"})
_GROUPS = "param_groups"
_MODE = "train_mode"
TRAINING_WEIGHTS = (
    "saved while the schedule-free optimizer was in train mode, so these weights are not the "
    "average, which is used for evaluation. Call optimizer.eval() before such a save"
)
_CPU = torch.device("cpu")
_NOT_RESIZED = {
    "LBFGS": "cannot be resized: its history is one vector of all parameters",
    "Rprop": "cannot be resized: new rows would have no step size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptimizer:
    """A live optimizer with its parameters named."""

    optimizer: Optimizer
    groups: tuple[tuple[str, ...], ...]
    """Names of each group's parameters, in order."""
    parameters: Mapping[str, Tensor]
    """Name -> parameter."""
    modules: tuple[str, ...]
    """Components that the parameters come from; their names are prefixes when several."""


def inspect(optimizer: Optimizer, names: ParameterNames) -> LiveOptimizer:
    """Name every parameter of `optimizer`, without changing its state."""
    homes = [
        [names.find_parameter(parameter) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    modules = tuple(dict.fromkeys(home[0] for group in homes for home in group if home))
    parameters: dict[str, Tensor] = {}
    groups: list[tuple[str, ...]] = []
    for g, group in enumerate(optimizer.param_groups):
        group_names = []
        for i, parameter in enumerate(group["params"]):
            name = _unique(_name_parameter(homes[g][i], g, i, len(modules) > 1), parameters)
            parameters[name] = parameter
            group_names.append(name)
        groups.append(tuple(group_names))
    return LiveOptimizer(
        optimizer=optimizer, groups=tuple(groups), parameters=parameters, modules=modules
    )


def _name_parameter(home: tuple[str, str] | None, group: int, index: int, is_prefixed: bool) -> str:
    if home is None:
        return f"group{group}.param{index}"
    return f"{home[0]}.{home[1]}" if is_prefixed else home[1]


def _unique(wanted: str, taken: Mapping[str, Any]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}#{number}"
    return name


def slot_path(path: str) -> str:
    """Convert a path in the optimizer's tree to `<parameter>.<slot>`."""
    return path.removeprefix("slots.")


class Naming:
    """Names the parameters of one optimizer repeatedly, with a cache."""

    def __init__(self) -> None:
        self._names: ParameterNames | None = None
        self._ids: list[list[int]] = []
        self._flat: tuple[str, ...] = ()
        self._groups: tuple[tuple[str, ...], ...] = ()
        self._modules: tuple[str, ...] = ()

    def name_parameters(self, optimizer: Optimizer, names: ParameterNames) -> LiveOptimizer:
        """Name the parameters as `inspect` does; cached while they are the same."""
        ids = [list(map(id, group["params"])) for group in optimizer.param_groups]
        if self._names is not names or ids != self._ids:
            live = inspect(optimizer, names)
            self._names, self._ids, self._flat = names, ids, tuple(live.parameters)
            self._groups, self._modules = live.groups, live.modules
            return live
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        return LiveOptimizer(
            optimizer=optimizer,
            groups=self._groups,
            parameters=dict(zip(self._flat, parameters, strict=True)),
            modules=self._modules,
        )


_SHAPE_AND_DEVICE = attrgetter("shape", "device")


def stamp(live: LiveOptimizer) -> tuple[Any, ...]:
    """Return a cache key of an optimizer's tree: everything in it but options and slots."""
    where = list(map(_SHAPE_AND_DEVICE, live.parameters.values()))
    return (type(live.optimizer).__name__, live.groups, live.modules, where)


def options_and_slots(live: LiveOptimizer) -> dict[str, Any] | None:
    """Return options and slots, the changing members of the tree; None if there is other state."""
    state = live.optimizer.state
    # By their ids: torch hashes a tensor in Python, and there are many.
    by_id = dict(zip(map(id, state), state.values(), strict=True))
    ids = zip(live.parameters, map(id, live.parameters.values()), strict=True)
    slots = {name: by_id[number] for name, number in ids if number in by_id}
    if len(slots) != len(state):
        return None
    return {_GROUPS: _options(live.optimizer), "slots": slots}


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        for group in optimizer.param_groups
    ]


def capture_optimizer(live: LiveOptimizer, leaves: Leaves) -> TreeDocument | None:
    """Encode an optimizer as a tree with the members of `_StoredOptimizer`."""
    slots, extra = _state_by_name(live, leaves)
    tree = {
        "type": type(live.optimizer).__name__,
        "modules": list(live.modules),
        "groups": [list(group) for group in live.groups],
        "shapes": {name: list(p.shape) for name, p in live.parameters.items()},
        "devices": {
            name: leaves.device_name(p.device)
            for name, p in live.parameters.items()
            if not p.is_cpu
        },
        _GROUPS: _options(live.optimizer),
        "slots": slots,
        "extra": extra,
    }
    return encoded(tree, leaves)


def stepped(live: LiveOptimizer, leaves: Leaves) -> frozenset[str]:
    """Return the keys of captured tensors that are only slots of this optimizer."""
    state: dict[Any, Any] = live.optimizer.state
    slots = {
        id(value)
        for key, of_parameter in state.items()
        if isinstance(key, Tensor) and isinstance(of_parameter, dict)
        for value in of_parameter.values()
        if isinstance(value, Tensor)
    }
    extra = [value for key, value in state.items() if isinstance(key, str)]
    slots -= {id(value) for value in nodes_in([_options(live.optimizer), extra])}
    return frozenset(
        key
        for (key, tensor), original in zip(leaves.tensors.items(), leaves.originals, strict=True)
        if id(original) in slots and tensor.is_set_to(local_of(original))
    )


def _state_by_name(live: LiveOptimizer, leaves: Leaves) -> tuple[dict[str, Any], dict[str, Any]]:
    by_id = {id(parameter): name for name, parameter in live.parameters.items()}
    slots: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    state: dict[Any, Any] = live.optimizer.state
    for key, value in state.items():
        if isinstance(key, str):
            extra[key] = value
        elif id(key) in by_id:
            slots[by_id[id(key)]] = value
        else:
            shown = f"a tensor {list(key.shape)}" if isinstance(key, Tensor) else repr(key)[:80]
            leaves.record_refusal("state", f"state of {shown}, which is in no parameter group")
    return {name: slots[name] for name in live.parameters if name in slots}, extra


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredOptimizer:
    """Checked members of a stored optimizer's tree."""

    type: str
    modules: list[str]
    groups: list[list[str]]
    shapes: dict[str, list[int]]
    devices: dict[str, str]
    param_groups: list[dict[str, Any]]
    slots: dict[str, Any]
    extra: dict[str, Any]


def _parse_optimizer(tree: Any, what: str) -> _StoredOptimizer:
    expected = {
        "type": str,
        "modules": list,
        "groups": list,
        "shapes": dict,
        "devices": dict,
        _GROUPS: list,
        "slots": dict,
        "extra": dict,
    }
    if not isinstance(tree, dict) or not tree.keys() >= expected.keys():
        raise FormatError(f"{what}: not the tree of an optimizer")
    members = {name: tree[name] for name in expected}
    for name, kind in expected.items():
        if not isinstance(members[name], kind):
            raise FormatError(f"{what}: {name} is not a {kind.__name__}")
    stored = _StoredOptimizer(**members)
    names = [name for group in stored.groups for name in _checked_names(group, what)]
    fits = len(set(names)) == len(names) and stored.shapes.keys() == set(names)
    groups_fit = len(stored.param_groups) == len(stored.groups)
    if not fits or not groups_fit or not stored.slots.keys() <= set(names):
        raise FormatError(f"{what}: parameters and groups do not fit together")
    if not all(isinstance(options, dict) for options in stored.param_groups):
        raise FormatError(f"{what}: a parameter group is not a dict")
    return stored


def _checked_names(group: Any, what: str) -> list[str]:
    if not isinstance(group, list) or not all(isinstance(name, str) for name in group):
        raise FormatError(f"{what}: a parameter group's names are not a list of text")
    return group


def find_modes(tree: Any) -> list[Any]:
    """List the modes of schedule-free optimizers in a tree or `state_dict`: True in train mode."""
    nodes = [node for node in nodes_in(tree) if isinstance(node, dict)]
    has_groups = any(_GROUPS in node for node in nodes)
    return [node[_MODE] for node in nodes if has_groups and _MODE in node]


def check_tree(tree: Any, what: str) -> None:
    """Check that a decoded tree is that of an optimizer."""
    _parse_optimizer(tree, what)


class _ParameterPlacement(Placement):
    """Placement on the parameter's device of tensors saved on device `home`, else on the CPU."""

    needs_device = True  # a kernel needs the tensor there

    def __init__(self, parameter: Tensor, home: str | None) -> None:
        """`home`: stored device of the tensors to place beside the parameter; None: any device."""
        self._parameter = parameter
        self._home = home

    @override
    def choose_device(self, ref: TensorRef) -> torch.device:
        return self._parameter.device if self._home in (None, ref.device) else _CPU

    @override
    def make_tensor(self, ref: TensorRef, stored: Tensor) -> Tensor:
        # With the parameter's strides where it has the parameter's shape: fused kernels pair
        # elements by their position in memory, whatever the strides say.
        parameter, device = local_of(self._parameter), self.choose_device(ref)
        if stored.shape != parameter.shape or parameter.is_contiguous():
            return owned(stored, device)
        like = torch.empty_like(parameter, dtype=stored.dtype, device=device, requires_grad=False)
        return like.copy_(stored)


class OptimizerPlan(LoadPlan):
    """A load into one optimizer: checks, then changes its groups and state."""

    _live: LiveOptimizer

    def __init__(
        self, component: str, live: LiveOptimizer, specs: Mapping[str, TensorSpec]
    ) -> None:
        super().__init__(component, live, specs)
        self._stored: _StoredOptimizer
        self._wishes: Wishes
        self._new_names: dict[str, str] = {}
        self._common: dict[str, str] = {}
        self._groups: list[tuple[int, int]] = []
        self._templates: dict[tuple[str, Any], Any] = {}
        """Live tensor of each slot that is stored as a tensor subclass, or one made for it."""
        self._merge: Merge

    def check(self, skeleton: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Match parameters and groups by name; record what does not fit."""
        self._wishes = wishes
        optimizer = self._live.optimizer
        live_values = [optimizer.param_groups, list(optimizer.state.values())]
        tree = revive(skeleton, live_values, self._component, problems)
        stored = self._stored = _parse_optimizer(tree, f"{self._component}'s tree")
        self._check_type(problems)
        self._new_names = self._renamed(wishes)
        self._match_names(problems)
        self._match_groups(problems)
        self._check_options(problems)
        self._count_all_leaves()
        problems.optimizers.add(self._component)
        if wishes.resizing:
            self._resize_slots(problems)
        self._check_fused(problems)
        for name, old in self._common.items():
            live, kept = list(self._live.parameters[name].shape), stored.shapes[old]
            if live != kept:
                path = f"{self._component}.{name}"
                problems.record_shape(path, kept, live, how="stored for")
            reason = refusal(self._live.parameters[name])
            if reason is not None:
                problems.offenders.append((f"{self._component}.{name}", reason))
        self._match_tensors(problems)
        if skeleton.has_subclasses:
            with undo_attributes(self._live.optimizer):  # those of its trial steps
                for name, old in self._common.items():
                    self._match_subclasses(name, old, problems)

    def _match_subclasses(self, name: str, old: str, problems: Problems) -> None:
        """Find a live tensor for each slot of a parameter that is stored as a subclass."""
        slots, optimizer = self._stored.slots.get(old), self._live.optimizer
        if not isinstance(slots, dict) or SubclassRef not in map(type, slots.values()):
            return
        state: Mapping[Any, Any] = optimizer.state
        parameter = self._live.parameters[name]
        wanted = {
            slot: ref
            for slot, ref in slots.items()
            if isinstance(ref, SubclassRef) and not self._omits_slot(name, old, slot)
        }
        found = state.get(parameter)
        live = found if isinstance(found, dict) else {}
        advice = ""
        if not wanted.keys() <= live.keys():
            try:
                live = {**make_slots(optimizer, parameter), **live}
            except Exception as error:  # noqa: BLE001 - code of the optimizer
                advice = f" ({type(error).__name__}: {error})"
        for slot, ref in wanted.items():
            path = f"{self._component}.{name}.{slot}"
            if slot in live:
                shards = self.destinations.shards
                match_inner(path, ref, live[slot], self._specs, problems, shards)
                self._templates[name, slot] = live[slot]
            else:
                problems.other.append(
                    f"{path}: stored as the tensor subclass {ref.type[:80]}, but a trial step of "
                    f"{type(optimizer).__name__} created no such slot{advice}. Run one optimizer "
                    "step before the load"
                )

    def _resize_slots(self, problems: Problems) -> None:
        """Resize the slots of parameters that are resized; refuse those of some optimizers."""
        stored, kind = self._stored, type(self._live.optimizer).__name__
        for name, old in self._common.items():
            slots = stored.slots.get(old)
            if isinstance(slots, dict):
                slots = {
                    slot: value
                    for slot, value in slots.items()
                    if not self._omits_slot(name, old, slot)
                }
            shape = self._wishes.resizing.resize_slots(
                self._component,
                (name, old),
                stored.shapes[old],
                self._live.parameters[name],
                slots,
                self._specs,
            )
            if shape != stored.shapes[old] and kind in _NOT_RESIZED:
                problems.other.append(f"{self._component}.{name}: {kind} {_NOT_RESIZED[kind]}")
            stored.shapes[old] = [*shape]

    def _match_tensors(self, problems: Problems) -> None:
        """Record which stored tensors go into DTensors, or become ones beside a parameter."""
        state: dict[Any, Any] = self._live.optimizer.state
        groups = self._live.optimizer.param_groups
        self.destinations.look_in([groups, [*state.values()]])
        if self.destinations.are_plain:
            return
        match, component = self.destinations.match, self._component
        for name, old in self._common.items():
            parameter = self._live.parameters[name]
            slots, held = self._stored.slots.get(old), state.get(parameter)
            of_slot = held if isinstance(held, dict) else {}
            path = f"{component}.{name}"
            if not isinstance(slots, dict):
                match(held, slots, path, problems, parameter)
                continue
            for slot, value in slots.items():
                # A step is plain also beside a parameter without dimensions.
                beside = None if slot == "step" else parameter
                match(of_slot.get(slot), value, f"{path}.{slot}", problems, beside)
        for live, old_group in self._groups:
            options = self._stored.param_groups[old_group]
            match(groups[live], options, f"{component}.{_GROUPS}.{live}", problems)
        match(state, self._stored.extra, f"{component}.extra", problems)

    def _check_type(self, problems: Problems) -> None:
        stored, live = self._stored.type, type(self._live.optimizer).__name__
        if stored == live:
            return
        sentence = f"{self._component}: saved from {stored[:80]}, the live optimizer is {live}"
        (problems.other if self._wishes.strict else problems.notes).append(sentence)

    def _renamed(self, wishes: Wishes) -> dict[str, str]:
        """Map stored names to live ones; component prefixes are not renamed."""
        prefixes = self._stored.modules if len(self._stored.modules) > 1 else []
        by_prefix: dict[str, list[str]] = {}
        for name in self._stored.shapes:
            prefix = name.partition(".")[0]
            by_prefix.setdefault(prefix + "." if prefix in prefixes else "", []).append(name)
        renamed: dict[str, str] = {}
        for prefix, names in by_prefix.items():
            plain = wishes.rename.map_names(
                [name.removeprefix(prefix) for name in names], f"{self._component}.{prefix}"
            )
            renamed.update({prefix + old: prefix + new for old, new in plain.items()})
        return renamed

    def _match_names(self, problems: Problems) -> None:
        component = self._component
        old_names = {new: old for old, new in self._new_names.items()}
        is_prefixed = len(self._stored.modules) > 1
        if not is_prefixed and not self._wishes.selection.is_partial(component):
            problems.names[component] = (old_names, self._live.parameters)
        for new, old in old_names.items():
            if new not in self._live.parameters and not self._omits_parameter(new, old):
                problems.unexpected.append(f"{component}.{new}")
        for name in self._live.parameters:
            if self._omits_parameter(name, old_names.get(name, name)):
                continue
            if name in old_names:
                self._common[name] = old_names[name]
            else:
                problems.missing.append(f"{component}.{name}")

    def _match_groups(self, problems: Problems) -> None:
        """Pair stored and live groups by the parameters that both sides have.

        One without parameters, as a rank of several may have, is paired by its number, if no
        parameter of that stored group is live.
        """
        both = self._live.parameters.keys() & set(self._new_names.values())
        waiting: dict[frozenset[str], list[int]] = {}
        for g, names in enumerate(self._stored.groups):
            shared = frozenset(self._new_names[name] for name in names) & both
            waiting.setdefault(shared, []).append(g)
        free = waiting.pop(frozenset(), [])
        empty = [g for g, names in enumerate(self._live.groups) if not names]
        for g, live_names in enumerate(self._live.groups):
            shared = frozenset(live_names) & both
            same = waiting.get(shared)
            if same:
                self._groups.append((g, same.pop(0)))
            elif shared:
                problems.other.append(_regrouped(self._component, g, live_names))
        by_number = {g: g for g in empty if g in free}
        others = [g for g in free if g not in by_number and not self._stored.groups[g]]
        for g in empty:
            old = by_number[g] if g in by_number else others.pop(0) if others else None
            if old is None:
                problems.other.append(f"{self._component}: live group {g} is not in the checkpoint")
            else:
                self._groups.append((g, old))
        if others:
            problems.other.append(f"{self._component}: a stored group without parameters")

    def _check_options(self, problems: Problems) -> None:
        """Check tensor options, such as a learning rate, which are copied into and must fit."""
        for live_index, old in self._groups:
            group = self._live.optimizer.param_groups[live_index]
            for key, value in self._stored.param_groups[old].items():
                path = f"{_GROUPS}.{live_index}.{key}"
                live = group.get(key)
                if self._omits(path) or not isinstance(live, Tensor):
                    continue
                if isinstance(value, TensorRef):
                    spec, at = self._specs[value.key], f"{self._component}.{path}"
                    problems.check_spec(at, spec, live)
                elif not isinstance(value, int | float) or live.numel() != 1:
                    problems.other.append(f"{self._component}.{path}: the live value is a tensor")

    def _check_fused(self, problems: Problems) -> None:
        """Check slots of fused kernels, which access them at the parameter's size unchecked."""
        options = self._stored_options()
        live_fused = {
            name
            for group, names in zip(
                self._live.optimizer.param_groups, self._live.groups, strict=True
            )
            for name in names
            if group.get("fused")
        }
        for name, old in self._common.items():
            slots = self._stored.slots.get(old)
            if isinstance(slots, dict) and (options[name].get("fused") or name in live_fused):
                for slot, ref in slots.items():
                    if isinstance(ref, TensorRef):
                        self._check_fused_slot(name, slot, self._specs[ref.key], problems)

    def _check_fused_slot(self, name: str, slot: Any, spec: TensorSpec, problems: Problems) -> None:
        parameter = self._live.parameters[name]
        shape = () if slot == "step" else tuple(parameter.shape)
        item_nbytes = 4 if slot == "step" else parameter.element_size()
        path = f"{self._component}.{name}.{slot}"
        if spec.shape != shape:
            stored = list(spec.shape)
            problems.wrong_shape.append(f"{path}: stored {stored}, fused it is {list(shape)}")
        if ITEM_NBYTES[spec.dtype] < item_nbytes:
            problems.wrong_dtype.append(f"{path}: stored {spec.dtype}, too small to be fused")

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        stored = self._stored
        wanted = [stored.slots.get(old) for old in self._common.values()]
        wanted += [stored.param_groups[old] for _, old in self._groups]
        wanted.append(stored.extra)
        return keys_in(wanted)

    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Plan every change, and make new tensors; nothing live changes."""
        layouts = self.destinations.layouts
        merge = self._merge = Merge(tensors, self._specs, claims, self._component, layouts)
        options = self._stored_options()
        for name, old in self._common.items():
            self._merge_slots(merge, name, old, options.get(name, {}))
        for live, old_group in self._groups:
            self._merge_group(merge, live, self._stored.param_groups[old_group])
        self._merge_extra(merge)

    def apply(self) -> None:
        """Make the planned changes to groups and state."""
        self._merge.commit()

    def _stored_options(self) -> dict[str, dict[str, Any]]:
        return {
            self._new_names[name]: self._stored.param_groups[g]
            for g, names in enumerate(self._stored.groups)
            for name in names
        }

    def _merge_slots(self, merge: Merge, name: str, old: str, options: dict[str, Any]) -> None:
        state, parameter = self._live.optimizer.state, self._live.parameters[name]
        # `state` is a defaultdict: asking with [] would create an entry.
        live = state.get(parameter)
        stored = self._stored.slots.get(old)
        kept = self._kept_slots(name, old, live)
        if stored is None and not kept:
            merge.then(partial(state.pop, parameter, None))
            return
        if not isinstance(stored, dict | None):
            new = merge.merge(live, stored, self._place_slot(old, "", parameter, options))
            merge.then(partial(state.__setitem__, parameter, new))
            return
        target = live if isinstance(live, dict) else {}
        slots = dict(kept)
        for slot, value in (stored or {}).items():
            if not self._omits_slot(name, old, slot):
                place = self._place_slot(old, slot, parameter, options)
                known = self._templates.get((name, slot), target.get(slot))
                slots[slot] = merge.merge(known, value, place)
        merge.then(partial(_refill, state, parameter, target, slots))

    def _kept_slots(self, name: str, old: str, live: Any) -> dict[Any, Any]:
        if not isinstance(live, dict):
            return {}
        return {slot: value for slot, value in live.items() if self._omits_slot(name, old, slot)}

    def _count_all_leaves(self) -> None:
        """Match every leaf with the selection now, so that unmatched entries can be reported."""
        if not self._wishes.selection.is_partial(self._component):
            return
        for name, old in self._common.items():
            for slot in self._slots(name, old):
                self._omits_slot(name, old, slot)
        for key in (*self._stored.extra, *self._live.optimizer.state):
            if isinstance(key, str):
                self._omits(f"extra.{key}")

    def _slots(self, name: str, old: str) -> list[Any]:
        """Return the names of a parameter's slots, stored and live ones."""
        stored = self._stored.slots.get(old)
        parameter = self._live.parameters.get(name)
        live = None if parameter is None else self._live.optimizer.state.get(parameter)
        return [slot for slots in (stored, live) if isinstance(slots, dict) for slot in slots]

    def _omits_parameter(self, name: str, old: str) -> bool:
        """Whether the selection excludes all of a parameter's state."""
        selection, component = self._wishes.selection, self._component
        is_skipped = selection.skips(component, name) or selection.skips(component, old)
        slots = [] if is_skipped else self._slots(name, old)
        wanted = [slot for slot in slots if not self._omits_slot(name, old, slot)]
        return not wanted and self._omits(name, old)

    def _omits_slot(self, name: str, old: str, slot: Any) -> bool:
        return self._omits(f"{name}.{slot}", f"{old}.{slot}")

    def _omits(self, *paths: str) -> bool:
        return self._wishes.selection.is_excluded(self._component, *paths)

    def _place_slot(
        self, old: str, slot: Any, parameter: Tensor, options: dict[str, Any]
    ) -> Placement:
        """Return the placement of a slot's tensor, for when a new one must be made.

        That is its parameter's device if it was saved from there, else the CPU. For `step`, torch
        has a separate rule: two flags mean that a kernel reads it on the device.
        """
        home = self._stored.devices.get(old, "cpu")
        if slot == "step" and (options.get("capturable") or options.get("fused")):
            return _ParameterPlacement(parameter, None)
        # Trees that Holdfast wrote never have None here; it names no device.
        is_apart = home is None or (slot == "step" and home == "cpu")
        return _ParameterPlacement(parameter, "" if is_apart else home)

    def _merge_group(self, merge: Merge, live_index: int, stored: dict[str, Any]) -> None:
        group = self._live.optimizer.param_groups[live_index]
        for key, value in stored.items():
            if key not in _NOT_OPTIONS and not self._omits(f"{_GROUPS}.{live_index}.{key}"):
                _merge_option(merge, group, key, value)

    def _merge_extra(self, merge: Merge) -> None:
        extra = self._stored.extra
        state: dict[Any, Any] = self._live.optimizer.state
        for key in [key for key in state if isinstance(key, str) and key not in extra]:
            if not self._omits(f"extra.{key}"):
                merge.then(partial(state.pop, key, None))
        for key, value in extra.items():
            if not self._omits(f"extra.{key}"):
                new = merge.merge(state.get(key), value)
                merge.then(partial(state.__setitem__, key, new))


def _merge_option(merge: Merge, group: dict[str, Any], key: str, value: Any) -> None:
    live = group.get(key)
    if not isinstance(live, Tensor):
        new = merge.merge(live, value)
    elif isinstance(value, TensorRef):
        new = merge.merge(live, value, _ParameterPlacement(live, None))
    else:
        # A compiled step reads this tensor, so it is kept and filled with the number.
        new = live
        merge.then(partial(live.fill_, value))
    merge.then(partial(group.__setitem__, key, new))


def _refill(
    state: dict[Any, Any], parameter: Tensor, target: dict[Any, Any], slots: dict[Any, Any]
) -> None:
    target.clear()
    target.update(slots)
    state[parameter] = target


def _regrouped(component: str, group: int, names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{component}: live parameter group {group} ({shown}) was grouped differently when saved"
