"""Which checkpoint a run goes on from when some are unhealthy or were saved in part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import SideSaver, errors
from holdfast.checkpoints import StateHooks
from holdfast.format.manifest import Deleted, Timestamp
from holdfast.maintenance.delete import preview
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import All, Last
from holdfast.root.catalog import Catalog
from holdfast.state.capture.edits import StateView
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from runs import Recorder, new_run

ILL = ("the loss is nan", "weight 0.weight is not finite")


class Story:
    """Saves of one run, some of them unhealthy or without the optimizer."""

    def __init__(self, store: Store | None = None) -> None:
        self.store = store if store is not None else MemoryStore()
        self.recorder = Recorder()
        self.ill: Sequence[str] = ()
        self.left_out: Sequence[str] = ()

    def open(self, **options: Any) -> CheckpointManager:
        hooks = StateHooks(before_save=self._before_save, edit_save=self._edit_save)
        options = {"sinks": (self.recorder,), "preflight": False, "hooks": hooks} | options
        self.run = new_run(seed=3)
        return self.run.manager(self.store, **options)

    def save(self, manager: CheckpointManager, step: int, kind: str = "good") -> str:
        """Kinds: good, ill, part (without the optimizer)."""
        self.ill = ILL if kind == "ill" else ()
        self.left_out = ("optimizer",) if kind == "part" else ()
        self.run.train()
        return manager.save(step).wait().folder

    def tell(self, *kinds: str, **options: Any) -> list[str]:
        """One process that saves at steps 1, 2, … and closes; gives the folders."""
        with self.open(**options) as manager:
            return [self.save(manager, step, kind) for step, kind in enumerate(kinds, start=1)]

    def resumed(
        self, which: str | int = "latest", *, takeover: bool = False, **options: Any
    ) -> int:
        with self.open(takeover=takeover) as manager:
            found = manager.resume(which, **options)
        assert found is not None
        return found.step

    def marked(self) -> list[str]:
        """Folders with a mark that says that they cannot be used."""
        return [e.folder for e in Catalog(self.store).checkpoints() if e.marks.rejected]

    def _before_save(self, now: Timestamp, metrics: Mapping[str, float]) -> Sequence[str]:
        return self.ill

    def _edit_save(self, view: StateView) -> None:
        for component in self.left_out:
            del view[component]


def test_resume_prefers_the_newest_healthy_one_and_says_why() -> None:
    story = Story()
    folders = story.tell("good", "good", "ill", "ill")
    with story.open() as manager:
        found = manager.resume()
    assert found is not None
    assert (found.step, found.unhealthy) == (2, ())
    reason = "not healthy: the loss is nan, weight 0.weight is not finite"
    assert found.rejected == ((folders[3], reason), (folders[2], reason))
    warnings = [event.message for event in story.recorder.of("warning")]
    assert warnings == [f"passed over {folder}: {reason}" for folder in folders[:1:-1]]


@pytest.mark.full
def test_what_is_passed_over_is_not_marked_and_the_next_resume_chooses_the_same() -> None:
    """It is not damaged; a claim that never commits moves nothing (rule 2)."""
    story = Story()
    story.tell("good", "good", "ill", "part")
    assert [story.resumed() for _ in range(3)] == [2, 2, 2]
    assert story.marked() == []
    assert story.recorder.of("rejected") == []


def test_a_new_lineage_does_not_descend_from_what_was_passed_over() -> None:
    story = Story()
    folders = story.tell("good", "ill", "part")
    with story.open() as manager:
        manager.resume()
        story.save(manager, 2)
    catalog = Catalog(story.store)
    newest = catalog.find_checkpoint("latest")
    assert newest.manifest.parent is not None
    assert newest.manifest.parent.folder == folders[0]
    assert [entry.step for entry in catalog.lineage_entries()] == [2, 1]
    assert story.resumed() == 2


def test_where_nothing_is_healthy_the_newest_is_taken_with_a_warning() -> None:
    story = Story()
    folders = story.tell("part", "ill", "ill", "part")
    with story.open() as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.unhealthy) == (3, ILL)
        assert "the state was not healthy: the loss is nan" in found.notes
        assert folders[2] not in dict(found.rejected)
        story.save(manager, 4)
    assert (
        f"continues from {folders[2]}, which is not healthy"
        in story.recorder.of("warning")[-1].message
    )
    assert story.resumed() == 4


def test_an_unhealthy_one_is_taken_where_the_healthy_ones_are_damaged() -> None:
    """R19: the damaged one is marked, the unhealthy ones are not."""
    story = Story()
    folders = story.tell("good", "ill", "ill")
    story.store.delete(f"{folders[0]}/model-00000.safetensors")
    story.store.delete(f"{folders[2]}/model-00000.safetensors")
    with story.open() as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == 2
    assert [folder for folder, _ in found.rejected] == [folders[2], folders[0]]
    assert sorted(story.marked()) == sorted([folders[0], folders[2]])
    assert story.resumed() == 2


def test_unhealthy_ones_are_accepted_when_asked() -> None:
    story = Story()
    story.tell("good", "ill")
    assert story.resumed(unhealthy="accept") == 2
    assert story.resumed() == 1
    with story.open() as manager, pytest.raises(errors.UsageError, match="unhealthy='take'"):
        manager.resume(unhealthy="take")  # type: ignore[arg-type]


def test_an_unhealthy_one_that_is_named_is_taken_and_stays_chosen() -> None:
    """Rule 2: a person's choice holds, also when the process ends before it has saved."""
    story = Story()
    story.tell("good", "ill", "good")
    assert story.resumed("step=2") == 2
    assert Catalog(story.store).find_checkpoint("latest").step == 2
    assert story.resumed() == 2


def test_resume_passes_over_what_was_saved_in_part_and_its_components_load() -> None:
    """Invariant 7: no run goes on from part of a state."""
    story = Story()
    folders = story.tell("good", "part", "part")
    with story.open() as manager:
        with pytest.raises(errors.NoCheckpoint, match="saved without optimizer"):
            manager.resume("step=3")
        with pytest.raises(errors.NoCheckpoint, match="saved without optimizer"):
            manager.load("step=3")
        with pytest.raises(errors.NoCheckpoint, match="saved without optimizer"):
            manager.load("step=3", components=["model", "optimizer"])
        loaded = manager.load("step=3", components=["model", "counters"])
        assert (loaded.step, loaded.left_out) == (3, ("optimizer",))
        assert story.run.counters == {"step": 3}
        assert manager.load("step=3", skip=["optimizer"]).step == 3
        assert manager.load("step=3", strict=False).step == 3
        assert manager.load().step == 1
        found = manager.resume()
    assert found is not None
    assert found.step == 1
    assert [folder for folder, _ in found.rejected] == folders[:0:-1]
    assert all("saved without optimizer" in reason for _, reason in found.rejected)
    (warning,) = story.recorder.of("warning")  # of strict=False
    assert "left unchanged: optimizer" in warning.message


def test_a_run_with_nothing_but_parts_is_not_begun_afresh() -> None:
    """None means that nothing was ever committed. Where the main saver left something out each
    time, the error says what lacks and how to go on, and the finished work stays."""
    story = Story()
    folders = story.tell("part", "part", keep=Last(1))
    with story.open(keep=Last(1)) as manager:
        with pytest.raises(errors.NoUsableCheckpoint) as caught:
            manager.resume()
        assert [folder for folder, _ in caught.value.rejected] == folders[:0:-1]
        assert "saved without optimizer" in str(caught.value)
        assert f"load({folders[1]!r}, components=['model', " in str(caught.value)
        with pytest.raises(
            errors.UsageError, match=r"holds the checkpoints of a run.*start_new\(\)"
        ):
            story.save(manager, 1)
    assert story.marked() == []
    assert Catalog(story.store).find_checkpoint("latest").step == 2


def test_a_state_without_what_was_left_out_goes_on() -> None:
    """What lacks and is not wanted is left out of the state: nothing lacks then."""
    story = Story()
    story.tell("good", "part", "part")
    state = {"model": (run := new_run()).model, "scheduler": run.scheduler, "counters": {"step": 0}}
    with CheckpointManager(story.store, state, preflight=False) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 3
        manager.save(4, wait=True)
    assert Catalog(story.store).find_checkpoint("latest").step == 4


@pytest.mark.parametrize("by_hook", [True, False])
def test_a_run_goes_on_without_generators_and_says_so(by_hook: bool) -> None:
    """A lack of the generators alone is a note: all the work is there."""
    story = Story()
    with story.open(keep=Last(1)) as manager:
        for step in (1, 2):
            story.run.train()
            if by_hook:
                story.left_out = ("rng",)
                manager.save(step, wait=True)
            else:
                manager.save(step, components=[*story.run.state], wait=True)
    before = story.run.bits()
    story.left_out = ()
    with story.open(keep=Last(1)) as manager:
        generators = torch.get_rng_state()
        found = manager.resume()
        assert found is not None
        assert (found.step, found.left_out) == (2, ("rng",))
        assert [note for note in found.notes if "rng" in note] == [
            "saved without rng, which is unchanged"
        ]
        assert torch.equal(torch.get_rng_state(), generators)
        assert story.run.bits() == before
        with pytest.raises(errors.NoCheckpoint, match="saved without rng"):
            manager.load("step=2", components=["rng"])
        with pytest.raises(errors.NoCheckpoint, match="saved without rng"):
            manager.load("step=2", include=["rng"])
        assert manager.load("step=2", skip=["rng"]).step == 2
        story.save(manager, 3)
    assert [entry.step for entry in Catalog(story.store).checkpoints()] == [3]
    assert story.store.get("latest").decode() == Catalog(story.store).checkpoints()[0].folder


@pytest.mark.parametrize(
    ("kinds", "step"),
    [
        (("good", "ill", "part"), 1),
        (("ill", "part"), 1),
        (("ill", "good", "ill"), 2),
        (("part", "part"), 2),
        (("good", "part", "good"), 3),
    ],
)
def test_latest_is_where_a_run_would_go_on(kinds: Sequence[str], step: int) -> None:
    story = Story()
    folders = story.tell(*kinds)
    assert Catalog(story.store).find_checkpoint("latest").step == step
    if set(kinds) != {"part"}:
        assert story.store.get("latest") == folders[step - 1].encode()
    standing = preview(story.store, All())
    assert [item.decision.keep for item in standing] == [True] * len(kinds)


def test_retention_keeps_the_newest_healthy_one_until_another_is_there() -> None:
    """R20, invariant 4; and the one that was saved in part is judged apart."""
    story = Story()
    keep = Last(1)
    with story.open(keep=keep) as manager:
        for step, kind in enumerate(("good", "good", "ill", "part", "ill"), start=1):
            story.save(manager, step, kind)
        manager.wait()
        steps = [entry.step for entry in Catalog(story.store).checkpoints()]
        assert steps == [5, 4, 3, 2]
        story.save(manager, 6)
        manager.wait()
        assert [entry.step for entry in Catalog(story.store).checkpoints()] == [6, 4]


class Choosy:
    """An object that can tell whether what is stored fits."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.refusal is not None:
            raise self.refusal

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    "refusal",
    [
        errors.MismatchError("it"),
        errors.UsageError("another length"),
        errors.FormatError("odd"),
        ValueError("no"),
    ],
    ids=lambda refusal: type(refusal).__name__,
)
def test_what_an_object_refuses_is_not_claimed_and_the_state_is_whole(refusal: Exception) -> None:
    """Else a save could begin the run anew in the place of the checkpoints that are there."""
    store = MemoryStore()
    with CheckpointManager(store, {"object": Choosy()}, preflight=False) as manager:
        manager.save(5).wait()
    live = Choosy(refusal)
    with CheckpointManager(store, {"object": live}, preflight=False) as manager:
        for _ in range(2):
            with pytest.raises(type(refusal)):
                manager.resume()
            assert not manager.is_owner
            assert Catalog(store).highest_epoch() == 1
            with pytest.raises(errors.UsageError, match="holds the checkpoints of a run"):
                manager.save(1)
        assert not any(entry.marks.rejected for entry in Catalog(store).checkpoints())
        live.refusal = None
        found = manager.resume()
        assert found is not None
        assert (found.step, found.rejected) == (5, ())


def test_what_an_object_refuses_leaves_the_run_where_it_stands() -> None:
    store, live = MemoryStore(), Choosy()
    with CheckpointManager(store, {"object": live}, preflight=False) as manager:
        for step in (1, 2):
            live.value = step
            manager.save(step).wait()
        live.refusal = errors.UsageError("another length")
        with pytest.raises(errors.UsageError, match="another length"):
            manager.load("step=1")
        live.value = 3
        assert manager.save(3).wait().step == 3
    entry = Catalog(store).find_checkpoint()
    assert (entry.step, entry.name.epoch, entry.name.sequence) == (3, 1, 3)


def test_what_side_savers_deleted_is_no_work_of_the_main_one() -> None:
    """Parts alone, and tombstones of parts: the run has not begun yet."""
    store = MemoryStore()

    def life() -> CheckpointManager:
        state = {"model": nn.Linear(2, 2), "other": nn.Linear(2, 2)}
        side = SideSaver("weights", every="1step", components=["model"], keep=Last(1))
        return CheckpointManager(
            store, state, every="100step", keep=Last(1), savers=[side], takeover=True, sinks=()
        )

    for first in (1, 3):  # neither ends cleanly, so that tombstones stay
        manager = life()
        assert manager.resume() is None
        for step in (first, first + 1):
            manager.maybe_save(step)
            manager.wait()
    registers = [Catalog(store).read(str(name)) for name in Catalog(store).attempts()]
    assert any(isinstance(register, Deleted) for register in registers)
    with life() as manager:
        assert manager.resume() is None


def test_a_commit_while_it_is_asked_whether_anything_was_committed_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Line 7: the first commit of another owner comes between the look for a checkpoint and the
    question whether there ever was one. A takeover had got `NoUsableCheckpoint`, with none named.
    """
    first, second = Story(), Story()
    second.store = first.store
    asked = Catalog.ever_committed

    def commits_first(catalog: Catalog, *, by_main: bool = False) -> bool:
        monkeypatch.setattr(Catalog, "ever_committed", asked)
        first.save(owner, 1)
        return asked(catalog, by_main=by_main)

    with first.open() as owner:
        assert owner.resume() is None
        monkeypatch.setattr(Catalog, "ever_committed", commits_first)
        assert second.resumed(takeover=True) == 1


def test_a_lost_reply_is_no_damage() -> None:
    """It says nothing of the bytes: no older checkpoint is taken for it, and no mark is left."""
    story = Story()
    newest = story.tell("good", "good")[-1]
    faults = [Fault(kind="lose_reply", key=f"{newest}/index.json", times=None)]
    story.store, store = FaultyStore(story.store, faults), story.store
    with pytest.raises(errors.OutcomeUnknown):
        story.resumed()
    story.store = store
    assert story.marked() == []
    assert story.resumed() == 2
