"""R38, M45, M46: ranks read once what they share. Invariants 6 and 7 hold as without."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from allranks import Breaking, Member, all_of, on_ranks, save_on
from holdfast import Checkpoints, Encryption, PerRank, errors
from holdfast.keys import SecretKey
from holdfast.loading import distributed as together_module
from holdfast.ranks.chosen import SingleProcess
from holdfast.ranks.coordinator import Coordinator
from holdfast.root.catalog import Catalog
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, WrappedStore
from holdfast.testing.ranks import ThreadCoordinator

BLOCK = 8 << 20
WIDTH = BLOCK // 4 + 1000
"""Of a layer that takes a little more than a block."""


class Counting(WrappedStore):
    """A view of a store that counts the bytes of tensors that one rank reads."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    @override
    def read_into(self, key: str, start: int, buffer: memoryview, **options: Any) -> None:
        if key.endswith(".safetensors"):
            with self._lock:
                self.read[key, start] += memoryview(buffer).nbytes
        self.inner.read_into(key, start, buffer, **options)

    @property
    def nbytes(self) -> int:
        return sum(self.read.values())


class Large(Member):
    """A rank whose model has layers of several blocks."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self.model = nn.Sequential(*(nn.Linear(1, WIDTH, bias=False) for _ in range(3)))
        self.fill(0.0)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters(), 1):
                parameter.fill_(value * number)

    @override
    def manager(self, root: Any, **options: Any) -> Any:
        return super().manager(root, **{"state": {"model": self.model}, **options})


def saved(num_ranks: int, **options: Any) -> MemoryStore:
    """A root with a large state, saved by so many ranks."""
    store = MemoryStore()

    def work(member: Member) -> None:
        large = Large(member.coordinator)
        large.fill(1.5)
        with large.manager(store, **options) as manager:
            manager.save(1).wait()

    all_of(
        on_ranks(
            ThreadCoordinator.for_ranks(num_ranks) if num_ranks > 1 else [SingleProcess()], work
        )
    )
    return store


def stored_nbytes(store: Store) -> int:
    (entry,) = Catalog(store).checkpoints()
    files = entry.manifest.files.items()
    return sum(file.nbytes for name, file in files if name.endswith(".safetensors"))


def resumed(views: Sequence[Store], **options: Any) -> list[dict[str, bytes]]:
    """The tensors of all ranks after each has resumed from its view."""

    def work(member: Member) -> dict[str, bytes]:
        large = Large(member.coordinator)
        with large.manager(views[member.rank], broadcast=True, **options) as manager:
            assert manager.resume() is not None
        return large.bits()

    return all_of(on_ranks(len(views), work))


@pytest.mark.parametrize(
    ("num_before", "num_ranks"),
    [
        (2, 3),
        pytest.param(1, 2, marks=pytest.mark.full),
        pytest.param(3, 4, marks=pytest.mark.full),
    ],
)
def test_replicas_read_each_byte_once_for_all_ranks_and_equally_many(
    num_before: int, num_ranks: int
) -> None:
    store = saved(num_before)
    views = [Counting(store) for _ in range(num_ranks)]
    bits = resumed(views)
    assert all(of_rank == bits[0] for of_rank in bits)
    assert bits[0]["2.weight"] == torch.full((WIDTH,), 4.5).numpy().tobytes()
    counts = sum((view.read for view in views), Counter())
    assert sum(counts.values()) == stored_nbytes(store)
    assert max(view.nbytes for view in views) - min(view.nbytes for view in views) <= 2 * BLOCK


@pytest.mark.full
def test_without_it_every_rank_reads_everything() -> None:
    store = saved(1)
    views = [Counting(store) for _ in range(2)]

    def work(member: Member) -> None:
        with Large(member.coordinator).manager(views[member.rank]) as manager:
            manager.resume()

    all_of(on_ranks(2, work))
    assert [view.nbytes for view in views] == [stored_nbytes(store)] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"compress": "zstd"},
        pytest.param({"encrypt": Encryption(keys=SecretKey(bytes(32)))}, marks=pytest.mark.full),
        {"encrypt": Encryption(keys=SecretKey(bytes(32))), "compress": "zstd"},
    ],
    ids=["compressed", "encrypted", "both"],
)
def test_compressed_and_encrypted_blocks_are_sent_as_they_are_in_memory(options: Any) -> None:
    bits = resumed([saved(2, **options)] * 2, **options)
    assert bits[0] == bits[1]
    assert bits[0]["1.weight"] == torch.full((WIDTH,), 3.0).numpy().tobytes()


def test_what_only_one_rank_needs_it_reads_by_itself() -> None:
    """Generators, and components that differ by rank."""
    store = MemoryStore()

    def state(member: Member, value: int) -> dict[str, Any]:
        own = {"queue": torch.full((300_000 + member.rank,), value)}
        return {**member.state, "own": PerRank(own), "noise": member.noise}

    def save(member: Member) -> bytes:
        member.noise.manual_seed(member.rank)
        with member.manager(store, state=state(member, member.rank)) as manager:
            manager.save(1).wait()
        return member.noise.get_state().numpy().tobytes()

    noises = all_of(on_ranks(3, save))

    def load(member: Member) -> tuple[bytes, float]:
        live = state(member, 9)
        with member.manager(store, state=live, broadcast=True) as manager:
            assert manager.resume() is not None
        queue = live["own"].component["queue"]
        return member.noise.get_state().numpy().tobytes(), queue.double().mean().item()

    assert all_of(on_ranks(3, load)) == [(noise, float(n)) for n, noise in enumerate(noises)]


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_needs_no_block_is_ready_again_and_the_others_do_not_wait_for_it(
    odd: int,
) -> None:
    store = MemoryStore()

    def work(member: Member) -> tuple[bool, int]:
        live = {"model": member.model, "data": {"batches": 7}}
        with member.manager(store, state=live, broadcast=True, save_timeout_s=300) as manager:
            manager.save(1).wait()
            before = member.bits()
            live["data"]["batches"] = 0
            with torch.no_grad():
                member.model[0].weight.zero_()
            manager.load(include=["data" if member.rank == odd else "model"])
        return member.bits() == before, live["data"]["batches"]

    found = all_of(on_ranks(3, work))
    assert found == [(False, 7) if rank == odd else (True, 0) for rank in range(3)]


def two(num_ranks: int) -> tuple[MemoryStore, dict[str, bytes], str]:
    """A root with two checkpoints, the tensors of the first, and the folder of the newest."""
    store = MemoryStore()
    save_on(num_ranks, store, [1, 2])
    (bits, *_) = save_on(num_ranks, MemoryStore(), [1])
    return store, bits, max(entry.folder for entry in Catalog(store).checkpoints())


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_damage_at_the_rank_that_reads_makes_all_go_to_the_one_before(odd: int) -> None:
    store, bits, newest = two(3)
    # Not the generators, which each rank reads for itself.
    damage = Fault(kind="flip", op="read_into", key=f"{newest}/[mo]*.safetensors", times=None)
    views = [FaultyStore(store, [damage]) if rank == odd else store for rank in range(3)]
    only = [Counting(view) for view in views]

    def work(member: Member) -> tuple[int, list[str], bool]:
        with member.manager(only[member.rank], broadcast=True) as manager:
            found = manager.resume()
            assert found is not None
            return found.step, [folder for folder, _ in found.rejected], member.bits() == bits

    found = all_of(on_ranks(3, work))
    shared = [key for key, _ in only[odd].read if newest in key and "/rng" not in key]
    assert bool(shared) == (odd < 2), "there are two such blocks"
    if shared:
        assert found == [(1, [newest], True)] * 3
    else:
        assert [step for step, *_ in found] == [2] * 3


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_state_that_does_not_fit_on_one_rank_is_an_error_on_all_at_once(odd: int) -> None:
    """The others are told while they wait for its blocks."""
    store, *_ = two(3)

    def work(member: Member) -> tuple[str, bool]:
        if member.rank == odd:
            member.model[0] = nn.Linear(3, 3)
            member.optimizer = torch.optim.AdamW(member.model.parameters())
        before = member.bits()
        manager = member.manager(store, broadcast=True, save_timeout_s=300)
        with manager, pytest.raises(errors.HoldfastError) as caught:
            manager.resume()
        return str(caught.value), member.bits() == before

    for said, is_old in all_of(on_ranks(3, work)):
        assert is_old
        assert "0.weight" in said


def test_a_rank_that_cannot_read_this_time_makes_all_try_again() -> None:
    store, _, newest = two(2)
    once = Fault(
        kind="fail",
        op="read_into",
        key=f"{newest}/*.safetensors",
        times=1,
        error=errors.TransientStoreError("the network is down"),
    )

    def work(member: Member) -> tuple[int, tuple[object, ...]]:
        view = FaultyStore(store, [once]) if member.rank else store
        with member.manager(view, broadcast=True) as manager:
            found = manager.resume()
            assert found is not None
            return found.step, tuple(found.rejected)

    assert all_of(on_ranks(2, work)) == [(2, ())] * 2


@pytest.mark.parametrize(
    ("odd", "how"),
    [(1, "die"), (1, "raise"), (0, "raise"), pytest.param(0, "die", marks=pytest.mark.full)],
)
def test_a_rank_that_is_lost_while_it_sends_is_named_by_the_deadline(
    odd: int, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "GRACE_S", 0.5)
    store, *_ = two(3)
    ranks: list[Coordinator] = [*ThreadCoordinator.for_ranks(3)]
    ranks[odd] = Breaking(ranks[odd], "begin", "a transfer", how)

    def work(member: Member) -> tuple[str, bool]:
        before = member.bits()
        manager = member.manager(store, broadcast=True, save_timeout_s=1.0)
        with pytest.raises(errors.HoldfastError) as caught:
            manager.resume()
        manager.close()
        return str(caught.value), member.bits() == before

    found = on_ranks(ranks, work)
    for rank in {0, 1, 2} - {odd}:
        one = found[rank]
        assert isinstance(one, tuple), one
        assert f"rank {odd}" in one[0] or f"ranks [{odd}]" in one[0]
        assert one[1], "nothing has changed"


def test_one_rank_alone_loads_as_without() -> None:
    store, _, _ = two(2)

    def work(member: Member) -> int:
        with member.manager(store, broadcast=True) as manager:
            found = manager.resume()
            assert found is not None
            return found.step

    assert all_of(on_ranks([SingleProcess()], work)) == [2]


def test_what_needs_other_memory_is_refused() -> None:
    with pytest.raises(errors.UsageError, match="cannot be combined with memory_budget"):
        Checkpoints(MemoryStore(), broadcast=True, memory_budget="1GiB")
    store, *_ = two(2)

    def work(member: Member) -> str:
        with member.manager(store, broadcast=True) as manager:
            with pytest.raises(errors.HoldfastError) as caught:
                manager.load(in_place=True)
            return str(caught.value)

    assert all("not with broadcast=True" in said for said in all_of(on_ranks(2, work)))


def test_ranks_that_cannot_send_to_each_other_are_refused() -> None:
    class Mute(ThreadCoordinator):
        exchange = Coordinator.exchange

    (member,) = [Member(Mute.for_ranks(2)[0])]
    with pytest.raises(errors.UsageError, match="the ranks of Mute send each other no tensors"):
        member.manager(MemoryStore(), broadcast=True)
