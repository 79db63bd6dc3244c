"""Progress bars of loads and saves, for as long as a block of the caller's code lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

Show: TypeAlias = Callable[[str, str, int, int], None]
"""Called with a name, a text, and how many parts are done of how many; of 0 where that is not
known."""
_SHOW: ContextVar[Show | None] = ContextVar("show", default=None)
_LOOK_S = 0.2
"""Seconds between two looks at a save that is waited for."""


@contextmanager
def progress() -> Iterator[None]:
    """Show a progress bar for each load, and for saves that are waited for, inside the block.

    On standard error, and only on a terminal or in a notebook; elsewhere nothing is shown. Loads
    and waits in the thread of the block are shown: `resume`, `load`, `load_weights`, `wait`.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(file=sys.stderr)
    if not (console.is_terminal or console.is_jupyter):
        yield
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, text: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(text, total=total or None)
            bars.update(tasks[name], description=text, completed=done, total=total or None)

        with shown_by(show):
            yield


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Call `show` for loads and saves in this thread, while the block lasts."""
    token = _SHOW.set(show)
    try:
        yield
    finally:
        _SHOW.reset(token)


def watch_all(futures: Sequence[Future[Any]], *, timeout_s: float, what: str) -> None:
    """Show, in `progress`, how many of these are done, until all are or the time is over."""
    show = _SHOW.get()
    if show is None:
        return
    end_s = time.monotonic() + timeout_s
    show(what, what, 0, len(futures))
    for number, future in enumerate(futures, start=1):
        _, running = wait([future], timeout=max(end_s - time.monotonic(), 0.0))
        if running or future.cancelled() or future.exception() is not None:
            return
        show(what, what, number, len(futures))


def watch_one(
    future: Future[Any], *, timeout_s: float, what: str, doing: Callable[[], str]
) -> None:
    """Show what is being done until a future is done, or the time is over; as `watch_all`."""
    show = _SHOW.get()
    if show is None:
        return
    end_s = time.monotonic() + timeout_s
    while not future.done() and time.monotonic() < end_s:
        show(what, f"{what}: {doing()}", 0, 0)
        wait([future], timeout=min(_LOOK_S, max(end_s - time.monotonic(), 0.0)))
    if future.done():
        show(what, f"{what}: done", 1, 1)
