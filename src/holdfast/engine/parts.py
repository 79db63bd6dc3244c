"""What is left of a checkpoint from which retention dropped components (docs/design.md, rule 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.catalog import Marks
from holdfast.errors import NotFound
from holdfast.format.manifest import Manifest
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of a checkpoint, by what is left of their files."""

    whole: tuple[str, ...]
    """All files are there, or nobody began to drop it: then a missing file is damage."""
    begun: tuple[str, ...] = ()
    """Some files were dropped, some are left."""
    gone: tuple[str, ...] = ()
    """No file is left."""


def parts_of(store: Store, folder: str, manifest: Manifest, marks: Marks) -> Parts:
    """Look at the files of the components that somebody began to drop, and at no others."""
    marked = marks.thinned
    by_left: dict[str, list[str]] = {"whole": [], "begun": [], "gone": []}
    for name, component in manifest.components.items():
        left = _left(store, folder, component.files) if name in marked else "whole"
        by_left[left].append(name)
    return Parts(**{left: tuple(names) for left, names in by_left.items()})


def _left(store: Store, folder: str, files: Sequence[str]) -> str:
    found = [_is_there(store, f"{folder}/{file}") for file in files]
    if all(found):
        return "whole"
    return "begun" if any(found) else "gone"


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except NotFound:
        return False
    return True
