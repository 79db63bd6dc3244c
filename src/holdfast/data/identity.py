"""Identity of a dataset, as far as it is known without reading it, to detect changes at a resume.

Reads attributes by name; imports none of the packages, reads no sample and no file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.arguments import shown
from holdfast.errors import UsageError

_PLACES = ("root", "path", "data_dir", "filename")
_LISTS = ("paths", "files", "filenames", "urls", "shards")


def describe_dataset(dataset: Any) -> str:
    """Describe a dataset: its type, and the fingerprint or the names of files that it has.

    Of a path only the last part counts, as the folders before it differ between machines.

    >>> from torch.utils.data import Subset
    >>> describe_dataset(Subset(range(10), [1, 2]))
    'Subset(range)'
    """
    known = getattr(dataset, "__dict__", {})
    parts = []
    # datasets: a hash of the data and of all that was done to it.
    if isinstance(known.get("_fingerprint"), str):
        parts.append(known["_fingerprint"])
    parts += [f"{name}={_last(known[name])}" for name in _PLACES if _is_path(known.get(name))]
    parts += [
        f"{name}={_digest_paths(known[name])}" for name in _LISTS if _are_paths(known.get(name))
    ]
    inner = [known["dataset"]] if "dataset" in known else known.get("datasets", [])
    if isinstance(inner, list | tuple):
        parts += [describe_dataset(each) for each in inner]
    name = type(dataset).__qualname__
    return f"{name}({', '.join(parts)})" if parts else name


def changes(stored: Mapping[str, Any], data: str, fingerprint: str | None) -> list[str]:
    """Describe how the data differs from that of a stored position."""
    before = stored.get("fingerprint")
    if before is not None and fingerprint is not None and before != fingerprint:
        raise UsageError(
            f"the position belongs to the data with fingerprint={shown(before)}, not "
            f"{shown(fingerprint)}: load that data, or start a new run (to continue with other "
            "data anyway, omit the argument fingerprint)"
        )
    notes = []
    if before is not None and fingerprint is None:
        notes.append(f"the data had the fingerprint {shown(before)}, and none is given now")
    if stored.get("data", data) != data:
        notes.append(f"the data was {stored['data']} and is {data} now")
    return notes


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))


def _are_paths(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_path, value))


def _last(path: Any) -> str:
    return os.path.basename(str(os.fspath(path)).rstrip("/\\")) or "/"


def _digest_paths(paths: Sequence[Any]) -> str:
    text = "\0".join(map(_last, paths))
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
