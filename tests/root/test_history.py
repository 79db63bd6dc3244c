"""The history of a run: every metric, save and deletion, over kills, rollbacks and merges."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from allranks import Member, all_of, on_ranks
from holdfast import Tiered, add_metrics
from holdfast.errors import FormatError, StoreError
from holdfast.events import Emitter
from holdfast.format.history import HistoryEvent, HistorySegment, HistorySession, MetricRows
from holdfast.format.manifest import Reference
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.policy.rules import parse_rule
from holdfast.replication.copy_checkpoints import copy_checkpoints, plan_copies
from holdfast.root import history_writer
from holdfast.root.catalog import Catalog
from holdfast.root.history import HistoryReader, RunHistory, read_history
from holdfast.root.history_writer import HistoryWriter, list_merged
from holdfast.saving import recorder
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore
from runs import Recorder, new_run

NONCE = "0123456789abcdef0123456789abcdef"


def writer(store: Store, epoch: int = 1, resumed_from: Reference | None = None) -> HistoryWriter:
    return HistoryWriter(store, epoch=epoch, nonce=NONCE, resumed_from=resumed_from)


def losses(history: RunHistory) -> list[float]:
    return list(history.curves["loss"].values)


def segments(store: Store) -> list[str]:
    return [info.key for info in store.list("history/")]


def test_ten_thousand_steps_stay_though_two_checkpoints_do(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, every="1000step", keep="last:2") as manager:
        for step in range(1, 10_001):
            manager.maybe_save(step, metrics={"loss": step / 7, "lr": 0.1})
    found = read_history(LocalStore(tmp_path))
    assert losses(found) == [step / 7 for step in range(1, 10_001)]
    assert list(found.curves["lr"].steps) == list(range(1, 10_001))
    assert [save.step for save in found.saves] == list(range(1000, 10_001, 1000))
    kept = [save.step for save in found.saves if save.deleted_s is None]
    assert kept == [9000, 10_000]
    assert all("last 2" in save.deleted_why for save in found.saves[:-2])
    times = found.curves["loss"].times
    assert list(times) == sorted(times)


def test_metrics_that_a_deleted_checkpoint_got_later_stay_on_its_branch(tmp_path: Path) -> None:
    run, keep = new_run(), "last:1,best:acc:max:1:wait=9"
    with run.manager(tmp_path, keep=keep) as manager:
        for step in (2, 4, 6):
            manager.maybe_save(step, metrics={"loss": 1.0})
            manager.save(step, wait=True)
            add_metrics(f"{tmp_path}@step={step}", {"acc": math.inf if step == 6 else -step})
    with run.manager(tmp_path, keep=keep) as manager:
        manager.resume("step=2")
        for step in (3, 5):
            manager.maybe_save(step, metrics={"loss": 2.0})
            manager.save(step, wait=True)
            add_metrics(f"{tmp_path}@step={step}", {"acc": 0.0})
    found = read_history(LocalStore(tmp_path))
    deleted = {save.step for save in found.saves if save.deleted_s is not None}
    assert {4, 6} <= deleted
    (branch,) = found.branches
    assert dict(zip(branch.curves["acc"].steps, branch.curves["acc"].values, strict=True)) == {
        4: -4.0,
        6: math.inf,
    }


def test_steps_after_a_rollback_are_a_branch(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, every="2step") as manager:
        for step in range(1, 8):
            manager.maybe_save(step, metrics={"loss": float(step)})
    with run.manager(tmp_path, every="2step") as manager:
        manager.resume("step=4")
        manager.maybe_save(5, metrics={"loss": 50.0})
        manager.resume("step=2")  # in one process, too
        manager.maybe_save(3, metrics={"loss": 30.0})
    found = read_history(LocalStore(tmp_path))
    assert losses(found) == [1, 2, 30]
    assert [(one.epoch, one.from_step) for one in found.branches] == [(1, 2), (2, 4)]
    assert list(found.branches[0].curves["loss"].steps) == [3, 4, 5, 6, 7]
    assert [(one.step, one.is_in_lineage) for one in found.starts] == [
        *((0, True), (4, False), (2, True))
    ]


def test_a_resume_leaves_lost_steps_before_it_has_recorded_any(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, every="2step") as manager:
        for step in range(1, 4):
            manager.maybe_save(step, metrics={"loss": float(step)})
    with run.manager(tmp_path) as manager:
        manager.resume()
        assert losses(read_history(manager.store)) == [1, 2]


def test_a_failing_history_fails_no_save_and_is_put_later() -> None:
    store = FaultyStore(MemoryStore(), [Fault(kind="fail", op="put", key="history/*", times=2)])
    run, seen = new_run(), Recorder()
    with run.manager(store, sinks=(seen,)) as manager:
        for step in (1, 2, 3):
            manager.save(step, metrics={"loss": float(step)}, wait=True)
            manager.wait()
    assert len(seen.of("committed")) == 3
    assert len(seen.of("housekeeping_failed")) == 2
    found = read_history(store)
    assert losses(found) == [1, 2, 3]
    assert [save.step for save in found.saves] == [1, 2, 3]


def test_a_folder_that_cannot_be_made_is_not_tried_at_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_MAX_ROWS", 10)
    (tmp_path / "history").write_text("mine")
    seen = Recorder()
    with new_run().manager(tmp_path, every="1000step", sinks=(seen,)) as manager:
        manager.resume()
        for step in range(1, 100):
            manager.maybe_save(step, metrics={"loss": float(step)})
            time.sleep(0.003)
    assert 1 <= len(seen.of("housekeeping_failed")) <= 12
    assert (tmp_path / "history").read_text() == "mine"


@pytest.mark.parametrize("kind", ["stop_before", "stop_after"])
def test_no_value_of_an_acknowledged_save_is_lost_at_any_put(kind: Any) -> None:
    def train(store: Store) -> list[int]:
        run = new_run()
        manager = run.manager(store, preflight=False, keep="last:1")
        acknowledged = []
        for step in range(1, 6):
            try:
                manager.save(step, metrics={"loss": float(step)}, wait=True)
                acknowledged.append(step)
                manager.wait()
            except BaseException:
                break
        with suppress(BaseException):
            manager.close()
        return acknowledged

    clean = FaultyStore(MemoryStore())
    train(clean)
    puts = [at for at, (op, _) in enumerate(clean.ops) if op == "put"]
    assert sum(key.startswith("history/") for _, key in clean.ops) > 5
    for at in range(0, len(puts), 2):
        inner = MemoryStore()
        acknowledged = train(FaultyStore(inner, [Fault(kind=kind, op="put", at=at)]))
        found = read_history(inner)
        assert not found.unread
        if acknowledged:
            assert losses(found)[: len(acknowledged)] == acknowledged


class Unreadable:
    def __float__(self) -> float:
        raise RuntimeError


def test_a_value_that_is_not_finite_or_no_number(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.resume()
        given: Mapping[str, Any] = {
            "a": math.nan,
            "b": -math.inf,
            "c": "text",
            "d": True,
            "e": Unreadable(),
        }
        manager.maybe_save(1, metrics=given)
    found = read_history(LocalStore(tmp_path)).curves
    assert math.isnan(found["a"].values[0])
    assert (found["b"].values[0], found["d"].values[0]) == (-math.inf, 1.0)
    assert not {"c", "e"} & {*found}


def test_of_several_ranks_the_leader_records() -> None:
    store = MemoryStore()

    def work(member: Member) -> None:
        with member.manager(store, every="5step", keep="last:1") as manager:
            manager.resume()
            for step in range(1, 11):
                member.train()
                manager.maybe_save(step, metrics={"loss": float(step)})

    all_of(on_ranks(2, work))
    assert losses(read_history(store)) == list(range(1, 11))
    assert segments(store) == ["history/00000001-000001.json"]


def test_a_large_history_is_merged_and_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the put of a merged segment and the deletions loses and doubles nothing."""
    monkeypatch.setattr(history_writer, "MAX_HISTORY_NBYTES", 900_000)
    inner = MemoryStore()
    for epoch in range(1, 51):
        one = writer(inner, epoch)
        one.add_row(epoch, float(epoch), {"loss": float(epoch)})
        one.add_event(HistoryEvent(what="failed", time=float(epoch), step=epoch, why="why"))
        one.put_segments()
    before = HistoryReader(inner).read_history()
    killed = FaultyStore(inner, [Fault(kind="fail", op="delete", times=None)])
    one = writer(killed, 51)
    with pytest.raises(StoreError):
        one.merge_segments()
    assert len(segments(inner)) == 51
    assert HistoryReader(inner).read_history() == before
    last = writer(inner, 52)
    last.merge_segments()
    assert len(segments(inner)) == 1
    assert HistoryReader(inner).read_history() == before
    for step in range(20_000):
        last.add_row(step, float(step), {"loss": step / 7, "lr": step / 3})
    last.put_segments()
    assert sum(info.nbytes for info in inner.list("history/")) > 900_000
    last.merge_segments()
    assert sum(info.nbytes for info in inner.list("history/")) <= 900_000
    found = read_history(inner)
    assert found.every == 2
    steps = list(found.curves["loss"].steps)
    assert steps[:3] == [0, 2, 4]
    assert steps[-3:] == [19_997, 19_998, 19_999]


def test_a_damaged_segment_is_named_and_the_others_are_read() -> None:
    store = MemoryStore()
    for epoch in (1, 2):
        one = writer(store, epoch)
        one.add_row(epoch, 0.0, {"loss": 1.0})
        one.put_segments()
    store.put("history/00000001-000001.json", store.get("history/00000001-000001.json")[:-9])
    store.put("history/mine.json", b"of a user")
    found = read_history(store)
    assert losses(found) == [1.0]
    assert [key for key, _ in found.unread] == ["history/00000001-000001.json"]


def test_columns_of_different_lengths_and_times_of_no_year_are_refused() -> None:
    rows = MetricRows(names=("a",), steps=[1, 2], times=[0.0, 0.0], values=[[1.0]])
    session = HistorySession(epoch=1, nonce=NONCE, resumed_from=None, from_step=0, rows=[rows])
    with pytest.raises(FormatError, match="columns"):
        HistorySegment.decode(HistorySegment(sessions=[session]).encode(), what="x")
    rows = MetricRows(names=("a",), steps=[1], times=[1e300], values=[[1.0]])
    session = HistorySession(epoch=1, nonce=NONCE, resumed_from=None, from_step=0, rows=[rows])
    with pytest.raises(FormatError, match="times"):
        HistorySegment.decode(HistorySegment(sessions=[session]).encode(), what="x")


def test_all_values_of_a_huge_row_stay_but_those_of_names_that_cannot_be_written() -> None:
    store = MemoryStore()
    one = writer(store)
    wrong: dict[Any, float] = {"n" * 2_000_000: 1.0, "\ud800": 1.0, 5: 1.0}
    one.add_row(1, 0.0, {**wrong, **{"m" * 200 + str(number): 1.0 for number in range(5000)}})
    one.add_row(2, 0.0, {"loss": 1.0})
    one.put_segments()
    assert len(read_history(store).curves) == 5001


def test_a_history_that_someone_removed_goes_on_and_comes_back_from_the_remote_tier(
    tmp_path: Path,
) -> None:
    root = Tiered(tmp_path / "local", tmp_path / "remote")
    for steps in (range(1, 4), range(4, 7)):
        with new_run().manager(root) as manager:
            manager.resume()
            for step in steps:
                manager.save(step, metrics={"loss": float(step)}, wait=True)
                manager.wait()
                if step == 5:
                    shutil.rmtree(tmp_path / "local" / "history")
    for name in ("local", "remote"):
        assert losses(read_history(LocalStore(tmp_path / name))) == [1, 2, 3, 4, 5, 6]


def test_a_remote_segment_is_deleted_only_if_all_of_it_was_merged() -> None:
    """Parts of the same session in other segments, or bytes that cannot be read, prove nothing."""
    local, remote = MemoryStore(), MemoryStore()
    keys = [f"history/00000001-{number:06d}.json" for number in (1, 2, 3)]
    for number, key in enumerate(keys):
        for store in (local, remote):
            one = writer(store)
            one.add_row(number, 0.0, {"loss": 1.0})
            one.put_segments()
            data = store.get(keys[0])
            store.put(key, data)
    for store in (local, remote):
        store.put(keys[0], local.get(keys[1]))
    remote.put(keys[2], b"damaged")
    assert list_merged(keys, remote, into=local) == keys[:2]
    local.delete(keys[0])
    local.delete(keys[1])
    assert list_merged(keys, remote, into=local) == []


def test_a_lost_local_disk_takes_no_curve_with_it(tmp_path: Path) -> None:
    def train(local: Path, steps: range) -> None:
        root = Tiered(local, tmp_path / "remote", keep_local="last:1")
        with new_run().manager(root, every="5step") as manager:
            manager.resume()
            for step in steps:
                manager.maybe_save(step, metrics={"loss": float(step)})

    train(tmp_path / "one", range(1, 13))
    train(tmp_path / "two", range(11, 21))  # on another machine
    for name in ("remote", "two"):
        found = read_history(LocalStore(tmp_path / name))
        assert losses(found) == list(range(1, 21))
        assert [list(branch.curves["loss"].steps) for branch in found.branches] == [[11, 12]]


def test_a_copy_and_deletions_by_hand_keep_the_history(tmp_path: Path) -> None:
    root, copy = tmp_path / "run", tmp_path / "copy"
    with new_run().manager(root, every="5step") as manager:
        for step in range(1, 13):
            manager.maybe_save(step, metrics={"loss": float(step)})
    store = LocalStore(root)
    newest = Catalog(store).find_checkpoint("latest").folder
    planned = plan_copies(store, LocalStore(copy), [newest])
    assert [*copy_checkpoints(store, LocalStore(copy), planned, emit=Emitter(()))]
    prune_checkpoints(store, parse_rule("last:1"), emit=Emitter(()))
    found = read_history(store)
    assert losses(found) == list(range(1, 13))
    deleted = [save for save in found.saves if save.deleted_s is not None]
    assert [(save.step, "last 1" in save.deleted_why) for save in deleted] == [(5, True)]
    assert losses(read_history(LocalStore(copy))) == list(range(1, 13))
