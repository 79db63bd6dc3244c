"""Segments of sealed files: what a cipher refuses to do twice."""

from __future__ import annotations

import pytest

from holdfast.errors import UsageError
from holdfast.format.segments import SEGMENT_NBYTES, FileCipher
from holdfast.format.suites import TAG_NBYTES, Suite


def test_a_segment_is_not_sealed_twice_nor_in_parts() -> None:
    """R33: also where assertions are switched off; other bytes under the same nonce would tell
    what differs."""
    cipher = FileCipher(Suite(name="aes-256-gcm"), bytes(32))
    out = memoryview(bytearray(100 + TAG_NBYTES))
    cipher.seal(0, b"a" * 100, out)
    first = bytes(out)
    with pytest.raises(UsageError, match="segment 0 is sealed once"):
        cipher.seal(0, b"b" * 100, out)
    with pytest.raises(UsageError, match="in its place"):
        cipher.seal(SEGMENT_NBYTES + 1, b"b" * 100, out)
    with pytest.raises(UsageError, match="in its place"):
        cipher.seal(2**32 * SEGMENT_NBYTES, b"b" * 100, out)
    assert bytes(out) == first
