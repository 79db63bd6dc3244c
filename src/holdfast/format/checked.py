"""Self-checking documents: JSON whose last line is its own digest (docs/format.md, section 2)."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from blake3 import blake3

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UnsupportedVersion, UsageError
from holdfast.format import strictjson
from holdfast.format.layout import FORMAT_VERSION
from holdfast.store.base import Buffer

MAX_CHECKED_NBYTES = 64 * 1024
CODEC = "codec"
"""Entry of `requires` in manifests that list compressed files."""
SEALED = "sealed"
"""Entry of `requires` in encrypted documents, and the kind of an encrypted manifest."""
KNOWN_REQUIREMENTS = frozenset({CODEC, SEALED})
_OWN_NAMES = ("holdfast", "kind", "digest")
_DIGEST_LINE = re.compile(rb'"digest": "blake3:([0-9a-f]{64})"\}\n')
_BEFORE_DIGEST = b",\n"
_DIGEST_LINE_NBYTES = len('"digest": "blake3:') + 64 + len('"}\n')


def encode_checked(
    kind: str, members: Mapping[str, Any], *, max_nbytes: int = MAX_CHECKED_NBYTES
) -> bytes:
    """Encode a self-checking document of `kind`.

    Raises:
        UsageError: the document is larger than a reader accepts, or not expressible as JSON.
    """
    assert not set(members) & set(_OWN_NAMES), "these names are the format's own"
    document = {"holdfast": FORMAT_VERSION, "kind": kind, **members}
    try:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        body = text.removesuffix("\n}").encode("utf-8") + _BEFORE_DIGEST
    except (ValueError, TypeError) as err:
        raise UsageError(f"a document of kind {kind!r} cannot hold this: {err}") from err
    data = body + b'"digest": "blake3:%s"}\n' % blake3(body).hexdigest().encode()
    if len(data) > max_nbytes:
        raise UsageError(
            f"a document of kind {kind!r} would have {len(data):,} bytes; "
            f"at most {max_nbytes:,} are allowed"
        )
    return data


def decode_checked(
    data: Buffer, *, what: str, kinds: Collection[str], max_nbytes: int = MAX_CHECKED_NBYTES
) -> dict[str, Any]:
    """Check a document; returns its members with `kind`, without version, `requires` and digest.

    Raises:
        CorruptData: the digest is missing or is not that of the bytes.
        UnsupportedVersion: another version, or a feature that this reader does not know.
        FormatError: not a self-checking document of one of `kinds`.
    """
    if memoryview(data).nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: larger than {max_nbytes:,} bytes")
    text = bytes(data)
    _check_digest(text, what=what)
    # Without the digest line the text is as `json` writes it, which is parsed fastest.
    whole = text[: -_DIGEST_LINE_NBYTES - len(_BEFORE_DIGEST)] + b"\n}"
    num_values = strictjson.MAX_VALUES - 1  # the digest is one
    document: dict[str, Any] = strictjson.loads(
        whole, what=what, max_nbytes=max_nbytes, max_values=num_values
    )
    check_version(document, what=what)
    names = list(document)
    if names[1:2] != ["kind"] or "digest" in names:
        raise FormatError(f"{what}: `kind` is not the second member, or `digest` occurs twice")
    if document["kind"] not in tuple(kinds):
        raise FormatError(
            f"{what}: its kind is {str(document['kind'])[:40]!r}, not {' or '.join(kinds)}"
        )
    for name in ("holdfast", "requires"):
        document.pop(name, None)
    return document


def check_version(document: Any, *, what: str) -> None:
    """Refuse a document of another version or with unknown requirements.

    Raises:
        FormatError: not an object that starts with the version.
        UnsupportedVersion: another version, or an unknown requirement.
    """
    if not isinstance(document, dict) or next(iter(document), None) != "holdfast":
        raise FormatError(f"{what}: does not start with the version of the format")
    version = document["holdfast"]
    if type(version) is not int:
        raise FormatError(f"{what}: the version is not an integer")
    if version != FORMAT_VERSION:
        shown = version if abs(version) < 10**9 else "very large"
        raise UnsupportedVersion(
            f"{what}: has version {shown}, and this Holdfast reads {FORMAT_VERSION}; upgrade it"
        )
    requires = strictjson.convert(document.get("requires", []), list[str], what=what)
    unknown = [name[:80] for name in requires if name not in KNOWN_REQUIREMENTS]
    if unknown:
        raise UnsupportedVersion(
            f"{what}: needs features that this Holdfast lacks, so upgrade it: "
            + ", ".join(unknown[:10])
        )


def _check_digest(text: bytes, *, what: str) -> None:
    body, last_line = text[:-_DIGEST_LINE_NBYTES], text[-_DIGEST_LINE_NBYTES:]
    match = _DIGEST_LINE.fullmatch(last_line)
    if match is None or not body.endswith(_BEFORE_DIGEST):
        raise CorruptData(
            f"{what}: cut short, or not one of Holdfast's documents (no digest at its end)"
        )
    if blake3(body).hexdigest().encode() != match[1]:
        raise CorruptData(f"{what}: its digest does not fit its bytes")
