"""Reads a MindSpore `.ckpt` file: a protobuf of named tensors, some of them in several slices.

An encrypted file is a sequence of blocks: a magic number, the tag of GCM, a length, a nonce, and
the length of what follows. MindSpore uses the first 12 of 16 bytes of the nonce for GCM.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, LimitExceeded, UsageError, WrongKey
from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import ITEM_NBYTES, MAX_DIMS, TensorSpec, check_shape
from holdfast.interop.files import LocalFile, ReadableFile, first_bytes
from holdfast.interop.pickles.values import LIFTED, bound
from holdfast.interop.source import LeftOut, Source, SourceComponent, expect_none_wrong
from holdfast.interop.sources.safetensors import MODEL

CIPHERS = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
"""Cipher by the first four bytes of a block, little-endian."""

MAX_BLOCK_NBYTES = (64 << 20) + 16
_IV_NBYTES = 16
_TAG_NBYTES = 16
_KEY_NBYTES = (16, 24, 32)


def cipher_of(first: bytes) -> str | None:
    """Return the cipher of a file by its first bytes; None if it is not encrypted."""
    return CIPHERS.get(int.from_bytes(first[:4], "little")) if len(first) >= 32 else None


class DecryptedFile(ReadableFile):
    """The content of an encrypted file. Thread-safe."""

    def __init__(self, file: LocalFile, key: bytes) -> None:
        """Find the blocks; decrypts no more than their ends."""
        if len(key) not in _KEY_NBYTES:
            raise UsageError(f"a key of {len(key)} bytes; MindSpore has keys of 16, 24 or 32")
        self.name = file.name
        self._file, self._key = file, key
        self._lock = threading.Lock()
        self._decrypted: dict[int, bytes] = {}
        self._crypto = _cryptography()
        self._blocks: list[tuple[str, bytes, bytes, int, int]] = []
        """Cipher, tag, nonce, first byte and length of each block's content."""
        self._starts = [0]
        position = 0
        while position < file.nbytes:
            position = self._add_block(position)
        self.nbytes = self._starts[-1]

    def _add_block(self, position: int) -> int:
        """Note the block that begins at a position; return where the next one begins."""
        cipher = CIPHERS.get(int.from_bytes(self._file.read(position, 4), "little"))
        if cipher not in ("AES-GCM", "AES-CBC") or (self._blocks and self._blocks[0][0] != cipher):
            raise CorruptData(
                f"{self.name}: no block of {cipher or 'a cipher'} at byte {position:,}"
            )
        position += 4
        tag = b""
        if cipher == "AES-GCM":
            tag = self._file.read(position, _TAG_NBYTES)
            position += _TAG_NBYTES
        head = self._file.read(position, 12 + _IV_NBYTES)
        total, iv_nbytes = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4))
        nbytes = int.from_bytes(head[-4:], "little")
        start = position + len(head)
        is_whole = 0 < nbytes <= MAX_BLOCK_NBYTES and start + nbytes <= self._file.nbytes
        if iv_nbytes != _IV_NBYTES or total != nbytes + 8 + _IV_NBYTES or not is_whole:
            raise CorruptData(f"{self.name}: a block at byte {position:,} has the wrong length")
        self._blocks.append((cipher, tag, head[8:-4], start, nbytes))
        self._starts.append(self._starts[-1] + nbytes - self._padding(cipher, head, start, nbytes))
        return start + nbytes

    def _padding(self, cipher: str, head: bytes, start: int, nbytes: int) -> int:
        """Return the number of bytes that CBC has added to a block."""
        if cipher == "AES-GCM":
            return 0
        if nbytes % 16:
            raise CorruptData(f"{self.name}: a block of {nbytes:,} bytes, not a multiple of 16")
        before = head[8:-4] if nbytes == 16 else self._file.read(start + nbytes - 32, 16)
        last = self._cbc(before, self._file.read(start + nbytes - 16, 16))
        if not 1 <= last[-1] <= 16 or last[-last[-1] :] != last[-1:] * last[-1]:
            raise self._wrong_key()
        return last[-1]

    @override
    def read_into(self, start: int, memory: memoryview) -> None:
        while memory.nbytes:
            if not 0 <= start < self.nbytes:
                raise CorruptData(f"{self.name}: ends at byte {start:,}, inside a tensor")
            number = bisect_right(self._starts, start) - 1
            part = memoryview(self._decrypt_block(number))[start - self._starts[number] :][
                : memory.nbytes
            ]
            memory[: part.nbytes] = part
            start, memory = start + part.nbytes, memory[part.nbytes :]

    def _decrypt_block(self, number: int) -> bytes:
        """Return a block decrypted; the last one is kept."""
        with self._lock:
            if number not in self._decrypted:
                cipher, tag, nonce, start, nbytes = self._blocks[number]
                data = self._file.read(start, nbytes)
                self._decrypted.clear()
                plain = (
                    self._gcm(nonce, tag, data) if cipher == "AES-GCM" else self._cbc(nonce, data)
                )
                size = self._starts[number + 1] - self._starts[number]
                self._decrypted[number] = plain[:size]
            return self._decrypted[number]

    def _gcm(self, nonce: bytes, tag: bytes, data: bytes) -> bytes:
        ciphers, modes = self._crypto
        try:
            decryptor = ciphers.Cipher(
                ciphers.algorithms.AES(self._key), modes.GCM(nonce[:12], tag)
            ).decryptor()
            return bytes(decryptor.update(data) + decryptor.finalize())
        except import_module("cryptography.exceptions").InvalidTag as error:
            raise self._wrong_key() from error

    def _cbc(self, before: bytes, data: bytes) -> bytes:
        ciphers, modes = self._crypto
        decryptor = ciphers.Cipher(ciphers.algorithms.AES(self._key), modes.CBC(before)).decryptor()
        return bytes(decryptor.update(data) + decryptor.finalize())

    def _wrong_key(self) -> WrongKey:
        return WrongKey(f"{self.name}: the key does not decrypt it, or it is damaged")

    @override
    def close(self) -> None:
        self._file.close()
        self._decrypted.clear()


def _cryptography() -> tuple[Any, Any]:
    try:
        ciphers = import_module("cryptography.hazmat.primitives.ciphers")
    except ImportError as error:
        raise UsageError(
            "files that MindSpore encrypted need the package cryptography: "
            "pip install 'holdfast-torch[encrypt]'"
        ) from error
    return ciphers, ciphers.modes


STATE = "state"
"""Component of the texts that were saved beside the tensors."""

MAX_VALUES = 50_000
"""Most tensors, slices counted, of a file."""
MAX_NAME_NBYTES = 4_096
_MAX_TEXT_NBYTES = 1 << 20

_DTYPES = {
    "Bool": "BOOL",
    "Float16": "F16",
    "BFloat16": "BF16",
    "Float32": "F32",
    "Float64": "F64",
    **{f"Int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"UInt{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "Complex64": "C64",
    "Complex128": "C128",
    "Float8E4M3FN": "F8_E4M3",
    "Float8E5M2": "F8_E5M2",
}
_TRAILER = b"crc_num"
_TRAILER_NBYTES = 17
_CHUNK_NBYTES = 1 << 20


def recognises(path: Path) -> bool:
    """Whether a file begins with a named tensor of MindSpore, or was encrypted by it."""
    first = first_bytes(path, 2 * MAX_NAME_NBYTES)
    return cipher_of(first) is not None or _begins_with_a_name(first)


def _begins_with_a_name(first: bytes) -> bool:
    """Whether bytes are field 1 of Checkpoint, in it field 1 with a text, and then field 2 or 3."""
    if first[:1] != b"\x0a":
        return False
    at = next((at for at in range(1, min(11, len(first))) if first[at] < 128), len(first)) + 1
    if first[at : at + 1] != b"\x0a" or len(first) < at + 4:
        return False
    length, start = first[at + 1], at + 2
    if length >= 128:
        length, start = length & 127 | first[at + 2] << 7, at + 3
    name, after = first[start : start + length], first[start + length : start + length + 1]
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return bool(name) and after in (b"\x12", b"\x1a")


@dataclass(slots=True)
class _Value:
    """A tensor or text as the file has it; big ones are in several slices."""

    dtype: str
    dims: tuple[int, ...]
    places: list[tuple[int, int]] = field(default_factory=list)
    """First byte and length of each slice in the file."""

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.places)


class MindSporeFile(Source):
    """Tensors of a MindSpore checkpoint as `model`, texts as `state`; a checksum is read first."""

    format = "mindspore"

    def __init__(self, path: Path, *, key: bytes | None = None) -> None:
        """Find the values and where each is; `key` decrypts an encrypted file."""
        self.url = str(path)
        self.left_out: list[LeftOut] = []
        self._file: ReadableFile = LocalFile.open_regular(path)
        self._lock = threading.Lock()
        with self.closing_on_error():
            self._file = self._decrypted(key)
            self._checksum, stop = self._trailer()
            values = self._values(stop)
            self.parts = self._make_components(values)

    def _decrypted(self, key: bytes | None) -> ReadableFile:
        """Return the file, or what it is after decryption."""
        assert isinstance(self._file, LocalFile)
        cipher = cipher_of(self._file.read(0, min(32, self._file.nbytes)))
        if cipher is None:
            return self._file
        if key is not None and cipher != "SM4-CBC":
            return DecryptedFile(self._file, key)
        by_key = "give its key (`holdfast --file-key PATH`, or open_source(key=…)), or "
        raise FormatError(
            f"{self.url}: encrypted by MindSpore ({cipher}); "
            f"{by_key if cipher != 'SM4-CBC' else ''}save it plainly first: "
            "mindspore.load_checkpoint(file, dec_key=…), then mindspore.save_checkpoint"
        )

    def _trailer(self) -> tuple[int | None, int]:
        """Return the checksum at the end of the file, if any, and where the content ends."""
        nbytes = self._file.nbytes
        if nbytes > _TRAILER_NBYTES:
            last = self._file.read(nbytes - _TRAILER_NBYTES, _TRAILER_NBYTES)
            if last.startswith(_TRAILER):
                return int.from_bytes(last[len(_TRAILER) :], "big"), nbytes - _TRAILER_NBYTES
        return None, nbytes

    def _values(self, stop: int) -> dict[str, _Value]:
        """Read what is in the file; slices of a tensor follow each other."""
        wire, found = Wire(self._file), dict[str, _Value]()
        last, twice, maps = "", [], set[str]()
        for number, entry in enumerate(wire.fields(0, stop)):
            if number >= bound(MAX_VALUES):
                raise LimitExceeded(f"{self.url}: more than {MAX_VALUES:,} tensors; {LIFTED}")
            if entry.number != 1 or entry.wire_type != LEN:
                raise CorruptData(f"{self.url}: field {entry.number} where a tensor should begin")
            name, tensor = self._read_entry_name(wire, entry)
            if tensor is None:
                maps.add(name)
                continue
            value = self._parse_tensor(wire, tensor, name)
            if name not in found:
                found[name] = value
            elif name != last or (value.dtype, value.dims) != (found[name].dtype, found[name].dims):
                twice.append(name)
            else:
                found[name].places += value.places
            last = name
        self.left_out += [LeftOut(name, "a map of parameters", MODEL) for name in sorted(maps)]
        expect_none_wrong(self.url, [f"{name!r} is there twice" for name in twice])
        return found

    def _read_entry_name(self, wire: Wire, entry: Field) -> tuple[str, Field | None]:
        """Return the name of an entry and its tensor; None for a map of parameters."""
        name, tensor, is_map = b"", None, False
        for inner in wire.fields(entry.start, entry.stop):
            if inner.number == 1:
                name = wire.read_field(inner, MAX_NAME_NBYTES, "a name")
            elif inner.number == 2 and inner.wire_type == LEN and tensor is None:
                tensor = inner
            elif inner.number == 3:
                is_map = True
            else:
                raise CorruptData(f"{self.url}: at byte {inner.start:,}: field {inner.number}")
        if not name or (tensor is None) != is_map:
            raise CorruptData(f"{self.url}: at byte {entry.start:,}: expected name and tensor")
        return _decode_name(name, self.url), tensor

    def _parse_tensor(self, wire: Wire, tensor: Field, name: str) -> _Value:
        dims: list[int] = []
        dtype = content = None
        for inner in wire.fields(tensor.start, tensor.stop):
            if inner.number == 1 and inner.wire_type == VARINT:
                dims.append(inner.value)
            elif inner.number == 2 and dtype is None:
                dtype = _decode_name(wire.read_field(inner, 64, "a type"), self.url)
            elif inner.number == 3 and inner.wire_type == LEN and content is None:
                content = inner.start, inner.stop - inner.start
            else:
                raise CorruptData(f"{self.url}, {name!r}: field {inner.number} of its tensor")
            if len(dims) > MAX_DIMS:
                raise LimitExceeded(f"{self.url}, {name!r}: more than {MAX_DIMS} dimensions")
        if dtype is None or content is None:
            raise CorruptData(f"{self.url}, {name!r}: its tensor has no type or no content")
        return _Value(dtype, tuple(dims), [content])

    def _make_components(self, values: dict[str, _Value]) -> dict[str, SourceComponent]:
        texts = {
            name: self._read_text(name, one) for name, one in values.items() if one.dtype == "str"
        }
        tensors = {name: one for name, one in values.items() if one.dtype != "str"}
        expect_none_wrong(
            self.url,
            [
                f"{name!r} has the type {one.dtype[:64]!r}, which cannot be expressed"
                for name, one in tensors.items()
                if one.dtype not in _DTYPES
            ],
        )
        specs = {name: self._spec(name, one) for name, one in tensors.items()}
        self._places = {name: _Slices.from_places(one.places) for name, one in tensors.items()}
        tree = {name: TensorRef(name) for name in specs}
        parts = {MODEL: SourceComponent(kind="module", tree=tree, specs=specs)}
        kept = {name: text for name, text in texts.items() if text is not None}
        if kept:
            parts[STATE] = SourceComponent(kind="tree", tree=kept, specs={})
        self.step = self._counter(specs)
        return parts

    def _read_text(self, name: str, value: _Value) -> str | None:
        """Return a text, which the file has in UTF-32; None if it cannot be carried over."""
        if value.nbytes > _MAX_TEXT_NBYTES:
            self.left_out.append(LeftOut(path=name, why=f"a text of {value.nbytes:,} bytes"))
            return None
        data = b"".join(self._file.read(*place) for place in value.places)
        try:
            return data.decode("utf-32-le")
        except UnicodeDecodeError:
            self.left_out.append(LeftOut(path=name, why="a text that is not Unicode"))
            return None

    def _spec(self, name: str, value: _Value) -> TensorSpec:
        """Return dtype and shape; a scalar may be written with the one dimension 0."""
        what, dtype = f"{self.url}, {name!r}", _DTYPES[value.dtype]
        is_scalar = value.dims == (0,) and value.nbytes == ITEM_NBYTES[dtype]
        shape = () if is_scalar else value.dims
        nbytes = check_shape([*shape], ITEM_NBYTES[dtype], what=what)
        if nbytes != value.nbytes:
            raise CorruptData(
                f"{what}: {value.dtype} of shape {[*shape]} has {nbytes:,} bytes; the file has "
                f"{value.nbytes:,}"
            )
        return TensorSpec(name, dtype, shape)

    def _counter(self, specs: dict[str, TensorSpec]) -> int | None:
        """Return the step that MindSpore's callback adds as `step_num`, if it is there."""
        spec = specs.get("step_num")
        if spec is None or spec.dtype not in ("I64", "I32") or spec.shape not in ((), (1,)):
            return None
        data = self._file.read(*self._places["step_num"].first)
        step = int.from_bytes(data, "little", signed=True)
        return step if step >= 0 else None

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        self._check_once()
        for position, part in self._places[key].split_memory(start, memory):
            self._file.read_into(position, part)

    def _check_once(self) -> None:
        """Compare the checksum with all bytes before it, at the first read."""
        with self._lock:
            if self._checksum is None:
                return
            found, stop = 0, self._file.nbytes - _TRAILER_NBYTES
            buffer = memoryview(bytearray(_CHUNK_NBYTES))
            for start in range(0, stop, _CHUNK_NBYTES):
                part = buffer[: min(_CHUNK_NBYTES, stop - start)]
                self._file.read_into(start, part)
                found = zlib.crc32(part, found)
            if found != self._checksum:
                raise CorruptData(
                    f"{self.url}: damaged: expected the checksum {self._checksum}, found {found}"
                )
            self._checksum = None

    @override
    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class _Slices:
    """Positions of a tensor's bytes: slices in order."""

    positions: Sequence[int]
    """First byte of each slice in the file."""
    starts: Sequence[int]
    """First byte of each slice in the tensor, and the tensor's length."""

    @classmethod
    def from_places(cls, places: Sequence[tuple[int, int]]) -> _Slices:
        lengths = (length for _, length in places)
        return cls([position for position, _ in places], [*accumulate(lengths, initial=0)])

    @property
    def first(self) -> tuple[int, int]:
        return self.positions[0], self.starts[1]

    def split_memory(self, start: int, memory: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Split memory for the tensor's bytes from `start` on: position in the file, memory."""
        while memory.nbytes:
            number = bisect_right(self.starts, start, hi=len(self.positions)) - 1
            count = min(memory.nbytes, self.starts[number + 1] - start)
            yield self.positions[number] + start - self.starts[number], memory[:count]
            start, memory = start + count, memory[count:]


def _decode_name(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptData(f"{what}: a name is not UTF-8: {data[:40]!r}") from error


VARINT, FIXED64, LEN, FIXED32 = 0, 1, 2, 5
"""Wire types; groups, which have others, are refused."""

_WINDOW_NBYTES = 512
_MAX_VARINT_NBYTES = 10


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message: its number and type, and its value or the place of its bytes."""

    number: int
    wire_type: int
    value: int
    """Of a varint; 0 for other types."""
    start: int
    """First byte of the value in the file."""
    stop: int


class Wire:
    """A file as a sequence of fields."""

    def __init__(self, file: ReadableFile) -> None:
        self.file = file
        self._window = b""
        self._window_start = 0

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """Read the fields between two bytes of the file; content is skipped, not read."""
        while start < stop:
            tag, after = self._varint(start, stop)
            number, wire_type = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                raise self._wrong(start, "no field has this number")
            field = self._field(number, wire_type, after, stop)
            yield field
            start = field.stop

    def read_field(self, field: Field, max_nbytes: int, what: str) -> bytes:
        """Read the content of a field."""
        nbytes = field.stop - field.start
        if field.wire_type != LEN or nbytes > max_nbytes:
            raise self._wrong(
                field.start, f"{what} has {nbytes:,} bytes; at most {max_nbytes:,} are allowed"
            )
        return self._peek(field.start, nbytes)

    def _field(self, number: int, wire_type: int, start: int, stop: int) -> Field:
        value = 0
        if wire_type == VARINT:
            value, end = self._varint(start, stop)
        elif wire_type == LEN:
            nbytes, start = self._varint(start, stop)
            end = start + nbytes
        elif wire_type in (FIXED64, FIXED32):
            end = start + (8 if wire_type == FIXED64 else 4)
        else:
            raise self._wrong(start, f"wire type {wire_type}")
        if end > stop:
            raise self._wrong(start, f"a field ends at byte {end:,}, beyond its message")
        return Field(number, wire_type, value, start, end)

    def _varint(self, start: int, stop: int) -> tuple[int, int]:
        """Read an integer of up to 64 bits; return it and the position after it."""
        at = start - self._window_start
        if start < stop and 0 <= at < len(self._window) and self._window[at] < 128:
            return self._window[at], start + 1
        data = self._peek(start, min(_MAX_VARINT_NBYTES, stop - start))
        value = 0
        for position, byte in enumerate(data):
            value |= (byte & 127) << 7 * position
            if byte < 128:
                return value & (1 << 64) - 1, start + position + 1
        raise self._wrong(start, "an integer without an end")

    def _peek(self, start: int, nbytes: int) -> bytes:
        at = start - self._window_start
        if at < 0 or at + nbytes > len(self._window):
            want = min(max(nbytes, _WINDOW_NBYTES), self.file.nbytes - start)
            self._window, self._window_start, at = self.file.read(start, want), start, 0
        return self._window[at : at + nbytes]

    def _wrong(self, position: int, why: str) -> CorruptData:
        return CorruptData(f"{self.file.name}: at byte {position:,}: {why}")
