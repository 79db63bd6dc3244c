"""The place of a new root: in or around no other root, and perhaps with things of others in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from holdfast.errors import FormatError, SealError, StoreError, UsageError, some_of
from holdfast.format import layout
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, decode_register
from holdfast.root.documents import read_if_there
from holdfast.store.base import Store

_MAX_FOLDERS = 100
_MAX_LISTED = 1000


def expect_apart(store: Store) -> None:
    """Check that the root of a new run is in no other root or checkpoint, and has no root in it.

    Inside, it looks two folders deep; in an object store at the first keys.
    """
    outer_stores = [*store.outer()]
    for outer in outer_stores:
        if _is_claimed(outer):
            raise UsageError(f"{store.url} is inside {outer.url}, the root of another run. {_HINT}")
    for outer in (store, *outer_stores[:1]):
        if _is_checkpoint(outer):
            raise UsageError(f"{store.url} is inside the checkpoint {outer.url}. {_HINT}")
    for inner in _inner_roots(store):
        raise UsageError(
            f"{store.url} has the root of another run in it: {store.url}/{inner}. {_HINT}"
        )


def others_in(store: Store) -> str:
    """Return a text on the things of others in a new root; empty if there are none.

    Folders with the names of attempts are left to gc.
    """
    names = [
        name
        for name in store.children()
        if name.rstrip("/") not in _OWN
        and layout.parse_attempt(name.rstrip("/")) is None
        and not layout.is_scratch(name.rstrip("/"))
    ]
    if not names:
        return ""
    return f"{store.url}: {some_of(names)}: not of this run, and left alone"


_OWN = layout.FOLDERS | {layout.LATEST, layout.LOG}
_HINT = "A run needs a folder of its own; put the two next to each other"


def _is_claimed(store: Store, folder: str = "") -> bool:
    with suppress(StoreError):  # such as one that may not be read
        names = store.children(f"{folder}/{layout.WRITERS}" if folder else layout.WRITERS)
        return any(layout.parse_writer(name) is not None for name in names)
    return False


def _is_checkpoint(store: Store) -> bool:
    with suppress(StoreError, FormatError):
        key = layout.MANIFEST
        try:
            return (
                read_if_there(store, key, decode_register, max_nbytes=MAX_MANIFEST_NBYTES)
                is not None
            )
        except SealError:
            return True
    return False


def _inner_roots(store: Store) -> Iterator[str]:
    if not store.has_folders:
        for info in islice(store.list(), _MAX_LISTED):
            folder, _, name = info.key.rpartition(f"/{layout.WRITERS}/")
            if folder and layout.parse_writer(name) is not None:
                yield folder
        return
    for name in _folders(store, ""):
        if _is_claimed(store, name):
            yield name
        for inner in _folders(store, name):
            if _is_claimed(store, inner):
                yield inner


def _folders(store: Store, folder: str) -> list[str]:
    with suppress(StoreError):
        names = [name[:-1] for name in store.children(folder) if name.endswith("/")]
        return [f"{folder}/{name}" if folder else name for name in names[:_MAX_FOLDERS]]
    return []
