"""What the tests of bridges to other libraries share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.interop.roots import release_all


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    """Let each test begin without claims of this process."""
    yield
    release_all()
