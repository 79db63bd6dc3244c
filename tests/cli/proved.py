"""A training that `prove` runs, in 60 steps and 6 saves: `python proved.py ROOT [FAULT]`.

FAULT is what is wrong with it, as the parameters of test_prove.py name it.
"""

from __future__ import annotations

import copy
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from holdfast.data import Loader
from holdfast.manager import CheckpointManager

STEPS = 60


def main(root: str, fault: str) -> None:
    torch.set_num_threads(1)
    if fault == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if fault != "unseeded":
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
    own = np.random.default_rng(None if fault == "unseeded of its own" else 0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    data = Loader(make_dataset(), batch_size=8, seed=0)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    state.pop(fault, None)
    if fault == "saves no weights":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        state = {"optimizer": optimizer, "data": data}
    with CheckpointManager(root, state, every="10step", keep="last:1") as manager:
        found = None
        if fault == "starts over":
            manager.start_new()
        elif fault != "never resumes":
            found = manager.resume()
        step = found.step if found else 0
        for inputs, targets in batches_of(data, step, fault):
            loss = nn.functional.mse_loss(model(inputs), targets)
            if fault == "teacher":
                loss = loss + (model(inputs) - teacher(inputs).detach()).square().mean()
            if fault == "unseeded of its own":
                loss = loss * (1 + float(own.random()))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            update(teacher, model)
            step += 1
            time.sleep(0.005)
            if fault == "fails when resumed" and found and step > found.step + 2:
                raise RuntimeError("planted")
            manager.maybe_save(step, metrics=metrics_of(loss, teacher, fault))
    if fault == "ignores SIGTERM":
        with CheckpointManager(root, state) as manager:
            manager.resume()
            manager.save(STEPS + 1, wait=True)


def make_dataset() -> TensorDataset:
    inputs = torch.linspace(-1, 1, 1024).reshape(256, 4)
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def batches_of(data: Loader, step: int, fault: str) -> Iterator[Any]:
    if fault == "data":
        endless = (batch for _ in range(STEPS) for batch in DataLoader(make_dataset(), 8))
        return islice(endless, STEPS - step)
    ahead = 3 if fault == "prefetcher" else 0
    return prefetch(data.until(step=STEPS + ahead, start=step), ahead, STEPS - step)


def prefetch(batches: Iterable[Any], ahead: int, num: int) -> Iterator[Any]:
    held = []
    for batch in batches:
        held.append(batch)
        if len(held) > ahead and num > 0:
            num -= 1
            yield held.pop(0)


def update(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.05)


def metrics_of(loss: torch.Tensor, average: nn.Module, fault: str) -> dict[str, float]:
    if fault == "saves no weights":
        return {}
    found = {"loss": float(loss), "samples_a_second": time.perf_counter()}
    if fault == "average":
        found["average"] = sum(float(p.detach().sum()) for p in average.parameters())
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
