"""Proof that a folder or a file in a root was made by Holdfast, and not by a user."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.errors import NotFound, SealError, StoreError
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.root.documents import is_own_json
from holdfast.store.base import ObjectInfo, Store, is_key

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

    By its name if the manifest `listed` names, else by its first bytes. `may_be_unwritten`: a data
    file may have none yet, as a killed save leaves it.
    """
    if layout.is_stored_name(name) or (listed is not None and name in listed):
        return True
    is_document = layout.is_sidecar(name) or layout.parse_keys(name) is not None
    if not is_document and listed is not None:
        return False
    if not is_document and name != layout.MANIFEST and not layout.is_listed_name(name):
        return layout.is_data_name(name)  # compressed
    try:
        head = store.get(info.key, 0, min(info.nbytes, _HEAD_NBYTES))
    except NotFound:
        return True
    except SealError:
        return is_document
    if not head.strip(b"\0"):
        return may_be_unwritten and not is_document
    return head[8:].startswith(_OWN_HEADER) or is_own_json(head)
