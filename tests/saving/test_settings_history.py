"""Settings of a run are recorded as text, and compared from life to life."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import CheckpointManager
from holdfast.checkpoints import StateHooks
from holdfast.errors import ManagerUnusable, UsageError
from holdfast.format.manifest import Change, Timestamp
from holdfast.policy.triggers import Metrics
from holdfast.root.catalog import Catalog
from holdfast.saving.settings_history import MAX_LIVES, SettingsHistory, as_text
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
        ("caf\udce9", r"caf\udce9"),
    ],
)
def test_a_setting_is_a_text(value: object, text: str) -> None:
    assert as_text(value) == text


def test_a_long_setting_is_compared_to_its_end() -> None:
    one, other = as_text("x" * 999 + "a"), as_text("x" * 999 + "b")
    assert one != other
    assert max(len(one), len(other)) <= 200


def test_nested_settings_have_dotted_names() -> None:
    config = {"data": {"mask": 0.1, "files": {}, "more": Namespace(seed=1)}, "run": Plan("1ep", 2)}
    assert SettingsHistory(config, world_size=1).config == {
        "data.mask": "0.1",
        "data.files": "{}",
        "data.more.seed": "1",
        "run.every": "1ep",
        "run.loader": "2",
    }


def test_text_that_is_not_unicode_is_saved_escaped_or_refused_by_name() -> None:
    store = MemoryStore()
    hooks = StateHooks(before_save=lambda now, metrics: ["caf\udce9"])
    config = {"data": {"path": "/caf\udce9"}}
    with new_run().manager(store, config=config, hooks=hooks) as manager:
        checkpoint = manager.save(1, reason="caf\udce9", wait=True).committed.result()
        with pytest.raises(UsageError, match=r"metrics.*caf"):
            manager.save(2, metrics={"caf\udce9": 1.0})
    from holdfast.root.catalog import Catalog

    entry = Catalog(store).find_checkpoint(checkpoint.path.rpartition("/")[2])
    assert entry.manifest.config["data.path"] == r"/caf\udce9"
    assert entry.manifest.unhealthy == (r"caf\udce9",)


@pytest.mark.parametrize(("dropout", "trains", "warns"), [(0.5, 0, 1), (0.5, 1, 0), (0.1, 0, 0)])
def test_a_finished_run_under_other_settings_is_warned_of(
    dropout: float, trains: int, warns: int
) -> None:
    """As a second trial in the root of the first one, which would train nothing."""
    store, run = MemoryStore(), new_run()
    with run.manager(store, config={"model": {"dropout": 0.1}}) as manager:
        manager.save(1, wait=True)
    with new_run().manager(
        store, config={"model": {"dropout": dropout}}, sinks=[sink := Recorder()]
    ) as manager:
        manager.resume()
        for step in range(2, 2 + trains):
            manager.maybe_save(step)
    warnings = [e.message for e in sink.events if "no step was trained" in e.message]
    assert len(warnings) == warns
    assert all("model.dropout: 0.1 → 0.5" in text for text in warnings)


def test_a_new_run_and_each_save_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast")
    with new_run().manager(MemoryStore()) as manager:
        manager.resume()
        for step in (1, 2):
            manager.save(step, wait=True)
    lines = [line for line in caplog.messages if re.match("starting a new run|saved step", line)]
    assert [line[:12] for line in lines] == ["starting a n", "saved step 1", "saved step 2"]


def test_a_manager_is_for_one_thread_at_a_time() -> None:
    """Its first saves from two threads would claim the run twice, each against the other."""
    refused: list[Exception] = []

    def save(manager: CheckpointManager) -> None:
        try:
            manager.save(2)
        except ManagerUnusable as error:
            refused.append(error)

    def before_save(now: Timestamp, metrics: Metrics) -> list[str]:
        other = Thread(target=save, args=(manager,))
        other.start()
        other.join()
        return []

    with new_run().manager(MemoryStore(), hooks=StateHooks(before_save=before_save)) as manager:
        manager.save(1, wait=True)
        assert [checkpoint.step for checkpoint in manager.list()] == [1]
    [error] = refused
    assert "thread" in str(error)


def test_equal_settings_of_two_processes_have_one_text() -> None:
    assert as_text(Plan("1ep", object())) == as_text(Plan("1ep", object()))
    assert " at 0x" not in as_text([Plan("1ep", object())])


def test_only_the_newest_changes_are_carried_along() -> None:
    store, run = MemoryStore(), new_run()
    with run.manager(store) as manager:
        manager.save(1, wait=True)
    from holdfast.root.catalog import Catalog

    manifest = Catalog(store).checkpoints()[0].manifest
    old = tuple(Change(epoch=n, step=n, what=("a: 1 → 2",)) for n in range(1, MAX_LIVES + 1))
    import msgspec

    history = SettingsHistory({f"s{n}": n for n in range(99)}, world_size=1)
    history.origins = {"optimizer.param_groups.0.lr": "0.1"}
    what = history.compare_with_base(msgspec.structs.replace(manifest, changes=old), MAX_LIVES + 1)
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


def test_settings_are_merged_once_however_many_there_are() -> None:
    """They were merged for each setting, which took seconds for some thousands."""
    store, run, reads = MemoryStore(), new_run(), 0

    class Counted(SettingsHistory):
        @property
        def config(self) -> dict[str, str]:
            nonlocal reads
            reads += 1
            return super().config

    settings = {f"layer{number}": number for number in range(100)}
    with run.manager(store, config=settings, sinks=()) as manager:
        manager.save(1).wait()
    (entry,) = Catalog(store).checkpoints()
    changes = Counted({**settings, "layer7": 0}, world_size=1).compare_with_base(entry.manifest, 2)
    assert "layer7: 7 → 0" in changes
    assert reads <= 2
