"""Folders in shared memory that several processes make and remove at once (decision 0069)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import warm
from holdfast.format.tensors import TensorFile, TensorSpec, lay_out
from holdfast.ownership.process import this_process
from holdfast.staging.shared import (
    SUPERVISOR,
    SharedFolder,
    StagingFolder,
    Supervisor,
    write_record,
)
from holdfast.system import map_reserved

NUM_PROCESSES = 3
RESTARTING = """
import sys
from pathlib import Path
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.loading.staged_blocks import is_ended
from holdfast.ownership.process import this_process
from holdfast.staging.shared import SharedFolder, StagingFolder

(file,) = lay_out("model", [TensorSpec(key="x", dtype="F32", shape=(100,))])
shared = SharedFolder(Path(sys.argv[1]))
for _ in range(150):
    for folder in shared.staging_folders():
        if is_ended(folder):
            folder.remove()
    own = StagingFolder.make_below(shared.path, this_process())
    shared.reserve(own, file)
    own.record_close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> SharedFolder:
    """The folder of a supervisor, which is this process."""
    write_record(tmp_path / SUPERVISOR, Supervisor(this_process(), 10 << 20))
    return SharedFolder(tmp_path)


@pytest.fixture
def file() -> TensorFile:
    (file,) = lay_out("model", [TensorSpec(key="x", dtype="F32", shape=(100,))])
    return file


def test_processes_that_remove_ended_folders_at_once_each_get_their_own(
    folder: SharedFolder,
) -> None:
    children = [warm.Popen(["-c", RESTARTING, folder.path]) for _ in range(NUM_PROCESSES)]
    assert [child.wait(120) for child in children] == [0] * NUM_PROCESSES
    assert 1 <= len(folder.staging_folders()) <= NUM_PROCESSES


@pytest.mark.parametrize("last", ["arena", "digests", "layout", "layout.new", "staged.new"])
def test_a_folder_is_removed_whatever_file_its_process_died_over(
    folder: SharedFolder, file: TensorFile, last: str
) -> None:
    own = StagingFolder.make_below(folder.path, this_process())
    folder.reserve(own, file).note_digests([None])
    for path in own.path.iterdir():
        path.unlink()
    (own.path / (last if last == "staged.new" else f"{file.name}.{last}")).touch()
    folder.remove()
    assert not folder.path.exists()


def test_memory_is_reserved_in_pieces(
    folder: SharedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal undoes a call of fallocate(2) before Linux 6.11, so that a long one never ends."""
    reserve, pieces = os.posix_fallocate, list[tuple[int, int]]()

    def noting(fd: int, start: int, nbytes: int) -> None:
        reserve(fd, start, nbytes)
        pieces.append((start, nbytes))

    monkeypatch.setattr(os, "posix_fallocate", noting)
    with (tmp_path / "memory").open("w+b") as opened:
        assert len(map_reserved(opened.fileno(), (9 << 20) + 1)) == (9 << 20) + 1
    assert pieces == [(0, 4 << 20), (4 << 20, 4 << 20), (8 << 20, (1 << 20) + 1)]
