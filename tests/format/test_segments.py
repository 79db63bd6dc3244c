"""Segments of sealed files: what a cipher refuses to do twice, and where a file ends."""

from __future__ import annotations

import pytest

from holdfast.errors import Tampered, UsageError
from holdfast.format.suites import SEGMENT_NBYTES, TAG_NBYTES, FileCipher, Suite


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


def test_the_closing_tag_says_how_long_a_sealed_file_is() -> None:
    """R32: the tags of another length, cut or with one flipped bit do not end it."""
    nbytes = SEGMENT_NBYTES + 100
    cipher = FileCipher(Suite(name="aes-256-gcm"), bytes(32))
    out = memoryview(bytearray(nbytes + TAG_NBYTES))
    cipher.seal(0, bytes(nbytes), out)
    tags = cipher.collect_tags(nbytes)
    cipher.check_closed(nbytes, tags, what="whole")
    flipped = bytes([*tags[:-1], tags[-1] ^ 1])
    for wrong, there in ((nbytes, flipped), (nbytes, tags[:-TAG_NBYTES]), (nbytes - 1, tags)):
        with pytest.raises(Tampered):
            cipher.check_closed(wrong, there, what="a test")
