"""Stores of bytes under keys; `open_store` makes one from a path or a URL."""

from __future__ import annotations

import os
import re

from holdfast.errors import UsageError
from holdfast.events import url_without_secrets
from holdfast.store.base import Store

REMOTE_SCHEMES = ("s3", "gs", "az", "oci")
"""URL schemes of object stores."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/+|$)")

_DBFS = "/dbfs"
_FOR_SHELLS = re.compile(r"^~[^/]*|\$\w+|\$\{\w+\}")


def open_store(where: str | os.PathLike[str] | Store) -> Store:
    """Return the store for a path or a URL, or `where` itself if it is a store.

    URLs: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
    `oci://bucket@namespace/prefix`, `sftp://user@host/path` and `memory://<name>`. Endpoint and
    credentials are those of the cloud's own tools, or of `ssh`; for options make a `RemoteStore`.
    `http://` and `https://` can only be read. `dbfs:/path` is `/dbfs/path`, if that is mounted.

    Opening touches nothing: a missing folder is made by the first save.

    Raises:
        UsageError: no store is known by that name, or it needs a library that is not installed.
    """
    if isinstance(where, (str, os.PathLike)):
        return _open_named(os.fspath(where))
    if isinstance(where, Store):
        return where
    raise UsageError(
        f"root {where!r}: must be a path, a URL or a store. Your own store class must subclass "
        "holdfast.store.base.Store"
    )


def _open_named(where: str) -> Store:
    # Imported here: modules that need only the base class import this package too.
    scheme, separator, rest = where.partition("://")
    if not separator and where.startswith("dbfs:/") and os.path.isdir(_DBFS):
        where = _DBFS + where.removeprefix("dbfs:")
    if not separator:
        _refuse_scheme(where)
        _refuse_unexpanded(where)
        from holdfast.store.local import LocalStore

        return LocalStore(where)
    if scheme == "memory" and rest:
        from holdfast.store.memory import memory_store

        return memory_store(rest)
    if scheme in REMOTE_SCHEMES:
        from holdfast.store.remote import RemoteStore

        return RemoteStore(where)
    if scheme == "sftp":
        from holdfast.store.remote.sftp import SftpStore

        return SftpStore(where)
    if is_web(where):
        from holdfast.store.remote import HttpStore

        return HttpStore(where)
    shown = url_without_secrets(where)
    raise UsageError(
        f"root {shown!r}: must be a path, s3://…, gs://…, az://…, sftp://… or memory://<name>"
    )


def is_web(where: str) -> bool:
    """Whether a text is the address of a web server."""
    return where.lower().startswith(("http://", "https://"))


def _refuse_unexpanded(path: str) -> None:
    """Raise `UsageError` for a path with `~` or `$NAME`, unexpanded, unless the folder exists."""
    name = _FOR_SHELLS.search(path)
    if name is not None and not os.path.isdir(path):
        function = "expanduser" if name[0].startswith("~") else "expandvars"
        raise UsageError(
            f"root {path!r}: {name[0]!r} is not expanded here. Pass os.path.{function}({path!r})"
        )


def _refuse_scheme(path: str) -> None:
    """Raise `UsageError` for a path that is a URL, which `Path` has mangled or no store knows."""
    match = _SCHEME.match(path)
    if match is None:
        return
    scheme, rest = match[1], path[match.end() :]
    if scheme in (*REMOTE_SCHEMES, "sftp", "memory"):
        raise UsageError(
            f"root {path!r}: this is the path of a folder called '{scheme}:', as a Path cannot "
            f"hold a URL. Write it as text: '{scheme}://{rest}'"
        )
    if scheme == "dbfs":
        raise UsageError(
            f"root {path!r}: this is {_DBFS}/{rest}, and {_DBFS} is not mounted here. Mount it, or "
            "write s3://…, gs://… or az://…"
        )
    raise UsageError(
        f"root {path!r}: no store is known for '{scheme}:'. Write s3://…, gs://… or az://…, or the "
        f"absolute path of a folder that is mounted here"
    )
