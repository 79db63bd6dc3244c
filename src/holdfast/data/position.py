"""The stored position of a `Loader`: checks of its members, comparison with settings and data.

Old positions have neither `version`, `data` nor `fingerprint`, and an `order` only where it is not
torch's. Seed and numbers of an old position mean other samples here, so it is refused in an epoch.
A dataset is described without reading it: attributes by name, no sample, no file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.arguments import shown
from holdfast.errors import UsageError

SETTINGS = ("num_samples", "batch_size", "shuffle", "drop_last")
VERSION = "version"
"""Of the rule by which orders and random numbers follow from a seed."""
PRESENT_VERSION = 2
"""1, which is not stored: 32 bits of a seed were used, and computed shuffles were even."""
PER_EPOCH = "batches_per_epoch"
"""Stored only if the option is given."""
ORDER = "order"
"""Stored only of a computed shuffle, as `COMPUTED`, and of samplers, as the digest of a lap."""
COMPUTED = "computed"
NUM_BATCHES = "num_batches"
"""Batches of the present lap; stored only of samplers."""
STEPS = "steps"
"""Batches that were taken in all epochs; stored only if the loop uses `steps()`."""
_TEXTS = ("data", "fingerprint", ORDER)


def check_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Check types and ranges of the members of a stored position."""
    is_of_batches = NUM_BATCHES in state and state.get("batch_size") == 0
    least = {"epoch": 0, "batch": 0, "seed": 0, "num_samples": 1}
    least["batch_size"] = 0 if is_of_batches else 1
    least |= {name: 1 for name in (VERSION, PER_EPOCH, NUM_BATCHES) if name in state}
    least |= {STEPS: 0} if STEPS in state else {}
    if {*state} - {*_TEXTS} != {*least, *SETTINGS}:
        raise UsageError(f"not the position of a Loader: it has {sorted(state)}")
    for name, at_least in least.items():
        value = state[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise UsageError(
                f"stored {name}={value!r}: must be a whole number, {at_least} or above"
            )
    for name in ("shuffle", "drop_last"):
        if not isinstance(state[name], bool):
            raise UsageError(f"stored {name}={state[name]!r}: must be true or false")
    for name in _TEXTS:
        if not isinstance(state.get(name, ""), str):
            raise UsageError(f"stored {name}={shown(state[name])}: must be text")
    length = epoch_length(state)
    if not 0 < length >= state["batch"]:
        raise UsageError(f"stored batch={state['batch']}: its epoch has {length} batches")
    return {VERSION: 1, **state}


def num_batches(num_samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of batches of a lap."""
    return num_samples // batch_size if drop_last else -(-num_samples // batch_size)


def epoch_length(stored: Mapping[str, Any]) -> int:
    """Return the number of batches of the stored epoch; zero if a lap has none."""
    if NUM_BATCHES in stored:
        in_lap = int(stored[NUM_BATCHES])
    else:
        in_lap = num_batches(stored["num_samples"], stored["batch_size"], stored["drop_last"])
    return int(stored.get(PER_EPOCH, in_lap)) if in_lap else 0


def differing_settings(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """List the members that differ from a loader's settings, except how a shuffle is drawn."""
    names = (VERSION, *SETTINGS, PER_EPOCH, NUM_BATCHES)
    found = [name for name in names if stored.get(name) != settings.get(name)]
    orders = [of.get(ORDER) for of in (stored, settings)]
    if len({None if order == COMPUTED else order for order in orders}) > 1:
        found.append(ORDER)
    return found


def changes_of_version(stored: Mapping[str, Any]) -> list[str]:
    """Describe how coming epochs differ from those of the stored position's version."""
    version = stored[VERSION]
    if version == PRESENT_VERSION:
        return []
    return [
        f"its version is {version}, and this Holdfast uses {PRESENT_VERSION}: later epochs have "
        "different orders and random numbers from those in the version of Holdfast that saved it"
    ]


def advice_for_version(stored: Mapping[str, Any]) -> str:
    """Return what to do about a position of another version, as the end of an error."""
    if stored[VERSION] == PRESENT_VERSION:
        return ""
    return "\nEnd the epoch with the version of Holdfast that saved the position"


def changes_of_data(
    stored: Mapping[str, Any], num_samples: int, data: str, fingerprint: str | None
) -> list[str]:
    """Describe what has changed in the dataset since the position was stored."""
    notes = [*changes_of_version(stored), *changes_of_identity(stored, data, fingerprint)]
    if stored["num_samples"] != num_samples:
        notes.append(f"the dataset had {stored['num_samples']} samples and has {num_samples} now")
    return notes


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


def changes_of_identity(stored: Mapping[str, Any], data: str, fingerprint: str | None) -> list[str]:
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
