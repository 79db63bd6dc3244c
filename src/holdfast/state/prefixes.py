"""The `rename` that undoes the parts which wrappers of modules add to stored or live names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

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
    """Return a `rename=` that turns the stored names of each component into the live ones.

    None if no removal and addition of wrappers' parts does so. `is_divided`: other ranks may have
    what is not live here.
    """
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
