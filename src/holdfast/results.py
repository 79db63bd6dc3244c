"""Results that the manager returns: committed checkpoints and saves under way."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import Enum
from html import escape
from typing import Literal

from holdfast.errors import DeadlineExceeded, RolledBack, SaveSkipped, UsageError, time_limit
from holdfast.format.manifest import Timestamp
from holdfast.policy.savers import Due
from holdfast.root.catalog import Entry
from holdfast.root.remaining import parts_of
from holdfast.store.base import Store
from holdfast.threads.progress import watch_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint: its location, its step and the contents of its manifest."""

    root: str
    """Path or URL of the run."""
    folder: str
    """Name of the checkpoint's folder inside the root."""
    step: int
    """Number of completed optimizer windows."""
    timestamp: Timestamp
    """Counters of training progress at the save."""
    save_id: str
    """Unique id of the save, 32 hex digits."""
    metrics: Mapping[str, float]
    tags: tuple[str, ...]
    pinned: bool
    save_class: str
    """Class of the save, which retention rules use: `permanent` or `ephemeral`."""
    reason: str
    """Why the checkpoint was saved: `interval`, `manual`, …"""
    created: str
    """Time of the save, ISO 8601 in UTC, for people to read."""
    nbytes: int
    """Bytes of all files but the manifest, without those that retention has removed."""
    savers: tuple[str, ...] = ()
    """Names of the savers that asked for this save; empty if the run has only one."""
    left_out: tuple[str, ...] = ()
    """Components that were not saved. Unless empty, training cannot resume from it."""
    unhealthy: tuple[str, ...] = ()
    """Reasons not to resume from this state; empty if no problem is known."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(folder, reason) of newer checkpoints that resume could not use, newest first."""
    seen: str = ""
    """Text to keep outside the root: `resume(seen=…)` detects with it that the root was rolled
    back."""
    notes: tuple[str, ...] = ()
    """What a load left out or could not restore exactly."""
    new: tuple[str, ...] = ()
    """Components that the checkpoint lacks, and that the load left unchanged."""

    @property
    def path(self) -> str:
        """Path or URL of the checkpoint's folder. Other tools read it inside `holdfast.reading`."""
        return f"{self.root}/{self.folder}"

    def __repr__(self) -> str:
        size = f"{self.nbytes:,} bytes"
        return f"<Checkpoint of step {self.step}: {self.path!r}, {size}, {_marks(self)}>"

    def _repr_html_(self) -> str:
        return f"<table>{_row('th', _COLUMNS)}{_row('td', _cells(self))}</table>"


class CheckpointList(tuple[Checkpoint, ...]):
    """The checkpoints of a run, newest first. `print` and notebooks show them as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "<no checkpoints>"
        steps = [str(checkpoint.step) for checkpoint in self]
        if len(steps) > _MAX_STEPS:
            steps[_MAX_STEPS - 1 : -1] = ["…"]
        what = "1 checkpoint" if len(self) == 1 else f"{len(self)} checkpoints"
        return f"<{what} of {self[0].root!r}, newest first: step {', '.join(steps)}>"

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines) if self else repr(self)

    def _repr_html_(self) -> str:
        return (
            f"<table>{_row('th', _COLUMNS)}{''.join(_row('td', _cells(c)) for c in self)}</table>"
        )


def metrics_by_step(newest_first: Iterable[Entry], until: int) -> dict[int, Mapping[str, float]]:
    """Return the metrics, by step up to `until`, of those checkpoints that `best` may be.

    `newest_first` is the lineage of a run. What a rollback left behind is after the step, or not in
    the lineage.
    """
    counting = [
        entry
        for entry in newest_first
        if entry.step <= until
        and not (entry.marks.rejected or entry.marks.retired or entry.manifest.unhealthy)
    ]
    return {entry.step: entry.metrics for entry in reversed(counting)}


_MAX_STEPS = 6
"""Most steps that the `repr` of a `CheckpointList` names."""
_COLUMNS = ("step", "folder", "bytes", "created (UTC)", "metrics", "marks")


def _row(kind: Literal["th", "td"], cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _cells(checkpoint: Checkpoint) -> tuple[str, ...]:
    metrics = (f"{name} {value:.6g}" for name, value in sorted(checkpoint.metrics.items()))
    return (
        str(checkpoint.step),
        checkpoint.folder,
        f"{checkpoint.nbytes:,}",
        checkpoint.created[:16].replace("T", " "),
        ", ".join(metrics),
        _marks(checkpoint),
    )


def _marks(checkpoint: Checkpoint) -> str:
    """List a checkpoint's class, savers, omitted components, pin, health and tags as text."""
    marks = [checkpoint.save_class, *(f"of {name}" for name in checkpoint.savers)]
    marks += [f"without {name}" for name in checkpoint.left_out]
    marks += ["pinned"] if checkpoint.pinned else []
    marks += ["unhealthy"] if checkpoint.unhealthy else []
    return ", ".join(marks + [f"#{tag}" for tag in checkpoint.tags])


def build_checkpoint(
    store: Store,
    entry: Entry,
    *,
    rejected: tuple[tuple[str, str], ...] = (),
    notes: tuple[str, ...] = (),
    new: tuple[str, ...] = (),
) -> Checkpoint:
    """Build the `Checkpoint` of a catalog entry."""
    manifest, nbytes = entry.manifest, entry.manifest.nbytes
    if entry.marks.thinned_by:  # else the table of files may not be needed
        nbytes = parts_of(store, entry.folder, manifest, entry.marks).nbytes
    return Checkpoint(
        root=store.url,
        folder=entry.folder,
        step=entry.step,
        timestamp=manifest.timestamp,
        save_id=manifest.save_id,
        metrics=dict(entry.metrics),
        tags=entry.tags,
        pinned=entry.marks.pinned,
        save_class=manifest.save_class,
        reason=manifest.reason,
        created=manifest.created,
        nbytes=nbytes,
        savers=manifest.savers,
        left_out=manifest.left_out,
        unhealthy=manifest.unhealthy,
        rejected=rejected,
        seen=seen_text(entry.order, manifest.save_id),
        notes=notes,
        new=new,
    )


class SavePhase(str, Enum):
    """Phase of a save, in their order: of a `PendingSave`, in messages among ranks and in errors.

    The first seven are in the training thread, and the others in the save thread.
    """

    UNCOUNTED = "maybe_save, before it knew whether a save was due"
    UNRECORDED = "save, before it could record the step as the others did"
    DUE = "maybe_save, with a save due"
    CALLED = "calling save"
    HOOK = "before_save"
    PREPARING = "preparing the save"
    SHARING = "sharing its state"
    QUEUED = "waiting to start"
    AGREEING = "waiting for the other ranks to begin"
    FOLDER = "making the folder"
    WRITING = "writing"
    DIGESTING = "digesting"
    SYNCING = "writing to stable storage"
    COPYING = "waiting for the copy"
    GATHERING = "waiting for the files of the other ranks in"
    CHECKING = "checking sizes in"
    COMMITTING = "committing"
    HOUSEKEEPING = "doing the housekeeping after it"

    def __str__(self) -> str:
        return self.value


class SaveProgress:
    """The phase that a save is in, and the file or folder of it. Any thread may read it."""

    def __init__(self) -> None:
        self._now = (SavePhase.PREPARING, "")

    def enter(self, phase: SavePhase, subject: str = "") -> None:
        """Enter a phase, for a file or folder of the save."""
        self._now = (phase, subject)

    @property
    def phase(self) -> SavePhase:
        """The phase that the save is in."""
        return self._now[0]

    def __str__(self) -> str:
        return " ".join(self._now).rstrip()


class PendingSave:
    """Handle of a save under way, as the manager returns it.

    `staged` resolves when all of the state was copied; `committed` when the checkpoint is durable,
    with its `Checkpoint`, or with the error. An error that was not raised by `wait` is raised by
    the manager's next call and by its `close`.
    """

    def __init__(
        self, step: int, due: Due, *, timeout_s: float, progress: SaveProgress | None = None
    ) -> None:
        self.step = step
        self.due = due
        """Why the save was started, its class, and the components in it."""
        self.staged: Future[None] = Future()
        self.committed: Future[Checkpoint] = Future()
        # It cannot be cancelled: a save that has begun commits or fails.
        self.committed.set_running_or_notify_cancel()
        self._timeout_s = timeout_s
        self.stall_s = 0.0
        """Seconds that the call to `save` took."""
        self.progress = progress if progress is not None else SaveProgress()
        self.delivered = False
        """Whether `wait` has raised the failure, or another caller has handled it."""

    @classmethod
    def skipped(cls, step: int, due: Due, error: SaveSkipped) -> PendingSave:
        """Create the `PendingSave` of a save that a hook skipped; it is already done."""
        pending = cls(step, due, timeout_s=0.0)
        pending.staged.set_exception(error)
        pending.committed.set_exception(error)
        return pending

    def __repr__(self) -> str:
        return f"<PendingSave of step {self.step}: {self._describe_state()}>"

    def _describe_state(self) -> str:
        error = self.failure()
        if isinstance(error, SaveSkipped):
            return "skipped"
        if error is not None:
            return f"failed with {type(error).__name__}"
        if self.done():
            return f"committed as {self.committed.result().folder}"
        return f"{self.progress}, {'copied' if self.staged.done() else 'not yet copied'}"

    @property
    def phase(self) -> SavePhase:
        """The phase that the save is in, or was in when it ended."""
        return self.progress.phase

    def done(self) -> bool:
        """Whether the save has committed or failed."""
        return self.committed.done()

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Block until the checkpoint is durable, or `timeout_s` are over (default: the manager's).

        Raises:
            SaveFailed: it did not commit; the cause is chained.
            SaveSkipped: a hook skipped it.
            Superseded: a later writer owns the run.
            DeadlineExceeded: `timeout_s` seconds passed; the save continues.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        end_s = time.monotonic() + limit_s
        watch_one(
            self.committed,
            timeout_s=limit_s,
            what=f"save of step {self.step}",
            doing=lambda: str(self.progress),
        )
        _, running = wait([self.committed], timeout=max(end_s - time.monotonic(), 0.0))
        if running:
            raise DeadlineExceeded(
                f"save of step {self.step}: not done after {time_limit(limit_s)}; it is "
                f"{self.progress}"
            )
        self.delivered = self.committed.exception() is not None
        return self.committed.result()

    def failure(self) -> BaseException | None:
        """Return the error of a failed save; None while it runs and after a commit."""
        return self.committed.exception() if self.committed.done() else None


_TEXT = re.compile(r"([0-9]{4,10})-([0-9]{6,12})-([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCommit:
    """Order and save id of a known commit, to detect at resume that the root was rolled back."""

    order: tuple[int, int]
    save_id: str

    def expect_no_rollback(self, latest: Entry | None, *, where: str) -> None:
        """Raise `RolledBack` unless `latest` is this commit or a later one."""
        wanted = f"{self.order[0]:04d}-{self.order[1]:06d}"
        if latest is None:
            raise RolledBack(f"{where}: no checkpoint found, but `seen` is commit {wanted}")
        if latest.order < self.order:
            raise RolledBack(
                f"{where}: commit {wanted} of `seen` is newer than the newest usable checkpoint, "
                f"{latest.folder}. Something was removed, restored or damaged; to resume "
                "anyway, name a checkpoint, or omit `seen`"
            )
        if latest.order == self.order and latest.manifest.save_id != self.save_id:
            raise RolledBack(f"{where}/{latest.folder}: another save was seen under this number")


def seen_text(order: tuple[int, int], save_id: str) -> str:
    """Encode a commit as text, which `resume(seen=…)` compares with the newest checkpoint."""
    return f"{order[0]:04d}-{order[1]:06d}-{save_id}"


def parse_seen(text: str | None) -> KnownCommit | None:
    """Parse the text that `seen_text` returned; None for None."""
    if text is None:
        return None
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"seen={text!r}: must be the `seen` of a Checkpoint")
    return KnownCommit(order=(int(match[1]), int(match[2])), save_id=match[3])
