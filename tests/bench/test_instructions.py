"""What counts instructions is looked for, and its answers are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import instructions


def test_planning_works_do_what_their_names_say() -> None:
    works = instructions.works(30)
    assert [name.split(":")[0] for name in works] == ["592 tensors"] * 2 + ["30 tensors"] * 2
    for work in works.values():
        work()


def test_totals_of_callgrind_and_counts_of_perf_are_read(tmp_path: Path) -> None:
    dump = tmp_path / "out.2"
    dump.write_text("version: 1\nevents: Ir\nfn=(1) f\n1 5\ntotals: 19272887\n")
    assert instructions._total(dump) == 19272887
    lines = "# started on Sat\n\n512345,,instructions:u,100,100.00,,\n"
    assert instructions._perf_count(lines) == 512345


def test_where_nothing_counts_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert instructions.BENCH.main(["--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Nothing was counted." in printed
    assert "left out: instructions: needs `perf`" in printed


@pytest.mark.long
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="there is no valgrind")
def test_callgrind_counts_the_same_twice() -> None:
    counts = [instructions.count_by_callgrind(30) for _ in range(2)]
    assert len(counts[0]) == 4
    for name, count in counts[0].items():
        assert count == pytest.approx(counts[1][name], rel=0.05)
