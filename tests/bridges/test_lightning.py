"""The bridge to Lightning, on the real one: kills, signals, where it starts, what it refuses."""

from __future__ import annotations

import logging
import os
import re
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
from holdfast.data import DataRanks, Loader
from holdfast.errors import NoCheckpoint, StoreError, UsageError
from holdfast.events import Event
from holdfast.testing.faulty import Fault, FaultyStore
from marks import full

lightning = needed("lightning")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks
from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.tuner import Tuner  # noqa: E402

from holdfast.bridges.lightning import HoldfastCheckpoint, seams  # noqa: E402

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


def test_a_run_that_stopped_early_stays_stopped_until_its_checkpoint_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning has the call that trains on."""

    def stopping() -> Any:
        return EarlyStopping("val_loss", patience=1, min_delta=1e6)

    first = fit(tmp_path, stopping())
    assert first.global_step < STEPS
    again = fit(tmp_path, stopping())
    assert again.global_step == first.global_step
    forks.assert_equal(weights(again), weights(first))
    (remedy,) = re.findall(r'to continue: fit\(…, ckpt_path="(.*)"\)', caplog.text)
    assert fit(tmp_path, ckpt_path=remedy).global_step == STEPS


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


def test_lightnings_last_is_the_newest_checkpoint(tmp_path: Path) -> None:
    data = Loader(Noisy(), batch_size=22)
    with pytest.raises(UsageError, match="has no checkpoint"):
        trainer(HoldfastCheckpoint(tmp_path)).test(Regression(), data, ckpt_path="last")
    trained = weights(fit(tmp_path, ckpt_path="last", max_steps=4))
    module = Regression()
    trainer(HoldfastCheckpoint(tmp_path)).test(module, data, ckpt_path="last", verbose=False)
    forks.assert_equal(dict(module.state_dict()), trained)
    assert fit(tmp_path, ckpt_path="last", max_steps=6).global_step == 6


def test_lightnings_last_of_another_callback_is_left_to_lightning(tmp_path: Path) -> None:
    class Own(Checkpoint):  # type: ignore[misc]
        checkpoints = "of its own"

    made = trainer(Own(), max_steps=1)
    made.fit(Regression(), train_data(), Loader(Noisy(), batch_size=22), ckpt_path="last")
    assert made.global_step == 1


@pytest.mark.parametrize("gone", ["_CheckpointConnector", "_CheckpointConnector._parse_ckpt_path"])
def test_another_lightning_without_our_seam_for_last_can_be_imported(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Trainer is refused when a fit begins."""
    path = "lightning.pytorch.trainer.connectors.checkpoint_connector"
    monkeypatch.delattr(f"{path}.{gone}")
    seams.patch_path_lookup(HoldfastCheckpoint)


def test_lightnings_best_without_a_rule_for_it_names_the_rule(tmp_path: Path) -> None:
    data = Loader(Noisy(), batch_size=22)
    with pytest.raises(UsageError, match="best:val_loss"):
        trainer(HoldfastCheckpoint(tmp_path)).test(Regression(), data, ckpt_path="best")


@pytest.mark.parametrize(
    ("options", "is_told"),
    [({}, True), ({"every": "9step"}, False), ({"keep": "best:val_loss"}, False)],
)
def test_a_fit_that_saves_its_end_alone_is_warned_of(
    tmp_path: Path, options: dict[str, str], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(HoldfastCheckpoint(tmp_path, **options), max_steps=1)
    made.fit(Regression(), train_data(), Loader(Noisy(), batch_size=22))
    assert ("a crash loses all of it" in caplog.text) == is_told


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("which", ["best", "last"])
def test_the_words_of_lightning_mean_ours_beside_its_own_callback(
    which: str, is_first: bool, tmp_path: Path
) -> None:
    """In a new process, where `ModelCheckpoint` has no path."""
    saving = HoldfastCheckpoint(tmp_path / "run", every="2step", keep="last:2,best:val_loss")
    module, data = Regression(), Loader(Noisy(), batch_size=22)
    trainer(saving, max_steps=7).fit(module, train_data(), data)
    theirs = ModelCheckpoint(tmp_path / "theirs", monitor="val_loss", save_last=True)
    made = trainer(*((saving, theirs) if is_first else (theirs, saving)))
    made.test(module, data, ckpt_path=which, verbose=False)
    name = which.replace("last", "latest")
    forks.assert_equal(dict(module.state_dict()), holdfast.load_weights(f"{tmp_path}/run@{name}"))


@pytest.mark.parametrize("is_first", [True, False])
def test_best_is_that_of_lightnings_own_callback_where_ours_has_no_metric(
    is_first: bool, tmp_path: Path
) -> None:
    saving = HoldfastCheckpoint(tmp_path / "run", every="2step")
    theirs = ModelCheckpoint(tmp_path / "theirs", monitor="val_loss")
    made = trainer(*((saving, theirs) if is_first else (theirs, saving)), max_steps=7)
    module, data = Regression(), Loader(Noisy(), batch_size=22)
    made.fit(module, train_data(), data)
    made.test(module, data, ckpt_path="best", verbose=False)
    best = torch.load(theirs.best_model_path, weights_only=False)["state_dict"]
    forks.assert_equal(dict(module.state_dict()), best)


@pytest.mark.parametrize("part", [None, "net"])
def test_a_module_is_made_of_a_root_as_of_a_file(part: str | None, tmp_path: Path) -> None:
    """With its hyper-parameters, and what its hooks have saved."""
    saving = HoldfastCheckpoint(tmp_path, model=part)
    made = trainer(saving, max_steps=4)
    made.fit(Regression(rate=0.5), train_data(), Loader(Noisy(), batch_size=22))
    for path in (tmp_path, f"{tmp_path}@step=4", holdfast.load_weights(tmp_path, nn_of(part)).path):
        module = Regression.load_from_checkpoint(path, map_location="cpu")
        forks.assert_equal(dict(module.state_dict()), weights(made))
        assert module.hparams["rate"] == 0.5
        assert module.num_batches == made.lightning_module.num_batches
    with pytest.raises(NoCheckpoint, match="a folder without checkpoints"):
        Regression.load_from_checkpoint(tmp_path.parent)


def nn_of(part: str | None) -> nn.Module:
    return Regression() if part is None else Regression().net


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


def test_a_callback_with_the_other_direction_is_refused(tmp_path: Path) -> None:
    saving = HoldfastCheckpoint(tmp_path, every="2step", keep="last:1,best:val_loss")
    made = trainer(saving, EarlyStopping("val_loss", mode="max"))
    with pytest.raises(UsageError, match="EarlyStopping with mode='max'"):
        made.fit(Regression(), train_data(), Loader(Noisy(), batch_size=22))


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
    assert "not ckpt_path" not in caplog.text
    again = fit(tmp_path / "run", ckpt_path=str(own / "last.ckpt"))
    assert again.global_step == STEPS
    assert f"not ckpt_path={own / 'last.ckpt'}" in caplog.text


class Average(getattr(lightning.pytorch.callbacks, "EMAWeightAveraging", Callback)):  # type: ignore[misc]
    """Averages weights, as newer versions can."""


class Validated(Callback):  # type: ignore[misc]
    """Notes what each validation of a fit measures, and at which step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


class Logging(Regression):
    """Logs its loss at every third batch, and at the end of an epoch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index % 3 == 2:
            self.log("train_loss", loss)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss


def saved(root: Path) -> dict[int, Any]:
    with holdfast.CheckpointManager(root, {"nothing": {}}, sinks=()) as manager:
        return {one.step: one for one in manager.list()}


def logging_fit(
    root: Path | holdfast.Checkpoints, module: Any = None, *, more: Any = (), **options: Any
) -> dict[int, float]:
    validated = Validated()
    given = {"accumulate_grad_batches": 1, "max_epochs": 2, **options}
    made = trainer(HoldfastCheckpoint(root), validated, *more, **given)
    made.fit(module or Logging(), train_data(), Loader(Noisy(), batch_size=22))
    return validated.losses


@pytest.mark.parametrize("stop_at", [7, *full(None)])
def test_a_checkpoint_has_the_metrics_of_its_own_step_alone(
    tmp_path: Path, stop_at: int | None
) -> None:
    """Also the first one after a resume, which shows what was measured before."""
    checkpoints = holdfast.Checkpoints(tmp_path, every="1step")
    losses = {}
    if stop_at:
        losses = logging_fit(checkpoints, max_steps=stop_at)
    losses |= logging_fit(checkpoints)
    found = saved(tmp_path)
    assert [*found] == [*range(22, 0, -1)]
    assert sorted(losses) == [5, 10, 16, 21]
    assert {s: c.metrics["val_loss"] for s, c in found.items() if "val_loss" in c.metrics} == losses
    of_training = {step for step, one in found.items() if "train_loss" in one.metrics}
    assert of_training == {3, 6, 9, 14, 17, 20}
    assert {step for step, one in found.items() if "epoch_loss" in one.metrics} == {11, 22}


class Rising(Logging):
    """Measures what the test says, in this order."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.measured = self.losses.pop(0)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", getattr(self, "measured", 9.0))


def test_a_validation_that_is_the_best_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    seen: list[Event] = []
    checkpoints = holdfast.Checkpoints(
        tmp_path, every="4step", keep="last:1,best:val_loss", sinks=[seen.append]
    )
    logging_fit(checkpoints, Rising([3.0, 2.0, 4.0, 2.5]))
    begun = {event.step for event in seen if event.kind == "save_started"}
    assert begun == {4, 5, 8, 10, 12, 16, 20, 22}
    assert {s: c.metrics.get("val_loss") for s, c in saved(tmp_path).items()} == {22: None, 10: 2.0}
    assert [event.message for event in seen if event.kind == "warning"] == []
    seen.clear()
    logging_fit(checkpoints, Rising([3.0, 1.0]), max_epochs=3)
    assert {event.step for event in seen if event.kind == "save_started"} == {24, 28, 32, 33}
    assert set(saved(tmp_path)) == {33, 32}


def test_a_metric_that_no_validation_gives_is_warned_of_after_the_first_one(tmp_path: Path) -> None:
    seen: list[Event] = []
    checkpoints = holdfast.Checkpoints(
        tmp_path, every="1step", keep="best:valid_loss", sinks=[seen.append]
    )
    logging_fit(checkpoints, max_steps=8)
    [at] = [i for i, event in enumerate(seen) if "valid_loss" in event.message]
    assert {event.step for event in seen[:at] if event.kind == "committed"} == {*range(1, 7)}


def test_a_validation_within_accumulated_gradients_is_in_no_checkpoint(tmp_path: Path) -> None:
    seen: list[Event] = []
    checkpoints = holdfast.Checkpoints(
        tmp_path, every="1step", keep="last:9,best:val_loss", sinks=[seen.append]
    )
    losses = logging_fit(checkpoints, accumulate_grad_batches=2, max_epochs=1)
    found = saved(tmp_path)
    assert sorted(losses) == [2, 5]
    assert {s: c.metrics["val_loss"] for s, c in found.items() if "val_loss" in c.metrics} == {
        5: losses[5]
    }
    told = [event.message for event in seen if event.kind == "warning"]
    assert len(told) == 1
    assert "multiple of accumulate_grad_batches" in told[0]


def average_fit(root: Path, *more: Any, **options: Any) -> Any:
    made = trainer(Average(), HoldfastCheckpoint(root, every="1step"), *more, **options)
    made.fit(Regression(), train_data(), Loader(Noisy(), batch_size=22))
    return made


@pytest.mark.skipif(Average.__mro__[1] is Callback, reason="this version averages no weights")
@pytest.mark.parametrize("stop_at", [4, *full(6)])
def test_averages_of_weights_go_on(tmp_path: Path, stop_at: int) -> None:
    """After the fit the module holds the averages; the checkpoint, what is trained."""
    whole = average_fit(tmp_path / "whole")
    average_fit(tmp_path / "run", **({"max_steps": 4} if stop_at == 4 else {"max_epochs": 1}))
    resumed = average_fit(tmp_path / "run")
    forks.assert_equal(weights(resumed), weights(whole))
    trained = [Regression(), Regression()]
    for module, root in zip(trained, ("whole", "run"), strict=True):
        holdfast.load_weights(tmp_path / root, module)
    forks.assert_equal(dict(trained[1].state_dict()), dict(trained[0].state_dict()))
    assert not torch.equal(trained[0].net[0].weight, whole.lightning_module.net[0].weight)
    tested = Regression()
    other = trainer(Average(), HoldfastCheckpoint(tmp_path / "run"))
    data = Loader(Noisy(), batch_size=22)
    other.test(tested, data, ckpt_path=str(tmp_path / "run"), verbose=False)
    forks.assert_equal(dict(tested.state_dict()), weights(whole))


@pytest.mark.parametrize("is_callback", [True, *full(False)])
def test_a_new_run_begins_with_the_first_batch_after_a_search_for_a_rate(
    tmp_path: Path, is_callback: bool
) -> None:
    """The search takes batches of the same Loader, and restores the model alone."""
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    made = trainer(*([finder] if is_callback else []), HoldfastCheckpoint(tmp_path), max_epochs=1)
    module, data = Regression(), train_data()
    if not is_callback:
        Tuner(made).lr_find(module, data, num_training=3, update_attr=False)
        assert data.batch > 0
    made.fit(module, data, Loader(Noisy(), batch_size=22))
    assert made.global_step == 6


def test_the_error_of_a_training_comes_out_where_closing_fails(tmp_path: Path) -> None:
    class Failing(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("of the training")

    fault = Fault(kind="fail", op="put", key="step-00000003*", error=StoreError("no"), times=None)
    store, seen = FaultyStore(holdfast.LocalStore(tmp_path), [fault]), list[Event]()
    with pytest.raises(RuntimeError, match="of the training"):
        logging_fit(
            holdfast.Checkpoints(store, every="3step", sinks=[seen.append]), more=[Failing()]
        )
    kinds = [event.kind for event in seen]
    assert kinds[-1] == "save_failed"
    assert "closed" in kinds


def test_a_person_sees_where_a_fit_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "run", max_steps=2)
    assert f"holdfast: starting a new run: {tmp_path / 'run'} has no" in capsys.readouterr().err
    fit(tmp_path / "run", max_steps=3)
    assert "holdfast: resuming from step 2: " in capsys.readouterr().err
    fit(tmp_path / "new", max_steps=3, ckpt_path=str(tmp_path / "run"))
    assert f"starting from {tmp_path / 'run'}" in capsys.readouterr().err
    logging.getLogger("holdfast").setLevel(logging.WARNING)
    try:
        fit(tmp_path / "run", max_steps=4)
    finally:
        logging.getLogger("holdfast").setLevel(logging.NOTSET)
    assert "resuming from" not in capsys.readouterr().err


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


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_a_validation_with_the_loader_of_the_training_is_refused(
    tmp_path: Path, num_sanity_val_steps: int
) -> None:
    data = train_data()
    made = trainer(HoldfastCheckpoint(tmp_path), num_sanity_val_steps=num_sanity_val_steps)
    with pytest.raises(UsageError, match="of its own"):
        made.fit(Regression(), data, data)


class Counting(Callback):  # type: ignore[misc]
    """Counts the batches of validations and tests."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.num_batches += 1

    on_test_batch_end = on_validation_batch_end


@pytest.mark.parametrize("method", ["validate", "test"])
def test_an_evaluation_of_the_training_data_sees_all_of_it_and_moves_no_position(
    tmp_path: Path, method: str
) -> None:
    data, module, counting = train_data(), Regression(), Counting()
    made = trainer(HoldfastCheckpoint(tmp_path, every="2step"), counting, max_steps=2)
    made.fit(module, data)
    before = data.state_dict()
    assert before["batch"] == 4
    getattr(made, method)(module, data, verbose=False)
    assert counting.num_batches == len(data)
    assert data.state_dict() == before


@pytest.mark.parametrize(("window", "num_batches"), [(1, None), (3, 2), (4, None)])
def test_another_accumulation_within_an_epoch_is_right_or_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, window: int, num_batches: int | None
) -> None:
    """Two steps of two batches were trained."""
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1.0}
    fit(tmp_path, max_steps=2, **options)
    fit(tmp_path, max_steps=3, **{**options, "accumulate_grad_batches": window})
    told = re.findall(r"the first step has the gradients of (\d) of", caplog.text)
    assert told == ([] if num_batches is None else [str(num_batches)])


@pytest.mark.parametrize(("size", "num_left"), [(4, 4), (2, 7), (8, 2)])
def test_an_epoch_of_several_ranks_has_the_rest_of_its_samples_in_batches_of_another_size(
    tmp_path: Path, size: int, num_left: int
) -> None:
    """44 samples, of which two batches of eight are taken."""

    def train(batch_size: int, **options: Any) -> Any:
        made = trainer(HoldfastCheckpoint(tmp_path), accumulate_grad_batches=1, **options)
        data = Loader(Noisy(), batch_size=batch_size, ranks=DataRanks(0, 2))
        made.fit(Regression(), data, Loader(Noisy(), batch_size=22))
        return made

    train(4, max_steps=2)
    made = train(size, max_epochs=1)
    assert made.global_step == 2 + num_left
    assert made.fit_loop.epoch_progress.current.completed == 1


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
