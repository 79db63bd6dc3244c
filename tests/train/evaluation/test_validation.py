"""Validation: when it is due, right means, and a training that it leaves undisturbed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast import Last
from holdfast.data import Loader
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.policy.savers import SavePolicy
from holdfast.root.catalog import Catalog
from holdfast.state.capture.edits import StateView
from holdfast.store import open_store
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import Callback, Counts, Downstream, HookFailed, Metrics, Training, Validation
from train.small import Noisy, make, mean_square


class Seen(Callback):
    """At which steps validations ended, and with which metrics."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.metrics: list[Metrics] = []

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        self.steps.append(training.counters.step)
        self.metrics.append(dict(metrics))


def held_out() -> Loader:
    return Loader([torch.full((4,), float(value)) for value in range(5)], batch_size=2)


def at_steps(until: str | int, **plan: Any) -> list[int]:
    seen = Seen()
    plan = {"data": held_out(), **plan}
    make(
        MemoryStore(), validate=Validation(**plan), callbacks=[seen], counts=Counts(samples=len)
    ).fit(until)
    return seen.steps


@pytest.mark.parametrize(
    ("until", "plan", "expected"),
    [
        (7, {"every": "3step"}, [3, 6, 7]),
        (7, {"every": "3step", "at_end": False}, [3, 6]),
        (6, {"every": "3step"}, [3, 6]),
        (11, {}, [5, 10, 11]),
        ("2ep", {"every": "1ep"}, [5, 10]),
        (9, {"every": "4sp"}, [2, 4, 6, 8, 9]),
        (8, {"every": "0.25dur"}, [2, 4, 6, 8]),
        (10, {"every": "0.3dur"}, [3, 6, 9, 10]),
        ("2ep", {"every": "0.5dur"}, [5, 10]),
        (3, {"every": "1dur"}, [3]),
        (8, {"every": "0.5dur"}, [4, 8]),
    ],
)
def test_it_happens_when_it_is_due(until: Any, plan: dict[str, Any], expected: list[int]) -> None:
    """K35, K48: by steps, epochs, samples or a part of the goal, and at the end."""
    assert at_steps(until, **plan) == expected


def test_means_weigh_every_sample_the_same() -> None:
    """The last batch is smaller; a mean over batches would be wrong."""

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return batch.mean() + 0.0 * model(batch).sum(), {"low": batch.min()}

    trainer = make(MemoryStore(), validate=held_out(), loss=loss)
    data = Loader([torch.full((4,), float(v)) for v in (0, 1, 8)], batch_size=2, shuffle=False)
    found = make(MemoryStore(), validate=data, loss=loss).validate()
    assert found == {"val/loss": 3.0, "val/low": pytest.approx((2 * 0.0 + 8.0) / 3)}
    assert trainer.validate()["val/loss"] == 2.0


def test_a_weight_of_ones_own_counts() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return batch.mean()

    data = Loader([torch.full((4,), float(v)) for v in (1, 3)], batch_size=1, shuffle=False)
    plan = Validation(data=data, weigh=lambda batch: float(batch.mean()), loss=loss)
    assert make(MemoryStore(), validate=plan).validate() == {"val/loss": 2.5}


def test_several_loaders_have_their_own_metrics_and_a_loss_of_their_own() -> None:
    """K16."""
    seen = Seen()
    plan = Validation(
        data={"one": held_out(), "two": held_out()},
        loss=lambda model, batch: (batch.mean(), {"most": batch.max()}),
    )
    found = make(MemoryStore(), validate=plan, callbacks=[seen]).validate()
    assert set(found) == {
        f"val/{name}/{item}" for name in ("one", "two") for item in ("loss", "most")
    }
    assert [set(metrics) for metrics in seen.metrics] == [
        {"val/one/loss", "val/one/most"},
        {"val/two/loss", "val/two/most"},
    ]


def test_a_limit_takes_the_same_first_batches_each_time() -> None:
    """K35: eval_steps; the loader begins anew although it was left in its middle."""
    batches: list[Tensor] = []

    class Watch(Callback):
        def validation_batch_end(self, training: Training, batch: Tensor, outputs: Any) -> None:
            batches.append(batch)

    plan = Validation(data=held_out(), batches=2, every="1step")
    make(MemoryStore(), validate=plan, callbacks=[Watch()]).fit(2)
    assert len(batches) == 4
    assert torch.equal(torch.stack(batches[:2]), torch.stack(batches[2:]))


def test_its_metrics_are_those_of_the_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    """A5: evaluated first, saved afterwards, so that a rule may look at the metric."""
    seen = Seen()
    plan = Validation(data=held_out(), every="2step")
    make(tmp_path, every="2step", validate=plan, callbacks=[seen]).fit(5)
    found = {
        entry.step: entry.manifest.metrics for entry in Catalog(open_store(tmp_path)).checkpoints()
    }
    assert sorted(found) == [2, 4, 5]
    assert [found[step]["val/loss"] for step in (2, 4, 5)] == [
        metrics["val/loss"] for metrics in seen.metrics
    ]
    assert all("loss" in metrics for metrics in found.values())


def test_training_is_the_same_with_and_without_it() -> None:
    """Whatever it draws, on whichever loader, and although it is left early."""

    def drawing(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch + torch.rand(4) + float(np.random.random()))[0]

    plans: list[Any] = [
        None,
        Validation(data=Loader(Noisy(), batch_size=2), batches=2, every="1step", loss=drawing),
        Validation(data=DataLoader(Noisy(), batch_size=2, shuffle=True), every="1step"),
    ]
    states = []
    for plan in plans:
        trainer = make(MemoryStore(), validate=plan)
        trainer.fit(7)
        generators = {"torch": torch.get_rng_state(), "python": random.getstate()}
        states.append(leaf_digests({**trainer.state, **generators}))
    assert states[1] == states[0]
    assert states[2] == states[0]


def test_modes_are_those_of_before_module_by_module() -> None:
    modes: list[tuple[bool, bool]] = []

    class Watch(Callback):
        def fit_start(self, training: Training) -> None:
            self.model = training.model

        def step_start(self, training: Training) -> None:
            training.model[1].eval()  # type: ignore[index]

        def validation_batch_end(self, training: Training, batch: Tensor, outputs: Any) -> None:
            assert not any(module.training for module in training.model.modules())
            assert not torch.is_grad_enabled()

        def log(self, training: Training, metrics: Metrics) -> None:
            modes.append((training.model.training, training.model[1].training))  # type: ignore[index]

    plan = Validation(data=held_out(), every="1step")
    make(MemoryStore(), validate=plan, callbacks=[Watch()]).fit(2)
    assert modes == [(True, False)] * 2


def test_modes_come_back_when_it_fails() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("in validation")

    trainer = make(MemoryStore(), validate=Validation(data=held_out(), loss=loss))
    with pytest.raises(RuntimeError, match="in validation"):
        trainer.validate()
    assert all(module.training for module in trainer.model.modules())


def test_an_early_end_asked_for_by_a_validation_is_saved_with_its_metrics(tmp_path: Path) -> None:
    """K46."""

    class Enough(Callback):
        def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
            if training.counters.step == 4:
                training.request_stop("good enough")

    plan = Validation(data=held_out(), every="2step")
    outcome = make(tmp_path, every=None, validate=plan, callbacks=[Enough()]).fit(100)
    assert (outcome.reason, outcome.step, outcome.detail) == ("stopped", 4, "good enough")
    assert outcome.exit_code == 0
    (entry,) = Catalog(open_store(tmp_path)).checkpoints()
    assert (entry.step, entry.manifest.reason) == (4, "stopped")
    assert "val/loss" in entry.manifest.metrics


def test_a_checkpoint_can_be_validated_without_claiming_anything(tmp_path: Path) -> None:
    """K14, invariant 11: the one asked for, in any order, with its own weights."""
    seen = Seen()
    first, again = (Validation(data=held_out(), every="2step") for _ in range(2))
    make(tmp_path, validate=first, callbacks=[seen], ema=0.5).fit(4)
    other = make(tmp_path, validate=again, ema=0.5)
    (tmp_path / "readers").mkdir(exist_ok=True)  # where a reader's lease lies while it reads
    before = sorted(path.name for path in tmp_path.rglob("*"))
    generators = torch.get_rng_state()
    found = [other.validate(which) for which in ("step=4", "step=2", "latest")]
    assert [metrics["val/loss"] for metrics in found] == [
        seen.metrics[number]["val/loss"] for number in (1, 0, 1)
    ]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert torch.equal(torch.get_rng_state(), generators)
    with pytest.raises(NoCheckpoint):
        other.validate("step=3")


def test_it_may_be_asked_for_in_a_hook() -> None:
    found: list[dict[str, float]] = []

    class Ask(Callback):
        def step_end(self, training: Any, metrics: Metrics) -> None:
            found.append(training.validate())
            with pytest.raises(UsageError, match="while fit runs"):
                training.validate("latest")

    make(MemoryStore(), validate=held_out(), callbacks=[Ask()]).fit(2)
    assert len(found) == 2


def test_data_without_a_batch_or_without_samples_is_an_error() -> None:
    with pytest.raises(UsageError, match="no batch"):
        make(MemoryStore(), validate=[]).validate()
    plan = Validation(data=[{"text": "a"}], loss=lambda model, batch: torch.tensor(1.0))
    with pytest.raises(UsageError, match=r"counts=Counts\(samples=…\)"):
        make(MemoryStore(), validate=plan).validate()
    with pytest.raises(UsageError, match="nothing to validate"):
        make(MemoryStore()).validate()


def test_samples_are_found_in_any_container() -> None:
    batch = {"id": 3, "inner": ("text", [torch.tensor(1.0), torch.zeros(3, 4)])}
    plan = Validation(data=[batch], loss=lambda model, batch: torch.tensor(1.0))
    assert make(MemoryStore(), validate=plan).validate() == {"val/loss": 1.0}


@pytest.mark.parametrize(
    "plan",
    [
        {"every": 5},
        {"every": True},
        {"every": 0.0},
        {"every": 1.5},
        {"every": "10min"},
        {"every": "5tok"},
        {"batches": 0},
        {"batches": True},
        {"data": {}},
        {"data": {1: []}},
        {"data": 5},
    ],
)
def test_what_cannot_work_is_refused_at_construction(plan: dict[str, Any]) -> None:
    """K35, D47."""
    with pytest.raises(UsageError, match="validation"):
        make(MemoryStore(), validate=Validation(**{"data": held_out(), **plan}))


def test_several_have_their_own_times_data_losses_and_names() -> None:
    seen = Seen()
    plans = [
        Validation(name="quick", data=held_out(), every="2step", batches=1),
        Validation(
            name="full",
            data={"one": held_out(), "two": held_out()},
            every="5step",
            at_end=False,
            loss=lambda model, batch: batch.mean(),
        ),
    ]
    make(MemoryStore(), validate=plans, callbacks=[seen]).fit(7)
    found = [
        (step, name.removesuffix("/loss"))
        for step, metrics in zip(seen.steps, seen.metrics, strict=True)
        for name in metrics
        if name.endswith("/loss")
    ]
    assert found == [
        *[(2, "val/quick"), (4, "val/quick")],
        *[(5, "val/full/one"), (5, "val/full/two")],
        *[(6, "val/quick"), (7, "val/quick")],
    ]
    assert seen.metrics[2]["val/full/one/loss"] == 2.0


def test_a_check_runs_at_some_validations_and_at_the_last_one(tmp_path: Path) -> None:
    """K48: as a part of the validation, with its metrics in the checkpoint."""
    models: list[tuple[int, bool, bool]] = []

    def run(model: nn.Module) -> dict[str, Any]:
        models.append((trainer.counters.step, model.training, torch.is_grad_enabled()))
        return {"score": torch.tensor(float(trainer.counters.step)), "draw": random.random()}

    seen = Seen()
    check = Downstream(name="text", run=run, every_n_vals=3)
    plan = Validation(data=held_out(), every="2step", downstream=[check])
    trainer = make(tmp_path, every="2step", validate=plan, callbacks=[seen])
    trainer.fit(9)
    assert models == [(6, False, False), (9, False, False)]
    assert seen.steps == [2, 4, 6, 6, 8, 9, 9]
    metrics = {
        entry.step: entry.manifest.metrics for entry in Catalog(open_store(tmp_path)).checkpoints()
    }
    name = "val/text/score"
    scores = {step: found[name] for step, found in metrics.items() if name in found}
    assert scores == {6: 6.0, 9: 9.0}
    assert "val/text/score" in trainer.validate()


def test_a_check_comes_again_where_it_would_without_a_resume(tmp_path: Path) -> None:
    """K48: its turns depend on steps alone, and on no process."""

    def steps_of(root: Any, *goals: int) -> list[int]:
        seen = Seen()
        for goal in goals:
            check = Downstream(name="text", run=lambda model: {"score": 1.0}, every_n_vals=2)
            plan = Validation(data=held_out(), every="2step", at_end=False, downstream=[check])
            make(root, validate=plan, callbacks=[seen]).fit(goal)
        checked = zip(seen.steps, seen.metrics, strict=True)
        return [step for step, metrics in checked if "val/text/score" in metrics]

    assert steps_of(MemoryStore(), 13) == [4, 8, 12]
    assert steps_of(tmp_path, 3, 5, 13) == [4, 8, 12]


def test_what_was_validated_at_the_goal_is_not_validated_again(tmp_path: Path) -> None:
    """Each validation and check by itself: a rerun does what is missing at the end."""
    names: list[str] = []

    class Names(Callback):
        def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
            names.append(f"{training.counters.step} {name}")

    class Ends(Callback):
        def before_data(self, training: Training) -> None:
            if training.counters.step == 3:
                raise RuntimeError

    check = Downstream(name="text", run=lambda model: {"score": 1.0}, every_n_vals=2)
    options: dict[str, Any] = {
        "every": SavePolicy(ephemeral="1step"),
        "validate": [
            Validation(name="a", data=held_out(), every="3step", downstream=[check]),
            Validation(name="b", data=held_out(), every="4step"),
        ],
    }
    with pytest.raises(HookFailed):
        make(tmp_path, callbacks=[Names(), Ends()], **options).fit(9)
    assert names == ["3 a"]
    names.clear()
    make(tmp_path, callbacks=[Names()], **options).fit(3)
    assert names == ["3 a/text", "3 b"]


def test_names_that_clash_are_refused() -> None:
    one = Validation(data=held_out())
    check = Downstream(name="one", run=lambda model: {})
    for plans in (
        [one, one],
        [Validation(data={"one": held_out()}, downstream=[check])],
        [Validation(name="one", data=held_out()), Validation(data={"one": held_out()})],
    ):
        with pytest.raises(UsageError, match="two have the name"):
            make(MemoryStore(), validate=plans)
    with pytest.raises(UsageError, match="is not a Validation"):
        make(MemoryStore(), validate=[one, held_out()])


@pytest.mark.parametrize(
    "check",
    [
        {"name": ""},
        {"name": 5},
        {"run": None},
        {"every_n_vals": 0},
        {"every_n_vals": True},
    ],
)
def test_what_is_no_check_is_refused(check: dict[str, Any]) -> None:
    """K48."""
    with pytest.raises(UsageError, match="downstream"):
        Downstream(**{"name": "text", "run": dict, **check})


def test_a_check_must_give_numbers() -> None:
    """A text is left out with a warning, so that nothing is left here."""
    for metrics, message in (({}, "no metric"), ({"score": "high"}, "no metric")):
        check = Downstream(name="text", run=lambda model, metrics=metrics: metrics)  # type: ignore[misc]
        plan = Validation(data=held_out(), downstream=[check])
        with pytest.raises(UsageError, match=message):
            make(MemoryStore(), validate=plan).validate()


def test_a_model_has_its_own_weights_after_the_validation_of_a_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, ema=0.5).fit(2)
    other = make(tmp_path, validate=held_out(), ema=0.5)
    before = leaf_digests(other.state)
    own = other.validate()
    assert other.validate("latest") != own
    assert other.validate() == own
    assert leaf_digests(other.state) == before


def test_checkpoints_are_validated_by_step_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K14, D63: whatever names them, in whichever order, on all loaders."""
    seen = Seen()
    plan = Validation(data=held_out(), every="1step")
    root = tmp_path / "runs" / "one"
    make(root, every="1step", validate=plan, callbacks=[seen]).fit(4)
    make(tmp_path / "runs" / "two", every=None).fit(1)
    (tmp_path / "runs" / "other").mkdir()
    expected = {step: seen.metrics[step - 1]["val/loss"] for step in (1, 2, 3, 4)}
    other = make(root, validate=held_out())

    def found(which: Any) -> list[int]:
        results = other.validate_all(which)
        for result in results:
            assert result.metrics["val/loss"] == expected[result.checkpoint.step]
        return [result.checkpoint.step for result in results]

    assert found(None) == [4]
    assert found(["latest", 2, "step=4", "step-0000000[12]"]) == [1, 2, 4]
    assert found("step=*") == [1, 2, 3, 4]
    assert found(f"{tmp_path}/*/*@step=[34]") == [3, 4]
    assert found([root, 1]) == [1, 4]
    assert found(f"{tmp_path}/runs/*") == [1, 4]
    monkeypatch.chdir(tmp_path / "runs")
    assert found(["two@latest", "./two", Path("two"), Path("t*")]) == [1]
    assert found([f"{root}/step-*3.*", next(root.glob("step-*2.*")), root / "log"][:2]) == [2, 3]
    with pytest.raises(UsageError, match="2 checkpoints; use validate_all"):
        other.validate("step=[12]")


def test_nothing_runs_where_a_pattern_matches_nothing(tmp_path: Path) -> None:
    """K14."""
    seen = Seen()
    make(tmp_path).fit(2)
    other = make(tmp_path, validate=held_out(), callbacks=[seen])
    for wrong in ("step=9*", "nothing", f"{tmp_path}/none-*", f"{tmp_path}@step=[5-9]"):
        with pytest.raises(NoCheckpoint):
            other.validate_all(["latest", wrong])
    for no_name in ([], [1.5], [True], [None]):
        with pytest.raises(UsageError, match="which"):
            other.validate_all(no_name)  # type: ignore[arg-type]
    assert seen.steps == []
    with pytest.raises(UsageError, match="nothing to validate"):
        make(tmp_path).validate_all()


def test_weights_come_back_when_a_validation_of_checkpoints_fails(tmp_path: Path) -> None:
    make(tmp_path).fit(1)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise RuntimeError("in validation")

    other = make(tmp_path, validate=Validation(data=held_out(), loss=loss))
    before = leaf_digests({"model": other.model})
    with pytest.raises(RuntimeError, match="in validation"):
        other.validate_all()
    assert leaf_digests({"model": other.model}) == before


def test_checkpoints_under_validation_are_not_deleted(tmp_path: Path) -> None:
    """The last of several is still there when its turn comes, whatever retention does meanwhile."""
    make(tmp_path, every="1step").fit(3)
    seen = Seen()

    class Trains(Callback):
        def validation_start(self, training: Training, name: str) -> None:
            if not seen.steps:
                with torch.enable_grad():
                    make(tmp_path, every="1step", keep=Last(1), log=False).fit(4)

    other = make(tmp_path, validate=held_out(), callbacks=[Trains(), seen], log=False)
    assert [item.checkpoint.step for item in other.validate_all("step=*")] == [1, 2, 3]


def test_what_is_stored_may_be_edited_before_it_is_validated(tmp_path: Path) -> None:
    """D22: as for a resume."""
    make(tmp_path).fit(2)

    class Zero(Callback):
        def edit_load(self, training: Training, view: StateView) -> None:
            for path, weight in view["model"].items():
                view["model"][path] = torch.zeros_like(weight)

    plain, edited = (
        make(tmp_path, validate=held_out(), callbacks=callbacks) for callbacks in ([], [Zero()])
    )
    assert plain.validate("latest")["val/loss"] > 0
    assert edited.validate("latest")["val/loss"] == 0
