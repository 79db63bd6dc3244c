"""Decision 0069: a restart reads blocks from shared memory if they are right, else from storage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import warm
from holdfast.ownership.process import this_process
from holdfast.staging.shared import SharedFolder, Supervisor
from holdfast.store.local import LocalStore
from marks import full

TRAINED = Path(__file__).parent.parent / "saving" / "trained.py"
LAST = 3


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SharedFolder]:
    """The folder of a supervisor, which is this process."""
    (tmp_path / "shared").mkdir()
    supervisor = Supervisor(this_process(), 100 << 20)
    folder, lock = SharedFolder.make_at(tmp_path / "shared", supervisor)
    yield folder
    os.close(lock)


def train(folder: SharedFolder | None, root: Path, **options: Any) -> list[dict[str, Any]]:
    """Run a training, and return the facts that it tells."""
    environment = {} if folder is None else {"HOLDFAST_MEMORY": str(folder.path)}
    done = warm.run([TRAINED, root, json.dumps(options)], env=environment)
    assert done.returncode == (-9 if "die" in options else 0), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def flip_bits(path: Path) -> None:
    """Flip one bit in each MiB of a file."""
    path.chmod(0o600)
    with path.open("r+b") as file:
        for place in range(100_000, path.stat().st_size, 1 << 20):
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), place)


def damage(root: Path, folder: SharedFolder, where: Literal["storage", "memory", "both"]) -> None:
    """Flip bits of the newest checkpoint: of its tensor files, or of the memory that has them."""
    newest = LocalStore(root).pointed("latest")
    assert newest is not None
    for path in (root / newest).glob("model-*"):
        if where in ("storage", "both"):
            flip_bits(path)
    for path in folder.path.glob("*/model-*.arena"):
        if where in ("memory", "both"):
            flip_bits(path)


WAYS: list[dict[str, Any]] = [
    {},
    {"ranks": 3},
    {"manager": {"compress": "zstd"}},
    {"manager": {"memory_budget": "64MiB"}},
]


# Not of several ranks: others may be staging the next step when one dies.
@pytest.mark.parametrize(
    ("way", "dies"),
    [
        (WAYS[1], False),
        (WAYS[2], False),
        *(
            pytest.param(WAYS[at], dies, marks=pytest.mark.full)
            for at, dies in ((0, False), (0, True), (2, True), (3, False), (3, True))
        ),
    ],
)
def test_the_newest_state_is_read_from_memory(
    folder: SharedFolder, tmp_path: Path, way: dict[str, Any], dies: bool
) -> None:
    """The files on the disk are damaged, which nobody notices: none of those blocks is read."""
    ends = {"until": 9, "at": LAST + 1, "die": "before staging"} if dies else {}
    told = train(folder, tmp_path / "run", **{"until": LAST, **ends, **way})
    damage(tmp_path / "run", folder, "storage")
    again = train(folder, tmp_path / "run", until=LAST + 1, **way)
    steps = [(one["rank"], one["bits"]) for one in told if one.get("step") == LAST]
    assert [one["rejected"] for one in again if "rejected" in one] == []
    assert sorted((one["rank"], one["bits"]) for one in again if one.get("resumed") == LAST) == (
        sorted(steps)
    )


def test_other_numbers_of_ranks_read_it_too(folder: SharedFolder, tmp_path: Path) -> None:
    told = train(folder, tmp_path / "run", until=LAST, ranks=3)
    damage(tmp_path / "run", folder, "storage")
    again = train(folder, tmp_path / "run", until=LAST + 1)
    assert again[0]["resumed"] == LAST
    assert again[0]["bits"] == told[-4]["bits"]


@pytest.mark.parametrize("way", [*WAYS[1:3], *full(WAYS[0], WAYS[3])], ids=json.dumps)
def test_flipped_bits_in_memory_are_found_and_the_storage_is_read(
    folder: SharedFolder, tmp_path: Path, way: dict[str, Any]
) -> None:
    told = train(folder, tmp_path / "run", until=LAST, **way)
    damage(tmp_path / "run", folder, "memory")
    again = train(folder, tmp_path / "run", until=LAST + 1, **way)
    warned = [one["warning"] for one in again if "is not what was staged" in one.get("warning", "")]
    assert warned
    resumed = [one["bits"] for one in again if one.get("resumed") == LAST]
    assert {*resumed} == {one["bits"] for one in told if one.get("step") == LAST}


def test_damage_in_both_places_condemns_the_checkpoint(
    folder: SharedFolder, tmp_path: Path
) -> None:
    told = train(folder, tmp_path / "run", until=LAST)
    damage(tmp_path / "run", folder, "both")
    again = train(folder, tmp_path / "run", until=LAST)
    (resumed,) = [one for one in again if "resumed" in one]
    before = next(one for one in told if one.get("step") == LAST - 1)
    assert (resumed["resumed"], resumed["bits"]) == (LAST - 1, before["bits"])


def test_a_run_that_is_not_below_the_supervisor_reads_the_storage(
    folder: SharedFolder, tmp_path: Path
) -> None:
    train(folder, tmp_path / "run", until=LAST)
    damage(tmp_path / "run", folder, "storage")
    again = train(None, tmp_path / "run", until=LAST)
    assert [one["resumed"] for one in again if "resumed" in one] == [LAST - 1]


def test_memory_of_a_killed_staging_is_not_used(folder: SharedFolder, tmp_path: Path) -> None:
    """And that is no damage to warn of."""
    told = train(folder, tmp_path / "run", until=9, at=LAST + 1, die="while staging")
    again = train(folder, tmp_path / "run", until=LAST)
    assert [one for one in again if "staged" in one.get("warning", "")] == []
    (resumed,) = [one for one in again if "resumed" in one]
    assert resumed["bits"] == next(one["bits"] for one in told if one.get("step") == LAST)


def test_memory_of_ended_managers_is_freed_for_the_next(
    folder: SharedFolder, tmp_path: Path
) -> None:
    for until in range(1, 4):
        train(folder, tmp_path / "run", until=until)
        assert len(folder.staging_folders()) == 1
