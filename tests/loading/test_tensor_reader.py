"""Loads that keep no copy of the state: equal to those that do, bounded, and open about damage."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import errors
from holdfast.errors import (
    ManagerUnusable,
    MismatchError,
    NoUsableCheckpoint,
    OutOfMemory,
    UsageError,
)
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorSpec
from holdfast.keys import Encryption, SecretKey
from holdfast.loading import pipeline
from holdfast.loading.apply import CheckpointApplier
from holdfast.loading.tensor_reader import TensorReader
from holdfast.manager import CheckpointManager
from holdfast.ownership.claim import is_closed
from holdfast.ownership.tiered_options import Tiered
from holdfast.root.catalog import Catalog
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.state.modules import ModulePlan
from holdfast.state.planning.copying import UnreadTensor
from holdfast.store.local import LocalStore
from holdfast.store.local import reads as localreads
from holdfast.store.local.reads import OpenFile, Seen, fill_cached, is_at_hand
from holdfast.weights import load_weights
from marks import diagonal, full
from runs import Recorder

SMALL_BUDGET = 4 * BLOCK_NBYTES
"""Less than the state of `Large` has, so that a load does not hold it."""
MEMORY_CHILD = """
import sys
from pathlib import Path
import torch
from holdfast import CheckpointManager

def status(name):
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(name))
    return int(line.split()[1])

state = {f"x{n}": torch.full((1 << 21,), -1.0) for n in range(48)}  # 8 MiB each
with CheckpointManager(sys.argv[1], {"tree": state}, memory_budget=eval(sys.argv[2])) as manager:
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    manager.load(**eval(sys.argv[3]))
    taken = status("VmHWM") - before
assert all(float(value[0]) == float(value[-1]) == n for n, value in enumerate(state.values()))
print(taken >> 10)
"""


class Large:
    """Tensors of many blocks among small ones, in every kind of component, some laid out oddly."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(1024, 2048), nn.LayerNorm(2048), nn.Linear(2048, 512), nn.BatchNorm1d(512)
        )
        self.model.register_buffer("turned", torch.randn(768, 1024).t())
        self.model.register_buffer("narrow", torch.randn(700, 999).to(torch.bfloat16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.best: dict[str, Any] = {"weights": torch.randn(1500, 800), "names": ["a"], "loss": 1.0}
        self.best["same"] = self.best["weights"]
        self.best["flags"] = torch.ones(5, dtype=torch.bool)
        self.best["none"] = torch.empty(0, 3)
        self.best["generator"] = torch.Generator().manual_seed(seed)

    def train(self) -> None:
        self.model(torch.randn(4, 1024)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.best["weights"].add_(1.0)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "best": self.best,
        }

    def manager(self, root: Any, **options: Any) -> CheckpointManager:
        return CheckpointManager(root, self.state, preflight=False, **{"sinks": ()} | options)

    def bits(self) -> dict[str, bytes]:
        tensors: dict[str, Tensor] = dict(self.model.state_dict())
        for index, slots in enumerate(self.optimizer.state_dict()["state"].values()):
            tensors |= {f"optimizer.{index}.{name}": value for name, value in slots.items()}
        for name in ("weights", "same", "flags"):
            tensors[f"best.{name}"] = self.best[name]
        tensors["best.generator"] = self.best["generator"].get_state()
        bits = {
            name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, value in tensors.items()
        }
        return bits | {"scheduler": repr(self.scheduler.state_dict()).encode()}


def saved(root: Any, steps: int = 1, **options: Any) -> list[dict[str, bytes]]:
    """The bits of each step that was saved; its files are in the page cache."""
    large, bits = Large(seed=1), []
    with large.manager(root, **options) as manager:
        for step in range(1, steps + 1):
            large.train()
            manager.save(step).wait()
            bits.append(large.bits())
    if isinstance(root, Path):
        fill_page_cache(root)
    return bits


def fill_page_cache(root: Path) -> None:
    """With all tensor files below a folder."""
    for path in root.rglob("*.safetensors"):
        path.read_bytes()


def expect_at_hand(root: Path) -> None:
    """All tensor files below the root of a store can be read without waiting; else skip."""
    for _ in range(10):  # the kernel may be busy with a page just then
        fill_page_cache(root)
        if all(map(is_filled, root.rglob("*.safetensors"))):
            return
    pytest.skip("this file system always waits")


def is_filled(path: Path) -> bool:
    """Whether a file could be read without waiting."""
    file, nbytes = OpenFile(os.open(path, os.O_RDONLY)), path.stat().st_size
    into = [memoryview(bytearray(nbytes))]
    return is_at_hand(file, 0, nbytes) and fill_cached(file, 0, into, id)


def damage(root: Path, step: int, *, component: str = "optimizer") -> str:
    """Flip a byte in the last block of a component's tensors; the folder of the checkpoint."""
    (folder,) = root.glob(f"step-{step:08d}.*")
    file = max(folder.glob(f"{component}*"), key=lambda path: path.stat().st_size)
    mode = file.stat().st_mode
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.seek(-9, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-9, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 4]))
    file.chmod(mode)
    return folder.name


@pytest.fixture(params=["in place", *full("in place from disk", "bounded")])
def how(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the manager and of the load."""
    if request.param == "in place from disk":
        monkeypatch.setattr(LocalStore, "cached", lambda *asked: None)
    if request.param == "bounded":
        return {"memory_budget": SMALL_BUDGET}, {}
    return {}, {"in_place": True}


How = tuple[dict[str, Any], dict[str, Any]]


@pytest.mark.parametrize(
    ("options", "trained"),
    diagonal(
        [{}, {"compress": "zstd"}, {"encrypt": Encryption(keys=SecretKey(bytes(range(32))))}],
        [2, 0],
        ids=["plain", "compressed", "sealed"],
    ),
)
def test_it_brings_the_same_bits_into_a_new_state_and_into_one_that_was_trained(
    tmp_path: Path, how: How, options: dict[str, Any], trained: int
) -> None:
    (bits,) = saved(tmp_path, **options)
    live = Large(seed=2)
    for _ in range(trained):
        live.train()
    keys = {name: value for name, value in options.items() if name == "encrypt"}
    with live.manager(tmp_path, **how[0], **keys) as manager:
        found = manager.resume(**how[1])
    assert found is not None
    assert live.bits() == bits
    assert live.best["same"] is live.best["weights"]
    assert live.best["none"].shape == (0, 3)


def test_the_memory_of_a_load_goes_with_it(
    tmp_path: Path, how: How, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the garbage collector is off, as in trainings that must not pause."""
    options, loads = how
    saved(tmp_path)
    streams: list[weakref.ref[TensorReader]] = []
    really_begin = TensorReader.__init__

    def noted(self: TensorReader, *args: Any, **kwargs: Any) -> None:
        really_begin(self, *args, **kwargs)
        streams.append(weakref.ref(self))

    monkeypatch.setattr(TensorReader, "__init__", noted)
    with Large().manager(tmp_path, **options) as manager:
        gc.collect()
        gc.disable()
        try:
            manager.load(**loads)
            assert [stream() for stream in streams] == [None]
        finally:
            gc.enable()


@pytest.mark.full
def test_training_goes_on_to_the_same_bits(tmp_path: Path, how: How) -> None:
    saved(tmp_path)
    states = [Large(seed=2), Large(seed=3)]
    for live, (options, load) in zip(states, [({}, {}), how], strict=True):
        with live.manager(tmp_path, **options) as manager:
            manager.load(**load)
        live.train()
        live.train()
    assert states[0].bits() == states[1].bits()


def test_live_tensors_and_what_watches_them_stay(tmp_path: Path, how: How) -> None:
    saved(tmp_path)
    live = Large(seed=2)
    live.train()
    weight = live.model[0].weight
    moment = live.optimizer.state[weight]["exp_avg"]
    before = [(tensor, tensor.data_ptr(), tensor._version) for tensor in (weight, moment)]
    with live.manager(tmp_path, **how[0]) as manager:
        manager.load(**how[1])
    assert live.model[0].weight is weight
    assert live.optimizer.state[weight]["exp_avg"] is moment
    for tensor, address, version in before:
        assert tensor.data_ptr() == address
        assert tensor._version > version


def test_what_is_at_hand_is_read_into_the_live_tensors_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"x{n}": torch.full((1 << 20,), float(n)) for n in range(16)}  # 4 MiB each
    with CheckpointManager(tmp_path, {"tree": state}, sinks=()) as manager:
        manager.save(1).wait()
    expect_at_hand(tmp_path)
    copied: list[int] = []
    copy = pipeline._copy_segments

    def counted(memory: memoryview, parts: Any) -> None:
        copied.append(len(memory))
        copy(memory, parts)

    monkeypatch.setattr(pipeline, "_copy_segments", counted)
    for _ in range(3):  # the kernel may be busy with a page just then
        copied.clear()
        for value in state.values():
            value.fill_(-1.0)
        with CheckpointManager(tmp_path, {"tree": state}, sinks=()) as manager:
            manager.load(in_place=True)
        assert all(bool((value == n).all()) for n, value in enumerate(state.values()))
        if not copied:
            break
    assert copied == []


def test_what_was_one_tensor_is_read_into_each_that_is_there_now(tmp_path: Path) -> None:
    def modules() -> list[nn.Linear]:
        return [nn.Linear(4096, 2048, bias=False) for _ in range(2)]

    tied, apart, store = modules(), modules(), LocalStore(tmp_path)
    tied[1].weight = tied[0].weight
    with CheckpointManager(tmp_path, {"model": nn.Sequential(*tied)}, sinks=()) as manager:
        manager.save(1).wait()
    fill_page_cache(tmp_path)
    with CheckpointManager(store, {"model": nn.Sequential(*apart)}, sinks=()) as manager:
        manager.load(in_place=True, verify=False)
    for module in apart:
        assert torch.equal(module.weight, tied[0].weight)


def test_damage_at_hand_is_read_again_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of the cache that went bad condemns no checkpoint."""
    (bits,) = saved(tmp_path)
    expect_at_hand(tmp_path)
    fill_cached = localreads.fill_cached
    spoiled: list[int] = []

    def spoiling(file: OpenFile, start: int, targets: Any, seen: Seen) -> bool:
        def look(piece: memoryview) -> None:
            if not spoiled and len(piece) > 1000:
                spoiled.append(start)
                piece[500] ^= 1
            seen(piece)

        return fill_cached(file, start, targets, look)

    monkeypatch.setattr(localreads, "fill_cached", spoiling)
    live = Large(seed=2)
    with live.manager(tmp_path) as manager:
        manager.load(in_place=True)
    assert live.bits() == bits
    assert spoiled


def test_a_load_in_place_tells_of_damage_and_the_manager_refuses_what_is_mixed(
    tmp_path: Path,
) -> None:
    bits = saved(tmp_path, steps=2)
    folder = damage(tmp_path, 2)
    live = Large(seed=2)
    with live.manager(tmp_path) as manager:
        with pytest.raises(OpaqueLoadFailed, match=f"{folder}.*optimizer.*mixed: load again"):
            manager.load(2, in_place=True)
        with pytest.raises(ManagerUnusable, match="half loaded"):
            manager.save(3)
        manager.load(1, in_place=True)
        assert live.bits() == bits[0]
        manager.resume()
        manager.save(3).wait()


def test_a_bounded_load_of_damage_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    damage(tmp_path, 1)
    live = Large(seed=2)
    live.train()
    before = live.bits()
    with live.manager(tmp_path, memory_budget=SMALL_BUDGET) as manager:
        with pytest.raises(errors.CorruptData, match="it holds optimizer"):
            manager.load()
        with pytest.raises(NoUsableCheckpoint, match="Nothing was changed"):
            manager.resume(in_place=False)
        assert live.bits() == before


def test_the_first_resume_reads_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of the state, unless something was loaded, saved or stepped before."""
    bits, apart, read, live = (
        saved(tmp_path, steps=2),
        set(),
        TensorReader.read_tensors,
        Large(seed=2),
    )

    def noted(reader: TensorReader, needed: Any, shards: Any) -> Any:
        apart.update(needed)
        return read(reader, needed, shards)

    monkeypatch.setattr(TensorReader, "read_tensors", noted)

    def is_in_place(use: Callable[[CheckpointManager], object], **options: Any) -> bool:
        with live.manager(tmp_path, **options) as manager:
            use(manager)
            apart.clear()
            assert manager.resume() is not None
        assert live.bits() == bits[1]
        return "model" not in apart

    assert is_in_place(lambda manager: None)
    assert is_in_place(lambda manager: None, memory_budget=SMALL_BUDGET)
    assert not is_in_place(lambda manager: manager.resume())
    assert not is_in_place(lambda manager: manager.load(1))
    assert not is_in_place(lambda manager: manager.maybe_save(3))


def test_a_first_resume_that_finds_all_damaged_says_that_the_state_is_mixed(tmp_path: Path) -> None:
    """It is in place, so that nothing may be saved until a whole load succeeds."""
    saved(tmp_path)
    damage(tmp_path, 1)
    live = Large(seed=2)
    with live.manager(tmp_path) as manager:
        with pytest.raises(NoUsableCheckpoint, match="The state is mixed"):
            manager.resume()
        with pytest.raises(ManagerUnusable, match="half loaded"):
            manager.save(9)


def test_a_named_checkpoint_that_is_damaged_changes_nothing(tmp_path: Path) -> None:
    """A resume from a name has no other to go on from: it is kept apart, the first one too."""
    saved(tmp_path)
    damage(tmp_path, 1)
    live = Large(seed=2)
    before = live.bits()
    with live.manager(tmp_path) as manager, pytest.raises(errors.CorruptData):
        manager.resume("step=1")
    assert live.bits() == before


def test_a_resume_passes_over_what_proves_damaged_on_the_way(tmp_path: Path, how: How) -> None:
    bits = saved(tmp_path, steps=3)
    folders = [damage(tmp_path, 3), damage(tmp_path, 2, component="model")][::1]
    live, recorder = Large(seed=2), Recorder()
    with live.manager(tmp_path, sinks=(recorder,), **how[0]) as manager:
        found = manager.resume(**how[1])
        assert found is not None
        assert found.step == 1
        assert [folder for folder, _ in found.rejected] == folders
        assert live.bits() == bits[0]
        live.train()
        manager.save(2).wait()
    marked = [e.folder for e in Catalog(LocalStore(tmp_path)).checkpoints() if e.marks.rejected]
    assert sorted(marked) == sorted(folders)
    assert [event.fields["folder"] for event in recorder.of("rejected")] == folders
    with Large(seed=3).manager(tmp_path) as manager:
        again = manager.resume()
    assert again is not None
    assert (again.step, len(again.rejected)) == (2, 0)


@pytest.mark.full
def test_with_nothing_usable_left_a_resume_in_place_says_that_the_state_is_mixed(
    tmp_path: Path,
) -> None:
    saved(tmp_path, steps=2)
    damage(tmp_path, 2)
    damage(tmp_path, 1)
    live = Large(seed=2)
    manager = live.manager(tmp_path)
    with pytest.raises(NoUsableCheckpoint, match="The state is mixed") as caught:
        manager.resume(in_place=True)
    assert len(caught.value.rejected) == 2
    with pytest.raises(ManagerUnusable, match="half loaded"):
        manager.save(3)
    with pytest.raises(NoUsableCheckpoint, match="The state is mixed"):
        manager.resume()
    manager.close()


@pytest.mark.parametrize("tiered", [True, *full(False)])
def test_with_nothing_usable_left_a_resume_in_place_gives_the_run_up_and_marks_all_it_tried(
    tmp_path: Path, tiered: bool
) -> None:
    root = Tiered(tmp_path / "run", tmp_path / "remote") if tiered else tmp_path / "run"
    saved(root, steps=2)
    places = [tmp_path / "run", *([tmp_path / "remote"] if tiered else [])]
    folders = [damage(place, step) for step in (2, 1) for place in places][:: len(places)]
    recorder = Recorder()
    manager = Large(seed=2).manager(root, sinks=(recorder,))
    with pytest.raises(NoUsableCheckpoint):
        manager.resume(in_place=True)
    assert not manager.is_owner
    for place in places:
        store = LocalStore(place)
        assert all(is_closed(store, epoch) for epoch in Catalog(store).claims())
    assert [event.fields["folder"] for event in recorder.of("rejected")] == folders
    entries = Catalog(LocalStore(tmp_path / "run")).checkpoints()
    assert [e.folder for e in entries if e.marks.rejected] == folders
    manager.close()


@pytest.mark.full
def test_damage_that_the_preparation_finds_leaves_the_state_as_it_was_and_the_error_says_so(
    tmp_path: Path,
) -> None:
    """The state of a generator is read before anything is changed."""
    saved(tmp_path, steps=2)
    folders = [damage(tmp_path, step, component="best") for step in (2, 1)]
    live = Large(seed=2)
    live.train()
    before = live.bits()
    with live.manager(tmp_path) as manager:
        with pytest.raises(NoUsableCheckpoint, match="Nothing was changed") as caught:
            manager.resume(in_place=True)
        assert [folder for folder, _ in caught.value.rejected] == folders
        assert live.bits() == before
        with pytest.raises(UsageError, match="holds the checkpoints of a run"):
            manager.save(3)


@pytest.mark.full
def test_an_older_one_that_does_not_fit_is_told_beside_the_mixed_state(tmp_path: Path) -> None:
    large = Large(seed=1)
    large.train()
    with large.manager(tmp_path) as manager:
        large.model.register_buffer("more", torch.zeros(3))
        manager.save(1).wait()
        del large.model.more
        manager.save(2).wait()
    folder = damage(tmp_path, 2)
    with Large(seed=2).manager(tmp_path) as manager:
        with pytest.raises(MismatchError) as caught:
            manager.resume(in_place=True)
        text = str(caught.value)
        assert f"nothing was changed, but the state was mixed before: loading {folder} was" in text
        assert caught.value.unexpected == ["model.more"]
        assert "model.more" in text
        assert not manager.is_owner
        with pytest.raises(ManagerUnusable, match="half loaded"):
            manager.save(3)
        with pytest.raises(MismatchError, match="the state was mixed before"):
            manager.load(1)
    with Large(seed=2).manager(tmp_path) as manager:
        with pytest.raises(MismatchError) as caught:
            manager.load(1)
        assert "nothing was changed." in str(caught.value)


def test_a_resume_that_fails_gives_the_run_up_and_the_next_save_claims_it_again(
    tmp_path: Path,
) -> None:
    large, store = Large(seed=1), LocalStore(tmp_path)
    with large.manager(tmp_path) as manager:
        manager.save(1).wait()
        large.model.register_buffer("more", torch.zeros(3))
        with pytest.raises(MismatchError):
            manager.resume()
        assert not manager.is_owner
        assert is_closed(store, 1)
        manager.save(2).wait()
        assert manager.is_owner
        with pytest.raises(errors.NoCheckpoint):
            manager.load("step=7")
        assert manager.is_owner
    assert [entry.step for entry in Catalog(store).checkpoints()] == [2, 1]


def test_a_resume_in_place_takes_the_other_tier_where_the_local_files_are_damaged(
    tmp_path: Path,
) -> None:
    tiers = Tiered(tmp_path / "local", tmp_path / "remote")
    bits = saved(tiers, steps=2)
    damage(tmp_path / "local", 2)
    live = Large(seed=2)
    with live.manager(tiers) as manager:
        found = manager.resume(in_place=True)
    assert found is not None
    assert found.step == 2
    assert live.bits() == bits[1]


@pytest.mark.full
def test_an_explicit_step_that_is_damaged_is_not_replaced_by_another(tmp_path: Path) -> None:
    saved(tmp_path, steps=2)
    damage(tmp_path, 2)
    with Large(seed=2).manager(tmp_path) as manager:
        with pytest.raises(OpaqueLoadFailed, match="CorruptData"):
            manager.resume(2, in_place=True)
        found = manager.resume(1, in_place=True)
    assert found is not None


def test_a_foreign_reader_keeps_what_it_reads_until_it_has_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = saved(tmp_path, steps=1)
    live, leases = Large(seed=2), []
    copy = CheckpointApplier._apply_candidate

    def looked(self: CheckpointApplier, *args: Any, **named: Any) -> None:
        leases.append(len([*tmp_path.glob("readers/*.json")]))
        copy(self, *args, **named)

    monkeypatch.setattr(CheckpointApplier, "_apply_candidate", looked)
    with live.manager(tmp_path) as manager:
        manager.load(in_place=True)
    assert live.bits() == bits[0]
    assert leases == [1]


def test_a_read_that_comes_back_after_the_load_was_given_up_writes_nothing(
    tmp_path: Path,
) -> None:
    saved(tmp_path)
    hangs, back = threading.Event(), threading.Event()

    class Hanging(LocalStore):
        def read_into(self, key: str, start: int, buffer: memoryview, **named: Any) -> None:
            super().read_into(key, start, buffer, **named)
            if armed and key.endswith(file) and start == 0:
                hangs.set()
                assert back.wait(60)

    armed = False
    live = Large(seed=2)
    file = "model-00000.safetensors"
    of_others = {*threading.enumerate()}
    with live.manager(Hanging(tmp_path), save_timeout_s=1.0) as manager:
        armed = True
        with pytest.raises(errors.HoldfastError):
            manager.load(in_place=True)
        assert hangs.is_set()
        before = live.bits()
        back.set()
        manager._session.saver.threads.close_pools()
        for thread in {*threading.enumerate()} - of_others:
            if thread.name.startswith(("holdfast-io", "holdfast-disk")):
                thread.join(60)
                assert not thread.is_alive()
        assert live.bits() == before


@pytest.mark.parametrize(
    ("budget", "load", "most_mib"),
    [
        ("64 << 20", {}, 200),
        pytest.param("None", {"in_place": True}, 200, marks=pytest.mark.full),
        pytest.param("None", {}, None, marks=pytest.mark.full),
    ],
)
def test_the_memory_that_a_load_takes_is_bounded(
    tmp_path: Path, budget: str, load: dict[str, Any], most_mib: int | None
) -> None:
    state = {f"x{n}": torch.full((1 << 21,), float(n)) for n in range(48)}
    with CheckpointManager(tmp_path, {"tree": state}, sinks=()) as manager:
        manager.save(1).wait()
    command = [sys.executable, "-c", MEMORY_CHILD, str(tmp_path), budget, repr(load)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    taken = int(done.stdout.split()[-1])
    assert taken > 300 if most_mib is None else taken < most_mib


@pytest.mark.full
def test_weights_are_loaded_in_place(tmp_path: Path) -> None:
    saved(tmp_path)
    models = [Large(seed=2).model, Large(seed=3).model]
    load_weights(tmp_path, models[0])
    load_weights(tmp_path, models[1], in_place=True)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_parts_and_other_names_are_loaded_in_place(tmp_path: Path) -> None:
    (bits,) = saved(tmp_path)
    live = Large(seed=2)
    before = live.bits()
    with live.manager(tmp_path) as manager:
        manager.load(include=["model.0"], in_place=True)
    changed = {name for name, value in live.bits().items() if before[name] != value}
    assert changed == {"0.weight", "0.bias"}
    assert live.bits()["0.weight"] == bits["0.weight"]


class Failing(LocalStore):
    """Its reads of a file fail as often as it is told."""

    file = "optimizer-00000.safetensors"
    error: type[errors.StoreError] = errors.StoreError
    times = 0
    nbytes = 0

    def read_into(self, key: str, start: int, buffer: memoryview, **named: Any) -> None:
        if key.endswith(self.file):
            self.nbytes += len(buffer)
            if self.times > 0:
                self.times -= 1
                raise self.error(f"{key}: the disk says no")
        super().read_into(key, start, buffer, **named)


@pytest.mark.parametrize("error", [errors.TransientStoreError, *full(errors.StoreError)])
def test_an_error_that_passes_costs_a_resume_in_place_no_checkpoint(
    tmp_path: Path, error: type[errors.StoreError]
) -> None:
    bits = saved(tmp_path, steps=2)
    store, live = Failing(tmp_path), Large(seed=2)
    store.error, store.times = error, 1
    with live.manager(store) as manager:
        found = manager.resume(in_place=True)
        assert found is not None
        assert (found.step, found.rejected) == (2, ())
        assert live.bits() == bits[1]
        live.train()
        manager.save(3).wait()
    assert not any(entry.marks.rejected for entry in Catalog(LocalStore(tmp_path)).checkpoints())


@pytest.mark.full
def test_errors_that_may_pass_reject_nothing_however_often_they_come(tmp_path: Path) -> None:
    saved(tmp_path, steps=2)
    store, live = Failing(tmp_path), Large(seed=2)
    store.error, store.times = errors.TransientStoreError, 1000
    manager = live.manager(store)
    with pytest.raises(OpaqueLoadFailed, match="the disk says no"):
        manager.resume(in_place=True)
    store.times = 0
    found = manager.resume(in_place=True)
    assert found is not None
    assert (found.step, found.rejected) == (2, ())
    manager.close()


class Foreign:
    """Reads something of its own when it is loaded, and finds that damaged."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def check_state_dict(self, state: dict[str, int]) -> None:
        """Find nothing, as it reads only when it is loaded."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("error", [errors.CorruptData("theirs"), errors.NotFound("theirs")])
def test_what_foreign_code_raises_is_no_damage_of_the_checkpoint(
    tmp_path: Path, error: Exception, in_place: bool
) -> None:
    with CheckpointManager(tmp_path, {"foreign": Foreign()}, sinks=()) as manager:
        manager.save(1).wait()
        manager.save(2).wait()
    manager = CheckpointManager(tmp_path, {"foreign": Foreign(error)}, sinks=())
    with pytest.raises(OpaqueLoadFailed, match="theirs"):
        manager.resume(in_place=in_place)
    manager.close()
    assert not any(entry.marks.rejected for entry in Catalog(LocalStore(tmp_path)).checkpoints())


@pytest.mark.full
def test_what_was_rejected_before_is_not_rejected_again_for_what_fails_on_the_way(
    tmp_path: Path,
) -> None:
    saved(tmp_path, steps=3)
    third = damage(tmp_path, 3, component="index")
    second = damage(tmp_path, 2)
    recorder = Recorder()
    with Large(seed=2).manager(tmp_path, sinks=(recorder,)) as manager:
        found = manager.resume(in_place=True)
    assert found is not None
    assert found.step == 1
    assert [event.fields["folder"] for event in recorder.of("rejected")] == [third, second]


def test_autograd_learns_of_tensors_that_a_load_changed_and_did_not_finish(tmp_path: Path) -> None:
    saved(tmp_path)
    damage(tmp_path, 1, component="model")
    live = Large(seed=2)
    weight = live.model[0].weight
    weight.data.zero_()
    before = weight._version
    with live.manager(tmp_path) as manager, pytest.raises(OpaqueLoadFailed):
        manager.load(in_place=True)
    assert weight.detach().any()
    assert weight._version > before


class Opaque(nn.Module):
    """Many small tensors, and code of its own for their loading."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for number in range(300):
            self.register_buffer(f"b{number}", torch.full((1 << 14,), value + number))
        hook: Any = self.register_load_state_dict_post_hook
        hook(lambda module, keys: None)


def many(value: float, kind: str) -> dict[str, Any]:
    if kind == "opaque":
        return {"it": Opaque(value)}
    if kind == "arrays":
        return {"it": {f"a{n}": np.full(1 << 14, value + n, np.float32) for n in range(300)}}
    module = nn.ParameterList([torch.full((1 << 14,), value + n) for n in range(300)])
    return {"it": module, "same": nn.Sequential(module)}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["opaque", "arrays", "tied"])
def test_what_is_wanted_piece_by_piece_is_not_read_over_and_over(tmp_path: Path, kind: str) -> None:
    with CheckpointManager(tmp_path, many(1.0, kind), sinks=()) as manager:
        manager.save(1).wait()
    (file,) = tmp_path.glob("step-*/it-*.safetensors")
    store, live = Failing(tmp_path), many(0.0, kind)
    store.file = file.name
    with CheckpointManager(store, live, sinks=()) as manager:
        manager.load(in_place=True)
    value = live["it"]
    last = value["a299"] if kind == "arrays" else [*value.state_dict().values()][-1]
    assert float(last[-1]) == 300.0
    assert store.nbytes <= 3 * file.stat().st_size


@pytest.mark.full
@pytest.mark.parametrize(("budget", "load"), [("None", {"in_place": True}), ("64 << 20", {})])
@pytest.mark.parametrize("kind", ["small", "turned"])
def test_the_memory_for_small_and_odd_tensors_is_bounded_too(
    tmp_path: Path, budget: str, load: dict[str, Any], kind: str
) -> None:
    of = {
        "small": 'f"x{n}": torch.full((1 << 17,), -1.0) for n in range(768)',
        "turned": 'f"x{n}": torch.full((1 << 10, 1 << 11), -1.0).t() for n in range(48)',
    }[kind]
    state = eval(f"{{{of.replace('-1.0', 'float(n)')}}}")
    with CheckpointManager(tmp_path, {"tree": state}, sinks=()) as manager:
        manager.save(1).wait()
    line = 'f"x{n}": torch.full((1 << 21,), -1.0) for n in range(48)'
    child = MEMORY_CHILD.replace(line, of).replace("value[", "value.reshape(-1)[")
    assert of in child
    command = [sys.executable, "-c", child, str(tmp_path), budget, repr(load)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout.split()[-1]) < 250


@pytest.mark.parametrize("waits", ["from disk", "in the cache", "before it", "between"])
def test_an_interrupt_while_reads_are_begun_leaves_nobody_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """What is being copied right then is waited for, nothing else is, and nothing is begun."""
    saved(tmp_path)
    places = {
        "from disk": (LocalStore, "read_into"),
        "in the cache": (localreads, "fill_cached"),
        "before it": (pipeline, "_targets"),
        "between": (LocalStore, "cached"),
    }
    if waits == "from disk":
        monkeypatch.setattr(LocalStore, "cached", lambda *asked: None)
    else:
        expect_at_hand(tmp_path)
    go, began = threading.Event(), threading.Semaphore(0)
    jobs: list[Any] = []
    real = getattr(*places[waits])

    def waiting(*asked: Any, **named: Any) -> Any:
        is_late = waits in ("from disk", "between")
        found = real(*asked, **named) if is_late else None
        began.release()
        assert go.wait(60)
        return found if is_late else real(*asked, **named)

    live = Large(seed=2)
    before = live.bits()
    manager = live.manager(LocalStore(tmp_path))
    put, apply = manager._session.saver.threads.waiters.queue_task, ModulePlan.apply

    def interrupted(begin: Any) -> None:
        if len(jobs) == 2:
            assert all(began.acquire(timeout=60) for _ in jobs)
            if waits == "in the cache":
                threading.Timer(0.5, go.set).start()
            raise KeyboardInterrupt
        jobs.append(begin.__self__.future)
        put(begin)

    def applied(self: ModulePlan) -> None:
        monkeypatch.setattr(*places[waits], waiting)
        monkeypatch.setattr(manager._session.saver.threads.waiters, "queue_task", interrupted)
        apply(self)

    monkeypatch.setattr(ModulePlan, "apply", applied)
    with pytest.raises(KeyboardInterrupt):
        manager.load(in_place=True)
    after = live.bits()
    go.set()
    for job in jobs:
        job.result(60)
    assert len(jobs) == 2
    assert live.bits() == after
    assert (after == before) == (waits != "in the cache")


@pytest.mark.full
def test_named_checkpoints_are_read_in_place_from_the_other_tier_too(tmp_path: Path) -> None:
    tiers = Tiered(tmp_path / "local", tmp_path / "remote")
    bits = saved(tiers, steps=2)
    damage(tmp_path / "local", 2)
    for method in ("resume", "load"):
        live = Large(seed=2)
        with live.manager(tiers) as manager:
            found = getattr(manager, method)(2, in_place=True)
        assert found.step == 2
        assert live.bits() == bits[1]


def test_a_tensor_that_no_memory_can_hold_is_told_so() -> None:
    """R29: whoever claims a tensor of a petabyte gets an error of ours, and not one of torch."""
    spec = TensorSpec("x", "F32", (2**48,))
    unread = UnreadTensor(
        source=NothingToRead(), spec=spec, file="m-0.safetensors", start=0, nbytes=2**50
    )
    with pytest.raises(OutOfMemory, match=r"m-0\.safetensors: 1125899906842624 bytes"):
        unread.empty()


class NothingToRead:
    """A source of which nothing is read."""

    def read_pairs(self, pairs: Sequence[tuple[Tensor, UnreadTensor]]) -> None:
        raise AssertionError("nothing is to be read")
