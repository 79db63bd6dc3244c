"""Verdicts on a run for a first look: what its answers mark as wrong, in one line each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from holdfast.cli.ls import Listed, Ls
from holdfast.cli.watch import WatchedOwner, WatchedRun

_MOST = 3
"""Findings of one kind that are shown."""
Level = Literal["bad", "warn", "good", "plain"]


class HealthLine(NamedTuple):
    """Line of the verdict on a run: good, bad or worth a look."""

    level: Level
    text: str


_OWNER: dict[str, tuple[Level, str]] = {
    "alive": ("good", "training now: process {pid} on {host}"),
    "closed": ("plain", "not running; the last process ended cleanly"),
    "dead": ("warn", "not running; process {pid} on {host} is gone without closing the run"),
    "silent": ("warn", "no sign of life from process {pid} on {host} for 30 s"),
    "unknown": ("plain", "cannot tell from here whether process {pid} on {host} lives"),
}


def findings(listed: Ls | None, watched: WatchedRun | None) -> list[HealthLine]:
    """Judge a run by the answers of `ls` and `watch`; the worst first."""
    order = ("bad", "warn", "good", "plain")
    found = [*_of_watch(watched), *_of_list(listed)]
    return sorted(found, key=lambda finding: order.index(finding.level))


def is_wrong(found: list[HealthLine]) -> bool:
    """Whether something needs a person."""
    return any(finding.level in ("bad", "warn") for finding in found)


def _of_watch(watched: WatchedRun | None) -> Iterator[HealthLine]:
    if watched is None:
        return
    if watched.owner is not None:
        yield _of_owner(watched.owner)
    stuck = [one for one in watched.uploads if one.state in ("failed", "refused")]
    if stuck:
        yield HealthLine("warn", f"{_format_count(len(stuck), 'upload')} failed: {stuck[0].folder}")


def _of_owner(owner: WatchedOwner) -> HealthLine:
    level, text = _OWNER.get(owner.state, _OWNER["unknown"])
    return HealthLine(level, text.format(pid=owner.pid, host=owner.host))


def _of_list(listed: Ls | None) -> Iterator[HealthLine]:
    if listed is None:
        return
    if listed.head is None:
        yield HealthLine("bad", "nothing to resume from")
    yield from _first(f"{one.folder} is damaged: {one.reason}" for one in listed.damaged)
    yield from _first(
        f"{one.folder}: {_format_count(len(one.missing), 'file')} missing or cut"
        for one in listed.checkpoints
        if one.missing
    )
    if listed.unopened:
        yield HealthLine(
            "warn",
            f"{_format_count(len(listed.unopened), 'checkpoint')} not opened by the given keys",
        )
    yield from _of_newest(listed.checkpoints)


def _first(texts: Iterable[str]) -> Iterator[HealthLine]:
    """Yield the first findings of a kind, and how many more there are."""
    found = [*texts]
    yield from (HealthLine("bad", text) for text in found[:_MOST])
    if len(found) > _MOST:
        yield HealthLine("bad", f"and {len(found) - _MOST} more like this")


def _of_newest(checkpoints: Sequence[Listed]) -> Iterator[HealthLine]:
    rejected = [one for one in checkpoints if one.rejected]
    if rejected:
        yield HealthLine("warn", f"a resume could not use {rejected[0].folder}")
    if checkpoints and checkpoints[0].unhealthy:
        yield HealthLine("warn", f"the newest state is unhealthy: {checkpoints[0].unhealthy[0]}")


def _format_count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
