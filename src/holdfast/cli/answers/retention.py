"""Answers about what a rule deletes: `prune` and `forecast`."""

from __future__ import annotations

from typing import Literal

from holdfast.cli.answers.base import Document, Unopened, UnreadableCheckpoint, Why


class Judged(Document, frozen=True):
    """Checkpoint of `prune`, and what the rule does with it."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    action: Literal["keep", "delete", "thin", "kept"]
    """What becomes of it; `kept`: its deletion was decided and did not happen."""
    drop: list[str]
    """Components that are dropped."""
    why: str
    """Which rule keeps it, or why none does."""
    nbytes: int
    """Bytes that this gives back; of one of another run its size."""
    savers: list[str]
    """Savers that asked for it."""
    left_out: list[str]
    """Components that were not saved."""
    unhealthy: list[str]
    """What was wrong with the state."""


class Prune(Document, frozen=True):
    """Answer of `prune`."""

    root: str
    """Path or URL of the root."""
    dry_run: bool
    """Whether nothing was touched."""
    keep: str
    """The rule, in words."""
    checkpoints: list[Judged]
    """All checkpoints."""
    deleted: list[str]
    """Folders that were deleted."""
    thinned: list[str]
    """Folders of which components were dropped."""
    failed: list[Why]
    """What could not be done."""
    postponed: list[Why]
    """What somebody reads, or waits for its upload."""
    damaged: list[UnreadableCheckpoint]
    """As for `ls`."""
    unopened: list[Unopened]
    """As for `ls`."""
    warnings: list[str]
    """Warnings, such as of files of others that were left; they go to standard error, too."""
    nbytes: int
    """Bytes given back, or to give back."""


class Gone(Document, frozen=True):
    """Checkpoint, or parts of one, that a coming save deletes."""

    folder: str | None
    """Folder of the checkpoint; null: a coming save."""
    save: int | None
    """Number of that coming save; null: a checkpoint that exists."""
    step: int
    """Its step."""
    drop: list[str]
    """Components that are dropped while the rest stays; empty: all is deleted."""
    why: str
    """Why it is deleted, or why the rest stays."""
    nbytes: int
    """Bytes that this frees."""


class ComingSave(Document, frozen=True, rename={"save_class": "class"}):
    """Assumed save, and the deletions after it."""

    save: int
    """Its number, from 1: the next save."""
    step: int
    """Its step."""
    save_class: str
    """`permanent` or `ephemeral`."""
    savers: list[str]
    """Savers that ask for it; empty if there is only one."""
    gone: list[Gone]
    """Deletions, oldest checkpoint first."""
    nbytes: int
    """Bytes that these free."""


class Kept(Document, frozen=True):
    """Checkpoint that exists and stays through all coming saves."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    why: str
    """Clause of the rule, pin or tag that keeps it after the last of these saves."""
    nbytes: int
    """Its bytes after the last of these saves."""


class Forecast(Document, frozen=True):
    """Answer of `forecast`."""

    root: str
    """Path or URL of the root."""
    keep: str
    """The rule, in words."""
    recorded_by: str | None
    """Folder of the checkpoint that records the rule; null: `--keep` gave it."""
    assumptions: list[str]
    """Assumptions of the forecast."""
    saves: list[ComingSave]
    """Coming saves, the next one first."""
    kept: list[Kept]
    """Checkpoints that stay, newest first."""
    damaged: list[UnreadableCheckpoint]
    """As for `ls`; they stay."""
    unopened: list[Unopened]
    """As for `ls`; they stay."""
