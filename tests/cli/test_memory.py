"""`holdfast run --memory`: real supervisors, real trainings, real kills (decision 0069)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result

import warm
from children import environment
from holdfast import system
from holdfast.cli import run as run_module
from holdfast.cli.run import StagingMemory, remove_stale_folders
from holdfast.errors import UsageError
from holdfast.maintenance.verify import verify
from holdfast.ownership.process import this_process
from holdfast.root.catalog import Catalog
from holdfast.staging.shared import SUPERVISOR, SharedFolder, Supervisor
from holdfast.store.local import LocalStore

TRAINED = Path(__file__).parent.parent / "saving" / "trained.py"
DEADLINE_S = 120
HOLDING = """
import sys, time
from pathlib import Path
from holdfast.staging.shared import SharedFolder

lock = SharedFolder(Path(sys.argv[1])).hold()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place in which no other test has folders, for what this process does there."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(run_module, "PLACE", tmp_path / "shm")
    return tmp_path / "shm"


def supervise(root: Path, *options: object, **training: Any) -> subprocess.Popen[str]:
    """Start a real `holdfast run --memory` of a training."""
    words = [sys.executable, "-m", "holdfast.cli", "run", "--memory", "50MB", "--backoff", "0"]
    words += ["--root", root, *options, "--", sys.executable, TRAINED, root, json.dumps(training)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [str(word) for word in words], stdout=pipe, stderr=pipe, text=True, env=environment()
    )


def left_by(pid: int) -> list[Path]:
    """The folders in shared memory whose supervisor has this number."""
    found = []
    for path in Path("/dev/shm").glob("holdfast-*"):
        with suppress(OSError):
            if SharedFolder(path).supervisor.process.pid == pid:
                found.append(path)
    return found


def steps_of(root: Path) -> list[int]:
    """The steps of all checkpoints, which are all whole."""
    catalog = Catalog(LocalStore(root))
    found = [entry for name in catalog.attempts() if (entry := catalog.entry(name))]
    assert all(verify(catalog.store, entry.folder).ok for entry in found)
    return sorted(entry.step for entry in found)


@pytest.mark.full
def test_the_save_of_a_killed_training_is_finished_before_the_restart(tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = {"until": 4, "at": 3, "die": "before the manifest", "once": str(tmp_path / "died")}
    with supervise(root, **options) as running:
        out, err = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 0, err
    assert "finished the save of step 3 that the training had staged" in err
    assert "step - to 3" in err
    told = [json.loads(line) for line in out.splitlines()]
    first, again = [one for one in told if one.get("step") == 3 or one.get("resumed") == 3]
    assert first["bits"] == again["bits"]
    assert steps_of(root) == [1, 2, 3, 4]
    assert left_by(running.pid) == []


def test_a_training_outlives_its_killed_supervisor_whose_folder_the_next_removes(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    with supervise(root, until=6, pause=str(tmp_path / "go")) as running:
        assert running.stdout is not None
        told = [json.loads(running.stdout.readline()) for _ in range(3)]
        (folder,) = left_by(running.pid)
        running.kill()
        running.wait(DEADLINE_S)
        monkeypatch.setattr(run_module, "PLACE", Path("/dev/shm"))
        remove_stale_folders()
        assert folder.exists()  # the training is alive
        (tmp_path / "go").touch()
        out = running.stdout.read()  # until the training ends
    assert '"closed": true' in out
    assert told[-1]["step"] == 2
    assert steps_of(root) == [*range(1, 7)]
    remove_stale_folders()
    assert not folder.exists()


def test_the_next_supervisor_finishes_what_a_killed_one_had_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both are killed, as by a container's end: first the supervisor, then its training."""
    root, go = tmp_path / "run", tmp_path / "go"
    options = {"until": 4, "at": 3, "die": "before the manifest", "once": str(tmp_path / "died")}
    with supervise(root, **options, pause=str(go)) as running:
        assert running.stdout is not None
        told = [json.loads(running.stdout.readline()) for _ in range(3)]
        (folder,) = left_by(running.pid)
        running.kill()
        running.wait(DEADLINE_S)
        go.touch()
        told += map(json.loads, running.stdout.read().splitlines())  # until the training ends
    assert steps_of(root) == [1, 2]
    monkeypatch.setattr(run_module, "PLACE", folder.parent)
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    remove_stale_folders()
    err = capfd.readouterr().err
    assert f"{root}: absent or empty. Is its disk mounted?" in err
    assert f"{folder} stays, with an unfinished save:" in err
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    with supervise(root, **options) as running:
        out, err = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 0, err
    assert "finished the save of step 3 that the training had staged" in err
    again = [json.loads(line) for line in out.splitlines()]
    assert (again[0]["resumed"], again[0]["bits"]) == (3, told[-1]["bits"])
    assert steps_of(root) == [1, 2, 3, 4]
    assert not folder.exists()


def test_only_folders_that_are_proven_to_be_ours_and_unused_are_removed(
    place: Path, tmp_path: Path
) -> None:
    supervisor, locks = Supervisor(this_process(), 1), {}
    for name in ("stale", "alive", "used", "forked", "mine", "older"):
        (place / f"holdfast-{name}").mkdir()
        _, locks[name] = SharedFolder.make_at(place / f"holdfast-{name}", supervisor)
    (tmp_path / "elsewhere").mkdir()
    _, locks["linked"] = SharedFolder.make_at(tmp_path / "elsewhere", supervisor)
    (place / "holdfast-linked").symlink_to(tmp_path / "elsewhere")
    (place / "holdfast-used" / "notes.txt").touch()
    (place / "holdfast-mine" / SUPERVISOR).write_bytes(b"something else")
    (place / "holdfast-older" / "used").unlink()
    (place / "other").mkdir()
    forked = warm.Popen(["-c", HOLDING, place / "holdfast-forked"], stdout=subprocess.PIPE)
    assert forked.stdout is not None
    assert forked.stdout.readline() == "held\n"
    for name in locks.keys() - {"alive"}:
        os.close(locks[name])
    remove_stale_folders()
    found = {path.name: sorted(one.name for one in path.iterdir()) for path in place.iterdir()}
    assert found == {
        "holdfast-alive": [SUPERVISOR, "used"],
        "holdfast-used": ["notes.txt"],
        "holdfast-forked": [SUPERVISOR, "used"],
        "holdfast-mine": [SUPERVISOR, "used"],
        "holdfast-older": [SUPERVISOR],
        "holdfast-linked": [SUPERVISOR, "used"],
        "other": [],
    }
    with forked:
        forked.kill()
    os.close(locks["alive"])
    remove_stale_folders()
    names = {path.name for path in place.iterdir()}
    assert names.isdisjoint({"holdfast-alive", "holdfast-forked"})


def test_memory_of_a_killed_supervisor_counts_as_free(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "holdfast-stale").mkdir()
    _, lock = SharedFolder.make_at(place / "holdfast-stale", Supervisor(this_process(), 1))
    os.close(lock)
    look = os.statvfs

    def look_at_the_rest(path: Path) -> os.statvfs_result:
        assert list(place.iterdir()) == []
        return look(path)

    monkeypatch.setattr(os, "statvfs", look_at_the_rest)
    with StagingMemory("1MB"):
        assert len(list(place.iterdir())) == 1


def test_more_than_there_is_is_refused(holdfast: Any) -> None:
    result: Result = holdfast("run", "--memory", "900TB", "true")
    assert result.code == 2
    assert "bytes free" in result.err


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/job", "job/memory.max"),
        ("4:memory:/job", "memory/job/memory.limit_in_bytes"),
        ("0::/job/step", "job/memory.max"),
    ],
)
def test_more_than_a_container_may_use_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str
) -> None:
    for name, text in (("self/cgroup", f"9:pids:/\n{line}\n"), (file, "2000000\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(system, "PROC", str(tmp_path))
    monkeypatch.setattr(system, "CGROUPS", str(tmp_path))
    with pytest.raises(UsageError, match="the cgroup allows 2,000,000 bytes"):
        StagingMemory("3MB").__enter__()
    assert list(place.iterdir()) == []
    (tmp_path / file).write_text("9223372036854771712")
    assert system.memory_limit() is None


@pytest.mark.parametrize("size", ["0", "8", "8.5", "8 ", "0GB", "999kB", "1000000"])
def test_a_size_needs_a_unit_and_a_megabyte(size: str, place: Path) -> None:
    with pytest.raises(UsageError, match=f"--memory {size}: expected a unit"):
        StagingMemory(size)


def test_the_folder_is_for_its_user_only(place: Path) -> None:
    with StagingMemory("1MB") as kept:
        (folder,) = place.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert kept.environment["HOLDFAST_MEMORY"] == str(folder)
    assert list(place.iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 3])
def test_fifty_random_kills_change_no_bit(tmp_path: Path, ranks: int) -> None:
    """Killed in all moments of a step, restarted by one supervisor, and compared step by step."""
    until, dice = 150, random.Random(ranks)
    undisturbed = warm.run([TRAINED, tmp_path / "a", json.dumps({"until": until, "ranks": ranks})])
    expected = {
        (one["rank"], one["step"]): one["bits"]
        for one in map(json.loads, undisturbed.stdout.splitlines())
        if "step" in one
    }
    num_kills = 0
    options = ("--max-failures", 60)
    with supervise(tmp_path / "b", *options, until=until, ranks=ranks) as running:
        assert running.stdout is not None
        lives = 0
        for line in running.stdout:
            told = json.loads(line)
            key = (told.get("rank"), told.get("step", told.get("resumed")))
            if key in expected:
                assert told["bits"] == expected[key]
            lives += "resumed" in told and told["rank"] == 0
            if "step" in told and num_kills < 50 and dice.random() < 1 / (1 + 2 * ranks):
                time.sleep(dice.random() * 0.05)
                num_kills += _kill_children(running.pid)
        assert running.stderr is not None
        err = running.stderr.read()
    assert running.returncode == 0, err
    assert num_kills == 50
    assert err.count("finished the save") >= 1
    assert lives > 40


def _kill_children(supervisor: int) -> int:
    """Kill the training of a supervisor; returns how many processes that were."""
    text = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text()
    pids = [int(word) for word in text.split()]
    for pid in pids:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"trained.py" in command:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return 1
    return 0
