"""Events: records of what happens during a run, and the sinks that receive them.

A sink is any callable that takes an Event. A sink that raises is reported once and never stops
a save (invariant 8).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger("holdfast")

Kind = Literal[
    "preflight",
    "claimed",
    "save_started",
    "staged",
    "stalled",
    "committed",
    "save_failed",
    "save_skipped",
    "rejected",
    "passed_over",
    "resumed",
    "started",
    "changed",
    "loaded",
    "retracted",
    "thinned",
    "postponed",
    "interval",
    "uploaded",
    "upload_failed",
    "mended",
    "compression",
    "gc",
    "housekeeping_failed",
    "not_saved",
    "no_position",
    "frozen",
    "warning",
    "closed",
]
"""What happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Record of something that happened in a run. Keys of `fields` have units, as in `took_s`."""

    kind: Kind
    """What happened."""
    message: str
    """The same in words, as it is logged."""
    step: int | None = None
    """Step of the checkpoint that it is about, if it is about one."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further values by name, which depend on the kind."""


Sink = Callable[[Event], None]
"""Receiver of events, called in the thread in which they happen."""

_LEVELS: Mapping[str, int] = {
    "save_failed": logging.ERROR,
    "rejected": logging.ERROR,
    "housekeeping_failed": logging.WARNING,
    "upload_failed": logging.WARNING,
    "mended": logging.WARNING,
    "save_skipped": logging.WARNING,
    "warning": logging.WARNING,
    "no_position": logging.WARNING,
    "committed": logging.INFO,
    "resumed": logging.INFO,
    "started": logging.INFO,
    "loaded": logging.INFO,
    "passed_over": logging.INFO,
    "changed": logging.INFO,
    "retracted": logging.INFO,
    "thinned": logging.INFO,
    "gc": logging.INFO,
    "not_saved": logging.INFO,
    "frozen": logging.INFO,
    "interval": logging.INFO,
}
"""Levels by kind; other kinds are logged at DEBUG."""


def log_event(event: Event) -> None:
    """Default sink: log the event to the standard logger named `holdfast`."""
    is_repeated = event.kind == "committed" and not event.fields.get("is_new", True)
    level = logging.DEBUG if is_repeated else _LEVELS.get(event.kind, logging.DEBUG)
    logger.log(level, "%s", event.message)


def shows_info(sinks: Iterable[Sink]) -> bool:
    """Whether `sinks` log events, and a handler shows those of level INFO."""
    return log_event in tuple(sinks) and logger.isEnabledFor(logging.INFO) and logger.hasHandlers()


class Emitter:
    """Passes events to all sinks; logs the first exception of each sink and drops the others."""

    def __init__(self, sinks: tuple[Sink, ...] = (log_event,)) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()
        self.first_metrics_at: float = -1
        """Step up to which metrics that retention needs may be missing, which then is no warning:
        their first validation comes later, or was at this step."""

    def add_sink(self, sink: Sink) -> None:
        """Pass all later events to one more sink."""
        self._sinks = (*self._sinks, sink)

    def drop_leader_sinks(self) -> None:
        """Drop the sinks with `is_for_leader`, on a rank that is not the leader."""
        self._sinks = tuple(
            sink for sink in self._sinks if not getattr(sink, "is_for_leader", False)
        )

    def __call__(self, kind: Kind, message: str, *, step: int | None = None, **fields: Any) -> None:
        """Make an event and pass it to every sink."""
        event = Event(kind=kind, message=message, step=step, fields=fields)
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                if id(sink) not in self._failed:
                    self._failed.add(id(sink))
                    logger.exception("event sink %r failed; its later failures are not shown", sink)


_USER = re.compile(r"(://)[^/\s?#]*@")
_QUERY = re.compile(r"(://[^\s?#]*)[?#][^\s'\"]*")


def without_secrets(text: str) -> str:
    """Cut user names, passwords, queries and fragments out of the URLs in a text.

    >>> without_secrets("https://me:pass@host/runs/gpt?sig=abc")
    'https://***@host/runs/gpt'
    >>> without_secrets("/data/runs/what?")
    '/data/runs/what?'
    """
    return _USER.sub(r"\1***@", _QUERY.sub(r"\1", text))


def url_without_secrets(url: str) -> str:
    """Cut user, password, query and fragment out of a URL, whatever they contain; keep a path.

    >>> url_without_secrets("https://me:a b'c@host/runs/gpt?sig='a b")
    'https://***@host/runs/gpt'
    >>> url_without_secrets("/data/runs/what?")
    '/data/runs/what?'
    """
    scheme, separator, rest = url.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    _, at, server = host.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{server}{slash}{path}"
