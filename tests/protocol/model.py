"""Run the model: `python -m tests.protocol.model` prints what each configuration covers."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from .configurations import CONFIGURATIONS, LONG_CONFIGURATIONS
from .explorer import explore
from .rules import Rules


def main(arguments: list[str]) -> None:
    """Explore every configuration, with the named rules left out; `--long` for the large ones."""
    left_out = [name for name in arguments if not name.startswith("--")]
    rules = replace(Rules(), **dict.fromkeys(left_out, False))
    makers = CONFIGURATIONS
    if "--long" in arguments:
        makers += LONG_CONFIGURATIONS
    for make in makers:
        configuration = make(rules)
        began = time.perf_counter()
        found = explore(configuration, rules)
        seconds = time.perf_counter() - began
        sizes = f"{found.num_states:10,} states {found.num_worlds:8,} worlds"
        print(f"{configuration.name:22} {sizes} {seconds:6.1f} s", flush=True)
        if found.violation:
            print("   ", found.violation.invariant)
            for number, line in enumerate(found.violation.trace, 1):
                print(f"      {number:2} {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
