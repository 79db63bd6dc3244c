"""A new run in the root of another: `start_new`, and `resume(required=True)`."""

from __future__ import annotations

from typing import Any

import pytest

from allranks import Member, all_of, on_ranks
from holdfast import CheckpointManager, Last, Tiered, errors
from holdfast.maintenance.delete import preview
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from runs import new_run


def opened(root: Store | Tiered, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, new_run().state, preflight=False, **options)


def save(root: Store | Tiered, *steps: int, fresh: bool = False, **options: Any) -> None:
    """A process that saves these steps, the last one read back, and closes."""
    with opened(root, **options) as manager:
        if fresh:
            manager.start_new()
        else:
            manager.resume()
        for step in steps:
            manager.save(step).wait()
        manager.wait()


def steps(store: Store) -> list[int]:
    return [entry.step for entry in Catalog(store).checkpoints()]


def resumed(root: Store | Tiered, which: str = "latest") -> int | None:
    with opened(root) as manager:
        found = manager.resume(which)
    return None if found is None else found.step


def test_a_fresh_start_leaves_what_is_there_and_its_own_checkpoints_are_found() -> None:
    store = MemoryStore()
    save(store, 1, 2, 3)
    save(store, fresh=True)  # killed before its first save, for all that the root shows
    assert resumed(store) is None
    assert resumed(store) is None  # and once more, after a resume that claimed
    save(store, 1, 2, keep=Last(1))
    assert steps(store) == [2, 3, 2, 1]  # the rule took the new run's 1, and nothing of the old
    assert resumed(store) == 2
    with pytest.raises(errors.NoCheckpoint, match="left behind"), opened(store) as manager:
        manager.resume("step=3")


def test_prune_leaves_the_run_before_alone_until_the_run_returns_to_it() -> None:
    store = MemoryStore()
    save(store, 1, 2)
    old = Catalog(store).newest()
    assert old is not None
    save(store, 1, 2, fresh=True)
    assert [item.entry.name.epoch for item in preview(store, Last(1))] == [2, 2]
    assert resumed(store, old.folder) == 2
    assert len(preview(store, Last(1))) == 4


def test_a_first_save_without_a_resume_follows_a_fresh_start_only() -> None:
    store = MemoryStore()
    save(store, 1)
    save(store, fresh=True)
    with opened(store) as manager:
        manager.save(1).wait()
    with pytest.raises(errors.UsageError, match="resume"), opened(store) as manager:
        manager.save(1)


def test_a_fresh_start_comes_first() -> None:
    store = MemoryStore()
    save(store, 1)
    for call in ("resume", "load"):
        with opened(store) as manager:
            getattr(manager, call)()
            with pytest.raises(errors.UsageError, match="comes before"):
                manager.start_new()
    refused = pytest.raises(errors.UsageError, match="on_existing")
    with opened(store, on_existing="error") as manager, refused:
        manager.start_new()
    assert resumed(store) == 1


def test_ranks_start_anew_together() -> None:
    store = MemoryStore()

    def work(member: Member) -> int | None:
        with member.manager(store) as manager:
            manager.start_new()
            manager.save(1).wait()
        with member.manager(store) as manager:
            found = manager.resume()
        return None if found is None else found.step

    save(store, 7)
    assert all_of(on_ranks(2, work)) == [1, 1]
    assert steps(store) == [1, 7]


def test_both_tiers_keep_the_run_before() -> None:
    near, far = MemoryStore(), MemoryStore("far")
    tiers = Tiered(near, far, keep_local=Last(1), keep_remote=Last(1))
    save(tiers, 1, 2)
    save(tiers, 5, 6, fresh=True)
    assert steps(near) == steps(far) == [6, 2]
    assert resumed(tiers) == 6
    assert resumed(Tiered(MemoryStore("new"), far)) == 6


def test_a_required_checkpoint_is_an_error_before_anything_is_claimed() -> None:
    store = MemoryStore()
    with opened(store) as manager, pytest.raises(errors.NoCheckpoint, match="required"):
        manager.resume(required=True)
    assert Catalog(store).claims() == ()
    save(store, 1)
    with opened(store) as manager:
        assert manager.resume(required=True) is not None

    def work(member: Member) -> None:
        with member.manager(MemoryStore()) as manager:
            manager.resume(required=member.rank == 0)

    for error in on_ranks(2, work):
        assert isinstance(error, errors.RanksFailed)
