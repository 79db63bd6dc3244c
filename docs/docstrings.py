"""An extension of griffe: docstrings as Markdown.

Examples (`>>> …`) and drawings become blocks of code; names of pages become links to them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PAGE = re.compile(r"(?<![\w/`\[])docs/([\w-]+\.md)")


class Docstrings(griffe.Extension):
    """Rewrites each docstring when it was read from the source."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring as Markdown for a page in docs/reference/."""
    return "\n\n".join(paragraph(each) for each in re.split(r"\n\n", text))


def paragraph(text: str) -> str:
    """One paragraph, in a block where it is code."""
    if text.startswith(">>> "):
        return f"```pycon\n{text}\n```"
    if re.search(r"^[├└│]", text, re.MULTILINE):
        return f"```text\n{text}\n```"
    return PAGE.sub(r"[docs/\1](../\1)", text)
