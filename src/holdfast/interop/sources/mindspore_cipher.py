"""Decrypts a file that MindSpore encrypted, a block at a time.

Each block has a magic number, the tag of GCM, its length, a nonce, and the length of what follows.
MindSpore uses the first 12 of 16 bytes of the nonce for GCM.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from importlib import import_module
from typing import Any

from typing_extensions import override

from holdfast.errors import CorruptData, UsageError, WrongKey
from holdfast.interop.files import LocalFile, ReadableFile

CIPHERS = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
"""Cipher by the first four bytes of a block, little-endian."""

MAX_BLOCK_NBYTES = (64 << 20) + 16
_IV_NBYTES = 16
_TAG_NBYTES = 16
_KEY_NBYTES = (16, 24, 32)


def cipher_of(first: bytes) -> str | None:
    """Return the cipher of a file by its first bytes; None if it is not encrypted."""
    return CIPHERS.get(int.from_bytes(first[:4], "little")) if len(first) >= 32 else None


class DecryptedFile(ReadableFile):
    """The content of an encrypted file. Thread-safe."""

    def __init__(self, file: LocalFile, key: bytes) -> None:
        """Find the blocks; decrypts no more than their ends."""
        if len(key) not in _KEY_NBYTES:
            raise UsageError(f"a key of {len(key)} bytes; MindSpore has keys of 16, 24 or 32")
        self.name = file.name
        self._file, self._key = file, key
        self._lock = threading.Lock()
        self._decrypted: dict[int, bytes] = {}
        self._crypto = _cryptography()
        self._blocks: list[tuple[str, bytes, bytes, int, int]] = []
        """Cipher, tag, nonce, first byte and length of each block's content."""
        self._starts = [0]
        position = 0
        while position < file.nbytes:
            position = self._add_block(position)
        self.nbytes = self._starts[-1]

    def _add_block(self, position: int) -> int:
        """Note the block that begins at a position; return where the next one begins."""
        cipher = CIPHERS.get(int.from_bytes(self._file.read(position, 4), "little"))
        if cipher not in ("AES-GCM", "AES-CBC") or (self._blocks and self._blocks[0][0] != cipher):
            raise CorruptData(
                f"{self.name}: no block of {cipher or 'a cipher'} at byte {position:,}"
            )
        position += 4
        tag = b""
        if cipher == "AES-GCM":
            tag = self._file.read(position, _TAG_NBYTES)
            position += _TAG_NBYTES
        head = self._file.read(position, 12 + _IV_NBYTES)
        total, iv_nbytes = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4))
        nbytes = int.from_bytes(head[-4:], "little")
        start = position + len(head)
        is_whole = 0 < nbytes <= MAX_BLOCK_NBYTES and start + nbytes <= self._file.nbytes
        if iv_nbytes != _IV_NBYTES or total != nbytes + 8 + _IV_NBYTES or not is_whole:
            raise CorruptData(f"{self.name}: a block at byte {position:,} of a wrong length")
        self._blocks.append((cipher, tag, head[8:-4], start, nbytes))
        self._starts.append(self._starts[-1] + nbytes - self._padding(cipher, head, start, nbytes))
        return start + nbytes

    def _padding(self, cipher: str, head: bytes, start: int, nbytes: int) -> int:
        """Return the number of bytes that CBC has added to a block."""
        if cipher == "AES-GCM":
            return 0
        if nbytes % 16:
            raise CorruptData(f"{self.name}: a block of {nbytes:,} bytes, no multiple of 16")
        before = head[8:-4] if nbytes == 16 else self._file.read(start + nbytes - 32, 16)
        last = self._cbc(before, self._file.read(start + nbytes - 16, 16))
        if not 1 <= last[-1] <= 16 or last[-last[-1] :] != last[-1:] * last[-1]:
            raise self._wrong_key()
        return last[-1]

    @override
    def read_into(self, start: int, memory: memoryview) -> None:
        while memory.nbytes:
            if not 0 <= start < self.nbytes:
                raise CorruptData(f"{self.name}: ends at byte {start:,}, inside a tensor")
            number = bisect_right(self._starts, start) - 1
            part = memoryview(self._decrypt_block(number))[start - self._starts[number] :][
                : memory.nbytes
            ]
            memory[: part.nbytes] = part
            start, memory = start + part.nbytes, memory[part.nbytes :]

    def _decrypt_block(self, number: int) -> bytes:
        """Return a block decrypted; the last one is kept."""
        with self._lock:
            if number not in self._decrypted:
                cipher, tag, nonce, start, nbytes = self._blocks[number]
                data = self._file.read(start, nbytes)
                self._decrypted.clear()
                plain = (
                    self._gcm(nonce, tag, data) if cipher == "AES-GCM" else self._cbc(nonce, data)
                )
                size = self._starts[number + 1] - self._starts[number]
                self._decrypted[number] = plain[:size]
            return self._decrypted[number]

    def _gcm(self, nonce: bytes, tag: bytes, data: bytes) -> bytes:
        ciphers, modes = self._crypto
        try:
            decryptor = ciphers.Cipher(
                ciphers.algorithms.AES(self._key), modes.GCM(nonce[:12], tag)
            ).decryptor()
            return bytes(decryptor.update(data) + decryptor.finalize())
        except import_module("cryptography.exceptions").InvalidTag as error:
            raise self._wrong_key() from error

    def _cbc(self, before: bytes, data: bytes) -> bytes:
        ciphers, modes = self._crypto
        decryptor = ciphers.Cipher(ciphers.algorithms.AES(self._key), modes.CBC(before)).decryptor()
        return bytes(decryptor.update(data) + decryptor.finalize())

    def _wrong_key(self) -> WrongKey:
        return WrongKey(f"{self.name}: the key does not decrypt it, or it is damaged")

    @override
    def close(self) -> None:
        self._file.close()
        self._decrypted.clear()


def _cryptography() -> tuple[Any, Any]:
    try:
        ciphers = import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise UsageError(
            "files that MindSpore encrypted need the package cryptography: "
            "pip install 'holdfast-torch[encrypt]'"
        ) from error
    return ciphers, ciphers.modes
