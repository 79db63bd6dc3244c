"""Opening of a checkpoint: its index and its components' trees are read and checked.

Every document is small and read whole. The tensors are read later, by `tensor_reader.TensorReader`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.format.index import Index
from holdfast.format.manifest import Manifest
from holdfast.loading.block_reader import read_index, read_tree
from holdfast.state.capture.byrank import part_of
from holdfast.state.components import StoredComponent
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint whose index and trees were read and checked."""

    folder: str
    manifest: Manifest
    index: Index
    components: Mapping[str, StoredComponent]
    by_rank: frozenset[str] = frozenset()
    """Components of which each rank has its own state."""


def open_checkpoint(
    store: Store,
    folder: str,
    manifest: Manifest,
    *,
    components: Collection[str] | None = None,
    verify: bool = True,
    rank: int = 0,
    world_size: int | None = None,
) -> Opened:
    """Read and check a checkpoint's index, and the trees of `components` (None: all) for `rank`."""
    index = read_index(store, folder, manifest, verify=verify)
    wanted = manifest.components if components is None else components
    stored = {
        name: _stored(store, folder, name, manifest, index, verify=verify)
        for name in wanted
        if name in manifest.components
    }
    tables = dict(index.components)
    by_rank = set()
    for name, component in stored.items():
        part = part_of(component, rank, world_size)
        if part is not None:
            by_rank.add(name)
            stored[name], keys = part
            tables[name] = tables[name].part(keys)
    index = msgspec.structs.replace(index, components=tables)
    return Opened(
        folder=folder, manifest=manifest, index=index, components=stored, by_rank=frozenset(by_rank)
    )


def _stored(
    store: Store, folder: str, name: str, manifest: Manifest, index: Index, *, verify: bool
) -> StoredComponent:
    component = manifest.components[name]
    data = read_tree(store, folder, name, manifest, index, verify=verify)
    tensors = index.components[name].specs
    return StoredComponent(name=name, kind=component.kind, tree=data, tensors=tensors)
