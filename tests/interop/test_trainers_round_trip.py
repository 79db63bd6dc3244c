"""Import a Trainer folder of transformers and export its model; the logits are equal.

transformers is in the extra `bench`; without it the test is skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from holdfast.interop import export_checkpoint, import_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]


class Tokens(Dataset[Any]):
    """Sixteen sequences, the same in each process."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> Any:
        tokens = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def test_a_model_from_a_trainer_folder_gives_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=16)

    def train(out: str) -> Any:
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
        trainer.train()
        return trainer

    trained = train("a")
    own = tmp_path / "a" / "checkpoint-3"
    names = [name for name, _ in trained.model.named_parameters()]
    made = import_checkpoint(own, tmp_path / "run", parameters=names)
    assert made.step == 3
    assert not [note for note in made.notes if note.startswith("optimizer")]
    hf = tmp_path / "hf"
    export_checkpoint(tmp_path / "run", hf, to="hf", config=own, shard_nbytes=2000)
    given, read = (
        transformers.AutoModelForCausalLM.from_pretrained(path).eval() for path in (own, hf)
    )
    tokens = torch.arange(5)[None]
    assert torch.equal(given(tokens).logits, read(tokens).logits)
    assert (hf / "model.safetensors.index.json").exists()
