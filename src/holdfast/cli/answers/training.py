"""Answers of a training: of `save`, which asks one, and `run`, which starts one."""

from __future__ import annotations

from typing import Literal

from holdfast.cli.answers.base import Document


class Save(Document, frozen=True):
    """Answer of `save`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the new checkpoint."""
    step: int | None
    """Its step; null where retention has deleted it already."""
    tags: list[str]
    """Tags that were asked for."""
    waited_s: float
    """Seconds from the request to the answer."""


class ChildLived(Document, frozen=True):
    """Line of `run` after each life of the command."""

    life: int
    """Its number, from 1."""
    exit_status: int | None
    """Exit status; null if a signal ended it."""
    signal: str | None
    """Signal that ended it."""
    asked: str | None
    """Signal that asked it to stop."""
    error: str | None
    """Why it could not be started."""
    duration_s: float
    """Seconds that it lived."""
    from_step: int | None
    """Step of the run before."""
    to_step: int | None
    """Step of the run after."""
    has_progressed: bool
    """Whether it made progress."""
    failures: int
    """Lives in a row without progress."""
    restart_in_s: float | None
    """Pause before the next life; null after the last."""


class Summary(Document, frozen=True):
    """All lives of `run`."""

    outcome: Literal["finished", "requeue", "stopped", "gave-up"]
    """How it ended."""
    code: int
    """Exit code of the command."""
    from_step: int | None
    """Step of the run before the first life."""
    to_step: int | None
    """Step of the run after the last."""
    lives: list[ChildLived]
    """The lives."""


class RunEnd(Document, frozen=True):
    """Last line of `run`."""

    summary: Summary
    """All lives."""
