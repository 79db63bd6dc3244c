"""Writing many files at once: digests, order, errors, nothing running afterwards."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.engine import writing
from holdfast.engine.workers import Workers
from holdfast.engine.writing import Document, FileToWrite, Phase, write_files
from holdfast.format.blocks import block_digest, digest_blocks, num_blocks
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore

SIZES = (0, 1, 4097, BLOCK_NBYTES, 2 * BLOCK_NBYTES + 5)


@pytest.fixture
def pools() -> Iterator[tuple[Workers, Workers]]:
    workers, writers = Workers(2, "hash"), Workers(4, "write")
    yield workers, writers
    workers.close()
    writers.close()


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
    phase: Phase | None = None,
    timeout_s: float = 60,
) -> dict[str, bytes]:
    workers, writers = pools
    return write_files(
        store,
        files,
        workers=workers,
        writers=writers,
        phase=phase or Phase(),
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
    document = FileToWrite(key="f/tree", content=Document(b"{}"))
    files = [*files_of(), document]
    found = write(store, files, pools)
    assert found == {file.key: digest_blocks(file.content.data) for file in files}
    assert {key: store.get(key) for key in found} == {f.key: f.content.data for f in files}


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
    phase = Phase()
    with pytest.raises(errors.DeadlineExceeded, match="f/1"):
        write(FaultyStore(store, [fault]), files_of((0, 1)), pools, phase, timeout_s=1)
    assert "f/1" in phase.text
    fault.release.set()
