"""The site is built without a warning, has every public name, and fetches nothing elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import holdfast
from test_docs import PUBLIC

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "holdfast"
TABLES = ("__all__", "_HOMES")
NOT_FOR_USERS = {
    *("name_ranks", "listing", "is_damage"),  # of holdfast.errors
    *("wrapped", "try_key", "unwrapped"),  # of holdfast.keys
    *("Emitter", "check_names", "shows_info"),
    *("agree_on_data", "check_distributed_type"),  # of holdfast.bridges.accelerate
}
"""Public in their modules for other modules of the package."""


def public_names() -> set[str]:
    """What a user may import, as `holdfast.…`; the modules themselves are pages."""
    own = {name for name in holdfast.__all__ if name != "__version__"}
    modules = {path.stem for path in SRC.iterdir()}
    names = {f"holdfast.{name}" for name in own - modules}
    return names | {f"{module}.{name}" for module in PUBLIC for name in names_in(module)}


def names_in(module: str) -> set[str]:
    """The public names of a module: those of its table, or else what it defines."""
    path = SRC.joinpath(*module.split(".")[1:])
    tree = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in TABLES:
            return set(ast.literal_eval(node.value))
    defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    return {name for name in defined - NOT_FOR_USERS if not name.startswith("_")}


def names_on(site: Path) -> set[str]:
    """The names that pages of the reference describe, from the inventory that comes with it."""
    data = (site / "objects.inv").read_bytes()
    lines = zlib.decompress(data.split(b"zlib.\n", 1)[1]).decode().splitlines()
    return {line.split()[0] for line in lines if " py:" in line}


def fetched_by(page: Path) -> list[str]:
    """Scripts, styles, fonts and pictures of other hosts that a page would load."""
    text = page.read_text("utf-8")
    loaded = re.findall(
        r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?(https?://[^\s\">]+)", text
    )
    return [f"{page.name}: {url}" for url in loaded]


@pytest.mark.full
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """All that looks at the built site is in one test, as the build takes seconds."""
    pytest.importorskip("mkdocstrings")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(public_names() - names_on(site)) == []
    assert [url for page in site.rglob("*.html") for url in fetched_by(page)] == []
    assert "(https://" not in "".join(css.read_text() for css in site.rglob("*.css"))
    assert not [*site.rglob("*.py")]


def test_public_names_are_found_in_tables_and_in_definitions() -> None:
    assert "holdfast.data.Loader" in public_names()
    assert "holdfast.errors.OwnedElsewhere" in public_names()
    assert "holdfast.CheckpointManager" in public_names()
    assert not {name for name in public_names() if name.split(".")[-1].startswith("_")}
