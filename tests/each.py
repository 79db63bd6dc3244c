"""A decorator that runs many small cases as one test: each test costs pytest a millisecond."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest


def each(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], object] = ascii
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run all cases in one test and list those that fail; otherwise like `pytest.mark.parametrize`.

    The cases share the test's fixtures. Called with positional arguments, the decorated function
    runs as if it were not decorated.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    rows = [(case,) if len(names) == 1 else tuple(case) for case in cases]
    assert rows, "there are no cases"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def every(*arguments: Any, **fixtures: Any) -> None:
            if arguments:
                test(*arguments, **fixtures)
                return
            failed = []
            for row in rows:
                try:
                    test(**fixtures, **dict(zip(names, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    if str(error).startswith("Timeout"):
                        raise  # of the whole test
                    traceback.print_exc()
                    label = ", ".join(str(ids(value))[:60] for value in row)
                    failed.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
            assert failed == [], f"{len(failed)} of {len(rows)} cases fail"

        left = [p for n, p in inspect.signature(test).parameters.items() if n not in names]
        every.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return every

    return decorate
