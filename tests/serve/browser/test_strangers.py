"""Claims about pages of others in the same Chromium: what they can do to this server is nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.serve.browser.chromium import Failed, Tab
from tests.serve.browser.conftest import enter
from tests.serve.client import Page

from marks import full


@contextmanager
def another_site(text: str = "<p>another site</p>") -> Iterator[str]:
    """Serve one page on another port of this machine; yield its URL, which differs by its host."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(60)


def test_the_token_leaves_the_address_and_the_history(tab: Tab, page: Page) -> None:
    enter(tab, page, "/r/run/checkpoints?q=paper")
    assert tab.url == f"{page.origin}/r/run/checkpoints?q=paper"
    assert tab.run("return document.cookie") == ""
    history = tab.send("Page.getNavigationHistory")["entries"]
    assert all(page.access.token not in entry["url"] for entry in history)
    assert page.access.token not in tab.run("return document.documentElement.outerHTML")
    tab.open(f"{page.origin}/r/run")
    assert "Overview" in tab.text()


@pytest.mark.full
def test_another_person_without_the_token_sees_nothing(tab: Tab, page: Page) -> None:
    tab.open(f"{page.origin}/r/run")
    assert tab.text().startswith("Open the whole URL that `holdfast serve` printed")
    assert tab.statuses[f"{page.origin}/r/run"] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", *full("localhost")])
def test_a_form_of_another_page_is_refused(tab: Tab, page: Page, host: str) -> None:
    """Also of one on this machine, which the browser sends the cookie of."""
    form = f'<form method="post" action="{page.origin}/r/run/verify"><button>go</button></form>'
    enter(tab, page, "/jobs")
    before = tab.text("main")
    with another_site(form) as url:
        tab.open(url.replace("127.0.0.1", host))
        tab.click("button")
        tab.wait_for("location.pathname === '/r/run/verify'")
        assert tab.statuses[f"{page.origin}/r/run/verify"] == 403
        assert tab.text().strip() == "The request comes from another page."
    tab.open(f"{page.origin}/jobs")
    assert tab.text("main") == before


_SEND = "return await fetch(a[0], a[1]).then(got => got.type + ' ' + got.status)"


@pytest.mark.full
def test_scripts_of_another_page_can_neither_read_nor_send(tab: Tab, page: Page) -> None:
    enter(tab, page, "/jobs")
    before = tab.text("main")
    body = {"method": "POST", "body": "x=1", "credentials": "include"}
    kind = {"headers": {"Content-Type": "application/x-www-form-urlencoded"}}
    with another_site() as url:
        tab.open(url)
        for path in ("/r/run/curves.json", "/", "/r/run/live"):
            with pytest.raises(Failed, match="Failed to fetch"):
                tab.run(_SEND, page.origin + path, {"credentials": "include"})
        for options in (body, {**body, **kind}):
            with pytest.raises(Failed, match="Failed to fetch"):
                tab.run(_SEND, f"{page.origin}/r/run/verify", options)
        blind = {**body, "mode": "no-cors"}
        with pytest.raises(Failed, match="Failed to fetch"):
            tab.run(_SEND, f"{page.origin}/r/run/verify", blind)  # by its resource policy
        answers = {path: got for path, got in tab.statuses.items() if path.endswith("verify")}
        assert {*answers.values()} <= {403}
    tab.open(f"{page.origin}/jobs")
    assert tab.text("main") == before


@pytest.mark.full
def test_another_page_cannot_show_or_load_this_one(tab: Tab, page: Page) -> None:
    enter(tab, page)
    script = f"{page.origin}/static/uplot-1.6.32.min.js"
    parts = f'<iframe src="{page.origin}/"></iframe><script src="{script}">'
    with another_site(f"{parts}</script><img src='{page.origin}/static/icon.svg'>") as url:
        tab.open(url)
        refused = tab.run(
            "try { return document.querySelector('iframe').contentDocument === null } "
            "catch { return true }"
        )
        assert refused
        assert script in tab.asked
        assert tab.run("return typeof uPlot") == "undefined"
        assert tab.run("return document.images[0].naturalWidth") == 0


def test_a_host_that_resolves_to_this_machine_is_refused(tab: Tab, page: Page) -> None:
    """DNS rebinding."""
    rebound = f"http://rebound.example:{page.port}"
    enter(tab, page)
    for path in ("/", f"/?token={page.access.token}"):
        tab.open(rebound + path)
        assert tab.text().startswith("Use 127.0.0.1, localhost or a name")
    status = tab.run("return (await fetch('/r/run/curves.json')).status")
    assert status == 403
