"""Resolution of typed targets to a store and a checkpoint: `ROOT`, `ROOT@which`, a folder.

Stores are opened with the keys that were named before the command.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.cli.options import NAMED, PATIENCE, KeySources
from holdfast.errors import (
    AccessDenied,
    KeyUnavailable,
    NoCheckpoint,
    NotFound,
    UnsupportedStore,
    UsageError,
)
from holdfast.format import layout
from holdfast.policy.clock import Unit, parse
from holdfast.root.address import expect_writable, split_folder, split_source
from holdfast.root.catalog import Catalog, Entry, is_root, standalone
from holdfast.root.single import alone
from holdfast.store import is_web, open_store
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.store.remote.opening import SCHEMES, RemoteOptions

if TYPE_CHECKING:
    from holdfast.keys import Encryption, Key

_MAX_FILE_KEY_NBYTES = 256


def open_root_store(root: str) -> Store:
    """Open the store of a root; an object store must answer a first request within `--timeout`."""
    store = open_store(root)
    patience = parse(PATIENCE.get(), what="--timeout", units={Unit.SECOND})
    if root.partition("://")[0] not in SCHEMES and not is_web(root):
        return store
    from holdfast.store.remote import HttpStore, RemoteStore

    # Half of the time is for retries; the last retry may need the other half to connect.
    half_s = float(patience.value) / 2
    options = RemoteOptions(connect_timeout_s=min(half_s, 10.0), retry_s=half_s)
    with suppress(NotFound):
        if is_web(root):
            with suppress(AccessDenied, UnsupportedStore):
                HttpStore(root, options=options).head(layout.LATEST)
        else:
            RemoteStore(root, options=options).head(layout.LATEST)
    return store


def open_new_root(root: str, *, what: str = "") -> Store:
    """Open the store of a root that may not exist yet; another process may create it."""
    expect_writable(root)
    name, which = split_source(root)
    if which is not None:
        raise UsageError(f"{what}{root!r}: must be a whole root, without @{which}")
    from holdfast.encryption.store import bare

    store = unlocked(open_root_store(name))
    if isinstance(bare(store), MemoryStore):
        raise UsageError(f"{what}{root!r}: another process cannot see it; use a folder or a URL")
    return store


def open_root(text: str) -> Store:
    """Open the store of an existing root; for commands that take no `@`."""
    root, which = split_source(text)
    if which is not None:
        raise UsageError(f"{text!r}: this command takes a whole root, without @{which}")
    store = open_root_store(root)
    if isinstance(store, LocalStore):
        _expect_folder(store.url)
    if is_root(store):
        return unlocked(store)
    if split_folder(root)[1]:
        raise UsageError(f"{text!r} is one checkpoint; this command takes the root it is in")
    if not store.children():
        raise NoCheckpoint(f"{store.url}: empty; there are no checkpoints here")
    raise NoCheckpoint(f"{store.url}: not a root of Holdfast; it holds other files")


def names_one(text: str) -> bool:
    """Whether a target names one checkpoint, by `@` or as a folder."""
    root, which = split_source(text)
    return which is not None or bool(split_folder(root)[1])


def open_target(text: str) -> tuple[Store, str]:
    """Open the store of a target, and find the folder; its manifest may still be damaged."""
    root, which = split_source(text)
    parent, folder = split_folder(root) if which is None else ("", "")
    if folder:
        return unlocked(alone(open_root_store(parent), folder)), folder
    store = open_root(root)
    if which is not None and layout.parse_attempt(which) in Catalog(store).attempts():
        return store, which
    return store, Catalog(store).find_checkpoint(which or "latest").folder


def read_entry(store: Store, folder: str) -> Entry:
    """Read the checkpoint in a folder, which a person may have renamed."""
    name = layout.parse_attempt(folder)
    if name is None:
        return standalone(store, folder)
    entry = Catalog(store).entry(name)
    if entry is None:
        raise NoCheckpoint(f"{store.url}/{folder}: not committed, or deleted")
    return entry


def _expect_folder(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpoint(f"{path}: there is no such folder") from None
    except OSError:
        return  # The store's own error says why it cannot be read.
    if not stat.S_ISDIR(mode):
        raise NoCheckpoint(f"{path}: not a folder")


def unlocked(store: Store) -> Store:
    """Wrap a store so that it decrypts with the given keys; return it unchanged without keys."""
    keys = named_keys()
    if keys is None:
        return store
    from holdfast.encryption.store import sealing

    return sealing(store, keys)


def named_keys() -> Encryption | None:
    """Return the keys that were given before the command; None if there are none."""
    sources = NAMED.get(KeySources())
    if not (sources.files or sources.variables or sources.commands):
        return None
    from holdfast.keys import Encryption

    return Encryption(keys=keys_of(sources), accept_plain=sources.accepts_plain)


def named_file_key() -> bytes | None:
    """Return the key of another library's file, if one was given, without a line end."""
    path = NAMED.get(KeySources()).file_key
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            key = file.read(_MAX_FILE_KEY_NBYTES + 1)
    except OSError as error:
        raise KeyUnavailable(f"--file-key {path}: cannot be read: {error.strerror}") from error
    if len(key) > _MAX_FILE_KEY_NBYTES:
        raise KeyUnavailable(f"--file-key {path}: longer than a key; it must hold nothing else")
    # Raw keys may end with such a byte, too.
    return key if len(key) % 8 == 0 else key.removesuffix(b"\n").removesuffix(b"\r")


def keys_of(sources: KeySources) -> tuple[Key, ...]:
    """Read the keys from all given files, variables and commands."""
    from holdfast.keys import from_command, from_environment, from_file

    groups = [from_file(path) for path in sources.files]
    groups += [from_environment(name) for name in sources.variables]
    groups += [from_command(command) for command in sources.commands]
    return tuple(key for keys in groups for key in keys)
