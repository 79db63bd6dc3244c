"""Bounds of the work and the memory that a pickle may cost."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import LimitExceeded


@dataclass(slots=True, kw_only=True)
class Budget:
    """What may still be spent on the pickles of one source.

    The memory of every value is charged when it is made, and never given back. Work that is not
    one operation is charged as memory.
    """

    operations: int = 6_000_000
    """Operations: about 100,000 tensors with all that belongs to them take as many as 4 million."""
    nbytes: int = 128 << 20
    """Memory of the values."""

    def charge(self, nbytes: int) -> None:
        """Take from the memory that is left.

        Raises:
            LimitExceeded: it is used up.
        """
        self.nbytes -= nbytes
        if self.nbytes < 0:
            raise LimitExceeded("its values need more memory than a pickle may take here")


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
