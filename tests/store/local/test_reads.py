"""Reads into the caller's memory: direct where that works, exact always."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CorruptData, NotFound, StoreError
from holdfast.store.local import LocalStore, syscalls
from holdfast.store.local import reads as localreads
from holdfast.store.local.reads import DIRECT_NBYTES_MIN, PIECE_NBYTES, OpenFile, OpenFiles, Seen
from holdfast.store.local.syscalls import DirectAlignment, is_cached
from holdfast.testing.store_contract import noise

MIB = 1024 * 1024
SIZES = [0, 1, 4095, DIRECT_NBYTES_MIN - 1, DIRECT_NBYTES_MIN, DIRECT_NBYTES_MIN + 777, 3 * MIB + 5]


@pytest.fixture
def arena() -> memoryview:
    """Memory that begins on a page."""
    return memoryview(mmap.mmap(-1, 4 * MIB))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Four MiB and a bit of noise on stable storage."""
    path = tmp_path / "file"
    with path.open("wb") as target:
        target.write(noise(4 * MIB + 99))
        os.fsync(target.fileno())
    return path


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    """The file, open for reading."""
    number = os.open(file, os.O_RDONLY)
    yield number
    os.close(number)


def warm(fd: int) -> None:
    """Have all of it in the page cache."""
    os.pread(fd, 8 * MIB, 0)


def cool(fd: int) -> None:
    """Have nothing of it in the page cache."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(fd, 0, 4 * MIB):
        pytest.skip("this file system keeps its pages")


def needs_direct(fd: int, arena: memoryview) -> None:
    """Skip where the file system reads nothing directly."""
    if not localreads._read_direct(OpenFile(os.dup(fd)), arena[:MIB], 0):
        pytest.skip("this file system reads nothing directly")


def fill(fd: int, memory: memoryview, start: int, *, seen: Seen, **how: bool) -> None:
    """As of a file that is open for this one read."""
    asked = {"direct": True, "afresh": False} | how
    localreads.fill_from_file(
        OpenFile(os.dup(fd)), memory, start, what="the file", seen=seen, **asked
    )


def read(fd: int, memory: memoryview, start: int, **how: bool) -> bytes:
    """Fill the memory; what was seen of it on the way."""
    seen = bytearray()
    fill(fd, memory, start, seen=seen.extend, **how)
    return bytes(seen)


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("afresh", [True, False])
@pytest.mark.parametrize("start", [0, 4096, 1])
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_way_reads_the_same_bytes_and_shows_each_once(
    fd: int, file: Path, arena: memoryview, nbytes: int, start: int, afresh: bool, is_warm: bool
) -> None:
    """Odd tails, odd beginnings, memory that begins nowhere in particular."""
    expected = file.read_bytes()[start : start + nbytes]
    for shift in (0, 3):
        (warm if is_warm else cool)(fd)
        memory = arena[shift : shift + nbytes]
        assert read(fd, memory, start, afresh=afresh) == expected
        assert memory == expected


def test_what_is_not_cached_is_read_past_the_cache(fd: int, arena: memoryview) -> None:
    """The cache keeps what others have there."""
    needs_direct(fd, arena)
    cool(fd)
    read(fd, arena, 0)
    assert not is_cached(fd, 0, len(arena))


@pytest.mark.parametrize("is_mapped", [False, True])
def test_the_cache_is_asked_for_a_part_of_a_file(
    fd: int, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    """By cachestat, and by a mapping where the kernel is older than Linux 6.5."""
    if is_mapped:
        monkeypatch.setattr(syscalls, "_SYS_CACHESTAT", 10**6)
    cool(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    os.pread(fd, MIB, 2 * MIB)
    asked = [(0, MIB), (2 * MIB, 3 * MIB), (2 * MIB + 1, 2 * MIB + 7), (3 * MIB, 4 * MIB)]
    assert [is_cached(fd, *span) for span in asked] == [False, True, True, False]
    assert not is_cached(fd, MIB + 1, 4 * MIB)


def test_what_is_cached_comes_from_the_cache_in_small_pieces(fd: int, arena: memoryview) -> None:
    """A digest finds each piece in the processor's cache."""
    warm(fd)
    pieces: list[int] = []

    def look(piece: memoryview) -> None:
        pieces.append(len(piece))

    fill(fd, arena, 0, seen=look)
    assert pieces == [PIECE_NBYTES] * 4


def test_without_leave_nothing_is_read_directly(file: Path, fd: int, arena: memoryview) -> None:
    """`direct_io=False` is for reads too."""
    cool(fd)
    LocalStore(file.parent, direct_io=False).read_into("file", 0, arena)
    assert is_cached(fd, 0, len(arena))


def test_afresh_drops_what_is_cached_where_direct_reads_are_refused(
    fd: int, arena: memoryview
) -> None:
    """A damaged page of the cache does not answer twice."""
    cool(fd)
    warm(fd)
    localreads._drop_pages(fd, 0, len(arena))
    assert not is_cached(fd, 0, len(arena))
    assert read(fd, arena, 0, direct=False, afresh=True) == bytes(arena)


@pytest.mark.parametrize("start", [0, 100, 4096, 2 * MIB - 5])
@pytest.mark.parametrize("nbytes", [1, 500, 5000, MIB + 77, 2 * MIB + 104])
def test_nothing_that_is_read_afresh_comes_out_of_the_cache(
    fd: int,
    file: Path,
    arena: memoryview,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    nbytes: int,
) -> None:
    """Also what begins or ends inside a page that is there: it may be the damaged one."""
    needs_direct(fd, arena)
    warm(fd)
    monkeypatch.setattr(localreads, "read_exactly", None)
    memory = arena[:nbytes]
    assert read(fd, memory, start, afresh=True) == file.read_bytes()[start : start + nbytes]
    assert memory == file.read_bytes()[start : start + nbytes]


@pytest.mark.parametrize(("start", "nbytes"), [(0, 5000), (100, 200), (4000, 8000), (3 * MIB, 99)])
def test_pages_of_which_a_part_is_to_be_forgotten_are_forgotten(
    fd: int, start: int, nbytes: int
) -> None:
    cool(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead, so pages of their own
    for at in range(0, 4 * MIB, 4096):
        os.pread(fd, 1, at)
    localreads._drop_pages(fd, start, nbytes)
    assert not any(is_cached(fd, at, at + 1) for at in (start, start + nbytes - 1))


def test_a_read_that_the_kernel_refuses_goes_through_the_cache(
    fd: int, file: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that says too little of its alignment costs speed and nothing else."""
    monkeypatch.setattr(
        localreads, "direct_alignment", lambda fd: DirectAlignment(memory=1, offset=1)
    )
    cool(fd)
    memory = arena[3 : 3 + MIB + 1]
    assert read(fd, memory, 5) == file.read_bytes()[5 : 5 + MIB + 1]


def test_without_the_links_in_proc_files_are_read_through_the_cache(
    fd: int, file: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower, and as right."""
    monkeypatch.setattr(localreads, "OWN_FDS", "/nowhere")
    cool(fd)
    assert read(fd, arena, 0) == file.read_bytes()[: len(arena)]
    assert is_cached(fd, 0, len(arena))


@pytest.mark.parametrize("told", [DirectAlignment(memory=0, offset=0), None])
def test_a_kernel_that_says_no_or_nothing_is_believed(
    fd: int, arena: memoryview, file: Path, told: DirectAlignment | None
) -> None:
    """Zeros: no direct reads. Nothing (before Linux 6.1): pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(localreads, "direct_alignment", lambda fd: told)
        cool(fd)
        assert read(fd, arena, 0) == file.read_bytes()[: len(arena)]
    assert told is None or is_cached(fd, 0, len(arena))


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("left_nbytes", [0, 4096, MIB + 17])
def test_a_file_that_ends_too_early_is_damaged(
    fd: int, file: Path, arena: memoryview, left_nbytes: int, is_warm: bool
) -> None:
    """Whichever way it is read."""
    os.truncate(file, left_nbytes)
    if is_warm:
        warm(fd)
    else:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with pytest.raises(CorruptData, match=f"ends at byte {left_nbytes}, "):
        read(fd, arena, 0)


def test_a_file_that_is_cut_while_it_is_read_is_damaged(
    fd: int, file: Path, arena: memoryview
) -> None:
    """The length that was seen at the beginning is not relied upon."""
    warm(fd)
    with pytest.raises(CorruptData, match=f"ends at byte {2 * MIB}"):
        fill(fd, arena, 0, seen=lambda piece: os.truncate(file, 2 * MIB))


def test_what_is_seen_is_what_stays_in_memory_when_the_file_changes(
    fd: int, file: Path, arena: memoryview
) -> None:
    """What is applied is what was verified: each byte is read once."""
    warm(fd)
    other = os.open(file, os.O_WRONLY)
    seen = bytearray()

    def look(piece: memoryview) -> None:
        seen.extend(piece)
        os.pwrite(other, bytes(4 * MIB), 0)

    fill(fd, arena, 0, seen=look)
    os.close(other)
    assert seen == arena
    assert any(seen[:PIECE_NBYTES])
    assert not any(seen[PIECE_NBYTES:])


def test_files_that_cannot_be_mapped_count_as_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they are read as ever where nothing else tells; so does a range beyond the end."""
    monkeypatch.setattr(syscalls, "_SYS_CACHESTAT", 10**6)
    with open("/proc/self/status", "rb") as status:
        assert is_cached(status.fileno(), 0, 4096)
    (tmp_path / "short").write_bytes(b"short")
    with open(tmp_path / "short", "rb") as short:
        assert is_cached(short.fileno(), 0, 1 << 20)


def fill_cached(fd: int, targets: list[memoryview], start: int) -> tuple[bool, bytes]:
    """Whether all was at hand, and what was seen."""
    seen, file = bytearray(), OpenFile(os.dup(fd))
    is_asked = localreads.is_at_hand(file, start, sum(map(len, targets)))
    is_filled = is_asked and localreads.fill_cached(file, start, targets, seen.extend)
    return is_filled, bytes(seen)


@pytest.fixture
def warm_fd(fd: int, arena: memoryview) -> int:
    """The file, all of it cached, where that can be read without waiting."""
    warm(fd)
    if not fill_cached(fd, [arena[:1]], 0)[0]:
        pytest.skip("this file system always waits")
    return fd


@pytest.mark.parametrize("start", [0, 1, 4096, MIB - 3])
@pytest.mark.parametrize(
    "sizes", [[3 * MIB], [1, 0, MIB, MIB + 1, 7], [999] * 3000, [MIB, *[1] * 2500]], ids=len
)
def test_what_is_at_hand_goes_to_many_places_in_order(
    warm_fd: int, file: Path, arena: memoryview, sizes: list[int], start: int
) -> None:
    """More of them than one call takes, and such that end anywhere."""
    targets, done = [], 0
    for nbytes in sizes:
        targets.append(arena[done : done + nbytes])
        done += nbytes
    expected = file.read_bytes()[start : start + done]
    assert fill_cached(warm_fd, targets, start) == (True, expected)
    assert arena[:done] == expected
    assert not any(arena[done:])


def test_nothing_is_waited_for_nor_brought_in(warm_fd: int, arena: memoryview) -> None:
    """The kernel would read ahead for a read that does not wait, too."""
    cool(warm_fd)
    assert fill_cached(warm_fd, [arena], 0) == (False, b"")
    assert not is_cached(warm_fd, 0, len(arena))


@pytest.mark.parametrize("gone", [(0, MIB), (MIB, MIB), (3 * MIB, MIB), (2 * MIB, 4096)])
def test_what_is_at_hand_in_part_is_not_at_hand(
    warm_fd: int, arena: memoryview, gone: tuple[int, int]
) -> None:
    """Nothing is copied, and nothing brought in."""
    cool(warm_fd)
    os.posix_fadvise(warm_fd, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    os.pread(warm_fd, gone[0], 0)
    os.pread(warm_fd, len(arena) - sum(gone), sum(gone))
    assert fill_cached(warm_fd, [arena], 0) == (False, b"")
    assert not is_cached(warm_fd, gone[0], sum(gone))


def test_what_goes_while_it_is_copied_is_not_waited_for(warm_fd: int, arena: memoryview) -> None:
    file = OpenFile(os.dup(warm_fd))
    assert localreads.is_at_hand(file, 0, len(arena))
    seen: list[int] = []

    def look(piece: memoryview) -> None:
        seen.append(len(piece))
        cool(warm_fd)

    assert not localreads.fill_cached(file, 0, [arena], look)
    assert seen == [PIECE_NBYTES]


def test_beyond_the_end_nothing_is_at_hand(warm_fd: int, arena: memoryview) -> None:
    assert not fill_cached(warm_fd, [arena[:200]], 4 * MIB)[0]
    assert fill_cached(warm_fd, [arena[:99]], 4 * MIB)[0]


def test_where_the_kernel_cannot_read_without_waiting_nothing_is_at_hand(
    warm_fd: int, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where it does not tell what is cached, for sure."""
    with open("/proc/self/status", "rb") as status:
        file = OpenFile(os.dup(status.fileno()))
        assert not localreads.fill_cached(file, 0, [arena[:10]], bytearray().extend)
    with monkeypatch.context() as patch:
        patch.setattr(localreads, "_NO_WAIT", 0)
        assert not fill_cached(warm_fd, [arena[:10]], 0)[0]
    assert fill_cached(warm_fd, [arena[:10]], 0)[0]
    monkeypatch.setattr(syscalls, "_SYS_CACHESTAT", 10**6)
    assert not fill_cached(warm_fd, [arena[:10]], 0)[0]


def test_nothing_is_at_hand_in_a_store_that_watches_its_reads(
    warm_fd: int, store: LocalStore, file: Path
) -> None:
    class Watching(LocalStore):
        def read_into(self, key: str, start: int, buffer: memoryview, **how: Any) -> None:
            super().read_into(key, start, buffer, **how)

    with store.keeping_open():
        assert store.cached("file", 0, MIB) is not None
    watching = Watching(file.parent)
    with watching.keeping_open():
        assert watching.cached("file", 0, MIB) is None


def test_what_is_at_hand_stays_open_for_as_long_as_it_is_held(
    warm_fd: int, store: LocalStore, arena: memoryview, file: Path
) -> None:
    """Also when the file is deleted meanwhile; then it is closed."""
    with store.keeping_open():
        fill = store.cached("file", 0, MIB)
    file.unlink()
    assert fill is not None
    assert fill([arena[:MIB]], bytearray().extend)
    del fill
    assert num_open(file.parent) == 1  # the test's own


@pytest.fixture
def store(file: Path) -> LocalStore:
    """The folder of the file."""
    return LocalStore(file.parent)


def num_open(path: Path) -> int:
    """How many descriptors of this process are of files in a folder, removed ones too."""
    return sum(
        os.readlink(f"/proc/self/fd/{name}").startswith(f"{path}/")
        for name in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{name}")
    )


def test_a_file_stays_open_while_anybody_reads_much(
    store: LocalStore, tmp_path: Path, arena: memoryview
) -> None:
    """Once for ordinary reads and once for direct ones; closed when the last one has ended."""
    with store.keeping_open():
        with store.keeping_open():
            for start in (0, MIB, 2 * MIB):
                store.read_into("file", start, arena[:MIB])
            assert 1 <= num_open(tmp_path) <= 2
        store.get("file", 0, 10)
        assert 1 <= num_open(tmp_path) <= 2
    assert num_open(tmp_path) == 0
    store.read_into("file", 0, arena[:MIB])
    assert num_open(tmp_path) == 0


def test_a_file_that_was_replaced_or_removed_is_not_read_on(
    store: LocalStore, file: Path, tmp_path: Path
) -> None:
    """Not even where nobody would compare a digest."""
    with store.keeping_open():
        store.get("file", 0, 10)
        store.put("file", b"other bytes")
        assert store.get("file") == b"other bytes"
        store.delete("file")
        with pytest.raises(NotFound):
            store.get("file", 0, 1)
        assert num_open(tmp_path) == 0


def test_a_file_that_has_another_name_too_is_not_read_on_under_one_that_it_lost(
    store: LocalStore, file: Path, tmp_path: Path
) -> None:
    """Unchanged files are names of one file, which outlives each of them."""
    with store.keeping_open():
        store.get("file", 0, 10)
        os.link(file, tmp_path / "linked")
        store.put("file", b"other bytes")
        assert store.get("file") == b"other bytes"
        os.link(file, tmp_path / "linked too")
        store.delete("file")
        with pytest.raises(NotFound):
            store.get("file", 0, 1)


def test_nothing_stays_open_for_a_reader_that_ends_while_a_file_is_opened(file: Path) -> None:
    """It would hold the room of a file that is deleted later."""
    files = OpenFiles()
    reading = files.keep_open()
    reading.__enter__()

    class Late(dict[str, OpenFile]):
        def __setitem__(self, path: str, opened: OpenFile) -> None:
            reading.__exit__(None, None, None)
            super().__setitem__(path, opened)

    files._files = Late()
    files.keep(str(file), OpenFile(os.open(file, os.O_RDONLY)))
    assert num_open(file.parent) == 0


def test_what_is_read_afresh_is_opened_anew(
    store: LocalStore, file: Path, arena: memoryview
) -> None:
    """A file that still has a name, but not this one any more."""
    with store.keeping_open():
        store.read_into("file", 0, arena[:MIB])
        file.rename(file.with_name("elsewhere"))
        file.write_bytes(bytes(MIB))
        store.read_into("file", 0, arena[:MIB], afresh=True)
    assert not any(arena[:MIB])


def test_only_some_files_stay_open(store: LocalStore, tmp_path: Path) -> None:
    """However many a checkpoint has."""
    for number in range(localreads._NUM_OPEN + 20):
        (tmp_path / str(number)).write_bytes(b"x")
    with store.keeping_open():
        for number in range(localreads._NUM_OPEN + 20):
            store.get(str(number))
        assert num_open(tmp_path) == localreads._NUM_OPEN


def test_what_stays_open_makes_room_where_descriptors_are_few(
    store: LocalStore, tmp_path: Path, arena: memoryview
) -> None:
    """A load needs no more of them than it did when it opened a file for each read."""
    for number in range(30):
        (tmp_path / str(number)).write_bytes(noise(DIRECT_NBYTES_MIN))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 10, limits[1]))
        with store.keeping_open():
            for number in range(30):
                store.read_into(str(number), 0, arena[:DIRECT_NBYTES_MIN])
                assert arena[:DIRECT_NBYTES_MIN] == noise(DIRECT_NBYTES_MIN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert num_open(tmp_path) == 0


def test_a_refused_kind_of_file_does_not_stay_open(store: LocalStore, tmp_path: Path) -> None:
    """A fifo is refused each time, and no descriptor of it is left."""
    os.mkfifo(tmp_path / "fifo")
    with store.keeping_open():
        for _ in range(2):
            with pytest.raises(StoreError, match="not a regular file"):
                store.get("fifo", 0, 1)
        assert num_open(tmp_path) == 0


def test_threads_read_from_one_open_file(store: LocalStore, file: Path) -> None:
    """Also while others end, and while the file is opened anew."""
    expected = file.read_bytes()

    def check(number: int) -> bool:
        memory = memoryview(mmap.mmap(-1, MIB))
        start = number % 4 * MIB
        with store.keeping_open():
            store.read_into("file", start, memory, afresh=number % 5 == 0)
        return memory == expected[start : start + MIB]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(200)))
    assert num_open(file.parent) == 0


def test_a_read_that_brings_less_than_was_asked_for_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of file systems of networks; what it did not bring is not what was in memory before."""
    really_read = os.preadv
    data = noise(10_000)
    store = LocalStore(tmp_path, direct_io=False)
    store.put("a", data)

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        return really_read(fd, [buffers[0][:999]], offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    found = bytearray(len(data))
    store.read_into("a", 0, memoryview(found))
    assert found == data
