"""Components that a load allows to be in the live state only, or in the checkpoint only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import MismatchError, UsageError
from holdfast.format.manifest import Manifest
from holdfast.state.components import RNG
from holdfast.state.patterns import convert_names
from holdfast.state.selection import WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingComponentPolicy:
    """Arguments of a load that allow components in the state only, or in the checkpoint only."""

    new: Collection[str] = ()
    """Live components that the checkpoint lacks."""
    without: Collection[str] = ()
    """Stored components that the state lacks."""
    allows: Callable[[str], bool] | None = None
    """Whether another component, given by name, may be on one side only."""

    @classmethod
    def from_arguments(
        cls,
        state: Mapping[str, Any],
        new: Iterable[str],
        without: Iterable[str],
        allows: Callable[[str], bool] | None,
    ) -> MissingComponentPolicy:
        """Create them from the arguments of a load, checked against the live state."""
        sides = cls(
            new=convert_names(new, "new"), without=convert_names(without, "without"), allows=allows
        )
        sides.check_live_state(state)
        return sides

    def check_live_state(self, state: Mapping[str, Any]) -> None:
        """Check the components named in `new` and `without` against the live state."""
        live = [*state, RNG]
        for name in self.new:
            if name not in live:
                raise UsageError(f"new: the state has no component {name!r}; it has {live}")
        for name in self.without:
            if name in live:
                raise UsageError(
                    f"without: {name!r} is a component of the state; remove it from the state, "
                    f"or keep its live value with load(skip=[{name!r}])"
                )

    def one_sided(
        self, state: Mapping[str, Any], manifest: Manifest, is_asked: Callable[[str], bool]
    ) -> SkippedComponents:
        """Find the allowed components that only the state or only a checkpoint has."""
        stored = manifest.components
        live, known = {*state, RNG}, {*stored, *manifest.left_out}
        new = [name for name in (*state, RNG) if name not in known and self._may(name, self.new)]
        without = [n for n in stored if n not in live and self._may(n, self.without)]
        return SkippedComponents(
            new=tuple(filter(is_asked, dict.fromkeys(new))),
            without=tuple(filter(is_asked, without)),
        )

    def check_newest_manifest(
        self, manifest: Manifest, gone: Collection[str], *, where: str
    ) -> None:
        """Check `new` and `without` against the newest checkpoint, or raise `UsageError`."""
        stored = manifest.components
        for name in self.new:
            if name in stored and name not in gone:
                raise UsageError(
                    f"new: {where} holds {name!r}, so it is not new; remove it from `new`"
                )
        for name in self.without:
            if name not in stored:
                raise UsageError(
                    f"without: {where} holds no component {name!r}; it has {[*stored]}"
                )

    def _may(self, name: str, named: Collection[str]) -> bool:
        return name in named or (self.allows is not None and self.allows(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedComponents:
    """Components that a load skips because only the state or only the checkpoint has them."""

    new: tuple[str, ...]
    without: tuple[str, ...]

    @property
    def component_names(self) -> tuple[str, ...]:
        """Names of all these components."""
        return (*self.new, *self.without)

    @property
    def skip_notes(self) -> tuple[str, ...]:
        """Text for each of these components that says what the load did."""
        return (
            *(f"{name}: not in the checkpoint, unchanged" for name in self.new),
            *(f"{name}: in the checkpoint only, not loaded" for name in self.without),
        )


def with_hint(error: MismatchError, manifest: Manifest) -> MismatchError:
    """Add to an error the hint to pass `new` or `without`, if components are on one side only."""
    # A component that an edit removed from a checkpoint is still in the manifest.
    new = [name for name in _select_whole(error.missing) if name not in manifest.components]
    without = _select_whole(error.unexpected)
    hints = [
        f"if {what}, pass {argument}={names!r} to resume or load"
        for what, argument, names in (
            ("the run gains these components", "new", new),
            ("the run continues without these components", "without", without),
        )
        if names
    ]
    return error.hinting("; ".join(hints)) if hints else error


def _select_whole(leaves: Collection[str]) -> list[str]:
    return [leaf.removesuffix(WHOLE) for leaf in leaves if leaf.endswith(WHOLE)]
