"""Global random generators: deriving seeds, and seeding or restoring them for a block.

Has no state of its own. Handles the CPU generators only: what a fetch draws from an
accelerator's generator is drawn in the order of the loop, and a checkpoint saves that generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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
        if before in _open:  # unless `end_blocks` has ended the block already
            before.restore_states()
            _open.remove(before)


def depth() -> int:
    """Return the number of blocks of `preserved` that have not ended."""
    return len(_open)


def end_blocks(depth: int) -> None:
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
