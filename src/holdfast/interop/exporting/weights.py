"""Weights as safetensors files, whole or in shards, as Hugging Face's libraries write them."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Literal, TypeAlias

import msgspec

from holdfast.errors import DeadlineExceeded, UnsupportedState, UsageError
from holdfast.format.nodes import ArrayRef, SubclassRef, TensorRef
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.exporting.files import PlannedFile
from holdfast.interop.files import copy_bytes
from holdfast.interop.renaming import RenameRules
from holdfast.interop.source import LeftOut, Source, read_pieces
from holdfast.store.local.syscalls import UNSUPPORTED, preallocate
from holdfast.system import CLOSED_ON_EXEC
from holdfast.threads.buffers import allocate_pages
from holdfast.threads.workers import Workers, cancel

Dtype: TypeAlias = Literal["f32", "f16", "bf16"]
Report: TypeAlias = Callable[[int], None]
"""Callback with the number of bytes that were written."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CAST_FROM = frozenset({"F64", "F32", "F16", "BF16"})
_NOT_IN_SAFETENSORS = frozenset({"C32", "C128"})
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor as it will be written."""

    name: str
    key: str
    """Its key in the source."""
    stored: TensorSpec
    """Its spec in the source."""
    dtype: str
    """Its dtype in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return TensorSpec(self.name, self.dtype, self.stored.shape).nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensors:
    """The tensors of a component in the order of its tree, each once."""

    component: str
    tensors: Sequence[Weight]
    aliases: Mapping[str, str]
    """Further name of a tied tensor → the name under which it is written."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(one.nbytes for one in self.tensors)


def model_of(source: Source, components: Sequence[str]) -> str:
    """Return the component whose weights are meant: the one named, `model`, or the only one."""
    if len(components) > 1:
        raise UsageError("--component: this form holds the weights of one component; name one")
    if components:
        source.get_component(components[0])
        return components[0]
    modules = [name for name, part in source.parts.items() if part.kind == "module"]
    found = ["model"] if "model" in source.parts else modules
    if len(found) != 1:
        has = ", ".join(source.parts) or "none"
        raise UsageError(f"{source.url}: say which one with --component NAME; it has {has}")
    return found[0]


def weights_of(
    source: Source,
    component: str,
    *,
    rename: RenameRules,
    dtype: Dtype | None,
    left_out: list[LeftOut],
) -> ExportedTensors:
    """List the tensors of a component under their new names; other values are left out."""
    part = source.get_component(component)
    leaves = part.leaves
    names = rename.map_names(leaves, component)
    rename.expect_used()
    first: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for path, ref in leaves.items():
        if ref.key in first:
            aliases[names[path]] = first[ref.key]
        else:
            first[ref.key] = names[path]
    tensors = [
        Weight(
            name=name, key=key, stored=part.specs[key], dtype=_cast(part.specs[key].dtype, dtype)
        )
        for key, name in first.items()
    ]
    left_out += iterate_left_out(part.tree, component)
    return ExportedTensors(component=component, tensors=tensors, aliases=aliases)


def iterate_left_out(tree: Any, path: str) -> Iterator[LeftOut]:
    """Yield the values that are not tensors, which a file of weights cannot hold."""
    items: Iterator[tuple[Any, Any]]
    if isinstance(tree, TensorRef | ArrayRef):
        return
    if isinstance(tree, SubclassRef):
        yield LeftOut(path=path, why=f"its inner tensors are written, not the class {tree.type}")
        return
    if isinstance(tree, Mapping):
        items = iter(tree.items())
    elif isinstance(tree, list | tuple):
        items = iter(enumerate(tree))
    else:
        yield LeftOut(path=path, why="no tensor, and the file holds tensors alone")
        return
    for key, inner in items:
        yield from iterate_left_out(inner, f"{path}.{key}")


def _cast(dtype: str, to: Dtype | None) -> str:
    return to.upper() if to is not None and dtype in CAST_FROM else dtype


class DtypeCast:
    """Casts pieces of tensors; counts the values that became infinite."""

    def __init__(self) -> None:
        self.num_overflows = 0

    def cast_bytes(self, memory: memoryview, dtype: str, to: str) -> memoryview:
        """Return the bytes of a piece in another dtype."""
        if dtype == to or not memory.nbytes:
            return memory
        import torch  # takes a second or two, and only a cast needs it

        from holdfast.state.leaves import TORCH_DTYPES

        given = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype])
        made = given.to(TORCH_DTYPES[to])
        infinite = made.isinf()
        if bool(infinite.any()):
            self.num_overflows += int(infinite.sum() - given.isinf().sum())
        return memoryview(made.view(torch.uint8).numpy().data)


def write_tensors(
    source: Source,
    component: str,
    tensors: Sequence[Weight],
    write: Callable[[memoryview], object],
    cast: DtypeCast,
    report: Report,
) -> None:
    """Write the bytes of tensors, one after the other, in their order."""
    by_key = {one.key: one for one in tensors}
    for piece in read_pieces(source, [(component, one.key) for one in tensors]):
        one = by_key[piece.key]
        write(cast.cast_bytes(piece.memory, one.stored.dtype, one.dtype))
        report(piece.memory.nbytes)


def plan_safetensors(
    source: Source,
    weights: ExportedTensors,
    *,
    shard_nbytes: int | None,
    single: str,
    cast: DtypeCast,
    report: Report,
) -> list[PlannedFile]:
    """Plan one safetensors file called `single`, or shards with an index if one is too small."""
    wrong = [
        (one.name, f"safetensors has no {one.dtype}")
        for one in weights.tensors
        if one.dtype in _NOT_IN_SAFETENSORS
    ]
    if wrong:
        raise UnsupportedState(wrong)
    groups = [*_shards(weights.tensors, shard_nbytes)]
    if len(groups) == 1:
        names = [single]
    else:
        names = [
            f"model-{number:05}-of-{len(groups):05}.safetensors"
            for number in range(1, len(groups) + 1)
        ]
    files = [
        _file(source, weights, name, group, cast, report)
        for name, group in zip(names, groups, strict=True)
    ]
    if len(groups) > 1:
        where = {one.name: name for name, group in zip(names, groups, strict=True) for one in group}
        index = {"metadata": {"total_size": weights.nbytes}, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files.append(bytes_file(INDEX, text.encode()))
    return files


def _shards(tensors: Sequence[Weight], nbytes: int | None) -> Iterator[list[Weight]]:
    group: list[Weight] = []
    room = nbytes or 0
    for one in tensors:
        if nbytes is not None and group and one.nbytes > room:
            yield group
            group, room = [], nbytes
        group.append(one)
        room -= one.nbytes
    yield group


def _file(
    source: Source,
    weights: ExportedTensors,
    name: str,
    group: Sequence[Weight],
    cast: DtypeCast,
    report: Report,
) -> PlannedFile:
    ordered = sorted(group, key=lambda one: -ITEM_NBYTES[one.dtype])
    # As safetensors.torch.save_model does it.
    of_file = {one.name for one in group}
    tied = {alias: kept for alias, kept in weights.aliases.items() if kept in of_file}
    header = _header(ordered, {"format": "pt", **tied})

    nbytes = len(header) + sum(one.nbytes for one in ordered)

    def write(file: BinaryIO) -> None:
        with past_cache(file, nbytes) as put:
            put(memoryview(header))
            write_tensors(source, weights.component, ordered, put, cast, report)

    return PlannedFile(name=name, nbytes=nbytes, write=write)


def _header(tensors: Sequence[Weight], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for one in tensors:
        stop = position + one.nbytes
        entries[one.name] = {
            "dtype": one.dtype,
            "shape": one.stored.shape,
            "data_offsets": (position, stop),
        }
        position = stop
    if len(entries) != len(tensors) + 1:
        raise UsageError("no tensor may be called '__metadata__' in safetensors; use --map")
    text = msgspec.json.encode(entries)
    text = text.ljust(len(text) + -len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def bytes_file(name: str, data: bytes) -> PlannedFile:
    """Plan a small file."""

    def write(file: BinaryIO) -> None:
        file.write(data)

    return PlannedFile(name=name, nbytes=len(data), write=write)


BLOCK_NBYTES = 4 << 20
"""Bytes of one write."""
_NUM_BLOCKS = 4
"""Blocks of memory, of which all but one are written at a time."""
_TIMEOUT_S = 600.0
"""Longest wait for one block to be written."""


class _Output:
    """The rest of a file that is written from its beginning, in blocks."""

    def __init__(self, file: BinaryIO, descriptor: int, workers: Workers) -> None:
        self._file = file
        self._descriptor = descriptor
        self._workers = workers
        self._free = [memoryview(allocate_pages(BLOCK_NBYTES)) for _ in range(_NUM_BLOCKS)]
        self._block = self._free.pop()
        self._num_filled = 0
        self._start = 0
        self._writing: deque[tuple[Future[None], memoryview]] = deque()

    def append_bytes(self, data: memoryview) -> None:
        """Write the next bytes, which are copied."""
        while data.nbytes:
            count = min(data.nbytes, BLOCK_NBYTES - self._num_filled)
            copy_bytes(data[:count], self._block[self._num_filled : self._num_filled + count])
            self._num_filled += count
            data = data[count:]
            if self._num_filled == BLOCK_NBYTES:
                self._submit_block()

    def flush_writes(self) -> None:
        """Write what is left, and wait for all."""
        while self._writing:
            self._wait_for_write()
        self._file.seek(self._start)
        self._file.write(self._block[: self._num_filled])

    def cancel_writes(self) -> None:
        """Wait for the writes in progress; begin no other."""
        cancel([written for written, _ in self._writing], timeout_s=_TIMEOUT_S)

    def _submit_block(self) -> None:
        job = partial(self._write_block, self._block, self._start)
        self._writing.append((self._workers.submit(job), self._block))
        self._start += BLOCK_NBYTES
        self._num_filled = 0
        if not self._free:
            self._wait_for_write()
        self._block = self._free.pop()

    def _wait_for_write(self) -> None:
        written, block = self._writing[0]
        try:
            written.result(timeout=_TIMEOUT_S)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"{self._file.name}: a block was not written within {_TIMEOUT_S:.0f} s"
            ) from None
        self._writing.popleft()
        self._free.append(block)

    def _write_block(self, block: memoryview, start: int) -> None:
        done = os.pwrite(self._descriptor, block, start)
        while done < block.nbytes:  # a rest may have no length that direct writes take
            done += os.pwrite(self._file.fileno(), block[done:], start + done)


@contextmanager
def past_cache(file: BinaryIO, nbytes: int) -> Iterator[Callable[[memoryview], object]]:
    """Yield a function that writes a new file of `nbytes`, past the cache if possible."""
    descriptor = open_direct(file)
    if descriptor is None:
        yield file.write
        return
    workers = Workers(_NUM_BLOCKS - 1, "holdfast-export")
    output = _Output(file, descriptor, workers)
    try:
        # Writes that make a file longer wait for each other.
        preallocate(descriptor, nbytes)
        yield output.append_bytes
        output.flush_writes()
    finally:
        output.cancel_writes()
        workers.close_pool()
        os.close(descriptor)


def open_direct(file: BinaryIO) -> int | None:
    """Open a new file once more with O_DIRECT; None if the file system refuses."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return None
    try:
        descriptor = os.open(file.name, os.O_WRONLY | CLOSED_ON_EXEC | direct)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return None
        raise
    with memoryview(allocate_pages(BLOCK_NBYTES)) as block:
        try:
            os.pwrite(descriptor, block, 0)
            os.ftruncate(descriptor, 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in UNSUPPORTED:
                return None
            raise
    return descriptor
