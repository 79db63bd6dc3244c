"""Every refusal of a cloud becomes the error by which a handler can act."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    CorruptData,
    HoldfastError,
    NotFound,
    OutcomeUnknown,
    StoreError,
    StoreFull,
    TransientStoreError,
    UnsupportedStore,
    is_damage,
)
from holdfast.store.remote import RemoteStore
from holdfast.store.remote.opening import RemoteOptions
from store.remote.answers import RESET, Answer, Answers, answering, refusal

TWICE = RemoteOptions(max_retries=1, retry_s=60, timeout_s=60, connect_timeout_s=60)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client needs before it asks."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def place(credentials: None) -> Iterator[tuple[RemoteStore, Answers]]:
    """A store on a server that answers as told, and these answers."""
    with answering() as (endpoint, answers):
        yield RemoteStore("s3://bucket/run", endpoint=endpoint, options=TWICE), answers


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "AccessDenied", AccessDenied),
        (403, "InvalidAccessKeyId", AccessDenied),
        (403, "RequestTimeTooSkewed", AccessDenied),
        (401, "Unauthorized", AccessDenied),
        (400, "ExpiredToken", AccessDenied),
        (403, "QuotaExceeded", StoreFull),
        (507, "InsufficientStorage", StoreFull),
        (404, "NoSuchBucket", UnsupportedStore),
        (301, "PermanentRedirect", UnsupportedStore),
        (501, "NotImplemented", UnsupportedStore),
        (400, "SomethingNew", TransientStoreError),
        (500, "InternalError", TransientStoreError),
        (503, "SlowDown", TransientStoreError),
        (429, "TooManyRequests", TransientStoreError),
    ],
)
def test_a_status_decides_the_class(
    place: tuple[RemoteStore, Answers], status: int, code: str, expected: type[HoldfastError]
) -> None:
    store, answers = place
    answers.then = refusal(status, code, "the service's own words")
    for operation in (
        lambda: store.put("a", b"x"),
        lambda: store.put("a", b"x", if_absent=True),
        lambda: store.get("a", 0, 5),
        lambda: list(store.list()),
        lambda: store.delete("a"),
    ):
        # A put if absent that the service gave up may still be done.
        with pytest.raises((expected, OutcomeUnknown) if status == 500 else expected) as caught:
            operation()
        assert "s3://bucket/run" in str(caught.value)


@pytest.mark.parametrize("operation", ["put", "get", "head", "list", "delete"])
def test_a_refusal_says_which_credentials_and_which_permission(
    place: tuple[RemoteStore, Answers], operation: str
) -> None:
    store, answers = place
    answers.then = refusal(403, "AccessDenied")
    calls = {
        "put": lambda: store.put("a", b"x"),
        "get": lambda: store.get("a"),
        "head": lambda: store.head("a"),
        "list": store.children,
        "delete": lambda: store.delete("a"),
    }
    with pytest.raises(AccessDenied, match=r"Used: AWS \(env\). Needed: s3:") as caught:
        calls[operation]()
    assert len(answers.asked) == 1  # at once, without a second try
    assert not is_damage(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        RESET,
        refusal(500, "OperationTimedOut"),
        refusal(500, "InternalError"),
        refusal(502, "Bad"),
        refusal(504, "Late"),
        Answer(status=503, body=b"upstream connect error or disconnect/reset before headers"),
    ],
)
def test_a_put_if_absent_whose_outcome_is_unclear_is_sent_once(
    place: tuple[RemoteStore, Answers], answer: Answer
) -> None:
    """Invariant 1: never a guess. Azure says of 500 that it may have been done, and gateways say
    503 of what they have sent on."""
    store, answers = place
    answers.then = answer
    with pytest.raises(OutcomeUnknown):
        store.put("a", b"x", if_absent=True)
    assert answers.asked == ["PUT /bucket/run/a"]


@pytest.mark.parametrize(
    "answer",
    [
        refusal(503, "SlowDown"),
        refusal(503, "ServerBusy"),
        refusal(429, "TooManyRequests"),
        refusal(409, "ConditionalRequestConflict"),
    ],
)
def test_a_put_if_absent_that_was_clearly_refused_is_sent_again(
    place: tuple[RemoteStore, Answers], answer: Answer
) -> None:
    store, answers = place
    answers.next_ones = [answer]
    answers.then = Answer(headers={"ETag": '"x"'})
    store.put("a", b"x", if_absent=True)
    assert len(answers.asked) == 2


def test_a_plain_put_is_sent_again_after_a_reset(place: tuple[RemoteStore, Answers]) -> None:
    store, answers = place
    answers.next_ones = [RESET]
    answers.then = Answer(headers={"ETag": '"x"'})
    store.put("a", b"x")
    assert len(answers.asked) == 2


def test_retries_come_to_an_end(place: tuple[RemoteStore, Answers]) -> None:
    store, answers = place
    answers.then = refusal(503, "SlowDown", "reduce your rate")
    with pytest.raises(TransientStoreError, match="503 Service Unavailable: SlowDown: reduce your"):
        store.put("a", b"x", if_absent=True)
    assert len(answers.asked) == 1 + TWICE.max_retries


@pytest.mark.full
@pytest.mark.usefixtures("credentials")
def test_pauses_grow_until_the_time_for_retries_is_over() -> None:
    """R24: if they did not, a service that is away for a moment would be given up in seconds."""
    patient = replace(TWICE, max_retries=11, retry_s=5)
    with answering() as (endpoint, answers):
        store = RemoteStore("s3://bucket/run", endpoint=endpoint, options=patient)
        answers.then = refusal(503, "SlowDown", "reduce your rate")
        with pytest.raises(TransientStoreError):
            store.get("a")
    assert 3 <= len(answers.asked) <= patient.max_retries


def test_a_taken_key_and_a_missing_object(place: tuple[RemoteStore, Answers]) -> None:
    store, answers = place
    answers.then = refusal(412, "PreconditionFailed")
    with pytest.raises(AlreadyExists):
        store.put("a", b"x", if_absent=True)
    answers.then = refusal(404, "NoSuchKey")
    with pytest.raises(NotFound):
        store.get("a")
    store.delete("a")


def test_a_range_past_the_end_is_corrupt_data(place: tuple[RemoteStore, Answers]) -> None:
    store, answers = place
    answers.then = refusal(416, "InvalidRange")
    with pytest.raises(CorruptData, match="shorter than expected"):
        store.get("a", 5, 5)


def test_a_service_that_ignores_the_range_is_named(place: tuple[RemoteStore, Answers]) -> None:
    store, answers = place
    when = {"ETag": '"x"', "Last-Modified": "Sat, 21 Nov 2026 08:00:00 GMT"}
    answers.then = Answer(body=b"0123456789", headers=when)
    with pytest.raises(UnsupportedStore, match="exact ranges"):
        store.get("a", 2, 3)


def test_a_service_that_does_not_list_in_order_is_named(
    place: tuple[RemoteStore, Answers],
) -> None:
    store, answers = place
    entry = (
        "<Contents><Key>run/{}</Key><Size>1</Size><ETag>x</ETag>"
        "<LastModified>2026-11-21T08:00:00.000Z</LastModified></Contents>"
    )
    entries = "".join(entry.format(name) for name in ("b", "a"))
    text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
    answers.then = Answer(body=text.encode())
    with pytest.raises(UnsupportedStore, match="a came after b"):
        list(store.list())


def test_a_server_that_is_not_there_is_transient(place: tuple[RemoteStore, Answers]) -> None:
    store = RemoteStore("s3://bucket/run", endpoint="http://127.0.0.1:9", options=TWICE)
    with pytest.raises(TransientStoreError, match="Connect"):
        store.put("a", b"x", if_absent=True)


@pytest.mark.parametrize("keys", [["a"], ["a", "b"]])
def test_a_refusal_of_one_object_of_a_bulk_delete_is_told_at_once(
    place: tuple[RemoteStore, Answers], keys: list[str]
) -> None:
    """S3 tells it in a reply of status 200, such as where a retention lock holds the object."""
    store, answers = place
    error = "<Error><Key>run/f/a</Key><Code>AccessDenied</Code><Message>because</Message></Error>"
    listed = "".join(
        f"<Contents><Key>run/f/{key}</Key><Size>1</Size><ETag>x</ETag>"
        "<LastModified>2026-11-21T08:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    page = f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>"
    refused = f"<DeleteResult>{error}</DeleteResult>"
    answers.then = lambda method, path: Answer(
        body=(page if method == "GET" else refused).encode(),
    )
    with pytest.raises(AccessDenied, match="Needed: s3:DeleteObject"):
        store.delete_many([info.key for info in store.list("f/")])
    assert sum(asked.startswith("POST") for asked in answers.asked) == 1


def test_an_object_whose_write_failed_is_never_finished(place: tuple[RemoteStore, Answers]) -> None:
    """Invariant 2: the one request of a short object is sent by a write."""
    store, answers = place
    answers.then = lambda method, path: refusal(*_NO_SUCH if method == "HEAD" else _DENIED)
    writer = store.create("a", 10)
    with pytest.raises(AccessDenied):
        writer.write(0, memoryview(bytes(10)))
    with pytest.raises(StoreError, match="not stored"):
        writer.finish()
    writer.abort()


_NO_SUCH, _DENIED = (404, "NoSuchKey"), (403, "AccessDenied")
