"""Claims about `holdfast evaluate`, with real programs that fail, hang and are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.roots import Result

from children import environment
from holdfast import CheckpointManager, Encryption
from holdfast.cli.evaluate import Evaluations
from holdfast.cli.supervisor import FORWARDED
from holdfast.events import Emitter
from holdfast.keys import from_file
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore

Command = Callable[..., Result]
STEP = "$(basename {checkpoint} | sed 's/step-0*//; s/[.].*//')"
"""Shell text of the step in a checkpoint's name."""


@pytest.fixture(autouse=True)
def _signals_are_not_ignored() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def save_steps(root: Path | Store, *steps: int, **options: Any) -> None:
    state = {"model": torch.nn.Linear(1, 1)}
    with CheckpointManager(root, state, sinks=(), preflight=False, **options) as manager:
        manager.resume()
        for step in steps:
            manager.save(step, wait=True)


def values_of(root: Path | Store, metric: str = "eval/acc") -> dict[int, float | None]:
    store = LocalStore(root) if isinstance(root, Path) else root
    return {one.step: one.metrics.get(metric) for one in Catalog(store).checkpoints()}


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.out.splitlines()]


def test_each_checkpoint_gets_its_value_oldest_first(holdfast: Command, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_steps(root, 1, 2, 3, keep="best:eval/acc:max:9:wait=9")
    assert holdfast("metric", f"{root}@step=2", "eval/acc=7").code == 0
    program = f'echo working; echo "{{\\"eval/acc\\": {STEP}, \\"n\\": NaN}}"; echo'
    result = holdfast("evaluate", root, "--json", "--", "sh", "-c", program)
    *each, last = lines(result)
    assert [(one["step"], one["metrics"]["eval/acc"]) for one in each] == [(1, 1.0), (3, 3.0)]
    assert (result.code, last["summary"]["evaluated"]) == (0, 2)
    assert values_of(root) == {1: 1.0, 2: 7.0, 3: 3.0}
    assert holdfast("evaluate", root, "--", "false", "{checkpoint}").code == 0  # nothing is left


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("echo no memory; exit 3", "status 3: no memory"),
        ("kill -9 $$", "SIGKILL"),
        ("echo '[1]'", "not a JSON object with 'acc'"),
        ("echo '{\"loss\": 1}'", "not a JSON object with 'acc'"),
        ('echo \'{"acc": "high"}\'', "not one number"),
        ("sleep 60", "killed after 0.2 s"),
    ],
)
def test_a_program_that_fails_is_run_again_and_then_named(
    holdfast: Command, tmp_path: Path, program: str, why: str
) -> None:
    root = tmp_path / "run"
    save_steps(root, 1)
    options = ("--metric", "acc", "--tries", 2, "--time-limit", "0.2s")
    if "sleep" not in program:
        options = options[:4]
    words = ("--json", "--", "sh", "-c", f"{program} # {{checkpoint}}")
    result = holdfast("evaluate", root, *options, *words)
    *each, last = lines(result)
    assert [one["tries"] for one in each] == [1, 2]
    assert all(why in one["error"] for one in each)
    assert (result.code, len(last["summary"]["failed"])) == (1, 1)
    assert values_of(root, "acc") == {1: None}


def test_a_call_that_cannot_work_is_refused(holdfast: Command, tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for words in (["--metric", "a", "--", "true"], ["--", "true", "{checkpoint}"]):
        result = holdfast("evaluate", tmp_path, *words)
        assert result.code == 2
        assert "{checkpoint}" in result.err or "--metric" in result.err
    nothing = ("--metric", "a", "--follow", "--linger", "0s", "--interval", "0s")
    absent = holdfast("evaluate", tmp_path / "none", *nothing, "--", "true", "{checkpoint}")
    assert (absent.code, (tmp_path / "none").exists()) == (3, False)
    missing = holdfast("evaluate", tmp_path, "--metric", "a", "--", "no-such", "{checkpoint}")
    assert (missing.code, values_of(tmp_path, "a")) == (2, {1: None})


@pytest.mark.parametrize("store", [MemoryStore(), None], ids=["objects", "folders"])
def test_of_several_processes_one_gets_a_checkpoint(tmp_path: Path, store: Store | None) -> None:
    """Rule 12: by the notes, which are put if absent."""
    store = store or LocalStore(tmp_path)
    save_steps(store, 1, 2)
    two = [Evaluations(store, "acc", Emitter(())) for _ in range(2)]
    first, _ = two[0].list_unmeasured()
    with two[0].claim_checkpoint(first) as is_ours:
        assert is_ours
        assert two[1].find_holder(first.folder, Catalog(store).marks(first.folder)) is not None
        with two[1].claim_checkpoint(first) as is_theirs:
            assert not is_theirs
    with two[1].claim_checkpoint(first) as is_theirs:  # the first has ended without a value
        assert is_theirs
        two[1].record_metrics(first, {"acc": 0.5})
    with two[0].claim_checkpoint(first) as is_ours:
        assert not is_ours
    assert [entry.step for entry in two[0].list_unmeasured()] == [2]


def test_an_encrypted_run_is_evaluated_with_its_keys(holdfast: Command, tmp_path: Path) -> None:
    root, key = tmp_path / "run", tmp_path / "key"
    assert holdfast("keys", "generate", key).code == 0
    save_steps(root, 1, 2, encrypt=Encryption(keys=from_file(key)))
    program = ("sh", "-c", 'echo "{\\"acc\\": 1}" # {checkpoint}')
    words = ("evaluate", root, "--metric", "acc", "--", *program)
    assert holdfast(*words).code == 1
    assert holdfast("--key-file", key, *words).code == 0
    shown = holdfast("--key-file", key, "ls", root, "--json").document["checkpoints"]
    assert [one["metrics"] for one in shown] == [{"acc": 1.0}, {"acc": 1.0}]
    assert not any(b'"acc"' in path.read_bytes() for path in root.rglob("*.json"))


def test_a_signal_stops_the_program_and_frees_the_checkpoint(
    holdfast: Command, tmp_path: Path
) -> None:
    save_steps(tmp_path, 1)
    program = "kill -TERM $PPID; sleep 60 # {checkpoint}"
    words = ("--metric", "acc", "--tries", 1, "--json", "--", "sh", "-c", program)
    result = holdfast("evaluate", tmp_path, *words)
    assert (result.code, lines(result)[-1]["summary"]["evaluated"]) == (128 + signal.SIGTERM, 0)
    store = LocalStore(tmp_path)
    (entry,) = Catalog(store).checkpoints()
    assert Evaluations(store, "acc", Emitter(())).find_holder(entry.folder, entry.marks) is None


def test_a_lost_reply_loses_neither_a_claim_nor_a_value() -> None:
    """Of an object store, where a put may take effect although its reply was an error."""
    lost = Fault(kind="lose_reply", op="put", key="*/notes-*", times=2)
    store = MemoryStore()
    save_steps(store, 1)
    evaluations = Evaluations(FaultyStore(store, [lost]), "acc", Emitter(()))
    (entry,) = evaluations.list_unmeasured()
    with evaluations.claim_checkpoint(entry) as is_ours:
        assert is_ours
        evaluations.record_metrics(entry, {"acc": 0.5})
    assert lost.reached.is_set()
    assert values_of(store, "acc") == {1: 0.5}


def test_a_killed_process_frees_its_checkpoint(holdfast: Command, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save_steps(root, 1)
    begun = tmp_path / "begun"
    words = [sys.executable, "-m", "holdfast.cli", "evaluate", str(root), "--metric", "acc", "--"]
    program = f"echo x > {begun}; sleep 60 # {{checkpoint}}"
    with subprocess.Popen([*words, "sh", "-c", program], env=environment()) as worker:
        while not begun.exists():
            assert worker.poll() is None
        busy = holdfast("evaluate", root, "--metric", "acc", "--json", "--", "true", "{checkpoint}")
        (summary,) = lines(busy)
        assert (busy.code, summary["summary"]["evaluated"]) == (0, 0)
        assert str(worker.pid) in summary["summary"]["elsewhere"][0]["why"]
        worker.kill()
    program = "echo '{\"acc\": 1}' # {checkpoint}"
    assert holdfast("evaluate", root, "--metric", "acc", "--", "sh", "-c", program).code == 0
    assert values_of(root, "acc") == {1: 1.0}


def test_an_evaluated_checkpoint_is_not_deleted_meanwhile(
    holdfast: Command, tmp_path: Path
) -> None:
    """Although more checkpoints wait than the rule allows."""
    save_steps(tmp_path, 1, 2, 3)
    prune = f"{sys.executable} -m holdfast.cli prune {tmp_path} --keep best:acc:max:1:wait=1 >&2"
    program = f'{prune}; echo "{{\\"acc\\": {STEP}}}"'
    holdfast("evaluate", tmp_path, "--metric", "acc", "--", "sh", "-c", program)
    assert values_of(tmp_path, "acc") == {1: 1.0, 3: 3.0}


@pytest.mark.full
def test_a_run_is_followed_until_it_ends(holdfast: Command, tmp_path: Path) -> None:
    """It waits for the root, and for the metric's name, which the first checkpoint records."""
    root = tmp_path / "run"
    words = [sys.executable, "-m", "holdfast.cli", "evaluate", str(root), "--follow", "--json"]
    words += ["--interval", "0.1s", "--linger", "6s", "--", "sh", "-c"]
    words += [f'echo "{{\\"eval/acc\\": {STEP}}}"']
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as worker:
        save_steps(root, 1, 2, keep="best:eval/acc:max:1:wait=9")
        assert worker.stdout is not None
        assert json.loads(worker.stdout.readline())["step"] == 1
        save_steps(root, 3, keep="best:eval/acc:max:1:wait=9")
        steps = [json.loads(line).get("step") for line in worker.stdout]
    assert (worker.returncode, steps) == (0, [2, 3, None])
    assert values_of(root)[3] == 3.0
