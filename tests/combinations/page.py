"""The table of combinations in docs/saving.md.

Run `PYTHONPATH=.:tests python -m combinations.page` from the root of the project.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from combinations.rows import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "saving.md"
BEGIN, END = "<!-- combinations: tests/combinations/page.py -->\n", "<!-- combinations end -->\n"
LIBRARIES = ("torch", "torchao", "bitsandbytes", "schedulefree", "pytorch_optimizer")


def table() -> str:
    """What resumes exactly, alone and sharded, and what is refused."""
    text = "| | exact | refused |\n|---|---|---|\n"
    for kind in ("weights", "optimizer", "wrappers"):
        exact, sharded, refused, refused_sharded = (
            {
                name
                for row in ROWS
                if bool(row.refused) == is_refused and ("FSDP2" in row.wrappers) >= is_sharded
                for name in (row.wrappers if kind == "wrappers" else [getattr(row, kind)])
            }
            for is_refused in (False, True)
            for is_sharded in (False, True)
        )
        lost = [listed(refused - exact), listed(refused_sharded & exact - sharded)]
        cells = [listed(exact, sharded), "; with FSDP2: ".join(filter(None, lost))]
        text += f"| {kind.rstrip('s')}s | {' | '.join(cells)} |\n".replace("  ", " ")
    return text


def listed(names: Iterable[str], sharded: Collection[str] = ()) -> str:
    """The names in order, each library's behind its own, with a mark if they may be sharded."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=str.lower):
        library, _, rest = name.partition(" ")
        is_known = library in LIBRARIES
        mark = "†" if name in sharded else ""
        groups.setdefault(library if is_known else "", []).append(
            (rest if is_known else name) + mark
        )
    return "; ".join(f"{library} {', '.join(found)}".strip() for library, found in groups.items())


def filled(page: str) -> str:
    """The page with the present table in the place of the one that it has."""
    return re.sub(f"(?s){BEGIN}.*{END}", lambda _: BEGIN + table() + END, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
