"""Large objects in pieces: order, memory, deadlines and giving up, against a real server."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.errors import StoreError, TransientStoreError
from holdfast.store.remote import RemoteStore
from holdfast.store.remote.opening import RemoteOptions
from holdfast.store.remote.writes import COPY_NBYTES, PART_NBYTES
from holdfast.testing.store_contract import noise
from marks import full
from servers.client import uploads
from servers.fixtures import on
from servers.program import Service
from store.remote.answers import Answer, answering, refusal

LENGTH = 3 * PART_NBYTES + 12_345
IMPATIENT = RemoteOptions(max_concurrency=1, max_retries=0, timeout_s=0.5, retry_s=0.5)
"""Memory for four pieces, and a second of patience."""


@pytest.fixture
def store(root: str) -> RemoteStore:
    return RemoteStore(root)


def left_of(service: Service, root: str) -> list[tuple[str, str]]:
    """Uploads that nobody completed or aborted."""
    return uploads(service, root.removeprefix(service.root("")))


@on("moto")
@pytest.mark.parametrize("piece_nbytes", [COPY_NBYTES, 1_000_003, LENGTH])
def test_pieces_of_any_size_from_one_thread_make_the_object(
    store: RemoteStore, service: Service, root: str, piece_nbytes: int
) -> None:
    data = memoryview(noise(LENGTH))
    writer = store.create("a", LENGTH)
    for start in range(0, LENGTH, piece_nbytes):
        writer.write(start, data[start : start + piece_nbytes])
    writer.finish()
    assert store.get("a") == data
    assert left_of(service, root) == []


@on("moto")
def test_pieces_of_several_objects_may_come_from_many_threads_out_of_order(
    service: Service, root: str
) -> None:
    """Also with the memory of one request: what must go next always may."""
    store = RemoteStore(root, options=RemoteOptions(max_concurrency=1))
    data = memoryview(noise(LENGTH))
    writers = [store.create(name, LENGTH) for name in ("a", "b", "c")]
    starts = [*range(0, LENGTH, COPY_NBYTES)]
    # Neighbours change places, and the objects take turns.
    order = [start for pair in zip(starts[1::2], starts[::2], strict=False) for start in pair]
    jobs = [(writer, start) for start in (*order, starts[-1]) for writer in writers]
    with ThreadPoolExecutor(8) as pool:
        written = pool.map(lambda job: job[0].write(job[1], _piece(data, job[1])), jobs)
        list(written)
    for writer in writers:
        writer.finish()
    for name in ("a", "b", "c"):
        assert store.get(name) == data


@on("moto")
def test_memory_is_free_when_write_returns(store: RemoteStore, root: str) -> None:
    data = bytearray(noise(LENGTH))
    expected = bytes(data)
    writer = store.create("a", LENGTH)
    for start in range(0, LENGTH, COPY_NBYTES):
        writer.write(start, memoryview(data)[start : start + COPY_NBYTES])
        data[start : start + COPY_NBYTES] = bytes(len(data[start : start + COPY_NBYTES]))
    writer.finish()
    assert store.get("a") == expected


@on("moto")
def test_a_piece_that_never_comes_ends_the_waiting_of_the_others(
    service: Service, root: str
) -> None:
    """Invariant 9: an object without its beginning, whose rest fills the memory."""
    store = RemoteStore(root, options=IMPATIENT)
    writer = store.create("a", 8 * COPY_NBYTES)
    piece = memoryview(bytes(COPY_NBYTES))
    for number in range(1, 5):
        writer.write(number * COPY_NBYTES, piece)
    with pytest.raises(StoreError, match="byte 0 is missing") as caught:
        writer.write(5 * COPY_NBYTES, piece)
    assert not isinstance(caught.value, TransientStoreError)  # again, it would end the same way
    writer.abort()
    assert left_of(service, root) == []


@on("moto")
def test_giving_up_wakes_who_waits(service: Service, root: str) -> None:
    store = RemoteStore(root, options=RemoteOptions(max_concurrency=1))
    writer = store.create("a", 8 * COPY_NBYTES)
    piece = memoryview(bytes(COPY_NBYTES))
    for number in range(1, 5):
        writer.write(number * COPY_NBYTES, piece)
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        writer.write(5 * COPY_NBYTES, piece)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        begun.wait(timeout=60)
        writer.abort()
        with pytest.raises(StoreError, match="finished or aborted"):
            waiting.result(timeout=60)
    assert left_of(service, root) == []
    assert list(store.list()) == []


@on("moto")
def test_giving_up_a_complete_object_removes_it(store: RemoteStore, root: str) -> None:
    for nbytes in (1000, LENGTH):
        writer = store.create("a", nbytes)
        writer.write(0, memoryview(noise(nbytes)))
        writer.abort()
        assert list(store.list()) == []


@on("moto")
def test_an_object_with_holes_is_never_finished(
    store: RemoteStore, service: Service, root: str
) -> None:
    """Invariant 2: of an object of several requests, too."""
    writer = store.create("a", LENGTH)
    writer.write(0, memoryview(bytes(LENGTH - 5)))
    with pytest.raises(StoreError, match=f"5 of {LENGTH}"):
        writer.finish()
    writer.abort()
    with pytest.raises(StoreError, match="finished or aborted"):
        writer.write(LENGTH - 5, memoryview(bytes(5)))
    assert left_of(service, root) == []


@on("moto")
def test_objects_pass_limits_of_the_rate_unharmed(root: str) -> None:
    store = RemoteStore(root, options=RemoteOptions(max_upload_mb_s=2000, max_download_mb_s=2000))
    data = memoryview(noise(LENGTH))
    writer = store.create("a", LENGTH)
    writer.write(0, data)
    writer.finish()
    buffer = bytearray(LENGTH)
    store.read_into("a", 0, memoryview(buffer))
    assert buffer == data


@on("moto")
def test_a_store_that_is_dropped_leaves_no_thread(root: str) -> None:
    store = RemoteStore(root)
    before = set(threading.enumerate())
    writer = store.create("a", LENGTH)
    (thread,) = set(threading.enumerate()) - before
    writer.write(0, memoryview(bytes(LENGTH)))
    writer.finish()
    del store, writer
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def _piece(data: memoryview, start: int) -> memoryview:
    return data[start : start + COPY_NBYTES]


class Held:
    """A service whose parts arrive when the test lets them, and the memory that uploads take."""

    def __init__(self, store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.may_end = threading.Event()
        self.is_stuck_or_done = threading.Event()
        self.most = 0
        uploads = store._uploads
        take, wait = uploads.acquire_copy_memory, uploads.changed.wait

        def counted() -> Any:
            buffer = take()
            self.most = max(self.most, uploads._num_taken)
            return buffer

        def watched(timeout: float | None = None) -> bool:
            if not wait(timeout):
                self.is_stuck_or_done.set()
            return True

        monkeypatch.setattr(uploads, "acquire_copy_memory", counted)
        monkeypatch.setattr(uploads.changed, "wait", watched)

    def run(self, job: Callable[[], None]) -> None:
        """Hold all parts back until the job cannot go on, or has ended."""

        def ending() -> None:
            job()
            self.is_stuck_or_done.set()

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ending)
            assert self.is_stuck_or_done.wait(60)
            self.may_end.set()
            running.result(timeout=60)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Memory for four pieces, and one request at a time."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    begun = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    ended = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"

    with answering() as (endpoint, answers):
        options = RemoteOptions(max_concurrency=1)
        held = Held(RemoteStore("s3://b-1/run", endpoint=endpoint, options=options), monkeypatch)

        def answer(method: str, path: str) -> Answer:
            if method == "HEAD":
                return refusal(404, "NoSuchKey")
            if method == "PUT":
                held.may_end.wait(timeout=60)
            body = ended if "uploadId" in path else begun
            return Answer(body=b"" if method == "PUT" else body, headers={"ETag": '"x"'})

        answers.then = answer
        yield held
        held.may_end.set()


def test_many_objects_at_once_share_the_memory_of_a_few(held: Held) -> None:
    """While parts are on their way, no other object takes more than there is."""
    data = memoryview(bytes(PART_NBYTES + 1000))
    writers = [held.store.create(f"{number}", len(data)) for number in range(12)]

    def write() -> None:
        for writer in writers:
            writer.write(0, data)
        held.may_end.set()
        for writer in writers:
            writer.finish()

    held.run(write)
    assert held.most <= 5, "four, and one without which an object could not go on"


@pytest.mark.full
@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("num_threads", [1, *full(12)])
def test_objects_that_take_turns_share_it_too(held: Held, num_threads: int, at_most: bool) -> None:
    """None keeps what cannot be sent yet while the others wait for its memory."""
    piece = memoryview(bytes(COPY_NBYTES))
    length = 3 * COPY_NBYTES
    writers = [
        held.store.create(f"{number}", length, at_most=at_most) for number in range(num_threads)
    ] + [held.store.create(f"more-{number}", length, at_most=at_most) for number in range(12)]
    jobs = [(writer, start) for start in range(0, length, COPY_NBYTES) for writer in writers]

    def write() -> None:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda job: job[0].write(job[1], piece), jobs))
            list(pool.map(lambda writer: writer.finish(length), writers))

    held.run(write)
    # The first object has parts of two pieces. Until `finish` nobody knows that its third piece is
    # the last, so that one waits for more without being on its way.
    waiting = 1 if at_most else 0
    assert held.most <= 5 + waiting, "four, one without which an object could not go on, and that"
