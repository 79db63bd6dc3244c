"""The best checkpoint exists where a rule asks for it, and its weights can be loaded."""

from __future__ import annotations

import logging
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast import Best, Checkpoints, Last, SideSaver, load_weights
from holdfast.errors import NoCheckpoint, SaveFailed, UsageError
from holdfast.policy.savers import SavePolicy
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore
from holdfast.train import Callback, Measured, Trainer, Training, Validation
from train.small import make

COURSE = {2: 5.0, 4: 3.0, 6: 4.0, 8: 1.0, 10: 2.0}
"""Loss of the validation at each second step."""


class Model(nn.Linear):
    """Its weights are the number of the step, so that they tell which were loaded."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)


class Steps(Callback):
    priority = 1

    def fit_start(self, training: Training) -> None:
        self.step_end(training, {})

    @torch.no_grad()
    def step_end(self, training: Training, metrics: Any) -> None:
        training.model.weight.fill_(training.counters.step)  # type: ignore[operator, union-attr]


def course(model: Any, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
    step = round(model.weight.item())
    return torch.tensor(COURSE.get(step, 9.0)), {"acc": -COURSE.get(step, 9.0)}


def trainer(root: Any, *, every: Any = "7step", keep: Any = None, **options: Any) -> Trainer:
    plan = Validation(
        data=[torch.zeros(1, 1)], every="2step", at_end=False, loss=course, use_ema=False
    )
    return make(
        root,
        model=Model(),
        loss=lambda model, batch: model(batch[:, :1]).square().mean(),
        every=every,
        keep=keep,
        **{"validate": plan, "callbacks": [Steps()], **options},
    )


def steps(root: Path | Store) -> list[int]:
    return sorted(entry.step for entry in Catalog(open_store(root)).checkpoints())


def test_an_outcome_in_another_process_knows_the_best_too() -> None:
    outcome = trainer(MemoryStore(), keep=Best("val/loss") | Last(1)).fit(5)
    copied = pickle.loads(pickle.dumps(outcome))
    assert copied == outcome
    assert copied.best == outcome.best
    assert copied.best.step == 4


@pytest.mark.parametrize("every", [None, "7step", SavePolicy(permanent="9step", ephemeral="5step")])
@pytest.mark.parametrize(
    ("rule", "expected"), [(Best("val/loss"), 8), (Best("val/acc", 1, "max"), 8)]
)
def test_saves_and_validations_that_never_meet_keep_the_best_all_the_same(
    every: Any, rule: Any, expected: int
) -> None:
    store = MemoryStore()
    outcome = trainer(store, every=every, keep=Last(1) | rule).fit(11)
    assert steps(store) == [expected, 11]
    assert outcome.best is not None
    assert (outcome.best.step, outcome.best.metrics["val/loss"]) == (8, 1.0)


def test_a_save_before_the_first_validation_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer(MemoryStore(), every="1step", keep=Best("val/loss") | Last(1)).fit(5)
    assert "which no checkpoint has" not in caplog.text


def test_only_what_the_rule_would_keep_is_saved() -> None:
    store = MemoryStore()
    trainer(store, keep=Best("val/loss") | Last(99)).fit(11)
    assert steps(store) == [2, 4, 7, 8, 11]


def test_as_many_are_saved_as_the_rule_keeps() -> None:
    store = MemoryStore()
    trainer(store, keep=Best("val/loss", 2) | Last(99)).fit(11)
    assert steps(store) == [2, 4, 6, 7, 8, 10, 11]


def test_without_a_rule_only_the_interval_decides() -> None:
    store = MemoryStore()
    trainer(store).fit(11)
    assert steps(store) == [7, 11]


def test_a_resume_knows_the_best_of_the_lives_before() -> None:
    store = MemoryStore()
    trainer(store, keep=Best("val/loss") | Last(99)).fit(5)
    trainer(store, keep=Best("val/loss") | Last(99)).fit(11)
    assert steps(store) == [2, 4, 5, 7, 8, 11]


def test_what_a_resume_left_behind_is_not_the_best_to_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path, keep=Best("val/loss") | Last(99)).fit(11)
    for step in (8, 11):
        [weights] = tmp_path.glob(f"step-{step:08}.*/model*.safetensors")
        weights.write_bytes(b"damaged")
    monkeypatch.setitem(COURSE, 8, 9.0)
    trainer(tmp_path, keep=Best("val/loss") | Last(99)).fit(12)
    went_on = {entry.step for entry in Catalog(open_store(tmp_path)).lineage_entries()}
    assert went_on == {2, 4, 7, 10, 12}


def test_a_side_saver_keeps_its_best_too() -> None:
    store = MemoryStore()
    weights = SideSaver(
        "weights", every="99step", components=["model"], keep=Best("val/loss") | Last(99)
    )
    trainer(store, savers=[weights]).fit(11)
    assert steps(store) == [2, 4, 7, 8, 11]
    parts = [entry.step for entry in Catalog(store).checkpoints() if entry.manifest.lacks]
    assert sorted(parts) == [2, 4, 8]


def test_a_best_one_that_could_not_be_saved_is_not_taken_for_saved() -> None:
    fault = Fault(kind="fail", op="put", key="step-00000004*/manifest.json")
    store = FaultyStore(MemoryStore(), [fault])

    class Waits(Callback):
        def before_data(self, training: Training) -> None:
            with suppress(SaveFailed):
                training.manager.wait()  # type: ignore[union-attr]

    trainer(store, keep=Best("val/loss") | Last(99), callbacks=[Steps(), Waits()]).fit(7)
    assert steps(store) == [2, 5, 6, 7]


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        (Best("val/los", mode="min"), "keep: best val/los (min): 'val/los'; is 'val/loss' meant"),
        (Last(1) | Best("los", mode="min"), "keep: best los (min): 'los'; is 'loss' meant"),
    ],
)
def test_a_rule_about_a_metric_that_nobody_logs_is_an_error_at_the_first_validation(
    keep: Any, says: str
) -> None:
    made = trainer(MemoryStore(), keep=keep)
    with pytest.raises(UsageError) as error:
        made.fit(11)
    assert says in str(error.value)
    assert "There are: loss, val/acc, val/loss" in str(error.value)
    assert made.counters.step == 2


def test_a_metric_that_another_process_measures_is_no_error(tmp_path: Path) -> None:
    """A rule that waits for it causes no save, and is no error at a validation."""
    keep = Best("eval/acc", wait=2)
    trainer(tmp_path, every="3step", keep=keep).fit("9step")
    assert steps(tmp_path) == [6, 9]
    holdfast.add_metrics(f"{tmp_path}@step=6", {"eval/acc": 0.5})
    trainer(tmp_path, every="3step", keep=keep).fit("15step")
    assert steps(tmp_path) == [6, 12, 15]


def test_a_callback_says_what_it_watches() -> None:
    class Plots(Callback):
        watches = ("loss", "val/acc", "val/f1")

    made = trainer(MemoryStore(), callbacks=[Steps(), Plots()])
    with pytest.raises(UsageError, match=r"logged:\n *plots: 'val/f1'"):
        made.fit(11)


def test_a_rule_about_validations_needs_one() -> None:
    with pytest.raises(UsageError, match="give validate="):
        trainer(MemoryStore(), keep=Best("val/loss"), validate=None)


def test_a_validation_that_comes_later_may_still_give_the_metric() -> None:
    late = [
        Validation(data=[torch.zeros(1, 1)], every=f"{every}step", loss=course, name=name)
        for name, every in (("often", 2), ("late", 4))
    ]
    made = trainer(MemoryStore(), keep=Best("val/late/f1"), validate=late)
    with pytest.raises(UsageError, match="val/late/f1"):
        made.fit(11)
    assert made.counters.step == 4


def _watching(name: str) -> Trainer:
    size = Measured(lambda losses: {"all": losses.sum()}, lambda batch, output: output.loss)
    return trainer(MemoryStore(), metrics={"size": size}, keep=Best(name, mode="min"))


def test_a_metric_of_an_epoch_may_come_after_the_first_validation() -> None:
    assert _watching("train/size/all").fit("2ep").best is not None


@pytest.mark.parametrize(("name", "step"), [("train/sizes", 2), ("train/size/none", 6)])
def test_a_metric_that_no_epoch_gives_is_found_at_the_next_validation(name: str, step: int) -> None:
    made = _watching(name)
    with pytest.raises(UsageError, match=rf"are never logged:\n.*{name}"):
        made.fit("2ep")
    assert made.counters.step == step


def test_the_best_weights_are_loaded_at_the_end_and_the_run_stays_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    made = trainer(store, keep=Best("val/loss") | Last(1), ema=0.5)
    with caplog.at_level(logging.INFO, "holdfast"):
        outcome = made.fit(11, load_best=True)
    assert made.model.weight.item() == 8.0
    assert made.ema is not None
    assert torch.equal(
        load_weights(store, average := Model(), which="best", component="ema") and average.weight,
        made.ema.model.weight,
    )
    assert outcome.step == made.counters.step == 11
    assert "model and ema: loaded from the best checkpoint, step-00000008" in caplog.text
    assert outcome.notes[-1] in caplog.text
    before = store.children()
    assert made.fit(11).step == 11
    assert made.model.weight.item() == 11.0
    assert store.children() == before


def test_the_best_is_loaded_where_the_goal_was_reached_before() -> None:
    store = MemoryStore()
    trainer(store, keep=Best("val/loss") | Last(1)).fit(11)
    again = trainer(store, keep=Best("val/loss") | Last(1))
    again.fit(11, load_best=True)
    assert again.model.weight.item() == 8.0


def test_without_a_best_one_to_load_it_is_an_error() -> None:
    def nan(model: Any, batch: Tensor) -> Tensor:
        return torch.tensor(float("nan"))

    plan = Validation(data=[torch.zeros(1, 1)], every="2step", loss=nan)
    made = trainer(MemoryStore(), validate=plan)
    with pytest.raises(NoCheckpoint, match=r"ended at step 3 \(goal\)"):
        made.fit(3, load_best=True)


@pytest.mark.parametrize(
    ("options", "says"), [({"validate": None}, "give validate="), ({"root": None}, "give a root")]
)
def test_what_can_have_no_best_one_refuses_to_load_it(options: dict[str, Any], says: str) -> None:
    made = trainer(**{"root": MemoryStore(), **options})
    with pytest.raises(UsageError, match=says):
        made.fit(3, load_best=True)


def test_it_is_named_in_validate_and_at_the_start_of_another_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, keep=Best("val/loss") | Last(1))
    outcome = made.fit(11)
    assert outcome.best is not None
    for which in ("best", "best:val/loss", "best:val/acc:max", f"{tmp_path}@best"):
        assert made.validate(which)["val/loss"] == 1.0
    other = trainer(MemoryStore())
    assert other.fit(9, start_from=f"{tmp_path}@best:val/loss").step == 9
    assert trainer(Checkpoints(None).root).fit(1).best is None
