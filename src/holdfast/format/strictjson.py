"""Strict JSON, and documents in it that end with their own digest (docs/format.md, section 2).

All JSON that Holdfast reads is parsed by `loads`, which checks the limits first. Of a document
this module knows the version, kind, requirements and digest, and no other member.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
from blake3 import blake3
from typing_extensions import Self

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UnsupportedVersion, UsageError
from holdfast.format.layout import FORMAT_VERSION
from holdfast.store.base import Buffer

MAX_DEPTH = 64
MAX_DIGITS = 4096
MAX_VALUES = 1_000_000
"""Default limit of the values in a document."""
MAX_CHECKED_NBYTES = 64 * 1024
CODEC = "codec"
"""Entry of `requires` in manifests that list compressed files."""
SHARDS = "shards"
"""Entry of `requires` in manifests of checkpoints in shards; see `manifest.Manifest.sharded`."""
SEALED = "sealed"
"""Entry of `requires` in encrypted documents, and the kind of an encrypted manifest."""
FROZEN = "frozen"
"""Entry of `requires` in manifests of checkpoints that record parameters by digest alone, and name
of the record beside the tree of a module."""
PARTS = "parts"
"""Entry of `requires` in manifests and indexes of checkpoints whose index is in parts."""
KNOWN_REQUIREMENTS = frozenset({CODEC, SHARDS, SEALED, FROZEN, PARTS})

T = TypeVar("T")

_OWN_NAMES = ("holdfast", "kind", "digest")
_DIGEST_LINE = re.compile(rb'"digest": "blake3:([0-9a-f]{64})"\}\n')
_BEFORE_DIGEST = b",\n"
_DIGEST_LINE_NBYTES = len('"digest": "blake3:') + 64 + len('"}\n')
_SCAN_NBYTES = 1 << 20
_QUOTE = ord('"')
_COMMA = ord(",")
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89a-bA-B][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89a-bA-B][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


_STRUCTURE = b'"[{]},'
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_LEVELS = bytes({"[": 1, "{": 1, "]": 255, "}": 255}.get(chr(code), 0) for code in range(256))


def loads(data: Buffer, *, what: str, max_nbytes: int, max_values: int = MAX_VALUES) -> Any:
    """Parse a strict JSON text, named `what`; checks size, values and depth before building it."""
    check_limits(data, what=what, max_nbytes=max_nbytes, max_values=max_values)
    return _decode_strictly(bytes(data), what=what)


def loads_as(
    data: Buffer, type_: type[T], *, max_nbytes: int, max_values: int = MAX_VALUES
) -> T | None:
    """Decode a record fast if it is written canonically; None: use `loads` and `convert`.

    A text is accepted only if encoding the record gives the same bytes. So it has no duplicate
    name, no unknown member, no unusual number, and is no deeper than the type. The type or the
    caller bounds integers; msgspec itself reads none of more than 4,300 digits.
    """
    text = bytes(data)
    if len(text) > max_nbytes:
        return None
    # Counts signs inside texts too, so the number of values is at most this.
    if sum(map(text.count, (b"[", b"{", b","))) >= max_values:
        return None
    try:
        with describe_once(type_):
            record = msgspec.json.decode(text, type=type_)
        return record if msgspec.json.encode(record) == text else None
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None


def check_limits(data: Buffer, *, what: str, max_nbytes: int, max_values: int = MAX_VALUES) -> None:
    """Raise `LimitExceeded` if a text is too large, too deep or has too many values for `loads`."""
    nbytes = memoryview(data).nbytes
    if nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: {nbytes:,} bytes; at most {max_nbytes:,} are accepted")
    plain = bytes(data)
    if b"\\" in plain:
        plain = plain.replace(rb"\\", b"__").replace(rb"\"", b"__")
        if _LONE_SURROGATE.search(plain):
            raise FormatError(f"{what}: half of a surrogate pair in a text")
    _check_limits(plain, what=what, max_values=max_values)


def dumps(value: Any) -> bytes:
    """Encode a value as compact JSON in UTF-8, as `loads` reads it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as err:
        raise UsageError(f"not a JSON value: {err}") from err


_describing = threading.RLock()
_described: set[Hashable] = set()


@contextmanager
def describe_once(type_: Any) -> Iterator[None]:
    """Let no other thread decode, while msgspec decodes a type for the first time.

    It describes a type at its first use, and another thread that used the half-made description
    would crash the process (msgspec 0.22).
    """
    if type_ in _described:
        yield
        return
    with _describing:
        yield
        _described.add(type_)


def convert(value: Any, type_: type[T], *, what: str) -> T:
    """Convert `value` to the record type `type_`; coerces nothing, ignores unknown members."""
    try:
        with describe_once(type_):
            return msgspec.convert(value, type_)
    except (msgspec.ValidationError, ValueError, OverflowError) as err:
        raise FormatError(f"{what}: {err}") from err


def _check_limits(plain: bytes, *, what: str, max_values: int) -> None:
    """Raise `LimitExceeded` if `plain`, without escaped quotes, has too many values or levels."""
    num_levels = plain.count(b"[") + plain.count(b"{")
    if num_levels <= MAX_DEPTH and num_levels + plain.count(b",") < max_values:
        return  # even if all signs were outside of texts
    import numpy as np  # takes longer than most commands, whose documents are small

    levels_of = np.frombuffer(_LEVELS, np.int8)
    num_values, depth, carry = 1, 0, 0
    for start in range(0, len(plain), _SCAN_NBYTES):
        # Pairs of quotes with no structure between them do not affect the rest.
        structure = plain[start : start + _SCAN_NBYTES].translate(None, _NO_STRUCTURE)
        part = np.frombuffer(structure.replace(b'""', b""), np.uint8)
        inside = np.bitwise_xor.accumulate((part == _QUOTE).view(np.uint8)) ^ carry
        carry = int(inside[-1]) if len(inside) else carry
        outside = part[inside == 0]
        levels = levels_of[outside]
        num_values += int(np.count_nonzero(levels == 1) + np.count_nonzero(outside == _COMMA))
        depths = depth + np.cumsum(levels, dtype=np.int64)
        deepest = int(depths.max(initial=depth))
        depth = int(depths[-1]) if len(depths) else depth
        if num_values > max_values:
            raise LimitExceeded(f"{what}: more than {max_values:,} values")
        if deepest > MAX_DEPTH:
            raise LimitExceeded(f"{what}: nested more than {MAX_DEPTH} levels deep")


def _decode_strictly(text: bytes, *, what: str) -> Any:
    has_long_number = _may_have_long_number(text)
    if not has_long_number:
        try:
            value = msgspec.json.decode(text)
            # Text that encodes to itself again has no duplicate name and no unusual number.
            again = msgspec.json.encode(value)
            if again in (text, msgspec.json.format(text, indent=-1)):
                return value
            del value, again  # before it is built anew
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
            pass  # the decoder below decides, with precise errors
    return _parse_any(text, parse_int=_integer if has_long_number else int, what=what)


def _may_have_long_number(text: bytes) -> bool:
    """Whether a text may have a run of `MAX_DIGITS` digits; true for some shorter runs, too."""
    step = MAX_DIGITS // 2
    return any(text[start : start + step].isdigit() for start in range(0, len(text), step))


def _parse_any(text: bytes, *, parse_int: Callable[[str], int], what: str) -> Any:
    """Parse any valid JSON with the slower `json` library, which gives precise errors."""
    if text.startswith(b"\xef\xbb\xbf"):
        raise FormatError(f"{what}: starts with a byte-order mark")
    try:
        # A new decoder each time: the C scanner keeps its table of names in the decoder object.
        return json.JSONDecoder(
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=parse_int,
            parse_constant=_constant,
        ).decode(text.decode("utf-8"))
    except RecursionError as err:
        raise LimitExceeded(f"{what}: nested too deeply for the stack that is left") from err
    except ValueError as err:
        raise FormatError(f"{what}: not strict JSON: {str(err)[:200]}") from err


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:80]!r} appears twice in an object")
            seen.add(name)
    return members


def _float(text: str) -> float:
    number = float(text) if len(text) <= MAX_DIGITS else math.inf
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]}… is too long or too large")
    return number


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer of more than {MAX_DIGITS:,} digits")
    return int(text)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def encode_checked(
    kind: str,
    members: Mapping[str, Any],
    *,
    max_nbytes: int = MAX_CHECKED_NBYTES,
    is_compact: bool = False,
) -> bytes:
    """Encode a document of `kind` that ends with its own digest; if compact, fast and in a line.

    A compact document must have no float that is not finite.
    """
    assert not set(members) & set(_OWN_NAMES), "these names are the format's own"
    document = {"holdfast": FORMAT_VERSION, "kind": kind, **members}
    try:
        if is_compact:
            body = msgspec.json.encode(document).removesuffix(b"}") + _BEFORE_DIGEST
        else:
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
    """Check and parse a document; return its members but version, `requires` and digest."""
    if memoryview(data).nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: larger than {max_nbytes:,} bytes")
    text = bytes(data)
    digest_of(text, what=what)
    # Without the digest line the text is as `json` writes it, which is parsed fastest.
    whole = text[: -_DIGEST_LINE_NBYTES - len(_BEFORE_DIGEST)] + b"\n}"
    num_values = MAX_VALUES - 1  # the digest is one
    document: dict[str, Any] = loads(whole, what=what, max_nbytes=max_nbytes, max_values=num_values)
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


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of records: documents that end with their own digest."""

    kind: ClassVar[str]
    max_nbytes: ClassVar[int] = MAX_CHECKED_NBYTES

    def encode(self) -> bytes:
        """Encode the record; raises `UsageError` if it is too long."""
        return encode_checked(self.kind, self._members(), max_nbytes=self.max_nbytes)

    @classmethod
    def decode(cls, data: Buffer, *, what: str) -> Self:
        """Decode a record; raises `FormatError` if `data` is not valid."""
        members = decode_checked(data, what=what, kinds=(cls.kind,), max_nbytes=cls.max_nbytes)
        cls._prepare_members(members)
        record = convert(members, cls, what=what)
        record._check(what)
        return record

    def _members(self) -> dict[str, Any]:
        members: dict[str, Any] = msgspec.to_builtins(self)
        return members

    @classmethod
    def _prepare_members(cls, members: dict[str, Any]) -> None:
        """Convert members that JSON cannot hold, in place."""

    def _check(self, what: str) -> None:
        """Raise `FormatError` if members contradict each other."""


def check_version(document: Any, *, what: str) -> None:
    """Raise an error for a document of another version or with unknown requirements."""
    if not isinstance(document, dict) or next(iter(document), None) != "holdfast":
        raise FormatError(f"{what}: does not start with the version of the format")
    version = document["holdfast"]
    if type(version) is not int:
        raise FormatError(f"{what}: the version is not an integer")
    if version != FORMAT_VERSION:
        shown = version if abs(version) < 10**9 else "very large"
        raise UnsupportedVersion(
            f"{what}: has version {shown}, but this Holdfast reads {FORMAT_VERSION}; upgrade "
            "Holdfast"
        )
    requires = convert(document.get("requires", []), list[str], what=what)
    unknown = [name[:80] for name in requires if name not in KNOWN_REQUIREMENTS]
    if unknown:
        raise UnsupportedVersion(
            f"{what}: upgrade Holdfast: this version lacks the features {', '.join(unknown[:10])}"
        )


def digest_of(data: Buffer, *, what: str) -> str:
    """Return the digest with which a document ends, "blake3:…", if it fits; else `CorruptData`."""
    text = memoryview(data)
    body, last_line = text[:-_DIGEST_LINE_NBYTES], bytes(text[-_DIGEST_LINE_NBYTES:])
    match = _DIGEST_LINE.fullmatch(last_line)
    if match is None or body[-len(_BEFORE_DIGEST) :] != _BEFORE_DIGEST:
        raise CorruptData(f"{what}: cut short, or no document of Holdfast (no digest at its end)")
    found = match[1].decode()
    if blake3(body).hexdigest() != found:
        raise CorruptData(f"{what}: its digest does not fit its bytes")
    return f"blake3:{found}"
