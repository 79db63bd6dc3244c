"""Options of a load, and the differences that it finds between a stored state and the live one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from typing_extensions import override

from holdfast.errors import MismatchError, UnsupportedState, UsageError, listing
from holdfast.format.objects import join_path
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import DTYPE_NAMES
from holdfast.state.patterns import Entries
from holdfast.state.resizing import RESIZABLE, Resize, Resizing, name_dimension, only_difference

_PARTS = frozenset(
    {
        "module",
        "model",
        "_orig_mod",
        "_forward_module",
        "_checkpoint_wrapped_module",
        "_fsdp_wrapped_module",
        "_dp_wrapped_module",
    }
)
"""Parts of names that torch.compile, data parallelism, Lightning and others add."""

Sides: TypeAlias = tuple[Collection[str], Collection[str]]
"""The stored and the live names of one component."""


def proposal(sides: Sequence[Sides], *, is_divided: bool = False) -> str | None:
    """Return a `rename=` that adds or removes wrappers' parts so that all names fit, or None."""
    if not any(stored and live for stored, live in sides):
        return None
    for what, code, rule in _rules(sides):
        if all(_fits(stored, live, rule, is_divided) for stored, live in sides):
            return f"the paths differ by {what} alone; pass rename=lambda name: {code}"
    return None


def _fits(
    stored: Collection[str], live: Collection[str], rule: Callable[[str], str], is_divided: bool
) -> bool:
    renamed = {rule(name) for name in stored}
    is_unique = len(renamed) == len({*stored})
    return is_unique and (renamed == {*live} or (is_divided and renamed > {*live}))


def _rules(sides: Sequence[Sides]) -> Iterator[tuple[str, str, Callable[[str], str]]]:
    """Yield (difference, source code, function) of each rule that may fit."""
    names = [next(iter(of)) for both in sides for of in both if of]
    leads = dict.fromkeys(lead for name in names for lead in _leads(name))
    for new in leads:
        for old in leads:
            if new != old:
                yield _of_prefix(old, new)
    inner = dict.fromkeys(
        part for stored, _ in sides for name in stored for part in name.split(".")[:-1]
    )
    parts = [part for part in inner if part in _PARTS]
    for chosen in (*([part] for part in parts), parts if len(parts) > 1 else []):
        if chosen:
            yield _of_parts(chosen)


def _leads(name: str) -> Iterator[str]:
    """Yield the prefixes of a name that consist of wrappers' parts, the empty one first."""
    lead = ""
    yield lead
    for part in name.split(".")[:-1]:
        if part not in _PARTS:
            return
        lead += part + "."
        yield lead


def _of_prefix(old: str, new: str) -> tuple[str, str, Callable[[str], str]]:
    added = f'"{new}" + ' if new else ""
    removed = f'name.removeprefix("{old}")' if old else "name"
    shown = " and ".join(repr(prefix) for prefix in (old, new) if prefix)
    return shown, added + removed, lambda name: new + name.removeprefix(old)


def _of_parts(parts: Sequence[str]) -> tuple[str, str, Callable[[str], str]]:
    def rule(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in parts)

    shown = " and ".join(repr(f"{part}.") for part in parts)
    listed = ", ".join(f'"{part}"' for part in parts)
    condition = f"part != {listed}" if len(parts) == 1 else f"part not in ({listed})"
    return shown, f'".".join(part for part in name.split(".") if {condition})', rule


_MAX_KEY_BITS = 2000
WHOLE = " (the whole component)"
"""End of the path that stands for a component of which one side has nothing."""
NOT_LOADED = "in the checkpoint only, not loaded"
"""Note on a stored leaf that no live one matches."""


def names_of_keys(keys: Iterable[Any]) -> dict[Any, str]:
    """Map the keys of one dict to unique names in paths: texts, and others with a type if alike."""
    keys = list(keys)
    texts = {key for key in keys if type(key) is str}
    names: dict[Any, str] = {}
    for key in keys:
        if type(key) is str:
            names[key] = key
        else:
            shown = _format_key(key)
            names[key] = f"{type(key).__name__}({shown})" if shown in texts else shown
    return names


def _format_key(key: Any) -> str:
    # Python refuses to write very long numbers.
    if type(key) is int:
        return str(key) if key.bit_length() < _MAX_KEY_BITS else "<int>"
    return str(key) if type(key) in (bool, float, type(None)) else f"<{type(key).__name__}>"


class Selection:
    """Selection of leaves to load: those in `include`, or all, without those in `skip`."""

    def __init__(self, *, include: Collection[str] = (), skip: Collection[str] = ()) -> None:
        self._include = Entries(include, "include")
        self._skip = Entries(skip, "skip")
        self._left: dict[str, dict[str, None]] = defaultdict(dict)

    @override
    def __str__(self) -> str:
        return f"include={self._include.given}, skip={self._skip.given}"

    def omits(self, component: str) -> bool:
        """Whether the whole component is excluded, judged by its name only."""
        is_skipped = self._skip.cover(component)
        return is_skipped or (bool(self._include) and not self._include.reach(component))

    def is_partial(self, component: str) -> bool:
        """Whether a part of the component may be excluded, so that each leaf must be matched."""
        within = self._skip.reach_inside(component) or self._include.reach_inside(component)
        return within or not self.includes(component)

    def is_excluded(self, component: str, *names: str) -> bool:
        """Whether a leaf is excluded; an entry may match any of its `names`, stored and live."""
        if not (self._include or self._skip):
            return False
        # All names are matched, not only the first: every entry that matches one is used.
        called = {*names} or {""}
        skipped = [self.skips(component, name) for name in called]
        included = [self.includes(component, name) for name in called]
        if any(skipped) or not any(included):
            self.note_left(component, names[0] if names else "")
            return True
        return False

    def skips(self, component: str, name: str = "") -> bool:
        """Whether `skip` matches a leaf or a container, or an ancestor of it."""
        return self._skip.cover(join_path(component, name) if name else component)

    def includes(self, component: str, name: str = "") -> bool:
        """Whether `include` is empty, or matches a leaf or a container, or an ancestor of it."""
        if not self._include:
            return True
        return self._include.cover(join_path(component, name) if name else component)

    def note_left(self, component: str, name: str) -> None:
        """Record an excluded leaf, for `notes`."""
        self._left[component][name] = None

    def list_excluded(self, components: Collection[str]) -> list[str]:
        """List a message about the excluded leaves of each component."""
        return [
            f"{component}: not selected, unchanged: {shortened([name or 'all' for name in left])}"
            for component, left in self._left.items()
            if component in components
        ]

    def unmatched(self, unseen: Collection[str]) -> list[str]:
        """List a message for each argument with entries that matched nothing."""
        return [*self._include.unmatched(unseen), *self._skip.unmatched(unseen)]


def shortened(names: Sequence[str], limit: int = 3) -> str:
    """Format the first `limit` names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerated:
    """Leaves that only one side has, in a load that allows them."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """A text for each kind of them that there is."""
        kinds = {"not in the checkpoint, left unchanged": self.missing, NOT_LOADED: self.unexpected}
        return [f"{what}: {shortened(paths, 10)}" for what, paths in kinds.items() if paths]


@dataclass(slots=True, kw_only=True)
class Problems:
    """Problems of all components of a load, which are raised together."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)
    untaken: list[str] = field(default_factory=list)
    """Stored leaves that only other ranks may have; expected until all ranks have looked."""
    other: list[str] = field(default_factory=list)
    """Problems in whole sentences, which are about more than a leaf."""
    offenders: list[tuple[str, str]] = field(default_factory=list)
    """Live leaves into which nothing can be loaded, with the reason."""
    notes: list[str] = field(default_factory=list)
    """Notes on what was left out or cannot be exact, and is no reason to refuse."""
    lost: list[str] = field(default_factory=list)
    """Notes on live values that the load removes, which are logged as warnings."""
    resizable: dict[str, int | None] = field(default_factory=dict)
    """Tensors of `wrong_shape` → the only dimension that differs; None: `resize` cannot help."""
    optimizers: set[str] = field(default_factory=set)
    """Components that are optimizers, whose slots are resized with their parameters."""
    names: dict[str, Sides] = field(default_factory=dict)
    """Stored and live names of modules and optimizers, to which a `rename` applies."""

    def check_spec(
        self, path: str, spec: TensorSpec, live: Tensor, *, any_shape: bool = False
    ) -> None:
        """Record a stored tensor whose shape or dtype differs from the live one."""
        if spec.shape != tuple(live.shape) and not any_shape:
            self.record_shape(path, spec.shape, live.shape)
            if spec.dtype not in RESIZABLE:
                self.resizable[path] = None
        if spec.dtype != DTYPE_NAMES[live.dtype]:
            live_dtype = DTYPE_NAMES[live.dtype]
            self.wrong_dtype.append(f"{path}: stored {spec.dtype}, live {live_dtype}")

    def record_shape(
        self, path: str, stored: Sequence[int], live: Sequence[int], *, how: str = "stored"
    ) -> None:
        """Record a tensor of another shape."""
        self.wrong_shape.append(f"{path}: {how} {[*stored]}, live {[*live]}")
        self.resizable[path] = only_difference(stored, live)

    def tolerate(self, tolerates: Callable[[str], bool]) -> Tolerated:
        """Turn those missing and unexpected leaves into notes that `tolerates` accepts."""
        found = Tolerated(
            missing=tuple(filter(tolerates, self.missing)),
            unexpected=tuple(filter(tolerates, self.unexpected)),
        )
        self.notes += [f"{path}: not in the checkpoint, unchanged" for path in found.missing]
        self.notes += [f"{path}: {NOT_LOADED}" for path in found.unexpected]
        self.missing = [path for path in self.missing if path not in found.missing]
        self.unexpected = [path for path in self.unexpected if path not in found.unexpected]
        return found

    def raise_if_any(self, where: str) -> None:
        """Raise all problems as one error, if there are any."""
        if self.offenders:
            raise UnsupportedState(self.offenders)
        leaves = (self.missing, self.unexpected, self.wrong_shape, self.wrong_dtype)
        if any(leaves) or self.other:
            raise MismatchError(
                where,
                missing=self.missing,
                unexpected=self.unexpected,
                wrong_shape=self.wrong_shape,
                wrong_dtype=self.wrong_dtype,
                hint=self._hint(),
            )

    def _hint(self) -> str:
        """List other problems, and suggest arguments that let similar paths fit."""
        hints = ["and also:\n" + listing(self.other)] if self.other else []
        found = None
        if self.missing:
            found = proposal([*self.names.values()], is_divided=bool(self.untaken))
        sides = self.names.values()
        is_grown = any({*live} != {*stored} and {*live} & {*stored} for stored, live in sides)
        if found is None and is_grown and (self.missing or self.unexpected):
            found = (
                "if the model has gained or lost parameters, pass strict=False (docs/loading.md)"
            )
        if self.wrong_shape and self.names:
            skip, resize = self._entries_to_skip(), self._entries_to_resize()
            way = f"to grow or cut the stored ones, pass resize={resize}; else " if resize else ""
            hints.append(
                f"parameters of other shapes cannot be loaded: {way}make the model as it was "
                "saved, or start a run in another root without them, by load or load_weights "
                f"with skip={skip or '[…]'} (docs/loading.md)"
            )
        return "\n".join([found, *hints] if found else hints)

    def _entries_to_resize(self) -> dict[str, str | int]:
        """Return entries for `resize` with which all shapes fit; none if there are no such."""
        dims = {path: dim for path, dim in self.resizable.items() if dim is not None}
        if self.other or len(dims) < len(self.wrong_shape) or any("*" in path for path in dims):
            return {}
        slots = {path for path in dims if path.split(".")[0] in self.optimizers}
        chosen = [path for path in dims if path not in slots] or [*dims]
        return {path: name_dimension(dims[path]) for path in chosen}

    def _entries_to_skip(self) -> list[str]:
        """Return entries for `skip` with which all the rest fits; none if there are no such."""
        shapes = [entry.partition(": stored")[0] for entry in self.wrong_shape]
        paths = dict.fromkeys([*shapes, *self.missing, *self.unexpected])
        known = {
            join_path(component, name)
            for component, sides in self.names.items()
            for name in (*sides[0], *sides[1])
        }
        fitting = known.difference(paths)
        if self.other or self.wrong_dtype or not fitting or any("*" in path for path in paths):
            return []
        kept = {prefix for path in fitting for prefix in _prefixes(path)}
        entries = dict.fromkeys(
            next((prefix for prefix in [*_prefixes(path)][1:] if prefix not in kept), path)
            for path in paths
        )
        by_end = {f"{entry.split('.')[0]}.**.{entry.rpartition('.')[2]}": None for entry in entries}
        if len(by_end) < len(entries) and not any(map(Entries(by_end, "skip").cover, fitting)):
            return [*by_end]
        return [*entries]


def _prefixes(path: str) -> Iterator[str]:
    """Yield a path's component, and what is above the leaf, down to the leaf itself."""
    parts = path.split(".")
    return (".".join(parts[: number + 1]) for number in range(len(parts)))


class Rename:
    """The `rename` option: stored leaf path -> live leaf path, inside a component."""

    def __init__(self, rule: RenameRule) -> None:
        self._table = rule if isinstance(rule, Mapping) else None
        self._call = rule if callable(rule) else None
        self._unused = set(self._table or ())

    def map_names(self, stored: Iterable[str], component: str) -> dict[str, str]:
        """Map all stored names of one component to live names."""
        renamed = {name: self._one(name) for name in stored}
        if self._table is None and self._call is None:
            return renamed
        taken: dict[str, str] = {}
        for old, new in renamed.items():
            if new in taken:
                raise UsageError(
                    f"rename: {component}.{taken[new]} and {component}.{old} both become {new!r}"
                )
            taken[new] = old
        return renamed

    def _one(self, name: str) -> str:
        if self._call is not None:
            new = self._call(name)
            if not isinstance(new, str):
                raise UsageError(f"rename({name!r}) returned {new!r}, not a name")
            return new
        if self._table is None:
            return name
        self._unused.discard(name)
        return self._table.get(name, name)

    def unmatched(self) -> list[str]:
        """Return a message about entries that match no stored name, as a list; empty if none."""
        if not self._unused:
            return []
        return [f"rename: nothing stored is called {sorted(self._unused)}"]


RenameRule: TypeAlias = Mapping[str, str] | Callable[[str], str] | None
"""Mapping or function from stored paths to live paths; None: they are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLoadOptions:
    """Options of a load into a live state: which leaves are loaded, and under which names."""

    components: Collection[str] | None = None
    """Names of the components to load; None: all."""
    strict: bool = True
    """Whether missing and unexpected leaves, and arguments that name nothing, are an error;
    otherwise they become notes. Another shape or dtype is an error either way."""
    is_grown: bool = False
    """Whether modules may have gained or lost parameters since; the load is still full."""
    rename: RenameRule = None
    """From stored to live paths inside modules, and names of an optimizer's parameters."""
    include: Collection[str] = ()
    """Load only these: components, `component.path` or what is above it, or patterns (see
    `state.patterns`). Empty: all."""
    skip: Collection[str] = ()
    """Parts of `include` that are not loaded; entries have the same form."""
    resize: Resize = field(default_factory=dict)
    """Tensors that are grown or cut to the live shape, and in which dimension."""
    rng: bool = True
    """Whether generator states are restored."""

    def __post_init__(self) -> None:
        Resizing(self.resize)  # raises if a dimension has no such name

    @property
    def selection(self) -> Selection:
        """The selection that `include` and `skip` describe."""
        return Selection(include=self.include, skip=self.skip)


class Wishes:
    """Options of one load, with its rename and selection, which note the entries that matched."""

    def __init__(self, options: StateLoadOptions) -> None:
        self.strict = options.strict
        self.is_grown = options.is_grown
        self.rename = Rename(options.rename)
        self.selection = options.selection
        self.resizing = Resizing(options.resize)
