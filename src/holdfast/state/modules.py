"""Modules: their parameters and persistent buffers, by name, and copying stored ones into them.

`Module.load_state_dict` writes the first layers before it finds the last one wrong, so it is used
only where a module has its own ideas about saving or loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from holdfast.errors import FormatError
from holdfast.format.objects import ArrayRef, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import Leaves, identity, refusal
from holdfast.state.merge import Claims, copy_tensors, is_writable_in_place
from holdfast.state.names import Cleaner, cleaner_of, unwrap
from holdfast.state.problems import Problems, Wishes
from holdfast.state.trees import Lifting, Skeleton, encode, nodes_in, owned

_EXTRA_STATE = "_extra_state"
_COLLISION = "two entries have this name once wrapper prefixes are stripped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModule:
    """What a module's `state_dict` holds, and how each entry is loaded."""

    module: nn.Module
    """Without wrappers."""

    entries: Mapping[str, Any]
    """Clean name -> value in the state_dict."""

    raw_names: Mapping[str, str]
    """Clean name -> name in the state_dict."""

    leaves: Mapping[str, Tensor]
    """Clean name -> the parameter or buffer whose memory the entry is."""

    extras: Mapping[str, nn.Module]
    """Clean name of an extra state -> the submodule that takes it."""

    collisions: tuple[str, ...]
    """Clean names that two entries share."""

    strange_keys: tuple[str, ...]
    """Keys of the state_dict that are no text."""

    own_loading: frozenset[str]
    """Clean paths of submodules with loading code of their own."""

    @property
    def is_opaque(self) -> bool:
        """Whether only the module itself knows how to load what it saves."""
        known = self.leaves.keys() | self.extras.keys()
        return bool(self.own_loading) or not self.entries.keys() <= known


def inspect(wrapped: nn.Module) -> LiveModule:
    """Look at a live module; runs its `state_dict`, changes nothing."""
    module = unwrap(wrapped)
    cleaner = cleaner_of(module)
    state = module.state_dict()
    raw_names: dict[str, str] = {}
    collisions = []
    names = [raw for raw in state if isinstance(raw, str)]
    for raw in names:
        clean = cleaner.clean(raw)
        if raw_names.setdefault(clean, raw) != raw:
            collisions.append(clean)
    entries = {clean: state[raw] for clean, raw in raw_names.items()}
    return LiveModule(
        module=module,
        entries=entries,
        raw_names=raw_names,
        leaves=_live_leaves(module, entries, cleaner),
        extras=_extras(module, entries, cleaner),
        collisions=tuple(collisions),
        strange_keys=tuple(repr(raw)[:80] for raw in state if not isinstance(raw, str)),
        own_loading=frozenset(_own_loading(module, cleaner)),
    )


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
    """The entries that are the memory of a parameter or buffer, under whatever name."""
    named = _named_tensors(module, cleaner)
    found: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            continue
        live = named.get(name)
        if live is not None and _is_same(live, value):
            found[name] = live
        elif refusal(value) is None:
            others[name] = value
    if others:
        by_memory = {identity(t): t for t in named.values() if refusal(t) is None}
        for name, value in others.items():
            if identity(value) in by_memory:
                found[name] = by_memory[identity(value)]
    return {name: found[name] for name in entries if name in found}


def _is_same(live: Tensor, value: Tensor) -> bool:
    if live is value:
        return True
    if refusal(live) is not None:
        return type(live) is type(value) or refusal(value) is not None
    return value.dtype == live.dtype and value.is_set_to(live)


def _extras(
    module: nn.Module, entries: Mapping[str, Any], cleaner: Cleaner
) -> dict[str, nn.Module]:
    wanted = {name for name in entries if name.rpartition(".")[2] == _EXTRA_STATE}
    if not wanted:
        return {}
    extras = {}
    for raw, inner in module.named_modules(remove_duplicate=False):
        name = f"{cleaner.clean(raw)}.{_EXTRA_STATE}".lstrip(".")
        if name in wanted:
            extras[name] = inner
    return extras


def _own_loading(module: nn.Module, cleaner: Cleaner) -> Iterator[str]:
    for raw, inner in module.named_modules(remove_duplicate=False):
        kind = type(inner)
        ours = kind._load_from_state_dict is nn.Module._load_from_state_dict
        from_torch = ours or _defined_in_torch(kind, "_load_from_state_dict")
        plain = kind.load_state_dict is nn.Module.load_state_dict or _defined_in_torch(
            kind, "load_state_dict"
        )
        if not (from_torch and plain) or inner._load_state_dict_post_hooks:
            yield cleaner.clean(raw)


def _defined_in_torch(kind: type, method: str) -> bool:
    owner = next(base for base in kind.__mro__ if method in vars(base))
    return owner.__module__.startswith("torch.")


def not_saved(component: str, wrapped: nn.Module) -> list[str]:
    """One line for each non-persistent buffer."""
    module = unwrap(wrapped)
    cleaner = cleaner_of(module)
    lines = []
    for raw, inner in module.named_modules():
        for name in sorted(inner._non_persistent_buffers_set):
            if inner._buffers.get(name) is not None:
                path = cleaner.clean(f"{raw}.{name}".lstrip("."))
                lines.append(f"{component}.{path}: non-persistent buffer")
    return lines


def capture_module(module: nn.Module, leaves: Leaves) -> bytes:
    """The tree of a module: clean name -> tensor or extra state."""
    live = inspect(module)
    for name in live.collisions:
        leaves.refuse(name, _COLLISION)
    for key in live.strange_keys:
        leaves.refuse(key, "a key of the state_dict that is no text")
    return encode(dict(live.entries), leaves)


class ModulePlan:
    """A checked load into one module."""

    turn = 0

    def __init__(self, component: str, live: LiveModule, specs: Mapping[str, TensorSpec]) -> None:
        self._component = component
        self._live = live
        self._specs = specs
        self._values: dict[str, Any] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._lifted: dict[str, Any] = {}

    def check(self, stored: Skeleton, wishes: Wishes, problems: Problems) -> None:
        """Match stored with live names; note what does not fit."""
        component, live = self._component, self._live
        names = stored.value if isinstance(stored.value, dict) else {None: None}
        if not all(isinstance(name, str) for name in names):
            raise FormatError(f"{component}'s tree is not that of a module")
        for name in live.collisions:
            problems.offenders.append((f"{component}.{name}", _COLLISION))
        renamed = wishes.rename.apply(stored.value, component)
        wanted = {
            new: stored.value[old]
            for old, new in renamed.items()
            if not (wishes.skip.path(component, new) or wishes.skip.path(component, old))
        }
        here = [name for name in live.entries if not wishes.skip.path(component, name)]
        problems.missing += [f"{component}.{name}" for name in here if name not in wanted]
        problems.unexpected += [
            f"{component}.{name}" for name in wanted if name not in live.entries
        ]
        self._values = {name: wanted[name] for name in here if name in wanted}
        self._check_values(problems)
        self._check_ties(problems)

    def _check_values(self, problems: Problems) -> None:
        for name, value in self._values.items():
            live = self._live.entries[name]
            path = f"{self._component}.{name}"
            if isinstance(live, Tensor) and name not in self._live.extras:
                self._check_tensor(path, name, live, value, problems)
            elif isinstance(value, TensorRef) and name not in self._live.extras:
                problems.other.append(f"{path}: stored a tensor, live it is none")

    def _check_tensor(
        self, path: str, name: str, live: Tensor, value: Any, problems: Problems
    ) -> None:
        reason = refusal(live)
        if reason is not None:
            problems.offenders.append((path, reason))
        elif not isinstance(value, TensorRef):
            problems.other.append(f"{path}: stored no tensor, live it is one")
        else:
            resizes = name.rpartition(".")[0] in self._live.own_loading
            problems.compare(path, self._specs[value.key], live, any_shape=resizes)

    def _check_ties(self, problems: Problems) -> None:
        """One live tensor cannot take two stored values."""
        taken: dict[Any, tuple[str, str]] = {}
        for name, value in self._values.items():
            live = self._live.leaves.get(name)
            if live is None or not isinstance(value, TensorRef) or refusal(live) is not None:
                continue
            first, key = taken.setdefault(identity(live), (name, value.key))
            if key != value.key:
                problems.other.append(
                    f"{self._component}.{first} and {name} are one tensor here, "
                    "and were two when saved"
                )

    @property
    def needed(self) -> tuple[str, ...]:
        """Keys of the tensors that will be read."""
        refs = (n.key for n in nodes_in(self._values) if isinstance(n, TensorRef | ArrayRef))
        return tuple(dict.fromkeys(refs))

    def prepare(self, tensors: Mapping[str, Tensor], claims: Claims) -> None:
        """Bring the bytes to the leaves they are for; nothing live changes."""
        lifting = Lifting(tensors)
        for name, value in self._values.items():
            if self._live.is_opaque or name in self._live.extras:
                self._lifted[name] = lifting.lift_tree(value)
            else:
                live, image = self._live.leaves[name], tensors[value.key]
                claims.agree(f"{self._component}.{name}", live, image)
                self._pairs.append((live, image))

    def apply(self) -> None:
        """Copy the leaves."""
        easy = [pair for pair in self._pairs if is_writable_in_place(pair[0])]
        copy_tensors(easy)
        for live, stored in self._pairs:
            if not is_writable_in_place(live):
                # Expanded memory cannot be written element by element; it gets its own.
                live.data = owned(stored, live.device)

    def finish(self) -> None:
        """Hand over what only the module's own code can load."""
        live = self._live
        if live.is_opaque:
            raw = {live.raw_names[name]: value for name, value in self._lifted.items()}
            is_whole = self._values.keys() == live.entries.keys()
            live.module.load_state_dict(raw, strict=is_whole)
        else:
            for name, value in self._lifted.items():
                live.extras[name].set_extra_state(value)
