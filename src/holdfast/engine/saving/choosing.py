"""`compress="auto"`: chooses a codec if that makes saves faster on the measured store.

A save without compression measures the store's speed, and keeps samples of the state. After its
commit the codecs are tried on the samples, and each component gets the one with the shortest time
of writing, or none. The choice is compared with the uncompressed save, and dropped where it is
slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from holdfast.engine.saving.throughput import Throughput
from holdfast.engine.workers import num_cores
from holdfast.events import Emitter
from holdfast.format.codec import Compression, is_installed

MIN_NBYTES = 32 << 20
"""A save that writes less tells nothing of the store."""
SAMPLE_NBYTES = 1 << 20
MAX_SAMPLES = 12
"""Of each component."""
GAIN = 0.9
"""What a save must take at most, beside a plain one, for a codec to be worth it."""
SLOWER = 1.05
"""A save that takes this much longer than the plain one did was chosen wrongly."""
SAVES_BETWEEN = 64
"""So many saves on, one is written plain again and everything is chosen anew."""


def candidates() -> list[Compression]:
    """List the codecs to try: fast ones whose packages are installed."""
    found = [Compression(codec="zstd")]
    if is_installed("lz4"):
        found.append(Compression(codec="lz4"))
    if is_installed("blosc2"):
        found.append(Compression(codec="blosc2", shuffle="bit", inner="lz4"))
        found.append(Compression(codec="blosc2", shuffle="byte", inner="zstd"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Sample of a block, and the size of its items."""

    data: bytes
    item_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of a compression on samples: stored bytes and seconds per plain byte."""

    compression: Compression
    ratio: float
    s_per_byte: float

    def cost(self, store_s_per_byte: float, num_threads: int) -> float:
        """Estimate the seconds per plain byte; encoding and writing run in parallel."""
        return max(self.s_per_byte / num_threads, self.ratio * store_s_per_byte)


def tried(compression: Compression, samples: Sequence[Sample]) -> Trial:
    """Measure a compression by encoding the samples one after the other."""
    stored = plain = 0
    began = time.perf_counter()
    for sample in samples:
        encoder = compression.encoding([sample.item_nbytes]).encoder
        stored += memoryview(encoder.encode(0, memoryview(sample.data))).nbytes
        plain += len(sample.data)
    spent_s = time.perf_counter() - began
    return Trial(compression=compression, ratio=stored / plain, s_per_byte=spent_s / plain)


def best(
    trials: Sequence[Trial], *, store_s_per_byte: float, plain_s_per_byte: float, num_threads: int
) -> Trial | None:
    """Select the trial with the shortest save; None if none gains enough.

    A codec shortens only the store's part of an uncompressed save.
    """
    costs = [trial.cost(store_s_per_byte, num_threads) for trial in trials]
    least = min(costs, default=0.0)
    expected = plain_s_per_byte - store_s_per_byte + least
    if not costs or expected > GAIN * plain_s_per_byte:
        return None
    return trials[costs.index(least)]


class Chooser:
    """Chooses codecs for components whose compression is "auto". One save at a time."""

    def __init__(self, components: Collection[str], emit: Emitter) -> None:
        self._components = frozenset(components)
        self._emit = emit
        self._chosen: dict[str, Compression] | None = None
        self._samples: dict[str, list[Sample]] = {}
        self._is_plain = True
        self._plain_s_per_byte = 0.0
        self._num_saves = 0

    def begin(self) -> None:
        """Begin a save: drop the samples of the last one."""
        self._samples.clear()
        self._is_plain = self._num_saves == 0

    def compression(self, component: str) -> Compression | None:
        """Return the compression of the component's files in this save."""
        return None if self._is_plain or self._chosen is None else self._chosen.get(component)

    def observer(
        self, component: str, item_nbytes: Sequence[int]
    ) -> Callable[[int, memoryview], None] | None:
        """Return a callback that samples blocks of a component's file; None if none is needed."""
        if not self._is_plain or component not in self._components:
            return None
        samples = self._samples.setdefault(component, [])
        last = len(item_nbytes) - 1
        numbers = {last // 4, last // 2, 3 * last // 4}

        def see(number: int, plain: memoryview) -> None:
            if number in numbers and len(samples) < MAX_SAMPLES:
                middle = (plain.nbytes // 2) & -4096  # items are whole there, and no header is
                data = bytes(plain[middle : middle + SAMPLE_NBYTES])
                samples.append(Sample(data=data, item_nbytes=item_nbytes[number]))

        return see

    def learn(self, nbytes: int, spent_s: float, store: Throughput) -> None:
        """Choose after a commit of `nbytes` plain bytes, which took `spent_s`."""
        if not self._components or nbytes < MIN_NBYTES:
            return
        s_per_byte = spent_s / nbytes
        if not self._is_plain:
            self._num_saves = (self._num_saves + 1) % SAVES_BETWEEN
            if self._chosen and s_per_byte > SLOWER * self._plain_s_per_byte:
                self._drop(s_per_byte)
        elif store.bytes_per_s is not None:
            self._num_saves, self._plain_s_per_byte = 1, s_per_byte
            self._choose(store.bytes_per_s)
        self._samples.clear()

    def _choose(self, store_bytes_per_s: float) -> None:
        before = self._chosen
        # Training goes on beside a save, and leaves it no more than that.
        num_threads = max(num_cores() // 4, 1)
        found: dict[str, Trial] = {}
        for component, samples in self._samples.items():
            trials = [tried(each, samples) for each in candidates()] if samples else []
            trial = best(
                trials,
                store_s_per_byte=1 / store_bytes_per_s,
                plain_s_per_byte=self._plain_s_per_byte,
                num_threads=num_threads,
            )
            if trial is not None:
                found[component] = trial
        self._chosen = {name: trial.compression for name, trial in found.items()}
        if self._chosen != before:
            self._tell(found, store_bytes_per_s)

    def _tell(self, found: dict[str, Trial], store_bytes_per_s: float) -> None:
        words = [
            f"{name} by {trial.compression} to {trial.ratio:.0%}" for name, trial in found.items()
        ]
        self._emit(
            "compression",
            f"the store takes {store_bytes_per_s / 1e6:,.0f} MB/s: compressing "
            + (", ".join(words) if words else "nothing, which would take longer"),
            bytes_per_s=store_bytes_per_s,
            compression={name: str(trial.compression) for name, trial in found.items()},
        )

    def _drop(self, s_per_byte: float) -> None:
        self._chosen = {}
        self._emit(
            "compression",
            f"compressing nothing: a compressed save took {1e9 * s_per_byte:.2f} s/GB, and a plain "
            f"one {1e9 * self._plain_s_per_byte:.2f}",
            compression={},
        )
