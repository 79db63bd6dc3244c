"""Keys that were named before the command, for every root that it opens."""

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
    """Named sources of keys; none of them is read before it is needed."""

    files: Sequence[str] = ()
    variables: Sequence[str] = ()
    commands: Sequence[str] = ()
    accepts_plain: bool = False


NAMED: ContextVar[KeySources] = ContextVar("named keys")
"""What stands before the command."""


def unlocked(store: Store) -> Store:
    """Return `store` with the named keys for decryption; itself if none were named.

    Raises:
        KeyUnavailable: a key cannot be obtained.
    """
    sources = NAMED.get(KeySources())
    if not (sources.files or sources.variables or sources.commands):
        return store
    from holdfast.engine.sealed.sealing import sealing
    from holdfast.keys import Encryption

    return sealing(store, Encryption(keys=keys_of(sources), accept_plain=sources.accepts_plain))


def keys_of(sources: KeySources) -> tuple[Key, ...]:
    """Read all keys of some sources.

    Raises:
        KeyUnavailable: a key cannot be obtained.
    """
    from holdfast.keys import from_command, from_environment, from_file

    groups = [from_file(path) for path in sources.files]
    groups += [from_environment(name) for name in sources.variables]
    groups += [from_command(command) for command in sources.commands]
    return tuple(key for keys in groups for key in keys)


def inner(store: Store) -> Store:
    """Return the store under the decrypting one."""
    from holdfast.engine.sealed.sealing import bare

    return bare(store)
