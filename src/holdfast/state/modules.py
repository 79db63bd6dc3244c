"""Modules: capture of their parameters and persistent buffers by name, and loading them.

`Module.load_state_dict` writes the first layers before it checks the last one, so it is used only
where a module has saving or loading code of its own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from holdfast.errors import FormatError, MismatchError, UnsupportedState
from holdfast.format.nodes import SubclassRef, TensorRef
from holdfast.format.objects import TreeDocument
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.collecting import Leaves
from holdfast.state.components import Cleaner, cleaner_of, is_of_fsdp, unwrap_module
from holdfast.state.frozen import entries_of_layers, find_differences
from holdfast.state.leaves import (
    PASSING,
    identity,
    is_dtensor,
    is_subclass,
    local_of,
    plain_parts,
    refusal,
)
from holdfast.state.planning.copying import (
    Fetching,
    Stored,
    StoredPair,
    copy_tensors,
    fetched,
    read_all,
)
from holdfast.state.planning.inner import InnerPair, match_inner, stored_for
from holdfast.state.planning.livevalues import revive
from holdfast.state.planning.merge import Claims, is_writable_in_place
from holdfast.state.planning.plans import LoadPlan, undo_changes
from holdfast.state.selection import NOT_LOADED, Problems, Wishes, proposal
from holdfast.state.trees import Lifting, Skeleton, encoded, keys_in, owned
from holdfast.state.unsaved import buffers_of, difference, other_size

# Their own loading only converts older forms, which then have other names.
_LOADS_PLAINLY = frozenset(
    kind._load_from_state_dict for kind in (nn.Module, _NormBase, _InstanceNorm)
)
_CHECKPOINTING = "torch.distributed.algorithms._checkpoint"
_EXTRA_STATE = "_extra_state"
_Inners: TypeAlias = Sequence[tuple[str, nn.Module]]
"""A module and all its submodules as (clean path, submodule), each as often as it has names."""
_loaded: WeakSet[nn.Module] = WeakSet()
"""Modules that a checkpoint was loaded into, so that training does not reset them."""
_OTHER_BASE = (
    "Load the same base model before the checkpoint, and seed layers that are initialized at "
    "random. To load the checkpoint on this base anyway, pass strict=False"
)
_COLLISION = "two entries have this name once wrapper prefixes are stripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModule:
    """A live module: the entries of its `state_dict`, and how each is loaded."""

    module: nn.Module
    """The module without wrappers."""
    entries: Mapping[str, Any]
    """Clean name (without wrappers' parts) -> value in the state_dict."""
    raw_names: Mapping[str, str]
    """Clean name -> name in the state_dict."""
    leaves: Mapping[str, Tensor]
    """Clean name -> the parameter or buffer whose memory the entry is."""
    extras: Mapping[str, nn.Module]
    """Clean name of an extra state -> the submodule that takes it."""
    settings: Mapping[str, Tensor | None]
    """Clean name of settings of a quantized layer -> the live tensor of a number in them."""
    quantized: frozenset[str]
    """Clean paths of these layers."""
    collisions: tuple[str, ...]
    """Clean names that two entries share."""
    strange_keys: tuple[str, ...]
    """Keys of the state_dict that are not text."""
    own_loading: frozenset[str]
    """Clean paths of submodules with loading code of their own."""
    converting: frozenset[str]
    """Clean paths of submodules whose loading is torch's own, and converts older names."""
    versions: Mapping[str, int] | None
    """Clean path of a submodule -> its saved version; None: the state_dict has no versions."""
    raw_paths: tuple[tuple[str, str], ...]
    """(raw, clean) path of every submodule."""
    of_torch: frozenset[str]
    """Clean paths of torch's own submodules that load plainly: their versions do not matter."""

    @property
    def strange_entries(self) -> list[str]:
        """Clean names of entries that are neither memory of the module nor an extra state."""
        known = {**self.leaves, **self.extras, **self.settings}
        return [name for name in self.entries if name not in known]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Clean name -> live tensor: the leaf, if the entry is memory of the module."""
        entries = {name: one for name, one in self.entries.items() if isinstance(one, Tensor)}
        return {**entries, **self.leaves}

    @property
    def is_opaque(self) -> bool:
        """Whether the module must be loaded by its own `load_state_dict`."""
        return bool(self.own_loading or self.strange_entries)


def state_of(component: str, wrapped: nn.Module) -> Mapping[str, Any]:
    """Call `state_dict` of a module."""
    module = unwrap_module(wrapped)
    try:
        state: dict[str, Any] = module.state_dict()
    except Exception as error:
        for raw, inner in module.named_modules():
            if type(inner).get_extra_state is not nn.Module.get_extra_state:
                path = ".".join(filter(None, (component, raw, _EXTRA_STATE)))
                _expect_extra_state(path, inner)
        raise error
    if "bitsandbytes" in sys.modules:
        from holdfast.state.bnb_layers import add_scales

        add_scales(module, state)
    return state


def _expect_extra_state(path: str, inner: nn.Module) -> None:
    try:
        inner.get_extra_state()
    except Exception as error:
        reason = (
            f"get_extra_state of {type(inner).__name__} fails: {error}. If the module has it only "
            "after a forward pass, run one first"
        )
        raise UnsupportedState([(path, reason)]) from error


def inspect(wrapped: nn.Module, state: Mapping[str, Any]) -> LiveModule:
    """Collect entries, leaves and versions of a module. `state`: its `state_dict()`."""
    module = unwrap_module(wrapped)
    cleaner = cleaner_of(module)
    submodules = [*module.named_modules(remove_duplicate=False)]
    paths = tuple((raw, cleaner.clean(raw)) for raw, _ in submodules)
    inners = [(clean, inner) for (_, clean), (_, inner) in zip(paths, submodules, strict=True)]
    raw_names: dict[str, str] = {}
    collisions = []
    names = [raw for raw in state if isinstance(raw, str)]
    for raw in names:
        clean = cleaner.clean(raw)
        if raw_names.setdefault(clean, raw) != raw:
            collisions.append(clean)
    entries = {clean: state[raw] for clean, raw in raw_names.items()}
    scales, settings, quantized = _quantized_layers(inners, entries)
    return LiveModule(
        module=module,
        entries=entries,
        raw_names=raw_names,
        leaves={**_live_leaves(module, entries, cleaner), **scales},
        extras=_extras(inners, entries),
        settings=settings,
        quantized=quantized,
        collisions=tuple(collisions),
        strange_keys=tuple(repr(raw)[:80] for raw in state if not isinstance(raw, str)),
        own_loading=frozenset(
            clean for clean, inner in inners if _loads_itself(inner) and clean not in quantized
        ),
        converting=frozenset(clean for clean, inner in inners if _converts(inner)),
        versions=_versions(state, paths),
        raw_paths=paths,
        of_torch=frozenset(_of_torch(inners)),
    )


def _versions(
    state: Mapping[str, Any], paths: tuple[tuple[str, str], ...]
) -> dict[str, int] | None:
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    # Of a wrapper and the module in it, which have one path, the inner one comes last.
    versions = ((clean, metadata.get(raw, {}).get("version")) for raw, clean in paths)
    return {clean: version for clean, version in versions if type(version) is int}


def buffer_names(wrapped: nn.Module) -> frozenset[str]:
    """Return the clean names of a module's buffers."""
    module = unwrap_module(wrapped)
    cleaner = cleaner_of(module)
    buffers = module.named_buffers(remove_duplicate=False)
    return frozenset(cleaner.clean(raw) for raw, _ in buffers)


def _quantized_layers(
    inners: _Inners, entries: Mapping[str, Any]
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor | None], frozenset[str]]:
    """Return scales, settings and paths of layers of bitsandbytes: see `bnb_layers`."""
    if "bitsandbytes" not in sys.modules:
        return {}, {}, frozenset()
    from holdfast.state.bnb_layers import read_layers

    return read_layers(inners, entries)


def _named_tensors(module: nn.Module, cleaner: Cleaner) -> dict[str, Tensor]:
    live: dict[str, Tensor] = {}
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        live[cleaner.clean(raw)] = parameter
    for raw, buffer in module.named_buffers(remove_duplicate=False):
        live[cleaner.clean(raw)] = buffer
    return live


def _live_leaves(
    module: nn.Module, entries: Mapping[str, Any], cleaner: Cleaner
) -> dict[str, Tensor]:
    """Find the entries that share the memory of a parameter or buffer, under any name."""
    named = _named_tensors(module, cleaner)
    leaves: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            continue
        live = named.get(name)
        if live is not None and _is_same_tensor(live, value):
            leaves[name] = live
        elif isinstance(live, nn.Parameter) and _is_alias(value, live):
            leaves[name] = value
        elif refusal(value) is None:
            others[name] = value
    if others:
        by_memory = {identity(t): t for t in named.values() if refusal(t) is None}
        for name, value in others.items():
            if identity(value) in by_memory:
                leaves[name] = by_memory[identity(value)]
    return {name: leaves[name] for name in entries if name in leaves}


def _is_same_tensor(live: Tensor, value: Tensor) -> bool:
    if live is value:
        return True
    if refusal(live) is not None:
        return type(live) is type(value) or refusal(value) is not None
    if is_dtensor(value) is not is_dtensor(live):
        return False
    parts, live_parts = plain_parts(value), plain_parts(live)
    is_same = value.dtype == live.dtype and len(parts) == len(live_parts)
    return is_same and all(map(Tensor.is_set_to, parts, live_parts))


def _is_alias(value: Tensor, live: Tensor) -> bool:
    """Whether a plain entry is the memory of a subclass of Parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return type(value) is Tensor and refusal(value) is None and value.is_set_to(live)


def _extras(inners: _Inners, entries: Mapping[str, Any]) -> dict[str, nn.Module]:
    wanted = {name for name in entries if name.rpartition(".")[2] == _EXTRA_STATE}
    if not wanted:
        return {}
    extras = {}
    for clean, inner in inners:
        name = f"{clean}.{_EXTRA_STATE}".lstrip(".")
        if name in wanted:
            extras[name] = inner
    return extras


def _of_torch(inners: _Inners) -> Iterator[str]:
    for clean, inner in inners:
        kind = type(inner)
        if kind.__module__.startswith("torch.") and kind._load_from_state_dict in _LOADS_PLAINLY:
            yield clean


def _loads_itself(inner: nn.Module) -> bool:
    """Whether code that is not torch's decides what a load makes of the module."""
    kind = type(inner)
    is_plain = (
        kind._load_from_state_dict in _LOADS_PLAINLY
        and kind.load_state_dict is nn.Module.load_state_dict
        and all(map(_is_of_wrapper, inner._load_state_dict_post_hooks.values()))
    )
    hooks = inner._load_state_dict_pre_hooks.values()
    if is_plain and all(_is_of_wrapper(hook) or _is_of_torch(hook) for hook in hooks):
        return bool(hooks) and any(map(is_lazy, inner.parameters(recurse=False)))
    return True


def _converts(inner: nn.Module) -> bool:
    if any(map(_is_of_torch, inner._load_state_dict_pre_hooks.values())):
        return True
    return type(inner)._load_from_state_dict is not nn.Module._load_from_state_dict


def _is_of_wrapper(hook: Callable[..., Any]) -> bool:
    """Whether a hook only prepares a wrapper for the raw names, which are not used."""
    # FSDP2's looks for a parameter's memory anew; a copy leaves it where it is.
    is_checkpointing = getattr(hook, "__module__", "").startswith(_CHECKPOINTING)
    return is_of_fsdp(hook) or is_checkpointing


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    """Whether a hook of torch's own modules only converts older names, or makes lazy parameters."""
    return getattr(hook, "__module__", "").startswith("torch.nn.")


def _is_within(name: str, paths: Collection[str]) -> bool:
    """Whether a name or path is that of one of the submodules, or inside of one."""
    if not paths:
        return False
    parts = name.split(".")
    return "" in paths or any(".".join(parts[:i]) in paths for i in range(1, len(parts) + 1))


def find_refused_entries(wrapped: nn.Module, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List (name, reason) of a `state_dict` that its own loading code, undone, refuses."""
    live = inspect(wrapped, state)
    module = live.module
    if not live.is_opaque or not _can_be_tried(module):
        return []
    strange = live.strange_entries
    homes = {name.rpartition(".")[0] for name in strange}
    named = [inner for _, inner in module.named_modules(remove_duplicate=False)]
    written = [
        inner
        for (_, clean), inner in zip(live.raw_paths, named, strict=True)
        if clean in homes or _is_within(clean, live.own_loading)
    ]
    with undo_changes(module.modules(), written=written):
        try:
            is_strict = not live.quantized
            found = module.load_state_dict(_without_layers(live, state), strict=is_strict)
            if not is_strict and (unexpected := getattr(found, "unexpected_keys", ())):
                raise KeyError(f"unexpected {', '.join(unexpected)}")
        except Exception as error:  # noqa: BLE001 - code of others
            kind = type(module).__name__
            reason = (
                f"{kind}.load_state_dict refuses the result of {kind}.state_dict, so no resume "
                f"could load it: {error}"
            )
            return [(name, reason) for name in strange[:1] or [""]]
    return []


def _without_layers(live: LiveModule, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a `state_dict` without the entries of quantized layers, which are loaded apart."""
    if not live.quantized:
        return state
    names = {raw for clean, raw in live.raw_names.items() if _is_within(clean, live.quantized)}
    kept: Any = OrderedDict((raw, value) for raw, value in state.items() if raw not in names)
    kept._metadata = getattr(state, "_metadata", {})
    return kept  # type: ignore[no-any-return]


def _can_be_tried(module: nn.Module) -> bool:
    # The hooks of FSDP1 gather the parameters of all ranks, and look for them by identity.
    return not any(type(inner).__name__ == "FullyShardedDataParallel" for inner in module.modules())


def not_saved(component: str, wrapped: nn.Module, elsewhere: Collection[int] = ()) -> list[str]:
    """List non-persistent buffers and attributes, in no other component, that are not saved."""
    module = unwrap_module(wrapped)
    cleaner = cleaner_of(module)
    lines = []
    for raw, inner in module.named_modules():
        for name, what in (*_lost_buffers(inner), *_lost_attributes(inner, elsewhere)):
            path = cleaner.clean(f"{raw}.{name}".lstrip("."))
            lines.append(f"{component}.{path}: {what}")
    return lines


def _lost_buffers(inner: nn.Module) -> Iterator[tuple[str, str]]:
    for name in sorted(inner._non_persistent_buffers_set):
        if inner._buffers.get(name) is not None:
            yield name, "non-persistent buffer"


def _lost_attributes(inner: nn.Module, elsewhere: Collection[int]) -> Iterator[tuple[str, str]]:
    kind = type(inner)
    if kind.get_extra_state is not nn.Module.get_extra_state:
        return  # The module saves more than its buffers by its own code.
    for name, value in vars(inner).items():
        if id(value) in elsewhere:
            continue
        # A tensor that is no leaf was computed from others, such as a normalized weight.
        if isinstance(value, Tensor) and value.is_leaf:
            yield name, "a tensor that is neither parameter nor buffer"
        elif generators.kind_of(value) is not None and not generators.is_global(value):
            yield name, "a random generator; make it a component of the state"


def stamp(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a cache key of a module's tree: names of entries, and versions of submodules."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return (tuple(state), None)
    return (tuple(state), {raw: entry.get("version") for raw, entry in metadata.items()})


def capture_module(
    module: nn.Module,
    state: Mapping[str, Any],
    leaves: Leaves,
    unsaved: Mapping[str, str],
    frozen: Mapping[str, str],
) -> TreeDocument | None:
    """Encode a module's tree from its state dict, without the `frozen` parameters.

    `unsaved` describes non-persistent buffers.
    """
    live = inspect(module, state)
    for name in live.collisions:
        leaves.record_refusal(name, _COLLISION)
    for key in live.strange_keys:
        leaves.record_refusal(key, "a key of the state_dict that is not text")
    versions = {
        path: version
        for path, version in (live.versions or {}).items()
        if version != 1 and path not in live.of_torch
    }
    # By name: a hook of the module may save a parameter under another one, or not at all.
    known = {**live.leaves, **live.settings}
    frozen = {name: text for name, text in frozen.items() if name in known}
    entries = {name: value for name, value in live.entries.items() if name not in frozen}
    return encoded(entries, leaves, versions=versions, unsaved=unsaved, frozen=frozen)


class ModulePlan(LoadPlan):
    """A load into one module: checks, then copies into its leaves."""

    _live: LiveModule
    _is_strict = True
    _has_own = False
    _versions: Mapping[str, int] = MappingProxyType({})
    _frozen: Mapping[str, str] = MappingProxyType({})

    def __init__(self, component: str, live: LiveModule, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__(component, live, specs)
        self._wanted: dict[str, Any] = {}
        self._pairs: list[StoredPair] = []
        self._lifted: dict[str, Any] = {}
        self._inner: dict[str, list[InnerPair]] = {}
        self._lives: dict[int, Tensor] = {}
        self._own_loading: frozenset[str] = live.own_loading
        self._is_opaque = live.is_opaque
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._left: set[str] = set()

    def check(self, stored: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Match stored with live names; record what does not fit."""
        component, live = self._component, self._live
        revive(stored, list(live.entries.values()), component, problems)
        known_names = stored.value if isinstance(stored.value, dict) else {None: None}
        if not all(isinstance(name, str) for name in known_names):
            raise FormatError(f"{component}: the stored tree is not from a module")
        for name in live.collisions:
            problems.offenders.append((f"{component}.{name}", _COLLISION))
        renamed = wishes.rename.map_names(stored.value, component)
        self._versions = _renamed_versions(stored.versions, renamed)
        old_names = {new: old for old, new in renamed.items()}
        if stored.frozen:
            old_names |= self._note_frozen(stored.frozen, wishes)
        names, is_excluded = {**live.entries, **old_names}, wishes.selection.is_excluded
        left = {name for name in names if is_excluded(component, name, old_names.get(name, name))}
        wanted = {new: stored.value[old] for old, new in renamed.items() if new not in left}
        loaded = [name for name in live.entries if name not in left]
        problems.names[component] = ({**wanted, **self._frozen}, loaded)
        missing = [name for name in loaded if name not in wanted and name not in self._frozen]
        unexpected = [name for name in wanted if name not in live.entries]
        if any(_is_within(name, live.converting) for name in (*missing, *unexpected)):
            self._own_loading |= live.converting
            self._is_opaque = True
        self._left, self._is_strict = left, wishes.strict and not wishes.is_grown
        # The module's own code may convert names; it is asked before anything changes.
        self._missing = [name for name in missing if self._is_own(name)]
        self._unexpected = [name for name in unexpected if self._is_own(name)]
        for name in missing:
            if not self._is_own(name):
                self._note_missing(name, problems)
        problems.unexpected += [
            f"{component}.{name}" for name in unexpected if not self._is_own(name)
        ]
        known = {*loaded, *self._unexpected}
        self._wanted = {name: value for name, value in wanted.items() if name in known}
        if wishes.resizing:
            wishes.resizing.resize_module(
                component, self._wanted, live.tensors, old_names, self._specs
            )
        self._check_values(problems)
        self._compare_unsaved(stored.unsaved, wishes, problems)
        if self._frozen:
            wishes.resizing.note_names(component, self._frozen)
            self._compare_frozen(left, wishes, problems)

    def _note_frozen(self, recorded: Mapping[str, str], wishes: Wishes) -> dict[str, str]:
        """Note the parameters that are recorded by digest; return live name -> stored name."""
        renamed = wishes.rename.map_names(recorded, self._component)
        self._frozen = {new: recorded[old] for old, new in renamed.items()}
        return {new: old for old, new in renamed.items()}

    def _compare_frozen(self, left: Collection[str], wishes: Wishes, problems: Problems) -> None:
        """Compare the parameters that are recorded by digest, except `left`, with the live ones."""
        component, live = self._component, self._live
        self._frozen = {name: text for name, text in self._frozen.items() if name not in left}
        unknown = [name for name in self._frozen if name not in live.entries]
        problems.unexpected += [f"{component}.{name}" for name in unknown]
        leaves = {**live.leaves, **entries_of_layers(live.module)}
        fault = find_differences(component, leaves, self._frozen)
        if fault is None:
            return
        if wishes.strict and not wishes.is_grown:
            problems.other.append(f"{fault}. {_OTHER_BASE}")
        else:
            problems.lost.append(fault)

    def _compare_unsaved(
        self, stored: Mapping[str, str], wishes: Wishes, problems: Problems
    ) -> None:
        """Record non-persistent buffers that are not those of the saved model."""
        if not stored:
            return
        live = {path: buffer for path, _, _, buffer in buffers_of(self._live.module)}
        for old, new in wishes.rename.map_names(stored, self._component).items():
            if new not in live or self._is_deselected(wishes, new, old):
                continue
            grown = other_size(stored[old], live[new])
            found = None if grown else difference(stored[old], live[new])
            if grown:
                problems.notes.append(
                    f"{self._component}.{new}: this buffer is not persistent: {grown}"
                )
            elif found is not None:
                problems.lost.append(
                    f"{self._component}.{new}: this buffer is not persistent, so it is not "
                    f"loaded, and its values differ: {found}. Compute it again after "
                    "`to_empty`, or register it as persistent"
                )

    def _note_missing(self, name: str, problems: Problems) -> None:
        """Record an entry that the checkpoint lacks; a hook may have left out one like this."""
        live, path = self._live.entries[name], f"{self._component}.{name}"
        reason = refusal(live) if isinstance(live, Tensor) else None
        if reason is None or reason in PASSING:
            problems.missing.append(path)
        else:
            problems.notes.append(
                f"{path}: keeps its value, as no checkpoint can hold it: {reason}"
            )

    def _is_deselected(self, wishes: Wishes, *names: str) -> bool:
        selection, component = wishes.selection, self._component
        is_skipped = any(selection.skips(component, name) for name in names)
        return is_skipped or not any(selection.includes(component, name) for name in names)

    def _is_own(self, name: str) -> bool:
        """Whether loading code of the module's own may convert the entry."""
        return _is_within(name, self._own_loading) and not _is_within(name, self._live.quantized)

    def _check_values(self, problems: Problems) -> None:
        self.destinations.look_in([*self._live.entries.values()])
        for name, value in self._wanted.items():
            live = self._live.entries.get(name)
            path = f"{self._component}.{name}"
            if name not in self._live.entries or name in self._live.settings:
                self.destinations.match(None, value, path, problems)
            elif isinstance(value, SubclassRef) or (
                isinstance(live, Tensor) and is_subclass(local_of(live))
            ):
                shards = self.destinations.shards
                self._inner[name] = match_inner(path, value, live, self._specs, problems, shards)
                if isinstance(live, Tensor):
                    self._lives[id(value)] = live
            elif isinstance(live, Tensor) and name not in self._live.extras:
                self._check_tensor(path, name, live, value, problems)
            elif isinstance(value, TensorRef) and name not in self._live.extras:
                problems.other.append(f"{path}: the stored value is a tensor, the live one is not")
            else:
                self.destinations.match(None, value, path, problems)

    def _check_tensor(
        self, path: str, name: str, live: Tensor, value: Any, problems: Problems
    ) -> None:
        reason = refusal(live)
        if is_lazy(live) and self._is_own(name):
            return
        if reason is not None:
            problems.offenders.append((path, reason))
        elif not isinstance(value, TensorRef):
            problems.other.append(f"{path}: the live value is a tensor, the stored one is not")
        else:
            problems.check_spec(path, self._specs[value.key], live, any_shape=self._is_own(name))
            self.destinations.match(live, value, path, problems)

    def prepare(self, tensors: Mapping[str, Stored], claims: Claims) -> None:
        """Pair stored tensors with live leaves; nothing live changes in the end."""
        placed = self.destinations.placed(tensors) if self._is_opaque else tensors
        lifted = read_all(placed) if self._is_opaque else Fetching(placed)
        lifting = Lifting(lifted, self._lives)
        wanted = self._prepare_layers(tensors, claims) if self._live.quantized else self._wanted
        for name, value in wanted.items():
            if self._is_opaque or name in self._live.extras:
                self._lifted[name] = lifting.lift_tree(value)
            leaf = self._live.leaves.get(name)
            pairs = self._inner.get(name, [])
            if isinstance(value, TensorRef) and leaf is not None:
                pairs = [(f"{self._component}.{name}", leaf, value)]
            for path, live, ref in pairs if leaf is not None and not self._is_own(name) else ():
                stored = tensors[ref.key] if live is leaf else stored_for(path, live, tensors, ref)
                claims.assign(path, live, stored)
                if not self._is_opaque:
                    self._pairs.append((local_of(live), stored))
        self._has_own = bool(self._lifted or self._missing)
        if self._has_own and _can_be_tried(self._live.module):
            self._try(lifted, claims)

    def _prepare_layers(self, tensors: Mapping[str, Stored], claims: Claims) -> dict[str, Any]:
        """Pair or compare the entries of quantized layers; return the other wanted entries."""
        from holdfast.state.bnb_layers import match_settings

        live, others = self._live, dict[str, Any]()
        for name, value in self._wanted.items():
            path = f"{self._component}.{name}"
            if not _is_within(name, live.quantized) or not isinstance(value, TensorRef):
                others[name] = value
            elif name in live.settings:
                stored, number = fetched(tensors[value.key]), live.settings[name]
                pair = match_settings(path, stored, live.entries[name], number)
                self._pairs += [] if pair is None else [pair]
            else:
                claims.assign(path, live.leaves[name], tensors[value.key])
                self._pairs.append((local_of(live.leaves[name]), tensors[value.key]))
        return others

    def _try(self, tensors: Mapping[str, Tensor], claims: Claims) -> None:
        """Run the module's own loading code on copies of the values, and undo what it changes."""
        live = self._live
        kept = {name: self._wanted[name] for name in self._lifted}
        copied = {key: tensors[key].clone() for name in kept for key in keys_in(kept[name])}
        lifting = Lifting(copied, self._lives)
        values = {name: lifting.lift_tree(value) for name, value in kept.items()}
        tried = [*live.module.modules()] if self._is_opaque else [*live.extras.values()]
        with undo_changes(tried, written=tried):
            try:
                missing, unexpected = self._call_module_loader(values)
            except Exception as error:
                raise self._make_refusal(str(error)) from error
        if self._is_strict and (missing or unexpected):
            raise self._make_refusal("")
        for names, why in ((missing, "not in the checkpoint, unchanged"), (unexpected, NOT_LOADED)):
            for name in names:
                claims.add_note(f"{self._component}.{name}: {why}")

    def _make_refusal(self, error: str) -> MismatchError:
        component, kind = self._component, type(self._live.module).__name__
        names = self._live.entries.keys() - self._left
        hint = proposal([(self._wanted, names)]) if self._missing else None
        reason = f"{component}: the loading code of {kind} refuses this state: {error}"
        return MismatchError(
            "the checkpoint",
            missing=[f"{component}.{name}" for name in self._missing],
            unexpected=[f"{component}.{name}" for name in self._unexpected],
            hint="\n".join(filter(None, (hint, reason if error else ""))),
        )

    def _call_module_loader(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Call the module's own loading code; returns names that it misses and does not know."""
        live = self._live
        if not self._is_opaque:
            for name, value in values.items():
                live.extras[name].set_extra_state(value)
            return [], []
        # Parameters that are recorded by digest were compared: they are as when saved.
        names = [one for one in self._frozen if not _is_within(one, live.quantized)]
        frozen = {name: live.entries[name] for name in names if name in live.entries}
        everything = {**values, **frozen}
        raw = self._with_versions({self._raw_name(name): one for name, one in everything.items()})
        # What was left out is missing on purpose.
        is_strict = self._is_strict and not (self._left or live.quantized)
        found = live.module.load_state_dict(raw, strict=is_strict)
        clean = cleaner_of(live.module).clean
        missing = [clean(name) for name in getattr(found, "missing_keys", ())]
        unexpected = [clean(name) for name in getattr(found, "unexpected_keys", ())]
        missing = [name for name in missing if self._is_own(name) and name not in self._left]
        return missing, [name for name in unexpected if self._is_own(name)]

    def _raw_name(self, name: str) -> str:
        """Return the name that a stored entry has in the module's `state_dict`."""
        if name in self._live.raw_names:
            return self._live.raw_names[name]
        inner = max(
            ((clean, raw) for raw, clean in self._live.raw_paths if _is_within(name, {clean})),
            key=lambda one: len(one[0]),
        )
        return f"{inner[1]}.{name.removeprefix(inner[0]).lstrip('.')}".lstrip(".")

    def apply(self) -> None:
        """Copy the stored tensors into the live leaves."""
        easy = [pair for pair in self._pairs if is_writable_in_place(pair[0])]
        copy_tensors(easy)
        for live, stored in self._pairs:
            if not is_writable_in_place(live):
                # An expanded tensor cannot be written element by element; it gets new memory.
                live.data = owned(fetched(stored), live.device)

    def finish(self) -> None:
        """Call the module's own loading code, if any: `load_state_dict` or `set_extra_state`."""
        if self._has_own:
            self._call_module_loader(self._lifted)

    def _with_versions(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with the versions of submodules, which a module's code may read."""
        if self._live.versions is None:
            return raw
        # What lacks an entry is of a version before it.
        older = {name.rpartition(".")[0] for name in self._missing}
        known = {
            path: self._live.versions.get(path, 1)
            for path in self._live.of_torch
            if path not in older
        }
        known.update(self._versions)
        state: Any = OrderedDict(raw)
        state._metadata = OrderedDict(
            (path, {"version": known.get(clean, 1)}) for path, clean in self._live.raw_paths
        )
        return state  # type: ignore[no-any-return]


def _renamed_versions(stored: Mapping[str, int], renamed: Mapping[str, str]) -> dict[str, int]:
    """Convert versions to live paths, for submodules whose leaves were renamed."""
    versions = dict(stored)
    for old, new in renamed.items():
        old_home, new_home = old.rpartition(".")[0], new.rpartition(".")[0]
        if old_home != new_home:
            versions[new_home] = stored.get(old_home, 1)
    return versions


def count_frozen(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of the parameters of a state without gradient, and of all."""
    modules = (value for value in state.values() if isinstance(value, nn.Module))
    parameters = {id(one): one for module in modules for one in module.parameters()}.values()
    sizes = [(one, sum(part.nbytes for part in plain_parts(one))) for one in parameters]
    frozen = sum(nbytes for one, nbytes in sizes if not one.requires_grad)
    return frozen, sum(nbytes for _, nbytes in sizes)


def note_loaded(components: Iterable[object]) -> None:
    """Record the modules among these components as loaded."""
    _loaded.update(item for item in components if isinstance(item, nn.Module))


def is_loaded(module: nn.Module) -> bool:
    """Whether a checkpoint was loaded into this module: by `load_weights`, `load` or `resume`."""
    return module in _loaded
