"""What is special about a remote store; the contract is tested on each server in tests/stores."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from holdfast.errors import (
    AccessDenied,
    CorruptData,
    HoldfastError,
    LimitExceeded,
    NotFound,
    StoreError,
    TransientStoreError,
    UnsupportedStore,
)
from holdfast.events import logger
from holdfast.store.remote import RemoteStore
from holdfast.store.remote import api as remoteapi
from holdfast.store.remote.api import RateLimit
from holdfast.store.remote.opening import RemoteOptions
from holdfast.testing.store_contract import noise
from marks import full
from servers.fixtures import on
from store.remote.answers import RESET, Answer, answering, refusal

LENGTH = 20 * 1024 * 1024 + 3
"""More than two reads of blocks."""

FORK = """
import os, sys
from holdfast.store import open_store
from holdfast.errors import UnsupportedStore
store = open_store(sys.argv[1])
unused = open_store(sys.argv[1] + "-unused")
store.put("a", b"x")
child = os.fork()
if not child:
    for one in (store, unused):
        try:
            one.get("a")
        except UnsupportedStore as error:
            print(error, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.get("a") == b"x"
"""


@on("moto", "gcs")
def test_a_forked_process_is_told_instead_of_hanging(root: str) -> None:
    """Invariant 9: the threads of the network stay behind in the parent."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, root], capture_output=True, text=True, timeout=120, check=True
    )
    told = done.stdout.splitlines()
    assert len(told) == 2
    assert all("spawn or forkserver" in line for line in told)


FORK_AT_WORK = """
import os, sys, threading
from contextlib import suppress
from holdfast.errors import NotFound, UnsupportedStore
from holdfast.store.remote import RemoteOptions, RemoteStore
from holdfast.store.remote.writes import PART_NBYTES
patient = RemoteOptions(max_concurrency=1, timeout_s=3600, retry_s=3600)
store = RemoteStore("s3://b-1/run", endpoint=sys.argv[1], options=patient)
writer = store.create("new", 2 * PART_NBYTES)
threading.Thread(target=lambda: store.get("slow"), daemon=True).start()
with suppress(NotFound):
    store.head("answered-when-slow-was-asked-for")
child = os.fork()
if not child:
    piece = memoryview(bytes(100))
    for ask in (
        lambda: store.get("a"),
        lambda: store.get("a", 0, 10),
        lambda: store.read_into("a", 0, memoryview(bytearray(10))),
        lambda: store.put("a", b""),
        lambda: store.put("a", b"", if_absent=True),
        lambda: store.head("a"),
        lambda: [*store.list()],
        lambda: store.delete("a"),
        lambda: store.create("a", 100),
        lambda: store.probe(),
        lambda: writer.write(0, piece),
        lambda: writer.finish(),
    ):
        try:
            ask()
        except UnsupportedStore as error:
            print(error, flush=True)
    writer.abort()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


def test_a_process_forked_while_all_requests_are_under_way_is_told_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 9: the threads that will end them, and give back what they hold, are elsewhere."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    was_asked, may_end = threading.Event(), threading.Event()

    def answer(method: str, path: str) -> Answer:
        if path.endswith("/slow"):
            was_asked.set()
            may_end.wait(timeout=300)
        elif "slow" in path:
            was_asked.wait(timeout=60)
        return refusal(404, "NoSuchKey")

    with answering() as (endpoint, answers):
        answers.then = answer
        try:
            done = subprocess.run(
                [sys.executable, "-c", FORK_AT_WORK, endpoint],
                capture_output=True,
                text=True,
                timeout=120,
            )
        finally:
            may_end.set()
    told = done.stdout.splitlines()
    assert ["spawn or forkserver" in line for line in told] == [True] * 12, done.stderr


class Reads(Dataset[int]):
    """Samples that are read in a bucket, whoever asks for them."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.store.get("a")[index]


@on("moto", "gcs")
@pytest.mark.parametrize("method", ["fork", *full("spawn")])
def test_workers_of_a_data_loader_read_or_are_told(root: str, method: str) -> None:
    """Invariant 9"""
    store = RemoteStore(root)
    store.put("a", bytes(range(4)))
    samples = Reads(store) if method == "fork" else Reads(RemoteStore(root))
    loader = DataLoader(
        samples, batch_size=None, num_workers=2, multiprocessing_context=method, timeout=60
    )
    if method == "fork":
        with pytest.raises(UnsupportedStore, match="spawn or forkserver"):
            list(loader)
    else:
        assert list(loader) == [0, 1, 2, 3]


@pytest.mark.full
@on("moto", "gcs", "azurite")
def test_a_read_of_many_requests_is_exact(root: str) -> None:
    store = RemoteStore(root)
    data = noise(LENGTH)
    store.put("a", data)
    buffer, seen = bytearray(LENGTH - 7), bytearray()
    store.read_into("a", 7, memoryview(buffer), seen=seen.extend)
    assert buffer == seen == data[7:]
    with pytest.raises(CorruptData, match=f"has {LENGTH} bytes"):
        store.read_into("a", 8, memoryview(buffer))
    with pytest.raises(CorruptData, match=f"has {LENGTH} bytes"):
        store.get("a", 8, LENGTH)


@on("moto", "gcs", "azurite")
def test_it_says_how_large_objects_are_written_and_leaves_nothing(root: str) -> None:
    store = RemoteStore(root, options=RemoteOptions(max_concurrency=5))
    told = store.probe()
    assert "up to 16 MiB" in told
    assert "up to 5 at once" in told
    assert list(store.list()) == []
    assert list(store.uploads()) == []


@on("localstack")
def test_checksums_are_sent_where_they_are_asked_for(root: str) -> None:
    """LocalStack refuses a wrong one, and would refuse one that is missing in a part."""
    store = RemoteStore(root, options=RemoteOptions(checksums=True))
    data = memoryview(noise(LENGTH))
    store.put("a", data[:1000])
    writer = store.create("b", LENGTH)
    writer.write(0, data)
    writer.finish()
    assert store.get("a") == data[:1000]
    assert store.get("b") == data


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def store_at(endpoint: str, **options: Any) -> RemoteStore:
    return RemoteStore("s3://bucket/run", endpoint=endpoint, options=RemoteOptions(**options))


@contextmanager
def on_a_warning(action: Callable[[], object]) -> Iterator[None]:
    """Do something in the moment in which Holdfast warns."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: action()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


ONE_BYTE = {"Content-Range": "bytes 0-0/1", "ETag": '"1"'}
CUT = {"Content-Length": "9", "Connection": "close"}
ASKS: dict[str, Callable[[RemoteStore], object]] = {
    "children": lambda store: store.children(),
    "head": lambda store: store.head("a"),
    "get": lambda store: store.get("a"),
    "range": lambda store: store.get("a", 1, 2),
    "put": lambda store: store.put("a", b"x"),
    "list": lambda store: [*store.list()],
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
def test_a_wrong_address_is_told_at_once_and_again_at_the_end(
    ask: Callable[[RemoteStore], object], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"http://127.0.0.1:{closed_port()}"
    store = store_at(endpoint, retry_s=0.5)
    for _ in range(2):
        with pytest.raises(TransientStoreError) as raised:
            ask(store)
        assert endpoint in str(raised.value)
        assert "(Connect: Connection refused)" in str(raised.value)
        assert "No server answered there. Check the address (endpoint=)" in str(raised.value)
    (record,) = caplog.records
    assert record.getMessage().startswith("s3://bucket/run: no answer yet: ")
    assert "Connection refused). Retrying for up to 0.5 s. Check the address" in record.getMessage()


@pytest.mark.usefixtures("s3_credentials")
def test_an_unknown_host_is_told_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://mistyped.invalid:9000")
    store = RemoteStore("s3://bucket/run", options=RemoteOptions(retry_s=0.5))
    with pytest.raises(TransientStoreError, match=r"http://mistyped\.invalid:9000/bucket"):
        store.children()
    assert "Check the address (AWS_ENDPOINT_URL or " in caplog.text


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
def test_a_service_that_is_not_up_yet_is_waited_for(
    ask: Callable[[RemoteStore], object],
) -> None:
    """It starts when the warning is given, so after the first request."""
    port = closed_port()
    with ExitStack() as stack:

        def start() -> None:
            _, answers = stack.enter_context(answering(port))
            answers.then = refusal(403, "AccessDenied")

        store = store_at(f"http://127.0.0.1:{port}", retry_s=60)
        with on_a_warning(start), pytest.raises(AccessDenied):
            ask(store)


@pytest.mark.usefixtures("s3_credentials")
def test_waiting_for_a_first_answer_can_be_interrupted() -> None:
    """obstore waits without looking at signals."""
    store = store_at(f"http://127.0.0.1:{closed_port()}", retry_s=3600)
    with (
        on_a_warning(lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt),
    ):
        store.children()


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
def test_a_first_answer_is_waited_for_as_often_as_the_options_say(
    ask: Callable[[RemoteStore], object],
) -> None:
    with answering() as (endpoint, answers):
        answers.then = RESET
        with pytest.raises(TransientStoreError, match="No server answered there"):
            ask(store_at(endpoint, retry_s=60, max_retries=3))
        assert len(answers.asked) == 4


@pytest.mark.usefixtures("s3_credentials")
def test_nothing_is_told_of_a_service_that_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    with answering() as (endpoint, answers):
        answers.then = Answer(body=b"x")
        store = store_at(endpoint, retry_s=60)
        assert store.get("a") == b"x"
        answers.next_ones = [RESET, RESET]
        assert store.get("a") == b"x"
        assert len(answers.asked) == 4
    assert not caplog.records


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda store: [*store.list()], Answer(body=b"<ListBucketResult/>")),
        (lambda store: [*store.list()], refusal(403, "AccessDenied")),
        (lambda store: store.put("a", b"x", if_absent=True), Answer(headers={"ETag": '"1"'})),
        (lambda store: store.put("a", b"x", if_absent=True), refusal(412, "PreconditionFailed")),
        (lambda store: store.get("a", 0, 2), Answer(status=206, body=b"x", headers=ONE_BYTE)),
        (lambda store: store.get("a"), Answer(body=b"x", headers=CUT)),
        (lambda store: store.children(), Answer(body=b"x", headers=CUT)),
    ],
    ids=[
        "list",
        "refused list",
        "new put",
        "refused new put",
        "range beyond the end",
        "object that broke off",
        "list that broke off",
    ],
)
def test_whatever_it_answered_first_it_has_answered(
    ask: Callable[[RemoteStore], object], answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    with answering() as (endpoint, answers):
        store = store_at(endpoint, retry_s=0.5)
        answers.then = answer
        with suppress(HoldfastError):
            ask(store)
        answers.then = RESET
        with pytest.raises(TransientStoreError) as raised:
            store.get("a")
        assert "No server answered" not in str(raised.value)
    assert not caplog.records


@pytest.mark.usefixtures("s3_credentials")
def test_a_first_answer_costs_one_request_and_is_repeated_only_where_that_may_help() -> None:
    with answering() as (endpoint, answers):
        answers.next_ones = [refusal(404, "NoSuchKey")]
        with pytest.raises(NotFound):
            store_at(endpoint).get("a")
        assert len(answers.asked) == 1
        answers.next_ones = [refusal(500, "InternalError"), Answer(body=b"x")]
        assert store_at(endpoint).get("a") == b"x"
        assert len(answers.asked) == 3


@pytest.mark.usefixtures("s3_credentials")
def test_a_document_is_one_request_and_so_are_many_deletions() -> None:
    """A service is paid, and waited for, by request."""
    with answering() as (endpoint, answers):
        answers.then = Answer(body=b"12345")
        store = store_at(endpoint)
        assert store.get_whole("a", max_nbytes=5) == b"12345"
        with pytest.raises(LimitExceeded):
            store.get_whole("a", max_nbytes=4)
        assert len(answers.asked) == 2
        gone = "".join(f"<Deleted><Key>b/{number}</Key></Deleted>" for number in range(1000))
        answers.then = Answer(body=f"<DeleteResult>{gone}</DeleteResult>".encode())
        store.delete_many([f"b/{number}" for number in range(1001)])
        assert len(answers.asked) == 4


@pytest.mark.usefixtures("s3_credentials")
def test_a_document_that_waits_for_its_turn_keeps_no_request_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of bandwidth may ask for longer than a request may take."""
    waited: list[float] = []

    def ask_instead(pace: RateLimit, nbytes: int) -> None:
        waited.append(pace.reserve(nbytes))
        assert store.children() == ()  # the only request that may be open

    def answer(method: str, path: str) -> Answer:
        is_list = "list-type" in path
        return Answer(body=b"<ListBucketResult/>" if is_list else b"12345" * 100_000)

    monkeypatch.setattr(remoteapi, "_wait_for_rate", ask_instead)
    with answering() as (endpoint, answers):
        answers.then = answer
        store = store_at(endpoint, max_download_mb_s=0.25, max_concurrency=1, timeout_s=20)
        for _ in range(2):
            assert len(store.get_whole("a", max_nbytes=500_000)) == 500_000
    assert waited[0] == 0
    assert waited[1] > 1


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("num_cuts", [1, 3])
def test_a_body_that_breaks_off_is_asked_for_again(num_cuts: int) -> None:
    """R24: obstore does so in some cases only."""
    part = {"Content-Range": "bytes 0-99999/100000"}
    whole = Answer(body=b"12345" * 20_000)
    of_range = Answer(status=206, body=whole.body, headers=part)
    with answering() as (endpoint, answers):
        answers.then = whole
        store = store_at(endpoint, retry_s=60)
        answers.next_ones = [replace(whole, is_cut=True)] * num_cuts
        assert store.get_whole("a", max_nbytes=100_000) == whole.body
        answers.then = of_range
        answers.next_ones = [replace(of_range, is_cut=True)] * num_cuts
        assert store.get("a", 0, 100_000) == whole.body
        assert len(answers.asked) == 2 * num_cuts + 2


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("nbytes", [5, 4, 0])
def test_a_file_whose_reply_was_lost_is_there_only_in_its_full_length(nbytes: int) -> None:
    """After a failure the key is looked at; what is shorter is not ours, or not whole."""
    when = {"ETag": '"x"', "Last-Modified": "Sat, 21 Nov 2026 08:00:00 GMT"}

    def answer(method: str, path: str) -> Answer:
        if method == "PUT":
            return refusal(400, "InvalidRequest")
        if not any(asked.startswith("PUT") for asked in answers.asked):
            return refusal(404, "NoSuchKey")
        return Answer(headers={**when, "Content-Length": str(nbytes)})

    with answering() as (endpoint, answers):
        answers.then = answer
        writer = store_at(endpoint, retry_s=0.5).create("a", 5)
        with nullcontext() if nbytes == 5 else pytest.raises(StoreError):
            writer.write(0, memoryview(b"12345"))
            writer.finish()
