"""One life of a training with a feature: `python feature_life.py FEATURE ROOT RESULT`.

Prints a line after each update of an optimizer, and writes the digests of the run's end.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.data.randomness import seed_generators
from holdfast.testing.resume import leaf_digests
from train.test_resume_features import made

GOAL = "60step"


def live(feature: str, root: Path) -> dict[str, str]:
    """Train to the end; a run that was killed goes on."""
    seed_generators(0)
    trainer = made(feature, root)
    trainer.fit(GOAL)
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    return leaf_digests({**trainer.state, "generators": generators})


if __name__ == "__main__":
    register_optimizer_step_post_hook(lambda *_: print("updated", flush=True))
    Path(sys.argv[3]).write_text(json.dumps(live(sys.argv[1], Path(sys.argv[2]))), "utf-8")
