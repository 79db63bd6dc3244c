"""`holdfast run`: restart a training when it crashes, as long as it makes progress.

With `--memory` trainings stage in a folder in shared memory, from which this process finishes the
saves that a dead training left.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import click

from holdfast.cli.documents import Document
from holdfast.cli.options import argument, command, option
from holdfast.cli.output import Code, TextTable, aligned, give_line, write_message
from holdfast.cli.supervisor import (
    REQUEUE_CODE,
    Child,
    ChildEnding,
    ChildProcess,
    ChildSession,
    RestartLimits,
    Supervised,
    SupervisionOutcome,
    supervise,
)
from holdfast.cli.target import open_new_root
from holdfast.errors import CorruptData, FormatError, SealError, StoreError, UsageError
from holdfast.launched import MEMORY
from holdfast.ownership.process import this_process
from holdfast.policy.clock import Unit, parse
from holdfast.policy.rules import number_of_bytes
from holdfast.root.catalog import Catalog
from holdfast.staging.shared import ALL_DEAD, FINISH_S, SharedFolder, Supervisor
from holdfast.store.base import Store
from holdfast.system import memory_limit, signal_name, user_number

PLACE = Path("/dev/shm")
_PREFIX = "holdfast-"
_LEAST_NBYTES = 1_000_000
_FINISH = (sys.executable, "-m", "holdfast.saving.finish")


class StagingMemory:
    """Folder in shared memory in which trainings stage, for as long as this process needs it."""

    def __init__(self, budget: str) -> None:
        """Check the budget, such as "8GB"."""
        self._nbytes = number_of_bytes(budget, what="--memory ")
        if not budget[-1].isalpha() or self._nbytes < _LEAST_NBYTES:
            raise UsageError(f"--memory {budget}: expected a unit and at least 1MB, such as 8GB")
        self._folder: SharedFolder | None = None
        if not PLACE.is_dir():
            raise UsageError(f"--memory: needs {PLACE}, which this system lacks")

    def __enter__(self) -> StagingMemory:
        remove_stale_folders()
        limit = memory_limit()
        if limit is not None and self._nbytes > limit:
            raise UsageError(f"--memory {self._nbytes:,}: the cgroup allows {limit:,} bytes")
        space = os.statvfs(PLACE)
        free = space.f_bavail * space.f_frsize
        if self._nbytes > free:
            raise UsageError(
                f"--memory {self._nbytes:,}: {PLACE} has {free:,} bytes free. Ask for less, or "
                "make it larger (docker run --shm-size)"
            )
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=PLACE))
        record = Supervisor(process=this_process(), budget_nbytes=self._nbytes)
        self._folder, self._lock = SharedFolder.make_at(path, record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            _remove_finished(self._folder)
            os.close(self._lock)

    @property
    def environment(self) -> dict[str, str]:
        """The environment for the command."""
        assert self._folder is not None, "in a with block"
        return {**os.environ, MEMORY: str(self._folder.path)}

    @property
    def unfinished(self) -> SharedFolder | None:
        """The folder, if it has saves that are staged whole and not known to be committed."""
        assert self._folder is not None, "in a with block"
        return self._folder if self._folder.is_unfinished else None


class FinishingChild(Child):
    """Child whose last staged save is finished after each of its ends."""

    def __init__(self, child: ChildProcess, memory: StagingMemory) -> None:
        self._child = child
        self._memory = memory

    def run_to_end(self) -> ChildEnding:
        """Start the process, wait for its end, and finish what it has left in memory."""
        ending = self._child.run_to_end()
        folder = self._memory.unfinished
        if folder is None:
            return ending
        # A process of its own, as this one imports no torch, and must not fail with it.
        finished = self._child.run_to_end([*_FINISH, str(folder.path)], limit_s=FINISH_S)
        if finished.returncode != 0:
            write_message(f"the save that the training had staged was not finished: {finished}")
        asked = finished.asked if ending.asked is None else ending.asked
        return replace(ending, asked=asked)

    def pause(self, delay_s: float) -> int | None:
        """Wait for `delay_s` seconds or until a stop signal; return that signal's number."""
        return self._child.pause(delay_s)


def remove_stale_folders() -> None:
    """Finish the saves in folders that no process uses any more, then remove the folders."""
    for path in PLACE.glob(f"{_PREFIX}*"):
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user_number():
                continue
            folder = SharedFolder(path)
            _ = folder.supervisor
            lock = folder.hold(alone=True)
        except (OSError, CorruptData):
            continue  # nothing proves that it is ours, and that its processes are dead
        try:
            if folder.is_unfinished:
                _finish_alone(folder, lock)
            _remove_finished(folder)
        finally:
            os.close(lock)


def _remove_finished(folder: SharedFolder) -> None:
    if folder.is_unfinished:
        write_message(
            f"{folder.path} stays, with an unfinished save: the next holdfast run --memory tries "
            "again, or delete it"
        )
    else:
        folder.remove()


def _finish_alone(folder: SharedFolder, lock: int) -> None:
    """Finish the saves of a killed supervisor's training, whose folder is locked."""
    command = [*_FINISH, str(folder.path), ALL_DEAD]
    try:
        # With the lock, as it may outlive this process.
        code = subprocess.run(command, pass_fds=(lock,), timeout=FINISH_S, check=False).returncode
        fault = f"exit status {code}" if code else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = str(error)
    if fault:
        write_message(f"saves in {folder.path} were not finished: {fault}")


class RunSession(Document, frozen=True):
    """Line of `run` after each session of the command."""

    session: int
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
    """Sessions in a row without progress."""
    restart_in_s: float | None
    """Pause before the next session; null after the last."""


class Summary(Document, frozen=True):
    """All sessions of `run`."""

    outcome: Literal["finished", "requeue", "stopped", "gave-up"]
    """How it ended."""
    code: int
    """Exit code of the command."""
    from_step: int | None
    """Step of the run before the first session."""
    to_step: int | None
    """Step of the run after the last."""
    sessions: Sequence[RunSession]
    """The sessions."""


class RunEnd(Document, frozen=True):
    """Last line of `run`."""

    summary: Summary
    """All sessions."""


@command(
    "run",
    argument("command", "COMMAND...", "The program to run, with its arguments.", nargs=-1),
    option("--root", "ROOT", "Run whose new checkpoints count as progress."),
    option(
        "--max-failures",
        "N",
        "Give up after N restarts in a row without progress.",
        type=click.IntRange(min=1),
        default=5,
    ),
    option(
        "--backoff", "TIME", "First pause before a restart; it doubles each time.", default="1s"
    ),
    option("--backoff-max", "TIME", "Longest pause.", default="60s"),
    option(
        "--progress-after",
        "TIME",
        "Without --root, running this long counts as progress. [default: 10min]",
    ),
    option(
        "--requeue-code",
        "N",
        "Exit code that ends the command without a restart.",
        type=click.IntRange(min=1, max=255),
        default=REQUEUE_CODE,
    ),
    option(
        "--memory",
        "SIZE",
        'Shared memory for staged state, as "8GB"; it outlives the training. [default: none]',
    ),
    option("--grace", "TIME", "Kill the training this long after a signal.", default="5min"),
    answer=RunEnd,
    json_lines="Print a JSON object after each session and at the end.",
    # Options after the program's name are the program's own.
    context_settings={"allow_interspersed_args": False},
)
def run_command(
    command: Sequence[str],
    *,
    root: str | None,
    max_failures: int,
    backoff: str,
    backoff_max: str,
    progress_after: str | None,
    requeue_code: int,
    memory: str | None,
    grace: str,
    as_json: bool,
) -> int:
    """Run a training, and restart it when it crashes.

    It is restarted as long as it makes progress. The command exits with the code of the
    program, or with 4 after too many restarts.
    """
    if root is not None and progress_after is not None:
        raise UsageError(
            "--progress-after: cannot be combined with --root, because checkpoints then show the "
            "progress"
        )
    limits = RestartLimits(
        max_failures=max_failures,
        backoff_s=parse_seconds(backoff, "--backoff"),
        backoff_max_s=parse_seconds(backoff_max, "--backoff-max"),
        requeue_code=requeue_code,
        progress_after_s=parse_seconds(progress_after or "10min", "--progress-after"),
    )
    head = None if root is None else _head_of(open_new_root(root, what="--root "))
    tell = _report_json if as_json else _report_session
    grace_s = parse_seconds(grace, "--grace")
    with ExitStack() as stack:
        kept = None if memory is None else stack.enter_context(StagingMemory(memory))
        environment = None if kept is None else kept.environment
        process = ChildProcess(command, grace_s=grace_s, environment=environment)
        child = stack.enter_context(process)
        supervised = child if kept is None else FinishingChild(child, kept)
        result = supervise(supervised, limits, head=head, tell=tell)
    code = Code.GAVE_UP if result.outcome is SupervisionOutcome.GAVE_UP else result.code
    if as_json:
        give_line(RunEnd(summary=_summary(result, code)))
    elif len(result.sessions) > 1 or result.outcome is SupervisionOutcome.GAVE_UP:
        _print_result(result)
    return code


def parse_seconds(text: str, option: str) -> float:
    """Parse a time such as "30s" or "2min"; returns seconds."""
    if text in ("0", "0s"):
        return 0.0
    return float(parse(text, what=option, units={Unit.SECOND}).value)


def _head_of(store: Store) -> Callable[[], int | None]:
    def head() -> int | None:
        try:
            entry = Catalog(store).latest()
        except (StoreError, FormatError, SealError) as error:
            write_message(f"cannot read the head of the run: {error}")
            return None
        return None if entry is None else entry.step

    return head


def _report_session(session: ChildSession) -> None:
    if session.restart_in_s is None:
        return
    progress = "" if session.has_progressed else f", no progress ({session.failures} in a row)"
    write_message(
        f"session {session.number} ended: {session.ending}, "
        f"after {session.ending.duration_s:.1f} s, {_steps(session)}{progress}; "
        f"next in {session.restart_in_s:.1f} s"
    )


def _steps(session: ChildSession) -> str:
    if session.from_step is None and session.to_step is None:
        return "no step known"
    return f"step {_format_step(session.from_step)} to {_format_step(session.to_step)}"


def _format_step(step: int | None) -> str:
    return "-" if step is None else str(step)


def _report_json(session: ChildSession) -> None:
    give_line(_describe_session(session))


def _describe_session(session: ChildSession) -> RunSession:
    returncode = session.ending.returncode
    is_signal = returncode is not None and returncode < 0
    return RunSession(
        session=session.number,
        exit_status=None if is_signal else returncode,
        signal=signal_name(-returncode) if returncode is not None and is_signal else None,
        asked=None if session.ending.asked is None else signal_name(session.ending.asked),
        error=session.ending.error or None,
        duration_s=session.ending.duration_s,
        from_step=session.from_step,
        to_step=session.to_step,
        has_progressed=session.has_progressed,
        failures=session.failures,
        restart_in_s=session.restart_in_s,
    )


def _summary(result: Supervised, code: int) -> Summary:
    return Summary(
        outcome=result.outcome.value,
        code=int(code),
        from_step=result.sessions[0].from_step,
        to_step=result.sessions[-1].to_step,
        sessions=[_describe_session(session) for session in result.sessions],
    )


def _print_result(result: Supervised) -> None:
    table = TextTable(
        columns=("session", "ended with", "seconds", "from step", "to step", "progress"),
        rows=[_row(session) for session in result.sessions],
        right=frozenset({0, 2, 3, 4}),
    )
    for line in aligned(table):
        click.echo(line, err=True)
    write_message(_verdict(result))


def _row(session: ChildSession) -> tuple[str, ...]:
    return (
        str(session.number),
        str(session.ending),
        f"{session.ending.duration_s:.1f}",
        _format_step(session.from_step),
        _format_step(session.to_step),
        "yes" if session.has_progressed else "no",
    )


def _verdict(result: Supervised) -> str:
    last = result.sessions[-1]
    if result.outcome is SupervisionOutcome.FINISHED:
        return f"finished in session {last.number}"
    if result.outcome is SupervisionOutcome.REQUEUE:
        return f"status {result.code}: to be run again by its scheduler"
    if result.outcome is SupervisionOutcome.STOPPED:
        return f"stopped by a signal in or after session {last.number}"
    return f"gave up: {last.failures} in a row made no progress; the last ended with {last.ending}"
