"""The bridge from Accelerate, on the real one: kills, windows, and what it refuses."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import holdfast
from bridges import forks
from bridges.frameworks import needed
from holdfast.errors import UsageError
from marks import full

accelerate = needed("accelerate")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks

from holdfast.bridges import accelerate as bridge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version


class Rows(Dataset[Any]):
    """Rows with noise that is drawn anew each time."""

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 10) + torch.rand(4)


class Sum:
    """A user's own object: sums up losses."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class Run:
    """All that a script with Accelerate has."""

    def __init__(self, **options: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        torch.manual_seed(1)
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.sum, self.loader = Sum(), holdfast.data.Loader(Rows(), batch_size=4, seed=3)
        self.accelerator.register_for_checkpointing(self.sum)

    def train(self, root: Path, steps: int, say: forks.Say = print) -> dict[str, Any]:
        window = self.accelerator.gradient_accumulation_steps
        state = bridge.state(self.accelerator, data=self.loader)
        with holdfast.CheckpointManager(root, state, every="3step", sinks=[say]) as manager:
            found = manager.resume()
            step = found.step if found else 0
            for batch in self.loader.until(steps, start=step, batches_per_step=window):
                say()
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.sum.total += loss.item()
                if self.accelerator.sync_gradients:
                    step += 1
                    manager.maybe_save(step)
                say()
            manager.save(step, wait=True)
        return {
            "weights": dict(self.accelerator.unwrap_model(self.model).state_dict()),
            "rates": self.scheduler.get_last_lr(),
            "sum": self.sum.total,
            "generator": torch.get_rng_state(),
        }


def job(root: Path, say: forks.Say) -> dict[str, Any]:
    return Run(gradient_accumulation_steps=2).train(root, 30, say)


@pytest.mark.parametrize(
    "kills",
    [pytest.param(5, marks=pytest.mark.full), pytest.param(20, marks=pytest.mark.long)],
)
def test_kills_at_random_moments_change_nothing(kills: int, tmp_path: Path) -> None:
    """Invariant 7, R1: windows of gradient accumulation cross the ends of epochs, too."""
    forks.assert_kills_change_nothing(job, tmp_path, kills=kills, seed=kills)


def test_the_components_have_the_names_of_all_bridges() -> None:
    run = Run()
    found = bridge.state(run.accelerator, data=run.loader, ema={})
    assert [*found] == ["model", "optimizer", "scheduler", "custom", "trainer", "data", "ema"]
    run.accelerator.prepare(nn.Linear(1, 1))
    assert {"model", "model1"} <= bridge.state(run.accelerator).keys()


def test_a_save_inside_of_a_window_is_refused(tmp_path: Path) -> None:
    run = Run(gradient_accumulation_steps=2)
    with holdfast.CheckpointManager(tmp_path, bridge.state(run.accelerator)) as manager:
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(run.model(torch.ones(1, 4)).sum())
        with pytest.raises(UsageError, match=r"if accelerator\.sync_gradients"):
            manager.save(1)


@pytest.mark.parametrize("windows", [(4, 3), (2, 5), (1, 2)], ids=str)
def test_windows_begin_anew_at_a_resume_whatever_their_size(
    windows: tuple[int, int], tmp_path: Path
) -> None:
    Run(gradient_accumulation_steps=windows[0]).train(tmp_path, 2)
    again = Run(gradient_accumulation_steps=windows[1])
    sizes, num_batches = [], 0
    optimizer_step = again.optimizer.step

    def step() -> None:
        nonlocal num_batches
        num_batches += 1
        optimizer_step()
        if again.accelerator.sync_gradients:
            sizes.append(num_batches)
            num_batches = 0

    again.optimizer.step = step
    again.train(tmp_path, 5)
    assert (sizes, num_batches) == ([windows[1]] * 3, 0)


def test_batches_that_are_skipped_by_a_loader_of_accelerates_own_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    state = bridge.state(run.accelerator, data=run.loader)
    with holdfast.CheckpointManager(tmp_path, state, every="2step") as manager:
        for step, _ in enumerate(accelerate.skip_first_batches(run.loader, 2), 1):
            manager.maybe_save(step)
    assert len([text for text in caplog.messages if "skip_first_batches" in text]) == 1


def test_what_is_prepared_after_the_components_are_taken_is_refused(tmp_path: Path) -> None:
    made = Run()
    components = bridge.state(made.accelerator)
    with holdfast.CheckpointManager(tmp_path, components) as manager:
        manager.save(1, wait=True)
        made.accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        with pytest.raises(UsageError, match="optimizers: prepared"):
            manager.save(2)


def test_nothing_prepared_a_taken_name_and_a_missing_one_are_refused() -> None:
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(UsageError, match=r"call state\(\) after prepare"):
        bridge.state(accelerator)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="model: the accelerator has"):
        bridge.state(accelerator, model=nn.Linear(1, 1))
    del accelerator._schedulers
    with pytest.raises(UsageError, match=r"no _schedulers; this bridge is tested with 1\.2"):
        bridge.state(accelerator)


def test_ways_of_running_with_other_optimizers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    kind = accelerate.utils.DistributedType.DEEPSPEED
    monkeypatch.setattr(type(run.accelerator), "distributed_type", kind)
    with pytest.raises(UsageError, match=r"distributed_type=DEEPSPEED.*holdfast import"):
        bridge.state(run.accelerator)


def test_what_another_trainer_counts_is_left_out_by_name(tmp_path: Path) -> None:
    class Theirs:
        def state_dict(self) -> dict[str, Any]:
            return {"of": "lightning", "epoch": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    run = Run()
    parts = bridge.state(run.accelerator, data=run.loader)
    with holdfast.CheckpointManager(tmp_path, {**parts, "trainer": Theirs()}) as manager:
        manager.save(3, wait=True)
    with holdfast.CheckpointManager(tmp_path, parts) as manager:
        found = manager.resume()
    assert found is not None
    assert any("trainer: saved by lightning" in note for note in found.notes)


def noted(root: Path, say: forks.Say, **options: Any) -> dict[str, Any]:
    run = Run(**options)
    state = bridge.state(run.accelerator, data=run.loader)
    with holdfast.CheckpointManager(root, state, sinks=[say]) as manager:
        found = manager.resume()
        manager.save(1 if found is None else 2, wait=True)
    return {"notes": [] if found is None else [*found.notes]}


@pytest.mark.parametrize("is_scaled", [True, *full(False)])
def test_schedulers_that_step_once_for_each_rank_are_warned_of_on_others(
    is_scaled: bool, tmp_path: Path
) -> None:
    job = partial(noted, step_scheduler_with_optimizer=is_scaled)
    for num_ranks in (2, 2, 1):
        assert forks.finish_ranks(job, tmp_path / "run", num_ranks) == [0] * num_ranks
        notes = forks.result(tmp_path / "run", 0)["found"]["notes"]
        is_noted = any("schedulers by 1, but by 2" in one for one in notes)
        assert is_noted is (is_scaled and num_ranks == 1)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "bridges" / "accelerate.md"


def test_the_page_shows_what_works(tmp_path: Path) -> None:
    def job(root: Path, say: forks.Say) -> dict[str, Any]:
        os.chdir(root.parent)
        return {"steps": [forks.run_page(PAGE)["step"], forks.run_page(PAGE)["found"].step]}

    assert forks.finish(job, tmp_path / "run") == 0
    assert forks.result(tmp_path / "run")["found"] == {"steps": [20, 20]}
