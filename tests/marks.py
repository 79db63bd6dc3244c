"""Helpers that mark parameters of tests, so that only `make test-full` runs them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def full(*values: Any) -> list[Any]:
    """Make each value a parameter that `make test` leaves out."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def diagonal(*axes: Sequence[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """Make all combinations of values, of which `make test` runs just enough to have each value.

    Args:
        axes: The values of each argument.
        ids: Names for the values of the first axis, where pytest finds no good ones.
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
