"""Answers about what a run did: `log`, `advise` and `plot`."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.cli.answers.base import Document, Ending, Unopened, UnreadableCheckpoint


class RecordedSaveCost(Document, frozen=True):
    """Durations and bytes of a save; null: not recorded."""

    stall_s: float | None
    """Seconds that training stood still, to capture and copy the state."""
    write_s: float | None
    """Seconds from then until every file was on stable storage; beside training."""
    durable_s: float | None
    """Both together: until the state could not be lost any more, but for the commit."""
    upload_s: float | None
    """Seconds from the commit to the end of its upload, of a root with a remote tier."""
    upload: str | None
    """State of its upload, as for `uploads`; null: nothing is noted here."""
    nbytes: int
    """Bytes of its files as stored."""
    plain_nbytes: int
    """Bytes of all files before they were compressed."""
    linked_nbytes: int | None
    """Bytes of files that it shares with an earlier checkpoint that is left; null without
    `--saves`."""
    new_nbytes: int | None
    """Bytes of all others, which were written; null likewise."""


class LoggedSave(Document, frozen=True):
    """A save of a run, and what became of it."""

    folder: str
    """Its folder."""
    step: int | None
    """Completed optimizer windows; null where neither the manifest nor the label says it."""
    save_class: str | None = msgspec.field(name="class")
    """`permanent` or `ephemeral`; null where its manifest is gone, like the next two."""
    reason: str | None
    """Why it was saved: `interval`, `manual` and so on."""
    created: str | None
    """When it was saved, in UTC."""
    state: Literal["kept", "left behind", "deleted", "aborted", "not committed"]
    """`left behind`: a rollback went on from an earlier one. `aborted`: gc has given it up."""
    why: str | None
    """Why it was deleted or aborted, and by whom; null where no record of that is left."""
    cost: RecordedSaveCost | None
    """What it took; null where its manifest is gone."""


class Life(Document, frozen=True):
    """Time in which one process owned a run."""

    epoch: int
    """Number of its claim."""
    began: str | None
    """UTC time of the claim; null where the claim is lost, as the next two."""
    host: str | None
    """Host of the process."""
    pid: int | None
    """Number of the process there."""
    resumed_from: str | None
    """Folder that it went on from."""
    rollback: bool
    """Whether a person chose that by name."""
    takeover: bool
    """Whether it took the run from a process that was not known to be dead."""
    purpose: str | None
    """What a person claimed it for, such as a deletion and its reason; null for a training."""
    from_step: int | None
    """First step; null where not known."""
    to_step: int | None
    """Last step known of it."""
    num_checkpoints: int
    """How many of its checkpoints exist."""
    reason: str | None
    """Why its newest checkpoint was saved."""
    ending: Ending
    """How it ended; `continued`: by the same process."""
    changes: list[str]
    """What had changed since the life before."""
    saves: list[LoggedSave]
    """Its saves, oldest first."""


class Log(Document, frozen=True):
    """Answer of `log`."""

    root: str
    """Path or URL of the root."""
    lives: list[Life]
    """Lives of the run, oldest first."""
    damaged: list[UnreadableCheckpoint]
    """As for `ls`."""
    unopened: list[Unopened]
    """As for `ls`."""


class Advise(Document, frozen=True):
    """Answer of `advise`."""

    root: str
    """Path or URL of the root."""
    every: str
    """Interval to paste."""
    interval_s: float
    """Seconds of training between two saves."""
    limit: Literal["optimum", "overhead_cap", "one_save_at_a_time", "at_least", "at_most"]
    """Reason for the interval."""
    stall_s: float
    """Median of the seconds that a save stops training."""
    write_s: float
    """Median of the seconds that a save is written after that."""
    mtbf_s: float
    """Mean seconds between failures."""
    num_failures: int | None
    """Failures of the run; null if `--mtbf` was given."""
    trained_s: float
    """Seconds of training that were recorded."""
    unreadable: list[str]
    """Checkpoints that could not be read."""


class MetricSeries(Document, frozen=True):
    """Curve of a metric."""

    panel: str
    """Title of its panel."""
    name: str
    """The metric."""
    points: list[list[float]]
    """Pairs of step and value."""


class PlotStart(Document, frozen=True):
    """Start of a life, but the first."""

    step: int | None
    """Step from which it went on; null where not known."""
    created: str
    """UTC time of the claim."""
    host: str
    """Host of its process."""
    before: Ending
    """How the life before ended."""


class Plot(Document, frozen=True):
    """Answer of `plot`."""

    root: str
    """Path or URL of the root."""
    output: str | None
    """File that was written."""
    series: list[MetricSeries]
    """Curves."""
    saves: list[int]
    """Steps of the saves."""
    starts: list[PlotStart]
    """Starts of all lives but the first."""
    metrics: list[str]
    """Names of all recorded metrics, learning rates among them; `--metric` draws any."""
    notes: list[str]
    """What to know about it."""
