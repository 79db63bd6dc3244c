"""Messages between ranks in a key-value store such as torch's: written in pieces, read, deleted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from holdfast.errors import FormatError, UsageError
from holdfast.ranks.coordinator import RankFailure

PIECE_NBYTES = 256 * 1024
"""Longest value: torch's server is slow with long ones, and cuts the connection above 8 MiB."""
MAX_NUM_PIECES = 4096
"""Most pieces of a message, which has at most 1 GiB."""
MAX_NUM_KEYS = 256
"""Most keys in one call: calls with thousands take seconds."""


class GroupStore(Protocol):
    """Methods of torch's stores that are used here, some of which torch's own types lack."""

    def clone(self) -> GroupStore:
        """Make a client with a connection of its own."""

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set how long `get` waits."""

    def set(self, key: str, value: bytes, /) -> None:
        """Send a value; returns before it has arrived."""

    def get(self, key: str, /) -> bytes:
        """Wait for a key, and return its value."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Wait for keys, and return their values."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""

    def add(self, key: str, number: int, /) -> int:
        """Add to a counter, and return it."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return whether it existed."""


def write_message(store: GroupStore, name: str, said: bytes | RankFailure) -> None:
    """Write a message; returns when the store has it."""
    data, failure = (b"", said) if isinstance(said, RankFailure) else (said, None)
    pieces = [data[at : at + PIECE_NBYTES] for at in range(0, len(data), PIECE_NBYTES)] or [b""]
    if len(pieces) > MAX_NUM_PIECES:
        raise UsageError(f"{name}: {len(data)} bytes are too long for a message between ranks")
    for number, piece in enumerate(pieces[1:], 1):
        store.set(_make_key(name, number), piece)
    # The first piece comes last: whoever sees it finds the others.
    head = _Head(num_more=len(pieces) - 1, failure=failure, data=pieces[0])
    store.set(_make_key(name), msgspec.msgpack.encode(head))
    # A `set` is not acknowledged: it succeeds when the server is dead. The reply of a `check` is.
    store.check([_make_key(name)])


def has(store: GroupStore, name: str) -> bool:
    """Whether a message has come."""
    return store.check([_make_key(name)])


def get(store: GroupStore, name: str) -> bytes | RankFailure:
    """Read a message that has come.

    Raises:
        FormatError: the value is not a message.
    """
    return _assemble_message(store, name, store.get(_make_key(name)))


def take_present(store: GroupStore, names: Sequence[str]) -> dict[str, bytes | RankFailure]:
    """Read and delete those of the named messages that have come, without waiting for others."""
    found: dict[str, bytes | RankFailure] = {}
    for start in range(0, len(names), MAX_NUM_KEYS):
        present = _present(store, names[start : start + MAX_NUM_KEYS])
        heads = store.multi_get([_make_key(name) for name in present]) if present else []
        for name, head in zip(present, heads, strict=True):
            found[name] = _assemble_message(store, name, head)
            _delete_pieces(store, name, head)
    return found


def delete_message(store: GroupStore, name: str) -> None:
    """Delete a message, if it has come."""
    if has(store, name):
        _delete_pieces(store, name, store.get(_make_key(name)))


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """First piece of a message."""

    num_more: Annotated[int, Meta(ge=0, lt=MAX_NUM_PIECES)]
    failure: RankFailure | None
    data: bytes


def _present(store: GroupStore, names: Sequence[str]) -> Sequence[str]:
    if store.check([_make_key(name) for name in names]):
        return names
    return [name for name in names if has(store, name)]


def _assemble_message(store: GroupStore, name: str, head: bytes) -> bytes | RankFailure:
    first = _decode(name, head)
    more = [store.get(_make_key(name, number + 1)) for number in range(first.num_more)]
    return first.failure or b"".join([first.data, *more])


def _delete_pieces(store: GroupStore, name: str, head: bytes) -> None:
    for number in range(_decode(name, head).num_more + 1):
        store.delete_key(_make_key(name, number))


def _decode(name: str, head: bytes) -> _Head:
    try:
        return msgspec.msgpack.decode(head, type=_Head)
    except msgspec.DecodeError as error:
        raise FormatError(f"{name}: not a message of a rank: {error}") from error


def _make_key(name: str, number: int = 0) -> str:
    return f"{number}/{name}"
