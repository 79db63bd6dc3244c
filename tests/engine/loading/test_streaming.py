"""Loads that keep no copy of the state: equal to those that do, bounded, and open about damage."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import errors
from holdfast.engine.roots.catalog import Catalog
from holdfast.engine.tiers.tiered import Tiered
from holdfast.errors import ManagerUnusable, NoUsableCheckpoint
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.keys import Encryption, SecretKey
from holdfast.manager import CheckpointManager
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.store.local import LocalStore
from holdfast.weights import load_weights
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
    """The bits of each step that was saved."""
    large, bits = Large(seed=1), []
    with large.manager(root, **options) as manager:
        for step in range(1, steps + 1):
            large.train()
            manager.save(step).wait()
            bits.append(large.bits())
    return bits


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


@pytest.fixture(params=["in place", "bounded"])
def how(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the manager and of the load."""
    if request.param == "in place":
        return {}, {"in_place": True}
    return {"memory_budget": SMALL_BUDGET}, {}


How = tuple[dict[str, Any], dict[str, Any]]


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"compress": "zstd"}, {"encrypt": Encryption(keys=SecretKey(bytes(range(32))))}],
    ids=["plain", "compressed", "sealed"],
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
            manager.resume()
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
    manager.close()


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
    copy = CheckpointManager._apply

    def looked(self: CheckpointManager, *args: Any, **named: Any) -> None:
        leases.append(len([*tmp_path.glob("readers/*.json")]))
        copy(self, *args, **named)

    monkeypatch.setattr(CheckpointManager, "_apply", looked)
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
    with live.manager(Hanging(tmp_path), save_timeout_s=1.0) as manager:
        armed = True
        with pytest.raises(errors.HoldfastError):
            manager.load(in_place=True)
        assert hangs.is_set()
        before = live.bits()
        back.set()
        manager._saver.workers.close()
        for thread in threading.enumerate():
            if thread.name.startswith("holdfast-io"):
                thread.join(60)
        assert live.bits() == before


@pytest.mark.parametrize(
    ("budget", "load", "most_mib"),
    [("None", {"in_place": True}, 150), ("64 << 20", {}, 150), ("None", {}, None)],
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
