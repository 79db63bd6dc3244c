"""`OnCommit`: a command or a function that is run after each commit, in the background."""

from __future__ import annotations

import logging
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from typing import IO, TypeAlias

from typing_extensions import override

from holdfast.arguments import checked
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.control.reporting import Reporter
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Event, Kind, url_without_secrets, without_secrets
from holdfast.format.manifest import manifest_digest

logger = logging.getLogger("holdfast")

CommitFunction: TypeAlias = Callable[[Checkpoint], object]

PLACEHOLDERS = ("folder", "step", "root", "path", "digest")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_FORMATTED = re.compile(rf"(?<!\$)\{{(?:{'|'.join(PLACEHOLDERS)})[:!][^}}]*\}}")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh"})
_SCRIPT = re.compile(r"-[a-z]{0,3}c")
"""Option of a shell, after which its script comes: -c, also with others, as in -ec."""
_MAX_OUTPUT_NBYTES = 2_000
"""Most bytes of a command's output that are kept and logged: the last ones."""
_READ_NBYTES = 1 << 16
_POLL_S = 0.05
"""Longest time until the end of a command is seen, in seconds."""
_REST_S = 1.0
"""How long to read on after the end of a command, in seconds: a child of its has the output, too,
until it has begun with its own."""
_KILLED_S = 5.0
"""How long to wait for a killed command to end, in seconds."""


@checked()
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
        problem = None if callable(self.command) else _problem(self.arguments)
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
        run([_filled(part, values) for part in self._on_commit.arguments], self.timeout_s)

    def __repr__(self) -> str:
        command = self._on_commit.command
        name = getattr(command, "__qualname__", None)
        return f"on_commit={name or without_secrets(repr(command))}"


class CommandFailed(HoldfastError):
    """A command that was run after a commit failed, or was killed at its time limit."""


def run(arguments: Sequence[str], timeout_s: float) -> None:
    """Run a command in a session of its own; at the time limit, kill all that it started.

    Its output is read while it runs, and only the end of it is kept.

    Raises:
        CommandFailed: its status is not 0, or it was killed; the message has its last output.
        OSError: it cannot be started.
    """
    deadline_s = time.monotonic() + timeout_s
    process = subprocess.Popen(
        arguments,
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    with closing(_Output(process.stdout)) as output:
        try:
            output.read_until(process, deadline_s)
            status = process.wait(max(deadline_s - time.monotonic(), 0))
            ending = _ending(status)
        except subprocess.TimeoutExpired:
            _kill(process)
            ending = f"killed after {timeout_s:g} s"
        output.read_rest()
    command, said = (without_secrets(text) for text in (shlex.join(arguments), str(output)))
    if ending:
        raise CommandFailed(f"{command}: {ending}" + (f", and it said{said}" if said else ""))
    logger.debug("%s: done%s", command, said)
    if output.is_held:
        logger.warning(
            "%s: has ended, and what it left running has its output, which nobody reads: give "
            "that an output of its own, as in `… >log 2>&1 &`",
            command,
        )


def _ending(status: int) -> str:
    """Name the ending of a command; "" for success."""
    if status < 0:
        names = {one.value: one.name for one in signal.Signals}
        return f"ended by {names.get(-status, f'signal {-status}')}"
    return f"status {status}" if status else ""


class _Output:
    """Reads a command's output, and keeps the last bytes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.is_held = True
        """Whether a process still has its other end."""
        self._pipe = pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        self._kept = bytearray()
        self._nbytes = 0

    def close(self) -> None:
        self._selector.close()
        self._pipe.close()

    def read_until(self, process: subprocess.Popen[bytes], deadline_s: float) -> None:
        """Read until the process has ended, or has closed its output."""
        while self.is_held and process.poll() is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            self._read(min(_POLL_S, left_s))

    def read_rest(self) -> None:
        """Read the rest, but not for long: whatever was left running may go on to write."""
        deadline_s = time.monotonic() + _REST_S
        while self.is_held and (left_s := deadline_s - time.monotonic()) > 0:
            self._read(left_s)

    def _read(self, patience_s: float) -> None:
        """Read once, as soon as something is there."""
        if not self._selector.select(patience_s):
            return
        data = os.read(self._pipe.fileno(), _READ_NBYTES)
        self.is_held = bool(data)
        self._nbytes += len(data)
        self._kept += data
        del self._kept[:-_MAX_OUTPUT_NBYTES]

    def __str__(self) -> str:
        """The end of it, as it follows on "it said"."""
        text = self._kept.decode("utf-8", "replace").strip()
        if self._nbytes > _MAX_OUTPUT_NBYTES:
            return f" (the end of {self._nbytes:,} bytes): {text}"
        return f": {text}" if text else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass  # it has just ended
    process.wait(_KILLED_S)


def _filled(part: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], part)


def _problem(arguments: Sequence[str]) -> str | None:
    """Say why a command cannot be run; None if it can."""
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
    if set(_PLACEHOLDER.findall(_script(arguments))) & {"root", "path"}:
        return (
            'a shell would read the path as its own language: write "$1" in the script, and the '
            "placeholder after it, as in sh -c 'ls \"$1\"' sh {path}"
        )
    return None


def _script(arguments: Sequence[str]) -> str:
    """Return what a shell among the arguments would run as its script; "" if there is none."""
    rest = iter(arguments)
    is_shell = any(os.path.basename(part) in _SHELLS for part in rest)
    return next(rest, "") if is_shell and any(map(_SCRIPT.fullmatch, rest)) else ""
