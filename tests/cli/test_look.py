"""Commands that look into checkpoints and files of any format: tree, cat, diff, stats, du."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.cli.roots import Result
from tests.cli.test_app import in_a_process
from torch import nn

from holdfast import CheckpointManager, Encryption, keys
from holdfast.cli.diff import DiffAnswer
from holdfast.cli.du import DuAnswer
from holdfast.cli.stats import StatsAnswer
from holdfast.cli.tree import MAX_NUMBERS, CatAnswer, TreeAnswer

Holdfast = Callable[..., Result]


def state(value: float) -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(4, 3)
    weight[2] = 0
    weight[0, 0] = value
    return {
        "model": {"h.0.weight": weight, "h.0.bias": torch.ones(2).bfloat16()},
        "progress": {"losses": [1.5, 0.5], "name": "run", "nested": {"lr": value}},
    }


@pytest.fixture
def looked(tmp_path: Path) -> Path:
    """A root with two checkpoints, which differ in one number and one value."""
    root = tmp_path / "looked"
    live = state(1.0)
    with CheckpointManager(root, live, preflight=False, sinks=()) as manager:
        manager.save(1).wait()
        manager.tag("step=1", "first")
        live["model"]["h.0.weight"][0, 0] = 1.5
        live["progress"]["nested"]["lr"] = 2.0
        manager.save(2).wait()
    return root


def answer(kind: type[msgspec.Struct], result: Result) -> Any:
    """The JSON answer, checked against the struct of the command."""
    document = json.loads(result.out)
    assert document.pop("holdfast") == 1
    return msgspec.convert(document, kind, strict=False)


def test_tree_shows_tensors_values_and_sizes(holdfast: Holdfast, looked: Path) -> None:
    result = holdfast("tree", f"{looked}@first")
    lines = [line.split() for line in result.out.splitlines()]
    assert ["h.0.weight", "F32", "4×3", "48", "B"] in lines
    assert ["name", "str", "'run'"] in lines
    assert ["losses", "list", "[1.5,", "0.5]"] in lines
    assert "step 1" in result.out
    flat = holdfast("tree", looked, "--depth", 0, "--component", "model").out.splitlines()
    assert [line.split()[0] for line in flat[1:]] == ["name", "model"]


def test_tree_answers_in_json(holdfast: Holdfast, looked: Path) -> None:
    found = answer(TreeAnswer, holdfast("tree", looked, "--json"))
    assert (found.format, found.step) == ("holdfast", 2)
    model = next(one for one in found.components if one.name == "model")
    shapes = {one.path: (one.dtype, one.shape, one.nbytes) for one in model.tensors}
    assert shapes == {"h.0.weight": ("F32", (4, 3), 48), "h.0.bias": ("BF16", (2,), 4)}
    progress = next(one for one in found.components if one.name == "progress")
    values = {one.path: one.value for one in progress.values}
    assert values == {"losses": "[1.5, 0.5]", "name": "'run'", "nested.lr": "2.0"}


def test_cat_prints_rows_and_values(holdfast: Holdfast, looked: Path) -> None:
    one = holdfast("cat", looked, "model:h.0.weight", "--slice", "0:2")
    assert one.out.splitlines() == [
        "model:h.0.weight  F32 2×3",
        "[[1.5 1.  2. ]",
        " [3.  4.  5. ]]",
    ]
    assert holdfast("cat", looked, "progress:nested.lr").out == "2.0\n"
    assert json.loads(holdfast("cat", looked, "progress:").out)["name"] == "run"
    row = answer(CatAnswer, holdfast("cat", looked, "model:h.0.weight", "--slice", "-1", "--json"))
    assert (row.dtype, row.shape, row.value) == ("F32", (3,), [9.0, 10.0, 11.0])
    bias = answer(CatAnswer, holdfast("cat", looked, "model:h.0.bias", "--json"))
    assert (bias.dtype, bias.value) == ("BF16", [1.0, 1.0])


@pytest.mark.parametrize(
    ("name", "rows", "why"),
    [
        ("model:h.0.wait", None, "has no 'h.0.wait'; there are 'h.0.weight', 'h.0.bias'"),
        ("h.0.weight", None, "write COMPONENT:PATH; the components are 'model'"),
        ("model:h.0.weight", "7", "there are 4 rows"),
        ("model:h.0.weight", "a:b", "write rows as 5, 0:2, :2 or 2:"),
        ("progress:name", "0:1", "is no tensor"),
    ],
)
def test_cat_says_what_is_wrong(
    holdfast: Holdfast, looked: Path, name: str, rows: str | None, why: str
) -> None:
    result = holdfast("cat", looked, name, *(("--slice", rows) if rows else ()))
    assert (result.code, result.out) == (2, "")
    assert why in result.err


def test_cat_refuses_to_print_more_than_its_limit(holdfast: Holdfast, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(MAX_NUMBERS + 1)}, tmp_path / "w.safetensors")
    result = holdfast("cat", tmp_path / "w.safetensors", "x", "--trust")
    assert result.code == 2
    assert "choose rows with --slice" in result.err
    assert holdfast("cat", tmp_path / "w.safetensors", "x", "--slice", ":2", "--trust").code == 0


def test_diff_finds_a_number_and_a_value(holdfast: Holdfast, looked: Path) -> None:
    result = holdfast("diff", f"{looked}@step=1", f"{looked}@step=2", "--json")
    found = answer(DiffAnswer, result)
    assert (result.code, found.equal) == (1, False)
    (tensor,) = found.tensors
    assert (tensor.tensor, tensor.different, tensor.max_abs) == ("model:h.0.weight", 1, 0.5)
    assert [(one.path, one.a, one.b) for one in found.values] == [
        ("progress:nested.lr", "1.0", "2.0")
    ]
    text = holdfast("diff", f"{looked}@step=1", f"{looked}@step=2")
    assert "1 of 12" in text.out
    assert "1 differ; 1 plain value differs" in text.out


def test_diff_of_equal_ones_exits_with_0(holdfast: Holdfast, looked: Path, tmp_path: Path) -> None:
    assert holdfast("diff", looked, f"{looked}@step=2").code == 0
    tensors = state(1.5)["model"]
    save_file(tensors, tmp_path / "w.safetensors")
    across = holdfast("diff", looked, tmp_path / "w.safetensors", "--component", "model", "--trust")
    assert (across.code, across.out.splitlines()[-1]) == (0, "2 tensors are equal")


def test_diff_may_allow_a_difference(holdfast: Holdfast, tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0])
    for name, value in (("a", a), ("b", a + 0.25), ("c", a.bfloat16())):
        save_file({"x": value}, tmp_path / f"{name}.safetensors")
    files = {name: tmp_path / f"{name}.safetensors" for name in "abc"}
    assert holdfast("diff", "--trust", files["a"], files["b"], "--fail-above", 0.25).code == 0
    assert holdfast("diff", "--trust", files["a"], files["b"], "--fail-above", 0.24).code == 1
    assert holdfast("diff", "--trust", files["a"], files["c"]).code == 1
    assert holdfast("diff", "--trust", files["a"], files["c"], "--fail-above", 0).code == 0
    assert holdfast("diff", "--trust", files["a"], files["c"], "--fail-above", -1).code == 2


def logged(value: float, seed: int) -> dict[str, Any]:
    """A state with a generator, and the log of a trainer; `value` is a time."""
    log = [{"loss": 0.5, "eval_runtime": value}, {"loss": 0.25, "eval_steps_per_second": value}]
    draws = torch.Generator().manual_seed(seed)
    return {"model": nn.Linear(2, 2), "data": {"draws": draws}, "trainer": {"log": log}}


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal trainings with other generators of Python and NumPy, and other times."""
    roots = (tmp_path / "one", tmp_path / "other")
    for number, root in enumerate(roots):
        torch.manual_seed(0)
        random.seed(number)
        np.random.seed(number)
        with CheckpointManager(root, logged(0.5 + number, number), preflight=False) as manager:
            manager.save(1, wait=True)
    return roots


def test_diff_tells_generators_and_timings_from_what_was_trained(
    holdfast: Holdfast, twins: tuple[Path, Path]
) -> None:
    text = holdfast("diff", *twins)
    assert text.code == 1
    assert text.out.splitlines()[2:] == [
        "3 tensors are equal (2 by their digests); 3 generators differ; 2 timings differ",
        "the generators of data:draws, Python and NumPy differ: seed them in both runs, or compare "
        "--component model",
        "eval_runtime and eval_steps_per_second tell how long something took, which no two runs "
        "have alike: leave them out with --ignore '**.eval_runtime' "
        "--ignore '**.eval_steps_per_second'",
    ]
    found = answer(DiffAnswer, holdfast("diff", *twins, "--json"))
    assert [(one.path, one.kind) for one in found.generators] == [
        ("data:draws", "torch"),
        ("rng:python", "python"),
        ("rng:numpy", "numpy-legacy"),
    ]
    assert found.tensors == ()
    assert [one.path for one in found.values] == [
        "trainer:log.0.eval_runtime",
        "trainer:log.1.eval_steps_per_second",
    ]
    assert holdfast("diff", *twins, "--component", "model").code == 0
    alone = holdfast("diff", *twins, "--component", "rng").out
    assert alone.endswith("or leave them out with --ignore rng:python --ignore rng:numpy\n")


def test_diff_leaves_out_what_patterns_name(holdfast: Holdfast, twins: tuple[Path, Path]) -> None:
    patterns = ("rng", "data:draws", "trainer.log.*.eval_runtime", "**.eval_steps_per_second")
    ignore = [word for pattern in patterns for word in ("--ignore", pattern)]
    text = holdfast("diff", *twins, *ignore)
    assert (text.code, text.out.splitlines()[2:]) == (
        0,
        ["2 tensors are equal (2 by their digests)", f"ignored: {', '.join(patterns)}"],
    )
    found = answer(DiffAnswer, holdfast("diff", *twins, *ignore, "--json"))
    assert (found.equal, found.ignored, found.values) == (True, patterns, ())
    assert holdfast("diff", *twins, *ignore[:-2]).code == 1


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("optimiser", "--ignore: nothing is called ['optimiser']"),
        ("trainer:log.0.runtime", "--ignore: nothing is called ['trainer.log.0.runtime']"),
        ("mod", "--ignore: nothing is called ['mod']"),
        ("modl*", "* stands for any characters between two dots"),
        ("**", "--ignore: leaves nothing to compare"),
        ("*.*", "--ignore: leaves nothing to compare"),
    ],
)
def test_diff_refuses_a_pattern_that_names_nothing_or_all(
    holdfast: Holdfast, twins: tuple[Path, Path], pattern: str, why: str
) -> None:
    """A typing mistake must not hide what it was to leave out, nor show all as equal."""
    result = holdfast("diff", *twins, "--ignore", pattern)
    assert (result.code, result.out) == (2, "")
    assert why in result.err


@pytest.mark.parametrize(
    "patterns", [("trainer", "**.eval_runtime"), ("rng:python:state", "rng"), ("rng", "rng.numpy")]
)
def test_a_pattern_may_name_what_another_leaves_out_too(
    holdfast: Holdfast, twins: tuple[Path, Path], patterns: tuple[str, ...]
) -> None:
    """Also if it names nothing else: it is no typing mistake."""
    ignore = [word for pattern in patterns for word in ("--ignore", pattern)]
    assert holdfast("diff", *twins, *ignore).err == ""
    mistaken = holdfast("diff", *twins, *ignore, "--ignore", "**.eval_runtim")
    assert (mistaken.code, mistaken.out) == (2, "")


def test_diff_advises_no_seeds_where_training_went_further(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    """Generators go on with each step; where weights differ, too, the model alone is no help."""
    live = {"model": nn.Linear(2, 2)}
    with CheckpointManager(tmp_path / "a", live, preflight=False) as manager:
        manager.save(1, wait=True)
        torch.rand(1)
        manager.save(2, wait=True)
    alone = holdfast("diff", f"{tmp_path / 'a'}@step=1", tmp_path / "a").out
    assert alone.endswith("1 generator differs\n")
    with torch.no_grad():
        live["model"].weight.add_(1)
    with CheckpointManager(tmp_path / "b", live, preflight=False) as manager:
        torch.rand(1)
        manager.save(2, wait=True)
    both = holdfast("diff", tmp_path / "a", tmp_path / "b").out
    assert both.endswith("the generators of torch differ: seed them in both runs\n")


def test_names_of_others_stay_on_their_line(holdfast: Holdfast, tmp_path: Path) -> None:
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        live = {"t": {"all equal\n0 differ_runtime": seconds, "x\ny": seconds}}
        with CheckpointManager(tmp_path / name, live, preflight=False) as manager:
            manager.save(1, wait=True)
    lines = holdfast("diff", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert [line.split("  ")[0] for line in lines[3:5]] == [
        "t:all equal\\x0a0 differ_runtime",
        "t:x\\x0ay",
    ]


def test_diff_leaves_out_parts_of_what_one_side_alone_has(
    holdfast: Holdfast, tmp_path: Path
) -> None:
    states = ({"t": {"n": 1, "log": [{"time": 1.0, "w": torch.ones(2)}]}}, {"t": {"n": 1}})
    for name, live in zip("ab", states, strict=True):
        with CheckpointManager(tmp_path / name, live, preflight=False) as manager:
            manager.save(1, wait=True)
    both = (tmp_path / "a", tmp_path / "b", "--component", "t")
    assert "t:log.0.w" in holdfast("diff", *both).out
    found = answer(DiffAnswer, holdfast("diff", *both, "--ignore", "**.w", "--json"))
    assert [(one.path, one.a, one.b) for one in found.values] == [
        ("t:log", "[{'time': 1.0}]", None)
    ]
    assert found.tensors == ()
    assert holdfast("diff", *both, "--ignore", "t:log").code == 0


def test_stats_has_each_tensor_with_its_norm(holdfast: Holdfast, looked: Path) -> None:
    found = answer(StatsAnswer, holdfast("stats", looked, "--component", "model", "--json"))
    by_name = {one.tensor: one for one in found.tensors}
    weight = by_name["model:h.0.weight"]
    assert weight.norm == pytest.approx(state(1.5)["model"]["h.0.weight"].norm().item())
    assert (weight.dead_rows, weight.zeros, weight.max) == (1, 3, 11.0)
    assert by_name["model:h.0.bias"].exponents == {0: 2}
    text = holdfast("stats", looked, "--component", "model").out
    assert "model:h.0.weight" in text


def test_stats_of_named_tensors_reads_only_those(holdfast: Holdfast, looked: Path) -> None:
    found = answer(StatsAnswer, holdfast("stats", looked, "--tensor", "model:h.0.bias", "--json"))
    assert [one.tensor for one in found.tensors] == ["model:h.0.bias"]
    for name in ("model:h.0", "other:x", "h.0.bias", "model:"):
        result = holdfast("stats", looked, "--tensor", name)
        assert (result.code, name in result.err) == (2, True)


_SHARED = """
import holdfast.cli.stats as stats
stats.num_cores = lambda: 3
stats._SHARED_NBYTES = 0
run = stats.Forks.run
stats.Forks.run = lambda self, function, tasks: print(
    *(f"{len(wanted)} of {url.rpartition('/')[2]}" for url, wanted, _ in tasks), file=sys.stderr
) or run(self, function, tasks)
"""


@pytest.mark.parametrize("which", ["", "@step=1"])
def test_stats_shared_by_processes_are_the_same(
    which: str, holdfast: Holdfast, tmp_path: Path
) -> None:
    model = {f"h.{number}": torch.arange(5.0).repeat(number, 1) for number in range(9)}
    with CheckpointManager(tmp_path, {"model": model}, sinks=()) as manager:
        manager.save(1).wait()
    words = ("stats", f"{tmp_path}{which}", "--component", "model", "--json")
    alone, done = holdfast(*words), in_a_process(*words, code=_SHARED)
    assert json.loads(done.stdout) == json.loads(alone.out)
    folder = next(tmp_path.glob("step-*")).name
    assert done.stderr.splitlines()[0] == f"5 of {folder} 2 of {folder} 2 of {folder}"


def test_stats_names_what_is_not_finite(holdfast: Holdfast, tmp_path: Path) -> None:
    save_file({"x": torch.tensor([float("nan"), 1.0])}, tmp_path / "w.safetensors")
    assert "not finite: model:x" in holdfast("stats", tmp_path / "w.safetensors", "--trust").out


def test_stats_shows_the_powers_of_two_as_bars(holdfast: Holdfast, tmp_path: Path) -> None:
    tensors = {
        "x": torch.tensor([0.5] * 4 + [4.0]),
        "y": torch.tensor([1.0, 0.0]),
        "z": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "w.safetensors")
    heading, *rows = holdfast("stats", tmp_path / "w.safetensors", "--trust").out.splitlines()
    assert heading.endswith("2^-1 to 2^3")
    at = heading.index("2^-1")
    assert [row[at:] for row in rows] == ["█  ▂", " █", ""]


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_stats_draws_exponents(
    holdfast: Holdfast, looked: Path, tmp_path: Path, ending: str, start: bytes
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / f"x.{ending}"
    assert holdfast("stats", looked, "--component", "model", "--plot", plot).code == 0
    assert plot.read_bytes().startswith(start)


def test_stats_says_what_a_plot_needs(
    holdfast: Holdfast, looked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "must end in .png, .svg, .pdf" in holdfast("stats", looked, "--plot", "x.gif").err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = holdfast("stats", looked, "--plot", "x.png")
    assert result.code == 2
    assert "pip install 'holdfast-torch[plot]'" in result.err


def test_du_counts_links_once(holdfast: Holdfast, tmp_path: Path) -> None:
    live = {"frozen": {"w": torch.zeros(1 << 19)}, "model": {"w": torch.zeros(1 << 18)}}
    with CheckpointManager(tmp_path / "run", live, preflight=False, sinks=()) as manager:
        for step in (1, 2, 3, 4):
            live["model"]["w"] += 1
            manager.save(step).wait()
    found = answer(DuAnswer, holdfast("du", tmp_path / "run", "--json"))
    names = [path.stat() for path in (tmp_path / "run").glob("step-*/frozen-*.safetensors")]
    extra = sum(one.st_size for one in names) - sum({n.st_ino: n.st_size for n in names}.values())
    assert found.linked_nbytes == extra > 1 << 21
    assert found.components["frozen"] < 4 << 21 < sum(one.st_size for one in names)
    assert found.components["model"] > 4 << 20
    newest = found.checkpoints[0]
    assert (newest.step, newest.components["frozen"].shared_nbytes) == (4, names[0].st_size)
    assert newest.freed_nbytes == newest.nbytes - names[0].st_size
    assert found.nbytes == sum(found.components.values()) + found.other_nbytes
    assert "(shared)" in holdfast("du", tmp_path / "run").out


def test_du_and_tree_of_an_encrypted_root(holdfast: Holdfast, tmp_path: Path) -> None:
    key = keys.generate()
    path = tmp_path / "run.key"
    path.write_text(key.text + "\n")
    path.chmod(0o600)
    with CheckpointManager(
        tmp_path / "run", state(1.0), preflight=False, sinks=(), encrypt=Encryption(keys=key)
    ) as manager:
        manager.save(1).wait()
    found = answer(DuAnswer, holdfast("--key-file", path, "du", tmp_path / "run", "--json"))
    assert {"model", "progress", "records"} <= found.components.keys()
    without = holdfast("du", tmp_path / "run")
    assert "not opened" in without.out
    assert holdfast("--key-file", path, "tree", tmp_path / "run").code == 0
    assert holdfast("tree", tmp_path / "run").code == 1


@pytest.mark.parametrize("command", ["tree", "stats", "cat", "diff"])
def test_a_source_that_does_not_exist_gives_3(
    holdfast: Holdfast, tmp_path: Path, command: str
) -> None:
    more = {"cat": ["x"], "diff": [tmp_path / "none"]}.get(command, [])
    assert holdfast(command, tmp_path / "none", *more).code == 3
