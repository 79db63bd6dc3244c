"""Collecting what was left behind, where some of it cannot be removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import AccessDenied
from holdfast.format.layout import READERS, scratch_folder, sending_folder
from holdfast.maintenance.gc import collect_garbage
from holdfast.manager import CheckpointManager
from holdfast.store.local import LocalStore
from holdfast.store.local.folders import temporary_name
from holdfast.testing.faulty import Fault, FaultyStore
from runs import new_run

TEMPORARY = temporary_name()
PREFLIGHT, SENDING = scratch_folder(bytes(8)), sending_folder(bytes(8))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One checkpoint, and what a killed preflight, upload and put have left beside it."""
    run = new_run()
    with CheckpointManager(tmp_path / "root", {"model": run.model}) as manager:
        manager.save(1, wait=True)
    for name in (PREFLIGHT, SENDING, READERS):
        (tmp_path / "root" / name).mkdir()
    (tmp_path / "root" / TEMPORARY).touch()
    return tmp_path / "root"


@pytest.mark.parametrize(
    ("op", "key", "failed", "left"),
    [
        ("delete", f"{PREFLIGHT}*", [PREFLIGHT], {PREFLIGHT}),
        ("children", "requests", ["requests"], set()),
        ("children", READERS, [READERS, READERS], set()),
        ("sweep", "writers", ["writers"], set()),
    ],
)
def test_what_cannot_be_removed_does_not_keep_the_rest(
    root: Path, op: str, key: str, failed: list[str], left: set[str]
) -> None:
    """Each refusal is told, and the other leftovers go."""
    refused = Fault(kind="fail", op=op, key=key, times=None, error=AccessDenied("not yours"))
    report = collect_garbage(FaultyStore(LocalStore(root), [refused]))
    assert [what for what, _ in report.failed] == failed
    assert {PREFLIGHT, SENDING, TEMPORARY}.intersection(
        path.name for path in root.iterdir()
    ) == left


def test_a_dry_run_lists_temporary_folders_and_removes_none(root: Path) -> None:
    listed = collect_garbage(LocalStore(root), dry_run=True).removed
    assert {PREFLIGHT, SENDING} <= {name for name, _ in listed}
    assert {PREFLIGHT, SENDING, TEMPORARY} <= {path.name for path in root.iterdir()}
    assert collect_garbage(LocalStore(root)).removed == listed
