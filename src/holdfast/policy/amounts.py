"""Parsing of numbers and sizes in texts such as `last:3` and `budget:500GB`."""

from __future__ import annotations

import re

from holdfast.errors import UsageError

_SIZES = {
    **dict.fromkeys(("", "B"), 1),
    **{unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB"), start=1)},
    **{unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)},
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)


def whole_number(text: str) -> int:
    """Parse a whole number.

    Raises:
        UsageError: `text` is not one.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise UsageError(f"{text!r}: expected a whole number, as in 'last:3'")
    return int(text)


def number_of_bytes(text: str, *, what: str = "") -> int:
    """Parse a size such as `500GB` or `1.5TiB` into bytes; an error begins with `what`.

    Raises:
        UsageError: `text` is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _SIZES:
        raise UsageError(f"{what}{text!r}: expected a size such as 500GB or 1.5TiB")
    return int(float(match[1]) * _SIZES[match[2]])
