"""The tests' own server of Google Cloud Storage does what its docstring says, seen by obstore."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError

from servers.client import bare_store, clear, keys, uploads
from servers.program import Service, send

PART = 5 << 20


pytestmark = pytest.mark.full


@pytest.fixture
def service(gcs_service: Service) -> Service:
    return gcs_service


@pytest.fixture
def store(service: Service) -> Iterator[Any]:
    yield bare_store(service)
    clear(service, "gcs")


def test_of_many_concurrent_creates_one_wins(store: Any) -> None:
    for number in range(10):
        start = threading.Barrier(16)

        def race(racer: int, key: str = f"gcs/{number}", start: threading.Barrier = start) -> bool:
            start.wait(30)
            try:
                store.put(key, b"%d" % racer, mode="create")
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(race, range(16)))
        assert won.count(True) == 1
        assert bytes(store.get(f"gcs/{number}").bytes()) == b"%d" % won.index(True)


def test_an_update_needs_the_generation_that_it_names(store: Any) -> None:
    first = store.put("gcs/a", b"1")
    store.put("gcs/a", b"2", mode=dict(first))
    with pytest.raises(PreconditionError):
        store.put("gcs/a", b"3", mode=dict(first))
    assert bytes(store.get("gcs/a").bytes()) == b"2"


def test_ranges_are_exact_and_past_the_end_refused(service: Service, store: Any) -> None:
    store.put("gcs/a", b"0123456789")
    assert bytes(store.get_range("gcs/a", start=3, end=7)) == b"3456"
    assert [bytes(part) for part in store.get_ranges("gcs/a", starts=[0, 8], ends=[2, 10])] == [
        b"01",
        b"89",
    ]
    url = f"{service.endpoint}/{service.bucket}/gcs/a"
    assert send("GET", url, {"Range": "bytes=-4"}) == 206
    assert send("GET", url, {"Range": "bytes=10-"}) == 416


def test_lists_have_pages_of_a_thousand_with_and_without_a_delimiter(store: Any) -> None:
    names = [f"gcs/{folder}/{number:04d}" for folder in "ab" for number in range(1100)]
    names += [f"gcs/{number:04d}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert [item["path"] for item in store.list("gcs").collect()] == sorted(names)
    found = store.list_with_delimiter("gcs")
    assert found["common_prefixes"] == ["gcs/a", "gcs/b"]
    assert len(found["objects"]) == 1100
    later = store.list("gcs", offset="gcs/b/0100").collect()
    assert [item["path"] for item in later] == sorted(n for n in names if n > "gcs/b/0100")


def test_a_multipart_upload_is_seen_when_it_is_complete(service: Service, store: Any) -> None:
    data = bytes(2 * PART) + b"end"
    obstore.put(store, "gcs/a", data, use_multipart=True, chunk_size=PART, max_concurrency=3)
    assert bytes(store.get("gcs/a").bytes()) == data
    assert uploads(service, "gcs") == []


def test_an_upload_under_way_is_listed_and_can_be_aborted(service: Service) -> None:
    url = f"{service.endpoint}/{service.bucket}/gcs/a"
    assert send("POST", f"{url}?uploads") == 200
    ((key, upload),) = uploads(service, "gcs")
    assert key == "gcs/a"
    assert send("PUT", f"{url}?partNumber=2&uploadId={upload}", data=b"second") == 200
    assert send("PUT", f"{url}?partNumber=1&uploadId={upload}", data=b"first") == 200
    assert keys(service, "gcs") == []
    clear(service, "gcs")
    assert uploads(service, "gcs") == []
    assert send("PUT", f"{url}?partNumber=3&uploadId={upload}", data=b"late") == 404


def test_copies_and_deletions(store: Any) -> None:
    store.put("gcs/a", b"x")
    store.copy("gcs/a", "gcs/b")
    assert bytes(store.get("gcs/b").bytes()) == b"x"
    with pytest.raises(AlreadyExistsError):
        store.copy("gcs/a", "gcs/b", overwrite=False)
    store.delete("gcs/a")
    with pytest.raises(FileNotFoundError):
        store.head("gcs/a")


def test_a_body_that_is_cut_short_leaves_nothing(service: Service) -> None:
    with closing(http.client.HTTPConnection(service.address, timeout=30)) as connection:
        connection.putrequest("PUT", f"/{service.bucket}/gcs/cut")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"x" * 50)
    url = f"{service.endpoint}/{service.bucket}/gcs/cut"
    assert send("GET", url) == 404


def test_a_wrong_digest_and_a_missing_bucket_are_refused(service: Service) -> None:
    url = f"{service.endpoint}/{service.bucket}/gcs/a"
    assert send("PUT", url, {"x-goog-hash": "md5=AAAAAAAAAAAAAAAAAAAAAA=="}, b"x") == 400
    assert send("PUT", f"{service.endpoint}/no-bucket/a", data=b"x") == 404
