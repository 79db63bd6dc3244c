"""The examples for clusters: their own commands, real signals, and the same weights in the end.

Only the scheduler is missing: a few lines stand in for `srun` and `scontrol`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.cli.output import Code
from holdfast.root.catalog import Catalog
from holdfast.store import open_store

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "clusters"
UNTIL = 400
REQUEUE = 75
DEADLINE_S = 120

pytestmark = pytest.mark.full

STAND_INS = {
    "python": 'exec {python} "$@"',
    "holdfast": 'exec {python} -m holdfast.cli "$@"',
    "torchrun": 'exec {python} -m torch.distributed.run "$@"',
    # It starts the task, to which it passes signals on.
    "srun": 'while [ "${{1#--}}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'echo "$@" >> "$SCONTROL_SAW"',
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the commands that the examples use."""
    folder = tmp_path_factory.mktemp("bin")
    for name, line in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{line.format(python=sys.executable)}\n")
        (folder / name).chmod(0o755)
    return folder


class Started:
    """A command of an example, in its folder."""

    def __init__(self, command: Sequence[str], commands: Path, root: Path, **others: str) -> None:
        self.root = root
        environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "ROOT": str(root),
            "UNTIL": f"{UNTIL}step",
            **others,
        }
        self.process = subprocess.Popen(
            command, cwd=FOLDER, env=environment, text=True, stderr=subprocess.PIPE
        )

    def wait_for_progress(self) -> None:
        """Wait until a checkpoint is committed that was not there when this was called."""
        before = {*self.root.glob("step-*/manifest.json")}
        end_s = time.monotonic() + DEADLINE_S
        while not {*self.root.glob("step-*/manifest.json")} - before:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < end_s, "no checkpoint was made"
            time.sleep(0.02)

    def status(self) -> int:
        """Wait for its end."""
        self.said = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode


@contextmanager
def started(command: Sequence[str], commands: Path, root: Path, **others: str) -> Iterator[Started]:
    one = Started(command, commands, root, **others)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            for child in psutil.Process(one.process.pid).children(recursive=True):
                child.kill()
            one.process.kill()
            one.process.communicate()


def signalled(
    command: Sequence[str], commands: Path, root: Path, number: int, **others: str
) -> tuple[int, str]:
    """Start it, signal it once it has made progress; gives its status and what it said."""
    with started(command, commands, root, **others) as one:
        one.wait_for_progress()
        one.process.send_signal(number)
        return one.status(), one.said


def finished(command: Sequence[str], commands: Path, root: Path, **others: str) -> str:
    with started(command, commands, root, **others) as one:
        assert one.status() == 0, one.said
        return one.said


def step_of(root: Path) -> int:
    """Step of the newest checkpoint."""
    return max(int(path.parent.name[5:13]) for path in root.glob("step-*/manifest.json"))


def assert_same(one: Path, other: Path) -> None:
    """The last checkpoints have the same bytes of weights, optimizer, data position, generators."""
    assert step_of(one) == step_of(other) == UNTIL
    assert digests(one) == digests(other)


def digests(root: Path) -> dict[str, str]:
    """Digest of each file of those components in the newest checkpoint."""
    entry = Catalog(open_store(root)).latest()
    assert entry is not None
    names = [
        name
        for component in ("model", "optimizer", "data", "rng")
        for name in entry.manifest.components[component].files
    ]
    return {name: entry.manifest.files[name].digest for name in names}


@pytest.fixture(scope="module")
def undisturbed(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run that nobody has disturbed."""
    root = tmp_path_factory.mktemp("undisturbed") / "run"
    finished(["python", "train.py", str(root)], commands, root)
    return root


def test_slurm_queues_the_job_again_after_its_signal_and_it_ends_alike(
    commands: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Invariant 7, R1. The batch script alone gets the signal, as `--signal=B:` says."""
    script = FOLDER / "slurm.sbatch"
    assert "#SBATCH --signal=B:USR1@120\n#SBATCH --requeue\n" in script.read_text("utf-8")
    root, saw = tmp_path / "run", tmp_path / "scontrol"
    job = {"SLURM_JOB_ID": "7", "SCONTROL_SAW": str(saw)}
    status, said = signalled(["bash", str(script)], commands, root, signal.SIGUSR1, **job)
    assert status == 0, said
    assert saw.read_text() == "requeue 7\n"
    assert step_of(root) < UNTIL
    # At a preemption all processes of the job get SIGTERM; Slurm queues it again by itself.
    finished(["bash", str(script)], commands, root, **job)
    assert saw.read_text() == "requeue 7\n"
    assert_same(root, undisturbed)


def test_slurm_restarts_a_training_that_was_killed_within_the_job(
    commands: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Invariant 7: `holdfast run` does."""
    root = tmp_path / "run"
    job = {"SLURM_JOB_ID": "7", "SCONTROL_SAW": str(tmp_path / "scontrol")}
    with started(["bash", str(FOLDER / "slurm.sbatch")], commands, root, **job) as one:
        one.wait_for_progress()
        trainings(one, "train.py")[-1].kill()
        assert one.status() == 0, one.said
    assert "session 1 ended: SIGKILL" in one.said
    assert not (tmp_path / "scontrol").exists()
    assert_same(root, undisturbed)


def trainings(one: Started, script: str) -> list[psutil.Process]:
    """The processes that run the script, outermost first."""
    found = [one.process.pid, *(p.pid for p in psutil.Process(one.process.pid).children(True))]
    processes = [psutil.Process(pid) for pid in found]
    return [process for process in processes if script in process.cmdline()]


def container(root: Path) -> tuple[Mapping[str, Any], list[str]]:
    """The spec of the Job, and the command of its container, with another root."""
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text("utf-8"))["spec"]
    (only,) = spec["template"]["spec"]["containers"]
    return spec, [str(root) if word == "/runs/gpt" else word for word in only["command"]]


def test_kubernetes_starts_another_pod_after_sigterm_and_it_ends_alike(
    commands: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Invariant 7, R1. The status is one that its rules do not count as a failure."""
    root = tmp_path / "run"
    spec, command = container(root)
    ignored = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"][1:]]
    assert [rule["values"] for rule in ignored] == [[REQUEUE]]
    pod = spec["template"]["spec"]
    grace_s = float(command[command.index("--grace") + 1].removesuffix("s"))
    assert grace_s < pod["terminationGracePeriodSeconds"]
    assert pod["restartPolicy"] == "Never", "the rules need it"
    status, said = signalled(command, commands, root, signal.SIGTERM)
    assert status == REQUEUE, said
    assert step_of(root) < UNTIL
    finished(command, commands, root)
    assert_same(root, undisturbed)


def test_kubernetes_counts_wrong_arguments_as_a_failure(commands: Path, tmp_path: Path) -> None:
    _, command = container(tmp_path / "run")
    wrong = [word if word != "100s" else "soon" for word in command]
    with started(wrong, commands, tmp_path / "run") as one:
        assert one.status() == Code.USAGE != REQUEUE


@pytest.fixture(scope="module")
def undisturbed_ranks(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run of two ranks that nobody has disturbed."""
    root = tmp_path_factory.mktemp("ranks") / "run"
    finished(["./torchrun.sh"], commands, root)
    return root


def test_torchrun_restarts_all_ranks_after_one_was_killed_and_they_end_alike(
    commands: Path, undisturbed_ranks: Path, tmp_path: Path
) -> None:
    """Invariant 7, R1."""
    root = tmp_path / "run"
    with started(["./torchrun.sh"], commands, root) as one:
        one.wait_for_progress()
        ranks = [p for p in trainings(one, "train.py") if p.environ().get("RANK") == "1"]
        ranks[-1].kill()
        assert one.status() == 0, one.said
    assert_same(root, undisturbed_ranks)


def test_torchrun_passes_sigterm_on_and_what_it_starts_next_ends_alike(
    commands: Path, undisturbed_ranks: Path, tmp_path: Path
) -> None:
    """Invariant 7, R1: all ranks save one step, though each got the signal at a step of its own."""
    root = tmp_path / "run"
    status, said = signalled(["./torchrun.sh"], commands, root, signal.SIGTERM)
    assert status != 0
    stopped = step_of(root)
    assert stopped < UNTIL, said
    finished(["./torchrun.sh"], commands, root)
    assert_same(root, undisturbed_ranks)


def test_the_folder_is_listed_with_all_its_files() -> None:
    index = (FOLDER.parent / "README.md").read_text("utf-8")
    page = (FOLDER.parents[1] / "docs" / "running.md").read_text("utf-8")
    for path in FOLDER.iterdir():
        assert f"clusters/{path.name}" in index
        assert f"examples/clusters/{path.name}" in page
