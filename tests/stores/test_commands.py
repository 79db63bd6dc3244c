"""Commands on the root of a bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.cli.conftest import holdfast as holdfast
from tests.cli.roots import Result

from holdfast import load_weights
from runs import new_run
from servers.fixtures import on
from servers.program import Service

Command = Callable[..., Result]


@pytest.fixture
def saved(root: str) -> Any:
    """A run with three checkpoints in a bucket, closed."""
    run = new_run()
    with run.manager(root) as manager:
        for step in (100, 200, 300):
            run.train()
            manager.save(step).wait()
    return run


@on("moto", "azurite")
def test_every_command_takes_a_url(
    holdfast: Command, service: Service, root: str, saved: Any
) -> None:
    listed = holdfast("ls", root, "--json").document
    assert [entry["step"] for entry in listed["checkpoints"]] == [300, 200, 100]
    folder = listed["checkpoints"][0]["folder"]
    for target in (root, f"{root}@step=300", f"{root}@{folder}", f"{root}/{folder}"):
        assert folder in holdfast("show", target).out
        assert holdfast("verify", target).code == 0
    assert holdfast("pin", f"{root}@step=100").code == 0
    assert holdfast("prune", root, "--keep", "last:1").code == 0
    listed = holdfast("ls", root, "--json").document
    assert [entry["step"] for entry in listed["checkpoints"]] == [300, 100]
    assert holdfast("gc", root).code == 0


@on("moto")
def test_a_run_goes_on_from_a_bucket_to_the_bit(service: Service, root: str, saved: Any) -> None:
    """Invariant 7."""
    again = new_run(seed=1)
    with again.manager(root) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 300
    assert again.bits() == saved.bits()


@on("moto")
def test_weights_load_from_the_url_of_a_checkpoint(
    holdfast: Command, service: Service, root: str, saved: Any
) -> None:
    folder = holdfast("ls", root, "--json").document["checkpoints"][0]["folder"]
    other = new_run(seed=2)
    load_weights(f"{root}/{folder}", other.model)
    weights = {k: v for k, v in saved.bits().items() if "optimizer" not in k and k != "scheduler"}
    assert weights.items() <= other.bits().items()


@on("moto")
def test_what_is_not_there_is_said(holdfast: Command, service: Service, root: str) -> None:
    empty = holdfast("ls", root)
    assert empty.code != 0
    assert "nothing was ever saved here" in empty.err
    missing = holdfast("ls", f"{service.scheme}://no-such-bucket/run")
    assert missing.code != 0
    assert "Make the bucket first" in missing.err
