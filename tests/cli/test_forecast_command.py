"""Claims about `holdfast forecast`: its answer, the rule that it uses, and its errors.

A comparison with real runs is in tests/maintenance/test_forecast.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cli.roots import Result, flip, folder_of

from holdfast import Best, Encryption, Last, SavePolicy, keys
from holdfast.policy.rule import Candidate, Rule
from runs import new_run

Command = Callable[..., Result]


def trained(root: Path, *steps: int, **options: Any) -> None:
    """Save these steps, with a loss that falls to step 200 and rises from there."""
    with new_run().manager(root, **options) as manager:
        for step in steps:
            manager.maybe_save(step, metrics={"loss": abs(step - 200) / 100})


def test_deletions_and_kept_checkpoints_have_their_reasons(
    holdfast: Command, tmp_path: Path
) -> None:
    keep = Last(2) | Best("loss")
    trained(tmp_path, 100, 200, 300, 400, every="100step", keep=keep)
    holdfast("tag", f"{tmp_path}@step=300", "paper")
    found = holdfast("forecast", tmp_path, "--saves", 3, "--json").document
    assert [(save["step"], [gone["step"] for gone in save["gone"]]) for save in found["saves"]] == [
        (500, []),
        (600, [400]),
        (700, [500]),
    ]
    (first, second) = (save["gone"][0] for save in found["saves"][1:])
    assert first["why"] == "not kept by: last 2 | best loss (min)"
    assert (first["folder"], first["save"]) == (folder_of(tmp_path, 400).name, None)
    assert (second["folder"], second["save"]) == (None, 1)
    assert [(one["step"], one["why"]) for one in found["kept"]] == [
        (300, "tagged paper"),
        (200, "best loss (min)"),
    ]
    assert found["recorded_by"] == folder_of(tmp_path, 400).name


def test_what_waits_for_a_metric_is_told(holdfast: Command, tmp_path: Path) -> None:
    keep = "best:eval/acc:max:1:wait=2"
    trained(tmp_path, 100, 200, 300, 400, every="100step", keep=keep)
    listed = holdfast("prune", tmp_path, "--keep", keep, "--dry-run", "--json").document
    assert [one["why"].partition(", 2 of at most 2")[0] for one in listed["checkpoints"]] == [
        "the run resumed from it, newest, waits for eval/acc",
        "waits for eval/acc",
    ]
    assert holdfast("metric", f"{tmp_path}@step=400", "eval/acc=0.5").code == 0
    found = holdfast("forecast", tmp_path, "--saves", 3, "--json").document
    assert [[gone["step"] for gone in save["gone"]] for save in found["saves"]] == [
        [],
        [300],
        [500],
    ]
    assert "no value of 'eval/acc' is added" in found["assumptions"]


def test_dropped_components_free_their_bytes_once(holdfast: Command, tmp_path: Path) -> None:
    keep = Last(1) | Last(9).then_drop("optimizer")
    trained(tmp_path, 100, 200, every="100step", keep=keep)
    optimizer = [*folder_of(tmp_path, 200).glob("optimizer*")]
    found = holdfast("forecast", tmp_path, "--saves", 2, "--json").document
    gone = [save["gone"] for save in found["saves"]]
    assert [[(one["step"], one["drop"]) for one in each] for each in gone] == [
        [(200, ["optimizer"])],
        [(300, ["optimizer"])],
    ]
    assert {one["nbytes"] for each in gone for one in each} == {
        sum(file.stat().st_size for file in optimizer)
    }


def test_the_text_names_rule_deletions_and_assumptions(holdfast: Command, tmp_path: Path) -> None:
    trained(tmp_path, 100, 200, 300, every="100step", keep="last:2")
    lines = holdfast("forecast", tmp_path, "--saves", 2).out.splitlines()
    assert lines[0] == f"rule: last 2 (recorded by {folder_of(tmp_path, 300).name})"
    (row,) = (line for line in lines if "step 200" in line)
    assert row.split()[:2] == ["1", "400"]
    assert row.endswith("not kept by: last 2")
    assert "assumed: saves are made at the recorded intervals only" in lines
    assert f"assumed: the run resumes from {folder_of(tmp_path, 300).name}" in lines


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
    assert [gone["step"] for gone in found["saves"][0]["gone"]] == [350]


def test_without_an_interval_the_last_distance_is_repeated(
    holdfast: Command, tmp_path: Path
) -> None:
    with new_run().manager(tmp_path, keep="last:2") as manager:
        for step in (10, 40, 75):
            manager.save(step)
    found = holdfast("forecast", tmp_path, "--saves", 2, "--json").document
    assert [save["step"] for save in found["saves"]] == [110, 145]
    assert any("as far apart as the last two" in text for text in found["assumptions"])


class Odd(Rule):
    """Keep what has an odd step."""

    def picks(self, newest_first: Sequence[Candidate]) -> Mapping[int, str]:
        return {p: "odd" for p, one in enumerate(newest_first) if one.timestamp.step % 2}


def test_a_rule_without_text_has_to_be_given(holdfast: Command, tmp_path: Path) -> None:
    trained(tmp_path, 1, 2, 3, every="1step", keep=Odd())
    result = holdfast("forecast", tmp_path)
    assert result.code == 2
    assert "give a rule, as --keep last:3" in result.err
    assert holdfast("forecast", tmp_path, "--keep", "last:3").code == 0


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


def test_intervals_in_other_units_and_without_end_are_followed(
    holdfast: Command, tmp_path: Path
) -> None:
    for name, every in (("epochs", "2ep"), ("never", "1000000000000step")):
        with new_run().manager(tmp_path / name, every=every, keep="last:1,daily") as manager:
            for step in (100, 200):
                manager.save(step, epoch=step // 50).wait()
    coming = [
        [
            save["step"]
            for save in holdfast("forecast", tmp_path / name, "--saves", 2, "--json").document[
                "saves"
            ]
        ]
        for name in ("epochs", "never")
    ]
    assert coming == [[300, 400], [10**12, 2 * 10**12]]
