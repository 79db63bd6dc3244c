"""Health of a state before a save: its loss and its weights must be finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import nn

from holdfast.errors import HoldfastError, UsageError, listing

logger = logging.getLogger("holdfast")

Policy = Literal["warn", "skip", "raise"]

# Limit of weights that the manifest names, as every weight of a model may be wrong.
_MAX_REASONS = 10


class UnhealthyState(HoldfastError):
    """The loss or the weights to be saved are not finite; nothing was saved."""


class HealthGate:
    """Checks the state before each save; between saves it costs nothing.

    A check reads every weight once, and waits for the accelerator.
    """

    def __init__(self, policy: Policy) -> None:
        """Make the gate: `warn` saves all the same, `skip` skips the save, `raise` ends training.

        Raises:
            UsageError: `policy` is none of these.
        """
        if policy not in get_args(Policy):
            raise UsageError(f"unhealthy={policy!r}: must be one of {get_args(Policy)}")
        self.policy: Policy = policy

    def check(self, step: int, model: nn.Module, metrics: Mapping[str, float]) -> tuple[str, ...]:
        """Check a state; returns the reasons why it is unhealthy, for the manifest.

        Raises:
            UnhealthyState: the state is unhealthy, and the policy is not `warn`.
        """
        reasons = (*_wrong_loss(metrics), *_wrong_weights(model))
        if not reasons:
            return ()
        error = UnhealthyState(f"step {step} is not healthy:\n{listing(reasons)}")
        if self.policy != "warn":
            raise error
        logger.warning("%s", error)
        more = (f"and {len(reasons) - _MAX_REASONS} more",) if len(reasons) > _MAX_REASONS else ()
        return reasons[:_MAX_REASONS] + more


def _wrong_loss(metrics: Mapping[str, float]) -> list[str]:
    loss = metrics.get("loss", 0.0)
    return [] if math.isfinite(loss) else [f"the loss is {loss}"]


@torch.no_grad()
def _wrong_weights(model: nn.Module) -> list[str]:
    names, checks = [], []
    for name, weight in model.named_parameters():
        if weight.is_floating_point() or weight.is_complex():
            names.append(name)
            checks.append(weight.isfinite().all())
    devices = {check.device for check in checks}
    if len(devices) > 1:
        checks = [check.cpu() for check in checks]
    # One result for all tensors, so that an accelerator is waited for once.
    if not checks or bool(torch.stack(checks).all()):
        return []
    return [
        f"weight {name} is not finite"
        for name, is_fine in zip(names, checks, strict=True)
        if not is_fine
    ]
