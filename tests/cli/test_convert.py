"""`holdfast import` and `export`: what they print, and the child with limits that they run in."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from children import environment
from holdfast import CheckpointManager
from holdfast.cli import sources
from holdfast.cli.convert import nbytes_of
from holdfast.errors import UsageError
from holdfast.interop.opening import open_source

KEY = b"0123456789abcdef"
"""The key of MindSpore's samples, in make_mindspore.py."""
PEERS = Path(__file__).parents[1] / "golden" / "peers"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save_file({"module.a": torch.ones(3), "module.b": torch.zeros(2, dtype=torch.int64)}, path)
    return path


def test_an_import_says_what_it_takes(file: Path, tmp_path: Path, holdfast: Any) -> None:
    arguments = (file, tmp_path / "run", "--map", "module.**=**", "--trust")
    done = holdfast("import", *arguments)
    assert done.code == 2
    assert "has no step; pass one: --step N" in done.err
    done = holdfast("import", *arguments, "--step", 7, "--dry-run")
    assert done.code == 0
    assert done.out.splitlines()[0] == (
        f"would be step 7 of {tmp_path / 'run'}: 28 B from {file} (safetensors)"
    )
    assert not (tmp_path / "run").exists()
    done = holdfast("import", *arguments, "--step", 7, "--label", "old", "--json")
    answer = done.document
    assert answer.pop("folder").startswith("old.0001-000001-")
    assert answer == {
        "holdfast": 1,
        "root": str(tmp_path / "run"),
        "step": 7,
        "path": str(file),
        "format": "safetensors",
        "components": [{"name": "model", "kind": "module", "num_tensors": 2, "nbytes": 28}],
        "left_out": [],
        "notes": [],
        "dry_run": False,
    }
    shown = holdfast("show", tmp_path / "run")
    assert "imported from" in shown.out


def test_an_export_says_what_it_writes(root: Path, tmp_path: Path, holdfast: Any) -> None:
    out = tmp_path / "out.safetensors"
    arguments = ("export", f"{root}@step=100", out, "--to", "safetensors", "--component", "model")
    done = holdfast(*arguments, "--dry-run")
    assert done.code == 0
    assert done.out.startswith(f"{out}: would be ")
    assert not out.exists()
    done = holdfast(*arguments, "--json")
    assert (done.document["step"], done.document["to"]) == (100, "safetensors")
    assert [one["name"] for one in done.document["files"]] == [""]
    assert {left["path"] for left in done.document["left_out"]} >= {"rng"}
    assert load_file(out)
    done = holdfast(*arguments)
    assert done.code == 2
    assert "already exists" in done.err


def test_an_export_says_how_its_file_is_loaded(tmp_path: Path, holdfast: Any) -> None:
    """The line is run as it is printed, also for tied weights, which a strict load refuses."""

    def new_model() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    trained, model, out = new_model(), new_model(), tmp_path / "it's.safetensors"
    with CheckpointManager(tmp_path / "run", {"model": trained, "n": {"epoch": 1}}) as manager:
        manager.save(1, wait=True)
    tied, left_out, load = holdfast(
        "export", tmp_path / "run", out, "--to", "safetensors", "--component", "model"
    ).out.splitlines()[1:]
    assert tied.startswith("1.weight: tied to 0.weight, under which it is written: load by")
    assert left_out == "skipped: n, rng: the file holds the weights of one component"
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(load_file(out))
    assert load.startswith("load it: ")
    exec(load.removeprefix("load it: "), {"model": model})
    assert torch.equal(model[1].weight, trained[1].weight)
    assert model[1].weight is model[0].weight


def test_the_weights_of_an_average_are_loaded_by_the_line_that_is_printed(
    tmp_path: Path, holdfast: Any
) -> None:
    model, out = torch.nn.Linear(2, 2), tmp_path / "average"
    average = torch.optim.swa_utils.AveragedModel(model)
    with CheckpointManager(tmp_path / "run", {"model": model, "ema": average}) as manager:
        manager.save(1, wait=True)
    load = holdfast(
        "export", tmp_path / "run", out, "--to", "safetensors", "--component", "ema"
    ).out.splitlines()[-1]
    there: dict[str, Any] = {"model": torch.nn.Linear(2, 2)}
    exec(load.removeprefix("load it: "), there)
    assert torch.equal(there["averaged"].weight, model.weight)


def test_what_is_no_module_is_loaded_as_tensors(tmp_path: Path, holdfast: Any) -> None:
    optimizer, out = (
        torch.optim.SGD([torch.ones(2, requires_grad=True)], momentum=0.9),
        tmp_path / "o",
    )
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    with CheckpointManager(tmp_path / "run", {"optimizer": optimizer}) as manager:
        manager.save(1, wait=True)
    load = holdfast(
        "export", tmp_path / "run", out, "--to", "safetensors", "--component", "optimizer"
    ).out.splitlines()[-1]
    there: dict[str, Any] = {}
    exec(load.removeprefix("load it: ").replace("; ", "; found = "), there)
    assert [*there["found"]] == [*load_file(out)]


def test_an_export_to_dcp_appears_whole(root: Path, tmp_path: Path, holdfast: Any) -> None:
    done = holdfast("export", root, tmp_path / "out", "--to", "dcp", "--dtype", "f16")
    assert done.code == 2
    assert holdfast("export", root, tmp_path / "out", "--to", "dcp").code == 0
    assert (tmp_path / "out" / ".metadata").exists()
    assert not [name for name in os.listdir(tmp_path) if "part-" in name]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_of_another_library_is_exported_to_dcp(tmp_path: Path, holdfast: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}
    torch.save(state, tmp_path / "saved.pt")
    out = tmp_path / "out"
    done = holdfast("export", tmp_path / "saved.pt", out, "--to", "dcp", "--trust", "--json")
    assert done.code == 0, done.err
    assert {".metadata"} < {file["name"] for file in done.document["files"]}
    wanted = {
        "model": {name: torch.empty_like(one) for name, one in model.state_dict().items()},
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "state": {"epoch": 0},
    }
    wanted["optimizer"]["state"] = {
        number: {name: torch.empty_like(one) for name, one in slots.items()}
        for number, slots in optimizer.state_dict()["state"].items()
    }
    dcp.load(wanted, checkpoint_id=out)
    assert wanted["state"] == {"epoch": 7}
    torch.testing.assert_close(wanted["model"], model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(
        wanted["optimizer"]["state"], optimizer.state_dict()["state"], rtol=0, atol=0
    )
    with open_source(str(out)) as again:
        assert {*again.parts} == {"model", "optimizer", "state"}


@pytest.mark.parametrize("name", ["\ud800", "x" * 5000])
def test_weights_under_a_name_that_cannot_be_used_are_an_error_unless_their_loss_is_allowed(
    tmp_path: Path, holdfast: Any, name: str
) -> None:
    path, run = tmp_path / "saved.pt", tmp_path / "run"
    torch.save({"model": {name: torch.ones(2), "w": torch.ones(3)}, "step": 4}, path)
    for arguments in (("import", path, run), ("export", path, run, "--to", "pt")):
        done = holdfast(*arguments, "--trust")
        assert done.code == 2
        assert "holds tensors that cannot be read" in done.err
        assert "--allow-loss" in done.err
        assert not run.exists()
        assert holdfast(*arguments, "--trust", "--allow-loss").code == 0
        shutil.rmtree(run) if run.is_dir() else run.unlink()
    done = holdfast("import", path, run, "--component", "state", "--trust")
    assert done.code == 0


def test_a_model_that_is_left_out_as_a_whole_is_an_error(tmp_path: Path, holdfast: Any) -> None:
    path = tmp_path / "saved.pt"
    torch.save({"model": torch.nn.Linear(2, 2), "optimizer": {"lr": 0.1}, "step": 4}, path)
    done = holdfast("import", path, tmp_path / "run", "--trust")
    assert done.code == 2
    assert "model: an object of torch.nn.modules.linear.Linear" in done.err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("5GB", 5 * 10**9), ("1.5 kB", 1500), ("2MiB", 2 << 20), ("7B", 7)]
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert nbytes_of(text) == nbytes
    with pytest.raises(UsageError, match="not a size"):
        nbytes_of(f"{text}x")


def test_roots_and_checkpoints_are_not_files_of_other_libraries(
    root: Path, file: Path, tmp_path: Path
) -> None:
    [checkpoint, *_] = [path.parent for path in root.glob("*/manifest.json")]
    foreign = [file, tmp_path]
    own = [root, checkpoint, f"{root}@latest", "s3://bucket/run", tmp_path / "missing"]
    assert [sources.is_foreign(str(one)) for one in (*foreign, *own)] == [True] * 2 + [False] * 5


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: Path(path).write_text("{}")])
def test_a_manifest_that_is_none_of_ours_lifts_no_limits(
    file: Path, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    file.rename(tmp_path / "model.safetensors")
    make(tmp_path / "manifest.json")
    assert sources.is_foreign(str(tmp_path))


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a/" * 3000])
def test_a_name_that_no_file_can_have_is_one_of_nothing(name: str, holdfast: Any) -> None:
    done = holdfast("tree", name)
    assert done.code == 3
    assert "there is no such file or folder" in done.err


def test_a_foreign_file_is_read_in_a_child_that_has_the_answer(file: Path, tmp_path: Path) -> None:
    """R27: also from a folder with modules that are called as ours and torch's."""
    for name in ("torch.py", "numpy.py", "holdfast.py"):
        (tmp_path / name).write_text("raise SystemExit('run from the current folder')")
    run = str(tmp_path / "run")
    command = [sys.executable, "-c", sources._PROGRAM, "import", file.name, run, "--step", "3"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step-00000003.0001-000001-")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.kill(os.getpid(), 9)", "crashed or took more than 2 GiB of memory"),
        ("import os; os.kill(os.getpid(), 11)", r"the process ended by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGALRM)", "opening took more than 60 s"),
    ],
)
def test_a_child_that_dies_names_the_file_and_what_lifts_the_limit(
    file: Path,
    tmp_path: Path,
    holdfast: Any,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    message: str,
) -> None:
    monkeypatch.setattr(sources, "_PROGRAM", program)
    done = holdfast("import", file, tmp_path / "run", "--step", 3)
    assert done.code == 1
    assert str(file) in done.err
    assert message in done.err
    assert "--trust" in done.err


@pytest.mark.parametrize(
    ("command", "name", "position", "byte", "message"),
    [  # HDF5 never ends; it takes all memory
        ("tree", "lz4.mdl", 24436, 254, "opening took more than 1 s.*--trust"),
        pytest.param(
            *("import", "lz4.mdl", 24436, 254, "opening took more than 1 s.*--trust"),
            marks=pytest.mark.full,
        ),
        ("tree", "state.mdl", 891, 32, "cannot be read|more than"),
    ],
)
def test_a_file_on_which_hdf5_hangs_or_takes_all_memory_is_refused_in_time(
    tmp_path: Path, command: str, name: str, position: int, byte: int, message: str
) -> None:
    """R27."""
    data = bytearray((PEERS / "cerebras" / name).read_bytes())
    data[position] = byte
    (tmp_path / name).write_bytes(data)
    opening_s = 1 if "1 s" in message else 40
    limits = f"sources.OPENING_S = {opening_s}; sources.DATA_NBYTES = 512 << 20"
    inner = f"from holdfast.cli import sources; {limits}; {sources._PROGRAM}"
    outer = f"from holdfast.cli import sources; sources._PROGRAM = {inner!r}; {inner}"
    arguments = (command, name, *(["run"] if command == "import" else []))
    done = subprocess.run(
        [sys.executable, "-c", outer, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(f"{name}.*({message})", done.stderr)
    assert os.listdir(tmp_path) == [name]


LIMITED = """
import sys
from holdfast.cli import sources
sources.DATA_NBYTES = 256 << 20
@sources.limited("source")
def command(source):
    {body}
command(source=sys.argv[1], trust={trust})
"""


def limited(file: Path, body: str, *, trust: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LIMITED.format(body=body, trust=trust), str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment(), sources.VARIABLE: "1"},
    )


def test_the_child_has_no_more_memory_than_its_limit_unless_the_file_is_trusted(
    file: Path,
) -> None:
    body = "bytearray(300 << 20)"
    done = limited(file, body)
    assert "LimitExceeded" in done.stderr
    assert str(file) in done.stderr
    assert limited(file, body, trust=True).returncode == 0


def test_trust_lifts_the_bounds_on_a_pickle(tmp_path: Path, holdfast: Any) -> None:
    torch.save({"x": torch.zeros(1).expand(20 << 20)}, tmp_path / "large.pt")
    assert "--trust lifts this limit" in refused(holdfast, "tree", tmp_path / "large.pt")
    assert "20971520" in holdfast("tree", tmp_path / "large.pt", "--trust").out.replace(",", "")


def refused(holdfast: Any, *arguments: Any) -> str:
    """Run in this process what the child runs, and return why it was refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_limit", lambda: None)
        patch.setenv(sources.VARIABLE, "1")
        done = holdfast(*arguments)
    assert done.code == 1
    return str(done.err)


def test_the_child_ends_when_opening_takes_too_long(file: Path) -> None:
    body = (
        "import time, holdfast.interop.opening as opening; sources.OPENING_S = 0.2; "
        "opening.open_source = lambda *_, **__: time.sleep(60); sources._open_limited(source)"
    )
    assert limited(file, body).returncode == -signal.SIGALRM


def test_an_import_is_encrypted_with_the_keys_and_a_root_is_not_mixed_in_silence(
    file: Path, tmp_path: Path, holdfast: Any
) -> None:
    key, run, plain = tmp_path / "key", tmp_path / "run", tmp_path / "plain"
    assert holdfast("keys", "generate", key).code == 0
    with_key = ("--key-file", key, "import", file)
    assert holdfast(*with_key, run, "--step", 1, "--trust").code == 0
    assert not [*run.glob("step-*/*.safetensors")]
    assert holdfast("--key-file", key, "verify", run).code == 0
    done = holdfast("import", file, run, "--step", 2, "--trust")
    assert done.code == 1
    assert "is encrypted, and no key was given" in done.err
    assert holdfast("import", file, plain, "--step", 1, "--trust").code == 0
    done = holdfast(*with_key, plain, "--step", 2, "--trust")
    assert done.code == 1
    assert "is not encrypted, and the import would be" in done.err
    assert holdfast("--accept-plain", *with_key, plain, "--step", 2, "--trust").code == 0
    made = holdfast("--key-file", key, "--accept-plain", "ls", plain, "--json").document
    assert [one["step"] for one in made["checkpoints"]] == [2, 1]


def test_a_file_that_mindspore_has_encrypted_is_read_with_its_key(
    tmp_path: Path, holdfast: Any
) -> None:
    encrypted, key = PEERS / "mindspore" / "AES-GCM.ckpt", tmp_path / "key"
    done = holdfast("tree", encrypted, "--trust")
    assert done.code != 0
    assert "holdfast --file-key PATH" in done.err
    for text in (KEY, KEY + b"\r\n"):
        key.write_bytes(text)
        assert holdfast("--file-key", key, "tree", encrypted, "--trust").code == 0
    done = holdfast("--file-key", tmp_path / "none", "tree", encrypted, "--trust")
    assert done.code == 1
    assert "none: cannot be read: No such file" in done.err
    key.write_bytes(bytes(300))
    done = holdfast("--file-key", key, "tree", encrypted, "--trust")
    assert "longer than a key" in done.err
