"""The record of a mutant, which is a fault seeded in our own code; the tables consist of these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A small change of the source that breaks a promise, with the tests that should catch it."""

    name: str
    """Unique; words with hyphens between them: `manifest-without-fsync`."""
    promise: str
    """The tag of tests/README.md that it breaks, and the promise in a few words."""
    place: str
    """Function, class or constant that it changes, such as `Attempt.commit`, in any module."""
    before: str
    """Text that occurs exactly once in all definitions of that name."""
    after: str
    """The text that replaces it."""
    near: tuple[str, ...]
    """Paths of tests, relative to the project, that are run first; the whole tier follows."""
