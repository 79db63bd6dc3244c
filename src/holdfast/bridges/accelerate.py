"""Save and resume loops that Accelerate prepares: `state(accelerator)` gives the components.

Accelerate's own hooks see the weights alone, so a `CheckpointManager` of these components saves
and resumes in place of `save_state` and `load_state`. The batches come from a `Loader`, which knows
its position and its rank by itself and is not prepared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from holdfast.bridges.parts import is_leader, name_components, needs_library, note_other_framework
from holdfast.errors import UsageError

with needs_library("accelerate"):
    import accelerate
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, broadcast_object_list

logger = logging.getLogger("holdfast")

# Names that are not part of accelerate's interface.
_PREPARED = ("_models", "_optimizers", "_schedulers", "_custom_objects")
_SUPPORTED = "1.2 to 1.15"

_FRAMEWORK, _STEPS = "accelerate", "scheduler_steps"
_REFUSED = {
    "FSDP": "FSDP1 is not supported; set fsdp_version=2",
    "DEEPSPEED": "its engine owns the optimizer state; use FSDP2 (fsdp_version=2), or DDP if the "
    "model and its optimizer state fit on each rank. `holdfast import` converts its checkpoints",
}
"""Distributed types of Accelerate that are refused -> what to use in place of them."""


def state(accelerator: Accelerator, *, data: Any = None, **others: Any) -> dict[str, Any]:
    """Return the components of a run, for a `CheckpointManager`. Call it after `prepare`.

        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        manager = CheckpointManager("runs/x", state(accelerator, data=loader), every="500step")

    They are `model`, `optimizer` and `scheduler` (of several, the second is `model1`), `scaler`
    with fp16, `trainer` (windows of gradient accumulation), and what
    `register_for_checkpointing` got, as `custom`.

    Args:
        accelerator: has prepared all that is to be saved.
        data: the `Loader` or `Stream` of the training, which is not prepared.
        others: further components by name, as a manager takes them.

    Raises:
        UsageError: nothing was prepared; a name is taken; the version of accelerate, or its way
            of running, is not supported.
    """
    _check_accelerator(accelerator)
    found: dict[str, Any] = {
        **name_components("model", accelerator._models),
        **name_components("optimizer", accelerator._optimizers),
        # Inside of a wrapper whose state it is; a scheduler of torch is checked before a load.
        **name_components(
            "scheduler", [getattr(n, "scheduler", n) for n in accelerator._schedulers]
        ),
        **name_components("custom", accelerator._custom_objects),
        "trainer": _Window(accelerator),
    }
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    if data is not None:
        agree_on_data(accelerator, data)
        found["data"] = data
    taken = sorted(found.keys() & others.keys())
    if taken:
        raise UsageError(f"{', '.join(taken)}: the accelerator has components of these names")
    return {**found, **others}


def _check_accelerator(accelerator: Accelerator) -> None:
    missing = [name for name in _PREPARED if not hasattr(accelerator, name)]
    if missing:
        raise UsageError(
            f"accelerate {accelerate.__version__}: an Accelerator has no {', '.join(missing)}; "
            f"this bridge is tested with {_SUPPORTED}"
        )
    check_distributed_type(accelerator)
    if not accelerator._models:
        raise UsageError("the accelerator has prepared no model: call state() after prepare()")


def check_distributed_type(accelerator: Accelerator) -> None:
    """Raise `UsageError` unless models and optimizers are those of torch, DDP or FSDP2."""
    kind: DistributedType = accelerator.distributed_type
    is_fsdp2 = kind.name == "FSDP" and accelerator.state.fsdp_plugin.fsdp_version == 2
    if kind.name == "NO" or kind.name.startswith("MULTI_") or is_fsdp2:
        return
    reason = _REFUSED.get(kind.name, "not supported by this bridge; use DDP or FSDP2")
    raise UsageError(f"distributed_type={kind.name}: {reason}")


def agree_on_data(accelerator: Accelerator, data: Any) -> None:
    """Use the description of the data from rank 0 on all ranks, each of which calls this.

    Raises:
        UsageError: ranks that hold parts of one replica would get different batches.
    """
    config = getattr(accelerator, "parallelism_config", None)
    size = 1 if config is None else config.non_data_parallel_size
    expected = accelerator.num_processes // size
    found = getattr(data, "ranks", None)
    if size > 1 and found is not None and found.world_size != expected:
        raise UsageError(
            f"data: batches are divided among {found.world_size} ranks, and {size} ranks hold one "
            f"replica: pass ranks=DataRanks(rank // {size}, {expected}) to the Loader"
        )
    if accelerator.num_processes > 1 and hasattr(data, "description"):
        data.description = broadcast_object_list([data.description])[0]


def _counts(accelerator: Accelerator) -> dict[str, int]:
    """Return how many there are of each kind that `state` collects."""
    return {name.removeprefix("_"): len(getattr(accelerator, name)) for name in _PREPARED}


def _scheduler_steps(accelerator: Accelerator) -> int:
    """Return how often prepared schedulers step for each step of the optimizer."""
    is_of_ranks = any(
        getattr(one, "step_with_optimizer", False) and not one.split_batches
        for one in accelerator._schedulers
    )
    return accelerator.num_processes if is_of_ranks else 1


class _Window:
    """Component `trainer`: windows of accumulation begin with the first batch after a resume."""

    is_of_loop = True
    """The loop is the user's, so a manager compares its steps with the position in the data."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._counts = accelerator, _counts(accelerator)

    def state_dict(self) -> dict[str, Any]:
        """Return whose state it is."""
        late = [
            name for name, num in _counts(self._accelerator).items() if num > self._counts[name]
        ]
        if late:
            raise UsageError(
                f"{', '.join(late)}: prepared or registered after state() was called, so no "
                "checkpoint has it; call state() last"
            )
        if not self._accelerator.sync_gradients:
            raise UsageError(
                "gradient accumulation: the save is inside of a window, whose gradients would be "
                "lost; save `if accelerator.sync_gradients:`"
            )
        return {"of": _FRAMEWORK, _STEPS: _scheduler_steps(self._accelerator)}

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return notes on what cannot be taken over."""
        note = note_other_framework(state, _FRAMEWORK)
        now = _scheduler_steps(self._accelerator)
        before = state.get(_STEPS, now)
        if note is None and before != now:
            note = (
                f"each step advances schedulers by {now}, but by {before} in the run that saved "
                "the checkpoint, because Accelerate steps them once for each rank. Use the same "
                "number of ranks, or pass step_scheduler_with_optimizer=False to Accelerator in "
                "both runs"
            )
        return [] if note is None else [note]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a window with the next batch, of the size that the accelerator has now."""
        for note in self.check_state_dict(state) if is_leader() else ():
            logger.warning("%s", note)
        self._accelerator.step = 0
