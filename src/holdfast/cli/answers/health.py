"""Answers of `verify`, and of `gc` with and without `--damaged`."""

from __future__ import annotations

from holdfast.cli.answers.base import Document, Unopened, Why


class ProblemFound(Document, frozen=True):
    """Damage, or what could not be read."""

    file: str
    """File, by its key in the root."""
    message: str
    """What is wrong."""
    block: int | None
    """Number of the damaged block."""
    start: int | None
    """First damaged byte."""
    nbytes: int | None
    """Bytes of the damaged part."""
    tensors: list[str]
    """Keys of the tensors in it."""
    expected: str
    """What should be there; empty where that cannot be said."""
    found: str
    """What is there; empty likewise."""


class Verified(Document, frozen=True):
    """Checkpoint of `verify`."""

    folder: str
    """Its folder."""
    step: int | None
    """Its step; null where the manifest cannot be read."""
    ok: bool
    """Whether every byte is as it was written."""
    nbytes: int
    """Bytes that were read and compared."""
    num_files: int
    """Files that were read."""
    num_tensors: int
    """Tensors in them."""
    problems: list[ProblemFound]
    """What is wrong."""
    notes: list[str]
    """What is worth knowing and no damage."""


class Verify(Document, frozen=True):
    """Answer of `verify`."""

    root: str
    """Path or URL of the root."""
    ok: bool
    """Whether all is whole."""
    checkpoints: list[Verified]
    """Checkpoints that were read, newest first."""
    unopened: list[Unopened]
    """As for `ls`."""
    problems: list[ProblemFound]
    """Problems of claims."""
    notes: list[str]
    """Notes on the root."""


class Markers(Document, frozen=True):
    """Markers that stay until somebody names their writer dead."""

    epoch: int
    """Number of the writer's claim."""
    number: int
    """How many markers."""


class Gc(Document, frozen=True):
    """Answer of `gc`."""

    root: str
    """Path or URL of the root."""
    dry_run: bool
    """Whether nothing was touched."""
    removed: list[Why]
    """What was removed."""
    marked: list[Why]
    """What got a marker, so that it cannot be committed any more."""
    kept: list[Why]
    """What stays, and why."""
    failed: list[Why]
    """What could not be removed."""
    markers: list[Markers]
    """Markers that stay."""
    warnings: list[str]
    """Warnings, such as of folders of others that were left; they go to standard error, too."""
    nbytes: int
    """Bytes given back."""


class FileSize(Document, frozen=True):
    """File of a checkpoint."""

    name: str
    """Its name."""
    nbytes: int
    """Its length."""


class GcDamaged(Document, frozen=True):
    """Answer of `gc --damaged`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the damaged checkpoint."""
    why: str
    """What is wrong with its manifest."""
    files: list[FileSize]
    """Its files."""
    nbytes: int
    """Their bytes."""
    pinned: bool
    """Whether it is pinned."""
    tags: list[str]
    """Tags that it was given after the save."""
    is_latest: bool
    """Whether `latest` names it."""
    goes_on_from: str | None
    """Folder from which the run goes on without it."""
    warnings: list[str]
    """What to look at first."""
    deleted: bool
    """Whether it was deleted."""
    kept_because: str | None
    """Why it was kept although its deletion was asked for."""
    marker: bool
    """Whether a tombstone stays."""
