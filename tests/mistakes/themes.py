"""All cases, in the order of the page."""

from __future__ import annotations

from tests.mistakes import names, times

THEMES = (names.THEME, times.THEME)
CASES = tuple(case for theme in THEMES for case in theme.cases)
