"""Components of a state: how each object is saved, and its captured and stored forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from holdfast.errors import UsageError, listing
from holdfast.format import layout
from holdfast.format.layout import check_component
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.positions import in_place_of

Kind: TypeAlias = Literal["module", "optimizer", "object", "tree", "generator", "rng"]

# What hooks add, only the optimizer's own methods can save and load.
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


_OF_AN_OBJECT = (
    "this is the result of a state_dict(): a resume would refill this dict alone. Give the "
    "object itself"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredComponent:
    """A component as a checkpoint holds it."""

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

    @property
    def stored(self) -> StoredComponent:
        """The component as a checkpoint holds it."""
        tensors = {spec.key: spec for spec in self.specs}
        return StoredComponent(name=self.name, kind=self.kind, tree=self.tree, tensors=tensors)


def kind_of(value: Any) -> Kind:
    """Return the kind of a component, which decides how it is saved.

    Raises:
        UsageError: the value cannot be a component.
    """
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
    if isinstance(value, dict | list):
        return "tree"
    if isinstance(value, DataLoader):
        raise UsageError(in_place_of(value))
    raise UsageError(
        f"a {type(value).__qualname__} cannot be a component: it must be a module, an optimizer, "
        "a generator, an object with state_dict and load_state_dict, or a dict or list, which "
        "resume refills in place"
    )


def unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace accelerate's wrappers in a state by the torch optimizers inside.

    The wrapper has no state of its own; left in place, it would be saved as an opaque object.
    """
    # Compared by name: importing the class would import all of accelerate.
    inner = {
        name: value.optimizer
        for name, value in state.items()
        if type(value).__name__ == "AcceleratedOptimizer"
        and isinstance(getattr(value, "optimizer", None), Optimizer)
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
    """Check names and types of all components, as at a manager's construction.

    Raises:
        UsageError: lists every component that is wrong.
    """
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
