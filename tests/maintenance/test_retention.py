"""Any sequence of saves of several savers, healthy or not, of failures, restarts and changes of
rule, on the real manager."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast import errors
from holdfast.checkpoints import StateHooks
from holdfast.events import Event
from holdfast.maintenance.retention import candidate, plan_retention
from holdfast.manager import CheckpointManager
from holdfast.ownership import deletion
from holdfast.policy import retention as policy
from holdfast.policy.rule import Candidate, Rule
from holdfast.policy.rules import All, Best, ByClass, Daily, EveryNth, Last, Within
from holdfast.policy.savers import SideSaver, combined_rule
from holdfast.root.catalog import Catalog, Entry
from holdfast.state.capture.edits import StateView
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from marks import full

FOREIGN = {
    "notes.txt": b"mine",
    "step-00000001.backup/weights.pt": b"mine too",
    "step-1/manifest.json": b"of another tool",
    "writers.old/00000001.json": b"old",
}
BEST = Best("loss")
RULES: tuple[Rule, ...] = (
    Last(1),
    Last(3),
    Last(1) | BEST,
    Last(2) | BEST | Best("loss", 2, "max"),
    Last(1) | EveryNth("3step"),
    Last(1) | Within("4step"),
    Last(1) | Daily() | ByClass("all_non_permanent").then_drop("extra"),
    Last(1) | Last(3).then_drop("extra"),
    Last(1) | (BEST | EveryNth("2step")).then_drop("extra"),
    All(),
)
LOSSES = st.sampled_from([0.5, 1.0, 2.0, math.nan, math.inf])
KEEPS = st.sampled_from(RULES)
SIDE_KEEPS = st.sampled_from((Last(1), Last(2), EveryNth("2step"), All()))
KINDS = st.sampled_from(["good", "good", "ill", "part"])
OPS = st.sampled_from(["put", "delete", "get", "children", "head", None])


class Histories(RuleBasedStateMachine):
    """A run with its restarts; what people were told is what the invariants compare with."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.tree: dict[str, Any] = {"tensor": torch.zeros(2), "step": 0}
        self.manager: CheckpointManager | None = None
        self.keep: Rule = All()
        self.side_keep: Rule = All()
        self.kind = "good"
        self.line: list[tuple[str, str]] = []
        """(folder, kind) of what people were told of, oldest first, down to where the run began."""
        self.point: str | None = None
        """What the process at work went on from, until it has saved."""
        self.last: str | None = None
        """The folder that people were told of last."""
        self.pinned: set[str] = set()

    @property
    def newest(self) -> str | None:
        """The folder from which a run must go on, as far as people were told."""
        for kind in ("good", "ill"):
            found = [folder for folder, its_kind in self.line if its_kind == kind]
            if found:
                return found[-1]
        return None

    @initialize(keep=KEEPS, side_keep=SIDE_KEEPS)
    def begin(self, keep: Rule, side_keep: Rule) -> None:
        for key, data in FOREIGN.items():
            self.store.put(key, data)
        self.restart(keep, side_keep)

    @rule(keep=KEEPS, side_keep=SIDE_KEEPS)
    def restart(self, keep: Rule, side_keep: Rule) -> None:
        """Another process with another rule goes on from the newest that is whole and healthy."""
        self._close()
        manager = self._open(self.store, keep, side_keep)
        found = manager.resume()
        self.point = found.folder if found is not None else None
        assert self.point == self.newest

    @rule(loss=LOSSES, kind=KINDS)
    def save(self, loss: float, kind: str) -> None:
        """After it the rule has nothing more to say, whatever the rule was before (D49)."""
        assert self.manager is not None
        before = self._losses()
        self.kind = kind if self.newest is not None else "good"
        self.tree["step"] += 1
        done = self.manager.save(self.tree["step"], metrics={"loss": loss}).wait()
        self._told(done.folder, self.kind)
        if self.kind == "good":
            before[done.folder] = loss
        self.manager.wait()
        self._expect_nothing_left_to_do()
        finite = {folder: loss for folder, loss in before.items() if math.isfinite(loss)}
        if finite and str(BEST) in str(self.keep):
            assert min(finite.values()) in self._losses().values()

    @precondition(lambda self: self.newest is not None)
    @rule()
    def save_beside(self) -> None:
        """The side saver saves its part at even steps."""
        assert self.manager is not None
        self.kind = "good"
        self.tree["step"] += 1
        # As a trainer calls it, which decides by itself whether a rule Best asks for a save.
        step = self.tree["step"]
        pending = self.manager.maybe_save(step, metrics={"loss": 1.0}, event=["step"])
        if pending is not None:
            done = pending.wait()
            assert (done.savers, done.left_out) == (("side",), ("extra", "rng"))
            self._told(done.folder, "part")
            self.manager.wait()
            self._expect_nothing_left_to_do()

    @rule(keep=KEEPS, op=OPS, at=st.integers(0, 60), loss=LOSSES)
    def fail(self, keep: Rule, op: Any, at: int, loss: float) -> None:
        """A process in which a few operations of the store fail, somewhere in its life."""
        self._close()
        self.kind = "good"
        before = self.newest
        faulty = FaultyStore(self.store, [Fault(kind="fail", op=op, at=at, times=3)])
        manager = self._open(faulty, keep, self.side_keep)
        with suppress(errors.HoldfastError):
            manager.resume()
            self.tree["step"] += 1
            saved = manager.save(self.tree["step"], metrics={"loss": loss}).wait()
            before = saved.folder
            manager.wait()
        self._close()
        found = self._open(self.store, keep, self.side_keep).resume()
        if before is not None:
            assert found is not None
            orders = {e.folder: e.order for e in Catalog(self.store).checkpoints()}
            assert orders[found.folder] >= orders[before]
        self.point = found.folder if found is not None else None
        self.last = None
        entries = Catalog(self.store).lineage_entries()
        self.line = [(e.folder, _kind_of(e)) for e in entries][::-1]

    @precondition(lambda self: self.newest is not None)
    @rule()
    def pin(self) -> None:
        assert self.manager is not None
        assert self.newest is not None
        self.manager.pin(self.newest)
        self.pinned.add(self.newest)

    @invariant()
    def what_must_stay_is_there(self) -> None:
        entries = {entry.folder: entry for entry in Catalog(self.store).checkpoints()}
        assert self.pinned <= set(entries)
        assert {self.last} - {None} <= set(entries)
        for folder in {*self.pinned, self.newest} - {None}:
            assert candidate(self.store, entries[folder]).dropped == ()

    @invariant()
    def what_is_foreign_is_untouched(self) -> None:
        for key in FOREIGN if self.manager is not None else ():
            assert self.store.get(key) == FOREIGN[key]

    def teardown(self) -> None:
        self._close()

    def _open(self, store: Store, keep: Rule, side_keep: Rule) -> CheckpointManager:
        state = {"tree": self.tree, "extra": {"n": 1}}
        self.keep, self.side_keep = keep, side_keep
        self.manager = CheckpointManager(
            store,
            state,
            keep=keep,
            savers=[self._side()],
            hooks=StateHooks(before_save=self._health, edit_save=self._leave_out),
            sinks=(),
            preflight=False,
        )
        return self.manager

    def _side(self) -> SideSaver:
        return SideSaver("side", every="2step", components=["tree"], keep=self.side_keep)

    def _health(self, *_: object) -> Sequence[str]:
        return ["it is ill"] if self.kind == "ill" else ()

    def _leave_out(self, view: StateView) -> None:
        if self.kind == "part":
            del view["extra"]

    def _told(self, folder: str, kind: str) -> None:
        """A commit makes the line that of its process: what was passed over is left behind."""
        if self.point is not None:
            folders = [name for name, _ in self.line]
            del self.line[folders.index(self.point) + 1 :]
            self.point = None
        self.line.append((folder, kind))
        self.last = folder

    def _expect_nothing_left_to_do(self) -> None:
        whole = combined_rule(self.keep, [self._side()], {"tree", "extra", "rng"})
        catalog = Catalog(self.store)
        for item in plan_retention(
            catalog, catalog.checkpoints(), whole, epoch=10**6, resumed_from=None
        ):
            assert item.decision.keep, item.decision
            assert item.decision.drop == (), item.decision

    def _close(self) -> None:
        if self.manager is not None:
            with suppress(errors.HoldfastError):
                self.manager.close()

    def _losses(self) -> dict[str, float]:
        found = Catalog(self.store).checkpoints()
        return {e.folder: e.manifest.metrics["loss"] for e in found if _kind_of(e) == "good"}


def _kind_of(entry: Entry) -> str:
    if entry.manifest.left_out:
        return "part"
    return "ill" if entry.manifest.unhealthy else "good"


def play(num_examples: int, **options: Any) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=num_examples, stateful_step_count=12, deadline=None, **options
        ),
    )


@pytest.mark.parametrize("num_histories", [8, *full(25)])
def test_newest_pinned_and_best_stay_whatever_happens(num_histories: int) -> None:
    """R20, R23, D2, D5, D12, D49: and a rule that shrinks takes effect at the next save."""
    play(num_histories)


@pytest.mark.long
def test_newest_pinned_and_best_stay_in_many_histories() -> None:
    """R20, R23, D2, D5, D12, D49: the same, longer."""
    play(500)


@pytest.mark.full
def test_a_retention_that_forgets_the_pins_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees what it is for."""
    monkeypatch.setattr(policy, "_protection", lambda entry, resumed_from: "")
    monkeypatch.setattr(deletion, "is_held", lambda manifest, marks: False)
    with pytest.raises((AssertionError, KeyError)):
        play(200, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False)


@pytest.mark.full
def test_a_retention_that_counts_the_unhealthy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for the health of what fills a quota and of what others go for."""
    monkeypatch.setattr(policy, "_map_newest", lambda newest_first: {0: "newest"})
    monkeypatch.setattr(Candidate, "counts", Candidate.is_usable)
    with pytest.raises((AssertionError, KeyError)):
        play(200, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False)


def test_a_checkpoint_whose_metric_is_nan_stands_for_others_like_any_other() -> None:
    """nan is not equal to itself, and the manifest is as it was all the same."""
    store, state = MemoryStore(), {"a": {"b": 1}}
    with CheckpointManager(store, state) as manager:
        for step in (1, 2):
            state["a"]["b"] = step
            manager.save(step, metrics={"loss": math.nan}).wait()
    hooks = StateHooks(before_save=lambda *_: ["it is ill"])
    with CheckpointManager(store, state, keep=Last(1), hooks=hooks) as manager:
        manager.resume()
        state["a"]["b"] = 3
        manager.save(3).wait()
        manager.wait()
        assert [found.step for found in manager.list()] == [3, 2]


@pytest.mark.parametrize("op", ["put", "delete"])
def test_a_deletion_that_fails_anywhere_is_ended_after_the_next_save(op: Any) -> None:
    """D43, invariant 8: also when the manifest is gone by then, and only files are left."""
    store = MemoryStore()
    fails = Fault(kind="fail", op=op, key="step-00000001*", at=_puts_of_a_save() * (op == "put"))
    events: list[Event] = []
    with CheckpointManager(
        FaultyStore(store, [fails]), {"a": {"b": 1}}, keep=Last(1), sinks=[events.append]
    ) as manager:
        first = manager.save(1).wait().folder
        manager.save(2).wait()
        manager.wait()
        assert [e.step for e in events if e.kind == "housekeeping_failed"] == [1]
        assert [*store.list(f"{first}/")]
        manager.save(3).wait()
        manager.wait()
        assert not [*store.list(f"{first}/")]
    assert [e.step for e in events if e.kind == "retracted"] == [1, 2]


def _puts_of_a_save() -> int:
    store = FaultyStore(MemoryStore())
    with CheckpointManager(store, {"a": {"b": 1}}) as manager:
        folder = manager.save(1).wait().folder
    return sum(op == "put" and key.startswith(folder) for op, key in store.ops)
