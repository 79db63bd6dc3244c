"""A training on several ranks that records which samples each step had.

Words: the root; `manager`, for a loop with a `CheckpointManager`, `hosts`, for the same with a disk
for each two ranks, or `trainer`; `ddp` or `fsdp2`; the number of steps; and the number of the first
life that this launch of the run has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from holdfast import CheckpointManager, Checkpoints, HostTiers, Last
from holdfast.data import Loader
from holdfast.train import Trainer, Validation

GLOBAL_BATCH = 24


def words() -> TensorDataset:
    """Numbers in base seven and the digit that follows each: 40 batches, fewer than steps."""
    numbers = torch.arange(40 * GLOBAL_BATCH).unsqueeze(1)
    digits = numbers // torch.tensor([[1, 7, 49, 343]]) % 7
    return TensorDataset(numbers, digits, digits.sum(1) % 7)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 20), nn.Flatten(), nn.Linear(80, 33), nn.Dropout(0.1), nn.Linear(33, 7)
    )


def recorder(root: Path, life: int) -> Callable[[int, Tensor], None]:
    """What appends the step and its samples to a file of this rank and life."""
    (root / "samples").mkdir(parents=True, exist_ok=True)
    path = root / "samples" / f"{life}-{os.environ['RANK']}-{os.environ['WORLD_SIZE']}"
    out = path.open("a")

    def record(step: int, samples: Tensor) -> None:
        out.write(f"{step} {' '.join(map(str, samples.flatten().tolist()))}\n")
        out.flush()

    return record


def tiers_of_hosts(root: Path) -> HostTiers:
    """Give each two ranks a disk of their own, with copies on the next one's."""
    host = root / f"host-{dist.get_rank() // 2}"
    return HostTiers(host, root / "remote", partner=True, keep_remote="last:2")


def train_by_hand(root: Path, strategy: str, num_steps: int, life: int) -> list[Tensor]:
    """Train with a manager; return the parameters, whole."""
    return _train(root, root, strategy, num_steps, life)


def train_on_hosts(root: Path, strategy: str, num_steps: int, life: int) -> list[Tensor]:
    """Train with a manager that saves to disks of hosts; return the parameters, whole."""
    return _train(tiers_of_hosts(root), root, strategy, num_steps, life)


def _train(
    checkpoints: Path | HostTiers, root: Path, strategy: str, num_steps: int, life: int
) -> list[Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    record = recorder(root, life)
    torch.manual_seed(0)  # the same first weights on every rank
    model = network()
    if strategy == "fsdp2":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)  # docs/ranks.md
    torch.manual_seed(1 + rank)  # dropout of its own on each
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Loader(words(), batch_size=GLOBAL_BATCH // world_size, shuffle=True)
    state = {"model": model, "optimizer": optimizer, "data": data}
    with CheckpointManager(checkpoints, state, every="10step", keep="last:2") as manager:
        found = manager.resume()
        step = found.step if found else 0
        while step < num_steps:
            for samples, inputs, targets in data:
                step += 1
                record(step, samples)
                loss = cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.maybe_save(step)
                if step == num_steps:
                    break
        manager.save(step, wait=True)
    return [whole(parameter) for parameter in model.parameters()]


def train_by_trainer(root: Path, strategy: str, num_steps: int, life: int) -> list[Tensor]:
    """Train with a Trainer; return the parameters, whole."""
    record = recorder(root, life)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        samples, inputs, targets = batch
        if model.training:
            record(trainer.present_step, samples)
        return cross_entropy(model(inputs), targets)

    trainer = Trainer(
        network,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        data=Loader(words(), batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])),
        loss=loss,
        validate=Validation(data=Loader(words(), batch_size=100), every="30step", batches=3),
        checkpoints=Checkpoints(root, every="10step", keep=Last(2)),
        strategy=strategy,
        accumulate=2,
        ema=0.9,
    )
    trainer.fit(f"{num_steps}step")
    return [whole(parameter) for parameter in trainer.model.parameters()]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


if __name__ == "__main__":
    place, way, kind, steps, number = sys.argv[1:]
    if way != "trainer":
        dist.init_process_group("gloo")
    train = {"manager": train_by_hand, "hosts": train_on_hosts, "trainer": train_by_trainer}[way]
    life = int(number) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    trained = train(Path(place), kind, int(steps), life)
    if os.environ["RANK"] == "0":
        torch.save(trained, Path(place) / "trained.pt")
    if way != "trainer":
        dist.destroy_process_group()
