"""Hosts with a disk each, here folders: uploads and retention, through kills of any rank.

After each kill the remote tier has no manifest without its files. The next life continues the
uploads, and brings all roots to the same checkpoints.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.jobs import make
from distributed.run import run_ranks
from holdfast import CheckpointManager, HostTiers, Last
from holdfast.errors import HoldfastError
from holdfast.events import Event
from holdfast.maintenance.verify import verify, verify_root
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from marks import full

NUM_STEPS = 3
REST = (
    *("2 committed", "0 sending", "0 uploaded", "0 retracted"),
    *("0 save_started", "2 save_started", "1 committed", "3 committed"),
)
"""Further ranks that are killed, and events at which they are."""


class KillingStore(LocalStore):
    """Remote tier of a rank that is killed in the middle of an upload of the second step."""

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.startswith("step-00000002") and not key.endswith("manifest.json"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(key, data, if_absent=if_absent)


def state_of(rank: int) -> dict[str, Any]:
    """Replicas, and generators of each rank, so that each rank writes files."""
    return {**make("plain", seed=1).state, "noise": torch.Generator().manual_seed(rank)}


def root_of(folder: Path, hosts: str, rank: int, remote: LocalStore | None = None) -> HostTiers:
    """The root of a rank whose host is a folder."""
    there = remote or LocalStore(folder / "remote")
    return HostTiers(folder / hosts[rank], there, keep_local=Last(2), close_timeout_s=20.0)


def work_until_killed(folder: Path, hosts: str, victim: int, kind: str, rank: int) -> None:
    """Save, until this rank or another one is killed."""

    def kill(event: Event) -> None:
        if rank == victim and event.kind == kind and (event.step or 0) >= 2:
            os.kill(os.getpid(), signal.SIGKILL)

    is_sending = rank == victim and kind == "sending"
    remote = KillingStore(folder / "remote") if is_sending else None
    root = root_of(folder, hosts, rank, remote)
    with (
        suppress(HoldfastError),
        CheckpointManager(
            root, state_of(rank), sinks=(kill,), preflight=False, save_timeout_s=60.0
        ) as manager,
    ):
        for step in range(1, NUM_STEPS + 2):
            manager.save(step, wait=True)
        manager.wait()


def continue_run(folder: Path, hosts: str, rank: int) -> int:
    """Resume, wait for the uploads of the life before, and save once more."""
    noted: list[Event] = []
    root = root_of(folder, hosts, rank)
    with CheckpointManager(root, state_of(rank), sinks=(noted.append,), preflight=False) as manager:
        found = manager.resume()
        assert found is not None
        manager.wait()
        for step in range(found.step + 1, found.step + 1 + NUM_STEPS):
            manager.wait()  # so that the next save may delete what was sent
            manager.save(step, wait=True)
        manager.wait()
    bad = [event.message for event in noted if event.kind in {"upload_failed", "save_failed"}]
    assert not bad, bad
    return found.step


@pytest.mark.parametrize("point", ["2 sending", *full("0 committed", *REST)])
def test_a_killed_rank_leaves_nothing_that_the_next_life_does_not_complete(
    point: str, tmp_path: Path
) -> None:
    hosts = "aabb"
    victim, kind = int(point.split()[0]), point.split()[1]
    run_ranks(len(hosts), partial(work_until_killed, tmp_path, hosts, victim, kind), lost=(victim,))
    remote = LocalStore(tmp_path / "remote")
    assert verify_root(remote).ok, "no manifest is there without its files"
    steps = {*run_ranks(len(hosts), partial(continue_run, tmp_path, hosts))}
    assert len(steps) == 1, "all ranks resume from the same step"
    last = next(iter(steps)) or 0
    assert last >= 1
    report = verify_root(remote)
    assert report.ok, report
    there = [entry.step for entry in Catalog(remote).checkpoints()]
    newest = last + NUM_STEPS
    assert there[: NUM_STEPS + 1] == [*range(newest, last - 1, -1)]
    for host in sorted({*hosts}):
        store = LocalStore(tmp_path / host)
        entries = Catalog(store).checkpoints()
        assert [entry.step for entry in entries] == [newest, newest - 1]
        for entry in entries:
            found = verify(store, entry.folder)
            assert found.ok, found
