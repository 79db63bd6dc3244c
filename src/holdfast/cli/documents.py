"""Parts that the answers of several commands share: structs, and texts for people.

The answer of a command is a struct. `--json` prints it, `holdfast schema` its fields, and the text
for people is made from it. Programs read the fields: add some, but rename none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Literal

import msgspec

from holdfast.errors import FormatError, HoldfastError, SealError
from holdfast.format.manifest import Manifest
from holdfast.format.records import WriterRecord
from holdfast.ownership.claim import is_closed
from holdfast.ownership.process import liveness
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.remaining import parts_of
from holdfast.store.base import Store

Ending = Literal["closed", "failed", "running", "continued", "unknown"]
OwnerState = Literal["alive", "dead", "closed", "silent", "unknown"]
_TIMING = re.compile(r"(.*_)?(runtime|duration|duration_s|wall_s|seconds|per_second)", re.DOTALL)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the answers and of their parts."""


class Owner(Document, frozen=True):
    """Newest claim of a run."""

    epoch: int
    """Number of the claim."""
    host: str
    """Host of its process."""
    pid: int
    """Number of its process on that host."""
    since: str
    """UTC time of the claim, ISO 8601."""
    state: OwnerState
    """Whether the process lives, as far as this host can tell; `closed`: it ended its claim;
    `silent` (only of `watch`): no heartbeat for 30 s, on another host."""


class UnreadableCheckpoint(Document, frozen=True):
    """Checkpoint whose manifest is damaged or lost."""

    folder: str
    """Its folder."""
    reason: str
    """What is wrong, as text."""


class Unopened(Document, frozen=True):
    """Checkpoint that is encrypted for other keys, or not encrypted where that is refused."""

    folder: str
    """Its folder."""
    kind: str
    """Class of the error in `holdfast.errors`."""
    reason: str
    """The error, as text."""


class Why(Document, frozen=True):
    """Folder and a reason."""

    folder: str
    """Folder of a checkpoint or an attempt."""
    why: str
    """The reason."""


class DescribedCheckpoint(Document, frozen=True, rename={"save_class": "class"}):
    """Members that `ls` and `show` have for each checkpoint."""

    folder: str
    """Its folder in the root."""
    step: int
    """Step at which it was saved."""
    label: str
    """Label in its folder's name."""
    epoch: int
    """Number of the claim that saved it."""
    sequence: int
    """Number of the save inside that epoch."""
    save_id: str
    """Random number of the save, in hex."""
    timestamp: Mapping[str, Any]
    """Counters of the training at the save: step, epoch, samples, tokens, wall_s."""
    created: str
    """UTC time of the save, ISO 8601."""
    save_class: str
    """`permanent` or `ephemeral`."""
    reason: str
    """Why it was saved."""
    nbytes: int
    """Bytes of the files that are left."""
    plain_nbytes: int
    """Bytes of all files before they were compressed."""
    codecs: Sequence[str]
    """Names of the codecs of compressed files."""
    metrics: Mapping[str, Any]
    """Metrics given to the save, and those added later."""
    tags: Sequence[str]
    """Tags, also those given later."""
    pinned: bool
    """Whether a person protects it from retention."""
    rejected: Sequence[str]
    """Why resumes could not use it."""
    retired: bool
    """Whether its deletion was begun."""
    thinned: Sequence[str]
    """Components whose dropping was begun."""
    savers: Sequence[str]
    """Savers that asked for it; empty where there is only one."""
    left_out: Sequence[str]
    """Components that were not saved."""
    unhealthy: Sequence[str]
    """What was wrong with the state; empty if nothing."""
    parent: str | None
    """Folder of the checkpoint that its process went on from; null: from the beginning."""


def is_timing(name: str) -> bool:
    """Whether a value of this name is a time or a rate, as `eval_runtime` of transformers."""
    return _TIMING.fullmatch(name) is not None


def owner_of(store: Store, catalog: Catalog) -> Owner | None:
    """Describe the newest claim, and whether its process is alive, dead, closed or unknown."""
    epoch = catalog.highest_epoch()
    try:
        writer = catalog.writer(epoch) if epoch else None
    except FormatError:
        return None
    if writer is None:
        return None
    state = "closed" if is_closed(store, epoch, writer.nonce) else liveness(writer.process)
    return describe_owner(writer, "alive" if state == "ours" else state)


def describe_owner(claim: WriterRecord, state: OwnerState) -> Owner:
    """Describe a claim and its process."""
    process = claim.process
    return Owner(
        epoch=claim.epoch,
        host=process.host,
        pid=process.pid,
        since=claim.created,
        state=state,
    )


def describe_checkpoint(store: Store, entry: Entry) -> dict[str, Any]:
    """Describe a checkpoint: the fields of a `DescribedCheckpoint`."""
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
        "save_class": manifest.save_class,
        "reason": manifest.reason,
        "nbytes": nbytes_left(store, entry),
        "plain_nbytes": manifest.plain_nbytes,
        "codecs": codecs(manifest),
        "metrics": entry.metrics,
        "tags": entry.tags,
        "pinned": entry.marks.pinned,
        "rejected": entry.marks.rejected,
        "retired": entry.marks.retired,
        "thinned": entry.marks.thinned,
        "savers": manifest.savers,
        "left_out": manifest.left_out,
        "unhealthy": manifest.unhealthy,
        "parent": None if manifest.parent is None else manifest.parent.folder,
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


def split_unread(
    unread: Sequence[tuple[str, HoldfastError]],
) -> tuple[list[UnreadableCheckpoint], list[Unopened]]:
    """Describe manifests that cannot be read: damaged ones, and those not decrypted by the keys."""
    damaged = [
        UnreadableCheckpoint(folder=folder, reason=str(error))
        for folder, error in unread
        if not isinstance(error, SealError)
    ]
    unopened = [
        Unopened(folder=folder, kind=type(error).__name__, reason=str(error))
        for folder, error in unread
        if isinstance(error, SealError)
    ]
    return damaged, unopened


def list_reasons(items: Sequence[tuple[str, str]]) -> list[Why]:
    """Describe (folder, why) pairs."""
    return [Why(folder=folder, why=why) for folder, why in items]


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
