"""What a run through a flaky network claims, beside what the server really holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import AlreadyExists, CommitConflict, HoldfastError, OutcomeUnknown
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store

KEPT = 4


def new_state(num_elements: int) -> dict[str, Any]:
    """A state whose tensors all hold the step at which it was saved."""
    tensors = [torch.zeros(num_elements // 4) for _ in range(4)]
    return {"tree": {"step": 0, "tensors": tensors}}


def advance(state: dict[str, Any], step: int) -> None:
    """Make it the state of that step, in place."""
    state["tree"]["step"] = step
    for tensor in state["tree"]["tensors"]:
        tensor.fill_(step)


def step_of(state: dict[str, Any]) -> int:
    """The step of a loaded state; fails when parts are of different steps."""
    step = int(state["tree"]["step"])
    values = {float(end) for tensor in state["tree"]["tensors"] for end in tensor.aminmax()}
    assert values == {float(step)}, f"torn: step {step}, tensors hold {sorted(values)}"
    return step


@dataclass(slots=True, kw_only=True)
class Oracle:
    """Judges the outcome of each save by what `direct` holds, a store without faults between."""

    direct: Store
    acknowledged: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Saves that failed and left no checkpoint: honest."""
    unknown: list[str] = field(default_factory=list)
    """Saves that said that their outcome is not known: honest, and to be rare."""
    broken: list[str] = field(default_factory=list)
    """Promises that were broken."""

    def judge(self, step: int, error: BaseException | None) -> None:
        """What a save said; no other save may be under way."""
        entries = {entry.step: entry for entry in Catalog(self.direct).checkpoints()}
        stands = step in entries
        if error is None:
            self.acknowledged.append(step)
            if not stands:
                self.broken.append(f"step {step} was falsely acknowledged")
        else:
            self._judge_failure(step, error.__cause__ or error, stands=stands)
        if stands and not verify(self.direct, entries[step].folder).ok:
            self.broken.append(f"step {step} is torn")
        for earlier in self.acknowledged[-2:]:
            if earlier not in entries and earlier != step:
                self.broken.append(f"step {earlier} was lost by step {step}")

    def _judge_failure(self, step: int, cause: BaseException, *, stands: bool) -> None:
        said = f"step {step}: {type(cause).__name__}: {cause}"
        if isinstance(cause, OutcomeUnknown):
            self.unknown.append(said)
        elif stands or isinstance(cause, AlreadyExists | CommitConflict):
            self.broken.append(f"falsely refused: {said}")
        else:
            self.refused.append(said)

    def check_end(self, num_elements: int) -> None:
        """The newest checkpoint loads, whole, and is no older than what was acknowledged."""
        state = new_state(num_elements)
        with CheckpointManager(self.direct, state, sinks=()) as reader:
            reader.load()
        if step_of(state) < max(self.acknowledged, default=0):
            self.broken.append(f"step {max(self.acknowledged)} was lost: {step_of(state)} loads")


def commit_many(
    flaky: Store, oracle: Oracle, *, num: int, num_elements: int, begun: Callable[[], object]
) -> None:
    """Save `num` steps through `flaky`, each judged.

    The first save claims the run and checks the store; `begun` is called when it has committed.
    """
    state = new_state(num_elements)
    manager = CheckpointManager(
        flaky, state, keep=Last(KEPT), on_failure="warn", sinks=(), save_timeout_s=120.0
    )
    try:
        for step in range(1, num + 1):
            advance(state, step)
            error: HoldfastError | None = None
            try:
                manager.save(step).wait()
                manager.wait()
            except HoldfastError as raised:
                error = raised
            oracle.judge(step, error)
            if step == 1:
                begun()
    finally:
        close_quietly(manager)


def close_quietly(manager: CheckpointManager) -> None:
    """Close a manager whose last save may have failed, which it then says again."""
    with suppress(HoldfastError):
        manager.close()
