"""HTML of the page: templates, the texts that they share, and the URLs of pages.

Text from a root was written by others. Templates escape all of it; control characters are shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from holdfast.cli.output import format_nbytes, number, printable
from holdfast.cli.watch import age
from holdfast.cli.web.guard import Access

MAX_TEXT = 10_000
"""Characters of one text that are shown: names in a checkpoint may be as long as it is."""
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Static:
    """Scripts, styles and pictures of the package, read once: no path of a request is opened."""

    def __init__(self) -> None:
        folder = files("holdfast.cli.web").joinpath("static")
        self._files = {
            one.name: (one.read_bytes(), kind)
            for one in folder.iterdir()
            for ending, kind in _KINDS.items()
            if one.name.endswith(ending)
        }
        digest = hashlib.sha256()
        for name in sorted(self._files):
            digest.update(self._files[name][0])
        self.version = digest.hexdigest()[:8]

    def response(self, name: str) -> Response | None:
        """Return a file; None if there is none of that name."""
        found = self._files.get(name)
        if found is None:
            return None
        data, kind = found
        # The URL has the version.
        headers = {"Cache-Control": "private, max-age=31536000, immutable"}
        return Response(data, media_type=f"{kind}; charset=utf-8", headers=headers)


class Rendering:
    """Makes pages of templates."""

    def __init__(self, access: Access, static: Static, **shared: Any) -> None:
        self._access = access
        self._environment = Environment(
            loader=PackageLoader("holdfast.cli.web"),
            autoescape=True,
            undefined=StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_escape_text,
        )
        self._environment.filters |= {
            "size": format_nbytes,
            "number": lambda value: "–" if value is None else number(value),
            "when": lambda text: (text or "?")[:19].replace("T", " "),
            "age": lambda seconds: "?" if seconds is None else age(seconds),
            "seconds": lambda value: "–" if value is None else _format_seconds(value),
        }
        self._environment.globals |= {
            **shared,
            "url": self.url,
            "static": lambda name: f"{self.url('static', name)}?v={static.version}",
            "form_token": access.form_token,
        }

    def url(self, *parts: str, **query: object) -> str:
        """Return the path of a page, with the prefix; empty values are left out of the query."""
        path = "/".join(quote(part, safe="") for part in parts)
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return f"{self._access.prefix}/{path}" + (f"?{urlencode(given)}" if given else "")

    def page(self, template: str, values: Mapping[str, Any], *, status: int = 200) -> HTMLResponse:
        """Render a template."""
        text = self._environment.get_template(template).render(values)
        return HTMLResponse(text, status_code=status)


def _escape_text(value: Any) -> Any:
    """Escape control characters of text, and cut what is huge; leave markup of templates."""
    if type(value) is not str:
        return value
    rest = len(value) - MAX_TEXT
    return printable(value) if rest <= 0 else f"{printable(value[:MAX_TEXT])}… ({rest:,} more)"


def _format_seconds(value: float) -> str:
    """Format a duration, of short ones the milliseconds."""
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"
