"""Middleware that decides which requests are answered: host, origin, token, size and time.

It knows nothing of roots. What passes has the form's fields in `scope["state"]["form"]`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_NBYTES = 64 << 10
BODY_S = 10.0
"""Longest time in which the body of a request must arrive."""
ANSWER_S = 60.0
"""Longest time of an answer. Long work runs in the background."""
MAX_FIELDS = 50
FORM_TOKEN = "form_token"
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Secrets that admit a browser, and the names by which the server is reached."""

    prefix: str = ""
    """Path below which the pages are, without a slash at its end."""
    hosts: frozenset[str] = frozenset()
    """Names beside those of this machine itself, for a proxy."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie(self) -> str:
        """Name of the cookie; two servers behind tunnels to one port have different ones."""
        return f"holdfast-{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"

    @property
    def form_token(self) -> str:
        """Token in the forms of each page; it is never in a cookie."""
        return hmac.new(self.token.encode(), b"form", hashlib.sha256).hexdigest()

    def is_token(self, text: str) -> bool:
        """Whether a text is the token; compares in constant time."""
        return hmac.compare_digest(text.encode(), self.token.encode())

    def is_host(self, name: str) -> bool:
        """Whether the server may be reached by a name, as `Host` has it."""
        return name in LOCAL_NAMES or name in self.hosts


class Guard:
    """Middleware that refuses foreign requests and adds security headers to each response."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # uvicorn refuses what is never accepted
        _set_prefix(scope, self._access.prefix)
        sending = _SafeSend(send)
        try:
            refusal = self._refusal(scope) or await self._read_form(scope, receive)
            if refusal is not None:
                await refusal(scope, receive, sending)
                return
            await asyncio.wait_for(self._app(scope, _no_body, sending), ANSWER_S)
        except asyncio.TimeoutError:
            if not sending.has_begun:
                await _make_refusal(503, "It took too long.")(scope, receive, sending)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if _name_of(headers.getlist("host")) not in self._find_allowed_hosts(headers):
            return _make_refusal(
                403,
                "Use 127.0.0.1, localhost or a name passed with --allow-host to reach this server.",
            )
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return _make_refusal(405, "Only GET and POST are answered.")
        if not self._is_own_origin(scope, headers):
            return _make_refusal(403, "The request comes from another page.")
        try:
            given = parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=MAX_FIELDS)
        except ValueError:
            return _make_refusal(400, f"A query has at most {MAX_FIELDS} fields.")
        return self._admit(scope, headers, given)

    def _find_allowed_hosts(self, headers: Headers) -> Collection[str]:
        name = _name_of(headers.getlist("host"))
        return {name} if name and self._access.is_host(name) else ()

    def _is_own_origin(self, scope: Scope, headers: Headers) -> bool:
        """Whether `Origin` is that of `Host`, or a proxy's; only reading may have none."""
        origins = headers.getlist("origin")
        if not origins:
            return scope["method"] != "POST" and not _is_embedded(headers)
        if len(origins) > 1:
            return False
        if origins[0] == "null":
            # So a browser hides the origin of our own forms, too, as they have no referrer. Pages
            # cannot set the other header.
            return headers.getlist("sec-fetch-site") == ["same-origin"]
        try:
            parts = urlsplit(origins[0])
        except ValueError:
            return False
        if parts.scheme not in ("http", "https"):
            return False
        return parts.netloc == headers["host"] or (parts.hostname or "") in self._access.hosts

    def _admit(
        self, scope: Scope, headers: Headers, query: Sequence[tuple[str, str]]
    ) -> Response | None:
        """Exchange the token in the URL for a cookie, or check the cookie."""
        tokens = [value for name, value in query if name == "token"]
        if tokens and scope["method"] != "POST" and self._access.is_token(tokens[0]):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            path = f"{self._access.prefix}/{_path_below(scope, self._access.prefix)}"
            response = RedirectResponse(f"{path}?{rest}" if rest else path, status_code=303)
            response.set_cookie(
                self._access.cookie,
                self._access.token,
                path=f"{self._access.prefix}/",
                httponly=True,
                samesite="strict",
            )
            return response
        if not tokens and self._access.is_token(_cookie(headers, self._access.cookie)):
            return None
        return _make_refusal(
            403,
            "Open the whole URL that `holdfast serve` printed, with its token, and "
            "accept its cookie (curl: `-L -b ''`).",
        )

    async def _read_form(self, scope: Scope, receive: Receive) -> Response | None:
        """Read the fields of a form, and check its token."""
        if scope["method"] != "POST":
            return None
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/x-www-form-urlencoded":
            return _make_refusal(415, "Only forms are taken.")
        try:
            body = await asyncio.wait_for(_body(receive), BODY_S)
        except asyncio.TimeoutError:
            return _make_refusal(408, "The form did not arrive in time.")
        if body is None:
            return _make_refusal(413, f"A form has at most {MAX_BODY_NBYTES} bytes.")
        try:
            fields = dict(parse_qsl(body.decode(), max_num_fields=MAX_FIELDS))
        except ValueError:
            return _make_refusal(400, "The form cannot be read.")
        if not hmac.compare_digest(
            fields.get(FORM_TOKEN, "").encode(), self._access.form_token.encode()
        ):
            return _make_refusal(403, "The form is not from this server. Reload the page.")
        scope.setdefault("state", {})["form"] = fields
        return None


class _SafeSend:
    """A `send` that adds security headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
        await self._send(message)


def _make_refusal(status: int, why: str) -> Response:
    return PlainTextResponse(f"{why}\n", status_code=status, headers={"Connection": "close"})


def _name_of(hosts: Sequence[str]) -> str:
    """Return the name in `Host` without its port; empty unless there is exactly one."""
    if len(hosts) != 1:
        return ""
    try:
        parts = urlsplit(f"//{hosts[0]}")
        _ = parts.port
    except ValueError:
        return ""
    is_plain = not (parts.path or parts.query or parts.fragment or parts.username is not None)
    return (parts.hostname or "") if is_plain else ""


def _is_embedded(headers: Headers) -> bool:
    """Whether a page of another origin embeds this request, rather than navigating to it."""
    is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    return is_foreign and headers.get("sec-fetch-mode") != "navigate"


def _cookie(headers: Headers, name: str) -> str:
    # By hand: of other servers of this machine there are cookies that the standard library refuses.
    pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _set_prefix(scope: Scope, prefix: str) -> None:
    """Set the prefix in the scope, whether or not the proxy has removed it from the path."""
    path: str = scope["path"]
    if path == prefix or not path.startswith(f"{prefix}/"):
        path = f"{prefix}{path.removeprefix(prefix) or '/'}"
    scope["root_path"], scope["path"] = prefix, path


def _path_below(scope: Scope, prefix: str) -> str:
    path: str = scope["path"]
    return path.removeprefix(prefix).lstrip("/\\")


async def _body(receive: Receive) -> bytes | None:
    """Read a whole body; None if it is too large."""
    found = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(found)
        found += message.get("body", b"")
        if len(found) > MAX_BODY_NBYTES:
            return None
        if not message.get("more_body"):
            return bytes(found)


async def _no_body() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
