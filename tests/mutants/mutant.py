"""A seeded fault of our own code: the record that the tables in this folder are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One small change of the source that breaks a promise, and where tests should notice it."""

    name: str
    """Unique; words with hyphens between them: `manifest-without-fsync`."""
    promise: str
    """The tag of tests/README.md that it breaks, and the promise in a few words."""
    file: str
    """Relative to `src/holdfast`."""
    before: str
    """Text that occurs exactly once in the file."""
    after: str
    """What replaces it."""
    near: tuple[str, ...]
    """Paths of tests, relative to the project, that are run first; the whole tier follows."""
