"""Base of the answers, and the parts that several of them share.

`make_answer` makes an answer from the members that a command gathered. One too many or of another
type raises, so that the JSON Schema matches the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

Ending = Literal["closed", "failed", "running", "continued", "unknown"]
DocumentType = TypeVar("DocumentType", bound="Document")


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the answers and of their parts."""


def make_answer(kind: type[DocumentType], members: Mapping[str, Any]) -> DocumentType:
    """Make an answer from its members; sequences of any kind become lists."""
    return msgspec.convert(members, kind)


class Owner(Document, frozen=True):
    """Newest claim of a run."""

    epoch: int
    """Number of the claim."""
    host: str
    """Host of its process."""
    pid: int
    """Number of its process on that host."""
    since: str
    """UTC time of the claim, ISO 8601."""
    state: Literal["alive", "dead", "closed", "unknown"]
    """Whether the process lives, as far as this host can tell; `closed`: it ended its claim."""


class LeaseHolder(Document, frozen=True):
    """Process that keeps a checkpoint from deletion. What its lease does not say is null."""

    folder: str
    """Checkpoint that is read."""
    host: str | None
    """Host of the process."""
    pid: int | None
    """Number of the process on that host."""
    since: str | None
    """UTC time of the lease, ISO 8601."""
    state: str
    """`alive` or `unknown`."""


class UnreadableCheckpoint(Document, frozen=True):
    """Checkpoint whose manifest is damaged or lost."""

    folder: str
    """Its folder."""
    reason: str
    """What is wrong, as text."""


class Unopened(Document, frozen=True):
    """Checkpoint that is encrypted for other keys, or not encrypted where that is refused."""

    folder: str
    """Its folder."""
    kind: str
    """Class of the error in `holdfast.errors`."""
    reason: str
    """The error, as text."""


class Why(Document, frozen=True):
    """Folder and a reason."""

    folder: str
    """Folder of a checkpoint or an attempt."""
    why: str
    """The reason."""
