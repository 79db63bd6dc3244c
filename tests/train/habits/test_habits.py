"""What users of other trainers expect: names, devices, look-ups, scopes, trials, skipped NaN."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.policy.triggers import On
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import (
    SWA,
    Callback,
    Clip,
    Freeze,
    HookFailed,
    JsonLines,
    Limits,
    Logger,
    Metrics,
    NotFinite,
    Schedule,
    StepOutput,
    Trainer,
    Training,
    Validation,
)
from holdfast.train.build import device_for
from holdfast.train.group import ALONE
from holdfast.train.step.numerics import checked_precision
from holdfast.weights import load_weights
from train.small import Noisy, NoLength, make, mean_square, network


def digests(trainer: Trainer) -> dict[str, str]:
    return dict(leaf_digests(trainer.state))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        *(("bf16-mixed", "bf16"), ("16-mixed", "fp16"), (16, "fp16"), ("32-true", "fp32")),
        *((32, "fp32"), ("no", "fp32"), ("amp_bf16", "bf16"), ("bf16", "bf16")),
    ],
)
def test_precisions_of_other_libraries_are_understood(given: Any, dtype: str) -> None:
    assert checked_precision(given).dtype == dtype


@pytest.mark.parametrize("given", ["bf16-true", "16-true", "64-true"])
def test_converted_weights_are_refused_with_what_to_do(given: str) -> None:
    with pytest.raises(UsageError, match=r"does not convert weights: give the model"):
        checked_precision(given)


def test_without_a_device_the_accelerator_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    assert device_for(ALONE, torch.device("cpu"), model) == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert device_for(ALONE, None, model) == torch.device("cuda")
    assert device_for(ALONE, None, lambda: model) == torch.device("cuda")
    assert device_for(ALONE, None, model.to("meta")) is None
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "6"), ("LOCAL_RANK", "2")):
        monkeypatch.setenv(name, value)
    assert device_for(ALONE, None, nn.Linear(2, 2)) == torch.device("cuda", 2)


def test_without_an_accelerator_nothing_is_moved() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert device_for(ALONE, None, nn.Linear(2, 2)) is None


class Notes(Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[int, bool, bool, bool]] = []

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.steps.append(
            (training.present_step, training.is_first, training.is_log_step, training.is_last)
        )


@pytest.mark.parametrize("goal", ["5step", "1ep"])
def test_callbacks_know_first_last_and_logged_steps(goal: str) -> None:
    """K18: of each call of fit, so that a resume has a first step, too."""
    notes = Notes()
    trainer = make(MemoryStore(), callbacks=[notes], log_every=2)
    trainer.fit(goal)
    assert notes.steps == [
        (1, True, False, False),
        (2, False, True, False),
        (3, False, False, False),
        (4, False, True, False),
        (5, False, True, True),
    ]
    trainer.fit("6step")
    assert notes.steps[5:] == [(6, True, True, True)]


def test_callbacks_are_found_by_their_class(tmp_path: Path) -> None:
    notes = Notes()
    trainer = make(tmp_path / "run", callbacks=[notes, Freeze("0.*"), Freeze("2.*")])
    assert trainer.callback(Notes) is notes
    assert trainer.callback(JsonLines) in trainer.callbacks
    for kind in (Freeze, Recorder):
        with pytest.raises(UsageError, match=r"callbacks are a \w+; there are \['Freeze'"):
            trainer.callback(kind)


class Recorder(Logger):
    name = "recorder"

    def __init__(self) -> None:
        self.names: list[str] = []

    def log(self, training: Training, metrics: Metrics) -> None:
        self.names += metrics


def test_a_scope_is_put_before_the_names_of_metrics() -> None:
    class Scoped(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            with training.scope("gen"), training.scope("inner"):
                training.log({"fid": 1.0}, to=["recorder"])
            training.log({"plain": 1.0})

    recorder = Recorder()
    make(MemoryStore(), callbacks=[recorder, Scoped()], log_every=100).fit(1)
    assert recorder.names == ["gen/inner/fid", "plain", "loss", "draw"]


# Anomaly detection and NaN


class Spoiled(nn.Module):
    """Batch norm sees a bad batch before the loss shows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(self.norm(inputs))
        return output


BAD = (2, 5)


def spoiled(root: Any, **options: Any) -> Trainer:
    samples = [torch.full((4,), float(number)) + torch.arange(4.0) / 10 for number in range(20)]
    for step in BAD:
        samples[2 * step - 1] = samples[2 * step - 1] * float("nan")
    options = {
        "model": Spoiled(),
        "data": Loader(samples, batch_size=2, shuffle=False),
        "loss": lambda model, batch: model(batch).square().mean(),
        "skip_nan": 2,
        **options,
    }
    return make(root, **options)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_is_not_applied_and_counted(
    precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = spoiled(tmp_path / "once", precision=precision)
    trainer.fit(8)
    for name, value in trainer.model.state_dict().items():
        assert value.isfinite().all(), name
    assert trainer.state["nan-count"].num_skipped == 2
    assert trainer.counters.step == 8
    said = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert said[0].startswith("step 2: ")
    assert "(1 of 2" in said[0]
    assert len(said) == 2

    spoiled(tmp_path / "twice", precision=precision).fit(3)
    again = spoiled(tmp_path / "twice", precision=precision)
    again.fit(8)
    assert digests(again) == digests(trainer)


@pytest.mark.parametrize("clip", [None, 1.0, Clip(value=0.5)])
def test_infinite_gradients_are_seen_before_they_are_clipped(clip: Any) -> None:
    def infinite(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, float("inf")) if trainer.present_step == 2 else gradient

    trainer = make(None, skip_nan=1, clip=clip, every=None)
    trainer.model[2].weight.register_hook(infinite)  # type: ignore[index]
    trainer.fit(3)
    assert trainer.state["nan-count"].num_skipped == 1


def test_buffers_of_all_modules_of_the_state_are_those_of_before_a_skipped_step() -> None:
    norm = nn.BatchNorm1d(4)
    trainer = spoiled(
        MemoryStore(),
        loss=lambda model, batch: model(norm(batch)).square().mean(),
        state={"norm": norm},
    )
    trainer.fit(8)
    assert trainer.state["nan-count"].num_skipped == 2
    assert norm.running_mean is not None
    assert norm.running_mean.isfinite().all()


def test_what_steps_on_a_metric_waits_for_the_next_step_after_a_skipped_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = [torch.full((4,), float("nan") if number < 2 else 1.0) for number in range(8)]
    schedule = Schedule(ReduceLROnPlateau, every="step", metric="loss")
    trainer = spoiled(
        MemoryStore(), data=Loader(samples, batch_size=2, shuffle=False), scheduler=schedule
    )
    trainer.fit(3)
    assert trainer.schedulers["scheduler"].last_epoch == 2
    assert "no 'loss' this time" in caplog.text


def test_metrics_of_an_epoch_are_without_its_skipped_steps() -> None:
    def loss(model: nn.Module, batch: Tensor) -> StepOutput:
        output = model(batch)
        return StepOutput(output.square().mean(), outputs=output)

    class Watch(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            found.extend(metrics[name] for name in metrics if name == "train/mean")

    found: list[float] = []
    given = {"mean": lambda outputs: outputs.isfinite().all() * len(outputs)}
    spoiled(MemoryStore(), loss=loss, metrics=given, callbacks=[Watch()]).fit("1ep")
    assert found == [20 - 2 * len(BAD)]


def test_one_more_than_the_budget_is_an_error_also_after_a_resume(tmp_path: Path) -> None:
    spoiled(tmp_path / "run", skip_nan=1, every=On("exception")).fit(3)
    with pytest.raises(NotFinite, match=r"step 5: .*1 steps were skipped.*skip_nan=1"):
        spoiled(tmp_path / "run", skip_nan=1, every=On("exception")).fit(8)
    assert spoiled(tmp_path / "run").fit(8).step == 8


def test_anomalies_are_found_in_the_backward_pass() -> None:
    def wrong(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * 0).sqrt().sum()

    with (
        pytest.warns(UserWarning, match="Error detected"),
        pytest.raises(RuntimeError, match="nan values"),
    ):
        make(MemoryStore(), loss=wrong, detect_anomaly=True).fit(1)
    assert not torch.is_anomaly_enabled()


# Freeze


def frozen(root: Any, *callbacks: Callback, **options: Any) -> Trainer:
    return make(root, callbacks=callbacks, **options)


def test_frozen_parameters_stay_and_are_trained_afterwards(tmp_path: Path) -> None:
    """Weight decay does not change them, either; the resume is exact on both sides."""
    weights: list[Tensor] = []

    class Watch(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            weights.append(training.model[0].weight.detach().clone())  # type: ignore[index]

    trainer = frozen(tmp_path / "once", Freeze("0.*", until="1ep"), Watch())
    before = trainer.model[0].weight.detach().clone()  # type: ignore[index]
    trainer.fit(8)
    assert all(torch.equal(weight, before) for weight in weights[:5])
    assert not torch.equal(weights[5], before)
    for split in (3, 5, 6):
        root = tmp_path / f"split-{split}"
        frozen(root, Freeze("0.*", until="1ep")).fit(split)
        again = frozen(root, Freeze("0.*", until="1ep"))
        again.fit(8)
        assert digests(again) == digests(trainer)


class Required(Callback):
    """Notes at each step whether weights require a gradient."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, ...]] = []

    def before_optimizer_step(self, training: Training) -> None:
        named = dict(training.model.named_parameters())
        self.seen.append((named["0.weight"].requires_grad, named["2.weight"].requires_grad))


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_parameter_is_frozen_while_one_of_several_freezes_it(is_turned: bool) -> None:
    freezes = [Freeze("*.weight", until="2step"), Freeze("0.*", until="3step")]
    required = Required()
    frozen(MemoryStore(), *(freezes[::-1] if is_turned else freezes), required).fit(4)
    assert required.seen == [(False, False), (False, False), (False, True), (True, True)]


@pytest.mark.parametrize("was_trained", [False, True])
def test_another_trainer_of_the_same_model_trains_what_the_first_froze(was_trained: bool) -> None:
    model, required = network(), Required()
    first = frozen(MemoryStore(), Freeze("0.*"), model=model)
    if was_trained:
        first.fit(1)
        assert model[0].weight.requires_grad
    frozen(MemoryStore(), Freeze("0.*", until="1step"), required, model=model).fit(2)
    assert required.seen == [(False, True), (True, True)]


def test_what_the_optimizer_has_for_frozen_parameters_stays() -> None:
    trainer = frozen(MemoryStore(), Freeze("0.weight", since="2step", until="4step"))
    trainer.fit(2)
    weight = trainer.model[0].weight  # type: ignore[index]
    slots = {name: value.clone() for name, value in trainer.optimizer.state[weight].items()}
    trainer.fit(4)
    assert slots.keys() == trainer.optimizer.state[weight].keys()
    assert all(torch.equal(trainer.optimizer.state[weight][name], slots[name]) for name in slots)
    assert weight.requires_grad


@pytest.mark.parametrize(
    "make_callback",
    [
        lambda: Freeze(),
        lambda: Freeze("0.*", until="3h"),
        lambda: Freeze("0.*", until=3),  # type: ignore[arg-type]
        lambda: frozen(MemoryStore(), Freeze("encoder.*")),
        lambda: frozen(MemoryStore(), Freeze("0.*", until="3tok")).fit(1),
    ],
)
def test_what_cannot_be_frozen_is_refused(make_callback: Any) -> None:
    with pytest.raises(Exception, match="Freeze"):
        make_callback()


# SWA


def test_an_equal_average_is_the_mean_and_resumes_exactly(tmp_path: Path) -> None:
    weights: list[Tensor] = []

    class Watch(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            weights.append(training.model[2].weight.detach().clone())  # type: ignore[index]

    plan = SWA(start="4step", every="2step")
    trainer = make(tmp_path / "once", swa=plan, ema=0.9, callbacks=[Watch()])
    trainer.fit(9)
    assert trainer.swa is not None
    assert trainer.swa.num_averaged == 3
    mean = torch.stack([weights[at] for at in (3, 5, 7)]).mean(0)
    torch.testing.assert_close(trainer.swa.model[2].weight, mean)  # type: ignore[index]
    for split in (3, 4, 7):
        make(tmp_path / f"{split}", swa=plan, ema=0.9).fit(split)
        again = make(tmp_path / f"{split}", swa=plan, ema=0.9)
        again.fit(9)
        assert digests(again) == digests(trainer)


def test_an_average_has_the_weights_of_an_epoch_that_ends_late(tmp_path: Path) -> None:
    class StopsAt2(Callback):
        def epoch_end(self, training: Training) -> None:
            if training.counters.epoch == 2:
                trainer.request_stop("enough")

    def averaging(root: Any, *callbacks: Callback) -> Trainer:
        plan = SWA(start="1ep", every="1ep")
        return make(root, data=NoLength(), swa=plan, callbacks=callbacks)

    trainer = averaging(tmp_path / "once")
    trainer.fit("3ep")
    once = digests(trainer)
    assert trainer.swa is not None
    assert trainer.swa.num_averaged == 3
    trainer = averaging(tmp_path / "twice", StopsAt2())
    assert trainer.fit("3ep").reason == "stopped"
    again = averaging(tmp_path / "twice")
    again.fit("3ep")
    assert digests(again) == once


def test_batch_norm_of_an_average_needs_data_and_gets_its_statistics(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)batch_norm=loader.*norm"):
        spoiled(tmp_path / "run", swa=SWA(start="1step"))
    samples = [torch.full((4,), float(number)) for number in range(8)]
    plan = SWA(start="0.5dur", every="1step", batch_norm=Loader(samples, batch_size=8))
    trainer = spoiled(tmp_path / "run", swa=plan)
    draw = random.getstate()
    trainer.fit(4)
    assert trainer.swa is not None
    torch.testing.assert_close(trainer.swa.model.norm.running_mean, torch.full((4,), 3.5))  # type: ignore[union-attr]
    assert not trainer.swa.model.norm.training  # type: ignore[union-attr]
    assert random.getstate() != draw  # fit seeds
    again = spoiled(tmp_path / "run", swa=plan)
    again.fit(4)
    assert digests(again) == digests(trainer)


STATISTICS = SWA(
    start="1step",
    every="1step",
    batch_norm=Loader([torch.full((4,), float(number)) for number in range(8)], batch_size=8),
)


class StopsAt(Callback):
    """Requests a stop at step 3, in a hook before or after that step's save."""

    def __init__(self, hook: str) -> None:
        if hook == "log":  # of the step, before its save
            self.log = lambda training, metrics: self.stop(training)  # type: ignore[method-assign]
        elif hook == "save":
            self.checkpoint_saved = lambda training, *_: self.stop(training)  # type: ignore[method-assign]

    def stop(self, training: Training) -> None:
        if training.counters.step == 3:
            training.request_stop("enough")


@pytest.mark.parametrize("hook", ["log", "save"])
def test_batch_norm_of_an_average_has_its_statistics_at_every_end(
    hook: str, tmp_path: Path
) -> None:
    """Also if the step was saved before it was known to be the last one."""
    trainer = spoiled(tmp_path, swa=STATISTICS, every="1step", callbacks=[StopsAt(hook)])
    assert trainer.fit(100).reason == "stopped"
    stored = load_weights(tmp_path, component="swa")
    torch.testing.assert_close(stored["norm.running_mean"], torch.full((4,), 3.5))


def test_an_average_is_dropped_where_a_farther_goal_has_it_begin_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It then has the weights that a run to that goal has from the beginning."""
    plan = SWA(start="0.5dur", every="1step")
    straight = make(tmp_path / "straight", swa=plan)
    straight.fit(12)
    make(tmp_path / "grown", swa=plan).fit(4)
    grown = make(tmp_path / "grown", swa=plan)
    grown.fit(12)
    assert grown.swa is not None
    assert grown.swa.num_averaged == 7
    assert "begins again at start='0.5dur'" in caplog.text
    assert digests(grown) == digests(straight)


def test_batch_norm_of_an_average_without_a_batch_is_an_error(tmp_path: Path) -> None:
    """Else the average would be saved with a mean of 0 and a variance of 1."""
    plan = SWA(start="1step", every="1step", batch_norm=iter([]))
    with pytest.raises(UsageError, match="batch_norm gave no batch"):
        spoiled(tmp_path / "run", swa=plan).fit(4)


# Limits


def test_limited_epochs_go_on_in_the_data_and_resume_exactly(tmp_path: Path) -> None:
    """Epochs of 3 of 5 batches: the second one continues; also after a kill in the middle."""
    whole = make(tmp_path / "whole")
    whole.fit(6)
    trainer = make(tmp_path / "once", limits=Limits(train=3))
    trainer.fit("2ep")
    assert trainer.counters.step == 6
    assert torch.equal(*(each.model[0].weight for each in (whole, trainer)))  # type: ignore[index]
    for split in (1, 3, 5):
        make(tmp_path / f"{split}", limits=Limits(train=0.6)).fit(split)
        again = make(tmp_path / f"{split}", limits=Limits(train=0.6))
        again.fit("2ep")
        assert digests(again) == digests(trainer)


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self.validated = 0

    def batch_start(self, training: Training, batch: Tensor) -> None:
        self.batches.append(batch.clone())

    def validation_batch_end(self, training: Training, batch: Any, outputs: Any) -> None:
        self.validated += 1


@pytest.mark.full
def test_overfitting_takes_the_same_batches_in_every_epoch(tmp_path: Path) -> None:
    class Spoil(Callback):
        def batch_end(self, training: Training, batch: Tensor, outputs: Any) -> None:
            batch.zero_()

    seen = Seen()
    limits = Limits(overfit=2)
    trainer = make(tmp_path / "once", limits=limits, callbacks=[seen, Spoil()])
    trainer.fit("3ep")
    assert trainer.counters.step == 6
    assert all(torch.equal(seen.batches[at], seen.batches[at % 2]) for at in range(6))
    assert not torch.equal(seen.batches[0], seen.batches[1])
    for split in (1, 2, 3):
        make(tmp_path / f"{split}", limits=limits, callbacks=[Spoil()]).fit(split)
        again = make(tmp_path / f"{split}", limits=limits, callbacks=[Spoil()])
        again.fit("3ep")
        assert digests(again) == digests(trainer)


def test_validation_is_limited(tmp_path: Path) -> None:
    for limits, expected in ((Limits(val=2), 2), (Limits(val=0.6), 3), (Limits(), 5)):
        seen = Seen()
        loaders = {"a": Loader(Noisy(), batch_size=2), "b": [torch.ones(2, 4)] * 5}
        make(MemoryStore(), validate=loaders, limits=limits, callbacks=[seen]).fit("1ep")
        assert seen.validated == 2 * expected


def test_a_fast_run_does_one_batch_of_each_and_saves_and_logs_nothing(tmp_path: Path) -> None:
    seen, recorder = Seen(), Recorder()
    trainer = make(
        tmp_path / "run",
        limits=Limits(fast_dev_run=True),
        accumulate=2,
        callbacks=[seen, recorder],
        validate=Validation(data=Loader(Noisy(), batch_size=2), every="7ep", at_end=False),
    )
    outcome = trainer.fit("10_000step")
    assert (outcome.step, len(seen.batches), seen.validated) == (1, 1, 1)
    assert not recorder.names
    assert not [*tmp_path.iterdir()]


class Saving(Callback):
    """Saves at a hook, waits for it and marks it, as a script of a user does."""

    def __init__(self, hook: str, **options: Any) -> None:
        self.options = options
        self.saved: list[Any] = []
        setattr(self, hook, self.save)

    def save(self, training: Any, *_: Any) -> None:
        manager = training.manager
        pending = manager.save(training.counters.step, **self.options)
        assert pending.done()
        found = pending.wait()
        manager.tag(found.step, "mine")
        manager.pin("latest")
        manager.wait()
        assert manager.maybe_save(found.step) is None
        assert not manager.list()
        self.saved.append(found)


def test_a_fast_run_goes_through_code_that_saves_and_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = Saving("step_end", metrics={"score": torch.tensor(1.5)}, tags=["a"], wait=True)
    with caplog.at_level(logging.INFO, "holdfast"):
        make(tmp_path / "run", limits=Limits(fast_dev_run=2), callbacks=[saving]).fit(9)
    assert [found.step for found in saving.saved] == [1, 2]
    assert (saving.saved[0].metrics, saving.saved[0].tags) == ({"score": 1.5}, ("a",))
    assert "nothing" in saving.saved[0].path
    assert not [*tmp_path.iterdir()]
    assert caplog.text.count("save() is tried, and writes nothing") == 1
    assert "checkpoints=None" not in caplog.text


@pytest.mark.parametrize(
    ("saving", "why"),
    [
        (Saving("batch_start"), "between steps only"),
        (Saving("step_end", tags=["a b"]), "tag"),
        (Saving("step_end", components=["moddel"]), "moddel"),
        (Saving("step_end", metrics={"score": [1, 2]}), "score"),
        (Saving("step_end", step_=1), "step_"),
    ],
)
def test_a_fast_run_finds_mistakes_in_code_that_saves(saving: Saving, why: str) -> None:
    with pytest.raises(HookFailed, match=why):
        make(MemoryStore(), limits=Limits(fast_dev_run=True), callbacks=[saving]).fit(9)


def test_a_fast_run_says_why_there_is_nothing_to_load() -> None:
    class Loads(Callback):
        def step_end(self, training: Any, metrics: Any) -> None:
            training.manager.load("best")

    with pytest.raises(HookFailed, match="fast_dev_run: nothing is saved"):
        make(MemoryStore(), limits=Limits(fast_dev_run=True), callbacks=[Loads()]).fit(9)


def test_a_fast_run_skips_a_save_of_an_unhealthy_state_as_any_other() -> None:
    class Saves(Callback):
        def step_end(self, training: Any, metrics: Any) -> None:
            with torch.no_grad():
                training.model[0].weight[0, 0] = float("nan")
            assert repr(training.manager.save(1)).endswith("skipped>")

    limits = Limits(fast_dev_run=True)
    make(MemoryStore(), limits=limits, unhealthy="skip", callbacks=[Saves()]).fit(9)


def test_a_fast_run_ignores_what_needs_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole run may be tried as it is written; the old checkpoint would be beyond its goal."""
    make(tmp_path / "old").fit(5)
    seen = Seen()
    limits = Limits(fast_dev_run=True)
    with caplog.at_level(logging.INFO, "holdfast"):
        outcome = make(tmp_path / "new", limits=limits, callbacks=[seen]).fit(
            100, start_from=tmp_path / "old", load_best=True
        )
    assert (outcome.step, len(seen.batches)) == (1, 1)
    assert "start_from and load_best are ignored" in caplog.text


def test_sanity_checks_validation_first_and_leaves_no_trace(tmp_path: Path) -> None:
    seen = Seen()
    called: list[bool] = []

    def loss(model: nn.Module, batch: Tensor) -> Any:
        called.append(model.training)
        return mean_square(model, batch)

    def run(name: str, limits: Limits, **options: Any) -> Trainer:
        trainer = make(
            tmp_path / name, limits=limits, validate=Loader(Noisy(), batch_size=2), **options
        )
        trainer.fit("1ep")
        return trainer

    checked = run("checked", Limits(sanity=2), callbacks=[seen], loss=loss)
    assert called[:3] == [False, False, True]
    assert seen.validated == 5
    assert digests(checked) == digests(run("plain", Limits()))
    called.clear()
    make(tmp_path / "checked", limits=Limits(sanity=2), loss=loss).fit("6step")
    assert called == [True]


def test_sanity_finds_what_would_fail_later(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Any:
        if not model.training:
            raise ValueError("no labels")
        return mean_square(model, batch)

    trainer = make(
        MemoryStore(), limits=Limits(sanity=1), validate=Loader(Noisy(), batch_size=2), loss=loss
    )
    with pytest.raises(ValueError, match="no labels"):
        trainer.fit("1ep")
    assert trainer.counters.step == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"train": 0},
        {"train": 1.5},
        {"val": 0.0},
        {"overfit": 0},
        {"sanity": -1},
        {"fast_dev_run": 0},
        {"fast_dev_run": True, "sanity": 1},
        {"overfit": 1, "train": 2},
    ],
)
def test_limits_that_mean_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="limits"):
        Limits(**limits)


def test_a_trial_is_not_resumed_by_a_run_without_its_limits(tmp_path: Path) -> None:
    make(tmp_path / "run", limits=Limits(overfit=2)).fit(3)
    with pytest.raises(UsageError, match=r"limits: train=3|limits: overfit=3"):
        make(tmp_path / "run", limits=Limits(overfit=3)).fit(4)


@pytest.mark.parametrize("limits", [Limits(), Limits(train=2, val=2)])
def test_the_loader_that_is_trained_on_is_none_to_validate_on(limits: Limits) -> None:
    loader = Loader(Noisy(), batch_size=2)
    trainer = make(MemoryStore(), data=loader, limits=limits)
    for evaluate in (trainer.validate, trainer.test):
        with pytest.raises(UsageError, match="the one that is trained on"):
            evaluate(loader)


@pytest.mark.parametrize("use", ["validate", "by name", "batch_norm"])
def test_the_loader_that_fit_gets_is_none_to_validate_on(use: str) -> None:
    loader = Loader(Noisy(), batch_size=2)
    options: dict[str, dict[str, Any]] = {
        "validate": {"validate": Validation(data=loader)},
        "by name": {"validate": {"a": Loader(Noisy(), batch_size=2), "b": loader}},
        "batch_norm": {"swa": SWA(start="1step", batch_norm=loader)},
    }
    trainer = make(MemoryStore(), data=None, **options[use])
    with pytest.raises(UsageError, match="the one that is trained on"):
        trainer.fit(1, data=loader)
    with pytest.raises(UsageError, match="the one that is trained on"):
        make(MemoryStore(), data=loader, **options[use])
    trainer.fit(1, data=Loader(Noisy(), batch_size=2))


# Loaders for a call, and Trainers that train nothing


def test_data_may_come_with_each_call_of_fit(tmp_path: Path) -> None:
    def loader() -> Loader:
        return Loader(Noisy(), batch_size=2)

    once = make(tmp_path / "once")
    once.fit(7)
    trainer = make(tmp_path / "run", data=None)
    with pytest.raises(UsageError, match="fit needs an optimizer, a loss and data"):
        trainer.fit(1)
    trainer.fit(3, data=loader())
    again = make(tmp_path / "run", data=None)
    again.fit(7, data=loader())
    assert digests(again) == digests(once)


def test_the_settings_that_a_checkpoint_records_are_of_the_data_that_fit_got(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path / "run", data=Loader(Noisy(), batch_size=5))
    trainer.fit(2, data=Loader(Noisy(), batch_size=2))
    entry = Catalog(LocalStore(tmp_path / "run")).head()
    assert entry is not None
    config = entry.manifest.config
    assert (config["data.batch_size"], config["data.length"]) == ("2", "5")


def test_nothing_but_a_model_is_needed_to_validate_a_checkpoint(tmp_path: Path) -> None:
    held_out = Loader(Noisy(), batch_size=2, shuffle=False)
    trained = make(tmp_path / "run", validate=held_out)
    trained.fit(4)
    reader = Trainer(
        make(MemoryStore()).model,
        loss=mean_square,
        checkpoints=tmp_path / "run",
        log=False,
        progress=False,
    )
    expected = trained.validate()
    found = reader.validate("latest", data=held_out)
    assert found["val/loss"] == expected["val/loss"]
    tested = reader.test(held_out, which="latest")
    assert tested["test/loss"] == expected["val/loss"]
    assert "val/loss" not in tested
    assert reader.validate(held_out)["val/loss"] != expected["val/loss"]  # the weights as they are
    for wrong in (lambda: reader.fit(5), lambda: reader.fit(5, data=held_out)):
        with pytest.raises(UsageError, match="fit needs"):
            wrong()
    with pytest.raises(UsageError, match="validate="):
        reader.validate()
    with pytest.raises(UsageError, match="needs a loss"):
        Trainer(nn.Linear(4, 1), checkpoints=None, progress=False).validate(held_out)


def test_logs_at_info_that_a_fast_run_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        make(MemoryStore(), limits=Limits(fast_dev_run=2)).fit("9ep")
    assert "nothing of this training is saved or logged" in caplog.text
