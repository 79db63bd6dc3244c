"""Claims about `every="auto"` of a Trainer."""

from __future__ import annotations

import pytest

from holdfast.maintenance.recorded_costs import read_recorded_costs
from holdfast.policy.auto import Auto
from holdfast.policy.savers import SavePolicy
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, Training
from train.small import make


class Watch(Callback):
    """Keeps what the trigger knows when the training ends."""

    auto: Auto | None = None

    def fit_end(self, training: Training) -> None:
        assert training.manager is not None
        training.manager.wait()
        self.auto = training.manager._session.schedule.auto


@pytest.mark.parametrize(
    "every", ["auto", Auto(mtbf="6h"), SavePolicy(permanent="2step", ephemeral="auto")]
)
def test_a_trainer_takes_it_and_tells_it_what_saves_cost(every: str | Auto | SavePolicy) -> None:
    store, watch = MemoryStore(), Watch()
    training = make(store, every=every, callbacks=[watch])
    training.fit(4)
    again = Watch()
    make(store, every=every, callbacks=[again]).fit(6)
    assert again.auto is not None
    assert again.auto.plan is not None
    facts = read_recorded_costs(store)
    assert len(facts.saves) >= 2
    fresh = Auto(mtbf=again.auto.mtbf)
    fresh.learn(facts.history)
    assert fresh.plan is not None
    assert again.auto.plan.limit == fresh.plan.limit
