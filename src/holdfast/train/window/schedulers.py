"""Making of schedulers, several for one optimizer or one for each parameter group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holdfast.errors import UsageError

Make = Callable[[torch.optim.Optimizer], Any]


def for_group(group: int, make: Make) -> Make:
    """Make a factory for a scheduler that sees only one group of the optimizer's parameters.

        Trainer(…, scheduler=[
            for_group(0, lambda optimizer: CosineAnnealingLR(optimizer, T_max=1000)),
            for_group(1, lambda optimizer: ConstantLR(optimizer, factor=0.1)),
        ])

    Args:
        group: index in `optimizer.param_groups`.
        make: makes the scheduler from an optimizer.
    """

    def make_for_group(optimizer: torch.optim.Optimizer) -> Any:
        if not 0 <= group < len(optimizer.param_groups):
            raise UsageError(
                f"for_group({group}): the optimizer has {len(optimizer.param_groups)} groups"
            )
        one = _OneGroup(optimizer, group)
        scheduler = make(one)
        # torch's schedulers warn if their optimizer has not stepped before they do.
        one.step()
        return scheduler

    return make_for_group


def make_schedulers(given: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Make the schedulers of an argument, by the names of their components.

    Raises:
        UsageError: a scheduler has no `step`, or steps on a metric, or two set the learning rate
            of the same group of parameters.
    """
    if given is None:
        return {}
    several = isinstance(given, Iterable) and not (isinstance(given, str) or hasattr(given, "step"))
    made = [_make(item, optimizer) for item in (given if several else [given])]
    if not several:
        return {"scheduler": made[0]}
    _check_apart(made, len(optimizer.param_groups))
    return {f"scheduler-{number}": scheduler for number, scheduler in enumerate(made)}


def _make(item: Any, optimizer: torch.optim.Optimizer) -> Any:
    scheduler = item if hasattr(item, "step") or not callable(item) else item(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "scheduler: ReduceLROnPlateau steps on a metric, not after each step: pass it in "
            "state, and step it in the validation_end of a callback"
        )
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"scheduler: {scheduler!r} has no step()")
    return scheduler


def _check_apart(schedulers: list[Any], num_groups: int) -> None:
    """Check that no two schedulers of torch set the learning rate of the same group."""
    taken: dict[int, int] = {}
    for number, scheduler in enumerate(schedulers):
        if not isinstance(scheduler, LRScheduler):
            continue
        sees = scheduler.optimizer
        for group in [sees.group] if isinstance(sees, _OneGroup) else range(num_groups):
            first = taken.setdefault(group, number)
            if first != number:
                raise UsageError(
                    f"scheduler: numbers {first} and {number} both set the learning rate of group "
                    f"{group}; combine them in torch's ChainedScheduler or SequentialLR"
                )


class _OneGroup(torch.optim.Optimizer):
    """View of an optimizer with only one of its parameter groups, for schedulers."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: int) -> None:
        # Without the base's, which would take the group over; this is only a view.
        self._optimizer = optimizer
        self.group = group
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The group, read each time, as a load may put new groups into the optimizer."""
        return [self._optimizer.param_groups[self.group]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No-op: the optimizer itself steps."""
