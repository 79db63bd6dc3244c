"""Whether low or high values of a metric are good: one answer for rules, callbacks and commands."""

# ruff: noqa: SIM905 - lists of words are read as text
from __future__ import annotations

import re
from typing import get_args

from holdfast.errors import UsageError
from holdfast.format.manifest import Mode

_LOW = frozenset(
    """
    loss losses error errors err nll ppl perplexity wer cer ter eer ece mse rmse mae mape
    smape nmse rmsle bpb bpc fid kid lpips brier hinge regret logloss
    """.split()
)
_HIGH = frozenset(
    """
    accuracy accuracies acc f1 fbeta auc auroc auprc roc bleu sacrebleu rouge rougel
    rougelsum meteor chrf comet iou miou dice jaccard map mrr ndcg precision recall
    sensitivity specificity mcc kappa psnr ssim r2 reward rewards hits elbo em pass success
    """.split()
)
_PAIRS: dict[str, Mode] = {"crossentropy": "min", "exactmatch": "max"}
_TURNS = frozenset(
    # They turn a value round, or make another quantity of it.
    """
    neg negative minus inverse inv one not non scale weight coef coefficient factor ratio lr
    std var variance grad gradient norm time seconds delta improvement gain reduction drop
    """.split()
)
_SPLITS = ("train", "training", "validation", "valid", "val", "test", "eval", "dev")
VALIDATION = frozenset({*_SPLITS[2:], "evaluation"})
"""Words in the name of a metric that is measured by a validation."""
_PARTS = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*")


def words_of(metric: str) -> list[str]:
    """Return the words in the name of a metric, in lower case.

    >>> words_of("val/Top1_errorRate")
    ['val', 'top1', 'error', 'rate']
    """
    pieces = re.findall(r"[A-Za-z]+[0-9]*", metric)
    return [word for piece in pieces for word in _words(piece)]


def direction(metric: str) -> Mode | None:
    """Return whether low ("min") or high values ("max") of a well-known metric are good.

    None if the name does not show it.

    >>> direction("val/loss"), direction("eval_accuracy"), direction("score")
    ('min', 'max', None)
    """
    words = words_of(metric)
    if _TURNS.intersection(words) or re.match(r"\s*(1\s*-|-)", metric):
        return None
    found = [mode for word in words if (mode := _mode_of(word)) is not None]
    found += [mode for pair, mode in _PAIRS.items() if pair in "".join(words)]
    if "min" in found[-1:]:  # as of a loss: "dice_loss"
        return "min"
    if words and VALIDATION.issuperset(words):  # as "train" and "val" name two losses
        return "min"
    return "max" if found and "min" not in found else None


def mode_for(metric: str, given: object, *, what: str, say: str) -> Mode:
    """Return the given direction for a metric, or that of its name; raises with `what`, `say`."""
    if given is not None:
        if given not in get_args(Mode):
            raise UsageError(f"{what}: mode={given!r} must be 'min' or 'max'")
        return "min" if given == "min" else "max"
    mode = direction(metric)
    if mode is None:
        raise UsageError(
            f"{what}: the name of the metric {metric!r} does not show whether low or high values "
            f"are good: {say}"
        )
    return mode


def _words(piece: str) -> list[str]:
    """Split a piece of a name at its capitals, unless the whole is a known word, such as mAP."""
    whole = piece.lower()
    for split in _SPLITS:
        if whole.startswith(split) and _mode_of(whole.removeprefix(split)) is not None:
            return [split, whole.removeprefix(split)]
    if _mode_of(whole) is not None:
        return [whole]
    return [part.lower() for part in _PARTS.findall(piece)]


def _mode_of(word: str) -> Mode | None:
    for form in (word, word.rstrip("0123456789")):
        if form in _LOW or form.endswith("loss"):
            return "min"
        if form in _HIGH or form.endswith("accuracy"):
            return "max"
    return None
