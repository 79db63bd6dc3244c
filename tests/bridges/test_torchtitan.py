"""The bridge from torchtitan, on its real containers; runs only where torchtitan is installed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from bridges import forks
from bridges.frameworks import needed
from holdfast.errors import UsageError

needed("torchtitan")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer  # noqa: E402

from holdfast.bridges import torchtitan as bridge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
STEPS = 30


class Train:
    """What torchtitan's Trainer keeps of itself, and its loop around the manager."""

    def __init__(self, folder: Path, /, **settings: Any) -> None:
        torch.manual_seed(1)
        self.step = self.tokens = 0
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizers = default_adamw(lr=1e-2).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.data = holdfast.data.Loader(torch.randn(42, 4), batch_size=4)
        given = {"enable": True, "interval": 4, "keep_latest_k": 2, **settings}
        self.checkpointer = bridge.HoldfastManager.Config(**given).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["ntokens_seen"]

    def train(self, say: forks.Say = print, *, stop_at: int = 0) -> dict[str, Any]:
        self.checkpointer.load(step=-1)
        for batch in self.data.until(STEPS, start=self.step):
            self.step += 1
            say()
            self.model(batch).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            if self.step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
            say()
        self.checkpointer.close()
        rates = self.schedulers.get_metrics()
        return {"weights": dict(self.model.state_dict()), "rates": rates, "step": self.step}


def job(root: Path, say: forks.Say) -> dict[str, Any]:
    return Train(root).train(say)


@pytest.mark.parametrize(
    "kills",
    [5, pytest.param(20, marks=pytest.mark.long)],
)
def test_kills_at_random_moments_change_nothing(kills: int, tmp_path: Path) -> None:
    """Invariant 7, R1."""
    forks.assert_kills_change_nothing(job, tmp_path, kills=kills, seed=kills)


def test_a_signal_saves_and_asks_to_be_run_again(tmp_path: Path) -> None:
    def preempted(root: Path, say: forks.Say) -> dict[str, Any]:
        return Train(root).train(say, stop_at=6)

    assert forks.finish(preempted, tmp_path / "run") == 75
    assert forks.finish(job, tmp_path / "run") == forks.finish(job, tmp_path / "whole") == 0
    run, whole = (forks.result(tmp_path / name)["found"] for name in ("run", "whole"))
    forks.assert_equal(run, whole)


def test_what_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude_from_loading: a resume loads the whole"):
        Train(tmp_path, exclude_from_loading=["dataloader"])


def test_methods_that_are_not_called_any_more_are_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge.BaseCheckpointManager, "__abstractmethods__", frozenset({"_load"}))
    with pytest.raises(UsageError, match=r"does not call _close, .*_save.* tested with 0\.3\.0"):
        Train(tmp_path)


def test_a_manager_that_only_loads_claims_nothing(tmp_path: Path) -> None:
    first = Train(tmp_path)
    first.step = 3
    first.checkpointer.save(3, last_step=True)
    # One Stop is active at a time in a process.
    first.checkpointer._closing.pop_all()
    first.checkpointer._stop.__exit__(None, None, None)
    second = Train(tmp_path, load_only=True)
    assert second.checkpointer.load()
    assert second.step == 3
    assert not second.checkpointer.save(4, last_step=True)
    second.checkpointer.close()
    assert first.checkpointer.manager.is_owner
    first.checkpointer.manager.save(5, wait=True)
    first.checkpointer.manager.close()
    empty = Train(tmp_path / "empty", load_only=True)
    assert not empty.checkpointer.load()
    empty.checkpointer.close()


def test_the_error_of_a_training_comes_out_where_closing_fails(tmp_path: Path) -> None:
    def fail(root: Path, say: forks.Say) -> dict[str, Any]:
        one = Train(root)
        try:
            try:
                one.checkpointer.save(4)
                one.checkpointer.manager.wait()
                root.joinpath("checkpoint").rename(root / "gone")
                root.joinpath("checkpoint").write_text("no folder")
                one.checkpointer.save(8)
                raise RuntimeError("of the training")
            finally:
                one.checkpointer.close()
        except RuntimeError as error:
            return {"error": str(error)}

    assert forks.finish(fail, tmp_path) == 0
    assert forks.result(tmp_path)["found"] == {"error": "of the training"}


def test_tokens_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Another trainer's count of them goes on."""
    one = Train(tmp_path)
    one.tokens = 700
    one.checkpointer.save(1, last_step=True)
    one.checkpointer.close()
    state = {"model": one.model, "optimizer": next(iter(one.optimizers)), "data": one.data}
    hooks = holdfast.StateHooks(one_sided=lambda name: name in ("trainer", "scheduler"))
    with holdfast.CheckpointManager(tmp_path / "checkpoint", state, hooks=hooks) as manager:
        found = manager.resume()
        assert found is not None
        assert found.timestamp.tokens == 700
        state["scheduler"] = next(iter(one.schedulers))
    with holdfast.CheckpointManager(tmp_path / "checkpoint", state, hooks=hooks) as manager:
        manager.resume()
        manager.save(2, tokens=900, wait=True)
    again = Train(tmp_path)
    again.checkpointer.load()
    again.checkpointer.close()
    assert (again.step, again.tokens) == (2, 900)


def test_a_manager_that_is_off_does_nothing(tmp_path: Path) -> None:
    one = Train(tmp_path, enable=False)
    assert one.train()["step"] == STEPS
    assert not list(tmp_path.iterdir())


def test_data_of_torchtitan_goes_on_where_it_was(tmp_path: Path) -> None:
    from torchtitan.components.dataloader import ParallelAwareDataloader

    class Rows(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from ({"at": torch.tensor(number)} for number in range(100))

    def start() -> tuple[Train, Any]:
        one = Train(tmp_path, enable=False)
        data = ParallelAwareDataloader(Rows(), dp_rank=0, dp_world_size=1, batch_size=2)
        one.checkpointer = bridge.HoldfastManager.Config(enable=True).build(
            dataloader=data,
            model_parts=[one.model],
            optimizers=one.optimizers,
            lr_schedulers=one.schedulers,
            states={"train_state": one},
            base_folder=str(tmp_path),
        )
        return one, data

    first, data = start()
    batches = iter(data)
    taken = [next(batches)["at"].tolist() for _ in range(3)]
    first.checkpointer.save(1, last_step=True)
    first.checkpointer.close()
    second, data = start()
    assert second.checkpointer.load()
    assert [*taken, next(iter(data))["at"].tolist()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    second.checkpointer.close()


def test_a_url_as_folder_is_no_path_below_the_dump_folder(tmp_path: Path) -> None:
    one = Train(tmp_path, folder="memory://titan")
    assert one.checkpointer.manager.store.url == "memory://titan"
    one.checkpointer.close()
