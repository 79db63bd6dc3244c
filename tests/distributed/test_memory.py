"""Decision 0069 with the real processes of torchrun: a save of all ranks is finished."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from children import environment
from holdfast.maintenance.verify import verify
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

JOB = Path(__file__).with_name("staging_job.py")
SUPERVISED = [sys.executable, "-m", "holdfast.cli", "run", "--memory", "50MB", "--backoff", "0"]
NUM_KILLS = 20


def job(num_ranks: int, root: Path, until: int, dies: Path) -> list[str]:
    """The command of a training of several ranks."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(num_ranks), str(JOB), str(root), str(until)]
    return [*words, str(dies)]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_ranks_of_torchrun_resume_from_what_they_had_staged(tmp_path: Path) -> None:
    root = tmp_path / "run"
    done = subprocess.run(
        [*SUPERVISED, "--root", str(root), "--", *job(2, root, 4, tmp_path / "died")],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "finished the save of step 3 that the training had staged" in done.stderr
    told = told_by(done.stdout.splitlines())
    for rank in ("0", "1"):
        assert told[rank, "resumed", "3"] == told[rank, "trained", "3"]
    catalog = Catalog(LocalStore(root))
    entries = [entry for name in catalog.attempts() if (entry := catalog.entry(name))]
    assert sorted(entry.step for entry in entries) == [1, 2, 3, 4]
    assert all(verify(catalog.store, entry.folder).ok for entry in entries)
    assert {entry.manifest.world_size for entry in entries} == {2}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_kills_of_one_rank_or_of_all_change_no_bit(tmp_path: Path) -> None:
    """Three real processes, killed in all moments of a step, and compared with undisturbed ones."""
    num_ranks, until, dice, never = 3, 80, random.Random(0), tmp_path / "died"
    never.touch()  # no rank ends itself
    undisturbed = subprocess.run(
        job(num_ranks, tmp_path / "a", until, never),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
        env=environment(),
    )
    expected = told_by(undisturbed.stdout.splitlines())
    root, kills, lines = tmp_path / "b", list[int](), list[str]()
    words = [*SUPERVISED, "--max-failures", "10", "--root", str(root), "--"]
    with (tmp_path / "errors").open("w+") as errors:
        with subprocess.Popen(
            [*words, *job(num_ranks, root, until, never)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
        ) as running:
            assert running.stdout is not None
            for line in running.stdout:
                lines.append(line)
                if " trained " in line and len(kills) < NUM_KILLS and dice.random() < 0.2:
                    time.sleep(dice.random() * 0.05)
                    if killed := kill_ranks(root, 1 if dice.random() < 0.4 else num_ranks):
                        kills.append(killed)
        errors.seek(0)
        said = errors.read()
    assert running.returncode == 0, said
    assert {1, num_ranks} <= {*kills}
    told = told_by(lines)
    for rank, word, step in told:
        assert told[rank, word, step] == expected[rank, "trained", step]
    assert {step for _, word, step in told if word == "trained"} == set(
        map(str, range(1, until + 1))
    )
    assert said.count("finished the save") >= 1, said
    catalog = Catalog(LocalStore(root))
    assert all(
        verify(catalog.store, name).ok
        for name in map(str, catalog.attempts())
        if catalog.read(name) is not None
    )


def told_by(lines: Sequence[str]) -> dict[tuple[str, ...], str]:
    """The bits by rank, word and step; if a step was made twice, both have the same."""
    told: dict[tuple[str, ...], str] = {}
    for line in lines:
        *key, bits = line.split()[1:]
        assert told.setdefault(tuple(key), bits) == bits, line
    return told


def kill_ranks(root: Path, number: int) -> int:
    """Kill so many ranks of a training in a root; returns how many."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if {str(JOB), str(root)} <= {*words} and "-m" not in words:
                found.append(int(path.parent.name))
    random.Random(len(found)).shuffle(found)
    for pid in found[:number]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found[:number])
