"""The fault proxy: each fault really happens, exactly where it is asked for, and is counted."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from servers.client import bare_store, clear, keys, uploads
from servers.faults import TRANSIENT, FaultProxy, Kind, Rule
from servers.fixtures import OWN_BUCKET
from servers.program import Service

BROKEN = (ConnectionError, http.client.IncompleteRead, http.client.RemoteDisconnected)
PATH = f"/{OWN_BUCKET}/faults/a"
DATA = bytes(range(256)) * 40


@pytest.fixture
def service(gcs_service: Service) -> Service:
    return gcs_service


class Client:
    """Requests to one address over one connection, without any retry."""

    def __init__(self, service: Service) -> None:
        self._connection = http.client.HTTPConnection(service.address, timeout=120)

    def ask(
        self, method: str, path: str = PATH, data: bytes = b"", **headers: str
    ) -> tuple[int, bytes]:
        """Status and body of the reply."""
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        self._connection.request(method, path, data, names)
        reply = self._connection.getresponse()
        return reply.status, reply.read()

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(autouse=True)
def _clean(service: Service) -> Iterator[None]:
    yield
    clear(service, "faults")


def ask(proxy: FaultProxy, method: str, data: bytes = b"") -> tuple[int, bytes]:
    """One request through the proxy, over a connection of its own."""
    with closing(Client(proxy.service)) as client:
        return client.ask(method, data=data)


def stored(service: Service) -> bytes | None:
    """What the server has, without the proxy."""
    with closing(Client(service)) as client:
        status, body = client.ask("GET")
    return body if status == 200 else None


def test_without_faults_requests_and_replies_pass_as_they_are(service: Service) -> None:
    with FaultProxy(service) as proxy, closing(Client(proxy.service)) as client:
        assert client.ask("PUT", data=DATA)[0] == 200
        assert client.ask("GET") == (200, DATA)
        assert client.ask("GET", Range="bytes=10-19") == (206, DATA[10:20])
        assert client.ask("HEAD") == (200, b"")
        assert client.ask("PUT", data=b"", x_goog_if_generation_match="0")[0] == 412
        assert client.ask("DELETE") == (204, b"")
        assert client.ask("GET")[0] == 404
        assert proxy.counts == {"requests": 7}


@pytest.mark.parametrize("kind", ["500", "503", "429"])
def test_an_error_status_comes_instead_of_the_servers_reply(service: Service, kind: Kind) -> None:
    with FaultProxy(service, [Rule(kind=kind)]) as proxy, closing(Client(proxy.service)) as client:
        status, body = client.ask("PUT", data=DATA)
        assert status == int(kind)
        assert b"<Code>" in body
        assert stored(service) is None
        assert client.ask("PUT", data=DATA)[0] == 200  # the connection goes on
        assert proxy.counts[kind] == 1


def test_a_reset_comes_before_the_server_saw_the_request(service: Service) -> None:
    with FaultProxy(service, [Rule(kind="reset")]) as proxy:
        with pytest.raises(BROKEN):
            ask(proxy, "PUT", DATA)
        assert stored(service) is None
        assert proxy.counts == {"requests": 1, "reset": 1}


def test_a_lost_reply_comes_after_the_server_has_done_it(service: Service) -> None:
    with FaultProxy(service, [Rule(kind="lose_reply")]) as proxy:
        with pytest.raises(BROKEN):
            ask(proxy, "PUT", DATA)
        assert stored(service) == DATA
        assert proxy.counts == {"requests": 1, "lose_reply": 1}


def test_a_truncated_reply_breaks_off_in_its_body(service: Service) -> None:
    with FaultProxy(service, [Rule(kind="truncate", method="GET")]) as proxy:
        ask(proxy, "PUT", DATA)
        with pytest.raises(BROKEN):
            ask(proxy, "GET")
        assert ask(proxy, "GET") == (200, DATA)
        assert proxy.counts["truncate"] == 1


def test_a_flipped_reply_has_its_length_and_one_wrong_bit(service: Service) -> None:
    with FaultProxy(service, [Rule(kind="flip", method="GET")]) as proxy:
        ask(proxy, "PUT", DATA)
        status, body = ask(proxy, "GET")
        assert status == 200
        assert len(body) == len(DATA)
        assert sum((a ^ b).bit_count() for a, b in zip(body, DATA, strict=True)) == 1
        assert stored(service) == DATA


def test_a_reply_without_a_body_is_neither_cut_nor_flipped(service: Service) -> None:
    rules = [Rule(kind="truncate"), Rule(kind="flip")]
    with FaultProxy(service, rules) as proxy:
        assert ask(proxy, "PUT", DATA)[0] == 200
        assert ask(proxy, "HEAD") == (200, b"")
        assert proxy.counts == {"requests": 2}


def test_a_delayed_request_arrives(service: Service) -> None:
    with FaultProxy(service, [Rule(kind="delay")]) as proxy:
        assert ask(proxy, "PUT", DATA)[0] == 200
        assert proxy.counts == {"requests": 1, "delay": 1}


def test_a_black_hole_never_answers(service: Service) -> None:
    rule = Rule(kind="blackhole")
    with FaultProxy(service, [rule]) as proxy, ThreadPoolExecutor(1) as pool:
        client = Client(proxy.service)
        asked = pool.submit(client.ask, "PUT", PATH, DATA)
        assert rule.reached.wait(120)
        assert ask(proxy, "GET")[0] == 404  # others are answered meanwhile
        assert not asked.done()
        client._connection.sock.shutdown(socket.SHUT_RDWR)  # as a time-out would
        with pytest.raises(BROKEN):
            asked.result(120)
        client.close()
        assert stored(service) is None


def test_a_rule_strikes_the_requests_that_it_names_and_no_others(service: Service) -> None:
    rule = Rule(kind="503", method="G*", path="*faults/*", at=1, times=2)
    with FaultProxy(service, [rule]) as proxy, closing(Client(proxy.service)) as client:
        client.ask("PUT", data=DATA)
        assert [client.ask("GET")[0] for _ in range(5)] == [200, 503, 503, 200, 200]
        assert client.ask("GET", f"/{OWN_BUCKET}/other")[0] == 404


def test_patterns_see_the_path_without_percent_signs(service: Service) -> None:
    with FaultProxy(service, [Rule(kind="500", path="*a=b?uploads*")]) as proxy:
        with closing(Client(proxy.service)) as client:
            assert client.ask("POST", f"/{OWN_BUCKET}/faults/a%3Db?uploads")[0] == 500
        assert uploads(service, "faults") == []


def test_while_the_network_is_cut_nothing_passes(service: Service) -> None:
    with FaultProxy(service) as proxy:
        with closing(Client(proxy.service)) as client:
            client.ask("PUT", data=DATA)
            proxy.cut()
            with pytest.raises(BROKEN):
                client.ask("GET")
        with pytest.raises(BROKEN):
            ask(proxy, "GET")
        proxy.mend()
        assert ask(proxy, "GET") == (200, DATA)


def test_a_rule_can_cut_the_network(service: Service) -> None:
    rule = Rule(kind="cut", method="PUT")
    with FaultProxy(service, [rule]) as proxy:
        assert ask(proxy, "GET")[0] == 404
        with pytest.raises(BROKEN):
            ask(proxy, "PUT", DATA)
        assert rule.reached.is_set()
        with pytest.raises(BROKEN):
            ask(proxy, "GET")
        proxy.mend()
        assert ask(proxy, "GET")[0] == 404


def test_stripped_headers_do_not_reach_the_server(service: Service) -> None:
    with FaultProxy(service, strip=["x-goog-if-generation-match"]) as proxy:
        with closing(Client(proxy.service)) as client:
            for data in (b"first", b"second"):
                assert client.ask("PUT", data=data, x_goog_if_generation_match="0")[0] == 200
        assert stored(service) == b"second"


def test_random_faults_strike_as_often_as_asked_and_the_same_with_the_same_seed(
    service: Service,
) -> None:
    counts = []
    for _ in range(2):
        with FaultProxy(service, rate=0.2, kinds=("500", "429"), seed=5) as proxy:
            with closing(Client(proxy.service)) as client:
                for _ in range(300):
                    client.ask("GET")
            counts.append(proxy.counts)
    assert counts[0] == counts[1]
    assert 30 <= counts[0].total() - 300 <= 90
    assert set(counts[0]) == {"requests", "500", "429"}


def test_a_client_with_retries_sees_no_fault(service: Service) -> None:
    """Every kind is one that a sound client can live with."""
    with FaultProxy(service, rate=0.1, kinds=("500", "503", "delay", "reset"), seed=1) as proxy:
        store = bare_store(proxy.service)
        for number in range(50):
            store.put(f"faults/{number:02d}", DATA)
        assert proxy.num_faults > 0
    assert len(keys(service, "faults")) == 50
    assert set(TRANSIENT) > {"500", "503", "delay", "reset"}
