"""Claims about `holdfast drift`: its numbers are those of the weights; what is equal is unread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.roots import Result
from torch import nn

from holdfast import CheckpointManager
from holdfast.interop.sources.checkpoint import CheckpointSource

Holdfast = Callable[..., Result]


class Net(nn.Module):
    """Two blocks and a frozen head, which shares its weight with an embedding."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, width)
        self.h = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.emb.weight


def relative(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    apart = sum(float((b - a).double().square().sum()) for a, b in zip(before, after, strict=True))
    return float((apart / sum(float(a.double().square().sum()) for a in before)) ** 0.5)


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """A root with four checkpoints, and their weights; block 1 changes only before the last."""
    net = Net()
    states = []
    with CheckpointManager(tmp_path / "run", {"model": net}, preflight=False, sinks=()) as manager:
        for step in range(1, 5):
            with torch.no_grad():
                net.h[0].weight += step
                net.h[0].bias[0] = step
                if step == 4:
                    net.h[1].weight *= 1.5
            manager.save(step, wait=True)
            states.append({name: one.clone() for name, one in net.state_dict().items()})
    return tmp_path / "run", states


def test_each_layer_has_its_relative_change(holdfast: Holdfast, run: Any) -> None:
    root, states = run
    found = holdfast("drift", root, "--depth", 2, "--json").document
    assert [one["step"] for one in found["checkpoints"]] == [1, 2, 3, 4]
    changes = {layer["layer"]: layer["changes"] for layer in found["layers"]}
    assert [*changes] == ["emb.weight", "h.0", "h.1"]
    names = {"h.0": ["h.0.weight", "h.0.bias"], "h.1": ["h.1.weight", "h.1.bias"]}
    for layer, inside in names.items():
        wanted = [
            relative([one[name] for name in inside], [other[name] for name in inside])
            for one, other in pairwise(states)
        ]
        assert changes[layer] == pytest.approx(wanted)
    assert changes["emb.weight"] == [0, 0, 0]
    assert changes["h.1"][:2] == [0, 0]


def test_every_tensor_alone_is_the_default_of_a_small_model(holdfast: Holdfast, run: Any) -> None:
    found = holdfast("drift", run[0], "--json").document
    assert found["depth"] == 3
    assert len(found["layers"]) == 5
    one = holdfast("drift", run[0], "--depth", 1, "--json").document
    assert [layer["layer"] for layer in one["layers"]] == ["emb", "h"]
    assert [layer["num_tensors"] for layer in one["layers"]] == [1, 4]


def test_many_layers_are_joined_until_a_table_can_be_read(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    state = {"model": {f"h.{n}.{part}.w": torch.ones(2) for n in range(20) for part in "abc"}}
    with CheckpointManager(tmp_path, state, preflight=False, sinks=()) as manager:
        for step in (1, 2):
            state["model"]["h.3.b.w"] += 1
            manager.save(step, wait=True)
    found = holdfast("drift", tmp_path, "--component", "model", "--json").document
    assert (found["depth"], len(found["layers"])) == (2, 20)


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Component and bytes of each later read of a tensor."""
    read: list[tuple[str, int]] = []
    copied, lent = CheckpointSource.read_into, CheckpointSource.lent

    def copying(self: CheckpointSource, component: str, *others: Any) -> None:
        read.append((component, others[-1].nbytes))
        copied(self, component, *others)

    def lending(self: CheckpointSource, component: str, *others: Any) -> Any:
        read.append((component, others[-1]))
        return lent(self, component, *others)

    monkeypatch.setattr(CheckpointSource, "read_into", copying)
    monkeypatch.setattr(CheckpointSource, "lent", lending)
    return read


def test_what_has_equal_digests_is_not_read(
    holdfast: Holdfast, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big, small = nn.Linear(1200, 1000, bias=False), nn.Linear(2, 2, bias=False)
    state = {"frozen": big, "live": small}
    with CheckpointManager(tmp_path / "big", state, preflight=False, sinks=()) as manager:
        for step in (1, 2, 3):
            with torch.no_grad():
                small.weight += step
            manager.save(step, wait=True)
    read = noted_reads(monkeypatch)
    found = holdfast("drift", tmp_path / "big", "--json").document
    assert {component for component, _ in read} == {"live"}
    assert (found["num_read"], found["num_unread"]) == (2, 2)
    assert found["layers"][0]["changes"] == [0, 0]


def test_of_a_large_tensor_beside_changed_ones_only_the_outer_blocks_are_read(
    holdfast: Holdfast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.ones(3), "big": torch.arange(8_000_000.0), "c": torch.ones(3)}
    with CheckpointManager(tmp_path, {"m": tensors}, preflight=False, sinks=()) as manager:
        for step in (1, 2, 3):
            tensors["a"] += step
            if step == 3:
                tensors["big"][-1] += 1e9
            manager.save(step, wait=True)
    read = noted_reads(monkeypatch)
    same = holdfast("diff", f"{tmp_path}@step=1", f"{tmp_path}@step=2", "--json").document
    assert [one["tensor"] for one in same["tensors"]] == ["m:a"]
    assert 0 < sum(nbytes for _, nbytes in read) < 2 * 16 << 20
    found = holdfast("drift", tmp_path, "--component", "m", "--json").document
    changes = {layer["layer"]: layer["changes"] for layer in found["layers"]}
    assert changes["big"][0] == 0
    assert changes["big"][1] == pytest.approx(1e9 / float(torch.arange(8e6).double().norm()))


def test_checkpoints_that_cannot_be_compared_are_named(holdfast: Holdfast, run: Any) -> None:
    root, _ = run
    holdfast("thin", f"{root}@step=2", "--drop", "model", "--yes")
    net = Net()
    with CheckpointManager(root, {"model": net}, preflight=False, sinks=()) as manager:
        manager.resume("step=3")
        manager.save(5, wait=True)
    found = holdfast("drift", root, "--json").document
    assert [one["step"] for one in found["checkpoints"]] == [1, 3, 5]
    reasons = sorted(one["why"] for one in found["skipped"])
    assert reasons == ["has no module", "left behind when the run went back"]


def test_a_nan_is_left_out_and_named(holdfast: Holdfast, tmp_path: Path) -> None:
    weight = torch.ones(4)
    with CheckpointManager(tmp_path, {"m": {"w": weight}}, preflight=False, sinks=()) as manager:
        manager.save(1, wait=True)
        weight[0], weight[1] = float("nan"), 3.0
        manager.save(2, wait=True)
    found = holdfast("drift", tmp_path, "--component", "m", "--json").document
    assert found["not_finite"] == ["m:w"]
    assert found["layers"][0]["changes"] == pytest.approx([2 / 3**0.5])
    assert "not finite" in holdfast("drift", tmp_path, "--component", "m").out


def test_a_tensor_of_another_shape_is_not_compared(holdfast: Holdfast, tmp_path: Path) -> None:
    state: dict[str, Any] = {"m": {}}
    with CheckpointManager(tmp_path, state, preflight=False, sinks=()) as manager:
        for step, rows in ((1, 2), (2, 3)):
            state["m"] |= {"w": torch.ones(rows), "v": torch.full((2,), float(step))}
            manager.save(step, wait=True)
    found = holdfast("drift", tmp_path, "--component", "m", "--json").document
    changes = {layer["layer"]: layer["changes"] for layer in found["layers"]}
    assert changes == {"w": [None], "v": [1.0]}


def test_the_text_has_a_shade_for_each_step(holdfast: Holdfast, run: Any) -> None:
    lines = holdfast("drift", run[0], "--depth", 2).out.splitlines()
    assert lines[0].split() == ["layer", "tensors", "1", "to", "4", "2", "3", "4"]
    rows = {line.split()[0]: line for line in lines[1:4]}
    assert "██" in rows["h.0"]
    assert rows["h.1"].split()[2:-1] == ["░░", "0", "0"]
    assert "░" not in rows["emb.weight"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(holdfast: Holdfast, run: Any, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / f"drift.{suffix}"
    found = holdfast("drift", run[0], "--plot", plot, "--json").document
    assert found["plot"] == str(plot)
    assert plot.stat().st_size > 1000


def test_a_plot_needs_its_library(
    holdfast: Holdfast, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = holdfast("drift", run[0], "--plot", tmp_path / "drift.png")
    assert result.code == 2
    assert "holdfast-torch[demo]" in result.err


def test_wrong_components_and_single_checkpoints_are_refused(
    holdfast: Holdfast, run: Any, tmp_path: Path
) -> None:
    result = holdfast("drift", run[0], "--component", "optim")
    assert result.code == 2
    assert "there are model" in result.err
    with CheckpointManager(tmp_path / "one", {"m": nn.Linear(1, 1)}, preflight=False) as manager:
        manager.save(1, wait=True)
    assert holdfast("drift", tmp_path / "one").code == 3


def test_a_layer_that_is_nan_throughout_has_no_number(holdfast: Holdfast, tmp_path: Path) -> None:
    """0 would say that it stayed as it was."""
    module = nn.Linear(2, 2)
    with CheckpointManager(tmp_path / "run", {"m": module}, preflight=False, sinks=()) as manager:
        for step, value in enumerate((1.0, float("nan"), float("nan"))):
            torch.nn.init.constant_(module.weight, value)
            manager.save(step, wait=True)
    found = holdfast("drift", tmp_path / "run", "--json").document
    assert {one["layer"]: one["changes"] for one in found["layers"]} == {
        "bias": [0.0, 0.0],
        "weight": [None, 0.0],
    }
    assert found["total"] == [None, 0.0]
