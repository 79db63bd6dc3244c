"""Claims about what a person does in Chromium: filter, verify, compare."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.serve.browser.chromium import Tab
from tests.serve.browser.conftest import enter, go, settle
from tests.serve.client import Page, serving
from tests.serve.conftest import EVIL
from tests.serve.many import multiply
from tests.serve.test_pages import folders

import holdfast
from warm import Popen


def test_checkpoints_and_tensors_are_filtered_while_one_types(
    tab: Tab, page: Page, run_root: Path
) -> None:
    enter(tab, page, "/r/run/checkpoints")
    tab.fill("input[name=q]", "left behind")
    tab.wait_for_text("2 of 5 checkpoints")
    assert tab.run("return document.querySelectorAll('tbody tr').length") == 2
    go(tab, page, f"/r/run/c/{folders(run_root)[0]}/tensors")
    loads = len([url for url in tab.asked if url.endswith("/tensors")])
    tab.fill("input[name=q]", "weight")
    tab.wait_for_text("12 of 30 tensors")
    tab.fill("input[name=q]", "weight model:4")
    tab.wait_for_text("1 of 30 tensors")
    assert "model:4.weight" in tab.text("tbody")
    tab.fill("input[name=q]", "nothing has this name")
    tab.wait_for_text("0 of 30 tensors")
    assert len([url for url in tab.asked if url.endswith("/tensors")]) == loads
    assert tab.said == []


@pytest.fixture(scope="module")
def heavy_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root that takes long to read: many checkpoints with the same 32 MiB."""
    root = tmp_path_factory.mktemp("heavy") / "run"
    with holdfast.CheckpointManager(root, {"model": {"w": torch.rand(8 << 20)}}) as manager:
        manager.save(100, metrics={"loss": 3.0}).wait()
    multiply(root, 400)
    yield root
    shutil.rmtree(root)


@pytest.mark.full
def test_verification_begins_shows_its_progress_and_is_stopped(tab: Tab, heavy_root: Path) -> None:
    with serving([heavy_root]) as page:
        enter(tab, page, "/r/run")
        tab.click("button", "Verify every byte")
        tab.wait_for("location.pathname.startsWith('/jobs/')")
        tab.wait_for("document.querySelector('progress')?.value > 0")
        said = tab.text("#part")
        tab.wait_for("document.querySelector('progress') && a[0] !== part.innerText", said)
        assert "Work 1" in tab.text("header")
        tab.click("button", "Stop")
        tab.wait_for_text("Stopped.")
        go(tab, page, "/jobs")
        tab.wait_for_text("stopped")
        assert tab.said == []


@pytest.mark.full
def test_two_checkpoints_are_compared(tab: Tab, page: Page, run_root: Path) -> None:
    newest, *_, oldest = folders(run_root)
    enter(tab, page, "/r/run/compare")
    tab.fill("input[name=a]", oldest)
    tab.fill("input[name=b]", newest)
    tab.press("Enter")
    tab.wait_for("location.search.includes(a[0])", oldest)
    tab.wait_for_text("counter step", "#part")
    tab.click("#part button")
    tab.wait_for_text("They differ.")
    assert "0.weight" in tab.text("main")


_TRAINING = """
import sys
from runs import new_run
run = new_run()
with run.manager(sys.argv[1]) as manager:
    for line in sys.stdin:
        run.train()
        manager.save(int(line), metrics={"loss": 1 / int(line)}).wait()
        print(line, end="", flush=True)
"""


@pytest.mark.full
def test_an_open_page_follows_a_training_in_another_process(tab: Tab, tmp_path: Path) -> None:
    root, pipe = tmp_path / "run", subprocess.PIPE
    with Popen(["-c", _TRAINING, root], stdin=pipe, stdout=pipe) as training:
        assert training.stdin is not None
        assert training.stdout is not None

        def save(step: int) -> None:
            training.stdin.write(f"{step}\n")
            training.stdin.flush()
            assert training.stdout.readline() == f"{step}\n"

        save(1)
        with serving([root]) as page:
            enter(tab, page, "/r/run")
            assert "training" in tab.text("#live")
            assert "step 1, saved" in tab.text("#live")
            tab.send("Emulation.setEmulatedMedia", features=[])  # a person who likes motion
            assert tab.run("return document.getAnimations().length") == 0, "they cost a core"
            tab.run("window.untouched = true")
            for step in (2, 3):
                save(step)
                tab.wait_for_text(f"step {step}, saved", "#live")
                tab.wait_for_text(f"step {step}", ".card .big")
                tab.wait_for_text(f"loss {1 / step:.6g}"[:9], "#newest-part tbody tr:first-child")
            training.stdin.close()
            assert training.wait(60) == 0
            tab.wait_for_text("ended", "#live")
            assert tab.run("return window.untouched"), "the page was loaded again"
            assert tab.said == []


@pytest.mark.full
def test_a_page_whose_server_has_ended_says_so(tab: Tab, run_root: Path) -> None:
    with serving([run_root]) as page:
        enter(tab, page, "/r/run")
        assert "5 checkpoints" in tab.text("#live")
    tab.wait_for_text("The server does not answer. What is shown here may be old.", "#live")
    with serving([run_root], port=page.port) as page:
        tab.wait_for_text("Open the URL that it printed.", "#live")


@pytest.mark.full
def test_of_many_changes_the_parts_hear_at_once_and_then_every_ten_seconds(
    tab: Tab, page: Page
) -> None:
    enter(tab, page, "/r/run")
    tab.run(_CHANGING)
    tab.wait_for("times.length === 2")
    assert tab.run("return times[1] - times[0]") > 9900
    assert tab.run("return version") > 3


_CHANGING = """
window.times = [];
window.version = 1000;
document.body.addEventListener("changed", () => times.push(performance.now()));
const fetched = window.fetch;
window.fetch = async (url, options) => {
  if (!String(url).endsWith("/live")) return fetched(url, options);
  version += 1;
  return new Response(`<span data-version="${version}" data-seen="${version}"></span>`);
};
"""


@pytest.mark.full
def test_markup_in_names_is_text(tab: Tab, page: Page, evil_root: Path) -> None:
    """Nothing of it becomes an element, also in what scripts draw and in the title."""
    run, (newest, older) = "/r/evil-b-run", folders(evil_root)
    enter(tab, page, run)
    for path in (
        *("", "/checkpoints", "/lineage", "/retention", "/resume", "/numbers"),
        *(f"/c/{newest}", f"/c/{newest}/tensors", f"/compare?a={older}&b={newest}"),
    ):
        go(tab, page, run + path)
        strange = (
            "return document.querySelectorAll('main img, script:not([src]), [onerror]').length"
        )
        assert tab.run(strange) == 0, path
    go(tab, page, run)
    tab.wait_for_text(EVIL, "#curves")
    go(tab, page, f"{run}/c/{newest}")
    assert EVIL in tab.text("#part")
    go(tab, page, f"{run}/c/{newest}/tensors")
    tab.click(f"button[value*='{EVIL[8:13]}']")
    tab.wait_for_text("Numbers by power of two")
    assert EVIL in tab.text("h1")
    settle(tab)
    assert tab.said == []
