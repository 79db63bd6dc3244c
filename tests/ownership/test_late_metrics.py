"""Metrics that are added to a checkpoint after its save, and who counts them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CheckpointManager, Encryption, MemoryStore, errors
from holdfast.events import Emitter, Event
from holdfast.keys import SecretKey
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.ownership.annotations import annotate
from holdfast.policy.rules import parse_rule
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from runs import retracted


def manager_of(root: Path | Store, **options: Any) -> CheckpointManager:
    state = {"model": torch.nn.Linear(1, 1)}
    return CheckpointManager(root, state, **{"sinks": (), "preflight": False, **options})


def save_steps(root: Path | Store, steps: range, **options: Any) -> None:
    with manager_of(root, **options) as manager:
        manager.resume()
        for step in steps:
            manager.save(step, metrics={"loss": float(step)}, wait=True)


def metrics_of(root: Path | Store) -> dict[int, dict[str, float]]:
    return {c.step: dict(c.metrics) for c in manager_of(root).list()}


def test_a_late_value_counts_for_best_the_list_and_retention(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_steps(root, range(1, 5))
    holdfast.add_metrics(f"{root}@step=2", {"eval/acc": 0.9})
    for step in (1, 3, 4):
        holdfast.add_metrics(f"{root}@step={step}", {"eval/acc": step / 10})
    assert metrics_of(root)[2] == {"loss": 2.0, "eval/acc": 0.9}
    store = holdfast.open_store(root)
    assert Catalog(store).find_checkpoint("best:eval/acc").step == 2
    prune_checkpoints(store, parse_rule("last:1,best:eval/acc"), emit=Emitter(()))
    assert [*metrics_of(root)] == [4, 2]


def test_retention_says_that_it_deletes_what_was_never_measured(tmp_path: Path) -> None:
    told: list[Event] = []
    with manager_of(tmp_path, keep="best:acc:wait=2", sinks=[told.append]) as manager:
        for step in range(1, 7):
            manager.save(step, wait=True)
    assert [*metrics_of(tmp_path)] == [6, 5]
    (warning,) = (event.message for event in told if event.kind == "warning")
    assert "step 1 was deleted before the metric" in warning


@pytest.mark.parametrize("change", [{"metrics": {"acc": 1.0}}, {"add_tags": ["kept"]}])
def test_what_gets_a_value_after_the_decision_is_judged_again(change: dict[str, Any]) -> None:
    """Rule 4: the deleter reads the notes again, after it has put its mark."""
    store = MemoryStore()
    save_steps(store, range(1, 4))
    entry = Catalog(store).checkpoints()[-1]
    annotate(store, entry, **change)
    assert not retracted(store, entry.folder, notes_number=0)
    assert retracted(store, entry.folder, notes_number=1) is ("metrics" in change)


def test_another_value_of_a_metric_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_steps(root, range(1, 2))
    (checkpoint,) = manager_of(root).list()
    holdfast.add_metrics(checkpoint, {"acc": math.nan, "loss": 1.0})
    holdfast.add_metrics(checkpoint, {"acc": math.nan})  # the same: a repeated try is no error
    for name in ("acc", "loss"):  # given later, and given to the save
        with pytest.raises(errors.UsageError, match=f"other values of {name}.*--replace"):
            holdfast.add_metrics(checkpoint, {"new": 1.0, name: 0.5})
    holdfast.add_metrics(checkpoint, {"loss": 0.5}, replace=True)
    assert str(metrics_of(root)[1]) == "{'loss': 0.5, 'acc': nan}"


@pytest.mark.parametrize(
    ("target", "metrics", "message"),
    [("{root}", {"acc": 1.0}, "name one"), ("{root}@step=1", {"acc": "high"}, "not one number")],
)
def test_a_whole_root_and_a_text_are_refused(
    tmp_path: Path, target: str, metrics: dict[str, Any], message: str
) -> None:
    save_steps(tmp_path / "run", range(1, 2))
    with pytest.raises(errors.UsageError, match=message):
        holdfast.add_metrics(target.format(root=tmp_path / "run"), metrics)


def test_of_values_that_many_add_at_once_none_is_lost() -> None:
    store = MemoryStore()
    save_steps(store, range(1, 2))
    (entry,) = Catalog(store).checkpoints()
    annotate(store, entry, add_tags=["kept"], pinned=True)

    def add(number: int) -> None:
        annotate(store, entry, metrics={f"m{number}": float(number)})

    with ThreadPoolExecutor(8) as pool:
        [*pool.map(add, range(24))]
    marks = Catalog(store).marks(entry.folder)
    assert marks.notes.metrics == {f"m{number}": float(number) for number in range(24)}
    assert (marks.pinned, marks.tags) == (True, ("kept",))


def test_a_value_for_a_checkpoint_that_is_being_deleted_is_an_error() -> None:
    store = MemoryStore()
    save_steps(store, range(1, 3))
    entry = Catalog(store).checkpoints()[-1]
    assert retracted(store, entry.folder)
    with pytest.raises(errors.NoCheckpoint):
        annotate(store, entry, metrics={"acc": 1.0})


def test_late_values_of_an_encrypted_run_need_its_keys_and_are_not_stored_in_plain_text(
    tmp_path: Path,
) -> None:
    root, keys = tmp_path / "run", Encryption(keys=SecretKey(bytes(range(32))))
    save_steps(root, range(1, 2), encrypt=keys)
    with pytest.raises(errors.SealError):
        holdfast.add_metrics(f"{root}@step=1", {"eval/secret": 0.5})
    holdfast.add_metrics(f"{root}@step=1", {"eval/secret": 0.5}, encrypt=keys)
    (listed,) = manager_of(root, encrypt=keys).list()
    assert listed.metrics["eval/secret"] == 0.5
    assert not any(b"eval/secret" in p.read_bytes() for p in root.rglob("*.json"))


def test_a_plain_checkpoint_of_an_encrypted_run_takes_no_metrics(tmp_path: Path) -> None:
    root = tmp_path / "run"
    keys = Encryption(keys=SecretKey(bytes(range(32))), accept_plain=True)
    save_steps(root, range(1, 2))
    with pytest.raises(errors.NotSealed, match="metrics"):
        holdfast.add_metrics(f"{root}@step=1", {"acc": 0.5}, encrypt=keys)


def test_a_resumed_run_knows_late_values(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_steps(root, range(1, 4))
    holdfast.add_metrics(f"{root}@step=2", {"acc": 0.9})
    assert manager_of(root).load("best:acc").step == 2
