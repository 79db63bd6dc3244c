"""Save and resume loops that Accelerate prepares: `state(accelerator)` gives the components.

Accelerate's own hooks see the weights alone, so a `CheckpointManager` of these components saves
and resumes in place of `save_state` and `load_state`. The batches come from a `Loader`, which knows
its position and its rank by itself and is not prepared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from holdfast.bridges.parts import is_leader, left_out, name_components, needs_library
from holdfast.errors import UsageError

with needs_library("accelerate"):
    import accelerate
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

logger = logging.getLogger("holdfast")

# Names that are not part of accelerate's interface.
_PREPARED = ("_models", "_optimizers", "_schedulers", "_custom_objects")
_SUPPORTED = "1.2 to 1.15"

_FRAMEWORK = "accelerate"
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Ways of running whose models and optimizers are those of torch, or DDP around them."""


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
    kind: DistributedType = accelerator.distributed_type
    if kind.name not in _DISTRIBUTED:
        raise UsageError(
            f"distributed_type={kind.name}: this bridge takes {', '.join(_DISTRIBUTED)}. For FSDP2 "
            "give a CheckpointManager the components themselves (docs/ranks.md)"
        )
    if not accelerator._models:
        raise UsageError("the accelerator has prepared no model: call state() after prepare()")


def _counts(accelerator: Accelerator) -> dict[str, int]:
    """Return how many there are of each kind that `state` collects."""
    return {name.removeprefix("_"): len(getattr(accelerator, name)) for name in _PREPARED}


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
        return {"of": _FRAMEWORK}

    def check_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Return notes on what cannot be taken over."""
        note = left_out(state, _FRAMEWORK)
        return [] if note is None else [note]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a window with the next batch, of the size that the accelerator has now."""
        note = left_out(state, _FRAMEWORK)
        if note is not None and is_leader():
            logger.warning("%s", note)
        self._accelerator.step = 0
