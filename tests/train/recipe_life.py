"""One life of a recipe in a process of its own: `python recipe_life.py RECIPE ROOT RESULT`.

Prints a line after each update of an optimizer, and writes the tensors of the run's end.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from train.test_recipes import end_of, makers

GAN = Path(__file__).resolve().parents[2] / "examples" / "gan.py"
GOAL = "48step"
"""Of all recipes but the GAN, whose example says how long it trains."""


def live(recipe: str, root: Path) -> list[torch.Tensor]:
    """Train to the end; a run that was killed goes on."""
    if recipe == "gan":
        runpy.run_path(str(GAN))["train"](root, [])
        return [*torch.load(root / "trained.pt").values()]
    trainer = makers()[recipe](root)
    more: dict[str, Any] = {}
    if recipe == "trial":
        base = root.parent / "base"
        makers()["trial"](base).fit("8step")
        more = {"start_from": base, "override": ["lr"]}
    trainer.fit(GOAL, **more)
    return end_of(trainer)


if __name__ == "__main__":
    register_optimizer_step_post_hook(lambda *_: print("updated", flush=True))
    torch.save(live(sys.argv[1], Path(sys.argv[2])), sys.argv[3])
