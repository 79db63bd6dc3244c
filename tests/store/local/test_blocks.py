"""Files written in pieces: direct where whole aligned pages allow it, exact always."""

import errno
import itertools
import mmap
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.errors import NotFound, StoreError, StoreFull, UnsupportedStore
from holdfast.store.local import LocalStore, syscalls
from holdfast.store.local import blocks as localblocks
from holdfast.testing.store_contract import noise
from marks import diagonal
from ways import takes_direct

MIB = 1024 * 1024
SIZES = [0, 1, 4095, 4096, 4097, 65536, 1_000_003, 8 * MIB, 8 * MIB + 3]


@pytest.fixture
def arena():
    """Memory that begins on a page, filled with noise, and room behind it."""
    memory = mmap.mmap(-1, 9 * MIB)
    memory[:] = noise(len(memory))
    return memoryview(memory)


@pytest.fixture
def direct_nbytes(monkeypatch):
    """A list with the length of every direct write."""
    lengths = []
    really_write = localblocks.LocalBlockWriter._write_direct

    def write_direct(self, start, piece):
        lengths.append(really_write(self, start, piece))
        return lengths[-1]

    monkeypatch.setattr(localblocks.LocalBlockWriter, "_write_direct", write_direct)
    return lengths


def write(store, key, data, piece_nbytes, threads=1):
    """Create `key` from pieces of that length."""
    writer = store.create(key, len(data))
    starts = list(range(0, len(data), piece_nbytes))
    random.Random(0).shuffle(starts)

    def write_piece(start):
        writer.write(start, data[start : start + piece_nbytes])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write_piece, starts))
    writer.finish()


@pytest.mark.parametrize(
    ("nbytes", "piece_nbytes", "direct_io"),
    diagonal(SIZES, [4096, 65536, 65537, 8 * MIB], [None, False]),
)
def test_every_size_is_exact(tmp_path, arena, nbytes, piece_nbytes, direct_io):
    if nbytes > 1000 * piece_nbytes:
        piece_nbytes *= 16
    store = LocalStore(tmp_path, direct_io=direct_io)
    with arena[:nbytes] as data:
        write(store, "a", data, piece_nbytes, threads=4)
        assert store.get("a") == data
    assert (tmp_path / "a").stat().st_size == nbytes


@pytest.mark.parametrize(("offset", "start"), diagonal([0, 1, 64, 512, 4096], [0, 1, 4096, 5000]))
def test_pieces_of_any_alignment_are_exact(tmp_path, arena, offset, start):
    nbytes = 200_000
    store = LocalStore(tmp_path)
    writer = store.create("a", start + nbytes)
    with arena[offset : offset + nbytes] as data, arena[MIB : MIB + start] as head:
        writer.write(start, data)
        writer.write(0, head)
        writer.finish()
        assert store.get("a") == bytes(head) + bytes(data)


def test_whole_aligned_pages_go_directly_and_the_tail_does_not(tmp_path, arena, direct_nbytes):
    if not takes_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    store = LocalStore(tmp_path)
    nbytes = 8 * MIB + 3
    with arena[:nbytes] as data:
        write(store, "a", data, nbytes)
        assert direct_nbytes == [8 * MIB]
        write(store, "b", data, 4 * MIB)
        assert sorted(direct_nbytes[1:]) == [0, 4 * MIB, 4 * MIB]
    with arena[1 : nbytes + 1] as data:
        write(store, "c", data, nbytes)
        assert direct_nbytes[4:] == [0]
        assert store.get("c") == data


def test_false_never_writes_directly(tmp_path, arena, direct_nbytes, monkeypatch):
    monkeypatch.setattr(localblocks, "open_direct", None)
    with arena[: 2 * MIB] as data:
        write(LocalStore(tmp_path, direct_io=False), "a", data, MIB)
    assert direct_nbytes == [0, 0]


def test_memory_that_is_read_only_is_written_directly_too(tmp_path, arena, direct_nbytes):
    if not takes_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    with arena[:MIB] as data, data.toreadonly() as readonly:
        write(LocalStore(tmp_path), "a", readonly, MIB)
    assert direct_nbytes == [MIB]


def refusing_open(monkeypatch):
    really_open = os.open

    def open_buffered(path, flags, mode=0o777, *, dir_fd=None):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_buffered)


def refusing_writes(monkeypatch, after, number):
    """Direct writes fail from the given one on; the first is that of the probe."""
    really_write = os.pwrite
    counter = itertools.count()
    direct_fds = set()
    really_open = localblocks.open_direct

    def open_direct(folder_fd, name):
        direct = really_open(folder_fd, name)
        direct_fds.add(direct.fd)
        return direct

    def pwrite(fd, data, start):
        if fd in direct_fds and next(counter) >= after:
            raise OSError(number, os.strerror(number))
        return really_write(fd, data, start)

    monkeypatch.setattr(localblocks, "open_direct", open_direct)
    monkeypatch.setattr(os, "pwrite", pwrite)
    return counter


def test_where_the_flag_is_refused_everything_is_buffered(tmp_path, arena, monkeypatch):
    refusing_open(monkeypatch)
    with arena[: 2 * MIB] as data:
        store = LocalStore(tmp_path)
        write(store, "a", data, MIB)
        assert store.get("a") == data
    with pytest.raises(UnsupportedStore, match="O_DIRECT"):
        LocalStore(tmp_path, direct_io=True).create("b", MIB)
    assert os.listdir(tmp_path) == ["a"]


def test_where_the_probe_fails_everything_is_buffered(tmp_path, arena, monkeypatch):
    if not takes_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    counter = refusing_writes(monkeypatch, after=0, number=errno.EINVAL)
    with arena[: 2 * MIB] as data:
        store = LocalStore(tmp_path)
        for key in ("a", "b"):
            write(store, key, data, MIB)
            assert store.get(key) == data
    assert next(counter) == 1


def test_what_was_found_out_before_the_first_file_is_not_tried_again(tmp_path, arena, monkeypatch):
    if not takes_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    store = LocalStore(tmp_path)
    assert "O_DIRECT" in store.probe()
    monkeypatch.setattr(localblocks, "takes_direct_writes", None)
    with arena[: MIB + 1] as data:
        write(store, "a", data, MIB)
        assert store.get("a") == data
    assert os.listdir(tmp_path) == ["a"]


def test_refused_flags_and_refused_writes_are_found_out_before_the_first_file(
    tmp_path, arena, monkeypatch
):
    """A save must not be the first to learn that the flag is taken and the write is not."""
    if takes_direct(tmp_path):
        with monkeypatch.context() as patch:
            refusing_writes(patch, after=0, number=errno.EINVAL)
            with pytest.raises(UnsupportedStore, match="O_DIRECT"):
                LocalStore(tmp_path, direct_io=True).probe()
        with monkeypatch.context() as patch:
            refusing_writes(patch, after=0, number=errno.EINVAL)
            assert "page cache" in LocalStore(tmp_path).probe()
    refusing_open(monkeypatch)
    store = LocalStore(tmp_path)
    assert "page cache" in store.probe()
    assert "direct_io=False" in LocalStore(tmp_path, direct_io=False).probe()
    with pytest.raises(UnsupportedStore, match="O_DIRECT"):
        LocalStore(tmp_path, direct_io=True).probe()
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(localblocks, "open_direct", None)
    with arena[:MIB] as data:
        write(store, "a", data, MIB)
        assert store.get("a") == data


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_memory_that_cannot_be_written_directly_is_copied(
    tmp_path, arena, monkeypatch, caplog, number
):
    """And nobody has to find out from its slowness: it is said, once."""
    if not takes_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    refusing_writes(monkeypatch, after=1, number=number)
    with arena[: 2 * MIB] as data:
        store = LocalStore(tmp_path)
        for key in ("a", "b"):
            write(store, key, data, MIB)
            assert store.get(key) == data
    (said,) = caplog.messages
    assert str(tmp_path / "a") in said
    assert "page cache" in said


def test_a_failed_direct_write_is_an_error(tmp_path, arena, monkeypatch):
    if not takes_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    refusing_writes(monkeypatch, after=1, number=errno.EIO)
    with arena[: 2 * MIB] as data, pytest.raises(StoreError, match="EIO"):
        write(LocalStore(tmp_path), "a", data, MIB)


@pytest.mark.parametrize("short_nbytes", [1000, 4096, 65536])
def test_short_writes_go_on(tmp_path, arena, monkeypatch, short_nbytes):
    """R6: a write may take less than it is given."""
    really_write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, start: really_write(fd, data[:short_nbytes], start)
    )
    with arena[:300_001] as data:
        store = LocalStore(tmp_path)
        write(store, "a", data, 100_000)
        store.put("b", data)
        assert store.get("a") == data
        assert store.get("b") == data


def test_the_probe_leaves_no_trace_in_a_short_file(tmp_path, monkeypatch):
    def told(fd):
        return syscalls.DirectAlignment(memory=4096, offset=65536)

    monkeypatch.setattr(localblocks, "direct_alignment", told)
    store = LocalStore(tmp_path)
    data = memoryview(noise(5000))
    write(store, "a", data, 5000)
    assert store.get("a") == data


def test_a_file_that_says_it_cannot_is_buffered(tmp_path, arena, monkeypatch, direct_nbytes):
    def told(fd):
        return syscalls.DirectAlignment(memory=0, offset=0)

    monkeypatch.setattr(localblocks, "direct_alignment", told)
    with arena[:MIB] as data:
        write(LocalStore(tmp_path), "a", data, MIB)
    assert direct_nbytes == [0]


def test_without_the_c_librarys_help_it_works_all_the_same(tmp_path, arena, monkeypatch):
    monkeypatch.setattr(syscalls, "_function", lambda name: None)
    with arena[: MIB + 1] as data:
        store = LocalStore(tmp_path)
        write(store, "a", data, MIB)
        assert store.get("a") == data


def test_room_is_taken_at_once(tmp_path):
    writer = LocalStore(tmp_path).create("a", MIB)
    found = (tmp_path / "a").stat()
    writer.abort()
    if found.st_size == 0:
        pytest.skip("this file system reserves no room")
    assert found.st_size == MIB
    assert found.st_blocks * 512 >= MIB


def test_no_room_leaves_no_file(tmp_path, monkeypatch):
    """R8: found out before a byte is written, and said with both numbers."""

    def preallocate(fd, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(localblocks, "preallocate", preallocate)
    with pytest.raises(StoreFull, match=r"asked for 1000 bytes, and the system reports \d+ bytes"):
        LocalStore(tmp_path).create("a", 1000)
    assert os.listdir(tmp_path) == []


def test_a_file_that_was_removed_meanwhile_is_no_success(tmp_path):
    """The bytes are synced, but the name is not ours to give; gc has taken the folder."""
    store = LocalStore(tmp_path)
    store.make_folder("f")
    writer = store.create("f/a", 1)
    shutil.rmtree(tmp_path / "f")
    writer.write(0, memoryview(b"x"))
    with pytest.raises(NotFound):
        writer.finish()
    writer.abort()


def test_descriptors_outlive_the_writes_that_use_them(tmp_path, monkeypatch):
    """A number closed under a running write could belong to another file by then."""
    reached, release = threading.Event(), threading.Event()
    really_write = os.pwrite

    def slow_write(fd, data, start):
        reached.set()
        assert release.wait(60)
        return really_write(fd, data, start)

    writer = LocalStore(tmp_path, direct_io=False).create("a", 10)
    monkeypatch.setattr(os, "pwrite", slow_write)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(writer.write, 0, memoryview(b"0123456789"))
        assert reached.wait(60)
        before = os.listdir("/proc/self/fd")
        writer.abort()
        assert os.listdir("/proc/self/fd") == before
        release.set()
        writing.result(60)
    assert len(os.listdir("/proc/self/fd")) == len(before) - 2
    assert os.listdir(tmp_path) == []
