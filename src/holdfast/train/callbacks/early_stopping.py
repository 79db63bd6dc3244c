"""Ready-made callbacks: stops by a condition, pruning of weights, and collection of garbage.

Weights are pruned by `torch.nn.utils.prune`.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError, listing
from holdfast.format.manifest import Mode
from holdfast.policy.clock import Time, Unit
from holdfast.policy.direction import mode_for
from holdfast.train.argument_checks import check_range
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.results import Checkpoint

logger = logging.getLogger("holdfast")


class StopWhen(Callback):
    """Ends `fit` after the step at which a condition holds.

        StopWhen(lambda training, metrics: metrics.get("val/loss", 1.0) < 0.01)

    The condition is called after each step, with the metrics of the step, and after each
    validation, with those of the validation. Reading a metric of a step waits for the
    accelerator. A rerun calls it for the checkpoint, with all metrics of its step: a stopped
    run stays stopped, unless the condition has changed by then.
    """

    def __init__(
        self, condition: Callable[[Training, Metrics], bool], reason: str = "its condition holds"
    ) -> None:
        """Stop when `condition` holds; `reason` becomes the `detail` of the outcome."""
        if not callable(condition):
            raise UsageError(f"StopWhen: {condition!r} cannot be called")
        self._condition = condition
        self._reason = reason
        self._asked: list[str] = []
        self.watches = self._asked

    def resumed(self, training: Training, checkpoint: Checkpoint) -> None:
        """Check the condition for the step of the checkpoint, if its metrics are known."""
        if checkpoint.metrics:
            self._check_condition(training, checkpoint.metrics)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Check the condition after the step."""
        self._check_condition(training, metrics)

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """Check the condition after the validation."""
        self._check_condition(training, metrics)

    def _check_condition(self, training: Training, metrics: Metrics) -> None:
        if self._condition(training, _LookedUp(metrics, self._asked)):
            training.request_stop(self._reason)


class _LookedUp(Mapping[str, float]):
    """Metrics that note which names are looked up, whether they exist or not."""

    def __init__(self, metrics: Metrics, names: list[str]) -> None:
        self._metrics = metrics
        self._names = names

    def __getitem__(self, name: str) -> float:
        if name not in self._names:
            self._names.append(name)
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


class EarlyStopping(Callback):
    """Ends `fit` when a metric of validations has stopped improving.

    The best value and the count are in the checkpoints: a resumed run ends at the same step as an
    undisturbed one, and a rerun of an ended run trains nothing, unless `patience` was raised.
    """

    def __init__(
        self,
        metric: str = "val/loss",
        *,
        mode: Mode | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        name: str | None = None,
    ) -> None:
        """Set the validation metric to watch, and how long it may fail to improve.

        Args:
            metric: its full name, as in the log.
            mode: whether low ("min") or high values ("max") are good. None: as the name of the
                metric shows, if it is well known.
            patience: ends at so many validations in a row without a better value; NaN is none.
            min_delta: by how much a value must be better than the best one.
            name: see `Callback`; needed if there are several.
        """
        known = mode_for(
            metric,
            mode,
            what="EarlyStopping",
            say=f"say EarlyStopping({metric!r}, mode='max') or mode='min'",
        )
        if not metric.startswith("val/"):
            raise UsageError(
                f"EarlyStopping({metric!r}): counts validations, whose metrics begin with 'val/'. "
                "For a metric of steps, use StopWhen(condition)"
            )
        check_range("EarlyStopping: patience", patience, 1, 2**31)
        if not isinstance(min_delta, int | float) or not 0 <= min_delta < math.inf:
            raise UsageError(f"EarlyStopping: min_delta={min_delta!r} must be 0 or above")
        if name is not None:
            self.name = name
        self.metric = metric
        self.patience = patience
        self.best: float | None = None
        """The best value so far."""
        self.num_waited = 0
        """Number of validations in a row without a better value."""
        self._sign = 1 if known == "min" else -1
        self._min_delta = min_delta
        self.watches = (metric,)

    def fit_start(self, training: Training) -> None:
        """Request a stop if an earlier process exhausted the patience."""
        self._stop_if_over(
            training,
            remedy=f" before this start. To train further, raise patience={self.patience}, or "
            "remove EarlyStopping",
        )

    def validation_end(self, training: Training, name: str, metrics: Metrics) -> None:
        """Compare the metric with the best value, if the validation has it."""
        if training.manager is None or self.metric not in metrics:
            return  # a validation outside of `fit` does not count
        value = metrics[self.metric]
        if self._is_better(value):
            self.best, self.num_waited = value, 0
        else:
            self.num_waited += 1
        self._stop_if_over(training)

    def state_dict(self) -> dict[str, float | None]:
        """Return the best value, and the number of validations without a better one."""
        return {"best": self.best, "num_waited": self.num_waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value and the count of an earlier process."""
        if set(state) != {"best", "num_waited"}:
            raise UsageError(f"not the state of EarlyStopping: {sorted(state)}")
        self.best, self.num_waited = state["best"], state["num_waited"]

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best is None or self._sign * (self.best - value) > self._min_delta

    def _stop_if_over(self, training: Training, remedy: str = "") -> None:
        if self.num_waited >= self.patience:
            training.request_stop(
                f"{self.metric} has been no better than {self.best} in {self.num_waited} "
                f"validations{remedy}"
            )


class CollectGarbage(Callback):
    """Collects Python's garbage at the same steps on all ranks, and at no other time in `fit`.

    Automatic collection starts at different moments on different ranks, and each rank then waits
    for the slowest one. It is off while `fit` runs. Its former state is restored when `fit` ends,
    also by an error.

    Args:
        every: number of steps between collections, such as "100step".
    """

    @check_arguments(but=("every",))
    def __init__(self, every: str | Time = "100step") -> None:
        self._every = int(Time.parse(every, what="CollectGarbage: every", units=(Unit.STEP,)).value)
        self._must_enable = False

    def fit_start(self, training: Training) -> None:
        """Turn automatic collection off, and collect once."""
        self._must_enable = gc.isenabled()
        gc.disable()
        gc.collect()

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Collect if the step is due."""
        if training.counters.step % self._every == 0:
            gc.collect()

    def close(self, training: Training) -> None:
        """Turn automatic collection on again if it was on."""
        if self._must_enable:
            self._must_enable = False
            gc.enable()


Method = Literal["l1_unstructured", "random_unstructured", "ln_structured", "random_structured"]

_DEFAULT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WEIGHT, _MASK = "weight", "weight_mask"


class Pruning(Callback):
    """Prunes a growing fraction of the weights of modules, at given steps.

        Pruning({1_000: 0.2, 2_000: 0.5, 3_000: 0.8})

    The modules are rebuilt before the optimizer is made, by `torch.nn.utils.prune`: a `weight`
    becomes `weight_orig`, which is trained, and `weight_mask`. Both are in every checkpoint, from
    the first one on, so that a resume continues with the masks; a checkpoint without masks is
    refused, and so is one with masks where nothing is pruned (`MismatchError`). The average of
    the weights gets the same masks.

    For a dense model of the result, call `torch.nn.utils.prune.remove(module, "weight")`.
    """

    priority = 100
    """High priority: masks are updated before other callbacks see the end of the step."""

    def __init__(
        self,
        amounts: Mapping[int, float],
        *,
        method: Method = "l1_unstructured",
        modules: Collection[str] | None = None,
    ) -> None:
        """Prune by `amounts`, a schedule from steps to fractions of the weights.

        Args:
            amounts: after which step (0: before the first) which part of each module's weights is
                pruned; steps and parts must grow.
            method: as in `torch.nn.utils.prune`. The structured ones prune whole outputs (of the
                least L2 norm, for "ln_structured").
            modules: names in the model; None: all linear and convolutional ones.
        """
        if method not in get_args(Method):
            raise UsageError(f"Pruning: method={method!r}: choose from {get_args(Method)}")
        _check_amounts(amounts)
        self._amounts = dict(amounts)
        self._method = method
        self._names = None if modules is None else list(modules)
        self._pruned: list[str] = []

    def model_made(self, training: Training) -> None:
        """Give every module that will be pruned a mask of ones."""
        self._pruned = self._choose_modules(training.model)
        with torch.no_grad():  # a weight that is part of a graph could not be copied
            for module in self._modules(training.model):
                if not prune.is_pruned(module):
                    prune.identity(module, _WEIGHT)  # type: ignore[no-untyped-call]

    def fit_start(self, training: Training) -> None:
        """Prune before the first step, if `amounts` has an entry for step 0."""
        if training.counters.step == 0:
            self._prune_models(training)

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Prune, if `amounts` has an entry for the step."""
        self._prune_models(training)

    def _prune_models(self, training: Training) -> None:
        amount = self._amounts.get(training.counters.step)
        if amount is None:
            return
        with torch.no_grad():
            for module in self._modules(training.model):
                self._prune_module(module, amount)
            if training.ema is not None:
                models = (training.model, training.ema.model)
                for module, average in zip(*map(self._modules, models), strict=True):
                    average.get_buffer(_MASK).copy_(module.get_buffer(_MASK))
        if any(one.records_log and type(one).log is not Callback.log for one in training.callbacks):
            training.log({"sparsity": sparsity(training.model)})

    def _prune_module(self, module: nn.Module, amount: float) -> None:
        mask = module.get_buffer(_MASK)
        is_structured = self._method.endswith("_structured")
        kept = mask.flatten(1).any(dim=1) if is_structured else mask
        num_more = round(amount * kept.numel()) - int((kept == 0).sum())
        if num_more > 0:
            _prune_weights(module, self._method, num_more)

    def _choose_modules(self, model: nn.Module) -> list[str]:
        modules = dict(model.named_modules())
        if self._names is None:
            chosen = [name for name, module in modules.items() if isinstance(module, _DEFAULT)]
            if not chosen:
                raise UsageError("Pruning: the model has no linear or convolutional module")
            return chosen
        wrong = [name for name in self._names if not _has_weight(modules.get(name))]
        if wrong or not self._names:
            raise UsageError(
                f"Pruning: modules={wrong} are no modules with a weight; there are:\n"
                + listing([name for name, module in modules.items() if _has_weight(module)])
            )
        return self._names

    def _modules(self, model: nn.Module) -> Iterator[nn.Module]:
        return (model.get_submodule(name) for name in self._pruned)


def sparsity(model: nn.Module) -> float:
    """Compute the pruned fraction of weights with a mask; waits for the accelerator."""
    masks = [mask for name, mask in model.named_buffers() if name.endswith(_MASK)]
    total = sum(mask.numel() for mask in masks)
    return sum(int((mask == 0).sum()) for mask in masks) / total if total else 0.0


def _prune_weights(module: nn.Module, method: Method, num_more: int) -> None:
    """Prune `num_more` weights, or outputs, that are not pruned yet."""
    options = {"dim": 0} if method.endswith("_structured") else {}
    if method == "ln_structured":
        options["n"] = 2
    getattr(prune, method)(module, _WEIGHT, num_more, **options)


def _has_weight(module: nn.Module | None) -> bool:
    if module is None:
        return False
    return isinstance(getattr(module, _WEIGHT, None), Tensor)


def _check_amounts(amounts: Mapping[int, float]) -> None:
    if not amounts:
        raise UsageError("Pruning: amounts={} must not be empty")
    last_step, last = -1, 0.0
    for step, amount in amounts.items():
        check_range("Pruning: step", step, 0, 2**63)
        if isinstance(amount, bool) or not 0 < amount < 1:
            raise UsageError(f"Pruning: {amount!r} at step {step}: must be between 0 and 1")
        if step <= last_step or amount <= last:
            raise UsageError(f"Pruning: amounts={dict(amounts)}: steps and amounts must increase")
        last_step, last = step, amount
