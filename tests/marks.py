"""Parameters of tests that only `make test-full` runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def full(*values: Any) -> list[Any]:
    """Each value as a parameter that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def diagonal(*axes: Sequence[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """All combinations of these values; `make test` runs as few as have each value once.

    Args:
        axes: The values of each argument.
        ids: The names of the values of the first axis, where their `repr` is none.
    """
    kept = {tuple(at % len(axis) for axis in axes) for at in range(max(len(axis) for axis in axes))}
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        name = None
        if ids is not None:
            name = "-".join([ids[places[0]], *map(str, values[1:])])
        marks = () if places in kept else pytest.mark.full
        found.append(pytest.param(*values, marks=marks, id=name))
    return found
