"""Property tests of the format never fail for being slow: other work may share the machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")
