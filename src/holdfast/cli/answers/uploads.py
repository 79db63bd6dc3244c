"""Answer of `uploads`."""

from __future__ import annotations

from holdfast.cli.answers.base import Document


class LastUpload(Document, frozen=True):
    """Upload that ended last."""

    folder: str
    """Folder of the checkpoint."""
    nbytes: int | None
    """Bytes that were sent."""
    upload_s: float | None
    """Seconds that it took."""
    requests: int | None
    """Requests that it took."""


class Uploaded(Document, frozen=True):
    """Checkpoint of `uploads`. What its note does not say is null."""

    folder: str
    """Its folder."""
    step: int | None
    """Its step; null where it is encrypted."""
    nbytes: int
    """Bytes of its files."""
    state: str
    """`uploaded`, `waiting`, `sending`, `failed`, `refused`, `deleted` (there), `unwanted` or
    `unknown`."""
    sent_nbytes: int | None
    """Bytes that are there already."""
    tries: int | None
    """Tries so far."""
    error: str | None
    """Error of the last try."""
    changed: str | None
    """UTC time of the note."""


class UploadsAnswer(Document, frozen=True):
    """Answer of `uploads`."""

    root: str
    """Path of the local root."""
    remote: str
    """URL of the remote root."""
    unreachable: str | None
    """Why the remote root was not looked at."""
    error: str | None
    """Last error of the uploads."""
    changed: str | None
    """UTC time of the record."""
    last: LastUpload | None
    """Upload that ended last."""
    checkpoints: list[Uploaded]
    """Checkpoints, newest first."""
    waiting: int
    """How many are not uploaded yet."""
    waiting_nbytes: int
    """Their bytes."""
