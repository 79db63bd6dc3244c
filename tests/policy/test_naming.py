"""Claims about labels."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.format.layout import check_label
from holdfast.format.manifest import Timestamp
from holdfast.policy.naming import DEFAULT_LABEL, compile_label

NOW = Timestamp(step=1200, epoch=3, samples=38_400, tokens=10**6)


@pytest.mark.parametrize(
    ("template", "label"),
    [
        (DEFAULT_LABEL, "step-00001200"),
        ("{run_name}_{step}", "gpt_1200"),
        ("ep{epoch:04d}-sp{samples}-tok{tokens:.0e}", "ep0003-sp38400-tok1e+06"),
        ("{step}={step:x}", "1200=4b0"),
        ("final", "final"),
    ],
)
def test_templates_are_filled_in(template: str, label: str) -> None:
    """D27, D28: specs, repeats and every counter may be used."""
    assert compile_label(template, run_name="gpt")(NOW) == label


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{stpe}", "{stpe} is not one of step, epoch"),
        ("{}", "{} is not one of"),
        ("{0}", "{0} is not one of"),
        ("{step.real}", "{step.real} is not one of"),
        ("{run_name[0]}", "is not one of"),
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
