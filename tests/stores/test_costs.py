"""What saves and resumes cost in requests, which are paid for: the table in docs/stores.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from holdfast.manager import CheckpointManager
from holdfast.policy.rules import Last
from servers.faults import FaultProxy, Kind
from servers.fixtures import on, use
from servers.program import Service

BEATS = 3
"""Requests of a heartbeat, which may come at any time."""


class Bill(FaultProxy):
    """A proxy that does no harm, and notes what is asked by what it costs."""

    def __init__(self, upstream: Service) -> None:
        super().__init__(upstream)
        self.asked = Counter[str]()

    def _choose(self, method: str, path: str) -> Kind | None:
        query = path.partition("?")[2]
        if method == "DELETE" or (method == "POST" and query.startswith("delete")):
            self.asked["deletes"] += 1
        elif method in ("PUT", "POST") or "list-type" in query or query.startswith("uploads"):
            self.asked["writes"] += 1
        else:
            self.asked["reads"] += 1
        return super()._choose(method, path)

    def since(self) -> Counter[str]:
        """What was asked since the last call."""
        found, self.asked = self.asked, Counter()
        return found


def state_of(num_elements: int) -> dict[str, Any]:
    """Two trees: with the generators and the index seven files, of which two are long."""
    return {name: {"x": torch.rand(num_elements)} for name in ("model", "optimizer")}


@pytest.mark.full
@on("moto")
def test_saves_and_resumes_cost_few_requests(
    service: Service, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bill: dict[str, Counter[str]] = {}
    options: dict[str, Any] = {"keep": Last(2), "sinks": ()}
    with Bill(service) as proxy:
        use(proxy.service, monkeypatch)
        state = state_of(9_400_000)
        with CheckpointManager(root, state, **options) as manager:
            for what in (
                "the first save",
                "a save",
                "the first save after which one is deleted",
                "a save after which one is deleted",
            ):
                for tree in state.values():
                    tree["x"].add_(1)
                manager.save(len(bill) + 1).wait()
                manager.wait()
                bill[what] = proxy.since()
        bill["close"] = proxy.since()
        with CheckpointManager(root, state_of(9_400_000), **options) as manager:
            assert manager.resume() is not None
            bill["a resume"] = proxy.since()
    for what, asked in bill.items():
        print(what, dict(asked))
    most = {
        "a save": (25, 11, 0),
        # The mark of the deletion is read by each look at it: a user's file may have its name.
        "a save after which one is deleted": (33, 16, 3),
        "a resume": (11, 35, 0),
    }
    for what, limits in most.items():
        for kind, limit in zip(("writes", "reads", "deletes"), limits, strict=True):
            assert bill[what][kind] <= limit + BEATS, (what, kind)
