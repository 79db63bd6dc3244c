"""The network is cut in the middle of a save: training goes on, and so does the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.errors import SaveFailed
from holdfast.manager import CheckpointManager
from holdfast.store.remote import RemoteOptions, RemoteStore
from runs import Run, new_run
from servers.faults import FaultProxy, Rule
from servers.fixtures import on, use
from servers.program import Service

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
