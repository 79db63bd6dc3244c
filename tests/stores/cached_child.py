"""A rank for tests: `python cached_child.py URL FOLDER`; loads weights through copies in FOLDER.

It says "ready", waits for a line, and says a digest of what was loaded.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn

from holdfast import CachedStore, load_weights


def new_model(seed: int) -> nn.Module:
    """A model of seven pieces."""
    torch.manual_seed(seed)
    return nn.ModuleList([nn.Linear(1024, 1024) for _ in range(12)])


def digest(model: nn.Module) -> str:
    """Of its bits."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def main(url: str, folder: str) -> None:
    """Load, and say what."""
    model = new_model(1)
    print("ready", flush=True)
    sys.stdin.readline()
    load_weights(CachedStore(url, folder, max_nbytes=1 << 30), model)
    print(digest(model), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
