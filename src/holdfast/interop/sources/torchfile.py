"""Reads files of `torch.save`: zip files, the older format, and pickles that hold tensors.

Storages stay in the file, and their bytes are read where they lie. Nothing in the file is run.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.boxes import gather_strided, is_row_major
from holdfast.interop.files import LocalFile, ReadableFile, first_bytes
from holdfast.interop.layouts import ComponentLayout, file_layout
from holdfast.interop.pickles.machine import Machine
from holdfast.interop.pickles.names import CONSTANTS, CONSTRUCTORS, SETTERS, checked_device
from holdfast.interop.pickles.parts import (
    Converted,
    NothingKept,
    TensorLocation,
    check_claims,
    convert,
)
from holdfast.interop.pickles.values import PickleBudget, Refusal, Span, Storage, StorageKind
from holdfast.interop.source import Source, SourceComponent
from holdfast.interop.sources.zips import Member, MemberCrc, Zip

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".distcp", ".metadata")

Layouts: TypeAlias = Callable[[Any], ComponentLayout]


def recognises(path: Path) -> bool:
    """Whether a file begins as one of `torch.save` or a pickle does."""
    first = first_bytes(path, len(_LEGACY))
    if not first:
        return False
    with LocalFile.open_regular(path) as file:
        return begins(first, file, path.suffix)


def begins(first: bytes, file: ReadableFile, suffix: str) -> bool:
    """Whether a file of that suffix, with these first bytes, is of `torch.save` or a pickle."""
    if first.startswith(_ZIP):
        return suffix not in (".npz", ".zip", ".keras") or _has_pickle(file)
    is_pickle = first[:1] == b"\x80" and len(first) > 1 and 2 <= first[1] <= 5
    return is_pickle or (suffix in SUFFIXES and first[:1] in b"(c]}" and len(first) > 1)


def _has_pickle(file: ReadableFile) -> bool:
    try:
        return any(name.endswith("data.pkl") for name in Zip(file).members)
    except FormatError:
        return False


def read_pickle(
    file: ReadableFile, *, budget: PickleBudget | None = None, records: Collection[str] = ()
) -> Any:
    """Return the description of a file's pickle; classes in `records` become descriptions, too."""
    return _Reader(file, budget or PickleBudget(), records).bare(0, file.nbytes)


def read_saved(file: ReadableFile, budget: PickleBudget) -> Any:
    """Return the description of what a file of `torch.save` holds, or another pickle."""
    return _Reader(file, budget).root()


class ConvertedSource(Source):
    """A source whose components are made of descriptions of pickled values."""

    _keeps_empty = True
    """Whether a component stays of which everything is left out."""

    def _convert(self, found: ComponentLayout) -> None:
        """Set the components to those that a layout has."""
        self.format, self.step = found.format, found.step
        self._converted: dict[str, Converted] = {}
        left_out = [*found.left_out]
        problem = FormatError(f"{self.url}: holds nothing that can be read")
        for name, one in found.components.items():
            try:
                made = convert(name, one, kind=found.kinds.get(name), where=found.paths.get(name))
            except LimitExceeded as err:
                raise LimitExceeded(f"{self.url}: {err}") from err
            except NothingKept as err:
                problem = FormatError(f"{self.url}: none of it can be carried over: {err}")
                problem.__cause__ = err
                left_out += err.left_out
                continue
            if made.part.tree or not made.left_out or self._keeps_empty:
                self._converted[name] = made
            left_out += made.left_out
        if not self._converted and not found.may_be_empty:
            raise problem
        self.parts: Mapping[str, SourceComponent] = {
            name: one.part for name, one in self._converted.items()
        }
        self.left_out = left_out

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        one = self._converted[component]
        spec = one.part.specs[key]
        if start + memory.nbytes > spec.nbytes:
            raise CorruptData(f"{self.url}: {key!r} has no byte {start + memory.nbytes:,}")
        if memory.nbytes:
            self._read_place(spec, one.places[key], start, memory.cast("B"))

    @abstractmethod
    def _read_place(
        self, spec: TensorSpec, place: TensorLocation, start: int, memory: memoryview
    ) -> None:
        """Fill `memory` with a tensor's bytes from `start` on, all of which it has."""


def gather_place(
    file: ReadableFile | None,
    spec: TensorSpec,
    place: TensorLocation,
    start: int,
    memory: memoryview,
) -> None:
    """Fill `memory` with bytes of a tensor, which lie in a file or were in the pickle."""
    data = place.data

    def read(at: int, into: memoryview) -> None:
        if isinstance(data, Span):
            assert file is not None
            file.read_into(data.start + at, into)
        else:
            into[:] = data[at : at + into.nbytes]

    gather_strided(
        read,
        spec.shape,
        place.strides,
        offset=place.offset,
        item_nbytes=ITEM_NBYTES[spec.dtype],
        start=start,
        memory=memory,
    )


class TorchFile(ConvertedSource):
    """A file of `torch.save`, or another pickle, as components; `layout` says which."""

    format = "torch"

    def __init__(
        self, path: Path | str, *, layout: Layouts = file_layout, file: ReadableFile | None = None
    ) -> None:
        """Read everything except tensors. With an open `file`, the path is only for messages."""
        self.url = str(path)
        self._file = file or LocalFile.open_regular(Path(path))
        with self.closing_on_error():
            self._read_layout(layout)

    def _read_layout(self, layout: Layouts) -> None:
        reader = _Reader(self._file, PickleBudget())
        root = reader.root()
        self._crcs = reader.crcs
        try:
            found = layout(root)
        except FormatError as err:
            raise FormatError(f"{self.url}: {err}") from err
        self._convert(found)
        check_claims(self._converted, file_nbytes=self._file.nbytes, what=self.url)

    @override
    def _read_place(
        self, spec: TensorSpec, place: TensorLocation, start: int, memory: memoryview
    ) -> None:
        gather_place(self._file, spec, place, start, memory)
        crc = self._crcs.get(place.data.start) if isinstance(place.data, Span) else None
        if crc is not None and is_row_major(spec.shape, place.strides):
            crc.add_bytes(place.offset * ITEM_NBYTES[spec.dtype] + start, memory)

    @override
    def close(self) -> None:
        self._file.close()


class _Reader:
    """Reads the pickles of one file, and finds the storages that they name."""

    def __init__(
        self, file: ReadableFile, budget: PickleBudget, records: Collection[str] = ()
    ) -> None:
        self._file = file
        self._budget = budget
        self._records = records
        self._constructors = {
            **CONSTRUCTORS,
            "torch.storage._load_from_bytes": self._load_from_bytes,
        }
        self._level = 0
        self.crcs: dict[int, MemberCrc] = {}
        """First byte of a storage in a zip file → the CRC of its member."""

    def root(self) -> Any:
        """Return the description of what was saved."""
        first = self._file.read(0, min(self._file.nbytes, len(_LEGACY)))
        if first.startswith(_ZIP):
            return self.zipped(Zip(self._file))
        if first == _LEGACY:
            return self.legacy(0, self._file.nbytes)
        return self.bare(0, self._file.nbytes)

    def _machine(
        self, stream: io.BufferedIOBase, persistent: Callable[[Any], Any] | None
    ) -> Machine:
        return Machine(
            stream,
            what=self._file.name,
            budget=self._budget,
            constructors=self._constructors,
            constants=CONSTANTS,
            setters=SETTERS,
            records=self._records,
            persistent=persistent,
        )

    def bare(self, start: int, stop: int) -> Any:
        """Read a pickle alone."""
        return self._machine(self._file.stream(start, stop), None).read_pickle()

    def legacy(self, start: int, stop: int, data: bytes | None = None) -> Any:
        """Read the format before torch 1.6: five pickles, and then the storages."""
        stream = (
            self._file.stream(start, stop) if data is None else io.BufferedReader(io.BytesIO(data))
        )
        storages = _Storages()
        machine = self._machine(stream, storages.find_legacy)
        what = self._file.name
        if machine.read_pickle() != _MAGIC or machine.read_pickle() != _PROTOCOL:
            raise FormatError(f"{what}: written by an unknown version of torch.save")
        system = machine.read_pickle()
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise FormatError(f"{what}: written by a big-endian machine")
        root = machine.read_pickle()
        storages.place_legacy(machine.read_pickle(), stream, stop, data, what)
        return root

    def zipped(self, archive: Zip) -> Any:
        """Read the zip file of torch 1.6 and newer: a pickle, and a member for each storage."""
        what, members = self._file.name, archive.members
        found = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
        found = [name for name in found if name.count("/") <= 1]
        if len(found) != 1:
            raise FormatError(f"{what}: a zip file, but not one that torch.save wrote")
        prefix = found[0].removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in members:
            raise FormatError(
                f"{what}: a TorchScript archive, which is a program; load it with "
                "torch.jit.load and save its state_dict()"
            )
        order = members.get(f"{prefix}byteorder")
        if order is not None:
            named = self._file.read(archive.find_data_start(order), min(order.nbytes, 20))
            if named != b"little":
                raise FormatError(f"{what}: its byte order is {named!r}, not little")
        member = members[found[0]]
        start = archive.find_data_start(member)
        crc = self._crc(member)
        for at in range(0, member.nbytes, 1 << 20):
            data = self._file.read(start + at, min(1 << 20, member.nbytes - at))
            crc.add_bytes(at, memoryview(data))
        storages = _Storages()

        def load_storage(name: Any) -> Storage | Refusal:
            storage = storages.find(name)
            if type(storage) is Storage and storage.data is None:
                self._place_member(storage, archive, f"{prefix}data/", str(name[2]))
            return storage

        stream = self._file.stream(start, start + member.nbytes)
        return self._machine(stream, load_storage).read_pickle()

    def _place_member(self, storage: Storage, archive: Zip, folder: str, key: str) -> None:
        member = archive.members.get(folder + key)
        if member is None:
            raise CorruptData(f"storage {key[:40]!r} is missing")
        if member.nbytes != storage.nbytes:
            raise CorruptData(
                f"storage {key[:40]!r} has {member.nbytes:,} bytes, not {storage.nbytes:,}"
            )
        start = archive.find_data_start(member)
        storage.data = Span(start, member.nbytes)
        self.crcs[start] = self._crc(member)

    def _crc(self, member: Member) -> MemberCrc:
        what = f"{self._file.name}: member {member.name[:80]!r}"
        return MemberCrc(what, member.nbytes, member.crc)

    def _load_from_bytes(self, machine: Machine, args: tuple[Any, ...]) -> Any:
        """A storage that was pickled alone: a file of `torch.save` inside of the pickle."""
        (data,) = args
        if self._level:
            raise ValueError("a storage inside of a storage")
        if not isinstance(data, Span | bytes):
            raise ValueError("no bytes")
        self._level += 1
        try:
            self._budget.operations -= 100
            if isinstance(data, Span):
                return self.legacy(data.start, data.start + data.nbytes)
            return self.legacy(0, len(data), data)
        finally:
            self._level -= 1


class _Storages:
    """Storages by key; each is found once, however many tensors are views of it."""

    def __init__(self) -> None:
        self.found: dict[str, Storage | Refusal] = {}

    def find(self, name: Any) -> Storage | Refusal:
        """Return the storage for `("storage", type, key, location, numel)`."""
        if type(name) is not tuple or len(name) < 5 or name[0] != "storage":
            raise ValueError("a persistent id that is no storage")
        _, kind, key, location, numel = name[:5]
        if type(key) is int:
            key = str(key)
        if type(kind) is not StorageKind or type(key) is not str:
            raise ValueError("a persistent id without a class of storage or a key")
        if type(numel) is not int or not 0 <= numel < 2**60 or len(key) > 200:
            raise ValueError("a storage without a number of elements")
        if kind.dtype is None:
            return Refusal(f"a quantized tensor ({kind.name})", is_tensor=True)
        nbytes = numel * ITEM_NBYTES[kind.dtype]
        known = self.found.get(key)
        if known is None:
            device = checked_device(location)
            known = self.found[key] = Storage(kind.dtype, device, nbytes)
        if type(known) is Storage and (known.dtype, known.nbytes) != (kind.dtype, nbytes):
            raise ValueError(f"storage {key[:40]!r} with two dtypes or sizes")
        return known

    def find_legacy(self, name: Any) -> Storage | Refusal:
        """Return the storage for a reference of the older format, which may name a view of it."""
        if type(name) is tuple and len(name) == 6 and name[5] is not None:
            return Refusal("a view of a storage, as torch before 0.4 wrote it", is_tensor=True)
        return self.find(name)

    def place_legacy(
        self, keys: Any, stream: io.BufferedIOBase, stop: int, data: bytes | None, what: str
    ) -> None:
        """Set where the storages are, which lie in the order of `keys`."""
        if type(keys) is not list or {*map(type, keys)} - {str}:
            raise FormatError(f"{what}: no list of storages")
        position = stream.tell()
        seen = set()
        for key in keys:
            storage = self.found.get(key)
            if type(storage) is not Storage or key in seen:
                raise FormatError(f"{what}: no tensor uses storage {key[:40]!r}")
            seen.add(key)
            stream.seek(position)
            head = stream.read(8)
            count = int.from_bytes(head, "little")
            start = position + 8
            if len(head) != 8 or start + storage.nbytes > stop:
                raise CorruptData(f"{what}: ends inside storage {key[:40]!r}")
            if count * ITEM_NBYTES[storage.dtype] != storage.nbytes:
                raise CorruptData(f"{what}: storage {key[:40]!r} and its tensors differ in size")
            if data is None:
                storage.data = Span(start, storage.nbytes)
            else:
                storage.data = data[start : start + storage.nbytes]
            position = start + storage.nbytes
