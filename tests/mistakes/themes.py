"""All cases, in the order of the page."""

from __future__ import annotations

from tests.mistakes import (
    changed,
    choices,
    clocks,
    comes_back,
    commands,
    files,
    names,
    off_boundary,
    order,
    others_files,
    paths,
    positions,
    ranks_order,
    replicas,
    rows,
    rules,
    times,
    trainer_ends,
    training,
)

THEMES = (
    names.THEME,
    times.THEME,
    paths.THEME,
    order.THEME,
    files.THEME,
    others_files.THEME,
    choices.THEME,
    changed.MODEL,
    changed.DATA,
    comes_back.THEME,
    off_boundary.THEME,
    positions.THEME,
    clocks.THEME,
    commands.THEME,
    training.THEME,
    trainer_ends.THEME,
    ranks_order.THEME,
    rules.RULES,
    replicas.THEME,
    rows.THEME,
)

CASES = tuple(case for theme in THEMES for case in theme.cases)
