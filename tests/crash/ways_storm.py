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
from dataclasses import replace
from typing import Any

from storm import MUTANTS, Storm, arguments, clean_up, look, rage, tell, tell_event

from ways import WAYS, save_and_go_on

LIVES = {
    "overlap": replace(WAYS["overlap"], num_elements=3 << 19, num_kept=2),
    "waves": replace(WAYS["waves"], num_kept=2),
    "links": replace(WAYS["links"], num_elements=3 << 18, num_kept=4),
}


class WaysStorm(Storm):
    """As `Storm`, over runs that save one way."""

    def __init__(self, root: str, way: str, rng: random.Random) -> None:
        self.name, self.way = way, LIVES[way]
        super().__init__(root, self.way.num_elements, rng)
        self.told = Counter[str]()

    def live(self, told: int) -> None:
        """Resume, then save, and step on before that is done; tells each acknowledged step."""
        for name, way in ((self.name, self.way), ("direct", WAYS["direct"])):
            way.have_noted(setattr, functools.partial(tell, told, name))
        state, sinks = self.way.new_state(), (functools.partial(tell_event, told),)
        with self.way.manager(self.root, state, sinks=sinks, preflight=self.preflight) as manager:
            manager.resume()
            first = state.step() + 1
            for step in range(first, first + self.way.num_before + 2):
                tell(told, "saved", save_and_go_on(manager, state, step).step)

    def heard(self, word: str, step: int) -> None:
        """What a child told."""
        self.told[word] += 1
        super().heard(word, step)

    def check(self) -> None:
        """Count it when a promise is broken."""
        state = self.way.new_state()
        self.judge(
            lambda: look(
                self.root, state.components, self.acknowledged, step_of=lambda _: state.step()
            )
        )

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
    parser.add_argument("--way", choices=sorted(LIVES), required=True)
    options = parser.parse_args()
    storm = WaysStorm(os.path.abspath(options.root), options.way, random.Random(options.seed))
    return rage(storm, options, mutants)


if __name__ == "__main__":
    sys.exit(main())
