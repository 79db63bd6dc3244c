"""Golden bytes: what was written once is written and read in the same way for ever.

A failure here means that the bytes on disk changed: that needs a new version of the format and
a change of docs/format.md, not a new golden file.
"""

from __future__ import annotations

from pathlib import Path

from tests.each import each
from tests.format.samples import Document, documents

GOLDEN = Path(__file__).parent / "golden"


@each("document", documents(), ids=str)
def test_bytes_are_those_of_version_1(document: Document) -> None:
    assert document.data == (GOLDEN / document.name).read_bytes()


@each("document", documents(), ids=str)
def test_documents_of_version_1_are_read(document: Document) -> None:
    found = document.decode((GOLDEN / document.name).read_bytes(), what="w")
    assert repr(found) == repr(document.value)


def test_every_golden_file_is_checked() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {d.name for d in documents()}
