"""Coordinator whose messages are encrypted, as they have names of tensors and secrets of files.

The leader makes their key and announces it in a box, which every rank opens with its own keys
(decision 0037). Who cannot open it says so in clear, in place of its first message.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from threading import Lock
from typing import Literal

import msgspec
from typing_extensions import override

from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    RanksError,
    RanksFailed,
    RanksSilent,
    SealError,
    Tampered,
    UsageError,
    time_limit,
)
from holdfast.format.envelope import decode_box, encode_box
from holdfast.format.suites import SECRET_NBYTES, Cipher, Suite, fresh_secret
from holdfast.keys import Encryption, unwrapped, wrapped
from holdfast.ranks.coordinator import (
    LEADER,
    Collected,
    Coordinator,
    Exchange,
    RankFailure,
    Watch,
    decode_message,
)

_OPENING = "opening the key of the ranks' messages"
_ENCRYPTED = "an encrypted message, which a rank without `encrypt` cannot read"
_NOT_ENCRYPTED = "its message is not encrypted with the leader's key: give `encrypt` on all ranks"

_Way = Literal["post", "announcement"]


def encrypted(ranks: Coordinator, encryption: Encryption | None) -> Coordinator:
    """Return a coordinator that encrypts messages of ranks, if asked for, on all at one point."""
    if ranks.world_size == 1:
        return ranks
    number = ranks.number()  # also without encryption, so that all ranks count alike
    return ranks if encryption is None else EncryptedRanks(ranks, encryption, number)


class _KeyNote(msgspec.Struct, frozen=True):
    """Announcement of the key of the messages, wrapped."""

    suite: str
    box: bytes


class EncryptedRanks(Coordinator):
    """Encrypts messages and hands them to the coordinator `inner`."""

    def __init__(self, inner: Coordinator, encryption: Encryption, number: int) -> None:
        super().__init__(inner.rank, inner.world_size)
        self._inner = inner
        self._encryption = encryption
        self._suite = Suite(name=encryption.suite)
        self._tag = f"key {number} of messages, shared by ranks with `encrypt`"
        self._key: bytes | None = None
        self._lock = Lock()

    @override
    def number(self) -> int:
        return self._inner.number()

    @override
    def exchange(self, *, timeout_s: float) -> Exchange:
        """Make that of the coordinator inside: tensors go as in the collectives of the training."""
        return self._inner.exchange(timeout_s=timeout_s)

    @override
    def close(self) -> None:
        self._inner.close()

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        left_s = self._share_key(timeout_s)
        self._inner.post(tag, self._sealed("post", self.rank, tag, data), timeout_s=left_s)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        """Report that this rank failed; without a key, only why it has none."""
        try:
            left_s = self._share_key(timeout_s)
        except HoldfastError as error:
            without = self._in_clear(error)
            # The followers of a leader that can make no key wait for that.
            for said_as in (self._tag, tag) if self.is_leader else (tag,):
                self._inner.fail(said_as, without, timeout_s=timeout_s)
            return
        data = self._sealed(self._way, self.rank, tag, msgspec.msgpack.encode(failure))
        said = RankFailure(_ENCRYPTED, base64.b64encode(data).decode())
        self._inner.fail(tag, said, timeout_s=left_s)

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        found = self._inner.collect(tag, timeout_s=self._share_key(timeout_s), watch=watch)
        came: dict[int, bytes] = {}
        failed = {r: self._failure("post", r, tag, said) for r, said in found.failed.items()}
        for rank, data in found.came.items():
            try:
                came[rank] = self._decrypt_message("post", rank, tag, data)
            except Tampered:
                failed[rank] = RankFailure("talking to the leader", _NOT_ENCRYPTED)
        return Collected(came=came, failed=failed, silent=found.silent)

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        left_s = self._share_key(timeout_s)
        self._inner.announce(tag, self._sealed(self._way, self.rank, tag, data), timeout_s=left_s)

    @override
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        left_s = self._share_key(timeout_s)
        encrypted_messages = [
            self._sealed(self._way, self.rank, _tag_to_rank(tag, rank), data)
            for rank, data in enumerate(messages)
        ]
        self._inner.announce_each(tag, encrypted_messages, timeout_s=left_s)

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        try:
            left_s = self._share_key(timeout_s, watch)
        except RanksSilent:
            raise
        except DeadlineExceeded as error:
            raise RanksSilent(tag, [LEADER]) from error
        try:
            data = self._inner.hear(tag, timeout_s=left_s, watch=watch)
        except RanksFailed as error:
            said = RankFailure(*error.failed[LEADER])
            failure = self._failure("announcement", LEADER, tag, said)
            raise RanksFailed(tag, {LEADER: failure}) from None
        try:
            return self._decrypt_announcement(tag, data)
        except Tampered as error:
            raise RanksError(f"{tag}: the leader has not encrypted this message") from error

    # The key

    def _share_key(self, timeout_s: float, watch: Watch | None = None) -> float:
        """Make or open the key of the messages; return the seconds left of `timeout_s`."""
        end = time.monotonic() + timeout_s
        note = None
        if self._key is None and not self.is_leader:
            # Not under the lock: threads with a shorter limit would wait as long as this one.
            note = self._inner.hear(self._tag, timeout_s=timeout_s, watch=watch)
        if not self._lock.acquire(timeout=max(end - time.monotonic(), 0)):
            raise DeadlineExceeded(f"{self._tag}: no key after {time_limit(timeout_s)}")
        try:
            if self._key is None:
                left_s = max(end - time.monotonic(), 0)
                self._key = (
                    self._announce_key(left_s) if note is None else self._unwrap_key_note(note)
                )
        finally:
            self._lock.release()
        return max(end - time.monotonic(), 0)

    def _announce_key(self, timeout_s: float) -> bytes:
        key = fresh_secret()
        box = encode_box(wrapped(self._encryption.sealing, key, self._suite))
        note = msgspec.msgpack.encode(_KeyNote(self._suite.name, box))
        self._inner.announce(self._tag, note, timeout_s=timeout_s)
        return key

    def _unwrap_key_note(self, heard: bytes) -> bytes:
        note = decode_message(heard, _KeyNote, self._tag)
        what = f"rank {self.rank}: key of the ranks' messages"
        if note.suite != self._suite.name:
            raise UsageError(
                f"{what}: suite={self._suite.name!r}, and the leader has {note.suite!r}. Give all "
                "ranks the same"
            )
        box = decode_box(note.box, what=what)
        try:
            return unwrapped(self._encryption.opening, [box], self._suite, what=what)
        except SealError as error:
            raise type(error)(
                f"{error}. With several ranks each of them needs a key that decrypts for the "
                "leader's keys"
            ) from error

    def _in_clear(self, error: HoldfastError) -> RankFailure:
        """Describe why this rank has no key, without what a service has said: it may be secret."""
        if not isinstance(error, SealError):
            return RankFailure.from_error(error, phase=_OPENING)
        names = ", ".join(dict.fromkeys(key.name for key in self._encryption.opening))
        return RankFailure(
            _OPENING, f"{type(error).__name__}: its keys are {names}; its own error says why"
        )

    # Messages

    @property
    def _way(self) -> _Way:
        return "announcement" if self.is_leader else "post"

    def _cipher(self, salt: bytes) -> Cipher:
        assert self._key is not None, "every verb begins with it"
        return self._suite.cipher(self._key, "ranks", salt=salt)

    def _sealed(self, way: _Way, rank: int, tag: str, data: bytes) -> bytes:
        salt = fresh_secret()  # so that the derived key encrypts this message only
        return salt + self._cipher(salt).encrypt(data, _make_context(way, rank, tag))

    def _decrypt_message(self, way: _Way, rank: int, tag: str, message: bytes) -> bytes:
        """Decrypt a message; raises `Tampered` if `rank` has not sent it in this round."""
        salt, sealed = message[:SECRET_NBYTES], message[SECRET_NBYTES:]
        return self._cipher(salt).decrypt(sealed, _make_context(way, rank, tag), what=tag)

    def _decrypt_announcement(self, tag: str, message: bytes) -> bytes:
        """Decrypt an announcement for all followers, or for this one."""
        try:
            return self._decrypt_message("announcement", LEADER, tag, message)
        except Tampered:
            own = _tag_to_rank(tag, self.rank)
            return self._decrypt_message("announcement", LEADER, own, message)

    def _failure(self, way: _Way, rank: int, tag: str, said: RankFailure) -> RankFailure:
        """Decrypt why a rank failed; a rank without the key has sent the reason in clear."""
        if said.phase == _OPENING:
            return said
        if said.phase != _ENCRYPTED:
            return RankFailure(said.phase, f"{said.reason} ({_NOT_ENCRYPTED})")
        try:
            data = self._decrypt_message(
                way, rank, tag, base64.b64decode(said.reason, validate=True)
            )
        except (Tampered, ValueError):
            return RankFailure("telling why it failed", _NOT_ENCRYPTED)
        return decode_message(data, RankFailure, tag)


def _tag_to_rank(tag: str, rank: int) -> str:
    """Return the tag that is authenticated with a message for one rank: no other takes it."""
    return f"{tag}, to rank {rank}"


def _make_context(way: _Way, rank: int, tag: str) -> bytes:
    return f"{way} of rank {rank}: {tag}".encode()
