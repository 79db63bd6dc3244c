"""State that training keeps outside of every `state_dict`, found by comparing saves.

Plain attributes of modules, optimizers and other objects are compared: numbers, tensors, arrays,
random generators, and containers, functions and objects that hold these. Values that a forward
pass writes anew, such as sizes, losses and attention maps, change too, and are no state. So only
changes count that such values do not show: counters that grow, numbers in equal steps, changes in
place, lists that grow, each in place or twice in a row. Attributes that an owner names in its
`not_state` are not compared.
"""

from __future__ import annotations

import dis
import inspect
import math
import re
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.state.attributes import Attributes
from holdfast.state.capture.capture import Captured
from holdfast.state.components import cleaner_of, is_of_fsdp, unwrap_module
from holdfast.state.generators import is_global, kind_of, read_generator_state
from holdfast.state.leaves import PLAIN_TYPES, refusal
from holdfast.state.probing import digest_sample
from holdfast.state.selection import shortened

NUM_COMPARISONS = 4
"""Saves at which attributes are compared: state changes from the first steps on."""

_LIBRARIES = ("torch.", "holdfast.")
_FRAMEWORKS = ("transformers.", "lightning.", "pytorch_lightning.", "accelerate.", "torchmetrics.")
_OF_TORCH = frozenset({*vars(nn.Module())}) | {
    *("defaults", "state", "param_groups", "grad_scale", "found_inf", "step"),
    *("_step_count", "_opt_called", "_zero_grad_profile_name"),
    *("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"),
}
"""Attributes that torch gives to modules and optimizers."""
_OF_SIZES = frozenset(
    {"size", "len", "length", "seq", "batch", "shape", "h", "w", "height", "width"}
)
_OF_MESSAGES = frozenset({"warn", "warned", "logged", "printed"})
"""Words in the names of sizes that a forward pass notes, and of what was said once."""
_NO_STATE = {"bitsandbytes": frozenset({"initialized"})}
"""Attributes of other libraries that each process computes again, by top package."""
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
_MAX_ITEMS, _MAX_DEPTH = 64, 3
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_MAX_DIGESTED_NBYTES = 2**16


@dataclass(frozen=True, slots=True)
class _Mark:
    """Identity and content of an attribute at one time."""

    kind: str
    value: Any
    is_sure: bool
    """Whether each change is one of state: in optimizers, which cache nothing."""
    home: Any = None
    """What tells whether a container is the same one: it if it is empty, else its id."""
    is_apart: bool = False
    """Whether it is in a hook, function or source of data, which no `state_dict` reaches."""

    def is_home_of(self, later: _Mark) -> bool:
        """Whether a container has grown in place since."""
        home = self.home if type(self.home) is int else id(self.home)
        return bool(home == later.home)


class OutsideState:
    """Compares the attributes of a state's objects between saves."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Note the attributes as they are."""
        self._state = state
        self._num_left = NUM_COMPARISONS
        self._before = self._marks()
        self._rising: set[str] = set()
        self._steps: dict[str, tuple[float, float]] = {}
        """Difference and ratio of the last two values of a number."""
        self._trees: list[bytes] = []
        """Trees of the saves so far."""

    def note_attributes(self) -> None:
        """Note the attributes again, as a load has changed the state."""
        if self._num_left:
            self._before, self._rising, self._steps = self._marks(), set(), {}

    def find_uncaptured(self, captured: Captured) -> list[str]:
        """Name the attributes that are state, and that no captured component holds."""
        if not self._num_left:
            return []
        self._num_left -= 1
        before, now = self._before, self._marks()
        saved = captured.addresses
        self._trees += [part.tree for part in captured.components.values()]
        names = [
            name
            for name, mark in now.items()
            if self._is_state(name, before.get(name), mark)
            and not _is_saved(name, mark, captured, saved, self._trees)
        ]
        self._before = now
        if names or not self._num_left:
            self._num_left, self._trees = 0, []
        return names

    def _is_state(self, name: str, before: _Mark | None, now: _Mark) -> bool:
        """Whether an attribute has changed as state does."""
        if before is None:
            return now.is_sure and now.kind == "tensor"
        if before.kind != now.kind or before.value == now.value:
            return False
        if now.is_sure:
            return True
        words = _words(name)
        if now.kind == "flag":
            return words.isdisjoint(_OF_MESSAGES)
        if now.kind == "generator":
            return True
        if now.kind in ("tensor", "array"):
            # In place: a cache is made anew.
            return bool(before.value[:2] == now.value[:2])
        if now.kind == "number" and self._is_in_steps(name, before.value, now.value):
            return True
        has_risen, had_risen = bool(now.value > before.value), name in self._rising
        (self._rising.add if has_risen else self._rising.discard)(name)
        if now.kind == "length":
            return has_risen and (had_risen or before.is_home_of(now))
        # From 0, or twice in a row: a size that a forward pass notes goes up and down.
        is_first = before.value == 0 and words.isdisjoint(_OF_SIZES)
        return type(now.value) is int and has_risen and (had_risen or is_first)

    def _is_in_steps(self, name: str, before: float, now: float) -> bool:
        """Whether a float has changed twice by the same difference or ratio, as if annealed."""
        step = (now - before, now / before if before else math.nan)
        known, self._steps[name] = self._steps.get(name), step
        return (
            type(now) is float
            and known is not None
            and any(math.isclose(*pair, rel_tol=1e-6) for pair in zip(known, step, strict=True))
        )

    def _marks(self) -> dict[str, _Mark]:
        values = self._state.values()
        kept = _Kept({*map(id, values)}, [one for one in values if isinstance(one, Attributes)])
        found: dict[str, _Mark] = {}
        for component, value in self._state.items():
            try:
                for name, mark in _marks_of(component, value, kept):
                    found[name] = mark
            except UsageError:
                raise
            except Exception:  # noqa: BLE001 - code of others, such as __getattr__ of a proxy
                continue
        return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """Components of the state: their ids, and attributes of other objects."""

    ids: Collection[int]
    attributes: Collection[Attributes]
    seen: set[int] = field(default_factory=set)
    """Ids of objects and functions that were looked into."""

    def holds(self, owner: object, name: str, value: object) -> bool:
        """Whether an attribute is or has a component."""
        return id(value) in self.ids or any(one.holds(owner, name) for one in self.attributes)

    def is_new(self, value: object) -> bool:
        """Whether an object was not looked into, and has no component of the state itself."""
        if id(value) in self.seen or id(value) in self.ids:
            return False
        self.seen.add(id(value))
        is_function = isinstance(value, FunctionType | partial)
        return is_function or not any(id(one) in self.ids for _, one in _members(value))


def _marks_of(component: str, value: Any, kept: _Kept) -> Iterator[tuple[str, _Mark]]:
    if isinstance(value, nn.Module):
        module = unwrap_module(value)
        cleaner = cleaner_of(module)
        for raw, inner in module.named_modules():
            path = f"{component}.{cleaner.clean(raw)}".rstrip(".")
            yield from _marks_apart(path, _hooks(inner), kept)
            if not _saves_more(inner):
                yield from _attributes(path, inner, kept, is_sure=False)
    elif isinstance(value, Optimizer):
        yield from _marks_apart(component, _hooks(value), kept)
        if not type(value).__module__.startswith("torch."):
            yield from _attributes(component, value, kept, is_sure=True)
    elif hasattr(value, "state_dict") and hasattr(value, "__iter__"):
        if _is_of_library(type(value)):
            yield from _marks_apart(component, _sources_of(value), kept)
    elif hasattr(value, "state_dict"):
        if isinstance(value, LRScheduler):
            yield from _marks_apart(component, _functions_of(value), kept)
        if not _is_of_library(type(value)):
            yield from _attributes(component, value, kept, is_sure=False)


def _is_of_library(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "")).startswith((*_LIBRARIES, *_FRAMEWORKS))


def _hooks(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of a module or optimizer."""
    for name in _HOOKS:
        for hook in (getattr(owner, name, None) or {}).values():
            yield f"{name[1:]}.{getattr(hook, '__qualname__', type(hook).__qualname__)}", hook


def _functions_of(scheduler: LRScheduler) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a scheduler: torch saves attributes of other callables only."""
    for number, one in enumerate(getattr(scheduler, "_schedulers", ())):
        yield from ((f"_schedulers.{number}.{name}", found) for name, found in _functions_of(one))
    for number, one in enumerate(getattr(scheduler, "lr_lambdas", ())):
        if isinstance(one, FunctionType | MethodType | partial):
            yield f"lr_lambdas.{number}", one


def _sources_of(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a loader reads and calls in this process, and does not save."""
    for name in ("dataset", "collate_fn"):
        one = getattr(loader, name, None)
        if not hasattr(one, "state_dict"):
            yield name, one


def _marks_apart(
    path: str, values: Iterable[tuple[str, Any]], kept: _Kept
) -> Iterator[tuple[str, _Mark]]:
    for name, value in values:
        for at, mark in _marks_in(f"{path}.{name}", value, kept, is_sure=False):
            yield at, replace(mark, is_apart=True)


def _saves_more(inner: nn.Module) -> bool:
    """Whether a submodule is torch's own, or saves by code of its own."""
    kind = type(inner)
    return (
        kind.__module__.startswith((*_LIBRARIES, *_FRAMEWORKS))
        or kind.get_extra_state is not nn.Module.get_extra_state
        or kind.state_dict is not nn.Module.state_dict
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or bool(inner._state_dict_hooks)
        or not all(map(is_of_fsdp, inner._state_dict_pre_hooks.values()))
    )


def _attributes(
    path: str, owner: Any, kept: _Kept, *, is_sure: bool
) -> Iterator[tuple[str, _Mark]]:
    is_framework = any(kind.__module__.startswith(_FRAMEWORKS) for kind in type(owner).__mro__)
    for name, value in _members(owner):
        is_private = is_framework and name.startswith("_")
        if not (name in _OF_TORCH or is_private or kept.holds(owner, name, value)):
            yield from _marks_in(f"{path}.{name}", value, kept, is_sure=is_sure)


def _members(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function keeps, or an object has in its dict and slots, but `not_state`."""
    if isinstance(owner, FunctionType):
        stored = {one.argval for one in dis.get_instructions(owner) if one.opname == "STORE_DEREF"}
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=False):
            with suppress(ValueError):  # not filled yet
                # A number that the function only reads is a variable of the script.
                if name in stored or not isinstance(cell.cell_contents, int | float):
                    yield name, cell.cell_contents
    elif isinstance(owner, partial):
        yield from (("func", owner.func), ("args", owner.args), ("keywords", owner.keywords))
    else:
        slots = [vars(kind).get("__slots__", ()) for kind in type(owner).__mro__]
        names = {name for some in slots for name in ([some] if isinstance(some, str) else some)}
        found = dict(getattr(owner, "__dict__", {}))
        for name in names:
            with suppress(AttributeError):  # not set; `__getattr__` is not asked
                found[name] = object.__getattribute__(owner, name)
        package = type(owner).__module__.partition(".")[0]
        declared = {*_declared(owner), *_NO_STATE.get(package, ())}
        yield from ((name, one) for name, one in found.items() if name not in declared)


def _declared(owner: Any) -> Collection[str]:
    """Return the names in the owner's `not_state`: attributes that are computed again."""
    # A proxy or a mock may have any name.
    is_given = inspect.getattr_static(owner, "not_state", None) is not None
    names = owner.not_state if is_given else ()
    if isinstance(names, str) or not isinstance(names, Collection):
        raise UsageError(
            f"{type(owner).__name__}.not_state={shown(names)}: must be a tuple of names of "
            'attributes, such as ("step", "scratch")'
        )
    return names


def _marks_in(
    path: str, value: Any, kept: _Kept, *, is_sure: bool, depth: int = 0
) -> Iterator[tuple[str, _Mark]]:
    value = value.item() if isinstance(value, np.number | np.bool_) else value
    # What a script gives to its optimizer to call may hold the batch.
    is_sure = is_sure and not isinstance(value, FunctionType | MethodType | partial)
    value = value.__self__ if isinstance(value, MethodType) else value
    kind = type(value)
    if kind is bool:
        yield path, _Mark("flag", value, is_sure)
    elif kind is int or kind is float:
        yield path, _Mark("number", value, is_sure)
    elif kind in PLAIN_TYPES:
        if value.is_leaf and refusal(value) is None and not value.is_inference():
            yield path, _Mark("tensor", (value.data_ptr(), value.shape, value._version), is_sure)
    elif kind is np.ndarray:
        if value.dtype != object:
            content = (value.ctypes.data, value.shape, _checksum_array(value))
            yield path, _Mark("array", content, is_sure)
    elif isinstance(value, Optimizer):
        slots = [slot for held in value.state.values() for slot in _tensors_in(held)]
        for number, slot in enumerate(slots[:1]):
            content = (slot.data_ptr(), slot.shape, slot._version)
            yield f"{path}.state.{number}", _Mark("tensor", content, True)
    elif kind_of(value) is not None:
        if not is_global(value) and id(value) not in kept.ids:
            state = digest_sample(read_generator_state(value)[1])
            yield path, _Mark("generator", state, is_sure)
    elif isinstance(value, _CONTAINERS) and depth < _MAX_DEPTH:
        if not isinstance(value, dict):
            mark = _Mark("length", len(value), is_sure, value if not value else id(value))
            yield f"{path} (its length)", mark
        if isinstance(value, set | frozenset) or len(value) > _MAX_ITEMS:
            return
        for name, item in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
            shown = name if isinstance(name, str | int) else type(name).__name__
            yield from _marks_in(f"{path}.{shown}", item, kept, is_sure=is_sure, depth=depth + 1)
    elif _is_of_user(value) and depth < _MAX_DEPTH and kept.is_new(value):
        for name, item in _members(value):
            yield from _marks_in(f"{path}.{name}", item, kept, is_sure=is_sure, depth=depth + 1)


def _is_of_user(value: Any) -> bool:
    """Whether a value is an object or a function of a script, with attributes to look into."""
    if isinstance(value, type | ModuleType | nn.Module | Tensor | np.ndarray):
        return False
    home = str(getattr(value, "__module__", "builtins"))
    is_standard = home.partition(".")[0] in sys.stdlib_module_names
    return isinstance(value, partial) or not (is_standard or _is_of_library(value))


def _words(name: str) -> set[str]:
    return set(name.rpartition(".")[2].removesuffix(" (its length)").lower().split("_"))


def _tensors_in(held: Any) -> list[Tensor]:
    values = held.values() if isinstance(held, Mapping) else ()
    return [one for one in values if isinstance(one, Tensor) and one.dim()]


def _checksum_array(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(array.reshape(-1)[: _MAX_DIGESTED_NBYTES // max(1, array.itemsize)].tobytes())


def _is_saved(
    name: str,
    mark: _Mark,
    captured: Captured,
    saved: Collection[int],
    all_trees: Iterable[bytes],
) -> bool:
    """Whether a component holds an attribute: by its memory or name, or in an object its value."""
    if mark.kind == "tensor" and mark.value[0] in saved:
        return True
    if mark.is_apart:
        return False
    component, _, rest = name.partition(".")
    part = captured.components.get(component)
    attribute = rest.split(".")[0].split(" ")[0].lstrip("_")
    # Of any component: a trainer's hook may save the attributes of a module.
    trees = [held.tree for held in captured.components.values()]
    if part is None or any(f'"{attribute}"'.encode() in tree for tree in trees):
        return True
    if type(mark.value) is float:  # such as a rate of the optimizer, also of the step before
        return any(_has_number(tree, mark.value) for tree in all_trees)
    if part.kind != "object":
        return False
    if mark.kind in ("tensor", "array"):
        return any(spec.shape == tuple(mark.value[1]) for spec in part.specs)
    return _has_number(part.tree, mark.value)


def _has_number(tree: bytes, value: Any) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(repr(value))}(?![\d.])".encode(), tree) is not None


def format_outside_state(names: Sequence[str]) -> str:
    """Format the warning of state outside of the components."""
    return (
        f"attributes that change in training are in no component: {shortened(names, 10)}. "
        "A resume begins with their initial values. Put them into the state, as in "
        'holdfast.Attributes(model, "name"), make them buffers, or save them with '
        "get_extra_state() or state_dict(). "
        "Name those that the script computes again in an attribute of their owner: "
        'not_state = ("name", …)'
    )
