"""Picture of a run's sessions, from the answer of `log`: a line each, and what was left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.cli.log import LoggedSave, Session

WIDTH, LANE, LEFT, RIGHT = 960, 26, 44, 16
MOST_SESSIONS = 40
"""Newest sessions that are drawn; the table has all."""


class Tick(NamedTuple):
    """A save on a line."""

    x: float
    state: str
    title: str


class Lane(NamedTuple):
    """The line of one session."""

    y: float
    session: Session
    start: float
    end: float
    ticks: list[Tick]
    origin: tuple[float, float] | None
    """Where it went on from: the place of that checkpoint."""


class Picture(NamedTuple):
    """All lines, and the size of the picture."""

    width: int
    height: int
    lanes: list[Lane]
    first: int
    last: int
    left_out: int


def picture(sessions: Sequence[Session]) -> Picture:
    """Lay out the newest sessions, oldest on top, with steps from left to right."""
    shown = sessions[-MOST_SESSIONS:]
    steps = [step for session in shown for step in _steps(session)] or [0]
    first, last = min(steps), max(steps)
    places = {
        save.folder: (_x(save.step, first, last), _y(number))
        for number, session in enumerate(shown)
        for save in session.saves
        if save.step is not None
    }
    lanes = [
        Lane(
            y=_y(number),
            session=session,
            start=_x(min([*_steps(session)], default=first), first, last),
            end=_x(max([*_steps(session)], default=first), first, last),
            ticks=_ticks(session.saves, first, last),
            origin=places.get(session.resumed_from or ""),
        )
        for number, session in enumerate(shown)
    ]
    height = int(_y(len(shown))) + 8
    return Picture(WIDTH, height, lanes, first, last, len(sessions) - len(shown))


def _steps(session: Session) -> Iterator[int]:
    known = (session.from_step, session.to_step, *(save.step for save in session.saves))
    yield from (step for step in known if step is not None)


def _ticks(saves: Sequence[LoggedSave], first: int, last: int) -> list[Tick]:
    """Place saves; of those at one place in one state, which could not be told apart, one."""
    found: dict[tuple[int, str], Tick] = {}
    for save in saves:
        if save.step is None:
            continue
        x = _x(save.step, first, last)
        why = f", {save.reason}" if save.reason else ""
        title = f"step {save.step}{why}: {save.state}"
        found[round(x / 3), save.state] = Tick(x, save.state.replace(" ", "-"), title)
    return [*found.values()]


def _x(step: int, first: int, last: int) -> float:
    share = (step - first) / max(last - first, 1)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def _y(number: int) -> float:
    return number * LANE + 20.0
