"""Claims about `holdfast forecast`: what it shows, where it takes the rule from, what it refuses.

That it comes true is tested in tests/care/test_forecast.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, flip, folder_of

from holdfast import Best, Candidate, Encryption, Last, Rule, SavePolicy, keys
from holdfast.engine.claims.leases import leased
from holdfast.store.local import LocalStore
from runs import new_run

Command = Callable[..., Result]


def trained(root: Path, *steps: int, **options: Any) -> None:
    """Save these steps, with a loss that falls to step 200 and rises from there."""
    with new_run().manager(root, **options) as manager:
        for step in steps:
            manager.maybe_save(step, metrics={"loss": abs(step - 200) / 100})


def test_each_checkpoint_has_its_clause_or_its_end(holdfast: Command, tmp_path: Path) -> None:
    keep = Last(2) | Best("loss")
    trained(tmp_path, 100, 200, 300, 400, every="100step", keep=keep)
    holdfast("tag", f"{tmp_path}@step=300", "paper")
    found = holdfast("forecast", tmp_path, "--saves", 3, "--json").document
    members = ("step", "action", "save", "keeps", "why", "waits_for")
    lost = "not kept by: last 2 | best loss (min)"
    assert [tuple(one[name] for name in members) for one in found["checkpoints"]] == [
        (400, "delete", 2, "last 2", lost, None),
        (300, "keep", None, "tagged paper", None, None),
        (200, "keep", None, "best loss (min)", None, None),
    ]
    assert [(save["step"], [gone["step"] for gone in save["gone"]]) for save in found["saves"]] == [
        (500, []),
        (600, [400]),
        (700, [500]),
    ]
    assert found["saves"][2]["gone"][0]["save"] == 1
    assert {save["metrics"]["loss"] for save in found["saves"]} == {2.0}
    assert found["recorded_by"] == folder_of(tmp_path, 400).name
    assert not found["running"]


def test_the_text_names_rule_ends_and_assumptions(holdfast: Command, tmp_path: Path) -> None:
    trained(tmp_path, 100, 200, 300, every="100step", keep="last:2")
    result = holdfast("forecast", tmp_path, "--saves", 2)
    lines = result.out.splitlines()
    assert lines[0] == f"rule: last 2 (recorded by {folder_of(tmp_path, 300).name})"
    (row,) = (line for line in lines if line.startswith(" 200"))
    assert "goes at save 1, step 400" in row
    assert row.endswith("not kept by: last 2")
    assert "assumed: saves are made at the recorded intervals, and none by hand" in lines
    assert f"assumed: the run resumes from {folder_of(tmp_path, 300).name}" in lines


def test_a_given_metric_makes_a_coming_save_the_best(holdfast: Command, tmp_path: Path) -> None:
    trained(tmp_path, 100, 200, 300, every="100step", keep="last:1,best:loss")
    plain = holdfast("forecast", tmp_path, "--saves", 2, "--json").document
    better = holdfast("forecast", tmp_path, "--metric", "loss=-1", "--saves", 2, "--json").document
    ends = [{one["step"]: one["save"] for one in found["checkpoints"]} for found in (plain, better)]
    assert ends == [{300: 1, 200: None}, {300: 1, 200: 1}]
    assert "every save has loss -1" in better["assumptions"]


def test_the_classes_of_a_policy_are_followed(holdfast: Command, tmp_path: Path) -> None:
    policy = SavePolicy(permanent="200step", ephemeral="50step")
    trained(tmp_path, *range(50, 450, 50), every=policy, keep="remove:ephemeral_only")
    found = holdfast("forecast", tmp_path, "--saves", 4, "--json").document
    coming = [(save["step"], save["class"]) for save in found["saves"]]
    assert coming == [
        (450, "ephemeral"),
        (500, "ephemeral"),
        (550, "ephemeral"),
        (600, "permanent"),
    ]
    assert [one["step"] for one in found["checkpoints"]] == [400, 350, 200]


def test_without_an_interval_the_last_distance_is_repeated(
    holdfast: Command, tmp_path: Path
) -> None:
    with new_run().manager(tmp_path, keep="last:2") as manager:
        for step in (10, 40, 75):
            manager.save(step)
    found = holdfast("forecast", tmp_path, "--saves", 2, "--json").document
    assert [save["step"] for save in found["saves"]] == [110, 145]
    assert any("as far apart as the last two" in text for text in found["assumptions"])
    given = holdfast("forecast", tmp_path, "--every", "20step", "--saves", 2, "--json").document
    assert [save["step"] for save in given["saves"]] == [80, 100]


class Odd(Rule):
    """Keep what has an odd step."""

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        return {p: "odd" for p, one in enumerate(newest_first) if one.timestamp.step % 2}


def test_a_rule_without_text_has_to_be_given(holdfast: Command, tmp_path: Path) -> None:
    trained(tmp_path, 1, 2, 3, every="1step", keep=Odd())
    result = holdfast("forecast", tmp_path)
    assert result.code == 2
    assert "give one that has, as --keep last:3" in result.err
    assert holdfast("forecast", tmp_path, "--keep", "last:3").code == 0


def test_what_somebody_reads_waits(holdfast: Command, root: Path) -> None:
    folder = folder_of(root, 300).name
    with leased(LocalStore(root), folder):
        found = holdfast("forecast", root, "--keep", "last:1", "--json").document
    held = next(one for one in found["checkpoints"] if one["folder"] == folder)
    assert (held["action"], held["save"]) == ("wait", 1)
    assert "reads it" in held["waits_for"]


@pytest.mark.parametrize("text", ["loss", "=1", "loss=low"])
def test_a_metric_is_a_name_and_a_number(holdfast: Command, root: Path, text: str) -> None:
    result = holdfast("forecast", root, "--metric", text)
    assert result.code == 2
    assert "NAME=VALUE" in result.err


def test_a_damaged_manifest_is_named_and_stays(holdfast: Command, root: Path) -> None:
    flip(folder_of(root, 200) / "manifest.json", 100)
    found = holdfast("forecast", root, "--keep", "last:1", "--json").document
    assert [one["folder"] for one in found["damaged"]] == [folder_of(root, 200).name]


def test_an_empty_root_gives_3(holdfast: Command, tmp_path: Path) -> None:
    assert holdfast("forecast", tmp_path).code == 3


def test_an_encrypted_root_needs_its_key(holdfast: Command, tmp_path: Path) -> None:
    holdfast("keys", "generate", tmp_path / "run.key")
    secret = Encryption(keys=keys.from_file(tmp_path / "run.key"))
    trained(tmp_path / "run", 100, 200, 300, every="100step", keep="last:2", encrypt=secret)
    assert holdfast("forecast", tmp_path / "run").code == 1
    keyed = ("--key-file", tmp_path / "run.key")
    found = holdfast(*keyed, "forecast", tmp_path / "run", "--saves", 1, "--json").document
    assert found["keep"] == "last 2"
    assert [gone["step"] for gone in found["saves"][0]["gone"]] == [200]
    assert holdfast("resume-plan", tmp_path / "run").code == 1
    plan = holdfast(*keyed, "resume-plan", tmp_path / "run", "--json").document
    assert plan["candidates"][0]["outcome"] == "taken"


def test_what_is_given_and_would_do_nothing_is_refused(holdfast: Command, root: Path) -> None:
    given = ("forecast", root, "--keep", "best:loss")
    wrong = holdfast(*given, "--metric", "los=0.1")
    assert wrong.code == 2
    assert "the rule best loss (min) does not ask for los, but for loss" in wrong.err
    uncounted = holdfast(*given, "--every", "2ep")
    assert uncounted.code == 2
    assert "no save follows from the given interval" in uncounted.err
    assert holdfast(*given, "--metric", "loss=0.1", "--every", "5step").code == 0
