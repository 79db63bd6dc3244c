"""A Trainer that validates as it goes, and keeps the best checkpoint beside the newest ones.

The model is far too large for its few examples, so that the loss on held-out text falls, and then
rises again. What is wanted in the end is not the last checkpoint but the best one.

    python examples/trainer_best.py
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from holdfast import Best, Checkpoints, Last, load_weights
from holdfast.data import Loader
from holdfast.train import Trainer, Validation


def texts() -> tuple[TensorDataset, TensorDataset]:
    """Real text, once to learn from and once held out: windows of 17 bytes of source code."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:200_000]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 17, 17).long()
    return TensorDataset(windows[:3000]), TensorDataset(windows[-1000:])


def make_model() -> nn.Module:
    """Guesses the next byte from the 16 before it."""
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(16 * 32, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
    )


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and a metric beside it."""
    (windows,) = batch
    logits, following = model(windows[:, :-1]), windows[:, -1]
    hits = (logits.argmax(1) == following).float().mean()
    return cross_entropy(logits, following), {"accuracy": hits}


def main() -> None:
    """Train, and look at what is left."""
    torch.set_num_threads(1)  # enough for a model of this size
    learning, held_out = texts()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "run")
        trainer = Trainer(
            make_model,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=5e-4),
            data=Loader(learning, batch_size=50),
            loss=loss,
            checkpoints=Checkpoints(root, every="50step", keep=Last(2) | Best("val/loss", n=1)),
            # Validated before the save of the same step, so that the checkpoint has the result.
            validate=Validation(
                data=Loader(held_out, batch_size=500, shuffle=False), every="50step"
            ),
        )
        outcome = trainer.fit("10ep")
        print(f"{outcome.reason} reached at step {outcome.step}")

        # The log has every validation; of the checkpoints only the best and the newest are left.
        log = (root / "log" / "train.jsonl").read_text("utf-8")
        lines = [json.loads(line) for line in log.splitlines()]
        losses = {x["step"]: x["metrics"]["val/loss"] for x in lines if "val/loss" in x["metrics"]}
        best_step = min(losses, key=lambda step: losses[step])
        kept = {path.name for path in root.glob("step-*") if (path / "manifest.json").exists()}
        print(f"{len(losses)} validations, the best at step {best_step}: {losses[best_step]:.3f}")
        print(f"kept: {sorted(kept)}")

        model = make_model()
        checkpoint = load_weights(f"{root}@step={best_step}", model)
        again = trainer.validate(f"step={best_step}")

    assert best_step < outcome.step
    assert checkpoint.metrics["val/loss"] == again["val/loss"] == losses[best_step]
    print("the best checkpoint is still there, and gives the same loss again")


if __name__ == "__main__":
    main()
