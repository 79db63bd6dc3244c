"""Sealed documents: readable JSON whose last line is its own digest (docs/format.md, section 2)."""

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

MAX_SEALED_NBYTES = 64 * 1024
CODEC = "codec"
"""The requirement of manifests that list files made by a codec."""
SEALED = "sealed"
"""The requirement of what is encrypted, and the kind of a manifest that is."""
KNOWN_REQUIREMENTS = frozenset({CODEC, SEALED})
_OWN_NAMES = ("holdfast", "kind", "digest")
_SEAL = re.compile(rb'"digest": "blake3:([0-9a-f]{64})"\}\n')
_BEFORE_SEAL = b",\n"
_SEAL_NBYTES = len('"digest": "blake3:') + 64 + len('"}\n')


def seal(kind: str, members: Mapping[str, Any], *, max_nbytes: int = MAX_SEALED_NBYTES) -> bytes:
    """A sealed document of `kind`.

    Raises:
        UsageError: larger than a reader accepts, or not expressible as JSON.
    """
    assert not set(members) & set(_OWN_NAMES), "these names belong to the seal"
    document = {"holdfast": FORMAT_VERSION, "kind": kind, **members}
    try:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        body = text.removesuffix("\n}").encode("utf-8") + _BEFORE_SEAL
    except (ValueError, TypeError) as err:
        raise UsageError(f"a document of kind {kind!r} cannot hold this: {err}") from err
    sealed = body + b'"digest": "blake3:%s"}\n' % blake3(body).hexdigest().encode()
    if len(sealed) > max_nbytes:
        raise UsageError(
            f"a document of kind {kind!r} would have {len(sealed):,} bytes; "
            f"at most {max_nbytes:,} are allowed"
        )
    return sealed


def unseal(
    data: Buffer, *, what: str, kinds: Collection[str], max_nbytes: int = MAX_SEALED_NBYTES
) -> dict[str, Any]:
    """The members of a sealed document, with `kind`, without version, `requires` and digest.

    Raises:
        CorruptData: the digest is missing or is not that of the bytes.
        UnsupportedVersion: another version, or a feature that this reader does not know.
        FormatError: not a sealed document of one of `kinds`.
    """
    if memoryview(data).nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: larger than {max_nbytes:,} bytes")
    text = bytes(data)
    _check_seal(text, what=what)
    # Without the seal it is as `json` writes it, which is read most quickly.
    whole = text[: -_SEAL_NBYTES - len(_BEFORE_SEAL)] + b"\n}"
    num_values = strictjson.MAX_VALUES - 1  # the digest is one
    document: dict[str, Any] = strictjson.loads(
        whole, what=what, max_nbytes=max_nbytes, max_values=num_values
    )
    check_version(document, what=what)
    names = list(document)
    if names[1:2] != ["kind"] or "digest" in names:
        raise FormatError(f"{what}: `kind` is not the second member, or `digest` is there twice")
    if document["kind"] not in tuple(kinds):
        raise FormatError(
            f"{what}: its kind is {str(document['kind'])[:40]!r}, not {' or '.join(kinds)}"
        )
    for name in ("holdfast", "requires"):
        document.pop(name, None)
    return document


def check_version(document: Any, *, what: str) -> None:
    """Refuse a document of another version or with requirements that we do not know.

    Raises:
        FormatError: not an object that starts with the version.
        UnsupportedVersion: as said.
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


def _check_seal(text: bytes, *, what: str) -> None:
    body, last_line = text[:-_SEAL_NBYTES], text[-_SEAL_NBYTES:]
    match = _SEAL.fullmatch(last_line)
    if match is None or not body.endswith(_BEFORE_SEAL):
        raise CorruptData(f"{what}: cut short, or no sealed document (no digest in the last line)")
    if blake3(body).hexdigest().encode() != match[1]:
        raise CorruptData(f"{what}: its digest does not fit its bytes")
