"""The resume harness: passes for an exact run, and names step and leaf for each that is not."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.data import Loader
from holdfast.errors import DeadlineExceeded, UsageError
from holdfast.testing import resume as harness
from holdfast.testing.resume import Report, assert_resume_equivalent, leaf_digests

STEPS = 6
ONES = torch.ones(4)

check = partial(assert_resume_equivalent, timeout_s=120.0, start_method="forkserver")


def run(root: str, steps: int, report: Report, *, fault: str = "") -> None:
    """A plain loop with checkpoints of its own, so that the harness is tested by itself."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    data = Loader(range(8), batch_size=2, seed=1)
    step = resume(Path(root), model, optimizer, data, fault)
    for batch in data.until(steps, start=step):
        if fault == "raises" and step == 2:
            raise RuntimeError("planted")
        inputs = batch.float()[:, None].expand(-1, 4)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        save(Path(root), model, optimizer, data, step)
        if fault != "silent":
            report(step, {"model": model, "optimizer": optimizer, "data": data, "step": step})


def save(root: Path, model: Any, optimizer: Any, data: Loader, step: int) -> None:
    state = {"model": model, "optimizer": optimizer, "data": data}
    stored = {name: part.state_dict() for name, part in state.items()}
    torch.save({**stored, "rng": torch.get_rng_state(), "step": step}, root / "aside")
    (root / "aside").replace(root / "checkpoint")


def resume(root: Path, model: Any, optimizer: Any, data: Loader, fault: str) -> int:
    if fault == "unrepeatable":
        model[0].bias.data += int.from_bytes(os.urandom(4), "little") / 2**33
    if fault == "begins anew" or not (root / "checkpoint").exists():
        return 0
    stored = torch.load(root / "checkpoint")
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    data.load_state_dict(stored["data"])
    if fault == "position":
        next(iter(data))
    if fault == "moment":
        for slots in optimizer.state.values():
            slots["exp_avg"] = slots["exp_avg"].bfloat16().float()
    if fault != "rng":
        torch.set_rng_state(stored["rng"])
    return int(stored["step"])


def broken(fault: str, kill_at: int | list[int] = 3) -> str:
    """What the harness says of a run with this fault."""
    with pytest.raises(AssertionError) as raised:
        check(partial(run, fault=fault), STEPS, kill_at)
    return str(raised.value)


@pytest.mark.full
def test_an_exact_run_passes_though_it_is_killed_twice() -> None:
    """Invariant 7, R1."""
    assert_resume_equivalent(run, STEPS, [2, 4], timeout_s=120.0)


@pytest.mark.parametrize(
    ("fault", "step", "leaf"),
    [
        ("rng", 4, "model.0.weight"),
        ("position", 4, "model.0.weight"),
        ("moment", 4, "model.0.weight"),
    ],
)
def test_a_broken_resume_is_named_by_its_first_step_and_leaf(
    fault: str, step: int, leaf: str
) -> None:
    """Invariant 7: the check itself can fail."""
    said = broken(fault)
    assert f"the first difference is at step {step}, leaf {leaf}\n" in said
    assert "the run resumed after the kill at step 3" in said


@pytest.mark.parametrize(
    ("found", "leaf"),
    [({"a": "1"}, "b"), ({"a": "1", "b": "2", "c": "3"}, "c"), ({"a": "1", "b": "3"}, "b")],
    ids=["lost", "new", "other"],
)
def test_a_leaf_that_only_one_of_the_runs_has_is_a_difference(
    tmp_path: Path, found: dict[str, str], leaf: str
) -> None:
    """Invariant 7."""
    leg = harness._Leg(run=run, folder=tmp_path, root="killed", steps=9, killed_at=3)
    with pytest.raises(AssertionError, match=f"at step 4, leaf {leaf}\n"):
        harness._check_leaves(leg, 4, found, {"a": "1", "b": "2"})
    harness._check_leaves(leg, 4, {"b": "2", "a": "1"}, {"a": "1", "b": "2"})


def test_a_run_that_begins_anew_fails_though_its_end_is_the_same() -> None:
    assert "did not resume, it began at step 1" in broken("begins anew")


def test_a_run_that_is_not_repeatable_is_told_from_a_broken_resume() -> None:
    said = broken("unrepeatable")
    assert "step 1, leaf model.0.weight" in said or "step 1, leaf model.0.bias" in said
    assert "the run itself is not repeatable" in said


def test_a_run_that_raises_is_shown_with_its_traceback() -> None:
    said = broken("raises")
    assert "RuntimeError: planted" in said
    assert "line" in said


def test_a_run_that_never_reports_the_step_of_the_kill_fails() -> None:
    assert "ended without reporting step 3" in broken("silent")


def hang(root: str, steps: int, report: Report) -> None:
    time.sleep(3600)


def test_a_run_that_hangs_is_ended() -> None:
    """Invariant 9."""
    with pytest.raises(DeadlineExceeded, match="did not end within"):
        check(hang, 2, 1, timeout_s=0.5)


@pytest.mark.parametrize("kill_at", [0, 6, [], [3, 2], [2, 2], [2, 7]])
def test_kills_that_prove_nothing_are_refused(kill_at: int | list[int]) -> None:
    with pytest.raises(UsageError, match="kill_at"):
        assert_resume_equivalent(run, STEPS, kill_at)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0.0, -0.0),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, dtype=torch.complex64), torch.tensor([0j, -0j]).conj()),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (1, True),
        (1, 1.0),
        (None, {}),
        ([], ()),
        ({1}, {2}),
        (random.Random(1), random.Random(2)),
        (np.random.default_rng(1), np.random.default_rng(2)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (np.random.RandomState(1), np.random.RandomState(2)),
        ({1: 5}, {"1": 5}),
        ({1: 5, "1": 6}, {1: 7, "1": 6}),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
        (torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        (np.ones((2, 3)), np.ones((2, 3), order="F")),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2).expand(3, 2), torch.ones(3, 2)),
        ([ONES, ONES], [ONES, torch.ones(4)]),
        ([ONES, ONES[2:]], [ONES, torch.ones(2)]),
        ([ONES[:2], ONES[2:]], [ONES[:2], ONES[:2]]),
    ],
)
def test_leaves_that_differ_in_any_bit_are_told_apart(left: Any, right: Any) -> None:
    assert leaf_digests({"a": left}) != leaf_digests({"a": right})
    assert leaf_digests({"a": left}) == leaf_digests({"a": left})


def test_leaves_have_the_paths_of_the_state() -> None:
    model = nn.Linear(1, 1)
    state = {"model": model, "list": [1, {"x": float("nan")}], "empty": torch.zeros(0)}
    assert list(leaf_digests(state)) == [
        "model.weight",
        "model.bias",
        "model (keys)",
        "list.0",
        "list.1.x",
        "list.1 (keys)",
        "empty",
    ]


def test_a_leaf_that_cannot_be_compared_is_named() -> None:
    with pytest.raises(UsageError, match=r"a\.b: cannot tell .* object"):
        leaf_digests({"a": {"b": object()}})


def test_arrays_of_objects_are_refused_and_not_compared_by_address() -> None:
    with pytest.raises(UsageError, match=r"a: cannot tell .* arrays of objects"):
        leaf_digests({"a": np.array([object()])})


def test_strides_that_mean_nothing_are_no_difference() -> None:
    odd = torch.ones(4).as_strided((1, 4), (77, 1))
    assert leaf_digests({"a": odd}) == leaf_digests({"a": torch.ones(1, 4)})
    assert leaf_digests({"a": torch.ones(4, 2)[:1, 0]}) == leaf_digests({"a": torch.ones(1)})


def test_leaves_of_a_loader_are_its_position() -> None:
    loader = Loader(range(8), batch_size=2)
    before = leaf_digests({"data": loader})
    list(islice(loader, 1))
    after = leaf_digests({"data": loader})
    assert [path for path in before if before[path] != after[path]] == ["data.batch"]
