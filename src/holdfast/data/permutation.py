"""A permutation that is computed and not stored, for shuffles of any number of samples.

A Feistel network over pairs of bits, which is a bijection of `2**num_bits` numbers for any round
function. A result outside of the range is permuted again until it is inside ("cycle walking": Black
and Rogaway, Ciphers with Arbitrary Finite Domains, 2002); as the domain is less than twice the
range, that takes two turns on average at most. Such a network is always an even permutation of its
domain, so one more bit of the seed decides whether the first two indices change places: half of all
orders are odd. It is for shuffling, and not for secrets; of ten samples or fewer, some orders come
more often than others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.data import randomness

Values = NDArray[np.uint64]

_NUM_ROUNDS = 10
"""Even, so that the halves end where they began; 4 would do for the theory of ideal rounds."""
_BLOCK = 2**14
"""Places computed at a time: a batch alone would cost more in calls than in arithmetic."""


class Permutation:
    """Order of `num_samples` indices, drawn from a seed and numbers, in constant memory.

    >>> order = Permutation(10**12, 1, 0)
    >>> len(set(order[10**11 : 10**11 + 1000].tolist()))
    1000
    """

    def __init__(self, num_samples: int, seed: int, *numbers: int) -> None:
        self._num_samples = num_samples
        num_bits = max(2, (num_samples - 1).bit_length())
        self._widths = (num_bits // 2, num_bits - num_bits // 2)
        self._keys = [
            np.uint64(
                int.from_bytes(randomness.derive(seed, "computed", *numbers, turn)[:8], "little")
            )
            for turn in range(_NUM_ROUNDS)
        ]
        self._is_swapped = (
            num_samples > 1 and randomness.derive(seed, "computed swap", *numbers)[0] % 2 == 1
        )
        self._number, self._block = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, places: slice) -> NDArray[np.int64]:
        """Return the indices at consecutive places."""
        start, stop, _ = places.indices(self._num_samples)
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        parts = [self._of_block(block) for block in blocks]
        if not parts:
            return np.empty(0, np.int64)
        first = blocks[0] * _BLOCK
        return np.concatenate(parts)[start - first : stop - first]

    def _of_block(self, number: int) -> NDArray[np.int64]:
        if number != self._number:
            stop = min((number + 1) * _BLOCK, self._num_samples)
            found = self._turn(np.arange(number * _BLOCK, stop, dtype=np.uint64))
            while len(outside := np.flatnonzero(found >= self._num_samples)):
                found[outside] = self._turn(found[outside])
            if self._is_swapped:
                found[found < 2] ^= np.uint64(1)
            self._number, self._block = number, found.astype(np.int64)
        return self._block

    def _turn(self, values: Values) -> Values:
        """Permute numbers of the whole domain."""
        left_width, right_width = self._widths
        right = values & _mask(right_width)
        left = values >> np.uint64(right_width)
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & _mask(left_width))
            left_width, right_width = right_width, left_width
        joined: Values = (left << np.uint64(right_width)) | right
        return joined


def _mask(width: int) -> np.uint64:
    found: np.uint64 = np.uint64((1 << width) - 1)
    return found


def _mixed(values: Values) -> Values:
    """Mix all bits into all others (the finaliser of SplitMix64: Steele, Lea, Flood, 2014)."""
    mixed: Values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
