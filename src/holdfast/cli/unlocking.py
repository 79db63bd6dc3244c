"""Decryption keys from the options before the command, for every root that it opens."""

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
    """Files, environment variables and commands that give keys; read only when needed."""

    files: Sequence[str] = ()
    variables: Sequence[str] = ()
    commands: Sequence[str] = ()
    accepts_plain: bool = False


NAMED: ContextVar[KeySources] = ContextVar("named keys")
"""Key sources given before the command, such as `--key-file`."""


def unlocked(store: Store) -> Store:
    """Wrap `store` so that it decrypts with the given keys; returned as it is without keys.

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
    """Read the keys from all given files, variables and commands.

    Raises:
        KeyUnavailable: a key cannot be obtained.
    """
    from holdfast.keys import from_command, from_environment, from_file

    groups = [from_file(path) for path in sources.files]
    groups += [from_environment(name) for name in sources.variables]
    groups += [from_command(command) for command in sources.commands]
    return tuple(key for keys in groups for key in keys)


def inner(store: Store) -> Store:
    """Return the plain store inside a decrypting one; other stores as they are."""
    from holdfast.engine.sealed.sealing import bare

    return bare(store)
