"""Ranks that are threads of one process, each with a state, a manager and perhaps a fault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from typing_extensions import override

from holdfast.errors import Disconnected
from holdfast.manager import CheckpointManager
from holdfast.ranks.coordinator import (
    Collected,
    Coordinator,
    Exchange,
    RankFailure,
    RankTransfer,
    Watch,
)
from holdfast.testing.faulty import Stopped
from holdfast.testing.ranks import ThreadCoordinator

T = TypeVar("T")
JOIN_S = 90.0


class Member:
    """One rank: a model, an optimizer and a generator, all without torch's global generator."""

    def __init__(self, coordinator: Coordinator, *, seed: int = 0, width: int = 16) -> None:
        self.coordinator = coordinator
        self.rank = coordinator.rank
        self.model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 4))
        self.noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=self.noise))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self) -> None:
        """One step, the same on all ranks that stand at the same bits."""
        self.model(torch.ones(2, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def manager(self, root: Any, **options: Any) -> CheckpointManager:
        given = {"save_timeout_s": 30.0, "preflight": False, "sinks": (), **options}
        state = given.pop("state", self.state)
        return CheckpointManager(root, state, ranks=self.coordinator, **given)

    def bits(self) -> dict[str, bytes]:
        """Every tensor as bytes, by name."""
        tensors = dict(self.model.state_dict())
        for number, slots in enumerate(self.optimizer.state_dict()["state"].values()):
            tensors |= {f"{number}.{name}": value for name, value in slots.items()}
        return {name: value.numpy().tobytes() for name, value in tensors.items()}


def on_ranks(
    ranks: int | Sequence[Coordinator], work: Callable[[Member], T], *, timeout_s: float = JOIN_S
) -> list[T | BaseException]:
    """Call `work` in a thread for each rank; returns what it returned or raised, by rank."""
    if isinstance(ranks, int):
        ranks = ThreadCoordinator.for_ranks(ranks)
    results: list[T | BaseException] = [TimeoutError("the rank is not done") for _ in ranks]

    def run(coordinator: Coordinator) -> None:
        try:
            results[coordinator.rank] = work(Member(coordinator))
        except BaseException as error:
            results[coordinator.rank] = error

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return results


def all_of(results: Sequence[T | BaseException]) -> list[T]:
    """Return the results if no rank raised, else raise what the first raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def save_on(
    ranks: int | Sequence[Coordinator], root: Any, steps: Sequence[int] = (1,), **options: Any
) -> list[dict[str, bytes]]:
    """Train and save at each step on all ranks; returns the bits of each rank after the last."""

    def work(member: Member) -> dict[str, bytes]:
        with member.manager(root, **options) as manager:
            for step in steps:
                member.train()
                manager.save(step).wait()
        return member.bits()

    return all_of(on_ranks(ranks, work))


Verb = Literal["post", "collect", "announce", "hear", "begin"]


class Breaking(Coordinator):
    """Coordinator of a rank to which something happens at a verb of a message.

    Args:
        inner: carries the other messages.
        verb: at this verb...
        part: ...of the message whose tag ends so,
        how: `raise`: an error; `die`: nothing of this rank is heard any more; `hang`: as stopped,
            until `release` is set.
    """

    def __init__(
        self,
        inner: Coordinator,
        verb: Verb,
        part: str,
        how: Literal["raise", "die", "hang"],
    ) -> None:
        super().__init__(inner.rank, inner.world_size)
        self.inner, self._verb, self._part, self._how = inner, verb, part, how
        self.reached, self.release = threading.Event(), threading.Event()
        self.died = threading.Event()

    @override
    def number(self) -> int:
        return self.inner.number()

    def _meet(self, verb: Verb, tag: str) -> None:
        if self.died.is_set():
            raise Stopped(f"rank {self.rank} is dead")
        if verb != self._verb or not tag.endswith(self._part) or self.reached.is_set():
            return
        self.reached.set()
        if self._how == "raise":
            raise Disconnected(f"injected at {verb} of {tag}")
        if self._how == "die":
            self.died.set()
            raise Stopped(f"rank {self.rank} dies at {verb} of {tag}")
        self.release.wait(JOIN_S)

    @override
    def post(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self._meet("post", tag)
        self.inner.post(tag, data, timeout_s=timeout_s)

    @override
    def fail(self, tag: str, failure: RankFailure, *, timeout_s: float) -> None:
        if not self.died.is_set():
            self.inner.fail(tag, failure, timeout_s=timeout_s)

    @override
    def collect(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> Collected:
        self._meet("collect", tag)
        return self.inner.collect(tag, timeout_s=timeout_s, watch=watch)

    @override
    def announce(self, tag: str, data: bytes, *, timeout_s: float) -> None:
        self._meet("announce", tag)
        self.inner.announce(tag, data, timeout_s=timeout_s)

    @override
    def announce_each(self, tag: str, messages: Sequence[bytes], *, timeout_s: float) -> None:
        self._meet("announce", tag)
        self.inner.announce_each(tag, messages, timeout_s=timeout_s)

    @override
    def hear(self, tag: str, *, timeout_s: float, watch: Watch | None = None) -> bytes:
        self._meet("hear", tag)
        return self.inner.hear(tag, timeout_s=timeout_s, watch=watch)

    @override
    def exchange(self, *, timeout_s: float) -> Exchange:
        return BreakingExchange(self.inner.exchange(timeout_s=timeout_s), self._meet)


class BreakingExchange(Exchange):
    """Exchange of a `Breaking` rank, to which something may happen where it begins a transfer."""

    def __init__(self, inner: Exchange, meet: Callable[[Verb, str], None]) -> None:
        self._inner, self._meet = inner, meet

    @override
    def start_exchange(
        self,
        sends: Sequence[tuple[int, memoryview]],
        receives: Sequence[tuple[int, memoryview]],
    ) -> RankTransfer:
        self._meet("begin", "a transfer")
        return self._inner.start_exchange(sends, receives)
