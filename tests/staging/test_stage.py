"""What stands still goes apart; what moves after all comes back, and is believed later."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast.errors import DeadlineExceeded
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.staging.interfaces import BytesContent, KnownFile, Staged, StagingTransfer
from holdfast.staging.stage import MIN_NBYTES, Grouping
from holdfast.threads.workers import Workers

BIG = MIN_NBYTES // 4


def grouping(**sizes: int) -> Grouping:
    return Grouping([TensorSpec(key=key, dtype="F32", shape=(n,)) for key, n in sizes.items()])


def test_what_did_not_change_goes_apart() -> None:
    groups = grouping(base=BIG, lora=10)
    groups.observe({"lora"})
    assert groups.has_moved
    assert groups.finish_layout() == {"base"}
    assert not groups.has_moved


def test_a_component_of_which_nothing_changes_stays_as_it_is() -> None:
    groups = grouping(base=BIG, other=BIG)
    groups.observe(())
    assert not groups.has_moved
    groups.observe({"other"})
    assert groups.finish_layout() == {"base"}
    groups.observe(())
    assert not groups.has_moved


def test_little_is_not_worth_a_file_of_its_own() -> None:
    groups = grouping(base=BIG - 1, model=BIG)
    groups.observe({"model"})
    assert not groups.has_moved
    groups = grouping(base=BIG, model=10 * BIG)
    groups.observe({"model"})
    assert not groups.has_moved


def test_what_changes_after_all_comes_back_and_waits_twice_as_long_each_time() -> None:
    groups = grouping(base=BIG, odd=BIG, lora=10)
    groups.observe({"lora"})
    assert groups.finish_layout() == {"base", "odd"}
    waits = []
    for _ in range(8):
        groups.observe({"lora", "odd"})
        assert groups.finish_layout() == {"base"}
        count = 0
        while "odd" not in groups.apart:
            groups.observe({"lora"})
            count += 1
        groups.finish_layout()
        waits.append(count)
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64]


class Late(BytesContent):
    """The second block does not come, while the first is being hashed."""

    def __init__(self) -> None:
        super().__init__(bytes(2 * BLOCK_NBYTES))
        self.is_hashing, self.may_end = threading.Event(), threading.Event()
        self.num_hashing = 0

    def block(self, number: int, timeout_s: float) -> memoryview:
        if number:
            assert self.is_hashing.wait(60)
            threading.Timer(0.3, self.may_end.set).start()
            raise DeadlineExceeded("staging block 1: not done")
        return super().block(number, timeout_s)

    def digest(self, number: int) -> bytes:
        self.num_hashing += 1
        self.is_hashing.set()
        assert self.may_end.wait(60)
        self.num_hashing -= 1
        return b""


def test_no_thread_hashes_any_more_when_a_block_did_not_come() -> None:
    """Its memory is that of the next save: the digest would be of neither."""
    (file,) = lay_out("m", [TensorSpec(key="x", dtype="U8", shape=(BLOCK_NBYTES + 9,))])
    known, content, workers = KnownFile(file), Late(), Workers(1, "hashing")
    transfer = cast(StagingTransfer, SimpleNamespace(content=lambda _: content))
    staged = Staged(files={"m": (known,)}, trees={}, kinds={}, transfer=transfer)
    with pytest.raises(DeadlineExceeded, match="block 1"):
        staged.compute_digests(known, workers, 60)
    assert content.num_hashing == 0
    workers.close_pool()
