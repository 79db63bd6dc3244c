"""Differences between a stored state and the live one, and the options of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.errors import MismatchError, UnsupportedState, UsageError, listing
from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import DTYPE_NAMES
from holdfast.state.selection import Selection

_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that wrappers of modules, such as torch.compile, add to the names in them."""


@dataclass(slots=True, kw_only=True)
class Problems:
    """Problems of all components of a load, which are raised together."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_dtype: list[str] = field(default_factory=list)

    other: list[str] = field(default_factory=list)
    """Problems in whole sentences, which are about more than a leaf."""

    offenders: list[tuple[str, str]] = field(default_factory=list)
    """Live leaves into which nothing can be loaded, with the reason."""

    notes: list[str] = field(default_factory=list)
    """Notes on what was left out or cannot be exact, and is no reason to refuse."""

    lost: list[str] = field(default_factory=list)
    """Notes on live values that the load removes, which are logged as warnings."""

    def compare(
        self, path: str, spec: TensorSpec, live: Tensor, *, any_shape: bool = False
    ) -> None:
        """Record a stored tensor whose shape or dtype differs from the live one."""
        if spec.shape != tuple(live.shape) and not any_shape:
            stored, expected = list(spec.shape), list(live.shape)
            self.wrong_shape.append(f"{path}: stored {stored}, live {expected}")
        if spec.dtype != DTYPE_NAMES[live.dtype]:
            live_dtype = DTYPE_NAMES[live.dtype]
            self.wrong_dtype.append(f"{path}: stored {spec.dtype}, live {live_dtype}")

    def tolerate(self) -> None:
        """Turn missing and unexpected leaves into notes."""
        self.notes += [f"{path}: not in the checkpoint, left as it is" for path in self.missing]
        self.notes += [f"{path}: in the checkpoint only, not loaded" for path in self.unexpected]
        self.missing.clear()
        self.unexpected.clear()

    def raise_if_any(self, where: str) -> None:
        """Raise all problems as one error, if there are any.

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
        """List other problems, and suggest a `rename=` if the paths differ by one prefix only."""
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
    """Remove a prefix from the name in a leaf path, after the component."""
    component, _, name = path.partition(".")
    return f"{component}.{name.removeprefix(prefix)}"


class Rename:
    """The `rename` option: stored leaf path -> live leaf path, inside a component."""

    def __init__(self, rule: Mapping[str, str] | Callable[[str], str] | None) -> None:
        self._table = rule if isinstance(rule, Mapping) else None
        self._call = rule if callable(rule) else None
        self._unused = set(self._table or ())

    def apply(self, stored: Iterable[str], component: str) -> dict[str, str]:
        """Map all stored names of one component to live names.

        Raises:
            UsageError: two stored names become one, or the callable did not return text.
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
                raise UsageError(f"rename({name!r}) returned {new!r}, not a name")
            return new
        if self._table is None:
            return name
        self._unused.discard(name)
        return self._table.get(name, name)

    def unmatched(self) -> list[str]:
        """List a message if entries of the mapping match no stored name."""
        if not self._unused:
            return []
        return [f"rename: nothing stored is called {sorted(self._unused)}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Options of the caller for a load."""

    strict: bool
    rename: Rename
    selection: Selection
