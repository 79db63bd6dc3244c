"""A claim that was lost takes nothing that was saved under it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import CheckpointManager
from holdfast.engine.roots.catalog import Catalog
from holdfast.format import layout
from holdfast.store.local import LocalStore
from holdfast.testing.faulty import FaultyStore
from tiers import Noted


def saved(root: Path, *steps: int, is_closed: bool = True) -> None:
    """One process that saves these steps, and ends cleanly or is killed."""
    store = FaultyStore(LocalStore(root))
    with CheckpointManager(store, {"model": {"w": torch.zeros(4)}}, takeover=True) as manager:
        manager.resume()
        for step in steps:
            manager.state["model"]["w"].fill_(step)
            manager.save(step).wait()
        manager.wait()
        alive = {path.name: path.read_bytes() for path in (root / layout.WRITERS).glob("*.alive.*")}
    if not is_closed:
        for name, data in alive.items():
            (root / layout.WRITERS / name).write_bytes(data)
        for path in (root / layout.WRITERS).glob(f"{max(alive)[:8]}.closed.json"):
            path.unlink()


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_newest_claim_that_was_lost_counts_all_the_same(
    tmp_path: Path, is_closed: bool
) -> None:
    """The run goes on from what was saved under it, and gives no number twice; it is told."""
    saved(tmp_path, 1, 2)
    saved(tmp_path, 3, 4, is_closed=is_closed)
    (tmp_path / layout.writer_key(2)).unlink()
    noted = Noted()
    state = {"model": {"w": torch.zeros(4)}}
    with CheckpointManager(tmp_path, state, sinks=(noted,)) as manager:
        resumed = manager.resume()
        assert resumed is not None
        assert resumed.step == 4
        manager.save(5).wait()
    orders = [name.order for name in Catalog(LocalStore(tmp_path)).attempts()]
    assert len(orders) == len(set(orders)) == 5
    assert max(orders) == (3, 1)
    lost = [event.message for event in noted.of("warning") if "was lost" in event.message]
    assert len(lost) == 1
    assert layout.writer_key(2) in lost[0]
