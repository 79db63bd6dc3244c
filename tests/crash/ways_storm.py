"""SIGKILL storm over the ways to save: kill a child that saves so, look, go on. Run as a script.

    python tests/crash/ways_storm.py ROOT --way overlap|waves|links [--mutant NAME] ...

As `storm.py`, whose parts it takes, over a folder and a module with its optimizer. Each child steps
on while its save is under way. Beside what that prints it counts, as `told`, how often saves went
that way, and past the page cache. `test_storm.py` runs it.
"""

from __future__ import annotations

import functools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from storm import MUTANTS, NUM_TENSORS, Storm, arguments, clean_up, look, rage, tell, tell_event
from torch import nn

from holdfast.engine.staging.copying import Copying
from holdfast.engine.staging.waves import StagedInWaves
from holdfast.manager import CheckpointManager
from holdfast.policy.retention import Last
from holdfast.store.local import LocalStore
from holdfast.store.localblocks import LocalBlockWriter

FROZEN = 7.0
"""What is in the tensors that nobody trains."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to save, and the call that shows that a save went it."""

    shown_by: tuple[type, str]
    num_elements: int
    """Of each tensor."""
    options: dict[str, Any] = field(default_factory=dict)
    num_kept: int = 2
    num_saves: int = 2
    """Of a child."""


WAYS = {
    "overlap": Way(
        shown_by=(Copying, "run_later"), num_elements=1 << 19, options={"overlap": True}
    ),
    # 42 MB, in waves of at most 34.
    "waves": Way(
        shown_by=(StagedInWaves, "content"),
        num_elements=1 << 20,
        options={"memory_budget": "32MiB"},
    ),
    # Where few are kept nothing is shared, nor what is smaller than 1 MiB.
    "links": Way(shown_by=(LocalStore, "link"), num_elements=1 << 18, num_kept=4, num_saves=4),
}


def new_state(num_elements: int) -> dict[str, Any]:
    """A state whose trained tensors all hold the step at which it was saved."""
    model = nn.ParameterList(torch.zeros(num_elements) for _ in range(NUM_TENSORS))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "base": {"tensors": [torch.full((num_elements,), FROZEN) for _ in range(2)]},
        "tree": {"step": 0},
    }


def advance(state: dict[str, Any], step: int) -> None:
    """Make it the state of that step, by a step of the optimizer, as training does."""
    for parameter in state["model"]:
        parameter.grad = parameter.detach() - step
    state["optimizer"].step()
    state["tree"]["step"] = step


def step_of(state: dict[str, Any]) -> int:
    """The step of a loaded state; fails when parts are of different steps."""
    step = state["tree"]["step"]
    expected = [(parameter.detach(), step) for parameter in state["model"]]
    if step:
        expected += [(tensor, FROZEN) for tensor in state["base"]["tensors"]]
    for number, (tensor, value) in enumerate(expected):
        low, high = float(tensor.min()), float(tensor.max())
        if not low == high == value:
            raise AssertionError(f"torn: step {step}, tensor {number} from {low} to {high}")
    return int(step)


def show(told: int, shown_by: tuple[type, str], word: str) -> None:
    """Have each call that comes to anything be told."""
    kind, name = shown_by
    real = getattr(kind, name)

    def shown(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        if found is None or found:
            tell(told, word)
        return found

    setattr(kind, name, shown)


class WaysStorm(Storm):
    """As `Storm`, over runs that save one way."""

    def __init__(self, root: str, way: str, rng: random.Random) -> None:
        self.name, self.way = way, WAYS[way]
        super().__init__(root, self.way.num_elements, rng)
        self.told = Counter[str]()

    def live(self, told: int) -> None:
        """Resume, then save, and step on before that is done; tells each acknowledged step."""
        show(told, self.way.shown_by, self.name)
        show(told, (LocalBlockWriter, "_write_direct"), "direct")
        state, kept = new_state(self.num_elements), Last(self.way.num_kept)
        sinks = (functools.partial(tell_event, told),)
        with CheckpointManager(
            self.root, state, keep=kept, sinks=sinks, preflight=self.preflight, **self.way.options
        ) as manager:
            manager.resume()
            first = step_of(state) + 1
            advance(state, first)
            for step in range(first, first + self.way.num_saves):
                pending = manager.save(step)
                advance(state, step + 1)
                tell(told, "saved", pending.wait().step)

    def heard(self, word: str, step: int) -> None:
        """What a child told."""
        self.told[word] += 1
        super().heard(word, step)

    def check(self) -> None:
        """Count it when a promise is broken."""
        state = new_state(self.num_elements)
        self.judge(lambda: look(self.root, state, self.acknowledged, step_of=step_of))

    def clean_up(self) -> None:
        """Raises unless a life to its end leaves what it should."""
        clean_up(self.root, most=self.way.num_kept + 1)

    def counts(self) -> dict[str, Any]:
        """What is told at the end."""
        return {**super().counts(), "told": self.told}


def main() -> int:
    """A storm over a run that saves one way."""
    mutants: dict[str, Callable[[], None]] = {"manifest_first": MUTANTS["manifest_first"]}
    parser = arguments(mutants)
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    options = parser.parse_args()
    storm = WaysStorm(os.path.abspath(options.root), options.way, random.Random(options.seed))
    return rage(storm, options, mutants)


if __name__ == "__main__":
    sys.exit(main())
