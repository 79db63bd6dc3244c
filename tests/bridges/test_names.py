"""A class of ours that extends one of a framework replaces only the names that it means to."""

from __future__ import annotations

import dis
import importlib
import inspect
from typing import Any

import pytest

from bridges.frameworks import needed

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, version by version

LIGHTNING = "lightning.callback.HoldfastCheckpoint"
CLASSES = {
    LIGHTNING: (
        "lightning.pytorch.callbacks.Checkpoint",
        {
            "on_exception",
            "on_fit_start",
            "on_predict_start",
            "on_test_start",
            "on_train_end",
            "on_train_start",
            "on_validation_end",
            "on_validation_start",
            "setup",
            "teardown",
        },
    ),
    "transformers.run.TransformersRun": (
        "transformers.TrainerCallback",
        {"on_epoch_end", "on_evaluate", "on_prediction_step", "on_step_end", "on_train_begin"},
    ),
    "torchtitan.HoldfastManager": (
        "torchtitan.components.checkpointer.BaseCheckpointManager",
        {
            "Config",
            "_close",
            "_load",
            "_maybe_wait_for_staging",
            "_save",
            "_wait_for_saving",
            "enable",
            "save_future",
        },
    ),
}
"""Class of a bridge -> the class that it extends, and the members that it replaces on purpose."""
ATTRIBUTES = {"Config", "enable", "save_future"}


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def members(one: type) -> set[str]:
    """Names of a class, and of the attributes that its methods set."""
    names = {*vars(one), *inspect.get_annotations(one)}
    for method in filter(inspect.isfunction, vars(one).values()):
        steps = dis.get_instructions(method)
        names |= {step.argval for step in steps if step.opname == "STORE_ATTR"}
    return {name for name in names if not name.startswith("__") and name != "_abc_impl"}


@pytest.mark.parametrize("name", CLASSES)
def test_a_subclass_replaces_only_what_it_means_to(name: str) -> None:
    """Neither a method nor an attribute of the base class has a name of ours by chance."""
    needed(name.partition(".")[0])
    base_name, intended = CLASSES[name]
    ours, base = found(f"holdfast.bridges.{name}"), found(base_name)
    theirs = set().union(*(members(one) for one in base.__mro__ if one is not object))
    above = ours.__mro__[: ours.__mro__.index(base)]
    own = set().union(*(members(one) for one in above))
    assert own & theirs == intended


@pytest.mark.parametrize(
    ("name", "method"),
    [(n, m) for n, (_, replaced) in CLASSES.items() for m in sorted(replaced - ATTRIBUTES)],
)
def test_what_is_replaced_takes_the_arguments_of_the_base_class(name: str, method: str) -> None:
    """By position and by name."""
    needed(name.partition(".")[0])
    theirs = getattr(found(CLASSES[name][0]), method)
    ours = inspect.signature(getattr(found(f"holdfast.bridges.{name}"), method))
    given = [
        one.name
        for one in inspect.signature(theirs).parameters.values()
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    ours.bind(*given)
    ours.bind(given[0], **dict.fromkeys(given[1:]))


def test_other_code_finds_the_checkpoints_of_lightnings_own_names() -> None:
    """Two names are shared with ModelCheckpoint, and mean the same."""
    needed("lightning")
    ours = found("lightning.pytorch.callbacks.Checkpoint")
    model = found("lightning.pytorch.callbacks.ModelCheckpoint")
    callback = found("holdfast.bridges.lightning.HoldfastCheckpoint")
    shared = (members(callback) & members(model)) - members(ours) - CLASSES[LIGHTNING][1]
    assert shared == {"best_model_path", "last_model_path"}
