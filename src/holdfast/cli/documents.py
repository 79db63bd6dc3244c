"""JSON objects and texts that the answers of several commands share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import HoldfastError, SealError
from holdfast.format.manifest import Manifest
from holdfast.root.catalog import Entry
from holdfast.root.remaining import parts_of
from holdfast.store.base import Store

if TYPE_CHECKING:
    from holdfast.maintenance.verify_reads import Problem, VerifyReport


_TIMING = re.compile(r"(.*_)?(runtime|duration|duration_s|wall_s|seconds|per_second)", re.DOTALL)


def is_timing(name: str) -> bool:
    """Whether a value of this name is a time or a rate, as `eval_runtime` of transformers."""
    return _TIMING.fullmatch(name) is not None


def checkpoint_document(store: Store, entry: Entry) -> dict[str, Any]:
    """Describe a checkpoint in JSON, as `ls` lists it."""
    manifest = entry.manifest
    return {
        "folder": entry.folder,
        "step": entry.step,
        "label": manifest.label,
        "epoch": manifest.epoch,
        "sequence": manifest.sequence,
        "save_id": manifest.save_id,
        "timestamp": msgspec.to_builtins(manifest.timestamp),
        "created": manifest.created,
        "class": manifest.save_class,
        "reason": manifest.reason,
        "nbytes": nbytes_left(store, entry),
        "plain_nbytes": manifest.plain_nbytes,
        "codecs": codecs(manifest),
        "metrics": dict(manifest.metrics),
        "tags": list(entry.tags),
        "pinned": entry.marks.pinned,
        "rejected": list(entry.marks.rejected),
        "retired": entry.marks.retired,
        "thinned": list(entry.marks.thinned),
        **origin_document(manifest),
        "components": sorted(manifest.components),
        "parent": None if manifest.parent is None else manifest.parent.folder,
    }


def origin_document(manifest: Manifest) -> dict[str, Any]:
    """Describe a checkpoint's savers, left-out components, and problems of its state."""
    return {
        "savers": list(manifest.savers),
        "left_out": list(manifest.left_out),
        "unhealthy": list(manifest.unhealthy),
    }


def origin_marks(manifest: Manifest) -> list[str]:
    """Describe savers, left-out components and problems in short texts for people."""
    first, others = manifest.unhealthy[:1], len(manifest.unhealthy) - 1
    more = f" and {others} more" if others > 0 else ""
    return [
        *(f"unhealthy: {reason}{more}" for reason in first),
        *([f"saved without {', '.join(manifest.left_out)}"] if manifest.left_out else []),
        *([f"by {', '.join(manifest.savers)}"] if manifest.savers else []),
    ]


def codecs(manifest: Manifest) -> list[str]:
    """List the names of the codecs with which files of a checkpoint are compressed."""
    stored = [entry.stored for entry in manifest.files.values() if entry.stored is not None]
    return sorted({entry.codec for entry in stored})


def nbytes_left(store: Store, entry: Entry) -> int:
    """Sum the bytes of a checkpoint's files that retention has not deleted."""
    return parts_of(store, entry.folder, entry.manifest, entry.marks).nbytes


def details_document(store: Store, entry: Entry) -> dict[str, Any]:
    """Describe a checkpoint in JSON, as `show` shows it: all of its manifest."""
    manifest = entry.manifest
    return {
        **checkpoint_document(store, entry),
        "components": msgspec.to_builtins(manifest.components),
        "files": msgspec.to_builtins(manifest.files),
        "block_nbytes": manifest.block_nbytes,
        "world_size": manifest.world_size,
        "numerics": dict(manifest.numerics),
        "environment": dict(manifest.environment),
        "timings": dict(manifest.timings),
        "best": msgspec.to_builtins(manifest.best),
        "config": dict(manifest.config),
        "changes": msgspec.to_builtins(manifest.changes),
        "policy": msgspec.to_builtins(manifest.policy),
    }


def unread_documents(
    unread: Sequence[tuple[str, HoldfastError]],
) -> dict[str, list[dict[str, str]]]:
    """Describe unreadable manifests: `damaged`, or `unopened` (not decrypted by the keys)."""
    damaged = [item for item in unread if not isinstance(item[1], SealError)]
    return {
        "damaged": [{"folder": folder, "reason": str(error)} for folder, error in damaged],
        "unopened": [
            {"folder": folder, "kind": type(error).__name__, "reason": str(error)}
            for folder, error in unread
            if isinstance(error, SealError)
        ],
    }


def unread_line(folder: str, error: HoldfastError) -> str:
    """Describe a manifest that cannot be read, for people."""
    if isinstance(error, SealError):
        return f"not opened ({type(error).__name__}): {folder}: {error}"
    return f"cannot be read: {folder}: {error}"


def expect_something_opened(opened: Sized, unread: Sequence[tuple[str, HoldfastError]]) -> None:
    """Raise the newest checkpoint's `SealError` if the keys decrypt no checkpoint."""
    errors = [error for _, error in unread if isinstance(error, SealError)]
    if errors and not opened:
        raise errors[0]


def report_document(report: VerifyReport) -> dict[str, Any]:
    """Describe the result of verifying one checkpoint, in JSON."""
    problems = [problem_document(problem) for problem in report.problems]
    return {**asdict(report), "ok": report.ok, "problems": problems}


def problem_document(problem: Problem) -> Mapping[str, Any]:
    """Describe one problem that verification found, in JSON."""
    document = asdict(problem)
    del document["is_damage"]
    return document
