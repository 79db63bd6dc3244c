"""A training loop of your own that can be interrupted at any moment and started again.

Holdfast adds four things to the loop: a `Loader` that knows its position, the `state` to save, a
`CheckpointManager`, and a call of `maybe_save` after each step. To see that a resumed run is the
same run, this file trains twice, once in one go and once interrupted, and compares every bit.

    python examples/plain_loop.py
"""

from __future__ import annotations

import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import holdfast

STEPS = 500


def standard_library() -> TensorDataset:
    """Real text: the source of Python's standard library, in windows of 17 bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:400_000]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 17, 8)
    return TensorDataset(windows.long())


def train(root: Path, *, interrupt_at: int | None = None) -> nn.Module:
    """Learn to guess the next byte from the 16 before it, from wherever `root` stands."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(16 * 32, 128),
        nn.ReLU(),
        nn.Dropout(0.1),  # draws random numbers: a resume must go on with the right ones
        nn.Linear(128, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    data = holdfast.data.Loader(standard_library(), batch_size=64, seed=0)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    with holdfast.CheckpointManager(
        root, state, every="100step", keep=holdfast.Last(2)
    ) as checkpoints:
        found = checkpoints.resume()  # the newest intact checkpoint, applied; None in a new run
        step = found.step if found else 0
        print(f"{root.name}: begins at step {step}")
        for (windows,) in data.until(step=STEPS, start=step):
            loss = cross_entropy(model(windows[:, :-1]), windows[:, -1])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            checkpoints.maybe_save(step)  # every 100 steps, written in the background
            if step == interrupt_at:
                raise KeyboardInterrupt  # as Ctrl-C would
        checkpoints.save(step, metrics={"loss": loss.item()}, tags=["final"], wait=True)
    print(f"{root.name}: ends at step {step} with a loss of {loss.item():.2f}")
    return model


def main() -> None:
    """Train in one go, train with an interruption, and compare."""
    torch.set_num_threads(1)  # enough for a model of this size
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = train(Path(folder, "undisturbed"))
        with suppress(KeyboardInterrupt):
            train(Path(folder, "interrupted"), interrupt_at=250)
        resumed = train(Path(folder, "interrupted"))  # new objects; step 200 was saved last
    expected = undisturbed.state_dict()
    assert all(torch.equal(expected[name], got) for name, got in resumed.state_dict().items())
    print("both runs end with the same bits")


if __name__ == "__main__":
    main()
