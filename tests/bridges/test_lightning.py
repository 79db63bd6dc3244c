"""The bridge to Lightning, on the real one: kills, signals, where it starts, what it refuses."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from bridges import forks
from bridges.frameworks import needed
from holdfast.data import Loader
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.events import Event
from marks import full

lightning = needed("lightning")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint  # noqa: E402

from holdfast.bridges.lightning import HoldfastCheckpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
EPOCHS = 3
STEPS = 18


class Noisy(Dataset[Any]):
    """Rows with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(-1, 1, 4) * (index % 7) + torch.randn(4)
        return x, x.sum().reshape(1)


class Regression(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """Dropout, a scheduler that follows validations, and state that hooks add."""

    def __init__(self, rate: float = 0.01, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.num_batches = 0

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.num_batches += 1
        return self.loss(batch)

    def on_train_epoch_start(self) -> None:
        torch.randn(3)

    def on_train_start(self) -> None:
        torch.randn(5)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_batches"] = self.num_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_batches = checkpoint["num_batches"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


class Saying(Callback):  # type: ignore[misc]
    """Tells the test of each moment of the loop."""

    def __init__(self, say: forks.Say) -> None:
        for name in ("train_batch_start", "before_optimizer_step", "train_batch_end"):
            setattr(self, f"on_{name}", say)
        self.on_validation_end = self.on_train_epoch_end = self.on_train_epoch_start = say


class Recording(Callback):  # type: ignore[misc]
    """Notes what each step is trained with."""

    def __init__(self) -> None:
        self.steps: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        generators = hash(torch.get_rng_state().numpy().tobytes())
        self.steps[trainer.global_step] = (trainer.current_epoch, rate, generators)


def trainer(*callbacks: Any, **options: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1, verbose=False)
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "logger": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False}
    given |= {"val_check_interval": 0.5, "accumulate_grad_batches": 2}
    return lightning.Trainer(callbacks=list(callbacks), **{**given, **options})


def train_data() -> Loader:
    return Loader(Noisy(), batch_size=4)


def fit(root: Path, *more: Any, every: str | None = "2step", **options: Any) -> Any:
    """Train in a root, from wherever that stands; returns the trainer."""
    ckpt_path = options.pop("ckpt_path", None)
    made = trainer(HoldfastCheckpoint(root, every=every), *more, **options)
    module = Regression()
    made.fit(module, train_data(), Loader(Noisy(), batch_size=22), ckpt_path=ckpt_path)
    return made


def job(root: Path, say: forks.Say, **options: Any) -> dict[str, Any]:
    made = fit(root, Saying(say), **options)
    return {
        "model": dict(made.lightning_module.state_dict()),
        "num_batches": made.lightning_module.num_batches,
        "rate": made.optimizers[0].param_groups[0]["lr"],
        "step": made.global_step,
        "epoch": made.current_epoch,
        "rng": torch.get_rng_state(),
    }


def weights(made: Any) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in made.lightning_module.state_dict().items()}


@pytest.mark.parametrize(
    "kills",
    [*full(5), pytest.param(20, marks=pytest.mark.long)],
)
def test_kills_at_any_moment_change_no_bit(tmp_path: Path, kills: int) -> None:
    """I7, R1: SIGKILL at random moments of one training."""
    forks.assert_kills_change_nothing(job, tmp_path, kills=kills, seed=kills)


# Within an epoch, at its end, and after a validation within it.
@pytest.mark.parametrize("stop_at", [6, *full(4, 5, 11)])
def test_each_step_after_a_resume_is_trained_as_in_one_go(tmp_path: Path, stop_at: int) -> None:
    whole, resumed = Recording(), Recording()
    fit(tmp_path / "whole", whole)
    fit(tmp_path / "run", max_steps=stop_at)
    fit(tmp_path / "run", resumed)
    assert min(resumed.steps) in (stop_at, stop_at + 1)
    expected = {step: whole.steps[step] for step in resumed.steps if step > stop_at}
    assert {step: resumed.steps[step] for step in expected} == expected


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    """D25."""
    first = fit(tmp_path)
    again = fit(tmp_path)
    assert again.global_step == first.global_step == STEPS
    forks.assert_equal(weights(again), weights(first))


class Preempting(Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_and_ends_with_the_code_for_running_again(tmp_path: Path) -> None:
    undisturbed = weights(fit(tmp_path / "whole"))
    root = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        fit(root, Preempting(), every=None)
    assert ended.value.code == 75
    with holdfast.reading(root) as found:
        assert (found.step, found.reason) == (5, "signal")
    forks.assert_equal(weights(fit(root, every=None)), undisturbed)


@pytest.mark.full
def test_a_run_that_stopped_early_stays_stopped(tmp_path: Path) -> None:
    def stopping() -> Any:
        return EarlyStopping("val_loss", patience=1, min_delta=1e6)

    first = fit(tmp_path, stopping())
    assert first.global_step < STEPS
    again = fit(tmp_path, stopping())
    assert again.global_step == first.global_step
    forks.assert_equal(weights(again), weights(first))


def test_ckpt_path_goes_back_in_its_own_root(tmp_path: Path) -> None:
    whole = weights(fit(tmp_path))
    resumed = Recording()
    again = fit(tmp_path, resumed, ckpt_path=f"{tmp_path}@step=4")
    assert min(resumed.steps) in (4, 5)
    forks.assert_equal(weights(again), whole)
    assert fit(tmp_path, ckpt_path=str(tmp_path)).global_step == STEPS


@pytest.mark.full
def test_ckpt_path_starts_from_another_root_once(tmp_path: Path) -> None:
    whole = weights(fit(tmp_path / "old"))
    at = f"{tmp_path / 'old'}@step=8"
    forks.assert_equal(weights(fit(tmp_path / "new", ckpt_path=at)), whole)
    again = Recording()
    fit(tmp_path / "new", again, ckpt_path=at)
    assert again.steps == {}


def test_ckpt_path_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises((NoCheckpoint, UsageError)):
        fit(tmp_path / "new", ckpt_path=f"{tmp_path / 'none'}@latest")


def test_weights_of_a_checkpoint_are_tested(tmp_path: Path) -> None:
    made = fit(tmp_path)
    trained = weights(made)
    other = trainer(HoldfastCheckpoint(tmp_path))
    module = Regression()
    data = Loader(Noisy(), batch_size=22)
    other.test(module, data, ckpt_path=str(tmp_path), verbose=False)
    forks.assert_equal(dict(module.state_dict()), trained)
    assert module.num_batches == made.lightning_module.num_batches
    assert made.checkpoint_callback.best_model_path == ""


@pytest.mark.full
def test_lightnings_best_is_the_best_of_the_rule(tmp_path: Path) -> None:
    keep = holdfast.Best("val_loss", 1) | holdfast.Last(1)
    made = trainer(HoldfastCheckpoint(tmp_path, every=holdfast.On("evaluation"), keep=keep))
    module = Regression()
    made.fit(module, train_data(), Loader(Noisy(), batch_size=22))
    assert made.checkpoint_callback.best_model_path == f"{tmp_path}@best"
    data = Loader(Noisy(), batch_size=22)
    made.test(module, data, ckpt_path="best", verbose=False)
    best = Regression()
    found = holdfast.load_weights(f"{tmp_path}@best", best)
    forks.assert_equal(dict(module.state_dict()), dict(best.state_dict()))
    assert "val_loss" in found.metrics


@pytest.mark.full
def test_a_file_of_lightnings_own_begins_a_run_and_does_not_go_on_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own"
    theirs = trainer(ModelCheckpoint(own, save_last=True), max_epochs=1)
    theirs.fit(Regression(), train_data(), Loader(Noisy(), batch_size=22))
    recorded = Recording()
    fit(tmp_path / "run", recorded, ckpt_path=str(own / "last.ckpt"))
    assert min(recorded.steps) >= 6
    assert "goes on" not in caplog.text
    again = fit(tmp_path / "run", ckpt_path=str(own / "last.ckpt"))
    assert again.global_step == STEPS
    assert f"goes on, and not ckpt_path={own / 'last.ckpt'}" in caplog.text


def test_a_plain_loop_goes_on_and_back(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=7)
    module, data = Regression(), train_data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
    state = {"model": module, "optimizer": optimizer, "scheduler": plateau, "data": data}
    hooks = holdfast.StateHooks(one_sided=lambda name: name == "trainer")
    with holdfast.CheckpointManager(tmp_path, state, hooks=hooks) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, data.epoch, data.batch) == (7, 1, 2)
        module.train()
        for step in (8, 9):
            for _ in range(2):
                (module.loss(next(iter(data))) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step)
    recorded = Recording()
    made = fit(tmp_path, recorded)
    assert min(recorded.steps) in (9, 10)
    assert recorded.steps[10][0] == 1
    assert (made.global_step, made.current_epoch) == (STEPS, EPOCHS)


def test_what_cannot_be_saved_is_left_out_by_name(tmp_path: Path) -> None:
    seen: list[Event] = []
    checkpoints = holdfast.Checkpoints(tmp_path, sinks=[seen.append])
    made = trainer(HoldfastCheckpoint(checkpoints), max_steps=2, limit_val_batches=0)
    made.fit(Regression(extra=nn.Linear(1, 1)), DataLoader(Noisy(), batch_size=4))
    texts = " ".join(event.message for event in seen)
    assert "hyper_parameters.extra" in texts
    assert "DataLoader has none" in texts
    with holdfast.reading(tmp_path) as found:
        assert found.step == 2


def test_epochs_of_another_length_than_the_loaders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batches_per_epoch"):
        fit(tmp_path, limit_train_batches=3)


def test_the_part_that_is_the_model_must_have_all_weights(tmp_path: Path) -> None:
    class Two(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 1)

    for module, part, named in ((Two(), "net", r"head\.weight"), (Two(), "body", "no module")):
        made = trainer(HoldfastCheckpoint(tmp_path, model=part))
        with pytest.raises(UsageError, match=named):
            made.fit(module, train_data())


def test_the_part_that_is_the_model_is_what_test_loads(tmp_path: Path) -> None:
    def callback() -> HoldfastCheckpoint:
        return HoldfastCheckpoint(tmp_path, model="net")

    made, module = trainer(callback(), max_steps=2, limit_val_batches=0), Regression()
    made.fit(module, train_data())
    again = Regression()
    trainer(callback()).test(again, Loader(Noisy(), batch_size=22), str(tmp_path), verbose=False)
    forks.assert_equal(dict(again.state_dict()), dict(module.state_dict()))
    bare = Regression().net
    holdfast.load_weights(tmp_path, bare)
    forks.assert_equal(dict(bare.state_dict()), dict(module.net.state_dict()))


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two"):
        fit(tmp_path / "a", HoldfastCheckpoint(tmp_path / "b"))


def test_a_missing_private_name_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lightning.pytorch.loops.fit_loop._FitLoop.on_advance_end")
    with pytest.raises(UsageError, match=r"fit_loop\.on_advance_end: Lightning .* 2\.4"):
        fit(tmp_path)


def test_a_fast_development_run_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path / "run", fast_dev_run=True)
    assert not (tmp_path / "run").exists()


def test_a_run_of_ignite_goes_on_under_lightning(tmp_path: Path) -> None:
    engine = needed("ignite")
    from holdfast.bridges.ignite import HoldfastRun

    module, data = Regression(), train_data()
    optimizer = module.configure_optimizers()["optimizer"]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)

    def update(_: Any, batch: Any) -> None:
        module.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    state = {"model": module, "optimizer": optimizer, "scheduler": plateau}
    HoldfastRun(engine.Engine(update), tmp_path, state).run(data, max_epochs=1)
    seen: list[Event] = []
    recorded = Recording()
    checkpoints = holdfast.Checkpoints(tmp_path, sinks=[seen.append])
    made = trainer(HoldfastCheckpoint(checkpoints), recorded, accumulate_grad_batches=1)
    made.fit(Regression(), train_data(), Loader(Noisy(), batch_size=22))
    assert [*recorded.steps] == [*range(12, 34)]
    assert recorded.steps[12][0] == 1
    assert "saved by ignite" in " ".join(event.message for event in seen)
