"""The demo's numbers."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from holdfast.demo.record import DemoPlan, draw_kills, fast_plan
from holdfast.errors import UsageError


@pytest.mark.parametrize("plan", [DemoPlan(seed=3), fast_plan(4)])
def test_a_plan_crosses_the_pipe_unchanged(plan: DemoPlan) -> None:
    assert msgspec.json.decode(plan.encoded(), type=DemoPlan) == plan


@pytest.mark.parametrize("plan", [DemoPlan(seed=3), fast_plan(4)])
@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_kills_come_in_order_with_saves_before_and_between_them(
    plan: DemoPlan, draw: float
) -> None:
    kills = draw_kills(plan, [draw] * 6)
    moments = [0, *(kill.after_step for kill in kills), plan.num_steps]
    assert all(b - a > 2 * plan.save_every for a, b in pairwise(moments))
    assert [kill.inside_save for kill in kills] == [False, True, False]
    assert [kill.flip_bit for kill in kills] == [False, False, True]


def test_three_kills_need_six_draws() -> None:
    with pytest.raises(UsageError, match="six draws, not 2"):
        draw_kills(DemoPlan(seed=0), [0.1, 0.2])
