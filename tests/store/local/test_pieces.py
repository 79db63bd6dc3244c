"""LocalPieces: one fetch for all processes of a host, whole copies only, within their room."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from children import Child
from holdfast.errors import TransientStoreError
from holdfast.store.base import ignore
from holdfast.store.local.pieces import LocalPieces
from store.local.pieces_child import NBYTES, OBJECT, content, piece

CHILD = Path(__file__).with_name("pieces_child.py")
ON_DISK = -(-NBYTES // 4096) * 4096
ROOM = 1 << 30


class Fetcher(Child):
    """A process that reads pieces once it is told to."""

    def __init__(self, folder: Path, how: str, *numbers: int, max_nbytes: int = ROOM) -> None:
        self.log = folder / "log"
        super().__init__(CHILD, folder, max_nbytes, self.log, how, *numbers)
        self.expect("ready")


class Reader:
    """Reads pieces here, and counts the fetches."""

    def __init__(self, folder: Path, *, max_nbytes: int = ROOM, wait_s: float = 60) -> None:
        self.pieces = LocalPieces(folder, max_nbytes=max_nbytes, wait_s=wait_s)
        self.fetched: Counter[int] = Counter()
        self.before: Callable[[], object] = lambda: None

    def __call__(self, number: int, seen: Callable[[memoryview], object] = ignore) -> None:
        def fetch(start: int, memory: memoryview, show: Callable[[memoryview], object]) -> None:
            self.before()
            self.fetched[number] += 1
            memory[:] = content(number)[start % NBYTES :][: len(memory)]
            show(memory)

        memory = bytearray(NBYTES)
        self.pieces.read_piece(
            piece(number), piece(number).start, memoryview(memory), fetch, seen=seen
        )
        assert memory == content(number)


def files(folder: Path) -> dict[str, int]:
    """Copies and drafts by their last names, and what they take."""
    found = [path for path in folder.rglob("0*") if path.is_file()]
    return {path.name: -(-path.stat().st_size // 4096) * 4096 for path in sorted(found)}


def names(*numbers: int) -> set[str]:
    return {f"{number:08d}" for number in numbers}


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Fetcher]]:
    with ExitStack() as stack:
        yield lambda *words, **options: stack.enter_context(Fetcher(tmp_path, *words, **options))


# One fetch


def test_four_processes_of_four_threads_fetch_each_piece_once(
    tmp_path: Path, child: Callable[..., Fetcher]
) -> None:
    numbers = range(40)
    children = [child("reads", *numbers) for _ in range(4)]
    for one in children:
        one.go_on()
    for one in children:
        one.expect("done")
    fetched = children[0].log.read_text().split()
    assert sorted(map(int, fetched)) == list(numbers)
    assert set(files(tmp_path)) == names(*numbers)


def test_threads_fetch_each_piece_once(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(reader, [number % 10 for number in range(80)]))
    assert reader.fetched == Counter(range(10))


def test_a_process_that_is_killed_in_a_fetch_leaves_nothing_in_the_way(
    tmp_path: Path, child: Callable[..., Fetcher]
) -> None:
    """R1, R9: the kernel gives its lock back, and its draft becomes the next one's."""
    hanging = child("hangs", 1)
    hanging.go_on()
    hanging.expect("fetching")
    assert set(files(tmp_path)) == {"00000001.part"}
    hanging.kill()
    reader = Reader(tmp_path)
    reader(1)
    assert reader.fetched == Counter([1])
    assert set(files(tmp_path)) == names(1)
    reader(1)
    assert reader.fetched == Counter([1])


def test_a_child_of_a_killed_process_holds_nothing_of_it(
    tmp_path: Path, child: Callable[..., Fetcher]
) -> None:
    """R1, R9: a worker of a DataLoader outlives the process that has forked it."""
    hanging = child("forks", 1)
    hanging.go_on()
    hanging.expect("fetching")
    hanging.kill()
    reader = Reader(tmp_path)
    reader(1)
    assert reader.fetched == Counter([1])
    assert set(files(tmp_path)) == names(1)


def test_who_forks_keeps_its_locks(tmp_path: Path, child: Callable[..., Fetcher]) -> None:
    """The child gives back nothing that is its parent's."""
    hanging, waiting = child("forks", 1), child("reads", 1)
    hanging.go_on()
    hanging.expect("fetching")
    reader = Reader(tmp_path, wait_s=0)
    reader(1)
    assert set(files(tmp_path)) == {"00000001.part"}
    waiting.go_on()
    hanging.kill()
    waiting.expect("done")
    assert set(files(tmp_path)) == names(1)


def test_who_waits_for_a_process_that_is_killed_goes_on(
    tmp_path: Path, child: Callable[..., Fetcher]
) -> None:
    """R1: without waiting for the deadline."""
    hanging, waiting = child("hangs", 1), child("reads", 1)
    hanging.go_on()
    hanging.expect("fetching")
    waiting.go_on()
    hanging.kill()
    waiting.expect("done")
    assert waiting.log.read_text().split() == ["1", "1"]


def test_nobody_waits_for_ever(tmp_path: Path, child: Callable[..., Fetcher]) -> None:
    """Invariant 9: who has waited long enough fetches, and leaves the other one's draft alone."""
    hanging = child("hangs", 1)
    hanging.go_on()
    hanging.expect("fetching")
    reader = Reader(tmp_path, wait_s=0)
    reader(1)
    reader(2)
    assert reader.fetched == Counter([1, 2])
    assert set(files(tmp_path)) == {"00000001.part", "00000002"}
    hanging.go_on()
    hanging.expect("done")
    assert set(files(tmp_path)) == names(1, 2)


def test_a_fetch_that_fails_is_told_and_tried_by_the_next(tmp_path: Path) -> None:
    reader = Reader(tmp_path)

    def fail() -> None:
        raise TransientStoreError("no network")

    reader.before = fail
    with pytest.raises(TransientStoreError, match="no network"):
        reader(1)
    assert files(tmp_path) == {}
    reader.before = lambda: None
    reader(1)
    assert set(files(tmp_path)) == names(1)


def test_who_waits_for_a_fetch_that_fails_fetches(tmp_path: Path) -> None:
    first, second = Reader(tmp_path), Reader(tmp_path)
    fetching, waiting = threading.Event(), threading.Event()

    def fail() -> None:
        fetching.set()
        assert waiting.wait(60)
        raise TransientStoreError("no network")

    first.before = fail
    with ThreadPoolExecutor(2) as pool:
        failed = pool.submit(first, 1)
        assert fetching.wait(60)
        done = pool.submit(second, 1)
        waiting.set()
        assert isinstance(failed.exception(60), TransientStoreError)
        done.result(60)
    assert second.fetched == Counter([1])


@pytest.mark.parametrize("left", [b"", b"junk", b"longer" * NBYTES])
def test_what_a_dead_process_left_is_overwritten(tmp_path: Path, left: bytes) -> None:
    reader = Reader(tmp_path)
    reader(1)
    (path,) = tmp_path.rglob("00000001")
    path.unlink()
    path.with_suffix(".part").write_bytes(left)
    reader(1)
    assert path.read_bytes() == content(1)
    assert set(files(tmp_path)) == names(1)


def test_a_part_of_a_piece_brings_the_whole_piece(tmp_path: Path) -> None:
    """Each byte from its own place: when the piece is fetched, and then from the copy."""
    reader, whole = Reader(tmp_path), (bytes(range(251)) * NBYTES)[:NBYTES]
    fetched: list[tuple[int, int]] = []

    def fetch(start: int, part: memoryview, show: Callable[[memoryview], object]) -> None:
        fetched.append((start, len(part)))
        part[:] = whole

    for offset in (5, 5, 0, 100):
        memory, seen = bytearray(10), bytearray()
        start = piece(3).start + offset
        reader.pieces.read_piece(piece(3), start, memoryview(memory), fetch, seen=seen.extend)
        assert memory == seen == whole[offset : offset + 10]
    assert fetched == [(piece(3).start, NBYTES)]


# Room


def test_copies_keep_to_their_room_and_the_least_recently_used_go(tmp_path: Path) -> None:
    reader = Reader(tmp_path, max_nbytes=10 * ON_DISK)
    for number in range(10):
        reader(number)
    reader(0)  # used again, so others go first
    for number in range(10, 40):
        reader(number)
        assert sum(files(tmp_path).values()) <= 10 * ON_DISK
        if number == 11:
            assert names(0) <= set(files(tmp_path))
            assert not names(1, 2) & set(files(tmp_path))
    assert len(files(tmp_path)) > 7


def test_processes_keep_to_one_room_together(tmp_path: Path, child: Callable[..., Fetcher]) -> None:
    room = 12 * ON_DISK
    children = [child("reads", *range(at, at + 30), max_nbytes=room) for at in (0, 10, 20)]
    for one in children:
        one.go_on()
    for one in children:
        one.expect("done")
    assert sum(files(tmp_path).values()) <= room
    assert not [name for name in files(tmp_path) if name.endswith(".part")]


@pytest.mark.parametrize(
    "count", [None, b"", b"junk", b"-1", b"9" * 20, b"9" * 40, b"\xff" * 8, b"0" * 20 + b" another"]
)
def test_a_count_that_is_lost_or_damaged_is_taken_anew(tmp_path: Path, count: bytes | None) -> None:
    reader = Reader(tmp_path, max_nbytes=5 * ON_DISK)
    for number in range(5):
        reader(number)
    (path,) = tmp_path.rglob("count")
    if count is None:
        path.unlink()
    else:
        path.write_bytes(count)
    for number in range(5, 12):
        reader(number)
        assert sum(files(tmp_path).values()) <= 5 * ON_DISK
    assert reader.fetched == Counter(range(12))


def test_clearing_takes_what_dead_processes_left_and_nothing_else(
    tmp_path: Path, child: Callable[..., Fetcher]
) -> None:
    """What is not ours stays, and so does what somebody works on."""
    dead, hanging = child("hangs", 100), child("hangs", 101)
    for one in (dead, hanging):
        one.go_on()
        one.expect("fetching")
    dead.kill()
    (ours,) = tmp_path.glob("holdfast-cache-*")
    mine = ("README", "20240101", "backup/20240101", f"{OBJECT}/notes", f"{OBJECT}/a/20240101")
    foreign = [tmp_path / "00000007", *(ours / name for name in mine)]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    reader = Reader(tmp_path, max_nbytes=3 * ON_DISK)
    for number in range(6):
        reader(number)
    assert not list(ours.rglob("00000100*"))
    assert list(ours.rglob("00000101.part"))
    assert all(path.read_bytes() == b"mine" for path in foreign)
    hanging.go_on()
    hanging.expect("done")


def test_a_process_that_stops_while_it_counts_delays_one_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 9: after that nothing is kept, and nobody waits."""
    reader = Reader(tmp_path)
    reader(1)
    (path,) = tmp_path.rglob("count")
    monkeypatch.setattr("holdfast.store.local.pieces._COUNT_WAIT_S", 0)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        reader(2)
        monkeypatch.setattr("holdfast.store.local.pieces._COUNT_WAIT_S", 10_000)
        reader(3)
        reader(1)
    assert reader.fetched == Counter([1, 2, 3])
    assert set(files(tmp_path)) == names(1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_is_larger_than_the_room_is_not_kept(tmp_path: Path) -> None:
    reader = Reader(tmp_path, max_nbytes=ON_DISK - 1)
    reader(1)
    reader(1)
    assert reader.fetched == Counter({1: 2})
    assert files(tmp_path) == {}


def test_a_copy_that_goes_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    reader = Reader(tmp_path, max_nbytes=2 * ON_DISK)
    reader(1)
    seen = bytearray()

    def see(part: memoryview) -> None:
        seen.extend(part)
        for number in range(2, 6):
            reader(number)
        assert "00000001" not in files(tmp_path)

    reader(1, see)
    assert seen == content(1)
    assert reader.fetched[1] == 1


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "cache")
    reader(1)
    shutil.rmtree(tmp_path / "cache")
    reader(1)
    reader(1)
    assert reader.fetched == Counter({1: 2})


def test_a_folder_that_is_removed_in_a_fetch_costs_a_copy_and_no_more(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "cache")
    reader.before = lambda: shutil.rmtree(tmp_path / "cache")
    reader(1)
    reader.before = lambda: None
    reader(1)
    reader(1)
    assert reader.fetched == Counter({1: 2})


def test_a_folder_that_another_process_tidies_away_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader(tmp_path)
    mkdir = os.mkdir
    tidied: list[str] = []

    def raced(path: str, mode: int = 0o777) -> None:
        if path.endswith("object") and not tidied:
            tidied.append(path)
            os.rmdir(os.path.dirname(path))
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", raced)
    reader(1)
    reader(1)
    assert tidied
    assert reader.fetched == Counter({1: 1})
    assert caplog.records == []


def test_what_is_forgotten_is_fetched_again(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for number in (1, 2, 3):
        reader(number)
    reader.pieces.remove_copies(piece(1).place)
    assert set(files(tmp_path)) == names(2, 3)
    (ours,) = tmp_path.glob("holdfast-cache-*")
    (ours / OBJECT / "mine").write_bytes(b"mine")
    reader.pieces.remove_copies(OBJECT.rpartition("/")[0])
    assert files(tmp_path) == {}
    assert (ours / OBJECT / "mine").read_bytes() == b"mine"
    reader(2)
    assert reader.fetched[2] == 2


def test_only_this_user_may_read_copies(tmp_path: Path) -> None:
    """Also after somebody has removed the folder of a process that lives."""
    reader = Reader(tmp_path)
    for number in (1, 2):
        reader(number)
        (ours,) = tmp_path.glob("holdfast-cache-*")
        assert ours.stat().st_mode & 0o077 == 0
        shutil.rmtree(ours)


def test_a_link_in_the_place_of_a_folder_that_was_removed_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R28: anybody may make something there meanwhile."""
    reader = Reader(tmp_path)
    reader(1)
    (ours,) = tmp_path.glob("holdfast-cache-*")
    shutil.rmtree(ours)
    (tmp_path / "elsewhere").mkdir()
    ours.symlink_to("elsewhere")
    reader(1)
    assert os.listdir(tmp_path / "elsewhere") == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R28: who has the folder could put anything into it."""
    Reader(tmp_path)(1)
    (ours,) = tmp_path.glob("holdfast-cache-*")
    os.chown(ours, 65534, 65534)
    reader = Reader(tmp_path)
    reader(1)
    reader(1)
    assert reader.fetched == Counter({1: 2})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
