"""Random numbers of the data: seeds, states of the global generators, and orders that are computed.

Stored positions depend on these numbers; tests/data (test_loader.py, test_samplers.py) pins them.
Has no state of its own. Handles the CPU generators only: numbers that a fetch draws from an
accelerator's generator are drawn in the order of the loop, and a checkpoint saves that generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

_UNDRAWN = torch.Generator().manual_seed(0).get_state()


def derive(seed: int, purpose: str, *numbers: int) -> bytes:
    """Derive 32 bytes that depend only on the arguments, on any machine and in any process."""
    text = "\0".join(["holdfast 1 data", purpose, str(seed), *map(str, numbers)])
    return hashlib.sha256(text.encode()).digest()


def generator(entropy: bytes) -> torch.Generator:
    """Make a separate CPU generator, seeded with all of `entropy`."""
    own = torch.Generator()
    own.set_state(_torch_state(entropy))
    return own


class _GeneratorStates:
    """Snapshot of the global generators' states."""

    def __init__(self) -> None:
        self._python, self._cpu = random.getstate(), torch.default_generator.get_state()
        self._numpy = np.random.get_state(legacy=False)

    def restore_states(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._cpu)


_open: list[_GeneratorStates] = []
"""Snapshots of the blocks of `preserved` that have not ended, outermost first."""


@contextmanager
def preserved() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global generators after the block."""
    before = _GeneratorStates()
    _open.append(before)
    try:
        yield
    finally:
        if before in _open:  # unless `end_inner_blocks` has ended the block already
            before.restore_states()
            _open.remove(before)


def count_open_blocks() -> int:
    """Return the number of blocks of `preserved` that have not ended."""
    return len(_open)


def end_inner_blocks(depth: int) -> None:
    """End all blocks of `preserved` but the outermost `depth`, for who interrupts a fetch."""
    if len(_open) > depth:
        _open[depth].restore_states()
        del _open[depth:]


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def seeded(entropy: bytes) -> Iterator[None]:
    """Seed the global generators with `entropy` for the block, and restore them after it.

    It also runs with one intra-op thread, as torch's data workers do: sums of floats depend on
    the number of threads, and a batch must not depend on the process that fetches it.
    """
    num_threads = torch.get_num_threads()
    with preserved():
        random.seed(entropy)
        np.random.seed(np.frombuffer(entropy, dtype="<u4").tolist())
        torch.default_generator.set_state(_torch_state(entropy))
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def _torch_state(entropy: bytes) -> torch.Tensor:
    """Return a state of torch's CPU generator that depends on all of `entropy`.

    `manual_seed` takes 32 bits of its number only, and so repeats itself after some ten thousand
    batches. The words of a state are its seed, two that say that no number was drawn yet, and the
    624 of a Mersenne twister.
    """
    state = _UNDRAWN.clone()
    words = state.numpy()[: 8 * 632].view(np.uint64)
    words[0] = int.from_bytes(entropy[:8], "little")
    words[3:627] = np.frombuffer(hashlib.shake_256(entropy).digest(4 * 624), dtype="<u4")
    return state


Values = NDArray[np.uint64]

_NUM_ROUNDS = 10
"""Even, so that the halves end where they began; 4 would do for the theory of ideal rounds."""
_BLOCK = 2**14
"""Places computed at a time: a batch alone would cost more in calls than in arithmetic."""


class Permutation:
    """Order of `num_samples` indices, drawn from a seed and numbers, in constant memory.

    A Feistel network over pairs of bits, which is a bijection of `2**num_bits` numbers for any
    round function. A result outside of the range is permuted again until it is inside ("cycle
    walking": Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002); as the domain is less
    than twice the range, that takes two turns on average at most. Such a network is always an even
    permutation of its domain, so one more bit of the seed decides whether the first two indices
    change places: half of all orders are odd. It is for shuffling, and not for secrets; of ten
    samples or fewer, some orders come more often than others.

    >>> order = Permutation(10**12, 1, 0)
    >>> len(set(order[10**11 : 10**11 + 1000].tolist()))
    1000
    """

    def __init__(self, num_samples: int, seed: int, *numbers: int) -> None:
        self._num_samples = num_samples
        num_bits = max(2, (num_samples - 1).bit_length())
        self._widths = (num_bits // 2, num_bits - num_bits // 2)
        self._keys = [
            np.uint64(int.from_bytes(derive(seed, "computed", *numbers, turn)[:8], "little"))
            for turn in range(_NUM_ROUNDS)
        ]
        self._is_swapped = num_samples > 1 and derive(seed, "computed swap", *numbers)[0] % 2 == 1
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
