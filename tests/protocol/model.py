"""Run the model: `python -m tests.protocol.model` prints what each configuration covers."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from .configurations import CONFIGURATIONS
from .explorer import explore
from .rules import Rules


def main(left_out: list[str]) -> None:
    """Explore every configuration, with the named rules left out."""
    rules = replace(Rules(), **dict.fromkeys(left_out, False))
    for make in CONFIGURATIONS:
        configuration = make(rules)
        began = time.perf_counter()
        found = explore(configuration, rules)
        seconds = time.perf_counter() - began
        print(f"{configuration.name:22} {found.num_states:9,} states {found.num_worlds:7,} worlds {seconds:6.1f} s")
        if found.violation:
            print("   ", found.violation.invariant)
            for number, line in enumerate(found.violation.trace, 1):
                print(f"      {number:2} {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
