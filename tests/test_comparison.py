"""What docs/comparison.md says of other libraries, tried on those that are installed here.

A claim that a newer version of a library makes untrue fails here, and then the page has to change.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.errors import CorruptData

pytestmark = pytest.mark.filterwarnings("ignore")  # of the other libraries, version by version
PAGE = Path(__file__).resolve().parent.parent / "docs" / "comparison.md"
Weights = dict[str, Tensor]


class Numbers(Dataset[Tensor]):
    """Rows of numbers; with `noise`, each is drawn anew, as augmentation is."""

    def __init__(self, noise: float = 0.0) -> None:
        self.rows = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + (self.noise * torch.randn(4) if self.noise else 0)


def network(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    return loss


def is_equal(some: Weights, others: Weights) -> bool:
    return all(torch.equal(some[name], others[name]) for name in some)


def flip(folder: Path, value: float) -> None:
    """Flip the lowest bit of a number in the one file of the folder that holds it."""
    wanted = torch.tensor(value).numpy().tobytes() * 4
    (path,) = (path for path in folder.rglob("*") if path.is_file() and wanted in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(wanted)] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def save_torch(state: Weights, folder: Path) -> Callable[[], Weights]:
    folder.mkdir()
    torch.save(state, folder / "model.pt")
    return lambda: torch.load(folder / "model.pt")


def save_safetensors(state: Weights, folder: Path) -> Callable[[], Weights]:
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return lambda: load_file(folder / "model.safetensors")


def save_dcp(state: Weights, folder: Path) -> Callable[[], Weights]:
    dcp.save(state, checkpoint_id=folder, no_dist=True)

    def load() -> Weights:
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        return found

    return load


def save_holdfast(state: Weights, folder: Path) -> Callable[[], Weights]:
    with holdfast.CheckpointManager(folder, {"model": state}, sinks=()) as manager:
        manager.save(1, wait=True)
    return lambda: holdfast.load_weights(folder)


@pytest.mark.full
@pytest.mark.parametrize("save", [save_torch, save_safetensors, save_dcp])
def test_a_flipped_bit_is_loaded(save: Any, tmp_path: Path) -> None:
    state = {"x": torch.full((64,), 1.5)}
    load = save(state, tmp_path / "saved")
    assert torch.equal(load()["x"], state["x"])
    flip(tmp_path / "saved", 1.5)
    assert not torch.equal(load()["x"], state["x"])


@pytest.mark.full
def test_a_flipped_bit_is_an_error_of_holdfast(tmp_path: Path) -> None:
    load = save_holdfast({"x": torch.full((64,), 1.5)}, tmp_path / "saved")
    flip(tmp_path / "saved", 1.5)
    with pytest.raises(CorruptData):
        load()


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.full
def test_dcp_runs_code_from_a_checkpoint(tmp_path: Path) -> None:
    load = save_dcp({"x": torch.zeros(4)}, tmp_path / "saved")
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    with contextlib.suppress(CheckpointException):
        load()
    assert (tmp_path / "ran").exists()


@pytest.mark.full
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_lightning_resumes_on_other_numbers(dropout: float, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network(dropout)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train(name: str, start_from: Path | None = None) -> Weights:
        lightning.seed_everything(0, verbose=False)
        saving = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / name, filename="{step}", every_n_train_steps=10, save_top_k=-1
        )
        trainer = lightning.Trainer(
            max_steps=20,
            accelerator="cpu",
            callbacks=[saving],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Module()
        data = DataLoader(Numbers(), batch_size=4, shuffle=True)
        trainer.fit(module, data, ckpt_path=start_from, weights_only=False)
        assert trainer.global_step == 20
        return dict(module.net.state_dict())

    undisturbed = train("undisturbed")
    again = train("again")
    resumed = train("resumed", tmp_path / "undisturbed" / "step=10.ckpt")
    assert is_equal(undisturbed, again), "the comparison itself"
    assert not is_equal(undisturbed, resumed)


class Rows(Dataset[dict[str, Tensor]]):
    """The same for the Trainer of transformers."""

    def __init__(self, noise: float) -> None:
        self.numbers = Numbers(noise)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.numbers[index]}


class WithLoss(nn.Module):
    """A model that gives its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net, x)}


def train_transformers(folder: Path, noise: float, start_from: Path | None = None) -> Weights:
    import transformers

    transformers.set_seed(0)
    trainer = transformers.Trainer(
        WithLoss(),
        transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=20,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            save_steps=10,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Rows(noise),
    )
    trainer.train(resume_from_checkpoint=None if start_from is None else str(start_from))
    assert trainer.state.global_step == 20
    return dict(trainer.model.state_dict())


@pytest.mark.full
@pytest.mark.parametrize(("noise", "same"), [(0.0, True), (0.1, False)])
def test_transformers_resumes_exactly_if_the_data_draws_nothing(
    noise: float, same: bool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    undisturbed = train_transformers(tmp_path / "undisturbed", noise)
    assert is_equal(undisturbed, train_transformers(tmp_path / "again", noise))
    start = tmp_path / "undisturbed" / "checkpoint-10"
    assert is_equal(undisturbed, train_transformers(tmp_path / "resumed", noise, start)) is same


def die_while_transformers_saves(folder: str) -> None:
    """Be killed between the weights and the optimizer of the second checkpoint."""
    import transformers

    save = transformers.Trainer._save_optimizer_and_scheduler

    def deadly(self: Any, output_dir: str) -> None:
        if output_dir.endswith("checkpoint-20"):
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, output_dir)

    transformers.Trainer._save_optimizer_and_scheduler = deadly
    train_transformers(Path(folder), 0.0)


@pytest.mark.full
def test_transformers_takes_a_half_written_checkpoint_for_the_last(tmp_path: Path) -> None:
    utils = pytest.importorskip("transformers.trainer_utils")
    code = "import sys; from test_comparison import die_while_transformers_saves as die; "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}die(sys.argv[1])", str(tmp_path / "run")],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    last = Path(utils.get_last_checkpoint(str(tmp_path / "run")))
    assert last.name == "checkpoint-20"
    assert not (last / "optimizer.pt").exists()


@pytest.mark.full
@pytest.mark.parametrize(("dropout", "same"), [(0.0, True), (0.2, False)])
def test_accelerate_resumes_exactly_if_nothing_draws_numbers(
    dropout: float, same: bool, tmp_path: Path
) -> None:
    """As its documents say: `load_state`, then `skip_first_batches`."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    def train(start_from: Path | None = None) -> Weights:
        set_seed(0)
        options = DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        model = network(dropout)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = DataLoader(Numbers(), batch_size=4, shuffle=True)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        step = 0
        if start_from is not None:
            accelerator.load_state(str(start_from))
            step = 10
        for epoch in range(2):
            if step >= 15 * (epoch + 1):
                continue
            data.set_epoch(epoch)
            left = accelerator.skip_first_batches(data, step - 15 * epoch)
            for batch in left:
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == 10 and start_from is None:
                    accelerator.save_state(str(tmp_path / "saved"))
                if step == 20:
                    return dict(accelerator.unwrap_model(model).state_dict())
        raise AssertionError("unreachable")

    undisturbed = train()
    assert is_equal(undisturbed, train())
    assert is_equal(undisturbed, train(tmp_path / "saved")) is same


def test_each_test_that_the_page_names_exists() -> None:
    named = re.findall(r"-k (\w+)", PAGE.read_text("utf-8"))
    here = [name for name in globals() if name.startswith("test_")]
    assert named
    assert [name for name in named if not any(name in one for one in here)] == []


def test_each_time_on_the_page_is_one_of_those_that_were_measured() -> None:
    measured = (PAGE.parent / "performance.md").read_text("utf-8")
    rows = re.findall(
        r"^\|.*`(?:python -m bench|make gpu).*$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    times = {time for row in rows for time in re.findall(r"([\d.]+) (?:s|ms|µs)\b", row)}
    assert len(times) > 20
    assert sorted(time for time in times if time not in measured) == []
