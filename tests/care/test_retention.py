"""Any sequence of saves, failures, restarts and changes of rule, on the real manager."""

from __future__ import annotations

import math
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
from holdfast.care.retention import candidate, plan
from holdfast.engine import commit
from holdfast.engine.catalog import Catalog
from holdfast.manager import CheckpointManager
from holdfast.policy import retention as policy
from holdfast.policy.retention import All, Best, ByClass, Daily, EveryNth, Last, Rule, Within
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore

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
OPS = st.sampled_from(["put", "delete", "get", "children", "head", None])


class Histories(RuleBasedStateMachine):
    """A run with its restarts; what people were told is what the invariants compare with."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.tree: dict[str, Any] = {"tensor": torch.zeros(2), "step": 0}
        self.manager: CheckpointManager | None = None
        self.keep: Rule = All()
        self.newest: str | None = None
        """The folder at which the run stands, as people were told."""
        self.pinned: set[str] = set()

    @initialize(keep=KEEPS)
    def begin(self, keep: Rule) -> None:
        for key, data in FOREIGN.items():
            self.store.put(key, data)
        self.restart(keep)

    @rule(keep=KEEPS)
    def restart(self, keep: Rule) -> None:
        """Another process with another rule goes on from the newest."""
        self._close()
        manager = self._open(self.store, keep)
        found = manager.resume()
        assert (found.folder if found is not None else None) == self.newest

    @rule(loss=LOSSES)
    def save(self, loss: float) -> None:
        """After it the rule has nothing more to say, whatever the rule was before (D49)."""
        assert self.manager is not None
        before = self._losses()
        self.tree["step"] += 1
        done = self.manager.save(self.tree["step"], metrics={"loss": loss}).wait()
        self.newest, before[done.folder] = done.folder, loss
        self.manager.wait()
        for item in plan(Catalog(self.store), self.keep, epoch=10**6, resumed_from=None):
            assert item.decision.keep, item.decision
            assert item.decision.drop == (), item.decision
        finite = {folder: loss for folder, loss in before.items() if math.isfinite(loss)}
        if finite and str(BEST) in str(self.keep):
            assert min(finite.values()) in self._losses().values()

    @rule(keep=KEEPS, op=OPS, at=st.integers(0, 60), loss=LOSSES)
    def fail(self, keep: Rule, op: Any, at: int, loss: float) -> None:
        """A process in which a few operations of the store fail, somewhere in its life."""
        self._close()
        faulty = FaultyStore(self.store, [Fault(kind="fail", op=op, at=at, times=3)])
        manager = self._open(faulty, keep)
        with suppress(errors.HoldfastError):
            manager.resume()
            self.tree["step"] += 1
            saved = manager.save(self.tree["step"], metrics={"loss": loss}).wait()
            self.newest = saved.folder
            manager.wait()
        self._close()
        found = self._open(self.store, keep).resume()
        if self.newest is not None:
            assert found is not None
            orders = {e.folder: e.order for e in Catalog(self.store).checkpoints()}
            assert orders[found.folder] >= orders[self.newest]
        self.newest = found.folder if found is not None else None

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
        for folder in {*self.pinned, self.newest} - {None}:
            assert candidate(self.store, entries[folder]).dropped == ()

    @invariant()
    def what_is_foreign_is_untouched(self) -> None:
        for key in FOREIGN if self.manager is not None else ():
            assert self.store.get(key) == FOREIGN[key]

    def teardown(self) -> None:
        self._close()

    def _open(self, store: Store, keep: Rule) -> CheckpointManager:
        state = {"tree": self.tree, "extra": {"n": 1}}
        self.keep = keep
        self.manager = CheckpointManager(store, state, keep=keep, sinks=(), preflight=False)
        return self.manager

    def _close(self) -> None:
        if self.manager is not None:
            with suppress(errors.HoldfastError):
                self.manager.close()

    def _losses(self) -> dict[str, float]:
        found = Catalog(self.store).checkpoints()
        return {e.folder: e.manifest.metrics["loss"] for e in found}


def play(num_examples: int, **options: Any) -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=num_examples, stateful_step_count=12, deadline=None, **options
        ),
    )


def test_newest_pinned_and_best_stay_whatever_happens() -> None:
    """R20, R23, D2, D5, D12, D49: and a rule that shrinks takes effect at the next save."""
    play(25)


@pytest.mark.long
def test_newest_pinned_and_best_stay_in_many_histories() -> None:
    """R20, R23, D2, D5, D12, D49: the same, longer."""
    play(500)


def test_a_retention_that_forgets_the_pins_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees what it is for."""
    monkeypatch.setattr(policy, "_protection", lambda entry, resumed_from: "")
    monkeypatch.setattr(commit, "is_held", lambda manifest, marks: False)
    with pytest.raises((AssertionError, KeyError)):
        play(200, phases=[Phase.generate], report_multiple_bugs=False)
