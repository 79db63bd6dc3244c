"""R34, R38: what several ranks have encrypted with FSDP2 any number of ranks loads, bit by bit."""

from __future__ import annotations

import re
from contextvars import copy_context
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.jobs import make
from distributed.run import run_ranks
from holdfast import CheckpointManager, Encryption, errors, keys
from holdfast.cli import main
from marks import full

NUM_STEPS = 2
HIDDEN = (b"model", b"optimizer", b"exp_avg", b"weight", b"safetensors")


def key_file(folder: Path, name: str = "run") -> Path:
    return folder / f"{name}.key"


def save(folder: Path, rank: int) -> dict[str, bytes]:
    """Train and save; every rank reads the key from the file by itself."""
    job = make("fsdp", seed=1)
    encrypt = Encryption(keys=keys.from_file(key_file(folder)))
    root = folder / "root"
    with CheckpointManager(root, job.state, encrypt=encrypt, compress="zstd") as manager:
        for step in range(1, NUM_STEPS + 1):
            job.step()
            manager.save(step)
        manager.wait()
    return job.whole()


def fail(folder: Path, rank: int) -> str:
    """Save where the last rank has another key; what this rank says of it."""
    job = make("fsdp", seed=1)
    is_last = rank == dist.get_world_size() - 1
    encrypt = Encryption(keys=keys.from_file(key_file(folder, "other" if is_last else "run")))
    with CheckpointManager(folder / "none", job.state, encrypt=encrypt) as manager:
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return str(error)
    return ""


def both(folder: Path, rank: int) -> tuple[dict[str, bytes], str]:
    return save(folder, rank), fail(folder, rank)


def load(folder: Path, expected: dict[str, bytes], name: str, rank: int) -> None:
    """Resume, compare, and go on."""
    job = make("fsdp", seed=2)
    encrypt = Encryption(keys=keys.from_file(key_file(folder, name)))
    with CheckpointManager(folder / "root", job.state, encrypt=encrypt) as manager:
        found = manager.resume()
        assert found is not None
        assert job.whole() == expected
        job.step()
        manager.save(found.step + 1, wait=True)


def holdfast(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """Exit status of a command, run in this process."""
    monkeypatch.setattr("sys.argv", ["holdfast", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        copy_context().run(main)  # it remembers the keys that were named
    return end.value.code


CASES = [(2, 3), *full((2, 1), (4, 1), (4, 2), (4, 3))]


@pytest.mark.parametrize("ranks", CASES, ids=str)
def test_what_ranks_have_encrypted_is_loaded_by_any_number(
    ranks: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_saving, num_loading = ranks
    for name in ("run", "other"):
        key_file(tmp_path, name).write_text(f"{keys.generate().text}\n")
    results = run_ranks(num_saving, partial(both, tmp_path))
    saved = results[0][0] if results[0] else {}
    for result in results:
        said = result[1] if result else ""
        assert f"rank {num_saving - 1}" in said
        assert re.search("keys (given )?are secret key", said)
    assert not [*tmp_path.glob("none/*/file-*")]
    root, old, new = tmp_path / "root", key_file(tmp_path), key_file(tmp_path, "other")
    tensors = [tensor[:64] for tensor in saved.values() if len(tensor) >= 64]
    for path in (path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        assert not [word for word in HIDDEN if word in data or word.decode() in path.name]
        assert not [tensor for tensor in tensors if tensor in data]
    for command in (["verify", root], ["show", root], ["keys", "rotate", root, "--to-file", new]):
        assert holdfast(monkeypatch, "--key-file", old, *command) == 0, command
    run_ranks(num_loading, partial(load, tmp_path, saved, "other"))
    assert holdfast(monkeypatch, "--key-file", new, "verify", root) == 0
