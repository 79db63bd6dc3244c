"""Ranks of one host that load from an object store fetch each byte of a checkpoint once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from children import Child
from holdfast import CachedStore, CheckpointManager, load_weights
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.local.pieces import PIECE_NBYTES
from holdfast.testing.store_contract import StoreContract
from servers.faults import FaultProxy, Rule
from servers.fixtures import Servers, on, use
from servers.program import Service
from stores.cached_child import digest, new_model

CHILD = Path(__file__).with_name("cached_child.py")
FILES = "*/model-00000.*"
NUM_RANKS = 4


@pytest.mark.full
class TestCachedObjectStore(StoreContract):
    @pytest.fixture
    def service(self, servers: Servers) -> Service:
        return servers.get("gcs")

    @pytest.fixture
    def store(self, root: str, tmp_path: Path) -> Store:
        store: Store = CachedStore(root, tmp_path, max_nbytes=1 << 30)
        return store


class Rank(Child):
    """A process that loads once it is told to."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(CHILD, url, folder)

    def load(self) -> None:
        self.expect("ready")
        self.go_on()


@pytest.fixture
def proxy(service: Service, root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy through which clients find the server."""
    with FaultProxy(service) as proxy:
        use(proxy.service, monkeypatch)
        yield proxy


@pytest.fixture
def expected(root: str) -> tuple[str, int]:
    """The digest of the weights that are there, and the requests that get their files."""
    model = new_model(0)
    with CheckpointManager(root, {"model": model}, sinks=()) as manager:
        saved = manager.save(1).wait()
    found = [info.nbytes for info in open_store(root).list(f"{saved.folder}/model-00000.")]
    assert sum(found) > 5 * PIECE_NBYTES
    return digest(model), sum(-(-nbytes // PIECE_NBYTES) for nbytes in found)


@pytest.fixture
def rank(
    root: str, tmp_path: Path, expected: object, proxy: FaultProxy
) -> Iterator[Callable[[], Rank]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Rank(root, tmp_path))


@pytest.mark.full
@on("moto", "gcs")
def test_four_ranks_fetch_each_byte_once(
    proxy: FaultProxy,
    rank: Callable[[], Rank],
    expected: tuple[str, int],
    root: str,
    tmp_path: Path,
) -> None:
    """A request gets 8 MiB at most: as many as there are pieces leave none to come twice."""
    weights, num_requests = expected
    ranks = [rank() for _ in range(NUM_RANKS)]
    # It strikes every request for the files, and so counts them.
    proxy.add(Rule(kind="delay", method="GET", path=FILES, times=None))
    for one in ranks:
        one.load()
    assert [one.says() for one in ranks] == [weights] * NUM_RANKS
    assert proxy.counts["delay"] == num_requests
    model = new_model(2)
    load_weights(CachedStore(root, tmp_path, max_nbytes=1 << 30), model)
    assert digest(model) == weights
    assert proxy.counts["delay"] == num_requests


@on("gcs")
def test_ranks_go_on_when_one_is_killed_while_it_fetches(
    proxy: FaultProxy, rank: Callable[[], Rank], expected: tuple[str, int]
) -> None:
    """R1: what it had begun is fetched by others."""
    weights, _ = expected
    hung = proxy.add(Rule(kind="blackhole", method="GET", path="*.safetensors*", at=2))
    killed, others = rank(), [rank() for _ in range(2)]
    killed.load()
    assert hung.reached.wait(60)
    for one in others:
        one.load()
    killed.kill()
    assert [one.says() for one in others] == [weights] * 2
    assert proxy.counts["blackhole"] == 1


@pytest.mark.full
@on("moto")
def test_a_bit_that_the_network_flips_is_not_kept(
    proxy: FaultProxy, rank: Callable[[], Rank], expected: tuple[str, int]
) -> None:
    """R15, D14: the copy is dropped, the store is asked again, and no checkpoint is blamed."""
    weights, _ = expected
    proxy.add(Rule(kind="flip", method="GET", path="*/model-00000.json"))
    proxy.add(Rule(kind="flip", method="GET", path="*.safetensors", at=3))
    for _ in range(2):
        one = rank()
        one.load()
        assert one.says() == weights
    assert proxy.counts["flip"] == 2
