"""Facts that a root records for choosing a save interval: costs, spacing, failed starts.

Reads only, and infers nothing that was not recorded; `holdfast.policy.advisor` draws conclusions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from holdfast.engine.claims.claim import is_closed
from holdfast.engine.claims.process import liveness
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.errors import FormatError
from holdfast.format.manifest import Reference
from holdfast.format.records import Process, WriterRecord
from holdfast.policy.costs import MAX_S, NUM_RECENT, History, SaveCost, recent
from holdfast.policy.rules import recorded_time
from holdfast.store.base import Store

Ending = Literal["closed", "failed", "running", "continued", "unknown"]
"""How a start ended. `continued`: the same process claimed again. `unknown`: the process ran on
another host, or was taken over."""

_MIN_STEP_S = 1e-9
"""Shortest plausible duration of a step, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Median of measured times, in seconds, and the number of measurements."""

    seconds: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spacing:
    """Median training time and steps between consecutive saves."""

    interval_s: float
    """Seconds of training from the end of one save's stall to the next save."""
    steps: float
    num_pairs: int
    is_by_interval: bool
    """Whether only saves triggered by an interval count; False: there were too few of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStart:
    """Recorded start of a process of the run: its claim, and how it ended."""

    epoch: int
    created: str
    host: str
    ending: Ending
    resumed_from: Reference | None
    resume_gap_s: float | None = None
    """Seconds from the commit that the next start resumed from to that start, after a failure.
    Lost work and downtime together: the record does not tell them apart."""
    steps_left_behind: int | None = None
    """Steps committed before a failure that the next start did not resume from. None where the
    manifests needed for it are deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFacts:
    """Facts that a root records about one run; None where it records none."""

    num_saves: int
    """Number of committed checkpoints of this run that still exist."""
    nbytes: int | None
    """Median size of a checkpoint."""
    saves: tuple[SaveCost, ...]
    """Costs of saves of the whole state that record how long they stopped training; oldest first.
    """
    stall: Measured | None
    """How long a recent save stopped training: `capture_s` and `stage_s`."""
    write: Measured | None
    """How long a recent save was written in the background: `write_s`."""
    delay: Measured | None
    """How much background writing delayed training: `delay_s`, measured by `every="auto"`."""
    resume: Measured | None
    """How long a resume took: `resume_s`. Excludes the start of the process."""
    step: Measured | None
    """Duration of a training step between saves, without the saves' stalls."""
    spacing: Spacing | None
    trained_s: float
    """Longest training time that a checkpoint records, in seconds; excludes repeated work."""
    starts: tuple[RecordedStart, ...]
    """Starts of the run, oldest first."""
    unreadable: tuple[str, ...]
    """Manifests and claims that are damaged and not counted, each with the reason."""

    @property
    def num_failures(self) -> int:
        """Number of starts whose process is dead and that did not end cleanly."""
        return sum(start.ending == "failed" for start in self.starts)

    @property
    def history(self) -> History:
        """Recorded costs and failures that an interval is computed from."""
        return History(
            saves=self.saves,
            resumes_s=tuple(_known(save.resume_s for save in self.saves)),
            num_failures=self.num_failures,
            trained_s=self.trained_s,
        )


def gather(store: Store) -> RecordedFacts:
    """Read the recorded save costs, spacing and starts of a run; claims and writes nothing.

    Raises:
        StoreError: the store cannot be read.
    """
    catalog = Catalog(store)
    survey, unread = catalog.survey()
    epochs = sorted(catalog.claims())
    claims, broken = _read_claims(catalog, epochs)
    entries = _of_this_run(survey, epochs)
    saves = [cost for entry in entries if (cost := _cost(entry)) and not entry.manifest.lacks]
    counted = recent(saves)
    walls = [entry.manifest.timestamp.wall_s for entry in entries]
    steps = [
        _work_s(before, after) / (after.step - before.step)
        for before, after in _neighbours(entries)
        if _is_apart(before, after)
    ]
    return RecordedFacts(
        num_saves=len(entries),
        nbytes=int(median(e.manifest.nbytes for e in entries)) if entries else None,
        saves=tuple(saves),
        stall=_measured([cost.stall_s for cost in counted]),
        write=_measured(_known(cost.write_s for cost in counted)),
        delay=_measured(_known(cost.delay_s for cost in counted)),
        resume=_measured(_known(cost.resume_s for cost in saves)[-NUM_RECENT:]),
        step=_measured(steps),
        spacing=_spacing(entries, by_interval=True) or _spacing(entries, by_interval=False),
        trained_s=max((wall_s for wall_s in walls if 0 <= wall_s < MAX_S), default=0.0),
        starts=tuple(_starts(store, claims, entries)),
        unreadable=(*(f"{folder}: {reason}" for folder, reason in unread), *broken),
    )


def _of_this_run(entries: Sequence[Entry], epochs: Sequence[int]) -> list[Entry]:
    """Select this run's checkpoints, oldest first: copies from other runs have unclaimed epochs."""
    claimed, first = set(epochs), min(epochs, default=None)
    own = (e for e in entries if first is None or e.order[0] < first or e.order[0] in claimed)
    return sorted(own, key=lambda entry: entry.order)


def _read_claims(catalog: Catalog, epochs: Sequence[int]) -> tuple[list[WriterRecord], list[str]]:
    claims: list[WriterRecord] = []
    broken: list[str] = []
    for epoch in epochs:
        try:
            claim = catalog.writer(epoch)
        except FormatError as error:
            broken.append(f"claim {epoch}: {error}")
        else:
            if claim is not None:
                claims.append(claim)
    return claims, broken


def _measured(readings: Sequence[float]) -> Measured | None:
    return Measured(seconds=median(readings), count=len(readings)) if readings else None


def _known(readings: Iterable[float | None]) -> list[float]:
    return [seconds for seconds in readings if seconds is not None]


def _cost(entry: Entry) -> SaveCost | None:
    return SaveCost.read(entry.manifest.timings, is_first=entry.order[1] == 1)


def _neighbours(entries: Sequence[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """Pair each existing checkpoint with the next one of the same start."""
    return ((a, b) for a, b in pairwise(entries) if a.order[0] == b.order[0])


def _work_s(before: Entry, after: Entry) -> float:
    """Compute the training time between two saves of one start, less the stall of the first.
    A Timestamp is taken as its save begins.
    """
    wall_s = after.manifest.timestamp.wall_s - before.manifest.timestamp.wall_s
    cost = _cost(before)
    return wall_s - (cost.stall_s if cost is not None else 0.0)


def _is_apart(before: Entry, after: Entry) -> bool:
    """Whether `after` has a later step than `before`, after a plausible training time."""
    num_steps = after.step - before.step
    return num_steps > 0 and num_steps * _MIN_STEP_S < _work_s(before, after) < MAX_S


def _spacing(entries: Sequence[Entry], *, by_interval: bool) -> Spacing | None:
    pairs = [
        (before, after)
        for before, after in _consecutive(entries, by_interval=by_interval)
        if _is_apart(before, after)
    ]
    if not pairs:
        return None
    return Spacing(
        interval_s=median(_work_s(before, after) for before, after in pairs),
        steps=median(after.step - before.step for before, after in pairs),
        num_pairs=len(pairs),
        is_by_interval=by_interval,
    )


def _consecutive(entries: Sequence[Entry], *, by_interval: bool) -> Iterator[tuple[Entry, Entry]]:
    """Pair consecutive saves, or those by interval, with no missing sequence number between."""
    before: Entry | None = None
    last = (0, 0)
    for entry in entries:
        epoch, sequence = entry.order
        if (epoch, sequence - 1) != last:
            before = None  # Retention deleted what lay in between, or another start begins.
        last = entry.order
        if by_interval and not _is_by_interval(entry):
            continue
        if before is not None:
            yield before, entry
        before = entry


def _is_by_interval(entry: Entry) -> bool:
    """Whether a periodic trigger asked for the save, judged by the start of its reason."""
    reasons = entry.manifest.reason.split(", ")
    return any(reason == "interval" or reason.startswith("every ") for reason in reasons)


def _starts(
    store: Store, claims: Sequence[WriterRecord], entries: Sequence[Entry]
) -> Iterator[RecordedStart]:
    by_order = {entry.order: entry for entry in entries}
    for number, claim in enumerate(claims, start=1):
        following = claims[number] if number < len(claims) else None
        ending = ending_of(store, claim, following)
        left_behind, gap_s = None, None
        if ending == "failed" and following is not None:
            left_behind, gap_s = _lost(claim, following, by_order)
        yield RecordedStart(
            epoch=claim.epoch,
            created=claim.created,
            host=claim.process.host,
            resumed_from=claim.resumed_from,
            ending=ending,
            resume_gap_s=gap_s,
            steps_left_behind=left_behind,
        )


def ending_of(store: Store, claim: WriterRecord, following: WriterRecord | None) -> Ending:
    """Say how the process of a claim ended; `following` is the next claim, if there is one."""
    if is_closed(store, claim.epoch):
        return "closed"
    if following is not None and _is_same(claim.process, following.process):
        return "continued"
    state = liveness(claim.process)
    if state == "dead":
        return "failed"
    if following is None:
        return "unknown" if state == "unknown" else "running"
    # Without a takeover a run is claimed only once its owner was found gone.
    return "unknown" if following.takeover else "failed"


def _is_same(one: Process, other: Process) -> bool:
    return bool(one.start and one.boot_id) and one == other


def _lost(
    failed: WriterRecord, following: WriterRecord, entries: Mapping[tuple[int, int], Entry]
) -> tuple[int | None, float | None]:
    """Compute what a failure cost: steps not resumed, and seconds from resumed commit to restart.

    Seconds only where the next start resumed from a checkpoint of `failed`. Where it resumed from
    an older start, all existing commits of `failed` were left behind.
    """
    point = following.resumed_from
    found = entries.get(point.order) if point is not None else None
    of_failed = [entry for order, entry in entries.items() if order[0] == failed.epoch]
    if point is None or found is None or not of_failed:
        return None, None
    left_behind = max(0, of_failed[-1].step - found.step)
    if point.epoch != failed.epoch:
        return left_behind, None
    since, until = recorded_time(found.manifest.created), recorded_time(following.created)
    if since is None or until is None or until < since:
        return left_behind, None
    return left_behind, (until - since).total_seconds()
