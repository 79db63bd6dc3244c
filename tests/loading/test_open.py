"""Reading tensors: each block is checked, and asked for once more before it is blamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import CheckpointManager
from holdfast.errors import CorruptData
from holdfast.store.base import ignore
from holdfast.store.local import LocalStore
from ways import takes_direct

NUMEL = 5_000_000  # more than two blocks, and an odd tail


class Flaky(LocalStore):
    """The first reads of some files bring one wrong bit; all are shown in pieces of some sizes."""

    def __init__(
        self,
        root: Path,
        num_wrong: int,
        *,
        wrong: str = ".safetensors",
        shown: Sequence[int] = (1 << 23,),
    ) -> None:
        super().__init__(root)
        self.num_wrong = num_wrong
        self.wrong = wrong
        self.shown = shown
        self.reads: list[tuple[int, bool]] = []

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        *,
        seen: Callable[[memoryview], object] = ignore,
        afresh: bool = False,
    ) -> None:
        super().read_into(key, start, buffer, afresh=afresh)
        if key.endswith(self.wrong):
            self.reads.append((start, afresh))
            if len(self.reads) <= self.num_wrong:
                buffer[-1] ^= 1
        done = 0
        for nbytes in self.shown:
            seen(buffer[done : done + nbytes])
            done += nbytes


def saved(root: Path) -> torch.Tensor:
    values = torch.rand(NUMEL, generator=torch.Generator().manual_seed(0))
    with CheckpointManager(root, {"data": {"x": values}}) as manager:
        manager.save(1).wait()
    return values


def load(store: LocalStore, *, verify: bool = True) -> torch.Tensor:
    live = torch.zeros(NUMEL)
    try:
        with CheckpointManager(store, {"data": {"x": live}}) as manager:
            manager.load(components=["data"], verify=verify)
    except CorruptData:
        assert not live.any()
        raise
    return live


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("direct_io", [None, False])
def test_large_tensors_come_back_directly_and_through_the_cache(
    tmp_path: Path, direct_io: bool | None, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = saved(tmp_path)
    found, really_open = list[int](), os.open

    def noting(path: Any, flags: int, *more: Any, **named: Any) -> int:
        found.append(flags)
        return really_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", noting)
    assert torch.equal(load(LocalStore(tmp_path, direct_io=direct_io), verify=verify), values)
    expected = direct_io is None and takes_direct(tmp_path)
    assert any(flags & os.O_DIRECT for flags in found) == expected


def test_a_wrong_block_is_read_once_more_from_the_medium(tmp_path: Path) -> None:
    """A transient error on the way, in a cache for one, condemns nothing."""
    values = saved(tmp_path)
    store = Flaky(tmp_path, 1)
    assert torch.equal(load(store), values)
    wrong = store.reads[0][0]
    assert [read for read in store.reads if read[1]] == [(wrong, True)]


@pytest.mark.parametrize(
    "shown",
    [[1 << 20] * 8, [1 << 23], [1 << 22, *[1 << 20] * 4], [0, 1 << 20, 1 << 22, 3 << 20], []],
)
def test_however_a_block_is_shown_it_is_digested_once(tmp_path: Path, shown: list[int]) -> None:
    """A piece that was left out, or came twice, would show as a second read of the block."""
    values = saved(tmp_path)
    store = Flaky(tmp_path, 0, shown=shown)
    assert torch.equal(load(store), values)
    assert len(store.reads) == 3
    assert not any(afresh for _, afresh in store.reads)


def test_a_block_that_stays_wrong_is_damaged_and_changes_nothing(tmp_path: Path) -> None:
    """Invariant 6: what was read of the other blocks goes nowhere."""
    saved(tmp_path)
    with pytest.raises(CorruptData, match="is not what was written; it holds data"):
        load(Flaky(tmp_path, 100))


@pytest.mark.parametrize("document", ["index.json", "data-00000.json"])
def test_a_wrong_document_is_read_once_more_too(tmp_path: Path, document: str) -> None:
    values = saved(tmp_path)
    store = Flaky(tmp_path, 1, wrong=document)
    assert torch.equal(load(store), values)
    assert store.reads == [(0, False), (0, True)]
    with pytest.raises(CorruptData, match=document):
        load(Flaky(tmp_path, 2, wrong=document))
