"""Compressed checkpoints, end to end: saved, loaded, shared, verified, and refused when hostile."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from holdfast import CheckpointManager, reading
from holdfast.cli.app import app
from holdfast.errors import CorruptData, NoUsableCheckpoint, UnsupportedVersion, UsageError
from holdfast.format import codec, frames
from holdfast.format.codec import Compression
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.maintenance.verify import verify, verify_root
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore
from marks import diagonal, full

MIB = 1 << 20
CHOICES: list[Any] = [
    "zstd",
    "lz4",
    "blosc2",
    Compression(codec="blosc2", shuffle="bit", inner="lz4"),
    {"model": "zstd", "slots": "blosc2"},
]


def state_of(seed: int) -> dict[str, Any]:
    """Three blocks of weights, moments of another dtype, noise, and a long list."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(9 * MIB // 2, generator=generator) * 0.02
    return {
        "model": {"w": weights, "half": weights[:MIB].bfloat16(), "empty": torch.empty(0, 3)},
        "slots": {"v": weights[:MIB] ** 2, "step": torch.tensor(float(seed))},
        "other": {"words": ["the same"] * 200_000, "n": seed},
    }


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    for tree in state.values():
        for name, value in tree.items():
            tree[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
    return state


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for component, tree in expected.items():
        for name, value in tree.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[component][name], value), (component, name)
            else:
                assert found[component][name] == value


def files_of(root: Path, step: int = 1) -> dict[str, Path]:
    folder = next(root.glob(f"step-{step:08d}*"))
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("compress", "kind", "budget"),
    diagonal(CHOICES, ["local", "memory"], [None, "32MiB"], ids=[*map(str, CHOICES)]),
)
def test_what_was_saved_is_resumed_bit_for_bit(
    tmp_path: Path, compress: Any, kind: str, budget: Any
) -> None:
    """I7: in memory and in waves, with direct writes and into flat stores."""
    store: Store = LocalStore(tmp_path) if kind == "local" else MemoryStore()
    with CheckpointManager(
        store, state_of(1), compress=compress, memory_budget=budget, sinks=()
    ) as saving:
        saved = saving.save(1, wait=False).wait()
    live = zeroed(state_of(2))
    with CheckpointManager(store, live, sinks=()) as loading:
        assert loading.resume() is not None
    assert_equal(live, state_of(1))
    (report,) = verify_root(store).checkpoints
    assert report.ok
    assert report.notes == ()
    assert report.nbytes == saved.nbytes
    entry = Catalog(store).find_checkpoint("latest")
    assert entry.manifest.nbytes == saved.nbytes < 0.95 * entry.manifest.plain_nbytes
    assert saved.nbytes == sum(
        info.nbytes for info in store.list(f"{saved.folder}/") if "manifest" not in info.key
    )


def test_without_it_nothing_is_stored_otherwise(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, state_of(1), sinks=()) as manager:
        manager.save(1).wait()
    files = files_of(tmp_path)
    assert {path.suffix for path in files.values()} == {".json", ".safetensors"}
    for name in ("manifest.json", "index.json"):
        assert b"stored" not in files[name].read_bytes()
    assert b'"requires": []' in files["manifest.json"].read_bytes()


def test_a_part_is_loaded_from_the_blocks_that_hold_it(tmp_path: Path) -> None:
    """Issue 5: loads seek by block; the rest of the file may even be damaged."""
    state = {"model": {f"{n}": torch.randn(2 * MIB) for n in range(6)}}
    with CheckpointManager(tmp_path, state, compress="zstd", sinks=()) as manager:
        manager.save(1).wait()
    path = files_of(tmp_path)["model-00000.safetensors.zst"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    live = {"model": {"0": torch.zeros(2 * MIB)}}
    with CheckpointManager(tmp_path, live, sinks=()) as loading:
        loading.load("step=1", include=["model.0"])
    assert torch.equal(live["model"]["0"], state["model"]["0"])


@pytest.mark.parametrize("at", ["middle", *full("first", "last")])
def test_a_flipped_bit_is_named_by_file_block_and_tensor(tmp_path: Path, at: str) -> None:
    """D14, D15, I3."""
    state = state_of(1)
    with CheckpointManager(tmp_path, state, compress="blosc2", sinks=()) as manager:
        folder = manager.save(1).wait().folder
    path = files_of(tmp_path)["model-00000.safetensors.blosc2"]
    data = bytearray(path.read_bytes())
    data[{"first": 0, "middle": len(data) // 2, "last": -1}[at]] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    block = {"first": 0, "middle": 1, "last": 2}[at]
    with CheckpointManager(tmp_path, state_of(2), sinks=()) as loading:
        with pytest.raises(CorruptData, match=rf"safetensors\.blosc2: block {block} .*model\.w"):
            loading.load("step=1")
        with pytest.raises(NoUsableCheckpoint):
            loading.resume()
    report = verify(open_store(tmp_path), folder)
    (problem,) = report.problems
    assert (problem.file, problem.block) == (path.name, block)
    assert "w" in problem.tensors
    assert verify(open_store(tmp_path), folder, decode=False).problems[0].block == block


@pytest.mark.full
@pytest.mark.parametrize("change", ["shorter", "longer", "missing"])
def test_a_file_of_another_length_is_damaged(tmp_path: Path, change: str) -> None:
    """D14."""
    with CheckpointManager(tmp_path, state_of(1), compress="lz4", sinks=()) as manager:
        folder = manager.save(1).wait().folder
    path = files_of(tmp_path)["model-00000.safetensors.lz4"]
    path.chmod(0o644)
    if change == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (1 if change == "longer" else -1))
    with CheckpointManager(tmp_path, state_of(2), sinks=()) as loading, pytest.raises(CorruptData):
        loading.load("step=1")
    report = verify(open_store(tmp_path), folder)
    assert {problem.file for problem in report.problems} == {path.name}
    tensors = {name for problem in report.problems for name in problem.tensors}
    assert tensors - {"empty"} == (set() if change == "longer" else {"w", "half"})


def encode_wrongly(plain: memoryview, level: int, *_filter: object) -> bytes:
    """A codec with a fault: what it encodes decodes to other bytes."""
    return bytes(frames.encode_zstd(memoryview(bytes(plain[:-1]) + b"\xff"), level))


def test_a_codec_with_a_fault_is_found_by_verify_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 5: the plain digests are of the staged bytes; retention relies on such a look."""
    faulty = replace(codec.CODECS["zstd"], encode=encode_wrongly)
    monkeypatch.setattr(codec, "CODECS", {**codec.CODECS, "zstd": faulty})
    with CheckpointManager(tmp_path, state_of(1), compress="zstd", sinks=()) as manager:
        folder = manager.save(1).wait().folder
    monkeypatch.undo()
    refused = pytest.raises(CorruptData, match="decodes to bytes that differ from those saved")
    with CheckpointManager(tmp_path, state_of(2), sinks=()) as loading, refused:
        loading.load("step=1")
    problems = verify(open_store(tmp_path), folder).problems
    assert "decodes to bytes that differ" in problems[0].message
    assert verify(open_store(tmp_path), folder, decode=False).ok


@pytest.mark.full
def test_a_transient_error_of_the_way_condemns_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, state_of(1), compress="zstd", sinks=()) as manager:
        manager.save(1).wait()
    fault = Fault(kind="flip", op="read_into", key="model-00000.safetensors", at=0)
    live = zeroed(state_of(2))
    with CheckpointManager(FaultyStore(open_store(tmp_path), [fault]), live, sinks=()) as loading:
        loading.load("step=1")
    assert_equal(live, state_of(1))


def test_without_the_package_nothing_is_condemned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that lacks it says what to install; resume does not go back to an older one."""
    state = state_of(1)
    with CheckpointManager(tmp_path, state, sinks=()) as manager:
        manager.save(1).wait()
    with CheckpointManager(tmp_path, state, compress="lz4", sinks=()) as manager:
        manager.resume()
        state["other"]["n"] = 2
        folder = manager.save(2).wait().folder
    monkeypatch.setattr(codec, "find_spec", lambda name: None)
    refused = pytest.raises(UnsupportedVersion, match=r"pip install 'holdfast-torch\[compress\]'")
    with CheckpointManager(tmp_path, state_of(3), sinks=()) as loading, refused:
        loading.resume()
    assert "rejected.json" not in files_of(tmp_path, 2)
    report = verify(open_store(tmp_path), folder)
    assert report.ok
    assert any("not decoded: it is compressed by lz4" in note for note in report.notes)


def test_unchanged_files_are_shared_as_they_are_stored(tmp_path: Path) -> None:
    """I10: also when another codec would be taken now; each checkpoint stands alone."""
    frozen = torch.randn(3 * MIB)
    state = {"model": {"frozen": frozen, "live": torch.zeros(MIB)}}
    inodes: list[int] = []
    for compress in ("zstd", "lz4"):
        with CheckpointManager(tmp_path, state, compress=compress, sinks=()) as manager:
            manager.resume()
            step = len(inodes)
            for number in range(step + 1, step + 6):
                state["model"]["live"].add_(1)
                manager.save(number).wait()
                manager.wait()
                files = files_of(tmp_path, number)
                largest = max(
                    (p for n, p in files.items() if "safetensors" in n),
                    key=lambda p: p.stat().st_size,
                )
                inodes.append(largest.stat().st_ino)
    # Apart from the third save on, and every second one shares.
    assert inodes[2] == inodes[4] != inodes[3]
    assert inodes[7] == inodes[9] != inodes[8]
    assert verify_root(open_store(tmp_path)).ok
    newest = next(tmp_path.glob("step-00000010*"))
    alone = tmp_path / "elsewhere" / newest.name
    shutil.copytree(newest, alone)
    shutil.rmtree(newest)
    live = {"model": {"frozen": torch.zeros(3 * MIB), "live": torch.ones(MIB)}}
    with CheckpointManager(alone.parent, live, sinks=()) as loading:
        loading.load("step=10")
    assert torch.equal(live["model"]["frozen"], frozen)
    assert torch.equal(live["model"]["live"], state["model"]["live"])


@pytest.mark.full
def test_the_same_bytes_again_are_the_same_checkpoint(tmp_path: Path) -> None:
    """Also with another compression: a rerun of a finished run writes nothing."""
    with CheckpointManager(tmp_path, state_of(1), compress="zstd", sinks=()) as manager:
        first = manager.save(1).wait()
    with CheckpointManager(tmp_path, state_of(1), compress="lz4", sinks=()) as manager:
        manager.resume()
        assert manager.save(1).wait().folder == first.folder


def test_a_compressed_file_is_read_by_stored_ranges_alone(tmp_path: Path) -> None:
    """Nothing is read twice, and nothing beside what is needed but up to a page."""
    with CheckpointManager(tmp_path, state_of(1), compress="zstd", sinks=()) as manager:
        manager.save(1).wait()

    class Watched(LocalStore):
        nbytes = 0

        def read_into(self, key: str, start: int, buffer: memoryview, **more: Any) -> None:
            Watched.nbytes += buffer.nbytes
            super().read_into(key, start, buffer, **more)

    with CheckpointManager(Watched(tmp_path), zeroed(state_of(1)), sinks=()) as loading:
        loading.load("step=1")
    files = files_of(tmp_path)
    stored = sum(path.stat().st_size for name, path in files.items() if ".zst" in name)
    assert stored <= Watched.nbytes < stored + 16 * 4096


@pytest.mark.parametrize(
    ("compress", "message"),
    [
        ("gzip", "compress='gzip'"),
        (True, "compress=True"),
        ({"modle": "zstd"}, "no component 'modle'"),
        ({"model": 3}, "compress=3"),
    ],
)
def test_a_wrong_choice_is_an_error(tmp_path: Path, compress: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CheckpointManager(tmp_path, {"model": {}}, compress=compress)


@pytest.mark.full
def test_reading_says_where_the_files_are(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, state_of(1), compress="zstd", sinks=()) as manager:
        manager.save(1).wait()
    with reading(tmp_path) as checkpoint:
        assert (Path(checkpoint.path) / "model-00000.safetensors.zst").is_file()


def test_the_last_page_is_decoded_into_its_place(tmp_path: Path) -> None:
    """A file whose last block is a single byte long."""
    nbytes = BLOCK_NBYTES - 4096 + 1
    state = {"model": {"w": torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)}}
    with CheckpointManager(tmp_path, state, compress="zstd", sinks=()) as manager:
        manager.save(1).wait()
    live = {"model": {"w": torch.zeros(nbytes, dtype=torch.uint8)}}
    with CheckpointManager(tmp_path, live, sinks=()) as loading:
        loading.load("step=1")
    assert torch.equal(live["model"]["w"], state["model"]["w"])


def test_the_command_line_tells_of_it(tmp_path: Path) -> None:
    """Issue 5: what was compressed, from how much to how much; and verify without decoding."""
    with CheckpointManager(tmp_path, state_of(1), compress=CHOICES[4], sinks=()) as manager:
        manager.save(1).wait()

    def answer(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == 0
        return json.loads(done.stdout)

    shown = answer("show", str(tmp_path))["checkpoint"]
    assert shown["codecs"] == ["blosc2", "zstd"]
    entry = shown["files"]["model-00000.safetensors.zst"]
    assert entry["stored"]["codec"] == "zstd"
    assert shown["nbytes"] < 0.95 * shown["plain_nbytes"]
    (listed,) = answer("ls", str(tmp_path))["checkpoints"]
    assert (listed["codecs"], listed["nbytes"]) == (shown["codecs"], shown["nbytes"])
    for more in ([], ["--stored-only"]):
        (report,) = answer("verify", str(tmp_path), *more)["checkpoints"]
        assert (report["ok"], report["nbytes"]) == (True, shown["nbytes"])
    text = CliRunner().invoke(app, ["show", str(tmp_path)], catch_exceptions=False).stdout
    assert "before blosc2 and zstd" in text
