"""Strict JSON whose cost is bounded before anything is built (docs/format.md, section 2).

Everything that Holdfast reads as JSON comes through `loads`. It knows no document of the format.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from holdfast.errors import FormatError, LimitExceeded, UsageError
from holdfast.store.base import Buffer

MAX_DEPTH = 64
MAX_DIGITS = 4096

T = TypeVar("T")

_SCAN_NBYTES = 1 << 20
_QUOTE = ord('"')
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89a-bA-B][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89a-bA-B][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)


def _table(values: dict[str, int]) -> np.ndarray[Any, np.dtype[np.int8]]:
    table = np.zeros(256, dtype=np.int8)
    for character, value in values.items():
        table[ord(character)] = value
    return table


_NESTING = _table({"[": 1, "{": 1, "]": -1, "}": -1})
_STARTS = _table({"[": 1, "{": 1, ",": 1})


def loads(
    data: Buffer,
    *,
    what: str,
    max_nbytes: int,
    max_values: int = 1_000_000,
    max_depth: int = MAX_DEPTH,
) -> Any:
    """The value of a strict JSON text. `what` names the document in every error.

    Size, number of values and depth are checked before anything is built.

    Raises:
        FormatError: not strict JSON.
        LimitExceeded: longer, deeper or with more values than allowed.
    """
    check_limits(data, what=what, max_nbytes=max_nbytes, max_values=max_values, max_depth=max_depth)
    return _parse(bytes(data), what=what)


def check_limits(
    data: Buffer,
    *,
    what: str,
    max_nbytes: int,
    max_values: int = 1_000_000,
    max_depth: int = MAX_DEPTH,
) -> None:
    """Raise `LimitExceeded` unless `loads` would take a text of this extent.

    Values are counted as the commas and opening brackets outside texts, plus one.
    """
    nbytes = memoryview(data).nbytes
    if nbytes > max_nbytes:
        raise LimitExceeded(f"{what}: {nbytes:,} bytes; at most {max_nbytes:,} are accepted")
    plain = bytes(data)
    if b"\\" in plain:
        plain = plain.replace(rb"\\", b"__").replace(rb"\"", b"__")
        if _LONE_SURROGATE.search(plain):
            raise FormatError(f"{what}: half of a surrogate pair in a text")
    _scan(plain, what=what, max_values=max_values, max_depth=max_depth)


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8, as `loads` reads it.

    Raises:
        UsageError: a text that is not Unicode, a number that is not finite, an odd type.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except (ValueError, TypeError, RecursionError) as err:
        raise UsageError(f"this cannot be written as JSON: {err}") from err


def convert(value: Any, type_: type[T], *, what: str) -> T:
    """`value` as the record type `type_`; nothing is coerced, unknown members are ignored.

    Raises:
        FormatError: a member is missing or of the wrong type.
    """
    try:
        return msgspec.convert(value, type_)
    except (msgspec.ValidationError, ValueError, OverflowError) as err:
        raise FormatError(f"{what}: {err}") from err


def _scan(plain: bytes, *, what: str, max_values: int, max_depth: int) -> None:
    """Count values and depth outside texts. `plain` has no escaped quotes.

    In bytes that are not JSON the count is wrong only behind the first error, where no parser
    gets to.
    """
    num_values, depth, carry = 1, 0, 0
    for start in range(0, len(plain), _SCAN_NBYTES):
        part = np.frombuffer(plain, np.uint8, min(_SCAN_NBYTES, len(plain) - start), start)
        inside = np.bitwise_xor.accumulate((part == _QUOTE).view(np.uint8)) ^ carry
        carry = int(inside[-1])
        outside = part[inside == 0]
        num_values += int(np.count_nonzero(_STARTS[outside]))
        levels = depth + np.cumsum(_NESTING[outside], dtype=np.int64)
        deepest = int(levels.max(initial=depth))
        depth = int(levels[-1]) if len(levels) else depth
        if num_values > max_values:
            raise LimitExceeded(f"{what}: more than {max_values:,} values")
        if deepest > max_depth:
            raise LimitExceeded(f"{what}: nested more than {max_depth} levels deep")


def _parse(text: bytes, *, what: str) -> Any:
    if text.startswith(b"\xef\xbb\xbf"):
        raise FormatError(f"{what}: starts with a byte-order mark")
    try:
        # A decoder of its own: the C scanner keeps its table of names in the decoder object.
        return json.JSONDecoder(
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_integer if re.search(rb"[0-9]{%d}" % MAX_DIGITS, text) else int,
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
