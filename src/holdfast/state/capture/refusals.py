"""Finds what no save of a live state could hold, before the first save.

Only values of kinds that torch alone saves are looked at: nothing of the user's code is run, and
no generator moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.state import optimizers
from holdfast.state.collecting import Leaves
from holdfast.state.components import (
    cleaner_of,
    is_of_fsdp,
    kind_of,
    parameter_names,
    unwrap_module,
)
from holdfast.state.leaves import PASSING
from holdfast.state.trees import encoded


def refusals(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List (path, reason) of everything found that can never be saved."""
    modules = ((name, value) for name, value in state.items() if isinstance(value, nn.Module))
    names = parameter_names(modules)
    found = []
    for component, value in state.items():
        leaves = Leaves(component=component, is_shared=True)
        kind = kind_of(value)
        if kind == "optimizer":
            leaves.key_of = optimizers.slot_path
            optimizers.capture_optimizer(optimizers.inspect(value, names), leaves)
        elif kind == "module":
            encoded(_entries_of(value), leaves)
        elif kind == "tree":
            encoded(value, leaves)
        elif isinstance(value, LRScheduler) and _is_of_torch(type(value).state_dict):
            encoded(value.state_dict(), leaves)
        found += [item for item in leaves.offenders if item[1] not in PASSING]
    return found


def slots_stamp(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return what changes when an optimizer has made further slots: counts, in microseconds."""
    return [_num_slots(value) for value in state.values() if isinstance(value, Optimizer)]


def _num_slots(optimizer: Optimizer) -> tuple[int, int]:
    state = vars(optimizer).get("state")
    if not isinstance(state, dict) or not state:
        return 0, 0
    last = next(reversed(state.values()))
    return len(state), len(last) if isinstance(last, dict) else 0


def _entries_of(wrapped: nn.Module) -> dict[str, Tensor]:
    module = unwrap_module(wrapped)
    clean = cleaner_of(module).clean
    return {clean(raw): tensor for raw, tensor in _entries(module, "")}


def _entries(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what the `state_dict` of a module will have, but for modules with code of their own."""
    own = vars(module)
    if not isinstance(own.get("_parameters"), dict) or not _saves_plainly(module):
        return
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and name not in module._non_persistent_buffers_set:
            # As `state_dict` does: what a subclass of Parameter gives may be a plain tensor.
            yield prefix + name, tensor if is_lazy(tensor) else tensor.detach()
    for name, inner in module._modules.items():
        if inner is not None:
            yield from _entries(inner, f"{prefix}{name}.")


def _saves_plainly(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and vars(module).keys().isdisjoint({"state_dict", "_save_to_state_dict"})
        and not module._state_dict_hooks
        and all(map(is_of_fsdp, module._state_dict_pre_hooks.values()))
    )


def _is_of_torch(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith("torch.")
