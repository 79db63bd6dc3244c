"""A Trainer goes on bit for bit, whatever decides its samples and batches."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from data.sources import Shards, Stateless
from holdfast.data import Buckets, Loader, Mixture, Stream, Weighted
from holdfast.testing.resume import Report, assert_resume_equivalent, leaf_digests
from holdfast.train import Counts, Limits, Validation
from marks import full
from runs import be_a_script
from train.small import Noisy, make, network
from train.test_resume import KilledIn, Phase

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

STEPS = 13

DATA: dict[str, Callable[[], Any]] = {
    "weighted": lambda: Loader(Noisy(), batch_size=2, sampler=Weighted(range(10))),
    "sampler": lambda: Loader(Noisy(), batch_size=3, sampler=RandomSampler(Noisy())),
    "buckets": lambda: Loader(Noisy(), batch_sampler=Buckets(range(10), max_tokens=20)),
    "sizes": lambda: Loader(Noisy(), batch_size={0: 2, 1: 3, 2: 5}),
    "computed": lambda: Loader(Noisy(), batch_size=2, shuffle="computed"),
    "mixture": lambda: Loader(Mixture([(Noisy(), 1), (Noisy(), 2)]), batch_size=3),
    "stream": lambda: Stream(Shards(), batch_size=3),
    "stream-shuffled": lambda: Stream(Shards(), batch_size=3, shuffle=6),
    "stream-replayed": lambda: Stream(Stateless(), batch_size=3, resume="replay"),
    "stream-workers": lambda: Stream(Shards(), batch_size=3, num_workers=2),
}


def trainer(root: Path, data: Any, **options: Any) -> Any:
    return make(root, data=data, loss=mean_square, every="1step", **options)


def mean_square(model: torch.nn.Module, batch: Tensor) -> Tensor:
    return model(batch.float()).square().mean()


@pytest.mark.parametrize("kind", ["buckets", *full(*sorted({*DATA} - {"buckets"}))])
def test_a_run_that_ended_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Invariant 7: within epochs, at their ends, and in the third one."""
    straight = trainer(tmp_path / "straight", DATA[kind]())
    straight.fit(STEPS)
    for steps in (2, 5, 6, 11, STEPS):
        parts = trainer(tmp_path / "parts", DATA[kind]())
        parts.fit(steps)
    assert leaf_digests(parts.state) == leaf_digests(straight.state)
    assert parts.data.epoch >= 1


def run(kind: str, phase: Phase, root: str, steps: int, report: Report) -> None:
    be_a_script()
    trainer(
        Path(root),
        DATA[kind](),
        model=network(),
        validate=Validation(data=Loader(Noisy(), batch_size=4), every="1step"),
        callbacks=[KilledIn(report, phase)],
    ).fit(steps)


def check(kind: str, phase: Phase) -> None:
    assert_resume_equivalent(
        partial(run, kind, phase), 8, 5, timeout_s=120.0, start_method="forkserver"
    )


@pytest.mark.parametrize(("kind", "phase"), [("stream-workers", "validation"), ("buckets", "save")])
def test_a_killed_run_goes_on_bit_for_bit(kind: str, phase: Phase) -> None:
    """Invariant 7."""
    check(kind, phase)


@pytest.mark.long
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("phase", ["train", "validation", "save"])
def test_the_product_of_data_and_phases(kind: str, phase: Phase) -> None:
    """Invariant 7."""
    check(kind, phase)


class Interrupting(Shards):
    """Sends the signal to stop once, in the middle of a fetch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def __iter__(self) -> Iterator[Tensor]:
        for sample in super().__iter__():
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGTERM)
            yield sample


@pytest.mark.parametrize("at", [8, *full(1, 20, 24)])
def test_a_stop_in_a_fetch_of_a_stream_goes_on_bit_for_bit(tmp_path: Path, at: int) -> None:
    """Invariant 7: also in one ahead of what the loop has taken, and in the second epoch."""
    straight = trainer(tmp_path / "straight", Stream(Interrupting(0), batch_size=3, shuffle=6))
    straight.fit(STEPS)
    data = Stream(Interrupting(at), batch_size=3, shuffle=6)
    first = trainer(tmp_path / "parts", data)
    with pytest.raises(SystemExit):
        first.fit(STEPS)
    again = trainer(tmp_path / "parts", Stream(Interrupting(0), batch_size=3, shuffle=6))
    again.fit(STEPS)
    assert leaf_digests(again.state) == leaf_digests(straight.state)


class Skipping:
    """Skips the batches of torch's DataLoader that were taken before a resume."""

    def __init__(self, **options: Any) -> None:
        self.num_taken = 0
        self.loader = DataLoader(range(12), **{"batch_size": 4, **options})  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return self._rest(iter(self.loader))  # workers draw the order here

    def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number >= self.num_taken:
                self.num_taken += 1
                yield batch.unsqueeze(1).expand(-1, 4)
        self.num_taken = 0

    def state_dict(self) -> Any:
        return {"num_taken": self.num_taken}

    def load_state_dict(self, state: Any) -> None:
        self.num_taken = state["num_taken"]


def test_epochs_differ_that_workers_draw_as_an_iteration_starts(tmp_path: Path) -> None:
    """Invariant 7, within epochs, too."""
    taken: list[list[int]] = []

    def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
        taken.append(batch[:, 0].tolist())
        return model(batch.float()).square().mean()

    options: Any = {"loss": loss, "every": "1step"}
    data = {"shuffle": True, "num_workers": 1}
    make(tmp_path / "straight", data=Skipping(**data), **options).fit(9)
    straight, taken[:] = [*taken], []
    for steps in (2, 4, 9):
        make(tmp_path / "parts", data=Skipping(**data), **options).fit(steps)
    assert taken == straight
    assert len({str(straight[start : start + 3]) for start in (0, 3, 6)}) == 3


def in_parts(**options: Any) -> DistributedSampler[int]:
    return DistributedSampler(range(12), 1, 0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "limits", "is_named"),
    [
        ({"sampler": in_parts()}, Limits(), True),
        (
            {"sampler": in_parts(), "num_workers": 1},
            Limits(),
            True,
        ),
        (
            {"sampler": in_parts(), "batch_size": 12},
            Limits(),
            False,
        ),
        ({"sampler": in_parts()}, Limits(overfit=2), False),
        (
            {"sampler": in_parts(shuffle=False)},
            Limits(),
            False,
        ),
        ({"shuffle": True}, Limits(), False),
        ({"shuffle": False}, Limits(), False),
    ],
)
def test_data_whose_epoch_nobody_sets_is_named_once(
    options: Any,
    limits: Limits,
    is_named: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer(tmp_path, Skipping(**options), limits=limits).fit("4ep")
    assert caplog.text.count("begin with the same batch") == is_named


class Sample:
    """A batch of a class of its own, as of a library for graphs."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


def test_epochs_of_batches_without_plain_content_are_not_called_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The data sets the epoch of its sampler; it has a lock, so that no copy of it is read."""

    class Locked(Skipping):
        def __init__(self) -> None:
            self.sampler = in_parts()
            super().__init__(sampler=self.sampler)
            self.lock = threading.Lock()
            self.epoch = 0

        def __iter__(self) -> Iterator[Any]:
            self.sampler.set_epoch(self.epoch)
            self.epoch += 1
            return super().__iter__()

        def _rest(self, batches: Iterator[Any]) -> Iterator[Any]:
            yield from map(Sample, super()._rest(batches))

    make(
        tmp_path,
        data=Locked(),
        loss=lambda model, batch: mean_square(model, batch.values),
        counts=Counts(samples=lambda batch: len(batch.values)),
    ).fit("3ep")
    assert "begin with the same batch" not in caplog.text


class Graphs:
    """Adjacency matrices, which are sparse."""

    def __init__(self) -> None:
        self.num_taken = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Tensor]:
        while self.num_taken < 3:
            self.num_taken += 1
            yield (torch.eye(4) * self.num_taken).to_sparse()
        self.num_taken = 0

    def state_dict(self) -> Any:
        return {"num_taken": self.num_taken}

    def load_state_dict(self, state: Any) -> None:
        self.num_taken = state["num_taken"]


def test_a_trainer_takes_sparse_batches(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch.to_dense())

    assert make(tmp_path, data=Graphs(), loss=loss).fit("3ep").step == 9
