"""Opens what a user names as a `Source`, recognised by its first bytes or its file names."""

from __future__ import annotations

from pathlib import Path

from holdfast.errors import FormatError, NoCheckpoint
from holdfast.interop.source import Source
from holdfast.interop.sources import safetensors


def open_source(text: str) -> Source:
    """Open a checkpoint or a file of weights of any known format.

    `text` is `ROOT`, `ROOT@which` or the folder of a checkpoint, or a local file or folder of
    another library.

    Raises:
        NoCheckpoint: nothing exists there.
        FormatError: it is in no known format, or damaged.
    """
    path = Path(text)
    if safetensors.recognises(path):
        return safetensors.SafetensorsFile(path)
    if not path.exists():
        raise NoCheckpoint(f"{text}: there is no such file or folder")
    raise FormatError(f"{text}: in no format that is known here")
