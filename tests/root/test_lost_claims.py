"""A claim that was lost takes nothing that was saved under it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import CheckpointManager, Last, load_weights
from holdfast.errors import NoUsableCheckpoint
from holdfast.format import layout
from holdfast.maintenance.delete import preview
from holdfast.maintenance.resume_plan import resume_steps
from holdfast.root.catalog import Catalog
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
    lost = [event.message for event in noted.of("warning") if "is lost" in event.message]
    assert len(lost) == 1
    assert layout.writer_key(2) in lost[0]


def resumed_step(root: Path, *sinks: Noted) -> int:
    """Where another process goes on, and that what it saves then comes after all others."""
    state = {"model": {"w": torch.zeros(4)}}
    with CheckpointManager(root, state, sinks=sinks, takeover=True) as manager:
        resumed = manager.resume()
        assert resumed is not None
        assert state["model"]["w"].tolist() == [resumed.step] * 4
        last = max(name.order for name in Catalog(LocalStore(root)).attempts())
        manager.save(9).wait()
    orders = [name.order for name in Catalog(LocalStore(root)).attempts()]
    assert len(orders) == len(set(orders))
    assert max(orders) > last
    return resumed.step


def test_a_claim_counts_of_which_nothing_is_left_but_what_latest_names(tmp_path: Path) -> None:
    """Line 23: with the claim its heartbeat or close is lost, too."""
    saved(tmp_path, 1, 2)
    saved(tmp_path, 3, 4)
    for path in (tmp_path / layout.WRITERS).glob("00000002.*"):
        path.unlink()
    assert resumed_step(tmp_path) == 4


def went_back(root: Path, step: int, *, then_saves: int | None = None) -> None:
    """A process that goes back to a step, and saves once or not at all."""
    state = {"model": {"w": torch.zeros(4)}}
    with CheckpointManager(root, state, takeover=True) as manager:
        manager.resume(f"step={step}")
        if then_saves is not None:
            state["model"]["w"].fill_(then_saves)
            manager.save(then_saves).wait()


def test_what_was_saved_tells_where_its_lost_claim_had_gone_back_to(tmp_path: Path) -> None:
    """Line 23: the newest is damaged; before it comes what it went on from, not what was left
    behind."""
    saved(tmp_path, 1, 2, 3)
    went_back(tmp_path, 1, then_saves=4)
    (tmp_path / layout.writer_key(2)).unlink()
    [newest] = [*tmp_path.glob("step-00000004.*/model-*.safetensors")]
    newest.unlink()
    assert resumed_step(tmp_path) == 1


def test_a_lost_checkpoint_that_the_run_went_back_to_is_an_error_with_the_choices(
    tmp_path: Path,
) -> None:
    """What the person has left behind on purpose is not taken in its place."""
    saved(tmp_path, 1, 2, 3)
    went_back(tmp_path, 2)
    [folder] = tmp_path.glob("step-00000002.*")
    folder.rename(tmp_path.parent / folder.name)
    store = LocalStore(tmp_path)
    for act in (
        lambda: resumed_step(tmp_path),
        lambda: load_weights(tmp_path),
        lambda: resume_steps(store),
        lambda: preview(store, Last(1)),
    ):
        with pytest.raises(NoUsableCheckpoint, match=r"step=3 .*left behind\n.*step=1 "):
            act()
    assert [entry.step for entry in Catalog(store).checkpoints()] == [3, 1]
    with CheckpointManager(tmp_path, {"model": {"w": torch.zeros(4)}}) as manager:
        found = manager.resume("step=1")
    assert found is not None
    assert resumed_step(tmp_path) == 1


def test_a_run_that_went_back_finds_the_checkpoint_under_another_label(tmp_path: Path) -> None:
    """A person has renamed the folder, which keeps its number: it is that checkpoint still."""
    saved(tmp_path, 1, 2, 3)
    went_back(tmp_path, 2)
    [folder] = tmp_path.glob("step-00000002.*")
    folder.rename(tmp_path / folder.name.replace("step-00000002", "before-the-spike"))
    assert resumed_step(tmp_path) == 2
