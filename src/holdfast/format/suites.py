"""Cipher suites, and the encrypted form of a file (docs/format.md, section 10).

Only standard constructions of the library `cryptography`; nothing here knows what is encrypted.
Every key used with a nonce comes from `derive` or `fresh_secret` and encrypts only one thing.

The tags of a file's segments follow the ciphertext, so that each byte has the same offset
encrypted as plain: ranges are read by their plain offsets, and aligned blocks stay aligned.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

from holdfast.errors import LimitExceeded, Tampered, UnsupportedVersion, UsageError
from holdfast.store.base import Buffer

SuiteName = Literal["aes-256-gcm", "chacha20-poly1305", "sm4-gcm"]
SECRET_NBYTES = 32
TAG_NBYTES = 16
NONCE_NBYTES = 12
SEGMENT_NBYTES = 1024 * 1024
MAX_SEGMENTS = 2**32
"""Limit of messages under one key; far below what any of the suites allows."""
_ONCE = bytes(NONCE_NBYTES)
"""Fixed nonce, for keys that encrypt only one message."""
_COUNTER = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A cipher suite: a cipher and the hash that derives its keys."""

    name: SuiteName

    @property
    def key_nbytes(self) -> int:
        """Length in bytes of the cipher's keys."""
        return 16 if self.name == "sm4-gcm" else 32

    def derive(self, secret: bytes, purpose: str, *, salt: bytes = b"", nbytes: int = 32) -> bytes:
        """Derive a key from a secret for one purpose, with HKDF (RFC 5869)."""
        info = f"holdfast 1 {purpose} {self.name}".encode()
        return hkdf(secret, salt=salt, info=info, nbytes=nbytes, sm3=self.name == "sm4-gcm")

    def cipher(self, secret: bytes, purpose: str, *, salt: bytes = b"") -> Cipher:
        """Make the cipher with a key that is derived for one purpose."""
        return Cipher(self, self.derive(secret, purpose, salt=salt, nbytes=self.key_nbytes))

    def commitment(self, data_key: bytes) -> bytes:
        """Compute a commitment to a data key, which does not reveal it: 32 bytes."""
        return self.derive(data_key, "commitment")


class Cipher:
    """A cipher with one key. Thread-safe."""

    def __init__(self, suite: Suite, key: bytes) -> None:
        self._aead = _aead(suite.name, key)

    def encrypt(self, data: Buffer, aad: bytes = b"", *, nonce: bytes = _ONCE) -> bytes:
        """Encrypt to ciphertext and tag. Only a key with one message may omit the nonce."""
        sealed = bytearray(memoryview(data).nbytes + TAG_NBYTES)
        self.encrypt_into(data, memoryview(sealed), aad, nonce=nonce)
        return bytes(sealed)

    def encrypt_into(
        self, data: Buffer, out: memoryview, aad: bytes = b"", *, nonce: bytes
    ) -> None:
        """Encrypt into `out`, 16 bytes longer than `data`: the ciphertext, then the tag."""
        self._aead.encrypt_into(nonce, data, aad, out)

    def decrypt(self, data: Buffer, aad: bytes = b"", *, nonce: bytes = _ONCE, what: str) -> bytes:
        """Check the tag at the end of `data`, and return the plaintext."""
        plain = bytearray(max(memoryview(data).nbytes - TAG_NBYTES, 0))
        self.decrypt_into(data, memoryview(plain), aad, nonce=nonce, what=what)
        return bytes(plain)

    def decrypt_into(
        self, data: Buffer, out: memoryview, aad: bytes = b"", *, nonce: bytes, what: str
    ) -> None:
        """Decrypt into `out`, 16 bytes shorter than `data`; it is zeroed after a failure."""
        from cryptography.exceptions import InvalidTag

        try:
            if memoryview(data).nbytes < TAG_NBYTES:
                raise InvalidTag
            self._aead.decrypt_into(nonce, data, aad, out)
        except InvalidTag as error:
            # The library has written unauthenticated bytes into it.
            out[:] = bytes(out.nbytes)
            raise Tampered(f"{what}: these are not the bytes that were encrypted") from error


def suite_named(name: str, *, what: str) -> Suite:
    """Return the cipher suite of this name, read from the document `what`."""
    for known in get_args(SuiteName):
        if name == known:
            return Suite(name=known)
    raise UnsupportedVersion(f"{what}: this version of Holdfast does not support {name[:40]!r}")


def hkdf(secret: bytes, *, salt: bytes, info: bytes, nbytes: int, sm3: bool = False) -> bytes:
    """Compute HKDF (RFC 5869) with SHA-256, or with SM3."""
    kdf = cryptography_part("hazmat.primitives.kdf.hkdf")
    hashes = cryptography_part("hazmat.primitives.hashes")
    algorithm = hashes.SM3() if sm3 else hashes.SHA256()
    derived: bytes = kdf.HKDF(algorithm=algorithm, length=nbytes, salt=salt, info=info).derive(
        secret
    )
    return derived


def fresh_secret(nbytes: int = SECRET_NBYTES) -> bytes:
    """Make a new secret from the operating system's randomness.

    Clock, process and a counter are mixed in. They add no entropy; they keep secrets distinct
    where the randomness repeats, as in two copies of a virtual machine.
    """
    moment = (time.time_ns(), time.monotonic_ns(), os.getpid(), next(_COUNTER))
    info = b"holdfast 1 fresh" + b"".join(part.to_bytes(16, "little") for part in moment)
    return hkdf(os.urandom(SECRET_NBYTES), salt=b"", info=info, nbytes=nbytes)


def cryptography_part(name: str) -> ModuleType:
    """Import a module of the library `cryptography`, which only encryption needs."""
    from importlib import import_module

    try:
        return import_module(f"cryptography.{name}")
    except ImportError as error:
        raise UsageError(
            "encrypted checkpoints need the package cryptography: "
            "pip install 'holdfast-torch[encrypt]'"
        ) from error


def _aead(name: SuiteName, key: bytes) -> Any:
    aead = cryptography_part("hazmat.primitives.ciphers.aead")
    if name == "aes-256-gcm":
        return aead.AESGCM(key)
    if name == "chacha20-poly1305":
        return aead.ChaCha20Poly1305(key)
    return _Sm4Gcm(key)


class _Sm4Gcm:
    """SM4-GCM (RFC 8998) with the interface of the library's one-shot ciphers."""

    def __init__(self, key: bytes) -> None:
        self._ciphers = cryptography_part("hazmat.primitives.ciphers")
        self._algorithm = self._ciphers.algorithms.SM4(key)
        self._modes = self._ciphers.modes
        try:
            self._context(self._modes.GCM(_ONCE)).encryptor()
        except cryptography_part("exceptions").UnsupportedAlgorithm as error:
            raise UsageError(
                "suite='sm4-gcm': the installed cryptography has no SM4 in GCM; use aes-256-gcm "
                "or chacha20-poly1305, or a build of it with SM4"
            ) from error

    def encrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, out: memoryview) -> None:
        context = self._context(self._modes.GCM(nonce)).encryptor()
        context.authenticate_additional_data(aad)
        done = context.update_into(data, out)
        context.finalize()
        out[done : done + TAG_NBYTES] = context.tag

    def decrypt_into(self, nonce: bytes, data: Buffer, aad: bytes, out: memoryview) -> None:
        sealed = memoryview(data).cast("B")
        tag = bytes(sealed[-TAG_NBYTES:])
        context = self._context(self._modes.GCM(nonce, tag)).decryptor()
        context.authenticate_additional_data(aad)
        context.update_into(sealed[:-TAG_NBYTES], out)
        context.finalize()

    def _context(self, mode: Any) -> Any:
        return self._ciphers.Cipher(self._algorithm, mode)


def num_segments(nbytes: int) -> int:
    """Compute the number of segments of a file of `nbytes`; 0 if it is empty."""
    return -(-nbytes // SEGMENT_NBYTES)


def tags_nbytes(nbytes: int) -> int:
    """Compute the length of all tags of a file: one for each segment, and the closing one."""
    if num_segments(nbytes) >= MAX_SEGMENTS:
        raise LimitExceeded(f"a file of {nbytes:,} bytes cannot be encrypted under one key")
    return TAG_NBYTES * (num_segments(nbytes) + 1)


def stored_nbytes(nbytes: int) -> int:
    """Compute the length of the encrypted form of a file; raises as `tags_nbytes` does."""
    return nbytes + tags_nbytes(nbytes)


class FileCipher:
    """Encrypts and decrypts segments of one file. Thread-safe; encrypts no segment twice."""

    def __init__(self, suite: Suite, secret: bytes) -> None:
        self._cipher = suite.cipher(secret, "file")
        self._tags: dict[int, bytes] = {}

    def seal(self, start: int, plain: Buffer, out: memoryview) -> None:
        """Encrypt whole segments into `out`, whose last 16 bytes are undefined; keep their tags."""
        data = memoryview(plain).cast("B")
        for low in range(0, data.nbytes, SEGMENT_NBYTES):
            number, rest = divmod(start + low, SEGMENT_NBYTES)
            if rest or number in self._tags or number >= MAX_SEGMENTS - 1:
                raise UsageError(f"segment {number} is sealed once, as a whole and in its place")
            high = min(low + SEGMENT_NBYTES, data.nbytes)
            piece = out[low : high + TAG_NBYTES]
            self._cipher.encrypt_into(data[low:high], piece, nonce=_nonce(number))
            self._tags[number] = bytes(piece[-TAG_NBYTES:])

    def collect_tags(self, nbytes: int) -> bytes:
        """Return the tags of all segments and the closing one, once all `nbytes` are encrypted."""
        number = num_segments(nbytes)
        nonce = _nonce(number, closes=True)
        closing = self._cipher.encrypt(b"", _encode_length(nbytes), nonce=nonce)
        return b"".join(self._tags[n] for n in range(number)) + closing

    def check_closed(self, nbytes: int, tags: bytes, *, what: str) -> None:
        """Raise `Tampered` unless the closing tag in `tags` is that of a file of `nbytes`."""
        nonce = _nonce(num_segments(nbytes), closes=True)
        self._cipher.decrypt(tags[-TAG_NBYTES:], _encode_length(nbytes), nonce=nonce, what=what)

    def decrypt_segment(self, number: int, sealed: Buffer, out: memoryview, *, what: str) -> None:
        """Decrypt a segment, ciphertext and tag, into `out`, or raise `Tampered`."""
        what = f"{what}, segment {number} (from byte {number * SEGMENT_NBYTES:,})"
        self._cipher.decrypt_into(sealed, out, nonce=_nonce(number), what=what)


def seal_whole(suite: Suite, secret: bytes, plain: Buffer) -> bytes:
    """Encrypt a whole file in memory: return its stored form."""
    data = memoryview(plain).cast("B")
    cipher = FileCipher(suite, secret)
    sealed = bytearray(data.nbytes + TAG_NBYTES)
    cipher.seal(0, data, memoryview(sealed))
    del sealed[data.nbytes :]
    return bytes(sealed) + cipher.collect_tags(data.nbytes)


def _nonce(number: int, *, closes: bool = False) -> bytes:
    """Make a nonce: the segment's number, 11 bytes big-endian, and 1 for the closing tag."""
    return number.to_bytes(NONCE_NBYTES - 1, "big") + bytes([closes])


def _encode_length(nbytes: int) -> bytes:
    return nbytes.to_bytes(8, "little")
