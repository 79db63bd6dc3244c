"""What a caller remembers of a root outside it, to notice that something was taken away."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.engine.roots.catalog import Entry
from holdfast.errors import RolledBack, UsageError

_TEXT = re.compile(r"([0-9]{4,10})-([0-9]{6,12})-([0-9a-f]{32})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A commit that was seen: its order and its save id."""

    order: tuple[int, int]
    save_id: str

    def expect(self, latest: Entry | None, *, where: str) -> None:
        """Raise `RolledBack` unless `latest` is this commit or a later one."""
        wanted = f"{self.order[0]:04d}-{self.order[1]:06d}"
        if latest is None:
            raise RolledBack(f"{where}: nothing is there, and commit {wanted} was seen before")
        if latest.order < self.order:
            raise RolledBack(
                f"{where}: commit {wanted} was seen before, and the newest that can be gone on "
                f"from is {latest.folder}. Something was taken away, put back or damaged; to go "
                "on all the same, name a checkpoint, or leave `seen` out"
            )
        if latest.order == self.order and latest.manifest.save_id != self.save_id:
            raise RolledBack(f"{where}/{latest.folder}: another save was seen under this number")


def seen_text(order: tuple[int, int], save_id: str) -> str:
    """What is to be remembered of a commit."""
    return f"{order[0]:04d}-{order[1]:06d}-{save_id}"


def parse_seen(text: str | None) -> Seen | None:
    """What `seen_text` gave; None for None.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(f"seen={text!r}: must be the `seen` of a Checkpoint")
    return Seen(order=(int(match[1]), int(match[2])), save_id=match[3])
