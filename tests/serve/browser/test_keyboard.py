"""Claims about the pages in Chromium for one who has a keyboard and no mouse."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.serve.browser.chromium import Chromium, Tab
from tests.serve.browser.conftest import enter, go
from tests.serve.client import Page
from tests.serve.test_pages import TABS, folders

_KNOWN = """
window.mark = one => [one.tagName, one.getAttribute('href') ?? one.name ?? '', one.value ?? '',
  one.getAttribute('aria-label') ?? '', one.closest('form')?.getAttribute('action') ?? '',
  one.textContent.trim().slice(0, 40)].join('|');
window.controls = () => [...document.querySelectorAll(
  'a[href], button, input:not([type=hidden]), select, summary, [tabindex="0"]')]
  .filter(one => one.checkVisibility());
return controls().map(mark);
"""

_FOCUSED = """
const one = document.activeElement;
if (!one || one === document.body) return null;
const style = getComputedStyle(one), rect = one.getBoundingClientRect();
const clear = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2
  && style.outlineColor !== getComputedStyle(document.body).backgroundColor;
const inside = rect.bottom > 0 && rect.top < innerHeight
  && rect.right > 0 && rect.left < innerWidth;
return [mark(one), one.matches(':focus-visible') && clear && inside];
"""


def walked(tab: Tab) -> tuple[list[str], list[str]]:
    """Press Tab to the end of a page; return the controls there are, and those that had focus."""
    controls = list(tab.run(_KNOWN))
    reached: list[str] = []
    for _ in range(len(controls) + 5):
        tab.press("Tab")
        found = tab.run(_FOCUSED)
        if found is None:
            break
        name, is_visible = found
        if reached and name == reached[0]:
            break
        assert is_visible, f"{tab.url}: the focus on {name} cannot be seen"
        reached.append(name)
    return controls, reached


@pytest.mark.full
def test_tab_reaches_every_control_in_order_and_the_focus_can_be_seen(
    tab: Tab, page: Page, run_root: Path
) -> None:
    one = f"/r/run/c/{folders(run_root)[0]}"
    enter(tab, page)
    tabs = [f"/r/run{name}" for name in (*TABS, "/numbers")]
    for path in ("/", "/jobs", *tabs, one, f"{one}/tensors"):
        go(tab, page, path)
        controls, reached = walked(tab)
        assert reached == controls, path


def test_the_first_tab_is_a_link_past_the_header(tab: Tab, page: Page) -> None:
    enter(tab, page, "/r/run/checkpoints")
    tab.press("Tab")
    assert tab.text(":focus") == "Skip to the content"
    left, top = tab.run(
        "const r = document.activeElement.getBoundingClientRect(); return [r.x, r.y]"
    )
    assert (left, top) == (0, 0)
    tab.press("Enter")
    tab.wait_for("document.activeElement.id === 'main'")
    tab.press("Tab")
    assert tab.run("return document.activeElement.name") == "q"


def test_enter_opens_a_link_and_filters_and_escape_empties_the_filter(
    tab: Tab, page: Page, run_root: Path
) -> None:
    enter(tab, page, "/r/run/checkpoints")
    tab.focus("input[name=q]")
    tab.type("paper")
    tab.wait_for_text("1 of 5 checkpoints")
    tab.press("Enter")
    tab.wait_for_text("1 of 5 checkpoints")
    assert tab.run("return document.activeElement.value") == "paper"
    tab.press("Escape")
    tab.wait_for_text("5 of 5 checkpoints")
    tab.focus("tbody a")
    tab.press("Enter")
    newest = folders(run_root)[0]
    tab.wait_for("location.pathname === a[0]", f"/r/run/c/{newest}")


@pytest.mark.full
def test_space_opens_details_and_presses_a_button(tab: Tab, page: Page, run_root: Path) -> None:
    enter(tab, page, f"/r/run/c/{folders(run_root)[0]}")
    tab.focus("details:last-of-type summary")
    tab.press("Space")
    tab.wait_for("document.querySelector('details:last-of-type').open")
    tab.wait_for_text("digest", "details[open]")
    tab.focus(".actions button")
    tab.press("Space")
    tab.wait_for_text("Every byte is as it was written.")


@pytest.mark.full
def test_the_focus_and_what_is_open_outlive_a_part_that_is_read_again(
    tab: Tab, page: Page, run_root: Path
) -> None:
    enter(tab, page, f"/r/run/c/{folders(run_root)[0]}")
    tab.focus("details:last-of-type summary")
    tab.press("Enter")
    tab.focus("#part td button")
    name = tab.run("return document.activeElement.getAttribute('aria-label')")
    tab.run("document.querySelector('#part').dataset.old = 'yes'")
    tab.run("document.body.dispatchEvent(new CustomEvent('changed'))")
    tab.wait_for("!document.querySelector('#part').dataset.old")
    tab.wait_for("document.activeElement.getAttribute('aria-label') === a[0]", name)
    assert tab.run("return document.querySelector('details:last-of-type').open")


@pytest.mark.full
def test_a_wide_table_is_scrolled_with_arrows(chromium: Chromium, page: Page) -> None:
    with chromium.tab(width=400) as tab:
        enter(tab, page, "/r/run/checkpoints")
        tab.focus(".scroll")
        tab.press("ArrowRight", times=3)
        tab.wait_for("document.querySelector('.scroll').scrollLeft > 0")
        assert tab.run("return scrollX") == 0
