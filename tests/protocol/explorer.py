"""Every interleaving, breadth first.

A state is a world and, for each actor, the node of its program at which it stands. Both are
numbered, so that a state is one integer; what an operation does in a world is worked out once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .actors import Stage
from .invariants import violations
from .operations import Operation, committed
from .rules import Rules
from .world import ABORTED, ABSENT, ATTEMPTS, World, first_world

_NODE_BITS = 12
_END = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Some actors that meet. `mortal`: names of actors whose death others can find out about."""

    name: str
    actors: tuple[tuple[str, Stage], ...]
    mortal: tuple[str, ...] = ()
    is_remote: bool = False
    """On a remote store a put may outlive the process that sent it."""


class Violation(NamedTuple):
    """A broken invariant and the shortest way to it."""

    invariant: str
    trace: tuple[str, ...]


class Exploration(NamedTuple):
    """What an exploration has seen. It ends early at the first violation."""

    num_states: int
    num_worlds: int
    violation: Violation | None


class Program:
    """The nodes of one actor's program, found as they are reached. Node 0 is the end."""

    def __init__(self, first: Stage) -> None:
        self.operations: list[Operation | None] = [None]
        self._histories: list[tuple[Stage, tuple[Any, ...]] | None] = [None]
        self._numbers: dict[tuple[Stage, tuple[Any, ...]], int] = {}
        self.first = self._node(first, ())

    def after(self, node: int, reply: Any) -> int:
        """The node to which a reply leads."""
        history = self._histories[node]
        assert history is not None
        stage, replies = history
        return self._node(stage, (*replies, reply))

    def _node(self, stage: Stage, replies: tuple[Any, ...]) -> int:
        number = self._numbers.get((stage, replies))
        if number is None:
            number = self._numbers[stage, replies] = self._enter(stage, replies)
        return number

    def _enter(self, stage: Stage, replies: tuple[Any, ...]) -> int:
        steps = stage.function(*stage.arguments)
        try:
            operation = next(steps)
            for reply in replies:
                operation = steps.send(reply)
        except StopIteration as end:
            return _END if end.value is None else self._node(end.value, ())
        self.operations.append(operation)
        assert len(self.operations) <= 1 << _NODE_BITS, "more nodes than a state has room for"
        self._histories.append((stage, replies))
        return len(self.operations) - 1


class _Explorer:
    def __init__(self, configuration: Configuration, rules: Rules, is_strict: bool) -> None:
        self.configuration = configuration
        self.is_strict = is_strict
        self.rules = rules
        self.names = [name for name, _ in configuration.actors]
        self.programs = [Program(stage) for _, stage in configuration.actors]
        self.shift = _NODE_BITS * len(self.programs)
        self.worlds: list[World] = []
        self.numbers: dict[World, int] = {}
        self.broken: dict[int, str] = {}
        self.moves: list[dict[int, tuple[tuple[int, int], ...]]] = [{} for _ in self.programs]
        self.own_moves: dict[int, tuple[int, ...]] = {}

    def number(self, world: World) -> int:
        """The number of a world; a new one is checked."""
        number = self.numbers.get(world)
        if number is None:
            number = self.numbers[world] = len(self.worlds)
            self.worlds.append(world)
            found = violations(world, self.rules, is_strict=self.is_strict)
            if found:
                self.broken[number] = found[0]
        return number

    def first_state(self) -> int:
        state = self.number(first_world()) << self.shift
        for place, program in enumerate(self.programs):
            state |= program.first << (_NODE_BITS * place)
        return state

    def actor_moves(self, place: int, node: int, world: int) -> tuple[tuple[int, int], ...]:
        """(next node, next world) for each outcome of an actor's next operation."""
        program = self.programs[place]
        operation = program.operations[node]
        assert operation is not None
        found = [
            (program.after(node, reply), self.number(after))
            for reply, after in operation.run(self.worlds[world])
        ]
        if self.names[place] in self.configuration.mortal:
            found.append((_END, self.number(self._without(self.names[place], world))))
        return tuple(dict.fromkeys(found))

    def _without(self, process: str, number: int) -> World:
        world = self.worlds[number]
        if not self.configuration.is_remote:
            for attempt in ATTEMPTS:
                epoch = world.folder(attempt).epoch
                if epoch and world.claims[epoch - 1].process == process:
                    world = world.having(attempt, in_flight=False)
        return world._replace(dead=world.dead | {process})

    def landings(self, number: int) -> tuple[int, ...]:
        """The worlds in which one more put that was in flight has arrived, or got lost."""
        world = self.worlds[number]
        found = []
        for attempt in ATTEMPTS:
            if world.folder(attempt).in_flight:
                arrived = world.having(attempt, in_flight=False)
                if world.folder(attempt).register == ABSENT:
                    found.append(self.number(committed(arrived, attempt)))
                else:
                    found.append(self.number(arrived))
            found += map(self.number, _followers_landings(world, attempt))
        return tuple(found)

    def successors(self, state: int) -> Iterator[int]:
        shift = self.shift
        world = state >> shift
        if self.worlds[world].is_cut:
            return
        nodes = state & ((1 << shift) - 1)
        for place, moves in enumerate(self.moves):
            low = _NODE_BITS * place
            node = (nodes >> low) & ((1 << _NODE_BITS) - 1)
            if node == _END:
                continue
            key = world << _NODE_BITS | node
            found = moves.get(key)
            if found is None:
                found = moves[key] = self.actor_moves(place, node, world)
            others = nodes & ~(((1 << _NODE_BITS) - 1) << low)
            for next_node, next_world in found:
                yield next_world << shift | others | next_node << low
        landed = self.own_moves.get(world)
        if landed is None:
            landed = self.own_moves[world] = self.landings(world)
        for next_world in landed:
            yield next_world << shift | nodes

    def trace(self, state: int, parents: dict[int, int]) -> tuple[str, ...]:
        """The steps from the first state to this one."""
        lines: list[str] = []
        while (before := parents[state]) >= 0:
            lines.append(self._describe(before, state))
            state = before
        return tuple(reversed(lines))

    def _describe(self, before: int, after: int) -> str:
        for place, name in enumerate(self.names):
            low = _NODE_BITS * place
            mask = (1 << _NODE_BITS) - 1
            node, later = before >> low & mask, after >> low & mask
            if node != later:
                operation = self.programs[place].operations[node]
                died = name in self.worlds[after >> self.shift].dead
                return f"{name}: {'dies before ' if died else ''}{_show(operation)}"
        return "a put that was in flight arrives"


def _followers_landings(world: World, attempt: str) -> Iterator[World]:
    """The worlds in which one more late write of a follower has arrived, or found no folder."""
    folder = world.folder(attempt)
    for follower in sorted(folder.hanging):
        arrived = world.having(attempt, hanging=folder.hanging - {follower})
        if folder.takes_files:
            arrived = arrived.having(attempt, shares=folder.shares | {follower})
        yield arrived
    if folder.marker_in_flight:
        arrived = world.having(attempt, marker_in_flight=False)
        if folder.register == ABSENT and folder.takes_files:
            arrived = arrived.having(attempt, register=ABORTED, finished=True)
        yield arrived


def _show(operation: object) -> str:
    fields = [str(value) for value in operation if not isinstance(value, Rules)]  # type: ignore[attr-defined]
    return f"{type(operation).__name__}({', '.join(fields)})"


def explore(
    configuration: Configuration,
    rules: Rules,
    *,
    is_strict: bool = False,
    max_states: int = 10_000_000,
) -> Exploration:
    """Visit every state; stop at the first that breaks an invariant.

    `is_strict` takes back the excuse that V4 and V6 have (see `invariants`).

    Raises:
        RuntimeError: there are more than `max_states`.
    """
    explorer = _Explorer(configuration, rules, is_strict)
    first = explorer.first_state()
    parents = {first: -1}
    waiting = deque([first])
    broken = explorer.broken
    while waiting:
        state = waiting.popleft()
        for following in explorer.successors(state):
            if following in parents:
                continue
            parents[following] = state
            if broken and following >> explorer.shift in broken:
                trace = explorer.trace(following, parents)
                found = Violation(broken[following >> explorer.shift], trace)
                return Exploration(len(parents), len(explorer.worlds), found)
            waiting.append(following)
        if len(parents) > max_states:
            raise RuntimeError(f"{configuration.name}: more than {max_states} states")
    return Exploration(len(parents), len(explorer.worlds), None)
