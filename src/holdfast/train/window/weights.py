"""Fingerprints of weights, to detect changes: one pass over the weights, no copy.

The bytes of parameters are summed, because torch does not count a write through `.data`. Changes of
optimizers' slots, which only steps change, are detected by their addresses and versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from holdfast.state.capture import capture

_SMALL_NBYTES = 2**20
"""Smaller tensors are copied together and summed with one call."""


class Weights:
    """Fingerprint of a state's modules and optimizers, without the buffers of modules."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        """Compute the fingerprint; other components are ignored."""
        self._components = {
            name: value
            for name, value in components.items()
            if isinstance(value, nn.Module | Optimizer)
        }
        self._marks = {name: _mark(value) for name, value in self._components.items()}

    def changed(self) -> list[str]:
        """List the components that have changed since. Waits for their devices."""
        return [
            name
            for name, value in self._components.items()
            if not _are_equal(self._marks[name], _mark(value))
        ]


def _mark(value: nn.Module | Optimizer) -> list[Any]:
    if isinstance(value, nn.Module):
        return _of_module(value)
    return [_noted(value.param_groups), _noted([*value.state.values()])]


def _of_module(module: nn.Module) -> list[Any]:
    trees = [] if _is_plain(module) else [capture({"module": module}).components["module"].tree]
    return [*trees, *_sums(module.parameters())]


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's state has only tensors."""
    own = nn.Module.get_extra_state
    return all(type(inner).get_extra_state is own for inner in module.modules())


def _noted(value: Any) -> Any:
    """Return a value that stays equal only while no slot and no option changes."""
    if isinstance(value, Tensor):
        version = None if value.is_inference() else value._version
        return (id(value), value.data_ptr(), version)
    if isinstance(value, Mapping):
        # The parameters of a group are covered by the modules.
        return {
            key: [*map(id, item)] if key == "params" else _noted(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_noted(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else id(value)


@torch.no_grad()
def _sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Sum all bytes as 64-bit integers that overflow: exact for any values."""
    sums: list[Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if is_lazy(tensor):
            sums.append(torch.zeros((), dtype=torch.int64))
        elif tensor.nbytes < _SMALL_NBYTES:
            small.setdefault((tensor.device, tensor.dtype), []).append(tensor.reshape(-1))
        else:
            sums += _sum(tensor.reshape(-1))
    for together in small.values():
        sums += _sum(torch.cat(together))
    return sums


def _sum(flat: Tensor) -> list[Tensor]:
    """Sum the words of 8 bytes, and the remaining bytes."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    if flat.data_ptr() % 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = len(data) // 8 * 8
    return [data[:whole].view(torch.int64).sum(), data[whole:].sum(dtype=torch.int64)]


def _are_equal(before: list[Any], now: list[Any]) -> bool:
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(_is_same(*pair) for pair in pairs)


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.device == now.device and torch.equal(before, now)
    return bool(before == now)
