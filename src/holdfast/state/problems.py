"""What stands between a stored state and the live one, and what the caller asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.errors import MismatchError, UnsupportedState, UsageError, listing
from holdfast.format.tensors import TensorSpec
from holdfast.state.dtypes import DTYPE_NAMES
from holdfast.state.selection import Selection

_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that wrappers of modules, such as torch.compile, add to the names in them."""


@dataclass(slots=True, kw_only=True)
class Problems:
    """Every finding of all components; raised together."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)

    other: list[str] = field(default_factory=list)
    """Whole sentences that no leaf's name can say."""

    offenders: list[tuple[str, str]] = field(default_factory=list)
    """Live leaves into which nothing can be loaded, with the reason."""

    notes: list[str] = field(default_factory=list)
    """What was left out or cannot be exact, and is no reason to refuse."""

    lost: list[str] = field(default_factory=list)
    """Notes on live values that the load removes, of which a user has to be told."""

    def compare(
        self, path: str, spec: TensorSpec, live: Tensor, *, any_shape: bool = False
    ) -> None:
        """Note a stored tensor that is of another shape or dtype than the live one."""
        if spec.shape != tuple(live.shape) and not any_shape:
            stored, here = list(spec.shape), list(live.shape)
            self.wrong_shape.append(f"{path}: stored {stored}, live {here}")
        if spec.dtype != DTYPE_NAMES[live.dtype]:
            here_name = DTYPE_NAMES[live.dtype]
            self.wrong_dtype.append(f"{path}: stored {spec.dtype}, live {here_name}")

    def tolerate(self) -> None:
        """Turn what is missing or unexpected into notes."""
        self.notes += [f"{path}: not in the checkpoint, left as it is" for path in self.missing]
        self.notes += [f"{path}: in the checkpoint only, not loaded" for path in self.unexpected]
        self.missing.clear()
        self.unexpected.clear()

    def raise_if_any(self, where: str) -> None:
        """Raise everything that was found.

        Raises:
            UnsupportedState: live leaves that cannot be written.
            MismatchError: stored and live leaves differ.
        """
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
        """All other problems, and a `rename=` if the paths differ by one prefix only."""
        others = ["and also:\n" + listing(self.other)] if self.other else []
        for prefix in _PREFIXES:
            for longer, shorter, rule in (
                (self.unexpected, self.missing, f'name.removeprefix("{prefix}")'),
                (self.missing, self.unexpected, f'"{prefix}" + name'),
            ):
                if longer and {_without(path, prefix) for path in longer} == {*shorter}:
                    only = f"the paths differ by {prefix!r} alone; pass rename=lambda name: {rule}"
                    return "\n".join([only, *others])
        return "\n".join(others)


def _without(path: str, prefix: str) -> str:
    """A leaf path whose name, after the component, has lost this prefix."""
    component, _, name = path.partition(".")
    return f"{component}.{name.removeprefix(prefix)}"


class Rename:
    """Stored leaf path -> live leaf path, inside a component."""

    def __init__(self, rule: Mapping[str, str] | Callable[[str], str] | None) -> None:
        self._table = rule if isinstance(rule, Mapping) else None
        self._call = rule if callable(rule) else None
        self._unused = set(self._table or ())

    def apply(self, stored: Iterable[str], component: str) -> dict[str, str]:
        """Stored name -> live name, for all names of one component.

        Raises:
            UsageError: two stored names become one, or the callable gave no text.
        """
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
                raise UsageError(f"rename({name!r}) gave {new!r}, not a name")
            return new
        if self._table is None:
            return name
        self._unused.discard(name)
        return self._table.get(name, name)

    def unmatched(self) -> list[str]:
        """A sentence if entries of the mapping named nothing stored."""
        if not self._unused:
            return []
        return [f"rename: nothing stored is called {sorted(self._unused)}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How the caller wants to load."""

    strict: bool
    rename: Rename
    selection: Selection
