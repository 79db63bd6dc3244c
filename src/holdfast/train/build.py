"""Makes and checks the objects of a Trainer, from its arguments.

There may be several schedulers for one optimizer, or one for each parameter group.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.arguments import shown
from holdfast.checkpoints import Checkpoints
from holdfast.data import Loader, Stream
from holdfast.data.foreign import describe_inexact
from holdfast.data.randomness import preserved
from holdfast.errors import UsageError
from holdfast.format.layout import LOG
from holdfast.launched import present_ranks
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Time, Unit, parse_goal, parse_limit_s
from holdfast.policy.savers import SavePolicy
from holdfast.policy.triggers import Trigger
from holdfast.staging.overlap import Mode
from holdfast.state.capture.capture import unheld_in
from holdfast.state.capture.lacking import describe_parameters
from holdfast.train.argument_checks import asks_for, check_range
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.curves import EpochLength
from holdfast.train.group import ALONE, Group, join_group
from holdfast.train.loggers.default import JsonLines
from holdfast.train.loggers.progress import ProgressBar
from holdfast.train.schedules import Schedule
from holdfast.train.step.batches import length_of
from holdfast.train.step.numerics import Numerics
from holdfast.train.step.step import Clip
from holdfast.train.strategies import FSDP2, Name, Strategy

logger = logging.getLogger("holdfast")

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Optimizers = (
    torch.optim.Optimizer | MakeOptimizer | Mapping[str, "torch.optim.Optimizer | MakeOptimizer"]
)
"""An optimizer, a function that makes it, or several by name."""


def checked_device(given: str | torch.device | None) -> torch.device | None:
    """Parse a device argument, and check that this machine has it; None stays None."""
    if given is None:
        return None
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={given!r}: {error}") from None
    if device.type != "cpu" and not _is_available(device):
        raise UsageError(f"device={given!r}: this machine has none")
    return device


def group_for(strategy: Name | Strategy | None, device: torch.device | None) -> Group:
    """Return the ranks that train together; opens the process group if there is none yet."""
    if strategy == "single":
        return ALONE
    return join_group(device, also_alone=strategy == "fsdp2" or isinstance(strategy, FSDP2))


def device_for(
    group: Group, given: torch.device | None, model: nn.Module | MakeModel
) -> torch.device | None:
    """Return the argument `device`; by default the accelerator, of the local rank if several train.

    A model that is on one accelerator already stays there. None: nothing is moved, because there is
    no accelerator, or the model is on several devices.
    """
    if given is not None:
        return given
    if isinstance(model, nn.Module):
        places = {item.device for item in (*model.parameters(), *model.buffers())}
        if places - {torch.device("cpu")}:
            only = next(iter(places))
            return only if len(places) == 1 and only.type != "meta" else None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    ranks = present_ranks()
    if ranks.world_size == 1:
        return torch.device(accelerator.type)  # the current one
    # Also with strategy="single": others train beside this process, each on a device of its own.
    local_rank = ranks.rank if ranks.local_rank is None else ranks.local_rank
    return torch.device(accelerator.type, local_rank % torch.accelerator.device_count())


def check_several(*, loss: Any, update: Any, micro_batch: Any, skip_nan: Any, metrics: Any) -> None:
    """Check the arguments of a Trainer with several optimizers, or with an `update` function."""
    if update is not None and loss is not None:
        raise UsageError(
            "update trains a whole step: leave loss out (for validations give it to Validation)"
        )
    given = {"micro_batch": micro_batch, "skip_nan": skip_nan, "metrics": metrics}
    refused = [name for name, value in given.items() if value]
    if refused:
        raise UsageError(f"{', '.join(refused)}: not with several optimizers or update")


def check_shared_data(data: Any, strategy: Strategy | None, group: Group) -> None:
    """Raise `UsageError` if a `Loader` or `Stream` was made for other ranks than these."""
    if not isinstance(data, Loader | Stream) or (strategy is None and not group.is_alone):
        return
    world_size = data.ranks.world_size
    if group.is_alone and world_size > 1:
        raise UsageError(
            f"data: the {type(data).__name__} gives this process one part of {world_size}, and it "
            "trains alone: make it with ranks=None"
        )
    if not group.is_alone and world_size == 1:
        raise UsageError(
            f"data: the {type(data).__name__} gives each of the {group.world_size} ranks the same "
            'batches: leave out ranks=None, or make it after the process group; "group" gives '
            "each its part"
        )


def check_parallel(
    optimizer: Any,
    model: nn.Module,
    strategy: Strategy | None,
    numerics: Numerics,
    every: Trigger | SavePolicy | None,
    group: Group,
) -> None:
    """Check that a strategy covers all trained parameters, and that the ranks support it."""
    if isinstance(strategy, FSDP2) and numerics.scaler is not None:
        raise UsageError(
            'strategy="fsdp2" and precision="fp16": use "bf16", or FSDP2(param_dtype=…)'
        )
    if optimizer is None or (strategy is None and group.is_alone):
        return
    if isinstance(optimizer, Mapping):
        raise UsageError(
            "several optimizers, and update, train on one process: no strategy knows which "
            "gradients to exchange when"
        )
    known = {id(parameter) for parameter in model.parameters()}
    trained = [item for of_group in optimizer.param_groups for item in of_group["params"]]
    num_others = sum(id(item) not in known for item in trained)
    if num_others:
        raise UsageError(
            f"optimizer: {num_others} of its {len(trained)} parameters are not the model's, so the "
            "ranks would not exchange their gradients: put them into the model; with "
            'strategy="fsdp2" give a function for the optimizer, as the parameters are replaced'
        )
    if not group.is_alone and asks_for(every, "exception"):
        raise UsageError(
            'every: On("exception") needs one process: when a rank fails, its step cannot be '
            "undone on the others"
        )


def make_model(given: nn.Module | MakeModel, seed: int, device: torch.device | None) -> nn.Module:
    """Return the model on its device; a factory is called with generators seeded by `seed`."""
    model = given
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise UsageError(
                f"model={given!r}: must be a torch module, or a function that makes one"
            )
        with preserved():
            seed_generators(seed)
            model = model()
        if not isinstance(model, nn.Module):
            raise UsageError(f"model: the function gave a {type(model).__name__}, not a module")
    return model if device is None else model.to(device)


def make_optimizer(
    given: Any, model: nn.Module, model_was_made: bool, *, takes_closure: bool = False
) -> Any:
    """Return the optimizer of the model, or several by name, made by factories where given.

    None stays None.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        check_optimizer_names(given)
        return {
            name: make_optimizer(item, model, model_was_made, takes_closure=takes_closure)
            for name, item in given.items()
        }
    if not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            raise UsageError(f"optimizer={given!r}: must be a torch optimizer, or make one")
        made = given(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"optimizer: the function gave a {type(made).__name__}")
        return made if takes_closure else _with_plain_step(made)
    if model_was_made:
        raise UsageError("optimizer: with a function for the model, give one for the optimizer")
    return given if takes_closure else _with_plain_step(given)


def checked_clip(given: Any) -> Clip:
    """Return an argument `clip`, of which a number is the largest norm, as a record."""
    if isinstance(given, Mapping):
        raise UsageError(f"clip={shown(given)}: names are for several optimizers, and there is one")
    if given == Clip():
        raise UsageError("clip=Clip(): clips nothing; pass norm=… or value=…, or clip=None")
    return given if isinstance(given, Clip) else Clip(norm=given)


def clips_of(given: Any, optimizers: Mapping[str, Any]) -> dict[str, Clip]:
    """Return how the gradients of each optimizer are clipped, alike unless given by names."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(optimizers, checked_clip(given))
    if not set(given) <= set(optimizers):
        raise UsageError(f"clip: {[*given]} must be some of the optimizers, {[*optimizers]}")
    return {name: checked_clip(given.get(name)) for name in optimizers}


def check_optimizer_names(given: Mapping[Any, Any]) -> None:
    """Raise `UsageError` if names of optimizers cannot be parts of component names."""
    wrong = [
        name
        for name in given
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_]{0,39}", name)
    ]
    if wrong or not given:
        raise UsageError(f"optimizer: the names {wrong} must match [a-z0-9][a-z0-9_]{{0,39}}")


def _with_plain_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    try:
        # From the class: a scheduler replaces the object's `step` by one that still has a `self`.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise UsageError(
            f"optimizer: the step of {type(optimizer).__name__} needs a closure that computes the "
            "loss again, and the Trainer computes it once a step. Give `update` in place of "
            "`loss`, and step with a closure there"
        ) from None
    return optimizer


def device_type(model: nn.Module, device: torch.device | None) -> str:
    """Return the type of the device that a model trains on; `device` is where it was moved."""
    if device is not None:
        return device.type
    first = next(model.parameters(), None)
    return "cpu" if first is None else first.device.type


def checked_overlap(given: Mode | None, device_type: str) -> Mode:
    """Return whether saves overlap with training: `given`, or the default for the device."""
    if given is None:
        # On a CPU the copy would compete with training for cores and memory.
        return device_type != "cpu"
    return given


def check_data(data: Any) -> None:
    """Check that data has a position to save; log a warning if it is not exact."""
    if data is None:
        return
    missing = [
        name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(data, name)
    ]
    if missing:
        raise UsageError(
            f"data={shown(data)} is a {type(data).__name__} without {', '.join(missing)}, so it "
            "has no position to resume from: use holdfast.data.Loader"
        )
    inexact = describe_inexact(data)
    if inexact is not None:
        logger.warning("data: %s", inexact)


def no_loss(model: Any, batch: Any) -> Any:
    """Loss of a Trainer that was made without one."""
    raise UsageError("this needs a loss, and the Trainer was made without one: give loss=…")


def check_loader(loader: Any) -> None:
    """Raise `UsageError` if an argument is not a loader of batches."""
    if isinstance(loader, str) or not hasattr(loader, "__iter__"):
        raise UsageError(f"data={shown(loader)}: must be a loader of batches")


def check_held(state: Mapping[str, Any], loss: Any) -> None:
    """Check that checkpoints include every parameter that an optimizer of the state updates."""
    unheld = unheld_in(state)
    if unheld:
        of_loss = {"loss": loss} if isinstance(loss, nn.Module) else {}
        shown = describe_parameters(unheld, of_loss)
        example = '{"loss": loss}' if "loss." in shown else '{"head": head}'
        raise UsageError(
            f"parameters that no component holds would be trained and not saved: {shown}. "
            f"Add the module that has them, such as state={example}, or leave them out of the "
            "optimizer"
        )


def checked_goal(until: str | int) -> Time:
    """Parse the goal of a `fit`."""
    if isinstance(until, int):
        check_range("until", until, 1, 2**63)
        return Time(until, Unit.STEP)
    return parse_goal(until)


def checked_max_time_s(max_time: str | Time | None) -> float:
    """Parse a duration into seconds; infinite for None."""
    return float("inf") if max_time is None else parse_limit_s(max_time)


def own_loggers(
    checkpoints: Checkpoints, log: bool | str | os.PathLike[str] | None, progress: bool
) -> list[Logger]:
    """Make the default loggers of a Trainer: JSON lines and a progress bar.

    The log of an encrypted run is not put into its root, where it would be unencrypted.
    """
    root = checkpoints.root
    root = root.local if isinstance(root, Tiered) else root
    loggers: list[Logger] = []
    is_local = isinstance(root, str | os.PathLike) and "://" not in os.fspath(root)
    may_log = is_local and checkpoints.encrypt is None
    if log is None:
        log = may_log
    if log is True:
        if not isinstance(root, str | os.PathLike) or not may_log:
            raise UsageError(
                "log=True needs a local root without encryption: name a file, or pass log=False"
            )
        loggers.append(JsonLines(Path(root) / LOG / "train.jsonl"))
    elif log is not False:
        loggers.append(JsonLines(log))
    if progress:
        loggers.append(ProgressBar())
    return loggers


def epoch_length(data: Any, accumulate: int) -> EpochLength:
    """Return the length of an epoch, as far as the data tells it and all epochs have the same."""
    num_batches = None if getattr(data, "epochs_vary", False) else length_of(data) or None
    return EpochLength(num_batches=num_batches, accumulate=accumulate)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _is_available(device: torch.device) -> bool:
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return False
    if not module.is_available():
        return False
    return device.index is None or device.index < int(module.device_count())


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


def make_schedulers(given: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Schedule]:
    """Make the schedulers of the argument `scheduler`, and when they step, by component name."""
    if given is None:
        return {}
    if optimizer is None:
        raise UsageError("scheduler: there is no optimizer whose learning rate it could set")
    if isinstance(optimizer, Mapping):
        return _make_by_name(given, optimizer)
    several = isinstance(given, Iterable) and not (isinstance(given, str) or hasattr(given, "step"))
    made = [_make_scheduler(item, optimizer) for item in (given if several else [given])]
    if not several:
        return {"scheduler": made[0]}
    _check_apart([item.scheduler for item in made], len(optimizer.param_groups))
    return {f"scheduler-{number}": scheduler for number, scheduler in enumerate(made)}


def _make_by_name(
    given: Any, optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Schedule]:
    """Make the schedulers of several optimizers, given by their names."""
    if not isinstance(given, Mapping) or not set(given) <= set(optimizers):
        raise UsageError(
            f"scheduler={shown(given)}: with several optimizers give a mapping from their names, "
            f"{[*optimizers]}"
        )
    return {
        name.replace("scheduler", f"scheduler-{of}", 1): made
        for of, item in given.items()
        for name, made in make_schedulers(item, optimizers[of]).items()
    }


def _make_scheduler(item: Any, optimizer: torch.optim.Optimizer) -> Schedule:
    plan = item if isinstance(item, Schedule) else Schedule(item)
    given = plan.scheduler
    is_factory = isinstance(given, type) or (callable(given) and not hasattr(given, "step"))
    return plan.made(given(optimizer) if is_factory else given)


def _check_apart(schedulers: list[Any], num_groups: int) -> None:
    """Check that no two torch schedulers set the learning rate of the same parameter group."""
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
        # Without super().__init__(), which would set up the group as its own; this is a view.
        self._optimizer = optimizer
        self.group = group
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The group, read each time, as a load may put new groups into the optimizer."""
        return [self._optimizer.param_groups[self.group]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No-op: the optimizer itself steps."""
