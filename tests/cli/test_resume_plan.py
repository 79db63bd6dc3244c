"""Claims about `holdfast resume-plan`: it is what a resume does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, cut_off, flip, folder_of

from holdfast import Encryption, StateHooks, keys
from holdfast.errors import SealError
from runs import new_run

Command = Callable[..., Result]


def outcomes(document: Any) -> list[tuple[int | None, str, str | None]]:
    return [(one["step"], one["outcome"], one["obstacle"]) for one in document["candidates"]]


def saved(root: Path, *steps: int, which: str = "latest", **options: Any) -> None:
    with new_run().manager(root, **options) as manager:
        manager.resume(which)
        for step in steps:
            manager.save(step, wait=True)


def test_every_kind_of_obstacle_is_named_and_a_resume_agrees(
    holdfast: Command, tmp_path: Path
) -> None:
    saved(tmp_path, 1, 2, 3)
    saved(tmp_path, 4, 5, which="step=2")
    with new_run().manager(tmp_path) as manager:
        manager.resume()
        manager.save(6, components=["model"], wait=True)
    saved(tmp_path, 8)
    saved(tmp_path, 9)
    odd = StateHooks(before_save=lambda now, metrics: ["the loss is nan"])
    saved(tmp_path, 10, hooks=odd)
    next(folder_of(tmp_path, 9).glob("model-*.safetensors")).unlink()
    flip(folder_of(tmp_path, 8) / "manifest.json", 60)
    found = holdfast("resume-plan", tmp_path, "--json").document
    assert outcomes(found) == [
        (10, "passed over", "unhealthy"),
        (9, "passed over", "damaged"),
        (None, "passed over", "damaged"),
        (5, "taken", None),
        (4, "in reserve", None),
        (2, "in reserve", None),
        (1, "in reserve", None),
        (6, "left behind", None),
        (3, "left behind", None),
    ]
    with new_run().manager(tmp_path) as manager:
        resumed = manager.resume()
    assert resumed is not None
    assert resumed.folder == found["head"]
    passed = [one["folder"] for one in found["candidates"] if one["outcome"] == "passed over"]
    assert [folder for folder, _ in resumed.rejected] == passed


def test_parts_and_thinned_ones_are_passed_over(holdfast: Command, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    with new_run().manager(tmp_path) as manager:
        manager.resume()
        manager.save(4, components=["model"], wait=True)
    holdfast("thin", f"{tmp_path}@step=3", "--drop", "optimizer", "--yes", "--even-latest")
    found = holdfast("resume-plan", tmp_path, "--json").document
    assert [one for one in outcomes(found) if one[1] == "taken"] == [(2, "taken", None)]
    assert (3, "passed over", "thinned") in outcomes(found)


def test_damage_inside_of_a_file_is_found_by_reading(holdfast: Command, root: Path) -> None:
    tensors = next(folder_of(root, 300).glob("model-*.safetensors"))
    flip(tensors, 4096)
    assert outcomes(holdfast("resume-plan", root, "--json").document)[0] == (300, "taken", None)
    read = holdfast("resume-plan", root, "--verify", "--json").document
    assert outcomes(read)[:2] == [(300, "passed over", "damaged"), (200, "taken", None)]
    assert [one["verified"] for one in read["candidates"]] == [False, True, False]
    text = holdfast("resume-plan", root, "--verify").out
    assert "taken, verified" in text


def test_the_unhealthy_is_taken_where_nothing_else_is_left(
    holdfast: Command, tmp_path: Path
) -> None:
    odd = StateHooks(before_save=lambda now, metrics: ["the loss is nan"])
    saved(tmp_path, 1, 2, hooks=odd)
    found = holdfast("resume-plan", tmp_path, "--json").document
    assert outcomes(found) == [(2, "taken", "unhealthy"), (1, "passed over", "unhealthy")]


def test_nothing_usable_gives_1_and_nothing_saved_3(holdfast: Command, tmp_path: Path) -> None:
    assert holdfast("resume-plan", tmp_path).code == 3
    saved(tmp_path / "run", 1)
    flip(folder_of(tmp_path / "run", 1) / "manifest.json", 60)
    result = holdfast("resume-plan", tmp_path / "run")
    assert result.code == 1
    assert "NoUsableCheckpoint" in result.out


def test_a_save_that_did_not_end_is_no_damage(holdfast: Command, root: Path) -> None:
    cut_off(folder_of(root, 300))
    found = holdfast("resume-plan", root, "--json").document
    assert outcomes(found)[-1] == (None, "left behind", "not committed")
    assert found["head"] == folder_of(root, 200).name


def test_what_other_keys_open_ends_a_resume(holdfast: Command, tmp_path: Path) -> None:
    for name in ("old", "new"):
        holdfast("keys", "generate", tmp_path / name)
    (old,), (new,) = (keys.from_file(tmp_path / name) for name in ("old", "new"))
    root = tmp_path / "run"
    saved(root, 1, encrypt=Encryption(keys=[old]))
    saved(root, 2, encrypt=Encryption(keys=[new], also_read=[old]))
    found = holdfast("--key-file", tmp_path / "old", "resume-plan", root, "--json")
    assert found.code == 1
    newest, older = found.document["candidates"]
    assert (newest["obstacle"], newest["ends"]) == ("not opened", True)
    assert (older["step"], older["outcome"]) == (1, "in reserve")
    with pytest.raises(SealError), new_run().manager(root, encrypt=Encryption(keys=[old])) as one:
        one.resume()


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_a_missing_file_of_an_encrypted_run_is_seen_without_reading(
    holdfast: Command, tmp_path: Path, compress: Any
) -> None:
    holdfast("keys", "generate", tmp_path / "key")
    encrypt = Encryption(keys=keys.from_file(tmp_path / "key"))
    root = tmp_path / "run"
    saved(root, 1, 2, encrypt=encrypt, compress=compress)
    asked = ("--key-file", tmp_path / "key")
    whole = holdfast(*asked, "resume-plan", root, "--json").document
    assert outcomes(whole) == [(2, "taken", None), (1, "in reserve", None)]
    largest = max(folder_of(root, 2).glob("*.sealed"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-20])
    found = holdfast(*asked, "resume-plan", root, "--json").document
    assert outcomes(found) == [(2, "passed over", "damaged"), (1, "taken", None)]
    assert "1 files missing or cut" in holdfast(*asked, "ls", root).out
    with new_run().manager(root, encrypt=encrypt) as manager:
        resumed = manager.resume()
    assert resumed is not None
    assert resumed.folder == found["head"]
