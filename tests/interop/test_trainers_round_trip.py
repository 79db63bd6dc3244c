"""Checkpoints of Lightning and of transformers, brought in and taken out: their trainers go on.

Both libraries are in the extra `bench`; without them these tests are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from holdfast.interop import export_checkpoint, import_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


def bits(model: torch.nn.Module) -> list[bytes]:
    return [one.detach().numpy().tobytes() for one in model.state_dict().values()]


def test_lightning_goes_on_from_an_export_as_from_its_own_file(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(0)
    batches = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2)

    def fit(epochs: int, path: Path | None) -> Any:
        torch.manual_seed(1)
        quiet = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, **quiet
        )
        trainer.fit(Model(), batches, ckpt_path=path)
        return trainer

    fit(2, None).save_checkpoint(tmp_path / "own.ckpt")
    made = import_checkpoint(tmp_path / "own.ckpt", tmp_path / "run")
    assert (made.step, made.notes) == (8, ())
    export_checkpoint(tmp_path / "run", tmp_path / "ours.ckpt", to="lightning")
    own, ours = (fit(4, tmp_path / name) for name in ("own.ckpt", "ours.ckpt"))
    assert (ours.global_step, ours.current_epoch) == (16, 4)
    assert bits(ours.model) == bits(own.model)
    keys = [
        torch.load(tmp_path / name, weights_only=True).keys() for name in ("own.ckpt", "ours.ckpt")
    ]
    assert {*keys[0]} == {*keys[1]}


class Tokens(Dataset[Any]):
    """Sixteen sequences, the same in each process."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> Any:
        tokens = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def test_a_trainer_goes_on_from_an_export_and_a_model_gives_the_same_logits(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=16)

    def train(out: str, path: Path | None) -> Any:
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / out),
            max_steps=6,
            per_device_train_batch_size=4,
            save_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model = transformers.GPT2LMHeadModel(config)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=None if path is None else str(path))
        return trainer

    whole = train("a", None)
    own = tmp_path / "a" / "checkpoint-3"
    names = [name for name, _ in whole.model.named_parameters()]
    made = import_checkpoint(own, tmp_path / "run", parameters=names)
    assert made.step == 3
    assert not [note for note in made.notes if note.startswith("optimizer")]
    out = tmp_path / "checkpoint-3"
    export_checkpoint(tmp_path / "run", out, to="hf-trainer", config=own)
    assert bits(train("b", out).model) == bits(whole.model)
    hf = tmp_path / "hf"
    export_checkpoint(tmp_path / "run", hf, to="hf", config=own, shard_nbytes=2000)
    given, read = (
        transformers.AutoModelForCausalLM.from_pretrained(path).eval() for path in (own, hf)
    )
    tokens = torch.arange(5)[None]
    assert torch.equal(given(tokens).logits, read(tokens).logits)
    assert (hf / "model.safetensors.index.json").exists()
