"""A real root, and a way to run the command line in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result
from tests.cli.schemas import validated

from holdfast.cli import main
from runs import new_run


@pytest.fixture
def holdfast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Runs `holdfast …` through its entry point."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr("sys.argv", ["holdfast", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            copy_context().run(main)  # so that no option outlives the command
        captured = capsys.readouterr()
        if "--json" in map(str, arguments) and captured.out:
            validated([str(one) for one in arguments], captured.out)
        return Result(int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def _template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli") / "run"
    run = new_run()
    with run.manager(root) as manager:
        for step in (100, 200, 300):
            run.train()
            metrics = {"loss": 30 / step, "odd": float("nan")}
            manager.save(step, metrics=metrics, epoch=1, reason="interval").wait()
        manager.pin("step=100")
        manager.tag("step=200", "paper")
    return root


@pytest.fixture
def root(_template: Path, tmp_path: Path) -> Path:
    """A root of its own for the test: steps 100 (pinned), 200 (tagged `paper`) and 300."""
    return Path(shutil.copytree(_template, tmp_path / "run", symlinks=True))


@pytest.fixture
def saving(root: Path) -> Iterator[Callable[..., Any]]:
    """Opens a manager on the root that has resumed, as a live owner."""
    opened = []

    def open_manager() -> Any:
        manager = new_run().manager(root)
        manager.resume()
        opened.append(manager)
        return manager

    yield open_manager
    for manager in opened:
        manager.close()
