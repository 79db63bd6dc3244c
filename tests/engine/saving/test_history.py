"""Settings of a run are recorded as text, and compared from life to life."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.saving.history import MAX_LIVES, History, as_text
from holdfast.format.manifest import Change
from holdfast.store.memory import MemoryStore
from runs import Recorder, new_run


@dataclass
class Plan:
    every: str
    loader: Any


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (1e-4, "0.0001"),
        ("text", "text"),
        (["a", 1], "['a', 1]"),
        ({"a": (1, 2)}, "{a: [1, 2]}"),
        (Path("a/b"), "PosixPath('a/b')"),
        (nn.Linear, "Linear"),
        (nn.Linear(1, 1), "Linear"),
        (test := lambda: None, test.__qualname__),
        ("x" * 999, "x" * 200),
    ],
)
def test_a_setting_is_a_text(value: object, text: str) -> None:
    assert as_text(value) == text


def test_equal_settings_of_two_processes_have_one_text() -> None:
    assert as_text(Plan("1ep", object())) == as_text(Plan("1ep", object()))
    assert " at 0x" not in as_text([Plan("1ep", object())])


def test_only_the_newest_changes_are_carried_along() -> None:
    store, run = MemoryStore(), new_run()
    with run.manager(store) as manager:
        manager.save(1, wait=True)
    from holdfast.engine.roots.catalog import Catalog

    manifest = Catalog(store).checkpoints()[0].manifest
    old = tuple(Change(epoch=n, step=n, what=("a: 1 → 2",)) for n in range(1, MAX_LIVES + 1))
    import msgspec

    history = History({f"s{n}": n for n in range(99)}, world_size=1)
    history.origins = {"optimizer.param_groups.0.lr": "0.1"}
    what = history.stand_on(msgspec.structs.replace(manifest, changes=old), MAX_LIVES + 1)
    assert len(what) == 50
    assert what[-1].endswith("more")
    assert len(history.changes) == MAX_LIVES
    assert history.changes[-1] == Change(epoch=MAX_LIVES + 1, step=1, what=what)


def test_versions_and_the_world_size_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    store, run, sink = MemoryStore(), new_run(), Recorder()
    with run.manager(store) as manager:
        manager.save(1, wait=True)
    monkeypatch.setattr(torch, "__version__", "99.0")
    with new_run().manager(store, sinks=[sink]) as manager:
        manager.resume()
        manager.save(2, wait=True)
    (event,) = [event for event in sink.events if event.kind == "changed"]
    assert "→ 99.0" in event.message
    assert event.step == 1
    with new_run().manager(store, sinks=[again := Recorder()]) as manager:
        manager.resume()
    assert not [event for event in again.events if event.kind == "changed"]
