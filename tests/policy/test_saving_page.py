"""The examples of docs/saving.md, each of which is run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "saving.md"


def test_every_example_of_the_page_gives_what_it_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, None, 0)
    results = doctest.DocTestRunner().run(examples)
    assert results.attempted > 30
    assert results.failed == 0
