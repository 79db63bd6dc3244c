"""Load plans: their interface, and those for generators, plain trees and foreign objects.

Each plan has four stages: `check` finds what does not fit, `prepare` makes new objects, `apply`
changes leaves and fails only if a tensor cannot be read, `finish` runs code that may fail. Loading
code of modules is tried before, because it may refuse a state after it has written half of it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from holdfast.errors import FormatError, MismatchError
from holdfast.format.nodes import GeneratorState
from holdfast.format.objects import DequeItems, join_path
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.attributes import Attributes, content_of
from holdfast.state.components import RNG
from holdfast.state.leaves import is_subclass, local_of, plain_parts
from holdfast.state.planning.copying import Fetching, Stored
from holdfast.state.planning.inner import match_subclasses
from holdfast.state.planning.livevalues import Destinations, keep_live, revive
from holdfast.state.planning.merge import CASTS, Claims, Merge
from holdfast.state.planning.schedulesettings import required_settings
from holdfast.state.selection import Problems, Wishes, shortened
from holdfast.state.trees import Lifting, Skeleton, keys_in, nodes_in


class LoadPlan(ABC):
    """Plan for loading one component, in four stages."""

    def __init__(self, component: str, live: Any, specs: Mapping[str, TensorSpec]) -> None:
        self._component = component
        self._live = live
        self._specs = dict(specs)
        """Key → spec; resized tensors get their live shape in `check`."""
        self.destinations = Destinations(self._specs)

    finish_order = 0
    """Order of `finish`: 0 foreign code, 1 generators, 2 the global generators."""

    unrestored = ""
    """Why a trial in `prepare` may have changed the live object; empty if it has not."""
    _wanted: Any = None
    """The nodes of the tree that will be loaded, available after `check`."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Keys of the tensors that will be read, available after `check`."""
        return keys_in(self._wanted)

    @abstractmethod
    def check(self, skeleton: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Record where the stored tree does not fit the live object; nothing live changes."""

    @abstractmethod
    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Make all new objects; nothing live changes."""

    def apply(self) -> None:  # noqa: B027
        """Change the leaves that need no foreign code. The default is a no-op."""

    def finish(self) -> None:  # noqa: B027
        """Run code that may fail or must come last. The default is a no-op."""


class TreePlan(LoadPlan):
    """A load into a plain dict or list, in place."""

    _merge: Merge

    def check(self, skeleton: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Check that both sides are dicts, lists or deques. Keys that differ become notes."""
        self._wanted = skeleton.value
        problems.notes += skeleton.list_absent_devices(self._component)
        stored, live = (_container_name(one) for one in (self._wanted, self._live))
        if stored != live:
            problems.other.append(f"{self._component}: stored a {stored}, live a {live}")
        elif wishes.selection.is_partial(self._component):
            keep_live(self._wanted, self._live, self._component, wishes.selection)
        self._compare_keys(problems)
        if wishes.resizing:
            wishes.resizing.resize_tree(self._component, self._wanted, self._live, self._specs)
        self._wanted = revive(skeleton, self._live, self._component, problems, stored=self._wanted)
        self.destinations.look_in(self._live)
        self.destinations.match(self._live, self._wanted, self._component, problems)

    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Plan the merge of the stored tree into the live one."""
        layouts = self.destinations.layouts
        self._merge = Merge(tensors, self._specs, claims, self._component, layouts)
        self._merge.refill(self._live, self._wanted)

    def apply(self) -> None:
        """Make the planned changes to the tree."""
        self._merge.commit()

    def _compare_keys(self, problems: Problems) -> None:
        """Record keys that only one of two dicts has, unless the live one is empty."""
        component, stored, live = self._component, self._wanted, self._live
        if not (isinstance(stored, dict) and isinstance(live, dict) and live):
            return
        if removed := [key for key in live if key not in stored]:
            lost = f"{component}: {_join_keys(removed)} not in the checkpoint, removed"
            problems.lost.append(lost)
        if added := [key for key in stored if key not in live]:
            problems.notes.append(f"{component}: {_join_keys(added)} in the checkpoint only, added")


def _container_name(value: Any) -> str:
    kinds = {dict: "dict", DequeItems: "deque", deque: "deque", list: "list"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "other value")


class AttributesPlan(TreePlan):
    """A load into attributes of an object: containers in place, other values are assigned."""

    def __init__(self, component: str, live: Attributes, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__(component, content_of(component, live), specs)
        self._attributes = live
        self._values: dict[str, Any] = {}

    @override
    def _compare_keys(self, problems: Problems) -> None:
        """Record names that only one side has as missing and unexpected leaves."""
        if not isinstance(self._wanted, dict):
            return
        for ours, theirs, found in (
            (self._live, self._wanted, problems.missing),
            (self._wanted, self._live, problems.unexpected),
        ):
            found += [join_path(self._component, name) for name in ours if name not in theirs]

    @override
    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Plan the merge of each value; try to assign it, and assign the former one again."""
        layouts, live = self.destinations.layouts, self._live
        self._merge = Merge(tensors, self._specs, claims, self._component, layouts)
        known = {name: node for name, node in self._wanted.items() if name in live}
        self._values = {name: self._merge.merge(live[name], node) for name, node in known.items()}
        lifting = Lifting(Fetching(self.destinations.placed(tensors)))
        for name, node in known.items():
            if self._attributes.is_opaque or self._values[name] is not live[name]:
                self._try(name, lifting.lift_tree(node))

    def _try(self, name: str, value: Any) -> None:
        attributes, at = self._attributes, join_path(self._component, name)
        try:
            attributes.assign_value(name, value)
        except Exception as error:
            refused = f"{at}: cannot be assigned ({type(error).__name__}: {error})"
            raise MismatchError("the checkpoint", hint=refused) from error
        finally:
            try:
                attributes.assign_value(name, self._live[name])
            except Exception as error:  # noqa: BLE001 - code of the user
                self.unrestored = (
                    f"{at}: the stored value was assigned in a trial, and the previous value was "
                    f"then refused ({type(error).__name__}: {error})"
                )

    @override
    def finish(self) -> None:
        """Assign the values."""
        for name, value in self._values.items():
            self._attributes.assign_value(name, value)


def _join_keys(keys: list[Any]) -> str:
    # Only keys that are shown are formatted: a live one may have no `repr`.
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(f"{key!r:.40}" for key in keys[:3]) + more


_SEQUENCES = (list, tuple, deque)
_PARTS_OF_SCHEDULERS = frozenset({"lr_lambdas", "_schedulers"})
"""What torch's schedulers that are made of functions or of other schedulers cannot load without."""


def _num_groups(scheduler: Mapping[str, Any]) -> list[int]:
    """Return the numbers of parameter groups of a scheduler's state and of those inside it."""
    own = [len(rates)] if isinstance(rates := scheduler.get("base_lrs"), list) else []
    inner = scheduler.get("_schedulers")
    parts = inner if isinstance(inner, list) else []
    return own + [count for part in parts if isinstance(part, dict) for count in _num_groups(part)]


class ObjectPlan(LoadPlan):
    """A load into an object by its own `load_state_dict`."""

    _value: Any = None
    _is_wanted = True
    _lives: Mapping[int, Tensor] = MappingProxyType({})

    def check(self, skeleton: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Check a scheduler's kind; replace excluded values and enumerations by live ones."""
        self._wanted = skeleton.value
        problems.notes += skeleton.list_absent_devices(self._component)
        if isinstance(self._live, GradScaler) and self._live.is_enabled() is not bool(self._wanted):
            then = "without" if self._live.is_enabled() else "with"
            problems.lost.append(
                f"{self._component}: saved {then} mixed precision, so this scaler "
                "keeps the state that it has"
            )
            self._wanted, self._is_wanted = {}, False
            return
        if isinstance(self._live, LRScheduler) and isinstance(self._wanted, dict):
            # torch's schedulers load any dict unchecked, and fail or compute wrong rates later.
            needed = required_settings(self._live) | _PARTS_OF_SCHEDULERS
            saved = needed.intersection(self._live.state_dict())
            lacks = sorted(saved.difference(self._wanted))
            if lacks:
                kind = type(self._live).__name__
                problems.other.append(
                    f"{self._component}: saved from another kind of scheduler, which has no "
                    f"{', '.join(lacks)} as this {kind} has"
                )
            stored, known = _num_groups(self._wanted), _num_groups(self._live.state_dict())
            if stored != known:
                problems.other.append(
                    f"{self._component}: its optimizer had {max(stored, default=0)} parameter "
                    f"groups when saved, and has {max(known, default=0)}. Edit the scheduler's "
                    "lists, such as base_lrs, in edit_load"
                )
        is_partial = wishes.selection.is_partial(self._component)
        # Without a group there are no DTensors; then no `state_dict` is called for them.
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        needs_live = skeleton.has_enums or skeleton.has_subclasses or is_partial
        needs_live |= bool(wishes.resizing)
        if not needs_live and (is_alone or not self._specs):
            return
        live = self._live.state_dict()
        if is_partial:
            self._is_wanted = keep_live(self._wanted, live, self._component, wishes.selection)
        if wishes.resizing:
            is_optimizer = isinstance(self._live, Optimizer)
            wishes.resizing.resize_tree(
                self._component, self._wanted, live, self._specs, is_optimizer=is_optimizer
            )
        self._wanted = revive(skeleton, live, self._component, problems, stored=self._wanted)
        self.destinations.look_in(live)
        self.destinations.match(live, self._wanted, self._component, problems)
        if skeleton.has_subclasses:
            self._lives = match_subclasses(
                self._component, self._wanted, live, self._specs, problems
            )

    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Make the state_dict; check it by `check_state_dict`, which may give notes, or a try."""
        placed = Fetching(self.destinations.placed(tensors))
        self._value = Lifting(placed, self._lives).lift_tree(self._wanted)
        if not self._is_wanted:
            return
        check = getattr(self._live, "check_state_dict", None)
        if callable(check):
            notes = check(self._value)
            for note in notes if isinstance(notes, list) else ():
                claims.add_note(f"{self._component}: {note}")
        elif not hasattr(self._live, "__iter__"):  # a source of data, which may start workers
            self._try({key: placed[key].clone() for key in keys_in(self._wanted)}, claims)

    def _try(self, tensors: Mapping[str, Tensor], claims: Claims) -> None:
        """Load a copy of the stored state; put the object's own back, by attributes too."""
        live, kind = self._live, type(self._live).__name__
        attributes = _Snapshot(live) if hasattr(live, "__dict__") else None
        try:
            before = copy.deepcopy(live.state_dict())
        except Exception:  # noqa: BLE001 - code of others
            return  # what has no state yet, or none that can be copied, could not be put back
        try:
            if cast := self._load(Lifting(tensors, self._lives).lift_tree(self._wanted)):
                claims.add_note(f"{shortened(cast, 10)}: {kind}.load_state_dict {CASTS}")
        except Exception as error:
            refused = (
                f"{self._component}: {kind}.load_state_dict refuses the stored state "
                f"({type(error).__name__}: {error})"
            )
            raise MismatchError("the checkpoint", hint=refused) from error
        finally:
            try:
                live.load_state_dict(before)
            except Exception as error:  # noqa: BLE001 - code of others
                # Many refuse the state that they have before they are filled.
                self.unrestored = (
                    f"{self._component}: it loaded part of the stored state in a trial, and "
                    f"{kind}.load_state_dict then refused the previous state "
                    f"({type(error).__name__}: {error})"
                )
            if attributes is not None:
                attributes.restore_attributes()

    def finish(self) -> None:
        """Call `load_state_dict`, if anything of the state is selected."""
        if self._is_wanted:
            self._load(self._value)

    def _load(self, value: Any) -> list[str]:
        """Call `load_state_dict`; return paths of optimizer state that has another dtype then.

        torch's casts all state to the dtype of its parameter, also when a subclass or a wrapper
        calls it. The dicts in its `state_dict` are live: the stored tensors are put back there.
        """
        self._live.load_state_dict(value)
        if not any(map(_is_of_optimizer, nodes_in(value))):
            return []
        casts = [*_find_casts(self._live.state_dict(), value, self._component)]
        for _, container, key, tensor in casts:
            if not isinstance(container, tuple):
                container[key] = tensor.to(container[key].device)
        left = _find_casts(self._live.state_dict(), value, self._component) if casts else ()
        return [path for path, *_ in left]


def _is_of_optimizer(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("param_groups"), list) and "state" in node


def _find_casts(
    live: Any, stored: Any, path: str, *, is_state: bool = False
) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Yield (path, live container, key, stored tensor) of state in another dtype than stored."""
    if _is_of_optimizer(live) and _is_of_optimizer(stored):
        # Fused kernels read state at the size of the parameter, unchecked.
        is_state = not any(group.get("fused") for group in live["param_groups"])
    if isinstance(live, dict) and isinstance(stored, dict):
        keys: Iterable[Any] = [key for key in stored if key in live]
    elif isinstance(live, _SEQUENCES) and isinstance(stored, _SEQUENCES):
        keys = range(min(len(live), len(stored)))
    else:
        return
    for key in keys:
        ours, theirs = live[key], stored[key]
        if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
            at = join_path(path, key)
            yield from _find_casts(ours, theirs, at, is_state=is_state and key != "param_groups")
        elif is_state and ours.dtype != theirs.dtype and key != "step":
            yield join_path(path, key), live, key, theirs


class GeneratorPlan(LoadPlan):
    """A load into one generator."""

    finish_order = 1
    _members: Any = None

    def check(self, skeleton: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Check that kind, device type and sizes of the stored state are those of the generator."""
        if not isinstance(skeleton.value, GeneratorState):
            raise FormatError(f"{self._component}: not the state of a generator")
        self._wanted = skeleton.value
        reason = generators.misfit(self._live, self._wanted, self._specs)
        if reason is not None:
            problems.other.append(f"{self._component}: {reason}")
        elif lost := generators.inexact(self._live, self._wanted):
            problems.notes.append(f"{self._component}: {lost}")

    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Validate the state by setting it on a scratch generator."""
        self._members = Lifting(Fetching(tensors)).lift_members(self._wanted.members)
        try:
            generators.write_generator_state(generators.scratch(self._live), self._members)
        except (ValueError, TypeError, RuntimeError, OverflowError) as err:
            what = f"{self._component}: the stored generator state is not valid"
            raise FormatError(f"{what}: {err}") from err

    def finish(self) -> None:
        """Set the state of the generator."""
        generators.write_generator_state(self._live, self._members)


class RngPlan(LoadPlan):
    """A load into the global generators that were stored and exist in this process."""

    finish_order = 2

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__(RNG, None, specs)
        self._plans: list[GeneratorPlan] = []

    def check(self, skeleton: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Check each stored generator; note absent ones, and other versions of the libraries."""
        stored = skeleton.value
        if not isinstance(stored, dict):
            raise FormatError(f"{RNG}: not the tree of the global generators")
        globals_ = generators.global_generators(initialise=bool(stored.get("devices")))
        live, nodes = _flat(globals_), _flat(stored)
        for name, node in nodes.items():
            if wishes.selection.is_excluded(RNG, name):
                continue
            if name not in live:
                problems.notes.append(f"{RNG}.{name}: no such generator here, not restored")
                continue
            plan = GeneratorPlan(f"{RNG}.{name}", live[name], self._specs)
            plan.check(Skeleton(value=node), wishes, problems)
            self._plans.append(plan)
        for name in live.keys() - nodes.keys():
            if not wishes.selection.is_excluded(RNG, name):
                problems.notes.append(f"{RNG}.{name}: not in the checkpoint, unchanged")
        problems.notes += _other_versions(stored.get("versions"), globals_["versions"])

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for plan in self._plans for key in plan.needed))

    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Validate every state by setting it on a scratch generator."""
        for plan in self._plans:
            plan.prepare(tensors, claims)

    def finish(self) -> None:
        """Set the states of all generators."""
        for plan in self._plans:
            plan.finish()


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a tree of global generators: `{"torch": …, "devices.cuda.0": …}`."""
    flat = {name: tree[name] for name in ("python", "numpy", "torch") if name in tree}
    devices = tree.get("devices", {})
    for kind, states in devices.items() if isinstance(devices, dict) else ():
        for i, state in enumerate(states if isinstance(states, list) else ()):
            flat[f"devices.{kind}.{i}"] = state
    return flat


def _other_versions(stored: Any, live: Mapping[str, str]) -> list[str]:
    if not isinstance(stored, dict):
        return []
    return [
        f"{RNG}: saved under {name} {stored[name]!s:.40}, this is {live[name]}: "
        "the same state may give other numbers"
        for name in live
        if name in stored and stored[name] != live[name]
    ]


_CONTAINERS = (dict, list, set)
_MAX_DEPTH = 4
"""Containers inside of so many others are put back."""


@contextmanager
def undo_changes(modules: Iterable[nn.Module], *, written: Iterable[nn.Module]) -> Iterator[None]:
    """Undo changes of the block to `modules` and `written` tensors, except their versions."""
    inners = list({id(inner): inner for inner in modules}.values())
    with torch.no_grad(), ExitStack() as undoing:
        for inner in inners:
            undoing.callback(_Snapshot(inner).restore_attributes)
        for tensor in _tensors_of(inners):
            if not is_lazy(tensor) and not tensor.is_inference():
                undoing.enter_context(_unsafe_preserve_version_counter(tensor))
        for tensor in _tensors_of(written):
            undoing.callback(_Values(tensor).restore_values)
        yield


@contextmanager
def undo_attributes(owner: object) -> Iterator[None]:
    """Undo changes of the block to an object's attributes: values, containers and tensors."""
    with torch.no_grad(), ExitStack() as undoing:
        undoing.callback(_Snapshot(owner).restore_attributes)
        for one in vars(owner).values():
            if isinstance(one, Tensor) and not is_subclass(one):
                undoing.enter_context(_unsafe_preserve_version_counter(one))
                undoing.callback(_Values(one).restore_values)
        yield


def _tensors_of(modules: Iterable[nn.Module]) -> Collection[Tensor]:
    """Collect the parameters, buffers and other tensors of modules, or their parts, each once."""
    found: dict[int, Tensor] = {}
    for inner in modules:
        attributes = vars(inner)
        for group in (attributes.get("_parameters"), attributes.get("_buffers"), attributes):
            for one in group.values() if isinstance(group, dict) else ():
                if isinstance(one, Tensor):
                    parts = plain_parts(one) if is_subclass(one) else [one]
                    found |= {id(part): part for part in parts}
    return found.values()


class _Snapshot:
    """The attributes of one object, and the content of containers in them."""

    def __init__(self, owner: object) -> None:
        """Note them as they are."""
        self._home = vars(owner)
        self._before = dict(self._home)
        found: dict[int, Any] = {}
        for value in self._before.values():
            _find_containers(value, found, 0)
        self._contents = [(value, value.copy()) for value in found.values()]

    def restore_attributes(self) -> None:
        """Undo all changes since."""
        for container, content in self._contents:
            _refill(container, content)
        _refill(self._home, self._before)


def _find_containers(value: Any, found: dict[int, Any], depth: int) -> None:
    if not isinstance(value, _CONTAINERS) or id(value) in found or depth > _MAX_DEPTH:
        return
    found[id(value)] = value
    if not isinstance(value, set):
        for item in value.values() if isinstance(value, dict) else value:
            _find_containers(item, found, depth + 1)


def _refill(container: Any, content: Any) -> None:
    """Give a container its old items, without touching one that still has them."""
    if isinstance(container, dict):
        is_same = [*map(id, container.values())] == [*map(id, content.values())]
        is_same = is_same and [*container] == [*content]
    elif isinstance(container, list):
        is_same = [*map(id, container)] == [*map(id, content)]
    else:
        is_same = container == content
    if not is_same:
        container.clear()
        (container.extend if isinstance(container, list) else container.update)(content)


class _Values:
    """The memory and the values of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._kind = type(tensor)
        self._is_empty = is_lazy(tensor) or tensor.is_meta
        if not self._is_empty:
            self._memory = local_of(tensor).detach()
            self._values = self._memory.to("cpu", copy=True)
            self._needs_grad = tensor.requires_grad

    def restore_values(self) -> None:
        if type(self._tensor) is not self._kind:  # a lazy parameter that was made
            self._tensor.data = torch.empty(0, device=self._tensor.device)
            self._tensor.__class__ = self._kind
        if self._is_empty:
            return
        if local_of(self._tensor) is self._tensor and not self._tensor.is_set_to(self._memory):
            self._tensor.data = self._memory
        self._memory.copy_(self._values)
        if self._tensor.requires_grad is not self._needs_grad:
            self._tensor.requires_grad_(self._needs_grad)
