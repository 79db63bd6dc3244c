"""Two runs are compared round by round, and only where both have a figure."""

from __future__ import annotations

import json
from pathlib import Path

from bench.compare import changes, compare_table, main
from bench.results import Outcome, Results, read_json, write_json


def _results(**cases: list[dict[str, list[float]]]) -> Results:
    results = Results()
    for name, rounds in cases.items():
        for figures in rounds:
            results.add(name, Outcome(figures=figures))
    return results


def test_the_ratio_is_the_median_of_the_ratios_of_equal_rounds() -> None:
    old = _results(a=[{"t_s": [1.0]}, {"t_s": [2.0]}, {"t_s": [4.0]}])
    new = _results(a=[{"t_s": [2.0]}, {"t_s": [1.0]}, {"t_s": [4.0]}])
    found = changes(old, new)["a t_s"]
    assert (found.old, found.new, found.ratios) == (2.0, 2.0, (2.0, 0.5, 1.0))


def test_what_only_one_run_has_and_what_is_no_cost_is_left_out() -> None:
    old = _results(a=[{"t_s": [1.0], "cold_share": [0.5]}], gone=[{"t_s": [1.0]}])
    new = _results(a=[{"t_s": [3.0], "cold_share": [0.1], "more_nbytes": [1.0]}])
    assert set(changes(old, new)) == {"a t_s"}


def test_a_round_that_failed_is_in_no_pair() -> None:
    old = _results(a=[{}, {"t_s": [2.0]}])
    new = _results(a=[{"t_s": [7.0]}, {"t_s": [1.0]}])
    assert changes(old, new)["a t_s"].ratios == (0.5,)


def test_the_command_prints_a_row_for_each_figure_of_two_files(tmp_path: Path, capsys) -> None:
    for name, value in (("old", 2.0), ("new", 3.0)):
        results = _results(a=[{"t_s": [value]}])
        write_json(tmp_path / name, results, {"command": [name]})
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert "| a t_s | 2 | 3 | 1.50× | 1.50 to 1.50 |" in capsys.readouterr().out
    assert json.loads((tmp_path / "old").read_text())["command"] == ["old"]


def test_a_file_gives_back_the_results_that_were_written(tmp_path: Path) -> None:
    results = _results(a=[{"t_s": [1.0, 2.0]}])
    results.add("a", Outcome(figures={}, error="died"))
    results.titles["a"], results.notes["b"] = "first", "not here"
    write_json(tmp_path / "all", results, {})
    assert read_json(tmp_path / "all") == results


def test_nothing_in_common_is_an_empty_table() -> None:
    assert len(compare_table(changes(_results(), _results()))) == 2
