"""Let every mistake be made, and write docs/mistakes.md: `python -m tests.mistakes`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.mistakes.table import judged
from tests.mistakes.themes import CASES
from tests.mistakes.user import made


def main() -> int:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        digests = made(Path(folder, "template"))
        for number, case in enumerate(CASES):
            if len(sys.argv) > 1 and not any(
                w in case.did or w in case.theme for w in sys.argv[1:]
            ):
                continue
            place = Path(folder, str(number))
            place.mkdir()
            try:
                answer = judged(case, Path(folder, "template"), digests, place)
                print(f"ok   {case.did}\n       {answer.kind}: {answer.text}")
            except AssertionError as e:
                print(f"BAD  {case.did}\n       {e}")
            except Exception as e:
                print(f"EXC  {case.did}\n       {e!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
