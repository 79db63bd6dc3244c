"""Manifest of a checkpoint, or the abort marker or tombstone in its place (docs/format.md, 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta
from typing_extensions import override

from holdfast.errors import FormatError, HoldfastError, MissingKey, UsageError
from holdfast.format import layout, strictjson
from holdfast.format.codec import CodecName
from holdfast.format.layout import MAX_INDEX_NBYTES, MAX_TREE_NBYTES, RNG
from holdfast.store.base import Buffer

T = TypeVar("T")

MAX_MANIFEST_NBYTES = 16 * 1024 * 1024
MAX_STORED_BLOCK_NBYTES = 64 * 1024 * 1024
"""Limit of the plain size of a compressed block, which is decompressed as a whole."""

_REGISTER_KINDS = ("checkpoint", "aborted", "deleted", strictjson.SEALED)
MAX_COUNT = 2**63 - 1
"""Largest counter; a manifest with a larger one cannot be read."""
Natural = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0)]
Hex128 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Hex64 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Mode = Literal["min", "max"]
Digest = Annotated[str, Meta(pattern=r"\Ablake3:[0-9a-f]{64}\Z")]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Reference to one checkpoint: its order, its save id (32 hex) and its folder."""

    epoch: Positive
    sequence: Positive
    save_id: Hex128
    folder: str

    @property
    def order(self) -> tuple[int, int]:
        """The order of commits: (epoch, sequence)."""
        return (self.epoch, self.sequence)


class Timestamp(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of training: totals over all resumes, and counts within the current epoch and cycle.

    Fields that the loop does not count are None.
    """

    step: Natural
    """Completed optimizer windows."""
    epoch: Natural | None = None
    """Epochs that have ended."""
    samples: Natural | None = None
    tokens: Natural | None = None
    wall_s: float = 0.0
    """Seconds of training."""
    step_in_epoch: Natural | None = None
    samples_in_epoch: Natural | None = None
    tokens_in_epoch: Natural | None = None
    epoch_wall_s: Seconds | None = None
    """Seconds of training in the current epoch."""
    step_wall_s: Seconds | None = None
    """Seconds that the newest step took."""
    cycle: Natural | None = None
    """Cycles that have ended: rounds of training that the loop defines."""
    step_in_cycle: Natural | None = None


_COUNTERS = Timestamp.__struct_fields__
_OPTIONAL_COUNTERS = _COUNTERS[_COUNTERS.index("wall_s") + 1 :]
_OPTIONAL_MEMBERS = (
    *("writer", "savers", "left_out", "unhealthy", "sharded"),
    *("best", "config", "changes", "policy", "hosts"),
)


def needed_of(left_out: Sequence[str]) -> tuple[str, ...]:
    """List the components of `left_out` that a resume needs: all but the random generators."""
    return tuple(name for name in left_out if name != RNG)


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Stored form of a compressed file: codec, length and digest as stored."""

    codec: CodecName
    nbytes: Natural
    digest: Digest


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Length in bytes and digest ("blake3:…") of one file, before compression."""

    nbytes: Natural
    digest: Digest
    stored: StoredEntry | None = None
    """Its compressed form; None: not compressed."""

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the file as stored."""
        return self.nbytes if self.stored is None else self.stored.nbytes


class FrozenEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a component that a checkpoint records by digest: their number and bytes."""

    num_tensors: Positive
    nbytes: Natural


class ComponentEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entry of a component: its kind, its files with the tree first, bytes, number of tensors."""

    kind: str
    files: tuple[str, ...]
    nbytes: Natural
    num_tensors: Natural
    frozen: FrozenEntry | None = None
    """Its parameters that are recorded by digest, and not in the files; None: there are none."""


class WatchedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """A metric by which retention keeps the best checkpoints, and whether low values are good."""

    metric: str
    mode: Mode


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Differences of a session, which began at `step`, from the one before."""

    epoch: Positive
    """Claim of that session."""
    step: Natural
    what: tuple[str, ...]
    """A text for each setting: name, old and new value."""


class RunPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rules and intervals of the process that saved a checkpoint, as texts, for forecasts."""

    keep: str
    """Retention rule of the root, in two tiers of the local one; empty: not to be had as text."""
    keep_remote: str | None = None
    """The rule of the remote tier; None: there is none."""
    replaces: bool = False
    """Whether a checkpoint replaces older ones of its step."""
    every: Mapping[str, Mapping[str, str]] = {}
    """Saver → `permanent`, `ephemeral` and `cooldown` with their intervals; those without text are
    left out."""
    parts: Mapping[str, tuple[str, ...]] = {}
    """Saver → the components that it saves, of those that do not save all."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename={"save_class": "class"}):
    """A committed checkpoint. Fields as in docs/format.md; `created` is for people and calendar
    rules.
    """

    save_id: Hex128
    label: str
    epoch: Positive
    sequence: Positive
    parent: Reference | None
    timestamp: Timestamp
    created: str
    save_class: Literal["permanent", "ephemeral"]
    reason: str
    tags: tuple[str, ...]
    metrics: Mapping[str, float]
    world_size: Positive
    components: Mapping[str, ComponentEntry]
    block_nbytes: Annotated[int, Meta(ge=4096, le=2**30)]
    files: Mapping[str, FileEntry]
    numerics: Mapping[str, Any]
    environment: Mapping[str, Any]
    timings: Mapping[str, float]
    writer: Hex128 | None = None
    """Nonce of the claim under which it was saved; None: not recorded."""
    savers: tuple[str, ...] = ()
    """Savers that requested the save; empty: the run has only one."""
    left_out: tuple[str, ...] = ()
    """Components of the state that were not saved; see `lacks`."""
    unhealthy: tuple[str, ...] = ()
    """Reasons not to resume from the state; empty: nothing wrong is known."""
    sharded: bool = False
    """Whether a tensor is stored as several boxes, or a component has a state for each rank."""
    best: tuple[WatchedMetric, ...] = ()
    """Metrics of the run's rules `Best`; the first is the one that `best` alone means."""
    config: Mapping[str, str] = {}
    """Settings of the script, by name, as text."""
    changes: tuple[Change, ...] = ()
    """Changes at the resumes up to this checkpoint, oldest first; those before may be left out."""
    policy: RunPolicy | None = None
    """Rules and intervals of the process that saved it; None: not recorded."""
    hosts: Mapping[str, tuple[str, ...]] = {}
    """Host → the files that its ranks wrote to its own disk; empty: all are in one place."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """Components that were left out and that a resume needs."""
        return needed_of(self.left_out)

    @property
    def nbytes(self) -> int:
        """Bytes of all files as stored, without the manifest itself."""
        if isinstance(self.files, LazyTable):
            return self.files.stored_nbytes
        return sum(entry.stored_nbytes for entry in self.files.values())

    @property
    def plain_nbytes(self) -> int:
        """Bytes of all files before compression."""
        return sum(entry.nbytes for entry in self.files.values())

    @property
    def order(self) -> tuple[int, int]:
        """The order of commits: (epoch, sequence)."""
        return (self.epoch, self.sequence)

    def make_reference(self, folder: str) -> Reference:
        """Make a reference to this checkpoint, which is in `folder`."""
        return Reference(
            epoch=self.epoch, sequence=self.sequence, save_id=self.save_id, folder=folder
        )


class LazyTable(Mapping[str, T]):
    """Table of a manifest that is decoded when it is first read. Any thread may read it."""

    def __init__(self, raw: msgspec.Raw, row: Any, stored_nbytes: int) -> None:
        self._rows: msgspec.Raw | dict[str, T] = raw
        self._type: Any = dict[str, row]
        self.stored_nbytes = stored_nbytes
        """Stored bytes of all files in it."""

    def _read(self) -> dict[str, T]:
        rows = self._rows
        if isinstance(rows, msgspec.Raw):
            with strictjson.describe_once(self._type):
                rows = self._rows = msgspec.json.decode(rows, type=self._type)
        return rows

    @override
    def __getitem__(self, key: str) -> T:
        return self._read()[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    @override
    def __len__(self) -> int:
        return len(self._read())


class Aborted(strictjson.Record, frozen=True, kw_only=True):
    """Abort marker: the register of an attempt that gc closed; it never becomes a checkpoint."""

    kind: ClassVar[str] = "aborted"
    by: str
    reason: str


class Deleted(strictjson.Record, frozen=True, kw_only=True):
    """Tombstone: the register of a checkpoint that retention has deleted."""

    kind: ClassVar[str] = "deleted"
    save_id: Hex128
    by: str
    reason: str


_TABLES: dict[str, Any] = {
    "components": ComponentEntry,
    "files": FileEntry,
    "hosts": tuple[str, ...],
}


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest."""
    is_stored = any(entry.stored is not None for entry in manifest.files.values())
    is_frozen = any(entry.frozen is not None for entry in manifest.components.values())
    needs = {
        strictjson.CODEC: is_stored,
        strictjson.SHARDS: manifest.sharded,
        strictjson.FROZEN: is_frozen,
        strictjson.PARTS: layout.part_name(1) in manifest.files,
    }
    requires = [name for name, is_needed in needs.items() if is_needed]
    members = {"requires": requires, **msgspec.to_builtins(manifest, enc_hook=dict)}
    members["metrics"] = encode_metrics(manifest.metrics)
    members["timestamp"] = {
        name: value
        for name, value in members["timestamp"].items()
        if value is not None or name not in _OPTIONAL_COUNTERS
    }
    for name in _OPTIONAL_MEMBERS:
        if not members[name]:
            del members[name]
    return strictjson.encode_checked("checkpoint", members, max_nbytes=MAX_MANIFEST_NBYTES)


def manifest_digest(manifest: Manifest) -> str:
    """Return the digest of a manifest before encryption, "blake3:…", from its last line."""
    return strictjson.digest_of(encode_manifest(manifest), what="manifest")


def decode_committed(data: Buffer, *, what: str, digest: str, nbytes: int) -> Manifest | None:
    """Decode the manifest with this digest, without its tables; None if `data` has another.

    The manifest of 16,384 ranks lists 83,000 files, which no follower needs. Only the digest is
    checked, which the leader announces with `nbytes`, the stored bytes of all files.
    """
    if strictjson.digest_of(data, what=what) != digest:
        return None
    members: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    rows = {name: row for name, row in _TABLES.items() if name in members}
    tables: dict[str, Any] = {n: LazyTable(members.pop(n), rows[n], nbytes) for n in rows}
    members = {name: msgspec.json.decode(raw) for name, raw in members.items()}
    decode_metrics(members)
    members |= {"components": {}, "files": {}}
    return msgspec.structs.replace(strictjson.convert(members, Manifest, what=what), **tables)


def decode_register(data: Buffer, *, what: str) -> Manifest | Aborted | Deleted:
    """Decode the register of an attempt.

    Raises:
        CorruptData: the digest does not fit.
        MissingKey: the manifest is encrypted.
        UnsupportedVersion: written by a newer Holdfast.
        FormatError: anything else that the format does not allow.
    """
    members = strictjson.decode_checked(
        data, what=what, kinds=_REGISTER_KINDS, max_nbytes=MAX_MANIFEST_NBYTES
    )
    if members["kind"] == strictjson.SEALED:
        raise MissingKey(
            f"{what}: this checkpoint is encrypted, and no key was given (`encrypt=` in Python, or "
            "an option such as `holdfast --key-file`)"
        )
    if members["kind"] == "aborted":
        return strictjson.convert(members, Aborted, what=what)
    if members["kind"] == "deleted":
        return strictjson.convert(members, Deleted, what=what)
    decode_metrics(members)
    manifest = strictjson.convert(members, Manifest, what=what)
    _check_manifest(manifest, what=what)
    return manifest


def check_reference(reference: Reference | None, *, what: str) -> None:
    """Raise `FormatError` unless a reference's folder name agrees with its other members."""
    if reference is None:
        return
    name = layout.parse_attempt(reference.folder)
    if name is None or (name.order, name.id8) != (reference.order, reference.save_id[:8]):
        raise FormatError(f"{what}: the reference to {reference.folder[:80]!r} contradicts itself")


def check_block_nbytes(block_nbytes: int, *, what: str) -> None:
    """Raise `FormatError` unless `block_nbytes` is a power of two from 4 KiB to 1 GiB."""
    if not 4096 <= block_nbytes <= 2**30 or block_nbytes & (block_nbytes - 1):
        raise FormatError(f"{what}: blocks of {str(block_nbytes)[:20]} bytes are not allowed")


def _check_manifest(manifest: Manifest, *, what: str) -> None:
    check_reference(manifest.parent, what=what)
    if manifest.parent is not None and manifest.parent.order >= manifest.order:
        raise FormatError(f"{what}: its parent was committed after it")
    check_block_nbytes(manifest.block_nbytes, what=what)
    _check_names(manifest, what=what)
    if odd := sorted(set(manifest.left_out) & set(manifest.components)):
        raise FormatError(f"{what}: component {odd[0]!r} is listed both as saved and as left out")
    for name, component in manifest.components.items():
        expected = [layout.tree_file(name)]
        numbers = range(len(component.files) - 1)
        expected += [layout.tensor_file(name, number) for number in numbers]
        if [*map(layout.plain_file, component.files)] != expected:
            raise FormatError(f"{what}: component {name!r} lists files that are not its own")
    of_components = {name for entry in manifest.components.values() for name in entry.files}
    num_parts = sum(layout.parse_part(name) is not None for name in manifest.files)
    of_index = {layout.INDEX, *map(layout.part_name, range(1, num_parts + 1))}
    _check_files(manifest, of_components | of_index, what=what)


def _check_names(manifest: Manifest, *, what: str) -> None:
    try:
        layout.check_label(manifest.label)
        for component in (*manifest.components, *manifest.left_out, *manifest.savers):
            layout.check_component(component)
        for name in manifest.files:
            layout.check_file_name(name)
    except HoldfastError as err:
        raise FormatError(f"{what}: {str(err)[:300]}") from err


def _check_files(manifest: Manifest, expected: set[str], *, what: str) -> None:
    if odd := sorted(expected ^ {*manifest.files, *chain(*manifest.hosts.values())}):
        raise FormatError(
            f"{what}: `files`, `components` and `hosts` do not list the same files ({odd[0][:80]})"
        )
    for name, entry in manifest.files.items():
        plain, stored = layout.plain_file(name), entry.stored
        if name != (plain if stored is None else layout.stored_file(plain, stored.codec)):
            raise FormatError(f"{what}: {name} is not the name of a file stored in this form")
        if stored is not None and manifest.block_nbytes > MAX_STORED_BLOCK_NBYTES:
            raise FormatError(f"{what}: {name} has blocks that are too long to be decoded")
        most = MAX_INDEX_NBYTES if layout.is_index_name(plain) else MAX_TREE_NBYTES
        if plain.endswith(".json") and entry.nbytes > most:
            raise FormatError(f"{what}: {name} would have {entry.nbytes:,} bytes")


def encode_metrics(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Encode metrics as members of a document, in which `$float` nodes are not finite."""
    return {name: _to_node(name, value) for name, value in metrics.items()}


def decode_metrics(members: dict[str, Any]) -> None:
    """Convert the `$float` nodes in the metrics of a document to floats, in place."""
    metrics = members.get("metrics")
    if isinstance(metrics, dict):
        members["metrics"] = {name: _from_node(value) for name, value in metrics.items()}


def _to_node(name: str, value: float) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as err:
        raise UsageError(f"metric {name!r} is not a number: {value!r}") from err
    return number if math.isfinite(number) else {"$float": str(number)}


def _from_node(value: Any) -> Any:
    """Convert a `$float` node to a float; return any other value as it is, to be checked later."""
    match value:
        case {"$float": ("nan" | "inf" | "-inf") as text, **rest} if not rest:
            return float(text)
        case _:
            return value
