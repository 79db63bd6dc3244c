"""Checks for a training state that lacks the position in the data, or the optimizer.

Knows no loader but torch's own; `holdfast.data` is above this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

_NAMES = ("data", "loader", "sampler")
"""Parts of component names that mark the user's own way to keep a position."""

OUTSIDE = (
    "no component of the state is a position in the data: a resumed run gets its data from the "
    "beginning again, unless the loop finds its place by itself. Make the data a "
    "holdfast.data.Loader and put it into the state; where the loop does find its place, say so "
    'with a component called "data", such as {"data": {"batches": 0}} (docs/data.md)'
)


NO_OPTIMIZER = (
    "the state has a model that is trained, and no optimizer: a resumed run begins with a new one, "
    "without its momenta and step counts. Put it into the state, as in "
    '{"model": model, "optimizer": optimizer}'
)


def lacks_optimizer(state: Mapping[str, Any]) -> bool:
    """Whether a state is that of a training run, and nothing in it looks like an optimizer.

    A scheduler, a scaler or a position in data shows that it is a training. An object of another
    class that has `state_dict` may hold an optimizer.
    """
    others = [value for value in state.values() if not isinstance(value, nn.Module)]
    stateful = [value for value in others if hasattr(value, "state_dict")]
    models = (value for value in state.values() if isinstance(value, nn.Module))
    return (
        any(parameter.requires_grad for model in models for parameter in model.parameters())
        and bool(stateful)
        and all(isinstance(v, LRScheduler | GradScaler) or _is_position(v) for v in stateful)
    )


def _is_position(value: Any) -> bool:
    return hasattr(value, "__iter__") and hasattr(value, "state_dict")


def is_outside(state: Mapping[str, Any]) -> bool:
    """Whether a state is of a training run, and nothing in it looks like a position in data.

    An iterable with `state_dict` counts as a position, as does any component whose name says so.
    """
    if not any(isinstance(value, Optimizer) for value in state.values()):
        return False
    return not any(
        any(word in name for word in _NAMES) or _is_position(value)
        for name, value in state.items()
        if not isinstance(value, nn.Module)
    )


def in_place_of(loader: DataLoader[Any]) -> str:
    """Explain why torch's own loader is no component, and what to write instead."""
    why = "a torch DataLoader has no position, so a resumed run gets its data from the beginning"
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return (
            f"{why}: for an IterableDataset or a batch sampler, put an object into the state that "
            "keeps the position, with state_dict and load_state_dict; holdfast.data.Loader does so "
            "for map-style datasets (docs/data.md)"
        )
    arguments = [f"batch_size={loader.batch_size}"]
    arguments.append(f"shuffle={not isinstance(loader.sampler, SequentialSampler)}")
    if loader.drop_last:
        arguments.append("drop_last=True")
    if loader.num_workers:
        arguments.append(f"num_workers={loader.num_workers}")
    if loader.collate_fn is not default_collate:
        arguments.append("collate_fn=…")
    return (
        f"{why}: write data = holdfast.data.Loader(dataset, {', '.join(arguments)}), iterate over "
        "that, and put it into the state (docs/data.md)"
    )
