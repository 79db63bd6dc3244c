"""The built wheel in an environment of its own, with nothing but what it asks for."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import holdfast

REPOSITORY = Path(__file__).resolve().parent.parent.parent
WAIT_S = 1200

SAVE = """
import sys, torch, holdfast
model = torch.nn.Linear(4, 4)
with holdfast.CheckpointManager(sys.argv[1], {"model": model}) as manager:
    manager.save(step=3).wait()
"""
IMPORT_ALL = """
import importlib, pkgutil, holdfast
found = pkgutil.walk_packages(holdfast.__path__, "holdfast.")
names = [one.name for one in found if not one.name.endswith("__main__")]
names.remove("holdfast.testing.store_contract")  # a suite for pytest
names = [name for name in names if not name.startswith("holdfast.bridges.")]  # trainers of others
names = [name for name in names if not name.startswith("holdfast.cli.web.")]  # needs [web]
for name in names:
    importlib.import_module(name)
print(len(names), holdfast.__file__)
"""


def _run(*words: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin"},  # no PYTHONPATH, which would name these sources
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip()


@pytest.mark.full
@pytest.mark.timeout(2 * WAIT_S)
def test_the_wheel_alone_saves_verifies_and_imports_whole(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(*pip, "wheel", "--no-deps", "-w", tmp_path / "dist", REPOSITORY, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").iterdir()
    names = {name.partition("holdfast/cli/web/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"templates/base.html", "static/page.js", "static/htmx.LICENSE"} <= names
    assert wheel.name == f"holdfast_torch-{holdfast.__version__}-py3-none-any.whl"
    venv.create(tmp_path / "bare", with_pip=True)
    bin_ = tmp_path / "bare" / "bin"
    limits = ("-c", REPOSITORY / "requirements" / "torch.txt")
    _run(bin_ / "python", *pip[1:], "install", *limits, wheel, cwd=tmp_path)
    assert _run(bin_ / "holdfast", "--version", cwd=tmp_path) == f"holdfast {holdfast.__version__}"
    _run(bin_ / "python", "-W", "error", "-c", SAVE, tmp_path / "run", cwd=tmp_path)
    _run(bin_ / "holdfast", "verify", tmp_path / "run", cwd=tmp_path)
    num_modules, file = _run(bin_ / "python", "-c", IMPORT_ALL, cwd=tmp_path).split()
    assert int(num_modules) > 250
    assert Path(file).is_relative_to(tmp_path / "bare")
