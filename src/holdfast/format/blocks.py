"""Blocks of files and their digests, which cover every byte (docs/format.md, section 3)."""

from __future__ import annotations

from blake3 import blake3

from holdfast.errors import CorruptData
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store.base import Buffer

DIGEST_NBYTES = 32
_CONTEXT = "holdfast 1 file"


def block_digest(data: Buffer) -> bytes:
    """Compute the 32-byte digest of one block. Runs without the GIL."""
    return blake3(data).digest()


def block_hasher() -> blake3:
    """Make a hasher for a block whose bytes are passed in pieces to `update`."""
    return blake3()


def num_blocks(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """Compute the number of blocks of a file of `nbytes`; 0 if it is empty."""
    return -(-nbytes // block_nbytes)


def list_blocks(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> list[tuple[int, int]]:
    """List (start, stop) of every block of a file of `nbytes`."""
    starts = range(0, nbytes, block_nbytes)
    return [(start, min(start + block_nbytes, nbytes)) for start in starts]


def max_stored_nbytes(nbytes: int) -> int:
    """Return the largest size of the stored form of a block of `nbytes`, with any codec."""
    return nbytes + nbytes // 128 + 4096


def max_file_nbytes(nbytes: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """Return the largest size of the stored form of a file of `nbytes`, with any codec."""
    return sum(max_stored_nbytes(stop - start) for start, stop in list_blocks(nbytes, block_nbytes))


def digest_blocks(data: Buffer, block_nbytes: int = BLOCK_NBYTES) -> bytes:
    """Compute the digests of all blocks of `data`, joined."""
    view = memoryview(data).cast("B")
    parts = list_blocks(view.nbytes, block_nbytes)
    return b"".join(block_digest(view[start:stop]) for start, stop in parts)


def file_digest(nbytes: int, digests: bytes) -> str:
    """Compute the digest of a file, "blake3:…", from its length and its blocks' digests."""
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update(nbytes.to_bytes(8, "little"))
    hasher.update(digests)
    return f"blake3:{hasher.hexdigest()}"


def check_block(data: Buffer, expected: bytes, *, what: str) -> None:
    """Raise `CorruptData`, naming `what`, unless `data` has the digest `expected`."""
    digest = block_digest(data)
    if digest != expected:
        raise CorruptData(
            f"{what}: the bytes differ from those that were written "
            f"(digest {digest.hex()[:16]}…, expected {expected.hex()[:16]}…)"
        )
