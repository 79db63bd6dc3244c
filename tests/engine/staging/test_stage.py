"""What stands still goes apart; what moves after all comes back, and is believed later."""

from __future__ import annotations

from holdfast.engine.staging.stage import MIN_NBYTES, Grouping
from holdfast.format.tensors import TensorSpec

BIG = MIN_NBYTES // 4


def grouping(**sizes: int) -> Grouping:
    return Grouping([TensorSpec(key=key, dtype="F32", shape=(n,)) for key, n in sizes.items()])


def test_what_did_not_change_goes_apart() -> None:
    groups = grouping(base=BIG, lora=10)
    groups.observe({"lora"})
    assert groups.has_moved
    assert groups.settle() == {"base"}
    assert not groups.has_moved


def test_a_component_of_which_nothing_changes_stays_as_it_is() -> None:
    groups = grouping(base=BIG, other=BIG)
    groups.observe(())
    assert not groups.has_moved
    groups.observe({"other"})
    assert groups.settle() == {"base"}
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
    assert groups.settle() == {"base", "odd"}
    waits = []
    for _ in range(8):
        groups.observe({"lora", "odd"})
        assert groups.settle() == {"base"}
        count = 0
        while "odd" not in groups.apart:
            groups.observe({"lora"})
            count += 1
        groups.settle()
        waits.append(count)
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64]
