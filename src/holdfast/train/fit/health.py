"""Whether a state is worth saving: its loss and its weights are finite numbers."""

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

# So many the manifest records of a model of which every weight may be wrong.
_MAX_REASONS = 10


class UnhealthyState(HoldfastError):
    """What was to be saved is not finite; nothing was saved."""


class HealthGate:
    """Looks at the state before each save; between saves it costs nothing.

    A look reads every weight once, and waits for the accelerator.
    """

    def __init__(self, policy: Policy) -> None:
        """`warn` saves all the same, `skip` leaves the save out, `raise` ends the training.

        Raises:
            UsageError: another policy.
        """
        if policy not in get_args(Policy):
            raise UsageError(f"unhealthy={policy!r}: must be one of {get_args(Policy)}")
        self.policy: Policy = policy

    def check(self, step: int, model: nn.Module, metrics: Mapping[str, float]) -> tuple[str, ...]:
        """Let a healthy state pass; gives the reasons why it is not, for the record.

        Raises:
            UnhealthyState: it is not, and the policy is not `warn`.
        """
        found = (*_wrong_loss(metrics), *_wrong_weights(model))
        if not found:
            return ()
        error = UnhealthyState(f"step {step} is not healthy:\n{listing(found)}")
        if self.policy != "warn":
            raise error
        logger.warning("%s", error)
        more = (f"and {len(found) - _MAX_REASONS} more",) if len(found) > _MAX_REASONS else ()
        return found[:_MAX_REASONS] + more


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
    # One answer for all of them, so that an accelerator is waited for once.
    if not checks or bool(torch.stack(checks).all()):
        return []
    return [
        f"weight {name} is not finite"
        for name, is_fine in zip(names, checks, strict=True)
        if not is_fine
    ]
