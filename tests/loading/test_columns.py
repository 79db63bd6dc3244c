"""Tensors as columns: copied in bulk or made one by one, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import CheckpointManager
from holdfast.errors import CorruptData, FormatError
from holdfast.format.tensors import TensorSpec
from holdfast.loading.assembly import FreshTensors, UnreadTensors
from holdfast.loading.plan import Packed, Wanted
from holdfast.staging.arena import Arena
from holdfast.state.planning.copying import LARGE_NBYTES, LazyTensors, UnreadTensor
from holdfast.store.local import LocalStore

FILES = {"a": 4096 * 3, "b": 4096 * 2}
"""Two tensor files, with their lengths."""


class Files:
    """Files whose bytes are known, and how often tensors of them were read one by one."""

    def __init__(self) -> None:
        noise = np.random.default_rng(0)
        self.bytes = {name: noise.integers(0, 255, n, np.uint8) for name, n in FILES.items()}
        self.num_alone = 0

    def read_pairs(self, pairs: Sequence[tuple[Tensor, UnreadTensor]]) -> None:
        """One by one."""
        self.num_alone += len(pairs)
        for live, unread in pairs:
            found = self.bytes[unread.file][unread.start :][: unread.nbytes]
            as_bytes(live).copy_(torch.from_numpy(found))

    def read_packed(self, packed: Packed) -> None:
        """Stretches of them."""
        for extent in packed.extents:
            found = self.bytes[extent.file][extent.start :][: extent.nbytes]
            packed.arena.memory[extent.at : extent.at + extent.nbytes] = found.tobytes()

    def arena(self, name: str) -> Arena:
        """A file as it was read."""
        arena = Arena(FILES[name])
        arena.memory[:] = self.bytes[name].tobytes()
        return arena


def parts() -> dict[str, Wanted]:
    """Tensors of several kinds, some of no bytes, some with a gap behind them."""
    rows = {
        "a": [("F32", (4, 3), 4096), ("U8", (7,), 4144), ("F32", (), 4152), ("I64", (0, 3), 4160)],
        "b": [
            ("BF16", (2, 2, 2), 4100),
            ("BOOL", (0,), 4104),
            ("U8", (), 4099),
            ("U8", (1,), 4098),
        ],
    }
    return {
        file: Wanted(
            component="it",
            specs=[
                TensorSpec(f"{file}{i}", dtype, shape) for i, (dtype, shape, _) in enumerate(of)
            ],
            start=np.array([start for *_, start in of], np.int64),
            nbytes=np.array([TensorSpec("", d, shape).nbytes for d, shape, _ in of], np.int64),
        )
        for file, of in rows.items()
    }


Make = Callable[[Files, dict[str, Wanted]], LazyTensors[Any]]


def read(files: Files, wanted: dict[str, Wanted]) -> LazyTensors[Any]:
    return FreshTensors(wanted, [files.arena(name) for name in wanted])


@pytest.fixture(params=[read, UnreadTensors])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def values(stored: Any) -> Tensor:
    found: Tensor = stored.read_tensor() if isinstance(stored, UnreadTensor) else stored
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_copied_in_bulk_are_the_tensors_that_are_made(make: Make, order: int) -> None:
    table = make(Files(), parts())
    keys = [*table][::order]
    live = [torch.zeros_like(values(table[key])) for key in keys]
    assert table.copy_into(live, keys, is_all=True) == []
    assert len(table) == len(keys) == 8
    for key, tensor in zip(keys, live, strict=True):
        found = values(table[key])
        assert found.shape == tensor.shape
        assert torch.equal(as_bytes(tensor), as_bytes(found)), key


def test_some_of_them_are_copied_and_none_is_made(make: Make) -> None:
    files = Files()
    table = make(files, parts())
    live = [torch.zeros(7, dtype=torch.uint8), torch.zeros(4, 3)]
    assert table.copy_into(live, ["a1", "a0"], is_all=True) == []
    assert live[0].numpy().tobytes() == files.bytes["a"][4144:4151].tobytes()
    assert live[1].numpy().tobytes() == files.bytes["a"][4096:4144].tobytes()
    assert not files.num_alone
    assert "_made" not in vars(table)


def test_nothing_is_copied_where_nothing_is_wanted(make: Make) -> None:
    make(Files(), parts()).copy_into([], [], is_all=True)
    make(Files(), {}).copy_into([], [], is_all=True)


def test_where_others_are_read_too_all_are_read_together() -> None:
    """So that a block in which both lie is read once."""
    table = UnreadTensors(Files(), parts())
    live = [torch.zeros(7, dtype=torch.uint8)]
    ((found, unread),) = table.copy_into(live, ["a1"], is_all=False)
    assert found is live[0]
    assert unread.spec.key == "a1"
    assert not live[0].any()


def test_the_same_key_gives_the_same_object(make: Make) -> None:
    """So that two names of one stored tensor are known for one."""
    table = make(Files(), parts())
    assert table["a0"] is table["a0"]


def test_a_tensor_that_is_not_aligned_is_refused_before_any_is_copied(make: Make) -> None:
    wanted = parts()
    wanted["a"].start[2] = 4153
    with pytest.raises(FormatError, match="'a2' starts at byte 4153, not aligned"):
        make(Files(), wanted)


SHAPES = [(64,), (), (3, 5), (0, 2), (300, 200), (1, 1, 1), (LARGE_NBYTES // 4 + 3,), (7,)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]


def many(seed: int) -> dict[str, Any]:
    """Small and large tensors of many kinds, in a dict, a list and beside other things."""
    noise = torch.Generator().manual_seed(seed)

    def some() -> Iterator[Tensor]:
        for shape in SHAPES:
            for dtype in DTYPES:
                yield (torch.randn(shape, generator=noise) * 9).to(dtype)

    tensors = [*some()]
    return {
        "dict": {f"t{number}": tensor for number, tensor in enumerate(some())},
        "list": tensors,
        "beside": {"loss": 1.0, "same": tensors[0]},
    }


def tensors_in(state: dict[str, Any]) -> list[Tensor]:
    return [*state["dict"].values(), *state["list"]]


@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"verify": False}])
def test_many_tensors_of_every_kind_come_back_where_they_were(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    saved, live = many(1), many(2)
    with CheckpointManager(tmp_path, {"it": saved}, sinks=()) as manager:
        manager.save(1).wait()
    before = tensors_in(live)
    with CheckpointManager(tmp_path, {"it": live}, sinks=()) as manager:
        manager.load(**options)
    assert all(a is b for a, b in zip(tensors_in(live), before, strict=True))
    for found, stored in zip(tensors_in(live), tensors_in(saved), strict=True):
        assert torch.equal(found, stored)
    assert live["beside"]["same"] is live["list"][0]


@pytest.mark.parametrize("options", [{}, {"in_place": True}])
def test_autograd_learns_of_small_tensors_that_a_load_changed(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    """A backward through values from before the load is an error, not a wrong gradient."""
    live = {f"t{number}": torch.ones(4) for number in range(20)}
    with CheckpointManager(tmp_path, {"it": live}, sinks=()) as manager:
        manager.save(1).wait()
        weight = torch.ones(4, requires_grad=True)
        loss = (weight * live["t7"]).sum()
        manager.load(**options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_damage_changes_none_of_many_small_tensors(tmp_path: Path) -> None:
    """Invariant 6."""
    live = {f"t{number}": torch.full((4,), float(number)) for number in range(20)}
    with CheckpointManager(tmp_path, {"it": live}, sinks=()) as manager:
        manager.save(1).wait()
    (file,) = tmp_path.glob("step-*/it-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for tensor in live.values():
        tensor.fill_(-1.0)
    manager = CheckpointManager(tmp_path, {"it": live}, sinks=())
    with manager, pytest.raises(CorruptData, match=r"it\.t0"):
        manager.load()
    assert all(tensor.tolist() == [-1.0] * 4 for tensor in live.values())


@pytest.mark.parametrize("options", [{}, {"in_place": True}])
def test_small_tensors_of_a_model_are_not_overwritten_by_a_copy_of_it(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    """`best = model.state_dict()` holds the memory of the model itself."""
    model = nn.ParameterList([torch.full((4,), float(n)) for n in range(20)])
    best = {f"b{n}": torch.full((4,), -1.0) for n in range(20)}
    with CheckpointManager(tmp_path, {"model": model, "best": best}, sinks=()) as manager:
        manager.save(1).wait()
    best = dict(zip(best, model.state_dict().values(), strict=True))
    with CheckpointManager(tmp_path, {"model": model, "best": best}, sinks=()) as manager:
        notes = manager.load(**options).notes
    assert [float(p[0].detach()) for p in model] == [float(n) for n in range(20)]
    assert all(tensor.tolist() == [-1.0] * 4 for tensor in best.values())
    assert any("is the memory of a module here" in note for note in notes)


class Counting(LocalStore):
    """Counts what is read of tensor files."""

    nbytes = 0

    def read_into(self, key: str, start: int, buffer: memoryview, **named: Any) -> None:
        """As it is."""
        if key.endswith(".safetensors"):
            self.nbytes += buffer.nbytes
        super().read_into(key, start, buffer, **named)


@pytest.mark.parametrize("odd", [[], [nn.Parameter(torch.zeros(4))]], ids=["plain", "parameter"])
def test_in_place_each_block_is_read_once_for_however_many_containers(
    tmp_path: Path, odd: list[Tensor]
) -> None:
    def state(value: float) -> dict[str, Any]:
        lists = {f"l{n}": [torch.full((1 << 12,), value + n)] for n in range(60)}
        for n in range(60):
            lists[f"l{n}"] += [torch.full((1 << 12,), value) for _ in range(20)]
        return {"it": lists | {"odd": odd}}

    with CheckpointManager(tmp_path, state(1.0), sinks=()) as manager:
        manager.save(1).wait()
    (file,) = tmp_path.glob("step-*/it-*.safetensors")
    store, live = Counting(tmp_path), state(-1.0)
    with CheckpointManager(store, live, sinks=()) as manager:
        manager.load(in_place=True)
    assert [float(live["it"][f"l{n}"][0][5]) for n in range(60)] == [1.0 + n for n in range(60)]
    assert store.nbytes == file.stat().st_size + rng_nbytes(tmp_path)


def rng_nbytes(root: Path) -> int:
    (file,) = root.glob("step-*/rng-*.safetensors")
    return file.stat().st_size
