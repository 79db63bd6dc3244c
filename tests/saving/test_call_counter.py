"""R38: ranks count their calls alike, also where a call raises on one of them before it begins."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks import Member, all_of, on_ranks, save_on
from holdfast import Tiered, errors
from holdfast.checkpoints import StateHooks
from holdfast.control.save_requests import put_save_request
from holdfast.events import Event
from holdfast.policy.triggers import Every, When
from holdfast.ranks import c10d
from holdfast.root.catalog import Catalog
from holdfast.saving import distributed as together_module
from holdfast.state.capture.edits import StateView
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from marks import full
from ranks.together import meet

LONG_S = 300.0
"""No test waits for this deadline."""


def steps_in(store: MemoryStore) -> list[int]:
    return [entry.step for entry in Catalog(store).checkpoints()][::-1]


def said_by(call: Any, *args: Any, **named: Any) -> str:
    """What a call raises, with its cause."""
    try:
        pending = call(*args, **named)
        if pending is not None:
            pending.wait()
    except errors.HoldfastError as error:
        return f"{error} {error.__cause__}"
    return "committed"


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("args", "named", "phase"),
    [
        ((2,), {"tags": ["no good"]}, "preparing the save"),
        ((2,), {"components": ["none"]}, "calling save"),
        (("2",), {}, "calling save"),
    ],
    ids=["tag", "component", "type"],
)
def test_a_save_that_one_rank_refuses_fails_on_all_and_the_next_is_made_by_all(
    args: tuple[Any, ...], named: dict[str, Any], phase: str, odd: int
) -> None:
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        with member.manager(store, save_timeout_s=LONG_S) as manager:
            wrong = member.rank == odd
            return [
                said_by(manager.save, 1),
                said_by(manager.save, *args, **named) if wrong else said_by(manager.save, 2),
                said_by(manager.save, 3),
            ]

    results = all_of(on_ranks(3, work))
    for rank, (first, second, third) in enumerate(results):
        assert (first, third) == ("committed", "committed"), results
        assert "UsageError" in second or rank == odd
        assert f"rank {odd}, in {phase}" in second or rank == odd
    assert steps_in(store) == [1, 3]


@pytest.mark.parametrize("odd", [0, 1, None])
def test_a_save_that_a_rank_refuses_for_its_tags_leaves_the_same_saves_due_on_all(
    odd: int | None,
) -> None:
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        with member.manager(store, every="2step", save_timeout_s=LONG_S) as manager:
            manager.resume()
            tags = ["no good"] if odd in (None, member.rank) else []
            said = [said_by(manager.save, 2, tags=tags)]
            return [*said, *(said_by(manager.maybe_save, step) for step in range(2, 7))]

    for first, *others in all_of(on_ranks(2, work)):
        assert "no good" in first
        assert others == ["committed"] * 5
    assert steps_in(store) == [4, 6]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("step", "named"),
    [(2, {"components": ["none"]}), ("2", {}), (2, {"samples": -1})],
    ids=["components", "type", "counter"],
)
def test_a_rank_that_cannot_know_what_save_it_refuses_lets_no_other_rank_wait(
    step: Any, named: dict[str, Any], odd: int
) -> None:
    """It may find the save due that the others have begun. So all fail, until all load."""
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        with member.manager(store, every="2step", save_timeout_s=LONG_S) as manager:
            manager.resume()
            wrong = member.rank == odd
            said = [said_by(manager.save, step, **named) if wrong else said_by(manager.save, 2)]
            said += [said_by(manager.maybe_save, step) for step in range(2, 7)]
            manager.resume()
            return [*said, said_by(manager.maybe_save, 8)]

    for rank, said in enumerate(all_of(on_ranks(3, work))):
        assert rank == odd or f"rank {odd}, in calling save" in said[0], said
        assert all(f"rank {odd}" in one and "before it could record" in one for one in said[3:6:2])
        assert said[2:5:2] == ["committed"] * 2, said
        assert said[-1] == "committed", said
    assert steps_in(store) == [8]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("is_due", [True, False])
def test_after_a_maybe_save_that_raised_on_one_rank_saves_fail_at_once_until_all_load(
    is_due: bool, odd: int
) -> None:
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        said = []
        with member.manager(store, every="2step", save_timeout_s=LONG_S) as manager:
            manager.resume()
            said.append(said_by(manager.maybe_save, 2))
            step = 4 if is_due else 3
            samples = -1 if member.rank == odd else None
            said.append(said_by(manager.maybe_save, step, samples=samples))
            said += [said_by(manager.maybe_save, step) for step in (6, 8)]
            found = manager.resume()
            assert found is not None
            said += [said_by(manager.maybe_save, step) for step in (10, 12)]
            assert found.step == 2
        return said

    results = all_of(on_ranks(2, work))
    for rank, said in enumerate(results):
        assert said[0] == "committed", results
        if is_due or rank == odd:
            assert "samples" in said[1], results
        assert all(f"rank {odd}" in one and "samples" in one for one in said[2:4]), results
        assert said[4:] == ["committed"] * 2, results
    assert steps_in(store) == [2, 10, 12]


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_whose_maybe_save_raises_again_and_again_lets_no_other_rank_wait(odd: int) -> None:
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        with member.manager(store, every="2step", save_timeout_s=LONG_S) as manager:
            manager.resume()
            samples = -1 if member.rank == odd else None
            said = [said_by(manager.maybe_save, step, samples=samples) for step in range(1, 9)]
            manager.resume()
            return [*said, said_by(manager.maybe_save, 10)]

    for rank, said in enumerate(all_of(on_ranks(3, work))):
        assert rank == odd or all(f"rank {odd}" in one for one in said[1:8:2]), said
        assert said[-1] == "committed"
    assert steps_in(store) == [10]


@pytest.mark.parametrize("is_due", [True, False])
def test_what_the_leader_alone_decides_and_cannot_loses_no_count_of_saves(is_due: bool) -> None:
    """A function in `every` that raises there: the others may have begun a save of this call."""
    store = MemoryStore()
    odd = 4 if is_due else 5

    def decide(now: Any, metrics: Any, event: Any) -> bool:
        if now.step == odd:
            raise errors.UsageError("cannot decide")
        return False

    def work(member: Member) -> list[str]:
        every = Every("2step") | When(decide)
        with member.manager(store, every=every, save_timeout_s=LONG_S) as manager:
            manager.resume()
            return [said_by(manager.maybe_save, step) for step in range(2, 9)]

    leader, follower = all_of(on_ranks(2, work))
    for rank, said in enumerate((leader, follower)):
        assert [number + 2 for number, one in enumerate(said) if one != "committed"] == (
            [odd] if rank == 0 or is_due else []
        ), said
    assert not is_due or "rank 0, in maybe_save, with a save due" in follower[2]
    assert steps_in(store) == ([2, 6, 8] if is_due else [2, 4, 6, 8])


def test_a_maybe_save_that_raised_where_nothing_can_be_due_costs_no_other_rank_a_wait() -> None:
    """A call that failed counts, so what the leader asks for is saved at one call by all."""
    store = MemoryStore()

    def work(member: Member) -> tuple[list[str], int]:
        with member.manager(store, save_timeout_s=LONG_S, stop=None) as manager:
            manager.save(1).wait()
            if member.rank:
                with pytest.raises(errors.UsageError):
                    manager.maybe_save("2")  # type: ignore[arg-type]
            else:
                manager.maybe_save(2)
            manager.resume()
            if member.rank == 0:
                put_save_request(store, reason="look", tags=())
            end = time.monotonic() + 60
            for step in range(3, 10_000_000):
                pending = manager.maybe_save(step)
                if pending is not None:
                    return [pending.wait().folder], step
                assert time.monotonic() < end
                time.sleep(0.001)
        raise AssertionError

    first, second = all_of(on_ranks(2, work))
    assert first == second


def test_ranks_agree_on_a_save_made_again_where_a_later_one_failed_to_begin_on_one() -> None:
    store, place = MemoryStore(), threading.Barrier(2)

    def fail(*_: Any, **__: Any) -> None:
        raise errors.OutOfMemory("none left")

    def work(member: Member) -> tuple[int, str]:
        with member.manager(
            store, every="1000step", save_timeout_s=LONG_S, on_failure="warn"
        ) as manager:
            manager.resume()
            assert said_by(manager.maybe_save, 1000) == "committed"
            start, prepare = manager._session.saver.start_save, manager._session.saver.prepare_save
            for step, name in ((2000, "start_save"), (3000, "prepare_save")):
                if member.rank:
                    setattr(manager._session.saver, name, fail)
                place.wait(60)
                assert "none left" in said_by(manager.maybe_save, step)
                manager._session.saver.start_save, manager._session.saver.prepare_save = (
                    start,
                    prepare,
                )  # type: ignore[method-assign]
                place.wait(60)
                said_by(manager.maybe_save, step + 1)  # the leader asks for the former again
                place.wait(60)
            for step in range(3002, 10_000_000):
                pending = manager.maybe_save(step)
                if pending is not None:
                    return step, pending.wait().folder
                time.sleep(0.001)
        raise AssertionError

    first, second = all_of(on_ranks(2, work))
    assert first == second


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("way", ["resume", "load"])
def test_a_load_that_one_rank_refuses_fails_on_all_at_once_and_the_next_is_made_by_all(
    way: str, odd: int
) -> None:
    store = MemoryStore()
    save_on(3, store, [1])

    def work(member: Member) -> tuple[str, int | None]:
        with member.manager(store, save_timeout_s=LONG_S) as manager:
            load: Any = getattr(manager, way)
            named = {"override": ["nothing"]} if member.rank == odd else {}
            with pytest.raises(errors.HoldfastError) as caught:
                load(**named)
            found = load()
            return str(caught.value), found.step

    for rank, (said, step) in enumerate(all_of(on_ranks(3, work))):
        assert step == 1
        assert "override: no optimizer has" in said
        assert rank == odd or f"rank {odd}, in beginning the load" in said


@pytest.mark.parametrize("next_waits", [True, *full(False)])
def test_the_deadline_of_a_save_begins_when_the_leader_has_waited_for_uploads(
    next_waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers that come early, the wait and the save each take most of the deadline. They wait
    long enough for the outcome, also where the next save does."""
    monkeypatch.setattr(together_module, "GRACE_S", 0.2)
    local, remote = MemoryStore("local"), MemoryStore("remote")
    upload = Fault(kind="hang", op="put", key="step-00000001*/manifest.json", deadline_s=60)
    slow = Fault(kind="hang", op="put", key="step-00000009*/manifest.json", deadline_s=60)
    views = [
        Tiered(FaultyStore(local, [slow]), FaultyStore(remote, [upload]), max_lag="1step"),
        Tiered(local, remote, max_lag="1step"),
    ]
    timeout_s = 3.0

    def work(member: Member) -> list[str]:
        with member.manager(views[member.rank], save_timeout_s=timeout_s) as manager:
            said = [said_by(manager.save, 1)]
            if member.rank == 0:
                upload.reached.wait(60)
                # The followers begin long before.
                threading.Event().wait(0.5 * timeout_s)
                threading.Timer(0.7 * timeout_s, upload.release.set).start()
                threading.Thread(target=release_later, daemon=True).start()
            if next_waits:
                manager.save(9)
                return [*said, said_by(manager.save, 10)]
            return [*said, said_by(manager.save, 9)]

    def release_later() -> None:
        slow.reached.wait(60)
        threading.Timer(0.6 * timeout_s, slow.release.set).start()

    assert all_of(on_ranks(2, work)) == [["committed", "committed"]] * 2
    assert steps_in(local) == ([1, 9, 10] if next_waits else [1, 9])


def test_an_interrupt_of_a_save_that_has_begun_fails_it_on_no_rank() -> None:
    """It goes on in the background of the leader, and commits: one outcome for all."""
    store = MemoryStore()
    commit = Fault(kind="hang", op="put", key="step-*/manifest.json", deadline_s=60)
    views = [FaultyStore(store, [commit]), store]

    def work(member: Member) -> str:
        with member.manager(views[member.rank], save_timeout_s=LONG_S) as manager:
            if member.rank:
                return manager.save(1).wait().folder
            background = manager._session.saver._background
            put = background.queue_task

            def interrupt(task: Any) -> None:
                put(task)
                assert commit.reached.wait(60)
                raise KeyboardInterrupt

            background.queue_task = interrupt  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                manager.save(1)
            background.queue_task = put  # type: ignore[method-assign]
            commit.release.set()
            pending = manager._session.saver.pending
            assert pending is not None
            return pending.committed.result(60).folder

    first, second = all_of(on_ranks(2, work))
    assert first == second


def test_saves_that_fail_leave_nothing_in_the_store_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither what followers have posted before the leader failed, nor that they failed."""
    monkeypatch.setattr(c10d, "KEPT_S", 0.0)
    group, store, place = dist.HashStore(), MemoryStore(), threading.Barrier(3)

    def work(member: Member) -> list[int]:
        sizes = []
        with member.manager(store, save_timeout_s=LONG_S, on_failure="warn") as manager:
            for step in range(40):
                wrong = member.rank == 0
                assert said_by(manager.save, step, tags=["no good"] if wrong else []) != "committed"
                place.wait(60)
                sizes.append(group.num_keys())
        return sizes

    sizes, *_ = all_of(on_ranks(meet(lambda: group, 3), work))
    # Heartbeats and late rounds add some for a while; a leak adds to each of the last ten.
    assert min(sizes[30:]) <= max(sizes[10:20]), sizes


def test_metrics_and_settings_that_differ_by_rank_are_warned_of_once_with_their_values() -> None:
    store = MemoryStore()
    warnings: list[str] = []

    def note(event: Event) -> None:
        if event.kind == "warning":
            warnings.append(event.message)

    def work(member: Member) -> None:
        config = {"lr": 0.1, "local_rank": member.rank}
        with member.manager(store, config=config, sinks=[note]) as manager:
            for step in (1, 2):
                loss = {"loss": [0.5, 0.5, 0.7][member.rank], "accuracy": math.nan}
                only_leader = {"lr": 0.1} if member.rank == 0 else {}
                manager.save(step, metrics={**loss, **only_leader}).wait()

    all_of(on_ranks(3, work))
    (found,) = warnings
    assert "metrics['loss'] is 0.5 on rank 0, 0.7 on rank 2\n" in found
    assert "config['local_rank'] is 0 on rank 0, 1 on rank 1, 2 on rank 2" in found
    assert "accuracy" not in found
    assert "lr'" not in found
    newest = Catalog(store).checkpoints()[0].manifest
    assert (newest.metrics["loss"], newest.config["local_rank"]) == (0.5, "0")


@pytest.mark.parametrize("odd", [None, 1])
def test_ranks_load_with_the_same_names_or_not_at_all(odd: int | None) -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        with member.manager(store, save_timeout_s=LONG_S) as manager:
            manager.save(1).wait()
            rename = None if member.rank == odd else lambda name: name
            try:
                manager.load(rename=rename, skip=["optimizer"] if member.rank else [])
            except errors.RanksFailed as error:
                return str(error)
        return "loaded"

    said = all_of(on_ranks(2, work))
    assert all("rename=None" in one for one in said) if odd else said == ["loaded"] * 2


def test_names_of_a_load_may_have_another_order_on_each_rank() -> None:
    store = MemoryStore()

    def work(member: Member) -> int:
        with member.manager(store, save_timeout_s=LONG_S) as manager:
            manager.save(1).wait()
            names = ["0.weight", "1.weight"][:: -1 if member.rank else 1]
            return manager.load(rename={name: name for name in names}).step

    assert all_of(on_ranks(2, work)) == [1, 1]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("by_hook", [True, False])
def test_loads_that_one_rank_edits_otherwise_fail_on_all(odd: int, by_hook: bool) -> None:
    store = MemoryStore()
    save_on(2, store)

    def edit(view: StateView) -> None:
        view["model"]["0.bias"] = torch.ones(16)

    def work(member: Member) -> str:
        own = edit if member.rank == odd else None
        hooks = StateHooks(edit_load=own if by_hook else None)
        with member.manager(store, hooks=hooks, save_timeout_s=LONG_S) as manager:
            return said_by(manager.load, **({} if by_hook else {"edit": own}))

    name = "hooks.edit_load" if by_hook else "edit"
    assert all(f"{name}=" in said for said in all_of(on_ranks(2, work)))
