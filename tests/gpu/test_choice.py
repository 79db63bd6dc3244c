"""Which Python `make gpu` takes, what it says is missing, and what its benchmark leaves out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from bench.gpu import SHARED_MEMORY, Clock, OneAtATime, Room, place_for
from bench.gpu_run import (
    FOR_TESTS,
    MODULES,
    OPTIONAL,
    REQUIRED,
    TESTS,
    Interpreter,
    Machine,
    cannot_run,
    choose,
)
from bench.peers import PEERS
from bench.states import StateSpec, build

ROOT = Path(__file__).parents[2]
ALL = {**REQUIRED, **FOR_TESTS, **OPTIONAL}
BARE = {"torch": "2.11.0+cu130", "numpy": "2.5.2", "click": "8.2.0", "rich": "14.0.0"}
GB = 10**9
LARGE = Room(device=140 * GB, memory=130 * GB, shared=130 * GB, disk=500 * GB)


def with_gpu(**packages: str) -> Interpreter:
    return Interpreter(python="python3", packages={**BARE, **packages}, gpu="NVIDIA H200")


def own(gpu: str | None = None) -> Interpreter:
    return Interpreter(python=".venv/bin/python", packages=ALL, gpu=gpu)


def test_a_torch_with_cuda_is_taken_before_the_environment_of_the_project() -> None:
    """Also where packages are missing there: they can be added."""
    system = with_gpu()
    assert choose(system, own()) is system
    assert choose(system, own(gpu="NVIDIA H200")) is system


def test_the_environment_of_the_project_is_taken_where_only_it_has_cuda_or_nobody_has() -> None:
    here = Interpreter(python="python3", packages=ALL)
    for mine in (own(gpu="NVIDIA H200"), own()):
        assert choose(here, mine) is mine
        assert choose(None, mine) is mine


def test_an_environment_that_is_not_there_or_lacks_something_is_made() -> None:
    packages = {name: version for name, version in ALL.items() if name != "pytest"}
    half = Interpreter(python=".venv/bin/python", packages=packages)
    for mine in (None, half):
        assert choose(None, mine) is None
        assert choose(Interpreter(python="python3", packages=ALL), mine) is None


def test_a_torch_that_is_too_old_is_not_taken() -> None:
    assert choose(with_gpu(torch="2.5.1"), None) is None


def test_what_is_missing_or_too_old_is_named_with_a_way_to_bring_it() -> None:
    found = with_gpu(click="8.0.4")
    assert found.lacks(REQUIRED) == {
        "blake3": "1.0",
        "msgspec": "0.19",
        "zstandard": "0.22",
        "click": "8.1.7",
    }
    problem = cannot_run(found, "python3")
    assert problem is not None
    for text in ("lacks blake3, msgspec, zstandard, click", "'blake3>=1.0'", "WHEELS=wheels"):
        assert text in problem
    assert cannot_run(own(), "python3") is None
    assert "PYTHON=" in str(cannot_run(None, "python3"))


def test_an_interpreter_is_asked_what_it_has() -> None:
    machine = Machine(sys.executable, ROOT / "no such folder", None)
    found = machine.look(sys.executable)
    assert found is not None
    assert found.lacks({**REQUIRED, **FOR_TESTS}) == {}
    assert (found.gpu is not None) is torch.cuda.is_available()
    assert machine.look(str(ROOT / "no such file")) is None


def test_the_packages_are_those_of_the_project() -> None:
    tomllib = pytest.importorskip("tomllib")
    assert set(MODULES) == set(ALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *extras["test"], *extras["bench"]]
    versions = dict(line.split(">=") for line in stated if ">=" in line and ";" not in line)
    assert {name: versions[name] for name in ALL} == ALL
    assert {line.split(">=")[0] for line in project["dependencies"]} == set(REQUIRED)


def test_the_tests_that_it_runs_are_there() -> None:
    for test in TESTS:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists()
        assert f"def {name}(" in (ROOT / path).read_text() if name else True


def test_the_disk_is_taken_where_it_has_room_and_is_quick_enough(tmp_path: Path) -> None:
    quick, slow = (place_for(40 * GB, LARGE, tmp_path, is_slow=way) for way in (False, True))
    assert (quick.folder, quick.nbytes) == (tmp_path, 40 * GB)
    assert (slow.folder, slow.nbytes) == (SHARED_MEMORY, 40 * GB)


@pytest.mark.parametrize(
    ("room", "largest", "is_in_memory"),
    [
        (Room(device=140 * GB, memory=130 * GB, shared=64 * GB, disk=30 * GB), 40, True),
        (Room(device=140 * GB, memory=130 * GB, shared=8 * GB, disk=30 * GB), 28, False),
        (Room(device=140 * GB, memory=40 * GB, shared=20 * GB, disk=60 * GB), 33, False),
        (Room(device=24 * GB, memory=130 * GB, shared=64 * GB, disk=60 * GB), 13, False),
    ],
)
def test_a_state_that_does_not_fit_is_made_smaller(
    tmp_path: Path, room: Room, largest: int, is_in_memory: bool
) -> None:
    place = place_for(40 * GB, room, tmp_path, is_slow=False)
    assert (place.nbytes, place.is_in_memory) == (largest * GB, is_in_memory)


def test_a_case_for_which_there_is_no_time_is_left_out() -> None:
    """Its time is known from a smaller state."""
    assert Clock(budget_s=None).why_not("save/holdfast", 10**15) is None
    clock = Clock(budget_s=100.0)
    clock.note("save/holdfast", 25.0, 10 * GB)
    assert clock.why_not("save/holdfast", 40 * GB) is None
    clock.note("save/dcp-async", 45.0, 10 * GB)
    assert "about 165 s" in str(clock.why_not("save/dcp-async", 40 * GB))


def test_only_the_newest_checkpoint_takes_room(tmp_path: Path) -> None:
    """And the next save does not need the one before."""
    state = build(StateSpec(kind="gpt", gpt_nbytes=4_000_000, num_small=0))
    saver = OneAtATime(PEERS["holdfast"].saver(state, tmp_path), tmp_path)
    sizes = []
    for number in range(3):
        state.negate()
        saver.begin(number).wait()
        sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
        saver.rest()
    saver.close()
    assert max(sizes) < 1.5 * sizes[0]
