"""Ends of a run whose remote tier is away, slow or full, and checks of the local tier."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from holdfast import LocalStore
from holdfast.errors import StoreFull
from holdfast.root.catalog import Catalog
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore

HANG_S = 40.0
"""Longer than any run here lasts: one that waited for its uploads would fail."""
KINDS = ("away", "slow", "full")
ENDS: dict[str, AbstractContextManager[Any]] = {
    "goal": nullcontext(),
    "SIGTERM": pytest.raises(SystemExit),
    "SIGINT": pytest.raises(KeyboardInterrupt),
}
SHORT_END_S = 0.2


def remote_of(kind: str) -> FaultyStore:
    """Return a remote tier that takes claims and no checkpoint."""
    error = StoreFull("no space left") if kind == "full" else None
    fault = "hang" if kind == "slow" else "fail"
    ops: tuple[Any, ...] = ("put", "create", "write", "finish")
    return FaultyStore(
        MemoryStore("remote"),
        [
            Fault(kind=fault, op=op, key="step-*", times=None, error=error, deadline_s=HANG_S)
            for op in ops
        ],
    )


def steps_in(store: LocalStore) -> list[int]:
    """Return the steps of a tier's checkpoints, newest first."""
    return [entry.step for entry in Catalog(store).checkpoints()]


def assert_only_local(
    local: LocalStore, remote: FaultyStore, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that the last step is local alone, and that the last warning names it."""
    assert steps_in(local)[0] == step
    assert not Catalog(remote).checkpoints()
    last = [record for record in caplog.records if "not uploaded" in record.getMessage()][-1]
    assert last.levelname == "WARNING"
    assert f"step {step} (" in last.getMessage()
    assert "run the program again" in last.getMessage()
