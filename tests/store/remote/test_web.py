"""Files on a web server are read by exact ranges; nothing else can be done with them."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import pickle
import re
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast.errors import (
    AccessDenied,
    CorruptData,
    HoldfastError,
    NotFound,
    TransientStoreError,
    UnsupportedStore,
    UsageError,
)
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.remote import HttpStore, RemoteOptions
from webserver import Web, serving

DATA = bytes(range(256)) * 4
BRIEF = RemoteOptions(retry_s=0.3, timeout_s=5.0, connect_timeout_s=5.0)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "data").write_bytes(DATA)
    with serving(tmp_path) as server:
        yield server


def test_bytes_are_read_by_exact_ranges(web: Web) -> None:
    store = open_store(f"{web.url}/a")
    assert store.get("data") == store.get_whole("data", max_nbytes=2000) == DATA
    assert store.get("data", 3, 5) == DATA[3:8]
    assert store.get("data", 1000) == DATA[1000:]
    buffer = bytearray(7)
    store.read_into("data", 250, memoryview(buffer))
    assert buffer == DATA[250:257]
    assert store.head("data").nbytes == len(DATA)


def test_what_is_missing_or_too_short_is_told_apart(web: Web) -> None:
    store = open_store(web.url)
    with pytest.raises(NotFound, match="a/other"):
        store.get("a/other")
    with pytest.raises(CorruptData, match="expected at least 2000"):
        store.get("a/data", 0, 2000)
    with pytest.raises(CorruptData):
        store.get("a/data", 2000, 1)
    web.answers["/a/data"] = [410]
    with pytest.raises(NotFound):
        store.get("a/data")


WRITES: list[Callable[[Store], Any]] = [
    lambda store: store.put("a", b""),
    lambda store: store.put("a", b"", if_absent=True),
    lambda store: store.create("a", 4),
    lambda store: store.delete("a"),
    lambda store: store.delete_many(["a"]),
    lambda store: store.point("latest", "a"),
    lambda store: store.probe(),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_without_a_request(web: Web, write: Callable[[Store], Any]) -> None:
    with pytest.raises(UnsupportedStore, match=r"can only be read.*s3://"):
        write(open_store(web.url))
    assert not web.asked


def test_a_list_is_refused_and_says_what_to_name(web: Web) -> None:
    store = open_store(web.url)
    for listed in (store.list, store.children):
        with pytest.raises(UnsupportedStore, match="Name the folder of one"):
            listed("")


def test_the_flags_say_so(web: Web) -> None:
    store = open_store(web.url)
    assert [store.reads_only, store.reads_origin] == [True, True]
    assert not any([store.has_folders, store.has_links, store.writes_in_place])


def test_a_login_is_sent_and_never_shown(web: Web) -> None:
    web.login = "Basic " + base64.b64encode(b"bob:s@cret").decode()
    address = web.url.replace("://", "://bob:s%40cret@")
    store = open_store(f"{address}/a")
    assert store.get("data") == DATA
    assert store.url == f"{web.url}/a"
    web.answers["/a/data"] = [403]
    with pytest.raises(AccessDenied, match="user 'bob'") as error:
        store.get("data")
    assert "cret" not in f"{error.value}{error.value.__cause__}{store!r}"
    with pytest.raises(AccessDenied, match=r"Used: no credentials.*USER:PASSWORD@HOST"):
        open_store(f"{web.url}/a").get("data")


def test_a_login_goes_to_no_other_server(web: Web, tmp_path: Path) -> None:
    with serving(tmp_path) as other:
        web.redirects["/a/data"] = f"{other.url}/a/data"
        assert open_store(web.url.replace("://", "://bob:secret@")).get("a/data") == DATA
        assert "authorization" in web.asked[0].headers
        assert "authorization" not in other.asked[0].headers


def test_a_query_is_sent_with_each_request_and_never_shown(web: Web) -> None:
    store = open_store(f"{web.url}/a?signature=abc#part")
    assert store.get("data", 0, 4) == DATA[:4]
    assert web.paths() == ["/a/data?signature=abc"]
    assert "abc" not in f"{store.url}{store!r}"


@pytest.mark.parametrize("status", [302, 403, 404, 416, 418, 503])
def test_a_signature_is_in_no_message_and_no_traceback(web: Web, status: int) -> None:
    store = HttpStore(f"{web.url}/a?signature=abc", options=BRIEF)
    web.answers["/a/data?signature=abc"] = [status] * 100
    with pytest.raises(HoldfastError) as error:
        store.get("data", 0, 4)
    assert error.value.__suppress_context__
    assert "abc" not in f"{error.value}{error.value.__cause__}"


def test_a_signature_is_not_logged_while_nobody_answers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TransientStoreError) as error:
        HttpStore("http://127.0.0.1:1/a?signature=abc", options=BRIEF).head("data")
    assert "no answer yet" in caplog.text
    assert "abc" not in f"{error.value}{caplog.text}"


def test_a_reply_longer_than_its_range_is_not_read_to_its_end(web: Web) -> None:
    web.surplus = bytes(64 << 20)
    with pytest.raises(CorruptData, match="more than 4 bytes"):
        open_store(web.url).get("a/data", 0, 4)


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://localhost/a", "//"])
def test_a_redirect_to_no_web_address_is_refused_at_once(web: Web, to: str) -> None:
    web.redirects["/a/data"] = to
    with pytest.raises(UnsupportedStore, match="not followed"):
        HttpStore(web.url, options=BRIEF).get("a/data", 0, 4)


def test_a_busy_server_is_asked_again(web: Web) -> None:
    store = open_store(web.url)
    store.head("a/data")
    web.answers["/a/data"] = [503, 500]
    assert store.get("a/data", 0, 4) == DATA[:4]
    assert len(web.asked) == 4


def test_a_server_that_stays_busy_is_an_error_that_may_pass(web: Web) -> None:
    store = HttpStore(web.url, options=BRIEF)
    web.answers["/a/data"] = [503] * 100
    with pytest.raises(TransientStoreError, match="503"):
        store.get("a/data")


def test_an_address_where_nobody_answers_is_named() -> None:
    with pytest.raises(TransientStoreError, match="No server answered there"):
        HttpStore("http://127.0.0.1:1", options=BRIEF).head("a")


def test_a_server_without_ranges_is_refused(web: Web) -> None:
    web.has_ranges = False
    store = open_store(f"{web.url}/a")
    assert store.get_whole("data", max_nbytes=2000) == DATA
    with pytest.raises(UnsupportedStore, match="does not answer Range requests"):
        store.get("data", 0, 4)


@pytest.mark.parametrize("coding", ["gzip", "br"])
def test_files_that_a_server_compresses_are_refused_by_name(web: Web, coding: str) -> None:
    web.coding = coding
    store = open_store(f"{web.url}/a")
    for read in (lambda: store.get_whole("data", max_nbytes=2000), lambda: store.get("data", 0, 4)):
        with pytest.raises(
            UnsupportedStore, match=f"a/data: is sent with .*{coding}.*without compression"
        ):
            read()
    web.coding = "identity"
    assert store.get_whole("data", max_nbytes=2000) == DATA


def test_redirects_are_followed_but_not_for_ever(web: Web) -> None:
    web.redirects["/moved"] = "/a/data"
    web.redirects["/loop"] = "/loop"
    store = open_store(web.url)
    assert store.get("moved", 1, 3) == DATA[1:4]
    with pytest.raises(UnsupportedStore, match="more than ten redirects"):
        store.get("loop")


def test_a_pickled_store_reads_on(web: Web) -> None:
    store = pickle.loads(pickle.dumps(open_store(f"{web.url}/a?x=1")))
    assert store.get("data") == DATA
    assert web.paths() == ["/a/data?x=1"]


@pytest.mark.parametrize("url", ["https://", "http:///path", "http://host:port/x", "http://[::1/x"])
def test_an_address_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="HOST"):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://bob:secret@host:port/x?token=abc",
        "https://bob:secret/abc@host/x",
        "https://bob:secret?abc@host/x",
        "httpx://bob:abc@secret@host/x",
        "s3://bob:secret@bucket/x",
        "s3://bucket/x?token=secret",
    ],
)
def test_a_refused_address_shows_no_password(url: str) -> None:
    with pytest.raises(UsageError) as error:
        open_store(url)
    assert not re.search("secret|abc", str(error.value))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    path.write_bytes(private + made.public_bytes(pem))
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_certificate_that_is_not_trusted_is_an_error_at_once(
    web: Web, tls: ssl.SSLContext
) -> None:
    with (
        serving(web.folder, tls=tls) as secure,
        pytest.raises(UnsupportedStore, match="certificate is not trusted"),
    ):
        open_store(secure.url).get("a/data")


def test_https_leads_to_no_address_that_is_not_encrypted(
    web: Web, tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(web.folder, tls=tls) as secure:
        store = open_store(secure.url)
        assert store.get("a/data") == DATA
        secure.redirects["/down"] = f"{web.url}/a/data"
        with pytest.raises(UnsupportedStore, match="an unencrypted"):
            store.get("down")
        assert not web.asked
        web.redirects["/up"] = f"{secure.url}/a/data"
        assert open_store(web.url).get("up") == DATA
