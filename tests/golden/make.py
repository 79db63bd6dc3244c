"""Makes the golden roots in `v1/`: `python -m tests.golden.make [NAME …]`.

They were made once. Running it again makes new ones beside what the tests expect of the old ones;
that is right only for a new version of the format.
"""

from __future__ import annotations

import random
import shutil
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from holdfast.format.codec import Compression
from holdfast.format.manifest import Aborted, Deleted
from holdfast.format.nodes import EnumValue
from holdfast.format.records import Process, Retired
from holdfast.manager import CheckpointManager
from holdfast.policy.rules import All, Last

V1 = Path(__file__).parent / "v1"
DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
SCALARS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
PROCESS = Process(host="golden", pid=1234, start="5678", boot_id="b" * 36, pid_namespace="pid:[1]")


class Run:
    """Live objects of a run; `at(step)` gives them the values of that step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.25)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5)
        self.counters: dict[str, Any] = {}
        self.shuffle = torch.Generator()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "counters": self.counters,
            "shuffle": self.shuffle,
        }

    def at(self, step: int) -> None:
        with torch.no_grad():
            for number, tensor in enumerate(self.model.state_dict().values()):
                values = torch.arange(tensor.numel()) + 100 * number + step
                tensor.copy_(values.reshape(tensor.shape))
            for number, parameter in enumerate(self.model.parameters()):
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.full_like(parameter, step + number / 8),
                    "exp_avg_sq": torch.full_like(parameter, step + number / 16),
                }
        self.optimizer.param_groups[0]["lr"] = 0.25 / step
        self.scheduler.last_epoch = step
        self.counters.update(step=step, seen={"samples": 8 * step}, best=[0.5, None])
        self.shuffle.manual_seed(step)
        seed_globals(step)


def seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def values() -> dict[str, Any]:
    """One of every typed value of docs/format.md, section 6, that needs no tensor."""
    shared = [1, 2]
    tree = {
        "none": None,
        "booleans": [True, False],
        "integers": [0, -7, 2**63, -(2**200)],
        "floats": [0.1, 3.0, 5e-324, -0.0, 1e300],
        "special floats": [float("inf"), float("-inf"), float("nan"), odd_nan()],
        "text": 'ä€😀 "\\\x00\n',
        "bytes": bytes(range(256)),
        "tuple": (1, (2, [3]), ()),
        "sets": [{3, 1, 2}, frozenset({"b", "a"}), {1, (2, "x"), 0.5}, set()],
        "dicts": [{1: "a", (2, "b"): [3]}, {"$x": 1}, {}, {None: 0, True: 1, b"k": 2}],
        "ordered": OrderedDict([("b", 1), ("a", {"inside": 2})]),
        "counter": Counter({"x": 2, 5: 1}),
        "enums": [HTTPStatus.NOT_FOUND, EnumValue("colours:Paint", None, 3)],
        "path": Path("a/b.txt"),
        "times": [
            timedelta(days=-1, seconds=5, microseconds=7),
            datetime(2026, 1, 2, 3, 4, 5, 6),
            datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5, minutes=-30))),
        ],
        "scalars": {name: scalar(name) for name in SCALARS},
        "torch": [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0, 3])],
        "shared": {"one": shared, "two": shared, "outer": {"three": shared}},
    }
    return {**tree, "again": tree["ordered"]}


def odd_nan() -> float:
    number: float = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
    return number


def scalar(name: str) -> Any:
    dtype = np.dtype(name)
    return np.frombuffer(b"\1" + bytes(dtype.itemsize - 1), dtype)[0]


def tensor_of(name: str) -> torch.Tensor:
    """Shape (2, 3) of a torch dtype, with the bytes 1, 2, 3, … (0 and 1 for bool)."""
    dtype = getattr(torch, name)
    nbytes = 6 * dtype.itemsize
    data = bytes([1, 0, 1, 1, 0, 0]) if name == "bool" else bytes(range(1, nbytes + 1))
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(2, 3)


def tensors() -> dict[str, Any]:
    """Every dtype of section 4 but the one that older torch lacks, and every odd shape."""
    tied = torch.arange(4, dtype=torch.int16)
    return {
        "dtypes": {name: tensor_of(name) for name in DTYPES},
        "scalar": torch.tensor(2.5),
        "empty": [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int64)],
        "strided": torch.arange(12, dtype=torch.int32).reshape(3, 4).t()[::2],
        "tied": [tied, {"also": tied}],
        "arrays": [np.arange(5, dtype=np.uint16), np.array(7.5), np.zeros((0, 2), np.bool_)],
        "odd key.s": {"ä/../x": torch.tensor([1], dtype=torch.uint8)},
    }


def generators() -> dict[str, Any]:
    """One of each kind of generator."""
    return {
        "torch": torch.Generator().manual_seed(3),
        "python": random.Random(3),
        "numpy": np.random.Generator(np.random.PCG64(3)),
        "numpy-legacy": np.random.RandomState(3),
    }


def types_state() -> dict[str, Any]:
    """The state of the root `types`; `rng` is a tree of the caller's own."""
    return {
        "values": values(),
        "tensors": tensors(),
        "scales": {"e8m0": tensor_of("float8_e8m0fnu")},
        "generators": generators(),
        "rng": {"none": "of ours"},
        "empty": [],
    }


def manager(root: Path, state: dict[str, Any]) -> CheckpointManager:
    return CheckpointManager(root, state, sinks=(), preflight=False)


def make_run(root: Path) -> None:
    """Two writers; a tombstone, a tagged and pinned checkpoint, an aborted attempt, the newest."""
    run = Run()
    with manager(root, run.state) as first:
        run.at(5)
        deleted = first.save(5).wait()
        run.at(10)
        first.save(10, metrics={"loss": 0.5, "odd": float("nan")}, tags=("kept",)).wait()
        run.at(15)
        aborted = first.save(15).wait()
    with manager(root, run.state) as second:
        second.resume("step=10")
        run.at(20)
        second.save(20, epoch=2, samples=160, tokens=640, reason="final", tags=("final",)).wait()
        second.tag("step=10", "paper")
        second.pin("step=10")
    # Last, because the second writer would have removed what is left of these.
    bury(root / deleted.folder, dead(deleted.save_id).encode())
    (root / deleted.folder / "retired-00000001.json").write_bytes(
        Retired(by="writer 1", reason="not kept by Last(1)").encode()
    )
    bury(root / aborted.folder, Aborted(by="gc", reason="its writer is gone").encode())


def dead(save_id: str) -> Deleted:
    return Deleted(save_id=save_id, by="writer 1", reason="not kept by Last(1)")


def bury(folder: Path, register: bytes) -> None:
    """Leave nothing of a checkpoint but another register."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "manifest.json").write_bytes(register)


def make_types(root: Path) -> None:
    with manager(root, types_state()) as only:
        only.save(1).wait()


def fours_state() -> dict[str, Any]:
    """The state of the root `fours`: pairs of 4-bit floats, which a torch before 2.8 lacks."""
    pairs = tensor_of("float4_e2m1fn_x2")
    return {
        "fours": {"w": pairs, "scalar": pairs[0, 0].clone(), "empty": pairs[:, :0].clone()},
        "rng": {"none": "of ours"},
    }


def make_fours(root: Path) -> None:
    with manager(root, fours_state()) as only:
        only.save(1).wait()


def thinned_state(step: int) -> dict[str, Any]:
    """The state of the root `thinned`; of the older of its checkpoints `slots` were dropped."""
    return {
        "weights": {"w": torch.full((2, 3), float(step))},
        "slots": {"m": torch.full((2, 3), -float(step)), "step": step},
        "rng": {"none": "of ours"},
    }


def make_thinned(root: Path) -> None:
    for step in (1, 2):
        with CheckpointManager(
            root,
            thinned_state(step),
            sinks=(),
            preflight=False,
            keep=Last(1) | All().then_drop("slots"),
        ) as only:
            only.resume()
            only.state = thinned_state(step)
            only.save(step).wait()


class Tables(nn.Module):
    """A module with a version, and with buffers that are not saved."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(2.0))
        buffers = {
            "mask": torch.full((4, 2), float("-inf")).triu(),
            "angles": torch.tensor([1 + 2j, -0.5j]),
            "many": torch.arange(100, dtype=torch.int16) ** 2,
            "empty": torch.empty(0),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)


def beside_state() -> dict[str, Any]:
    """The state of the root `beside`: a document has members beside its tree."""
    return {"model": nn.Sequential(nn.Identity(), Tables()), "rng": {"none": "of ours"}}


def make_beside(root: Path) -> None:
    with manager(root, beside_state()) as only:
        only.save(1).wait()


COMPRESSION: Mapping[str, Compression] = {
    "zstd": Compression(codec="zstd"),
    "lz4": Compression(codec="lz4"),
    "byte": Compression(codec="blosc2", shuffle="byte"),
    "bit": Compression(codec="blosc2", shuffle="bit", inner="lz4"),
}


def compressed_state() -> dict[str, Any]:
    """The state of the root `compressed`: a component for each way to compress, in two blocks."""
    pattern = torch.arange(8, dtype=torch.int16).repeat(625_000)
    components: dict[str, Any] = {
        name: {"w": pattern + number, "few": torch.tensor([0.5, number])}
        for number, name in enumerate(COMPRESSION)
    }
    components["zstd"]["names"] = ["a long list"] * 100_000
    return {**components, "as_it_is": {"w": torch.arange(6)}, "rng": {"none": "of ours"}}


def make_compressed(root: Path) -> None:
    state = compressed_state()
    with CheckpointManager(root, state, compress=COMPRESSION, sinks=(), preflight=False) as only:
        only.save(1).wait()


ROOTS: Mapping[str, Callable[[Path], None]] = {
    "run": make_run,
    "types": make_types,
    "fours": make_fours,
    "thinned": make_thinned,
    "compressed": make_compressed,
    "beside": make_beside,
}


def main(names: Sequence[str]) -> None:
    """Make the golden roots of these names anew; without any, all of them."""
    for name in names or ROOTS:
        shutil.rmtree(V1 / name, ignore_errors=True)
    make_all({name: ROOTS[name] for name in names or ROOTS})


def make_all(roots: Mapping[str, Callable[[Path], None]], base: Path = V1) -> None:
    """Make some golden roots, as by the same process everywhere."""
    same = {
        "holdfast.save_controller.environment": {"host": "golden"},
        "holdfast.save_controller.numerics": {"torch": str(torch.__version__), "num_threads": 2},
        "holdfast.ownership.claim.this_process": PROCESS,
    }
    patches = [mock.patch(name, return_value=value) for name, value in same.items()]
    for patch in patches:
        patch.start()
    for name, make in roots.items():
        make(base / name)
    for patch in patches:
        patch.stop()
    for path in (path for name in roots for path in (base / name).rglob("*")):
        if path.is_symlink():
            path.unlink()  # `latest` is for people, and git need not know links
        elif path.is_file():
            path.chmod(0o644)


if __name__ == "__main__":
    main(sys.argv[1:])
