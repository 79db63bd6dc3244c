"""Claims about who may look at the page, of a real server."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.serve.client import Page, serving

from holdfast.cli.web import guard
from holdfast.cli.web.guard import Access
from holdfast.cli.web.serve import SERVER, listening


def test_it_listens_on_this_machine_only() -> None:
    with listening(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_token_of_the_url_becomes_a_cookie_and_leaves_the_url(page: Page) -> None:
    reply = page.ask("GET", f"/r/run/checkpoints?q=x&token={page.access.token}")
    assert (reply.status, reply.headers["location"]) == (303, "/r/run/checkpoints?q=x")
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith(f"{page.cookie};")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert page.get("/").status == 200


@pytest.mark.parametrize(
    "path", ["/", "/r/run", "/static/page.js", "/r/run/curves.json", "/nothing"]
)
def test_without_the_token_everything_is_refused(page: Page, path: str) -> None:
    assert page.ask("GET", path).status == 403
    wrong = f"{page.access.cookie}={page.access.token[:-1]}"
    assert page.ask("GET", path, Cookie=wrong).status == 403
    assert page.ask("GET", f"{path}?token=wrong", Cookie=page.cookie).status == 403


def test_a_redirect_stays_on_this_server(page: Page) -> None:
    for path in ("//evil.example/x", "/\\evil.example", "///evil.example"):
        reply = page.ask("GET", f"{path}?token={page.access.token}")
        assert reply.headers["location"].lstrip("/") in ("evil.example/x", "evil.example")
        assert not reply.headers["location"].startswith(("//", "/\\"))


HOSTS = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:1", "", "127.0.0.1@evil"]


@pytest.mark.parametrize("host", HOSTS)
def test_another_host_is_refused_even_with_the_cookie(page: Page, host: str) -> None:
    """DNS rebinding: the browser believes that this server is another site."""
    assert page.ask("GET", "/", Host=host, Cookie=page.cookie).status == 403
    assert page.ask("GET", f"/?token={page.access.token}", Host=host).status == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:1", "[::1]:5", "LOCALHOST"])
def test_this_machine_may_have_any_port_in_host(page: Page, host: str) -> None:
    """An SSH tunnel has another port at its other end."""
    assert page.ask("GET", "/", Host=host, Cookie=page.cookie).status == 200


def test_two_hosts_or_none_are_refused(page: Page) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        data = b"GET / HTTP/1.1\r\n" + hosts + f"Cookie: {page.cookie}\r\n\r\n".encode()
        assert page.raw(data).split()[1] in (b"400", b"403")


HARMLESS = "/jobs/99999/stop"
"""A form that passes the guard, and then stops no work, as there is none of that number."""
FORM = {"Content_Type": "application/x-www-form-urlencoded"}


def test_a_form_needs_its_own_origin_and_token(page: Page) -> None:
    """CSRF: the browser sends the cookie, but another page knows neither."""
    own, body = page.origin, f"form_token={page.access.form_token}"
    for origin in ("http://evil.example", "null", f"http://localhost:{page.port}", f"{own}0"):
        asked = page.ask("POST", HARMLESS, body, Cookie=page.cookie, Origin=origin, **FORM)
        assert asked.status == 403, origin
    no_origin = page.ask("POST", HARMLESS, body, Cookie=page.cookie, **FORM)
    assert no_origin.status == 403
    for wrong in ("", "form_token=", f"form_token={page.access.token}", "form_token=é"):
        asked = page.ask("POST", HARMLESS, wrong, Cookie=page.cookie, Origin=own, **FORM)
        assert asked.status == 403, wrong
    assert page.ask("POST", HARMLESS, body, Origin=own, **FORM).status == 403
    for site, status in (("same-origin", 404), ("same-site", 403), ("cross-site", 403)):
        hidden = {"Cookie": page.cookie, "Origin": "null", "Sec_Fetch_Site": site, **FORM}
        assert page.ask("POST", HARMLESS, body, **hidden).status == status
    assert page.ask("POST", HARMLESS, body, Cookie=page.cookie, Origin=own).status == 415
    assert page.post(HARMLESS).status == 404


def test_another_page_may_not_read_or_embed(page: Page) -> None:
    for headers in (
        {"Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
    ):
        assert page.get("/r/run/curves.json", **headers).status == 403, headers
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert page.get("/", **followed).status == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT"])
def test_other_methods_are_refused(page: Page, method: str) -> None:
    assert page.ask(method, "/", Cookie=page.cookie, Origin=page.origin).status in (400, 403, 405)


@pytest.mark.parametrize(
    "path", ["/", "/r/run", "/static/page.css", "/nothing", "/r/run/curves.json"]
)
def test_every_answer_forbids_what_the_page_does_not_need(page: Page, path: str) -> None:
    for reply in (page.get(path), page.ask("GET", path)):
        policy = dict(
            part.strip().split(" ", 1)
            for part in reply.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        for source in ("script-src", "style-src", "connect-src", "img-src", "form-action"):
            assert policy[source] == "'self'"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in reply.headers
    assert "no-store" in page.get("/").headers["cache-control"]


def test_a_request_that_is_too_large_is_refused(page: Page) -> None:
    large = "x" * (guard.MAX_BODY_NBYTES + 1)
    asked = page.ask("POST", HARMLESS, large, Cookie=page.cookie, Origin=page.origin, **FORM)
    assert asked.status == 413
    header = b"GET / HTTP/1.1\r\nX: " + b"x" * (2 * SERVER["h11_max_incomplete_event_size"])
    with suppress(ConnectionResetError):  # closed before all of it was taken
        assert b" 400 " in page.raw(header)[:20]
    fields = "&".join(f"a{number}=1" for number in range(200))
    asked = page.ask("POST", HARMLESS, fields, Cookie=page.cookie, Origin=page.origin, **FORM)
    assert asked.status == 400
    assert page.get("/?" + fields).status == 400


def test_a_form_that_arrives_slowly_is_refused(
    run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.2)
    with serving([run_root]) as page:
        head = f"POST {HARMLESS} HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n"
        head += f"Cookie: {page.cookie}\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        assert b" 408 " in page.raw(f"{head}Content-Length: 9999\r\n\r\nform_token=".encode())[:20]


def test_there_is_a_limit_of_connections(run_root: Path) -> None:
    with serving([run_root]) as page:
        with ExitStack() as stack:
            for _ in range(SERVER["limit_concurrency"]):
                held = socket.create_connection(("127.0.0.1", page.port), timeout=20)
                stack.enter_context(held)
            assert page.get("/static/page.css").status == 503
        while page.get("/static/page.css").status == 503:
            pass
        assert page.get("/static/page.css").status == 200


def test_a_prefix_works_whether_the_proxy_takes_it_off_or_not(run_root: Path) -> None:
    access = Access(prefix="/tools/holdfast", hosts=frozenset({"proxy.example"}))
    with serving([run_root], access=access) as page:
        for path in ("/tools/holdfast/r/run/lineage", "/r/run/lineage"):
            reply = page.get(path, Host="proxy.example")
            assert reply.status == 200
            assert 'href="/tools/holdfast/r/run"' in reply.text
        reply = page.ask("GET", f"/tools/holdfast/?token={access.token}")
        assert reply.headers["location"] == "/tools/holdfast/"
        assert "Path=/tools/holdfast/" in reply.headers["set-cookie"]
        asked = page.ask(
            "POST",
            "/tools/holdfast/r/run/verify",
            f"form_token={access.form_token}",
            Cookie=page.cookie,
            Origin="https://proxy.example",
            Host="proxy.example",
            **FORM,
        )
        assert asked.headers["location"].startswith("/tools/holdfast/jobs/")
        page.whole(asked.headers["location"])
        assert page.get("/tools/holdfast").status == 200
        assert page.get("/", Host="other.example").status == 403


def test_cookies_of_other_servers_do_not_hide_ours(page: Page) -> None:
    odd = f'_xsrf="2|a,b;c"; {{}}=1; =; {page.cookie}; x'
    assert page.ask("GET", "/", Cookie=odd).status == 200


def test_many_who_ask_at_once_are_all_answered(page: Page) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(page.get("/r/run").status)) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [200] * 12


@pytest.mark.parametrize("origin", ["http://[", "http://127.0.0.1:99999999", "http://[::1", "//"])
def test_an_origin_that_is_no_url_is_refused(page: Page, origin: str) -> None:
    reply = page.ask("GET", "/", Cookie=page.cookie, Origin=origin)
    assert (reply.status, reply.headers.get("x-frame-options")) == (403, "DENY")
