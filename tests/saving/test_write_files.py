"""Writing many files at once: digests, order, errors, nothing running afterwards."""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast import errors
from holdfast.format.blocks import block_digest, digest_blocks, list_blocks, num_blocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.results import SaveProgress
from holdfast.saving import write_files as writing
from holdfast.saving.write_files import FileToWrite, WrittenFile, write_files
from holdfast.staging.interfaces import BytesContent
from holdfast.store.base import Store, WrappedStore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.threads.workers import Workers
from marks import diagonal, full

SIZES = (0, 1, 4097, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 5)


@pytest.fixture
def pools() -> Iterator[tuple[Workers, Workers]]:
    workers, writers = Workers(2, "hash"), Workers(4, "write")
    yield workers, writers
    workers.close_pool()
    writers.close_pool()


def noise(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


class Held:
    """A large file whose bytes are there."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.unwritten = set(range(num_blocks(len(data))))

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def block(self, number: int, timeout_s: float) -> memoryview:
        return memoryview(self.data)[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    def digest(self, number: int) -> bytes:
        return block_digest(self.block(number, 0))

    def written(self, number: int) -> None:
        self.unwritten.remove(number)


def files_of(sizes: tuple[int, ...] = SIZES) -> list[FileToWrite]:
    return [
        FileToWrite(key=f"f/{number}", content=Held(noise(nbytes)))
        for number, nbytes in enumerate(sizes)
    ]


def write(
    store: Store,
    files: list[FileToWrite],
    pools: tuple[Workers, Workers],
    progress: SaveProgress | None = None,
    timeout_s: float = 60,
) -> dict[str, WrittenFile]:
    workers, writers = pools
    return write_files(
        store,
        files,
        workers=workers,
        writers=writers,
        progress=progress or SaveProgress(),
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("at_once", [1, 2, 64])
@pytest.mark.parametrize("local", [True, False])
def test_every_file_is_there_with_the_digests_of_its_blocks(
    tmp_path: Path,
    pools: tuple[Workers, Workers],
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
    local: bool,
) -> None:
    monkeypatch.setattr(writing, "FILES_AT_ONCE", at_once)
    store = LocalStore(tmp_path / "root") if local else MemoryStore()
    if isinstance(store, LocalStore):
        store.make_folder("f")
    document = FileToWrite(key="f/tree", content=BytesContent(b"{}"))
    files = [*files_of(), document]
    found = write(store, files, pools)
    assert found == {
        file.key: WrittenFile(digests=digest_blocks(file.content.data)) for file in files
    }
    assert {key: store.get(key) for key in found} == {f.key: f.content.data for f in files}


class Reversing:
    """An encoding whose blocks are longer or shorter than the plain ones."""

    def encode(self, number: int, plain: memoryview) -> bytes:
        data = bytes(plain[::-1])
        return data + b"more" * number if number % 2 else data[: -(-len(data) // 3)]


@pytest.mark.parametrize(("kind", "at_once"), diagonal(["local", "memory", "whole"], [1, 64]))
def test_encoded_blocks_lie_one_behind_the_other(
    tmp_path: Path,
    pools: tuple[Workers, Workers],
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
    kind: str,
) -> None:
    """The digests of the plain blocks stay what they are; those of the stored ones are beside."""
    monkeypatch.setattr(writing, "FILES_AT_ONCE", at_once)
    store: Store = LocalStore(tmp_path / "root") if kind == "local" else MemoryStore()
    if isinstance(store, LocalStore):
        store.make_folder("f")
    if kind == "whole":
        store = WrappedStore(store)  # takes only whole objects
    encoding = Reversing()
    plain, document = files_of()[2], FileToWrite(key="f/d", content=BytesContent(b"{}"))
    files = [
        *(
            FileToWrite(key=f"f/e{n}", content=file.content, encoding=encoding)
            for n, file in enumerate([*files_of((*SIZES, 5 * BLOCK_NBYTES)), document])
        ),
        plain,
        document,
    ]
    found = write(store, files, pools)
    for file in files:
        data = file.content.data
        assert found[file.key].digests == digest_blocks(data)
        blocks = [
            encoding.encode(n, memoryview(data)[start:stop])
            for n, (start, stop) in enumerate(list_blocks(len(data)))
        ]
        stored = found[file.key].stored
        if file.encoding is None:
            assert stored is None
            assert store.get(file.key) == data
        else:
            assert stored is not None
            assert stored.lengths == tuple(map(len, blocks))
            assert stored.digests == b"".join(map(block_digest, blocks))
            assert store.get(file.key) == b"".join(blocks)
        assert getattr(file.content, "unwritten", set()) == set()


class Counting:
    """An encoding that says how many of its blocks are alive."""

    def __init__(self) -> None:
        self.alive = 0
        self.most = 0
        self._lock = threading.Lock()

    def encode(self, number: int, plain: memoryview) -> memoryview:
        with self._lock:
            self.alive += 1
            self.most = max(self.most, self.alive)
        data = bytearray(1)
        block = np.frombuffer(data, np.uint8)
        weakref.finalize(block, self._gone)
        return memoryview(block)

    def _gone(self) -> None:
        with self._lock:
            self.alive -= 1


def test_a_bounded_number_of_encoded_blocks_waits(pools: tuple[Workers, Workers]) -> None:
    """However large the file is, and however slow the store."""
    encoding = Counting()
    data = bytes(4 * writing.ENCODED_AT_ONCE * BLOCK_NBYTES)
    write(MemoryStore(), [FileToWrite(key="a", content=Held(data), encoding=encoding)], pools)
    assert encoding.most <= writing.ENCODED_AT_ONCE + 2


class Broken:
    """An encoding that fails."""

    def encode(self, number: int, plain: memoryview) -> bytes:
        if number == 1:
            raise RuntimeError("no memory for a block")
        return bytes(plain)


def test_an_encoder_that_fails_ends_everything(
    tmp_path: Path, pools: tuple[Workers, Workers]
) -> None:
    """R7: the error comes through, and nothing is left open or half written."""
    store = LocalStore(tmp_path)
    store.make_folder("f")
    before = set(os.listdir("/proc/self/fd"))
    content = Held(noise(5 * BLOCK_NBYTES))
    with pytest.raises(RuntimeError, match="no memory for a block"):
        write(store, [FileToWrite(key="f/a", content=content, encoding=Broken())], pools)
    assert os.listdir(tmp_path / "f") == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("op", ["write", *full("create", "finish")])
def test_a_store_that_fails_ends_the_encoding_too(
    tmp_path: Path, pools: tuple[Workers, Workers], op: str
) -> None:
    """R7: invariant 2 holds for files that are encoded."""
    inner = LocalStore(tmp_path)
    inner.make_folder("f")
    fault = Fault(kind="fail", op=op, at=0, error=errors.StoreError("EIO"))  # type: ignore[arg-type]
    content = Held(noise(20 * BLOCK_NBYTES))
    with pytest.raises(errors.StoreError, match="EIO"):
        write(
            FaultyStore(inner, [fault]),
            [FileToWrite(key="f/a", content=content, encoding=Reversing())],
            pools,
        )
    assert os.listdir(tmp_path / "f") == []


@pytest.mark.parametrize(
    ("op", "at"), [("create", 2), ("write", 0), ("write", 3), ("finish", 0), ("finish", 4)]
)
def test_an_error_ends_everything_and_nobody_writes_afterwards(
    tmp_path: Path, pools: tuple[Workers, Workers], op: str, at: int
) -> None:
    """R7: invariant 2. A file whose sync failed is given up, and none is synced twice."""
    inner = LocalStore(tmp_path)
    inner.make_folder("f")
    fault = Fault(kind="fail", op=op, at=at, error=errors.StoreError("EIO"))  # type: ignore[arg-type]
    store = FaultyStore(inner, [fault])
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(errors.StoreError, match="EIO"):
        write(store, files_of(), pools)
    num_ops = len(store.ops)
    files = os.listdir(tmp_path / "f")
    for pool in pools:
        pool.submit(lambda: None).result(60)
    assert len(store.ops) == num_ops
    # What was whole before the error stays for the caller to remove with its folder.
    finished = [key for name, key in store.ops if name == "finish"]
    assert len(finished) == len(set(finished))
    assert {f"f/{name}" for name in files} <= set(finished)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("op", ["write", "finish"])
def test_what_hangs_is_named(tmp_path: Path, pools: tuple[Workers, Workers], op: str) -> None:
    """Invariant 9: by the error, and meanwhile by the phase."""
    store = LocalStore(tmp_path)
    store.make_folder("f")
    fault = Fault(kind="hang", op=op, key="f/1", deadline_s=60)  # type: ignore[arg-type]
    progress = SaveProgress()
    with pytest.raises(errors.DeadlineExceeded, match="f/1"):
        write(FaultyStore(store, [fault]), files_of((0, 1)), pools, progress, timeout_s=1)
    assert "f/1" in str(progress)
    fault.release.set()
