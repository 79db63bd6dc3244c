"""The network is cut in the middle of a save: training goes on, and so does the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import SaveFailed
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import Last
from holdfast.root.upload_records import Ledger
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from holdfast.store.remote import RemoteOptions, RemoteStore
from runs import Run, new_run
from servers.faults import FaultProxy, Rule
from servers.fixtures import on, use
from servers.program import Service
from tiers import steps_in

STEPS_WITHOUT_NETWORK = 25
PATIENT = RemoteOptions(retry_s=120.0, max_retries=100)
IMPATIENT = RemoteOptions(retry_s=0.5, max_retries=1)


@pytest.fixture
def proxy(service: Service, root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy without faults, through which clients find the server."""
    with FaultProxy(service) as proxy:
        use(proxy.service, monkeypatch)
        yield proxy


def cut_in_the_next_save(proxy: FaultProxy, run: Run, manager: CheckpointManager) -> Rule:
    """Begin a save and return when the network was cut by its first file."""
    cut = proxy.add(Rule(kind="cut", method="PUT", path="*step-*"))
    run.train()
    manager.save(run.counters["step"])
    assert cut.reached.wait(60)
    return cut


def train_without_network(run: Run, manager: CheckpointManager) -> None:
    """Nobody mends the network meanwhile, so a step that waited for it would fail the test."""
    for _ in range(STEPS_WITHOUT_NETWORK):
        run.train()
        manager.maybe_save(run.counters["step"])


@on("moto", "gcs", "azurite")
def test_training_goes_on_while_the_network_is_cut_and_the_save_completes_afterwards(
    proxy: FaultProxy, root: str
) -> None:
    """R24, invariant 8."""
    run = new_run()
    with run.manager(RemoteStore(root, options=PATIENT), sinks=()) as manager:
        run.train()
        manager.save(1).wait()
        cut_in_the_next_save(proxy, run, manager)
        train_without_network(run, manager)
        proxy.mend()
        manager.wait()
        assert [found.step for found in manager.list()] == [2, 1]
        assert manager.save(run.counters["step"]).wait().step == 2 + STEPS_WITHOUT_NETWORK


@on("moto", "gcs", "azurite")
def test_a_save_that_outlasts_its_retries_fails_and_the_next_one_is_fine(
    proxy: FaultProxy, root: str
) -> None:
    """R24, invariant 8: the failure cannot be missed, and nothing of it is taken for a save."""
    run = new_run()
    with run.manager(RemoteStore(root, options=IMPATIENT), sinks=(), on_failure="warn") as manager:
        run.train()
        manager.save(1).wait()
        cut_in_the_next_save(proxy, run, manager)
        train_without_network(run, manager)
        with pytest.raises(SaveFailed):
            manager.wait()
        proxy.mend()
        step = run.counters["step"]
        assert manager.save(step).wait().step == step
        assert [found.step for found in manager.list()] == [step, 1]
    again = new_run(seed=1)
    with again.manager(root, sinks=()) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == step
    assert again.bits() == run.bits()


def after_a_minute(name: str) -> Any:
    """The parameters of a test that cuts the network of this server for so long."""
    return pytest.param(name, 60.0, marks=pytest.mark.stores, id=f"{name}-after-a-minute")


@pytest.mark.parametrize(
    ("service", "cut_s"),
    [
        pytest.param("gcs", 0.0, id="gcs", marks=pytest.mark.full),
        after_a_minute("moto"),
        after_a_minute("ceph"),
    ],
    indirect=["service"],
)
def test_an_upload_completes_after_the_network_was_cut_in_the_middle_of_it(
    proxy: FaultProxy, root: str, tmp_path: Path, cut_s: float
) -> None:
    """R24, invariant 8: the run saves in the local tier all the while, and what it saved meanwhile
    is sent, too."""
    run = new_run()
    remote = RemoteStore(root, options=IMPATIENT)
    tiers = Tiered(tmp_path, remote, keep_local=Last(1), keep_remote=Last(3))
    with run.manager(tiers, sinks=(), save_timeout_s=300.0) as manager:
        run.train()
        manager.save(1).wait()
        manager.wait()
        cut = proxy.add(Rule(kind="cut", method="PUT", path="*step-*"))
        run.train()
        manager.save(2).wait()
        assert cut.reached.wait(60)
        mended = time.monotonic() + cut_s
        while run.counters["step"] < 6 or time.monotonic() < mended:
            run.train(100)
            assert manager.save(run.counters["step"]).wait().step == run.counters["step"]
        assert Ledger(LocalStore(tmp_path)).waiting()
        proxy.mend()
        manager.wait()
        assert steps_in(open_store(root))[0] == run.counters["step"]
    again = new_run(seed=1)
    with again.manager(root, sinks=()) as manager:
        manager.resume()
    assert again.bits() == run.bits()


@pytest.mark.stores
@on("moto", "ceph")
def test_a_save_completes_after_a_minute_without_network(proxy: FaultProxy, root: str) -> None:
    """R24, invariant 8: training goes on, and the save goes on, with no options."""
    run = new_run()
    with run.manager(root, sinks=()) as manager:
        run.train()
        manager.save(1).wait()
        cut_in_the_next_save(proxy, run, manager)
        mended = time.monotonic() + 60.0
        while time.monotonic() < mended:
            train_without_network(run, manager)
        proxy.mend()
        manager.wait()
        assert [found.step for found in manager.list()][:2] == [2, 1]
