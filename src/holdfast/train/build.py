"""Makes and checks the parts of a Trainer, from its arguments."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from holdfast.arguments import shown
from holdfast.checkpoints import Checkpoints, best_rules
from holdfast.control.stop import Stop
from holdfast.data import Loader, Stream
from holdfast.data.randomness import preserved, seed_generators
from holdfast.errors import UsageError
from holdfast.format.layout import LOG
from holdfast.launched import present_ranks
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.best import BestSaves
from holdfast.policy.clock import Time, Unit, parse_goal, parse_limit_s
from holdfast.policy.savers import SavePolicy
from holdfast.policy.triggers import Trigger
from holdfast.saving.settings_history import as_text
from holdfast.staging.overlap import Mode
from holdfast.state.capture.capture import find_unsaved_parameters
from holdfast.state.capture.lacking import describe_parameters
from holdfast.state.components import PROGRESS, RNG, check_state, take_per_rank_marks
from holdfast.state.foreign import describe_inexact
from holdfast.store.base import Store
from holdfast.train.argument_checks import Counts, asks_for, check_range, checked_every
from holdfast.train.averages import SWA, Average, EqualAverage, modules_of_averages
from holdfast.train.callbacks.hooks import Callback, Logger
from holdfast.train.callbacks.measuring import device_of
from holdfast.train.callbacks.registry import Callbacks
from holdfast.train.group import ALONE, Group, join_group
from holdfast.train.loggers.files import JsonLines
from holdfast.train.loggers.progress import ProgressBar
from holdfast.train.parts import Policy, TrainerParts
from holdfast.train.schedules import Schedules, make_schedulers
from holdfast.train.status import FitStatus
from holdfast.train.step.batches import Limits
from holdfast.train.step.device_metrics import Numbers, RankMeans
from holdfast.train.step.epoch_metrics import Scores
from holdfast.train.step.micro_batches import MicroBatches, Weighing
from holdfast.train.step.numerics import NanBudget, Numerics, Precision, checked_precision
from holdfast.train.step.several_optimizers import SeveralUpdate, UpdateFunction
from holdfast.train.step.step import Clip, LossFunction, Update, checked_skips
from holdfast.train.step.undo import Boundary, StepUndo, modules_of, small
from holdfast.train.strategies import FSDP2, Name, Strategy, chosen_strategy, parallel_of, recompute
from holdfast.train.training import OF_VALIDATION, Counters

logger = logging.getLogger("holdfast")

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Optimizers = (
    torch.optim.Optimizer | MakeOptimizer | Mapping[str, "torch.optim.Optimizer | MakeOptimizer"]
)
"""An optimizer, a function that makes it, or several by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a Trainer, which describes them."""

    model: nn.Module | MakeModel
    optimizer: Optimizers | None
    data: Any
    loss: LossFunction | None
    update: UpdateFunction | None
    checkpoints: str | os.PathLike[str] | Store | Tiered | Checkpoints | None
    scheduler: Any
    state: Mapping[str, Any] | None
    stop: Stop | None
    validate: Any
    skip_steps: Iterable[range]
    accumulate: int
    precision: str | int | Precision
    clip: float | Clip | Mapping[str, float | Clip] | None
    ema: float | None
    swa: SWA | None
    unhealthy: Policy
    skip_nan: int | None
    detect_anomaly: bool
    limits: Limits
    seed: int
    device: str | torch.device | None
    strategy: Name | Strategy | None
    activation_checkpointing: bool | Collection[type[nn.Module]]
    compile: bool | Mapping[str, Any]
    callbacks: Sequence[Callback]
    counts: Counts
    log: bool | str | os.PathLike[str] | None
    log_every: int
    progress: bool
    metrics: Mapping[str, Any] | None
    micro_batch: Literal["auto"] | int | None

    def __post_init__(self) -> None:
        check_data(self.data)
        check_range("accumulate", self.accumulate, 1, 2**31)
        check_range("seed", self.seed, 0, 2**32)
        check_range("log_every", self.log_every, 1, 2**63)

    @property
    def trains(self) -> bool:
        """Whether there is all that training needs besides data."""
        return self.optimizer is not None and (self.loss is not None or self.update is not None)


class ModelSetup:
    """The model of a Trainer on its device, its ranks, its callbacks, and where it saves."""

    def __init__(self, given: Arguments) -> None:
        device = checked_device(given.device)
        uses_fsdp = given.strategy == "fsdp2" or isinstance(given.strategy, FSDP2)
        is_single = given.strategy == "single"
        self.group = ALONE if is_single else join_group(device, also_alone=uses_fsdp)
        self.device = device_for(self.group, device, given.model)
        self.model = make_model(given.model, given.seed, self.device)
        self.strategy = chosen_strategy(given.strategy, self.model, self.group)
        checkpoints, log = given.checkpoints, given.log
        callbacks = given.callbacks
        if given.limits.fast_dev_run:
            logger.info("limits: fast_dev_run: nothing of this training is saved or logged")
            checkpoints, log = None, False
            callbacks = [item for item in callbacks if not isinstance(item, Logger)]
        self.checkpoints = Checkpoints.of(checkpoints, {})
        self.callbacks = [*callbacks, *own_loggers(self.checkpoints, log, given.progress)]

    @property
    def device_type(self) -> str:
        """Type of the device on which the model trains."""
        return (device_of(self.model) if self.device is None else self.device).type


class PartsBuilder:
    """Builds the parts of a Trainer, once its callbacks have seen the model."""

    def __init__(self, given: Arguments, base: ModelSetup, callbacks: Callbacks) -> None:
        self._given, self._base, self._callbacks = given, base, callbacks
        self._accumulate = 1 if given.limits.fast_dev_run else given.accumulate
        self._make_modules()
        self._make_optimizers()
        self._counters = Counters(cycle_length=given.counts.cycle_length)
        self._status = FitStatus(self._counters)
        self._every = _checked_intervals(given, base.checkpoints)
        self._overlap = checked_overlap(base.checkpoints.overlap, base.device_type)
        self._numerics = Numerics(checked_precision(given.precision), base.device_type)
        check_shared_data(given.data, base.strategy, base.group)
        check_parallel(
            self._named, base.model, base.strategy, self._numerics, self._every, base.group
        )
        self._scores = Scores(given.metrics or {}, base.group, what="metrics", is_saved=True)
        self._micro_batches = MicroBatches(given.micro_batch, base.group)
        self._data = given.limits.of_data(given.data)
        self._make_state()

    def _make_modules(self) -> None:
        given, model = self._given, self._base.model
        self._ema = None if given.ema is None else Average(model, given.ema)
        self._swa = None if given.swa is None else EqualAverage(model, given.swa)
        recompute(model, given.activation_checkpointing)
        self._parallel = parallel_of(self._base.strategy, self._base.group, self._base.device)
        for module in (model, *modules_of_averages(self._ema, self._swa)):
            self._parallel.prepare(module)
        if given.compile is not False:
            model.compile(**({} if given.compile is True else given.compile))

    def _make_optimizers(self) -> None:
        given, model = self._given, self._base.model
        is_closed = given.update is not None
        if isinstance(given.optimizer, Mapping) or is_closed:
            check_several(given)
        self._optimizer = make_optimizer(
            given.optimizer, model, model is not given.model, takes_closure=is_closed
        )
        is_single = isinstance(self._optimizer, torch.optim.Optimizer)
        self._named = {"": self._optimizer} if is_single and is_closed else self._optimizer
        schedulers = make_schedulers(given.scheduler, self._optimizer)
        self._schedules = Schedules(schedulers, self._callbacks)

    def _make_state(self) -> None:
        """Name the components, in a dict for later parts. Existing checkpoints have the names."""
        given, group, ema, swa = self._given, self._base.group, self._ema, self._swa
        extra, self._per_rank = take_per_rank_marks(given.state or {})
        state: dict[str, Any] = {}
        self._state = state
        self._nan = (
            None
            if given.skip_nan is None
            else NanBudget(given.skip_nan, group, self._status, state)
        )
        own = {
            "model": self._base.model,
            **_name_optimizers(self._optimizer),
            **self._schedules.components,
            "scaler": self._numerics.scaler,
            "ema": ema and ema.model,
            "swa": swa and swa.model,
            "swa-count": swa,
            "nan-count": self._nan,
            "data": self._data,
            PROGRESS: self._counters,
            **self._callbacks.components,
            "metrics": self._scores if self._scores else None,
            "micro_batch": self._micro_batches if self._micro_batches.is_auto else None,
        }
        _add_components(state, own, extra)
        check_held(state, given.loss)
        self._base.checkpoints.check_components({*state, RNG})
        self._undo = StepUndo(
            # With several ranks nothing is interrupted: they stop where they meet.
            stop=given.stop if group.is_alone else None,
            is_exact=self._base.checkpoints.root is not None and asks_for(self._every, "exception"),
            data=self._data,
            state=state,
            callbacks=self._callbacks,
        )

    def _begin_update(self) -> None:
        """Before weights change: drop the snapshot for undo, and wait for saves that copy them."""
        self._undo.begin_update()
        self._status.fence()

    def _snapshot(self) -> Boundary:
        fixed = ("data", PROGRESS, "scaler", "micro_batch", *self._schedules.components)
        return Boundary(components=small(self._state, *fixed), modules=modules_of(self._state))

    def _make_update(self) -> Update:
        given, base, optimizer, named = self._given, self._base, self._optimizer, self._named
        update = Update(
            model=base.model,
            called=base.model if optimizer is None else self._parallel.wrap_model(base.model),
            parallel=self._parallel,
            means=RankMeans(base.group),
            weighing=Weighing(base.group, is_scaled=self._numerics.scaler is not None),
            micro_batches=self._micro_batches,
            scores=self._scores,
            snapshot=self._snapshot,
            optimizer=optimizer,  # not used where it is None
            schedulers=self._schedules.plain_schedulers,
            loss=no_loss if given.loss is None else given.loss,
            clip=Clip() if isinstance(named, Mapping) else checked_clip(given.clip),
            numerics=self._numerics,
            device=base.device,
            callbacks=self._callbacks,
            numbers=Numbers(),
            begin_update=self._begin_update,
            nan=self._nan,
        )
        if not isinstance(named, Mapping):
            return update
        return SeveralUpdate.from_update(
            update,
            optimizers=named,
            clips=clips_of(given.clip, named),
            update=given.update,
            accumulate=self._accumulate,
        )

    def make_parts(self) -> TrainerParts:
        """Make the parts from all that was made before."""
        given, base, optimizer = self._given, self._base, self._optimizer
        update, components = self._make_update(), self._schedules.components
        rules = best_rules(base.checkpoints)
        return TrainerParts(
            model=base.model,
            ema=self._ema,
            swa=self._swa,
            optimizer=optimizer,
            data=self._data,
            state=self._state,
            per_rank=self._per_rank,
            config=config_of(given, base.checkpoints, base.model, optimizer, components),
            checkpoints=base.checkpoints,
            every=self._every,
            overlap=self._overlap,
            best=BestSaves([item for item in rules if item.rule.metric.startswith(OF_VALIDATION)]),
            unhealthy=given.unhealthy,
            counters=self._counters,
            status=self._status,
            callbacks=self._callbacks,
            update=update,
            schedules=self._schedules,
            undo=self._undo,
            stop=given.stop,
            strategy=base.strategy,
            limits=given.limits,
            counts=given.counts,
            skip_steps=checked_skips(given.skip_steps),
            accumulate=self._accumulate,
            log_every=given.log_every,
            seed=given.seed,
        )


def _name_optimizers(optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer, Mapping):
        return {f"optimizer-{name}": item for name, item in optimizer.items()}
    return {"optimizer": optimizer}


def _add_components(
    state: dict[str, Any], own: Mapping[str, Any], extra: Mapping[str, Any]
) -> None:
    """Add the Trainer's own components, without those that are None, and those of the caller."""
    state |= {name: value for name, value in own.items() if value is not None}
    taken = [name for name in extra if name in state or name == RNG]
    if taken:
        raise UsageError(f"state: the Trainer has components named {taken} itself")
    state |= extra
    check_state(state)


def _checked_intervals(given: Arguments, checkpoints: Checkpoints) -> Trigger | SavePolicy | None:
    """Check when all savers save; returns when the main one does."""
    checked = partial(
        checked_every,
        extra=given.counts.units,
        handles_signals=given.stop is not None,
        validates=given.validate is not None,
    )
    every = checked(checkpoints.every)
    for saver in checkpoints.savers:
        checked(saver.policy, what=f"saver {saver.name!r}: every")
    return every


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


def device_for(
    group: Group, given: torch.device | None, model: nn.Module | MakeModel
) -> torch.device | None:
    """Return the device for the model: as given, its own, or the rank's accelerator; or None."""
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


def check_several(given: Arguments) -> None:
    """Check the arguments of a Trainer with several optimizers, or with an `update` function."""
    if given.update is not None and given.loss is not None:
        raise UsageError(
            "update= replaces loss=: pass either (validations have Validation(loss=…))"
        )
    names = ("micro_batch", "skip_nan", "metrics")
    refused = [name for name in names if getattr(given, name)]
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
            'batches: make it after init_process_group, with ranks="group" (the default), which '
            "gives each rank its share"
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
            raise UsageError(f"model: the function returned a {type(model).__name__}, not a module")
    return model if device is None else model.to(device)


def make_optimizer(
    given: Any, model: nn.Module, model_was_made: bool, *, takes_closure: bool = False
) -> Any:
    """Return the optimizer, or several by name, made by factories where given; or None."""
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
            raise UsageError(f"optimizer: the function returned a {type(made).__name__}")
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
    unsaved = find_unsaved_parameters(state)
    if unsaved:
        of_loss = {"loss": loss} if isinstance(loss, nn.Module) else {}
        shown = describe_parameters(unsaved, of_loss)
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
    """Make a Trainer's default loggers: a progress bar, and JSON lines unless encrypted."""
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


def _is_available(device: torch.device) -> bool:
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        return False
    if not module.is_available():
        return False
    return device.index is None or device.index < int(module.device_count())


_LEFT_OUT = frozenset({"checkpoints", "stop", "log", "log_every", "progress", "device"})
_DESCRIBED = frozenset({"model", "optimizer", "scheduler", "data", "state", "callbacks"})
_POSITION = frozenset({"epoch", "batch"})


def config_of(
    given: Arguments,
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: Any,
    schedulers: Mapping[str, Any],
) -> dict[str, str]:
    """Describe the arguments `given` to a Trainer, and what it has made of them, as text."""
    names = [item.name for item in fields(given)]
    plain = [name for name in names if name not in _LEFT_OUT | _DESCRIBED]
    found = {name: as_text(getattr(given, name)) for name in plain}
    found["every"], found["keep"] = as_text(checkpoints.every), as_text(checkpoints.keep)
    found["model"], found["optimizer"] = _class(model), _class(optimizer)
    found["model.parameters"] = str(sum(item.numel() for item in model.parameters()))
    found["scheduler"] = ", ".join(map(_class, schedulers.values())) or "None"
    found["state"] = ", ".join(sorted(given.state or ())) or "None"
    own = [item for item in given.callbacks if isinstance(item, Callback)]
    found["callbacks"] = ", ".join(map(_class, own)) or "None"
    return found | config_of_data(given.data)


def config_of_data(data: Any) -> dict[str, str]:
    """Describe the data that is trained on, as text: the entries `data` and `data.…`."""
    found = {"data": _class(data)}
    with suppress(TypeError):  # of an iterable without a length
        found["data.length"] = str(len(data))
    if isinstance(data, Loader):
        state = data.state_dict()
        found |= {f"data.{name}": str(state[name]) for name in state if name not in _POSITION}
    return found


def _class(value: Any) -> str:
    return type(value).__qualname__
