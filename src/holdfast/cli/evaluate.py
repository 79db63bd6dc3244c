"""`holdfast evaluate`: run a command on each checkpoint that lacks a metric, and record its result.

Any number of these processes may work on one run, on any machines.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import click
import msgspec

from holdfast.cli import options
from holdfast.cli.documents import Document, Why
from holdfast.cli.options import argument, command, option
from holdfast.cli.output import Code, give_line, number, say_event, write_message
from holdfast.cli.run import parse_seconds
from holdfast.cli.supervisor import ChildEnding, ChildProcess
from holdfast.cli.target import open_new_root, open_root
from holdfast.cli.watch import Watcher
from holdfast.errors import (
    AccessDenied,
    HoldfastError,
    NoCheckpoint,
    NotFound,
    SealError,
    TransientStoreError,
    UsageError,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.manifest import Manifest
from holdfast.ownership.annotations import annotate, checked_metrics, put_notes, read_marks
from holdfast.ownership.leases import FoundLease, Readers, leased
from holdfast.root.catalog import Catalog, Entry, Marks, is_root
from holdfast.store.base import Store

_PLACEHOLDER = "{checkpoint}"
_MAX_OUTPUT_NBYTES = 64 * 1024
"""Bytes from the end of a command's output in which its last line is looked for."""
_GRACE_S = 10.0
_SIGNAL_CODE = 128
"""Shells give 128 + n as the status of a process that signal n ended."""


class Evaluation(Document, frozen=True):
    """Line of `evaluate` after each run of the command."""

    folder: str
    """Folder of the checkpoint."""
    step: int
    """Its step."""
    metrics: Mapping[str, Any]
    """Metrics that were recorded; empty if the evaluation failed."""
    exit_status: int | None
    """Exit status of the command; -n if signal n ended it; null if it was not started."""
    error: str | None
    """Why it failed."""
    tries: int
    """Number of tries of this process."""
    duration_s: float
    """Seconds that the command took."""


class EvaluationSummary(Document, frozen=True):
    """Result of all evaluations of one process."""

    root: str
    """Path or URL of the root."""
    metric: str | None
    """Metric that was measured; null: unknown, as nothing was saved."""
    evaluated: int
    """Number of checkpoints that this process evaluated."""
    failed: Sequence[Why]
    """Checkpoints that were left without a value after all tries."""
    elsewhere: Sequence[Why]
    """Checkpoints that other processes are evaluating."""
    code: int
    """Exit code of the command."""


class EvaluateEnd(Document, frozen=True):
    """Last line of `evaluate`."""

    summary: EvaluationSummary
    """Result of all evaluations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLimits:
    """Limits of an evaluating process."""

    max_tries: int
    """Tries of each checkpoint."""
    time_limit_s: float
    """Seconds after which the command is killed."""
    interval_s: float | None
    """Seconds between looks for new checkpoints; None: evaluate those that exist, and end."""
    linger_s: float
    """Seconds to wait for another session when the run has ended."""


@command(
    "evaluate",
    options.root,
    argument("command", "COMMAND...", "Program and arguments, with {checkpoint}.", nargs=-1),
    option("--metric", "NAME", "Metric to measure. [default: the metric of the rule best]"),
    click.Option(
        ["--follow/--once"],
        default=False,
        help="Wait for new checkpoints until the run ends, or evaluate those that exist.",
    ),
    option("--tries", "N", "Tries of each checkpoint.", type=click.IntRange(min=1), default=3),
    option("--time-limit", "TIME", "Kill the command after this long.", default="24h"),
    option("--interval", "TIME", "With --follow, time between looks at the root.", default="10s"),
    option("--linger", "TIME", "With --follow, time to wait for another session.", default="60s"),
    answer=EvaluateEnd,
    json_lines="Print a JSON object after each evaluation and at the end.",
)
def evaluate_root(
    root: str,
    command: Sequence[str],
    *,
    metric: str | None,
    follow: bool,
    tries: int,
    time_limit: str,
    interval: str,
    linger: str,
    as_json: bool,
) -> int:
    """Run a command on each checkpoint that lacks a metric.

    {checkpoint} is replaced by the checkpoint's folder, or by ROOT@FOLDER if the root is a URL. The
    last line that the command prints must be a JSON object of numbers, such as {"eval/mmlu": 0.61},
    which are added to the checkpoint. Started any number of times, on any machines, it evaluates
    each checkpoint once, the oldest first. Exit code 1: a checkpoint has no value after all tries.
    """
    if not any(_PLACEHOLDER in word for word in command):
        raise UsageError(
            f"the command has no {_PLACEHOLDER}: holdfast evaluate ROOT -- python eval.py "
            f"{_PLACEHOLDER}"
        )
    limits = EvaluationLimits(
        max_tries=tries,
        time_limit_s=parse_seconds(time_limit, "--time-limit"),
        interval_s=parse_seconds(interval, "--interval") if follow else None,
        linger_s=parse_seconds(linger, "--linger"),
    )
    store = open_new_root(root) if follow else open_root(root)
    with ChildProcess(command, grace_s=_GRACE_S) as child:
        evaluator = _Evaluator(store, metric, limits, child, as_json=as_json)
        code = evaluator.evaluate_all(command)
    evaluator.report_end(code)
    return code


class _Evaluator:
    """Evaluates the checkpoints of a root, one at a time."""

    def __init__(
        self,
        store: Store,
        metric: str | None,
        limits: EvaluationLimits,
        child: ChildProcess,
        *,
        as_json: bool,
    ) -> None:
        self._store = store
        self._metric = metric
        self._limits = limits
        self._child = child
        self._as_json = as_json
        self._evaluations: Evaluations | None = None
        self._num_evaluated = 0
        self._failures: dict[str, list[str]] = {}
        """Folder → why each try failed."""
        self._elsewhere: dict[str, str] = {}
        """Folder → the process that evaluates it."""
        self._seen_live_s = time.monotonic()
        """When the run was last seen to train."""

    def evaluate_all(self, command: Sequence[str]) -> int:
        """Evaluate until nothing is left to do, or a signal asks to stop; return the exit code."""
        watcher, interval_s = Watcher(self._store), self._limits.interval_s
        while True:
            may_train = self._may_train(watcher)  # before the look, which then sees all
            entry, asked = None, None
            try:
                entry, asked = self._evaluate_next(command)
            except TransientStoreError as error:
                if interval_s is None:
                    raise
                write_message(str(error))
                may_train = True
            if entry is None:
                if interval_s is None or not (may_train or self._elsewhere):
                    if not is_root(self._store):
                        raise NoCheckpoint(f"{self._store.url}: no run has begun here")
                    return Code.FOUND if self._list_failed() else Code.OK
                asked = self._child.pause(interval_s)
            if asked is not None:
                return _SIGNAL_CODE + asked

    def _may_train(self, watcher: Watcher) -> bool:
        """Whether the run trains, or was seen to within the time to linger."""
        try:
            owner = watcher.observe_root().owner
        except NotFound:
            owner = None
        except TransientStoreError:
            return True
        if owner is not None and owner.state in ("alive", "unknown"):
            self._seen_live_s = time.monotonic()
        return time.monotonic() - self._seen_live_s < self._limits.linger_s

    def _evaluate_next(self, command: Sequence[str]) -> tuple[Entry | None, int | None]:
        """Evaluate one checkpoint; return it, and the signal that asked to stop, if any."""
        self._elsewhere.clear()
        if self._metric is None:
            self._metric = _find_watched_metric(self._store)
        if self._metric is None:
            return None, None
        if self._evaluations is None:
            self._evaluations = Evaluations(self._store, self._metric, Emitter((say_event,)))
        entries = self._evaluations.list_unmeasured()
        failures = {entry.folder: self._failures.get(entry.folder, []) for entry in entries}
        self._failures = failures
        for entry in sorted(entries, key=lambda entry: len(failures[entry.folder])):
            if len(failures[entry.folder]) >= self._limits.max_tries:
                continue
            holder = self._evaluations.find_holder(entry.folder, entry.marks)
            if holder is not None:
                self._elsewhere[entry.folder] = holder.who
                continue
            with self._evaluations.claim_checkpoint(entry) as is_ours:
                if is_ours:
                    return entry, self._evaluate_entry(entry, command)
            self._elsewhere[entry.folder] = "another process"
        return None, None

    def _evaluate_entry(self, entry: Entry, command: Sequence[str]) -> int | None:
        """Run the command on a checkpoint and record its result; return the signal that came."""
        separator = "/" if self._store.has_folders else "@"
        place = f"{self._store.url}{separator}{entry.folder}"
        words = [word.replace(_PLACEHOLDER, place) for word in command]
        metrics: dict[str, float] = {}
        error = None
        with tempfile.TemporaryFile() as output:
            limit_s = self._limits.time_limit_s
            ending = self._child.run_to_end(words, stdout=output, limit_s=limit_s)
            if ending.asked is not None:
                return ending.asked
            try:
                metrics = self._read_result(ending, output)
            except (UsageError, ValueError) as failure:
                error = str(failure)
        if error is None and self._evaluations is not None:
            try:
                self._evaluations.record_metrics(entry, metrics)
                self._num_evaluated += 1
            except HoldfastError as failure:
                metrics, error = {}, str(failure)
        if error is not None:
            self._failures[entry.folder].append(error)
        self._report(entry, metrics, ending, error)
        return None

    def _read_result(self, ending: ChildEnding, output: IO[bytes]) -> dict[str, float]:
        """Parse the last line of a command's output; raise `ValueError` if the command failed."""
        output.seek(max(output.seek(0, 2) - _MAX_OUTPUT_NBYTES, 0))
        lines = output.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if ending.returncode != 0:
            is_late = ending.duration_s >= self._limits.time_limit_s
            why = f"killed after {self._limits.time_limit_s:g} s" if is_late else str(ending)
            raise ValueError(f"{why}{': ' if last else ''}{last[:200]}")
        try:
            found = json.loads(last)  # not strictly: a metric may be NaN
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or self._metric not in found:
            raise ValueError(
                f"the last line of the output is not a JSON object with {self._metric!r}: "
                f"{last[:200]!r}"
            )
        return checked_metrics(found)

    def _report(
        self, entry: Entry, metrics: Mapping[str, float], ending: ChildEnding, error: str | None
    ) -> None:
        num_tries = len(self._failures[entry.folder]) + (error is None)
        if self._as_json:
            document = Evaluation(
                folder=entry.folder,
                step=entry.step,
                metrics=metrics,
                exit_status=ending.returncode,
                error=error,
                tries=num_tries,
                duration_s=ending.duration_s,
            )
            give_line(document)
            return
        result = ", ".join(f"{name} {number(value)}" for name, value in metrics.items())
        if error is not None:
            result = f"try {num_tries} of {self._limits.max_tries} failed: {error}"
        write_message(f"step {entry.step}: {result} ({ending.duration_s:.1f} s)")

    def _list_failed(self) -> list[Why]:
        return [
            Why(folder=folder, why=errors[-1])
            for folder, errors in self._failures.items()
            if len(errors) >= self._limits.max_tries
        ]

    def report_end(self, code: int) -> None:
        """Report what was evaluated, what was left, and what others are evaluating."""
        summary = EvaluationSummary(
            root=self._store.url,
            metric=self._metric,
            evaluated=self._num_evaluated,
            failed=self._list_failed(),
            elsewhere=[Why(folder=name, why=who) for name, who in self._elsewhere.items()],
            code=int(code),
        )
        if self._as_json:
            give_line(EvaluateEnd(summary=summary))
            return
        for one in summary.failed:
            write_message(f"no value of {self._metric}: {one.folder}: {one.why}")
        for one in summary.elsewhere:
            write_message(f"{one.folder} is being evaluated by {one.why}")
        write_message(f"{summary.evaluated} evaluated")


def _find_watched_metric(store: Store) -> str | None:
    """Return the metric of the run's rule `Best`; None if nothing is saved yet.

    Raises:
        UsageError: the run has no such rule, or several.
    """
    newest = Catalog(store).head()
    if newest is None:
        return None
    names = [watched.metric for watched in newest.manifest.best]
    if len(names) == 1:
        return names[0]
    found = f"several rules best ({', '.join(names)})" if names else "no rule best"
    raise UsageError(f"{store.url}: the run has {found}: pass --metric NAME")


class Evaluations:
    """The checkpoints of a run that lack a value of a metric, as one process measures them.

    It holds a lease on the checkpoint that it measures, and names the lease in the checkpoint's
    notes. Notes are put if absent, so one of several processes is first; the others skip the
    checkpoint until it has a value, or until the lease has ended (docs/design.md, rule 12).
    """

    def __init__(self, store: Store, metric: str, emit: Emitter) -> None:
        self._store = store
        self._metric = metric
        self._emit = emit
        self._readers = Readers(store)
        self._manifests: dict[str, Manifest] = {}
        self._reported: set[str] = set()

    def list_unmeasured(self) -> list[Entry]:
        """List the checkpoints without a value, oldest first: retention deletes the oldest next.

        Skips those that no rule and no name `best` counts: unhealthy, rejected, or left behind by a
        rollback. Warns once of each that cannot be read.

        Raises:
            SealError: no checkpoint can be decrypted with the keys.
        """
        catalog = Catalog(self._store)
        entries, unread = catalog.survey(known=self._manifests)
        for folder, error in unread:
            if isinstance(error, SealError) and not entries:
                raise error
            if folder not in self._reported:
                self._reported.add(folder)
                self._emit("warning", f"{folder} is not evaluated: {error}", folder=folder)
        self._manifests = {entry.folder: entry.manifest for entry in entries}
        lineage = {name.order for name in catalog.lineage()}
        return [
            entry
            for entry in reversed(entries)
            if entry.order in lineage
            and self._metric not in entry.metrics
            and not (entry.manifest.unhealthy or entry.marks.rejected or entry.marks.retired)
        ]

    def find_holder(self, folder: str, marks: Marks) -> FoundLease | None:
        """Return the lease of the process that measures a checkpoint; None if none does."""
        nonce = marks.notes.evaluating.get(self._metric)
        if nonce is None:
            return None
        key = layout.lease_key(folder, nonce)
        return next((one for one in self._readers.find_leases(folder) if one.key == key), None)

    @contextmanager
    def claim_checkpoint(self, entry: Entry) -> Iterator[bool]:
        """Try to claim a checkpoint while the block lasts; yield False if others have done so.

        While it is claimed, retention does not delete it. The claim ends with this process.

        Raises:
            AccessDenied: no lease can be put here, so that others could not see the claim.
        """
        nonce = os.urandom(16).hex()
        with ExitStack() as stack:
            try:
                lease = leased(self._store, entry.folder, emit=self._emit, nonce=nonce)
                refused = stack.enter_context(lease)
                if refused:
                    raise AccessDenied(
                        f"{self._store.url}: cannot be evaluated from here: {refused}"
                    )
                has_claimed = self._put_claim(entry, nonce[:16])
            except NoCheckpoint:  # its deletion has begun
                has_claimed = False
            yield has_claimed

    def _put_claim(self, entry: Entry, nonce: str) -> bool:
        for marks in read_marks(self._store, entry):
            notes = marks.notes
            if self._metric in notes.metrics or self.find_holder(entry.folder, marks) is not None:
                return False
            claims = {**notes.evaluating, self._metric: nonce}
            changed = msgspec.structs.replace(notes, evaluating=claims)
            if put_notes(self._store, entry, marks, changed):
                return True
        return False

    def record_metrics(self, entry: Entry, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a checkpoint, which end its claim; raises as `annotate`."""
        annotate(self._store, entry, metrics=metrics)
