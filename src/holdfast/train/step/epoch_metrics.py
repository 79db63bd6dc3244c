"""Metrics that are not means over batches: objects with `update`, functions over all outputs.

`Scores` updates the metrics of a training or of a validation, computes them over all ranks, and
keeps their state for a checkpoint.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.arguments import shown
from holdfast.errors import UsageError
from holdfast.train.group import Group
from holdfast.train.outputs import Image, StepOutput, picture
from holdfast.train.step.device_metrics import convert_metric

logger = logging.getLogger("holdfast")

Inputs = Callable[[Any, StepOutput], Any]
_MAX_ITEMS = 1000
"""Longest vector that is logged value by value."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Metric together with a function that gives its inputs.

    Measured(BinaryF1Score(), lambda batch, outputs: (outputs.outputs, batch["label"]))
    """

    metric: Any
    """Object with `update`, `compute` and `reset`, or a function."""
    inputs: Inputs
    """Function from a batch and its `StepOutput` to the arguments of `update`: a tuple, a mapping
    for arguments by name, or a tensor."""


class Perplexity:
    """Perplexity: the exponential of the mean loss over all tokens.

    >>> from torch import tensor
    >>> perplexity = Perplexity()
    >>> perplexity.update(tensor(1.0), 3)
    >>> perplexity.update(tensor(2.0), 1)
    >>> round(float(perplexity.compute()), 3)  # exp(5 / 4)
    3.49
    """

    def __init__(self, tokens: Callable[[Any], Tensor | float] | None = None) -> None:
        """Count the tokens of a batch by `tokens`; None: use the weight of the loss."""
        if tokens is not None and not callable(tokens):
            raise UsageError(f"Perplexity: tokens={tokens!r} cannot be called")
        self._tokens = tokens
        self._total: Tensor | float = 0.0
        self._count: Tensor | float = 0.0

    def inputs(self, batch: Any, output: StepOutput) -> tuple[Tensor, Tensor | float]:
        """Return the arguments of `update` for a batch."""
        tokens = output.weight if self._tokens is None else self._tokens(batch)
        if tokens is None:
            raise UsageError(
                "Perplexity: the tokens of a batch are not known: the loss must give them as the "
                "weight of its StepOutput, or Perplexity(tokens=…) count them"
            )
        return output.loss, tokens

    def update(self, loss: Tensor, tokens: Tensor | float) -> None:
        """Add the mean loss over some tokens."""
        count = convert_metric("tokens", tokens)
        self._total = self._total + convert_metric("loss", loss) * count
        self._count = self._count + count

    def compute(self) -> Tensor:
        """Return the perplexity."""
        total, count = (
            torch.as_tensor(value, dtype=torch.float64) if isinstance(value, float) else value
            for value in (self._total, self._count)
        )
        return torch.exp(total / count)

    def reset(self) -> None:
        """Begin anew."""
        self._total = self._count = 0.0

    def merge_state(self, metrics: Iterable[Perplexity]) -> None:
        """Add what metrics of other ranks have."""
        for other in metrics:
            self._total = self._total + other._total
            self._count = self._count + other._count

    def state_dict(self) -> dict[str, float]:
        """Return the state to save."""
        return {"total": float(self._total), "count": float(self._count)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state."""
        self._total, self._count = float(state["total"]), float(state["count"])

    def __getstate__(self) -> dict[str, float]:
        # For other ranks, which do not have this one's device.
        return self.state_dict()

    def __setstate__(self, state: Mapping[str, float]) -> None:
        self._tokens = None
        self.load_state_dict(state)


class _Score(ABC):
    """Interface to a metric of any kind: an object, one of torchmetrics, or a function."""

    @abstractmethod
    def add_values(self, values: Any) -> None: ...
    @abstractmethod
    def compute_metric(self) -> Any: ...
    @abstractmethod
    def reset_metric(self) -> None: ...
    @abstractmethod
    def export_state(self) -> Any: ...
    @abstractmethod
    def restore_state(self, state: Any) -> None: ...

    def make_undo(self) -> Callable[[], None]:
        return partial(self.restore_state, self.export_state())


class Scores:
    """Metrics by name, of one training or of one validation."""

    def __init__(
        self, metrics: Mapping[str, Any], group: Group, *, what: str, is_saved: bool = False
    ) -> None:
        """Check the metrics; `what` names the argument in errors; `is_saved`: they have a state."""
        if not isinstance(metrics, Mapping):
            raise UsageError(f"{what}={shown(metrics)}: must map names to metrics")
        self._what = what
        self._group = group
        self._scores: dict[str, _Score] = {}
        self._inputs: dict[str, Inputs] = {}
        self.objects: list[Any] = []
        """The metrics, as they were given."""
        for name, given in metrics.items():
            self._add_metric(name, given, is_saved)
        self._count = 0
        """Batches since the last reset."""
        self._gathered: list[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self._scores)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; a result that is a mapping has longer ones."""
        return [*self._scores]

    @torch.no_grad()
    def add_batch(self, batch: Any, output: StepOutput) -> None:
        """Add a batch to all metrics."""
        self._count += 1
        self._gathered = None
        for name, score in self._scores.items():
            values = _mapped(Tensor.detach, self._inputs[name](batch, output))
            try:
                score.add_values(values)
            except TypeError as error:
                raise UsageError(
                    f"{self._what}: metric {name!r} does not accept its inputs "
                    f"({_describe_values(values)}): {error}. "
                    "Measured(metric, inputs=…) gives it others"
                ) from error

    def compute_metrics(self) -> tuple[dict[str, Any], dict[str, Image]]:
        """Return numbers and pictures by name, over all ranks, which call this together."""
        numbers: dict[str, Any] = {}
        pictures: dict[str, Image] = {}
        if self._count == 0 and self._group.is_alone:
            return numbers, pictures
        for name, score in self._scores.items():
            with torch.no_grad():
                found = score.compute_metric()
            for full, value in _flatten_result(name, found):
                if isinstance(value, Image):
                    pictures[full] = value
                else:
                    numbers[full] = value
        return numbers, pictures

    def reset_metrics(self) -> None:
        """Begin anew."""
        self._count, self._gathered = 0, None
        for score in self._scores.values():
            score.reset_metric()

    def capture_undo(self) -> Callable[[], None]:
        """Return a function that makes all as it is now; it keeps no copy of outputs."""
        count, undos = self._count, [score.make_undo() for score in self._scores.values()]

        def put_back() -> None:
            self._count, self._gathered = count, None
            for put_back_one in undos:
                put_back_one()

        return put_back

    def gather_states(self) -> None:
        """Gather the states of all ranks for a save, on all ranks together."""
        if not self._group.is_alone:
            self._gathered = self._group.gather_values(_on_host(self._collect_states()))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks to save."""
        ranks = [self._collect_states()] if self._gathered is None else self._gathered
        return {"ranks": ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state; of other ranks or metrics, begin anew with a warning."""
        ranks = state.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise UsageError("not the state of a Trainer's metrics")
        self.reset_metrics()
        if len(ranks) != self._group.world_size:
            self._warn_of_restart(
                [*self._scores], f"they are those of {len(ranks)} ranks", ranks[0]
            )
            return
        own = ranks[self._group.rank]
        lacking, wrong = [], []
        for name, score in self._scores.items():
            if name not in own["metrics"]:
                lacking.append(name)
                continue
            try:
                score.restore_state(own["metrics"][name])
            except (UsageError, KeyError, TypeError, ValueError, RuntimeError) as error:
                score.reset_metric()
                wrong.append(f"{name} ({error})")
        self._count = own["count"]
        self._warn_of_restart(lacking, "the checkpoint lacks them", own)
        self._warn_of_restart(wrong, "their state in the checkpoint does not fit", own)

    def _warn_of_restart(self, names: Sequence[str], why: str, own: Mapping[str, Any]) -> None:
        if names and own["count"]:
            logger.warning(
                "metrics %s start over in the middle of the epoch: %s", ", ".join(names), why
            )

    def _collect_states(self) -> dict[str, Any]:
        states = {name: score.export_state() for name, score in self._scores.items()}
        return {"count": self._count, "metrics": states}

    def _add_metric(self, name: Any, given: Any, is_saved: bool) -> None:
        if not isinstance(name, str) or not name or name in ("loss", "grad_norm"):
            raise UsageError(f"{self._what}: {name!r} cannot be the name of a metric")
        where = f"{self._what}: metric {name!r}"
        metric = given.metric if isinstance(given, Measured) else given
        if isinstance(given, Measured):
            if not callable(given.inputs):
                raise UsageError(f"{where}: inputs={given.inputs!r} cannot be called")
            self._inputs[name] = given.inputs
        elif isinstance(metric, Perplexity):
            self._inputs[name] = metric.inputs
        else:
            self._inputs[name] = _outputs_for(where)
        self._scores[name] = _score_of(metric, self._group, where, is_saved)
        self.objects.append(metric)


def check_apart(trained: Scores, validated: Iterable[Mapping[str, Any]]) -> None:
    """Check that no validation resets a metric of the training."""
    of_training = {*map(id, trained.objects)}
    for metrics in validated:
        for name, given in metrics.items():
            metric = given.metric if isinstance(given, Measured) else given
            if id(metric) in of_training and hasattr(metric, "reset"):
                raise UsageError(
                    f"validation metrics: {name!r} is also among the Trainer's "
                    "metrics: create an object for each"
                )


def _outputs_for(where: str) -> Inputs:
    def inputs(batch: Any, output: StepOutput) -> Any:
        if output.outputs is None:
            raise UsageError(
                f"{where}: the loss gives no outputs: let it return StepOutput(loss, outputs=…), "
                "or give Measured(metric, inputs=…)"
            )
        return output.outputs

    return inputs


def _score_of(metric: Any, group: Group, where: str, is_saved: bool) -> _Score:
    if isinstance(metric, type):
        raise UsageError(f"{where} is a class: give an object of it")
    missing = [
        name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))
    ]
    if "update" in missing and "compute" in missing and callable(metric):
        return _Function(metric, group)
    if missing:
        raise UsageError(
            f"{where}: {shown(metric)} has no {', '.join(missing)}: must be an object with update, "
            "compute and reset, a function of all outputs, or Measured"
        )
    if _syncing(metric):
        return _Syncing(metric)
    if not group.is_alone and not callable(getattr(metric, "merge_state", None)):
        raise UsageError(
            f"{where}: {type(metric).__name__} cannot be computed over {group.world_size} ranks: "
            "give a metric of torchmetrics, one with merge_state(other metrics), or a function"
        )
    saves = all(callable(getattr(metric, name, None)) for name in ("state_dict", "load_state_dict"))
    if is_saved and not saves:
        raise UsageError(
            f"{where}: {type(metric).__name__} has no state_dict and load_state_dict, so that a "
            "resume within an epoch would lose its counts"
        )
    return _Merging(metric, group)


def _syncing(metric: Any) -> list[tuple[str, Any]]:
    """List the metrics of torchmetrics in an object, by path: itself, or those it is made of."""
    if not isinstance(metric, nn.Module):
        return []
    if hasattr(metric, "compute_groups"):
        # Metrics of a group share one state, which this gives to all of them.
        metric.items(keep_base=True, copy_state=True)  # type: ignore[operator]
    needed = ("metric_state", "sync_context", "update_count")
    return [
        (path, module)
        for path, module in metric.named_modules()
        if all(hasattr(type(module), name) for name in needed)
    ]


class _Syncing(_Score):
    """Metric of torchmetrics, which exchanges its state in `compute`, on all ranks together."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._device: torch.device | None = None

    def add_values(self, values: Any) -> None:
        device = next((item.device for item in tensors_in(values)), None)
        if device is not None and device != self._device:
            self._metric.to(device)
            self._device = device
        _call_with_values(self._metric.update, values)

    def compute_metric(self) -> Any:
        return self._metric.compute()

    def reset_metric(self) -> None:
        self._metric.reset()

    def export_state(self) -> Any:
        """Return all states, which torchmetrics leaves out of its state dict by default."""
        inner = [
            {"path": path, "count": module.update_count, "values": _cloned(module.metric_state)}
            for path, module in _syncing(self._metric)
        ]
        return {"kept": _cloned(dict(self._metric.state_dict())), "states": inner}

    def restore_state(self, state: Any) -> None:
        inner = _syncing(self._metric)
        found = [(item["path"], {*item["values"]}) for item in state["states"]]
        if found != [(path, {*module.metric_state}) for path, module in inner]:
            raise UsageError("it has other states")
        self._metric.load_state_dict(state["kept"])
        for item, (_, module) in zip(state["states"], inner, strict=True):
            for name, value in item["values"].items():
                setattr(module, name, _cloned(value))
            module._update_count = item["count"]
            module._computed = None
        self._device = None


class _Merging(_Score):
    """Object with `update` and `compute`; `merge_state` adds what those of other ranks have."""

    def __init__(self, metric: Any, group: Group) -> None:
        self._metric = metric
        self._group = group

    def add_values(self, values: Any) -> None:
        _call_with_values(self._metric.update, values)

    def compute_metric(self) -> Any:
        if self._group.is_alone:
            return self._metric.compute()
        first, *others = self._group.gather_values(self._metric)
        first.merge_state(others)
        return first.compute()

    def reset_metric(self) -> None:
        self._metric.reset()

    def export_state(self) -> Any:
        get = getattr(self._metric, "state_dict", None)
        return None if get is None else _cloned(get())

    def restore_state(self, state: Any) -> None:
        self._metric.load_state_dict(_cloned(state))


class _Function(_Score):
    """Function of the outputs of all batches, concatenated over batches and ranks."""

    def __init__(self, function: Callable[..., Any], group: Group) -> None:
        self._function = function
        self._group = group
        self._parts: dict[str, list[Tensor]] = {}
        self._has_names = False

    def add_values(self, values: Any) -> None:
        self._has_names = isinstance(values, Mapping)
        named = values if self._has_names else _name_by_position(values)
        wrong = [str(name) for name, value in named.items() if not isinstance(value, Tensor)]
        if wrong or not all(isinstance(name, str) for name in named):
            raise UsageError(
                f"a metric that is a function needs tensors, and got {_describe_values(values)}: "
                "give Measured(function, inputs=…)"
            )
        if self._parts and self._parts.keys() != named.keys():
            raise UsageError(f"a metric got {[*named]}, and {[*self._parts]} before")
        for name, value in named.items():
            rows = value.reshape(1) if value.dim() == 0 else value
            parts = self._parts.setdefault(name, [])
            if parts and parts[-1].device != rows.device:  # loaded to the host
                parts[:] = [part.to(rows.device) for part in parts]
            parts.append(rows.clone())

    def compute_metric(self) -> Any:
        own = {name: torch.cat(parts) for name, parts in self._parts.items()}
        if self._group.is_alone:
            joined = own
        else:
            ranks = [found for found in self._group.gather_values(_on_host(own)) if found]
            names = ranks[0] if ranks else {}
            joined = {name: torch.cat([found[name] for found in ranks]) for name in names}
        if not joined:
            return {}
        return self._function(**joined) if self._has_names else self._function(*joined.values())

    def reset_metric(self) -> None:
        self._parts = {}

    def export_state(self) -> Any:
        # One tensor each, as the parts are never looked at by themselves.
        parts = {name: torch.cat(several) for name, several in self._parts.items()}
        return {"parts": parts, "has_names": self._has_names}

    def restore_state(self, state: Any) -> None:
        self._parts = {name: [_cloned(value)] for name, value in state["parts"].items()}
        self._has_names = state["has_names"]

    def make_undo(self) -> Callable[[], None]:
        # Parts are only ever added.
        kept = [(name, parts, len(parts)) for name, parts in self._parts.items()]
        has_names = self._has_names

        def put_back() -> None:
            self._parts = {name: parts[:count] for name, parts, count in kept}
            self._has_names = has_names

        return put_back


def _call_with_values(function: Callable[..., Any], values: Any) -> None:
    if isinstance(values, Mapping):
        function(**values)
    else:
        function(*_name_by_position(values).values())


def _name_by_position(values: Any) -> dict[str, Any]:
    several = values if isinstance(values, list | tuple) else (values,)
    return {str(at): value for at, value in enumerate(several)}


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to the tensors of a nested value; other leaves stay."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        mapped = [_mapped(function, item) for item in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return value


def _cloned(value: Any) -> Any:
    return _mapped(lambda tensor: tensor.detach().clone(), value)


def _on_host(value: Any) -> Any:
    return _mapped(lambda tensor: tensor.detach().cpu(), value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a nested value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def _describe_values(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"a mapping with {[*values][:10]}"
    kinds = [type(item).__name__ for item in _name_by_position(values).values()]
    return ", ".join(kinds[:10])


def _flatten_result(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and pictures of a result by their names."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten_result(f"{name}/{key}", item)
    elif not isinstance(value, Tensor | np.ndarray):
        yield name, value
    elif value.ndim == 1 and 1 < len(value) <= _MAX_ITEMS:
        for at, item in enumerate(value):
            yield f"{name}/{at}", item
    elif value.ndim == 2 and value.shape[0] and value.shape[1]:
        yield name, picture(value.tolist())
    else:
        yield name, value
