"""Chooses the codec of each file of a save, from the user's `compress` option.

For "auto" an uncompressed save measures how fast the store is, and takes samples of the state.
After its commit the codecs are tried on the samples. Each component gets the codec with which
writing takes the least time, or none. If a later save is slower, compression is turned off.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from holdfast.errors import UsageError
from holdfast.events import Emitter
from holdfast.format.blocks import num_blocks
from holdfast.format.codec import CODECS, CodecName, Compression, Encoding, is_installed
from holdfast.format.index import StoredBlocks
from holdfast.format.layout import BLOCK_NBYTES, component_of
from holdfast.format.tensors import ITEM_NBYTES, TensorFile
from holdfast.store.base import Buffer
from holdfast.threads.buffers import LimitedBuffers
from holdfast.threads.workers import num_cores


class Throughput:
    """Measures a store's throughput: bytes, and the time with at least one call in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_calls = 0
        self._began_s = 0.0
        self.busy_s = 0.0
        self.nbytes = 0

    @contextmanager
    def taking(self, nbytes: int = 0) -> Iterator[None]:
        """Measure a call to the store that writes `nbytes`, or makes earlier ones durable."""
        with self._lock:
            if self._num_calls == 0:
                self._began_s = time.perf_counter()
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self.nbytes += nbytes
                self._num_calls -= 1
                if self._num_calls == 0:
                    self.busy_s += time.perf_counter() - self._began_s

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes written per second; None before anything was measured."""
        return self.nbytes / self.busy_s if self.busy_s > 0 and self.nbytes else None


MIN_NBYTES = 32 << 20
"""Saves that write fewer bytes are not measured."""
SAMPLE_NBYTES = 1 << 20
MAX_SAMPLES = 12
"""Most samples that are taken of one component."""
GAIN = 0.9
"""A codec is chosen only if saves take at most this fraction of the uncompressed save's time."""
SLOWER = 1.05
"""Compression is turned off if a save takes more than this many times the uncompressed time."""
SAVES_BETWEEN = 64
"""Number of saves after which one is written uncompressed, to choose the codecs anew."""


def candidates() -> list[Compression]:
    """List every codec whose package is installed, at its default level, with its filters."""
    return [
        Compression(codec=name, shuffle=shuffle, inner=inner)
        for name, codec in CODECS.items()
        if is_installed(name)
        for shuffle, inner in codec.filters or ((None, None),)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample of a block's bytes, and the size of its items in bytes."""

    data: bytes
    item_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTrial:
    """A codec's measurement on samples: stored bytes and seconds, each per plain byte."""

    compression: Compression
    ratio: float
    s_per_byte: float

    def cost(self, store_s_per_byte: float, num_threads: int) -> float:
        """Estimate the seconds to save one plain byte, with encoding and writing in parallel."""
        return max(self.s_per_byte / num_threads, self.ratio * store_s_per_byte)


def try_codec(compression: Compression, samples: Sequence[Sample]) -> CodecTrial:
    """Measure size and time of a compression by encoding the samples one after the other."""
    stored = plain = 0
    began = time.perf_counter()
    for sample in samples:
        encoding = Encoding(compression, [sample.item_nbytes])
        stored += memoryview(encoding.encode(0, memoryview(sample.data))).nbytes
        plain += len(sample.data)
    spent_s = time.perf_counter() - began
    return CodecTrial(compression=compression, ratio=stored / plain, s_per_byte=spent_s / plain)


def choose_trial(
    trials: Sequence[CodecTrial],
    *,
    store_s_per_byte: float,
    plain_s_per_byte: float,
    num_threads: int,
) -> CodecTrial | None:
    """Return the trial of the codec with the shortest save time; None if none gains enough."""
    costs = [trial.cost(store_s_per_byte, num_threads) for trial in trials]
    least = min(costs, default=0.0)
    expected = plain_s_per_byte - store_s_per_byte + least
    if not costs or expected > GAIN * plain_s_per_byte:
        return None
    return trials[costs.index(least)]


class Chooser:
    """Chooses the codecs of the components that were given "auto". One save at a time."""

    def __init__(self, components: Collection[str], emit: Emitter) -> None:
        self._components = frozenset(components)
        self._emit = emit
        self._chosen: dict[str, Compression] | None = None
        self._samples: dict[str, list[Sample]] = {}
        self._is_plain = True
        self._plain_s_per_byte = 0.0
        self._num_saves = 0

    @property
    def has_components(self) -> bool:
        """Whether there is a component to choose for."""
        return bool(self._components)

    def discard_samples(self) -> None:
        """Prepare for a save: discard the previous save's samples."""
        self._samples.clear()
        self._is_plain = self._num_saves == 0

    def compression(self, component: str) -> Compression | None:
        """Return the compression of a component's files in this save; None: not compressed."""
        return None if self._is_plain or self._chosen is None else self._chosen.get(component)

    def observer(
        self, component: str, item_nbytes: Sequence[int]
    ) -> Callable[[int, memoryview], None] | None:
        """Return a callback that samples blocks of an uncompressed file; None: not needed."""
        if not self._is_plain or component not in self._components:
            return None
        samples = self._samples.setdefault(component, [])
        last = len(item_nbytes) - 1
        numbers = {last // 4, last // 2, 3 * last // 4}

        def take_sample(number: int, plain: memoryview) -> None:
            if number in numbers and len(samples) < MAX_SAMPLES:
                middle = (plain.nbytes // 2) & -4096  # whole items, past the header
                data = bytes(plain[middle : middle + SAMPLE_NBYTES])
                samples.append(Sample(data=data, item_nbytes=item_nbytes[number]))

        return take_sample

    def record_save(self, nbytes: int, spent_s: float, store: Throughput) -> None:
        """Record size and time of a committed save; choose codecs if it was uncompressed."""
        if not self._components or nbytes < MIN_NBYTES:
            return
        s_per_byte = spent_s / nbytes
        if not self._is_plain:
            self._num_saves = (self._num_saves + 1) % SAVES_BETWEEN
            if self._chosen and s_per_byte > SLOWER * self._plain_s_per_byte:
                self._turn_off(s_per_byte)
        elif store.bytes_per_s is not None:
            self._num_saves, self._plain_s_per_byte = 1, s_per_byte
            self._choose_codecs(store.bytes_per_s)
        self._samples.clear()

    def _choose_codecs(self, store_bytes_per_s: float) -> None:
        before = self._chosen
        # Training runs beside the save, and leaves it about a quarter of the cores.
        num_threads = max(num_cores() // 4, 1)
        found: dict[str, CodecTrial] = {}
        for component, samples in self._samples.items():
            trials = [try_codec(each, samples) for each in candidates()] if samples else []
            trial = choose_trial(
                trials,
                store_s_per_byte=1 / store_bytes_per_s,
                plain_s_per_byte=self._plain_s_per_byte,
                num_threads=num_threads,
            )
            if trial is not None:
                found[component] = trial
        self._chosen = {name: trial.compression for name, trial in found.items()}
        if self._chosen != before:
            self._report_choice(found, store_bytes_per_s)

    def _report_choice(self, found: dict[str, CodecTrial], store_bytes_per_s: float) -> None:
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

    def _turn_off(self, s_per_byte: float) -> None:
        self._chosen = {}
        self._emit(
            "compression",
            f"compressing nothing: a compressed save took {1e9 * s_per_byte:.2f} s/GB, and a plain "
            f"one {1e9 * self._plain_s_per_byte:.2f}",
            compression={},
        )


MIN_TREE_NBYTES = 1 << 20
"""Shorter trees are stored plain, so that people can read them."""

Auto = Literal["auto"]
Choice: TypeAlias = Compression | CodecName | Auto | None
"""Compression of a component, as given by the user; None: it is not compressed."""
Compress: TypeAlias = Choice | Mapping[str, Choice]


def check_choices(asked: Compress) -> None:
    """Check that the codecs in a `compress` option exist and are installed."""
    for choice in asked.values() if isinstance(asked, Mapping) else (asked,):
        _compression(choice)


def resolve_compress(asked: Compress, components: Collection[str]) -> dict[str, Compression | Auto]:
    """Resolve a `compress` option into the compression of each compressed component."""
    if not isinstance(asked, Mapping):
        asked = dict.fromkeys(components, asked)
    elif unknown := sorted(set(asked) - set(components)):
        raise UsageError(
            f"compress: no component {unknown[0]!r}; there are {', '.join(sorted(components))}"
        )
    compressions = {name: _compression(choice) for name, choice in asked.items()}
    return {name: choice for name, choice in compressions.items() if choice is not None}


def _compression(choice: Choice) -> Compression | Auto | None:
    if choice is None or choice == "auto" or isinstance(choice, Compression):
        return choice
    if choice not in (*CODECS,):  # a tuple, as `choice` may be unhashable
        names = (*CODECS, "auto")
        raise UsageError(f"compress={choice!r}: choose from {names}, or a Compression")
    return Compression(codec=choice)


class Compressing:
    """Provides the encoding of each file, fixed by the user or automatic. One save at a time."""

    def __init__(self, chosen: Mapping[str, Compression | Auto], emit: Emitter) -> None:
        self._fixed = {
            name: choice for name, choice in chosen.items() if isinstance(choice, Compression)
        }
        self._emit = emit
        self._chooser = Chooser(chosen.keys() - self._fixed.keys(), emit)
        self._is_settled = False
        self.prepare_save()

    @property
    def is_possible(self) -> bool:
        """Whether any file may be compressed."""
        return bool(self._fixed) or self._chooser.has_components

    def prepare_save(self) -> None:
        """Prepare for a save; after a failed one, replace buffers that threads may still use."""
        self.store = Throughput()
        if not self._is_settled:
            self.pieces = LimitedBuffers(NUM_PIECES, BLOCK_NBYTES)
        self._is_settled = False
        self._written: tuple[int, float] | None = None
        self._chooser.discard_samples()

    def of_tensors(self, file: TensorFile) -> Encoding | None:
        """Return the encoding of a tensor file; None: it is not compressed."""
        compression = self._get_compression(component_of(file.name))
        return None if compression is None else Encoding(compression, item_sizes(file))

    def of_tree(self, component: str, nbytes: int) -> Encoding | None:
        """Return the encoding of a component's tree; None: it is not compressed."""
        compression = self._get_compression(component)
        if compression is None or nbytes < MIN_TREE_NBYTES:
            return None
        return Encoding(compression, [1] * num_blocks(nbytes))

    def observer(self, file: TensorFile) -> Callable[[int, memoryview], None] | None:
        """Return a callback that samples blocks of an uncompressed file; None: not needed."""
        return self._chooser.observer(component_of(file.name), item_sizes(file))

    def record_commit(self, nbytes: int, spent_s: float) -> None:
        """Record the plain bytes and the seconds of a committed save, for `choose_codecs`."""
        self._written = (nbytes, spent_s)
        self._is_settled = True

    def choose_codecs(self) -> None:
        """Choose compressions for "auto" after a committed save, by trial encoding; slow."""
        if self._written is None:
            return
        try:
            self._chooser.record_save(*self._written, self.store)
        except Exception as error:  # noqa: BLE001 - it is logged, and the commit stands
            self._emit("warning", f"compression could not be chosen: {error!r}")
        self._written = None

    def _get_compression(self, component: str) -> Compression | None:
        return self._fixed.get(component) or self._chooser.compression(component)


def item_sizes(file: TensorFile) -> list[int]:
    """Return the item size in the middle of each block of a tensor file."""
    middles = range(BLOCK_NBYTES // 2, file.nbytes + BLOCK_NBYTES // 2, BLOCK_NBYTES)
    at = [bisect_right(file.starts, min(middle, file.nbytes - 1)) - 1 for middle in middles]
    return [ITEM_NBYTES[file.specs[max(position, 0)].dtype] for position in at]


NUM_PIECES = 9
"""Pieces in the pool: one that is being filled, and one for each writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An encoded block and its digest."""

    data: Buffer
    digest: bytes


class Packer:
    """Packs the encoded blocks of one file into pieces. Not thread-safe."""

    def __init__(
        self, pieces: LimitedBuffers, send: Callable[[int, memoryview, int], None], timeout_s: float
    ) -> None:
        """Pass full pieces to `send(offset, piece, used_nbytes)`, which then owns the piece."""
        self._pieces = pieces
        self._send = send
        self._timeout_s = timeout_s
        self._piece: memoryview | None = None
        self._start = 0
        self._used = 0
        self._lengths: list[int] = []
        self._digests: list[bytes] = []

    def append_block(self, block: Encoded) -> None:
        """Append the next block; each full piece is passed to `send`."""
        data = memoryview(block.data)
        self._lengths.append(data.nbytes)
        self._digests.append(block.digest)
        while data.nbytes:
            if self._piece is None:
                self._piece = self._pieces.acquire_buffer(self._timeout_s)
            part = data[: BLOCK_NBYTES - self._used]
            _copy_memory(self._piece[self._used : self._used + part.nbytes], part)
            self._used += part.nbytes
            data = data[part.nbytes :]
            if self._used == BLOCK_NBYTES:
                self._flush()

    def send_rest(self) -> None:
        """Pass the last piece, which may be partly filled, to `send`."""
        self._flush()

    @property
    def packed_blocks(self) -> StoredBlocks:
        """Lengths and digests of the blocks packed so far."""
        return StoredBlocks(tuple(self._lengths), b"".join(self._digests))

    def _flush(self) -> None:
        if self._piece is not None:
            piece, used = self._piece, self._used
            self._piece, self._used = None, 0
            self._send(self._start, piece, used)
            self._start += used


def _copy_memory(target: memoryview, source: memoryview) -> None:
    # NumPy lets other threads run meanwhile, which assigning to a memoryview does not.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
