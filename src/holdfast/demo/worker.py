"""The training process of the demo: `python -m holdfast.demo.worker ROOT PLAN NUM_WORKERS`.

It is what a user would write: a plain loop that holds a CheckpointManager. What happens goes to
standard output, a JSON object a line, each in one write, so that a kill never splits two lines.
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
import numpy as np
import torch
from torch import Tensor

import holdfast
from holdfast.demo.model import GPT
from holdfast.demo.plan import Plan
from holdfast.demo.text import Windows, standard_library_text
from holdfast.events import Event


def main(arguments: list[str]) -> None:
    """Train in ROOT from wherever it stands to the end of the plan."""
    root, plan, num_workers = arguments
    train(root, Plan.from_json(plan), num_workers=int(num_workers))


def train(root: str, plan: Plan, *, num_workers: int) -> None:
    """Resume or begin, train to the last step, save it, and tell the digest of the state."""
    torch.set_num_threads(plan.num_threads)
    state = make_state(plan, num_workers=num_workers)
    with holdfast.CheckpointManager(
        root,
        state,
        every=f"{plan.save_every}step",
        keep=holdfast.Last(plan.keep_last),
        sinks=(_tell_event,),
    ) as manager:
        found = manager.resume()
        step = found.step if found else 0
        _tell(
            "begins", step=step, rejected=[list(pair) for pair in found.rejected] if found else []
        )
        model, optimizer, scheduler, data = state.values()
        for windows in data.until(step=plan.num_steps, start=step):
            loss = model.loss(windows)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            _tell("step", step=step, loss=loss.item())
            _save_if_due(manager, step)
        manager.save(step, tags=["final"]).wait()
    _tell("ends", step=step, digest=digest(state))


def make_state(plan: Plan, *, num_workers: int = 0) -> dict[str, Any]:
    """Model, optimizer, scheduler and data as they are at step 0."""
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
    """BLAKE3 over every leaf of the state and the generators, in order of their names.

    It goes its own way to the state, not Holdfast's, so that the two can disagree.
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
        _tell("stalled", step=step, stall_s=time.perf_counter() - before)


def _tell_event(event: Event) -> None:
    if event.kind in ("save_started", "committed", "rejected", "save_failed"):
        _tell(event.kind, step=event.step, nbytes=event.fields.get("nbytes"))


def _tell(kind: str, **members: Any) -> None:
    line = json.dumps({"kind": kind, "at_s": time.monotonic(), **members})
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
