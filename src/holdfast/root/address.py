"""Parsing of a checkpoint's address: `root`, `root@which`, or a checkpoint's own folder.

`ownership.access.locate` opens the checkpoint, and imports much more for that.
"""

from __future__ import annotations

import os

from holdfast.errors import UsageError
from holdfast.events import url_without_secrets
from holdfast.format import layout
from holdfast.store import is_web

_WITH_USER = ("sftp://", "oci://")
"""URLs with an @ that separates the user or the bucket from the host."""


def split_source(source: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Split `root@which` into (root, which); `which` is None without an @.

    An existing folder with an @ in its path is a root. Web servers list nothing, so that nothing
    can be looked up in a root there.
    """
    text = os.fspath(source)
    refuse_credentials(text)
    if is_web(text):
        _refuse_which_of_web(text)
        return text, None
    # An @ before the path of such a URL belongs to its host.
    start = text.find("/", text.find("://") + 3) if text.startswith(_WITH_USER) else 0
    start = len(text) if start < 0 else start
    root, at, which = text[start:].rpartition("@")
    root = text[:start] + root
    if not at or os.path.isdir(text):
        root, at, which = text, "", ""
    if not root or (at and not which):
        raise UsageError(f"{text!r}: expected ROOT or ROOT@WHICH")
    return root, which if at else None


def refuse_credentials(text: str) -> None:
    """Raise `UsageError` if a bucket's URL has credentials; an @ may begin a name."""
    _, separator, rest = text.partition("://")
    host, at, server = rest.partition("/")[0].rpartition("@")
    is_which = "/" not in rest or _is_which(server) or text.startswith(_WITH_USER)
    if separator and at and not is_web(text) and (":" in host or not is_which):
        raise UsageError(
            f"{url_without_secrets(text)!r}: must have no credentials. Set the environment "
            "variables of the service, such as AWS_ACCESS_KEY_ID, or pass RemoteStore(options=…)"
        )


def make_which_error(source: str | os.PathLike[str], which: int | str) -> UsageError:
    """Make the error for a `which` beside a path or a URL, which would have to contain it."""
    refuse_credentials(os.fspath(source))
    text = url_without_secrets(os.fspath(source))
    if is_web(text):
        return UsageError(f"which={which!r} of {text!r}: {_explain_no_lookup(which)}")
    root, at, named = text.rpartition("@")
    if not at or "/" in named or os.path.isdir(text):
        root = text
    asked = f"step={which}" if isinstance(which, int) else which
    return UsageError(f"which={which!r}: with a path or a URL, write {f'{root}@{asked}'!r}")


def expect_root(path: str) -> None:
    """Raise `UsageError` if a path names one checkpoint instead of the root of a run."""
    if not path:
        return  # opening it raises
    expect_writable(path)
    root, which = split_source(path)
    if which is None:
        root, which = split_folder(path)
        if not which:
            return
    elif not _is_which(which):
        return
    raise UsageError(
        f"root={path!r}: this names a checkpoint. The root is {root!r}; resume({which!r}) goes "
        f"back to that checkpoint, and load({which!r}) loads it"
    )


def expect_writable(path: str) -> None:
    """Raise `UsageError` if a root is a web address."""
    if is_web(path):
        raise UsageError(
            f"root={url_without_secrets(path)!r}: a web address can only be read. Save to a "
            "folder, or to the bucket behind it; load a checkpoint that is there with "
            "load_weights, or with fit(start_from=…) of a Trainer"
        )


def _is_which(which: str) -> bool:
    is_word = which in ("latest", "best") or which.startswith(("step=", "best:"))
    return is_word or layout.parse_attempt(which) is not None


def split_folder(source: str) -> tuple[str, str]:
    """Split the address of a checkpoint's folder into (root, folder); ("", "") for others.

    A path is one if it holds a manifest, as users may rename the folder. A URL is one if it ends
    with the name of a checkpoint. A web address is always one, also with `manifest.json`.
    """
    if is_web(source):
        return _split_web(source)
    scheme, separator, rest = source.partition("://")
    if separator:
        root, slash, folder = rest.rstrip("/").rpartition("/")
        is_named = bool(slash) and layout.parse_attempt(folder) is not None
        return (f"{scheme}://{root}", folder) if is_named else ("", "")
    if os.path.isfile(os.path.join(source, layout.MANIFEST)):
        root, folder = os.path.split(os.path.abspath(source))
        return root, folder
    return "", ""


def _split_web(url: str) -> tuple[str, str]:
    address, mark, query = url.partition("#")[0].partition("?")
    address = address.rstrip("/").removesuffix(f"/{layout.MANIFEST}")
    root, _, folder = address.rpartition("/")
    is_inside = "://" in root and not root.endswith("/")
    return (f"{root}{mark}{query}", folder) if is_inside else ("", "")


def _refuse_which_of_web(url: str) -> None:
    shown = url_without_secrets(url)
    path = shown.partition("://")[2].partition("/")[2]
    which = path.rpartition("@")[2]
    if "@" in path and _is_which(which):
        raise UsageError(f"{shown!r}: {_explain_no_lookup(which)}")


def _explain_no_lookup(which: int | str) -> str:
    return (
        f"a web server lists no files, so {which!r} cannot be looked up. Name the folder of one "
        "checkpoint, which `holdfast ls` shows where the root is"
    )
