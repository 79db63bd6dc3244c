"""`best` and `best:METRIC` name the checkpoint with the best value of a recorded metric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runs import new_run

from holdfast import Best, CheckpointManager, Last, SideSaver, errors, load_weights
from holdfast.root.catalog import Catalog
from holdfast.store import open_store

Resolve = Callable[[str], int]


def saved(root: Path, *all_metrics: dict[str, float], **options: Any) -> Resolve:
    """A root with a checkpoint a step; returns what step a name means."""
    with new_run().manager(root, **options) as manager:
        for step, metrics in enumerate(all_metrics, start=1):
            manager.save(step, metrics=metrics, wait=True)
    return lambda which: Catalog(open_store(root)).find_checkpoint(which).step


LOSSES = ({"val/loss": 3.0, "acc": 0.1}, {"val/loss": 1.0, "acc": 0.5}, {"val/loss": 2.0}, {})


@pytest.mark.parametrize(
    ("keep", "which", "step"),
    [
        (None, "best", 2),
        (None, "best:val/loss", 2),
        (None, "best:val/loss:max", 1),
        (None, "best:acc:max", 2),
        (None, "best:acc:min", 1),
        (Best("acc", 4, "max") | Last(9), "best", 2),
        (Best("acc", 4, "min") | Last(9), "best", 1),
        (Best("acc", 4, "max") | Best("val/loss", 4) | Last(9), "best:acc", 2),
        (Last(9) | Best("val/loss", 4, "max") | Best("acc", 4), "best", 1),
    ],
)
def test_it_is_the_best_by_the_metric_of_the_rule_and_in_its_direction(
    tmp_path: Path, keep: Any, which: str, step: int
) -> None:
    assert saved(tmp_path, *LOSSES, keep=keep)(which) == step


def test_of_equal_values_it_is_the_older_as_for_the_rule(tmp_path: Path) -> None:
    assert saved(tmp_path, {"loss": 1.0}, {"loss": 1.0}, keep=Best("loss") | Last(2))("best") == 1


def test_values_that_are_not_finite_do_not_count(tmp_path: Path) -> None:
    resolve = saved(tmp_path, {"loss": float("nan")}, {"loss": float("-inf")}, {"loss": 1.0})
    assert resolve("best:loss") == 3


def test_an_unhealthy_state_is_never_the_best(tmp_path: Path) -> None:
    from holdfast.checkpoints import StateHooks

    hooks = StateHooks(before_save=lambda now, metrics: ["broken"] if now.step == 1 else [])
    assert saved(tmp_path, {"loss": 1.0}, {"loss": 2.0}, hooks=hooks)("best:loss") == 2


def test_a_part_of_the_state_is_the_best_only_if_no_whole_one_has_the_metric(
    tmp_path: Path,
) -> None:
    weights = SideSaver("weights", every="1h", components=["model"])
    with new_run().manager(tmp_path, savers=[weights]) as manager:
        manager.save(1, metrics={"loss": 1.0}, components=["model"], wait=True)
        assert Catalog(manager.store).find_checkpoint("best:loss").step == 1
        manager.save(2, metrics={"loss": 2.0}, wait=True)
    assert Catalog(open_store(tmp_path)).find_checkpoint("best:loss").step == 2


def test_what_a_rollback_has_left_behind_is_not_the_best(tmp_path: Path) -> None:
    resolve = saved(tmp_path, {"loss": 2.0}, {"loss": 1.0})
    with new_run().manager(tmp_path) as manager:
        manager.resume("step=1")
    assert resolve("best:loss") == 1


def test_a_tag_of_a_person_comes_first(tmp_path: Path) -> None:
    resolve = saved(tmp_path, {"val/loss": 2.0}, {"val/loss": 1.0})
    with new_run().manager(tmp_path) as manager:
        manager.tag("step=1", "best")
    assert resolve("best") == 1
    assert resolve("best:val/loss") == 2


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("best", r"name one, as in best:METRIC:max \(recorded: 'acc'\)"),
        ("best:los:min", r"none has the metric 'los' \(recorded: 'acc'\)"),
        ("best:loss", "none has the metric 'loss'"),
    ],
)
def test_a_metric_that_nobody_recorded_is_an_error_that_names_those_that_are(
    tmp_path: Path, which: str, says: str
) -> None:
    resolve = saved(tmp_path, {"acc": 1.0})
    with pytest.raises(errors.NoCheckpoint, match=says):
        resolve(which)


def test_a_direction_that_nobody_knows_is_not_guessed(tmp_path: Path) -> None:
    resolve = saved(tmp_path, {"score": 1.0})
    with pytest.raises(errors.UsageError, match="say best:score:max or best:score:min"):
        resolve("best:score")


def test_loads_and_rollbacks_take_it(tmp_path: Path) -> None:
    saved(tmp_path, *LOSSES)
    run = new_run()
    assert load_weights(f"{tmp_path}@best:val/loss", run.model).step == 2
    with run.manager(tmp_path) as manager:
        assert manager.load("best").step == 2
        found = manager.resume("best:acc:max")
        assert found is not None
        assert found.step == 2


def test_a_root_with_the_name_of_the_best_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.UsageError, match="names a checkpoint"):
        CheckpointManager(f"{tmp_path}@best:val/loss", new_run().state)
