"""Event sinks that may be slow, offline or broken: trackers, and commands after each commit.

Owns the queue, the thread and the time limits; knows nothing of what is done with an event.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, TypeAlias

from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Event, Kind, url_without_secrets, without_secrets
from holdfast.format.manifest import manifest_digest
from holdfast.results import Checkpoint
from holdfast.threads.workers import Workers

logger = logging.getLogger("holdfast")

MAX_WAITING = 10_000
"""Most events that wait for a handler that is slow; further ones are dropped with a warning."""


class Reporter:
    """Event sink that handles events in order, in a thread of its own.

    Override `report`. A save never waits for it. What it raises is logged as a warning, and so is a
    handler that takes longer than `timeout_s` seconds. The close of the manager waits as long for
    what is queued, and warns of what was not handled. With several ranks only the leader reports.
    """

    is_for_leader: ClassVar[bool] = True
    kinds: tuple[Kind, ...] | None = None
    """Kinds of the events that are handled; None: all."""

    @check_arguments()
    def __init__(self, *, timeout_s: float = 10.0) -> None:
        if not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s!r}: must be a positive number of seconds")
        self.timeout_s = timeout_s
        self._workers = Workers(1, f"holdfast-{type(self).__name__}")
        self._lock = threading.Lock()
        self._queued: deque[tuple[Event, Future[None]]] = deque()
        self._began_s: float | None = None
        """Time when the handler under way was called; None: none is."""
        self._warned: set[str] = set()
        self._num_failed = 0

    @property
    def close_timeout_s(self) -> float:
        """Seconds that the close of the manager waits for what is queued."""
        return self.timeout_s

    def report(self, event: Event, at_s: float) -> None:
        """Handle an event that was emitted at `at_s`, a Unix time. Called in the thread."""
        raise NotImplementedError

    def __call__(self, event: Event) -> None:
        """Queue an event; at "closed", wait until all are handled, up to the time limit."""
        if self.kinds is None or event.kind in self.kinds:
            self._queue(event)
        if event.kind == "closed":
            self._drain_queue()

    def _queue(self, event: Event) -> None:
        self._warn_of_slowness()
        with self._lock:
            while self._queued and self._queued[0][1].done():
                self._queued.popleft()
            is_full = len(self._queued) >= MAX_WAITING
            if not is_full:
                at_s = time.time()
                future = self._workers.submit(lambda: self._handle(event, at_s))
                self._queued.append((event, future))
        if is_full:
            self._warn_once("full", f"{MAX_WAITING:,} events wait; further ones are dropped")

    def _handle(self, event: Event, at_s: float) -> None:
        self._began_s = time.monotonic()
        try:
            self.report(event, at_s)
        except BaseException as error:  # noqa: BLE001 - it is logged, also SystemExit
            self._num_failed += 1
            self._warn_once(
                "failed", f"failed for {_describe_event(event)}: {_describe_error(error)}"
            )
        finally:
            self._began_s = None

    def _warn_of_slowness(self) -> None:
        began_s = self._began_s
        if began_s is not None and time.monotonic() - began_s > self.timeout_s:
            self._warn_once("slow", f"one event takes more than {self.timeout_s:g} s; others wait")

    def _drain_queue(self) -> None:
        """Wait for queued events up to the time limit; warn of what was not handled."""
        with self._lock:
            queued = [*self._queued]
        left = wait([future for _, future in queued], timeout=self.close_timeout_s).not_done
        if left:
            named = [_describe_event(event) for event, future in queued if future in left]
            more = f" and {len(named) - 1} more" if len(named) > 1 else ""
            text = f"not done after {self.close_timeout_s:g} s, and abandoned: {named[0]}{more}"
            logger.warning("%s: %s. The checkpoints are not affected", self, text)
        if self._num_failed > 1:
            logger.warning("%s: failed %d times in all", self, self._num_failed)
        self._num_failed = 0
        self._warned.clear()

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s: %s. Saves and training are not affected", self, text)

    def __repr__(self) -> str:
        return type(self).__name__


def _describe_event(event: Event) -> str:
    folder = event.fields.get("folder")
    if folder is not None:
        return f"{event.kind} {folder}"
    return event.kind if event.step is None else f"{event.kind} of step {event.step}"


def _describe_error(error: BaseException) -> str:
    text = without_secrets(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


CommitFunction: TypeAlias = Callable[[Checkpoint], object]

PLACEHOLDERS = ("folder", "step", "root", "path", "digest")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_FORMATTED = re.compile(rf"(?<!\$)\{{(?:{'|'.join(PLACEHOLDERS)})[:!][^}}]*\}}")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_SCRIPT = re.compile(r"-[a-z]{0,3}c")
"""Option of a shell, after which its script comes: -c, also with others, as in -ec."""
_KILLED_S = 5.0
"""How long to wait for a killed command to end, in seconds."""


@check_arguments()
@dataclass(frozen=True, slots=True)
class OnCommit:
    """Command or function that is run after each commit, with a time limit.

        Checkpoints("runs/gpt", on_commit=OnCommit("notify {folder} {step}", timeout_s=30))

    In each argument of a command, `{folder}`, `{step}`, `{root}`, `{path}` (root and folder) and
    `{digest}` (of the manifest) are replaced. No shell sees it, unless it calls one itself.

    Raises:
        UsageError: the command is empty, does not exist, or has another placeholder.
    """

    command: str | Sequence[str] | CommitFunction
    """A command as one text, which is split as a shell would, or as its arguments; or a function,
    which is called with the `Checkpoint` in the background."""
    _: KW_ONLY
    timeout_s: float = 60.0
    """Seconds after which a command is killed. A function cannot be: there is a warning, and what
    follows waits for it. The close of the manager waits as long for all that is left."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise UsageError(f"timeout_s={self.timeout_s!r}: must be a positive number of seconds")
        problem = None if callable(self.command) else _find_problem(self.arguments)
        if problem is not None:
            raise UsageError(f"on_commit={self.command!r}: {problem}")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command's arguments, with their placeholders; none of a function."""
        if isinstance(self.command, str):
            try:
                return tuple(shlex.split(self.command))
            except ValueError as error:
                raise UsageError(f"on_commit={self.command!r}: {error}") from error
        return () if callable(self.command) else tuple(self.command)


def commands_of(
    given: OnCommit | str | Sequence[str] | CommitFunction | None,
) -> tuple[Reporter, ...]:
    """Return the sink that runs what is given as `on_commit`; none for None."""
    if given is None:
        return ()
    return (CommandSink(given if isinstance(given, OnCommit) else OnCommit(given)),)


class CommandSink(Reporter):
    """Sink that runs an `OnCommit` after each commit, in order."""

    kinds: tuple[Kind, ...] | None = ("committed",)

    def __init__(self, on_commit: OnCommit) -> None:
        super().__init__(timeout_s=on_commit.timeout_s)
        self._on_commit = on_commit

    @property
    @override
    def close_timeout_s(self) -> float:
        return self.timeout_s + _KILLED_S  # so that one that hangs is killed and not left behind

    @override
    def report(self, event: Event, at_s: float) -> None:
        if not event.fields["is_new"]:
            return
        checkpoint: Checkpoint = event.fields["checkpoint"]
        command = self._on_commit.command
        if callable(command):
            command(checkpoint)
            return
        values = {
            "folder": checkpoint.folder,
            "step": str(checkpoint.step),
            "root": url_without_secrets(checkpoint.root),
            "path": url_without_secrets(checkpoint.path),
            "digest": manifest_digest(event.fields["manifest"]),
        }
        run_command(
            [_fill_placeholders(part, values) for part in self._on_commit.arguments], self.timeout_s
        )

    def __repr__(self) -> str:
        command = self._on_commit.command
        name = getattr(command, "__qualname__", None)
        return f"on_commit={name or without_secrets(repr(command))}"


class CommandFailed(HoldfastError):
    """A command that was run after a commit failed, or was killed at its time limit."""


def run_command(arguments: Sequence[str], timeout_s: float) -> None:
    """Run a command in a session of its own; at the time limit, kill all that it started."""
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        ending = _describe_exit(process.wait(timeout_s))
    except subprocess.TimeoutExpired:
        _kill(process)
        ending = f"killed after {timeout_s:g} s"
    command = without_secrets(shlex.join(arguments))
    if ending:
        raise CommandFailed(f"{command}: {ending}; its output is in this process's output")
    logger.debug("%s: done", command)


def _describe_exit(status: int) -> str:
    """Describe how a command ended; "" for success."""
    if status < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"ended by {names.get(-status, f'signal {-status}')}"
    return f"status {status}" if status else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass  # it has just ended
    process.wait(_KILLED_S)


def _fill_placeholders(part: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], part)


def _find_problem(arguments: Sequence[str]) -> str | None:
    """Return the reason why a command cannot be run; None if it can."""
    if not arguments or not all(isinstance(part, str) for part in arguments):
        return "must be a command and its arguments, as text"
    for part in arguments:
        unknown = [name for name in _PLACEHOLDER.findall(part) if name not in PLACEHOLDERS]
        if unknown:
            known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            return f"{{{unknown[0]}}} is none of {known}"
        formatted = _FORMATTED.search(part)
        if formatted:
            return f"{formatted[0]}: a placeholder is a name alone, without a format"
    name = arguments[0]
    if shutil.which(name) is None:
        return f"there is no command {name!r} that can be run"
    if set(_PLACEHOLDER.findall(_find_shell_script(arguments))) & {"root", "path"}:
        return (
            'a shell would read the path as its own language: write "$1" in the script, and the '
            "placeholder after it, as in sh -c 'ls \"$1\"' sh {path}"
        )
    return None


def _find_shell_script(arguments: Sequence[str]) -> str:
    """Return what a shell among the arguments would run as its script; "" if there is none."""
    rest = iter(arguments)
    is_shell = any(os.path.basename(part) in _SHELLS for part in rest)
    return next(rest, "") if is_shell and any(map(_SCRIPT.fullmatch, rest)) else ""
