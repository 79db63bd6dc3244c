"""Make every mistake, and write docs/mistakes.md.

Run `python -m tests.mistakes` from the root of the project.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mistakes.page import PAGE, filled, tables
from tests.mistakes.table import judged
from tests.mistakes.themes import CASES
from tests.mistakes.user import made


def main() -> int:
    """Write the page; exit status 1, and no page, if a mistake has no right answer."""
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "template")
        digests = made(template)
        for number, case in enumerate(CASES):
            place = Path(folder, str(number))
            place.mkdir()
            try:
                rows.append((case, judged(case, template, digests, place)))
            except Exception as error:
                failed += 1
                print(f"{case.theme}: {case.did}: {error}", file=sys.stderr)
    if not failed:
        PAGE.write_text(filled(PAGE.read_text("utf-8"), tables(rows)), "utf-8")
        print(f"{len(rows)} mistakes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
