"""Makes the pictures of docs/serve.md again: `python -m tests.serve.browser.pictures [FOLDER]`."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from tests.serve.browser.chromium import Chromium, Tab
from tests.serve.browser.conftest import enter, go, program
from tests.serve.browser.story import make_runs
from tests.serve.client import Page, serving
from tests.serve.test_pages import folders

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
MAX_NBYTES = 80_000


def _runs(tab: Tab, page: Page, root: Path) -> None:
    go(tab, page, "/")


def _overview(tab: Tab, page: Page, root: Path) -> None:
    go(tab, page, "/r/gpt")


def _lineage(tab: Tab, page: Page, root: Path) -> None:
    go(tab, page, "/r/gpt/lineage")


def _retention(tab: Tab, page: Page, root: Path) -> None:
    go(tab, page, "/r/gpt/retention")


def _checkpoint(tab: Tab, page: Page, root: Path) -> None:
    go(tab, page, f"/r/gpt/c/{folders(root)[0]}")


SHOWN: dict[str, tuple[Callable[[Tab, Page, Path], None], int]] = {
    "runs": (_runs, 765),
    "overview": (_overview, 1085),
    "lineage": (_lineage, 760),
    "retention": (_retention, 832),
    "checkpoint": (_checkpoint, 760),
}
"""Name → how to come there, and how much of the page is shown."""


def make(chromium: Chromium, roots: Sequence[Path], folder: Path) -> list[Path]:
    """Write a picture of each page of the first run, called `gpt`; return their paths."""
    made = []
    with serving(roots) as page, chromium.tab(width=1100) as tab:
        enter(tab, page)
        for name, (come, height) in SHOWN.items():
            come(tab, page, roots[0])
            tab.run("document.activeElement.blur()")
            path = folder / f"serve-{name}.png"
            path.write_bytes(smaller(tab.picture(height=height)))
            made.append(path)
    return made


def smaller(png: bytes) -> bytes:
    """Return a picture with at most 256 colors, which is all that flat areas and letters need."""
    with Image.open(io.BytesIO(png)) as image, io.BytesIO() as out:
        flat = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
        flat.save(out, "PNG", optimize=True)
        return out.getvalue()


def main() -> None:
    """Train the run of the pictures, and take them."""
    folder = (Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES).resolve()
    with tempfile.TemporaryDirectory() as where, Chromium(program()) as chromium:
        make_runs(Path(where) / "runs")
        os.chdir(where)  # so that the pages show short paths
        for path in make(chromium, sorted(Path("runs").iterdir()), folder):
            print(path, f"{path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
