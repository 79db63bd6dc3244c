"""MLflow, into a database in a folder: one run over all resumes, each step once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.train import (
    Callback,
    HookFailed,
    Measured,
    Metrics,
    MLflow,
    Table,
    Training,
    Validation,
)
from train.small import Noisy, make

# Its own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    pytest.importorskip("mlflow")


class Ends(Callback):
    """Raises within the step after `step`, when it has logged something of it."""

    def __init__(self, step: int, error: type[BaseException] = RuntimeError) -> None:
        self.step = step
        self.error = error

    def before_optimizer_step(self, training: Training) -> None:
        training.log({"within": 1.0})

    def before_zero_grad(self, training: Training) -> None:
        if training.counters.step == self.step:
            raise self.error


def train(root: Path, until: int, ends: Ends) -> None:
    logger = MLflow("mine", tracking_uri=f"sqlite:///{root}/runs.db", run_name="first")
    plan = Validation(data=Loader(Noisy(), batch_size=5), every="3step")
    make(root / "run", every="3step", validate=plan, callbacks=[logger, ends]).fit(until)


def client(root: Path) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{root}/runs.db")


def runs(root: Path) -> list[Any]:
    found = client(root)
    experiment = found.get_experiment_by_name("mine")
    return list(found.search_runs([experiment.experiment_id]))


@pytest.mark.full
def test_a_resumed_run_goes_on_and_has_each_step_once(tmp_path: Path) -> None:
    """K45, D55: also what is logged within a step, and what was logged beyond the checkpoint."""
    with pytest.raises(HookFailed):
        train(tmp_path, 8, Ends(5))
    (run,) = runs(tmp_path)
    assert run.info.status == "FAILED"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 8, Ends(4, KeyboardInterrupt))
    assert runs(tmp_path)[0].info.status == "KILLED"
    train(tmp_path, 8, Ends(99))
    (run,) = runs(tmp_path)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    found = client(tmp_path)
    steps = {
        name: [item.step for item in found.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    references = {name: steps.pop(name) for name in list(steps) if name.startswith("checkpoint/")}
    assert sorted({*references["checkpoint/loss"]}) == [3, 6, 8]
    # Of a save that was under way when training ended by an error nobody is told.
    costs = [steps.pop(f"save/{name}") for name in ("stall_s", "duration_s", "nbytes")]
    assert all(cost[-1] == 8 and sorted({*cost}) == cost for cost in costs)
    assert {name: sorted(several) for name, several in steps.items()} == {
        **{name: [1, 2, 3, 4, 5, 6, 7, 8] for name in ("loss", "draw", "within")},
        **{name: [3, 6, 8] for name in ("val/loss", "val/draw")},
        **{name: [3, 3] for name in ("load/duration_s", "load/nbytes")},
    }


def test_a_validation_alone_makes_no_run(tmp_path: Path) -> None:
    logger = MLflow(tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    trainer = make(tmp_path / "run", validate=Loader(Noisy(), batch_size=5), callbacks=[logger])
    trainer.validate()
    trainer.log({"mine": 1.0}, to=["mlflow"])
    assert not (tmp_path / "runs.db").exists()


@pytest.mark.parametrize("state", [{}, {"id": 5}, {"id": "a", "more": 1}])
def test_what_is_no_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="not the state"):
        MLflow().load_state_dict(state)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match=r"holdfast-torch\[mlflow\]"):
        MLflow()


@pytest.mark.full
def test_a_matrix_is_a_picture_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where MLflow keeps files of runs in such a database
    matrix = Measured(lambda inputs: inputs[:2], lambda batch, outputs: batch)
    plan = Validation(data=Loader(Noisy(), batch_size=5), every="2step", metrics={"matrix": matrix})
    service = MLflow("mine", tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    make(tmp_path / "run", validate=plan, callbacks=[service]).fit(4)
    (run,) = runs(tmp_path)
    found = client(tmp_path).list_artifacts(run.info.run_id, "val/matrix")
    assert [Path(item.path).name for item in found] == ["step2.png", "step4.png"]


@pytest.mark.full
def test_texts_and_tables_are_files_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tells(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            worst = Table(["word"], [["a"]])
            training.log({"sample": "once", "worst": worst, "weights": torch.ones(3)})

    monkeypatch.chdir(tmp_path)  # where MLflow keeps files of runs in such a database
    service = MLflow("mine", tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    make(tmp_path / "run", callbacks=[service, Tells()]).fit(2)
    (run,) = runs(tmp_path)
    for name, kind in [("sample", "txt"), ("worst", "md"), ("weights", "json")]:
        found = client(tmp_path).list_artifacts(run.info.run_id, name)
        assert [Path(item.path).name for item in found] == [f"step{n}.{kind}" for n in (1, 2)]


@pytest.mark.full
def test_checkpoints_are_models_of_the_run_that_goes_on(tmp_path: Path) -> None:
    """With tags and metrics and no files; deleted ones are marked."""
    for until in (2, 4):
        service = MLflow("mine", tracking_uri=f"sqlite:///{tmp_path}/runs.db")
        make(tmp_path / "run", keep="last:1", callbacks=[service]).fit(until)
    (run,) = runs(tmp_path)
    models = client(tmp_path).search_logged_models([run.info.experiment_id])
    found = {model.tags["holdfast.step"]: model for model in models}
    assert {step: model.source_run_id for step, model in found.items()} == dict.fromkeys(
        ("2", "4"), run.info.run_id
    )
    assert found["2"].tags["holdfast.deleted"] == "not kept by: last 1"
    assert "holdfast.deleted" not in found["4"].tags
    (metric, *_) = [item for item in found["4"].metrics if item.key == "checkpoint/loss"]
    assert (metric.step, metric.model_id) == (4, found["4"].model_id)


@pytest.mark.full
def test_references_can_be_refused(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/runs.db"
    make(tmp_path / "run", callbacks=[MLflow("mine", tracking_uri=uri, references=False)]).fit(2)
    (run,) = runs(tmp_path)
    assert not client(tmp_path).search_logged_models([run.info.experiment_id])


@pytest.mark.full
def test_a_test_after_fit_goes_on_with_the_run(tmp_path: Path) -> None:
    logger = MLflow("mine", tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    trainer = make(tmp_path / "run", callbacks=[logger])
    trainer.fit(2)
    found = trainer.test(Loader(Noisy(), batch_size=5))
    (run,) = runs(tmp_path)
    assert run.info.status == "FINISHED"
    (item,) = client(tmp_path).get_metric_history(run.info.run_id, "test/loss")
    assert (item.step, item.value) == (2, pytest.approx(found["test/loss"]))
