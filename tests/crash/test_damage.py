"""Damage: every flipped bit and every cut is found at load, named, and worked around."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import errors
from holdfast.format import blocks, strictjson
from holdfast.loading import apply, pipeline
from holdfast.maintenance.verify import verify
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from marks import full
from runs import Recorder, new_run, remove_folder
from ways import WAYS, Way, save_and_go_on


class Small:
    """A state of every kind of component, in about 50 kB."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.extra = {"step": 0, "names": ["a", "b"], "table": torch.arange(100)}

    def train(self) -> None:
        self.model(torch.ones(1, 64)).sum().backward()
        self.optimizer.step()
        self.extra["step"] += 1

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}

    def manager(self, root: Path, **options: Any) -> CheckpointManager:
        return CheckpointManager(root, self.state, preflight=False, **{"sinks": ()} | options)


def saved(root: Path, steps: int = 1) -> list[Path]:
    """A root with that many checkpoints; their folders, newest first."""
    small = Small()
    with small.manager(root) as manager:
        for step in range(1, steps + 1):
            small.train()
            manager.save(step).wait()
        return [root / checkpoint.folder for checkpoint in manager.list()]


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file, whatever its mode."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    write_over(path, bytes(data))


def write_over(path: Path, data: bytes) -> None:
    os.chmod(path, 0o644)
    path.write_bytes(data)


def load_newest(root: Path) -> None:
    """Load by name, so that damage raises instead of being walked around."""
    with Small(seed=1).manager(root) as manager:
        manager.load(Catalog(LocalStore(root)).attempts()[0].__str__())


def assert_flips_are_found(root: Path, number: int, seed: int) -> None:
    """Each of so many random flips over all files is an error that names the file."""
    folder = saved(root)[0]
    rng = random.Random(seed)
    files = sorted(path for path in folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    for _ in range(number):
        path = rng.choices(files, weights=sizes)[0] if rng.random() < 0.5 else rng.choice(files)
        bit = rng.randrange(8 * path.stat().st_size)
        before = path.read_bytes()
        flip(path, bit)
        with pytest.raises(errors.FormatError) as caught:
            load_newest(root)
        assert path.name in str(caught.value), (path.name, bit, str(caught.value))
        assert not verify_is_clean(root), (path.name, bit)
        write_over(path, before)
    load_newest(root)


def verify_is_clean(root: Path) -> bool:
    store = LocalStore(root)
    return verify(store, str(Catalog(store).attempts()[0])).ok


@pytest.mark.parametrize("num_flips", [40, *full(200)])
def test_bit_flips_are_found_and_named(tmp_path: Path, num_flips: int) -> None:
    """R15, D14; invariant 3."""
    assert_flips_are_found(tmp_path, num_flips, seed=0)


@pytest.mark.long
def test_two_thousand_bit_flips_are_found_and_named(tmp_path: Path) -> None:
    """R15."""
    assert_flips_are_found(tmp_path, 2000, seed=1)


@pytest.mark.parametrize("num_places", [6, *full(60)])
def test_every_truncation_is_found(tmp_path: Path, num_places: int) -> None:
    """R16, D15: each file, cut at many places, also to nothing, and made longer."""
    folder = saved(tmp_path)[0]
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        lengths = {0, 1, len(data) - 1} | {
            len(data) * part // num_places for part in range(num_places)
        }
        for length in sorted(lengths):
            write_over(path, data[:length])
            with pytest.raises(errors.FormatError, match=path.name):
                load_newest(tmp_path)
        write_over(path, data + b"\0")
        with pytest.raises(errors.FormatError, match=path.name):
            load_newest(tmp_path)
        write_over(path, data)
    load_newest(tmp_path)


def damage(path: Path, start: int, *, cuts: bool = False) -> Callable[[], None]:
    """Turn the bits of the byte around that is there, or cut the file; the call that undoes it."""
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(start)
        rest = file.read(None if cuts else 1)
        file.seek(start)
        if cuts:
            file.truncate()
        else:
            file.write(bytes([rest[0] ^ 0xFF]))

    def undo() -> None:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(rest)

    return undo


def saved_so(root: Path, way: Way, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A root whose newest checkpoint was saved that way, and those before; newest first."""
    shown: list[str] = []
    state = way.new_state()
    with monkeypatch.context() as patched, way.manager(root, state, keep=Last(9)) as manager:
        way.have_noted(patched.setattr, partial(shown.append, way.name))
        for step in range(1, 2 + way.num_before):
            shown.clear()
            save_and_go_on(manager, state, step)
        assert shown
        return [root / checkpoint.folder for checkpoint in manager.list()]


@pytest.mark.full
def test_damage_to_what_was_saved_otherwise_is_found(
    way_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15, R16, D14, D15; invariants 3, 6: in each file, also one that was copied while training
    went on, written in waves and loaded so, shared, or written past the page cache."""
    folder = saved_so(way_path, way, monkeypatch)[0]
    rng, store = random.Random(0), LocalStore(way_path)
    live, placed = way.new_state(), way.new_state()
    with way.manager(way_path, live) as manager, way.manager(way_path, placed) as in_place:
        for path in sorted(folder.iterdir()):
            last = path.stat().st_size - 1
            for start, cuts in (
                (0, False),
                (rng.randrange(last), False),
                (last, False),
                (last, True),
            ):
                undo = damage(path, start, cuts=cuts)
                with pytest.raises(errors.FormatError, match=re.escape(path.name)):
                    manager.load(folder.name)
                assert live.step() == 0
                with pytest.raises(errors.HoldfastError, match=re.escape(path.name)):
                    in_place.load(folder.name, in_place=True)
                assert not verify(store, folder.name).ok, (path.name, start, cuts)
                undo()
        assert verify(store, folder.name).ok
        manager.load(folder.name)
        in_place.load(folder.name, in_place=True)
        assert live.step() == placed.step() == 1 + way.num_before


def test_damage_to_a_shared_file_is_found_in_each_that_shares_it(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15, R19, D31; invariants 3, 4, 10: and resume goes back to one with bytes of its own."""
    way = WAYS["links"]
    folders = saved_so(ram_path, way, monkeypatch)
    shared = next(path for path in folders[0].iterdir() if path.stat().st_nlink > 1)
    damage(shared, shared.stat().st_size // 2)
    holders = [f for f in folders if (f / shared.name).samefile(shared)]
    store = LocalStore(ram_path)
    assert [f for f in folders if not verify(store, f.name).ok] == holders == folders[::2]
    live = way.new_state()
    with way.manager(ram_path, live) as manager:
        found = manager.resume()
        assert found is not None
        assert found.folder == folders[1].name
        assert live.step() == 2
        assert [name for name, _ in found.rejected] == [folders[0].name]


def swap_with(other: Path, path: Path) -> None:
    a, b = path.read_bytes(), other.read_bytes()
    write_over(path, b)
    write_over(other, a)


def zero_page(path: Path) -> None:
    data = path.read_bytes()
    start = len(data) // 2 // 4096 * 4096
    write_over(path, data[:start] + bytes(len(data[start : start + 4096])) + data[start + 4096 :])


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "zero page": lambda new, old: zero_page(new / "model-00000.safetensors"),
    "missing tensor file": lambda new, old: os.remove(new / "optimizer-00000.safetensors"),
    "missing tree": lambda new, old: os.remove(new / "extra-00000.json"),
    "missing index": lambda new, old: os.remove(new / "index.json"),
    "file of another step": lambda new, old: shutil.copy(
        old / "model-00000.safetensors", new / "model-00000.safetensors"
    ),
    "index of another step": lambda new, old: shutil.copy(old / "index.json", new / "index.json"),
    "manifest of another step": lambda new, old: shutil.copy(
        old / "manifest.json", new / "manifest.json"
    ),
    "two files swapped": lambda new, old: swap_with(
        new / "model-00000.safetensors", new / "optimizer-00000.safetensors"
    ),
    "symlink in place of a file": lambda new, old: (
        os.replace(new / "extra-00000.json", new / "moved"),
        os.symlink("moved", new / "extra-00000.json"),
    )[0],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_other_damage_is_found_and_walked_around(
    tmp_path: Path, name: str, recorder: Recorder
) -> None:
    """R16, R19, D13, D31: an older one is used, the reason is told, nothing is deleted."""
    new, old = saved(tmp_path, steps=2)
    for path in new.iterdir():
        os.chmod(path, 0o644)
    DAMAGES[name](new, old)
    with pytest.raises((errors.FormatError, errors.StoreError)):
        load_newest(tmp_path)
    there = sorted(path.name for path in new.iterdir())
    small = Small(seed=1)
    with small.manager(tmp_path, sinks=[recorder]) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, small.extra["step"]) == (1, 1)
        assert [folder for folder, _ in found.rejected] == [new.name]
        manager.wait()
    assert new.name in recorder.of("rejected")[0].message
    assert sorted(path.name for path in new.iterdir() if path.name != "rejected.json") == there


def test_the_walk_goes_back_as_far_as_it_must(tmp_path: Path) -> None:
    """R19, D31: with the newest k damaged the next is used; with all, no fresh start."""
    for damaged in range(1, 5):
        root = tmp_path / str(damaged)
        folders = saved(root, steps=4)
        for folder in folders[:damaged]:
            flip(folder / "model-00000.safetensors", 8 * 5000)
        with Small(seed=1).manager(root) as manager:
            if damaged == 4:
                with pytest.raises(errors.NoUsableCheckpoint) as caught:
                    manager.resume()
                assert len(caught.value.rejected) == 4
            else:
                found = manager.resume()
                assert found is not None
                assert found.step == 4 - damaged
                assert [name for name, _ in found.rejected] == [f.name for f in folders[:damaged]]


def test_a_damaged_checkpoint_that_was_named_raises(tmp_path: Path) -> None:
    """R19; rule 7."""
    new, _ = saved(tmp_path, steps=2)
    flip(new / "model-00000.safetensors", 8 * 5000)
    with (
        Small(seed=1).manager(tmp_path) as manager,
        pytest.raises(errors.CorruptData, match=r"model\.(weight|bias)"),
    ):
        manager.resume("step=2")


def test_a_rejected_checkpoint_fills_no_quota(tmp_path: Path) -> None:
    """R20; invariant 4."""
    new, _old = saved(tmp_path, steps=2)
    flip(new / "model-00000.safetensors", 8 * 5000)
    small = Small()
    with small.manager(tmp_path, keep=Last(2)) as manager:
        manager.resume()
        small.train()
        manager.save(2).wait()
        manager.wait()
        assert [c.step for c in manager.list()] == [2, 2, 1]


def test_a_newer_format_is_refused_and_not_walked_around(tmp_path: Path) -> None:
    """R21, D33: an older checkpoint must not quietly take its place."""
    new, _ = saved(tmp_path, steps=2)
    manifest = new / "manifest.json"
    text = manifest.read_text().replace('"holdfast": 1', '"holdfast": 2', 1)
    body = text[: text.rindex('"digest"')].encode()
    digest = blocks.block_digest(body).hex()
    write_over(manifest, body + f'"digest": "blake3:{digest}"}}\n'.encode())
    with (
        Small().manager(tmp_path) as manager,
        pytest.raises(errors.UnsupportedVersion, match="this Holdfast reads 1"),
    ):
        manager.resume()


def test_a_refused_load_changes_nothing(tmp_path: Path) -> None:
    """Invariant 6, D18: damage in the last block leaves the live state as it was."""
    run = new_run()
    run.train(2)
    with run.manager(tmp_path) as manager:
        folder = tmp_path / manager.save(2).wait().folder
    flip(folder / "optimizer-00000.safetensors", 8 * 4100)
    other = new_run(seed=4)
    before = other.bits()
    with other.manager(tmp_path) as manager, pytest.raises(errors.CorruptData):
        manager.load()
    assert other.bits() == before


def no_block_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: blocks are read and not compared."""
    real = pipeline.begin_block

    def unchecked(*args: Any, **named: Any) -> Any:
        return real(*args, **{**named, "verify": False})

    monkeypatch.setattr(pipeline, "begin_block", unchecked)


@pytest.mark.parametrize("mutant", [no_block_check])
def test_the_check_catches(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R15, R16: our own code without its checks does not pass."""
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        assert_flips_are_found(tmp_path, 200, seed=0)


def test_a_resume_that_deletes_what_it_rejects_is_caught(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R19, D13: the mutant takes the evidence away."""
    monkeypatch.setattr(
        apply,
        "reject",
        lambda store, folder, **named: remove_folder(store, folder),
    )
    with pytest.raises((AssertionError, FileNotFoundError)):
        test_other_damage_is_found_and_walked_around(tmp_path, "missing tree", recorder)


def test_a_reader_that_ignores_the_version_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21: the mutant reads what it does not understand."""
    monkeypatch.setattr(strictjson, "check_version", lambda *args, **named: None)
    with pytest.raises(pytest.fail.Exception):
        test_a_newer_format_is_refused_and_not_walked_around(tmp_path)
