"""Attributes of the user's objects, deques and arrays as state: exact, in place, all or none."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Attributes, CheckpointManager, PerRank
from holdfast.errors import MismatchError, UnsupportedState, UsageError
from holdfast.testing.resume import leaf_digests


class Agent:
    """A user's object without `state_dict`."""

    def __init__(self) -> None:
        self.episode, self.best = 0, -1.0
        self.recent: deque[float] = deque(maxlen=3)
        self.seen = np.zeros((4, 2), np.float32)
        self.weights = [torch.zeros(2), np.zeros(2)]

    def play(self) -> None:
        self.episode += 1
        self.best = max(self.best, 1 / self.episode)
        self.recent.append(self.best)
        self.seen[self.episode % 4] = self.episode
        self.weights[0] += 1
        self.weights[1] -= 1


NAMES = ("episode", "best", "recent", "seen", "weights")


def saved(root: Path, state: dict[str, Any], step: int = 1) -> None:
    with CheckpointManager(root, state) as manager:
        manager.save(step, wait=True)


def played(root: Path) -> Agent:
    """An agent of five episodes, which is saved."""
    agent = Agent()
    for _ in range(5):
        agent.play()
    saved(root, {"agent": Attributes(agent, *NAMES)})
    return agent


def test_attributes_come_back_exactly_and_containers_in_place(tmp_path: Path) -> None:
    before, after = played(tmp_path), Agent()
    homes = [after.recent, after.seen, after.weights, *after.weights]
    with CheckpointManager(tmp_path, {"agent": Attributes(after, *NAMES)}) as manager:
        manager.resume(required=True)
    assert (after.episode, after.best, after.recent) == (before.episode, before.best, before.recent)
    assert np.array_equal(after.seen, before.seen)
    assert torch.equal(after.weights[0], before.weights[0])
    assert np.array_equal(after.weights[1], before.weights[1])
    kept = [after.recent, after.seen, after.weights, *after.weights]
    assert all(one is other for one, other in zip(homes, kept, strict=True))
    tree = holdfast.load_file(tmp_path).tree("agent")
    assert tree["episode"] == 5
    assert tree["recent"] == before.recent
    assert tree["recent"].maxlen == 3


def test_a_load_that_one_attribute_refuses_changes_none(tmp_path: Path) -> None:
    class Strict(Agent):
        @property
        def best(self) -> float:
            return self._best

        @best.setter
        def best(self, value: float) -> None:
            if value > 0.5:
                raise ValueError("too good")
            self._best = value

    played(tmp_path)
    agent = Strict()
    state = {"agent": Attributes(agent, *NAMES)}
    with (
        CheckpointManager(tmp_path, state) as manager,
        pytest.raises(MismatchError, match=r"agent\.best.*too good"),
    ):
        manager.resume()
    assert (agent.episode, agent.best, len(agent.recent), agent.seen.sum()) == (0, -1.0, 0, 0)


def test_names_that_only_one_side_has_are_an_error_and_may_be_allowed(tmp_path: Path) -> None:
    played(tmp_path)
    agent = Agent()
    agent.level = 7  # type: ignore[attr-defined]
    state = {"agent": Attributes(agent, "episode", "level")}
    with CheckpointManager(tmp_path, state) as manager:
        with pytest.raises(MismatchError) as caught:
            manager.load()
        assert caught.value.missing == ["agent.level"]
        assert "agent.best" in caught.value.unexpected
        manager.load(strict=False)
        assert (agent.episode, agent.level) == (5, 7)  # type: ignore[attr-defined]
        agent.episode = 0
        manager.load(skip=["agent.level", "agent.episode"], strict=False)
        assert agent.episode == 0


def test_parts_can_be_selected_and_edited(tmp_path: Path) -> None:
    before, after = played(tmp_path), Agent()

    def edit(view: Any) -> None:
        view["agent"]["episode"] = 77
        view["agent"]["seen"] = np.ones((4, 2), np.float32)

    with CheckpointManager(tmp_path, {"agent": Attributes(after, *NAMES)}) as manager:
        manager.load(include=["agent.recent"])
        assert (after.recent, after.episode) == (before.recent, 0)
        manager.load(skip=["agent.weights"], edit=edit)
    assert (after.episode, after.seen.min(), after.recent.maxlen) == (77, 1, 3)
    assert after.weights[0].sum() == 0
    assert leaf_digests({"a": Attributes(before, *NAMES)}) != leaf_digests(
        {"a": Attributes(after, *NAMES)}
    )


def test_names_are_checked_at_once_and_deleted_ones_at_the_save(tmp_path: Path) -> None:
    class ReadOnly(Agent):
        @property
        def mean(self) -> float:
            return 0.0

    agent = ReadOnly()
    with pytest.raises(UsageError, match=r"lost.*set it before.*mean has no setter"):
        Attributes(agent, "lost", "mean")
    with pytest.raises(UsageError, match="at least one"):
        Attributes(agent)
    with pytest.raises(UsageError, match="functions"):
        Attributes.of(agent.play, 3)  # type: ignore[arg-type]
    with CheckpointManager(tmp_path, {"agent": Attributes(agent, "best")}) as manager:
        del agent.best
        with pytest.raises(UnsupportedState, match=r"agent\.best"):
            manager.save(1)


def test_a_frozen_dataclass_is_refused_before_a_save() -> None:
    @dataclass(frozen=True)
    class Progress:
        episode: int = 0

    with pytest.raises(UsageError, match="frozen"):
        Attributes(Progress(), "episode")


def test_a_getter_and_a_setter_are_a_component(tmp_path: Path) -> None:
    class Buffer:
        def __init__(self) -> None:
            self.rows: list[tuple[int, float]] = []

    def component(buffer: Buffer) -> Attributes:
        def restore(rows: list[list[float]]) -> None:
            buffer.rows = [(int(key), value) for key, value in rows]

        return Attributes.of(lambda: [list(row) for row in buffer.rows], restore)

    one, other = Buffer(), Buffer()
    one.rows = [(1, 0.5), (2, 0.25)]
    saved(tmp_path, {"buffer": component(one)})
    with CheckpointManager(tmp_path, {"buffer": component(other)}) as manager:
        manager.resume(required=True)
    assert other.rows == one.rows
    wrong = Attributes.of(lambda: 0, lambda rows: float(rows))
    with (
        CheckpointManager(tmp_path, {"buffer": wrong}) as manager,
        pytest.raises(MismatchError, match=r"buffer\.value"),
    ):
        manager.load()


def test_a_deque_keeps_its_maxlen_and_another_one_is_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = deque(([np.ones(2), 1] for _ in range(4)), maxlen=4)
    saved(tmp_path, {"queue": queue, "more": {"none": deque([1])}})

    def resumed(queue: deque[Any]) -> Any:
        state: dict[str, Any] = {"queue": queue, "more": {"none": None}}
        with CheckpointManager(tmp_path, state) as manager:
            manager.load()
        return state["more"]["none"]

    longer: deque[Any] = deque(maxlen=9)
    with caplog.at_level(logging.INFO):
        assert resumed(longer) == deque([1])
    assert (len(longer), longer.maxlen, longer[3][1]) == (4, 9, 1)
    assert "maxlen" in caplog.text
    shorter: deque[Any] = deque([0], maxlen=3)
    with pytest.raises(MismatchError, match="maxlen=4"):
        resumed(shorter)
    assert shorter == deque([0])


def test_ranks_of_a_run_may_each_have_their_own_attributes(tmp_path: Path) -> None:
    agent = played(tmp_path / "a")
    saved(tmp_path / "b", {"agent": PerRank(Attributes(agent, *NAMES))})
    other = Agent()
    with CheckpointManager(
        tmp_path / "b", {"agent": PerRank(Attributes(other, *NAMES))}
    ) as manager:
        manager.resume(required=True)
    assert other.recent == agent.recent
