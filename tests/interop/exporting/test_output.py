"""Exports past the page cache: the same bytes as through it, and no file after an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreError
from holdfast.interop.exporting import weights
from holdfast.interop.exporting.files import ExportPlan, PlannedFile, write_plan
from holdfast.interop.exporting.weights import past_cache

BLOCK = weights.BLOCK_NBYTES


def plan_of(data: bytes, step: int) -> ExportPlan:
    """An export of one file, written in pieces of `step` bytes."""

    def write(file: Any) -> None:
        with past_cache(file, len(data)) as put:
            for start in range(0, len(data), step):
                put(memoryview(data)[start : start + step])

    return ExportPlan(files=[PlannedFile(name="", nbytes=len(data), write=write)])


@pytest.mark.parametrize("nbytes", [0, 5, BLOCK, 6 * BLOCK + 4097])
def test_a_file_holds_what_was_written(tmp_path: Path, nbytes: int) -> None:
    data = os.urandom(nbytes)
    write_plan(plan_of(data, 3_000_001), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


def test_a_file_system_without_direct_writes_gets_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(BLOCK + 10)
    monkeypatch.setattr(weights, "open_direct", lambda file: None)
    write_plan(plan_of(data, 4096), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def full(descriptor: int, data: Any, start: int) -> int:
        if start >= 2 * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left"):
        write_plan(plan_of(bytes(8 * BLOCK), BLOCK), tmp_path / "out")
    assert not any(tmp_path.iterdir())
