"""TrainingArguments as options of ours, transformers' private names, and epochs for its Trainer.

Arguments about checkpoints are translated to options of `Checkpoints`, or refused. Private names
that are used must be in the lists that tests/bridges/test_seams.py reads.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import transformers
import transformers.trainer as theirs
from accelerate.utils import broadcast_object_list
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from tqdm.auto import tqdm
from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback

from holdfast.bridges.parts import Generators, check_direction
from holdfast.checkpoints import Checkpoints, best_rules
from holdfast.data.loader import Loader
from holdfast.errors import UsageError, listing
from holdfast.events import Emitter
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rule import Rule
from holdfast.policy.rules import All, Best, Last, as_rule
from holdfast.results import Checkpoint

_DEFAULT_STEPS = 500
"""`save_steps` of arguments that do not name it."""


def translate_arguments(args: Any, given: Checkpoints, emit: Emitter) -> Checkpoints:
    """Return the options with the retention that TrainingArguments ask for, and report it once.

    An `every` or `keep` in the options wins, with a warning.

    Raises:
        UsageError: an argument cannot be translated; all of them are listed.
    """
    _refuse_arguments(args)
    best = find_best_rule(args)
    if best is not None:
        who = f"greater_is_better={best.mode == 'max'}"
        check_direction(given, emit, best.metric, best.mode, who)
    is_kept = given.keep is not None or _has_local_rule(given)
    limits = _list_limits(args)
    if unused := [*_list_other_intervals(args, given), *(limits if is_kept else ())]:
        emit(
            "warning",
            f"TrainingArguments: {', '.join(unused)}: ignored, because Checkpoints sets "
            f"every={given.every!r}, keep={given.keep!r}",
        )
    if args.push_to_hub and _value_of(args.hub_strategy) == "every_save":
        emit(
            "warning",
            "push_to_hub: nothing is pushed during the training; call trainer.push_to_hub() after "
            'it, and set hub_strategy="end"',
        )
    options = given if is_kept else replace(given, keep=_combine_limits(args, best))
    wanted = [] if is_kept else limits
    if args.load_best_model_at_end and best is not None:
        if all(item.rule.metric != best.metric for item in best_rules(options)):
            options = _keep_best(options, best)
        if options is not given:
            wanted = [*wanted, "load_best_model_at_end=True"]
    if not wanted:
        return given
    emit("changed", f"keep={options.keep!r}, for TrainingArguments with {', '.join(wanted)}")
    return options


def find_best_rule(args: Any) -> Best | None:
    """Return the rule for the evaluation that the Trainer takes for the best; None: it has none."""
    name, is_high = args.metric_for_best_model, args.greater_is_better
    if not name:
        return None
    is_high = not name.endswith("loss") if is_high is None else is_high
    return Best(f"eval_{name.removeprefix('eval_')}", mode="max" if is_high else "min")


class OtherInterval(TrainerCallback):
    """Callback that drops the saves of `save_strategy`, where `every` says when to save.

    It follows the callback of the Trainer that asks for them, so that others may still ask.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the save of a step."""
        control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop the save of an epoch."""
        control.should_save = False

    @classmethod
    def insert_into(cls, callbacks: list[Any]) -> None:
        """Insert the callback after the one that asks for saves, if that is there."""
        places = [at for at, one in enumerate(callbacks) if isinstance(one, DefaultFlowCallback)]
        for at in places[:1]:
            callbacks.insert(at + 1, cls())


def _list_other_intervals(args: Any, given: Checkpoints) -> list[str]:
    strategy = _value_of(args.save_strategy)
    is_same = str(given.every) == {"steps": f"{args.save_steps}step", "epoch": "1ep"}.get(strategy)
    if given.every is None or is_same or strategy not in ("steps", "epoch"):
        return []
    if strategy == "epoch":
        return ["save_strategy='epoch'"]
    return [] if args.save_steps == _DEFAULT_STEPS else [f"save_steps={args.save_steps}"]


def _list_limits(args: Any) -> list[str]:
    limit = args.save_total_limit
    found = [f"save_total_limit={limit}"] if limit is not None and limit > 0 else []
    return [*found, "save_only_model=True"] if args.save_only_model else found


def _has_local_rule(given: Checkpoints) -> bool:
    return isinstance(given.root, Tiered) and given.root.options.keep_local is not None


def _combine_limits(args: Any, best: Best | None) -> Rule:
    """The rule for `save_total_limit`, which counts the best one, and for `save_only_model`."""
    limit = args.save_total_limit or 0
    rule: Rule = All()
    if limit > 0:
        rule = Last(limit)
        if best is not None and _value_of(args.eval_strategy) != "no":
            rule = Last(max(limit - 1, 1)) | best
    # A run resumes from a whole state only, so the newest one keeps its optimizer.
    return rule.then_drop("optimizer") | Last(1) if args.save_only_model else rule


def _keep_best(given: Checkpoints, best: Best) -> Checkpoints:
    rule = as_rule(given.keep, what="keep")
    if rule is None:
        raise UsageError(
            f"load_best_model_at_end: Tiered(keep_local=…) may delete the best: add {best} to it"
        )
    return replace(given, keep=rule | best)


def _refuse_arguments(args: Any) -> None:
    """Raise `UsageError` for arguments that would be ignored, or cannot be resumed exactly."""
    pushes = _value_of(args.hub_strategy) if args.push_to_hub else "end"
    reasons = {
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a position in the data needs one batch size: set per_device_train_batch_size",
        ),
        "hub_strategy": (
            pushes in ("checkpoint", "all_checkpoints"),
            'checkpoints are not pushed: set hub_strategy="end", and copy them with `holdfast cp`',
        ),
        "past_index": (
            getattr(args, "past_index", -1) >= 0,
            "past hidden states are not saved: omit it",
        ),
        "split_batches": (
            args.accelerator_config.split_batches and args.world_size > 1,
            "each rank makes its own batches: omit it",
        ),
    }
    wrong = [f"{name}: {why}" for name, (is_set, why) in reasons.items() if is_set]
    if wrong:
        raise UsageError("TrainingArguments:\n" + listing(wrong))


def _value_of(choice: Any) -> str:
    """The text of a choice, which may be a member of an enumeration."""
    return str(getattr(choice, "value", choice))


FRAMEWORK = "transformers"

# Names that are not part of transformers' interface.
_METHODS = (
    "_inner_training_loop",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
)
_SET_BY_THE_LOOP = ("_globalstep_last_logged", "_total_loss_scalar")
SKIP, STATE_FILE = "skip_first_batches", "TRAINER_STATE_NAME"  # in transformers.trainer
_SUPPORTED = "4.48 to 5.24"
COUNTS_UNFULL_WINDOWS = 5
"""Major version from which the Trainer counts the last window of an epoch as a step."""

SUMMARY = frozenset({"train_loss", "total_flos"})
"""Names that are logged together at the end of a training only."""
_NOT_MEASURED = ("step", "epoch", "total_flos")
_TIMINGS = ("_runtime", "_per_second", "_compilation_time", "_preparation_time")
"""Ends of the names by which the Trainer logs how long it took."""


def is_measure(name: str) -> bool:
    """Whether a logged value says something about the state that is saved, and not of its speed.

    >>> [one for one in ("eval_loss", "eval_runtime", "eval_steps_per_second") if is_measure(one)]
    ['eval_loss']
    """
    return name not in _NOT_MEASURED and not name.endswith(_TIMINGS)


def measured_at(step: int, log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what was measured at the last step that was logged, if it is `step`."""
    found: dict[str, float] = {}
    for logs in reversed(log_history):
        if logs.get("step") != step:
            break
        numbers = {k: float(v) for k, v in logs.items() if isinstance(v, int | float)}
        found = {**numbers, **found}  # of one name, the newest
    return {name: value for name, value in found.items() if is_measure(name)}


def broadcast(value: Any) -> Any:
    """Return what the first rank has given, on all ranks."""
    return broadcast_object_list([value])[0]


def beside_bar(line: str) -> None:
    """Write a line on stderr, where the Trainer's progress bar is drawn already."""
    tqdm.write(line, file=sys.stderr)


def check_names() -> None:
    """Raise `UsageError` unless transformers has all the names that this module needs."""
    trainer = transformers.Trainer
    missing = [f"Trainer.{name}" for name in _METHODS if not hasattr(trainer, name)]
    loop = getattr(trainer, "_inner_training_loop", None)
    inner = getattr(loop, "__wrapped__", loop)
    used = getattr(getattr(inner, "__code__", None), "co_names", ())
    missing += [f"Trainer.{name}" for name in _SET_BY_THE_LOOP if name not in used]
    missing += [f"trainer.{name}" for name in (SKIP, STATE_FILE) if not hasattr(theirs, name)]
    if missing:
        raise UsageError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}: this bridge is "
            f"tested with {_SUPPORTED}"
        )


def major_version() -> int:
    """Return the major version of transformers."""
    return int(transformers.__version__.split(".")[0])


class Epochs:
    """A `Loader` as the Trainer uses it: it names an epoch, may skip batches, and counts."""

    def __init__(self, loader: Any, args: Any, is_done: Callable[[], bool]) -> None:
        self.loader, self.dataset = loader, getattr(loader, "dataset", None)
        self.batch_size = args.train_batch_size
        self._is_done = is_done
        self._epoch, self._num_skipped = 0, 0
        self._generators: Generators | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iterator is of."""
        self._epoch = epoch

    def skip(self, num_batches: int) -> Epochs:
        """Begin the next iterator after that many batches of its epoch."""
        self._num_skipped = num_batches
        return self

    def keep_generators(self) -> None:
        """Let the next iterator begin with the present state of the global generators."""
        self._generators = Generators()

    def __iter__(self) -> Iterator[Any]:
        if self._generators is not None:
            self._generators.restore_states()
        self._generators = None
        place, self._num_skipped = (self._epoch, self._num_skipped), 0
        if self._is_done():
            return iter(())
        loader = self.loader
        if loader.at_epoch_end and place == (loader.epoch + 1, 0):
            next(iter(loader), None)
        if place != (loader.epoch, loader.batch):
            loader.load_state_dict({**loader.state_dict(), "epoch": place[0], "batch": place[1]})
        return iter(loader)


@contextlib.contextmanager
def leave_skipping_to_epochs() -> Iterator[None]:
    """Let the Trainer leave it to `Epochs` to skip batches, without reading them."""
    before = getattr(theirs, SKIP)

    def skip(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, Epochs):
            return dataloader.skip(num_batches)
        return before(dataloader, num_batches)

    setattr(theirs, SKIP, skip)
    try:
        yield
    finally:
        setattr(theirs, SKIP, before)


def loader_of(trainer: Any, given: Any) -> Loader:
    """Make the `Loader` of what the Trainer's own DataLoader loads."""
    dataset, args = given.dataset, trainer.args
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            "train_dataset has no length: give `data=holdfast.data.Stream(…)`, which resumes it"
        )
    batches, num_ranks = _find_batches(given)
    options = {
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "collate_fn": given.collate_fn,
        "num_workers": given.num_workers,
        "pin_memory": given.pin_memory and torch.accelerator.is_available(),
        "persistent_workers": given.persistent_workers,
        "prefetch_factor": given.prefetch_factor,
    }
    if type(batches).__iter__ is not BatchSampler.__iter__:  # its batches are no runs of a sampler
        is_of_rank = num_ranks != trainer.accelerator.num_processes
        if is_of_rank or hasattr(batches, "num_replicas"):
            raise UsageError(
                f"{type(batches).__name__} makes separate batches for each rank: pass data=Loader("
                "train_dataset, batch_sampler=…), whose batches hold the samples of all ranks"
            )
        return Loader(dataset, batch_sampler=JoinedBatches(batches, num_ranks), **options)
    sampler = batches.sampler
    is_shuffled = isinstance(sampler, RandomSampler)
    is_plain = is_shuffled or isinstance(sampler, SequentialSampler)
    return Loader(
        dataset,
        batch_size=batches.batch_size,
        sampler=None if is_plain else sampler,
        shuffle=is_shuffled or not is_plain,
        drop_last=batches.drop_last,
        **options,
    )


def _find_batches(given: Any) -> tuple[Any, int]:
    """Return a DataLoader's batch sampler without Accelerate's wrappers, and its ranks."""
    found, num_ranks = given.batch_sampler, 1
    while hasattr(found, "batch_sampler"):
        num_ranks = getattr(found, "num_processes", num_ranks)
        found = found.batch_sampler
    return found, num_ranks


class JoinedBatches(Sampler[list[int]]):
    """Batches of all ranks, each joined from as many batches as there are ranks."""

    def __init__(self, batches: Any, num_ranks: int) -> None:
        self.sampler, self._num_ranks = batches, num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.sampler)
        while parts := list(islice(batches, self._num_ranks)):
            sizes = {len(part) for part in parts}
            if len(sizes) > 1:
                raise UsageError(
                    f"{type(self.sampler).__name__}: in a step, {self._num_ranks} ranks would get "
                    f"batches of different sizes, {sorted(sizes)}: drop the last batch, or pass "
                    "data=Loader(train_dataset, batch_sampler=…) with batches for all ranks"
                )
            yield [index for part in parts for index in part]


def check_windows(loader: Any, args: Any) -> None:
    """Raise `UsageError` where the Trainer could not find its place in an epoch again."""
    window = args.gradient_accumulation_steps
    if window > 1 and major_version() < COUNTS_UNFULL_WINDOWS and len(loader) % window:
        raise UsageError(
            f"gradient_accumulation_steps={window}: an epoch has {len(loader)} batches, and before "
            f"transformers {COUNTS_UNFULL_WINDOWS} the Trainer cannot resume unless they divide; "
            "give Loader(batches_per_epoch=…) as `data`, or use a newer transformers"
        )


def check_place(loader: Any, found: Checkpoint, args: Any) -> None:
    """Raise `UsageError` where the data's position is not the one of the Trainer's step."""
    window = args.gradient_accumulation_steps
    steps_per_epoch = max(-(-len(loader) // window), 1)
    epoch, step = divmod(found.step, steps_per_epoch)
    at = (epoch, step * window)
    there = (loader.epoch + 1, 0) if loader.at_epoch_end else (loader.epoch, loader.batch)
    if at != there:
        raise UsageError(
            f"{found.path}: its data position is batch {there[1]} of epoch {there[0]}, and with "
            f"gradient_accumulation_steps={window} step {found.step} is batch {at[1]} of epoch "
            f"{at[0]}. Use the batch size and accumulation of the run that saved it"
        )
