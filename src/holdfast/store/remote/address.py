"""Addresses of web servers, parsed for the client."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from holdfast.errors import UsageError
from holdfast.events import url_without_secrets
from holdfast.store.remote.opening import BucketLocation


def parse_web(url: str) -> BucketLocation:
    """Parse the URL of a folder or a file on a web server; a fragment is dropped."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError("no host")
    except ValueError:
        # A password that is not percent-encoded may be anywhere before the last @.
        scheme, _, rest = url.partition("://")
        shown = url_without_secrets(f"{scheme}://{rest.rpartition('@')[2]}")
        raise UsageError(
            f"{shown!r}: must be https://HOST/… or https://USER:PASSWORD@HOST/…, with a port that "
            "is a number; write / ? # and @ in a password as %2F %3F %23 and %40"
        ) from None
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return BucketLocation(
        scheme="https" if parts.scheme == "https" else "http",
        bucket=host,
        prefix=parts.path.strip("/"),
        endpoint=None,
        query=parts.query,
        login=f"{user}:{password}" if user or password else "",
    )
