"""Factories and devices: made in order, repeatable, and refused when they cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import UsageError
from holdfast.keys import Encryption, generate
from holdfast.store.memory import MemoryStore
from holdfast.train import build
from train.small import make, network


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def test_a_model_that_is_made_is_the_same_for_the_same_seed() -> None:
    """K1, K42: seeded before it is made, and the generators of the process are left alone."""
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(models))
        before = torch.get_rng_state()
        trainer = make(
            MemoryStore(), model=lambda: nn.Linear(4, 1), optimizer=adam, seed=seed, scheduler=None
        )
        assert torch.equal(torch.get_rng_state(), before)
        models.append(trainer.model.weight)
    assert torch.equal(models[0], models[1])  # type: ignore[arg-type]
    assert not torch.equal(models[0], models[2])  # type: ignore[arg-type]


def test_what_is_made_is_trained() -> None:
    trainer = make(MemoryStore(), model=lambda: nn.Linear(4, 1), optimizer=adam)
    before = trainer.model.weight.clone()  # type: ignore[operator, union-attr]
    trainer.fit(2)
    assert not torch.equal(trainer.model.weight, before)  # type: ignore[arg-type]
    assert trainer.optimizer.param_groups[0]["params"][0] is trainer.model.weight


def test_model_and_batches_go_to_the_device() -> None:
    trainer = make(MemoryStore(), device="cpu", optimizer=adam)
    trainer.fit(1)
    assert {weight.device.type for weight in trainer.model.parameters()} == {"cpu"}


def test_an_optimizer_that_has_a_scheduler_already_is_taken() -> None:
    """Its `step` is then a function of the scheduler, not one that needs a closure."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    made = make(MemoryStore(), model=model, optimizer=optimizer, scheduler=scheduler)
    assert made.optimizer is optimizer


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_an_accelerator() -> None:
    trainer = make(MemoryStore(), device="cuda", optimizer=adam, precision="bf16", ema=0.9)
    trainer.fit(3)
    assert {weight.device.type for weight in trainer.model.parameters()} == {"cuda"}


layer = nn.Linear(4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 5}, "model=5"),
        ({"model": lambda: 5, "optimizer": adam}, "returned a int"),
        ({"optimizer": 5}, "optimizer=5"),
        ({"optimizer": lambda model: 5}, "returned a int"),
        (
            {"model": network, "optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)},
            "one for the optimizer",
        ),
        ({"optimizer": lambda model: torch.optim.LBFGS(model.parameters())}, "LBFGS .* closure"),
        ({"model": layer, "optimizer": torch.optim.LBFGS(layer.parameters())}, "LBFGS .* closure"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device": 1.5}, "device=1.5"),
        ({"device": "xpu:7"}, "device='xpu:7'"),
        ({"log_every": 0}, "log_every=0"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(options: dict[str, Any], message: str) -> None:
    """D47, K1."""
    with pytest.raises(UsageError, match=message):
        make(MemoryStore(), **{"scheduler": None, **options})


@pytest.mark.parametrize("max_time", ["5step", "10", "0s", 5])
def test_what_is_no_time_is_refused(max_time: Any) -> None:
    with pytest.raises(UsageError, match="max_time"):
        build.checked_max_time_s(max_time)


def test_times_are_seconds() -> None:
    assert build.checked_max_time_s("3h50min") == 13_800.0
    assert build.checked_max_time_s(None) == float("inf")


def test_a_sealed_run_goes_on_and_writes_no_log_beside_its_checkpoints(tmp_path: Path) -> None:
    """R34: metrics would be in it."""
    encrypt = Encryption(keys=generate())
    with pytest.raises(UsageError, match="without encryption"):
        make(tmp_path / "root", encrypt=encrypt)
    make(tmp_path / "root", encrypt=encrypt, log=False).fit("4step")
    make(tmp_path / "root", encrypt=encrypt, log=False).fit("6step")
    whole = make(tmp_path / "whole")
    whole.fit("6step")
    sealed = make(tmp_path / "root", encrypt=encrypt, log=False)
    sealed.fit("6step")
    assert torch.equal(sealed.model[0].weight, whole.model[0].weight)
    paths = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    stored = b"".join(path.read_bytes() for path in paths)
    assert b"draw" not in stored


@pytest.mark.parametrize("root", [Path("s3://bucket/run"), "runs/{run_name}"], ids=str)
def test_a_root_that_would_be_another_folder_than_meant_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Any
) -> None:
    """No folder `s3:` or `{run_name}` is made, not even by the log."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="root"):
        make(root, log=True).fit("1step")
    assert not any(tmp_path.iterdir())


def test_a_component_called_rng_is_refused_by_name() -> None:
    """Issue 20, line 10: in its place the global generators would not be saved."""
    with pytest.raises(UsageError, match="'rng'"):
        make(MemoryStore(), state={"rng": {"mine": 1}})
