"""DCP on Holdfast in one process: what is saved, what is refused, and what reads it."""

from __future__ import annotations

import dataclasses
import enum
import gc
import io
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from distributed.run import run_ranks
from holdfast import CheckpointManager, Encryption, Last, errors, load_weights
from holdfast.errors import CorruptData, NoCheckpoint, OwnedElsewhere, Superseded, UsageError
from holdfast.interop.dcp import HoldfastReader, HoldfastWriter
from holdfast.interop.roots import release_all
from holdfast.keys import generate
from holdfast.maintenance.gc import collect_garbage
from holdfast.ownership.access import locate
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def state_of(seed: int) -> dict[str, Any]:
    """A state of all that DCP saves; its values follow from a seed."""
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.full((3, 2), seed, dtype=torch.bfloat16),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "Epoch": seed,
        "progress": {
            "nothing": None,
            "pair": (torch.arange(seed + 1), "text", 1.5),
            "array": np.full(3, seed, np.int16),
            "bytes": bytes([seed]),
            "list": [1, {"deep": torch.ones(2) * seed}, "b"],
            "words": {"a": [seed, {2, 3}]},
        },
    }


def flat(state: Any, path: str = "") -> dict[str, str]:
    """Every leaf as text, by its path."""
    if isinstance(state, dict):
        items = [*state.items()]
    elif isinstance(state, list | tuple):
        items = [*enumerate(state)]
    elif isinstance(state, torch.Tensor):
        return {path: f"{state.dtype} {tuple(state.shape)} {state.flatten().tolist()}"}
    else:
        return {path: f"{type(state).__name__} {state!r}"}
    return {
        name: text for key, value in items for name, text in flat(value, f"{path}/{key}").items()
    }


def save(root: Any, state: dict[str, Any], step: int = 1, **options: Any) -> None:
    planner = options.pop("planner", None)
    dcp.save(state, storage_writer=HoldfastWriter(root, step=step, **options), planner=planner)


def load(
    root: Any, state: dict[str, Any], which: str | None = None, **options: Any
) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=which, storage_reader=HoldfastReader(root, **options))
    return state


def test_every_kind_of_value_comes_back_as_from_dcp_itself(tmp_path: Path) -> None:
    """Only the storage argument differs; R38."""
    save(tmp_path / "run", state_of(3))
    dcp.save(state_of(3), checkpoint_id=tmp_path / "dcp")
    found, expected = load(tmp_path / "run", state_of(5)), state_of(5)
    dcp.load(expected, checkpoint_id=tmp_path / "dcp")
    assert flat(found) == flat(expected) == flat(state_of(3))


@pytest.mark.parametrize("flatten", [True, False])
def test_a_planner_that_does_not_flatten_saves_whole_values(tmp_path: Path, flatten: bool) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    save(tmp_path, state_of(3), planner=planner)
    found = state_of(5)
    dcp.load(
        found,
        storage_reader=HoldfastReader(tmp_path),
        # Else torch's planner fills a copy of the state.
        planner=DefaultLoadPlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten),
    )
    assert flat(found) == flat(state_of(3))


def test_the_checkpoint_is_one_of_this_library(tmp_path: Path) -> None:
    save(tmp_path, state_of(3), step=7)
    _, entry = locate(tmp_path)
    assert (entry.step, entry.manifest.label, entry.manifest.reason) == (7, "step-00000007", "dcp")
    kinds = {name: one.kind for name, one in entry.manifest.components.items()}
    assert kinds == {"model": "module", "optimizer": "tree", "state": "tree", "progress": "tree"}
    assert entry.manifest.sharded is False
    model = network(1)
    load_weights(tmp_path, model)
    assert flat(dict(model.state_dict())) == flat(dict(state_of(3)["model"]))


def test_a_manager_loads_the_components_and_goes_on(tmp_path: Path) -> None:
    """Names of components and leaves are those of the state."""
    save(tmp_path, {"model": network(3).state_dict(), "progress": {"seen": 5, "t": torch.ones(2)}})
    release_all()
    model, progress = network(1), {"seen": 0, "t": torch.zeros(2)}
    with CheckpointManager(tmp_path, {"model": model, "progress": progress}) as manager:
        found = manager.load(new=["rng"])
        assert found.step == 1
        assert flat(progress) == flat({"seen": 5, "t": torch.ones(2)})
        assert flat(dict(model.state_dict())) == flat(dict(network(3).state_dict()))
        manager.save(2, wait=True)
    assert [one.step for one in Catalog(open_store(tmp_path)).checkpoints()] == [2, 1]


def test_weights_at_the_top_are_a_model(tmp_path: Path) -> None:
    """torchtitan puts the model's weights beside its other keys."""
    save(tmp_path, {**network(3).state_dict(), "lr_scheduler": {"last": 4}, "note": "x"})
    _, entry = locate(tmp_path)
    assert [*entry.manifest.components] == ["model", "lr_scheduler", "state"]
    model = network(1)
    load_weights(tmp_path, model)
    assert flat(dict(model.state_dict())) == flat(dict(network(3).state_dict()))


def test_dcp_loads_what_a_manager_has_saved(tmp_path: Path) -> None:
    model, progress = network(3), {"seen": 5, "list": [1, 2], "t": torch.ones(2)}
    with CheckpointManager(tmp_path, {"model": model, "progress": progress}) as manager:
        manager.save(4, wait=True)
    state = {
        "model": dict(network(1).state_dict()),
        "progress": {"seen": 0, "list": [], "t": torch.zeros(2)},
    }
    assert flat(load(tmp_path, state)) == flat(
        {"model": dict(model.state_dict()), "progress": progress}
    )


@pytest.mark.parametrize(
    ("checkpoint_id", "step", "label", "expected"),
    [
        ("out/checkpoints/step-120", None, "step-120", 120),
        ("epoch=2-final", None, "epoch=2-final", 2),
        (Path("best"), 9, "best", 9),
        (None, 11, "step-00000011", 11),
    ],
)
def test_the_id_is_the_label(
    tmp_path: Path, checkpoint_id: Any, step: int | None, label: str, expected: int
) -> None:
    writer = HoldfastWriter(tmp_path, step=step)
    dcp.save({"x": torch.ones(1)}, checkpoint_id=checkpoint_id, storage_writer=writer)
    _, entry = locate(tmp_path)
    assert (entry.manifest.label, entry.step) == (label, expected)
    found = load(tmp_path, {"x": torch.zeros(1)}, which=checkpoint_id and f"some/{label}")
    assert found["x"].item() == 1


@pytest.mark.parametrize(
    ("make", "use", "message"),
    [
        (lambda: HoldfastWriter("x"), {}, "the step is unknown"),
        (lambda: HoldfastWriter("x", step=-1), {}, "step=-1"),
        (lambda: HoldfastWriter("x", step=1), {"use_collectives": False}, "use_collectives=False"),
        (lambda: HoldfastWriter("x", step=1), {"checkpoint_id": "a b"}, "label 'a b'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], HoldfastWriter],
    use: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CheckpointException, UsageError), match=message):
        dcp.save({"x": torch.ones(1)}, storage_writer=make(), **use)
    assert [*tmp_path.iterdir()] == []


class Phase(enum.Enum):
    WARM = 1


UNSAVED = {"model": {"w": torch.ones(2)}, "progress": {"share": Fraction(1, 3)}}


def test_a_value_that_is_no_tree_is_refused_and_named(tmp_path: Path) -> None:
    """Invariant 5: what would come back only by running a pickle is not saved unasked."""
    with pytest.raises(CheckpointException, match=r"progress.share: fractions:Fraction is not"):
        save(tmp_path, UNSAVED)
    with pytest.raises(CheckpointException, match=r"phase: its Enum would come back as another"):
        save(tmp_path, {"x": torch.ones(1), "phase": Phase.WARM})
    assert Catalog(open_store(tmp_path)).attempts() == ()


def test_a_pickle_is_saved_and_loaded_where_both_allow_it(tmp_path: Path) -> None:
    """Invariant 5: who loads it says so, too, or nothing changes."""
    save(tmp_path, UNSAVED, unsafe_pickle=True)
    state = {"model": {"w": torch.zeros(2)}, "progress": {"share": None}}
    with pytest.raises(CheckpointException, match=r"'progress.share': saved as a pickle"):
        load(tmp_path, state)
    assert flat(state) == flat({"model": {"w": torch.zeros(2)}, "progress": {"share": None}})
    assert flat(load(tmp_path, state, unsafe_pickle=True)) == flat(UNSAVED)


class Rewriting(DefaultSavePlanner):
    """A planner whose values are other pickles than torch's own planner makes."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return io.BytesIO(pickle.dumps(print)) if write_item.index.fqn == "odd" else made


def test_the_pickles_of_another_planner_are_read_as_weights(tmp_path: Path) -> None:
    """Invariant 5: they may be foreign, so nothing in them runs."""
    save(tmp_path, {"x": torch.ones(1), "fine": {"a": [1, 2]}}, planner=Rewriting())
    assert load(tmp_path, {"fine": {"a": None}})["fine"] == {"a": [1, 2]}
    with pytest.raises(CheckpointException, match=r"odd: its pickle cannot be read as weights"):
        save(tmp_path, {"x": torch.ones(1), "odd": 1}, planner=Rewriting(), step=2)
    assert [one.step for one in Catalog(open_store(tmp_path)).checkpoints()] == [1]


def test_a_flipped_bit_is_found_before_anything_changes(tmp_path: Path) -> None:
    """Invariants 3 and 6."""
    save(tmp_path, state_of(3))
    [path] = tmp_path.glob("step-*/optimizer-00000.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    state = state_of(5)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, state)
    error = caught.value.failures[0][0]
    assert isinstance(error, CorruptData)
    assert "optimizer-00000.safetensors: block 0" in str(error)
    found, before = flat(state), flat(state_of(5))
    tensors = [name for name, text in before.items() if text.startswith("torch.")]
    # DCP itself has replaced sets and arrays by None.
    assert {name: found[name] for name in tensors} == {name: before[name] for name in tensors}


@dataclasses.dataclass
class Meanwhile(DefaultSavePlanner):
    """A planner that does something when it is asked for data."""

    do: Callable[[], None]

    def __post_init__(self) -> None:
        super().__init__()

    def resolve_data(self, write_item: Any) -> Any:
        self.do()
        return super().resolve_data(write_item)


def boom() -> None:
    raise RuntimeError("injected")


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, state_of(3))
    with pytest.raises(CheckpointException, match="injected"):
        save(tmp_path, state_of(4), step=2, planner=Meanwhile(boom))
    assert [name.label for name in Catalog(open_store(tmp_path)).attempts()] == ["step-00000001"]
    save(tmp_path, state_of(5), step=3)
    assert flat(load(tmp_path, state_of(1))) == flat(state_of(5))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("*/model-00000.safetensors", "fail"),
        ("*/progress-00000.json", "fail"),
        ("*/index.json", "fail"),
        ("*/index.json", "truncate"),
        ("*/manifest.json", "fail"),
    ],
)
def test_a_store_that_fails_at_any_point_fails_the_save(
    tmp_path: Path, key: str, kind: Any
) -> None:
    """Invariant 2: what was not written is not committed, and the next save is as any other."""
    store = FaultyStore(LocalStore(tmp_path), [Fault(kind=kind, key=key)])
    with pytest.raises(CheckpointException):
        save(store, state_of(3))
    assert Catalog(LocalStore(tmp_path)).checkpoints() == ()
    save(store, state_of(4), step=2)
    assert flat(load(store, state_of(5))) == flat(state_of(4))


@pytest.mark.parametrize("how", ["next save", "close"])
def test_an_attempt_of_which_nothing_was_heard_is_removed(tmp_path: Path, how: str) -> None:
    """As after a failure of another rank, which DCP does not tell the writer."""
    writer = HoldfastWriter(tmp_path, step=1)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.prepare_global_plan([SavePlan([])])
    assert len(Catalog(open_store(tmp_path)).attempts()) == 1
    if how == "close":
        writer.close()
        assert Catalog(open_store(tmp_path)).attempts() == ()
    else:
        save(tmp_path, state_of(3), step=2)
        labels = [name.label for name in Catalog(open_store(tmp_path)).attempts()]
        assert labels == ["step-00000002"]


def killed(root: Path, rank: int) -> None:
    """Save once, and be killed while the second save is being written."""
    save(root, state_of(3))
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    save(root, state_of(4), step=2, planner=Meanwhile(kill))


def test_a_kill_before_the_end_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Invariants 1 and 2, R1: gc removes the attempt, and the next process goes on."""
    root = tmp_path / "run"
    with pytest.raises(AssertionError, match="rank 0 ended: -9"):
        run_ranks(1, partial(killed, root))
    store = open_store(root)
    assert [one.step for one in Catalog(store).checkpoints()] == [1]
    assert len(Catalog(store).attempts()) == 2
    assert flat(load(root, state_of(5))) == flat(state_of(3))
    save(root, state_of(6), step=3)
    release_all()
    assert len(collect_garbage(store).removed) == 1
    assert [one.step for one in Catalog(store).checkpoints()] == [3, 1]


def caching() -> type[DefaultSavePlanner]:
    """A class of planners with a cache of its own."""

    def make(self: DefaultSavePlanner) -> None:
        DefaultSavePlanner.__init__(self, enable_plan_caching=True)

    return type(f"Caching{os.urandom(4).hex()}", (DefaultSavePlanner,), {"__init__": make})


def test_a_planner_that_caches_its_plan_saves_into_any_root(tmp_path: Path) -> None:
    """The plan comes from the cache, folder and values are new; also after DCP's own writer."""
    kind = caching()
    dcp.save(state_of(1), checkpoint_id=tmp_path / "dcp", planner=kind())
    for seed, root in enumerate(("one", "one", "two", "one"), start=2):
        save(tmp_path / root, state_of(seed), step=seed, planner=kind())
        found = load(tmp_path / root, state_of(1))
        expected = state_of(seed)
        assert flat(found) == flat(expected)


def test_planners_of_two_caches_save_in_turn(tmp_path: Path) -> None:
    """The storage is not told which planner left its plan out, and finds out in time."""
    one, other = caching(), caching()
    for step in range(1, 5):
        value = torch.full((3,), step)
        save(tmp_path, {"a": value, "n": {"a": step}}, step=2 * step, planner=one())
        save(tmp_path, {"b": value + 1, "n": {"b": step}}, step=2 * step + 1, planner=other())
        found = load(tmp_path, {"a": value * 0, "n": {"a": 0}}, which=f"step={2 * step}")
        assert (found["a"].tolist(), found["n"]) == ([step] * 3, {"a": step})
        found = load(tmp_path, {"b": value * 0, "n": {"b": 0}})
        assert (found["b"].tolist(), found["n"]) == ([step + 1] * 3, {"b": step})


@pytest.mark.usefixtures("refused_at_once")
def test_a_manager_in_this_process_keeps_the_run(tmp_path: Path) -> None:
    """Invariant 11: DCP's writer claims the run, unless somebody owns it."""
    with CheckpointManager(tmp_path, {"model": network()}) as manager:
        manager.save(1, wait=True)
        with pytest.raises(CheckpointException) as caught:
            save(tmp_path, state_of(1), step=2)
        assert isinstance(caught.value.failures[0][0], OwnedElsewhere)
        save(tmp_path, state_of(1), step=2, takeover=True)
        with pytest.raises(Superseded):
            manager.save(3, wait=True)
    assert [one.step for one in Catalog(open_store(tmp_path)).checkpoints()] == [2, 1]


def test_a_process_owns_the_run_until_it_closes_its_writer(tmp_path: Path) -> None:
    """Invariant 11: one claim for all saves of a process, and others may follow."""
    for step in (1, 2):
        save(tmp_path, state_of(1), step=step)
    assert Catalog(open_store(tmp_path)).claims() == (1,)
    HoldfastWriter(tmp_path).close()
    with CheckpointManager(tmp_path, {"model": network()}) as manager:
        manager.load(components=["model"])
    save(tmp_path, state_of(1), step=3)
    assert next(one.epoch for one in Catalog(open_store(tmp_path)).attempts()) == 2


def test_a_run_goes_on_from_what_was_loaded(tmp_path: Path) -> None:
    """An older checkpoint that was loaded by name is a rollback, as with a manager."""
    for step in (1, 2, 3):
        save(tmp_path, state_of(step), step=step)
    release_all()
    load(tmp_path, state_of(9), which="step=2")
    save(tmp_path, state_of(4), step=4)
    save(tmp_path, state_of(5), step=5)
    catalog = Catalog(open_store(tmp_path))
    lineage = [entry.step for entry in catalog.lineage_entries()]
    assert lineage == [5, 4, 2, 1]


def test_a_load_that_fails_early_lets_the_checkpoint_go(tmp_path: Path) -> None:
    """DCP does not tell the reader, whose lease ends with it."""
    save(tmp_path, {"x": torch.ones(4)})
    reader = HoldfastReader(f"{tmp_path}@latest")
    leases = tmp_path / "readers"
    with suppress(CheckpointException):  # held by nothing afterwards
        dcp.load({"x": torch.zeros(5)}, checkpoint_id="step=1", storage_reader=reader)
    assert len([*leases.iterdir()]) == 1
    del reader
    gc.collect()
    assert [*leases.iterdir()] == []


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    """Invariant 6: as when one was committed between two ranks' looks."""
    plans = []
    for step in (1, 2):
        save(tmp_path, {"x": torch.ones(1)}, step=step)
        reader = HoldfastReader(tmp_path)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(NoCheckpoint, match="different checkpoints: step-00000001"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[:1] * 2) == plans[:1] * 2


def test_the_step_of_a_save_is_that_at_its_beginning(tmp_path: Path) -> None:
    """A writer may be used again, and get its next step while it saves in the background."""
    writer = HoldfastWriter(tmp_path, step=1)
    later = Meanwhile(lambda: setattr(writer, "step", 2))
    dcp.save({"x": torch.ones(1)}, storage_writer=writer, planner=later)
    dcp.save({"x": torch.ones(1)}, storage_writer=writer)
    assert [one.step for one in Catalog(open_store(tmp_path)).checkpoints()] == [2, 1]


def test_a_store_in_memory_holds_a_run(tmp_path: Path) -> None:
    """A root may be a Store, which stays in this process."""
    store = MemoryStore()
    save(store, state_of(3))
    assert flat(load(store, state_of(5))) == flat(state_of(3))
    for one in (HoldfastWriter(store, step=1), HoldfastReader(store)):
        with pytest.raises(UsageError, match="another process"):
            pickle.dumps(one)


def test_a_load_into_another_dtype_warns(tmp_path: Path) -> None:
    """DCP casts, and so does this; never in silence."""
    save(tmp_path, {"x": torch.ones(3), "y": torch.ones(2)})
    state = {"x": torch.zeros(3, dtype=torch.float64), "y": torch.zeros(2)}
    with pytest.warns(UserWarning, match="1 tensors were loaded into another dtype, first 'x'"):
        load(tmp_path, state)
    assert state["x"].tolist() == [1, 1, 1]


def test_encrypted_checkpoints_are_loaded_with_their_key(tmp_path: Path) -> None:
    encrypt = Encryption(keys=generate())
    model = network(3)
    with CheckpointManager(tmp_path, {"model": model}, encrypt=encrypt) as manager:
        manager.save(1, wait=True)
    state = {"model": dict(network(1).state_dict())}
    with pytest.raises(CheckpointException, match=r"seal|encrypted"):
        load(tmp_path, state)
    with pytest.raises(CheckpointException, match=r"seal|encrypted"):
        save(tmp_path, state, step=2)  # in the clear, beside what is encrypted
    assert flat(load(tmp_path, state, encrypt=encrypt)["model"]) == flat(dict(model.state_dict()))


def test_what_retention_has_dropped_is_missing_and_the_rest_loads(tmp_path: Path) -> None:
    model, progress = network(3), {"t": torch.ones(2)}
    keep = Last(1) | Last(3).then_drop("progress")
    with CheckpointManager(
        tmp_path, {"model": model, "progress": progress}, keep=keep, on_existing="keep"
    ) as manager:
        for step in (1, 2, 3):
            progress["t"] += 1
            manager.save(step, wait=True)
    state = {"model": dict(network(1).state_dict())}
    assert flat(load(tmp_path, state, which="step=1")) == flat({"model": dict(model.state_dict())})
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint .* progress.t"):
        load(tmp_path, {**state, "progress": {"t": torch.zeros(2)}}, which="step=1")


ERRORS = [
    errors.Superseded("text", committed=True),
    errors.SaveFailed("text", step=4),
    errors.UnsupportedState([("a.b", "why")]),
    errors.MismatchError("where", missing=["x"]),
    errors.RanksFailed("the save", {1: ("phase", "why")}),
    errors.RanksSilent("the save", [1, 2]),
    errors.PreflightFailed(["full"]),
    errors.DeadlineExceeded("late"),
    errors.OutOfMemory("none"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_reaches_another_rank_as_it_is(error: Exception) -> None:
    """DCP pickles what a rank raises; an error that cannot be opened would hang all others."""
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_a_save_and_a_load_without_an_id_know_nothing_of_the_last_id(tmp_path: Path) -> None:
    root = tmp_path / "run"
    writer, reader = HoldfastWriter(root), HoldfastReader(root)
    dcp.save({"w": torch.tensor(10)}, checkpoint_id="first-10", storage_writer=writer)
    with pytest.raises(CheckpointException, match="the step is unknown"):
        dcp.save({"w": torch.tensor(20)}, storage_writer=writer)
    writer.step = 20
    dcp.save({"w": torch.tensor(20)}, storage_writer=writer)
    assert locate(root)[1].manifest.label == "step-00000020"
    state = {"w": torch.tensor(0)}
    dcp.load(state, checkpoint_id="step=10", storage_reader=reader)
    assert state["w"] == 10
    with pytest.raises(CheckpointException, match="step=30"):
        dcp.load(state, checkpoint_id="step=30", storage_reader=reader)
    dcp.load(state, storage_reader=reader)
    assert state["w"] == 20
