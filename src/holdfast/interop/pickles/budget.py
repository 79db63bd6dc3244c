"""Bounds of the work and the memory that a pickle may cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from holdfast.errors import LimitExceeded

LIFTED = "if you trust the file, --trust lifts this limit, or trust=True in Python"
_IS_TRUSTED = ContextVar("is_trusted", default=False)


@contextmanager
def trusting() -> Iterator[None]:
    """Open files of others without bounds on their number of values and on memory."""
    token = _IS_TRUSTED.set(True)
    try:
        yield
    finally:
        _IS_TRUSTED.reset(token)


def bound(most: int) -> int:
    """Return a bound; one that nothing reaches while a file is opened that the user trusts."""
    return 1 << 62 if _IS_TRUSTED.get() else most


@dataclass(slots=True, kw_only=True)
class PickleBudget:
    """Remaining operations and memory, never given back, for the pickles of one source."""

    operations: int = 6_000_000
    """Operations: about 100,000 tensors with all that belongs to them take as many as 4 million."""
    nbytes: int = 128 << 20

    def __post_init__(self) -> None:
        self.operations, self.nbytes = bound(self.operations), bound(self.nbytes)

    def charge(self, nbytes: int) -> None:
        """Take from the memory that is left."""
        self.nbytes -= nbytes
        if self.nbytes < 0:
            raise LimitExceeded(
                f"its values need more memory than a pickle may take here; {LIFTED}"
            )


MAX_LEAF_NBYTES = 16 << 20
"""Most bytes of one text or one `bytes` that is not left in the file."""
MAX_INT_NBYTES = 1_701
"""Bytes of an integer with 4,096 digits."""
MAX_NAME = 200
"""Most characters of a module's or a class's name."""
SPAN_NBYTES = 4096
"""`bytes` longer than this stay in the file."""
MAX_OTHER_KEYS = 4_000
"""Most keys that are neither text nor small integers: hashes of others can be made to collide."""
MAX_KEY_VALUES = 32
"""Most values in such a key."""
