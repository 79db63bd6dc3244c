"""Compares stored tensor subclasses with live ones, and pairs their inner tensors.

A stored subclass is loaded only into a live tensor of the same class with an equal context.
No class is imported or built by a name in a file.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.errors import MismatchError
from holdfast.format.nodes import EnumValue, SubclassRef, TensorRef
from holdfast.format.objects import Refused, join_path, type_name
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import (
    inner_tensors,
    is_dtensor,
    is_subclass,
    local_of,
    plain_name,
    refusal,
)
from holdfast.state.planning.copying import Stored, UnreadTensor, fetched
from holdfast.state.probing import undisturbed_generators
from holdfast.state.selection import Problems
from holdfast.state.shards import LocalShards, shards_of, shards_of_inner
from holdfast.state.trees import decoded_context

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

InnerPair: TypeAlias = tuple[str, Tensor, TensorRef]
"""Path of an inner tensor, the live one, and the reference of the stored one for it."""
_OF_GROUPS = frozenset({"params", "param_names"})


def match_inner(
    path: str,
    stored: object,
    live: object,
    specs: Mapping[str, TensorSpec],
    problems: Problems,
    shards: dict[str, LocalShards],
    outer: DTensor | None = None,
) -> list[InnerPair]:
    """Pair the inner tensors of a stored subclass with live ones; record all that differs.

    The boxes of those in DTensors are added to `shards`. `outer` is the DTensor of the live one.
    """
    outer = live if is_dtensor(live) else outer
    if not isinstance(stored, SubclassRef):
        problems.other.append(f"{path}: stored as a plain tensor, live is {_describe_live(live)}")
        return []
    if not isinstance(live, Tensor) or not is_subclass(local_of(live)):
        advice = "Make one optimizer step, or create it in another way,"
        advice = advice if live is None else "Convert the live model in the same way"
        problems.other.append(
            f"{path}: stored as the tensor subclass {stored.type[:80]}, live is "
            f"{_describe_live(live)}. {advice} before the load"
        )
        return []
    reason = refusal(live)
    if reason is not None:
        problems.offenders.append((path, reason))
        return []
    if class_name(stored.type) != class_name(type_name(type(local_of(live)))):
        problems.other.append(
            f"{path}: stored as {stored.type[:80]}, live is {_describe_live(live)}"
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
        problems.offenders.append((path, f"tensor subclass {_describe_live(live)}: {err}"))
        return []
    inner = inner_tensors(local_of(live))
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
            pairs.append((at, like, part))
            _match_shards(at, specs[part.key], like, outer, problems, shards)
        else:
            pairs += match_inner(at, part, like, specs, problems, shards, outer)
    return pairs


def match_subclasses(
    path: str, stored: Any, live: Any, specs: Mapping[str, TensorSpec], problems: Problems
) -> dict[int, Tensor]:
    """Find the live tensor of each subclass in a tree; returns them by the id of its node."""
    if isinstance(stored, SubclassRef):
        match_inner(path, stored, live, specs, problems, {})
        return {id(stored): live}
    found: dict[int, Tensor] = {}
    if isinstance(stored, dict):
        known = live if isinstance(live, dict) else {}
        items = [(name, one, dict.get(known, name)) for name, one in stored.items()]
    elif isinstance(stored, list | tuple):
        others = [*live] if isinstance(live, list | tuple | deque) else []
        others += [None] * len(stored)
        items = [(at, one, others[at]) for at, one in enumerate(stored)]
    else:
        return {}
    for name, one, other in items:
        found |= match_subclasses(join_path(path, name), one, other, specs, problems)
    return found


def _match_shards(
    path: str,
    spec: TensorSpec,
    live: Tensor,
    outer: DTensor | None,
    problems: Problems,
    shards: dict[str, LocalShards],
) -> None:
    """Record the boxes of an inner tensor, or that it had others when it was saved."""
    found = shards_of(live) if outer is None else shards_of_inner(outer, live)
    size = tuple(local_of(live).shape)
    if isinstance(found, Refused):
        problems.offenders.append((path, found.reason))
        return
    is_same = spec.shape == found.shape
    is_repeated = size and size[0] and spec.shape[1:] == size[1:] and not spec.shape[0] % size[0]
    if is_same and not found.is_whole:
        shards[spec.key] = found
    # `stored_for` compares the parts of a tensor that each rank may have saved for itself.
    problems.check_spec(path, spec, live, any_shape=bool(is_same or is_repeated))


def stored_for(path: str, live: Tensor, tensors: Mapping[str, Stored], ref: TensorRef) -> Stored:
    """Return the stored tensor for an inner one: of equal ones of several ranks the first.

    Raises:
        MismatchError: they are not equal.
    """
    stored = tensors[ref.key]
    sizes, size = (
        (stored.spec if isinstance(stored, UnreadTensor) else stored).shape,
        local_of(live).shape,
    )
    if tuple(sizes) == tuple(size):
        return stored
    of_ranks = fetched(stored).reshape(-1, *size)
    rows = of_ranks.reshape(len(of_ranks), -1).view(torch.uint8)
    if not bool((rows == rows[0]).all()):
        hint = (
            f"{path}: stored {[*sizes]}, live {[*size]}, and the parts differ: resume on "
            f"{len(rows)} ranks if that many saved it, or with the settings of the saved tensor"
        )
        raise MismatchError("the checkpoint", hint=hint)
    return of_ranks[0].clone()


def _describe_live(live: object) -> str:
    if not isinstance(live, Tensor):
        return "no tensor" if live is not None else "absent"
    local = local_of(live)
    return type_name(type(local)) if is_subclass(local) else "a plain tensor"


def make_slots(optimizer: Optimizer, parameter: Tensor) -> dict[Any, Any]:
    """Return the state that an optimizer makes for a parameter, by a step of copies of both.

    The gradient is zero. Hooks, and whatever else wraps `step`, do not run, and the global
    generators are restored. Attributes are shared with the copy: `undo_attributes` undoes changes.
    Errors of the optimizer are raised as they are.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    trial: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise TypeError(f"its attribute {name} is an optimizer, which would step, too")
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
                return f"its context: {at} is only {'live' if key in live else 'stored'}"
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
    return f"its context{f': {path}' if path else ''}: stored {stored!r:.80}, live {live!r:.80}"


def describe_context(context: object) -> str:
    """Return a decoded context as text, equal for two in which `compare_contexts` finds nothing."""
    if isinstance(context, torch.device):
        return "device"
    if isinstance(context, EnumValue):
        return repr(_enum_key(context))
    kind = type(context).__name__
    if isinstance(context, dict):
        items = sorted(f"{key!r}: {describe_context(one)}" for key, one in context.items())
        return f"{kind}({', '.join(items)})"
    if isinstance(context, list | tuple):
        return f"{kind}({', '.join(map(describe_context, context))})"
    return f"{kind}({context!r})"


def _enum_key(member: EnumValue) -> tuple[Any, ...]:
    return class_name(member.type), member.name, repr(member.value)


def class_name(type_: str) -> tuple[str, str]:
    """Return package and name of a class "module:Name": libraries move classes between modules."""
    module, _, name = type_.partition(":")
    return module.partition(".")[0], name
