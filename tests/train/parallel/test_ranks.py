"""A Trainer on several ranks: the same run after a resume, on any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

from distributed.run import run_ranks
from holdfast import Best, CheckpointManager, Checkpoints, Last, load_weights
from holdfast.data import Loader, Stream
from holdfast.errors import HoldfastError, StoreError, StoreFull, UsageError
from holdfast.policy.triggers import On
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.local.store import LocalStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.train import (
    DDP,
    FSDP2,
    Callback,
    Counts,
    GradientNorm,
    Logger,
    Metrics,
    Outcome,
    Perplexity,
    Reduced,
    Schedule,
    StepOutput,
    StopWhen,
    Trainer,
    Training,
    Validation,
    cosine,
    status,
    warmup,
)
from holdfast.train.fit import starting
from holdfast.train.group import join_group
from holdfast.train.step.device_metrics import Mean, RankMeans, mean_of_ranks
from marks import diagonal, full

GLOBAL_BATCH = 12


class Net(nn.Module):
    """A model with blocks, buffers that differ by rank until they are shared, and dropout."""

    def __init__(self, dropout: float = 0.2, *, has_norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10) if has_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.last = nn.Linear(10, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        output: Tensor = self.last(hidden)
        return output


def samples(count: int = 96) -> TensorDataset:
    own = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 6, generator=own), torch.randint(3, (count,), generator=own)
    )


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(batch[0])
    return cross_entropy(output, batch[1]), {"mean": output.detach().mean()}


def make(root: Path | Store | None, num_ranks: int, **options: Any) -> Trainer:
    model = options.pop("model", Net)
    record = {"every": options.pop("every", "2step"), "keep": options.pop("keep", None)}
    options = {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "data": Loader(
            samples(), batch_size=GLOBAL_BATCH // num_ranks, ranks=options.pop("ranks", "group")
        ),
        "loss": loss,
        "validate": Validation(
            data=Loader(samples(20), batch_size=4, shuffle=False), every="3step"
        ),
        "clip": 1.0,
        "ema": 0.9,
        "counts": Counts(samples=lambda batch: len(batch[0])),
        "log_every": 2,
        "progress": False,
        **options,
    }
    return Trainer(model, checkpoints=root and Checkpoints(root, **record), **options)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that a run must have in common with the undisturbed one, whole on each rank."""
    weights = {name: _whole(value) for name, value in trainer.model.state_dict().items()}
    average = {name: _whole(value) for name, value in trainer.ema.model.state_dict().items()}
    slots = [
        _whole(value) for slots in trainer.optimizer.state.values() for value in slots.values()
    ]
    return {"weights": weights, "average": average, "slots": slots, "draw": torch.rand(3).numpy()}


def _whole(tensor: Any) -> Any:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().numpy().copy()


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def fit(root: Path, until: str, num_ranks: int, options: dict[str, Any], rank: int) -> Any:
    trainer = make(root, num_ranks, **options)
    trainer.fit(until)
    return state_of(trainer)


def _on_plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


STRATEGIES = {
    "ddp": {"strategy": "ddp"},
    "ddp of windows": {"accumulate": 2},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 of windows": {"strategy": FSDP2(reshard_after_forward=False), "accumulate": 2},
    "a curve": {"scheduler": warmup("2ep").then(cosine("4step"))},
    "a plateau": {
        "strategy": "fsdp2",
        "scheduler": Schedule(_on_plateau, every="evaluation", metric="val/loss"),
        "callbacks": [GradientNorm()],
    },
    "recomputed": {"strategy": "fsdp2", "activation_checkpointing": True},
    # Batch norm on a CPU takes no parameters of another type than its statistics.
    "mixed": {
        "strategy": FSDP2(param_dtype="bf16", reduce_dtype="fp32"),
        "model": partial(Net, has_norm=False),
    },
    "offloaded": {"strategy": FSDP2(cpu_offload=True)},
    "compiled": {"strategy": "ddp", "compile": {"backend": "eager"}},
}


QUICK = ("mixed",)
"""Run by `make test`: FSDP2 with more options; DDP is in `test_exact.py`."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, options in STRATEGIES.items()
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """Invariant 7, R38: it ends at one goal, and other processes go on to the next."""
    once = run_ranks(2, partial(fit, tmp_path / "once", "7step", 2, options))
    run_ranks(2, partial(fit, tmp_path / "twice", "4step", 2, options))
    twice = run_ranks(2, partial(fit, tmp_path / "twice", "7step", 2, options))
    assert_same(twice, once)
    assert_same(once[0]["weights"], once[1]["weights"])
    assert once[0]["draw"].tolist() != once[1]["draw"].tolist()
    lines = [
        [(line["step"], line["samples"], line["metrics"]) for line in log_of(tmp_path / name)]
        for name in ("once", "twice")
    ]
    assert [line for line in lines[1] if line[0] > 4] == [line for line in lines[0] if line[0] > 4]
    assert lines[0][-1][1] == 7 * GLOBAL_BATCH * options.get("accumulate", 1)


def best_weights(root: Path, strategy: str, rank: int) -> Any:
    trainer = make(root, 2, strategy=strategy, every="5step", keep=Best("val/loss") | Last(99))
    outcome = trainer.fit("10step", load_best=True)
    assert outcome.best is not None
    saved = [found.step for found in CheckpointManager(root, {"x": {}}, ranks=None).list()]
    return outcome.best.step, saved, state_of(trainer)["weights"]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp2", *full("ddp")])
def test_ranks_save_and_load_the_best_checkpoint_together(strategy: str, tmp_path: Path) -> None:
    found = run_ranks(2, partial(best_weights, tmp_path, strategy))
    assert_same(found[1], found[0])
    step, saved, weights = found[0]
    assert {3, 5, 10} <= set(saved)
    model = Net()
    assert load_weights(f"{tmp_path}@best", model).step == step
    assert_same(weights, {name: _whole(value) for name, value in model.state_dict().items()})


def go_on_unread(root: Path, lives: list[str], rank: int) -> str:
    """Fit several times, the last time while the leader cannot read earlier metrics."""

    def fail(*_: Any) -> Any:
        raise StoreError("a manifest cannot be read")

    options = {"every": "5step", "keep": Best("val/loss") | Last(99)}
    for until in lives[:-1]:
        make(root, 2, **options).fit(until)
    if rank == 0:
        status.catalog_of = starting.catalog_of = fail
    try:
        make(root, 2, **options).fit(lives[-1], load_best=True)
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "has gone on"


@pytest.mark.parametrize(
    ("lives", "what"),
    [
        (["3step", "6step"], "reading the metrics of earlier checkpoints"),
        pytest.param(["3step"], "finding the best checkpoint", marks=pytest.mark.full),
    ],
)
def test_a_leader_that_cannot_read_earlier_metrics_fails_all_ranks(
    lives: list[str], what: str, tmp_path: Path
) -> None:
    """Else the others would wait for it until the timeout of the group."""
    leader, follower = run_ranks(2, partial(go_on_unread, tmp_path, lives))
    assert leader == "StoreError: a manifest cannot be read"
    assert str(follower).startswith("RanksFailed: ")
    assert f"rank 0, in {what}: StoreError: a manifest cannot be read" in str(follower)


def overridden(root: Path, strategy: str, rank: int) -> Any:
    trainer = make(
        root,
        2,
        strategy=strategy,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    )
    outcome = trainer.fit("4step", override=["lr"])
    told = [note for note in outcome.notes if "replaces" in note]
    return trainer.optimizer.param_groups[0]["lr"], told


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", *full("fsdp2")])
def test_all_ranks_take_the_rate_of_the_script(strategy: str, tmp_path: Path) -> None:
    fit(tmp_path, "2step", 1, {"strategy": "single", "ranks": None}, 0)
    found = run_ranks(2, partial(overridden, tmp_path, strategy))
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(0.005)
    assert len(found[0][1]) == 1
    (life,) = Catalog(open_store(tmp_path)).find_checkpoint().manifest.changes
    assert {"world_size: 1 → 2", "optimizer.param_groups.0.lr: 0.01 → 0.05"} <= set(life.what)


class Rows:
    """The samples as a source that is read from start to end."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while self.place < 96:
            self.place += 1
            yield samples()[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def fit_stream(root: Path, until: str, num_ranks: int, rank: int) -> Any:
    stream = Stream(Rows(), batch_size=GLOBAL_BATCH // num_ranks, shuffle=24)
    trainer = make(root, num_ranks, data=stream)
    trainer.fit(until)
    return state_of(trainer), (stream.epoch, stream.batch)


@pytest.mark.full
def test_a_resumed_run_over_a_stream_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Invariant 7: bit for bit on two; on one it goes on where the two were."""
    once = run_ranks(2, partial(fit_stream, tmp_path / "once", "11step", 2))
    run_ranks(2, partial(fit_stream, tmp_path / "twice", "5step", 2))
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "twice", alone)
    twice = run_ranks(2, partial(fit_stream, tmp_path / "twice", "11step", 2))
    assert_same([state for state, _ in twice], [state for state, _ in once])
    (*_, place), *_ = run_ranks(1, partial(fit_stream, alone, "11step", 1))
    assert place == once[0][1] == (1, 3)


def log_of(root: Path) -> list[Any]:
    lines = map(json.loads, (root / "log" / "train.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line["metrics"] or "val/loss" in line["metrics"]]


def plain_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def weights_after(root: Path | None, num_ranks: int, options: dict[str, Any], rank: int) -> Any:
    trainer = make(root, num_ranks, model=_without_noise, loss=plain_loss, **options)
    trainer.fit("5step")
    return [_whole(weight) for weight in trainer.model.parameters()]


def _without_noise() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    diagonal(["ddp", "fsdp2", FSDP2(mesh=(1, 2)), DDP(bucket_cap_mb=1.0)], [1, 3]),
)
def test_ranks_train_what_one_process_trains(strategy: Any, accumulate: int) -> None:
    options = {"accumulate": accumulate, "ema": None, "validate": None}
    alone = weights_after(None, 1, options, 0)
    of_ranks = run_ranks(2, partial(weights_after, None, 2, {**options, "strategy": strategy}))
    torch.testing.assert_close(of_ranks[0], alone, rtol=1e-4, atol=1e-5)
    assert_same(of_ranks[1], of_ranks[0])


def carried_on(root: Path, num_ranks: int, strategy: Any, rank: int) -> Any:
    trainer = make(root, num_ranks, strategy=strategy)
    started: list[Any] = []

    class Look(Callback):
        def resumed(self, training: Training, checkpoint: Any) -> None:
            started.append([_whole(weight) for weight in trainer.model.parameters()])

        def step_start(self, training: Training) -> None:
            started.append(trainer.data.batch)

    trainer = make(root, num_ranks, strategy=strategy, callbacks=[Look()])
    outcome = trainer.fit("6step")
    assert (outcome.step, outcome.reason) == (6, "goal")
    return started


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((2, "fsdp2"), (1, None), marks=pytest.mark.full),
        pytest.param((1, None), (2, "ddp"), marks=pytest.mark.full),
        ((2, "ddp"), (3, "fsdp2")),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks_and_strategy(
    before: tuple[int, Any], after: tuple[int, Any], tmp_path: Path
) -> None:
    num_ranks, strategy = before
    first = run_ranks(num_ranks, partial(fit, tmp_path, "4step", num_ranks, {"strategy": strategy}))
    num_ranks, strategy = after
    (weights, *batches), *_ = run_ranks(
        num_ranks, partial(carried_on, tmp_path, num_ranks, strategy)
    )
    names = dict(Net().named_parameters())
    assert_same(weights, [first[0]["weights"][name] for name in names])
    assert batches == [5, 6]  # each is fetched before its step starts


def in_parts(root: Path, until: str, num_ranks: int, rank: int) -> Any:
    trainer = make(
        root,
        num_ranks,
        accumulate=3,
        every="0.5ep",
        validate=Validation(data=Loader(samples(20), batch_size=4, shuffle=False), every="0.5ep"),
    )
    trainer.fit(until)
    tested = trainer.test(Loader(samples(10), batch_size=4, shuffle=False))
    return tested, state_of(trainer)


@pytest.mark.full
def test_parts_of_an_epoch_are_at_the_same_steps_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Invariant 7: eight batches are three steps; a half is 1.5 steps. A test is logged once."""
    once = run_ranks(2, partial(in_parts, tmp_path / "once", "2ep", 2))
    run_ranks(2, partial(in_parts, tmp_path / "twice", "4step", 2))
    twice = run_ranks(2, partial(in_parts, tmp_path / "twice", "2ep", 2))
    run_ranks(1, partial(in_parts, tmp_path / "alone", "2ep", 1))
    assert_same(twice, once)
    for name, steps in (
        ("once", [2, 3, 5, 6]),
        ("alone", [2, 3, 5, 6]),
        ("twice", [2, 3, 4, 5, 6]),
    ):
        lines = log_of(tmp_path / name)
        assert [line["step"] for line in lines if "val/loss" in line["metrics"]] == steps
        saved = {entry.step for entry in Catalog(open_store(tmp_path / name)).checkpoints()}
        assert saved == {*steps}
    text = (tmp_path / "once" / "log" / "train.jsonl").read_text()
    assert text.count('"test/loss"') == 1


class EndAt(Callback):
    """Asks for the end on one rank only."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def step_end(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step == self.step and torch.distributed.get_rank() == self.rank:
            training.request_stop("enough")


def ended(root: Path | None, options: dict[str, Any], rank: int) -> Outcome:
    return make(root, 2, **options).fit("40step")


@pytest.mark.parametrize(("rank", "has_root"), diagonal([0, 1], [True, False]))
def test_a_stop_that_one_rank_asks_for_ends_all_at_the_next_log(
    rank: int, has_root: bool, tmp_path: Path
) -> None:
    options = {"callbacks": [EndAt(5, rank)], "log_every": 4, "validate": None}
    root = tmp_path if has_root else None
    outcomes = run_ranks(2, partial(ended, root, options))
    assert [(found.step, found.reason) for found in outcomes] == [(8, "stopped")] * 2
    assert {found.detail for found in outcomes} == {"enough", "a request on another rank"}


def _is_low(training: Training, metrics: Metrics) -> bool:
    return metrics.get("val/loss", 1000.0) < 100.0


@pytest.mark.full
def test_a_stop_by_a_metric_ends_all_ranks_where_it_ends_one_process(tmp_path: Path) -> None:
    """Metrics are means over the ranks, the same on all."""
    options = {"callbacks": [StopWhen(_is_low)], "log_every": 7}
    outcomes = run_ranks(2, partial(ended, tmp_path, options))
    assert [(found.step, found.reason) for found in outcomes] == [(3, "stopped")] * 2


def test_the_time_limit_of_any_rank_ends_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, partial(_limited, tmp_path))
    assert first.reason == second.reason == "max_time"
    assert first.step == second.step


def _limited(root: Path, rank: int) -> Outcome:
    return make(root, 2).fit("1000000step", max_time="1s" if rank else None)


class Signalled(Callback):
    """Gets a signal on one rank, as from a scheduler that ends its host."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def step_end(self, training: Training, metrics: Metrics) -> None:
        if training.counters.step == self.step and torch.distributed.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def signalled(root: Path | None, rank: int) -> tuple[int, int]:
    trainer = make(root, 2, callbacks=[Signalled(3, 1)], validate=None)
    with pytest.raises(SystemExit) as ending:
        trainer.fit("1000000step")
    return trainer.counters.step, int(str(ending.value.code))


@pytest.mark.parametrize("has_root", [True, *full(False)])
def test_a_signal_to_one_rank_ends_all_at_one_step(has_root: bool, tmp_path: Path) -> None:
    (step, code), other = run_ranks(2, partial(signalled, tmp_path if has_root else None))
    assert other == (step, code)
    assert code == 75
    if has_root:
        assert CheckpointManager(tmp_path, {"model": Net()}).list()[0].step == step


class Told(Callback):
    """Remembers at which steps it was told of saves."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def checkpoint_saved(self, training: Training, checkpoint: Any, cost: Metrics) -> None:
        self.events.append((f"saved {checkpoint.step}", training.counters.step))

    def checkpoint_failed(self, training: Training, error: Exception) -> None:
        self.events.append(("failed", training.counters.step))


def _fault(what: str) -> Fault:
    """Fault of the second rank: it cannot write a file of step 4, or read what became of it."""
    op, key, error = {
        "write": ("finish", "step-00000004*", StoreFull("no space")),
        "read": ("get", "step-00000004*/manifest.json", StoreError("unread")),
    }[what]
    return Fault(kind="fail", op=op, key=key, error=error, times=1)  # type: ignore[arg-type]


def failing(root: Path, what: str, rank: int) -> list[tuple[str, int]]:
    told = Told()
    store = FaultyStore(LocalStore(root), [_fault(what)] if rank == 1 else [])
    make(store, 2, callbacks=[told], validate=None, log=False).fit("9step")
    return told.events


class Recorded(Logger):
    """A logger that only the leader calls, with a state that only the leader's calls change."""

    def __init__(self) -> None:
        self.run = "none"
        self.num_calls = 0

    def fit_start(self, training: Training) -> None:
        self.run = self.run if self.run != "none" else "run-of-the-leader"

    def log(self, training: Training, metrics: Metrics) -> None:
        self.num_calls += 1

    def state_dict(self) -> dict[str, str]:
        return {"run": self.run}

    def load_state_dict(self, state: Any) -> None:
        self.run = state["run"]


def logged(root: Path, rank: int) -> tuple[str, int]:
    logger = Recorded()
    make(root, 2, callbacks=[logger]).fit("4step")
    return logger.run, logger.num_calls


@pytest.mark.parametrize("what", ["write", *full("read")])
def test_a_save_that_one_rank_failed_is_made_again_at_one_step(what: str, tmp_path: Path) -> None:
    """R38: every rank hears of saves at the same steps, and what has failed on any has failed."""
    events, others = run_ranks(2, partial(failing, tmp_path, what))
    assert events == others
    (again,) = [step for event, step in events if event == "failed"]
    saved = [checkpoint.step for checkpoint in CheckpointManager(tmp_path, {"m": Net()}).list()]
    assert again % 2 == 0, "the ranks meet at steps that log"
    assert {6, 8, 9} <= set(saved)
    assert (4 in saved) == (what == "read")


def test_only_the_leader_logs_and_all_ranks_save_under_what_it_logs(tmp_path: Path) -> None:
    (run, calls), (other, no_calls) = run_ranks(2, partial(logged, tmp_path))
    assert run == other == "run-of-the-leader"
    assert calls > 0 == no_calls


class Losses(Callback):
    """Remembers the losses of this rank's batches, and the metrics of each step."""

    def __init__(self) -> None:
        self.own: list[float] = []
        self.told: list[dict[str, float]] = []

    def before_backward(self, training: Training, loss: Tensor) -> None:
        self.own.append(float(loss))

    def step_end(self, training: Training, metrics: Metrics) -> None:
        self.told.append(dict(metrics))


def _sometimes(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    rank = torch.distributed.get_rank()
    return plain_loss(model, batch), {"rank": float(rank), **({"second": 5.0} if rank else {})}


def told(rank: int) -> tuple[list[float], list[dict[str, float]]]:
    losses = Losses()
    make(None, 2, loss=_sometimes, callbacks=[losses], validate=None, clip=None).fit("3step")
    return losses.own, losses.told


def test_metrics_are_means_over_the_ranks_that_have_them() -> None:
    """R38: and the same on all ranks, so that a stop by a metric is one for all."""
    (own, first), (others, second) = run_ranks(2, told)
    assert own != others
    means = [(one + other) / 2 for one, other in zip(own, others, strict=True)]
    assert [found["loss"] for found in first] == pytest.approx(means)
    assert [found["rank"] for found in first] == [0.5] * 3
    assert [found["second"] for found in second] == [5.0] * 3
    assert [{**found, "second": 5.0} for found in first] == second


class Norms(Logger):
    """Keeps the norms that are logged."""

    def __init__(self) -> None:
        self.seen: list[Metrics] = []

    def log(self, training: Training, metrics: Metrics) -> None:
        if "grad_norm/total" in metrics:
            self.seen.append(dict(metrics))


def norms_of(num_ranks: int, strategy: Any, rank: int) -> list[Metrics]:
    norms = Norms()
    options = {"model": _without_noise, "loss": plain_loss, "strategy": strategy}
    make(None, num_ranks, callbacks=[GradientNorm(), norms], **options).fit("4step")
    return norms.seen


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_norms_of_gradients_are_those_of_one_process(strategy: str) -> None:
    found, none = run_ranks(2, partial(norms_of, 2, strategy))
    (expected,) = run_ranks(1, partial(norms_of, 1, None))
    assert none == []
    assert len(found) == 3  # steps 2 and 4, and 3 for its validation
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


class NoSync(Callback):
    """Compares the gradients of both ranks after each backward pass."""

    def __init__(self) -> None:
        self.are_equal: list[bool] = []

    def after_backward(self, training: Training) -> None:
        gradient = training.model.get_parameter("last.bias").grad
        assert gradient is not None
        found = [torch.empty_like(gradient) for _ in range(2)]
        torch.distributed.all_gather(found, gradient.clone())
        self.are_equal.append(torch.equal(*found))


def synced(strategy: str, rank: int) -> list[bool]:
    look = NoSync()
    make(None, 2, accumulate=3, strategy=strategy, callbacks=[look]).fit("2step")
    return look.are_equal


def test_gradients_are_exchanged_once_a_step() -> None:
    assert run_ranks(2, partial(synced, "ddp"))[0] == [False, False, True] * 2


def refused(root: Path, options: dict[str, Any], rank: int) -> str:
    try:
        make(root, 2, **options).fit("2step")
    except UsageError as error:
        return str(error)
    return "nothing was refused"


def beside_the_model(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return sum(weight.square().sum() for weight in model.parameters())  # type: ignore[return-value]


def _with_more(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": None}, "gives each of the 2 ranks the same"),
        ({"every": On("exception")}, "needs one process"),
        ({"loss": beside_the_model}, "has not called the model"),
        ({"optimizer": _with_more}, "1 of its 11 parameters are not the model's"),
        ({"strategy": "fsdp2", "precision": "fp16"}, "precision"),
        ({"strategy": FSDP2(mesh=(2, 2))}, "must multiply to the 2 ranks"),
        ({"strategy": FSDP2(blocks=[nn.Conv2d])}, "no module of these classes:\n  Conv2d"),
        ({"strategy": "zero3"}, "must be one of ('ddp', 'fsdp2', 'single')"),
        (
            {"optimizer": {"all": _with_more}, "scheduler": None},
            "several optimizers, and update, train on one process",
        ),
        ({"strategy": "single"}, "and it trains alone: make it with ranks=None"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    found = run_ranks(2, partial(refused, tmp_path, options))
    assert all(message in text for text in found), found


def test_fsdp2_also_runs_on_one_process(tmp_path: Path) -> None:
    assert_same(*run_ranks(1, partial(fit, tmp_path, "3step", 1, {"strategy": "fsdp2"})) * 2)


def weighed_loss(model: nn.Module, batch: list[Tensor]) -> StepOutput:
    """Mean over the samples whose first value is positive: another number on each rank."""
    inputs, target = batch
    is_counted = inputs[:, 0] > 0
    output = model(inputs)
    errors = cross_entropy(output, target, reduction="none")
    count = is_counted.sum()
    value = torch.where(is_counted, errors, 0.0).sum() / count.clamp(min=1)
    return StepOutput(value, {"own": value.detach()}, outputs=(output, target), weight=count)


def weighed(num_ranks: int, options: dict[str, Any], rank: int) -> Any:
    seen: list[dict[str, float]] = []

    class Watch(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            seen.append(dict(metrics))

    options = {"callbacks": [Watch()], "ema": None, "validate": None, **options}
    trainer = make(None, num_ranks, model=_without_noise, loss=weighed_loss, **options)
    trainer.fit("5step")
    return [_whole(weight) for weight in trainer.model.parameters()], seen


@pytest.mark.parametrize(
    ("options", "strategy"),
    diagonal(
        [{}, {"accumulate": 3}, {"micro_batch": 4}],
        ["ddp", "fsdp2"],
        ids=["plain", "accumulate", "micro_batch"],
    ),
)
def test_ranks_with_unequal_weights_train_what_one_process_trains(
    strategy: str, options: dict[str, Any]
) -> None:
    alone, metrics = weighed(1, options, 0)
    of_ranks = run_ranks(2, partial(weighed, 2, {**options, "strategy": strategy}))
    torch.testing.assert_close(of_ranks[0][0], alone, rtol=1e-4, atol=1e-5)
    assert_same(of_ranks[1][0], of_ranks[0][0])
    for found, expected in zip(of_ranks[0][1], metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def only_one_weighs(rank: int) -> str:
    def some(model: nn.Module, batch: list[Tensor]) -> StepOutput:
        found = weighed_loss(model, batch)
        return found if rank else StepOutput(found.loss)

    with pytest.raises(UsageError) as raised:
        make(None, 2, loss=some).fit("1step")
    return str(raised.value)


def test_a_weight_on_some_ranks_only_is_refused_on_all() -> None:
    assert (
        run_ranks(2, only_one_weighs)
        == ["loss: only ranks [1] give a weight: all or none must"] * 2
    )


class Right:
    """A metric of one's own, which adds what other ranks have."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.count += int((output.argmax(1) == target).sum())

    def compute(self) -> int:
        return self.count

    def reset(self) -> None:
        self.count = 0

    def merge_state(self, others: list[Right]) -> None:
        self.count += sum(other.count for other in others)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def share_of_right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def scored() -> dict[str, Any]:
    return {
        "f1": MulticlassF1Score(3),
        "matrix": MulticlassConfusionMatrix(3),
        "right": Right(),
        "share": share_of_right,
        "perplexity": Perplexity(),
    }


def scores_of(root: Path) -> list[Any]:
    lines = map(json.loads, (root / "log" / "train.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line["metrics"].items() if "/" in name}
        for line in lines
        if {*line["metrics"]} & {"train/f1", "train/matrix", "val/f1", "val/matrix"}
    ]


def fit_scored(root: Path, num_ranks: int, untils: list[str], rank: int) -> None:
    for until in untils:
        plan = Validation(
            data=Loader(samples(24), batch_size=12 // num_ranks, shuffle=False),
            every="1ep",
            at_end=False,
            metrics=scored(),
        )
        options = {"loss": weighed_loss, "metrics": scored(), "model": _without_noise, "ema": None}
        make(root, num_ranks, validate=plan, **options).fit(until)


@pytest.mark.full
def test_metrics_are_those_of_all_ranks_and_a_resume_goes_on_with_each_ranks_own(
    tmp_path: Path,
) -> None:
    """An epoch is 8 steps: it ends in the middle of one, and of the next one."""
    fit_scored(tmp_path / "alone", 1, ["2ep"], 0)
    run_ranks(2, partial(fit_scored, tmp_path / "once", 2, ["2ep"]))
    run_ranks(2, partial(fit_scored, tmp_path / "twice", 2, ["3step", "13step", "2ep"]))
    alone, once = scores_of(tmp_path / "alone"), scores_of(tmp_path / "once")
    assert scores_of(tmp_path / "twice") == once
    assert len(once) == len(alone) == 2 * 4 - 2  # at the end of an epoch the two logs are one
    for found, expected in zip(once, alone, strict=True):
        assert {*found} == {*expected}
        for name, value in found.items():
            given, wanted = (torch.tensor(item).double() for item in (value, expected[name]))
            torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-6)


def test_metrics_of_another_number_of_ranks_begin_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, partial(fit_scored, tmp_path, 2, ["3step"]))
    fit_scored(tmp_path, 1, ["1ep"], 0)
    said = "metrics f1, matrix, right, share, perplexity start over in the middle of the epoch"
    assert f"{said}: they are those of 2 ranks" in caplog.text


def reduced_of_ranks(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    """Reduce a metric by each way over two batches of each rank; one only rank 1 has."""
    group = join_group(None, also_alone=False)
    mean, kinds = Mean(), {"sum": "sum", "max": "max", "min": "min", "l2": "l2", "late": "min"}
    for value in (1.0, 2.0 + rank):
        names = ["mean", "sum", "max", "min", "l2", *(["late"] if rank else [])]
        mean.add_batch(dict.fromkeys(names, -value), 1.0 + rank, kinds)  # type: ignore[arg-type]
    step = {name: float(value) for name, value in RankMeans(group)(mean).items()}
    return step, {name: float(v) for name, v in mean_of_ranks(group, mean).compute_means().items()}


def test_metrics_are_reduced_over_all_ranks() -> None:
    """O59: by sum, max, min and l2, of a step and of a validation."""
    (first, validated), (second, _) = run_ranks(2, reduced_of_ranks)
    expected = {"mean": -11 / 6, "sum": -7.0, "max": -1.0, "min": -3.0, "l2": 15**0.5}
    assert first == pytest.approx(expected)
    assert second == pytest.approx({**expected, "late": -3.0})
    assert validated == pytest.approx({**expected, "late": -3.0})


class Values(nn.Module):
    """Its output is its input, as long as its weight is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.weight


def _value(model: nn.Module, batch: list[Tensor]) -> StepOutput:
    return StepOutput(model(batch[0]).mean() * 1.0, outputs=(batch[0], batch[0]))


class Total(Right):
    def update(self, output: Tensor, target: Tensor) -> None:
        self.count += int(output.sum())


def short(strategy: Any, folder: Path, rank: int) -> dict[str, Any]:
    """Validate, predict and train on few samples, of which the last batch has one."""

    def data(size: int, **options: Any) -> Loader:
        return Loader(TensorDataset(torch.arange(float(size)).view(size, 1)), **options)

    plans = [
        Validation(
            data=data(size, batch_size=1, shuffle=False),
            name=f"of{size}",
            metrics={"total": Total(), "all": lambda output, target: float(output.sum())},
        )
        for size in (1, 4)
    ]
    trainer = Trainer(
        Values(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        data=data(4, batch_size=1),
        loss=_value,
        counts=Counts(samples=lambda batch: len(batch[0])),
        validate=plans,
        checkpoints=None,
        progress=False,
        stop=None,
        log=False,
        strategy=strategy,
    )
    found = dict(trainer.validate())
    found["predicted"] = (
        trainer.predict(
            data(4, batch_size=1, shuffle=False),
            to=folder,
            outputs=lambda model, batch: model(batch[0]),
        )
        .load()["output"]
        .flatten()
        .tolist()
    )
    trainer.fit("2ep")
    return {**found, "samples": trainer.counters.samples}


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_sample_that_two_ranks_get_counts_once(strategy: str, tmp_path: Path) -> None:
    """In means and metrics of validations, in predictions, and in the number of samples."""
    expected = {f"val/of1/{name}": 0.0 for name in ("loss", "total", "all")}
    expected |= {"val/of4/loss": 1.5, "val/of4/total": 6.0, "val/of4/all": 6.0}
    expected |= {"predicted": [0.0, 1.0, 2.0, 3.0], "samples": 8}
    found = run_ranks(3, partial(short, strategy, tmp_path))
    assert found == [expected] * 3


def trained_on_five(num_ranks: int, options: dict[str, Any], rank: int) -> dict[str, float]:
    """Train on five samples, three a step; return the weight, and the metrics of the last step."""
    found: dict[str, float] = {}

    class Look(Callback):
        def log(self, training: Training, metrics: Any) -> None:
            found.update(metrics)

    def loss(model: nn.Module, batch: list[Tensor]) -> StepOutput:
        loss, metrics = model(batch[0]).mean(), {"values": Reduced(float(batch[0].sum()), "sum")}
        return StepOutput(loss, metrics, outputs=(batch[0], batch[0]), weight=len(batch[0]))

    data = TensorDataset(torch.arange(5.0).view(5, 1))
    trainer = Trainer(
        Values(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=Loader(data, batch_size=3 // num_ranks, shuffle=False),
        loss=loss,
        metrics={"total": Total()},
        callbacks=[Look()],
        log_every=1,
        checkpoints=None,
        progress=False,
        stop=None,
        log=False,
        **options,
    )
    trainer.fit("1ep")
    (weight,) = trainer.model.parameters()
    names = ("loss", "values", "train/total")
    return {"weight": _whole(weight).item(), **{name: float(found[name]) for name in names}}


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fsdp2", "skip_nan": 1},
        {"strategy": "ddp", "accumulate": 2},
        *full({"strategy": "ddp"}, {"strategy": "ddp", "micro_batch": 1}),
    ],
)
def test_a_sample_that_two_ranks_train_on_counts_once_with_weights(options: dict[str, Any]) -> None:
    alone = trained_on_five(1, {**options, "strategy": None}, 0)
    assert alone["train/total"] == 10.0
    for of_rank in run_ranks(3, partial(trained_on_five, 3, options)):
        assert of_rank == pytest.approx(alone)


class Unmerged(Right):
    merge_state = None  # type: ignore[assignment]


def refused_scores(rank: int) -> list[str]:
    found = []
    for options in ({"metrics": {"own": Unmerged()}}, {"micro_batch": "auto"}):
        with pytest.raises(UsageError) as raised:
            make(None, 2, **options)
        found.append(str(raised.value))
    return found


def test_what_ranks_cannot_do_with_metrics_and_micro_batches_is_refused_by_name() -> None:
    metric, size = run_ranks(2, refused_scores)[0]
    assert "metric 'own': Unmerged cannot be computed over 2 ranks" in metric
    assert 'micro_batch="auto" needs one process' in size
