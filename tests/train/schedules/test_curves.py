"""Curves give the rates that their formulas say, in any unit, and also after a resume."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from holdfast.data import Buckets, Loader
from holdfast.errors import MismatchError, UsageError
from holdfast.store.memory import MemoryStore
from holdfast.testing.resume import leaf_digests
from holdfast.train import (
    Callback,
    Counts,
    Curve,
    Training,
    cosine,
    for_group,
    linear,
    one_cycle,
    warmup,
    wsd,
)
from marks import full
from train.small import Noisy, make

RATE = 0.001


class Rates(Callback):
    """Notes the rates with which each step is done."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def before_optimizer_step(self, training: Training) -> None:
        self.seen.append(training.optimizer.param_groups[0]["lr"])


def rates(curve: Any, until: str, root: Any = None, **options: Any) -> list[float]:
    seen = Rates()
    store = MemoryStore() if root is None else root
    make(store, scheduler=curve, callbacks=[seen], **options).fit(until)
    return seen.seen


def test_warmup_and_cosine_are_those_of_transformers() -> None:
    def factor(step: int, num_warmup: int = 4, num_steps: int = 12) -> float:
        # get_cosine_schedule_with_warmup
        if step < num_warmup:
            return float(step) / float(max(1, num_warmup))
        progress = float(step - num_warmup) / float(max(1, num_steps - num_warmup))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))

    assert rates(warmup("4step").then(cosine()), "12step") == rates(
        lambda optimizer: LambdaLR(optimizer, factor), "12step"
    )


def test_one_cycle_is_that_of_torch() -> None:
    def torchs(optimizer: torch.optim.Optimizer) -> Any:
        # Its phases end a step before the part of its total that it is given.
        return OneCycleLR(optimizer, RATE, total_steps=21, pct_start=5 / 21, cycle_momentum=False)

    assert rates(one_cycle("20step", rise=0.2), "20step") == pytest.approx(rates(torchs, "20step"))


@pytest.mark.parametrize(
    ("curve", "until", "expected"),
    [
        (linear(), "4step", [1, 0.75, 0.5, 0.25]),
        (linear("2step", end=0.5), "4step", [1, 0.75, 0.5, 0.5]),
        (warmup("0.5dur", start=0.5), "4step", [0.5, 0.75, 1, 1]),
        (wsd(warmup="2step", decay="2step"), "6step", [0, 0.5, 1, 1, 1, 0.5]),
        (wsd(warmup="2step", decay="0.5dur", end=0.2), "4step", [0, 0.5, 1, 0.6]),
        (warmup("1ep"), "2ep", [0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1]),
        (wsd(warmup="2step", decay="1ep"), "2ep", [0, 0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (wsd(warmup="2step", decay="2step"), "1ep", [0, 0.5, 1, 1, 0.5]),
        (warmup("4sp").then(linear()), "12sp", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        (warmup("2step").then(linear("8tok")), "6step", [0, 0.5, 1, 0, 0, 0]),
        (warmup("2step").then(linear("4sp")), "8sp", [0, 0.5, 1, 0.5]),
    ],
    ids=str,
)
def test_lengths_are_in_any_unit(curve: Curve, until: str, expected: list[float]) -> None:
    counts = Counts(samples=len, tokens=torch.numel)  # 2 samples and 8 tokens a step
    found = rates(curve, until, counts=counts)
    assert [rate / RATE for rate in found] == pytest.approx(expected)


def test_an_epoch_of_windows_has_the_steps_of_its_windows() -> None:
    found = rates(wsd(warmup="1step", decay="3step"), "2ep", accumulate=2)  # 3 steps an epoch
    assert [rate / RATE for rate in found] == pytest.approx([0, 1, 1, 1, 0.6, 0.2])


def test_a_group_has_a_curve_of_its_own() -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}],
            lr=1.0,
        )

    trainer = make(
        MemoryStore(),
        optimizer=optimizer,
        scheduler=[for_group(1, linear()), for_group(0, warmup("4step"))],
    )
    trainer.fit(2)
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.5, 0.0]


CURVES = {
    "cosine": lambda: warmup("3step").then(cosine()),
    "wsd": lambda: wsd(warmup="3step", decay="1ep"),
    "tokens": lambda: warmup("3step").then(linear("24tok")).then(linear("3step", end=0.5)),
}


@pytest.mark.parametrize("make_curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("end", [4, *full(2, 7)])
def test_a_curve_goes_on_bit_for_bit_inside_an_epoch(
    tmp_path: Path, make_curve: Any, end: int
) -> None:
    """Invariant 7: ended by a callback with the goal of the whole run, and begun again."""

    class Stops(Callback):
        def step_end(self, training: Training, metrics: Any) -> None:
            if training.counters.step == end:
                training.request_stop("enough")

    options: dict[str, Any] = {"counts": Counts(tokens=torch.numel)}
    one, both = tmp_path / "one", tmp_path / "both"
    whole = make(one, scheduler=make_curve(), **options)
    whole.fit("2ep")
    make(both, scheduler=make_curve(), callbacks=[Stops()], **options).fit("2ep")
    resumed = make(both, scheduler=make_curve(), **options)
    assert resumed.fit("2ep").notes == ()
    assert leaf_digests(resumed.state) == leaf_digests(whole.state)


def test_a_run_that_goes_on_with_the_same_curve_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for until in ("3step", "6step"):
        make(tmp_path, scheduler=warmup("2step").then(cosine("3step"))).fit(until)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_longer_goal_moves_a_curve_that_follows_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates(linear(), "4step", tmp_path)
    assert rates(linear(), "8step", tmp_path) == pytest.approx(
        [RATE * 0.5, RATE * 0.375, RATE * 0.25, RATE * 0.125]
    )
    assert (
        "scheduler: the goal was 4step and is 8step, which is used from now on: at step 4 the "
        "learning rate continues with 0.0005, not with 0"
    ) in caplog.text


def test_beyond_its_end_a_rate_stays(tmp_path: Path) -> None:
    assert rates(cosine("4step", end=0.5), "6step", tmp_path)[4:] == [RATE / 2] * 2
    assert rates(cosine("4step", end=0.5), "8step", tmp_path) == [RATE / 2] * 2


def test_another_curve_of_the_script_is_used_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates(cosine(), "4step", tmp_path)
    assert rates(linear("16step"), "8step", tmp_path)[0] == pytest.approx(RATE * 0.75)
    assert "the curve was 'cosine to 0 in the rest' and is 'linear to 0 in 16step'" in caplog.text


def test_a_curve_is_new_in_a_run_without_one(tmp_path: Path) -> None:
    make(tmp_path, scheduler=None).fit(2)
    assert rates(linear("4step"), "4step", tmp_path) == pytest.approx([RATE / 2, RATE / 4])


@pytest.mark.parametrize(
    "both",
    [
        (cosine("9step"), lambda optimizer: CosineAnnealingLR(optimizer, 9)),
        (lambda optimizer: CosineAnnealingLR(optimizer, 9), cosine("9step")),
    ],
    ids=["to torch's", "from torch's"],
)
def test_another_kind_of_scheduler_is_refused(tmp_path: Path, both: Any) -> None:
    make(tmp_path, scheduler=both[0]).fit(2)
    with pytest.raises(
        (MismatchError, UsageError), match=r"another kind of scheduler|parameter groups"
    ):
        make(tmp_path, scheduler=both[1]).fit(4)


def test_a_rate_in_a_tensor_is_set_in_place() -> None:
    weight = nn.Parameter(torch.zeros(1))
    trainer = make(
        MemoryStore(),
        model=nn.Linear(4, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0)),
        scheduler=linear("4step"),
    )
    kept = trainer.optimizer.param_groups[0]["lr"]
    trainer.fit(2)
    assert trainer.optimizer.param_groups[0]["lr"] is kept
    assert float(kept) == 0.5
    assert weight.grad is None


class Endless(Loader):
    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: cosine().then(linear()), "two parts have no length"),
        (lambda: warmup("5s"), "length='5s'"),
        (lambda: warmup(5), "length=5"),
        (lambda: warmup("5step", start=-1.0), "start=-1.0"),
        (lambda: cosine(end=math.inf), "end=inf"),
        (lambda: one_cycle(rise=1.0), "rise=1.0"),
        (lambda: wsd(form="sine"), "form"),
        (lambda: cosine().then("5step"), r"then\('5step'\)"),
        (lambda: rates(warmup("5tok"), "4step"), r"counts=Counts\(tokens=…\)"),
        (lambda: rates(wsd(decay="8sp"), "4step", counts=Counts(samples=len)), "counted back"),
        (lambda: rates(cosine(), "1ep", data=Endless(Noisy(), batch_size=2)), "data has none"),
    ],
)
def test_what_cannot_work_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrong()


@pytest.mark.parametrize("goal", ["3ep", "30step"])
@pytest.mark.parametrize(
    "options",
    [{"batch_size": {0: 5, 1: 2}}, {"batch_sampler": Buckets([1] * 10, max_tokens=4)}],
    ids=["by-epoch", "buckets"],
)
def test_epochs_of_several_lengths_are_refused_where_a_curve_counts_them(
    options: dict[str, Any], goal: str
) -> None:
    trainer = make(
        MemoryStore(),
        data=Loader(Noisy(), **options),
        scheduler=cosine("2ep") if goal == "30step" else warmup("2step").then(cosine()),
    )
    with pytest.raises(UsageError, match=r"epochs of several lengths.*give goal and lengths in s"):
        trainer.fit(goal)


def test_epochs_of_several_lengths_may_have_a_curve_in_steps() -> None:
    data = Loader(Noisy(), batch_size={0: 5, 1: 2})
    trainer = make(MemoryStore(), data=data, scheduler=warmup("2step").then(cosine()))
    trainer.fit("9step")
    assert trainer.optimizer.param_groups[0]["lr"] == 0.0
