"""Wrong arguments are refused by name, where they are given, before anything is claimed.

The table has wrong values for every argument of what users call. A new argument needs a row.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import CheckpointManager, Checkpoints, Last, SideSaver, load_weights
from holdfast.data import Buckets, DataRanks, Loader, Mixture, Stream, Weighted
from holdfast.errors import UsageError
from holdfast.policy.rule import BySaver
from holdfast.policy.rules import All
from holdfast.train import Clip, Counts, Trainer

Wrong = tuple[Any, ...]
NOT_TRUE_OR_FALSE: Wrong = (3, "yes", None)
NO_FUNCTION: Wrong = (3, "x")
NO_NUMBER: Wrong = ("x", [3], True)
NO_COUNT: Wrong = ("x", -1, 1.5, True)
NO_NAMES: Wrong = (3, None, "x")
NO_RESIZE: Wrong = (3, None, "x", ["x"], {3: "rows"}, {"model": "lines"}, {"model": -1})
NO_INTERVAL: Wrong = (3, True, ["5step"], "x")
NO_TEXT: Wrong = (3, ["x"])
NO_CHECKPOINT: Wrong = (1.5, None, ["x"], True, -1)


def no(*wrong: Any, but: Wrong = ()) -> Wrong:
    """Wrong values without those that mean something here."""
    return tuple(value for value in wrong if not any(value is right for right in but))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A public function, how it is called in a folder, and wrong values for its arguments."""

    of: Callable[..., Any]
    call: Callable[..., Any]
    wrong: Mapping[str, Wrong]
    prepare: Callable[[Path], None] = lambda folder: None
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments that some of these need."""


def a_state() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def a_loader(**given: Any) -> Loader:
    return Loader(given.pop("dataset", [torch.ones(2)] * 4), **{"batch_size": 2, **given})


class Source:
    """An iterable with a state."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def a_stream(**given: Any) -> Stream:
    return Stream(given.pop("source", Source()), **{"batch_size": 2, **given})


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


def a_trainer(folder: Path, **given: Any) -> Trainer:
    made = a_state()
    options = {"data": a_loader(), "loss": mean, "checkpoints": folder / "run", "progress": False}
    options = {**made, **options, **given}
    return Trainer(options.pop("model"), **options)


def a_manager(folder: Path, **given: Any) -> CheckpointManager:
    options = {"root": folder / "run", "state": a_state(), **given}
    return CheckpointManager(options.pop("root"), options.pop("state"), **options)


def a_checkpoint(folder: Path) -> None:
    with a_manager(folder) as manager:
        manager.save(1, wait=True)


def method(name: str, **beside: Any) -> Callable[..., Any]:
    """Call a method of a manager that owns nothing."""

    def call(folder: Path, **given: Any) -> None:
        with a_manager(folder) as manager:
            tags = given.pop("tags", ("good",)) if name == "tag" else ()
            arguments = {**beside, **given}
            first = (arguments.pop("which"),) if name in ("pin", "unpin", "tag") else ()
            try:
                getattr(manager, name)(*first, *tags, **arguments)
            finally:
                assert not manager.is_owner

    return call


def weights(folder: Path, **given: Any) -> None:
    options = {"source": folder / "run", "model": nn.Linear(2, 1), **given}
    load_weights(options.pop("source"), options.pop("model"), **options)


def plain(public: str | type, /, **right: Any) -> Callable[..., Any]:
    made = getattr(holdfast, public) if isinstance(public, str) else public

    def call(folder: Path, **given: Any) -> None:
        made(**{**right, **given})

    return call


_RECORD: dict[str, Wrong] = {
    "every": NO_INTERVAL,
    "keep": (3, ["last:3"], "lost:3"),
    "savers": (3, None, ["x"]),
    "on_existing": ("x", 3, None),
    "label": (3, None, "{x}"),
    "run_name": NO_TEXT,
    "takeover": NOT_TRUE_OR_FALSE,
    "memory_budget": (1, "x", [3], 1e12),
    "compress": (3, "zip"),
    "encrypt": (3, "key"),
    "frozen": ("x", 3, True),
    "root": (3, ["x"]),
    "overlap": (3, "x"),
    "sinks": (3, None, [3], "x", [dict]),
    "on_commit": (3, "", "true {x}", "no-such-command", [3]),
    "save_timeout_s": (0, *NO_NUMBER, None),
    "exit_timeout_s": (0, *NO_NUMBER, None),
    "preflight": NOT_TRUE_OR_FALSE,
    "broadcast": NOT_TRUE_OR_FALSE,
}
_LOOP: dict[str, Wrong] = {
    "stop": (3, "SIGTERM"),
    "state": (3, ["x"], "x"),
}
_COUNTS: dict[str, Wrong] = dict.fromkeys(("epoch", "cycle", "samples", "tokens"), NO_COUNT)
_LOAD: dict[str, Wrong] = {
    "which": NO_CHECKPOINT,
    "in_place": NOT_TRUE_OR_FALSE,
    "new": (*NO_NAMES, [3]),
    "without": (*NO_NAMES, [3]),
    "override": (*NO_NAMES, [3], ["lrr"]),
    "resize": NO_RESIZE,
}
_CHOOSE: dict[str, Wrong] = {
    "strict": NOT_TRUE_OR_FALSE,
    "rename": (3, "x", ["x"]),
    "include": (*NO_NAMES, [3]),
    "skip": (*NO_NAMES, [3]),
    "edit": NO_FUNCTION,
}

CASES: dict[str, Case] = {
    "Trainer": Case(
        of=Trainer,
        call=a_trainer,
        wrong={
            **_LOOP,
            "checkpoints": (3, ["x"]),
            "model": (3, "x", None),
            "optimizer": (3, "adam"),
            "update": (3, "x"),
            "data": (3, ["x"], "x"),
            "loss": (3, "mse"),
            "scheduler": (3, "cosine", ["x"]),
            "validate": (3, "x", [holdfast.train.Validation(data=[]), 3]),
            "skip_steps": (3, None, [5], [range(3)]),
            "accumulate": (0, 1.5, "x", True),
            "precision": (3, None, "fp8"),
            "clip": (*NO_NUMBER, 0, -1.0),
            "ema": (*NO_NUMBER, 1.5, 0),
            "swa": (3, "10ep"),
            "skip_nan": (*NO_COUNT, 0),
            "detect_anomaly": NOT_TRUE_OR_FALSE,
            "limits": (3, None, "fast_dev_run"),
            "unhealthy": (3, None, "x"),
            "seed": NO_COUNT,
            "device": (3.5, "gpu", ["cpu"]),
            "strategy": (3, "zero", ["ddp"]),
            "activation_checkpointing": (3, "x", [3], True),
            "compile": (3, "x", None),
            "callbacks": (3, None, ["x"]),
            "counts": (3, None, "x", {"samples": len}),
            "log": (3, ["x"]),
            "metrics": (3, ["x"], {"own": 3}),
            "micro_batch": (0, *NO_COUNT),
            "log_every": (0, *NO_COUNT),
            "progress": NOT_TRUE_OR_FALSE,
        },
    ),
    "Checkpoints": Case(
        of=Checkpoints,
        call=lambda folder, **given: Checkpoints(**{"root": folder / "run", **given}),
        wrong=_RECORD,
    ),
    "Clip": Case(
        of=Clip,
        call=lambda folder, **given: Clip(**given),
        wrong={"norm": (*NO_NUMBER, 0, -1.0), "value": (*NO_NUMBER, 0, -1.0)},
    ),
    "Counts": Case(
        of=Counts,
        call=lambda folder, **given: Counts(**given),
        wrong={"samples": NO_FUNCTION, "tokens": NO_FUNCTION, "cycle": NO_INTERVAL},
    ),
    "Trainer.fit": Case(
        of=Trainer.fit,
        call=lambda folder, **given: a_trainer(folder).fit(**{"until": 1, **given}),
        wrong={
            "until": (0, 1.5, "x", None, True, ["x"]),
            "max_time": (3, "5step", ["1h"]),
            "data": (3, ["x"], "x"),
            "start_from": (3, ["x"]),
            "load_best": NOT_TRUE_OR_FALSE,
            "override": (*NO_NAMES, [3], ["lrr"]),
            "resize": NO_RESIZE,
            "without": (*NO_NAMES, [3]),
            "resume": (1.5, None, ["x"]),
            "strict": NOT_TRUE_OR_FALSE,
        },
    ),
    "CheckpointManager": Case(
        of=CheckpointManager,
        call=a_manager,
        wrong={
            **_RECORD,
            **_LOOP,
            "root": (3, None, ["x"]),
            "compress": (*_RECORD["compress"], {"optimiser": "zstd"}),
            "max_duration": NO_INTERVAL,
            "on_failure": ("x", 3, None),
            "hooks": (3, {"before_save": print}),
            "counters": (3, {"epoch": 3}),
            "config": (3, "x", ["x"]),
            "ranks": (3, "all", [0, 1]),
        },
    ),
    "save": Case(
        of=CheckpointManager.save,
        call=method("save", step=1),
        wrong={
            **_COUNTS,
            "step": (*NO_COUNT, None),
            "metrics": (3, ["x"], {3: 1.0}, {"loss": "x"}),
            "tags": (3, None, "x", [3], ["two words"]),
            "components": (3, "x", [3], []),
            "reason": (3, None),
            "save_class": ("x", 3, None),
            "wait": NOT_TRUE_OR_FALSE,
        },
    ),
    "maybe_save": Case(
        of=CheckpointManager.maybe_save,
        call=method("maybe_save", step=1),
        wrong={
            **_COUNTS,
            "step": (*NO_COUNT, None),
            "metrics": (3, ["x"]),
            "event": (3, None, "x", ["x"], ["step", 3]),
            "vetoes": (3, None),
            "wanted": (3, "x"),
        },
    ),
    "resume": Case(
        of=CheckpointManager.resume,
        call=method("resume"),
        prepare=a_checkpoint,
        wrong={
            **_LOAD,
            "in_place": no(*NOT_TRUE_OR_FALSE, but=(None,)),
            "unhealthy": ("x", 3, None),
            "seen": (3, "x"),
            "required": NOT_TRUE_OR_FALSE,
            "strict": NOT_TRUE_OR_FALSE,
        },
    ),
    "load": Case(
        of=CheckpointManager.load,
        call=method("load"),
        prepare=a_checkpoint,
        wrong={
            **_LOAD,
            **_CHOOSE,
            "components": (3, "x", [3]),
            "verify": NOT_TRUE_OR_FALSE,
        },
    ),
    "list": Case(of=CheckpointManager.list, call=method("list"), wrong={}),
    "pin": Case(
        of=CheckpointManager.pin,
        call=method("pin"),
        prepare=a_checkpoint,
        wrong={"which": NO_CHECKPOINT},
    ),
    "unpin": Case(
        of=CheckpointManager.unpin,
        call=method("unpin"),
        prepare=a_checkpoint,
        wrong={"which": NO_CHECKPOINT},
    ),
    "tag": Case(
        of=CheckpointManager.tag,
        call=method("tag", which="latest"),
        prepare=a_checkpoint,
        wrong={"which": NO_CHECKPOINT, "tags": ([3], [None], ["two words"])},
    ),
    "load_weights": Case(
        of=load_weights,
        call=weights,
        prepare=a_checkpoint,
        wrong={
            **_CHOOSE,
            "resize": NO_RESIZE,
            "source": (3, None, ["x"]),
            "model": (3, {"x": 3}),
            "which": no(*NO_CHECKPOINT, but=(None,)),
            "component": (3, ["model"], None),
            "encrypt": (3, "key"),
            "in_place": NOT_TRUE_OR_FALSE,
        },
    ),
    "Loader": Case(
        of=Loader,
        call=lambda folder, **given: a_loader(**given),
        beside={"multiprocessing_context": {"num_workers": 1}},
        wrong={
            "dataset": (3, None),
            "batch_size": (0, *NO_COUNT, {}, {0: 0}, {1: 4}),
            "sampler": (3, iter([1]), [9], ["x"]),
            "batch_sampler": (3, [[0]]),
            "seed": NO_COUNT,
            "shuffle": NOT_TRUE_OR_FALSE,
            "drop_last": NOT_TRUE_OR_FALSE,
            "batches_per_epoch": (0, *NO_COUNT),
            "ranks": (3, "x", (0, 2), DataRanks(2, 2)),
            "fingerprint": NO_TEXT,
            "num_workers": (*NO_COUNT, None),
            "collate_fn": NO_FUNCTION,
            "pin_memory": NOT_TRUE_OR_FALSE,
            "generator": (3, torch.Generator()),
            "persistent_workers": NOT_TRUE_OR_FALSE,
            "prefetch_factor": (*NO_COUNT, 0),
            "timeout": ("x", -1),
            "worker_init_fn": NO_FUNCTION,
            "multiprocessing_context": ("x", b"fork"),
        },
    ),
    "Stream": Case(
        of=Stream,
        call=lambda folder, **given: a_stream(**given),
        beside={"multiprocessing_context": {"num_workers": 1}},
        wrong={
            "source": (3, iter([1]), [1], None),
            "batch_size": (0, *NO_COUNT, None),
            "seed": NO_COUNT,
            "shuffle": (-1, "x", 1.5, None),
            "drop_last": NOT_TRUE_OR_FALSE,
            "resume": (3, "x", None),
            "ranks": (3, "x", (0, 2), DataRanks(2, 2)),
            "fingerprint": NO_TEXT,
            "num_workers": (*NO_COUNT, None),
            "collate_fn": NO_FUNCTION,
            "pin_memory": NOT_TRUE_OR_FALSE,
            "prefetch_factor": (*NO_COUNT, 0),
            "timeout": ("x", -1),
            "worker_init_fn": NO_FUNCTION,
            "multiprocessing_context": ("x", b"fork"),
        },
    ),
    "Weighted": Case(
        of=Weighted,
        call=lambda folder, **given: Weighted(**{"weights": [1.0, 2.0], **given}),
        wrong={
            "weights": ([], [-1], [float("nan")], "x", 3, None, [[1.0]]),
            "num_samples": (0, *NO_COUNT),
            "replacement": NOT_TRUE_OR_FALSE,
        },
    ),
    "Buckets": Case(
        of=Buckets,
        call=lambda folder, **given: Buckets(**{"lengths": [1, 2], "batch_size": 2, **given}),
        wrong={
            "lengths": ([], [-1], "x", 3, None, [[1]]),
            "batch_size": (0, *NO_COUNT, None),
            "max_tokens": (0, *NO_COUNT, 1),
            "pool": (0, *NO_COUNT, None),
        },
    ),
    "Mixture": Case(
        of=Mixture,
        call=lambda folder, **given: Mixture(**{"parts": [([1], 1)], **given}),
        wrong={
            "parts": (3, None, [], [1], [([1], 0)], [([1],)], [(3, 1)], "x"),
            "num_samples": (0, *NO_COUNT),
        },
    ),
    "All": Case(of=All, call=plain(All), wrong={}),
    "Last": Case(
        of=holdfast.Last,
        call=plain("Last", n=1),
        wrong={"n": (0, *NO_COUNT), "save_class": ("x", 3)},
    ),
    "Best": Case(
        of=holdfast.Best,
        call=plain("Best", metric="loss"),
        wrong={
            "metric": (1, "", None),
            "n": (0, *NO_COUNT),
            "mode": ("low", 3),
            "wait": (-1, *NO_COUNT),
        },
    ),
    "EveryNth": Case(
        of=holdfast.EveryNth, call=plain("EveryNth"), wrong={"interval": (*NO_INTERVAL, None)}
    ),
    "Hourly": Case(of=holdfast.Hourly, call=plain("Hourly"), wrong={"n": (0, *NO_COUNT)}),
    "Daily": Case(of=holdfast.Daily, call=plain("Daily"), wrong={"n": (0, *NO_COUNT)}),
    "Within": Case(of=holdfast.Within, call=plain("Within"), wrong={"span": (*NO_INTERVAL, None)}),
    "Budget": Case(of=holdfast.Budget, call=plain("Budget"), wrong={"nbytes": (0, *NO_COUNT)}),
    "ByClass": Case(of=holdfast.ByClass, call=plain("ByClass"), wrong={"remove": ("x", 3, None)}),
    "BySaver": Case(of=BySaver, call=plain(BySaver), wrong={"rules": (3, None, {})}),
    "then_drop": Case(
        of=holdfast.Last.then_drop,
        call=lambda folder, components: holdfast.Last(1).then_drop(*components),
        wrong={"components": ([3], ["A B"])},
    ),
    "Every": Case(
        of=holdfast.Every,
        call=plain("Every", interval="0.1dur"),
        wrong={"interval": (*NO_INTERVAL, None), "max_duration": NO_INTERVAL, "epoch": NO_INTERVAL},
    ),
    "At": Case(
        of=holdfast.At,
        call=lambda folder, times=("5step",), steps=(): holdfast.At(*times, steps=steps),
        wrong={"times": ([3], ["x"], [None]), "steps": (3, None, "x", [0], ["x"])},
    ),
    "WallClock": Case(
        of=holdfast.WallClock,
        call=plain("WallClock"),
        wrong={"interval": (*NO_INTERVAL, "5step", None)},
    ),
    "When": Case(
        of=holdfast.When,
        call=plain("When", function=print),
        wrong={"function": (*NO_FUNCTION, None), "name": (3, None)},
    ),
    "On": Case(
        of=holdfast.On,
        call=lambda folder, events: holdfast.On(*events),
        wrong={"events": ([3], ["x"], ["step"])},
    ),
    "AtStart": Case(
        of=holdfast.AtStart, call=plain("AtStart"), wrong={"always": NOT_TRUE_OR_FALSE}
    ),
    "AtEnd": Case(of=holdfast.AtEnd, call=plain("AtEnd"), wrong={}),
    "Auto": Case(
        of=holdfast.Auto,
        call=plain("Auto"),
        wrong={
            "overhead": (*NO_NUMBER, 0.0, None),
            "mtbf": (*NO_INTERVAL, "5step"),
            "at_least": (*NO_INTERVAL, "5step", None),
            "at_most": (*NO_INTERVAL, "5step", None),
        },
    ),
    "SavePolicy": Case(
        of=holdfast.SavePolicy,
        call=plain("SavePolicy", permanent="9step", ephemeral="2step"),
        wrong=dict.fromkeys(("permanent", "ephemeral", "cooldown"), NO_INTERVAL),
    ),
    "SideSaver": Case(
        of=holdfast.SideSaver,
        call=plain("SideSaver", name="weights", every="5step", components=["model"]),
        wrong={
            "name": (3, None, "main", "A B"),
            "every": (*NO_INTERVAL, None),
            "components": (3, None, "model", [], [3]),
            "keep": (3, "lost:3"),
        },
    ),
}


def arguments(of: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name != "self"]


@pytest.mark.parametrize("name", CASES)
def test_every_argument_has_a_row(name: str) -> None:
    """A new argument needs wrong values in the table."""
    assert sorted(CASES[name].wrong) == sorted(arguments(CASES[name].of))


def test_every_public_rule_and_trigger_is_in_the_table() -> None:
    """A new rule or trigger needs a case."""
    bases = (
        *(holdfast.policy.rule.Rule, holdfast.policy.triggers.Trigger),
        *(holdfast.SavePolicy, holdfast.SideSaver),
    )
    public = [getattr(holdfast, name) for name in holdfast.__all__]
    ours = [kind for kind in public if inspect.isclass(kind) and issubclass(kind, bases)]
    assert {kind.__name__ for kind in ours if not inspect.isabstract(kind)} <= {*CASES}


@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, case in CASES.items() for argument in case.wrong],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, name: str, argument: str) -> None:
    """The error has the name of the argument and what was given for it; nothing was claimed."""
    case = CASES[name]
    case.prepare(tmp_path)
    before = [*tmp_path.rglob("*")]
    for value in case.wrong[argument]:
        with pytest.raises(UsageError) as raised:
            case.call(tmp_path, **{argument: value, **case.beside.get(argument, {})})
        said = str(raised.value)
        assert re.search(rf"\b{argument}\b", said), said
        parts = value if isinstance(value, list | dict) else ()
        assert any(repr(part) in said for part in (value, *parts)), said
    assert [*tmp_path.rglob("*")] == before


def test_an_argument_that_is_given_twice_is_refused_with_the_order() -> None:
    """`Best(1, metric="loss")`, which the documents had: the error says how to write it."""
    with pytest.raises(UsageError, match=r"metric .* twice.* 1 .*'loss'.* Best\(metric, n, mode\)"):
        holdfast.Best(1, metric="loss")  # type: ignore[misc]


class StoreByMethods:
    """Store as before there was a class: it has the members and derives from nothing."""

    url = "mine://run"

    def _do(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("refused before it is used")

    put = get = head = list = children = delete = _do


def test_a_store_by_its_methods_is_refused_with_the_class_to_derive_from() -> None:
    store: Any = StoreByMethods()
    state = {"model": nn.Linear(2, 2)}
    for call in (lambda: CheckpointManager(store, state), lambda: Checkpoints(store)):
        with pytest.raises(UsageError, match=r"class StoreByMethods\(Store\)"):
            call()


@pytest.mark.parametrize(
    "wrong",
    [
        {"compress": {"optimiser": "zstd"}},
        {"savers": [SideSaver("w", every="5step", components=["optimiser"])]},
        {"keep": Last(1).then_drop("optimiser")},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_record_that_names_no_component_of_a_state_is_refused_there(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    """The record knows no state: a manager and a Trainer compare it with theirs when made."""
    record = Checkpoints(tmp_path / "run", **wrong)
    with pytest.raises(UsageError, match=rf"(?s){next(iter(wrong))}.*optimiser"):
        a_trainer(tmp_path, checkpoints=record)
    with pytest.raises(UsageError, match=rf"(?s){next(iter(wrong))}.*optimiser"):
        CheckpointManager(record, a_state())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("value", [1, 1.5, np.float32(2), np.float64(2)])
def test_any_real_number_is_taken_for_a_float(tmp_path: Path, value: Any) -> None:
    """A check of types refuses nothing that worked: a whole number, one of NumPy's."""
    a_trainer(tmp_path, clip=value)
    a_manager(tmp_path, save_timeout_s=value).close()
