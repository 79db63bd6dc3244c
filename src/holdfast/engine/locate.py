"""What people write to name a checkpoint: `root`, `root@which`, or a checkpoint's own folder."""

from __future__ import annotations

import os

from holdfast.engine.catalog import Catalog, Entry, standalone
from holdfast.format import layout
from holdfast.store import open_store
from holdfast.store.base import Store


def split_source(source: str | os.PathLike[str]) -> tuple[str, str | None]:
    """(root, which) of `root@which`; which is None without one. A path with an @ in it that is
    there wins."""
    text = os.fspath(source)
    root, at, which = text.rpartition("@")
    if not at or os.path.isdir(text):
        return text, None
    return root, which


def locate(source: str | os.PathLike[str]) -> tuple[Store, Entry]:
    """The store and the checkpoint that a source names; of a root, its newest.

    Raises:
        NoCheckpoint: nothing there answers.
        FormatError: its manifest is damaged.
    """
    root, which = split_source(source)
    if which is None and os.path.isfile(os.path.join(root, layout.MANIFEST)):
        parent, folder = os.path.split(os.path.abspath(root))
        store = open_store(parent)
        return store, standalone(store, folder)
    store = open_store(root)
    return store, Catalog(store).resolve("latest" if which is None else which)
