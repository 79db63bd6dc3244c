"""Stored tensor subclasses and live ones: they are compared, and their inner tensors paired.

A stored subclass goes only into a live tensor of the same class, whose context is the stored one.
No class is imported or built by a name in a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.format.nodes import EnumValue, SubclassRef, TensorRef
from holdfast.format.objects import join_path, type_name
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import inner_tensors, is_subclass, plain_name, refusal
from holdfast.state.probing import undisturbed_generators
from holdfast.state.selection import Problems
from holdfast.state.trees import decoded_context

InnerPair: TypeAlias = tuple[str, Tensor, TensorRef]
"""Path of an inner tensor, the live one, and the reference of the stored one for it."""
_OF_GROUPS = frozenset({"params", "param_names"})


def match_inner(
    path: str, stored: object, live: object, specs: Mapping[str, TensorSpec], problems: Problems
) -> list[InnerPair]:
    """Pair the inner tensors of a stored subclass with live ones; record all that differs."""
    if not isinstance(stored, SubclassRef):
        problems.other.append(
            f"{path}: stored as a plain tensor, live it is {_describe_live(live)}"
        )
        return []
    if not isinstance(live, Tensor) or not is_subclass(live):
        problems.other.append(
            f"{path}: stored as the tensor subclass {stored.type[:80]}, live it is "
            f"{_describe_live(live)}. Convert the live model in the same way before the load"
        )
        return []
    reason = refusal(live)
    if reason is not None:
        problems.offenders.append((path, reason))
        return []
    if class_name(stored.type) != class_name(type_name(type(live))):
        problems.other.append(
            f"{path}: stored as {stored.type[:80]}, live it is {_describe_live(live)}"
        )
        return []
    if stored.shape != tuple(live.shape):
        problems.wrong_shape.append(f"{path}: stored {[*stored.shape]}, live {[*live.shape]}")
        return []
    if stored.dtype != plain_name(live.dtype):
        problems.wrong_dtype.append(f"{path}: stored {stored.dtype}, live {plain_name(live.dtype)}")
        return []
    try:
        differs = compare_contexts(stored.context, decoded_context(live))
    except ValueError as err:
        problems.offenders.append((path, f"tensor subclass {type_name(type(live))}: {err}"))
        return []
    inner = inner_tensors(live)
    if differs is None and stored.tensors.keys() != inner.keys():
        names = [", ".join(sorted(one))[:80] for one in (stored.tensors, inner)]
        differs = f"its inner tensors: stored {names[0]}, live {names[1]}"
    if differs is not None:
        problems.other.append(f"{path}: {differs}")
        return []
    pairs: list[InnerPair] = []
    for name, part in stored.tensors.items():
        at, like = join_path(path, name), inner[name]
        if isinstance(part, TensorRef) and not is_subclass(like):
            problems.check_spec(at, specs[part.key], like)
            pairs.append((at, like, part))
        else:
            pairs += match_inner(at, part, like, specs, problems)
    return pairs


def _describe_live(live: object) -> str:
    if not isinstance(live, Tensor):
        return "no tensor" if live is not None else "absent"
    return type_name(type(live)) if is_subclass(live) else "a plain tensor"


def make_slots(optimizer: Optimizer, parameter: Tensor) -> dict[Any, Any]:
    """Return the state that an optimizer makes for a parameter, by a step of copies of both.

    The gradient is zero. Hooks, and whatever else wraps `step`, do not run, and the global
    generators are restored. Errors of the optimizer are raised as they are.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    trial: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # an instance has one if a scheduler or a scaler wraps it
            setattr(trial, name, type(value)() if name.endswith("_hooks") else value)
    with torch.no_grad(), undisturbed_generators():
        clone = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        clone.grad = torch.zeros_like(clone)
        options = {name: deepcopy(one) for name, one in group.items() if name not in _OF_GROUPS}
        trial.param_groups = [{"params": [clone], **options}]
        trial.state = defaultdict(dict)
        step: Any = type(optimizer).step
        # torch wraps the step of each class in a function that runs the hooks of all optimizers.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        with torch.compiler.set_stance("force_eager"):
            step(trial)
    made = trial.state.get(clone)
    return made if isinstance(made, dict) else {}


def compare_contexts(stored: Any, live: Any, path: str = "") -> str | None:
    """Return the first member in which two decoded contexts differ, or None.

    Devices may differ: inner tensors are copied to those of the live tensor.
    """
    if isinstance(stored, torch.device) and isinstance(live, torch.device):
        return None
    if isinstance(stored, EnumValue) and isinstance(live, EnumValue):
        is_same = _enum_key(stored) == _enum_key(live)
    elif type(stored) is not type(live):
        is_same = False
    elif isinstance(stored, dict):
        is_same = True
        for key in {**stored, **live}:
            at = join_path(path, key)
            if key not in stored or key not in live:
                return f"its context {at} is only {'live' if key in live else 'stored'}"
            if found := compare_contexts(stored[key], live[key], at):
                return found
    elif isinstance(stored, list | tuple):
        is_same = len(stored) == len(live)
        for number, one in enumerate(stored) if is_same else ():
            if found := compare_contexts(one, live[number], join_path(path, number)):
                return found
    else:
        is_same = repr(stored) == repr(live)  # NaN is the same, and -0.0 is not 0.0
    if is_same:
        return None
    return f"its context{f' {path}' if path else ''}: stored {stored!r:.80}, live {live!r:.80}"


def _enum_key(member: EnumValue) -> tuple[Any, ...]:
    return class_name(member.type), member.name, member.name or repr(member.value)


def class_name(type_: str) -> tuple[str, str]:
    """Return package and name of a class "module:Name": libraries move classes between modules."""
    module, _, name = type_.partition(":")
    return module.partition(".")[0], name
