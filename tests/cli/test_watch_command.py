"""Claims about `holdfast watch`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, cut_off, folder_of

from holdfast.cli import watch as watch_module
from holdfast.cli.watch import Watcher
from holdfast.keys import Encryption, generate
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import FaultyStore
from runs import begun, new_run, retracted

Command = Callable[..., Result]


def test_once_shows_the_state_of_now(
    holdfast: Command, root: Path, saving: Callable[..., Any]
) -> None:
    manager = saving()
    begun(LocalStore(root), label="step-00000400", epoch=2, sequence=9)
    seen = holdfast("watch", root, "--once", "--json").document
    assert (seen["owner"]["state"], seen["owner"]["epoch"]) == ("alive", 2)
    assert (seen["last_step"], [e["step"] for e in seen["checkpoints"]]) == (300, [300, 200, 100])
    assert [save["nbytes"] for save in seen["saves"]] == [0]
    text = holdfast("watch", root, "--once").out
    assert "last: step 300, " in text
    assert "under way" in text
    manager.close()
    seen = holdfast("watch", root, "--once", "--json").document
    assert (seen["owner"]["state"], seen["saves"], seen["left_behind"]) == ("closed", [], 1)


def test_a_line_is_written_at_each_change_and_no_other(
    holdfast: Command, root: Path, saving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = saving()
    looks = iter(range(4))

    def between(_: float) -> None:
        look = next(looks)
        if look == 1:
            manager.save(400).wait()
            manager.wait()
        elif look == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch_module.time, "sleep", between)
    result = holdfast("watch", root, "--json")
    assert result.code == 130
    assert [json.loads(line)["last_step"] for line in result.out.splitlines()] == [300, 400]


def test_what_is_known_is_not_read_again_and_deletions_are_seen_all_the_same() -> None:
    """Few requests, also where a tombstone stays."""
    store = MemoryStore()
    with new_run().manager(store, preflight=False) as manager:
        for step in (1, 2, 3):
            manager.save(step).wait()
    clock = iter([0.0, 1.0, 2.0, 3.0, 4.0, 100.0, 101.0, 102.0, 103.0])
    noted = FaultyStore(store)
    watcher = Watcher(noted, clock=lambda: next(clock))
    assert watcher.observe_root().last_step == 3
    before = len(noted.ops)
    assert watcher.observe_root().last_step == 3
    assert len(noted.ops) - before <= 10
    assert not any(key.endswith("manifest.json") for _, key in noted.ops[before:])
    newest = str(Catalog(store).attempts()[0])
    assert retracted(store, newest)
    steps = {watcher.observe_root().last_step for _ in range(4)}
    assert 2 in steps


def test_an_encrypted_run_is_watched_without_its_key(holdfast: Command, tmp_path: Path) -> None:
    encrypt = Encryption(keys=generate())
    with new_run().manager(tmp_path / "run", encrypt=encrypt) as manager:
        manager.save(1).wait()
    seen = holdfast("watch", tmp_path / "run", "--once", "--json").document
    assert [entry["step"] for entry in seen["checkpoints"]] == [None]


def test_an_unfinished_save_of_a_dead_process_is_left_behind(holdfast: Command, root: Path) -> None:
    cut_off(folder_of(root, 300))
    seen = holdfast("watch", root, "--once", "--json").document
    assert (seen["left_behind"], seen["saves"], seen["last_step"]) == (1, [], 200)
    assert holdfast("watch", root, "--once", "--every", "soon").code == 2
