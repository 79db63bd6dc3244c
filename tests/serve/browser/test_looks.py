"""Claims about how each page looks in Chromium: light, dark, wide, narrow, and in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.browser.chromium import Chromium
from tests.serve.browser.conftest import enter, go
from tests.serve.browser.looks import colors, cut_off, pale, stranger, unnamed
from tests.serve.client import Page
from tests.serve.conftest import EVIL
from tests.serve.test_pages import TABS, folders


@pytest.fixture(scope="module")
def work(page: Page, run_root: Path, evil_root: Path) -> list[str]:
    """Pages of work that is done, one of each kind, and of work that failed."""
    newest, *_, oldest = folders(run_root)
    evil, *_ = folders(evil_root)
    begun = [
        page.post("/r/run/verify"),
        page.post(f"/r/run/c/{newest}/stats", component="model"),
        page.post("/r/run/compare", a=oldest, b=newest),
        page.post(f"/r/evil-b-run/c/{evil}/stats", tensor=f"model:{EVIL}"),
    ]
    for one in begun:
        page.done(one)
    return [one.headers["location"] for one in begun]


SIGHTS = [
    pytest.param(width, dark, marks=() if (width, dark) == (400, True) else pytest.mark.full)
    for width in (1200, 400)
    for dark in (False, True)
]


def paths_of(name: str, folder: str) -> list[str]:
    """Return the addresses of the pages of a run and of one of its checkpoints."""
    one = f"/r/{name}/c/{folder}"
    tabs = [f"/r/{name}{tab}" for tab in (*TABS, "/numbers")]
    return [*tabs, one, f"{one}/tensors"]


@pytest.mark.parametrize(("width", "dark"), SIGHTS)
def test_every_page_is_whole_legible_and_silent(
    chromium: Chromium,
    page: Page,
    work: list[str],
    run_root: Path,
    evil_root: Path,
    width: int,
    dark: bool,
) -> None:
    """No scrolling sideways, pale text, message, forbidden script or style, or stranger."""
    paths = ["/", "/jobs", *work, *paths_of("run", folders(run_root)[0])]
    paths += paths_of("evil-b-run", folders(evil_root)[0])
    with chromium.tab(width=width, dark=dark) as tab:
        enter(tab, page)
        for path in paths:
            go(tab, page, path)
            wrong = [*cut_off(tab), *pale(tab), *unnamed(tab)]
            assert wrong == [], (path, wrong)
            assert tab.said == [], path
            assert 0 not in colors(tab), path
        assert stranger(tab, page.origin) == []
        assert {status for status in tab.statuses.values() if status >= 400} == set()
