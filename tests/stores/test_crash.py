"""A store that is killed itself: what it has acknowledged is there when it comes back."""

from __future__ import annotations

from contextlib import suppress

import pytest

from holdfast.errors import SaveFailed
from runs import new_run
from servers.fixtures import on, use
from servers.program import Program


@pytest.mark.stores
@on("ceph", indirect="own_program")
def test_acknowledged_checkpoints_survive_sigkill_of_the_store(
    own_program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1: the save that is under way completes or fails, and the next one is fine."""
    run = new_run()
    with own_program as service:
        use(service, monkeypatch)
        with run.manager(service.root("crash"), sinks=(), on_failure="warn") as manager:
            for _ in range(3):
                run.train()
                acknowledged = manager.save(run.counters["step"]).wait().step
                run.train()
                manager.save(run.counters["step"])
                own_program.kill()
                own_program.start()
                with suppress(SaveFailed):
                    manager.wait()
                steps = {found.step for found in manager.list()}
                assert acknowledged in steps
                assert steps <= {*range(1, run.counters["step"] + 1)}
