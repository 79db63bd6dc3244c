"""State that training keeps outside of every `state_dict`, found by comparing saves.

Plain attributes of modules, optimizers and other objects are compared: numbers, tensors, arrays,
and containers of these. Values that a forward pass writes anew, such as sizes, losses and attention
maps, change too, and are no state. So only changes count that such values do not show: counters
that grow, changes in place, lists that grow, each in place or twice in a row. Attributes that an
owner names in its `not_state` are not compared.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.state.attributes import Attributes
from holdfast.state.capture.capture import Captured
from holdfast.state.components import cleaner_of, is_of_fsdp, unwrap_module
from holdfast.state.leaves import PLAIN_TYPES, refusal
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
_MAX_ITEMS, _MAX_DEPTH = 64, 2
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

    def note_attributes(self) -> None:
        """Note the attributes again, as a load has changed the state."""
        if self._num_left:
            self._before, self._rising = self._marks(), set()

    def find_uncaptured(self, captured: Captured) -> list[str]:
        """Name the attributes that are state, and that no captured component holds."""
        if not self._num_left:
            return []
        self._num_left -= 1
        before, now = self._before, self._marks()
        saved = captured.addresses
        names = [
            name
            for name, mark in now.items()
            if self._is_state(name, before.get(name), mark)
            and not _is_saved(name, mark, captured, saved)
        ]
        self._before = now
        if names:
            self._num_left = 0
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
        if now.kind in ("tensor", "array"):
            # In place: a cache is made anew.
            return bool(before.value[:2] == now.value[:2])
        has_risen, had_risen = bool(now.value > before.value), name in self._rising
        (self._rising.add if has_risen else self._rising.discard)(name)
        if now.kind == "length":
            return has_risen and (had_risen or before.is_home_of(now))
        # From 0, or twice in a row: a size that a forward pass notes goes up and down.
        is_first = before.value == 0 and words.isdisjoint(_OF_SIZES)
        return type(now.value) is int and has_risen and (had_risen or is_first)

    def _marks(self) -> dict[str, _Mark]:
        values = self._state.values()
        kept = _Kept({*map(id, values)}, [one for one in values if isinstance(one, Attributes)])
        return {
            name: mark
            for component, value in self._state.items()
            for name, mark in _marks_of(component, value, kept)
        }


class _Kept(NamedTuple):
    """Components of the state: their ids, and attributes of other objects."""

    ids: Collection[int]
    attributes: Collection[Attributes]

    def holds(self, owner: object, name: str, value: object) -> bool:
        """Whether an attribute is or has a component."""
        return id(value) in self.ids or any(one.holds(owner, name) for one in self.attributes)


def _marks_of(component: str, value: Any, kept: _Kept) -> Iterator[tuple[str, _Mark]]:
    if isinstance(value, nn.Module):
        module = unwrap_module(value)
        cleaner = cleaner_of(module)
        for raw, inner in module.named_modules():
            if not _saves_more(inner):
                path = f"{component}.{cleaner.clean(raw)}".rstrip(".")
                yield from _attributes(path, inner, kept, is_sure=False)
    elif isinstance(value, Optimizer):
        if not type(value).__module__.startswith("torch."):
            yield from _attributes(component, value, kept, is_sure=True)
    elif hasattr(value, "state_dict") and not hasattr(value, "__iter__") and _is_of_user(value):
        yield from _attributes(component, value, kept, is_sure=False)


def _is_of_user(value: Any) -> bool:
    kinds = type(value).__mro__
    return not any(kind.__module__.startswith((*_LIBRARIES, *_FRAMEWORKS)) for kind in kinds)


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
    declared = _declared(owner)
    for name, value in getattr(owner, "__dict__", {}).items():
        is_private = is_framework and name.startswith("_")
        if name in _OF_TORCH or name in declared or is_private or kept.holds(owner, name, value):
            continue
        yield from _marks_in(f"{path}.{name}", value, is_sure, 0)


def _declared(owner: Any) -> Collection[str]:
    """Return the names in the owner's `not_state`: attributes that are computed again."""
    names = getattr(owner, "not_state", ())
    if isinstance(names, str) or not isinstance(names, Collection):
        raise UsageError(
            f"{type(owner).__name__}.not_state={shown(names)}: must be a tuple of names of "
            'attributes, such as ("step", "scratch")'
        )
    return names


def _marks_in(path: str, value: Any, is_sure: bool, depth: int) -> Iterator[tuple[str, _Mark]]:
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
            yield (
                path,
                _Mark("array", (value.ctypes.data, value.shape, _checksum_array(value)), is_sure),
            )
    elif isinstance(value, Optimizer):
        slots = [slot for held in value.state.values() for slot in _tensors_in(held)]
        for number, slot in enumerate(slots[:1]):
            yield (
                f"{path}.state.{number}",
                _Mark("tensor", (slot.data_ptr(), slot.shape, slot._version), True),
            )
    elif kind in (list, tuple, deque, set, frozenset, dict) and depth < _MAX_DEPTH:
        if kind is not dict:
            mark = _Mark("length", len(value), is_sure, value if not value else id(value))
            yield f"{path} (its length)", mark
        if kind in (set, frozenset) or len(value) > _MAX_ITEMS:
            return
        for name, item in value.items() if kind is dict else enumerate(value):
            shown = name if isinstance(name, str | int) else type(name).__name__
            yield from _marks_in(f"{path}.{shown}", item, is_sure, depth + 1)


def _words(name: str) -> set[str]:
    return set(name.rpartition(".")[2].removesuffix(" (its length)").lower().split("_"))


def _tensors_in(held: Any) -> list[Tensor]:
    values = held.values() if isinstance(held, Mapping) else ()
    return [one for one in values if isinstance(one, Tensor) and one.dim()]


def _checksum_array(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(array.reshape(-1)[: _MAX_DIGESTED_NBYTES // max(1, array.itemsize)].tobytes())


def _is_saved(name: str, mark: _Mark, captured: Captured, saved: Collection[int]) -> bool:
    """Whether a component holds an attribute: by its memory or name, or in an object its value."""
    if mark.kind == "tensor" and mark.value[0] in saved:
        return True
    component, _, rest = name.partition(".")
    part = captured.components.get(component)
    attribute = rest.split(".")[0].split(" ")[0].lstrip("_")
    # Of any component: a trainer's hook may save the attributes of a module.
    trees = [held.tree for held in captured.components.values()]
    if part is None or any(f'"{attribute}"'.encode() in tree for tree in trees):
        return True
    if part.kind != "object":
        return False
    if mark.kind in ("tensor", "array"):
        return any(spec.shape == tuple(mark.value[1]) for spec in part.specs)
    return (
        re.search(rf"(?<![\d.]){re.escape(repr(mark.value))}(?![\d.])".encode(), part.tree)
        is not None
    )


def format_outside_state(names: Sequence[str]) -> str:
    """Format the warning of state outside of the components."""
    return (
        f"attributes that change in training are in no component: {shortened(names, 10)}. "
        "A resume begins with their first values. Put them into the state, as in "
        'holdfast.Attributes(model, "name"), make them buffers, or save them with '
        "get_extra_state() or state_dict(). "
        "Name those that the script computes again in an attribute of their owner: "
        'not_state = ("name", …)'
    )
