"""What the benchmarks do to the machine's files, and what they know of threads and processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from time import thread_time

import pytest
from bench.limits import BLOCK_NBYTES, ReadProbe
from bench.machine import (
    drop_cache,
    fill_cache,
    newest_under,
    own_children,
    own_threads,
    threads_s,
)


def write(path: Path, nbytes: int, when: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(nbytes))
    os.utime(path, (when, when))


def test_the_newest_checkpoint_is_where_the_newest_large_file_lies(tmp_path: Path) -> None:
    write(tmp_path / "1/model", 10_000, when=1)
    write(tmp_path / "2/model", 9_000, when=2)
    write(tmp_path / "2/index", 10, when=2)
    write(tmp_path / "writers/closed", 100, when=3)
    assert newest_under(tmp_path) == tmp_path / "2"


def test_a_probe_reads_every_byte_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [BLOCK_NBYTES + 5000, 300, 2 * BLOCK_NBYTES]
    for number, nbytes in enumerate(sizes):
        write(tmp_path / str(number), nbytes, when=1)
    fill_cache(tmp_path)
    read, preadv = [], os.preadv

    def noting(fd: int, buffers: list[memoryview], start: int) -> int:
        read.append(preadv(fd, buffers, start))
        return read[-1]

    monkeypatch.setattr(os, "preadv", noting)
    assert ReadProbe(tmp_path).read_s() > 0
    assert sum(read) == sum(sizes)
    assert drop_cache(tmp_path) == 0
    (tmp_path / "2").write_bytes(b"")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="short read"):
        ReadProbe(tmp_path).read_s()


def test_a_thread_and_a_process_of_ones_own_are_known_and_timed() -> None:
    before = own_threads()
    assert os.getpid() in before
    is_over = threading.Event()
    found: list[float] = []

    def compute() -> None:
        while thread_time() < 0.2:
            pass
        found.append(threads_s([threading.get_native_id()]))
        is_over.wait(60)

    thread = threading.Thread(target=compute)
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert thread.native_id in own_threads() - before
        assert child.pid in own_children()
    finally:
        is_over.set()
        thread.join()
        child.communicate(b"\n", timeout=60)
    assert child.pid not in own_children()
    assert 0.1 < found[0] < 0.4
