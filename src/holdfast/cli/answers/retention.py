"""Answers about what a rule deletes: `prune` and `forecast`."""

from __future__ import annotations

from typing import Any, Literal

from holdfast.cli.answers.base import Document, Unopened, Unread, Why


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
    damaged: list[Unread]
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
    """Why: what no longer keeps it."""
    nbytes: int
    """Bytes that this gives back."""


class ComingSave(Document, frozen=True, rename={"save_class": "class"}):
    """Save that is assumed, and what retention does after it."""

    save: int
    """Its number, from 1: the next save."""
    step: int
    """Step at which it is assumed."""
    save_class: str
    """`permanent` or `ephemeral`."""
    savers: list[str]
    """Savers that ask for it; empty where there is only one."""
    metrics: dict[str, Any]
    """Metrics that it is assumed to have."""
    gone: list[Gone]
    """What is deleted or dropped after it, oldest first."""
    nbytes: int
    """Bytes that this gives back."""
    left: int
    """Checkpoints that are left then."""
    left_nbytes: int
    """Their bytes."""


class Foretold(Document, frozen=True):
    """Checkpoint that exists, and what becomes of it."""

    folder: str
    """Its folder."""
    step: int
    """Its step."""
    action: Literal["keep", "delete", "thin", "wait"]
    """`keep`: it stays whole through all saves. `thin`: components are dropped, and the rest stays.
    `wait`: it is to be deleted or thinned, and something holds it for now."""
    save: int | None
    """Number of the save after which it is deleted, first thinned, or would be; null: stays."""
    drop: list[str]
    """Components that are dropped by the end, if it is thinned."""
    keeps: str | None
    """What keeps it last: the clause of the rule, pin or tag; null: it goes at the next save."""
    why: str | None
    """Why it is deleted or thinned; null: it stays."""
    waits_for: str | None
    """What holds it for now, such as a reader."""
    nbytes: int
    """Its bytes now."""


class Forecast(Document, frozen=True):
    """Answer of `forecast`."""

    root: str
    """Path or URL of the root."""
    keep: str
    """The rule, in words."""
    recorded_by: str | None
    """Folder of the checkpoint that records the rule; null: `--keep` gave it."""
    running: bool
    """Whether the owner of the run lives, as far as this host can tell. Else the next save comes
    after a resume."""
    assumptions: list[str]
    """What the forecast rests on, one text each."""
    checkpoints: list[Foretold]
    """Checkpoints that exist, newest first."""
    saves: list[ComingSave]
    """Coming saves, the next one first."""
    damaged: list[Unread]
    """As for `ls`; they stay."""
    unopened: list[Unopened]
    """As for `ls`; they stay."""
