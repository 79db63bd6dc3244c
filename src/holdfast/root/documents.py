"""Small documents of a root, and proof that a document, a file, a folder or a root is of Holdfast.

Size limits are checked before the download.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeVar
from weakref import WeakKeyDictionary

from holdfast.errors import (
    CorruptData,
    FormatError,
    NotFound,
    SealError,
    StoreError,
    UsageError,
    some_of,
)
from holdfast.format import layout
from holdfast.format.codec import CODECS
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, decode_register
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.store.base import Buffer, ObjectInfo, Store, is_key

T = TypeVar("T")


def read_document(store: Store, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
    """Read an object of at most `max_nbytes`, or raise; `afresh` not from a cache, if possible."""
    try:
        return store.get_whole(key, max_nbytes=max_nbytes, afresh=afresh)
    except StoreError as error:
        if type(error) is StoreError:
            raise CorruptData(str(error)) from error
        raise


_OWN_JSON = re.compile(rb'\s*\{\s*"holdfast"\s*:\s*1\b')


def is_own_json(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a JSON document of Holdfast."""
    return _OWN_JSON.match(head) is not None


def is_of_others(store: Store, key: str) -> bool:
    """Whether something is at this key that does not begin as a JSON document of Holdfast."""
    try:
        return not is_own_json(read_document(store, key, max_nbytes=MAX_CHECKED_NBYTES))
    except NotFound:
        return False
    except FormatError:
        return True


_OWN_MARKS: WeakKeyDictionary[Store, set[str]] = WeakKeyDictionary()


def is_own_mark(store: Store, key: str) -> bool:
    """Whether a mark was written by Holdfast; sealed ones were. A process reads each once."""
    try:
        known = _OWN_MARKS.setdefault(store, set())
    except TypeError:  # a user's own store that allows no weak references
        known = set()
    with suppress(SealError):
        if key not in known and is_of_others(store, key):
            return False
        known.add(key)
    return True


def is_there(store: Store, key: str) -> bool:
    """Whether an object with this key exists now."""
    try:
        store.head(key)
    except NotFound:
        return False
    return True


def read_if_there(
    store: Store, key: str, decode: Callable[..., T], *, max_nbytes: int = 65536
) -> T | None:
    """Read and decode a document; None if it does not exist. `decode(data, what=…)` may raise."""
    try:
        data: Buffer = read_document(store, key, max_nbytes=max_nbytes)
    except NotFound:
        return None
    return decode(data, what=f"{store.url}/{key}")


_OWN_HEADER = b'{"__metadata__":{"format":"holdfast"'
_HEAD_NBYTES = 64


def was_made_by(name: AttemptName, nonce: str | None) -> bool:
    """Whether an attempt's name proves that the claim with this nonce made it."""
    if nonce is None:
        return False
    return name.id8 == layout.first_digits(name.label, name.epoch, name.sequence, nonce)


def holds_own_files(store: Store, folder: str) -> bool:
    """Whether a folder holds a file that Holdfast has written; False for a link to a folder."""
    try:
        for info in store.list(f"{folder}/"):
            name = info.key.removeprefix(f"{folder}/")
            if is_key(info.key) and is_own_file(store, info, name, may_be_unwritten=False):
                return True
    except StoreError as error:
        if type(error) is not StoreError:
            raise  # may be temporary
    return False


def is_own_file(
    store: Store,
    info: ObjectInfo,
    name: str,
    listed: Collection[str] | None = None,
    *,
    may_be_unwritten: bool = True,
) -> bool:
    """Whether a file in an attempt's folder is one that Holdfast has written.

    By its name if the manifest `listed` names, else by its first bytes. Encrypted bytes prove
    nothing, so such a file is known by its name. `may_be_unwritten`: a data file may have no bytes
    yet, as a killed save leaves it.
    """
    if layout.is_stored_name(name) or (listed is not None and name in listed):
        return True
    is_document = layout.is_sidecar(name) or layout.parse_keys(name) is not None
    if not is_document and listed is not None:
        return False
    magic = None
    if not is_document and name != layout.MANIFEST and not layout.is_listed_name(name):
        if not layout.is_data_name(name):
            return False
        magic = next(codec.magic for codec in CODECS.values() if name.endswith(codec.suffix))
    try:
        head = store.get(info.key, 0, min(info.nbytes, _HEAD_NBYTES))
    except NotFound:
        return True
    except SealError:
        return is_document
    if not head.strip(b"\0"):
        return may_be_unwritten and not is_document
    if magic is not None:
        return head.startswith(magic)
    return head[8:].startswith(_OWN_HEADER) or is_own_json(head)


_MAX_FOLDERS = 100
_MAX_LISTED = 1000


def expect_apart(store: Store) -> None:
    """Check that the root of a new run is in no other, or checkpoint, and has none near its top."""
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
    """Return a text on things of others, no attempts, in a new root; empty if there are none."""
    names = [
        name
        for name in store.children()
        if name.rstrip("/") not in _OWN
        and layout.parse_attempt(name.rstrip("/")) is None
        and not layout.is_scratch(name.rstrip("/"))
    ]
    if not names:
        return ""
    return f"{store.url}: {some_of(names)}: not part of this run, so left alone"


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
