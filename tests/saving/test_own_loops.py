"""Triggers for events in a loop of one's own: they save, or a warning says that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import AtStart, Every, On, load_weights
from holdfast.store.memory import MemoryStore
from runs import Recorder, new_run


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("caught", [False, True])
def test_an_error_is_saved_for_if_the_loop_reports_it_and_else_warned_of(
    error: type[BaseException], caught: bool
) -> None:
    run, sink = new_run(), Recorder()
    every = Every("100step") | On("exception")

    def train() -> None:
        with run.manager(MemoryStore(), every=every, sinks=[sink]) as manager:
            try:
                for step in (1, 2):
                    run.train()
                    manager.maybe_save(step)
                raise error
            except BaseException:
                if caught:
                    manager.maybe_save(2, event="exception")
                raise

    with pytest.raises(error):
        train()
    saved = [event.step for event in sink.events if event.kind == "committed"]
    warned = [event.step for event in sink.events if 'On("exception")' in event.message]
    assert (saved, warned) == (([2], []) if caught else ([], [2]))


@pytest.mark.parametrize(("always", "saved"), [(False, []), (True, [0])])
def test_loaded_weights_are_no_fresh_start(tmp_path: Path, always: bool, saved: list[int]) -> None:
    with new_run().manager(tmp_path / "source") as manager:
        manager.save(3, wait=True)
    run, sink = new_run(), Recorder()
    load_weights(tmp_path / "source", run.model)
    with run.manager(tmp_path / "run", every=AtStart(always=always), sinks=[sink]) as manager:
        manager.maybe_save(0, event="start")
    assert [event.step for event in sink.events if event.kind == "committed"] == saved
