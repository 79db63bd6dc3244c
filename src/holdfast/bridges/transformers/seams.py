"""Private names of transformers that are used, and arguments that cannot be obeyed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
import transformers.trainer as theirs
from accelerate.utils import broadcast_object_list
from tqdm.auto import tqdm

from holdfast.errors import UsageError, listing

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


def leaders(value: Any) -> Any:
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


def refuse_arguments(trainer: Any) -> None:
    """Raise `UsageError` for arguments that would be ignored, or cannot be resumed exactly."""
    args = trainer.args
    pushes = args.push_to_hub and str(getattr(args.hub_strategy, "value", "")) != "end"
    reasons = {
        "deepspeed": (args.deepspeed, "its optimizer cannot be a component"),
        "fsdp": (args.fsdp, "not supported by this bridge; see holdfast.train for FSDP2"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a position in the data needs one batch size",
        ),
        "load_best_model_at_end": (
            args.load_best_model_at_end,
            'give Checkpoints(keep="last:1,best:eval_loss") and call '
            "holdfast.load_weights(f'{root}@best', model) after train()",
        ),
        "save_total_limit": (
            args.save_total_limit is not None,
            "give Checkpoints(keep=Last(n))",
        ),
        "save_only_model": (args.save_only_model, "a run cannot resume from weights alone"),
        "ignore_data_skip": (args.ignore_data_skip, "nothing is read to skip it: leave it out"),
        "push_to_hub": (pushes, 'checkpoints are not pushed: set hub_strategy="end"'),
        "past_index": (getattr(args, "past_index", -1) >= 0, "states of the past are not saved"),
        "split_batches": (
            args.accelerator_config.split_batches,
            "batches are of each rank: leave it out",
        ),
    }
    wrong = [f"{name}: {why}" for name, (is_set, why) in reasons.items() if is_set]
    if wrong:
        raise UsageError("TrainingArguments:\n" + listing(wrong))


def major_version() -> int:
    """Return the major version of transformers."""
    return int(transformers.__version__.split(".")[0])
