"""Many small things instead of much data: `python -m bench.metadata`.

An index of 100,000 shards; a root of 1,000 checkpoints; the command line's start; one tensor out
of a large checkpoint; many small tensors beside a bare safetensors file. Beside them is what plain
calls take for the same files.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from blake3 import blake3

from bench import plain
from bench.case import SEED
from bench.child import in_child, settle
from bench.command import Bench, progress
from bench.machine import PeakMemory, drop_cache, files_under, newest_under, sync_folder
from bench.plans import plan
from bench.report import megabytes, number, percent, seconds, table, times
from bench.results import Figures, Results
from bench.states import StateSpec, build
from holdfast.format.layout import INDEX, MANIFEST
from holdfast.format.tensors import TensorSpec

ONE = "blocks.6.projection.weight"
"""The tensor that is read alone; at 2.5 GB it has 4.3 MB."""
_REPEATS = 3
_NUM_PLAIN = 20
_READ_MANIFESTS = f"""
import glob, sys
for path in glob.glob(sys.argv[1] + "/*/{MANIFEST}"):
    open(path, "rb").read()
"""


def write_index(num_shards: int, path: Path) -> Figures:
    """Encode the index of so many tensors and put it on the disk."""
    from holdfast.format.index import encode_index
    from holdfast.store.local import LocalStore

    planned = plan({"model": list(_specs(num_shards))})
    store = LocalStore(path)
    store.make_folder("")
    peak = PeakMemory()
    with peak.watch():
        start = perf_counter()
        store.put("index", encode_index(planned.files, planned.digests))
        write_s = perf_counter() - start
    return {
        "write_s": [write_s],
        "plain_write_s": [plain.write_s(path, path.parent / "plain-index")],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
        "index_nbytes": [float((path / "index").stat().st_size)],
    }


def read_index(num_shards: int, path: Path) -> Figures:
    """Read and check what `write_index` wrote."""
    from holdfast.format.index import decode_index
    from holdfast.store.local import LocalStore

    entries = plan({"model": list(_specs(num_shards))}).entries
    store = LocalStore(path)
    peak = PeakMemory()
    with peak.watch():
        start = perf_counter()
        index = decode_index(store.get("index"), files=entries, what="index")
        read_s = perf_counter() - start
    if len(index.components["model"]) != num_shards:
        raise RuntimeError("the index does not have the tensors that were written")
    return {
        "read_s": [read_s],
        "plain_read_s": [plain.read_s([path / "index"])],
        "peak_extra_nbytes": [float(peak.extra_nbytes)],
    }


def _specs(num_shards: int) -> Iterator[TensorSpec]:
    for position in range(num_shards):
        key = f"layer{position // 8:05d}.part{position:06d}"
        yield TensorSpec(key=key, dtype="F32", shape=(1, 4096))


def make_run(num_checkpoints: int, root: Path) -> Figures:
    """A root with so many checkpoints of one small tensor."""
    import torch

    from holdfast import CheckpointManager

    values = torch.zeros(16)
    with CheckpointManager(root, {"values": {"x": values}}, sinks=()) as manager:
        start = perf_counter()
        for step in range(num_checkpoints):
            values += 1
            manager.save(step).wait()
    save_s = (perf_counter() - start) / num_checkpoints
    newest = newest_under(root)
    copies = [root.parent / f"plain-{number}" for number in range(_NUM_PLAIN)]
    return {"save_s": [save_s], "plain_save_s": [plain.write_s(newest, copy) for copy in copies]}


def resume(root: Path) -> Figures:
    """`resume` of such a run, and how many manifests it reads before it returns.

    The state is next to nothing, so that the decision is what takes the time. What housekeeping
    reads afterwards, in a thread of its own, does not count.
    """
    import torch

    from holdfast import CheckpointManager
    from holdfast.store.local import LocalStore

    store = LocalStore(root)
    manifests: set[str] = set()
    get, caller = store.get, threading.get_ident()

    def counting(key: str, *arguments: Any, **options: Any) -> Any:
        if key.endswith(f"/{MANIFEST}") and threading.get_ident() == caller:
            manifests.add(key)
        return get(key, *arguments, **options)

    store.get = counting  # type: ignore[method-assign]
    manager = CheckpointManager(store, {"values": {"x": torch.zeros(16)}}, sinks=())
    start = perf_counter()
    manager.resume()
    resume_s = perf_counter() - start
    manager.close()
    return {
        "resume_s": [resume_s],
        "plain_resume_s": [_plain_resume_s(root)],
        "manifests_count": [float(len(manifests))],
    }


def _plain_resume_s(root: Path) -> float:
    """A look at what there is, the files of the newest, and one that says who goes on."""
    newest, claim = newest_under(root), root / "plain-claim"
    start = perf_counter()
    os.listdir(root)
    plain.read_s(files_under(newest))
    with claim.open("xb") as file:
        file.write(bytes(1000))
        os.fsync(file.fileno())
    sync_folder(root)
    took_s = perf_counter() - start
    claim.unlink()
    return took_s


def save_large(spec: StateSpec, root: Path) -> Figures:
    """One checkpoint of a large state."""
    from holdfast import CheckpointManager

    state = build(spec)
    state.fill(SEED)
    with CheckpointManager(root, state.components, sinks=()) as manager:
        manager.save(0).wait()
    return {"nbytes": [float(state.nbytes)]}


def load_one(spec: StateSpec, root: Path, *, settles: bool) -> Figures:
    """One tensor of it into the live model, from the disk and from the page cache, verified."""
    from holdfast import load_weights

    model = build(spec).components["model"]
    nbytes = model.get_parameter(ONE).nbytes
    one = _places_of_one(root)
    found: dict[str, list[float]] = {}
    for figure in ("cold_s", "warm_s"):
        for _ in range(_REPEATS):
            if figure == "cold_s":
                drop_cache(root)
            if settles:
                settle(8 * nbytes)  # whole blocks are read
            start = perf_counter()
            load_weights(root, model, include=[f"model.{ONE}"])
            found.setdefault(figure, []).append(perf_counter() - start)
            if figure == "cold_s":
                drop_cache(root)
            found.setdefault(f"plain_{figure}", []).append(_plain_one_s(*one))
    return found | {"tensor_nbytes": [float(nbytes)]}


def _places_of_one(root: Path) -> tuple[list[Path], Path, range]:
    """The documents that say where the tensor lies, its file, and where its blocks begin."""
    from holdfast.loading.open import open_checkpoint
    from holdfast.root.catalog import standalone
    from holdfast.store.local import LocalStore

    newest = newest_under(root)
    store = LocalStore(root)
    manifest = standalone(store, newest.name).manifest
    index = open_checkpoint(store, newest.name, manifest).index
    tree = manifest.components["model"].files[0]
    (shard,) = index.components["model"][ONE].shards
    documents = [newest / name for name in (MANIFEST, INDEX, tree)]
    of_block, stop = index.block_nbytes, shard.start + shard.nbytes
    blocks = range(shard.start // of_block * of_block, stop, of_block)
    return documents, newest / shard.file, blocks


def _plain_one_s(documents: Sequence[Path], path: Path, blocks: range) -> float:
    """Documents, and then blocks of a file at once, read and digested."""
    start = perf_counter()
    plain.read_s(documents)
    fd = os.open(path, os.O_RDONLY)
    with ThreadPoolExecutor(len(blocks)) as pool:
        list(pool.map(lambda at: blake3(os.pread(fd, blocks.step, at)).digest(), blocks))
    os.close(fd)
    return perf_counter() - start


def small_tensors(spec: StateSpec, folder: Path, *, settles: bool) -> Figures:
    """Save and load many small tensors, in turns with one bare safetensors file, which is neither
    synced nor verified."""
    from safetensors.torch import load_file, save_file

    from holdfast import CheckpointManager

    state = build(spec)
    state.fill(SEED)
    flat, path = state.flat(), folder / "bare.safetensors"
    found: dict[str, list[float]] = {}
    with CheckpointManager(folder / "run", state.components, sinks=()) as manager:
        ways: dict[str, Callable[[int], object]] = {
            "save_s": lambda number: manager.save(number).wait(),
            "bare_save_s": lambda number: save_file(flat, path),
            "load_s": lambda number: manager.load(),
            "bare_load_s": lambda number: load_file(path),
        }
        for number in range(1 + _REPEATS):
            state.negate()
            for name, work in ways.items():
                gc.collect()
                if settles:
                    settle(2 * state.nbytes)
                start = perf_counter()
                work(number)
                if number:
                    found.setdefault(name, []).append(perf_counter() - start)
    newest = newest_under(folder / "run")
    copies = [folder / f"plain-{number}" for number in range(_REPEATS)]
    found["plain_save_s"] = [plain.write_s(newest, copy) for copy in copies]
    found["plain_load_s"] = [plain.read_s(files_under(newest)) for _ in copies]
    return found


def commands(root: Path) -> Figures:
    """Wall times of commands, each a process, in turns."""
    holdfast = [sys.executable, "-m", "holdfast.cli"]
    ways = {
        "import_torch_s": [sys.executable, "-c", "import torch"],
        "help_s": [*holdfast, "--help"],
        "ls_s": [*holdfast, "ls", str(root)],
        "prune_s": [*holdfast, "prune", str(root), "--keep", "last:3", "--dry-run"],
        "plain_help_s": [sys.executable, "-c", "pass"],
        "plain_ls_s": [sys.executable, "-c", _READ_MANIFESTS, str(root)],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + _REPEATS):
        for name, command in ways.items():
            found[name].append(_wall_s(command))
    return {name: values[1:] for name, values in found.items()}


def _wall_s(command: Sequence[str]) -> float:
    environment = {**os.environ, "COLUMNS": "80"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
    start = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return perf_counter() - start


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size-gb", type=float, default=2.5, help="the large state, in 1e9 bytes")
    parser.add_argument("--shards", type=int, default=100_000, help="in the index (%(default)s)")
    parser.add_argument("--checkpoints", type=int, default=1000, help="in the root (%(default)s)")
    parser.add_argument("--small-tensors", type=int, default=20_000, help="(%(default)s)")


def _measure_round(options: argparse.Namespace, folder: Path, results: Results) -> None:
    gpt = StateSpec(kind="gpt", gpt_nbytes=round(options.size_gb * 1e9), num_small=0)
    small = StateSpec(kind="small", gpt_nbytes=0, num_small=options.small_tensors)
    titles = results.titles
    titles["metadata/index"] = f"an index of {options.shards:,} shards"
    titles["metadata/run"] = f"a root of {options.checkpoints:,} checkpoints"
    titles["metadata/one"] = f"one tensor out of {options.size_gb:g} GB"
    titles["metadata/small"] = f"{options.small_tensors:,} tensors of 256 bytes"
    many, large = folder / "many", folder / "large"
    if not large.exists():
        _add(results, "metadata/run/make", make_run, options.checkpoints, many)
        _add(results, "metadata/one/save", save_large, gpt, large)
    number = len(list(folder.iterdir()))
    own = folder / str(number)
    own.mkdir()
    _add(results, "metadata/index/write", write_index, options.shards, own / "index")
    _add(results, "metadata/index/read", read_index, options.shards, own / "index")
    _add(results, "metadata/run/resume", resume, many)
    _add(results, "metadata/run/commands", commands, many)
    settles = options.settle
    _add(results, "metadata/one/load", partial(load_one, settles=settles), gpt, large)
    _add(results, "metadata/small", partial(small_tensors, settles=settles), small, own)


def _add(results: Results, name: str, work: Callable[..., Figures], *arguments: object) -> None:
    progress(f"  {name}")
    results.add(name, in_child(work, *arguments))


_ROWS: Sequence[tuple[str, str, str]] = (
    ("metadata/index/write", "write_s", "{index}: written"),
    ("metadata/index/read", "read_s", "{index}: read"),
    ("metadata/run/commands", "ls_s", "{run}: `holdfast ls`"),
    ("metadata/run/commands", "prune_s", "{run}: `holdfast prune --dry-run`"),
    ("metadata/run/resume", "resume_s", "{run}: `resume()`"),
    ("metadata/run/make", "save_s", "{run}: each save"),
    ("metadata/run/commands", "help_s", "`holdfast --help`"),
    ("metadata/run/commands", "import_torch_s", "`import torch`"),
    ("metadata/one/load", "cold_s", "{one}: cold, verified"),
    ("metadata/one/load", "warm_s", "{one}: warm, verified"),
    ("metadata/small", "save_s", "{small}: holdfast save, durable"),
    ("metadata/small", "bare_save_s", "{small}: safetensors save_file, not synced"),
    ("metadata/small", "load_s", "{small}: holdfast load, verified"),
    ("metadata/small", "bare_load_s", "{small}: safetensors load_file"),
)
_BESIDE = {
    "help_s": "import_torch_s",
    "save_s": "bare_save_s",
    "load_s": "bare_load_s",
}

_PLAIN = {"prune_s": "plain_ls_s"}
"""Figures beside which plain calls stand that are not named after them."""


def _tables(results: Results) -> list[str]:
    names = {key.split("/")[1]: title for key, title in results.titles.items()}
    rows = {f"{case} {figure}": (case, figure) for case, figure, _ in _ROWS}
    titles = {f"{case} {figure}": title.format(**names) for case, figure, title in _ROWS}

    def row(name: str) -> list[str]:
        case, figure = rows[name]
        other = (case, _BESIDE.get(figure, ""))
        return [
            seconds(results.median(case, figure)),
            percent(results.ratio((case, _PLAIN.get(figure, f"plain_{figure}")), (case, figure))),
            times(results.ratio((case, figure), other)),
            megabytes(results.median(case, "peak_extra_nbytes")),
            number(results.median(case, "manifests_count"), "{:.0f}"),
        ]

    head = ["what", "time", "plain calls", "vs. the other", "extra memory", "manifests read"]
    errors = {name: results.error(case) for name, (case, _) in rows.items()}
    return table(head, titles, row, errors)


BENCH = Bench(
    name="metadata",
    about="Many small things: an index, a root of many checkpoints, the command line's start.",
    add_options=_add_options,
    measure_round=_measure_round,
    tables=_tables,
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
