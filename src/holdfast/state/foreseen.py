"""Prediction of a module's `state_dict` without calling it.

`state_dict` calls two functions of every submodule, which is most of the cost of a capture. Where
only torch's own code decides the result, reading the same attributes is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter

from holdfast.state.names import unwrap

_TENSORS = frozenset({Tensor, Parameter})
_DECIDING = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_modules",
    "_named_members",
)
_SHADOWED = frozenset({*_DECIDING, "_version"})
_TORCHS = vars(nn.modules.module)
_CONTAINERS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Predicted entries of a module's `state_dict`."""

    outline: list[Any]
    """Types, names, versions and ids of parameters, which decide the names and versions of the
    entries. Holds no tensors."""

    tensors: list[Tensor]
    """Parameters and persistent buffers, in the order of the entries."""

    def is_right(self, entries: Sequence[Any]) -> bool:
        """Whether `entries`, from `state_dict`, are the predicted ones."""
        pairs = list(zip(entries, self.tensors, strict=False))
        is_whole = len(entries) == len(self.tensors)
        return is_whole and all(type(a) is Tensor and a.is_set_to(b) for a, b in pairs)


def foresee(wrapped: nn.Module) -> Foreseen | None:
    """Predict the result of `state_dict`; None where code other than torch's affects it."""
    look = _Look()
    if not look.at(unwrap(wrapped)):
        return None
    look.outline += look.kinds.values()
    tensors = [entry for entry in look.entries if entry is not None]
    if not all(map(_is_plain, look.kinds)) or not _TENSORS.issuperset(map(type, tensors)):
        return None
    return Foreseen(outline=look.outline, tensors=tensors)


class _Look:
    def __init__(self) -> None:
        self.outline: list[Any] = []
        self.entries: list[Tensor | None] = []
        self.kinds: dict[type[nn.Module], int] = {}
        """Types of modules -> versions of what they save."""

    def at(self, module: nn.Module | None) -> bool:
        """Record a module and its submodules; False if one of them is not plain."""
        if module is None:
            self.outline.append(None)
            return True
        own, kind = module.__dict__, type(module)
        parameters, buffers, children = map(own.get, _CONTAINERS)
        if not (type(parameters) is type(buffers) is type(children) is dict):
            return False  # a scripted module's are made anew each time
        if own.get("_state_dict_hooks") or own.get("_state_dict_pre_hooks"):
            return False
        if not own.keys().isdisjoint(_SHADOWED):
            return False
        self.kinds[kind] = kind._version
        self.outline += (kind, tuple(parameters), tuple(children))
        if parameters:
            self.outline += map(id, parameters.values())
            self.entries += parameters.values()
        if buffers:
            self._note_buffers(buffers, own.get("_non_persistent_buffers_set", ()))
        return all(map(self.at, children.values()))

    def _note_buffers(
        self, buffers: Mapping[str, Tensor | None], not_kept: Collection[str]
    ) -> None:
        """Record buffers without their ids, as a step may replace them by others."""
        kept = {name: value for name, value in buffers.items() if name not in not_kept}
        self.outline += ((name, value is None) for name, value in kept.items())
        self.entries += kept.values()


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether a class has torch's own methods behind `state_dict`: not overridden or patched."""
    deciding = (getattr(kind, name) for name in _DECIDING)
    return all(getattr(one, "__globals__", None) is _TORCHS for one in deciding)
