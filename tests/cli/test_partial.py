"""What the commands say of checkpoints that are unhealthy, partial or thinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.roots import Result, folder_of

from holdfast.checkpoints import StateHooks
from holdfast.policy.rules import All, Last
from holdfast.policy.savers import SideSaver
from runs import new_run

Command = Callable[..., Result]
ILL = ("the loss is nan", "weight 0.weight is not finite")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Steps 100 (whole), 200 (unhealthy) and 300 (weights alone)."""
    run, root = new_run(), tmp_path / "mixed"
    hooks = StateHooks(before_save=lambda now, _: ILL if now.step == 200 else ())
    weights = SideSaver("weights", every="300step", components=["model"])
    with run.manager(root, hooks=hooks, savers=[weights], sinks=()) as manager:
        for step in (100, 200):
            run.train()
            manager.save(step).wait()
        pending = manager.maybe_save(300)
        assert pending is not None
        pending.wait()
    return root


def test_ls_says_what_a_run_would_not_go_on_from(holdfast: Command, mixed: Path) -> None:
    lines = holdfast("ls", mixed).out.splitlines()
    assert "saved without optimizer, scheduler, counters, rng, by weights" in lines[1]
    assert "unhealthy: the loss is nan and 1 more" in lines[2]
    assert ["latest" in line for line in lines[1:]] == [False, False, True]
    document = holdfast("ls", mixed, "--json").document
    assert document["head"] == folder_of(mixed, 100).name
    part, ill, whole = document["checkpoints"]
    assert (part["savers"], part["components"]) == (["weights"], ["model"])
    assert part["left_out"] == ["optimizer", "scheduler", "counters", "rng"]
    assert ill["unhealthy"] == list(ILL)
    assert (whole["left_out"], whole["unhealthy"]) == ([], [])


def test_show_says_why(holdfast: Command, mixed: Path) -> None:
    ill = holdfast("show", f"{mixed}@step=200").out
    assert "unhealthy      the loss is nan; weight 0.weight is not finite\n" in ill
    part = holdfast("show", f"{mixed}@step=300").out
    assert "asked for by   weights\n" in part
    assert "saved without  optimizer, scheduler, counters, rng\n" in part
    assert holdfast("show", mixed, "--json").document["checkpoint"]["step"] == 100


def test_verify_notes_it_and_finds_no_damage(holdfast: Command, mixed: Path) -> None:
    result = holdfast("verify", mixed)
    assert result.code == 0
    assert "note: component optimizer was not to be saved" in result.out
    assert "note: the state was not healthy: the loss is nan" in result.out


def test_prune_judges_each_saver_by_its_own_rule(holdfast: Command, mixed: Path) -> None:
    result = holdfast("prune", mixed, "--keep", "last:1,weights=last:1", "--dry-run")
    assert "unhealthy: the loss is nan and 1 more" in result.out
    document = holdfast("prune", mixed, "--keep", "last:1,weights=last:1", "--json").document
    assert document["keep"] == "main: last 1, weights: last 1"
    assert [entry["action"] for entry in document["checkpoints"]] == ["keep", "keep", "keep"]
    assert document["checkpoints"][1]["unhealthy"] == list(ILL)
    assert document["checkpoints"][1]["why"] == "newest to resume from"
    assert document["checkpoints"][0]["left_out"] == ["optimizer", "scheduler", "counters", "rng"]


def test_the_bytes_of_a_thinned_one_are_those_that_are_left(
    holdfast: Command, tmp_path: Path
) -> None:
    run = new_run()
    keep = Last(1) | All().then_drop("optimizer", "scheduler")
    with run.manager(tmp_path, keep=keep) as manager:
        for step in (1, 2):
            run.train()
            manager.save(step).wait()
        manager.wait()
        whole, thinned = manager.list()
    folder = tmp_path / thinned.folder
    there = sum(path.stat().st_size for path in folder.iterdir()) - sum(
        path.stat().st_size for path in folder.glob("manifest.json")
    )
    marks = sum(path.stat().st_size for path in folder.glob("thinned-*"))
    assert thinned.nbytes == there - marks < whole.nbytes
    listed = holdfast("ls", tmp_path, "--json").document["checkpoints"]
    assert [entry["nbytes"] for entry in listed] == [whole.nbytes, thinned.nbytes]
    shown = holdfast("show", f"{tmp_path}@step=1")
    assert " left of " in shown.out
    assert "; dropped: optimizer, scheduler" in shown.out
