"""How checkpoints, saves and managers show themselves: on one line each, and as a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast import CheckpointManager, MemoryStore, SideSaver, StateHooks
from holdfast.errors import SaveFailed, SaveSkipped
from holdfast.format.manifest import Timestamp
from holdfast.results import Checkpoint, CheckpointList, SavePhase
from holdfast.testing import Fault, FaultyStore

STATE = {"model": {"w": torch.zeros(4)}, "optimizer": {}}
PLAIN = Checkpoint(
    root="runs/gpt",
    folder="step-00000500.0001-000001-01234567",
    step=500,
    timestamp=Timestamp(step=500),
    save_id="0123456789abcdef0123456789abcdef",
    metrics={"loss": 0.25},
    tags=(),
    pinned=False,
    save_class="permanent",
    reason="manual",
    created="2026-11-20T14:02:00Z",
    nbytes=1234567,
)


def test_a_checkpoint_says_its_step_place_size_and_class() -> None:
    assert repr(PLAIN) == (
        "<Checkpoint of step 500: 'runs/gpt/step-00000500.0001-000001-01234567', "
        "1,234,567 bytes, permanent>"
    )


def test_a_checkpoint_says_what_sets_it_apart() -> None:
    special = replace(
        PLAIN,
        save_class="ephemeral",
        pinned=True,
        tags=("good",),
        savers=("weights",),
        left_out=("optimizer",),
        unhealthy=("loss is nan",),
    )
    text = ", ephemeral, of weights, without optimizer, pinned, unhealthy, #good>"
    assert repr(special).endswith(text)


def test_no_repr_takes_a_second_line() -> None:
    odd = replace(PLAIN, root="runs\nfirst")
    assert "\n" not in repr(odd) + repr(CheckpointList([odd]))


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "<no checkpoints>"),
        ([500], "<1 checkpoint of 'runs/gpt', newest first: step 500>"),
        ([3, 2, 1], "<3 checkpoints of 'runs/gpt', newest first: step 3, 2, 1>"),
        (
            [*range(900, 0, -1)],
            "<900 checkpoints of 'runs/gpt', newest first: step 900, 899, 898, 897, 896, …, 1>",
        ),
    ],
)
def test_a_list_says_how_many_there_are_and_their_steps(steps: list[int], text: str) -> None:
    assert repr(CheckpointList(replace(PLAIN, step=step) for step in steps)) == text


def test_a_list_is_a_table_in_a_notebook_and_a_tuple_elsewhere(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, STATE, sinks=()) as manager:
        assert manager.list() == ()
        manager.save(1, metrics={"a<b": 0.5}, tags=["first"])
        manager.save(2)
        manager.wait()
        found = manager.list()
    assert isinstance(found, tuple)
    assert [checkpoint.step for checkpoint in found] == [2, 1]
    assert found == tuple(found)
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["step", "folder", "bytes"]
    assert [line.split()[0] for line in lines[1:]] == ["2", "1"]
    assert found[0]._repr_html_().count("<tr>") == 2
    table = found._repr_html_()
    assert table.count("<tr>") == 3
    assert "<th>step</th><th>folder</th>" in table
    assert f"<tr><td>1</td><td>{found[1].folder}</td><td>{found[1].nbytes:,}</td>" in table
    assert "<td>a&lt;b 0.5</td><td>permanent, #first</td>" in table


def test_what_a_table_shows_cannot_be_markup() -> None:
    odd = replace(PLAIN, folder="<script>", tags=("<b>",), metrics={"<i>": 1.0})
    table = CheckpointList([odd])._repr_html_()
    assert "<script>" not in table
    assert "<b>" not in table
    assert "<i>" not in table


def test_a_save_says_how_far_it_is() -> None:
    hangs = Fault(kind="hang", op="put", key="*/manifest.json")
    store = FaultyStore(MemoryStore(), [hangs])
    with CheckpointManager(store, STATE, sinks=()) as manager:
        pending = manager.save(7)
        pending.staged.result(60)
        assert repr(pending).startswith("<PendingSave of step 7: ")
        assert repr(pending).endswith(", copied>")
        assert repr(pending) in repr(manager)
        hangs.release.set()
        folder = pending.wait().folder
        assert repr(pending) == f"<PendingSave of step 7: committed as {folder}>"
        assert pending.phase is SavePhase.HOUSEKEEPING


def test_a_save_that_failed_or_was_skipped_says_so() -> None:
    def veto(now: Timestamp, metrics: object) -> None:
        if now.step == 2:
            raise SaveSkipped("not now")

    fails = Fault(kind="fail", op="put", key="step-00000001*/manifest.json")
    store = FaultyStore(MemoryStore(), [fails])
    hooks = StateHooks(before_save=veto)
    with CheckpointManager(store, STATE, hooks=hooks, on_failure="warn", sinks=()) as manager:
        failed = manager.save(1)
        with pytest.raises(SaveFailed):
            failed.wait()
        assert repr(failed) == "<PendingSave of step 1: failed with SaveFailed>"
        assert failed.phase is SavePhase.COMMITTING
        assert repr(failed) in repr(manager)
        assert repr(manager.save(2)) == "<PendingSave of step 2: skipped>"


def test_a_manager_says_its_root_whether_it_owns_the_run_and_where_it_stands(
    tmp_path: Path,
) -> None:
    savers = [SideSaver("weights", every="2step", components=["model"])]
    manager = CheckpointManager(tmp_path, STATE, savers=savers, sinks=())
    begin = f"<CheckpointManager of {manager.store.url!r}: "
    assert repr(manager) == f"{begin}owns nothing>"
    manager.save(3, wait=True)
    manager.wait()
    assert repr(manager) == f"{begin}owns the run, at step 3>"
    manager.close()
    assert repr(manager) == f"{begin}closed, at step 3>"
