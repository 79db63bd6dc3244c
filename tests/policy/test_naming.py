"""Claims about labels."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.layout import check_label
from holdfast.format.manifest import Timestamp
from holdfast.launched import Ranks
from holdfast.policy.naming import (
    COUNTERS,
    DEFAULT_LABEL,
    compile_label,
    fill_root,
)

NOW = Timestamp(
    step=1200,
    epoch=3,
    samples=38_400,
    tokens=10**6,
    wall_s=5400.25,
    step_in_epoch=200,
    samples_in_epoch=6400,
    tokens_in_epoch=7,
    epoch_wall_s=900.5,
    step_wall_s=0.75,
    cycle=1,
    step_in_cycle=700,
)
RANKS = Ranks(rank=5, local_rank=1, world_size=8, local_world_size=4, node_rank=1)


def clock() -> datetime:
    return datetime(2026, 11, 20, 1, 2, 3, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("template", "label"),
    [
        (DEFAULT_LABEL, "step-00001200"),
        ("{run_name}_{step}", "gpt_1200"),
        ("ep{epoch:04d}-sp{samples}-tok{tokens:.0e}", "ep0003-sp38400-tok1e+06"),
        ("{step}={step:x}", "1200=4b0"),
        ("final", "final"),
        ("ep{epoch}-ba{batch}-rank{rank}", "ep3-ba1200-rank5"),
        ("{rank}.{local_rank}.{world_size}.{local_world_size}.{node_rank}", "5.1.8.4.1"),
        ("{step_in_epoch}-{samples_in_epoch}-{tokens_in_epoch}", "200-6400-7"),
        ("{batch_in_epoch}-{sample_in_epoch}-{token_in_epoch}", "200-6400-7"),
        ("{sample}-{token}-{cycle}-{step_in_cycle}", "38400-1000000-1-700"),
        ("{total_wct}-{epoch_wct:.0f}-{batch_wct}s", "5400.25-900-0.75s"),
        ("{wall_s:09.1f}-{epoch_wall_s}-{step_wall_s}", "0005400.2-900.5-0.75"),
        ("{date}-{step}", "2026-11-19-1200"),
        ("{time}", "20261119T230203Z"),
        ("{time:%H%M}-{date:%y}-{time:%j}", "2302-26-323"),
    ],
)
def test_templates_are_filled_in(template: str, label: str) -> None:
    """D27, D28, C37, C38: specs, repeats and every variable may be used; time is UTC."""
    compiled = compile_label(template, run_name="gpt", ranks=RANKS, clock=clock)
    assert compiled(NOW) == label


@pytest.mark.parametrize("name", sorted(COUNTERS))
def test_every_counter_can_be_formatted_and_is_missed_by_name(name: str) -> None:
    """D27."""
    label = compile_label(f"a{{{name}:08.2f}}")
    assert label(NOW) == f"a{getattr(NOW, COUNTERS[name]):08.2f}"
    if name not in ("step", "batch", "wall_s", "total_wct"):
        with pytest.raises(UsageError, match=f"{name} was not given"):
            label(Timestamp(step=5))


def test_the_only_process_has_rank_zero_and_the_clock_runs() -> None:
    label = compile_label("{rank}-{world_size}-{time:%Y}")
    assert re.fullmatch("0-1-20[0-9]{2}", label(NOW))


def test_names_tell_the_ranks_that_the_launcher_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": 3, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**environment, "GROUP_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    template = "r{rank}w{world_size}l{local_rank}of{local_world_size}n{node_rank}"
    assert compile_label(template)(NOW) == "r3w8l1of2n1"
    assert fill_root(f"runs/{template}") == "runs/r3w8l1of2n1"


def test_a_local_rank_that_nobody_knows_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert compile_label("{rank}")(NOW) == "3"
    with pytest.raises(UsageError, match="local_rank is known only where a launcher"):
        compile_label("{local_rank}")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, "rank=8 must be from 0 to 7"),
        ({"RANK": "one", "WORLD_SIZE": "8"}, "RANK='one', which is not a valid rank"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        fill_root("runs/{rank}")


@pytest.mark.parametrize(
    "numbers", [{"rank": 1}, {"rank": -1}, {"local_rank": 1, "world_size": 8}, {"node_rank": 1}]
)
def test_ranks_that_contradict_each_other_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be from 0 to 0"):
        Ranks(**numbers)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{stpe}", "{stpe} is unknown; choose from step, epoch"),
        ("{}", "{} is unknown; choose from"),
        ("{0}", "{0} is unknown; choose from"),
        ("{step.real}", "{step.real} is unknown; choose from"),
        ("{run_name[0]}", "is unknown; choose from"),
        ("{step!r}", "only a plain format spec"),
        ("{step:{epoch}}", "only a plain format spec"),
        ("{step:1000000000d}", "at most 200"),
        ("{step:.999999999f}", "at most 200"),
        ("{step", "'{step'"),
        ("{step:q}", "format code"),
        ("{run_name}", "run_name was not given"),
        ("{step:,}", "letters, digits"),
        ("runs/{step}", "letters, digits"),
        ("../{step}", "letters, digits"),
        (".{step}", "letters, digits"),
        ("{step: d}", "letters, digits"),
        ("{time:%H:%M}", "letters, digits"),
        ("{time:%c}", "letters, digits"),
        ("{time:%500000d}", "at most 200"),
        ("{time.year}", "is unknown; choose from"),
        ("{epoch_wct:d}", "format code"),
        ("{rank!s}", "only a plain format spec"),
        ("{{step}}", "letters, digits"),
        ("", "letters, digits"),
        ("x" * 195 + "{step}", "at most 200"),
    ],
)
def test_bad_templates_are_refused_when_given(template: str, message: str) -> None:
    """D27, D28, D57: not at the first save."""
    with pytest.raises(UsageError, match=re.escape(message)):
        compile_label(template)


def test_a_run_name_that_no_folder_can_have_is_refused_when_given() -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        compile_label("{run_name}-{step}", run_name="my run")


def test_a_counter_that_is_not_known_is_an_error_that_names_it() -> None:
    label = compile_label("{epoch}-{tokens}")
    with pytest.raises(UsageError, match="epoch, tokens was not given"):
        label(Timestamp(step=5))


def test_a_function_may_name_checkpoints() -> None:
    """D50."""
    assert compile_label(lambda now: f"k{now.step // 1000}")(NOW) == "k1"


@pytest.mark.parametrize("result", ["a b", "", "/etc", None, 5])
def test_a_function_with_bad_results_is_refused_when_given(result: object) -> None:
    with pytest.raises(UsageError):
        compile_label(lambda _: result)  # type: ignore[arg-type, return-value]


def test_what_a_function_returns_is_checked_each_time() -> None:
    label = compile_label(lambda now: "bad name" if now.step == 1200 else "good")
    with pytest.raises(UsageError, match="bad name"):
        label(NOW)


def test_a_label_that_is_neither_is_refused() -> None:
    with pytest.raises(UsageError, match="template or a function"):
        compile_label(5)  # type: ignore[arg-type]


@given(st.text(alphabet="ab-./{}:!step0123456789dx[] ", max_size=20))
def test_any_template_is_refused_or_always_gives_a_label(template: str) -> None:
    try:
        label = compile_label(template)
    except UsageError:
        return
    check_label(label(NOW))


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ("{run_name}/checkpoints", "gpt-2/checkpoints"),
        ("s3://bucket/{run_name}/{rank:02d}of{world_size}", "s3://bucket/gpt-2/05of8"),
        ("/data/{{kept}}", "/data/{kept}"),
        (lambda: "/data/other", "/data/other"),
    ],
)
def test_a_root_may_be_a_template_or_a_function(root: Any, path: str) -> None:
    """C39, D57: what is not a name is left exactly as it is."""
    assert fill_root(root, run_name="gpt-2", ranks=RANKS) == path


@pytest.mark.parametrize(
    ("root", "run_name", "message"),
    [
        ("{step}", None, "{step} is unknown; choose from run_name, rank"),
        ("{run_nam}", "a", "{run_nam} is unknown; choose from"),
        ("{rank.real}", None, "is unknown; choose from"),
        ("{rank!r}", None, "only a plain format spec"),
        ("{run_name}", None, "run_name was not given"),
        ("{run_name}", "../other", "letters, digits"),
        ("{run_name}", "a/b", "letters, digits"),
        ("{rank:s}", None, "format code"),
        ("a{b", None, "'a{b'"),
        ("", None, "must name a place"),
        (lambda: None, None, "returned None"),
        (lambda: "", None, "not a path"),
    ],
)
def test_a_bad_root_is_refused_when_given(root: Any, run_name: str | None, message: str) -> None:
    """D27, D57."""
    with pytest.raises(UsageError, match=re.escape(message)):
        fill_root(root, run_name=run_name)


@given(st.text(alphabet="ab-./{}:!rank0123456789d[]%", max_size=16))
def test_any_root_is_refused_or_filled_in_without_a_crash(template: str) -> None:
    try:
        assert fill_root(template)
    except UsageError:
        return
