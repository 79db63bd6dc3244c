"""Images that commands draw by matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".svg", ".pdf")


def expect_drawable(path: Path, option: str) -> None:
    """Raise `UsageError` unless the file can be drawn, before anything is read."""
    if path.suffix not in _ENDINGS:
        raise UsageError(f"{option}={str(path)!r}: must end in {', '.join(_ENDINGS)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{option}={str(path)!r}: needs matplotlib: pip install 'holdfast-torch[plot]'"
        ) from None


def save_figure(figure: Figure, path: Path, option: str) -> None:
    """Write an image in the format that the name's ending says."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"{option}={str(path)!r}: {error.strerror or error}") from error
