"""R38, M45, M46: real ranks read once what they share, over gloo; one that is lost is named."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from typing_extensions import override

from allranks import Member
from distributed.jobs import WAYS, make
from distributed.run import run_ranks
from holdfast import CheckpointManager, errors
from holdfast.control import exits
from holdfast.format.tensors import parse_header
from holdfast.ranks import c10d
from holdfast.ranks.c10d import C10d, _GroupTransfer, _Operation
from holdfast.ranks.coordinator import GRACE_S
from holdfast.root.catalog import Catalog
from holdfast.store.base import WrappedStore
from holdfast.store.local import LocalStore

DEADLINE_S = 2.0


class Watched(WrappedStore):
    """Counts the bytes of tensors that this process reads; may send it a signal at the first."""

    def __init__(self, root: Path, how: signal.Signals | None = None) -> None:
        super().__init__(LocalStore(root))
        self.nbytes, self.how = 0, how

    @override
    def read_into(self, key: str, start: int, buffer: memoryview, **options: Any) -> None:
        if key.endswith(".safetensors"):
            if self.how is not None:
                os.kill(os.getpid(), self.how)
            self.nbytes += memoryview(buffer).nbytes
        self.inner.read_into(key, start, buffer, **options)

    @override
    def cached(self, *_: Any) -> None:
        """Nothing goes past the count."""


def save(root: Path, way: str, rank: int) -> dict[str, bytes]:
    """Train a step and save it."""
    job = make(way, seed=1)
    job.step()
    with CheckpointManager(root, {**job.state}) as manager:
        manager.save(1).wait()
    return job.whole()


def load(root: Path, way: str, rank: int) -> tuple[dict[str, bytes], int]:
    """Resume in another process; return the tensors, and how many bytes this rank has read."""
    job, store = make(way, seed=2), Watched(root)
    with CheckpointManager(store, job.state, broadcast=True) as manager:
        found = manager.resume()
        assert found is not None
        read = store.nbytes
        whole = job.whole()
        job.step()
        manager.save(2).wait()
    return whole, read


def tensors_nbytes(root: Path) -> int:
    """Bytes of tensors in the first checkpoint, but for those of generators, which differ."""
    entry = min(Catalog(LocalStore(root)).checkpoints(), key=lambda found: found.step)
    files = entry.manifest.files.items()
    return sum(f.nbytes for name, f in files if name.endswith(".safetensors") and "rng" not in name)


@pytest.mark.parametrize(
    ("saved_as", "way", "num_ranks"),
    [
        ("plain", "ddp", 2),
        *(
            pytest.param(saved_as, way, num_ranks, marks=pytest.mark.full)
            for saved_as in ("fsdp", "ddp")
            for way in WAYS
            for num_ranks in (2, 4)
            if num_ranks in WAYS[way].ranks
        ),
    ],
)
def test_real_ranks_send_each_other_what_they_share(
    saved_as: str, way: str, num_ranks: int, tmp_path: Path
) -> None:
    (saved, *_) = run_ranks(2, partial(save, tmp_path / "run", saved_as))
    loaded = run_ranks(num_ranks, partial(load, tmp_path / "run", way))
    read = 0
    for of_rank in loaded:
        assert of_rank is not None
        assert of_rank[0] == saved
        read += of_rank[1]
    nbytes = tensors_nbytes(tmp_path / "run")
    assert nbytes <= read < 1.5 * nbytes + 20_000 * num_ranks, (read, nbytes)


def read_own(root: Path, way: str, rank: int) -> int:
    """Resume without broadcasts; return how many bytes this rank has read."""
    job, store = make(way, seed=1), Watched(root)
    job.step()
    saved = job.whole()
    job.step()
    with CheckpointManager(store, job.state) as manager:
        assert manager.resume() is not None
    assert job.whole() == saved
    return store.nbytes


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_each_rank_reads_its_own_shards_and_one_file_of_small_tensors(
    num_ranks: int, tmp_path: Path
) -> None:
    run_ranks(num_ranks, partial(save, tmp_path / "run", "fsdp"))
    read = run_ranks(num_ranks, partial(read_own, tmp_path / "run", "fsdp"))
    sizes, small = dict[str, int](), set[str]()
    for path in tmp_path.glob("run/step-*/*.safetensors"):
        name = str(path.relative_to(tmp_path))
        data = path.read_bytes()
        sizes[name] = len(data)
        keys = parse_header(data, file_nbytes=len(data), what=name)
        if any(key.endswith(".step") for key in keys):
            assert all(key.endswith(".step") for key in keys)
            small.add(name)
    (name,) = small
    assert sum(read) == sum(sizes.values()) + (num_ranks - 1) * sizes[name]


@pytest.mark.full
def test_a_group_with_a_backend_for_each_device_exchanges_through_that_of_the_cpu(
    tmp_path: Path,
) -> None:
    """Such as "cpu:gloo,cuda:nccl", here without a GPU."""
    backend = "cpu:gloo,cuda:fake"
    (saved, *_) = run_ranks(2, partial(save, tmp_path / "run", "ddp"), backend=backend)
    loaded = run_ranks(2, partial(load, tmp_path / "run", "ddp"), backend=backend)
    for of_rank in loaded:
        assert of_rank is not None
        assert of_rank[0] == saved
    read = sum(of_rank[1] for of_rank in loaded if of_rank is not None)
    assert read < 1.5 * tensors_nbytes(tmp_path / "run") + 40_000


def lose(root: Path, odd: int, how: signal.Signals, rank: int) -> tuple[str, float]:
    """Resume while one rank is killed or stopped where it reads; what this rank says, and when."""
    member = Member(C10d.of_default_group(), width=64)
    before = member.bits()
    view = Watched(root, how if rank == odd else None)
    (root.parent / f"pid{rank}").write_text(f"{os.getpid()}")
    manager = member.manager(view, broadcast=True, save_timeout_s=DEADLINE_S)
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(errors.HoldfastError) as caught:
        manager.resume()
    assert member.bits() == before
    exits.unregister(manager)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "odd"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_lost_in_between_is_named_by_the_deadline(
    how: signal.Signals, odd: int, tmp_path: Path
) -> None:
    run_ranks(3, partial(save_member, tmp_path / "run"))
    found = run_ranks(3, partial(lose, tmp_path / "run", odd, how), lost=[odd])
    for rank, of_rank in enumerate(found):
        if rank != odd:
            assert of_rank is not None
            said, took_s = of_rank
            assert f"rank {odd}" in said or f"ranks [{odd}]" in said, found
            assert took_s < DEADLINE_S + GRACE_S + 2, found


def load_after_a_stop(root: Path, rank: int) -> list[str | dict[str, bytes]]:
    """Resume while rank 1 is stopped, and again, twice, when it goes on; what each has loaded."""
    member = Member(C10d.of_default_group(), width=64)
    view = Watched(root, signal.SIGSTOP if rank == 1 else None)
    folder = root.parent
    (folder / f"pid{rank}").write_text(f"{os.getpid()}")
    manager = member.manager(view, broadcast=True, save_timeout_s=DEADLINE_S)
    dist.barrier()
    with pytest.raises(errors.HoldfastError):
        manager.resume()
    if rank == 2:
        os.kill(int((folder / "pid1").read_text()), signal.SIGCONT)
    dist.barrier()
    view.how = None
    found: list[str | dict[str, bytes]] = []
    for _ in range(2):
        try:
            manager.resume()
        except errors.HoldfastError as error:
            found.append(str(error))
        else:
            found.append(member.bits())
    exits.unregister(manager)
    return found


@pytest.mark.full
def test_a_load_after_one_that_lost_a_rank_has_no_bytes_that_did_not_come(tmp_path: Path) -> None:
    (saved, *_) = run_ranks(3, partial(save_member, tmp_path / "run"))
    loaded = run_ranks(3, partial(load_after_a_stop, tmp_path / "run"))
    assert loaded == [[saved, saved]] * 3


def test_what_a_lost_rank_was_to_send_is_missed() -> None:
    operations = [_Operation(dist.irecv, peer, torch.empty(3)) for peer in (1, 2)]
    transfer = _GroupTransfer(operations, lambda _: [], {1})
    with pytest.raises(errors.Disconnected, match=r"ranks \[1\]: an earlier transfer has failed"):
        transfer.wait_until_done(1.0)


def make_alone(root: Path, broadcasting: int, rank: int) -> str:
    """Make a manager that broadcasts on one rank only; what the other is told."""
    c10d._MEET_S = 1.0
    member = Member(C10d.of_default_group())
    if rank != broadcasting:
        member.manager(root).close()
        return ""
    with pytest.raises(errors.RanksSilent) as caught:
        member.manager(root, broadcast=True)
    return str(caught.value)


@pytest.mark.parametrize("broadcasting", [0, pytest.param(1, marks=pytest.mark.full)])
def test_an_option_of_one_rank_alone_ends_in_an_error_that_names_it(
    broadcasting: int, tmp_path: Path
) -> None:
    said = run_ranks(2, partial(make_alone, tmp_path, broadcasting))[broadcasting]
    assert said is not None
    assert f"broadcast=True: nothing came by the deadline from rank {1 - broadcasting}" in said


def save_member(root: Path, rank: int) -> dict[str, bytes]:
    """Save a state that all ranks share."""
    member = Member(C10d.of_default_group(), width=64)
    member.train()
    with member.manager(root) as manager:
        manager.save(1).wait()
    return member.bits()


def load_through_a_device(root: Path, rank: int) -> bytes:
    """Resume with buffers that go through other memory, as with NCCL through an accelerator's."""
    member = Member(C10d.of_default_group(), width=64)
    with member.manager(root, broadcast=True) as manager:
        exchange = manager._session.applier._exchange  # type: ignore[attr-defined]
        assert exchange._device is None, "gloo sends from the memory of the host"
        exchange._device = torch.device("cpu")
        assert manager.resume() is not None
    return member.bits()["0.weight"]


@pytest.mark.full
def test_blocks_may_go_through_the_memory_of_a_device(tmp_path: Path) -> None:
    run_ranks(2, partial(save_member, tmp_path / "run"))
    first, *others = run_ranks(3, partial(load_through_a_device, tmp_path / "run"))
    assert first is not None
    assert others == [first] * 2
