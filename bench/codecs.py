"""What compression does to a trained state, and to its saves: `python -m bench.codecs`.

A small GPT is trained on text for some hundred steps; its weights, in fp32 and bf16, and its Adam
moments are the state. They are repeated to the size asked for: blocks are compressed one by one, so
this changes no ratio. Saves go to the disk, and to the same disk slowed down as a network is.
"""

from __future__ import annotations

import argparse
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.child import settle
from bench.command import Bench, progress
from bench.machine import drop_cache
from bench.report import megabytes, number, percent, results_table, seconds, times
from bench.results import Figures, Outcome, Results
from holdfast import CheckpointManager, Compression
from holdfast.demo.model import GPT
from holdfast.demo.plan import Shape
from holdfast.demo.text import Windows, standard_library_text
from holdfast.events import Event
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.store.local import LocalStore

KINDS = {
    "weights": "weights, fp32",
    "half": "weights, bf16",
    "exp_avg": "Adam exp_avg, fp32",
    "exp_avg_sq": "Adam exp_avg_sq, fp32",
}
CHOICES: Mapping[str, Any] = {
    "none": None,
    "zstd": "zstd",
    "lz4": "lz4",
    "blosc2 bits": Compression(codec="blosc2", shuffle="bit", inner="lz4"),
    "blosc2 bytes": Compression(codec="blosc2", shuffle="byte", inner="zstd"),
    "auto": "auto",
}
STORES = {"disk": "the disk", "slow": "the disk at {rate:,.0f} MB/s"}
SAVES = 3
"""Of a round; the first makes buffers, and measures for "auto"."""


@lru_cache(maxsize=1)
def trained(num_steps: int) -> Mapping[str, Tensor]:
    """By kind: all tensors of that kind behind each other, after so many steps."""
    progress(f"codecs: training for {num_steps} steps")
    torch.manual_seed(0)
    model = GPT(Shape(width=256, num_heads=4, num_layers=6, context=128, dropout=0.0))
    windows = Windows(standard_library_text(), 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        picked = torch.randint(len(windows), (4,)).tolist()
        text = torch.stack([windows[place] for place in picked])
        logits = model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
    from holdfast.format.codec import decoder

    encoder = compression.encoding([item_nbytes]).encoder

    def encode(data: bytes) -> list[tuple[int, Any]]:
        view = memoryview(data)
        parts = [view[at : at + BLOCK_NBYTES] for at in range(0, len(data), BLOCK_NBYTES)]
        return [(part.nbytes, encoder.encode(0, part)) for part in parts]

    def decode(blocks: list[tuple[int, Any]]) -> None:
        for nbytes, block in blocks:
            decoder(compression.codec).decode(0, memoryview(block), memoryview(bytearray(nbytes)))

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


def save_and_load(store: LocalStore, state: dict[str, Any], compress: Any, folder: Path) -> Figures:
    """Some saves of a state that changes between them, and one load of what is cold."""
    nbytes = sum(tensor.nbytes for part in state.values() for tensor in part.values())
    told: list[Event] = []
    save_s = []
    with CheckpointManager(store, state, compress=compress, sinks=(told.append,)) as manager:
        for step in range(1, SAVES + 1):
            for part in state.values():
                for tensor in part.values():
                    tensor.neg_()
            settle(2 * nbytes)
            began = perf_counter()
            saved = manager.save(step).wait()
            save_s.append(perf_counter() - began)
            manager.wait()
        for event in told:
            if event.kind == "compression":
                progress(f"codecs: {event.message}")
        sums = [tensor.double().sum().item() for part in state.values() for tensor in part.values()]
        drop_cache(folder)
        began = perf_counter()
        manager.load(f"step={SAVES}")
        load_s = perf_counter() - began
    if sums != [t.double().sum().item() for part in state.values() for t in part.values()]:
        raise RuntimeError("the tensors are not what was saved")
    return {
        "nbytes": [float(nbytes)],
        "stored_nbytes": [float(saved.nbytes)],
        "save_s": save_s[1:],
        "load_s": [load_s],
    }


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
    total = sum(tensor.nbytes for tensor in found.values())
    repeats = max(round(options.size_gb * 1e9 / total), 1)
    state = {
        kind: {f"{n}": tensor.clone() for n in range(repeats)} for kind, tensor in found.items()
    }
    results.titles["codecs/steps"] = str(options.steps)
    results.titles["codecs/rate"] = str(options.slow_mb_per_s)
    for where in STORES:
        for name, compress in CHOICES.items():
            progress(f"codecs: {where}, {name}")
            case = f"codecs/save/{where}/{name}"
            results.titles[case] = name
            here = folder / "run"
            store = SlowStore(here, options.slow_mb_per_s) if where == "slow" else LocalStore(here)
            results.add(case, _outcome(partial(save_and_load, store, state, compress, here)))
            shutil.rmtree(here, ignore_errors=True)


def _tables(results: Results) -> list[str]:
    lines: list[str] = []
    steps = results.titles.get("codecs/steps", "?")
    for kind, title in KINDS.items():

        def row(case: str) -> list[str]:
            return [
                percent(results.median(case, "ratio")),
                number(results.median(case, "encode_mb_per_s"), "{:,.0f} MB/s"),
                number(results.median(case, "decode_mb_per_s"), "{:,.0f} MB/s"),
            ]

        prefix = f"codecs/ratio/{kind}/"
        lines += [f"**{title}**, after {steps} steps; one thread", ""]
        head = ["", "stored", "encode", "decode"]
        lines += [*results_table(results, prefix, head, results.titles, row), ""]
    for where, title in STORES.items():
        plain = f"codecs/save/{where}/none"

        def row(case: str, plain: str = plain) -> list[str]:
            return [
                megabytes(results.median(case, "stored_nbytes")),
                seconds(results.median(case, "save_s")),
                times(results.ratio((case, "save_s"), (plain, "save_s"))),
                seconds(results.median(case, "load_s")),
                times(results.ratio((case, "load_s"), (plain, "load_s"))),
            ]

        rate = float(results.titles.get("codecs/rate", "0"))
        nbytes = megabytes(results.median(plain, "nbytes"))
        lines += [f"**{title.format(rate=rate)}**, a state of {nbytes}", ""]
        head = ["", "stored", "save", "beside none", "cold load", "beside none"]
        lines += [
            *results_table(results, f"codecs/save/{where}/", head, results.titles, row),
            "",
        ]
    return lines


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=300, help="of training (%(default)s)")
    parser.add_argument("--size-gb", type=float, default=1.0, help="of the state, in 1e9 bytes")
    parser.add_argument("--slow-mb-per-s", type=float, default=200.0, help="of the slow store")


BENCH = Bench(
    name="codecs",
    about="ratios of a trained state, and saves and loads with each compression beside none",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
