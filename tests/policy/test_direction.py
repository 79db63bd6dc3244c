"""One function decides whether low or high values of a metric are good; it never guesses."""

from __future__ import annotations

import pytest

from holdfast import Best, errors
from holdfast.policy.direction import direction
from holdfast.policy.rule import Rule
from holdfast.policy.rules import parse_rule

LOW = "loss val/loss eval_loss valLoss testloss val_ppl perplexity MSE top5_error dice_loss nll WER"
HIGH = "accuracy val_acc acc1 F1 f1_macro eval/f1_score roc_auc bleu-4 mAP50 mIoU valAccuracy r2"
UNKNOWN = "score neg_mean_squared_error 1-accuracy loss_scale grad_norm loss/accuracy epoch"


@pytest.mark.parametrize(("names", "mode"), [(LOW, "min"), (HIGH, "max"), (UNKNOWN, None)], ids=str)
def test_well_known_names_show_the_direction_and_others_do_not(
    names: str, mode: str | None
) -> None:
    assert {name: direction(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_a_rule_takes_the_direction_from_the_user_or_else_from_the_name() -> None:
    assert parse_rule("best:val/accuracy") == Best("val/accuracy", mode="max")
    assert parse_rule("best:accuracy:min") == Best("accuracy", mode="min")
    assert parse_rule("best:score:max:2") == Best("score", 2, "max")


@pytest.mark.parametrize("make", [lambda: parse_rule("best:score"), lambda: Best("score", 2)])
def test_a_rule_for_a_name_that_shows_nothing_is_refused(make: type[Rule]) -> None:
    with pytest.raises(errors.UsageError, match=r"score.*:max or :min"):
        make()
