"""Commands on the root of a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
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
def test_checkpoints_of_a_bucket_are_evaluated_by_their_urls(
    holdfast: Command, service: Service, root: str, saved: Any
) -> None:
    program = f'case $0 in {root}@step-*) echo "{{\\"acc\\": 0.5}}";; esac'
    words = ("--metric", "acc", "--json", "--", "sh", "-c", program, "{checkpoint}")
    lines = holdfast("evaluate", root, *words).out.splitlines()
    assert [json.loads(line).get("step") for line in lines] == [100, 200, 300, None]
    assert holdfast("metric", f"{root}@step=200", "acc=0.9", "--replace").code == 0
    assert holdfast("prune", root, "--keep", "best:acc:wait=1").code == 0
    listed = holdfast("ls", root, "--json").document["checkpoints"]
    assert [(one["step"], one["metrics"]["acc"]) for one in listed] == [(300, 0.5), (200, 0.9)]


@pytest.mark.full
@on("moto")
def test_what_comes_next_and_what_it_cost_is_told_of_a_bucket(
    holdfast: Command, service: Service, root: str, saved: Any
) -> None:
    plan = holdfast("resume-plan", root, "--verify", "--json").document
    assert [one["outcome"] for one in plan["candidates"]] == ["taken", "in reserve", "in reserve"]
    coming = holdfast("forecast", root, "--keep", "last:2", "--saves", 2, "--json").document
    assert [[gone["step"] for gone in save["gone"]] for save in coming["saves"]] == [
        [100, 200],
        [300],
    ]
    (session,) = holdfast("log", root, "--saves", "--json").document["sessions"]
    costs = [save["cost"] for save in session["saves"]]
    assert all(cost["durable_s"] > 0 and cost["linked_nbytes"] == 0 for cost in costs)


@on("moto")
def test_a_run_goes_on_from_a_bucket_to_the_bit(service: Service, root: str, saved: Any) -> None:
    """Invariant 7."""
    again = new_run(seed=1)
    with again.manager(root) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 300
    assert again.bits() == saved.bits()


@pytest.mark.full
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
    assert "there are no checkpoints here" in empty.err
    missing = holdfast("ls", f"{service.scheme}://no-such-bucket/run")
    assert missing.code != 0
    assert "Create the bucket first" in missing.err


@pytest.mark.full
@on("moto")
def test_checkpoints_are_copied_in_and_out_and_deleted(
    holdfast: Command, service: Service, root: str, saved: Any, tmp_path: Path
) -> None:
    home, back = tmp_path / "home", f"{root}-back"
    out = holdfast("cp", f"{root}@step=100", f"{root}@step=300", home, "--json")
    assert out.code == 0, out.err
    into = holdfast("cp", home, back, "--all", "--json")
    assert [item["outcome"] for item in into.document["checkpoints"]] == ["copied"] * 2, into.err
    again = holdfast("cp", home, back, "--all", "--json").document["checkpoints"]
    assert [(item["outcome"], item["sent_nbytes"]) for item in again] == [("already there", 0)] * 2
    for copied in (home, back):
        assert holdfast("verify", copied).code == 0
        with new_run().manager(copied) as manager:
            found = manager.resume()
            assert found is not None
            assert found.step == 300
    sure = ("--yes", "--reason", "test")
    thinned = holdfast("thin", f"{root}@step=200", "--drop", "optimizer", "--yes")
    assert thinned.code == 0, thinned.err
    deleted = holdfast("rm", f"{back}@step=100", *sure)
    assert deleted.code == 0, deleted.err
    listed = holdfast("ls", back, "--json").document["checkpoints"]
    assert [entry["step"] for entry in listed] == [300]
    assert holdfast("rm", f"{back}@step=100", *sure, "--json").document["nbytes"] == 0
    for place in (root, back):
        assert holdfast("scrub", place, "--resume", tmp_path / f"{len(place)}").code == 0


@pytest.mark.full
@on("moto")
def test_a_bucket_is_watched_and_examined(
    holdfast: Command, service: Service, root: str, saved: Any
) -> None:
    seen = holdfast("watch", root, "--once", "--json").document
    assert (seen["last_step"], seen["owner"]["state"]) == (300, "closed")
    examined = holdfast("doctor", root, "--json")
    found = {line["check"]: line["status"] for line in examined.document["findings"]}
    assert (found["saving"], found["clock"], examined.code) == ("ok", "ok", 0)
    missing = holdfast("doctor", f"{service.scheme}://no-such-bucket/run")
    assert (missing.code, "Create the bucket first" in missing.out) == (1, True)
