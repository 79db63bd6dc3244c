"""`OnCommit`: a command or a function that is run after each commit, in the background."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.control.reporter import Reporter
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Event, Kind, url_without_secrets, without_secrets
from holdfast.format.manifest import manifest_digest
from holdfast.results import Checkpoint

logger = logging.getLogger("holdfast")

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
        run_command([_filled(part, values) for part in self._on_commit.arguments], self.timeout_s)

    def __repr__(self) -> str:
        command = self._on_commit.command
        name = getattr(command, "__qualname__", None)
        return f"on_commit={name or without_secrets(repr(command))}"


class CommandFailed(HoldfastError):
    """A command that was run after a commit failed, or was killed at its time limit."""


def run_command(arguments: Sequence[str], timeout_s: float) -> None:
    """Run a command in a session of its own; at the time limit, kill all that it started.

    It writes to the standard output and error of this process.

    Raises:
        CommandFailed: its status is not 0, or it was killed.
        OSError: it cannot be started.
    """
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        ending = _ending(process.wait(timeout_s))
    except subprocess.TimeoutExpired:
        _kill(process)
        ending = f"killed after {timeout_s:g} s"
    command = without_secrets(shlex.join(arguments))
    if ending:
        raise CommandFailed(f"{command}: {ending}; its output is in this process's output")
    logger.debug("%s: done", command)


def _ending(status: int) -> str:
    """Name the ending of a command; "" for success."""
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
