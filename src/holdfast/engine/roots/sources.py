"""What people write to name a checkpoint: `root`, `root@which`, or a checkpoint's own folder.

`locate` opens what they name, for which it imports much more.
"""

from __future__ import annotations

import os

from holdfast.errors import UsageError
from holdfast.format import layout


def split_source(source: str | os.PathLike[str]) -> tuple[str, str | None]:
    """(root, which) of `root@which`; which is None without one. A path with an @ in it that is
    there wins.

    Raises:
        UsageError: it is empty, or nothing stands before or after the @.
    """
    text = os.fspath(source)
    root, at, which = text.rpartition("@")
    if not at or os.path.isdir(text):
        root, at, which = text, "", ""
    if not root or (at and not which):
        raise UsageError(f"{text!r}: expected ROOT or ROOT@WHICH")
    return root, which if at else None


def split_folder(source: str) -> tuple[str, str]:
    """(root, folder) of what names the folder of one checkpoint; otherwise nothing twice.

    A path does when a manifest is in it, which a person may have renamed. A URL does when it ends
    with the name of a checkpoint.
    """
    scheme, separator, rest = source.partition("://")
    if separator:
        root, slash, folder = rest.rstrip("/").rpartition("/")
        is_named = bool(slash) and layout.parse_attempt(folder) is not None
        return (f"{scheme}://{root}", folder) if is_named else ("", "")
    if os.path.isfile(os.path.join(source, layout.MANIFEST)):
        root, folder = os.path.split(os.path.abspath(source))
        return root, folder
    return "", ""
