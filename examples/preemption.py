"""A job that is told to go, saves, asks for being run again, and ends with the same bits.

Schedulers send a signal some time before they kill: SIGTERM, or SIGUSR1 with Slurm's `--signal`.
`holdfast.Stop` notes it; the loop saves at the end of its step, leaves, and the program ends with
status 75, upon which this file, in the role of the scheduler, starts the job again.

    python examples/preemption.py
"""

from __future__ import annotations

import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import holdfast

STEPS = 600
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h


def make_model() -> nn.Module:
    """Guesses the next byte from the 16 before it."""
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.Dropout(0.1),
        nn.Linear(128, 256),
    )


def job(root: str) -> None:
    """The training script. It does not know how often it was started before."""
    torch.set_num_threads(1)  # enough for a model of this size
    torch.manual_seed(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:400_000]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 17, 8).long()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = holdfast.data.Loader(TensorDataset(windows), batch_size=32, seed=0)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with (
        holdfast.Stop(grace="60s") as stop,
        holdfast.CheckpointManager(
            root, state, every="10min", keep=holdfast.Last(2), stop=stop
        ) as checkpoints,
    ):
        found = checkpoints.resume()
        step = found.step if found else 0
        print(f"begins at step {step}", flush=True)
        for (batch,) in data.until(step=STEPS, start=step):
            cross_entropy(model(batch[:, :-1]), batch[:, -1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"did step {step}", flush=True)
            checkpoints.maybe_save(step)  # saves when it is time, and when a signal has come
            if stop.requested:
                break
        # Also after a signal, which may have come when maybe_save was done; a step that is saved
        # already is not saved again.
        checkpoints.save(step, wait=True)


def run(root: Path, preempt: signal.Signals | None = None) -> int:
    """Start the job; preempt it after about a hundred steps. Gives its exit status."""
    command = [sys.executable, __file__, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout):
            if number == 0:
                print(f"{root.name}: {line.strip()}")
            if number == 100 and preempt is not None:
                process.send_signal(preempt)
    name = preempt.name if preempt else "nothing"
    print(f"{root.name}: {name} was sent, the status is {process.returncode}")
    return process.returncode


def main() -> None:
    """Run one job undisturbed; preempt the other one twice, and start it again each time."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, preempted = Path(folder, "undisturbed"), Path(folder, "preempted")
        assert run(undisturbed) == 0
        assert run(preempted, signal.SIGTERM) == REQUEUE
        assert run(preempted, signal.SIGUSR1) == REQUEUE
        assert run(preempted) == 0
        expected, got = make_model(), make_model()
        holdfast.load_weights(undisturbed, expected)
        assert holdfast.load_weights(preempted, got).step == STEPS
    pairs = zip(expected.parameters(), got.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    print("the job that was preempted twice ends with the same bits")


if __name__ == "__main__":
    job(sys.argv[1]) if len(sys.argv) > 1 else main()
