"""`holdfast stats`: norm, extremes, zeros and exponents of each tensor, of any format."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, pairwise, repeat
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from typing_extensions import Self

from holdfast.cli import options
from holdfast.cli.options import PATH, command, option, several
from holdfast.cli.output import Answer, TextTable, number, progress_bar
from holdfast.cli.plot import expect_drawable, save_figure
from holdfast.cli.sources import choose_components, limited, open_read, split_name
from holdfast.cli.target import named_file_key, named_keys
from holdfast.errors import DeadlineExceeded, OutOfMemory, UsageError
from holdfast.interop.comparing.statistics import TensorStats, stats_of
from holdfast.interop.opening import open_source
from holdfast.interop.source import READ_TIMEOUT_S, Source
from holdfast.ownership.owner import left_s
from holdfast.system import IS_LINUX
from holdfast.threads.workers import num_cores

_MAX_BARS = 24
"""Most bars of a histogram in the table."""
_MAX_PANELS = 64
_MOST_TICKS = 24
_BARS = " ▁▂▃▄▅▆▇█"
_SHARED_NBYTES = 256 << 20
"""Least bytes to divide among forks: fewer are read sooner than the forks can open the source."""

_Tensor = tuple[str, str]
"""Component and key of a tensor."""


class StatsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast stats`."""

    source: str
    """Path or URL of what was opened."""
    format: str
    """Its format."""
    step: int | None
    """Completed steps; null if the source does not tell."""
    tensors: tuple[TensorStats, ...]
    """Each tensor once, in the order of their bytes."""
    plot: str | None
    """The file that was drawn."""


@command(
    "stats",
    options.source,
    options.components,
    several("--tensor", "tensors", "NAME", "Only this tensor: COMPONENT:PATH."),
    option("--plot", "FILE", "Draw the histograms (.png, .svg or .pdf).", type=PATH),
    options.trust,
    answer=StatsAnswer,
    wrap=limited("source"),
)
def stats(
    source: str,
    *,
    components: Collection[str] = (),
    tensors: Collection[str] = (),
    plot: Path | None = None,
) -> Answer:
    """Compute statistics of each tensor, such as norm and mean.

    Also extremes, zeros, values that are not finite, rows of zeros, and a histogram by powers of
    two.
    """
    if plot is not None:
        expect_drawable(plot, "--plot")
    with Forks() as forks, open_read(source) as opened:
        names = choose_components(opened, components)
        found = tuple(_with_progress(opened, _wanted(opened, names, tensors), forks))
        answer = StatsAnswer(
            source=opened.url,
            format=opened.format,
            step=opened.step,
            tensors=found,
            plot=None if plot is None else str(plot),
        )
    parts: list[str | TextTable] = [_make_statistics_table(found), *_warnings(found)]
    if plot is not None:
        _draw(found, plot, title=answer.source)
        parts.append(f"{plot}: exponents of {min(len(found), _MAX_PANELS)} tensors")
    return Answer(document=answer, parts=parts)


def _wanted(source: Source, components: Collection[str], tensors: Collection[str]) -> list[_Tensor]:
    """List component and key of the tensors to read."""
    if not tensors:
        return [(name, key) for name in components for key in source.parts[name].specs]
    found = []
    for text in tensors:
        name, path = split_name(source, text)
        part = source.parts[name]
        ref = part.leaves.get(path)
        key = path if ref is None else ref.key  # `show` lists keys, `tree` paths
        if name not in components or key not in part.specs:
            raise UsageError(f"--tensor={text!r}: {source.url} has no such tensor; see `tree`")
        found.append((name, key))
    return found


def _with_progress(
    source: Source, wanted: Sequence[_Tensor], forks: Forks
) -> Iterator[TensorStats]:
    """Compute the statistics of tensors; return them in the order given."""
    sizes = [source.parts[component].specs[key].nbytes for component, key in wanted]
    total, done = sum(sizes), 0
    if len(forks) and total >= _SHARED_NBYTES and "://" not in source.url:
        shares = [
            (source.url, wanted[start:stop], forks.num_threads)
            for start, stop in _cuts(sizes, len(forks))
        ]
        computed = forks.run(_stats_of_share, shares)
    else:
        computed = zip(repeat(0), stats_of(source, wanted))
    found: list[list[TensorStats]] = [[] for _ in range(max(len(forks), 1))]
    with progress_bar() as progress:
        for share, one in computed:
            found[share].append(one)
            done += one.nbytes
            if progress is not None:
                progress("read", done, total)
    return chain.from_iterable(found)


def _cuts(sizes: Sequence[int], num: int) -> Iterator[tuple[int, int]]:
    """Cut sizes into `num` slices of neighbors, which may share blocks, with about the same sum."""
    sums = [*accumulate(sizes)]
    stops = (bisect_right(sums, sums[-1] * part // num) for part in range(1, num + 1))
    return pairwise([0, *stops])


def _stats_of_share(url: str, wanted: Sequence[_Tensor], num_threads: int) -> Iterator[TensorStats]:
    with open_source(url, encrypt=named_keys(), key=named_file_key()) as source:
        yield from stats_of(source, wanted, num_threads=num_threads)


def _make_statistics_table(found: Sequence[TensorStats]) -> TextTable:
    heading, histograms = _histograms(found)
    columns = ("tensor", "dtype", "norm", "min", "max", "mean", "zeros", "dead rows", "odd")
    return TextTable(
        columns=(*columns, heading),
        rows=[
            (
                one.tensor,
                one.dtype,
                number(one.norm),
                *("–" if x is None else number(x) for x in (one.min, one.max, one.mean)),
                f"{one.zeros:,}" if one.zeros else "",
                f"{one.dead_rows:,}" if one.dead_rows else "",
                ", ".join(_odd(one)),
                histogram,
            )
            for one, histogram in zip(found, histograms, strict=True)
        ],
        right=frozenset({2, 3, 4, 5, 6, 7}),
        whole=frozenset({9}),
    )


def _histograms(found: Sequence[TensorStats]) -> tuple[str, list[str]]:
    """Return a heading, and for each tensor bars of how many numbers have which power of two."""
    exponents = [exponent for one in found for exponent in one.exponents]
    if not exponents:
        return "", [""] * len(found)
    low, high = min(exponents), max(exponents)
    width = -(-(high - low + 1) // _MAX_BARS)
    rows = []
    for one in found:
        counts = [0] * -(-(high - low + 1) // width)
        for exponent, count in one.exponents.items():
            counts[(exponent - low) // width] += count
        rows.append(bars(counts))
    return f"2^{low} to 2^{high + 1}", rows


def _odd(one: TensorStats) -> Iterator[str]:
    if one.nan:
        yield f"{one.nan:,} nan"
    if one.infinite:
        yield f"{one.infinite:,} inf"


def _warnings(found: Sequence[TensorStats]) -> list[str]:
    odd = [one.tensor for one in found if one.nan or one.infinite]
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    return [f"not finite: {', '.join(odd[:3])}{more}"] if odd else []


def _draw(found: Sequence[TensorStats], plot: Path, *, title: str) -> None:
    """Draw a row of shades for each tensor: how many of its numbers have each exponent."""
    from matplotlib.figure import Figure

    shown = found[:_MAX_PANELS]
    exponents = sorted({exponent for one in shown for exponent in one.exponents}) or [0]
    columns = range(exponents[0], exponents[-1] + 1)
    shares = [
        [one.exponents.get(column, 0) / max(sum(one.exponents.values()), 1) for column in columns]
        for one in shown
    ]
    num_rows = len(shown)
    canvas = Figure(figsize=(10, 2 + num_rows / 4), layout="constrained")
    axis = canvas.subplots()
    if num_rows:
        drawn = axis.imshow(shares, aspect="auto", cmap="viridis")
        canvas.colorbar(drawn, label="share of the numbers")
    step = -(-len(columns) // _MOST_TICKS)
    axis.set_xticks(range(0, len(columns), step), [*columns][::step], fontsize=7)
    axis.set_yticks(range(num_rows), [one.tensor[-60:] for one in shown], fontsize=7)
    axis.set_xlabel("power of two")
    axis.set_title(title[-100:], fontsize=8)
    save_figure(canvas, plot, "--plot")


def bars(counts: Sequence[int]) -> str:
    """Return a bar of block characters for each count, the largest one full.

    >>> bars([0, 1, 50, 100])
    ' ▁▄█'
    """
    largest = max(counts, default=0)
    return "".join(_BARS[-(-8 * count // largest)] if count else " " for count in counts)


T = TypeVar("T")

_MAX_FORKS = 3
"""Most forks: each takes about 120 MB of memory, however many tensors there are."""
_END_S = 5.0
"""Longest wait for forks to close what they have open, before they are killed."""


class Forks:
    """Forked processes, each of which runs one call of a function. Use it in a `with`.

    They compute in parallel, where threads would wait for Python's global lock. A fork is safe only
    while the process has one thread, so make them before anything is opened.
    """

    def __init__(self) -> None:
        """Make one for each core, at most three; fewer or none if the system does not allow it."""
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        if IS_LINUX and threading.active_count() == 1 and num_cores() > 1:
            with suppress(OSError):
                for _ in range(min(num_cores(), _MAX_FORKS)):
                    self._start_process()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes; one that does not close what it has open in time is killed."""
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + _END_S
        for process in self._processes:
            process.join(left_s(end))
            process.kill()
            process.join()

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def num_threads(self) -> int:
        """Threads that each fork may use to compute: its part of the cores."""
        return max(num_cores() // max(len(self), 1), 1)

    def _start_process(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [*self._connections, ours]
        process = context.Process(target=_serve, args=(theirs, others), daemon=True)
        with theirs, warnings.catch_warnings():
            # Python 3.12 counts the threads of NumPy's OpenBLAS, which may be forked.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        self._processes.append(process)
        self._connections.append(ours)

    def run(
        self, function: Callable[..., Iterable[T]], tasks: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, T]]:
        """Call a function in a process for each task; yield (number of the task, item)."""
        numbers: dict[Any, int] = {}
        for index, task in enumerate(tasks):
            self._connections[index].send((function, task))
            numbers[self._connections[index]] = index
        while numbers:
            ready = wait(numbers, READ_TIMEOUT_S)
            if not ready:
                raise DeadlineExceeded(
                    f"nothing was read within {READ_TIMEOUT_S:.0f} s; the storage hangs"
                )
            for connection in ready:
                number = numbers[connection]
                item, error, is_last = self._received(number)
                if error is not None:
                    raise error
                if is_last:
                    del numbers[connection]
                else:
                    yield number, item

    def _received(self, number: int) -> _Message:
        try:
            found: _Message = self._connections[number].recv()
        except (EOFError, ConnectionError):
            process = self._processes[number]
            process.join(_END_S)
            raise OutOfMemory(
                f"a worker process ended with code {process.exitcode}; the system kills "
                "processes when memory runs out"
            ) from None
        return found


_Message = tuple[Any, "Exception | None", bool]
"""An item, the error that ended the call, and whether the call ended without one."""


def _serve(connection: Connection, others: Sequence[Connection]) -> None:
    """Run the function that the parent sends; end if the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in others:
        other.close()  # the parent's ends: a pipe is closed when they all are
    with suppress(EOFError, ConnectionError):
        function, task = connection.recv()
        try:
            for item in function(*task):
                connection.send((item, None, False))
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the parent raises it
            connection.send((None, error, False))
        else:
            connection.send((None, None, True))
