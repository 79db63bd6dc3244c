"""Authenticated encryption and key derivation, by suite (docs/format.md, section 10).

Only standard constructions of the library `cryptography`; nothing here knows what is encrypted.
Every key used with a nonce comes from `derive` or `fresh_secret` and encrypts only one thing.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

from holdfast.errors import Tampered, UnsupportedVersion, UsageError
from holdfast.store.base import Buffer

SuiteName = Literal["aes-256-gcm", "chacha20-poly1305", "sm4-gcm"]
SECRET_NBYTES = 32
TAG_NBYTES = 16
NONCE_NBYTES = 12
_ONCE = bytes(NONCE_NBYTES)
"""Fixed nonce, for keys that encrypt only one message."""
_COUNTER = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A cipher suite: a cipher and the hash that derives its keys."""

    name: SuiteName

    @property
    def key_nbytes(self) -> int:
        """Bytes of a key of the cipher."""
        return 16 if self.name == "sm4-gcm" else 32

    def derive(self, secret: bytes, purpose: str, *, salt: bytes = b"", nbytes: int = 32) -> bytes:
        """Derive a key from a secret for one purpose, with HKDF (RFC 5869)."""
        info = f"holdfast 1 {purpose} {self.name}".encode()
        return hkdf(secret, salt=salt, info=info, nbytes=nbytes, sm3=self.name == "sm4-gcm")

    def cipher(self, secret: bytes, purpose: str, *, salt: bytes = b"") -> Cipher:
        """Make the cipher with a key that is derived for one purpose.

        Raises:
            UsageError: the library does not offer this cipher.
        """
        return Cipher(self, self.derive(secret, purpose, salt=salt, nbytes=self.key_nbytes))

    def commitment(self, data_key: bytes) -> bytes:
        """Compute a commitment to a data key, which does not reveal it: 32 bytes."""
        return self.derive(data_key, "commitment")


class Cipher:
    """A cipher with one key. Thread-safe."""

    def __init__(self, suite: Suite, key: bytes) -> None:
        self._aead = _aead(suite.name, key)

    def encrypt(self, data: Buffer, aad: bytes = b"", *, nonce: bytes = _ONCE) -> bytes:
        """Return ciphertext and tag; a key for one message needs no nonce."""
        sealed = bytearray(memoryview(data).nbytes + TAG_NBYTES)
        self.encrypt_into(data, memoryview(sealed), aad, nonce=nonce)
        return bytes(sealed)

    def encrypt_into(
        self, data: Buffer, out: memoryview, aad: bytes = b"", *, nonce: bytes
    ) -> None:
        """Fill `out`, which is 16 bytes longer than `data`, with ciphertext and tag."""
        self._aead.encrypt_into(nonce, data, aad, out)

    def decrypt(self, data: Buffer, aad: bytes = b"", *, nonce: bytes = _ONCE, what: str) -> bytes:
        """Return the plaintext.

        Raises:
            Tampered: the bytes were not encrypted with this key, nonce and `aad`.
        """
        plain = bytearray(max(memoryview(data).nbytes - TAG_NBYTES, 0))
        self.decrypt_into(data, memoryview(plain), aad, nonce=nonce, what=what)
        return bytes(plain)

    def decrypt_into(
        self, data: Buffer, out: memoryview, aad: bytes = b"", *, nonce: bytes, what: str
    ) -> None:
        """Decrypt into `out`, 16 bytes shorter than `data`; it is zeroed after a failure.

        Raises:
            Tampered: the bytes were not encrypted with this key, nonce and `aad`.
        """
        from cryptography.exceptions import InvalidTag

        try:
            if memoryview(data).nbytes < TAG_NBYTES:
                raise InvalidTag
            self._aead.decrypt_into(nonce, data, aad, out)
        except InvalidTag as error:
            # The library has written unauthenticated bytes into it.
            out[:] = bytes(out.nbytes)
            raise Tampered(f"{what}: these are not the bytes that were sealed") from error


def suite_named(name: str, *, what: str) -> Suite:
    """Return the suite that a document names.

    Raises:
        UnsupportedVersion: the suite is unknown.
    """
    for known in get_args(SuiteName):
        if name == known:
            return Suite(name=known)
    raise UnsupportedVersion(f"{what}: sealed with {name[:40]!r}, which this Holdfast lacks")


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
    """Import a module of the library `cryptography`, which only encryption needs.

    Raises:
        UsageError: the library is not installed.
    """
    from importlib import import_module

    try:
        return import_module(f"cryptography.{name}")
    except ImportError as error:
        raise UsageError(
            "sealed checkpoints need the library cryptography: pip install 'holdfast[encrypt]'"
        ) from error


def _aead(name: SuiteName, key: bytes) -> Any:
    aead = cryptography_part("hazmat.primitives.ciphers.aead")
    if name == "aes-256-gcm":
        return aead.AESGCM(key)
    if name == "chacha20-poly1305":
        return aead.ChaCha20Poly1305(key)
    return _Sm4Gcm(key)


class _Sm4Gcm:
    """SM4-GCM (RFC 8998) with the calls of the library's one-shot ciphers."""

    def __init__(self, key: bytes) -> None:
        self._ciphers = cryptography_part("hazmat.primitives.ciphers")
        self._algorithm = self._ciphers.algorithms.SM4(key)
        self._modes = self._ciphers.modes
        try:
            self._context(self._modes.GCM(_ONCE)).encryptor()
        except cryptography_part("exceptions").UnsupportedAlgorithm as error:
            raise UsageError(
                "suite='sm4-gcm': the installed cryptography has no SM4 in GCM; "
                "take aes-256-gcm or chacha20-poly1305, or a build of it with SM4"
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
