"""Capture of live objects as named leaves and typed trees. Read only; copies no leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import HoldfastError, UnsupportedState
from holdfast.format.objects import TreeDocument
from holdfast.state import modules, optimizers
from holdfast.state.attributes import content_of
from holdfast.state.capture import lacking as held
from holdfast.state.capture.byrank import BY_RANK
from holdfast.state.capture.recall import CaptureCache, Irregular, PredictedStateDict, predict_state
from holdfast.state.collecting import Leaves
from holdfast.state.components import (
    RNG,
    CapturedComponent,
    Kind,
    ParameterNames,
    check_state,
    cleaner_of,
    kind_of,
    parameter_names,
    refuse_other_sharding,
    structure,
    unwrap_module,
)
from holdfast.state.frozen import FrozenParameters
from holdfast.state.generators import global_generators
from holdfast.state.leaves import local_of
from holdfast.state.trees import encoded
from holdfast.state.unsaved import UnsavedBuffers

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A captured state. Its tensors alias the live ones: copy them before training continues."""

    components: Mapping[str, CapturedComponent]
    state: Mapping[str, Any]
    find_unsaved_parameters: Callable[[], Mapping[str, Mapping[str, Tensor]]]
    """Callback that finds parameters of optimizers that no captured component holds."""
    stepping: Sequence[int] = ()
    """`id()` of each parameter that an optimizer of the state updates."""
    names: ParameterNames | None = None
    """Homes of the parameters; another object once the structure of a module has changed."""
    left_out: tuple[str, ...] = ()
    """Names of components that a `before_save` hook removed from this save."""

    @property
    def addresses(self) -> set[int]:
        """Addresses of the captured tensors."""
        parts = self.components.values()
        return {tensor.data_ptr() for part in parts for tensor in part.tensors.values()}

    @property
    def not_saved(self) -> tuple[str, ...]:
        """Messages about buffers and attributes of modules that are not saved."""
        elsewhere = {id(value) for value in self.state.values()}
        live = ((name, one) for name, one in self.state.items() if isinstance(one, nn.Module))
        return tuple(line for name, one in live for line in modules.not_saved(name, one, elsewhere))


def capture(state: Mapping[str, Any], only: Collection[str] | None = None) -> Captured:
    """Capture the state, or `only` some components: name every leaf; generators come last."""
    return Capturer(state).capture(only)


class Capturer:
    """Captures one state repeatedly, and caches what follows from its structure alone."""

    _by_digest: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """Component -> parameter -> record, in this capture."""

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        is_shared: bool = False,
        per_rank: Collection[str] = (),
        is_edited: bool = False,
        records_frozen: bool = False,
    ) -> None:
        """`is_shared`: other ranks capture the same state, so that no tree may tell this one's.

        `per_rank`: components of which each rank has its own. `is_edited`: leaves that cannot be
        saved are no error, as `edited` follows, whose hook may omit them. `records_frozen`:
        parameters that training does not change are recorded by digest.
        """
        self.frozen = FrozenParameters(state) if records_frozen else None
        self._state = state
        self._is_edited = is_edited
        self._per_rank = per_rank
        self._is_shared = is_shared
        self._structures: dict[str, list[Any]] = {}
        self._names = ParameterNames(homes={})
        self._namings: dict[str, optimizers.Naming] = {}
        self._recollections: dict[str, CaptureCache] = {}
        self._predicted: dict[str, PredictedStateDict | None] = {}
        """Predicted module states of this capture; discarded once code outside torch has run."""
        self._modules: dict[str, _KnownModule] = {}
        self._unsaved = {
            name: UnsavedBuffers(value)
            for name, value in state.items()
            if isinstance(value, nn.Module) and name not in per_rank
        }
        self._accepted: dict[str, Any] = {}
        """Stamps of modules whose own loading code accepts what they save."""
        self._stepping: list[int] = []
        self._offenders: list[tuple[str, str]] = []
        self._has_run_foreign = False
        """Whether code outside torch was called in this capture."""

    def capture(self, only: Collection[str] | None = None) -> Captured:
        """Capture the state: name every leaf, and add the global random generators as `rng`.

        `only` names the components that are wanted; None: all.

        `state_dict` of objects is called in the order of the mapping. The generators are read
        last, so that random numbers drawn by those calls are accounted for.
        """
        check_state(self._state)
        try:
            return self._capture(only)
        finally:
            self._predicted.clear()  # holds tensors

    def _capture(self, only: Collection[str] | None) -> Captured:
        self._name_parameters()
        if self.frozen is not None:
            self._by_digest = self.frozen.find_unchanged()
        self._offenders = []
        self._has_run_foreign = False
        wanted = {*self._state, RNG} if only is None else set(only)
        components = {
            name: self._capture_component(name, value)
            for name, value in self._state.items()
            if name in wanted
        }
        if RNG not in self._state and RNG in wanted:
            components[RNG] = self._rng()
        components = {name: self._marked(one) for name, one in components.items()}
        if self._offenders:
            raise UnsupportedState(self._offenders)
        if self._has_run_foreign:
            components = {name: _without_stale_addresses(one) for name, one in components.items()}
        return Captured(
            components=components,
            state=self._state,
            find_unsaved_parameters=partial(_find_unsaved, self._state, self._names, components),
            stepping=self._stepping,
            names=self._names,
        )

    def _marked(self, component: CapturedComponent) -> CapturedComponent:
        """Mark a component as different on each rank; refuse DTensors in it."""
        if component.kind not in BY_RANK and component.name not in self._per_rank:
            return component
        self._offenders += [
            (f"{component.name}.{key}", "a DTensor lies on several ranks, and is in a PerRank")
            for key, held in component.shards.items()
            if not held.is_whole
        ]
        return replace(component, by_rank=True)

    def _name_parameters(self) -> None:
        live = {name: value for name, value in self._state.items() if isinstance(value, nn.Module)}
        self._predicted.update((name, predict_state(module)) for name, module in live.items())
        structures = {}
        for name, module in live.items():
            predicted = self._predicted[name]
            structures[name] = structure(module) if predicted is None else predicted.outline
        if structures != self._structures:
            self._names = parameter_names(live.items())
            self._structures = structures
            self._modules.clear()  # parameters may belong to other modules now
            for unsaved in self._unsaved.values():
                unsaved.watch_new_buffers()
        optimizers_ = (value for value in self._state.values() if isinstance(value, Optimizer))
        groups = (group for optimizer in optimizers_ for group in optimizer.param_groups)
        self._stepping = [id(parameter) for group in groups for parameter in group["params"]]

    def _capture_component(self, name: str, value: Any) -> CapturedComponent:
        kind = kind_of(value)
        if kind == "module":
            return self._module(name, value)
        if kind == "optimizer":
            return self._optimizer(name, value)
        if kind == "object":
            self._discard_predictions()
        content = _call_state_dict(name, value) if kind == "object" else content_of(name, value)
        walked = None if kind == "generator" else content
        recalled = self._recalled(name, kind, walked, None)
        if recalled is not None:
            return recalled
        leaves = self._make_leaves(name)
        return self._encoded(kind, leaves, encoded(content, leaves), walked)

    def _module(self, name: str, module: nn.Module) -> CapturedComponent:
        """Capture a module, from the cache where the result of `state_dict` can be predicted."""
        if name not in self._predicted:
            self._predicted[name] = predict_state(module)
        predicted, known = self._predicted[name], self._modules.get(name)
        unsaved = self._unsaved[name].find_unchanged() if name in self._unsaved else {}
        frozen = self._by_digest.get(name, _NONE) if name not in self._per_rank else _NONE
        if known is not None and not (known.unsaved is unsaved and known.frozen is frozen):
            known = None
        if predicted is not None and known is not None and known.fits(predicted, self._stepping):
            component = self._recalled(
                name,
                "module",
                predicted.detached(self.frozen.ids if self.frozen and frozen else ()),
                known.stamp,
            )
            if component is not None:
                return replace(component, may_overlap=known.may_overlap)
        return self._module_by_state_dict(name, module, predicted, unsaved, frozen)

    def _module_by_state_dict(
        self,
        name: str,
        module: nn.Module,
        predicted: PredictedStateDict | None,
        unsaved: Mapping[str, str],
        frozen: Mapping[str, str],
    ) -> CapturedComponent:
        """Capture a module by calling its `state_dict`, and cache the result where possible."""
        refuse_other_sharding({name: module})  # it may have been wrapped since the manager was made
        state = modules.state_of(name, module)
        tensors = list(state.values())
        walked = tensors if all(isinstance(tensor, Tensor) for tensor in tensors) else None
        if frozen and walked is not None:
            clean = cleaner_of(unwrap_module(module)).clean
            walked = [tensor for raw, tensor in state.items() if clean(raw) not in frozen]
        stamp = (self._structures[name], modules.stamp(state), unsaved, frozen)
        component = self._recalled(name, "module", walked, stamp)
        if component is None:
            leaves = self._make_leaves(name)
            document = modules.capture_module(module, state, leaves, unsaved, frozen)
            is_whole = not leaves.offenders and not leaves.refused
            if is_whole and self._accepted.get(name) != stamp:
                for entry, reason in modules.find_refused_entries(module, state):
                    leaves.record_refusal(entry, reason)
                self._accepted[name] = stamp
            component = self._encoded("module", leaves, document, walked, stamp)
        may_overlap = self._stepped(component)
        self._modules.pop(name, None)
        if predicted is None:
            self._discard_predictions()
        elif name in self._recollections and predicted.matches_tensors(tensors):
            self._modules[name] = _KnownModule(
                outline=predicted.outline,
                stepping=self._stepping,
                stamp=stamp,
                may_overlap=may_overlap,
                unsaved=unsaved,
                frozen=frozen,
            )
        return replace(component, may_overlap=may_overlap)

    def _discard_predictions(self) -> None:
        """Discard predicted module states: code outside torch may have changed the modules."""
        self._has_run_foreign = True
        self._predicted.clear()

    def _stepped(self, component: CapturedComponent) -> frozenset[str]:
        """Return the keys of a module's parameters that an optimizer of the state updates."""
        keys = []
        for value in self._state.values():
            for group in value.param_groups if isinstance(value, Optimizer) else ():
                for parameter in group["params"]:
                    home, key = self._names.find_parameter(parameter) or ("", "")
                    captured = component.tensors.get(key) if home == component.name else None
                    at = None if captured is None else local_of(parameter).data_ptr()
                    if captured is not None and captured.data_ptr() == at:
                        keys.append(key)
        return frozenset(keys)

    def _optimizer(self, name: str, optimizer: Optimizer) -> CapturedComponent:
        live = self._namings.setdefault(name, optimizers.Naming()).name_parameters(
            optimizer, self._names
        )
        walked, stamp = optimizers.options_and_slots(live), optimizers.stamp(live)
        recalled = self._recalled(name, "optimizer", walked, stamp)
        if recalled is not None:
            return recalled
        leaves = self._make_leaves(name, key_of=optimizers.slot_path)
        document = optimizers.capture_optimizer(live, leaves)
        stepped = optimizers.stepped(live, leaves)
        return self._encoded("optimizer", leaves, document, walked, stamp, stepped)

    def _recalled(self, name: str, kind: Kind, walked: Any, stamp: Any) -> CapturedComponent | None:
        """Return the cached component; None if `stamp` changed, or `walked` beyond its numbers."""
        known = None if walked is None else self._recollections.get(name)
        return None if known is None else known.recall(kind, walked, stamp)

    def _encoded(
        self,
        kind: Kind,
        leaves: Leaves,
        document: TreeDocument | None,
        walked: Any = None,
        stamp: Any = None,
        may_overlap: frozenset[str] = frozenset(),
    ) -> CapturedComponent:
        """Make a component from its leaves and tree; cache it under `walked` and `stamp`."""
        name = leaves.component
        self._recollections.pop(name, None)
        self._offenders += leaves.offenders
        component = CapturedComponent(
            name=name,
            kind=kind,
            tree=b"" if document is None else document.data,
            tensors=leaves.tensors,
            specs=tuple(leaves.specs),
            may_overlap=may_overlap,
            shards=leaves.shards,
            refused=leaves.refused,
        )
        is_whole = not leaves.offenders and not leaves.refused
        if document is not None and walked is not None and is_whole:
            with suppress(Irregular):
                self._recollections[name] = CaptureCache(
                    walked, stamp, document, component, leaves.originals
                )
        return component

    def _make_leaves(self, component: str, key_of: Callable[[str], str] = str) -> Leaves:
        return Leaves(
            component=component, key_of=key_of, is_shared=self._is_shared, is_edited=self._is_edited
        )

    def _rng(self) -> CapturedComponent:
        leaves = self._make_leaves(RNG)
        return self._encoded("rng", leaves, encoded(global_generators(), leaves))


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownModule:
    """Cached facts about a module from its last `state_dict`."""

    outline: list[Any]
    stepping: list[int]
    stamp: Any
    may_overlap: frozenset[str]
    unsaved: Mapping[str, str]
    frozen: Mapping[str, str]

    def fits(self, predicted: PredictedStateDict, stepping: list[int]) -> bool:
        """Whether the facts still hold: the same names and the same parameters in optimizers."""
        return self.outline == predicted.outline and self.stepping == stepping


def _without_stale_addresses(component: CapturedComponent) -> CapturedComponent:
    """Drop a component's cached tensor addresses if they no longer match its tensors."""
    addresses = list(map(Tensor.data_ptr, component.tensors.values()))
    return component if addresses == component.addresses else replace(component, addresses=None)


def _find_unsaved(
    state: Mapping[str, Any], names: ParameterNames, components: Mapping[str, CapturedComponent]
) -> Mapping[str, Mapping[str, Tensor]]:
    tensors = (tensor for part in components.values() for tensor in part.tensors.values())
    return held.select_unsaved(held.find_parameters_outside_modules(state, names), tensors)


def find_unsaved_parameters(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
    """Find parameters of optimizers that no component saves, by optimizer and name."""
    live = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    if not held.find_parameters_outside_modules(state, parameter_names(live.items())):
        return {}
    return Capturer(state, is_shared=True).capture().find_unsaved_parameters()


def _call_state_dict(component: str, value: Any) -> Any:
    """Return the state of an object of another library; name the component if that fails."""
    try:
        return value.state_dict()
    except HoldfastError:
        raise
    except Exception as error:
        kind = type(value).__name__
        reason = f"{kind}.state_dict() failed ({type(error).__name__}: {error})"
        if kind == "ZeroRedundancyOptimizer":
            reason += ". Save an object that gathers it on each rank: see docs/ranks.md"
        raise UnsupportedState([(component, reason)]) from error
