"""The table of mistakes, and the judge of its cases.

A case is a function of a `User`. Where it is a generator, what stands before its `yield` prepares
the mistake, such as an edit of a file. For each case the judge asks for the same three things: an
error or a warning that names what is wrong; every file of every checkpoint is as it was; and the
state is the one that the case declares.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mistakes.user import AS_IT_WAS, Listener, User, copied, digest

import holdfast
from holdfast.errors import HoldfastError

Act = Callable[[User], Any]
_NOT_KEPT = ("writers", "readers", "requests", "uploads", "history", "log", "latest")
"""What a run changes beside its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mistake."""

    theme: str
    did: str
    """What the user did, in Markdown."""
    names: str
    """What the message must name."""
    act: Act
    state: str | int | None
    """The state afterwards: as it was (or as the user's own training left it), or of which step;
    None: it is a Trainer's, which trains."""
    deletes: bool
    """Whether the user asked for a deletion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What Holdfast says to a mistake."""

    kind: str
    """The error's class, `exit` and a number, or `warning`."""
    text: str


class Theme:
    """Cases that belong together, in a file of their own."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.cases: list[Case] = []

    def case(
        self, did: str, *, names: str, state: str | int | None = AS_IT_WAS, deletes: bool = False
    ) -> Callable[[Act], Act]:
        """Register a case."""

        def register(act: Act) -> Act:
            self.cases.append(
                Case(theme=self.title, did=did, names=names, act=act, state=state, deletes=deletes)
            )
            return act

        return register


def judged(case: Case, template: Path, digests: dict[int, str], folder: Path) -> Answer:
    """Let the user make the mistake, and give what Holdfast says.

    Raises:
        AssertionError: it is silent, deletes something, or leaves another state.
    """
    user = copied(template, folder)
    listener, was_in = Listener(), Path.cwd()
    error: Exception | None = None
    os.chdir(folder)
    try:
        steps = _steps(case.act, user)
        next(steps)
        before = _files(folder)
        logging.getLogger("holdfast").addHandler(listener)
        try:
            with user.doing:
                next(steps, None)
        except HoldfastError as raised:
            error = raised
        finally:
            logging.getLogger("holdfast").removeHandler(listener)
        if not case.deletes:
            _expect_all(before, folder)
        if case.state is not None:
            _expect_state(case, user, digests)
    finally:
        os.chdir(was_in)
    return _answer(case, error, [*user.said, *listener.messages], folder)


def _steps(act: Act, user: User) -> Iterator[None]:
    """The preparation, and the mistake."""
    if inspect.isgeneratorfunction(act):
        yield from act(user)
    else:
        yield
        act(user)


def _files(folder: Path) -> Counter[tuple[str, str, bytes]]:
    """Every file below a folder that no run may change, wherever a user moves its folder to."""
    return Counter(
        (*path.parts[-2:], path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and not set(_NOT_KEPT).intersection(path.relative_to(folder).parts)
    )


def _expect_all(before: Counter[tuple[str, str, bytes]], folder: Path) -> None:
    lost = sorted(f"{parent}/{name}" for parent, name, _ in before - _files(folder))
    assert not lost, f"deleted or changed: {lost}"


def _expect_state(case: Case, user: User, digests: dict[int, str]) -> None:
    now = digest(user.state)
    expected = user.at
    if isinstance(case.state, int):
        expected = digests[case.state]
    known = {value: f"that of step {step}" for step, value in digests.items()}
    assert now == expected, f"the state is {known.get(now, 'another one')}"


def _answer(case: Case, error: Exception | None, said: list[str], folder: Path) -> Answer:
    if error is not None:
        said = [str(error)]
    named = [text for text in said if case.names in text]
    assert error is not None or any(text.strip() for text in said), "silence"
    assert named, f"{case.names!r} is not named: {error!r} {said}"
    text, kind = named[0], "warning"
    if error is not None:
        kind = type(error).__name__
        public = (holdfast.errors, holdfast.train)
        assert any(getattr(module, kind, None) is type(error) for module in public), repr(error)
    elif (match := re.match(r"exit (\d+): ", text)) is not None:
        kind, text = match[0].rstrip(": "), text[match.end() :]
    return Answer(kind=kind, text=_plain(_telling(text, case.names), folder))


def _telling(text: str, names: str) -> str:
    """The line that names what is wrong."""
    return next(line.strip() for line in text.splitlines() if names in line)


def _plain(text: str, folder: Path) -> str:
    """Without what differs from machine to machine."""
    text = text.replace(str(folder.resolve()), "…").replace(str(folder), "…")
    text = re.sub(rf"\bon {re.escape(socket.gethostname())}\b", "on HOST", text)
    text = re.sub(r"\d+ bytes, expected \d+", "N bytes, expected N", text)
    text = re.sub(r"the smallest: \d+", "the smallest: N", text)
    text = re.sub(r"\(\d+ bytes\)", "(N bytes)", text)
    text = re.sub(r"(Expected one of) .* (device type)", r"\1 … \2", text)
    text = re.sub(r"(\.\d{4}-\d{6})-[0-9a-f]{8}\b", r"\1-…", text)
    text = re.sub(r"\((\d+-\d+)-[0-9a-f]{8}\)", r"(\1-…)", text)
    text = re.sub(r"\b[0-9a-f]{32,}\b", "…", text)
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\+00:00|Z)?", "TIME", text)
    return re.sub(r"\b(pid|process) \d+", r"\1 N", text)
