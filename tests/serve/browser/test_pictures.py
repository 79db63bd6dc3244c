"""Claims about the pictures: they are drawn, follow the colors, and lead to what they show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.serve.browser import pictures
from tests.serve.browser.chromium import Chromium, Tab
from tests.serve.browser.conftest import enter
from tests.serve.browser.looks import colors
from tests.serve.client import Page
from tests.serve.test_pages import folders

_DATA = "return [...document.querySelectorAll('canvas')].map(one => one.toDataURL()).join()"


def test_the_time_line_is_drawn_and_a_click_on_a_mark_opens_its_checkpoint(
    tab: Tab, page: Page, run_root: Path
) -> None:
    enter(tab, page, "/r/run")
    drawn = colors(tab, "#curves canvas")
    assert drawn
    assert min(drawn) > 3
    assert {"loss"} <= {*tab.text("#curves .u-title").split()}
    rect = tab.run(
        "const r = document.querySelector('#curves .u-over').getBoundingClientRect();"
        "return [r.x, r.y, r.width, r.height]"
    )
    left, middle = rect[0] + 2, rect[1] + rect[3] / 2
    for x in range(0, int(rect[2]), 4):  # marks are within 12 of each place at most
        tab.point(left + x, middle)
        if "step 100," in tab.text("#curves-note"):
            break
    oldest = folders(run_root)[-1]
    assert "step 100, interval" in tab.text("#curves-note")
    for kind in ("mousePressed", "mouseReleased"):
        at = {"x": left + x, "y": middle, "button": "left", "clickCount": 1}
        tab.send("Input.dispatchMouseEvent", type=kind, **at)
    tab.wait_for("location.pathname === a[0]", f"/r/run/c/{oldest}")


def test_runs_are_chosen_smoothed_and_sorted(tab: Tab, page: Page) -> None:
    enter(tab, page, "/")
    before = tab.run(_DATA)
    assert tab.run("return [...document.querySelectorAll('tbody .name a')].length") == 2
    tab.click("input[value=run]")
    tab.wait_for(f"(() => {{ {_DATA} }})() !== a[0]", before)
    assert tab.run("return document.querySelector('input[value=run]').checked") is False
    tab.click("thead a", "step")
    tab.wait_for("document.querySelector('[aria-sort=ascending]')?.textContent === 'step'")
    assert tab.run("return document.querySelector('input[value=run]').checked") is False
    tab.click("input[value=run]")
    tab.wait_for_text("loss", "#curves .u-title")
    for key, control in (("Space", "log"), ("ArrowRight", "smooth"), ("ArrowDown", "x")):
        before = tab.run(_DATA)
        tab.focus(f"[name={control}]")
        tab.press(key, times=20 if control == "smooth" else 1)
        tab.wait_for(f"(() => {{ {_DATA} }})() !== a[0]", before)
    tab.wait_for_text("time (UTC)", "#curves .u-legend")
    assert tab.run("return sessionStorage.getItem('holdfast-curves')") == (
        '{"smooth":0.2,"log":true,"x":"time"}'
    )
    assert tab.said == []


@pytest.mark.full
def test_a_picture_is_drawn_again_in_the_dark_and_at_another_width(tab: Tab, page: Page) -> None:
    enter(tab, page, "/r/run")
    light = tab.run(_DATA)
    tab.looks(width=1200, height=900, dark=True)
    tab.wait_for(f"(() => {{ {_DATA} }})() !== a[0]", light)
    tab.looks(width=500, height=900, dark=True)
    tab.wait_for("document.querySelector('#curves canvas').clientWidth <= 500")
    assert min(colors(tab, "#curves canvas")) > 3
    assert tab.said == []


@pytest.mark.full
def test_costs_are_drawn_above_their_table(tab: Tab, page: Page) -> None:
    enter(tab, page, "/r/run/costs")
    assert min(colors(tab, "#costs canvas")) > 3
    assert "stall" in tab.text("#costs")
    assert tab.run("return document.querySelectorAll('#part tbody tr').length") == 5


@pytest.mark.full
def test_lives_are_drawn_with_what_was_left_behind(tab: Tab, page: Page) -> None:
    enter(tab, page, "/r/run/lineage")
    assert tab.run("return document.querySelectorAll('svg.lineage circle').length") == 5
    fill = "return getComputedStyle(document.querySelector('svg .left-behind')).fill"
    back = "return getComputedStyle(document.body).backgroundColor"
    assert tab.run(fill) == tab.run(back)
    assert tab.run("return document.querySelectorAll('[aria-label=Saves] tbody tr').length") == 5


@pytest.mark.full
def test_the_pictures_of_the_docs_are_made_and_are_small(
    chromium: Chromium, run_root: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(run_root, tmp_path / "gpt", symlinks=True))
    made = pictures.make(chromium, [root], tmp_path)
    assert {path.name for path in made} == {path.name for path in pictures.IMAGES.glob("serve-*")}
    for path in (*made, *pictures.IMAGES.glob("serve-*")):
        assert path.stat().st_size < pictures.MAX_NBYTES, path
    text = (pictures.IMAGES.parent / "serve.md").read_text()
    assert all(f"images/{path.name}" in text for path in made)
