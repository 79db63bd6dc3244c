"""Claims about `holdfast train`: typed overrides, restarts, exit codes; ranks by torchrun."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.cli.roots import Result

from holdfast.cli.fitting import convert, fit, load_function, overrides
from holdfast.engine.roots.catalog import Catalog
from holdfast.errors import UsageError
from holdfast.store.local import LocalStore

Command = Callable[..., Result]
NO_PAUSE = ("--backoff", "0")

SCRIPT = '''
import os
import signal

import torch

from holdfast import Checkpoints
from holdfast.data import Loader
from holdfast.train import Callback, Trainer


class Dies(Callback):
    """Kills the process once in its life, after so many steps of it."""

    def __init__(self, after):
        self.after, self.done = after, 0

    def step_end(self, training, metrics):
        self.done += 1
        if self.done == self.after + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(root, lr: float = 0.1, dies_after: int = 100, bias: bool = True):
    return Trainer(
        lambda: torch.nn.Linear(2, 1, bias=bias),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        data=Loader([torch.ones(2)] * 8, batch_size=2),
        loss=lambda model, batch: model(batch).square().mean(),
        checkpoints=Checkpoints(root, every="1step"),
        callbacks=[Dies(dies_after)],
        progress=False,
    )


def make_nothing():
    return 3
'''


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments: object, before: tuple[str, ...] = ("-m", "holdfast.cli")) -> Any:
    command = [sys.executable, *before, "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def head(root: Path) -> int:
    entry = Catalog(LocalStore(root)).head()
    assert entry is not None
    return entry.step


class Colour(enum.Enum):
    RED = "r"


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        *(("1e-4", float, 1e-4), ("10_000", int, 10_000), ("x", str, "x"), ("3", str, "3")),
        *(("false", bool, False), ("Yes", bool, True), ("none", int | None, None)),
        *(("3", int | None, 3), ("0.5", int | float, 0.5), ("none", str | None, None)),
        *(("adam", Literal["adam", "sgd"], "adam"), ("2", Literal[1, 2], 2)),
        *(("r", Colour, Colour.RED), ("a/b", Path, Path("a/b")), ("RED", Colour, Colour.RED)),
        *(("1,2", list[int], [1, 2]), ("(0.9, 0.99)", tuple[float, float], (0.9, 0.99))),
        *(("[a, b]", list[str], ["a", "b"]), ("{'a': 1}", dict[str, int], {"a": 1})),
        *(("[1, 2]", Any, [1, 2]), ("word", Any, "word"), ("", list[int], [])),
        ("1,2,3", tuple[int, ...], (1, 2, 3)),
    ],
)
def test_an_override_gets_the_type_of_its_parameter(text: str, hint: Any, value: Any) -> None:
    found = convert(text, hint)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *(("1.5", int), ("maybe", bool), ("x", float), ("x", int | None), ("lion", Literal["sgd"])),
        *(("1,2,3", tuple[int, int]), ("x", dict[str, int]), ("a", list[int]), ("blue", Colour)),
    ],
)
def test_an_override_that_does_not_fit_is_refused(text: str, hint: Any) -> None:
    with pytest.raises(ValueError, match=r".*"):
        convert(text, hint)


def test_every_wrong_override_is_named_with_what_was_meant(script: Path) -> None:
    make = load_function(f"{script}:make_trainer")
    with pytest.raises(UsageError) as raised:
        overrides(make, ["learning=1", "lr=x", "dies_aftr=3", "bias", "lr=1"])
    assert str(raised.value).splitlines() == [
        "--set learning=1: make_trainer has no 'learning'; there are root, lr, dies_after, bias",
        "--set lr=x: must be float",
        "--set dies_aftr=3: make_trainer has no 'dies_aftr'; is 'dies_after' meant?",
        "--set bias: write NAME=VALUE",
        "root has no default: give --set root=VALUE",
    ]
    assert overrides(make, ["root=runs/x", "lr=1"]) == {"root": "runs/x", "lr": 1.0}


def test_it_trains_and_says_what_was_overridden(script: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    result = run(script, "--until", "3step", "--set", f"root={root}", "--set", "lr=1e-3")
    assert result.returncode == 0, result.stderr
    assert f"train {script} until 3step" in result.stderr
    assert "lr = 0.001 (default 0.1)" in result.stderr
    assert head(root) == 3


@pytest.mark.full
def test_a_training_that_dies_is_started_again(script: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    given = ("--until", "5step", "--set", f"root={root}", "--set", "dies_after=2")
    result = run(f"{script}:make_trainer", *given, "--root", root, *NO_PAUSE, "--json")
    assert result.returncode == 0, result.stderr
    *lives, last = map(json.loads, result.stdout.splitlines())
    assert len(lives) > 1
    assert [life["signal"] for life in lives] == ["SIGKILL"] * (len(lives) - 1) + [None]
    assert lives[-1]["to_step"] == 5
    assert last["summary"]["outcome"] == "finished"


def test_wrong_arguments_end_it_at_once(script: Path, tmp_path: Path) -> None:
    """They are found by the process that trains, which is not started again."""
    result = run(script, "--until", "3step", "--set", "root=run", "--set", "lrate=3", "--json")
    assert (result.returncode, len(result.stdout.splitlines())) == (2, 2)
    assert "has no 'lrate'" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["summary"]["outcome"] == "wrong"


def test_what_the_trainer_refuses_ends_it_at_once(script: Path, tmp_path: Path) -> None:
    """A restart would be refused again."""
    given = ("--set", f"root={tmp_path}/run", "--json", *NO_PAUSE)
    result = run(script, "--until", "10tok", *given)
    assert (result.returncode, len(result.stdout.splitlines())) == (2, 2)
    assert "tokens are not counted" in result.stderr
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--until", "10foo"), "until='10foo'"),
        (("--until", "3step", "--max-time", "2ep"), "max_time='2ep'"),
    ],
)
def test_a_wrong_goal_or_time_limit_ends_it_before_anything_is_made(
    holdfast: Command, arguments: tuple[str, ...], message: str, script: Path, tmp_path: Path
) -> None:
    given = ("--set", f"root={tmp_path}/run", "--max-failures", "1", *NO_PAUSE)
    result = holdfast("train", script, *arguments, *given)
    assert result.code == 2, result.err
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("script.py:make", "has no function 'make'; "),
        ("script.py:make_nothing", "gave a int, not a Trainer"),
        ("no_such_module:make", "no such module"),
    ],
)
def test_what_makes_no_trainer_is_refused(
    name: str,
    message: str,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asked of the function of the child process, whose exit code is that of the command."""
    monkeypatch.chdir(script.parent)
    assert fit([name, "3step", ""]) == 2
    assert message in capsys.readouterr().err


def test_a_script_that_is_missing_is_refused(holdfast: Command) -> None:
    result = holdfast("train", "missing.py", "--until", "3step")
    assert result.code == 2
    assert "no such file" in result.err


@pytest.mark.full
def test_the_time_limit_asks_to_be_run_again(script: Path, tmp_path: Path) -> None:
    result = run(script, "--until", "9ep", "--max-time", "0.001s", "--set", f"root={tmp_path}/run")
    assert result.returncode == 75, result.stderr


@pytest.mark.full
def test_ranks_of_torchrun_train_together(script: Path, tmp_path: Path) -> None:
    """torchrun starts ranks again itself, so each trains in its own process."""
    root = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "holdfast.cli")
    result = run(script, "--until", "3step", "--set", f"root={root}", before=launcher)
    assert result.returncode == 0, result.stderr
    assert head(root) == 3
    assert result.stderr.count("until 3step") == 1


def test_help_does_not_import_torch() -> None:
    code = "import sys; sys.argv = ['holdfast', 'train', '--help']\n"
    code += "import holdfast.cli.app as app\ntry:\n    app.run()\nfinally:\n"
    code += "    assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "--set NAME=VALUE" in result.stdout
