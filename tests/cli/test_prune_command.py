"""Claims about `holdfast prune`, `pin`, `unpin` and `tag`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.roots import Result, flip, folder_of, overwrite

from holdfast.format.manifest import decode_register, encode_manifest
from holdfast.format.records import WriterRecord
from holdfast.ownership.process import this_process
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

Command = Callable[..., Result]


def actions(document: Any) -> dict[int, str]:
    return {entry["step"]: entry["action"] for entry in document["checkpoints"]}


@pytest.fixture
def unmarked(holdfast: Command, root: Path, saving: Callable[..., Any]) -> Path:
    """The root with two more checkpoints that nobody pinned or tagged, and no owner."""
    manager = saving()
    for step in (400, 500):
        manager.save(step, metrics={"loss": 30 / step})
    manager.close()
    return root


def test_every_checkpoint_is_listed_with_what_and_why(holdfast: Command, unmarked: Path) -> None:
    result = holdfast("prune", unmarked, "--keep", "last:1")
    assert result.code == 0
    rows = [line.split(maxsplit=5) for line in result.out.splitlines()[1:-1]]
    assert [(row[0], row[4], row[5]) for row in rows] == [
        ("500", "keep", "the run resumed from it, newest, last 1"),
        ("400", "delete", "not kept by: last 1"),
        ("300", "delete", "not kept by: last 1"),
        ("200", "keep", "tagged paper"),
        ("100", "keep", "pinned"),
    ]
    assert result.out.endswith(" freed\n")
    left = [entry.step for entry in Catalog(LocalStore(unmarked)).checkpoints()]
    assert left == [500, 200, 100]
    assert holdfast("verify", unmarked).code == 0


def test_a_dry_run_says_the_same_and_touches_nothing(holdfast: Command, unmarked: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in unmarked.rglob("*"))
    keep = "last:1,best:loss:max without optimizer+scheduler"
    planned = holdfast("prune", unmarked, "--keep", keep, "--dry-run", "--json").document
    assert sorted((path, path.stat().st_mtime_ns) for path in unmarked.rglob("*")) == before
    text = holdfast("prune", unmarked, "--keep", keep, "--dry-run").out
    assert "would be freed" in text
    done = holdfast("prune", unmarked, "--keep", keep, "--json").document
    assert planned["checkpoints"] == done["checkpoints"]
    assert planned["nbytes"] == done["nbytes"]
    assert (planned["deleted"], len(done["deleted"])) == ([], 2)


def test_components_go_where_the_rule_says_so(holdfast: Command, unmarked: Path) -> None:
    keep = "last:1,all without optimizer+scheduler"
    before = sum(path.stat().st_size for path in folder_of(unmarked, 300).iterdir())
    document = holdfast("prune", unmarked, "--keep", keep, "--json").document
    assert actions(document) == {500: "keep", 400: "thin", 300: "thin", 200: "keep", 100: "keep"}
    assert document["keep"] == "last 1 | all without optimizer, scheduler"
    assert document["thinned"] == [folder_of(unmarked, n).name for n in (300, 400)]
    assert sum(path.stat().st_size for path in folder_of(unmarked, 300).iterdir()) < before
    assert document["checkpoints"][1]["drop"] == ["optimizer", "scheduler"]
    listed = holdfast("ls", unmarked).out
    assert listed.count("without optimizer, without scheduler") == 2
    (shown,) = [
        entry
        for entry in holdfast("ls", unmarked, "--json").document["checkpoints"]
        if entry["step"] == 300
    ]
    assert shown["thinned"] == ["optimizer", "scheduler"]
    verified = holdfast("verify", f"{unmarked}@step=300")
    assert verified.code == 0
    assert "note: component optimizer was dropped by retention" in verified.out
    again = holdfast("prune", unmarked, "--keep", keep, "--json").document
    assert (again["deleted"], again["thinned"], again["nbytes"]) == ([], [], 0)


def test_the_run_stands_where_it_stood(
    holdfast: Command, unmarked: Path, saving: Callable[..., Any]
) -> None:
    """The claim of a prune never commits, so it moves nothing; not even after a rollback."""
    manager = saving()
    manager.resume("step=200")
    manager.close()
    assert holdfast("show", unmarked, "--json").document["checkpoint"]["step"] == 200
    document = holdfast("prune", unmarked, "--keep", "last:1", "--json").document
    assert actions(document)[200] == "keep"
    assert holdfast("show", unmarked, "--json").document["checkpoint"]["step"] == 200


def test_where_there_is_nothing_to_do_nothing_is_claimed(holdfast: Command, root: Path) -> None:
    before = sorted((root / "writers").iterdir())
    assert holdfast("prune", root, "--keep", "all").code == 0
    assert sorted((root / "writers").iterdir()) == before


def test_a_live_owner_refuses_it(holdfast: Command, unmarked: Path) -> None:
    """R22, invariant 11: its own rule prunes; a dry run may look."""
    newest = max(unmarked.glob("writers/????????.json"))
    writer = WriterRecord.decode(newest.read_bytes(), what="claim")
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        process = msgspec.structs.replace(this_process(), pid=other.pid, start=start)
        overwrite(newest, msgspec.structs.replace(writer, process=process).encode())
        newest.with_suffix(".closed.json").unlink()
        assert holdfast("prune", unmarked, "--keep", "last:1", "--dry-run").code == 0
        result = holdfast("prune", unmarked, "--keep", "last:1")
    finally:
        other.communicate(b"\n", timeout=60)
    assert result.code == 1
    assert "owns this run" in result.err
    assert len(list(unmarked.glob("step-*"))) == 5


def test_nothing_goes_for_a_damaged_newest(holdfast: Command, unmarked: Path) -> None:
    """R17, R20: what stays is read back first."""
    for step in (100, 200):
        assert holdfast("unpin", f"{unmarked}@step={step}").code == 0
    flip(folder_of(unmarked, 500) / "model-00000.safetensors", 5000)
    result = holdfast("prune", unmarked, "--keep", "last:1")
    assert result.code == 1
    assert f"FAILED {folder_of(unmarked, 500).name}: read back, it is damaged" in result.out


def test_a_damaged_manifest_is_kept_and_said(holdfast: Command, unmarked: Path) -> None:
    """R20, D13."""
    damaged = folder_of(unmarked, 300)
    flip(damaged / "manifest.json", 100)
    result = holdfast("prune", unmarked, "--keep", "last:1")
    assert f"kept, cannot be read: {damaged.name}: " in result.out
    assert damaged.exists()


def test_checkpoints_copied_from_another_run_are_not_judged(
    holdfast: Command, unmarked: Path
) -> None:
    """D5."""
    source = folder_of(unmarked, 300)
    manifest: Any = decode_register((source / "manifest.json").read_bytes(), what="manifest")
    copied = unmarked / source.name.replace(".0001-", ".0099-")
    copied.mkdir()
    moved = msgspec.structs.replace(manifest, epoch=99, parent=None)
    (copied / "manifest.json").write_bytes(encode_manifest(moved))
    document = holdfast("prune", unmarked, "--keep", "last:1", "--json").document
    (entry,) = [item for item in document["checkpoints"] if item["folder"] == copied.name]
    assert entry["action"] == "keep"
    assert "another run" in entry["why"]
    assert copied.exists()


@pytest.mark.parametrize(
    ("keep", "what", "more"),
    [
        ("best:los:min", "the metric 'los' (recorded: 'loss', 'odd')", ()),
        ("last:1,best:los:max:2 without optimizer", "the metric 'los'", ("--dry-run",)),
        ("every:9sp", "the counter 'samples'", ("--json",)),
        ("within:5tok", "the counter 'tokens'", ()),
    ],
)
def test_a_rule_that_needs_what_no_checkpoint_has_is_refused(
    holdfast: Command, unmarked: Path, keep: str, what: str, more: tuple[str, ...]
) -> None:
    """A mistyped metric must not delete the best checkpoints without a word."""
    before = sorted(path.name for path in unmarked.rglob("*"))
    result = holdfast("prune", unmarked, "--keep", keep, *more)
    assert result.code == 2
    assert what in result.err + result.out
    assert "nothing was deleted" in result.err + result.out
    assert sorted(path.name for path in unmarked.rglob("*")) == before


@pytest.mark.parametrize("keep", ["last", "newest:3", ""])
def test_a_rule_that_is_none_is_a_wrong_call(holdfast: Command, root: Path, keep: str) -> None:
    assert holdfast("prune", root, "--keep", keep).code == 2


def test_an_empty_root_has_nothing_to_prune(holdfast: Command, tmp_path: Path) -> None:
    assert holdfast("prune", tmp_path, "--keep", "last:1").code == 3


def test_pins_and_tags_are_set_and_taken_back(holdfast: Command, root: Path) -> None:
    name = folder_of(root, 300).name
    assert holdfast("pin", f"{root}@step=300").out == f"{name}: pinned\n"
    assert holdfast("tag", f"{root}@step=300", "best", "v1").out == f"{name}: pinned, #best, #v1\n"
    document = holdfast("unpin", f"{root}@v1", "--json").document
    assert (document["pinned"], document["tags"], document["step"]) == (False, ["best", "v1"], 300)
    assert holdfast("unpin", root / name).out == f"{name}: not pinned, #best, #v1\n"


@pytest.mark.parametrize("command", ["pin", "unpin", "tag"])
def test_a_pin_is_for_one_checkpoint_that_is_there(
    holdfast: Command, root: Path, command: str
) -> None:
    more = ["best"] if command == "tag" else []
    assert holdfast(command, root, *more).code == 2
    assert holdfast(command, f"{root}@step=7", *more).code == 3


@pytest.mark.parametrize("tag", ["latest", "step=3", " ", "a\nb"])
def test_a_tag_that_would_be_misread_is_a_wrong_call(
    holdfast: Command, root: Path, tag: str
) -> None:
    assert holdfast("tag", f"{root}@step=300", tag).code == 2
