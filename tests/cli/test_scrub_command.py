"""Claims about `holdfast scrub`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.roots import Result, flip, folder_of

from holdfast.cli import verify as scrub_module
from holdfast.maintenance import verify as verify_module

Command = Callable[..., Result]


@pytest.fixture
def interrupted(
    holdfast: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The file with the place of a scrub that was stopped in its second checkpoint."""
    place = tmp_path / "place.json"
    real, seen = verify_module.verify_kept, []

    def stop_in_the_second(store: object, folder: str, **options: object) -> object:
        seen.append(folder)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(store, folder, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(verify_module, "verify_kept", stop_in_the_second)
        assert holdfast("scrub", root, "--resume", place).code == 130
    return place


def test_a_scrub_goes_on_where_it_was_stopped(
    holdfast: Command, root: Path, interrupted: Path
) -> None:
    assert [entry["step"] for entry in json.loads(interrupted.read_text())["reports"]] == [300]
    result = holdfast("scrub", root, "--resume", interrupted, "--json")
    assert result.code == 0, result.err
    document = result.document
    assert [entry["step"] for entry in document["checkpoints"]] == [300, 200, 100]
    assert document["carried_over"] == 1
    sizes = [entry["nbytes"] for entry in document["checkpoints"]]
    assert document["read_nbytes"] == sum(sizes[1:])
    again = holdfast("scrub", root, "--resume", interrupted, "--json").document
    assert (again["carried_over"], again["read_nbytes"]) == (0, sum(sizes))


def test_damage_that_was_found_before_the_stop_is_not_forgotten(
    holdfast: Command, root: Path, tmp_path: Path, interrupted: Path
) -> None:
    place = json.loads(interrupted.read_text())
    problem = {"file": "model-00000.safetensors", "message": "bad"}
    place["reports"][0]["problems"] = [problem]
    interrupted.write_text(json.dumps(place))
    result = holdfast("scrub", root, "--resume", interrupted)
    assert (result.code, "1 bad" in result.out) == (1, True)


def test_damage_is_found(holdfast: Command, root: Path) -> None:
    flip(folder_of(root, 200) / "model-00000.safetensors", 5000)
    result = holdfast("scrub", root, "--rate", "1GB")
    assert (result.code, "1 bad" in result.out) == (1, True)


def test_reads_keep_to_the_rate(
    holdfast: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(scrub_module.time, "sleep", slept.append)
    monkeypatch.setattr(scrub_module.time, "monotonic", lambda: 0.0)
    document = holdfast("scrub", root, "--rate", "10kB", "--json").document
    assert max(slept) == pytest.approx(document["read_nbytes"] / 10_000, rel=0.01)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "0MB"], "must be more than 0"),
        (["--rate", "fast"], "--rate"),
        (["--resume", "{root}/place"], "must not lie in the root"),
        pytest.param(
            ["--resume", "{root}/../other"],
            "not a file of `holdfast scrub`",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--resume", "{root}/../moved"],
            "this file holds the progress in /elsewhere",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["--resume", "{root}/../no/place"], "cannot be written", marks=pytest.mark.full
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_read(
    holdfast: Command, root: Path, options: list[str], said: str
) -> None:
    (root.parent / "other").write_text("notes of mine")
    (root.parent / "moved").write_text('{"root": "/elsewhere", "began": "x"}')
    given = [text.format(root=root) for text in options]
    result = holdfast("scrub", root, *given)
    assert (result.code, said in result.err) == (2, True), result.err
    assert (root.parent / "other").read_text() == "notes of mine"
