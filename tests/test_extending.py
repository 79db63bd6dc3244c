"""What docs/extending.md shows works, and what it says of the package is so."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast import CheckpointManager
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.policy.retention import decide
from holdfast.policy.rule import Candidate
from holdfast.policy.rules import Last
from holdfast.policy.triggers import At
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.testing import StoreContract
from holdfast.train import Callback

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
*CLASSES, TOGETHER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MODULE = "\n".join(CLASSES)
TESTS = dict(re.findall(r'```python title="(tests/[^"]+)"\n(.*?)```', PAGE, re.DOTALL))
CHANGES = re.findall(r'```(python|diff) title="(src/[^"]+)"\n(.*?)```', PAGE, re.DOTALL)
"""(kind, file, text) of each change of the package."""


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "extending"}
    # As its own file: the annotations are values there.
    exec(compile(MODULE, "extending.md", "exec", dont_inherit=True), names)
    return names


def task() -> dict[str, Any]:
    """The names that the last block takes for granted."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inputs = torch.randn(256, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.05),
        "dataset": dataset,
        "held_out": dataset,
        "loss_fn": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    }


def test_all_of_it_works_in_one_training(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    first = {**page, **task()}
    exec(TOGETHER, first)
    assert first["outcome"].reason == "goal"
    entries = Catalog(LocalStore(tmp_path / "runs" / "extended")).checkpoints()
    assert [entry.step for entry in entries] == [200, 100, 50, 25]
    lines = (tmp_path / "runs" / "numbers.csv").read_text().splitlines()
    assert sum(line.endswith(",val/loss") for line in lines) == 8


def test_the_trigger_fires_at_each_doubling_also_after_a_jump(page: dict[str, Any]) -> None:
    trigger = page["Doubling"]("25step") | At("60step")

    def fired(*steps: int) -> list[int]:
        stamps = [Timestamp(step=step) for step in steps]
        return [b.step for a, b in pairwise(stamps) if trigger.due(a, None, b)]

    assert fired(*range(450)) == [25, 50, 60, 100, 200, 400]
    assert fired(0, 20, 110, 190, 210) == [110, 210]
    assert trigger.due(None, None, Timestamp(step=25)) == "doubling from 25step"
    with pytest.raises(UsageError, match="tokens"):
        page["Doubling"]("5tok").due(None, None, Timestamp(step=1))


def test_the_rule_keeps_the_same_when_the_others_are_gone(page: dict[str, Any]) -> None:
    rule = page["Records"]("loss") | Last(1)

    def entries(losses: dict[int, float], *, rejected: int = 0) -> list[Candidate]:
        return [
            Candidate(
                order=(1, step),
                timestamp=Timestamp(step=step),
                metrics={"loss": loss},
                rejected=step == rejected,
                components=("model",),
            )
            for step, loss in losses.items()
        ]

    def kept(losses: dict[int, float]) -> dict[int, float]:
        decisions = decide(entries(losses), rule)
        steps = {decision.entry.timestamp.step for decision in decisions if decision.keep}
        return {step: loss for step, loss in losses.items() if step in steps}

    first = kept({1: 0.5, 2: 0.7, 3: float("nan"), 4: 0.4, 5: 0.4, 6: 0.3, 7: 0.9})
    assert list(first) == [1, 4, 6, 7]
    assert kept(first) == first
    newest_first = entries({4: 0.4, 3: 0.45, 2: 0.1, 1: 0.5}, rejected=2)
    assert sorted(page["Records"]("loss").picks(newest_first)) == [0, 1, 3]


def test_the_callback_stops_and_goes_on_where_it_was(page: dict[str, Any]) -> None:
    class Training:
        stopped = ""

        def request_stop(self, reason: str) -> None:
            self.stopped = reason

    training, before = Training(), page["Patience"](2)
    for loss in (1.0, 0.5, 0.6):
        before.validation_end(training, "", {"val/loss": loss})
    after = page["Patience"](2)
    after.load_state_dict(before.state_dict())
    assert training.stopped == ""
    after.validation_end(training, "", {"val/loss": 0.7})
    assert training.stopped == "no better than 0.5"


def test_the_logger_drops_what_will_be_done_again(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = {**page, **task()}
    exec(TOGETHER.replace('fit("200step")', 'fit("20step")'), names)
    path = tmp_path / "runs" / "numbers.csv"
    before = path.read_text()
    path.write_text(before + "30,1.0,loss\n40,1.0,loss\n4")
    exec(TOGETHER.replace('fit("200step")', 'fit("40step")'), {**page, **task()})
    steps = [int(line.split(",")[0]) for line in path.read_text().splitlines()]
    assert path.read_text().startswith(before)
    assert steps.count(30) == 1
    assert steps == sorted(steps)


class TestTheStore(StoreContract):
    @pytest.fixture
    def store(self, page: dict[str, Any], tmp_path: Path) -> Store:
        store: Store = page["SqliteStore"](str(tmp_path / "run.sqlite"))
        return store


def test_a_training_goes_on_in_the_store(page: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "run.sqlite")
    state = torch.arange(10.0)
    with CheckpointManager(page["SqliteStore"](path), {"x": {"t": state}}, sinks=()) as manager:
        for step in (1, 2):
            manager.save(step).wait()
    found = torch.zeros(10)
    store = page["SqliteStore"](path)
    with CheckpointManager(store, {"x": {"t": found}}, sinks=()) as manager:
        resumed = manager.resume()
    assert resumed is not None
    assert resumed.step == 2
    assert torch.equal(found, state)
    assert [entry.step for entry in Catalog(store).checkpoints()] == [2, 1]
    assert [*tmp_path.iterdir()] == [tmp_path / "run.sqlite"]


def patched(source: str, patch: str) -> str:
    """The source after the changes of a patch, each at the only place with its old lines."""
    for hunk in patch.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        assert f"\n{source}".count(f"\n{old}") == 1, old
        source = f"\n{source}".replace(f"\n{old}", f"\n{new}")[1:]
    return source


def in_the_package(name: str) -> str:
    """The class of that name on the page, as it stands in the package: without its imports."""
    (block,) = (block for block in CLASSES if f"class {name}(" in block)
    return "\n\n" + "".join(
        line
        for line in block.splitlines(keepends=True)
        if not line.startswith(("from holdfast", "from dataclasses"))
    )


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with every change that the page makes."""
    copy = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    head = "from __future__ import annotations\n\n"
    hooks = "from holdfast.train.callbacks.hooks import Logger\n"
    added = [
        ("python", "src/holdfast/policy/triggers.py", in_the_package("Doubling")),
        ("python", "src/holdfast/policy/rules.py", in_the_package("Records")),
        (
            "python",
            "src/holdfast/train/loggers/numbers.py",
            head + hooks + in_the_package("Numbers"),
        ),
    ]
    for kind, name, text in [*added, *CHANGES]:
        path = copy / name
        before = path.read_text("utf-8") if path.exists() else ""
        path.write_text(patched(before, text) if kind == "diff" else before + text, "utf-8")
    return copy


def run_changed(changed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with the changed package, in that folder."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(changed / "src")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_changes_touch_at_most_three_files_each() -> None:
    rows = re.findall(r"^\| an? .* \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 6
    assert [row for row in rows if row.count("src/holdfast/") > 3] == []
    named = set(re.findall(r"`(src/holdfast/[\w/.]+)`", "\n".join(rows)))
    files = {name for _, name, _ in CHANGES}
    assert {name for name in files if name not in named and not is_new_in(name, named)} == set()


def is_new_in(name: str, named: set[str]) -> bool:
    return f"{name.rpartition('/')[0]}/" in named and not (ROOT / name).exists()


USES = {
    "trigger": """
from holdfast import AtEnd, CheckpointManager, MemoryStore
from holdfast.policy.triggers import Doubling
trigger = Doubling("2step") | AtEnd()
with CheckpointManager(MemoryStore(), {"model": {}}, every=trigger, sinks=()) as manager:
    saves = [manager.maybe_save(step) for step in range(1, 20)]
print([save.step for save in saves if save])
""",
    "rule": """
from holdfast.policy.rules import Records, parse_rule
print(parse_rule("last:3, records:loss"), parse_rule("records:loss") == Records("loss"))
""",
    "logger": """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from holdfast.data import Loader
from holdfast.train import Numbers, Trainer
model = nn.Linear(4, 1)
Trainer(
    model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data=Loader(TensorDataset(torch.randn(8, 4)), batch_size=4),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    callbacks=[Numbers("numbers.csv")],
    checkpoints=None,
).fit("20step")
""",
    "codec": """
import torch
from holdfast import CheckpointManager
from holdfast.format.codec import Compression
from holdfast.saving.compression import candidates
from holdfast.errors import UsageError
state = {"model": {"w": torch.arange(3 << 20).float()}}
with CheckpointManager("run", state, compress="gzip") as manager:
    manager.save(1).wait()
live = {"model": {"w": torch.zeros(3 << 20)}}
with CheckpointManager("run", live) as manager:
    manager.load()
print(torch.equal(live["model"]["w"], state["model"]["w"]))
print(Compression(codec="gzip") in candidates())
for wrong in (lambda: Compression(codec="zip"), lambda: Compression(codec="gzip", level=10)):
    try:
        wrong()
    except UsageError as error:
        print(error)
""",
}
"""Programs that use what the page adds to the package."""


@pytest.fixture(scope="module")
def used(changed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder in which each of `USES` ran with the changed package, and what each printed."""
    folder = tmp_path_factory.mktemp("used")
    # In one process, as the import of torch takes longer than all of them.
    code = f"for name, code in {USES!r}.items():\n    print('===', name)\n    exec(code, {{}})"
    _, *parts = run_changed(changed, folder, "-c", code).stdout.split("=== ")
    return folder, dict(part.split("\n", 1) for part in parts)


@pytest.mark.full
def test_a_trigger_and_a_rule_are_classes_in_the_package(
    used: tuple[Path, dict[str, str]],
) -> None:
    assert used[1]["trigger"].split("\n")[0] == "[2, 4, 8, 16]"
    assert used[1]["rule"].split("\n")[0] == "last 3 | records of loss True"


@pytest.mark.full
def test_a_logger_in_the_package_is_a_public_name(used: tuple[Path, dict[str, str]]) -> None:
    lines = (used[0] / "numbers.csv").read_text().splitlines()
    assert any(re.fullmatch("20,.*,loss", line) for line in lines)


@pytest.mark.full
def test_a_codec_is_a_row_and_two_functions(
    changed: Path, used: tuple[Path, dict[str, str]]
) -> None:
    """Named by errors, tried by "auto", in the name of the file, which the format's tool reads."""
    folder, said = used
    loaded, is_tried, names, levels = said["codec"].splitlines()
    assert (loaded, is_tried) == ("True", "True")
    assert names.endswith("choose from ('zstd', 'lz4', 'blosc2', 'gzip')")
    assert levels == "level=10: gzip has 0 to 9"
    (stored,) = folder.glob("run/step-*/model-00000.safetensors.gz")
    with gzip.open(stored) as file:
        assert b'"w"' in file.read(4096)
    report = run_changed(changed, folder, "-m", "holdfast.cli", "verify", "run", "--json")
    assert json.loads(report.stdout)["checkpoints"][0]["ok"]


@pytest.mark.full
def test_a_command_is_a_module_and_a_declaration(changed: Path, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", {"model": {}}, sinks=()) as manager:
        manager.save(1)
        folder = manager.save(2).wait().folder
    cli = ("-m", "holdfast.cli")
    assert "newest" in run_changed(changed, tmp_path, *cli, "--help").stdout
    done = run_changed(changed, tmp_path, *cli, "newest", "run")
    assert done.stdout == f"step 2: {folder}\n"
    answer = json.loads(run_changed(changed, tmp_path, *cli, "newest", "run", "--json").stdout)
    assert (answer["folder"], answer["step"]) == (folder, 2)


@pytest.mark.full
def test_a_reader_of_a_format_is_a_module_and_a_line(changed: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    good = (tmp_path / "weights.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(good[:-1])
    (tmp_path / "header.npy").write_bytes(good[:20])
    code = """
import holdfast
from holdfast.errors import FormatError
print(holdfast.load_weights("weights.npy")["weight"].tolist())
for name in ("short.npy", "header.npy"):
    try:
        holdfast.load_weights(name)
    except FormatError as error:
        print(error)
"""
    (tmp_path / "claims.py").write_text(TESTS["tests/interop/sources/test_npyfile.py"])
    code += f"""
import sys, tempfile
from pathlib import Path
sys.path += [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import claims
from holdfast.interop.opening import open_source
claims.test_the_array_is_as_numpy_wrote_it(Path(tempfile.mkdtemp(dir=".")))
for data in claims.malformed():
    Path("bad.npy").write_bytes(data)
    try:
        open_source("bad.npy")
    except FormatError as error:
        print(error)
"""
    loaded, short, header, *bad = run_changed(changed, tmp_path, "-c", code).stdout.splitlines()
    assert loaded == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]"
    assert "expected 24 bytes" in short
    assert "no header" in header
    said = ("expected 12 bytes", "no header", "not a size", "at most 128 sizes")
    assert [text for text, line in zip(said, bad, strict=True) if text not in line] == []


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:src|tests)/[\w/.]+)`", PAGE)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_what_the_page_says_of_the_package_is_there() -> None:
    """Names that a contributor is sent to."""
    policy, train = ROOT / "src/holdfast/policy", ROOT / "src/holdfast/train"
    assert "__subclasses__()" in (policy / "rules.py").read_text("utf-8")
    assert "Last" in holdfast.__all__
    assert "\nMOMENTS: " in (train / "callbacks/hooks.py").read_text("utf-8")
    assert "tell(Callback." in (train / "step/step.py").read_text("utf-8")
    assert "def import_extra(" in (train.parent / "arguments.py").read_text("utf-8")
    assert not hasattr(Callback, "before_clip"), "name a hook that is not there"
