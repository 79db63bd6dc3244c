"""Tests of `make gpu`: the Python that it takes, its error messages, the cases it leaves out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from bench.gpu import BENCH, SHARED_MEMORY, Clock, OneAtATime, Room, place_for
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
from bench.results import Outcome, Results
from bench.states import StateSpec, build

ROOT = Path(__file__).parents[2]
ALL = {**REQUIRED, **FOR_TESTS, **OPTIONAL}
BARE = {
    "torch": "2.11.0+cu130",
    "numpy": "2.5.2",
    "click": "8.2.0",
    "rich": "14.0.0",
    "typing_extensions": "4.15.0",
}
GB = 10**9
LARGE = Room(device=140 * GB, memory=130 * GB, shared=130 * GB, disk=500 * GB)


def system(packages: Mapping[str, str], gpu: str | None = None) -> Interpreter:
    return Interpreter(python="python3", version="3.11", packages=packages, gpu=gpu)


def with_gpu(**packages: str) -> Interpreter:
    return system({**BARE, **packages}, gpu="NVIDIA H200")


def own(gpu: str | None = None, packages: Mapping[str, str] = ALL) -> Interpreter:
    return Interpreter(python=".venv/bin/python", version="3.12", packages=packages, gpu=gpu)


def all_but(name: str) -> dict[str, str]:
    return {package: version for package, version in ALL.items() if package != name}


def test_a_torch_with_cuda_is_taken_before_the_environment_of_the_project() -> None:
    """A Python with CUDA is taken even if packages are missing there, for they can be added."""
    here = with_gpu()
    assert choose(here, own()) is here
    assert choose(here, own(gpu="NVIDIA H200")) is here


def test_the_environment_of_the_project_is_taken_where_only_it_has_cuda_or_nobody_has() -> None:
    here = system(ALL)
    for mine in (own(gpu="NVIDIA H200"), own()):
        assert choose(here, mine) is mine
        assert choose(None, mine) is mine


def test_a_python_with_all_that_is_needed_is_taken_before_an_environment_is_made() -> None:
    here = system({**REQUIRED, **FOR_TESTS})
    for mine in (None, own(packages=all_but("pytest"))):
        assert choose(here, mine) is here


def test_an_environment_is_made_where_every_python_lacks_something() -> None:
    for mine in (None, own(packages=all_but("pytest"))):
        for here in (None, system(BARE), system(all_but("blake3"))):
            assert choose(here, mine) is None


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (0, None),
        (2, "was not made: `make` failed with status 2"),
        (None, "was not made: `make` was cut off after 60 s"),
    ],
)
def test_making_the_environment_ends_soon_and_says_why_it_failed(
    status: int | None,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def watched(command: Sequence[str], given: Mapping[str, str], timeout_s: float) -> int | None:
        assert command[0] == "make"
        assert (given["PIP_RETRIES"], given["PIP_TIMEOUT"], timeout_s) == ("1", "15", 60.0)
        return status

    monkeypatch.setattr("bench.gpu_run._watched", watched)
    assert Machine("no such python", ROOT / "no such folder", None).find(60.0) is None
    printed = capsys.readouterr().out
    assert told in printed if told else "was not made" not in printed


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
    assert "--python-version 3.11 " in problem  # its own, not that of this process
    assert cannot_run(own(), "python3") is None
    assert "PYTHON=" in str(cannot_run(None, "python3"))


@pytest.mark.full
def test_an_interpreter_is_asked_what_it_has() -> None:
    machine = Machine(sys.executable, ROOT / "no such folder", None)
    found = machine.look(sys.executable)
    assert found is not None
    assert found.lacks({**REQUIRED, **FOR_TESTS}) == {}
    assert found.version == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.added == ROOT / "build" / f"gpu-site-{found.version}"
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
    everywhere = [line for line in project["dependencies"] if ";" not in line]
    assert {line.split(">=")[0] for line in everywhere} == set(REQUIRED)


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
    """The time of a case is estimated from its time with a smaller state."""
    assert Clock(budget_s=None).why_not("save/holdfast", 10**15) is None
    clock = Clock(budget_s=100.0)
    clock.note("save/holdfast", 25.0, 10 * GB)
    assert clock.why_not("save/holdfast", 40 * GB) is None
    clock.note("save/dcp-async", 45.0, 10 * GB)
    assert "about 165 s" in str(clock.why_not("save/dcp-async", 40 * GB))


def test_a_run_has_one_clock_which_leaves_time_for_its_start_and_end() -> None:
    clock: Clock = BENCH.parse(["--budget-s", "100"]).clock
    assert 80 < clock.left_s < 90
    assert BENCH.parse([]).clock.left_s == float("inf")


@pytest.mark.parametrize("rounds", [(100.0, 0.0), (0.0, 100.0), (0.0, 100.0, 0.0)])
def test_a_case_that_not_every_round_has_time_for_has_one_row(
    rounds: Sequence[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(
        place: str, name: str, _: StateSpec, __: argparse.Namespace, ___: Path, results: Results
    ) -> None:
        results.add(f"{place}/{name}", Outcome(figures={"stall_s": [1.0]}))

    monkeypatch.setattr("bench.gpu._measure_case", measure)
    monkeypatch.setattr("bench.gpu.in_child", lambda *_: Outcome(figures={}))
    sizes = ("--device", "cpu", "--size-gb", "0.001", "--only", "holdfast", "--no-loads")
    options, results = BENCH.parse(sizes), Results()
    for budget_s in rounds:
        options.clock = Clock(budget_s=budget_s)
        BENCH.measure_round(options, tmp_path, results)
    printed = "\n".join(BENCH.tables(results))
    assert printed.count("| holdfast |") == 1
    assert "left out" not in printed
    assert not results.notes


def test_only_the_newest_checkpoint_takes_room(tmp_path: Path) -> None:
    """The files of a checkpoint are emptied before the next save, which works without them."""
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
