"""The exported model gives the outputs of the trained one, and training is not disturbed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.store import open_store
from holdfast.train import SWA, Callback, ExportModel, Metrics, Training
from train.small import make, network


def exported(folder: Path, step: int) -> Any:
    return torch.export.load(folder / f"model-step{step}.pt2").module()


class Keeps(Callback):
    """Keeps the first batch, and the modes of the modules after the end."""

    batch: Tensor | None = None

    def batch_start(self, training: Training, batch: Tensor) -> None:
        self.batch = batch.clone() if self.batch is None else self.batch

    def fit_end(self, training: Training) -> None:
        training.model[1].eval()  # type: ignore[operator]

    def close(self, training: Training) -> None:
        self.modes = [module.training for module in training.model.modules()]


def test_the_program_gives_the_outputs_of_the_model(tmp_path: Path) -> None:
    """C61: inputs are those of the first call; modules are in their modes again."""
    model = network()
    keeps = Keeps()
    callbacks = [ExportModel(tmp_path / "out"), keeps]
    trainer = make(tmp_path / "run", model=model, callbacks=callbacks)
    trainer.fit(2)
    assert keeps.modes == [True, True, False, True]
    assert keeps.batch is not None
    model.eval()
    assert torch.equal(exported(tmp_path / "out", 2)(keeps.batch), model(keeps.batch))
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("weights", ["ema", "swa"])
def test_an_average_is_exported_to_any_store(weights: Any, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}-{weights}"
    averages = {"ema": 0.5} if weights == "ema" else {"swa": SWA(start="1step", every="1step")}
    inputs = torch.ones(3, 4)
    export = ExportModel(url, weights=weights, inputs=inputs)
    trainer = make(tmp_path, callbacks=[export], **averages)
    trainer.fit(3)
    (tmp_path / "model-step3.pt2").write_bytes(open_store(url).get("model-step3.pt2"))
    found = exported(tmp_path, 3)(inputs)
    average: Any = trainer.state[weights]
    assert torch.allclose(found, average(inputs))
    assert not torch.allclose(found, trainer.model.eval()(inputs))


def test_the_program_takes_other_batch_sizes_if_asked(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    export = ExportModel(tmp_path / "out", inputs=torch.ones(3, 4), dynamic_shapes=shapes)
    make(tmp_path / "run", callbacks=[export]).fit(1)
    assert exported(tmp_path / "out", 1)(torch.ones(7, 4)).shape == (7, 1)


def test_a_finished_run_exports_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "run").fit(2)
    make(tmp_path / "run", callbacks=[ExportModel(tmp_path / "out")]).fit(2)
    assert [one.getMessage() for one in caplog.records if "give inputs=" in one.getMessage()]
    export = ExportModel(tmp_path / "out", inputs=torch.ones(3, 4))
    make(tmp_path / "run", callbacks=[export]).fit(2)
    (file,) = (tmp_path / "out").iterdir()
    before = file.stat().st_mtime_ns
    make(tmp_path / "run", callbacks=[export]).fit(2)
    assert file.stat().st_mtime_ns == before


def test_a_signal_exports_nothing(tmp_path: Path) -> None:
    class Stops(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            signal.raise_signal(signal.SIGTERM)

    export = ExportModel(tmp_path / "out")
    with pytest.raises(SystemExit):
        make(tmp_path / "run", callbacks=[export, Stops()]).fit(3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "keyword"),
    [
        ({"formats": ["torchscript"]}, "torchscript"),
        ({"formats": "pt2"}, "formats"),
        ({"formats": []}, "formats"),
        ({"weights": "mean"}, "weights"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, keyword: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=keyword):
        ExportModel(tmp_path, **options)


def test_an_average_that_is_not_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="weights='ema'"):
        make(tmp_path, callbacks=[ExportModel(tmp_path, weights="ema")])


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"holdfast-torch\[onnx\]"):
        ExportModel(tmp_path, formats=["onnx"])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnx_gives_the_outputs_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    inputs = torch.ones(3, 4)
    export = ExportModel(tmp_path / "out", formats=["pt2", "onnx"], inputs=inputs)
    trainer = make(tmp_path / "run", callbacks=[export])
    trainer.fit(2)
    graph = onnx.load(tmp_path / "out" / "model-step2.onnx")
    (name,) = [one.name for one in graph.graph.input]
    (found,) = reference.ReferenceEvaluator(graph).run(None, {name: inputs.numpy()})
    trainer.model.eval()
    assert torch.allclose(torch.from_numpy(found), trainer.model(inputs), atol=1e-5)
    assert torch.equal(exported(tmp_path / "out", 2)(inputs), trainer.model(inputs))
