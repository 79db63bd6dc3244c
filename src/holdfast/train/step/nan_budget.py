"""Skips steps whose loss or gradients are not finite, up to a budget that is in the checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import HoldfastError, UsageError
from holdfast.train.argument_checks import check_range
from holdfast.train.parallel.group import Group
from holdfast.train.parallel.strategies import local

logger = logging.getLogger("holdfast")


class NotFinite(HoldfastError):
    """Loss or gradients are not finite, in more steps than `skip_nan` allows."""


class NanBudget:
    """Budget of steps that may be skipped; a component, so that a resume continues the count."""

    def __init__(
        self,
        limit: int,
        group: Group,
        step: Callable[[], int],
        modules: Callable[[], Iterable[nn.Module]],
    ) -> None:
        """Allow `limit` skipped steps in the whole run; `step` gives the one under way.

        `modules` gives those whose buffers a step may change.
        """
        check_range("skip_nan", limit, 1, 2**31)
        self.limit = limit
        self.num_skipped = 0
        """Steps that were skipped so far, of the whole run."""
        self._group = group
        self._step = step
        self._modules = modules
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Keep the buffers: a bad batch spoils statistics such as those of batch norm."""
        self._buffers = [
            (item, item.detach().clone()) for module in self._modules() for item in module.buffers()
        ]

    @torch.no_grad()
    def must_skip(self, values: Iterable[Tensor | float]) -> bool:
        """Whether one of these values is not finite on any rank; restores the buffers if so.

        Waits for the device.
        """
        checks = [local(value).isfinite().all() for value in _convert_to_tensors(values)]
        # One read for each device, not for each tensor.
        devices = {check.device for check in checks}
        are_fine = all(
            bool(torch.stack([check for check in checks if check.device == device]).all())
            for device in devices
        )
        kept, self._buffers = self._buffers, []
        if not any(self._group.max([not are_fine])):
            return False
        for buffer, before in kept:
            buffer.copy_(before)
        what = f"step {self._step()}: its loss or gradients are not finite"
        if self.num_skipped >= self.limit:
            raise NotFinite(
                f"{what}, and {self.num_skipped} steps were skipped before: skip_nan={self.limit} "
                "allows no more. Look at the data and the learning rate, or raise skip_nan"
            )
        self.num_skipped += 1
        logger.warning(
            "%s: it is not applied (%d of the %d that skip_nan allows)",
            what,
            self.num_skipped,
            self.limit,
        )
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the count to save."""
        return {"num_skipped": self.num_skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        if set(state) != {"num_skipped"}:
            raise UsageError(f"not the count of skipped steps: {sorted(state)}")
        self.num_skipped = state["num_skipped"]


def _convert_to_tensors(values: Iterable[Tensor | float]) -> list[Tensor]:
    return [item if isinstance(item, Tensor) else torch.tensor(item) for item in values]
