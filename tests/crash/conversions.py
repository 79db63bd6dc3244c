"""Scenarios of tests/crash/syscalls.py for import and export: what a child does, and checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from holdfast.interop import export_checkpoint, import_checkpoint
from holdfast.interop.roots import release_all
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify_root
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.weights import load_weights
from ways import Way

Act = Callable[[], object]
FILE = "weights.safetensors"
OUT = "out"


def weights() -> dict[str, torch.Tensor]:
    """The tensors of the file, the same in each process."""
    return {"weight": torch.arange(48.0).reshape(6, 8), "bias": torch.arange(6.0)}


def a_file(way: Way, root: Path) -> None:
    """Make a root with one import, and a file beside it."""
    root.mkdir(parents=True)
    save_file(weights(), root.parent / FILE)
    import_checkpoint(root.parent / FILE, root, step=1)
    release_all()


def importing(way: Way, root: Path, told: int) -> Act:
    """The import of a file as step 2."""

    def act() -> None:
        made = import_checkpoint(root.parent / FILE, root, step=2)
        os.write(told, f"{made.step}\n".encode())

    return act


def exporting(way: Way, root: Path, told: int) -> Act:
    """The export of a file in two shards."""

    def act() -> None:
        export_checkpoint(root.parent / FILE, root / OUT, to="hf", shard_nbytes=30)
        os.write(told, b"2\n")

    return act


def check_import(root: Path, newest: int) -> None:
    """The root verifies and has what was told; the import can be repeated; gc leaves no rest."""
    _expect_sound(root, newest)
    import_checkpoint(root.parent / FILE, root, step=3)
    _expect_sound(root, 3)
    store = LocalStore(root)
    collect_garbage(store)
    folders = {entry.folder for entry in Catalog(store).checkpoints()}
    kept = {path.name for path in root.iterdir() if path.is_dir() and not path.is_symlink()}
    kept -= {"writers", "readers", "history"}
    assert kept == folders, kept ^ folders


def _expect_sound(root: Path, newest: int) -> None:
    report = verify_root(LocalStore(root))
    assert report.ok, report
    assert report.checkpoints, "no checkpoint"
    model = nn.Linear(8, 6)
    assert load_weights(root, model).step >= newest
    assert all(torch.equal(model.state_dict()[name], one) for name, one in weights().items())


def check_export(root: Path, newest: int) -> None:
    """The output is whole or absent; the export can be repeated, and leaves nothing else."""
    out = root / OUT
    if newest == 2 or out.exists():
        _expect_whole(out)
        for path in out.iterdir():
            path.unlink()
    export_checkpoint(root.parent / FILE, out, to="hf", shard_nbytes=30)
    _expect_whole(out)
    assert [path.name for path in root.iterdir() if OUT in path.name] == [OUT]


def _expect_whole(out: Path) -> None:
    found: dict[str, torch.Tensor] = {}
    for path in out.glob("*.safetensors"):
        found |= load_file(path)
    assert found.keys() == weights().keys(), found.keys()
    assert all(torch.equal(found[name], one) for name, one in weights().items())
    assert (out / "model.safetensors.index.json").exists()
