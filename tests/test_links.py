"""Unchanged files are shared between checkpoints, and each of these stands alone all the same."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from holdfast import Best, CachedStore, CheckpointManager, EveryNth, Last, StateHooks, Within
from holdfast.errors import SaveFailed, TransientStoreError
from holdfast.format import layout
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import Timestamp
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.ownership.annotations import reject
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.base import ObjectInfo
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore
from marks import full

MIB = 1 << 20


def lora() -> dict[str, torch.Tensor]:
    """A large base that nobody trains, adapters between its tensors, and a small tail."""
    state: dict[str, torch.Tensor] = {}
    for layer in range(6):
        state[f"{layer}.base"] = torch.randn(512, 1024)
        state[f"{layer}.adapter"] = torch.randn(8, 64)
    return state


def step(state: dict[str, Any]) -> None:
    for name, tensor in state.items():
        if name.endswith("adapter"):
            tensor.add_(1)


def links_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_nlink for path in folder.glob("*.safetensors")}


def bytes_written(root: Path) -> list[int]:
    """New bytes of each checkpoint's tensor files, oldest first."""
    seen: set[int] = set()
    found = []
    for folder in sorted(path for path in root.iterdir() if path.name.startswith("step")):
        files = [path.stat() for path in folder.glob("model-*.safetensors")]
        found.append(sum(file.st_size for file in files if file.st_ino not in seen))
        seen |= {file.st_ino for file in files}
    return found


def save(manager: CheckpointManager, state: dict[str, Any], number: int) -> None:
    step(state)
    manager.save(number).wait()
    manager.wait()


@pytest.fixture(params=[None, *full("32MiB")])
def budget(request: pytest.FixtureRequest) -> Any:
    return request.param


def big() -> dict[str, torch.Tensor]:
    state = lora()
    state["more"] = torch.randn(10, MIB)
    return state


def test_a_frozen_base_is_written_twice_and_no_more(tmp_path: Path, budget: Any) -> None:
    state = big()
    with CheckpointManager(tmp_path, {"model": state}, memory_budget=budget) as manager:
        for number in range(1, 18):
            save(manager, state, number)
            expected = {name: tensor.clone() for name, tensor in state.items()}
        nbytes = manager.list()[0].nbytes
    written = bytes_written(tmp_path)
    full = [number for number, new in enumerate(written, start=1) if new > 0.9 * nbytes]
    # Twice to learn what stands still; then apart, for each of two that do not share.
    assert full == [1, 2, 3, 4][: len(full)]
    assert min(written) < 0.02 * nbytes
    newest = max(path for path in tmp_path.iterdir() if path.name.startswith("step"))
    alone = Path(shutil.copytree(newest, tmp_path / "elsewhere" / newest.name))
    shutil.rmtree(newest)
    found = {}
    for file in alone.glob("model-*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def whole_folders(root: Path) -> list[Path]:
    """The folders of what a run could go on from, newest first."""
    with CheckpointManager(root, {"model": {}}) as manager:
        found = [c for c in manager.list() if not (c.left_out or c.unhealthy)]
    folders = [root / checkpoint.folder for checkpoint in found]
    return [folder for folder in folders if not (folder / layout.REJECTED).exists()]


def share(one: Path, other: Path) -> bool:
    inodes = [{path.stat().st_ino for path in folder.iterdir()} for folder in (one, other)]
    return bool(inodes[0] & inodes[1])


LOSSES = [0.9, 0.8, 0.7, 0.6, 0.55, 1.0, 2.0, 5.0, 0.5, 4.0, 4.0, 0.4, 6.0, 7.0]
"""Falling at first."""


@pytest.mark.parametrize(
    "rule",
    [
        None,
        Last(2) | Best("loss"),
        EveryNth("5step") | Last(2),
        *full(Last(2), Last(3), Best("loss"), Best("loss", n=3), EveryNth("3step"), Within("1s")),
    ],
    ids=str,
)
def test_the_newest_two_never_share_a_file(tmp_path: Path, rule: Any) -> None:
    """Invariant 10: one flipped bit must not take all that there is, whatever the rule keeps."""
    state, linked = lora(), 0
    with CheckpointManager(tmp_path, {"model": state}, keep=rule) as manager:
        for number, loss in enumerate(LOSSES, start=1):
            before = {path.stat().st_ino for path in tmp_path.glob("step*/*")}
            step(state)
            manager.save(number, metrics={"loss": loss}).wait()
            manager.wait()
            newest, *others = whole_folders(tmp_path)
            assert not others or not share(newest, others[0]), number
            linked += any(path.stat().st_ino in before for path in newest.iterdir())
    assert linked > 3 or not others  # with one alone there is nothing to share


def test_where_one_is_kept_nothing_is_shared_or_read_back(tmp_path: Path) -> None:
    state = lora()
    with CheckpointManager(tmp_path, {"model": state}, keep=Last(1)) as manager:
        for number in range(1, 7):
            save(manager, state, number)
            assert {n for f in tmp_path.glob("step*") for n in links_of(f).values()} == {1}


@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_rule_that_would_leave_only_sharers_keeps_one_more(
    tmp_path: Path, is_pruned: bool
) -> None:
    """Invariant 10: every second one is one file; by another rule from outside, or after a
    restart."""
    state = lora()
    with CheckpointManager(tmp_path, {"model": state}, keep=None) as manager:
        for number in range(1, 9):
            save(manager, state, number)
    rule = EveryNth("2step")
    if is_pruned:
        report = prune_checkpoints(open_store(tmp_path), rule, emit=lambda *_, **__: None)
        kept = [item for item in report.planned if item.decision.keep]
        assert [item.entry.step for item in kept] == [8, 7, 6, 4, 2]
        assert "share a file" in kept[1].decision.reason
    else:
        with CheckpointManager(tmp_path, {"model": state}, keep=rule) as manager:
            manager.resume()
            save(manager, state, 9)
        assert len(whole_folders(tmp_path)) == 5  # 9 shares with nothing that stays
    newest, second, *_ = whole_folders(tmp_path)
    assert not share(newest, second)


@pytest.mark.parametrize("what", ["rejected", "unhealthy", "partial"])
def test_what_cannot_stand_in_is_not_between(tmp_path: Path, what: str) -> None:
    """Invariant 10: of the two around it the newer one is written anew."""
    state, small, odd = lora(), {"x": torch.randn(8)}, (6, 9)

    def judge(now: Timestamp, metrics: Any) -> list[str]:
        return ["the loss is nan"] if what == "unhealthy" and now.step in odd else []

    parts = {"model": state, "small": small}
    with CheckpointManager(tmp_path, parts, hooks=StateHooks(before_save=judge)) as manager:
        for number in range(1, 14):
            step(state)
            part = ["model"] if number in odd and what == "partial" else None
            saved = manager.save(number, components=part).wait()
            manager.wait()
            if number in odd and what == "rejected":
                reject(open_store(tmp_path), saved.folder, by="a test", reason="it is not good")
            newest, *others = whole_folders(tmp_path)
            assert not others or not share(newest, others[0]), number


def frozen_parts() -> dict[str, Any]:
    """A part that changes, and two that do not."""
    large = torch.randn(3, MIB)
    return {"model": {"w": torch.zeros(8)}, "base": {"w": large}, "extra": {"w": large + 1}}


def go(manager: CheckpointManager, number: int, **more: Any) -> None:
    manager.state["model"]["w"].add_(1)
    manager.save(number, **more).wait()
    manager.wait()


def newest_of_line(root: Path) -> list[Path]:
    """The folders on the run's own line, newest first."""
    return [root / entry.folder for entry in Catalog(LocalStore(root)).lineage_entries()]


def test_what_was_thinned_is_not_between(tmp_path: Path) -> None:
    """Invariant 10: it is not whole, so the two around it are the newest whole ones."""
    rule = Last(1) | EveryNth("3step").then_drop("extra")
    with CheckpointManager(tmp_path, frozen_parts(), keep=rule) as manager:
        for number in range(1, 12):
            go(manager, number, tags=["kept"] if number == 10 else [])
    newest, tagged = newest_of_line(tmp_path)[:2]
    assert [path.name[:13] for path in (newest, tagged)] == ["step-00000011", "step-00000010"]
    assert not share(newest, tagged)


def test_after_a_rollback_the_own_line_has_two_files(tmp_path: Path) -> None:
    """Invariant 10: not those that were left behind count, but what a resume would go back to."""
    with CheckpointManager(tmp_path, frozen_parts(), keep=Last(2)) as manager:
        for number in (1, 2, 3):
            go(manager, number)
        manager.load("step=2")
        for number in (3, 4, 5):
            go(manager, number)
            newest, second, *_ = newest_of_line(tmp_path)
            assert not share(newest, second), number


def test_saves_of_another_kind_are_no_excuse(tmp_path: Path) -> None:
    """Invariant 10: what lacks generators alone is whole, too."""
    with CheckpointManager(tmp_path, frozen_parts(), keep=Last(2)) as manager:
        for number in range(1, 10):
            parts = ["model", "base", "extra"] if number in (4, 5, 8) else None
            go(manager, number, components=parts, tags=["kept"] if number == 2 else [])
            newest, *others = newest_of_line(tmp_path)
            assert not others or not share(newest, others[0]), number


class Unreadable(FaultyStore):
    """A store in which some keys cannot be looked at now."""

    pattern = ""

    def head(self, key: str) -> ObjectInfo:
        if self.pattern and fnmatch(key, self.pattern):
            raise TransientStoreError(f"head {key}: the disk is busy")
        return super().head(key)


@pytest.mark.parametrize("hidden", [5, 6])
def test_one_that_cannot_be_read_now_is_not_forgotten(tmp_path: Path, hidden: int) -> None:
    """Invariant 10: which are the newest two is not known in that save, which shares nothing; the
    next ones share as before."""
    store = Unreadable(open_store(tmp_path))
    with CheckpointManager(store, frozen_parts()) as manager:
        for number in range(1, 11):
            before = {path.stat().st_ino for path in tmp_path.glob("step*/*")}
            store.pattern = f"step-{hidden:08d}.*/manifest.json" if number == 7 else ""
            manager.state["model"]["w"].add_(1)
            manager.save(number).wait()
            store.pattern = ""
            manager.wait()
            newest, *others = newest_of_line(tmp_path)
            assert not others or not share(newest, others[0]), number
            linked = any(path.stat().st_ino in before for path in newest.iterdir())
            assert linked is (number > 2 and number != 7), number


def test_a_damaged_manifest_leaves_its_file_to_others_but_the_newest(tmp_path: Path) -> None:
    """Invariant 10: the second newest that stands may be one file with the newest, then."""
    with CheckpointManager(tmp_path, frozen_parts()) as manager:
        for number in range(1, 12):
            if number == 7:
                (path,) = tmp_path.glob("step-00000005.*/manifest.json")
                path.chmod(0o644)
                path.write_bytes(b"rot")
            go(manager, number)
            newest, *others = newest_of_line(tmp_path)
            assert not others or not share(newest, others[0]), number


def test_nothing_is_deleted_while_it_is_not_known_which_share(tmp_path: Path) -> None:
    """Invariant 10: the one to be spared cannot be found then."""
    store, rule = Unreadable(open_store(tmp_path)), EveryNth("2step")
    with CheckpointManager(store, frozen_parts()) as manager:
        for number in range(1, 7):
            go(manager, number)
    store.pattern = "step-*/base-*.safetensors"
    with pytest.raises(TransientStoreError, match="the disk is busy"):
        prune_checkpoints(store, rule, emit=lambda *_, **__: None)
    assert len(newest_of_line(tmp_path)) == 6
    store.pattern = ""
    report = prune_checkpoints(store, rule, emit=lambda *_, **__: None)
    assert [item.entry.step for item in report.planned if item.decision.keep] == [6, 5, 4, 2]


def test_a_change_behind_the_back_of_torch_is_seen(tmp_path: Path) -> None:
    """R14: `_version` does not count what is written through another view of the memory."""
    state = lora()
    array = state["3.base"].numpy()
    with CheckpointManager(tmp_path, {"model": state}) as manager:
        for number in range(1, 8):
            save(manager, state, number)
        array[5, 7] += 1
        manager.save(8).wait()
        expected = state["3.base"].clone()
    with CheckpointManager(tmp_path, {"model": lora()}) as manager:
        assert manager.load("step=8").step == 8
        assert torch.equal(manager.state["model"]["3.base"], expected)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_damaged_source_is_not_shared(tmp_path: Path, is_copied: bool) -> None:
    """Invariant 3: it is read against its digest before anything is linked to it, where it lies."""
    state, messages = lora(), []
    cached: Any = CachedStore(tmp_path, tmp_path / "cache", max_nbytes=64 * MIB)

    def spoil(event: Any) -> None:
        if event.kind == "warning":
            messages.append(event.message)
        if event.kind == "committed" and event.step == 3:
            cold = max((tmp_path / event.fields["folder"]).glob("model-*.safetensors"))
            memory = memoryview(bytearray(cold.stat().st_size))
            cached.read_into(f"{cold.parent.name}/{cold.name}", 0, memory)
            os.chmod(cold, 0o644)
            with cold.open("r+b") as file:
                file.seek(BLOCK_NBYTES + 5)
                file.write(b"rot")

    root = cached if is_copied else tmp_path
    with CheckpointManager(root, {"model": state}, sinks=[spoil]) as manager:
        for number in range(1, 6):
            save(manager, state, number)
    assert "is not what was written" in messages[0]
    assert {n for f in tmp_path.glob("step*") for n in links_of(f).values()} == {1}
    with CheckpointManager(tmp_path, {"model": lora()}) as manager:
        assert manager.load("step=5").step == 5


def test_where_no_link_can_be_made_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(31, "Too many links")

    monkeypatch.setattr("holdfast.store.local.folders.link_file", refuse)
    state = lora()
    with CheckpointManager(tmp_path, {"model": state}) as manager:
        for number in range(1, 6):
            save(manager, state, number)
        assert manager.load("step=5").step == 5
    assert {n for f in tmp_path.glob("step*") for n in links_of(f).values()} == {1}


def test_a_save_whose_link_fails_does_not_commit_and_the_next_is_whole(tmp_path: Path) -> None:
    """R7."""
    store = FaultyStore(open_store(tmp_path), [Fault(kind="fail", op="link")])
    state = lora()
    with CheckpointManager(store, {"model": state}, on_failure="warn") as manager:
        for number in range(1, 5):
            save(manager, state, number)
        step(state)
        with pytest.raises(SaveFailed):
            manager.save(5).wait()
        save(manager, state, 6)
        expected = {name: tensor.clone() for name, tensor in state.items()}
    with CheckpointManager(tmp_path, {"model": lora()}) as manager:
        assert next(c.step for c in manager.list()) == 6
        manager.load("step=6")
        found = manager.state["model"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_deleting_the_source_leaves_the_link_whole(tmp_path: Path) -> None:
    """Invariant 10."""
    state = lora()
    with CheckpointManager(tmp_path, {"model": state}, keep=Last(4)) as manager:
        for number in range(1, 12):
            save(manager, state, number)
            manager.load(f"step={number}", components=["model"])
    assert len(list(tmp_path.glob("step*/manifest.json"))) == 4


@pytest.mark.full
def test_in_a_memory_store_it_is_the_same(budget: Any) -> None:
    state = big()
    store = MemoryStore("links")
    with CheckpointManager(store, {"model": state}, memory_budget=budget) as manager:
        for number in range(1, 8):
            save(manager, state, number)
        expected = {name: tensor.clone() for name, tensor in state.items()}
        step(state)
        manager.load("step=7")
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_saves_of_other_parts_do_not_count_as_copies(tmp_path: Path) -> None:
    """Invariant 10: the two that hold the base must not be one file."""
    base = {"x": torch.randn(3, MIB)}
    other = {"x": torch.randn(8)}
    state = {"base": base, "other": other}
    with CheckpointManager(tmp_path, state, keep=Last(4)) as manager:
        manager.save(1).wait()
        for number in range(2, 6):
            other["x"].add_(1)
            manager.save(number, components=["other"]).wait()
            manager.wait()
        other["x"].add_(1)
        manager.save(6).wait()
        manager.wait()
    found = [path.stat().st_ino for path in tmp_path.glob("step*/base-00000.safetensors")]
    assert len(found) == len(set(found)) == 2
