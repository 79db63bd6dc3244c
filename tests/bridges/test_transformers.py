"""The bridge from transformers' Trainer, on the real one: kills, signals, and what it refuses."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import holdfast
import holdfast.interop
from bridges import forks
from bridges.frameworks import needed
from holdfast.cli.diff import diff
from holdfast.errors import UsageError
from holdfast.events import Event
from holdfast.policy.rules import parse_rule

transformers = needed("transformers")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks
from transformers import trainer_callback as callbacks  # noqa: E402

from holdfast.bridges import transformers as bridge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
TESTS = Path(__file__).resolve().parents[1]
STEPS = 40
SUMS_UNFULL_WINDOWS = int(transformers.__version__.split(".")[0]) >= 5


class Rows(Dataset[Any]):
    """Rows with noise that is drawn anew each time."""

    def __init__(self, length: int = 42) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.full((4,), index / 10) + torch.rand(4)
        return {"x": x, "labels": x.sum()}


class Net(nn.Module):
    """As models of transformers are called, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Counting(callbacks.TrainerCallback, callbacks.ExportableState):
    """Counts evaluations, as EarlyStoppingCallback counts those without progress."""

    def __init__(self) -> None:
        self.evaluations = 0

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.evaluations += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"evaluations": self.evaluations}}


class Saying(callbacks.TrainerCallback):
    """Tells the test of each moment of the loop."""

    def __init__(self, say: forks.Say) -> None:
        self.on_step_begin = self.on_step_end = self.on_epoch_end = self.on_evaluate = say
        self.on_log = self.on_optimizer_step = say


def arguments(root: Path, **options: Any) -> Any:
    given = {"max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 3}
    given |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    return transformers.TrainingArguments(str(root), **{**given, **options})


def trainer(root: Path, *, every: str | None = "4step", more: Any = (), **options: Any) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.set_seed(1)
    sinks = options.pop("sinks", ())
    data, keep = options.pop("data", None), options.pop("keep", None)
    dataset = options.pop("dataset", None) or Rows()
    return options.pop("kind", bridge.CheckpointedTrainer)(
        Net(),
        arguments(root, **options),
        train_dataset=dataset,
        eval_dataset=Rows(8),
        callbacks=[Counting(), *more],
        checkpoints=holdfast.Checkpoints(root, every=every, keep=keep, sinks=sinks),
        data=data,
    )


def outcome(one: Any) -> dict[str, Any]:
    """Weights, logs without times, and counters."""
    of_time = ("runtime", "per_second")
    logs = [
        {k: v for k, v in entry.items() if not k.endswith(of_time)}
        for entry in one.state.log_history
    ]
    counting = next(c for c in one.callback_handler.callbacks if isinstance(c, Counting))
    return {
        "weights": dict(one.model.state_dict()),
        "step": one.state.global_step,
        "epoch": one.state.epoch,
        "logs": logs,
        "evaluations": counting.evaluations,
        "generator": torch.get_rng_state(),
        "flos": one.state.total_flos,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "steps": {},
    # Rates that follow evaluations, at every epoch's end: 11 batches of an epoch.
    "plateau": {
        "eval_strategy": "epoch",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "metric_for_best_model": "eval_loss",
    },
    "windows": {
        "gradient_accumulation_steps": 3 if SUMS_UNFULL_WINDOWS else 11,
        "max_steps": 10,
        "every": "2step",
    },
    "epochs": {"max_steps": -1, "num_train_epochs": 3, "every": "1ep", "eval_on_start": True},
    "workers": {"dataloader_num_workers": 2, "max_steps": 16},
}


def job_of(variant: str) -> forks.Job:
    def job(root: Path, say: forks.Say) -> dict[str, Any]:
        one = trainer(root, more=[Saying(say)], sinks=[say], **VARIANTS[variant])
        one.train()
        return outcome(one)

    return job


@pytest.mark.parametrize(
    ("variant", "kills"),
    [
        *(pytest.param(name, 5, marks=pytest.mark.full) for name in VARIANTS),
        pytest.param("plateau", 20, marks=pytest.mark.long),
        pytest.param("steps", 20, marks=pytest.mark.long),
    ],
)
def test_kills_at_random_moments_change_nothing(variant: str, kills: int, tmp_path: Path) -> None:
    """Invariant 7, R1: weights, logged losses, rates, counters, callbacks and generators."""
    forks.assert_kills_change_nothing(job_of(variant), tmp_path, kills=kills, seed=kills)


def manager_of(root: Path, state: dict[str, Any] | None = None) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, state or {"trainer": {}})


def test_a_signal_saves_and_asks_to_be_run_again(tmp_path: Path) -> None:
    """R1: the step that the signal came in is saved, and the next life begins there."""

    class Signals(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    def preempted(root: Path, say: forks.Say) -> dict[str, Any]:
        return dict(trainer(root, every=None, more=[Signals()]).train().metrics)

    def job(root: Path, say: forks.Say) -> dict[str, Any]:
        one = trainer(root, every=None)
        one.train()
        return outcome(one)

    assert forks.finish(preempted, tmp_path / "run") == 75
    assert [one.step for one in manager_of(tmp_path / "run").list()] == [6]
    assert forks.finish(job, tmp_path / "run") == forks.finish(job, tmp_path / "whole") == 0
    forks.assert_equal(
        forks.result(tmp_path / "run")["found"], forks.result(tmp_path / "whole")["found"]
    )


def test_what_a_resumed_run_saves_is_what_an_undisturbed_one_saves(tmp_path: Path) -> None:
    """As the README proves it: by `holdfast diff`, losses that were summed up included."""

    class Fails(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 5:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        trainer(tmp_path / "run", max_steps=8, more=[Fails()]).train()
    trainer(tmp_path / "run", max_steps=8).train()
    trainer(tmp_path / "whole", max_steps=8).train()
    found = diff(str(tmp_path / "run"), str(tmp_path / "whole"))
    assert (found.code, found.parts[2:]) == (0, ["19 tensors are equal (19 by their digests)"])


class LikeTrl(bridge.CheckpointedTrainer):
    """Sums up metrics between two logs in the attributes that TRL's trainers have."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._metrics: Any = {"train": defaultdict(list)}
        self._total_train_tokens = 0

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        self._metrics["train"]["entropy"].append(loss.item())
        self._total_train_tokens += 4
        return loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        found = self._metrics["train"]["entropy"]
        more = {"entropy": sum(found), "num_tokens": float(self._total_train_tokens)}
        super().log({**logs, **more}, *args, **options)
        found.clear()


def test_metrics_that_trl_has_not_logged_yet_are_resumed(tmp_path: Path) -> None:
    options = {"kind": LikeTrl, "logging_steps": 4, "lr_scheduler_type": "constant"}
    for goal in (5, 8):
        resumed = trainer(tmp_path / "run", max_steps=goal, **options)
        resumed.train()
    whole = trainer(tmp_path / "whole", max_steps=8, **options)
    whole.train()
    names = ("entropy", "num_tokens")
    last, expected = (one.state.log_history[-2] for one in (resumed, whole))
    assert [last[name] for name in names] == [expected[name] for name in names]
    assert expected["num_tokens"] == 32


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """R6: the loop begins at the step of the one that is used."""
    root = tmp_path / "run"
    steady = {"lr_scheduler_type": "constant"}
    trainer(root, max_steps=8, **steady).train()
    whole = trainer(tmp_path / "whole", max_steps=12, **steady)
    whole.train()
    newest = manager_of(root).list()[0]
    assert newest.step == 8
    file = max(Path(newest.path).rglob("*"), key=lambda path: path.is_file() * path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    again = trainer(root, max_steps=12, **steady)
    again.train()
    forks.assert_equal(outcome(again), outcome(whole))


def test_a_run_at_its_goal_stays_as_it_is(tmp_path: Path) -> None:
    first = trainer(tmp_path / "run", max_steps=6, eval_strategy="epoch")
    first.train()
    again = trainer(tmp_path / "run", max_steps=6, eval_strategy="epoch")
    again.train()
    forks.assert_equal(outcome(again)["weights"], outcome(first)["weights"])
    assert outcome(again)["evaluations"] == outcome(first)["evaluations"] == 1
    assert len(manager_of(tmp_path / "run").list()) == 2


def test_the_trainers_own_wish_to_save_is_a_save_here(tmp_path: Path) -> None:
    """Nothing is saved twice: what TrainingArguments ask for goes to the root, and nowhere else."""

    class Asks(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_save |= state.global_step == 7

    given = {"save_strategy": "steps", "save_steps": 5, "max_steps": 12}
    trainer(tmp_path / "run", every=None, more=[Asks()], **given).train()
    assert [one.step for one in manager_of(tmp_path / "run").list()] == [12, 10, 7, 5]
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_checkpoint_has_the_metrics_of_its_own_step_alone(tmp_path: Path) -> None:
    """What was measured, and not how long it took."""
    root = tmp_path / "run"
    one = trainer(root, every="1step", eval_strategy="steps", eval_steps=4, max_steps=9)
    one.train()
    found = {saved.step: set(saved.metrics) for saved in manager_of(root).list()}
    logs = {"loss", "grad_norm", "learning_rate"}
    expected = {step: logs if step % 3 == 0 else set() for step in range(1, 9)}
    assert found.pop(9) >= logs  # newer versions evaluate at the end, too
    assert found == {**expected, 4: {"eval_loss"}, 8: {"eval_loss"}}
    assert any("eval_runtime" in entry for entry in one.state.log_history)


class Told(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose evaluations measure what the test says."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": self.losses.pop(0), "eval_runtime": 1.0}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


class OursTold(bridge.CheckpointedMixin, Told):
    """The same with checkpoints of its own."""


@pytest.mark.parametrize("every", ["4step", holdfast.On("evaluation")], ids=str)
def test_an_evaluation_that_is_the_best_is_saved_whatever_the_interval(
    every: Any, tmp_path: Path
) -> None:
    seen: list[Event] = []
    transformers.logging.set_verbosity_error()
    one = OursTold(
        Net(),
        arguments(tmp_path, max_steps=17, eval_strategy="steps", eval_steps=5),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        checkpoints=holdfast.Checkpoints(
            tmp_path, every=every, keep="last:1,best:eval_loss", sinks=[seen.append]
        ),
    )
    one.losses = [3.0, 2.0, 4.0, 5.0]
    one.train()
    begun = {event.step for event in seen if event.kind == "save_started"}
    assert begun == ({4, 5, 8, 10, 12, 16, 17} if every == "4step" else {5, 10, 15, 17})
    assert [saved.step for saved in manager_of(tmp_path).list()] == [17, 10]
    assert [event.message for event in seen if event.kind == "warning"] == []


def test_the_mean_loss_at_the_end_is_that_of_all_lives(tmp_path: Path) -> None:
    """Between two logs, and at one; also of a run that is started after its end."""
    steady = {"lr_scheduler_type": "constant", "every": None}
    whole = trainer(tmp_path / "whole", max_steps=14, **steady).train()
    for goal in (5, 9, 14, 14):
        output = trainer(tmp_path / "run", max_steps=goal, **steady).train()
    assert output.training_loss == whole.training_loss == output.metrics["train_loss"]


def test_the_evaluation_before_the_first_step_is_made_once(tmp_path: Path) -> None:
    for goal in (2, 4):
        one = trainer(tmp_path, max_steps=goal, eval_on_start=True)
        one.train()
        assert one.args.eval_on_start
    assert [log["step"] for log in one.state.log_history if "eval_loss" in log] == [0]


def test_tokens_per_second_are_of_this_life(tmp_path: Path) -> None:
    def train(max_steps: int) -> dict[str, float]:
        one = OursInOrder(
            transformers.GPT2LMHeadModel(tiny()),
            arguments(
                tmp_path,
                max_steps=max_steps,
                logging_steps=1,
                lr_scheduler_type="constant",
                include_num_input_tokens_seen=True,
            ),
            train_dataset=Tokens(),
            checkpoints=holdfast.Checkpoints(tmp_path / "run", sinks=()),
        )
        one.train()
        return next(log for log in one.state.log_history[::-1] if "loss" in log)

    num_tokens = 4 * len(Tokens()[0]["input_ids"])
    if "train_tokens_per_second" not in train(6):
        pytest.skip("this version of transformers does not log them")
    log = train(7)
    assert log["num_input_tokens_seen"] == 7 * num_tokens
    counted = log["train_tokens_per_second"] * log["train_runtime"]
    assert num_tokens * 0.9 < counted < num_tokens * 1.1


def test_a_person_sees_where_a_training_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for goal, said in ((2, "starting a new run: "), (3, "resuming from step 2: ")):
        trainer(tmp_path / "run", max_steps=goal, sinks=(holdfast.events.log_event,)).train()
        assert f"holdfast: {said}" in capsys.readouterr().err


def test_where_a_training_begins_is_said_on_a_line_of_its_own_beside_the_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 2, "sinks": (holdfast.events.log_event,), "disable_tqdm": False}
    trainer(tmp_path / "run", **options).train()
    # As a terminal shows it: what comes after a return overwrites the line.
    lines = [line.split("\r")[-1] for line in capsys.readouterr().err.split("\n")]
    assert [line for line in lines if "holdfast: " in line and line.startswith("holdfast: ")]


@pytest.mark.parametrize("is_path", [True, False])
def test_another_checkpoint_of_the_root_can_be_named(is_path: bool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer(root, max_steps=12).train()
    whole = trainer(tmp_path / "whole", max_steps=12)
    whole.train()
    back = trainer(root, max_steps=12)
    [of_four] = [one for one in manager_of(root).list() if one.step == 4]
    back.train(resume_from_checkpoint=of_four.path if is_path else 4)
    forks.assert_equal(outcome(back)["weights"], outcome(whole)["weights"])
    begun = sorted(manager_of(root).list(), key=lambda one: one.folder)
    assert [one.step for one in begun].count(12) == 2
    back.train()
    assert sorted(manager_of(root).list(), key=lambda one: one.folder) == begun
    with pytest.raises(UsageError, match="to start a new run, pass another root"):
        trainer(root).train(resume_from_checkpoint=False)


def test_a_run_of_the_trainers_own_goes_on_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights, optimizer, place in the epoch and step; saves go to the root from then on."""
    transformers.set_seed(1)
    own = transformers.Trainer(
        transformers.GPT2LMHeadModel(tiny()),
        arguments(tmp_path / "own", max_steps=6, save_strategy="steps", save_steps=6),
        train_dataset=Tokens(),
    )
    own.train()
    ours = bridge.CheckpointedTrainer(
        transformers.GPT2LMHeadModel(tiny()),
        arguments(tmp_path / "ours", max_steps=9),
        train_dataset=Tokens(),
        checkpoints=tmp_path / "ours",
    )
    ours.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-6"))
    [last] = manager_of(tmp_path / "ours").list()
    assert last.step == 9
    assert (ours._holdfast.data.epoch, ours._holdfast.data.batch) == (0, 9)
    assert "not resume_from_checkpoint" not in caplog.text
    ours.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-6"))
    assert "not resume_from_checkpoint" in caplog.text


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) + index) % 20
        return {"input_ids": tokens, "labels": tokens}


def tiny() -> Any:
    return transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)


def test_batches_can_be_looked_at_before_during_and_after_a_training(tmp_path: Path) -> None:
    """Without moving it."""

    class Looks(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(len(next(iter(one.get_train_dataloader()))["labels"]))

    seen: list[int] = []
    one = trainer(tmp_path / "run", max_steps=3, more=[Looks()])
    first = next(iter(one.get_train_dataloader()))
    one.train()
    assert seen == [4] * 3
    assert (one.state.global_step, one._holdfast.data.batch) == (3, 3)
    again = next(iter(one.get_train_dataloader()))
    assert len(first["labels"]) == len(again["labels"]) == 4


class Pairs(BatchSampler):
    """Batches of a first and a last sample; one rank's, as accelerate takes them."""

    def __init__(self, num_left: int = 0) -> None:
        super().__init__(range(40), batch_size=2, drop_last=False)
        self._num_left = num_left

    def __iter__(self) -> Any:
        yield from ([number, 39 - number] for number in range(16 - self._num_left))
        yield from ([20] for _ in range(self._num_left))


class Batched(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose batches are of a sampler of its own, or of another size."""

    options: dict[str, Any] = {}  # noqa: RUF012 - each test has a class of its own

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(Tokens(), **self.options))


def first_tokens(root: Path, num_left: int, *, is_ours: bool, **options: Any) -> list[list[int]]:
    """Tokens of each batch of this rank in the first epoch."""
    given = options or {"batch_sampler": Pairs(num_left)}
    kind = type("Batched", (Batched,), {"options": given})
    more = {"checkpoints": root} if is_ours else {}
    kind = type("Ours", (bridge.CheckpointedMixin, kind), {}) if is_ours else kind
    backend = "gloo" if torch.distributed.is_initialized() else None
    args = arguments(root, ddp_backend=backend)
    made = kind(transformers.GPT2LMHeadModel(tiny()), args, train_dataset=Tokens(), **more)
    return [[*batch["input_ids"][:, 0].tolist()] for batch in made.get_train_dataloader()]


def batches_of_both(root: Path, say: forks.Say) -> dict[str, Any]:
    found = [first_tokens(root, 0, is_ours=is_ours) for is_ours in (True, False)]
    with pytest.raises(UsageError, match="drop the last batch"):
        first_tokens(root, 1, is_ours=True)
    return {"ours": found[0], "theirs": found[1]}


def test_batches_of_a_sampler_of_ones_own_are_those_of_the_trainer(tmp_path: Path) -> None:
    """In one process, and each rank's; a size other than that of the arguments is kept, too."""
    assert first_tokens(tmp_path, 1, is_ours=True) == first_tokens(tmp_path, 1, is_ours=False)
    sizes = first_tokens(tmp_path, 0, is_ours=True, batch_size=8, shuffle=True)
    assert [len(batch) for batch in sizes] == [8] * 5
    assert forks.finish_ranks(batches_of_both, tmp_path / "ranks", 2) == [0, 0]
    for rank in range(2):
        found = forks.result(tmp_path / "ranks", rank)["found"]
        assert found["ours"] == found["theirs"] != []


class InOrder(transformers.Trainer):  # type: ignore[misc]
    """A Trainer whose data comes in the order of the dataset."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class OursInOrder(bridge.CheckpointedMixin, InOrder):
    """The same with checkpoints of its own."""


def test_a_loop_of_ones_own_can_begin_what_the_trainer_ends(tmp_path: Path) -> None:
    """Only counters, logs and callbacks are missing, and that is logged by name."""
    root, events = tmp_path / "run", list[Event]()
    transformers.set_seed(1)
    model = Net()
    biases = [one for name, one in model.named_parameters() if "bias" in name]
    weights = [one for name, one in model.named_parameters() if "bias" not in name]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]  # as the Trainer has
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    data = holdfast.data.Loader(Rows(), batch_size=4, seed=42)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with manager_of(root, state) as manager:
        for batch in data.until(5):
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        manager.save(5, wait=True)
    one = trainer(root, max_steps=7, sinks=[events.append], optim="adamw_torch")
    one.train()
    told = [event.message for event in events if event.kind == "warning"]
    assert any("trainer" in text for text in told), told
    assert any("scheduler" in text for text in told), told
    assert (one.state.global_step, one._holdfast.data.batch) == (7, 7)


def test_another_batch_size_is_refused_before_training(tmp_path: Path) -> None:
    trainer(tmp_path / "run", max_steps=5).train()
    with pytest.raises(UsageError, match="batch"):
        trainer(tmp_path / "run", per_device_train_batch_size=2, max_steps=9).train()
    with pytest.raises(UsageError, match="data position is batch 5 of epoch 0"):
        trainer(
            tmp_path / "run",
            gradient_accumulation_steps=2 if SUMS_UNFULL_WINDOWS else 11,
            max_steps=9,
        ).train()


FOR_BEST = {"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size: a position"),
        (
            {"keep_local": "last:1", **FOR_BEST},
            r"Tiered\(keep_local=…\) may delete the best",
        ),
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    local = options.pop("keep_local", None)
    root: Any = tmp_path / "run"
    if local is not None:
        root = holdfast.Tiered(root, tmp_path / "far", keep_local=local)
    with pytest.raises(UsageError, match=named):
        bridge.CheckpointedTrainer(
            Net(), arguments(tmp_path, **options), eval_dataset=Rows(8), checkpoints=root
        )


@pytest.mark.parametrize(
    ("options", "keep", "rule", "said"),
    [
        ({"save_total_limit": 3}, None, "last:3", "changed"),
        ({"save_total_limit": 0}, None, None, ""),
        ({"save_total_limit": 3, **FOR_BEST}, None, "last:2,best:eval_loss:min", "changed"),
        ({"save_total_limit": 1, **FOR_BEST}, None, "last:1,best:eval_loss:min", "changed"),
        ({**FOR_BEST}, None, "all,best:eval_loss:min", "changed"),
        ({**FOR_BEST}, "last:2", "last:2,best:eval_loss:min", "changed"),
        ({**FOR_BEST}, "best:eval_loss:min:2", "best:eval_loss:min:2", ""),
        ({"save_total_limit": 3}, "last:2", "last:2", "warning"),
        ({"save_only_model": True}, None, "all without optimizer,last:1", "changed"),
    ],
    ids=str,
)
def test_limits_of_the_arguments_become_a_rule_and_are_said_once(
    options: dict[str, Any], keep: str | None, rule: str | None, said: str, tmp_path: Path
) -> None:
    told: list[Event] = []
    one = trainer(tmp_path, every=None, keep=keep, sinks=[told.append], **options)
    assert one.checkpoints.keep in (rule, None if rule is None else parse_rule(rule))
    assert [event.kind for event in told] == ([said] if said else [])
    assert not said or all(name in told[0].message for name in options if "limit" in name)


def test_an_interval_of_ours_wins_over_that_of_the_arguments(tmp_path: Path) -> None:
    """A callback may still ask for a save."""

    class Asks(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_save |= state.global_step == 7

    told: list[Event] = []
    given = {"save_strategy": "steps", "save_steps": 5, "max_steps": 13}
    trainer(tmp_path, sinks=[told.append], more=[Asks()], **given).train()
    assert [one.step for one in manager_of(tmp_path).list()] == [13, 12, 8, 7, 4]
    [warning] = [event.message for event in told if event.kind == "warning"]
    assert "save_steps=5: ignored" in warning


def told(kind: Any, root: Path, **options: Any) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.set_seed(1)
    given = {"max_steps": 17, "save_steps": 4, **FOR_BEST, **options}
    given["eval_strategy"], given["save_strategy"], given["eval_steps"] = "steps", "steps", 4
    one = kind(Net(), arguments(root, **given), train_dataset=Rows(), eval_dataset=Rows(8))
    one.losses = [3.0, 2.0, 4.0, 5.0, 6.0]
    return one


@pytest.mark.parametrize("limit", [None, 2])
def test_the_best_model_is_kept_and_loaded_at_the_end_as_by_the_trainer(
    limit: int | None, tmp_path: Path
) -> None:
    """With ordinary arguments and `output_dir` for the root; also where the run had ended."""
    theirs = told(Told, tmp_path / "theirs", save_total_limit=limit)
    theirs.train()
    for _ in range(2):
        ours = told(OursTold, tmp_path / "ours", save_total_limit=limit)
        ours.train()
        saved = [int(one.name.removeprefix("checkpoint-")) for one in tmp_path.glob("theirs/c*")]
        assert {one.step for one in manager_of(tmp_path / "ours").list()} == {*saved} >= {8, 17}
        best = ours.state.best_model_checkpoint
        assert ("checkpoint-8" in theirs.state.best_model_checkpoint, "step-00000008" in best) == (
            (True, True)
        )
        forks.assert_equal(dict(ours.model.state_dict()), holdfast.load_weights(best))


def test_weights_alone_stay_of_all_but_the_newest(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=8, save_only_model=True).train()
    newest, older = (Path(one.path) for one in manager_of(tmp_path).list())
    assert [*newest.glob("optimizer-*")]
    assert not [*older.glob("optimizer-*")]
    again = trainer(tmp_path, max_steps=9, save_only_model=True)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 9


def test_a_direction_other_than_that_of_the_rule_is_refused(tmp_path: Path) -> None:
    options = {"metric_for_best_model": "loss", "greater_is_better": True}
    with pytest.raises(UsageError, match="greater_is_better=True"):
        trainer(tmp_path, keep="last:1,best:eval_loss", **options)


REPLACED = {
    "__init__",
    "get_train_dataloader",
    "log",
    "train",
    "training_step",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
}
"""Methods of the Trainer that the mixin replaces on purpose."""


def names_of(one: Any) -> set[str]:
    return {name for name in dir(one) if name == "__init__" or not name.startswith("__")}


def test_the_mixin_replaces_only_what_it_means_to(tmp_path: Path) -> None:
    """Neither methods of the Trainer, nor what its instances and its subclasses have."""
    plain = transformers.Trainer(Net(), arguments(tmp_path), train_dataset=Rows())
    mixin = {name for name in vars(bridge.CheckpointedMixin) if name in names_of(plain)}
    assert mixin - {"__module__", "__doc__"} == REPLACED & names_of(plain)
    ours = trainer(tmp_path / "run")
    more = {name for name in names_of(ours) - names_of(plain) if "holdfast" not in name}
    assert more <= {"checkpoints", "manager"} | (REPLACED - names_of(plain))


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_what_the_mixin_replaces_takes_the_arguments_of_the_trainer(name: str) -> None:
    theirs = getattr(transformers.Trainer, name, None)
    if theirs is None:
        pytest.skip("this version of transformers has no such method")
    ours = inspect.signature(vars(bridge.CheckpointedMixin)[name])
    given = list(inspect.signature(theirs).parameters)
    more = {"checkpoints": None} if name == "__init__" else {}
    ours.bind(*given, **more)
    ours.bind(given[0], **dict.fromkeys(given[1:]), **more)


def test_the_model_is_saved_as_by_the_trainer(tmp_path: Path) -> None:
    """`save_model` in the middle of a run and after it, and `save_state`."""

    class Saves(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            one.save_model(str(tmp_path / f"step{state.global_step}"))

    one = trainer(tmp_path / "run", max_steps=2, more=[Saves()])
    one.train()
    one.save_model(str(tmp_path / "end"))
    one.save_state()
    for folder in ("step1", "step2", "end"):
        weights = safetensors.torch.load_file(tmp_path / folder / "model.safetensors")
        assert weights.keys() == dict(one.model.state_dict()).keys()
    forks.assert_equal(weights, dict(one.model.state_dict()))
    assert (tmp_path / "run" / "trainer_state.json").exists()


class Scored(Told):
    """A Trainer whose evaluations stop to improve."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses = [2.0] * STEPS


class OursScored(bridge.CheckpointedMixin, Scored):
    """The same with checkpoints of its own."""


def scored(root: Path, said: list[str], *, patience: int = 2, **options: Any) -> Any:
    transformers.logging.set_verbosity_error()
    given = {"max_steps": 14, "eval_strategy": "steps", "eval_steps": 2, **options}
    given |= {"metric_for_best_model": "eval_loss", "greater_is_better": False}
    return OursScored(
        Net(),
        arguments(root, **given),
        train_dataset=Rows(),
        eval_dataset=Rows(8),
        callbacks=[transformers.EarlyStoppingCallback(patience)],
        checkpoints=holdfast.Checkpoints(
            root,
            every="3step",
            sinks=[lambda event: said.append(event.message) if event.kind == "warning" else None],
        ),
    )


@pytest.mark.parametrize(
    "options", [{}, {"max_steps": -1, "num_train_epochs": 3}, {"max_steps": 30}]
)
def test_a_run_that_a_callback_ended_stays_ended(options: dict[str, Any], tmp_path: Path) -> None:
    """Also with a longer goal, until a person names the checkpoint to go on from."""
    said: list[str] = []
    first = scored(tmp_path, said)
    first.train()
    assert (first.state.global_step, said) == (6, [])
    again = scored(tmp_path, said, **options)
    again.train()
    assert again.state.global_step == 6
    forks.assert_equal(dict(again.model.state_dict()), dict(first.model.state_dict()))
    assert any("train(resume_from_checkpoint=6)" in text for text in said)
    assert [one.step for one in manager_of(tmp_path).list()] == [6, 3]
    more = scored(tmp_path, said, patience=4, **options)
    more.train(resume_from_checkpoint=6)
    assert more.state.global_step == 10


def test_a_run_that_a_signal_ended_goes_on(tmp_path: Path) -> None:
    class Signals(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 1:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        trainer(tmp_path, more=[Signals()]).train()
    again = trainer(tmp_path, max_steps=4)
    again.train()
    assert again.state.global_step == 4


@pytest.mark.parametrize("given", [5, "step-5", "out/checkpoint-5"])
def test_to_resume_where_nothing_is_is_an_error(given: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no checkpoint; omit it for a new run"):
        trainer(tmp_path / "run").train(resume_from_checkpoint=given)


@pytest.mark.parametrize("given", ["the root", True])
def test_the_root_itself_can_be_named(
    given: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """True also while it has no checkpoint: the same script begins the run and resumes it."""
    trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=given is True or None)
    again = trainer(tmp_path, max_steps=3, sinks=(holdfast.events.log_event,))
    again.train(resume_from_checkpoint=str(tmp_path) if given == "the root" else given)
    assert again.state.global_step == 3
    assert "not resume_from_checkpoint" not in caplog.text


def test_data_without_a_length_is_refused_with_what_to_give(tmp_path: Path) -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(UsageError, match=r"data=holdfast\.data\.Stream"):
        trainer(tmp_path / "run", dataset=Endless()).train()


def test_an_evaluation_with_the_loader_of_the_training_is_refused(tmp_path: Path) -> None:
    """It would move the position, also at the end of an epoch, where no iterator is open."""

    class Same(bridge.CheckpointedTrainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return data

    data = holdfast.data.Loader(Rows(), batch_size=4)
    options = {"eval_strategy": "epoch", "per_device_train_batch_size": 4}
    one = Same(
        Net(),
        arguments(tmp_path, **options),
        eval_dataset=Rows(),
        data=data,
        checkpoints=tmp_path,
    )
    with pytest.raises(UsageError, match="of its own"):
        one.train()


def test_batches_of_another_loader_than_the_one_that_is_saved_are_refused(tmp_path: Path) -> None:
    class Own(bridge.CheckpointedTrainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(Rows(), batch_size=4)

    one = Own(Net(), arguments(tmp_path), train_dataset=Rows(), checkpoints=tmp_path / "run")
    with pytest.raises(UsageError, match="get_train_dataloader"):
        one.train()


@pytest.mark.parametrize(
    ("every", "strategy", "is_told"),
    [(None, "no", True), (None, "epoch", False), ("9step", "no", False)],
)
def test_a_training_that_saves_its_end_alone_is_warned_of(
    tmp_path: Path, every: str | None, strategy: str, is_told: bool
) -> None:
    told: list[Event] = []
    options = {"save_strategy": strategy, "max_steps": 1, "sinks": [told.append]}
    trainer(tmp_path, every=every, **options).train()
    assert any("a crash loses all of it" in one.message for one in told) == is_told


def test_an_epoch_that_a_callback_ends_is_warned_of(tmp_path: Path) -> None:
    """As no checkpoint after it can be resumed."""

    class Ends(callbacks.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            control.should_epoch_stop = state.global_step == 1

    told: list[Event] = []
    trainer(tmp_path, max_steps=15, more=[Ends()], sinks=[told.append]).train()
    (warning,) = [one.message for one in told if one.kind == "warning"]
    assert "has ended an epoch at step 1 (should_epoch_stop)" in warning
    with pytest.raises(UsageError, match="its data position is batch"):
        trainer(tmp_path, max_steps=15).train()


def test_a_loader_of_ones_own_is_used(tmp_path: Path) -> None:
    data = holdfast.data.Loader(Rows(), batch_size=4, batches_per_epoch=3, seed=5)
    one = trainer(tmp_path / "run", data=data, max_steps=7)
    one.train()
    assert one._holdfast.data is data
    assert (data.epoch, data.batch) == (2, 1)


def renamed(name: str) -> Callable[[Any], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        owner = transformers.trainer if "." not in name else transformers.Trainer
        patch.delattr(owner, name.split(".")[-1])

    return change


@pytest.mark.parametrize(
    "name", ["Trainer._save_checkpoint", "Trainer._load_rng_state", "skip_first_batches"]
)
def test_a_name_that_is_missing_is_told_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed(name)(monkeypatch)
    with pytest.raises(UsageError, match=rf"no .*{name}: this bridge is tested with 4\.48"):
        trainer(tmp_path / "run")


def test_a_loop_that_counts_otherwise_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Trainer, "_inner_training_loop", lambda self: None)
    with pytest.raises(UsageError, match=r"_globalstep_last_logged, Trainer\._total_loss_scalar"):
        trainer(tmp_path / "run")


PAGE = Path(__file__).resolve().parents[2] / "docs" / "bridges" / "transformers.md"


def test_the_page_shows_what_works(tmp_path: Path) -> None:
    def job(root: Path, say: forks.Say) -> dict[str, Any]:
        os.chdir(root.parent)
        names = forks.run_page(PAGE)
        again = names["CheckpointedTrainer"](
            names["Net"](4, 1),
            names["trainer"].args,
            train_dataset=names["Rows"](),
            checkpoints="runs/hf",
        )
        again.train()
        return {"steps": [names["trainer"].state.global_step, again.state.global_step]}

    assert forks.finish(job, tmp_path / "run") == 0
    assert forks.result(tmp_path / "run")["found"] == {"steps": [30, 30]}
    assert [one.step for one in manager_of(tmp_path / "runs" / "hf").list()][:1] == [30]


RANKS = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bridges import test_transformers as here
class Die(here.callbacks.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[3]):
            os._exit(9)
one = here.trainer(Path(sys.argv[2]), more=[Die()], max_steps=20, ddp_backend="gloo")
one.train()
found = here.outcome(one)
here.torch.save(found, f"{sys.argv[2]}.{os.environ['RANK']}")
"""


@pytest.mark.full
def test_two_ranks_that_are_killed_end_with_the_same_weights_and_logs(tmp_path: Path) -> None:
    """R1: under torchrun, each rank with losses of its own that were not logged yet."""
    (tmp_path / "job.py").write_text(RANKS)
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [sys.executable, "-W", "ignore", *run, str(tmp_path / "job.py"), str(TESTS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for root, step in (("whole", 0), ("killed", 13), ("killed", 0)):
        code = subprocess.run(
            [*words, str(tmp_path / root), str(step)], env=environment, timeout=240, check=False
        ).returncode
        assert (code == 0) == (step == 0)
    for rank in range(2):
        found, expected = (
            torch.load(tmp_path / f"{root}.{rank}", weights_only=False)
            for root in ("killed", "whole")
        )
        forks.assert_equal(found, expected)
