"""Components that only one side has, the live state or the checkpoint, and that are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, LRScheduler

from each import each
from holdfast import CheckpointManager, StateHooks, Tiered
from holdfast.errors import MismatchError, NoUsableCheckpoint, UsageError
from holdfast.keys import Encryption, SecretKey
from holdfast.loading.optional_components import MissingComponentPolicy
from holdfast.loading.search import CheckpointSearch, LoadOptions
from holdfast.root.catalog import Catalog
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import FaultyStore
from holdfast.threads.workers import Threads
from runs import Recorder, Run, new_run

SEALS = Encryption(keys=SecretKey(bytes(range(32))))


def extra() -> nn.Linear:
    """A component that the checkpoints of `saved` lack."""
    torch.manual_seed(7)
    return nn.Linear(3, 2)


def saved(root: Any, *, steps: int = 2, state: dict[str, Any] | None = None, **options: Any) -> Run:
    """A run with a checkpoint of each step, whose state may hold more."""
    run = new_run()
    with CheckpointManager(root, run.state | (state or {}), **options) as manager:
        manager.resume()
        for step in range(1, steps + 1):
            run.train()
            manager.save(step, wait=True)
    return run


Roots = Callable[[Path], tuple[Any, dict[str, Any]]]
ROOTS: dict[str, Roots] = {
    "folder": lambda path: (path, {}),
    "memory": lambda path: (MemoryStore("sides"), {}),
    "faulty": lambda path: (FaultyStore(MemoryStore("sides"), []), {}),
    "sealed": lambda path: (path, {"encrypt": SEALS}),
    "tiers": lambda path: (Tiered(path / "a", path / "b"), {}),
    "sealed tiers": lambda path: (Tiered(path / "a", MemoryStore("far")), {"encrypt": SEALS}),
}

VERBS = ["resume", "load", "owned load"]
CASES = [(root, VERBS[i % 3], i % 2 == 0) for i, root in enumerate(ROOTS)]
"""Each root, and each verb both ways."""


@each("root, verb, in_place", CASES)
def test_a_component_that_is_new_stays_as_it_is(
    root: str, verb: str, in_place: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`new=["ema"]` takes a checkpoint without `ema` whole, leaves `ema` alone, and says so."""
    where, options = ROOTS[root](tmp_path_factory.mktemp("root"))
    run, other, ema = saved(where, **options), new_run(3), extra()
    with CheckpointManager(where, other.state | {"ema": ema}, **options) as manager:
        if verb == "owned load":
            manager.resume(1, new=["ema"])
        load = manager.resume if verb == "resume" else manager.load
        which = manager.list()[0].folder if verb == "owned load" else "latest"
        found = load(which, new=["ema"], in_place=in_place)
        assert found is not None
        assert other.bits() == run.bits()
        assert (found.step, found.new) == (2, ("ema",))
        assert "ema: not in the checkpoint, unchanged" in found.notes
        assert torch.equal(ema.weight, extra().weight)
        after = manager.save(3, wait=True)
        assert after.wait().left_out == ()
    with CheckpointManager(where, other.state | {"ema": ema}, **options) as manager:
        again = manager.resume()
        assert again is not None
        assert (again.step, again.new) == (3, ())


@each("root, verb, in_place", CASES)
def test_a_component_that_is_gone_is_not_loaded(
    root: str, verb: str, in_place: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`without=["ema"]` takes a checkpoint with `ema` into a state without it, and says so."""
    where, options = ROOTS[root](tmp_path_factory.mktemp("root"))
    run, other = saved(where, state={"ema": extra()}, **options), new_run(3)
    with CheckpointManager(where, other.state, **options) as manager:
        if verb == "owned load":
            manager.resume(1, without=["ema"])
        load = manager.resume if verb == "resume" else manager.load
        which = manager.list()[0].folder if verb == "owned load" else "latest"
        found = load(which, without=["ema"], in_place=in_place)
        assert found is not None
        assert found.step == 2
        assert other.bits() == run.bits()
        assert "ema: in the checkpoint only, not loaded" in found.notes
        manager.save(3, wait=True)
    with CheckpointManager(where, other.state, **options) as manager:
        assert manager.resume() is not None


def test_names_are_checked(tmp_path: Path) -> None:
    """A name that is no component, or that the other side has too, is an error that says so."""
    saved(tmp_path, state={"ema": extra()})
    run = new_run(3)
    before = run.bits()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"new": ["emma"]}, "new: the state has no component 'emma'"),
        ({"new": "ema"}, "pass a collection of names"),
        ({"new": ["ema"]}, "holds 'ema', so it is not new"),
        ({"without": ["emma"]}, "holds no component 'emma'"),
        ({"without": ["ema"]}, "without: 'ema' is a component of the state"),
        ({"without": "ema"}, "pass a collection of names"),
    ]
    for verb in ("resume", "load"):
        for arguments, message in cases:
            with CheckpointManager(tmp_path, run.state | {"ema": extra()}) as manager:
                with pytest.raises(UsageError, match=message):
                    getattr(manager, verb)(**arguments)
                assert not manager.is_owner
    assert run.bits() == before


def test_what_is_not_named_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """The error of a component that only one side has names the argument for it."""
    saved(tmp_path / "with", state={"ema": extra()})
    saved(tmp_path / "without")
    run = new_run(3)
    with (
        CheckpointManager(tmp_path / "with", run.state) as manager,
        pytest.raises(MismatchError, match=r"without=\['ema'\]"),
    ):
        manager.resume()
    with (
        CheckpointManager(tmp_path / "without", run.state | {"ema": extra(), "b": {}}) as manager,
        pytest.raises(MismatchError, match=r"new=\['ema'\]"),
    ):
        manager.resume(new=["b"])


def test_an_older_checkpoint_may_be_the_one_that_lacks_it(tmp_path: Path) -> None:
    """Where the newest is damaged, the names are checked with the one that is taken."""
    saved(tmp_path, steps=1)
    run = new_run()
    with CheckpointManager(tmp_path, run.state | {"ema": extra()}) as manager:
        manager.resume(new=["ema"])
        folder = manager.save(2, wait=True).wait().folder
    for file in (tmp_path / folder).rglob("*"):
        if file.is_file() and file.suffix != ".json":
            file.chmod(0o600)
            file.write_bytes(b"")
    allows = StateHooks(one_sided=lambda name: name == "ema")
    with CheckpointManager(tmp_path, run.state | {"ema": extra()}, hooks=allows) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.new) == (1, ("ema",))
        assert [folder for folder, _ in found.rejected] == [folder]


def test_what_was_left_out_or_dropped_was_there_before_and_is_not_new(tmp_path: Path) -> None:
    """A run does not go on from a part because the missing component is called new."""
    run, ema = new_run(), extra()
    with CheckpointManager(tmp_path, run.state | {"ema": ema}) as manager:
        run.train()
        manager.save(1, wait=True)
        manager.save(2, components=[*run.state, "rng"], wait=True)
    allows = StateHooks(one_sided=lambda name: name == "ema")
    with CheckpointManager(tmp_path, run.state | {"ema": ema}, hooks=allows) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.new) == (1, ())


def test_a_hook_allows_what_it_likes(tmp_path: Path) -> None:
    """`one_sided` is asked for each such component; what is taken is a warning, each time."""
    saved(tmp_path, state={"old": {"a": 1}})
    run, recorder, asked = new_run(3), Recorder(), list[str]()
    hooks = StateHooks(one_sided=lambda name: asked.append(name) is None)
    state = run.state | {"ema": extra()}
    with CheckpointManager(tmp_path, state, hooks=hooks, sinks=(recorder,)) as manager:
        found = manager.resume()
    assert found is not None
    assert found.new == ("ema",)
    assert sorted({*asked}) == ["ema", "old"]
    assert [event.message.partition(": ")[2] for event in recorder.of("warning")] == [
        "ema: not in the checkpoint, unchanged",
        "old: in the checkpoint only, not loaded",
    ]


@each(
    "options",
    [
        ({}, True),
        ({"sides": MissingComponentPolicy(new=["ema"])}, True),
        ({"sides": MissingComponentPolicy(without=["old"])}, False),
        ({"verify": False}, False),
    ],
)
def test_what_was_not_read_is_no_proof(options: tuple[dict[str, Any], bool]) -> None:
    """Retention takes a checkpoint of which a component was not read for unverified."""
    store = MemoryStore("sides")
    given, is_proof = options
    old = {"old": extra()} if "sides" in given and given["sides"].without else {}
    saved(store, state=old)
    ema = {"ema": extra()} if "sides" in given and given["sides"].new else {}
    reader = CheckpointSearch(
        catalog=Catalog(store), state=new_run(3).state | ema, threads=Threads(), timeout_s=60.0
    )
    found = reader.read_named("latest", LoadOptions(**given))
    reader.threads.close_pools()
    assert found.options.is_full
    assert found.is_proof is is_proof


def test_a_new_schedule_begins_at_its_beginning(tmp_path: Path) -> None:
    """A scheduler that the checkpoint lacks goes on with the learning rates that it has set.

    The stored ones are those of a run without it: a warm-up would multiply what is high already.
    """

    def state() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    with CheckpointManager(tmp_path, state()) as manager:
        manager.save(1, wait=True)
    later = state()
    scheduler = LinearLR(later["optimizer"], start_factor=0.01, total_iters=10)
    with CheckpointManager(tmp_path, later | {"scheduler": scheduler}) as manager:
        manager.resume(new=["scheduler"])
        assert later["optimizer"].param_groups[0]["lr"] == pytest.approx(0.001)
        for _ in range(10):
            later["optimizer"].step()
            scheduler.step()
        assert later["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_schedule_beside_a_stored_one_leaves_the_rates_to_that(tmp_path: Path) -> None:
    """Where another scheduler of the state drives the same groups, its stored rates are loaded."""

    def state() -> tuple[dict[str, Any], LRScheduler]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = ConstantLR(optimizer, factor=0.5, total_iters=3)
        return {"model": model, "optimizer": optimizer, "scheduler": made}, made

    first, made = state()
    with CheckpointManager(tmp_path, first) as manager:
        for _ in range(4):
            first["optimizer"].step()
            made.step()
        manager.save(1, wait=True)
    later, _ = state()
    later["plateau"] = ConstantLR(later["optimizer"], factor=0.1)
    with CheckpointManager(tmp_path, later) as manager:
        manager.resume(new=["plateau"])
    assert later["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_copy_of_the_model_can_be_new(tmp_path: Path) -> None:
    """A module whose parameters share names with the model's changes no name of the optimizer's."""
    run, other = saved(tmp_path), new_run(3)
    average = copy.deepcopy(other.model)
    with CheckpointManager(tmp_path, {"ema": average, **other.state}) as manager:
        manager.resume(new=["ema"])
    assert other.bits() == run.bits()


def test_nothing_usable_stays_an_error(tmp_path: Path) -> None:
    """`new` and `without` do not turn a root of damaged checkpoints into a fresh start."""
    run = saved(tmp_path)
    for index in tmp_path.rglob("index.json"):
        index.chmod(0o600)
        index.write_bytes(b"{}")
    with (
        CheckpointManager(tmp_path, run.state | {"ema": extra()}) as manager,
        pytest.raises(NoUsableCheckpoint),
    ):
        manager.resume(new=["ema"])


def test_a_load_of_parts_says_nothing_of_what_it_does_not_want(tmp_path: Path) -> None:
    """`new` among the parts is left as it is; beside them it is not told."""
    run, other = saved(tmp_path), new_run(3)
    state = other.state | {"ema": extra()}
    hooks = StateHooks(one_sided=lambda name: True)
    with CheckpointManager(tmp_path, state, hooks=hooks) as manager:
        for parts in ({"components": ["model"]}, {"include": ["model"]}, {"skip": ["ema"]}):
            assert manager.load(**parts).new == ()
        loaded = manager.load(components=["model", "ema"])
        assert loaded.new == ("ema",)
    assert torch.equal(other.model[0].weight, run.model[0].weight)


@each("gains", [False, True])
def test_a_save_of_another_set_of_components_is_a_new_checkpoint(
    gains: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At the same step, too: a checkpoint with other components is not the one that there was."""
    root, ema = tmp_path_factory.mktemp("root"), {"ema": extra()}
    run = saved(root, state={} if gains else ema)
    sides: dict[str, Any] = {"new": ["ema"]} if gains else {"without": ["ema"]}
    with CheckpointManager(root, run.state | (ema if gains else {})) as manager:
        found = manager.resume(**sides)
        assert found is not None
        folder = manager.save(2, wait=True).wait().folder
        assert folder != found.folder
    assert ('"ema"' in (root / folder / "manifest.json").read_text()) is gains


@pytest.mark.parametrize("argument", ["new", "without"])
def test_a_damaged_newest_one_does_not_decide_what_is_new(tmp_path: Path, argument: str) -> None:
    """It gained, or had, a component that the one before has not: that one is gone on from."""
    small, large = {"model": {"w": torch.zeros(4)}}, {"ema": {"w": torch.ones(4)}}
    with CheckpointManager(tmp_path, small) as manager:
        manager.save(1).wait()
    with CheckpointManager(tmp_path, {**small, **large}) as manager:
        manager.resume(new=["ema"])
        folder = tmp_path / manager.save(2).wait().folder
    file = folder / "model-00000.safetensors"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    state = {**small, **large} if argument == "new" else small
    with CheckpointManager(tmp_path, state) as manager:
        found = manager.resume(**{argument: ["ema"]})  # type: ignore[arg-type]
        assert found is not None
        assert found.step == 1
        assert [name for name, _ in found.rejected] == [folder.name]
