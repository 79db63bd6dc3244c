"""A browser for the tests of a worker, which is installed if need be, and servers for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from tests.serve.browser.chromium import Chromium, Tab
from tests.serve.client import Page

from servers.cache import Unavailable, debian_packages
from servers.fixtures import skip_or_fail

PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-liberation")
"""What Debian has of the browser and of what it writes with."""
OpenTab = Callable[..., Tab]


def program() -> str:
    """Return the path of Chromium, which is installed if it is not there yet."""
    found = shutil.which("chromium")
    if found is None:
        debian_packages(*PACKAGES)
        found = shutil.which("chromium")
    if found is None:
        raise Unavailable("chromium: Debian's package has no such program")
    return found


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """A browser; under CI it must be had."""
    try:
        path = program()
    except Unavailable as error:
        skip_or_fail(str(error))
    with Chromium(path) as browser:
        yield browser


@pytest.fixture
def tab(chromium: Chromium) -> Iterator[Tab]:
    """A page of 1200 by 900, light, that no server has given a cookie yet."""
    with chromium.tab() as found:
        yield found


def enter(tab: Tab, page: Page, path: str = "/") -> None:
    """Open a page by the URL with the token, and wait until nothing of it is still being read."""
    joint = "&" if "?" in path else "?"
    tab.open(f"{page.origin}{path}{joint}token={page.access.token}")
    settle(tab)


def go(tab: Tab, page: Page, path: str) -> None:
    """Open another page, as one who has the cookie."""
    tab.open(f"{page.origin}{path}")
    settle(tab)


IS_SETTLED = """
document.readyState === 'complete' && !document.querySelector('[hx-trigger*="load delay"]')
&& [...document.querySelectorAll('.chart')].every(one => one.childElementCount)
&& document.body.innerText.length > 0
"""


def settle(tab: Tab) -> None:
    """Wait until nothing of the page is still being read, and its pictures are drawn."""
    tab.wait_for(IS_SETTLED)
    tab.run("await new Promise(requestAnimationFrame)")
