"""Finds what a training state lacks, such as its optimizer, and leaves that no save can hold.

A parameter that an optimizer has and no component saves is trained, and starts again from its
first value after a resume. Knows no loader but torch's own; `holdfast.data` is above this package.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from torch import Size, Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from holdfast.state import optimizers
from holdfast.state.attributes import content_of
from holdfast.state.collecting import Leaves
from holdfast.state.components import (
    ParameterNames,
    cleaner_of,
    is_of_fsdp,
    kind_of,
    parameter_names,
    unwrap_module,
)
from holdfast.state.generators import is_global
from holdfast.state.leaves import PASSING, plain_parts, refusal, span
from holdfast.state.selection import shortened
from holdfast.state.trees import encoded

Stepped: TypeAlias = "tuple[Optimizer, GradScaler | None]"
"""An optimizer that steps, and the scaler whose `step` calls it."""
_NAMES = ("data", "loader", "sampler")
"""Parts of component names that mark the user's own way to keep a position."""

NO_DATA_POSITION = (
    "the state has no data-loader position: a resumed run gets its data from the beginning again, "
    "unless the loop skips the batches that were used. Make the data a holdfast.data.Loader and "
    "add it to the state; if the loop skips them itself, add a component called "
    '"data", such as {"data": {"batches": 0}} (docs/data.md)'
)
PERSISTENT_WORKERS = (
    "a torch DataLoader with persistent_workers draws a seed from torch's global generator, or one "
    "in the state, once in a process, at its first epoch. A resumed process draws it again, so the "
    "random numbers of the training differ from then on. Give it a generator of its own: "
    "DataLoader(…, generator=torch.Generator())"
)

NO_OPTIMIZER = (
    "the state has a model that is trained, and no optimizer: a resumed run begins with a new one, "
    "without its momenta and step counts. Put it into the state, as in "
    '{"model": model, "optimizer": optimizer}'
)
OMITTED = (
    "used in training, but not in the state: {}. A resumed run starts with new ones. Add them to "
    'the state, as in {{"model": model, "optimizer": optimizer}}. If your script restores one '
    'itself, set its not_state, as in optimizer.not_state = ("state",)'
)


def has_loader_that_draws_once(state: Mapping[str, Any]) -> bool:
    """Whether a torch DataLoader of this process draws only once from a generator that is saved."""
    loaders: list[DataLoader[Any]] = instances_of(DataLoader)
    drawn_from = [each.generator for each in loaders if each.persistent_workers]
    saved = [part for _, inside in _dicts("", dict(state)) for part in inside.values()]
    return any(
        one is None or is_global(one) or any(one is part for part in saved) for one in drawn_from
    )


def find_parameters_outside_modules(
    state: Mapping[str, Any], names: ParameterNames
) -> dict[str, dict[str, Tensor]]:
    """Find optimizers' parameters that no module in `names` has: optimizer → name → parameter."""
    by_optimizer = {}
    for component, value in state.items():
        if isinstance(value, Optimizer):
            live = optimizers.inspect(value, names).parameters
            lost = {name: p for name, p in live.items() if names.find_parameter(p) is None}
            if lost:
                by_optimizer[component] = lost
    return by_optimizer


def select_unsaved(
    parameters: Mapping[str, Mapping[str, Tensor]], captured: Iterable[Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Select the `parameters` whose memory is in none of the captured tensors."""
    if not parameters:
        return {}
    spans = [_get_addresses(tensor) for tensor in captured]
    left = {
        component: {
            name: parameter for name, parameter in lost.items() if not _is_within(parameter, spans)
        }
        for component, lost in parameters.items()
    }
    return {component: lost for component, lost in left.items() if lost}


def describe_parameters(
    parameters: Mapping[str, Mapping[str, Tensor]], known: Mapping[str, nn.Module] | None = None
) -> str:
    """Format parameters for a message: by name in the `known` modules, else in the optimizer."""
    names = parameter_names((known or {}).items())
    shown = [
        f"{_called(component, name, names.find_parameter(parameter))} {_shape(parameter)}"
        for component, lost in parameters.items()
        for name, parameter in lost.items()
    ]
    return shortened(shown, 10)


def _called(component: str, name: str, home: tuple[str, str] | None) -> str:
    return f"{component}: {name}" if home is None else f"{component}: {home[0]}.{home[1]}"


def _shape(parameter: Tensor) -> str:
    return "(not made yet)" if is_lazy(parameter) else str(list(parameter.shape))


def _get_addresses(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and after its last one."""
    first, stop = span(tensor)
    address = tensor.data_ptr()
    return address, address + stop - first


def _is_within(parameter: Tensor, spans: Iterable[tuple[int, int]]) -> bool:
    if is_lazy(parameter):
        return False
    spans = [*spans]
    return all(
        start == stop or any(first <= start and stop <= last for first, last in spans)
        for start, stop in map(_get_addresses, plain_parts(parameter))
    )


def lacks_optimizer(state: Mapping[str, Any]) -> bool:
    """Whether a state trains, as its other parts show, and nothing may hold an optimizer."""
    others = [value for value in state.values() if not isinstance(value, nn.Module)]
    stateful = [value for value in others if hasattr(value, "state_dict")]
    models = (value for value in state.values() if isinstance(value, nn.Module))
    return (
        any(parameter.requires_grad for model in models for parameter in model.parameters())
        and bool(stateful)
        and all(isinstance(v, LRScheduler | GradScaler) or _is_position(v) for v in stateful)
    )


def list_omitted_classes(
    state: Mapping[str, Any],
    stepped: Iterable[Stepped],
    saved: Collection[int],
    averages: Iterable[AveragedModel] = (),
) -> list[str]:
    """Name the classes of optimizers, schedulers and scalers that train a state and are not in it.

    Args:
        state: the components. An object of another class may hold anything.
        stepped: optimizers that step, each with the scaler that calls it.
        saved: addresses of the saved tensors.
        averages: averages of its models that were updated lately, and have no saved tensor.
    """
    values = [*state.values()]
    known = nn.Module | Optimizer | LRScheduler | GradScaler
    others = [value for value in values if not (isinstance(value, known) or _is_position(value))]
    if any(hasattr(value, "state_dict") for value in others):
        return []
    dicts = list(_dicts("", dict(state)))
    used: list[Any] = [*averages]
    for optimizer, scaler in stepped:
        if not _is_any_at(
            saved, (one for group in optimizer.param_groups for one in group["params"])
        ):
            continue
        held = [one for one in optimizer.state.values() if isinstance(one, dict)]
        tensors = [slot for one in held for slot in one.values() if isinstance(slot, Tensor)]
        if tensors and not _is_any_at(saved, tensors):
            used.append(optimizer)
        if scaler is not None and scaler.is_enabled():
            used.append(scaler)
        has_schedule = any("sched" in name for name, _ in dicts)
        has_schedule |= any(isinstance(v, LRScheduler) and v.optimizer is optimizer for v in values)
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not has_schedule:
            schedulers: list[LRScheduler] = instances_of(LRScheduler)
            used += [one for one in schedulers if one.optimizer is optimizer and one.last_epoch]
    inside = {id(value) for value in values}
    for owner in values:
        parts = owner.modules() if isinstance(owner, nn.Module) else [owner]
        if not isinstance(owner, LRScheduler):
            inside.update(id(v) for part in parts for v in getattr(part, "__dict__", {}).values())
    lost = [one for one in used if id(one) not in inside and not getattr(one, "not_state", ())]
    return sorted({type(one).__name__ for one in lost if not _is_kept(one, dicts)})


def unsaved_averages(state: Mapping[str, Any], saved: Collection[int]) -> dict[AveragedModel, int]:
    """Find averages of a state's models without a saved tensor, in all live objects."""
    models = [unwrap_module(one) for one in state.values() if isinstance(one, nn.Module)]
    shapes = [_shapes(model) for model in models]
    averages: list[AveragedModel] = instances_of(AveragedModel)
    return {
        one: int(one.n_averaged)
        for one in averages
        if _shapes(unwrap_module(one.module)) in shapes and not _is_any_at(saved, one.parameters())
    }


def _shapes(module: nn.Module) -> dict[str, Size]:
    named = module.named_parameters()
    return {name: parameter.shape for name, parameter in named if not is_lazy(parameter)}


def _dicts(name: str, value: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield a value and the dicts inside it, each with its key."""
    if isinstance(value, dict):
        yield name, value
        for key, part in value.items():
            yield from _dicts(str(key), part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _dicts(name, part)


def _is_kept(one: Any, dicts: Iterable[tuple[str, dict[Any, Any]]]) -> bool:
    """Whether a dict in the state has the keys of a scheduler's or scaler's `state_dict()`."""
    if isinstance(one, AveragedModel):
        return any("n_averaged" in found for _, found in dicts)
    if not isinstance(one, LRScheduler | GradScaler):
        return False
    keys = one.state_dict().keys()
    return any(found.keys() == keys for _, found in dicts)


def _is_any_at(addresses: Collection[int], tensors: Iterable[Tensor]) -> bool:
    usual = (part for one in tensors if refusal(one) is None for part in plain_parts(one))
    return any((at := tensor.data_ptr()) and at in addresses for tensor in usual)


def _is_position(value: Any) -> bool:
    return hasattr(value, "__iter__") and hasattr(value, "state_dict")


def lacks_data_position(state: Mapping[str, Any]) -> bool:
    """Whether a training's state has no position in data, by name or as an iterable."""
    if not any(isinstance(value, Optimizer) for value in state.values()):
        return False
    return not any(
        any(word in name for word in _NAMES) or _is_position(value)
        for name, value in state.items()
        if not isinstance(value, nn.Module)
    )


T = TypeVar("T")


def instances_of(kind: type[T]) -> list[T]:
    """List the live objects of a class and of its subclasses, in any thread.

    `gc.get_objects()` must not be used for this: it also returns tuples that other threads are
    still building, and CPython fails there with a SystemError or a crash if somebody holds one.
    """
    kinds, new = {kind}, [kind]
    while new:
        found: list[type[Any]] = new.pop().__subclasses__()
        kinds.update(found)
        new += found
    # By type, as `isinstance` would call proxies.
    return [item for item in gc.get_referrers(*kinds) if type(item) in kinds]


def find_unsavable_leaves(state: Mapping[str, Any]) -> list[tuple[str, str]]:
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
            encoded(content_of(component, value), leaves)
        elif isinstance(value, LRScheduler | Optimizer) and _is_of_torch(type(value).state_dict):
            encoded(value.state_dict(), leaves)
        found += [item for item in leaves.offenders if item[1] not in PASSING]
    return found


def count_slots(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Count slots of each optimizer, to notice new ones; takes microseconds."""
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
