"""The bridge to Ignite, on the real one: kills, signals, where it starts, what it refuses."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
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
from holdfast.errors import UsageError
from holdfast.events import Event
from marks import full

needed("ignite")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks
from ignite.engine import Engine, Events  # noqa: E402
from ignite.handlers import EarlyStopping, PiecewiseLinear  # noqa: E402
from ignite.metrics import RunningAverage  # noqa: E402

from holdfast.bridges.ignite import HoldfastRun  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
EPOCHS = 3
ITERATIONS = 33


class Noisy(Dataset[Any]):
    """Rows with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        x = torch.linspace(-1, 1, 4) * (index % 7) + torch.randn(4)
        return x, x.sum().reshape(1)


class Training:
    """An Engine with dropout, a scheduler of Ignite's, a validation, and handlers that draw."""

    def __init__(self, root: Path | holdfast.Checkpoints, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.accumulate = options.pop("accumulate", 1)
        self.engine = Engine(self.update)
        scheduler = PiecewiseLinear(self.optimizer, "lr", [(0, 0.01), (ITERATIONS, 0.001)])
        self.engine.add_event_handler(Events.ITERATION_STARTED, scheduler)
        for event in (Events.STARTED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED):
            self.engine.add_event_handler(event, lambda: torch.randn(3))
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, self.note)
        self.rows: dict[int, Any] = {}
        if not isinstance(root, holdfast.Checkpoints):
            options = {"every": "2step", **options}
        self.run = HoldfastRun(
            self.engine,
            root,
            {"model": self.model, "optimizer": self.optimizer, "scheduler": scheduler},
            accumulate=self.accumulate,
            **options,
        )

    def update(self, engine: Engine, batch: Any) -> float:
        self.model.train()
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        loss.backward()
        if engine.state.iteration % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss)

    def note(self, engine: Engine) -> None:
        generators = hash(torch.get_rng_state().numpy().tobytes())
        rate = self.optimizer.param_groups[0]["lr"]
        self.rows[engine.state.iteration] = (engine.state.epoch, rate, generators)

    def train(self, **options: Any) -> Training:
        self.run.run(Loader(Noisy(), batch_size=4), **{"max_epochs": EPOCHS, **options})
        return self

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())


def job(root: Path, say: forks.Say) -> dict[str, Any]:
    training = Training(root)
    for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
        training.engine.add_event_handler(event, say)
    training.train()
    state = training.engine.state
    return {
        "model": training.weights(),
        "rate": training.optimizer.param_groups[0]["lr"],
        "counters": (state.iteration, state.epoch),
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize(
    "kills",
    [*full(5), pytest.param(20, marks=pytest.mark.long)],
)
def test_kills_at_any_moment_change_no_bit(tmp_path: Path, kills: int) -> None:
    """I7, R1: SIGKILL at random moments of one training."""
    forks.assert_kills_change_nothing(job, tmp_path, kills=kills, seed=kills)


class Stopped(Exception):
    """Ends a training as an error does."""


@pytest.mark.parametrize("stop_at", [22, *full(4, 20)])
def test_each_iteration_after_a_resume_is_trained_as_in_one_go(
    tmp_path: Path, stop_at: int
) -> None:
    whole = Training(tmp_path / "whole").train()
    first = Training(tmp_path / "run")

    @first.engine.on(Events.ITERATION_STARTED)
    def stop(engine: Engine) -> None:
        if engine.state.iteration == stop_at + 1:
            raise Stopped

    with pytest.raises(Stopped):
        first.train()
    resumed = Training(tmp_path / "run").train()
    assert min(resumed.rows) == stop_at + 1
    assert resumed.rows == {at: whole.rows[at] for at in resumed.rows}
    forks.assert_equal(resumed.weights(), whole.weights())


def test_a_new_run_begins_with_the_first_batch_of_a_loader_that_was_used(tmp_path: Path) -> None:
    """As after a search for a learning rate."""
    seen: list[Event] = []
    training = Training(holdfast.Checkpoints(tmp_path / "run", sinks=[seen.append]))
    data = Loader(Noisy(), batch_size=4)
    next(iter(data))
    torch.manual_seed(5)
    training.run.run(data, max_epochs=EPOCHS)
    whole = Training(tmp_path / "whole")
    torch.manual_seed(5)
    whole.train()
    forks.assert_equal(training.weights(), whole.weights())
    assert "the data was at batch 1 of epoch 0" in " ".join(event.message for event in seen)


def test_a_finished_run_is_not_trained_again_unless_for_longer(tmp_path: Path) -> None:
    """D25."""
    first = Training(tmp_path).train()
    again = Training(tmp_path).train()
    assert again.rows == {}
    assert again.engine.state.iteration == ITERATIONS
    forks.assert_equal(again.weights(), first.weights())
    longer = Training(tmp_path).train(max_epochs=EPOCHS + 1)
    assert [*longer.rows] == [*range(ITERATIONS + 1, ITERATIONS + 12)]


def test_a_signal_saves_and_ends_with_the_code_for_running_again(tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole").train()
    root = tmp_path / "run"
    first = Training(root, every=None)

    @first.engine.on(Events.ITERATION_COMPLETED(once=5))
    def preempt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        first.train()
    assert ended.value.code == 75
    with holdfast.reading(root) as found:
        assert (found.step, found.reason) == (5, "signal")
    forks.assert_equal(Training(root).train().weights(), whole.weights())


@pytest.mark.parametrize("is_let_pass", [True, *full(False)])
@pytest.mark.parametrize(
    "event", ["update", *full(Events.ITERATION_STARTED, Events.EPOCH_COMPLETED)]
)
def test_an_error_comes_out_and_nothing_of_its_iteration_is_saved(
    tmp_path: Path, event: Any, is_let_pass: bool
) -> None:
    """Also where a handler of EXCEPTION_RAISED lets it pass, after which Ignite would go on."""
    whole = Training(tmp_path / "whole", every="3step").train()
    training, error = Training(tmp_path / "run", every="1step"), Stopped("the disk of the data")

    def fail(*_: Any) -> Any:
        if training.engine.state.iteration == 11:
            training.optimizer.param_groups[0]["params"][0].data.zero_()
            raise error
        return training.update(*_) if event == "update" else None

    if event == "update":
        training.engine._process_function = fail
    else:
        training.engine.add_event_handler(event, fail)
    heard: list[BaseException] = []
    if is_let_pass:
        training.engine.add_event_handler(Events.EXCEPTION_RAISED, lambda _, one: heard.append(one))
    with pytest.raises(Stopped) as raised:
        training.train()
    assert raised.value is error
    assert set(heard) == ({error} if is_let_pass else set())
    with holdfast.reading(tmp_path / "run") as found:
        assert found.step == 10
    resumed = Training(tmp_path / "run", every="3step").train()
    forks.assert_equal(resumed.weights(), whole.weights())


def test_an_engine_that_has_failed_trains_on_when_it_is_run_again(tmp_path: Path) -> None:
    """Ignite's own next run after an error returns at once."""
    whole, training = Training(tmp_path / "whole").train(), Training(tmp_path / "run")
    tries: list[int] = []

    @training.engine.on(Events.ITERATION_STARTED)
    def stop(engine: Engine) -> None:
        if engine.state.iteration == 8 and 8 not in tries:
            tries.append(8)
            raise Stopped

    with pytest.raises(Stopped):
        training.train()
    training.train()
    assert [*training.rows] == [*range(1, ITERATIONS + 1)]
    forks.assert_equal(training.weights(), whole.weights())


class Validating(Training):
    """Validates at every fifth iteration and each epoch's end; the values are the test's."""

    def __init__(self, root: Any, losses: list[float], **options: Any) -> None:
        self.evaluator, self.losses = Engine(lambda *_: None), losses
        self.evaluator.add_event_handler(Events.COMPLETED, self.measure)
        super().__init__(root, evaluator=self.evaluator, **options)
        self.measured: dict[int, float] = {}
        self.validate_at(Events.ITERATION_COMPLETED(every=5))
        self.validate_at(Events.EPOCH_COMPLETED)

    def validate_at(self, event: Any) -> None:
        self.engine.add_event_handler(event, lambda: self.evaluator.run([0]))

    def measure(self, evaluator: Engine) -> None:
        value = self.losses.pop(0)
        self.measured[self.engine.state.iteration] = value
        if len(self.losses) % 2:
            evaluator.state.metrics |= {"val_loss": value}
        else:
            evaluator.state.metrics.update(val_loss=value, confusion=torch.eye(2))


def saved(root: Path) -> dict[int, Any]:
    with holdfast.CheckpointManager(root, {"nothing": {}}, sinks=()) as manager:
        return {one.step: dict(one.metrics) for one in manager.list()}


def test_a_checkpoint_has_the_metrics_of_its_own_step_alone(tmp_path: Path) -> None:
    training = Validating(tmp_path, [4.0, 3.0, 2.0, 5.0, 4.0, 6.0], every="1step")
    training.train(max_epochs=2)
    assert [*training.measured] == [5, 10, 11, 15, 20, 22]
    expected = {step: {} for step in range(22, 0, -1)}
    expected |= {step: {"val_loss": value} for step, value in training.measured.items()}
    assert saved(tmp_path) == expected


def test_a_validation_that_is_the_best_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    seen: list[Event] = []
    checkpoints = holdfast.Checkpoints(
        tmp_path, every="4step", keep="last:1,best:val_loss", sinks=[seen.append]
    )
    Validating(checkpoints, [4.0, 2.0, 3.0, 5.0, 4.0, 6.0]).train(max_epochs=2)
    assert [event.step for event in seen if event.kind == "save_started"] == [
        4, 5, 8, 10, 12, 16, 20, 22
    ]  # fmt: skip
    assert saved(tmp_path) == {22: {"val_loss": 6.0}, 10: {"val_loss": 2.0}}
    assert [event.message for event in seen if event.kind == "warning"] == []


@pytest.mark.parametrize("event", [Events.STARTED, *full(Events.EPOCH_STARTED)])
def test_a_validation_before_the_first_step_makes_no_save_due(tmp_path: Path, event: Any) -> None:
    """Users validate the untrained model, and the resumed one before it trains on."""
    for epochs, expected in ((1, [5, 10, 11]), (2, [15, 20, 22])):
        seen: list[Event] = []
        checkpoints = holdfast.Checkpoints(
            tmp_path, every=holdfast.On("evaluation"), sinks=[seen.append]
        )
        training = Validating(checkpoints, [1.0] * 9)
        training.validate_at(event)
        training.train(max_epochs=epochs)
        assert sorted({one.step for one in seen if one.kind == "save_started"}) == expected
        assert len(training.measured) == len(expected) + 1


def started(checkpoints: holdfast.Checkpoints, losses: list[float], **how: Any) -> list[int | None]:
    """Train two epochs; returns the steps of which saves began."""
    seen: list[Event] = []
    hooks = how.pop("hooks", None)
    one = holdfast.Checkpoints(
        checkpoints.root, every=checkpoints.every, keep=checkpoints.keep, sinks=[seen.append]
    )
    training = Validating(one, losses, hooks=hooks)
    training.train(max_epochs=2, **how)
    return [event.step for event in seen if event.kind == "save_started"]


def test_what_a_rollback_left_behind_is_not_the_best_to_beat(tmp_path: Path) -> None:
    checkpoints = holdfast.Checkpoints(tmp_path, every="4step", keep="last:9,best:val_loss")
    started(checkpoints, [4.0, 1.0, 5.0, 5.0, 5.0, 6.0])
    begun = started(checkpoints, [4.0, 3.0, 2.0, 5.0, 4.0, 6.0], which="step=4")
    assert begun == [5, 8, 10, 11, 12, 16, 20, 22]


def test_an_unhealthy_state_is_not_the_best_to_beat(tmp_path: Path) -> None:
    checkpoints = holdfast.Checkpoints(tmp_path, every="4step", keep="last:9,best:val_loss")
    hooks = holdfast.StateHooks(before_save=lambda now, _: ["it is odd"] if now.step == 5 else None)
    begun = started(checkpoints, [1.0, 2.0, 3.0, 5.0, 4.0, 6.0], hooks=hooks)
    assert begun == [4, 5, 8, 10, 12, 16, 20, 22]


def test_metrics_of_the_training_itself_are_those_of_the_iteration(tmp_path: Path) -> None:
    training = Training(tmp_path, every="1step")

    @training.engine.on(Events.ITERATION_COMPLETED(every=2))
    def measure(engine: Engine) -> None:
        engine.state.metrics["loss"] = engine.state.output

    training.train(max_epochs=1)
    assert {s for s, metrics in saved(tmp_path).items() if "loss" in metrics} == {2, 4, 6, 8, 10}


def test_the_end_of_an_epoch_by_hand_is_warned_of(tmp_path: Path) -> None:
    seen: list[Event] = []
    training = Training(holdfast.Checkpoints(tmp_path, every="9step", sinks=[seen.append]))
    training.engine.add_event_handler(
        Events.ITERATION_COMPLETED(every=4), lambda engine: engine.terminate_epoch()
    )
    training.train(max_epochs=1)
    told = [event.message for event in seen if event.kind == "warning"]
    assert len(told) == 1
    assert "terminate_epoch() at iteration 4" in told[0]


def test_a_run_that_was_terminated_stays_so_until_its_checkpoint_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning has the call that trains on."""

    def training() -> Training:
        made = Training(tmp_path)
        early = EarlyStopping(2, lambda engine: 0.0, made.engine)
        made.engine.add_event_handler(Events.ITERATION_COMPLETED, early)
        return made

    first = training().train()
    assert first.engine.state.iteration == 3
    again = training().train()
    assert again.rows == {}
    forks.assert_equal(again.weights(), first.weights())
    (remedy,) = re.findall(r'to continue: run\(…, which="(.*)"\)', caplog.text)
    assert Training(tmp_path).train(which=remedy).engine.state.iteration == ITERATIONS


def test_steps_are_those_of_the_optimizer(tmp_path: Path) -> None:
    Training(tmp_path, accumulate=3, every="1step").train()
    with holdfast.CheckpointManager(tmp_path, {"nothing": {}}) as manager:
        found = sorted((one.step, one.timestamp.epoch) for one in manager.list())
    assert [step for step, _ in found] == [*range(1, 12)]
    assert found[-1] == (11, EPOCHS)


def test_a_run_goes_back_or_begins_with_another_one(tmp_path: Path) -> None:
    whole = Training(tmp_path / "old").train()
    back = Training(tmp_path / "old").train(which="step=8")
    assert min(back.rows) == 9
    other = Training(tmp_path / "new").train(begin_from=f"{tmp_path / 'old'}@step=8")
    assert min(other.rows) == 9
    for one in (back, other):
        forks.assert_equal(one.weights(), whole.weights())


def plain_loop(root: Path, until: int) -> Iterator[int]:
    training, data = Training(root), Loader(Noisy(), batch_size=4)
    state = {"model": training.model, "optimizer": training.optimizer, "data": data}
    hooks = holdfast.StateHooks(one_sided=lambda name: name in ("trainer", "scheduler"))
    with holdfast.CheckpointManager(root, state, hooks=hooks) as manager:
        found = manager.resume()
        step = found.step if found else 0
        for batch in data.until(until, start=step):
            step += 1
            training.update(training.engine, batch)
            yield step
        manager.save(step)


def test_a_plain_loop_goes_on_and_back(tmp_path: Path) -> None:
    assert [*plain_loop(tmp_path, 7)] == [*range(1, 8)]
    hooks = holdfast.StateHooks(one_sided=lambda name: name == "scheduler")
    training = Training(tmp_path, hooks=hooks).train(max_epochs=1)
    assert [*training.rows] == [8, 9, 10, 11]
    assert [*plain_loop(tmp_path, 13)] == [12, 13]


def test_data_without_a_position_is_warned_of(tmp_path: Path) -> None:
    seen: list[Event] = []
    training = Training(holdfast.Checkpoints(tmp_path, sinks=[seen.append]))
    training.run.run(DataLoader(Noisy(), batch_size=4), max_epochs=1)
    assert "a DataLoader has none" in " ".join(event.message for event in seen)


@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED])
def test_a_validation_with_the_loader_of_the_training_is_refused(
    tmp_path: Path, event: Any
) -> None:
    training, data = Training(tmp_path), Loader(Noisy(), batch_size=4)
    evaluator = Engine(lambda _, batch: None)
    training.engine.add_event_handler(event, lambda: evaluator.run(data))
    with pytest.raises(UsageError, match="has ended"):
        training.run.run(data, max_epochs=EPOCHS)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"accumulate": 4}, "accumulate=4: step 11 was saved after iteration 22"),
        ({"batch_size": 2}, "had 11 iterations, and has 22 here"),
    ],
    ids=["accumulation", "batch size"],
)
def test_other_counts_of_iterations_are_refused(
    tmp_path: Path, changed: dict[str, int], match: str
) -> None:
    """Also at the end of an epoch, where a position in the data fits batches of any size."""
    Training(tmp_path, accumulate=2).train(max_epochs=2)
    given = {"accumulate": 2, "batch_size": 4, **changed}
    data = Loader(Noisy(), batch_size=given.pop("batch_size"))
    with pytest.raises(UsageError, match=match):
        Training(tmp_path, **given).run.run(data, max_epochs=EPOCHS)


def test_an_epoch_may_keep_its_iterations_with_batches_of_another_size(tmp_path: Path) -> None:
    Training(tmp_path).train(max_epochs=2)
    state = Training(tmp_path).run.run(
        Loader(Noisy(), batch_size=2), max_epochs=EPOCHS, epoch_length=ITERATIONS // EPOCHS
    )
    assert state.iteration == ITERATIONS


def test_handlers_whose_state_is_not_saved_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also below an event filter, and on the Engine that validates; none that is a component."""
    training, evaluator = Training(tmp_path / "old"), Engine(lambda _, batch: None)
    early = EarlyStopping(9, lambda engine: 0.0, training.engine)
    rate = PiecewiseLinear(training.optimizer, "lr", [(0, 0.01), (9, 0.001)])
    evaluator.add_event_handler(Events.COMPLETED, early)
    training.engine.add_event_handler(Events.ITERATION_STARTED(every=2), rate)
    RunningAverage(output_transform=lambda loss: loss).attach(training.engine, "mean")
    state = {**training.run._components}
    for name, more in (("a", {}), ("b", {"early": early, "rate": rate})):
        run = HoldfastRun(training.engine, tmp_path / name, {**state, **more}, evaluator=evaluator)
        run.run(Loader(Noisy(), batch_size=4), max_epochs=1)
        told = [one for one in caplog.messages if "no checkpoint has the state" in one]
        assert len(told) == 1
        assert "after a resume: PiecewiseLinear, EarlyStopping." in told[0]


def test_a_run_that_saves_its_end_alone_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Training(tmp_path / "a").train(max_epochs=1)
    assert "a crash loses all of it" not in caplog.text
    Training(tmp_path / "b", every=None).train(max_epochs=1)
    assert "a crash loses all of it" in caplog.text


def test_an_engine_that_is_run_by_itself_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if another run of the same Engine was made before; not of the run that trains."""
    training = Training(tmp_path)
    training.train(max_epochs=1)
    assert "runs by itself" not in caplog.text
    training.engine.run(Loader(Noisy(), batch_size=4), max_epochs=2)
    assert caplog.text.count("runs by itself") == 1


def test_data_without_a_length_needs_the_epochs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="epoch_length"):
        Training(tmp_path).run.run(iter([1, 2]), max_epochs=1)


def test_what_is_wrong_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = Engine(lambda *_: None), nn.Linear(1, 1)
    with pytest.raises(UsageError, match="trainer"):
        HoldfastRun(engine, tmp_path, {"trainer": model})
    with pytest.raises(UsageError, match="accumulate"):
        HoldfastRun(engine, tmp_path, {"model": model}, accumulate=0)
    monkeypatch.delattr(Engine, "interrupt")
    with pytest.raises(UsageError, match=r"engine\.interrupt: Ignite .* 0\.5\.1"):
        HoldfastRun(engine, tmp_path, {"model": model})
