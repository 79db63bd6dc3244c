"""Claims about `holdfast rm`, `thin` and `untag`."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cli.roots import Result, flip, folder_of

from children import environment
from holdfast import Encryption, keys
from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Emitter
from holdfast.maintenance.delete import delete_as_planned, examine
from holdfast.maintenance.verify import verify_root
from holdfast.manager import CheckpointManager
from holdfast.ownership.leases import leased
from holdfast.root.catalog import Catalog
from holdfast.root.commit import sync_checkpoint
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import FaultyStore, Stopped
from runs import new_run
from stops import stops

Command = Callable[..., Result]
SURE = ("--yes", "--reason", "test")


def steps(root: Path) -> list[int]:
    return [entry.step for entry in Catalog(LocalStore(root)).checkpoints()]


def state_of(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))


@pytest.fixture
def longer(holdfast: Command, root: Path, saving: Callable[..., Any]) -> Path:
    """The root with step 400, and no owner."""
    manager = saving()
    manager.save(400).wait()
    manager.close()
    return root


def test_one_checkpoint_goes_and_its_reason_stays_in_the_log(
    holdfast: Command, longer: Path
) -> None:
    result = holdfast("rm", f"{longer}@step=300", *SURE, "--json")
    assert result.code == 0, result.err
    document = result.document
    assert (document["done"], document["step"], document["reason"]) == (True, 300, "test")
    assert document["resumes_from"] == folder_of(longer, 400).name
    assert steps(longer) == [400, 200, 100]
    assert holdfast("verify", longer).code == 0
    purpose = f"deleted {document['folder']}: test"
    assert holdfast("log", longer, "--json").document["sessions"][-1]["purpose"] == purpose
    assert purpose in holdfast("log", longer).out


@pytest.mark.parametrize(
    ("which", "options", "said"),
    [
        ("step=100", SURE, "it is pinned (--even-pinned)"),
        ("step=200", SURE, "it is tagged paper (--even-pinned)"),
        ("paper", SURE, "it is tagged paper (--even-pinned)"),
        ("step=400", SURE, "the run would resume from it (--even-latest)"),
        ("latest", SURE, "name the step or the folder"),
        pytest.param("step=3*", SURE, "one checkpoint at a time", marks=pytest.mark.full),
        pytest.param("step=100..300", SURE, "one checkpoint at a time", marks=pytest.mark.full),
        pytest.param("step=100,300", SURE, "one checkpoint at a time", marks=pytest.mark.full),
        pytest.param("step=30", SURE, "no checkpoint for 'step=30'", marks=pytest.mark.full),
        pytest.param("step=300", ("--yes",), "say why", marks=pytest.mark.full),
        ("step=300", ("--yes", "--reason", " "), "say why"),
        ("step=300", ("--yes", "--reason", "x" * 1001), "more than 1000"),
        pytest.param(
            "step=300", ("--reason", "x"), "no terminal for the question", marks=pytest.mark.full
        ),
        pytest.param(None, SURE, "Name one checkpoint", marks=pytest.mark.full),
    ],
)
def test_a_command_that_may_be_mistyped_deletes_nothing(
    holdfast: Command, longer: Path, which: str | None, options: tuple[str, ...], said: str
) -> None:
    before = state_of(longer)
    target = f"{longer}@{which}" if which is not None else str(longer)
    result = holdfast("rm", target, *options)
    assert (result.code in (2, 3), said in result.err) == (True, True), result.err
    assert state_of(longer) == before


def test_a_step_that_was_saved_twice_is_not_guessed(
    holdfast: Command, longer: Path, saving: Callable[..., Any]
) -> None:
    """The branch that a rollback left behind has the same step."""
    manager = saving()
    manager.resume("step=200")
    manager.save(300).wait()
    manager.save(400).wait()
    manager.close()
    result = holdfast("rm", f"{longer}@step=300", *SURE)
    assert result.code == 2
    assert result.err.count("(step 300, ") == 2
    assert len(steps(longer)) == 6


def test_a_dry_run_says_what_would_happen(holdfast: Command, longer: Path) -> None:
    before = state_of(longer)
    fine = holdfast("rm", f"{longer}@step=300", "--dry-run", "--json")
    assert (fine.code, fine.document["done"], fine.document["nbytes"] > 1000) == (0, False, True)
    kept = holdfast("rm", f"{longer}@step=100", "--dry-run")
    assert (kept.code, "it is pinned" in kept.out) == (1, True)
    assert state_of(longer) == before


def test_the_latest_is_deleted_with_even_latest_and_the_run_resumes_before_it(
    holdfast: Command, longer: Path
) -> None:
    result = holdfast("rm", f"{longer}@step=400", *SURE, "--even-latest")
    assert result.code == 0, result.err
    assert holdfast("show", longer, "--json").document["checkpoint"]["step"] == 300
    run = new_run()
    with run.manager(longer) as manager:
        assert manager.resume().step == 300  # type: ignore[union-attr]


def test_a_pinned_checkpoint_is_deleted_with_even_pinned(holdfast: Command, longer: Path) -> None:
    assert holdfast("rm", f"{longer}@step=100", *SURE, "--even-pinned").code == 0
    assert holdfast("rm", f"{longer}@paper", *SURE, "--even-pinned").code == 0
    assert steps(longer) == [400, 300]


def test_nothing_is_deleted_if_the_checkpoint_to_resume_from_is_damaged(
    holdfast: Command, longer: Path
) -> None:
    flip(folder_of(longer, 400) / "model-00000.safetensors", 5000)
    result = holdfast("rm", f"{longer}@step=300", *SURE)
    assert result.code == 1
    assert "cannot be read back" in result.err
    assert steps(longer) == [400, 300, 200, 100]


def test_a_checkpoint_that_is_being_read_is_kept(holdfast: Command, longer: Path) -> None:
    with leased(LocalStore(longer), folder_of(longer, 300).name):
        result = holdfast("rm", f"{longer}@step=300", *SURE)
    assert (result.code, "reads it" in result.out) == (1, True)
    assert 300 in steps(longer)


def test_a_reader_that_comes_after_the_claim_keeps_it_and_the_answer_says_what_has_moved(
    longer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, quiet = LocalStore(longer), Emitter(())
    entry = Catalog(store).find_checkpoint("step=400")
    with ExitStack() as readers:

        def late(*given: Any) -> None:
            readers.enter_context(leased(store, entry.folder, emit=quiet))
            sync_checkpoint(*given)

        monkeypatch.setattr("holdfast.maintenance.delete.sync_checkpoint", late)
        why = delete_as_planned(store, examine(store, entry), reason="test", emit=quiet)
    before = folder_of(longer, 300).name
    assert f"reads it; but the run begins from {before} from now on" in why
    assert steps(longer) == [400, 300, 200, 100]


def test_the_reason_of_an_encrypted_checkpoint_is_nowhere(
    holdfast: Command, tmp_path: Path
) -> None:
    key, run = tmp_path / "key", tmp_path / "run"
    assert holdfast("keys", "generate", key).code == 0
    with new_run().manager(run, encrypt=Encryption(keys=keys.from_file(key))) as manager:
        for step in (1, 2):
            manager.save(step).wait()
    given = ("--yes", "--reason", "SECRET")
    assert holdfast("--key-file", key, "rm", f"{run}@step=1", *given).code == 0
    assert not any(b"SECRET" in path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_a_run_with_a_live_owner_is_refused(
    holdfast: Command, longer: Path, saving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.ownership.claim._DROPPED_S", 0.0)
    saving()
    result = holdfast("rm", f"{longer}@step=300", *SURE)
    assert (result.code, "owns this run" in result.err) == (1, True)
    assert 300 in steps(longer)


def test_a_terminal_is_asked_for_the_reason_and_once_more(longer: Path) -> None:
    """Ctrl-D at the question, as Ctrl-C, ends without a traceback."""
    asked = (("wrong run\n\x04", 130, True), ("wrong run\nn\n", 1, True))
    for answers, code, left in (*asked, ("wrong run\ny\n", 0, False)):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "holdfast.cli", "rm", f"{longer}@step=300"]
        child = subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=environment()
        )
        os.write(ours, answers.encode())
        out, _ = child.communicate(timeout=120)
        os.close(theirs)
        os.close(ours)
        assert (child.returncode, 300 in steps(longer)) == (code, left), out


# thin


def test_a_component_is_dropped_and_the_rest_loads(holdfast: Command, longer: Path) -> None:
    drop = ("--drop", "optimizer", "--drop", "scheduler")
    result = holdfast("thin", f"{longer}@step=300", *drop, "--yes", "--json")
    assert result.code == 0, result.err
    assert result.document["drop"] == ["optimizer", "scheduler"]
    verified = holdfast("verify", f"{longer}@step=300")
    assert (verified.code, "optimizer was dropped" in verified.out) == (0, True)
    assert holdfast("show", longer, "--json").document["checkpoint"]["step"] == 400
    again = holdfast("thin", f"{longer}@step=300", *drop, "--yes", "--json").document
    assert (again["done"], again["nbytes"]) == (True, 0)


@pytest.mark.parametrize(
    ("which", "drop", "said"),
    [
        ("step=300", ["optimzer"], "It has no optimzer"),
        (
            "step=300",
            ["model", "optimizer", "scheduler", "counters", "rng"],
            "all of its components",
        ),
        pytest.param("step=300", [], "--drop", marks=pytest.mark.full),
        pytest.param("step=100", ["optimizer"], "it is pinned", marks=pytest.mark.full),
        pytest.param("step=400", ["optimizer"], "--even-latest", marks=pytest.mark.full),
    ],
)
def test_a_command_that_may_be_mistyped_drops_nothing(
    holdfast: Command, longer: Path, which: str, drop: list[str], said: str
) -> None:
    before = state_of(longer)
    options = [text for name in drop for text in ("--drop", name)]
    result = holdfast("thin", f"{longer}@{which}", *options, "--yes")
    assert (result.code, said in result.err) == (2, True), result.err
    assert state_of(longer) == before


def test_the_latest_is_thinned_when_asked_and_resume_passes_over_it(
    holdfast: Command, longer: Path
) -> None:
    thin = ("--drop", "optimizer", "--yes", "--even-latest")
    assert holdfast("thin", f"{longer}@step=400", *thin).code == 0
    with new_run().manager(longer) as manager:
        assert manager.resume().step == 300  # type: ignore[union-attr]


# untag


def test_a_tag_that_was_added_is_removed(holdfast: Command, root: Path) -> None:
    assert holdfast("tag", f"{root}@step=200", "best-so-far").code == 0
    result = holdfast("untag", f"{root}@paper", "paper", "--json")
    assert (result.code, result.document["tags"]) == (0, ["best-so-far"])
    assert holdfast("show", f"{root}@paper").code == 3


def test_untag_names_tags_that_do_not_exist_or_came_with_the_save(
    tmp_path: Path, holdfast: Command
) -> None:
    with new_run().manager(tmp_path / "run") as manager:
        manager.save(1, tags=["first"]).wait()
        with pytest.raises(UsageError, match="part of the checkpoint"):
            manager.untag("step=1", "first")
        with pytest.raises(UsageError, match="has no tag other"):
            manager.untag("step=1", "other")
        manager.tag("step=1", "later")
        manager.untag("step=1", "later")
        assert manager.list()[0].tags == ("first",)
    result = holdfast("untag", f"{tmp_path / 'run'}@step=1", "first")
    assert (result.code, "part of the checkpoint" in result.err) == (2, True)


# A stop at every operation


def three(store: Store) -> None:
    state = {"one": {"a": 1}, "two": {"b": 2}}
    with CheckpointManager(store, state, sinks=(), preflight=False) as manager:
        for step in (1, 2, 3):
            manager.save(step).wait()


def removed(store: Store, step: int, components: tuple[str, ...]) -> None:
    (entry,) = (e for e in Catalog(store).checkpoints() if e.step == step)
    why = delete_as_planned(
        store, examine(store, entry, components), reason="test", emit=Emitter(())
    )
    assert why == ""


def in_an_object_store() -> Store:
    """A new object store with three checkpoints."""
    store = MemoryStore()
    three(store)
    return store


@pytest.mark.parametrize(
    ("step", "components"),
    [
        (3, ()),
        pytest.param(2, (), marks=pytest.mark.full),
        pytest.param(2, ("two",), marks=pytest.mark.full),
    ],
)
def test_after_a_kill_anywhere_the_root_verifies_and_the_command_can_be_repeated(
    step: int, components: tuple[str, ...]
) -> None:
    clean = FaultyStore(in_an_object_store())
    removed(clean, step, components)
    for fault in stops("stop_before", clean):
        store = in_an_object_store()
        with suppress(Stopped, HoldfastError):
            removed(FaultyStore(store, [fault]), step, components)
        assert verify_root(store).ok, fault
        left = {entry.step: entry for entry in Catalog(store).checkpoints()}
        if step in left:
            removed(store, step, components)
        assert verify_root(store).ok, fault
        left = {entry.step: entry for entry in Catalog(store).checkpoints()}
        assert sorted(left) == ([1, 2, 3] if components else sorted({1, 2, 3} - {step})), fault
        assert left[2].marks.thinned == components if components else True
