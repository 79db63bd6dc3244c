"""Each feature of the Trainer with a state resumes bit for bit from a kill in any phase."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import IterableDataset

from bridges import forks
from holdfast.data import Loader, Mixture, Stream
from holdfast.data.randomness import seed_generators
from holdfast.testing.resume import Report, assert_resume_equivalent, leaf_digests
from holdfast.train import (
    SWA,
    Control,
    EarlyStopping,
    Freeze,
    GradientNorm,
    LearningRates,
    Limits,
    Schedule,
    Trainer,
    Validation,
    warmup,
)
from runs import be_a_script
from train.small import Noisy, make, network
from train.test_resume import KILL_AT, STEPS, KilledIn, Phase

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
GOAL = "60step"


class Source(IterableDataset[Tensor]):
    """A stream that draws and says where it is."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < 10:
            self.position += 1
            yield torch.rand(4) + self.position / 10
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


def sgd_of(part: int) -> Callable[[nn.Sequential], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model[part].parameters(), lr=0.05, momentum=0.9)


def alternate(control: Control, batch: Tensor) -> dict[str, Tensor]:
    for name in ("first", "last"):
        loss = (control.model(batch) * torch.rand(())).square().mean()
        control.backward(loss)
        control.step(name)
    return {"loss": loss}


def sometimes_nan(model: nn.Module, batch: Tensor) -> Tensor:
    """Not finite in about every third step, by a draw."""
    factor = float("nan") if torch.rand(()) < 0.3 else 1.0
    return model(batch).square().mean() * factor


FEATURES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "optimizers": lambda: {
        "optimizer": {"first": sgd_of(0), "last": sgd_of(2)},
        "update": alternate,
        "loss": None,
        "validate": Validation(
            data=Loader(Noisy(), batch_size=4),
            every="1step",
            loss=lambda model, batch: model(batch).mean(),
        ),
        "scheduler": {"first": lambda optimizer: StepLR(optimizer, 2)},
    },
    "swa": lambda: {"swa": SWA(start="2step", every="1step")},
    "ema": lambda: {"ema": 0.9},
    "freeze": lambda: {"callbacks": [Freeze("0.*", until="5step"), Freeze("2.*", since="7step")]},
    "skip_nan": lambda: {"loss": sometimes_nan, "skip_nan": 40},
    "sizes": lambda: {"data": Loader(Noisy(), batch_size={0: 2, 1: 5})},
    "mixture": lambda: {"data": Loader(Mixture([(Noisy(), 2.0), (Noisy(), 1.0)]), batch_size=3)},
    "stream": lambda: {"data": Stream(Source(), batch_size=2, shuffle=4)},
    "micro_batch": lambda: {"micro_batch": 1, "accumulate": 2},
    "micro_batch_auto": lambda: {"micro_batch": "auto"},
    "monitors": lambda: {
        "callbacks": [GradientNorm(), LearningRates(), EarlyStopping("val/loss", patience=9)]
    },
    "schedules": lambda: {
        "scheduler": [
            Schedule(
                lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
                "evaluation",
                metric="val/loss",
            )
        ]
    },
    "curve": lambda: {"scheduler": warmup("12step")},
    "limits": lambda: {"limits": Limits(train=3, val=1)},
    "overfit": lambda: {"limits": Limits(overfit=2)},
}


def made(feature: str, root: Path, *callbacks: Any) -> Trainer:
    options = {
        "data": Loader(Noisy(), batch_size=2),
        "validate": Validation(data=Loader(Noisy(), batch_size=4), every="1step"),
        "every": "1step",  # so that those before the last are committed at any kill
        **FEATURES[feature](),
    }
    options["callbacks"] = [*options.get("callbacks", []), *callbacks]
    return make(root, model=network(), **options)


def run(feature: str, phase: Phase, root: str, steps: int, report: Report) -> None:
    be_a_script()
    made(feature, Path(root), KilledIn(report, phase)).fit(steps)


@pytest.mark.full
@pytest.mark.parametrize("phase", get_args(Phase))
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_with_a_state_resumes_bit_for_bit_from_a_kill_in_any_phase(
    feature: str, phase: Phase
) -> None:
    """Invariant 7."""
    run_of_feature = partial(run, feature, phase)
    assert_resume_equivalent(
        run_of_feature, STEPS, KILL_AT, timeout_s=120.0, start_method="forkserver"
    )


def live(feature: str, root: Path, _: forks.Say) -> dict[str, str]:
    """Train to the end; a run that was killed goes on."""
    seed_generators(0)
    trainer = made(feature, root)
    trainer.fit(GOAL)
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return leaf_digests({**trainer.state, "generators": generators})


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_is_killed_ten_times_at_any_moment_ends_with_the_same_bits(
    feature: str, tmp_path: Path
) -> None:
    """Invariant 7, by SIGKILL at any call of a function."""
    job = partial(live, feature)
    forks.assert_kills_change_nothing(job, tmp_path, kills=10, seed=1, at_calls=True)
