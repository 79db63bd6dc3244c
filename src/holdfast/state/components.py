"""Components of a state: how each is saved, its captured and stored form, and names inside it.

torch.compile, activation checkpointing and data parallelism put a part into every name. Names
leave it out, because a checkpoint must fit the same model with and without them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.errors import UnsupportedState, UsageError, listing
from holdfast.format import layout
from holdfast.format.layout import check_component
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.attributes import Attributes
from holdfast.state.leaves import explain_refused_loader
from holdfast.state.shards import LocalShards

Kind: TypeAlias = Literal["module", "optimizer", "object", "tree", "generator", "rng"]

# State that hooks add can be saved and loaded by the optimizer's own methods only.
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

_NAMES_OF_OBJECTS = (frozenset({"state", "param_groups"}), frozenset({"last_epoch", "_step_count"}))
"""Keys by which the `state_dict` of an optimizer, and of a scheduler, is recognized."""

RNG = layout.RNG
"""The component of the global generators, added unless the caller has one of that name."""

TRAINER = "trainer"
"""The component of another library's trainer, saved by its bridge."""
PROGRESS = "progress"
"""The component of the counters of `holdfast.train`."""
OF_TRAINERS = frozenset({TRAINER, PROGRESS})
"""Components that only the trainer that saved them understands."""

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_PARALLEL = (DataParallel, DistributedDataParallel)

_FSDP = "torch.distributed.fsdp"
_PARTS = (
    "is not supported: ranks hold different parts of parameters and moments under the same names"
)
_FSDP1 = f"FullyShardedDataParallel (FSDP1) {_PARTS}. Use torch.distributed.fsdp.fully_shard"
_DEEPSPEED = (
    f"DeepSpeed {_PARTS}. Save with its own save_checkpoint, whose folder `holdfast import` reads; "
    "or train with torch.distributed.fsdp.fully_shard"
)
_SHARDING = {
    "FullyShardedDataParallel": (_FSDP, _FSDP1),
    "DeepSpeedEngine": ("deepspeed", _DEEPSPEED),
    "DeepSpeedOptimizer": ("deepspeed", _DEEPSPEED),
}
"""Name of a class -> its package, and why it and its subclasses are refused."""
_MARKS = {
    "_is_flat_param": _FSDP1,
    "_fsdp_flattened": _FSDP1,
    "ds_id": _DEEPSPEED,
    "_hp_mapping": _DEEPSPEED,
}
"""Attribute of a parameter -> why it is refused, also without the module that shards it."""
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"

_OF_AN_OBJECT = (
    "this is the result of a state_dict(): a resume would refill this dict alone. Give the "
    "object itself"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredComponent:
    """A component as stored: its typed tree, and the dtypes and shapes of its tensors."""

    name: str
    kind: str
    tree: bytes
    """The typed tree."""
    tensors: Mapping[str, TensorSpec]
    """Key -> dtype and shape from the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedComponent:
    """A captured component, before its tensors are copied and assigned to files."""

    name: str
    kind: Kind
    tree: bytes
    """The typed tree, as it will be stored."""
    tensors: Mapping[str, Tensor]
    """Key -> live tensor: detached, of any strides, on any device, in the order of the tree."""
    specs: tuple[TensorSpec, ...]
    """Specs of the tensors, in the same order."""
    may_overlap: frozenset[str] = frozenset()
    """Keys of the tensors that only steps of a torch optimizer change."""
    addresses: Sequence[int] | None = None
    """Addresses of the tensors, in their order; None unless each is known to be contiguous in host
    memory."""
    shards: Mapping[str, LocalShards] = field(default_factory=dict)
    """Key -> the boxes of each DTensor; its entries in `tensors` and `specs` are those of its local
    tensor."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Key in the tree of each leaf that cannot be saved -> reason. An edit must omit it."""
    by_rank: bool = False
    """Whether each rank has its own."""
    numbers: range | None = None
    """Numbers of the tensor files into which this rank writes it; None: from 0, as many as needed,
    and unchanging tensors may get files of their own."""
    apart: frozenset[str] = frozenset()
    """Keys of the small tensors that are in the last of `numbers` alone."""

    @property
    def stored(self) -> StoredComponent:
        """The component in its stored form, without the values of its tensors."""
        empty = (TensorSpec(key, "U8", (0,)) for key in self.refused)
        tensors = {spec.key: spec for spec in (*self.specs, *empty)}
        return StoredComponent(name=self.name, kind=self.kind, tree=self.tree, tensors=tensors)


def is_of_trainer(state: Mapping[str, Any]) -> bool:
    """Whether the state is that of a trainer, which counts its steps and batches itself."""
    found = [state.get(name, {}) for name in OF_TRAINERS]
    return any(
        not isinstance(one, dict | list) and not getattr(one, "is_of_loop", False) for one in found
    )


def kind_of(value: Any) -> Kind:
    """Return the kind of a component, which decides how it is saved, or raise `UsageError`."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer) and _saves_as_torch_does(value):
        return "optimizer"
    if generators.kind_of(value) is not None:
        return "generator"
    if not isinstance(value, type) and _is_stateful(value):
        return "object"
    if isinstance(value, dict) and _is_of_an_object(value):
        raise UsageError(_OF_AN_OBJECT)
    if isinstance(value, dict | list | deque | Attributes):
        return "tree"
    if isinstance(value, DataLoader):
        raise UsageError(explain_refused_loader(value))
    if isinstance(value, PerRank):
        raise UsageError(
            "PerRank marks a component of a CheckpointManager or a Trainer, and nothing else"
        )
    raise UsageError(
        f"a {type(value).__qualname__} cannot be a component: it must be a module, an optimizer, "
        "a generator, an object with state_dict and load_state_dict, or a dict, list or deque, "
        "which resume refills in place. For attributes of your own object, give "
        'holdfast.Attributes(it, "name", …); put a value or an array into a dict'
    )


@dataclass(frozen=True, slots=True)
class PerRank:
    """Mark on a component of which each rank of a run has its own state.

    `CheckpointManager(root, {"model": model, "queue": PerRank(queue)})` saves the queue of every
    rank, and each rank gets its own back. With another number of ranks, rank *r* gets that of *r*
    modulo the old number, if all of them have tensors of the same shapes.
    """

    component: Any
    """The component itself: a module, an optimizer, an object, a dict or a list."""


def take_per_rank_marks(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Take the `PerRank` marks from a state; returns it without them, and the marked names."""
    items = state.items() if isinstance(state, Mapping) else ()
    inner = {name: one.component for name, one in items if isinstance(one, PerRank)}
    return ({**state, **inner}, frozenset(inner)) if inner else (state, frozenset())


def unwrap_accelerate(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace accelerate's wrappers of optimizers and schedulers by what is inside.

    A wrapped optimizer would be saved as an opaque object, without names of parameters.
    """
    # Compared by name: importing the classes would import all of accelerate.
    inside = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}
    inner = {
        name: getattr(value, inside[type(value).__name__])
        for name, value in state.items()
        if type(value).__name__ in inside and hasattr(value, inside[type(value).__name__])
    }
    return {**state, **inner} if inner else state


def _saves_as_torch_does(optimizer: Optimizer) -> bool:
    own = vars(optimizer)
    kind = type(optimizer)
    return (
        kind.state_dict is Optimizer.state_dict
        and kind.load_state_dict is Optimizer.load_state_dict
        and "state_dict" not in own
        and "load_state_dict" not in own
        and not any(own.get(hooks) for hooks in _STATE_HOOKS)
    )


def _is_of_an_object(content: dict[Any, Any]) -> bool:
    """Whether a dict is the `state_dict` of a torch optimizer or scheduler."""
    return any(names <= {*content} for names in _NAMES_OF_OBJECTS)


def _is_weights(value: Any) -> bool:
    """Whether a value is the `state_dict` of a module: torch attaches versions to it."""
    return isinstance(value, dict) and hasattr(value, "_metadata")


def _is_stateful(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def check_state(state: Mapping[str, Any]) -> None:
    """Check the names and types of all components of a state."""
    if not isinstance(state, Mapping) or not state:
        raise UsageError("state must be a mapping of at least one named component")
    wrong = []
    for name, value in state.items():
        try:
            check_component(name)
            kind_of(value)
        except UsageError as err:
            wrong.append(f"{name}: {err}")
        except TypeError:
            wrong.append(f"{name!r}: a component's name must be text")
    if not any(isinstance(value, nn.Module) for value in state.values()):
        # If the module is a component too, this may be a copy of weights that is meant to be saved.
        wrong += [f"{name}: {_OF_AN_OBJECT}" for name, value in state.items() if _is_weights(value)]
    if wrong:
        raise UsageError("state:\n" + listing(wrong))


def refuse_other_sharding(state: Mapping[str, Any], *, allows_fsdp1: bool = False) -> None:
    """Raise `UnsupportedState` for modules and optimizers that FSDP1 or DeepSpeed shards.

    Objects are refused if an attribute of theirs is sharded. Only schedulers may have such an
    optimizer, because they save nothing of it.
    """
    found = []
    for name, value in state.items():
        held = [] if hasattr(value, "get_last_lr") else getattr(value, "__dict__", {}).values()
        reasons = [_find_sharding(one) for one in (value, *held)]
        reason = next(filter(None, reasons), None)
        if reason is not None and not (allows_fsdp1 and reason is _FSDP1):
            found.append((name, reason))
    if found:
        raise UnsupportedState(found)


def _find_sharding(value: Any) -> str | None:
    """Return why a module or optimizer is refused; None: nothing that is known shards it."""
    parts, parameters = [value], list[Any]()
    if isinstance(value, nn.Module):
        parts, parameters = [*value.modules()], [*value.parameters()]
    elif isinstance(value, Optimizer):
        groups = getattr(value, "param_groups", ())  # a wrapper may have none of its own
        parameters = [one for group in groups for one in group["params"]]
    # By name: importing the classes would import their libraries.
    for one in {base for kind in {*map(type, parts)} for base in kind.__mro__}:
        package, reason = _SHARDING.get(one.__name__, ("", None))
        if reason is not None and one.__module__.startswith(package):
            return reason
    return next(
        (why for one in parameters for mark, why in _MARKS.items() if _has_mark(one, mark)), None
    )


def _has_mark(parameter: object, mark: str) -> bool:
    found = getattr(parameter, mark, None)
    return found is not None and found is not False


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch.compile and data parallelism."""
    while True:
        # Compared by name: importing the class would import all of dynamo.
        if type(module).__name__ == "OptimizedModule":
            module = module.get_submodule("_orig_mod")
        elif isinstance(module, _PARALLEL):
            module = module.module
        else:
            return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaner:
    """Converts a module's raw names to names without the parts that wrappers add."""

    parallel: frozenset[str]
    """Raw paths of the parallel wrappers inside the module; their child is called `module`."""

    def clean(self, raw: str) -> str:
        """Return the name of the same leaf in the model without wrappers."""
        if not self.parallel and "_orig_mod" not in raw and "_checkpoint_w" not in raw:
            return raw
        parts = raw.split(".")
        kept = [part for i, part in enumerate(parts) if not self._is_wrapper(parts, i)]
        return ".".join(kept)

    def _is_wrapper(self, parts: list[str], i: int) -> bool:
        if parts[i] in _WRAPPER_PARTS:
            return True
        return parts[i] == "module" and ".".join(parts[:i]) in self.parallel


def reshard(module: nn.Module) -> bool:
    """Free what `fully_shard` gathered, by its hooks; False if the module has other hooks."""
    hooks = module.__dict__.get("_state_dict_pre_hooks")
    if not hooks:
        return True
    of_fsdp = [hook for hook in hooks.values() if is_of_fsdp(hook)]
    for hook in of_fsdp:
        hook(module, "", False)
    return len(of_fsdp) == len(hooks)


def is_of_fsdp(hook: Callable[..., Any]) -> bool:
    """Whether a hook of a module is one that `fully_shard` has registered."""
    return getattr(hook, "__module__", "").startswith(_FULLY_SHARD)


def cleaner_of(module: nn.Module) -> Cleaner:
    """Make the `Cleaner` for the names inside an unwrapped module."""
    submodules = module.named_modules(remove_duplicate=False)
    wrappers = (name for name, inner in submodules if isinstance(inner, _PARALLEL))
    return Cleaner(parallel=frozenset(wrappers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """Component and name of each parameter of the state's modules."""

    homes: Mapping[int, tuple[str, str]]
    """id of the parameter -> (component, name inside it); of several names the first."""

    def find_parameter(self, parameter: Tensor) -> tuple[str, str] | None:
        """Return (component, name) of a parameter; None if no module of the state has it."""
        return self.homes.get(id(parameter))


def parameter_names(modules: Iterable[tuple[str, nn.Module]]) -> ParameterNames:
    """Name the parameters of the given components; the modules must stay alive meanwhile."""
    homes: dict[int, tuple[str, str]] = {}
    for component, wrapped in modules:
        module = unwrap_module(wrapped)
        for inner in module.modules():
            reshard(inner)
        cleaner = cleaner_of(module)
        for raw, parameter in module.named_parameters():
            homes.setdefault(id(parameter), (component, cleaner.clean(raw)))
    return ParameterNames(homes=homes)


def structure(wrapped: nn.Module) -> list[Any]:
    """List submodules with types and parameters, equal only if all is; holds no tensors."""
    module = unwrap_module(wrapped)
    if type(module).named_parameters is not nn.Module.named_parameters:
        return [object()]  # the module overrides the names
    outline: list[Any] = []
    for raw, inner in module.named_modules(remove_duplicate=False):
        reshard(inner)
        parameters = inner._parameters
        if not isinstance(parameters, dict):
            return [object()]  # a scripted module makes new ones on each access
        outline += (raw, type(inner), *parameters, *map(id, parameters.values()))
    return outline
