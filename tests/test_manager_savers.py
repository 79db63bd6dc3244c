"""Several savers on one run, older checkpoints of a step, and hooks: on a real folder."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import SideSaver, StateHooks, Stop, load_weights
from holdfast.errors import (
    MismatchError,
    NoCheckpoint,
    OutOfMemory,
    SaveFailed,
    SaveSkipped,
    UsageError,
)
from holdfast.manager import CheckpointManager
from holdfast.ownership.annotations import reject
from holdfast.policy.rules import All, Last
from holdfast.policy.triggers import AtEnd, Every, On
from holdfast.staging import arena
from holdfast.store import open_store
from holdfast.testing import Fault, FaultyStore
from runs import Run, new_run

WEIGHTS = SideSaver("weights", every="2step", components=["model"], keep=Last(2))


def steps_of(manager: Any) -> list[tuple[int, tuple[str, ...]]]:
    return [(checkpoint.step, checkpoint.left_out) for checkpoint in manager.list()]


def trained(run: Run, manager: Any, until: int, first: int = 1) -> None:
    for step in range(first, until + 1):
        run.train()
        manager.maybe_save(step)
        manager.wait()


PART = ("optimizer", "scheduler", "counters", "rng")


def test_weights_are_saved_beside_the_whole_state_and_kept_by_their_own_rule(
    tmp_path: Path,
) -> None:
    run = new_run()
    with run.manager(tmp_path, every="5step", keep=Last(1), savers=[WEIGHTS]) as manager:
        manager.resume()
        trained(run, manager, 9)
        assert steps_of(manager) == [(8, PART), (6, PART), (5, ())]
        trained(run, manager, 10, first=10)
        # One save for both: the whole state has the weights in it.
        assert steps_of(manager) == [(10, ()), (8, PART)]
        assert manager.list()[0].savers == ("main", "weights")


def test_a_resume_passes_over_what_has_no_optimizer_and_says_so(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, every="5step", savers=[WEIGHTS]) as manager:
        trained(run, manager, 8)
        weights = [p.clone() for p in run.model.parameters()]
    again = new_run(seed=3)
    with again.manager(tmp_path, every="5step", savers=[WEIGHTS]) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 5
        assert [reason.count("optimizer") for _, reason in found.rejected] == [1, 1]
        assert (tmp_path / "latest").resolve().name == found.folder
    other = new_run(seed=4)
    load_weights(f"{tmp_path}@step=8", other.model)
    assert all(map(torch.equal, other.model.parameters(), weights))


def test_the_resumed_run_saves_when_the_undisturbed_one_would(tmp_path: Path) -> None:
    def saves(root: Path, cuts: list[int]) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        hooks = StateHooks(save_begun=lambda begun: found.update({begun.step: begun.due.savers}))
        for last in (*cuts, 12):
            run = new_run()
            with run.manager(root, every="4step", savers=[WEIGHTS], hooks=hooks) as manager:
                resumed = manager.resume()
                trained(run, manager, last, first=1 if resumed is None else resumed.step + 1)
        return found

    assert saves(tmp_path / "cut", [4, 7, 8]) == saves(tmp_path / "straight", [])


@pytest.mark.parametrize("on_existing", ["keep", "replace", "error"])
def test_a_second_checkpoint_of_a_step(tmp_path: Path, on_existing: str) -> None:
    """A12: it lies beside the older one, takes its place once it is committed, or is refused."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step, tags=["mine"] if step == 3 else []).wait()
    again = new_run()
    with again.manager(tmp_path, on_existing=on_existing) as manager:
        if on_existing == "error":
            with pytest.raises(UsageError, match="already are checkpoints of the steps 2, 3"):
                manager.resume(1)
            assert not manager.is_owner
            assert len(manager.list()) == 3
            return
        manager.resume(1)
        again.train()
        torch.rand(1)  # another history than the one before
        manager.save(2).wait()
        manager.save(3).wait()
        manager.wait()
        expected = [3, 2, 3, 2, 1] if on_existing == "keep" else [3, 2, 3, 1]
        assert [c.step for c in manager.list()] == expected  # a tagged one stays


def test_saving_the_present_step_again_unchanged_is_no_second_one(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, on_existing="error") as manager:
        first = manager.save(1, metrics={"loss": math.nan}).wait()
        again = manager.save(1, metrics={"loss": math.nan}).wait()
        assert again.folder == first.folder


def test_hooks_see_a_detached_view_and_can_refuse(tmp_path: Path) -> None:
    """D22: whatever a hook does to the view, training goes on with what it had."""
    run, begun = new_run(), []
    run.train()
    before = run.bits()

    def edit(view: Any) -> None:
        name = next(iter(view["model"]))
        view["model"][name].zero_()  # a copy
        view["model"][name] = torch.full_like(view["model"][name], 7.0)
        del view["scheduler"]

    def check(now: Any, metrics: Any) -> list[str]:
        if now.step == 2:
            raise SaveSkipped("not this one")
        return ["looks odd"] if metrics.get("loss") == 1.0 else []

    hooks = StateHooks(before_save=check, edit_save=edit, save_begun=begun.append)
    with run.manager(tmp_path, hooks=hooks) as manager:
        saved = manager.save(1, metrics={"loss": 1.0}).wait()
        assert run.bits() == before
        assert saved.left_out == ("scheduler",)
        assert saved.unhealthy == ("looks odd",)
        skipped = manager.save(2)
        with pytest.raises(SaveSkipped, match="not this one"):
            skipped.wait()
        assert [pending.step for pending in begun] == [1]
    other = new_run(seed=2)
    load_weights(tmp_path, other.model, component="model")
    assert next(other.model.parameters()).eq(7.0).all()


def test_an_edit_at_load_is_checked_like_what_was_stored(tmp_path: Path) -> None:
    run = new_run()
    run.train(2)
    with run.manager(tmp_path) as manager:
        manager.save(2).wait()
    name = next(iter(dict(run.model.named_parameters())))

    def with_value(value: torch.Tensor) -> StateHooks:
        def edit(view: Any) -> None:
            view["model"][name] = value

        return StateHooks(edit_load=edit)

    shape = run.model.get_parameter(name).shape
    bad = new_run(seed=1)
    before = bad.bits()
    with (
        bad.manager(tmp_path, hooks=with_value(torch.zeros(1, 1, 1))) as manager,
        pytest.raises(MismatchError),
    ):
        manager.resume()
    assert bad.bits() == before
    good = new_run(seed=1)
    with good.manager(tmp_path, hooks=with_value(torch.full(shape, 3.0))) as manager:
        found = manager.resume()
        assert found is not None
        assert good.model.get_parameter(name).eq(3.0).all()
        good.train()
        manager.save(3).wait()
        assert manager.list()[0].step == 3


def test_counters_fill_what_a_call_does_not_tell(tmp_path: Path) -> None:
    run = new_run()
    told = {"epoch": 1, "samples": 40}
    with run.manager(tmp_path, counters=lambda: told) as manager:
        now = manager.save(4, tokens=7).wait().timestamp
    assert (now.epoch, now.samples, now.tokens, now.step_in_epoch) == (1, 40, 7, None)


def test_a_save_alone_does_not_know_how_far_its_epoch_is(tmp_path: Path) -> None:
    """`save(7, epoch=1)` with nothing before it records no step within the epoch, and not 0."""
    run = new_run()
    with run.manager(tmp_path / "run") as manager:
        assert manager.save(7, epoch=1, wait=True).wait().timestamp.step_in_epoch is None
        run.train()
        assert manager.save(9, epoch=2, wait=True).wait().timestamp.step_in_epoch == 0
    with run.manager(tmp_path / "run", label="{epoch}-{step_in_epoch}") as manager:
        manager.resume()
        run.train()
        assert manager.save(12, epoch=2, wait=True).wait().folder.startswith("2-3.")
    with (
        run.manager(tmp_path / "other", label="{epoch}-{step_in_epoch}") as manager,
        pytest.raises(UsageError, match="step_in_epoch was not given, or is not known"),
    ):
        manager.save(7, epoch=1)


def test_a_failure_that_is_only_warned_of_does_not_stop_the_next_save(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, on_failure="warn") as manager:
        manager.save(1).wait()
        hidden = tmp_path.with_name("hidden")
        tmp_path.rename(hidden)
        tmp_path.write_text("in the way")
        failed = manager.save(2)
        with pytest.raises(SaveFailed):
            failed.wait()
        tmp_path.unlink()
        hidden.rename(tmp_path)
        assert manager.save(3).wait().step == 3


@pytest.mark.parametrize(
    "options",
    [
        {"on_existing": "overwrite"},
        {"on_failure": "ignore"},
        {"savers": ["weights"]},
        {"takeover": "no"},
        {"preflight": "no"},
        {"stop": True},
        {"hooks": print},
        {"label": "{nothing}"},
    ],
)
def test_wrong_choices_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        new_run().manager(tmp_path, **options)


def test_a_hook_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match="before_save=3"):
        StateHooks(before_save=3)  # type: ignore[arg-type]


def test_a_part_can_be_saved_by_hand(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1).wait()
        run.train()
        part = manager.save(1, components=["model"]).wait()
        assert part.left_out == PART
        with pytest.raises(UsageError, match="weights"):
            manager.save(2, components=["weights"])
        with pytest.raises(UsageError, match="must be some of"):
            manager.save(2, components=[])
    other = new_run(seed=1)
    load_weights(f"{tmp_path}/{part.folder}", other.model)
    assert all(map(torch.equal, other.model.parameters(), run.model.parameters()))


def test_parts_alone_are_no_start_and_do_not_stand_in_the_way_of_one(tmp_path: Path) -> None:
    """A crash after weights were saved, and before the first whole checkpoint was."""
    weights = SideSaver("weights", every="1step", components=["model"])
    run = new_run()
    with run.manager(tmp_path, every="5step", savers=[weights]) as manager:
        assert manager.resume() is None
        trained(run, manager, 3)
    accidental = new_run()
    with accidental.manager(tmp_path) as manager, pytest.raises(UsageError, match="resume"):
        manager.save(1)
    again = new_run()
    with again.manager(tmp_path, every="5step", savers=[weights]) as manager:
        assert manager.resume() is None
        trained(again, manager, 6)
    third = new_run()
    with third.manager(tmp_path, every="5step", savers=[weights]) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 5


def test_a_rollback_has_something_to_fall_back_on(tmp_path: Path) -> None:
    """D30, D31: what was left behind fills no place that the run itself needs."""
    run = new_run()
    with run.manager(tmp_path, keep=Last(9)) as manager:
        for step in range(1, 6):
            run.train()
            manager.save(step).wait()
    again = new_run()
    with again.manager(tmp_path, keep=Last(2)) as manager:
        assert manager.resume(2) is not None
        again.train()
        torch.rand(1)
        newest = manager.save(3).wait()
        manager.wait()
    damaged = next((tmp_path / newest.folder).glob("model-*.safetensors"))
    damaged.chmod(0o600)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    third = new_run()
    with third.manager(tmp_path, keep=Last(2)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2


def test_a_part_cannot_be_gone_on_from(tmp_path: Path) -> None:
    run = new_run()
    only = SideSaver("weights", every="1step", components=["model"])
    with run.manager(tmp_path, savers=[only]) as manager:
        trained(run, manager, 1)
    again = new_run()
    with again.manager(tmp_path, savers=[only]) as manager, pytest.raises(NoCheckpoint):
        manager.resume(1)


@pytest.mark.parametrize("first", ["unhealthy", "a part"])
def test_after_a_rollback_its_target_stays_until_there_is_better(
    tmp_path: Path, first: str
) -> None:
    """Invariant 4: newer ones of the branch that was left behind are no reason to delete it."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step).wait()
    hooks = StateHooks(before_save=lambda now, _: ["nan"] if first == "unhealthy" else None)
    again = new_run()
    with again.manager(tmp_path, keep=Last(1), savers=[WEIGHTS], hooks=hooks) as manager:
        manager.resume(1)
        trained(again, manager, 2, first=2)
        if first == "unhealthy":
            manager.save(3).wait()
    with new_run().manager(tmp_path) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 1


def test_what_another_saver_asks_for_is_its_own_also_when_nothing_changed(tmp_path: Path) -> None:
    run = new_run()
    everything = [*run.state, "rng"]
    archive = SideSaver("archive", every=On("epoch"), components=everything, keep=All())
    with run.manager(tmp_path, every="1step", keep=Last(1), savers=[archive]) as manager:
        for step in (1, 2):
            run.train()
            manager.maybe_save(step)
            pending = manager.maybe_save(step, event="epoch")
            assert pending is not None
            assert pending.wait().savers == ("archive",)
        manager.wait()
        found = [(c.step, c.savers) for c in manager.list()]
    assert found == [(2, ("archive",)), (2, ("main",)), (1, ("archive",))]


def test_a_checkpoint_that_was_rejected_or_is_unhealthy_is_saved_again(tmp_path: Path) -> None:
    run, reasons = new_run(), [["nan"], []]
    hooks = StateHooks(before_save=lambda now, _: reasons.pop(0) if reasons else [])
    with run.manager(tmp_path, hooks=hooks) as manager:
        ill = manager.save(1).wait()
        well = manager.save(1).wait()
        assert (ill.unhealthy, well.unhealthy) == (("nan",), ())
        reject(manager.store, well.folder, by="retention", reason="damaged")
        assert manager.save(1).wait().folder not in (ill.folder, well.folder)


def test_a_part_of_this_step_is_no_reason_to_refuse_the_whole(tmp_path: Path) -> None:
    run = new_run()
    with run.manager(tmp_path, savers=[WEIGHTS], on_existing="error", every=AtEnd()) as manager:
        trained(run, manager, 2)
        final = manager.maybe_save(2, event="end")
        assert final is not None
        assert final.wait().left_out == ()


@pytest.mark.parametrize("end", ["wait", "close"])
@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_the_failure_of_the_last_save_is_raised(tmp_path: Path, on_failure: str, end: str) -> None:
    fails = Fault(kind="fail", op="put", key="*/manifest.json")
    store = FaultyStore(open_store(tmp_path), [fails])
    manager = new_run().manager(store, on_failure=on_failure)
    manager.save(1)
    with pytest.raises(SaveFailed):
        getattr(manager, end)()
    manager.close()


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_save_that_failed_does_not_count_as_made(tmp_path: Path, on_failure: str) -> None:
    run = new_run()
    fails = Fault(kind="fail", op="put", key="*/manifest.json")
    store = FaultyStore(open_store(tmp_path), [fails])
    with run.manager(store, every=Every("2step") | AtEnd(), on_failure=on_failure) as manager:
        run.train()
        assert manager.maybe_save(1) is None
        pending = manager.maybe_save(2)
        assert pending is not None
        with pytest.raises(SaveFailed):
            pending.wait()
        run.train()
        retried = manager.maybe_save(3)
        assert retried is not None
        assert retried.wait().step == 3
        assert manager.maybe_save(3, event="end") is None


def test_what_was_due_and_could_not_be_begun_is_due_at_the_next_look(tmp_path: Path) -> None:
    asked: list[int] = []

    def refuse_once(now: Any, metrics: Any) -> None:
        asked.append(now.step)
        if len(asked) == 1:
            raise ValueError("not yet")

    run = new_run()
    hooks = StateHooks(before_save=refuse_once)
    with run.manager(tmp_path, every="2step", hooks=hooks) as manager:
        assert manager.maybe_save(1) is None
        with pytest.raises(ValueError, match="not yet"):
            manager.maybe_save(2)
        later = manager.maybe_save(3)
        assert later is not None
        assert later.wait().step == 3
        assert manager.maybe_save(4) is not None
    assert asked == [2, 3, 4]


@pytest.mark.parametrize("reasons", ["loss is nan", True, [ValueError("nan")]])
def test_reasons_that_are_no_list_of_texts_are_refused(tmp_path: Path, reasons: Any) -> None:
    hooks = StateHooks(before_save=lambda now, _: reasons)
    manager = new_run().manager(tmp_path, hooks=hooks)
    with manager, pytest.raises(UsageError, match="list of texts"):
        manager.save(1)


def test_memory_that_was_not_to_be_had_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"tree": {"tensor": torch.zeros(2)}}
    with CheckpointManager(tmp_path, state) as manager:
        manager.save(1).wait()
        with monkeypatch.context() as patched:
            patched.setattr(arena, "Arena", _no_memory)
            state["tree"]["tensor"] = torch.zeros(3)
            with pytest.raises(OutOfMemory):
                manager.save(2)
        state["tree"]["tensor"] = torch.zeros(2)
        assert manager.save(3).wait().step == 3


def _no_memory(nbytes: int, pages: object = None) -> None:
    raise OutOfMemory(f"{nbytes} bytes")


def test_a_quiet_step_has_nothing_to_save(tmp_path: Path) -> None:
    """Whatever could be due, asked for or have failed makes the next look a real one."""
    run, stop = new_run(), Stop()
    with stop, run.manager(tmp_path, every="4step", stop=stop) as manager:
        assert not manager.is_quiet(1)
        manager.maybe_save(1)
        assert [manager.is_quiet(step) for step in (2, 3, 4)] == [True, True, False]
        signal.raise_signal(signal.SIGUSR2)
        assert not manager.is_quiet(2)
        assert manager.maybe_save(2) is not None
        assert not manager.is_quiet(3)
        manager.wait()
        manager.maybe_save(3)
        assert manager.is_quiet(3)
        manager.save(3).wait()
        assert not manager.is_quiet(3)
        manager.load()
        assert not manager.is_quiet(3)


def test_what_would_be_refused_later_is_refused_by_resume(tmp_path: Path) -> None:
    """Issue 20, line 10: before training, not at the save after hours of it."""
    run = new_run()
    with run.manager(tmp_path) as manager:
        for step in (1, 2, 3):
            run.train()
            manager.save(step).wait()
    with new_run().manager(tmp_path, on_existing="error") as manager:
        assert manager.resume().step == 3  # type: ignore[union-attr]
    with new_run().manager(tmp_path) as manager:
        manager.resume(1)
    again = new_run().manager(tmp_path, on_existing="error")
    with again as manager, pytest.raises(UsageError, match=r'on_existing="error".*steps 2, 3'):
        manager.resume()


def test_a_run_of_another_root_counts_on(tmp_path: Path) -> None:
    """Issue 20, line 18: after a load by hand an interval and the clock go on where they were."""
    run = new_run()
    with run.manager(tmp_path / "old") as manager:
        for _ in range(3):
            run.train()
        manager.save(3, epoch=1).wait()
    loaded = new_run().manager(tmp_path / "old").load()
    again = new_run()
    with again.manager(tmp_path / "new", every="2step") as manager:
        manager.count_from(loaded.timestamp)
        saved = manager.maybe_save(4, epoch=1)
        assert saved is not None
        assert manager.maybe_save(5, epoch=1) is None
        assert saved.wait().timestamp.wall_s >= loaded.timestamp.wall_s
    with again.manager(tmp_path / "odd", every="2step") as manager:
        manager.count_from(loaded.timestamp)
        assert manager.maybe_save(3, epoch=1) is None
