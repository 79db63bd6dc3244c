"""Two savers on one run: the whole state for the next crash, the weights alone for later.

Of the whole state only the newest two are kept; it is large, and only a resume needs it. The
weights are saved more often and kept much longer, for evaluation or an average of them. Where both
are due at one step, one checkpoint serves both, and loses its optimizer when only the weights of it
are still wanted.

    python examples/several_savers.py
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import holdfast

STEPS = 400


def standard_library() -> TensorDataset:
    """Real text: the source of Python's standard library, in windows of 17 bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:400_000]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 17, 8)
    return TensorDataset(windows.long())


def make_model() -> nn.Module:
    """Guesses the next byte from the 16 before it."""
    return nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 256)
    )


def train(root: Path) -> tuple[holdfast.Checkpoint, ...]:
    """Train to the end; gives the checkpoints that are left, newest first."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = holdfast.data.Loader(standard_library(), batch_size=64)
    weights = holdfast.SideSaver(
        "weights",
        every="40step",
        components=["model"],
        keep=holdfast.Last(8).then_drop("optimizer"),  # where it is there, for the other saver
    )
    with holdfast.CheckpointManager(
        root,
        {"model": model, "optimizer": optimizer, "data": data},
        every="100step",
        keep=holdfast.Last(2),
        savers=[weights],
    ) as checkpoints:
        found = checkpoints.resume()
        step = found.step if found else 0
        for (windows,) in data.until(step=STEPS, start=step):
            cross_entropy(model(windows[:, :-1]), windows[:, -1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpoints.maybe_save(step)
        checkpoints.wait()
        return checkpoints.list()


def main() -> None:
    """Train, say what is left, and average the weights along the way."""
    torch.set_num_threads(1)  # enough for a model of this size
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "run")
        left = train(root)
        for checkpoint in left:
            by, size = " and ".join(checkpoint.savers), checkpoint.nbytes / 1e3
            print(f"step {checkpoint.step}: by {by}, {size:.0f} kB")
        smallest = min(checkpoint.nbytes for checkpoint in left)
        whole = [checkpoint.step for checkpoint in left if checkpoint.nbytes > 2 * smallest]
        assert whole == [400, 300]
        assert len(left) >= 8

        # Reading claims nothing: this could run beside the training, on another machine.
        average, one = make_model(), make_model()
        for number, checkpoint in enumerate(left[:4], start=1):
            holdfast.load_weights(root / checkpoint.folder, one)
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), one.parameters(), strict=True):
                    mean.lerp_(weight, 1 / number)
    windows = standard_library().tensors[0][:5000]
    loss = cross_entropy(average(windows[:, :-1]), windows[:, -1])
    print(f"the average of the newest four has a loss of {loss.item():.2f}")
    assert loss < 3
    print("weights of many steps are left, and the whole state of two")


if __name__ == "__main__":
    main()
