"""The training process of the demo: `python -m holdfast.demo.worker ROOT PLAN NUM_WORKERS`.

A plain loop with a CheckpointManager, as a user would write it. Reports are written to standard
output, one JSON object a line, each in one write, so that a kill never splits a line.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import blake3
import msgspec
import numpy as np
import torch
from torch import Tensor

import holdfast
from holdfast.demo.model import GPT, Windows, standard_library_text
from holdfast.demo.record import DemoPlan
from holdfast.events import Event


def main(arguments: list[str]) -> None:
    """Train in ROOT from its newest checkpoint to the end of the plan."""
    root, plan, num_workers = arguments
    train(root, msgspec.json.decode(plan, type=DemoPlan), num_workers=int(num_workers))


def train(root: str, plan: DemoPlan, *, num_workers: int) -> None:
    """Resume or begin, train to the last step, save it, and report the digest of the state."""
    torch.set_num_threads(plan.num_threads)
    state = make_state(plan, num_workers=num_workers)
    with holdfast.CheckpointManager(
        root,
        state,
        every=f"{plan.save_every}step",
        keep=holdfast.Last(plan.keep_last),
        sinks=(_report_event,),
    ) as manager:
        resumed = manager.resume()
        step = resumed.step if resumed else 0
        rejected = [list(pair) for pair in resumed.rejected] if resumed else []
        _report("begins", step=step, rejected=rejected)
        model, optimizer, scheduler, data = state.values()
        for windows in data.until(step=plan.num_steps, start=step):
            loss = model.loss(windows)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            _report("step", step=step, loss=loss.item())
            _save_if_due(manager, step)
        manager.save(step, tags=["final"]).wait()
    _report("ends", step=step, digest=digest(state))


def make_state(plan: DemoPlan, *, num_workers: int = 0) -> dict[str, Any]:
    """Make model, optimizer, scheduler and data as they are at step 0."""
    random.seed(plan.seed)
    np.random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    model = GPT(plan.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.peak_lr, weight_decay=0.1)

    def factor(step: int) -> float:
        warmup = min(1.0, (step + 1) / plan.warmup_steps)
        return warmup * 0.5 * (1.0 + math.cos(math.pi * step / plan.num_steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    text = standard_library_text(plan.text_nbytes)
    data = holdfast.data.Loader(
        Windows(text, plan.shape.context),
        batch_size=plan.batch_size,
        seed=plan.seed,
        num_workers=num_workers,
    )
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}


def digest(state: Mapping[str, Any]) -> str:
    """Hash every leaf of the state and the generators with BLAKE3, in order of their names.

    Does not use Holdfast's code to read the state, so that an error there would show.
    """
    members = {name: component.state_dict() for name, component in state.items()}
    generators = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    leaves = dict(_leaves({**members, "rng": generators}, "state"))
    hasher = blake3.blake3()
    for name in sorted(leaves):
        for part in (name.encode(), leaves[name]):
            hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.hexdigest()


def _leaves(value: Any, name: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaves(member, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            yield from _leaves(member, f"{name}.{index}")
    elif isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().numpy()
        yield name, f"{array.dtype}{array.shape}".encode() + array.tobytes()
    elif isinstance(value, np.ndarray):
        yield name, f"{value.dtype}{value.shape}".encode() + value.tobytes()
    else:
        yield name, repr(value).encode()


def _save_if_due(manager: holdfast.CheckpointManager, step: int) -> None:
    before = time.perf_counter()
    if manager.maybe_save(step) is not None:
        _report("stalled", step=step, stall_s=time.perf_counter() - before)


def _report_event(event: Event) -> None:
    if event.kind in ("save_started", "committed", "rejected", "save_failed"):
        _report(event.kind, step=event.step, nbytes=event.fields.get("nbytes"))


def _report(kind: str, **members: Any) -> None:
    line = json.dumps({"kind": kind, "at_s": time.monotonic(), **members})
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
