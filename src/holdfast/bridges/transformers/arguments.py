"""TrainingArguments about checkpoints: translated to options of `Checkpoints`, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback

from holdfast.bridges.parts import check_direction
from holdfast.checkpoints import Checkpoints, best_rules
from holdfast.errors import UsageError, listing
from holdfast.events import Emitter
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rule import Rule
from holdfast.policy.rules import All, Best, Last, as_rule

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
            f"TrainingArguments: {', '.join(unused)}: without effect, as Checkpoints says "
            f"otherwise: every={given.every!r}, keep={given.keep!r}",
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
            "states of the past are not saved: leave it out",
        ),
        "split_batches": (
            args.accelerator_config.split_batches and args.world_size > 1,
            "batches are of each rank: leave it out",
        ),
    }
    wrong = [f"{name}: {why}" for name, (is_set, why) in reasons.items() if is_set]
    if wrong:
        raise UsageError("TrainingArguments:\n" + listing(wrong))


def _value_of(choice: Any) -> str:
    """The text of a choice, which may be a member of an enumeration."""
    return str(getattr(choice, "value", choice))
