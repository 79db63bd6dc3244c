"""Sinks of trackers for a manager alone: where each checkpoint is, and that it was deleted."""

from __future__ import annotations

import os
import random
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import CheckpointManager, MemoryStore, Tiered
from holdfast.errors import UsageError
from holdfast.events import Event, Sink
from holdfast.sinks import (
    MLflowReferences,
    OpenTelemetry,
    Prometheus,
    TensorBoardReferences,
    WandbReferences,
)
from holdfast.sinks.trackers import CommittedCheckpoint
from offline import tensorboard_texts, wandb_references

# MLflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


def train(root: Any, sink: Sink, steps: range = range(1, 4)) -> list[Any]:
    """Save checkpoints of which the newest is kept; gives all, oldest first."""
    state = {"a": {"b": 0}}
    saved = []
    keep = None if isinstance(root, Tiered) else "last:1"
    with CheckpointManager(root, state, keep=keep, sinks=[sink]) as manager:
        manager.resume()
        for step in steps:
            state["a"]["b"] = step
            manager.save(step, metrics={"loss": 1 / step}).wait()
            saved.append(manager.list()[0])
    return saved


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An offline run of W&B."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    settings = wandb.Settings(silent=True, console="off")
    yield wandb.init(mode="offline", dir=str(tmp_path), project="test", settings=settings)
    wandb.teardown()


def end(run: Any) -> None:
    """End a run of W&B, so that all of it is in its file."""
    run.finish()
    sys.modules["wandb"].teardown()


def test_wandb_gets_a_reference_artifact_of_each_checkpoint_and_of_each_deletion(
    run: Any, tmp_path: Path
) -> None:
    root = tmp_path / "my run"
    saved = train(root, WandbReferences(run))
    end(run)
    found = wandb_references(tmp_path)
    name = f"checkpoint-{run.id}"
    commits = [(facts, refs) for title, facts, refs in found if title == name]
    for checkpoint, (facts, refs) in zip(saved, commits, strict=True):
        assert facts["root"] == str(root)
        assert (facts["folder"], facts["step"]) == (checkpoint.folder, checkpoint.step)
        assert facts["metrics"] == {"loss": 1 / checkpoint.step}
        assert re.fullmatch("blake3:[0-9a-f]{64}", facts["digest"])
        # None if it had been deleted before; then the artifact has a file that names the place.
        assert all(ref.startswith(f"{root.as_uri()}/{checkpoint.folder}/") for ref in refs if ref)
    assert any(ref for ref in commits[-1][1]), "the newest exists, and is referred to"
    gone = [facts for title, facts, _ in found if title == f"{name}-deleted"]
    assert [(facts["folder"], facts["reason"]) for facts in gone] == [
        (checkpoint.folder, "not kept by: last 1") for checkpoint in saved[:2]
    ]


def test_wandb_refers_to_object_stores_and_asks_none_of_them(run: Any, tmp_path: Path) -> None:
    """By a file where W&B needs a library, or a login, to refer to one."""
    sink = WandbReferences(run)
    for root in ("s3://bucket/gpt", "gs://bucket/gpt", "memory://gpt"):
        sink.committed(
            CommittedCheckpoint(
                root=root, folder="f", step=1, digest="d", nbytes=1, metrics={"loss": 1.0}
            )
        )
    end(run)
    found = wandb_references(tmp_path)
    assert [facts["root"] for _, facts, _ in found] == [
        "s3://bucket/gpt",
        "gs://bucket/gpt",
        "memory://gpt",
    ]
    assert found[0][2] == ["s3://bucket/gpt/f"]
    assert found[2][2] == ["memory://gpt/f"]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow that keeps runs in a file."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs.db")


def test_mlflow_gets_a_model_of_each_checkpoint_and_marks_deleted_ones(
    client: Any, tmp_path: Path
) -> None:
    """Also those of an earlier process; and of two tiers it is told apart where they are gone."""
    run_id = client.create_run("0").info.run_id
    uri = f"sqlite:///{tmp_path}/runs.db"
    root = Tiered(
        tmp_path / "local", tmp_path / "remote", keep_local="last:1", keep_remote="last:1"
    )
    saved = train(root, MLflowReferences(run_id, tracking_uri=uri), range(1, 3))
    saved += train(root, MLflowReferences(run_id, tracking_uri=uri), range(3, 4))
    models = {m.tags["holdfast.folder"]: m for m in client.search_logged_models(["0"])}
    for checkpoint in saved:
        model = models[checkpoint.folder]
        assert (model.source_run_id, str(model.status)) == (run_id, "READY")
        assert model.tags["holdfast.root"] == str(tmp_path / "local")
        assert model.tags["holdfast.uploaded"] == str(tmp_path / "remote")
        assert int(model.tags["holdfast.nbytes"]) == checkpoint.nbytes
        (metric,) = model.metrics
        assert (metric.key, metric.value, metric.step) == (
            "checkpoint/loss",
            1 / checkpoint.step,
            checkpoint.step,
        )
        is_gone = checkpoint is not saved[-1]
        assert ("holdfast.deleted" in model.tags) == is_gone
        assert ("holdfast.deleted-upload" in model.tags) == is_gone
    MLflowReferences(run_id, tracking_uri=uri).committed(
        CommittedCheckpoint(
            root="r", folder="f", step=1, digest="d", nbytes=1, metrics={"val/acc@1": 0.5}
        )
    )
    (odd,) = client.search_logged_models(["0"], filter_string="tags.`holdfast.folder` = 'f'")
    assert [metric.key for metric in odd.metrics] == ["checkpoint/val/acc_1"]


def test_mlflow_needs_a_run() -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(UsageError, match=r"call mlflow\.start_run first"):
        MLflowReferences()


def test_mlflow_without_models_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delattr(mlflow.MlflowClient, "create_logged_model")
    with pytest.raises(UsageError, match="MLflow 3"):
        MLflowReferences("a")


def test_tensorboard_gets_texts_and_scalars(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path / "events")) as writer:
        saved = train(tmp_path / "run", TensorBoardReferences(writer))
    texts = tensorboard_texts(tmp_path / "events", "checkpoint/reference")
    assert [step for step, _ in texts] == [1, 2, 3]
    assert f"| folder | {saved[0].folder} |" in texts[0][1]
    gone = tensorboard_texts(tmp_path / "events", "checkpoint/deleted")
    assert gone == [
        (
            checkpoint.step,
            f"{checkpoint.folder} was deleted from {tmp_path / 'run'}: not kept by: last 1",
        )
        for checkpoint in saved[:2]
    ]


TRACKIO = """
import random, sys, trackio, holdfast
run = trackio.init(project="mine", name="first", resume="allow", embed=False)
state = {"a": {"b": 0}}
sink = holdfast.sinks.TrackioReferences()
before = random.getstate()
with holdfast.CheckpointManager(sys.argv[1], state, keep="last:1", sinks=[sink]) as manager:
    for step in (1, 2):
        state["a"]["b"] = step
        manager.save(step, metrics={"loss": 1 / step}, wait=True)
trackio.finish()
assert random.getstate() == before
"""


@pytest.mark.full
def test_trackio_gets_what_and_where_at_the_step(tmp_path: Path) -> None:
    """In a process of its own, as it chooses its folder when it is imported."""
    pytest.importorskip("trackio")
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", TRACKIO, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "trackio").glob("mine*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    text = "\n".join(f"{step} {metrics}" for step, metrics in rows)
    assert [step for step, _ in rows] == [1, 2, 1]
    assert f'"checkpoint/root":"{tmp_path}/run"' in text.replace(" ", "")
    assert '"checkpoint/deleted":"step-00000001' in text.replace(" ", "")


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("WandbReferences", "wandb", "wandb"),
        ("MLflowReferences", "mlflow", "mlflow"),
        ("TrackioReferences", "trackio", "trackio"),
        ("Prometheus", "prometheus_client", "prometheus"),
        ("OpenTelemetry", "opentelemetry.metrics", "otel"),
    ],
)
def test_without_the_extra_the_error_names_it(
    name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast import sinks

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"holdfast-torch\[{extra}\]"):
        getattr(sinks, name)()


class Secret(MemoryStore):
    """A store of somebody's own, with a password in its URL."""

    @property
    def url(self) -> str:
        return "https://me:hunter2@host/runs/gpt?token=tokenofmine"


def test_no_secret_of_a_root_leaves(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path / "events")) as writer:
        train(Secret(), TensorBoardReferences(writer))
    written = b"".join(path.read_bytes() for path in (tmp_path / "events").iterdir())
    assert b"https://***@host/runs/gpt" in written
    assert b"hunter2" not in written
    assert b"tokenofmine" not in written


@pytest.mark.full
def test_a_tracker_draws_nothing_from_the_generators_of_training(
    run: Any, client: Any, tmp_path: Path
) -> None:
    """Invariant 7: it works beside training, in a thread of its own."""
    run_id = client.create_run("0").info.run_id
    events: list[Event] = []
    train(tmp_path / "run", events.append)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    uri = f"sqlite:///{tmp_path}/runs.db"
    meters = pytest.importorskip("opentelemetry.sdk.metrics").MeterProvider(shutdown_on_exit=False)
    for sink in (
        WandbReferences(run),
        MLflowReferences(run_id, tracking_uri=uri),
        Prometheus(textfile=tmp_path / "holdfast.prom"),
        OpenTelemetry(meter_provider=meters),
    ):
        for event in events:
            sink(event)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert (tmp_path / "holdfast.prom").exists()
    assert torch.equal(before[2], after[2])
