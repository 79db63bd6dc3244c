"""A stop before and after every single store operation of saves, retention, resume and gc.

A stop is what a kill is to the store: nothing after it happens. Whatever was acknowledged before
must be there afterwards, whole, and the run must go on. Here that is at the operations that change
the store (`stops.CHANGES`), in the long tier at all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from holdfast import errors
from holdfast.maintenance import gc as gc_module
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.verify import verify
from holdfast.ownership import deletion
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.saving import save as save_module
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Kind, Stopped
from marks import full
from runs import remove_folder
from stops import stops
from ways import WAYS, Tiny, opened, save_and_go_on

Stores = Callable[[int], Store]


def scenario(
    store: Store,
    acknowledged: list[int],
    make: Callable[[], Tiny] = Tiny,
    num_kept: int = 1,
    **options: Any,
) -> None:
    """Resume, three saves of which one is kept, and gc. Appends each acknowledged step."""
    tiny = make()
    with opened(store, tiny, keep=Last(num_kept), **options) as manager:
        found = manager.resume()
        last = found.step if found is not None else 0
        for step in range(last + 1, last + 4):
            acknowledged.append(save_and_go_on(manager, tiny, step).step)
        manager.wait()
    collect_garbage(store)


def check(
    store: Store, acknowledged: list[int], make: Callable[[], Tiny] = Tiny, num_kept: int = 1
) -> None:
    """What was acknowledged is there, whole; the run goes on; gc leaves no files behind."""
    entries = Catalog(store).checkpoints()
    for entry in entries:
        report = verify(store, entry.folder)
        assert report.ok, report.problems
    newest = max(acknowledged, default=0)
    head = Catalog(store).head()
    assert (head.step if head is not None else 0) >= newest
    tiny = make()
    with opened(store, tiny, keep=Last(num_kept)) as manager:
        found = manager.resume()
        assert (found.step if found is not None else 0) == tiny.step() >= newest
        tiny.become(newest + 10)
        manager.save(newest + 10).wait()
        manager.wait()
        kept = {entry.folder for entry in Catalog(store).checkpoints()}
        assert 1 <= len(kept) <= num_kept
    collect_garbage(store)
    files = [info.key for info in store.list() if not info.key.startswith(("writers/", "history/"))]
    loose = [
        k for k in files if k.partition("/")[0] not in kept and not k.endswith("manifest.json")
    ]
    assert [key for key in loose if key != "latest"] == []


def run_stopped(store: Store, fault: Fault, scenario: Callable[..., None]) -> list[int]:
    """The scenario on a store that stops at one operation; the steps that were acknowledged."""
    acknowledged: list[int] = []
    with suppress(Stopped, errors.HoldfastError):
        scenario(FaultyStore(store, [fault]), acknowledged)
    return acknowledged


def undisturbed(store: Store, scenario: Callable[..., None]) -> FaultyStore:
    """What wrote down the operations of the scenario."""
    clean = FaultyStore(store)
    scenario(clean, [])
    return clean


def second_run(store: Store) -> Store:
    """The store with an earlier run's checkpoint, a leftover attempt and an unfinished deletion."""
    run_stopped(store, Fault(kind="stop_before", at=40), scenario)
    run_stopped(store, Fault(kind="stop_after", at=90), scenario)
    return store


def copies_of(made: Store, make: Stores) -> Stores:
    """New stores with all that this one holds."""

    def copy(number: int) -> Store:
        store = make(number)
        if isinstance(made, LocalStore):
            shutil.copytree(made.url, store.url, symlinks=True, dirs_exist_ok=True)
        else:
            for info in made.list():
                store.put(info.key, made.get(info.key))
        return store

    return copy


@pytest.fixture(params=["local", *full("memory")])
def stores(request: pytest.FixtureRequest, ram_path: Path) -> Stores:
    """New, empty stores of one kind."""

    def make(number: int) -> Store:
        return LocalStore(ram_path / str(number)) if request.param == "local" else MemoryStore()

    return make


@pytest.fixture(params=["empty", *full("after two crashes")])
def begun(request: pytest.FixtureRequest, stores: Stores) -> Stores:
    """New stores of one kind, with what the scenario finds there."""
    return stores if request.param == "empty" else copies_of(second_run(stores(-2)), stores)


changes_or_all = pytest.mark.parametrize(
    "at_all", [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)


@changes_or_all
@pytest.mark.parametrize("kind", ["stop_after", *full("stop_before")])
def test_a_stop_at_every_operation_loses_nothing(begun: Stores, kind: Kind, at_all: bool) -> None:
    """R1, R2, R9, R20, R23; invariants 1, 2, 4."""
    found = [*stops(kind, undisturbed(begun(-1), scenario), at_all=at_all)]
    assert len(found) > 40
    sweep(begun, found)


@pytest.mark.full
@changes_or_all
def test_nor_does_one_of_compressed_saves(stores: Stores, at_all: bool) -> None:
    """R1, R2, R9; invariants 1, 2, 4: files whose length is known only at the end."""
    compressed = partial(scenario, compress="zstd")
    clean = undisturbed(stores(-1), compressed)
    sweep(stores, stops("stop_after", clean, at_all=at_all), compressed)


STRIDES = {"overlap": 1, "waves": 5, "links": 1}
"""Every so many changes are tried, where not all operations are."""


@pytest.mark.full
@changes_or_all
@pytest.mark.parametrize("way", STRIDES)
def test_nor_does_one_of_saves_made_otherwise(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, at_all: bool
) -> None:
    """R1, R2, R9, R14; invariants 1, 2, 4, 10: also while copies overlap with training, of a state
    larger than the memory for it, and where files are linked."""
    shown: list[str] = []
    chosen = WAYS[way]
    chosen.have_noted(monkeypatch.setattr, partial(shown.append, way))
    make, num_kept = chosen.new_state, chosen.num_kept
    lived = partial(scenario, make=make, num_kept=num_kept, **chosen.options)
    checked = partial(check, make=make, num_kept=num_kept)
    clean = undisturbed(LocalStore(ram_path / "whole"), lived)
    assert way in shown
    found = stops("stop_after", clean, at_all=at_all)
    for at, fault in enumerate(islice(found, 0, None, 1 if at_all else STRIDES[way])):
        store = LocalStore(ram_path / str(at))
        checked(store, run_stopped(store, fault, lived))
        shutil.rmtree(ram_path / str(at))


def sweep(new: Stores, faults: Iterable[Fault], scenario: Callable[..., None] = scenario) -> None:
    """Stop at each of these operations, on a new store each time."""
    for number, fault in enumerate(faults):
        store = new(number)
        check(store, run_stopped(store, fault, scenario))


def no_tombstone(store: Store, folder: str, tombstone: object) -> None:
    """Mutant: files go while the manifest still says that they are there."""


def commit_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the manifest is put before the index."""
    real_put, real_commit = LocalStore.put, save_module.commit
    held: list[Callable[[], None]] = []

    def put(self: LocalStore, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.endswith("index.json"):
            held.append(lambda: real_put(self, key, data))
            return
        real_put(self, key, data, if_absent=if_absent)

    def commit(*args: Any) -> None:
        real_commit(*args)
        held.pop()()

    monkeypatch.setattr(LocalStore, "put", put)
    monkeypatch.setattr(save_module, "check_sizes", lambda *_: None)
    monkeypatch.setattr(save_module, "commit", commit)


def delete_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: retention deletes before the new one is committed."""
    real = save_module.commit

    def commit(store: Store, attempt: Any, manifest: Any) -> None:
        for entry in Catalog(store).checkpoints():
            remove_folder(store, entry.folder)
        real(store, attempt, manifest)

    monkeypatch.setattr(save_module, "commit", commit)


def files_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a deletion removes files before it has put the tombstone."""
    monkeypatch.setattr(deletion, "_put_tombstone", no_tombstone)


def gc_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: gc decides, and leaves the files (R9)."""
    monkeypatch.setattr(gc_module, "remove_files", lambda *args, **options: None)


@pytest.mark.parametrize("mutant", full(delete_first, commit_first, files_first, gc_forgets))
def test_the_check_catches(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, ram_path: Path
) -> None:
    """R1, R2, R9, R23: each breaks the order of our own code; the test above must notice."""
    mutant(monkeypatch)
    untroubled = LocalStore(ram_path / "untroubled")
    clean = FaultyStore(untroubled)
    acknowledged: list[int] = []
    scenario(clean, acknowledged)
    check(untroubled, acknowledged)
    with pytest.raises((AssertionError, errors.HoldfastError)):
        sweep(
            lambda at: LocalStore(ram_path / str(at)),
            chain(stops("stop_before", clean), stops("stop_after", clean)),
        )
