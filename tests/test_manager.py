"""The manager as a training loop sees it, on a real folder."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warm
from holdfast import SideSaver, Tiered, errors
from holdfast.checkpoints import StateHooks
from holdfast.format import layout
from holdfast.format.records import Retired
from holdfast.manager import CheckpointManager
from holdfast.ownership import claim
from holdfast.ownership.annotations import reject
from holdfast.policy.rule import Rule
from holdfast.policy.rules import Best, EveryNth, Last
from holdfast.policy.savers import SavePolicy
from holdfast.root.catalog import Catalog
from holdfast.saving import save as save_module
from holdfast.saving import saver
from holdfast.staging.arena import Arena
from holdfast.staging.in_memory import ImageTransfer
from holdfast.staging.interfaces import Staged
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import Fault, FaultyStore
from holdfast.weights import load_weights
from runs import Recorder, new_run


def folders(root: Path) -> list[str]:
    """Names of the attempts in a root."""
    others = {"writers", "readers", "history", "latest"}
    return sorted(path.name for path in root.iterdir() if path.name not in others)


def test_resume_of_an_empty_root_is_a_fresh_start(tmp_path: Path) -> None:
    with new_run().manager(tmp_path / "run") as manager:
        assert manager.resume() is None


def test_a_resumed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    """Invariant 7."""
    straight = new_run()
    straight.train(10)

    first = new_run()
    with first.manager(tmp_path) as manager:
        first.train(6)
        manager.save(6).wait()
        first.train(2)  # lost with the process

    second = new_run(seed=1)
    with second.manager(tmp_path) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 6
        assert found.notes == ()
        second.train(4)
    assert second.bits() == straight.bits()
    assert second.counters == {"step": 10}


def test_an_async_save_holds_the_state_of_the_call(tmp_path: Path) -> None:
    """R14: what happens after save() returned is not in the checkpoint."""
    run = new_run()
    run.train(3)
    expected = run.bits()
    with run.manager(tmp_path) as manager:
        manager.save(3)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.fill_(7.0)
        manager.wait()
    other = new_run(seed=5)
    with other.manager(tmp_path) as manager:
        manager.resume()
    assert other.bits() == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_an_awaited_save_is_committed_and_holds_the_state_of_the_call(
    tmp_path: Path, overlap: bool
) -> None:
    """Invariant 3: blocks are written while others are still being copied."""
    state = {"large": torch.randn(12, 1 << 20), "small": torch.arange(5)}
    with CheckpointManager(tmp_path, {"model": state}, overlap=overlap) as manager:
        for step in range(1, 4):
            state["large"].add_(step)
            pending = manager.save(step, wait=True)
            assert pending.done()
            assert [found.step for found in manager.list()] == list(range(1, step + 1))[::-1]
        expected = state["large"].clone()
        state["large"].zero_()
        manager.load("latest")
    assert torch.equal(state["large"], expected)


def test_an_awaited_save_raises_its_own_failure_once(tmp_path: Path) -> None:
    state = {"x": torch.zeros(3)}
    store = FaultyStore(LocalStore(tmp_path), [Fault(kind="fail", op="put", key="*/index.json")])
    with CheckpointManager(store, {"model": state}, preflight=False) as manager:
        with pytest.raises(errors.SaveFailed, match="step 1"):
            manager.save(1, wait=True)
        assert manager.save(2, wait=True).wait().step == 2


def test_an_awaited_save_that_a_hook_skips_is_no_error(tmp_path: Path) -> None:
    def skip(*_: object) -> None:
        raise errors.SaveSkipped("not now")

    hooks = StateHooks(before_save=skip)
    with CheckpointManager(tmp_path, {"model": {"x": torch.zeros(3)}}, hooks=hooks) as manager:
        assert isinstance(manager.save(1, wait=True).failure(), errors.SaveSkipped)


def test_maybe_save_follows_every(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, every="3step") as manager:
        saved = []
        for step in range(1, 11):
            run.train()
            if manager.maybe_save(step) is not None:
                saved.append(step)
        manager.wait()
        assert saved == [3, 6, 9]
        assert [checkpoint.step for checkpoint in manager.list()] == [9, 6, 3]


def test_retention_keeps_what_the_rule_says_and_removes_folders_whole(tmp_path: Path) -> None:
    """D1, D43, D49."""
    run = new_run()
    with run.manager(tmp_path, keep=Last(2) | Best("loss")) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
            run.train()
            manager.save(step, metrics={"loss": loss})
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [5, 4, 2]
    assert len(folders(tmp_path)) == 3
    assert (tmp_path / "latest").resolve().name.startswith("step-00000005")


@pytest.mark.parametrize("rule", [Best("los", n=3, mode="min"), EveryNth("1ep")], ids=str)
def test_a_rule_that_needs_what_is_not_recorded_deletes_nothing_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rule: Rule
) -> None:
    """A mistyped metric must not delete the best checkpoints without a word."""
    with (
        caplog.at_level(logging.WARNING, logger="holdfast"),
        CheckpointManager(tmp_path, {"step": {"done": 1}}, keep=rule) as manager,
    ):
        for step in (1, 2, 3):
            manager.save(step, metrics={"loss": 0.1})
            manager.wait()
            is_early = step < 3 and isinstance(rule, Best)  # it may be measured soon
            assert len(caplog.messages) == (not is_early)
        (warned,) = caplog.messages
        assert str(rule) in warned
        for step in range(4, 6):
            manager.save(step, metrics={"loss": 0.1 * step, "accuracy": 0.5})
        manager.wait()
        assert [c.step for c in manager.list()] == [5, 4, 3, 2, 1]
    assert caplog.messages == [warned]


def test_deletions_are_told_with_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO: what is gone, and by which rule."""
    rule = Last(1) | Last(2).then_drop("optimizer")
    with (
        caplog.at_level(logging.INFO, logger="holdfast"),
        new_run().manager(tmp_path, keep=rule) as manager,
    ):
        for step in (1, 2, 3):
            manager.save(step).wait()
    told = [text for text in caplog.messages if text.startswith(("deleted", "dropped"))]
    assert [text.partition("step-")[0] for text in told] == [
        "dropped optimizer of ",
        "deleted ",
        "dropped optimizer of ",
    ]
    assert f"not kept by: {rule}" in told[1]


def test_pinned_and_tagged_ones_stay(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, keep=Last(1)) as manager:
        manager.save(1, tags=["start"]).wait()
        run.train()
        manager.save(2).wait()
        manager.pin("step=2")
        run.train(2)
        manager.save(4)
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [4, 2, 1]
        manager.unpin("step=2")
        run.train()
        manager.save(5)
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [5, 1]
        assert manager.list()[-1].tags == ("start",)


def test_a_rolled_back_run_resumes_from_its_own_branch(tmp_path: Path) -> None:
    """D30: not from the abandoned step 1000."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        for step in (500, 1000):
            run.train()
            manager.save(step).wait()
    with run.manager(tmp_path) as manager:
        found = manager.resume("step=500")
        assert found is not None
        run.train(3)
        manager.save(800).wait()
    with run.manager(tmp_path) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 800
        assert manager.load("step=500").step == 500
        with pytest.raises(errors.NoCheckpoint, match=r"step-00001000"):
            manager.load("step=1000")


@pytest.mark.parametrize("which", ["step=2", 2, "good", "ahead"])
def test_what_a_rollback_left_behind_is_named_when_it_is_asked_for(
    tmp_path: Path, which: str | int
) -> None:
    """A step, a tag or a label that only a branch has which the run has left: the error says so,
    and by which name it is still there."""
    run, label = new_run(), {1: "begin", 2: "ahead"}
    with run.manager(tmp_path, label=lambda now: label.get(now.step, "x")) as manager:
        manager.save(1, wait=True)
        folder = manager.save(2, tags=["good"]).wait().folder
    with run.manager(tmp_path) as manager:
        manager.resume("step=1")
        with pytest.raises(errors.NoCheckpoint, match=f"{folder} .* left behind .* rollback"):
            manager.load(which)
        assert manager.load(folder).step == 2


def test_best_is_a_tag_if_nothing_says_which_metric_is_meant(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1, metrics={"accuracy": 1.0}, wait=True)
        with pytest.raises(errors.NoCheckpoint, match="holdfast tag ROOT@step=N best"):
            manager.load("best")
        manager.tag("step=1", "best")
        assert manager.load("best").step == 1


def test_a_rollback_survives_a_kill_before_its_first_commit(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        for step in (500, 1000):
            run.train()
            manager.save(step).wait()
    with run.manager(tmp_path) as manager:
        manager.resume("step=500")
    with run.manager(tmp_path) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 500


def test_a_rerun_of_a_finished_run_writes_nothing(tmp_path: Path) -> None:
    """D25."""
    run = new_run()
    run.train(4)
    with run.manager(tmp_path) as manager:
        manager.save(4, tags=["final"]).wait()
    before = folders(tmp_path)
    again = new_run(seed=2)
    with again.manager(tmp_path) as manager:
        found = manager.resume()
        saved = manager.save(4, tags=["final"]).wait()
        assert found is not None
        assert saved.folder == found.folder
    assert folders(tmp_path) == before


def test_a_changed_state_at_the_same_step_is_saved_beside_the_old_one(tmp_path: Path) -> None:
    """D6, D54: identity is the save, not the step or the name."""
    run = new_run()
    run.train()  # so that both have the same files, and only bytes differ
    with run.manager(tmp_path) as manager:
        one = manager.save(4).wait()
        run.train()
        two = manager.save(4).wait()
        assert one.folder != two.folder
        assert [checkpoint.folder for checkpoint in manager.list()] == [two.folder, one.folder]
        assert manager.load("step=4").folder == two.folder


def test_saving_over_an_old_run_without_resume_is_refused(tmp_path: Path) -> None:
    """Retention would otherwise eat the old run's checkpoints."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(4).wait()
    with run.manager(tmp_path) as manager, pytest.raises(errors.UsageError, match="resume"):
        manager.save(1)


@pytest.mark.parametrize(
    "claims", [lambda m: m.resume(), lambda m: m.save(2)], ids=["resume", "save"]
)
@pytest.mark.usefixtures("refused_at_once")
def test_a_second_manager_of_a_run_is_refused_while_the_first_is_open(
    tmp_path: Path, claims: Callable[[CheckpointManager], Any]
) -> None:
    """Invariant 11: two loops in one process would save into one run. The error says how to go on,
    and closing the first one is a way."""
    first, second = new_run(), new_run()
    one = first.manager(tmp_path)
    one.resume()
    with second.manager(tmp_path) as two:
        with pytest.raises(errors.OwnedElsewhere, match=r"this process.*Close .* takeover=True"):
            claims(two)
        one.save(1).wait()
        one.resume()  # its own claim holds it back from nothing
        one.close()
        assert two.resume() is not None
        two.save(2).wait()


def test_a_second_manager_of_the_same_process_may_take_over(tmp_path: Path) -> None:
    """Invariant 11: the first is fenced off."""
    first, second = new_run(), new_run()
    one = first.manager(tmp_path)
    one.save(1).wait()
    two = second.manager(tmp_path, takeover=True)
    assert two.resume() is not None
    first.train()
    with pytest.raises(errors.Superseded) as caught:
        one.save(2).wait()
    assert not caught.value.committed
    second.train()
    two.save(2).wait()
    one.close()
    two.close()


def test_a_manager_that_was_dropped_holds_no_other_back(tmp_path: Path) -> None:
    """Invariant 11: as in a notebook whose cell is run again, though the manager is in cycles."""
    run = new_run()
    manager = run.manager(tmp_path)
    manager.save(1)
    manager.wait()
    is_gone = threading.Event()
    weakref.finalize(manager, is_gone.set)
    manager = run.manager(tmp_path)
    for _ in range(60):  # its threads may be about to let it go
        gc.collect()
        if is_gone.wait(1):
            break
    assert manager.resume() is not None
    manager.close()


def test_a_background_failure_is_raised_at_the_next_call_and_only_once(tmp_path: Path) -> None:
    """R14, D37."""
    run = new_run()
    manager = run.manager(tmp_path)
    manager.save(1).wait()
    os.rename(tmp_path, f"{tmp_path}-gone")
    manager.save(2)
    with pytest.raises(errors.SaveFailed, match="step 2"):
        manager.save(3)
    os.rename(f"{tmp_path}-gone", tmp_path)
    run.train()
    manager.save(3).wait()
    manager.close()


def test_close_raises_a_failure_that_nobody_fetched(tmp_path: Path) -> None:
    """R14, D39."""
    run = new_run()
    manager = run.manager(tmp_path)
    manager.save(1).wait()
    os.rename(tmp_path, f"{tmp_path}-gone")
    manager.save(2)
    with pytest.raises(errors.SaveFailed):
        manager.close()


def fail_with_a_bad_save_under_way(root: Path, recorder: Recorder) -> None:
    with new_run().manager(root, sinks=[recorder]) as manager:
        manager.save(1).wait()
        os.rename(root, f"{root}-gone")
        manager.save(2)
        raise ZeroDivisionError


def test_the_loop_own_error_is_not_masked_by_close(tmp_path: Path, recorder: Recorder) -> None:
    """D46."""
    with pytest.raises(ZeroDivisionError):
        fail_with_a_bad_save_under_way(tmp_path, recorder)
    assert any("while closing" in event.message for event in recorder.of("save_failed"))


def test_a_closed_manager_refuses_work(tmp_path: Path) -> None:
    manager = new_run().manager(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(errors.ManagerUnusable):
        manager.save(1)


def test_nothing_is_written_beside_a_copy_that_training_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the memory's bandwidth, and cores; the copy comes first."""
    manager = new_run().manager(tmp_path)
    copy = ImageTransfer.run_copies

    def copied(self: ImageTransfer, *args: Any) -> None:
        # The background does one thing after the other, so it has nothing else to do.
        manager._session.saver._background.submit(int).result(60)
        copy(self, *args)

    monkeypatch.setattr(ImageTransfer, "run_copies", copied)
    manager.save(1).wait()
    manager.close()
    assert folders(tmp_path) == [found.folder for found in manager.list()]


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_that_fails_is_told_at_once_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Whether it is written beside the copy or after it."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
        with monkeypatch.context() as patch:
            patch.setattr(ImageTransfer, "run_now", _fail)
            with pytest.raises(MemoryError):
                manager.save(2, wait=waits)
        manager.save(3, wait=True)
        assert [found.step for found in manager.list()] == [3, 1]


def _fail(*_: Any, **__: Any) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"memory_budget": "32MiB"}])
def test_a_closed_manager_holds_no_copy_of_the_state(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Not even until the garbage collector comes, which counts objects and not bytes."""

    def num_held() -> int:
        blocks = (found for found in gc.get_objects() if type(found) in (Arena, memoryview))
        return sum(found.nbytes >= layout.BLOCK_NBYTES for found in blocks)

    before = num_held()
    gc.disable()
    try:
        state = {"weights": torch.ones(10_000_000)}
        manager = CheckpointManager(tmp_path, {"model": state}, **options)
        manager.save(1).wait()
        assert num_held() > before
        manager.close()
        assert num_held() == before
    finally:
        gc.enable()


def test_a_deletion_that_failed_holds_no_copy_of_the_state(tmp_path: Path) -> None:
    """As an error would that is kept, with the frames of the save after which it was raised."""

    def held() -> list[object]:
        gc.collect()
        return [found for found in gc.get_objects() if type(found) is Staged]

    fault = Fault(kind="fail", op="put", key="*/retired-*", times=None)
    store, of_others = FaultyStore(LocalStore(tmp_path), [fault]), held()
    manager = CheckpointManager(store, {"model": {"weights": torch.ones(9)}}, keep=Last(1))
    for step in (1, 2):
        manager.save(step).wait()
    manager.close()
    assert [entry.step for entry in Catalog(store).checkpoints()] == [2, 1]
    assert all(any(found is other for other in of_others) for found in held())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["holdfast-io", "holdfast-disk", "holdfast-save"])
def test_a_save_for_which_no_thread_can_be_started_is_due_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool
) -> None:
    """Invariant 8: it is raised, nothing is left hanging, and it does not count as made."""
    run, start = new_run(), threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    run.train()
    due = SideSaver("side", every="2step", components=["model"])
    with run.manager(tmp_path, every="2step", savers=[due], overlap=overlap) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", scarce)
            with pytest.raises(RuntimeError, match="new thread"):
                manager.maybe_save(2)
        manager.fence()
        pending = manager.maybe_save(3)
        assert pending is not None
        assert pending.wait().step == 3
        assert manager.maybe_save(3) is None


def test_what_does_not_fit_is_reported_together_and_changes_nothing(tmp_path: Path) -> None:
    """Invariant 6, D18."""
    run = new_run(width=16)
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
    other = new_run(seed=3, width=8)
    before = other.bits()
    with other.manager(tmp_path) as manager, pytest.raises(errors.MismatchError) as caught:
        manager.resume()
    assert len(caught.value.wrong_shape) > 3
    assert other.bits() == before


def test_parts_can_be_loaded(tmp_path: Path) -> None:
    run = new_run()
    run.train(2)
    with run.manager(tmp_path) as manager:
        manager.save(2).wait()
    other = new_run(seed=3)
    with other.manager(tmp_path) as manager:
        manager.load(components=["model"])
        assert not manager.is_owner
    assert other.bits()["0.weight"] == run.bits()["0.weight"]
    assert not other.optimizer.state


@pytest.mark.parametrize("name", ["root", "at", "folder", "copy"])
def test_load_weights_takes_roots_and_folders(tmp_path: Path, name: str) -> None:
    """Invariant 10: a copied folder is a checkpoint."""
    run = new_run()
    run.train(2)
    with run.manager(tmp_path / "run") as manager:
        saved = manager.save(2).wait()
    folder = tmp_path / "run" / saved.folder
    os.system(f"cp -r {folder} {tmp_path / 'mine'}")
    sources = {
        "root": tmp_path / "run",
        "at": f"{tmp_path / 'run'}@step=2",
        "folder": folder,
        "copy": tmp_path / "mine",
    }
    other = new_run(seed=8)
    assert load_weights(sources[name], other.model).step == 2
    assert other.bits()["0.weight"] == run.bits()["0.weight"]


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    """D47, D48, A2."""
    run = new_run()
    with pytest.raises(errors.UsageError, match="every"):
        run.manager(tmp_path, every="0step")
    with pytest.raises(errors.UsageError, match="keep"):
        run.manager(tmp_path, keep=3)
    with pytest.raises(errors.UsageError, match="save_timeout_s"):
        run.manager(tmp_path, save_timeout_s=0)
    with pytest.raises(errors.UsageError, match="component"):
        CheckpointManager(tmp_path, {"../x": run.model})
    with run.manager(tmp_path) as manager:
        with pytest.raises(errors.UsageError, match="step"):
            manager.save(True)
        for tag in ("latest", "two words", "a\u00a0b", " ", "", "x" * 201):
            with pytest.raises(errors.UsageError, match="tag"):
                manager.save(1, tags=[tag])
    assert folders(tmp_path) == []


def test_a_pin_beside_a_dead_deleter_mark_holds(tmp_path: Path) -> None:
    """R20, rule 4: the next deleter leaves a mark of its own and reads the pins after it."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
        run.train()
        manager.save(2).wait()
    old = sorted(folders(tmp_path))[0]
    mark = Retired(by="writer 1", reason="last 1").encode()
    (tmp_path / old / layout.retired_name(1)).write_bytes(mark)
    with run.manager(tmp_path, keep=Last(1)) as manager:
        manager.resume()
        manager.pin("step=1")
        run.train()
        manager.save(3)
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [3, 1]


def test_nothing_is_deleted_while_nothing_that_stays_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    """R17, R20; invariant 4: the disk stored something else than was written."""
    run = new_run()
    spoil_saves(monkeypatch, tmp_path, 2, 3)
    with run.manager(tmp_path, keep=Last(1), sinks=[recorder]) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step).wait()
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [3, 2, 1]
        assert "damaged" in recorder.of("housekeeping_failed")[0].message
        monkeypatch.undo()
        run.train()
        manager.save(4).wait()
        manager.wait()
        assert [checkpoint.step for checkpoint in manager.list()] == [4]


def test_a_rule_that_raises_does_not_stop_training(tmp_path: Path, recorder: Recorder) -> None:
    """Invariant 8, D43."""

    class Broken(Last):
        def picks(self, newest_first: Any) -> Any:
            raise RuntimeError("a user's rule")

    run = new_run()
    with run.manager(tmp_path, keep=Broken(1), sinks=[recorder]) as manager:
        manager.save(1).wait()
        run.train()
        manager.save(2).wait()
        manager.wait()
    assert "a user's rule" in recorder.of("housekeeping_failed")[0].message


def test_a_fenced_off_owner_cannot_take_the_run_back_by_a_load(tmp_path: Path) -> None:
    """Invariant 11: a full load claims, so it asks first."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
        pipe = subprocess.PIPE
        child = warm.Popen(["-c", OTHER_OWNER, tmp_path], stdin=pipe, stdout=pipe)
        assert child.stdout is not None
        assert child.stdout.readline() == "owns\n"
        with pytest.raises(errors.OwnedElsewhere):
            manager.load("step=1")
        child.communicate("\n")


OTHER_OWNER = """
import sys
sys.path.insert(0, "tests")
from runs import new_run
manager = new_run().manager(sys.argv[1], takeover=True)
manager.resume()
print("owns", flush=True)
input()
"""


def test_settings_and_modes_of_torch_do_not_break_a_save(tmp_path: Path) -> None:
    """A save in inference mode, and precision set through the newer names."""
    run = new_run()
    run.train()
    with run.manager(tmp_path) as manager:
        with torch.inference_mode():
            manager.save(1, metrics={"loss": torch.tensor(2.0), "norm": np.float32(1.5)}).wait()
        run.train()
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        try:
            manager.save(2).wait()
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"
        manager.load("step=1", components=["model"])
        run.train()
        assert manager.list()[-1].metrics == {"loss": 2.0, "norm": 1.5}
        with pytest.raises(errors.UsageError, match="loss"):
            manager.save(3, metrics={"loss": torch.ones(3)})
        with pytest.raises(errors.UsageError, match=r"count.*too large"):
            manager.save(3, metrics={"count": 10**400})  # issue 20, line 10


def test_loading_a_part_is_not_enough_to_save_into_the_root(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
    with run.manager(tmp_path) as manager:
        manager.load(skip=["optimizer"])
        with pytest.raises(errors.UsageError, match="whole"):
            manager.save(2)


def test_a_failed_opaque_load_locks_the_manager_until_a_whole_one_succeeds(tmp_path: Path) -> None:
    """Invariant 6."""

    class Fragile:
        """Fails in the load itself, and not in the trial of it, whose calls come before."""

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            calls.append(None)
            if len(calls) == fails_at:
                raise RuntimeError("no")

    calls: list[None] = []
    fails_at = 0
    fragile, tree = Fragile(), {"x": torch.ones(3)}
    state = {"tree": tree, "fragile": fragile}
    with CheckpointManager(tmp_path, state, sinks=()) as manager:
        manager.save(1).wait()
        manager.load()
        fails_at = 2 * len(calls)
        with pytest.raises(errors.HoldfastError, match="fragile"):
            manager.load()
        with pytest.raises(errors.ManagerUnusable, match="half loaded"):
            manager.save(2)
        manager.load()
        manager.save(2).wait()


def test_a_manager_does_nothing_in_a_forked_child(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                manager.save(2)
            except errors.ManagerUnusable:
                manager.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        run.train()
        manager.save(2).wait()


def test_fractions_of_the_run_need_its_length(tmp_path: Path) -> None:
    """C26, D47: found when the manager is made, not at the first save."""
    run = new_run()
    with pytest.raises(errors.UsageError, match="dur"):
        run.manager(tmp_path, every="0.5dur")
    with run.manager(tmp_path, every="0.5dur", max_duration="8step") as manager:
        saved = []
        for step in range(1, 9):
            run.train()
            if manager.maybe_save(step) is not None:
                saved.append(step)
        assert saved == [4, 8]


def test_classes_are_recorded_and_the_higher_one_wins(tmp_path: Path) -> None:
    """A4, D10, D11: a permanent save at an ephemeral one's step is a checkpoint of its own."""
    run = new_run()
    policy = SavePolicy(permanent="4step", ephemeral="1step")
    with run.manager(tmp_path, every=policy) as manager:
        for step in range(1, 7):
            run.train()
            manager.maybe_save(step)
        manager.save(6, reason="final").wait()
        manager.wait()
        found = [(c.step, c.save_class, c.reason) for c in reversed(manager.list())]
    classes = ["ephemeral"] * 3 + ["permanent"] + ["ephemeral"] * 2 + ["permanent"]
    assert [(step, name) for step, name, _ in found] == list(
        zip([1, 2, 3, 4, 5, 6, 6], classes, strict=True)
    )
    assert found[-1][2] == "final"


def spoil_saves(monkeypatch: pytest.MonkeyPatch, root: Path, *sequences: int) -> None:
    """The storage keeps another bit than was written, in the saves of these numbers."""
    real = save_module.write_files

    def write(*args: Any, **options: Any) -> dict[str, bytes]:
        digests = real(*args, **options)
        for path in [root / key for key in digests]:
            name = layout.parse_attempt(path.parent.name)
            assert name is not None
            if name.sequence in sequences and path.name == "model-00000.safetensors":
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                os.chmod(path, 0o644)
                path.write_bytes(bytes(data))
        return digests

    monkeypatch.setattr(save_module, "write_files", write)


def rot(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_nothing_is_deleted_because_of_one_whose_manifest_went_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R20, invariant 4: it was read back when it was newest; since then its disk forgot it."""
    spoil_saves(monkeypatch, tmp_path, 4)
    run = new_run()
    with run.manager(tmp_path, keep=Last(2)) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step).wait()
            manager.wait()
        rot(next(tmp_path.glob("step-00000003*")) / "manifest.json", 200)
        run.train()
        manager.save(4).wait()
        manager.wait()
    with run.manager(tmp_path) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2


def test_a_manifest_that_went_bad_does_not_end_retention(tmp_path: Path) -> None:
    """Invariant 8."""
    run = new_run()
    with run.manager(tmp_path, keep=Last(2)) as manager:
        for step in range(1, 10):
            run.train()
            manager.save(step).wait()
            manager.wait()
            if step == 3:
                rot(next(tmp_path.glob("step-00000003*")) / "manifest.json", 200)
        assert [checkpoint.step for checkpoint in manager.list()] == [9, 8]


def test_an_old_proven_checkpoint_justifies_no_deletion_of_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R20, invariant 4: with the newest spoilt, the ones before it must stay."""
    spoil_saves(monkeypatch, tmp_path, 4)
    run = new_run()
    with run.manager(tmp_path, keep=Last(1) | Best("loss")) as manager:
        for step, loss in enumerate([1.0, 2.0, 3.0, 4.0], start=1):
            run.train()
            manager.save(step, metrics={"loss": loss}).wait()
        manager.wait()
    with run.manager(tmp_path) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 3


def test_each_class_goes_on_from_its_own_last_save(tmp_path: Path) -> None:
    """D54: a resume from an ephemeral checkpoint must not make a permanent one due at once."""
    policy = SavePolicy(permanent="10s", ephemeral="1s")
    run = new_run()
    with run.manager(tmp_path, every=policy) as manager:
        manager.save(1, save_class="permanent").wait()
        run.train()
        manager.save(2, save_class="ephemeral").wait()
    with run.manager(tmp_path, every=policy) as manager:
        manager.resume()
        manager._session.clock._wall_before_s += 5.0
        run.train()
        pending = manager.maybe_save(3)
        assert pending is not None
        assert pending.wait().save_class == "ephemeral"


def test_a_rule_about_an_unknown_component_is_refused(tmp_path: Path) -> None:
    """D47: a misspelt name would never drop anything."""
    with pytest.raises(errors.UsageError, match="optimiser"):
        new_run().manager(tmp_path, keep=Last(1) | Last(5).then_drop("optimiser"))


@pytest.mark.parametrize(
    "root",
    ["runs/{run_name}", Path("runs/{run_name}/{rank:02d}"), "{date}", Tiered("runs/{rank}", "far")],
    ids=str,
)
def test_a_root_that_nobody_has_filled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Any
) -> None:
    """Names in braces are filled by `fill_root`, and make no folder of that name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.UsageError, match="fill_root"):
        new_run().manager(root, run_name="gpt")
    new_run().manager(tmp_path / "{lr}").close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("every", "to_write"), [(500, "'500step'"), (2.5, "'2.5step'")])
def test_an_interval_without_a_unit_is_refused_by_the_name_of_its_argument(
    tmp_path: Path, every: Any, to_write: str
) -> None:
    with pytest.raises(errors.UsageError, match=f"every={every}.*every={to_write}"):
        CheckpointManager(tmp_path, new_run().state, every=every)


def test_a_rule_may_be_written_as_on_the_command_line(tmp_path: Path) -> None:
    """In every place that takes a rule; what is none is refused by the name of its argument."""
    run = new_run()
    with run.manager(tmp_path / "a", keep="last:2") as manager:
        for step in range(1, 5):
            manager.save(step).wait()
        manager.wait()
        assert [c.step for c in manager.list()] == [4, 3]
    tiered = Tiered(tmp_path / "b", tmp_path / "c", keep_local="last:1", keep_remote="last:3")
    assert tiered.options.keep_local == Last(1)
    assert tiered.options.keep_remote == Last(3)
    saver = SideSaver("weights", every="1step", components=["model"], keep="last:4,best:loss")
    assert str(saver.keep) == "last 4 | best loss (min)"
    for name in ("keep_local", "keep_remote"):
        with pytest.raises(errors.UsageError, match=f"{name}='newest:3'.*unknown rule"):
            Tiered(tmp_path / "b", tmp_path / "c", **{name: "newest:3"})  # type: ignore[arg-type]
    with pytest.raises(errors.UsageError, match=r"keep='newest:3'.*unknown rule"):
        run.manager(tmp_path / "d", keep="newest:3")


def test_keys_that_only_one_side_of_a_dict_has_are_noted(tmp_path):
    """Line 26 of the review: the dict was replaced without a word."""
    with CheckpointManager(tmp_path, {"counts": {"seen": 1, "old": 2}}, sinks=()) as manager:
        manager.save(1).wait()
    live = {"seen": 0, "new": 3}
    with CheckpointManager(tmp_path, {"counts": live}, sinks=()) as manager:
        found = manager.resume()
    assert live == {"seen": 1, "old": 2}
    assert "counts: 'new' not in the checkpoint, removed" in found.notes
    assert "counts: 'old' in the checkpoint only, added" in found.notes


def test_accelerates_optimizer_is_saved_as_the_one_inside(tmp_path: Path) -> None:
    """It overrides `state_dict`, and would be saved as an opaque object without names."""

    class AcceleratedOptimizer(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> Any:
            return self.optimizer.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.optimizer.load_state_dict(state)

    model = torch.nn.Linear(2, 2)
    state = {"model": model, "optimizer": AcceleratedOptimizer(torch.optim.SGD(model.parameters()))}
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(1, wait=True)
    (entry,) = Catalog(LocalStore(tmp_path)).checkpoints()
    assert entry.manifest.components["optimizer"].kind == "optimizer"


def test_what_a_damaged_newest_one_has_filled_in_part_is_not_saved(tmp_path: Path) -> None:
    """I6: the one before lacks a component that is allowed to be new, so it replaces no part of
    it; the first resume is in place."""
    small = {"model": {"w": torch.zeros(4)}}
    large = {**small, "ema": {"w": torch.full((1 << 22,), 99.0)}}
    hooks = StateHooks(one_sided=lambda name: name == "ema")
    with CheckpointManager(tmp_path, small) as manager:
        manager.save(1, wait=True)
    with CheckpointManager(tmp_path, large, hooks=hooks) as manager:
        manager.resume()
        folder = tmp_path / manager.save(2).wait().folder
    (file,) = (path for path in folder.glob("ema*.safetensors") if path.stat().st_size > 1 << 20)
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    live = {**small, "ema": {"w": torch.full((1 << 22,), 7.0)}}
    manager = CheckpointManager(tmp_path, live, hooks=hooks, sinks=())
    with pytest.raises(errors.MismatchError, match="lacks ema, which a damaged checkpoint"):
        manager.resume()
    with pytest.raises(errors.ManagerUnusable):
        manager.save(3)
    manager.close()


def test_folders_that_are_not_ours_stop_no_run(tmp_path: Path) -> None:
    """A link in the root, also one in the place of an old checkpoint, that leads elsewhere."""
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "data").symlink_to(tmp_path / "elsewhere")
    state = {"model": {"w": torch.zeros(4)}}
    with CheckpointManager(tmp_path / "run", state) as manager:
        assert manager.resume() is None
        folder = manager.save(1).wait().folder
        manager.save(2, wait=True)
    (tmp_path / "run" / folder).rename(tmp_path / "elsewhere" / folder)
    (tmp_path / "run" / folder).symlink_to(tmp_path / "elsewhere" / folder)
    with CheckpointManager(tmp_path / "run", state) as manager:
        assert manager.resume() is not None
        manager.save(3, wait=True)


def test_a_manager_that_was_dropped_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cell of a notebook that is run again does; also after a save that failed."""
    monkeypatch.setattr(claim, "_DROPPED_S", 60.0)  # on a busy machine its threads end late
    state = {"model": {"w": torch.zeros(4)}}
    for step in range(1, 4):
        manager = CheckpointManager(tmp_path / "a", state)
        manager.resume()
        state["model"]["w"] += 1
        manager.save(step).wait()
        del manager
    store = FaultyStore(LocalStore(tmp_path / "b"), [Fault(kind="fail", key="*/manifest.json")])
    manager = CheckpointManager(store, state, preflight=False, sinks=())
    with pytest.raises(errors.SaveFailed):
        manager.save(1).wait()
    del manager
    with CheckpointManager(LocalStore(tmp_path / "b"), state) as manager:
        manager.resume()


def test_a_copy_of_weights_is_a_component_beside_the_module(tmp_path: Path) -> None:
    """The usual early stopping keeps one; without the module it is a mistake."""
    model = torch.nn.Linear(2, 2)
    best = copy.deepcopy(model.state_dict())
    with CheckpointManager(tmp_path, {"model": model, "best": best}) as manager:
        manager.save(1, wait=True)
    with pytest.raises(errors.UsageError, match="object itself"):
        CheckpointManager(tmp_path, {"model": model.state_dict()})


def test_rates_that_a_training_moves_are_no_other_setting(tmp_path: Path) -> None:
    """By a plateau; a dict that has grown is no warning either."""

    def made() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"model": model, "optimizer": optimizer, "plateau": plateau, "best": {"loss": 1.0}}

    state = made()
    for _ in range(3):
        state["plateau"].step(1.0)
    state["best"]["acc"] = 0.5
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(1, wait=True)
    recorder = Recorder()
    with CheckpointManager(tmp_path, made(), sinks=(recorder,)) as manager:
        found = manager.resume()
    assert found is not None
    assert any("'acc'" in note for note in found.notes)
    assert not [
        e.message for e in recorder.of("warning") if "data-loader position" not in e.message
    ]


def test_a_scheduler_of_ones_own_resumes_with_one_more_option(tmp_path: Path) -> None:
    """It keeps a function that it does not save, as LambdaLR does."""

    class Own(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any, fn: Any, floor: float = 0.0) -> None:
            self.fn, self.floor = fn, floor
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            return [max(self.floor, self.fn(self.last_epoch) * lr) for lr in self.base_lrs]

        def state_dict(self) -> dict[str, Any]:
            saved = ("last_epoch", "base_lrs", *(["floor"] if self.floor else []))
            return {name: vars(self)[name] for name in saved}

    def made(floor: float) -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "own": Own(optimizer, float, floor)}

    with CheckpointManager(tmp_path, made(0.0)) as manager:
        manager.save(1, wait=True)
    with CheckpointManager(tmp_path, made(0.5)) as manager:
        assert manager.resume() is not None


def test_a_checkpoint_that_is_rejected_while_it_is_compared_is_not_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R8: what a save gives is there, and can be gone on from."""
    store = MemoryStore()
    digest_staged = saver.digest_staged
    with CheckpointManager(store, {"model": torch.nn.Linear(3, 3)}, sinks=()) as manager:
        first = manager.save(1).wait()

        def reject_meanwhile(*args: Any, **named: Any) -> dict[str, bytes]:
            reject(store, first.folder, by="a scrub", reason="a block is damaged")
            return digest_staged(*args, **named)

        monkeypatch.setattr(saver, "digest_staged", reject_meanwhile)
        assert manager.save(1).wait().folder != first.folder


def test_a_metric_that_is_still_to_come_is_no_warning_and_other_lacks_are() -> None:
    seen: list[str] = []
    rule = Best("loss") | EveryNth("1ep")
    with CheckpointManager(
        MemoryStore(), {"n": {}}, keep=rule, sinks=[lambda event: seen.append(event.message)]
    ) as manager:
        manager.expect_metrics()
        for step in (1, 2):
            manager.save(step)
            manager.wait()
        told = [text for text in seen if "which no checkpoint has" in text]
        assert len(told) == 1
        assert told[0].startswith("the rule 'every 1ep'")
        manager.expect_metrics(until=3)
        for step in (3, 4):
            assert len([text for text in seen if "the metric 'loss'" in text]) == 0
            manager.save(step)
            manager.wait()
        assert len([text for text in seen if "the metric 'loss'" in text]) == 1
