"""Encrypted files of a checkpoint, read and written by ranges (docs/format.md, section 10).

Also decrypts a manifest with the keys of a user, and redacts the records beside it: error texts and
reasons in unencrypted records may contain names of parts of the state.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence

import msgspec

from holdfast.errors import CorruptData, FormatError, LimitExceeded, NotFound, Tampered, UsageError
from holdfast.format import blocks, layout
from holdfast.format.envelope import (
    MAX_STRETCHING_KIB,
    Contents,
    FileSeal,
    KeyBox,
    Visible,
    decode_box,
    decode_visible,
    open_sealed,
)
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import FileEntry
from holdfast.format.records import (
    AnswerRecord,
    Rejected,
    Retired,
    Thinned,
    TiersRecord,
    UploadRecord,
)
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.format.suites import (
    SEGMENT_NBYTES,
    TAG_NBYTES,
    FileCipher,
    Suite,
    stored_nbytes,
    suite_named,
    tags_nbytes,
)
from holdfast.keys import Key, unwrapped
from holdfast.root.documents import read_document
from holdfast.store.base import BlockWriter, Buffer, Seen, Store, final_nbytes, ignore
from holdfast.threads.buffers import allocate_pages


class SealedFile:
    """Reads and decrypts ranges of one encrypted file. Thread-safe."""

    def __init__(self, inner: Store, key: str, seal: FileSeal, suite: Suite, what: str) -> None:
        self._inner = inner
        self._cipher = FileCipher(suite, bytes.fromhex(seal.secret))
        self._what = what
        self._tags: bytes | None = None
        self.key = key
        self.seal = seal

    def get(self, start: int, nbytes: int, *, afresh: bool = False) -> bytes:
        """Return decrypted, authenticated bytes at `start`; raises as `decrypt_range` does."""
        plain = bytearray(nbytes)
        self.decrypt_range(start, memoryview(plain), afresh=afresh)
        return bytes(plain)

    def decrypt_range(
        self, start: int, out: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        """Fill `out` with the decrypted and authenticated bytes at `start`."""
        stop = start + out.nbytes
        if start < 0 or stop > self.seal.nbytes:
            raise CorruptData(
                f"{self._what}: has {self.seal.nbytes} bytes, expected at least {stop}"
            )
        # Authenticated tags stay valid, and there may be many: not reread for each block.
        tags = self._checked_tags(afresh=afresh and start == 0)
        while start < stop:
            until = min(start - start % SEGMENT_NBYTES + BLOCK_NBYTES, stop)
            piece, out = out[: until - start], out[until - start :]
            self._read_run(start, piece, tags, seen=seen, afresh=afresh)
            start = until

    def _read_run(
        self, start: int, out: memoryview, tags: bytes, *, seen: Seen, afresh: bool
    ) -> None:
        """Fill `out`, at most one block, by reading and decrypting whole segments."""
        stop = start + out.nbytes
        base = start - start % SEGMENT_NBYTES
        end = min(-(-stop // SEGMENT_NBYTES) * SEGMENT_NBYTES, self.seal.nbytes)
        # A segment's tag overwrites the bytes behind it while the segment is decrypted.
        sealed = _scratch(end - base + TAG_NBYTES)
        self._inner.read_into(self.key, base, sealed[: end - base], afresh=afresh)
        # One retry of each: a transient read error must not count as damage.
        retries = ["tags", "bytes"]
        for first in range(base, end, SEGMENT_NBYTES):
            number, last = first // SEGMENT_NBYTES, min(first + SEGMENT_NBYTES, end)
            low, high = max(first, start), min(last, stop)
            piece = out[low - start : high - start]
            is_whole = (low, high) == (first, last)
            plain = piece if is_whole else memoryview(bytearray(last - first))
            segment = sealed[first - base : last - base + TAG_NBYTES]
            while not self._try_open(number, segment, tags, plain, or_raise=not retries):
                if retries.pop() == "bytes":
                    rest = sealed[first - base : end - base]
                    self._inner.read_into(self.key, first, rest, afresh=True)
                else:
                    tags = self._checked_tags(afresh=True)
            if not is_whole:
                piece[:] = plain[low - first : high - first]
            seen(piece)

    def _try_open(
        self, number: int, segment: memoryview, tags: bytes, plain: memoryview, *, or_raise: bool
    ) -> bool:
        overwritten = bytes(segment[-TAG_NBYTES:])
        segment[-TAG_NBYTES:] = tags[number * TAG_NBYTES : (number + 1) * TAG_NBYTES]
        try:
            self._cipher.decrypt_segment(number, segment, plain, what=self._what)
        except Tampered:
            if or_raise:
                raise
            return False
        finally:
            segment[-TAG_NBYTES:] = overwritten
        return True

    def _checked_tags(self, *, afresh: bool) -> bytes:
        """Return the file's authentication tags, cached, checked against its length; one retry."""
        if self._tags is None or afresh:
            try:
                self._tags = self._read_tags(afresh=afresh)
            except Tampered:
                # One retry, as in `_read_run`.
                self._tags = self._read_tags(afresh=True)
        return self._tags

    def _read_tags(self, *, afresh: bool) -> bytes:
        nbytes = self.seal.nbytes
        tags = memoryview(bytearray(tags_nbytes(nbytes)))
        self._inner.read_into(self.key, nbytes, tags, afresh=afresh)
        self._cipher.check_closed(nbytes, bytes(tags), what=f"{self._what}, the end of it")
        return bytes(tags)


class SealedWriter:
    """`BlockWriter` of an encrypted file: encrypts blocks and writes them with an inner writer."""

    def __init__(
        self,
        inner: BlockWriter,
        cipher: FileCipher,
        nbytes: int,
        *,
        at_most: bool,
        done: Callable[[int, FileEntry], None],
    ) -> None:
        """Write to `inner`; `finish` calls `done` with plain length and the stored file's entry."""
        self._inner = inner
        self._cipher = cipher
        self._nbytes = nbytes
        self._at_most = at_most
        self._done = done
        self._digests: dict[int, bytes] = {}
        self._last_block = b""
        """Ciphertext of a shorter last block, kept because the tags are written behind it."""

    def write(self, start: int, data: memoryview) -> None:
        """Encrypt and write a piece: whole blocks; only the file's last block may be shorter."""
        plain = memoryview(data).cast("B")
        if start % BLOCK_NBYTES:
            raise UsageError(f"sealed files are written in blocks of {BLOCK_NBYTES} bytes")
        for low in range(0, plain.nbytes, BLOCK_NBYTES):
            piece = plain[low : low + BLOCK_NBYTES]
            ciphertext, digest = self._seal(start + low, piece)
            if piece.nbytes < BLOCK_NBYTES:
                self._last_block = bytes(ciphertext)
                return
            self._digests[(start + low) // BLOCK_NBYTES] = digest
            self._inner.write(start + low, ciphertext)

    def _seal(self, start: int, plain: memoryview) -> tuple[memoryview, bytes]:
        """Return a block's ciphertext and its digest, computed while it is in the CPU cache."""
        sealed, hasher = _scratch(plain.nbytes + TAG_NBYTES), blocks.block_hasher()
        for low in range(0, plain.nbytes, SEGMENT_NBYTES):
            high = min(low + SEGMENT_NBYTES, plain.nbytes)
            self._cipher.seal(start + low, plain[low:high], sealed[low : high + TAG_NBYTES])
            hasher.update(sealed[low:high])
        return sealed[: plain.nbytes], hasher.digest()

    def finish(self, nbytes: int | None = None) -> None:
        """Write the authentication tags, finish the inner file, and call `done`."""
        length = final_nbytes(nbytes, self._nbytes, at_most=self._at_most, what="a sealed file")
        num_blocks = length // BLOCK_NBYTES
        if len(self._last_block) != length % BLOCK_NBYTES or len(self._digests) != num_blocks:
            raise UsageError(f"finish: not all of the {length} bytes were written")
        rest = memoryview(self._last_block + self._cipher.collect_tags(length))
        for low in range(0, rest.nbytes, BLOCK_NBYTES):
            start = num_blocks * BLOCK_NBYTES + low
            self._inner.write(start, rest[low : low + BLOCK_NBYTES])
        stored = stored_nbytes(length)
        self._inner.finish(stored if self._at_most else None)
        whole = b"".join(self._digests[number] for number in range(num_blocks))
        digest = blocks.file_digest(stored, whole + blocks.digest_blocks(rest))
        self._done(length, FileEntry(nbytes=stored, digest=digest))

    def abort(self) -> None:
        """Abort the inner writer."""
        self._inner.abort()


def plain_nbytes(nbytes: int, seal: FileSeal) -> int:
    """Convert a stored file length to a plain one; a wrong length never gives `seal.nbytes`."""
    expected = stored_nbytes(seal.nbytes)
    if nbytes == expected:
        return seal.nbytes
    guess = nbytes - (expected - seal.nbytes)
    return guess if guess >= 0 and guess != seal.nbytes else seal.nbytes + 1


class _Scratch(threading.local):
    """Page-aligned memory for direct writes, one buffer for each thread."""

    def __init__(self) -> None:
        self.memory = allocate_pages(BLOCK_NBYTES + SEGMENT_NBYTES + mmap.PAGESIZE)


_SCRATCH = _Scratch()


def _scratch(nbytes: int) -> memoryview:
    return memoryview(_SCRATCH.memory)[:nbytes]


_MAX_READS = 3
"""Attempts to list and read boxes: a newer box may replace one between list and read."""


def decrypt_manifest(store: Store, folder: str, document: bytes, keys: Sequence[Key]) -> Contents:
    """Decrypt a folder's stored manifest `document` with the user's `keys`."""
    what = f"{store.url}/{folder}/{layout.MANIFEST}"
    visible = decode_visible(document, what=what)
    name = layout.parse_attempt(folder)
    if name is not None and name.label != visible.label:
        raise Tampered(f"{what}: it was encrypted under the label {visible.label!r}")
    boxes = [*boxes_of(store, folder, visible).values()]
    suite = suite_named(visible.suite, what=what)
    data_key = unwrapped(keys, boxes, suite, what=what)
    return open_sealed(document, visible, data_key, what=what)


def boxes_of(store: Store, folder: str, visible: Visible) -> dict[int, KeyBox]:
    """Read the boxes of wrapped keys, number → box, newest first; skips unreadable ones."""
    return {number: box for number, (box, _) in _boxes(store, folder, visible).items()}


def box_documents(store: Store, folder: str, visible: Visible) -> dict[str, bytes]:
    """Read the stored bytes of the boxes of wrapped keys, by file name; skips unreadable ones."""
    boxes = _boxes(store, folder, visible)
    return {layout.keys_name(number): data for number, (_, data) in boxes.items()}


def _boxes(store: Store, folder: str, visible: Visible) -> dict[int, tuple[KeyBox, bytes]]:
    where = f"{store.url}/{folder}"
    problem: FormatError = CorruptData(f"{where}: the key file next to the manifest is missing")
    for _ in range(_MAX_READS):
        found: dict[int, tuple[KeyBox, bytes]] = {}
        work = 0
        names = store.children(folder)
        numbers = {n for n in map(layout.parse_keys, names) if n is not None}
        for number in sorted(numbers or {1}, reverse=True):
            key = f"{folder}/{layout.keys_name(number)}"
            try:
                data = read_document(store, key, max_nbytes=MAX_CHECKED_NBYTES)
                box = decode_box(data, what=f"{store.url}/{key}")
            except NotFound:
                continue
            except FormatError as error:
                problem = error
                continue
            if box.commitment != visible.commitment:
                problem = Tampered(f"{store.url}/{key}: these are the keys of another checkpoint")
            elif work + box.stretching_kib > MAX_STRETCHING_KIB:
                problem = LimitExceeded(f"{store.url}/{key}: too many passphrases to try")
            else:
                work += box.stretching_kib
                found[number] = box, data
        if found:
            return found
    raise problem


REDACTED = "hidden: the checkpoints here are encrypted"


def redact_mark(name: str, data: bytes) -> bytes:
    """Replace the reasons in a mark of a deleted, lost or damaged checkpoint by a fixed text."""
    if name == layout.REJECTED:
        rejected = Rejected.decode(data, what=name)
        return Rejected(by=rejected.by, reasons=(REDACTED,)).encode()
    if layout.parse_retired(name) is not None:
        return Retired(by=Retired.decode(data, what=name).by, reason=REDACTED).encode()
    raise NotFound(f"{name}: none of its checkpoints can be decrypted")


def redact_sidecar(name: str, data: bytes) -> bytes:
    """Replace the reason in a mark of an unencrypted checkpoint; notes are returned as they are."""
    if layout.parse_notes(name) is not None:
        return data
    if layout.parse_thinned(name) is not None:
        thinned = Thinned.decode(data, what=name)
        return msgspec.structs.replace(thinned, reason=REDACTED).encode()
    return redact_mark(name, data)


def redact_record(key: str, data: Buffer) -> Buffer:
    """Replace the error text in an answer, upload or tiers record; return others as they are."""
    if key.startswith(f"{layout.REQUESTS}/") and layout.is_answer(key):
        answer = AnswerRecord.decode(data, what=key)
        if answer.error is None:
            return data
        return msgspec.structs.replace(answer, error=REDACTED).encode()
    if key == layout.TIERS:
        tiers = TiersRecord.decode(data, what=key)
        error = None if tiers.error is None else REDACTED
        return msgspec.structs.replace(tiers, error=error).encode()
    if key.startswith(f"{layout.UPLOADS}/"):
        upload = UploadRecord.decode(data, what=key)
        error = None if upload.error is None else REDACTED
        return msgspec.structs.replace(upload, error=error).encode()
    return data
