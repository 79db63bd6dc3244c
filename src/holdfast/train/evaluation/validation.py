"""Validation during training: its schedule, its loaders and checks, and its metrics.

Restores the training's state afterwards: modes of modules, random generators, and the positions of
its own loaders, to their beginning.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.arguments import shown
from holdfast.data.randomness import preserved
from holdfast.errors import UsageError, listing
from holdfast.format.manifest import Timestamp
from holdfast.policy.clock import ALL_UNITS, Time, Unit, parse
from holdfast.policy.triggers import Every
from holdfast.state.generators import device_generators
from holdfast.train.argument_checks import check_range
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.curves import EpochLength
from holdfast.train.outputs import Image, StepOutput
from holdfast.train.step.device_metrics import LazyMetrics, Mean, convert_metric, mean_of_ranks
from holdfast.train.step.epoch_metrics import Scores, tensors_in
from holdfast.train.step.step import LossFunction, Update, evaluate, moved
from holdfast.train.step.undo import StepUndo
from holdfast.train.training import OF_VALIDATION, Metrics, evaluating

logger = logging.getLogger("holdfast")

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Downstream:
    """A check of the weights without a loader, such as the quality of generated text.

    Runs after the loaders of the `Validation` that it belongs to, in eval mode and without
    gradients. Its metrics are `val/<name>/<metric>`, in the log and in the checkpoint of the step.
    """

    name: str
    """Name of the check, unique among loaders and checks."""
    run: Callable[[nn.Module], Mapping[str, Any]]
    """Function from the validated model to metrics, each of them one number."""
    every_n_vals: int = 1
    """Run at each n-th of the regular validations, and always at the last one, when the
    goal is reached."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UsageError(f"downstream name={self.name!r}: must be a text")
        if not callable(self.run):
            raise UsageError(f"downstream {self.name!r}: run={self.run!r} cannot be called")
        check_range(f"downstream {self.name!r}: every_n_vals", self.every_n_vals, 1, 2**63)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Plan of validation: loaders, checks and interval."""

    data: Any
    """A loader, or several by name. Each is read from its beginning every time: a `Loader` draws
    the same random numbers again, a torch `DataLoader` new ones."""
    every: str | Time = "1ep"
    """Interval, such as "500step", "1e6tok" or "0.1dur" (ten times in the whole run). A part of an
    epoch, such as "0.5ep", is that part of its optimizer steps, counted from the beginning of the
    run, and needs data with a length."""
    batches: int | None = None
    """Limit of the batches of each loader; None: all."""
    at_end: bool = True
    """Whether to validate when the goal is reached, also if it is not due."""
    loss: LossFunction | None = None
    """Function that computes a batch's mean loss and metrics; None: the Trainer's."""
    use_ema: bool = True
    """Whether to validate the averaged weights, if the Trainer keeps an average."""
    weigh: Callable[[Any], float] | None = None
    """Weight of a batch in the means; None: the weight that the loss gives, or its samples, as the
    Trainer counts them, or else the first dimension of its first tensor."""
    name: str = ""
    """Name that distinguishes several validations: metrics are then `val/<name>/…`."""
    downstream: Sequence[Downstream] = ()
    """Further checks at each, or each n-th, of these validations."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that are no means, by name: objects with `update`, `compute` and `reset`, such as
    torchmetrics, functions of all outputs, or `Measured`; each is of one loader at a time. They get
    the `outputs` of the loss function's `StepOutput`."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UsageError(f"validation name={self.name!r}: must be a text")
        wrong = [item for item in self.downstream if not isinstance(item, Downstream)]
        if wrong:
            raise UsageError(f"validation downstream: {wrong[0]!r} is not a Downstream")
        if self.trigger.unit is Unit.SECOND:
            raise UsageError(
                f"validation every='{self.every}': by the clock it would not be the same after a "
                "resume; use steps, epochs, samples or tokens"
            )
        if self.batches is not None:
            check_range("validation batches", self.batches, 1, 2**63)

    @property
    def trigger(self) -> Every:
        """Trigger at which validation is due, parsed from `every`."""
        given: object = self.every
        if isinstance(given, int | float):
            raise UsageError(
                f"validation every={given!r}: it has no unit: '0.5ep' is half of an "
                "epoch, '0.5dur' half of the whole run, '500step' each 500 steps of the "
                "optimizer"
            )
        return Every(parse(self.every, what="validation every", units=ALL_UNITS, parts=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPart:
    """A unit of validation: all loaders of a `Validation`, or one of its checks."""

    plan: Validation
    names: tuple[str, ...]
    """Prefixes of the names of its metrics, after `val/`."""
    every_n_vals: int
    run: Callable[[nn.Module], dict[str, float]]

    @property
    def name(self) -> str:
        """Unique name of the part: the first of `names`."""
        return self.names[0]

    def on(self, model: nn.Module, live: nn.Module) -> dict[str, float]:
        """Compute the metrics of `model`; `live`, the trained module, is in eval mode as well."""
        with undisturbed(), evaluating(live, model), torch.no_grad():
            return self.run(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Validator:
    """Runs one `Validation`: its loaders and its checks."""

    plan: Validation
    update: Update
    """Training step, whose loss function, precision and device are used."""
    weigh: Callable[[Any], float]
    kind: str
    """First part of the names of metrics."""
    undo: StepUndo
    """Undo of a validation that a stop interrupts, in a fetch or a forward pass."""
    _loaders: dict[str, Restarting] = field(init=False)
    _scores: Scores = field(init=False)

    def __post_init__(self) -> None:
        data = self.plan.data
        named = dict(data) if isinstance(data, Mapping) else {"": data}
        if not named or not all(isinstance(name, str) for name in named):
            raise UsageError("validation data: give a loader, or some by name")
        loaders = {self._prefix_name(name): Restarting(loader) for name, loader in named.items()}
        object.__setattr__(self, "_loaders", loaders)
        for name, loader in named.items():
            _warn_of_repeated(name, loader)
        what = f"validation {self.plan.name!r}: metrics" if self.plan.name else "validation metrics"
        scores = Scores(self.plan.metrics, self.update.parallel.group, what=what)
        object.__setattr__(self, "_scores", scores)

    @property
    def validation_parts(self) -> tuple[ValidationPart, ...]:
        """Parts of the validation: its loaders, then its checks."""
        loaders = ValidationPart(
            plan=self.plan, names=tuple(self._loaders), every_n_vals=1, run=self._run_loaders
        )
        checks = [
            ValidationPart(
                plan=self.plan,
                names=(self._prefix_name(check.name),),
                every_n_vals=check.every_n_vals,
                run=partial(self._run_check, check),
            )
            for check in self.plan.downstream
        ]
        return (loaders, *checks)

    def _prefix_name(self, name: str) -> str:
        return "/".join(filter(None, (self.plan.name, name)))

    def _run_loaders(self, model: nn.Module) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, loader in self._loaders.items():
            self._call_validation_start(name)
            metrics, pictures = self._metrics(loader, model)
            found |= self._call_end_hook(name, metrics)
            for of, image in pictures.items():
                full = f"{_prefix(name, self.kind)}{of}"
                self.update.callbacks.call_hook(Callback.log_image, full, image)
        return found

    def _run_check(self, check: Downstream, model: nn.Module) -> dict[str, float]:
        name = self._prefix_name(check.name)
        self._call_validation_start(name)
        with self.undo.waiting():
            found = check.run(model)
        mean = Mean()
        values, kinds = self.update.numbers.reduced(found)
        mean.add_batch(values, 1.0, kinds)
        return self._call_end_hook(
            name, mean_of_ranks(self.update.parallel.group, mean).compute_means()
        )

    def _call_validation_start(self, name: str) -> None:
        """Call `validation_start` for a loader or a check."""
        self.update.callbacks.call_hook(Callback.validation_start, name)
        self.undo.validation_started()

    def _call_end_hook(self, name: str, found: Mapping[str, Any]) -> dict[str, float]:
        """Call `validation_end` for a loader or a check; returns its metrics by full names."""
        values = LazyMetrics(found)
        if not values:
            raise UsageError(
                f"validation data {name!r} returned no batch, or a check returned no metric"
            )
        metrics = {f"{_prefix(name, self.kind)}{metric}": value for metric, value in values.items()}
        self.update.callbacks.call_hook(Callback.validation_end, name, metrics)
        return metrics

    def _metrics(
        self, loader: Restarting, model: nn.Module
    ) -> tuple[Mapping[str, Any], dict[str, Image]]:
        """Return the metrics of a loader, and their pictures."""
        mean, update, tell = Mean(), self.update, self.update.callbacks.call_hook
        self._scores.reset_metrics()
        has_weights: bool | None = None
        for given in self._fetch(loader):
            batch = moved(given, update.device)
            tell(Callback.validation_batch_start, batch)
            with update.numerics.autocast(), self.undo.waiting():
                output = evaluate(self.plan.loss or update.validation_loss, model, batch)
            has_weight = output.weight is not None
            if has_weights not in (None, has_weight):
                raise UsageError("validation: the loss gives some batches a weight, others none")
            has_weights = has_weight
            is_own = not loader.fills_in
            if not is_own:  # after the forward pass, in which other ranks take part
                output = replace(output, weight=0.0)
            found, kinds = update.numbers.reduced({"loss": output.loss, **output.metrics})
            mean.add_batch(found, self._weight(given, output), kinds, is_own=is_own)
            if self._scores and is_own:
                self._scores.add_batch(batch, output)
            tell(Callback.validation_batch_end, batch, output)
        means = mean_of_ranks(update.parallel.group, mean).compute_means()
        if not self._scores or not means:
            return means, {}
        scored, pictures = self._scores.compute_metrics()
        self._scores.reset_metrics()
        taken = [name for name in scored if name in means]
        if taken:
            raise UsageError(f"validation metrics: the loss gives metrics named {taken}, too")
        return {**means, **update.numbers(scored)}, pictures

    def _weight(self, given: Any, output: StepOutput) -> Tensor | float:
        if output.weight is None or self.plan.weigh is not None:
            return self.weigh(given)
        return convert_metric("weight", output.weight)

    def _fetch(self, loader: Restarting) -> Iterator[Any]:
        batches = islice(loader.batches(), self.plan.batches)
        while True:
            with self.undo.waiting():
                found = next(batches, _END)
            if found is _END:
                return
            yield found


def plans_of(given: Any) -> list[Validation]:
    """Convert the argument `validate` (loaders, or `Validation` plans) to a list of plans."""
    if given is None:
        return []
    if isinstance(given, Validation):
        return [given]
    if isinstance(given, list | tuple) and any(isinstance(item, Validation) for item in given):
        wrong = [item for item in given if not isinstance(item, Validation)]
        if wrong:
            raise UsageError(f"validate: {wrong[0]!r} is not a Validation, as others are")
        return list(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UsageError(
            f"validate={shown(given)}: must be a loader, loaders by name or Validation"
        )
    return [Validation(data=given)]


class TrainerValidations:
    """All validations of a Trainer; decides which are due and not done yet."""

    def __init__(self, validators: Sequence[Validator]) -> None:
        """Combine validators; raises `UsageError` if two would give metrics of the same names."""
        self.parts = tuple(part for validator in validators for part in validator.validation_parts)
        counts = Counter(name for part in self.parts for name in part.names)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise UsageError(
                f"validation: two have the name {twice[0]!r}; give each Validation, loader and "
                "check a name of its own"
            )
        self._intervals: dict[int, tuple[Unit, Any]] = {}
        self._done: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.parts)

    def compute_intervals(self, goal: Time, epoch: EpochLength) -> None:
        """Compute the intervals for a goal and the length of an epoch."""
        for at, part in enumerate(self.parts):
            every = epoch.resolved(part.plan.trigger, "validation every").resolve(goal)
            self._intervals[at] = every.unit, every.size

    def start_at_step(self, step: int, known: Metrics) -> None:
        """Begin at `step`; parts with metrics in `known` count as done there."""
        owners = {self._owner(name) for name in known if name.startswith("val/")}
        self._done = {at: step for at in owners if at is not None}

    def count_due_parts(
        self, before: Timestamp, now: Timestamp, *, is_last: bool
    ) -> list[ValidationPart]:
        """Return the parts whose interval has passed since `before`, and count them as done."""
        due = self._due_indices(before, now, is_last)
        self._done.update(dict.fromkeys(due, now.step))
        return [self.parts[at] for at in due]

    def names_due(self, before: Timestamp, now: Timestamp, *, is_last: bool) -> list[str]:
        """Return the names of the parts that `due` would return, without counting them as done."""
        return [self.parts[at].name for at in self._due_indices(before, now, is_last)]

    def count_named_parts(self, names: Sequence[str], step: int) -> list[ValidationPart]:
        """Return the parts with these names, and count them as done at `step`."""
        missed = [at for at, part in enumerate(self.parts) if part.name in names]
        self._done.update(dict.fromkeys(missed, step))
        return [self.parts[at] for at in missed]

    def has_run(self, metric: str) -> bool:
        """Whether the part that would compute a metric has run; True if no part would."""
        owner = self._owner(metric)
        return owner is None or owner in self._done

    def owner_of(self, metric: str) -> str | None:
        """Return the name of the part that computes this metric; None: no part does."""
        at = self._owner(metric)
        return None if at is None else self.parts[at].name

    def _due_indices(self, before: Timestamp, now: Timestamp, is_last: bool) -> list[int]:
        return [
            at
            for at in range(len(self.parts))
            if self._done.get(at) != now.step and self._is_due(at, before, now, is_last)
        ]

    def _is_due(self, at: int, before: Timestamp, now: Timestamp, is_last: bool) -> bool:
        part, (unit, size) = self.parts[at], self._intervals[at]
        if is_last and part.plan.at_end:
            return True
        every_n = 1 if is_last else part.every_n_vals
        passed = [(unit.read_progress(stamp) or 0) // (size * every_n) for stamp in (before, now)]
        return bool(passed[0] < passed[1])

    def _owner(self, metric: str) -> int | None:
        """Find the part that computes this metric: the one with the longest matching prefix."""
        named = [(_prefix(name), at) for at, part in enumerate(self.parts) for name in part.names]
        fitting = [(len(prefix), at) for prefix, at in named if metric.startswith(prefix)]
        return max(fitting)[1] if fitting else None


def _prefix(name: str, kind: str = "val") -> str:
    return f"{kind}/{name}/" if name else f"{kind}/"


def _warn_of_repeated(name: str, loader: Any) -> None:
    """Log a warning if a sampler of torch repeats samples, so that ranks have equally many."""
    sampler: Any = getattr(loader, "sampler", None)
    if not hasattr(sampler, "num_replicas") or not hasattr(sampler, "total_size"):
        return
    num_repeated = sampler.total_size - len(sampler.dataset)
    if num_repeated > 0:
        logger.warning(
            "validation data %r: its DistributedSampler gives %d samples twice, and means and "
            "metrics count them twice. Give a holdfast.data.Loader, which divides the data itself "
            "and counts each sample once",
            name,
            num_repeated,
        )


class Restarting:
    """Validation loader that starts from its first position each time, if it has positions."""

    def __init__(self, loader: Any) -> None:
        if isinstance(loader, str) or not hasattr(loader, "__iter__"):
            raise UsageError(f"validation data: {shown(loader)} is no loader of batches")
        self._loader = loader
        has_position = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._begin = loader.state_dict() if has_position else None

    @property
    def fills_in(self) -> bool:
        """Whether the last batch is a neighbor's sample: fewer samples than ranks were left."""
        return getattr(self._loader, "own_samples", None) == 0

    def batches(self) -> Iterator[Any]:
        """Iterate from the first position; the loader is set back to it afterwards."""
        return iter(self._loader) if self._begin is None else self._from_begin()

    def _from_begin(self) -> Iterator[Any]:
        self._loader.load_state_dict(self._begin)
        try:
            yield from self._loader
        finally:
            self._loader.load_state_dict(self._begin)


def size_of(batch: Any) -> int:
    """Count the samples of a batch: the first dimension of its first tensor."""
    tensor = next((item for item in tensors_in(batch) if item.dim()), None)
    if tensor is None:
        raise UsageError(
            "validation: the number of samples of a batch is unknown; give "
            "counts=Counts(samples=…) or weigh"
        )
    return len(tensor)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the global generators of all devices after the block."""
    devices = [item for several in device_generators().values() for item in several]
    states = [item.get_state() for item in devices]
    with preserved():
        try:
            yield
        finally:
            for item, state in zip(devices, states, strict=True):
                item.set_state(state)


Watchers = Callable[[], Mapping[str, Sequence[str]]]
"""Function that returns who watches, as text, with the names of metrics."""


class WatchedMetricsCheck:
    """Checks, after validations or else epochs, that all watched metrics are known by then."""

    def __init__(
        self, watchers: Watchers, validations: TrainerValidations, of_epochs: Sequence[str] = ()
    ) -> None:
        """Make the check of what `watchers`, called each time, and metrics `of_epochs` are."""
        self._watchers = watchers
        self._validations = validations
        self._of_epochs = of_epochs
        self._waits_for_epoch = bool(of_epochs)
        """Whether metrics of an epoch are still to come."""
        self._seen: set[str] = set()
        self._is_checked = False
        """Whether the first check was made."""
        if not validations and (wrong := [text for _, text in self._unseen()]):
            raise UsageError(f"there is nothing to validate on; give validate=…:\n{listing(wrong)}")

    def saw(self, metrics: Metrics, *, has_epoch: bool = False) -> None:
        """Record names of a step's metrics, until a validation and, if `has_epoch`, an epoch."""
        if not self._is_checked or self._waits_for_epoch:
            self._seen.update(metrics)
        self._waits_for_epoch &= not has_epoch

    def check_watched_metrics(self, metrics: Metrics, *, but_of_steps: bool = False) -> None:
        """Check what is watched after a validation; `metrics` are those of its step.

        A metric of a validation that has not run yet may still come, or of the first epoch.
        `but_of_steps`: metrics of steps may still come, too. Without validations they always may,
        so that a missing one is a warning.
        """
        self._seen.update(metrics)
        wrong = list(self._unseen(but_of_steps=but_of_steps or self._is_checked))
        self._is_checked |= not but_of_steps
        if not wrong:
            return
        known = ", ".join(sorted(self._seen))
        found = f"{listing([text for _, text in wrong])}\nThere are: {known}"
        if self._validations or any(name.startswith(OF_VALIDATION) for name, _ in wrong):
            raise UsageError(f"metrics are watched that are never logged:\n{found}")
        logger.warning("metrics are watched that were not logged in this epoch:\n%s", found)

    def _unseen(self, *, but_of_steps: bool = False) -> Iterator[tuple[str, str]]:
        """Yield name and text of each metric that is not known and not expected later."""
        for who, names in self._watchers().items():
            for name in names:
                is_of_step = not name.startswith(OF_VALIDATION)
                is_of_epoch = any(f"{name}/".startswith(f"{one}/") for one in self._of_epochs)
                if name in self._seen or (is_of_epoch and self._waits_for_epoch):
                    continue
                may_come = but_of_steps and not (is_of_epoch and self._validations)
                if is_of_step and (may_come or not self._seen):
                    continue
                if is_of_step or self._validations.has_run(name):
                    meant = difflib.get_close_matches(name, self._seen, 1, 0.6)
                    hint = f"; is {meant[0]!r} meant?" if meant else ""
                    yield name, f"{who}: {name!r}{hint}"
