"""`holdfast show`: print the manifest and the tensors of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.cli import options
from holdfast.cli.documents import DescribedCheckpoint, Document, describe_checkpoint
from holdfast.cli.options import command, flag
from holdfast.cli.output import Answer, TextTable, format_nbytes, number
from holdfast.cli.target import open_target, read_entry
from holdfast.errors import CorruptData
from holdfast.format import layout
from holdfast.format.blocks import digest_blocks, file_digest
from holdfast.format.index import Index
from holdfast.format.index_parts import open_index
from holdfast.format.manifest import Manifest, Timestamp
from holdfast.root.catalog import Entry
from holdfast.root.documents import read_document
from holdfast.store.base import Store

_IMPORTED = "imported"


class Shown(DescribedCheckpoint, frozen=True):
    """Checkpoint of `show`: all of its manifest (docs/format.md, section 3)."""

    components: Mapping[str, Any]
    """Name → kind, number of tensors and files of each component."""
    files: Mapping[str, Any]
    """Name → length and digest of each file."""
    block_nbytes: int
    """Bytes of a block, the unit of digests."""
    world_size: int
    """Number of ranks that saved it."""
    numerics: Mapping[str, Any]
    """Settings that the bits of results depend on."""
    environment: Mapping[str, Any]
    """Versions, host, program and git commit."""
    timings: Mapping[str, float]
    """Phase → seconds that it took."""
    best: Sequence[Mapping[str, Any]]
    """Metrics by which rules choose the best."""
    config: Mapping[str, Any]
    """`config` of the manager."""
    changes: Sequence[Any]
    """Changes at the resumes up to it."""
    policy: Mapping[str, Any] | None
    """Rules and intervals of the process that saved it; null: not recorded."""


class Shard(Document, frozen=True):
    """Box of a tensor in a file."""

    file: str
    """File that holds it."""
    start: int
    """First byte in the file."""
    nbytes: int
    """Bytes of the box."""
    offsets: Sequence[int] | None
    """First element in each dimension; null where all tensors of the component are whole."""
    sizes: Sequence[int] | None
    """Elements in each dimension; null likewise."""


class StoredTensor(Document, frozen=True):
    """Tensor of a checkpoint."""

    component: str
    """Component that it belongs to."""
    key: str
    """Its name there."""
    dtype: str
    """Type of its elements, such as `BF16`."""
    shape: Sequence[int]
    """Its shape."""
    shards: Sequence[Shard]
    """Boxes that it is stored in."""


class Show(Document, frozen=True):
    """Answer of `show`."""

    root: str
    """Path or URL of the root."""
    checkpoint: Shown
    """The checkpoint."""
    tensors: Sequence[StoredTensor] | UnsetType = UNSET
    """Its tensors, with `--tensors`."""


@command(
    "show",
    options.target,
    flag("--tensors", "List all tensors with type, shape, size and file."),
    answer=Show,
)
def show(target: str, *, tensors: bool) -> Answer:
    """Show the manifest of one checkpoint.

    That is its counters, metrics, components, origin and numerics. Without @WHICH, the latest.
    """
    store, folder = open_target(target)
    entry = read_entry(store, folder)
    manifest = entry.manifest
    index = _read_index(store, folder, entry) if tensors else None
    described = {**describe_checkpoint(store, entry), "folder": folder}
    document = Show(
        root=store.url,
        checkpoint=Shown(
            **described,
            components=msgspec.to_builtins(manifest.components),
            files=msgspec.to_builtins(manifest.files),
            block_nbytes=manifest.block_nbytes,
            world_size=manifest.world_size,
            numerics=manifest.numerics,
            environment=manifest.environment,
            timings=manifest.timings,
            best=msgspec.to_builtins(manifest.best),
            config=manifest.config,
            changes=msgspec.to_builtins(manifest.changes),
            policy=msgspec.to_builtins(manifest.policy),
        ),
        tensors=UNSET if index is None else _list_tensors(index),
    )
    parts = _format_checkpoint(document.checkpoint, manifest)
    return Answer(
        document=document, parts=parts if index is None else [*parts, _tensor_table(index)]
    )


def _read_index(store: Store, folder: str, entry: Entry) -> Index:
    files = entry.manifest.files

    def read(name: str) -> bytes:
        key = f"{folder}/{name}"
        data = read_document(store, key, max_nbytes=layout.MAX_INDEX_NBYTES)
        digest = file_digest(len(data), digest_blocks(data, entry.manifest.block_nbytes))
        if digest != files[name].digest:
            raise CorruptData(f"{store.url}/{key}: its bytes have changed; see holdfast verify")
        return data

    what = f"{store.url}/{folder}/{layout.INDEX}"
    return open_index(read(layout.INDEX), read, files=files, what=what)


def _format_checkpoint(shown: Shown, manifest: Manifest) -> list[str | TextTable]:
    facts = {
        "folder": shown.folder,
        "step": str(shown.step),
        "at": _position(manifest.timestamp),
        "created": f"{shown.created} ({shown.reason}, {shown.save_class})",
        "size": _format_size(shown, manifest),
        "writer": f"{shown.epoch}, save {shown.sequence}, id {shown.save_id}",
        "resumed from": shown.parent or "",
        "asked for by": ", ".join(shown.savers),
        "saved without": ", ".join(shown.left_out),
        "by digest": "; ".join(
            f"{name}: {part.frozen.num_tensors} frozen parameters "
            f"({format_nbytes(part.frozen.nbytes)}), only their digests are stored"
            for name, part in manifest.components.items()
            if part.frozen is not None
        ),
        "unhealthy": "; ".join(shown.unhealthy),
        "tags": ", ".join(shown.tags),
        "pinned": "yes" if shown.pinned else "",
        "rejected": "; ".join(shown.rejected),
        "being deleted": "yes" if shown.retired else "",
        "metrics": ", ".join(f"{k} {number(v)}" for k, v in sorted(shown.metrics.items())),
        "best by": ", ".join(f"{item.metric} ({item.mode})" for item in manifest.best),
        "numerics": _format_members(shown.numerics),
        "environment": _format_members(
            {n: v for n, v in shown.environment.items() if n != _IMPORTED}
        ),
        "imported from": _origin(shown.environment.get(_IMPORTED)),
        "config": _format_members(shown.config),
        "took": ", ".join(f"{k} {v:.3f}" for k, v in shown.timings.items()),
    }
    width = max(map(len, facts))
    lines: list[str | TextTable] = [
        f"{name:<{width}}  {text}" for name, text in facts.items() if text
    ]
    return [*lines, _component_table(manifest)]


def _origin(imported: Any) -> str:
    """Format where an imported checkpoint comes from, and how much was left out."""
    if not isinstance(imported, Mapping):
        return ""
    left = imported.get("left_out") or ()
    more = f", without {len(left)} values; --json lists them" if left else ""
    return f"{imported.get('from')} ({imported.get('format')}){more}"


def _format_size(shown: Shown, manifest: Manifest) -> str:
    before = " and ".join(shown.codecs)
    plain = f", {format_nbytes(shown.plain_nbytes)} before {before}" if before else ""
    if shown.nbytes == manifest.nbytes:
        return f"{format_nbytes(shown.nbytes)} in {len(shown.files)} files{plain}"
    left = f"{format_nbytes(shown.nbytes)} left of {format_nbytes(manifest.nbytes)}"
    return f"{left}{plain}; dropped: {', '.join(shown.thinned)}"


def _position(at: Timestamp) -> str:
    counters = {"epoch": at.epoch, "samples": at.samples, "tokens": at.tokens}
    texts = [f"{name} {value}" for name, value in counters.items() if value is not None]
    return ", ".join([*texts, f"{at.wall_s:.1f} s of training"])


def _format_members(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _component_table(manifest: Manifest) -> TextTable:
    files = manifest.files
    return TextTable(
        columns=("component", "kind", "tensors", "size", "stored", "files"),
        rows=[
            (
                name,
                part.kind,
                str(part.num_tensors),
                format_nbytes(part.nbytes),
                format_nbytes(sum(files[file].stored_nbytes for file in part.files)),
                ", ".join(part.files),
            )
            for name, part in manifest.components.items()
        ],
        right=frozenset({2, 3, 4}),
    )


def _list_tensors(index: Index) -> list[StoredTensor]:
    return [
        StoredTensor(
            component=component,
            key=entry.key,
            dtype=entry.dtype,
            shape=entry.shape,
            shards=msgspec.convert(entry.shards, list[Shard], from_attributes=True),
        )
        for component, entries in index.components.items()
        for entry in entries.values()
    ]


def _tensor_table(index: Index) -> TextTable:
    return TextTable(
        columns=("tensor", "dtype", "shape", "size", "file"),
        rows=[
            (
                f"{component}.{entry.key}",
                entry.dtype,
                "×".join(map(str, entry.shape)) or "scalar",
                format_nbytes(sum(shard.nbytes for shard in entry.shards)),
                ", ".join(dict.fromkeys(shard.file for shard in entry.shards)),
            )
            for component, entries in index.components.items()
            for entry in entries.values()
        ],
        right=frozenset({3}),
    )
