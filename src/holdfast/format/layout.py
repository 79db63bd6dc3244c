"""Makes and parses the names of all keys in a root (docs/format.md, section 1).

Existing checkpoints have these names, so none may change (tests/golden).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from holdfast.errors import FormatError, LimitExceeded, UsageError
from holdfast.format.codec import CODECS, CodecName
from holdfast.store.base import MAX_SEGMENT_BYTES, proof_of

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
INDEX = "index.json"
REJECTED = "rejected.json"
LATEST = "latest"
LOG = "log"
"""Name of the folder with the metrics of a training."""
RNG = "rng"
"""Name of the component that holds the global random generators."""
WRITERS = "writers"
READERS = "readers"
REQUESTS = "requests"
UPLOADS = "uploads"
HISTORY = "history"
TIERS = "uploads/tiers.json"
FOLDERS = frozenset({WRITERS, READERS, REQUESTS, UPLOADS, HISTORY})
"""Names of the folders in a root that are not attempts."""
BLOCK_NBYTES = 8 * 1024 * 1024
DATA_ALIGNMENT = 4096
MAX_TENSOR_FILE_NBYTES = 4 * 1024**3
MAX_TENSORS_PER_FILE = 50_000
MAX_INDEX_NBYTES = 128 * 1024 * 1024
MAX_TREE_NBYTES = 64 * 1024 * 1024
MAX_LABEL_BYTES = 200
MAX_STORED_FILES = 10_000_000
"""Limit of the numbers in names of encrypted files, which have at most seven digits."""
MAX_BOX_NUMBER = 9999
"""The highest number in the name of a box of keys."""
MAX_PARTS = 9999
"""Most parts of an index."""

_SUFFIXES = frozenset(codec.suffix for codec in CODECS.values())
_SUFFIX = re.compile(r"\.([0-9]{4,10})-([0-9]{6,12})-([0-9a-f]{8})$", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9_=+\-][A-Za-z0-9._=+\-]*", re.ASCII)
_COMPONENT = re.compile(r"[a-z0-9_\-]{1,64}", re.ASCII)
_SCRATCH = re.compile(r"((?:preflight|sending)-[0-9a-f]{16})-([0-9a-f]{8})", re.ASCII)
_THINNED = re.compile(r"thinned-([a-z0-9_\-]{1,64})-([0-9]{8,12})\.json", re.ASCII)
_ANSWER = ".answer"
_STORED = re.compile(r"file-[0-9]{5,7}\.sealed", re.ASCII)
_SEGMENT = re.compile(r"([0-9]{8,12})-([0-9]{6,9})\.json", re.ASCII)
_LEASE = re.compile(r"(.+)\.([0-9a-f]{16})\.json", re.ASCII)
_PART = re.compile(r"index-([0-9]{4})\.json", re.ASCII)
_FILE = re.compile(r"([a-z0-9_\-]{1,64})-([0-9]{5,7})\.(json|safetensors)", re.ASCII)
# A cache, as the checkpoints of a root have files and sidecars of the same few names.
_cached = lru_cache(maxsize=1024)


def _number_in(pattern: str) -> Callable[[str], int | None]:
    """Make a function that parses the number in names of this pattern; None for other names."""
    compiled = re.compile(pattern, re.ASCII)

    @_cached
    def parse(name: str) -> int | None:
        match = compiled.fullmatch(name)
        return int(match[1]) if match else None

    return parse


@dataclass(frozen=True, slots=True, order=True)
class AttemptName:
    """The parsed name of an attempt's folder. Sorts in the order of commits."""

    epoch: int
    sequence: int
    id8: str
    label: str

    def __str__(self) -> str:
        return f"{self.label}.{self.epoch:04d}-{self.sequence:06d}-{self.id8}"

    @property
    def order(self) -> tuple[int, int]:
        """The order of commits: (epoch, sequence)."""
        return (self.epoch, self.sequence)


def first_digits(label: str, epoch: int, sequence: int, nonce: str) -> str:
    """Return the 8 hex digits that prove an attempt to be made under the claim with this nonce."""
    text = f"holdfast attempt {nonce} {label}.{epoch:04d}-{sequence:06d}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def attempt_name(label: str, epoch: int, sequence: int, save_id: str) -> AttemptName:
    """Make the name of a new attempt; checks the label."""
    check_label(label)
    return AttemptName(epoch=epoch, sequence=sequence, id8=save_id[:8], label=label)


def parse_attempt(folder: str) -> AttemptName | None:
    """Parse the name of an attempt's folder; None for any other name."""
    match = _SUFFIX.search(folder)
    if match is None or not _LABEL.fullmatch(folder[: match.start()]):
        return None
    epoch, sequence = int(match[1]), int(match[2])
    label = folder[: match.start()]
    parsed = AttemptName(epoch=epoch, sequence=sequence, id8=match[3], label=label)
    return parsed if str(parsed) == folder else None


def check_label(label: str) -> None:
    """Raise `UsageError` unless `label` is valid in a folder's name."""
    if len(label) > MAX_LABEL_BYTES or not _LABEL.fullmatch(label):
        raise UsageError(
            f"label {label!r}: letters, digits and . _ = + - (not first a dot), "
            f"at most {MAX_LABEL_BYTES}"
        )


def check_component(name: str, *, what: str = "") -> None:
    """Raise `UsageError` unless `name` is valid for a component; the message begins with `what`."""
    if not isinstance(name, str) or not _COMPONENT.fullmatch(name):
        raise UsageError(f"{what}component name {name!r} must match {_COMPONENT.pattern}")


def writer_key(epoch: int) -> str:
    """Return the key of the claim of a writer epoch."""
    return f"{WRITERS}/{epoch:08d}.json"


def closed_key(epoch: int) -> str:
    """Return the key of the record that the writer of an epoch released the run."""
    return f"{WRITERS}/{epoch:08d}.closed.json"


def alive_key(epoch: int) -> str:
    """Return the key of the heartbeat of a writer epoch."""
    return f"{WRITERS}/{epoch:08d}.alive.json"


parse_alive = _number_in(r"([0-9]{8,12})\.alive\.json")
"""Parse the writer epoch of a heartbeat's name in `writers/`; None for any other name."""


parse_closed = _number_in(r"([0-9]{8,12})\.closed\.json")
"""Parse the writer epoch of a release's name in `writers/`; None for any other name."""


parse_writer = _number_in(r"([0-9]{8,12})\.json")
"""Parse the writer epoch of a claim's name in `writers/`; None for any other name."""


def ended_name(epoch: int) -> str:
    """Return the name of a writer epoch's record of aborted and deleted attempts, in the root."""
    return f"ended-{epoch:08d}.json"


parse_ended = _number_in(r"ended-([0-9]{8,12})\.json")
"""Parse the writer epoch of an `ended_name`; None for any other name."""


def lease_key(folder: str, nonce: str) -> str:
    """Return the key of the lease of one reader on the checkpoint in `folder`, from its nonce."""
    return f"{READERS}/{folder}.{nonce[:16]}.json"


def parse_lease(name: str) -> tuple[AttemptName, str] | None:
    """Parse a lease's name: checkpoint, and first 16 digits of the nonce; None for other names."""
    match = _LEASE.fullmatch(name)
    attempt = parse_attempt(match[1]) if match else None
    return (attempt, match[2]) if match and attempt else None


def scratch_folder(number: bytes) -> str:
    """Return the name of preflight's temporary folder in a root, from 8 random bytes."""
    return _scratch(f"preflight-{number.hex()}")


def sending_folder(number: bytes, nonce: str = "") -> str:
    """Return the name of the temporary folder of an upload or a repair, from 8 random bytes.

    With the `nonce` of a claim, whose owner knows it by `is_sent_under`.
    """
    return _scratch(f"sending-{nonce[:8]}{number.hex()[len(nonce[:8]) :]}")


def is_sent_under(name: str, nonce: str) -> bool:
    """Whether a temporary folder has the name of an upload under the claim with this nonce."""
    return name.startswith(f"sending-{nonce[:8]}")


def _scratch(name: str) -> str:
    return f"{name}-{proof_of(name)}"


def is_scratch(name: str) -> bool:
    """Whether a folder in the root is temporary and ours, as the end of its name proves."""
    match = _SCRATCH.fullmatch(name)
    return match is not None and match[2] == proof_of(match[1])


def is_preflight(name: str) -> bool:
    """Whether a folder in the root is a temporary one of preflight, which holds no state."""
    return is_scratch(name) and name.startswith("preflight-")


def request_name(request_id: str) -> str:
    """Return the name inside `requests/` of the request with an id of 32 hex digits."""
    return f"{request_id}.json"


TOUCHED = "now"
"""Name inside `requests/` of the request that a user makes with `touch`."""
_REQUEST = re.compile(r"[0-9a-f]{32}\.json", re.ASCII)


def is_request(name: str) -> bool:
    """Whether a request may have this name inside `requests/`."""
    return name == TOUCHED or _REQUEST.fullmatch(name) is not None


def request_key(name: str) -> str:
    """Return the key of a request, from its name inside `requests/`."""
    return f"{REQUESTS}/{name}"


def answer_key(name: str) -> str | None:
    """Return the key of the answer to the request of that name; None if the name is too long."""
    key = f"{REQUESTS}/{name}{_ANSWER}"
    return key if len(name) + len(_ANSWER) <= MAX_SEGMENT_BYTES else None


def is_answer(name: str) -> bool:
    """Whether a name inside `requests/` may be an answer's; its content proves that."""
    return name.endswith(_ANSWER)


def upload_key(folder: str) -> str:
    """Return the key of the upload record of a checkpoint, in the local root."""
    return f"{UPLOADS}/{folder}.json"


def parse_upload(name: str) -> AttemptName | None:
    """Parse the checkpoint of an upload record's name in `uploads/`; None for any other name."""
    return parse_attempt(name.removesuffix(".json")) if name.endswith(".json") else None


def history_key(epoch: int, number: int) -> str:
    """Return the key of a segment of the history, of a writer epoch; numbers begin with 1."""
    return f"{HISTORY}/{epoch:08d}-{number:06d}.json"


def parse_history(name: str) -> tuple[int, int] | None:
    """Parse the epoch and number of a segment's name in `history/`; None for any other name."""
    match = _SEGMENT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def notes_name(number: int) -> str:
    """Return the name of the n-th notes sidecar, from 1."""
    return f"notes-{number:04d}.json"


def retired_name(epoch: int) -> str:
    """Return the name of the mark by which a writer epoch begins a deletion."""
    return f"retired-{epoch:08d}.json"


parse_retired = _number_in(r"retired-([0-9]{8,12})\.json")
"""Parse the writer epoch of a mark that begins a deletion; None for any other name."""


def thinned_name(component: str, epoch: int) -> str:
    """Return the name of the mark by which a writer epoch begins to drop a component."""
    return f"thinned-{component}-{epoch:08d}.json"


@_cached
def parse_thinned(name: str) -> tuple[str, int] | None:
    """Parse component and epoch of a mark of a drop, of 8 digits or more; None for other names."""
    match = _THINNED.fullmatch(name)
    return (match[1], int(match[2])) if match else None


parse_notes = _number_in(r"notes-([0-9]{4})\.json")
"""Parse the number of a notes sidecar; None for any other name."""


def keys_name(number: int) -> str:
    """Return the name of the n-th box of keys of an encrypted checkpoint, from 1."""
    return f"keys-{number:04d}.json"


parse_keys = _number_in(r"keys-([0-9]{4})\.json")
"""Parse the number of a box of keys; None for any other name."""


def part_name(number: int) -> str:
    """Return the name of the n-th part of an index, from 1."""
    return f"index-{number:04d}.json"


def parse_part(name: str) -> int | None:
    """Parse the number of a part of an index; None for any other name."""
    # Not cached: called before the name is checked, which may be of any length.
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


def is_index_name(name: str) -> bool:
    """Whether a name is that of the index or a part of it."""
    return name == INDEX or parse_part(name) is not None


def stored_name(number: int) -> str:
    """Return the name under which the n-th file of an encrypted checkpoint is stored, from 0."""
    if number >= MAX_STORED_FILES:
        raise LimitExceeded(f"file {number:,}: too many for an encrypted checkpoint")
    return f"file-{number:05d}.sealed"


def is_stored_name(name: str) -> bool:
    """Whether a name is that of a file of an encrypted checkpoint."""
    return _STORED.fullmatch(name) is not None


def is_sidecar(name: str) -> bool:
    """Whether a name in a checkpoint's folder is that of a sidecar: notes or a mark."""
    numbers = (parse_notes(name), parse_retired(name), parse_thinned(name))
    return name == REJECTED or any(number is not None for number in numbers)


def tree_file(component: str) -> str:
    """Return the name of a component's typed tree."""
    return f"{component}-00000.json"


def tensor_file(component: str, number: int) -> str:
    """Return the name of a component's n-th tensor file, from 0."""
    return f"{component}-{number:05d}.safetensors"


def number_of_file(name: str) -> int:
    """Return the number of a component's tensor file from its plain name."""
    return int(name.rpartition("-")[2].partition(".")[0])


def component_of(name: str) -> str:
    """Return the component that a file of that name belongs to."""
    return name.rpartition("-")[0]


def stored_file(name: str, codec: CodecName) -> str:
    """Add a codec's suffix to a file's plain name: the name of its compressed form."""
    return name + CODECS[codec].suffix


def is_listed_name(name: str) -> bool:
    """Whether a name in a checkpoint's folder is the plain name of a data file."""
    return is_index_name(name) or _FILE.fullmatch(name) is not None


def plain_file(name: str) -> str:
    """Return the name of a component's file without the suffix of a codec."""
    # Not cached: called before the name is checked, which may be of any length.
    plain, dot, suffix = name.rpartition(".")
    return plain if dot + suffix in _SUFFIXES else name


def is_data_name(name: str) -> bool:
    """Whether a name is that of a data file: the index, a listed file, or its encrypted form."""
    plain = plain_file(name)
    return is_index_name(name) or is_stored_name(name) or _FILE.fullmatch(plain) is not None


def is_document(name: str) -> bool:
    """Whether a file that a manifest lists is an index or a component's tree."""
    return plain_file(name).endswith(".json")


@_cached
def check_file_name(name: str) -> None:
    """Raise `FormatError` unless a manifest may list a file called `name`."""
    plain = plain_file(name)
    if not is_index_name(name) and _FILE.fullmatch(plain) is None:
        raise FormatError(f"a manifest may not list a file named {name[:80]!r}")
