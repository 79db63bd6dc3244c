"""Answers of `keys generate`, `keys list` and `keys rotate`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from holdfast.cli.answers.base import Document


class KeysGenerate(Document, frozen=True):
    """Answer of `keys generate`."""

    path: str
    """File of the key."""
    key: str
    """What it is, and its id."""
    public_path: str | UnsetType = UNSET
    """File of the public key, with `--pair`."""


class Encrypted(Document, frozen=True):
    """Encrypted checkpoint."""

    folder: str
    """Its folder."""
    suite: str
    """Name of the cipher suite."""
    recipients: list[str]
    """Keys that open it."""
    boxes: list[int]
    """Numbers of its boxes of keys."""


class Rotated(Document, frozen=True):
    """Checkpoint of `keys rotate`."""

    folder: str
    """Its folder."""
    outcome: Literal["done", "was so", "failed"]
    """What became of it."""
    reason: str
    """Why it failed; else empty."""


class KeysList(Document, frozen=True):
    """Answer of `keys list`."""

    root: str
    """Path or URL of the root."""
    checkpoints: list[Encrypted]
    """Encrypted checkpoints, newest first."""
    failed: list[Rotated]
    """Those that cannot be read."""


class KeysRotate(Document, frozen=True):
    """Answer of `keys rotate`."""

    root: str
    """Path or URL of the root."""
    checkpoints: list[Rotated]
    """Encrypted checkpoints, newest first."""
