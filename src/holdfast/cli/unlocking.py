"""The keys that were named before the command, for every root that it opens."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.store.base import Store

if TYPE_CHECKING:
    from holdfast.keys import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySources:
    """Where keys come from, as they were named; none of them is opened before it is needed."""

    files: Sequence[str] = ()
    variables: Sequence[str] = ()
    commands: Sequence[str] = ()
    accepts_plain: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was named."""
        return not (self.files or self.variables or self.commands)


NAMED: ContextVar[KeySources] = ContextVar("named keys")
"""What stands before the command."""


def unlocked(store: Store) -> Store:
    """`store`, opened with the keys that were named; itself where none were.

    Raises:
        KeyUnavailable: a key cannot be had.
    """
    sources = NAMED.get(KeySources())
    if sources.is_empty:
        return store
    from holdfast.engine.sealed.sealing import sealing
    from holdfast.keys import Encryption

    return sealing(store, Encryption(keys=keys_of(sources), accept_plain=sources.accepts_plain))


def given_keys() -> tuple[Key, ...]:
    """The keys that were named before the command; none when none were.

    Raises:
        KeyUnavailable: a key cannot be had.
    """
    return keys_of(NAMED.get(KeySources()))


def keys_of(sources: KeySources) -> tuple[Key, ...]:
    """All keys of some sources.

    Raises:
        KeyUnavailable: a key cannot be had.
    """
    from holdfast.keys import from_command, from_environment, from_file

    found = [from_file(path) for path in sources.files]
    found += [from_environment(name) for name in sources.variables]
    found += [from_command(command) for command in sources.commands]
    return tuple(key for keys in found for key in keys)


def inner(store: Store) -> Store:
    """The store under one that is unlocked."""
    from holdfast.engine.sealed.sealing import bare

    return bare(store)
