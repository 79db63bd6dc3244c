"""`holdfast show`: print the manifest and the tensors of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.cli import options
from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.checkpoints import Show
from holdfast.cli.documents import codecs, details_document, nbytes_left
from holdfast.cli.options import command, flag
from holdfast.cli.output import Answer, TextTable, format_nbytes, number
from holdfast.cli.target import open_target, read_entry
from holdfast.errors import CorruptData
from holdfast.format import layout
from holdfast.format.blocks import digest_blocks, file_digest
from holdfast.format.index import Index, decode_index
from holdfast.format.manifest import Timestamp
from holdfast.root.catalog import Entry
from holdfast.root.documents import read_document
from holdfast.store.base import Store

_IMPORTED = "imported"


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
    document: dict[str, Any] = {
        "root": store.url,
        "checkpoint": {**details_document(store, entry), "folder": folder},
    }
    parts = _format_checkpoint(store, entry, folder)
    if tensors:
        index = _read_index(store, folder, entry)
        document["tensors"] = _tensor_documents(index)
        parts.append(_tensor_table(index))
    return Answer(document=make_answer(Show, document), parts=parts)


def _read_index(store: Store, folder: str, entry: Entry) -> Index:
    key = f"{folder}/{layout.INDEX}"
    data = read_document(store, key, max_nbytes=layout.MAX_INDEX_NBYTES)
    digest = file_digest(len(data), digest_blocks(data, entry.manifest.block_nbytes))
    if digest != entry.manifest.files[layout.INDEX].digest:
        raise CorruptData(f"{store.url}/{key}: other bytes than written; see holdfast verify")
    return decode_index(data, files=entry.manifest.files, what=f"{store.url}/{key}")


def _format_checkpoint(store: Store, entry: Entry, folder: str) -> list[str | TextTable]:
    manifest = entry.manifest
    facts = {
        "folder": folder,
        "step": str(entry.step),
        "at": _position(manifest.timestamp),
        "created": f"{manifest.created} ({manifest.reason}, {manifest.save_class})",
        "size": _format_size(store, entry),
        "writer": f"{manifest.epoch}, save {manifest.sequence}, id {manifest.save_id}",
        "resumed from": "" if manifest.parent is None else manifest.parent.folder,
        "asked for by": ", ".join(manifest.savers),
        "saved without": ", ".join(manifest.left_out),
        "unhealthy": "; ".join(manifest.unhealthy),
        "tags": ", ".join(entry.tags),
        "pinned": "yes" if entry.marks.pinned else "",
        "rejected": "; ".join(entry.marks.rejected),
        "being deleted": "yes" if entry.marks.retired else "",
        "metrics": ", ".join(f"{k} {number(v)}" for k, v in sorted(manifest.metrics.items())),
        "best by": ", ".join(f"{item.metric} ({item.mode})" for item in manifest.best),
        "numerics": _format_members(manifest.numerics),
        "environment": _format_members(
            {n: v for n, v in manifest.environment.items() if n != _IMPORTED}
        ),
        "imported from": _origin(manifest.environment.get(_IMPORTED)),
        "config": _format_members(manifest.config),
        "took": ", ".join(f"{k} {v:.3f}" for k, v in manifest.timings.items()),
    }
    width = max(map(len, facts))
    lines: list[str | TextTable] = [
        f"{name:<{width}}  {text}" for name, text in facts.items() if text
    ]
    return [*lines, _component_table(entry)]


def _origin(imported: Any) -> str:
    """Format where an imported checkpoint comes from, and how much was left out."""
    if not isinstance(imported, Mapping):
        return ""
    left = imported.get("left_out") or ()
    more = f", without {len(left)} values; --json lists them" if left else ""
    return f"{imported.get('from')} ({imported.get('format')}){more}"


def _format_size(store: Store, entry: Entry) -> str:
    manifest, left = entry.manifest, nbytes_left(store, entry)
    made = codecs(manifest)
    plain = f", {format_nbytes(manifest.plain_nbytes)} before {' and '.join(made)}" if made else ""
    if left == manifest.nbytes:
        return f"{format_nbytes(left)} in {len(manifest.files)} files{plain}"
    dropped = ", ".join(entry.marks.thinned)
    return (
        f"{format_nbytes(left)} left of {format_nbytes(manifest.nbytes)}{plain}; dropped: {dropped}"
    )


def _position(at: Timestamp) -> str:
    counters = {"epoch": at.epoch, "samples": at.samples, "tokens": at.tokens}
    texts = [f"{name} {value}" for name, value in counters.items() if value is not None]
    return ", ".join([*texts, f"{at.wall_s:.1f} s of training"])


def _format_members(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _component_table(entry: Entry) -> TextTable:
    files = entry.manifest.files
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
            for name, part in entry.manifest.components.items()
        ],
        right=frozenset({2, 3, 4}),
    )


def _tensor_documents(index: Index) -> list[dict[str, Any]]:
    return [
        {
            "component": component,
            "key": entry.key,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "shards": [
                {
                    "file": shard.file,
                    "start": shard.start,
                    "nbytes": shard.nbytes,
                    "offsets": shard.offsets,
                    "sizes": shard.sizes,
                }
                for shard in entry.shards
            ],
        }
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
