"""Claims about the decorator that runs many cases as one test."""

from __future__ import annotations

import pytest
from tests.each import each


def test_all_cases_run_and_those_that_fail_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    ran = []

    @each(("number", "limit"), [(1, 2), (3, 2), (2, 2), (5, 2)])
    def below(number: int, limit: int) -> None:
        ran.append(number)
        assert number <= limit, f"{number} is too large"

    with pytest.raises(AssertionError, match="2 of 4 cases fail"):
        below()
    assert ran == [1, 3, 2, 5]
    assert "5 is too large" in capsys.readouterr().err
    below(1, 1)


def test_a_failure_of_pytest_is_one_too() -> None:
    @each("kind", [ValueError])
    def raises(kind: type[Exception]) -> None:
        with pytest.raises(kind):
            pass

    with pytest.raises(AssertionError, match="1 of 1 cases fail"):
        raises()


def test_the_time_limit_ends_the_whole_test() -> None:
    ran = []

    @each("number", [1, 2])
    def slow(number: int) -> None:
        ran.append(number)
        pytest.fail("Timeout (>300.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        slow()
    assert ran == [1]


def test_a_test_without_cases_is_refused() -> None:
    with pytest.raises(AssertionError, match="no cases"):
        each("number", [])
