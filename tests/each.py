"""Many small cases as one test: pytest spends a millisecond on each test, and collects them all."""

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
    """`pytest.mark.parametrize` in one test, which runs every case and lists those that fail.

    The cases share the test's fixtures. With arguments, the decorated function is the plain one.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    rows = [(case,) if len(names) == 1 else tuple(case) for case in cases]

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
                    traceback.print_exc()
                    label = ", ".join(str(ids(value))[:60] for value in row)
                    failed.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
            assert failed == [], f"{len(failed)} of {len(rows)} cases fail"

        left = [p for n, p in inspect.signature(test).parameters.items() if n not in names]
        every.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return every

    return decorate
