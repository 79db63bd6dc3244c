"""What compression and encryption do to a trained state and its saves: `python -m bench.codecs`.

A small GPT is trained on text for some hundred steps; its weights, in fp32 and bf16, and its Adam
moments are the state. They are repeated to the size asked for: blocks are compressed one by one, so
this changes no ratio. Saves go to the disk, and to the same disk slowed down as a network is. Each
setup takes turns with a plain one, save by save, so that a slow minute hits both.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any, TypeAlias

import torch
from examples.demo.gpt import GPT, Plan, Windows
from torch import Tensor
from torch.nn import functional

from bench.child import settle
from bench.command import Bench, progress
from bench.goals import CODEC_GOALS
from bench.machine import drop_cache
from bench.report import megabytes, number, percent, results_table, seconds, table, times
from bench.results import Figures, Outcome, Results
from holdfast import CheckpointManager, Last
from holdfast.events import Event
from holdfast.format.codec import Compression
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store.local import LocalStore

KINDS = {
    "weights": "weights, fp32",
    "half": "weights, bf16",
    "exp_avg": "Adam exp_avg, fp32",
    "exp_avg_sq": "Adam exp_avg_sq, fp32",
}
State: TypeAlias = Mapping[str, Mapping[str, Tensor]]
CHOICES: Mapping[str, Any] = {
    "zstd": "zstd",
    "lz4": "lz4",
    "blosc2 bits": Compression(codec="blosc2", shuffle="bit", inner="lz4"),
    "blosc2 bytes": Compression(codec="blosc2", shuffle="byte", inner="zstd"),
    "auto": "auto",
}
"""Compression by name."""
SUITES = ("aes-256-gcm", "chacha20-poly1305", "sm4-gcm")
AGAIN = "none again"
"""Plain like what it is compared with: its ratio is the noise of the measurement."""
SETUPS = (AGAIN, *CHOICES, *SUITES)
STORES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "disk": ("the disk", SETUPS),
    "slow": ("the disk at {rate:,.0f} MB/s", (AGAIN, *CHOICES)),
}
"""Title and setups of each."""
WARMUP = 2
"""Pairs of saves that do not count: they make buffers, and "auto" measures and chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One save that was waited for."""

    took_s: float
    cpu_s: float
    nbytes: int
    """Of the files in the store."""
    sums: list[float]
    """Of the tensors that were saved."""


@lru_cache(maxsize=1)
def trained(num_steps: int) -> Mapping[str, Tensor]:
    """By kind: all tensors of that kind behind each other, after so many steps."""
    progress(f"codecs: training for {num_steps} steps")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them spin on a busy machine; this is not measured
    torch.manual_seed(0)
    model = GPT(Plan(width=256, num_layers=6, context=128, dropout=0.0))
    windows = Windows(128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        picked = torch.randint(len(windows), (4,)).tolist()
        text = torch.stack([windows[place] for place in picked])
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    progress(f"codecs: the loss is {loss.item():.2f}")
    parameters = [p.detach() for p in model.parameters()]
    slots = [optimizer.state[p] for p in model.parameters()]
    found = {
        "weights": torch.cat([p.flatten() for p in parameters]),
        **{
            kind: torch.cat([slot[kind].flatten() for slot in slots])
            for kind in ("exp_avg", "exp_avg_sq")
        },
    }
    return {**found, "half": found["weights"].bfloat16()}


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.view(torch.uint8).numpy().tobytes()


Coder = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Encodes all bytes, and decodes what came of it."""


def by_block(compression: Compression, item_nbytes: int) -> Coder:
    """Block by block, as Holdfast stores them."""
    from holdfast.format.codec import Encoding, decoder

    encoding = Encoding(compression, [item_nbytes])

    def encode(data: bytes) -> list[tuple[int, Any]]:
        view = memoryview(data)
        parts = [view[at : at + BLOCK_NBYTES] for at in range(0, len(data), BLOCK_NBYTES)]
        return [(part.nbytes, encoding.encode(0, part)) for part in parts]

    def decode(blocks: list[tuple[int, Any]]) -> None:
        for nbytes, block in blocks:
            decoder(compression.codec)(memoryview(block), memoryview(bytearray(nbytes)))

    return encode, decode


def coders(kind: str) -> Iterator[tuple[str, Coder]]:
    """Title and coder of everything that is compared; what is not installed is left out."""
    import zstandard

    item_nbytes = 2 if kind == "half" else 4
    for name, compression in CHOICES.items():
        if isinstance(compression, str) and compression != "auto":
            compression = Compression(codec=compression)  # type: ignore[arg-type]
        if isinstance(compression, Compression):
            yield f"holdfast, {name}", by_block(compression, item_nbytes)
    yield (
        "zstd alone, level 3, whole",
        (zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress),
    )
    try:
        from zipnn import ZipNN
    except ImportError:
        return
    zipnn = ZipNN(bytearray_dtype="bfloat16" if kind == "half" else "float32", threads=1)
    yield "ZipNN", (lambda data: zipnn.compress(bytearray(data)), zipnn.decompress)


def try_coder(coder: Coder, data: bytes) -> Figures:
    """What a coder makes of the data, on one thread."""
    encode, decode = coder
    began = perf_counter()
    encoded = encode(data)
    encode_s = perf_counter() - began
    blocks = [block for _, block in encoded] if isinstance(encoded, list) else [encoded]
    nbytes = sum(memoryview(block).nbytes for block in blocks)
    began = perf_counter()
    decode(encoded)
    decode_s = perf_counter() - began
    return {
        "ratio": [nbytes / len(data)],
        "encode_mb_per_s": [len(data) / encode_s / 1e6],
        "decode_mb_per_s": [len(data) / decode_s / 1e6],
    }


class SlowStore(LocalStore):
    """A local store whose large files come and go at a limited rate."""

    def __init__(self, root: Path, mb_per_s: float) -> None:
        super().__init__(root)
        self._s_per_byte = 1e-6 / mb_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def _pass(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, perf_counter()) + nbytes * self._s_per_byte
            until = self._free_at
        sleep(max(until - perf_counter(), 0))

    def read_into(self, key: str, start: int, buffer: memoryview, **options: Any) -> None:
        self._pass(buffer.nbytes)
        super().read_into(key, start, buffer, **options)

    def create(self, key: str, nbytes: int, **options: Any) -> Any:
        writer = super().create(key, nbytes, **options)
        write = writer.write

        def slowly(start: int, data: memoryview) -> None:
            self._pass(data.nbytes)
            write(start, data)

        writer.write = slowly  # type: ignore[method-assign]
        return writer


def options(setup: str) -> dict[str, Any]:
    """What a manager is given for a setup."""
    if setup in SUITES:
        from holdfast import Encryption, keys

        return {"encrypt": Encryption(keys=keys.generate(), suite=setup)}  # type: ignore[arg-type]
    return {"compress": CHOICES[setup]} if setup in CHOICES else {}


def beside_plain(
    make: Callable[[str], LocalStore],
    setup: str,
    state: State,
    folder: Path,
    *,
    num_pairs: int,
    settles: bool,
) -> Figures:
    """Durable saves with a setup and without, in turns, of a state that changes between them; and
    a cold load of each."""
    names = ("plain", "other")
    told: list[Event] = []
    with ExitStack() as stack:
        managers = {}
        for name in names:
            given = {} if name == "plain" else {**options(setup), "sinks": (told.append,)}
            manager = CheckpointManager(make(name), state, keep=Last(1), **given)
            managers[name] = stack.enter_context(manager)
        saves: dict[str, list[Saved]] = {name: [] for name in names}
        for step in range(1, 1 + WARMUP + num_pairs):
            for name in names if step % 2 else names[::-1]:
                saves[name].append(_save(managers[name], step, state, settles=settles))
        loads = {}
        for name in names:
            loads[name] = _load_s(managers[name], state, folder, settles=settles)
            if _sums(state) != saves[name][-1].sums:
                raise RuntimeError("the tensors are not what was saved")
    for event in told:
        if event.kind == "compression":
            progress(f"codecs: {event.message}")
    plain, other = (saves[name][WARMUP:] for name in names)
    pairs = list(zip(other, plain, strict=True))
    return {
        "nbytes": [float(_nbytes(state))],
        "stored_nbytes": [float(other[-1].nbytes)],
        "save_s": [saved.took_s for saved in other],
        "plain_save_s": [saved.took_s for saved in plain],
        "save_ratio": [mine.took_s / its.took_s for mine, its in pairs],
        "cpu_ratio": [mine.cpu_s / its.cpu_s for mine, its in pairs],
        "load_s": [loads["other"]],
        "plain_load_s": [loads["plain"]],
    }


def _nbytes(state: State) -> int:
    return sum(tensor.nbytes for part in state.values() for tensor in part.values())


def _save(manager: CheckpointManager, step: int, state: State, *, settles: bool) -> Saved:
    """A save that is waited for, of a state of which every tensor is another."""
    for part in state.values():
        for tensor in part.values():
            tensor.neg_()
    if settles:
        settle(2 * _nbytes(state))
    began, cpu_s = perf_counter(), process_time()
    pending = manager.save(step, wait=True)
    took_s, cpu_s = perf_counter() - began, process_time() - cpu_s
    manager.wait()
    return Saved(took_s=took_s, cpu_s=cpu_s, nbytes=pending.wait().nbytes, sums=_sums(state))


def _load_s(manager: CheckpointManager, state: State, folder: Path, *, settles: bool) -> float:
    if settles:
        settle(2 * _nbytes(state))
    drop_cache(folder)
    began = perf_counter()
    manager.load()
    return perf_counter() - began


def _sums(state: State) -> list[float]:
    return [tensor.double().sum().item() for part in state.values() for tensor in part.values()]


def _outcome(work: Callable[[], Figures]) -> Outcome:
    try:
        return Outcome(figures=work())
    except Exception as error:
        return Outcome(figures={}, error=repr(error))


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    found = trained(options.steps)
    for kind in KINDS:
        data = raw(found[kind])
        for title, coder in coders(kind):
            case = f"codecs/ratio/{kind}/{title}"
            results.titles[case] = title
            results.add(case, _outcome(partial(try_coder, coder, data)))
    results.titles["codecs/steps"] = str(options.steps)
    results.titles["codecs/rate"] = str(options.slow_mb_per_s)
    sizes = {"disk": options.size_gb, "slow": options.slow_size_gb}
    for where, (_, setups) in STORES.items():
        state = _repeated(found, sizes[where])
        for setup in setups:
            if setup in options.only:
                case = f"codecs/save/{where}/{setup}"
                progress(f"  {case}")
                results.titles[case] = setup
                here = folder / "run"
                make = partial(_store, where, options.slow_mb_per_s, here)
                work = partial(beside_plain, make, setup, state, here)
                how = {"num_pairs": options.pairs, "settles": options.settle}
                results.add(case, _outcome(partial(work, **how)))
                shutil.rmtree(here, ignore_errors=True)


def _repeated(found: Mapping[str, Tensor], size_gb: float) -> State:
    total = sum(tensor.nbytes for tensor in found.values())
    repeats = range(max(round(size_gb * 1e9 / total), 1))
    return {kind: {f"{n}": tensor.clone() for n in repeats} for kind, tensor in found.items()}


def _store(where: str, mb_per_s: float, folder: Path, name: str) -> LocalStore:
    here = folder / name
    return SlowStore(here, mb_per_s) if where == "slow" else LocalStore(here)


def _tables(results: Results) -> list[str]:
    return [*_ratio_tables(results), *_save_tables(results)]


def _ratio_tables(results: Results) -> list[str]:
    """By coder and kind: what is stored, and how fast."""

    def stored(coder: str) -> list[str]:
        return [percent(results.median(f"{_RATIO}{kind}/{coder}", "ratio")) for kind in KINDS]

    def speed(coder: str) -> list[str]:
        return [" / ".join(_rates(results, f"{_RATIO}{kind}/{coder}")) for kind in KINDS]

    coders = {case.split("/", 3)[3]: results.titles[case] for case in results.names(_RATIO)}
    steps = results.titles.get("codecs/steps", "?")
    return [
        f"**Stored**, of a state after {steps} steps",
        "",
        *table(["", *KINDS.values()], coders, stored),
        "",
        "**Encode / decode**, MB/s, one thread",
        "",
        *table(["", *KINDS.values()], coders, speed),
        "",
    ]


_RATIO = "codecs/ratio/"


def _rates(results: Results, case: str) -> list[str]:
    figures = ("encode_mb_per_s", "decode_mb_per_s")
    return [number(results.median(case, figure), "{:,.0f}") for figure in figures]


def _save_tables(results: Results) -> list[str]:
    def row(case: str) -> list[str]:
        load = results.ratio((case, "load_s"), (case, "plain_load_s"))
        return [
            megabytes(results.median(case, "stored_nbytes")),
            seconds(results.median(case, "save_s")),
            times(results.median(case, "save_ratio")),
            times(results.median(case, "cpu_ratio")),
            seconds(results.median(case, "load_s")),
            times(load),
        ]

    lines = []
    head = ["", "stored", "durable save", "vs. none", "processor time", "cold load"]
    head.append("vs. none")
    for where, (title, _) in STORES.items():
        prefix = f"codecs/save/{where}/"
        rate = float(results.titles.get("codecs/rate", "0"))
        nbytes = megabytes(results.median(f"{prefix}{AGAIN}", "nbytes"))
        lines += [f"**{title.format(rate=rate)}**, a state of {nbytes}", ""]
        lines += [*results_table(results, prefix, head, results.titles, row), ""]
    return lines


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="of training (%(default)s)")
    parser.add_argument("--size-gb", type=float, default=1.0, help="of the state, in 1e9 bytes")
    parser.add_argument("--slow-size-gb", type=float, default=0.3, help="on the slow store")
    parser.add_argument("--slow-mb-per-s", type=float, default=200.0, help="of the slow store")
    parser.add_argument("--pairs", type=int, default=6, help="of counted saves (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=SETUPS, help="setups")


BENCH = Bench(
    name="codecs",
    about="Ratios of a trained state; saves and loads with each codec and cipher vs. none.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
    goals=CODEC_GOALS,
    rounds=1,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
