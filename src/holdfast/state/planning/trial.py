"""Trial runs of the loading code that modules have themselves, which change nothing in the end.

Hooks and overridden methods may refuse a state after they have written half of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from holdfast.state.leaves import local_of

_CONTAINERS = (dict, list, set)
_MAX_DEPTH = 4
"""Containers inside of so many others are put back."""


@contextmanager
def undo_changes(modules: Iterable[nn.Module], *, written: Iterable[nn.Module]) -> Iterator[None]:
    """Undo all changes that the block makes to attributes of `modules` and tensors of `written`.

    Versions of tensors stay, so that a
    backward pass that is under way does not fail.
    """
    inners = list({id(inner): inner for inner in modules}.values())
    with torch.no_grad(), ExitStack() as undoing:
        for inner in inners:
            undoing.callback(Attributes(inner).restore_attributes)
        for tensor in _tensors_of(inners):
            if not is_lazy(tensor) and not tensor.is_inference():
                undoing.enter_context(_unsafe_preserve_version_counter(tensor))
        for tensor in _tensors_of(written):
            undoing.callback(_Values(tensor).restore_values)
        yield


def _tensors_of(modules: Iterable[nn.Module]) -> Collection[Tensor]:
    """Collect the parameters, buffers and other tensors of modules, each once."""
    found: dict[int, Tensor] = {}
    for inner in modules:
        attributes = vars(inner)
        for group in (attributes.get("_parameters"), attributes.get("_buffers"), attributes):
            if isinstance(group, dict):
                found |= {id(one): one for one in group.values() if isinstance(one, Tensor)}
    return found.values()


class Attributes:
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
