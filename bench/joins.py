"""What it takes the leader to join the trees of ranks that hold different parts of a model."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from holdfast.state.capture.byrank import join_by_name
from holdfast.state.capture.capture import capture

_ROUNDS = 5
_CASES = ((4, 250), (16, 250), (16, 2500))
"""Number of stages, and of parameters on each."""
_KINDS = {"model": "module", "optimizer": "optimizer"}


def stage_trees(rank: int, num_parameters: int) -> dict[str, bytes]:
    """Capture the trees of a stage whose parameters have names of their own."""
    names = [f"layers_{rank}_{number}" for number in range(num_parameters)]
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1)) for name in names})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones(1)
    optimizer.step()
    components = capture({"model": model, "optimizer": optimizer}).components
    return {name: components[name].tree for name in _KINDS}


def main() -> None:
    """Print a line for each case and component."""
    print("stages  parameters  component  KB a stage  ms of a core")
    for num_stages, num_parameters in _CASES:
        stages = [stage_trees(rank, num_parameters) for rank in range(num_stages)]
        for component, kind in _KINDS.items():
            trees = [stage[component] for stage in stages]
            times = []
            for _ in range(_ROUNDS):
                began = time.process_time()
                join_by_name(component, kind, trees)
                times.append(time.process_time() - began)
            took_ms, nbytes = 1000 * statistics.median(times), len(trees[0])
            shown = f"{num_stages:6}  {num_parameters:10}  {component:9}"
            print(f"{shown}  {nbytes / 1000:10.0f}  {took_ms:.0f}")


if __name__ == "__main__":
    main()
