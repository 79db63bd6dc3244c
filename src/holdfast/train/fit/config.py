"""Settings of a Trainer that its checkpoints record, to compare the lives of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from holdfast.checkpoints import Checkpoints
from holdfast.data import Loader
from holdfast.saving.settings_history import as_text
from holdfast.train.callbacks.hooks import Callback

_LEFT_OUT = frozenset({"self", "checkpoints", "stop", "log", "log_every", "progress", "device"})
_DESCRIBED = frozenset({"model", "optimizer", "scheduler", "data", "state", "callbacks"})
_POSITION = frozenset({"epoch", "batch"})


def config_of(
    given: Mapping[str, Any],
    *,
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: Any,
    schedulers: Mapping[str, Any],
) -> dict[str, str]:
    """Describe the arguments `given` to a Trainer, and what it has made of them, as text."""
    plain = given.keys() - _LEFT_OUT - _DESCRIBED
    found = {name: as_text(value) for name, value in given.items() if name in plain}
    found["every"], found["keep"] = as_text(checkpoints.every), as_text(checkpoints.keep)
    found["model"], found["optimizer"] = _class(model), _class(optimizer)
    found["model.parameters"] = str(sum(item.numel() for item in model.parameters()))
    found["scheduler"] = ", ".join(map(_class, schedulers.values())) or "None"
    found["state"] = ", ".join(sorted(given["state"] or ())) or "None"
    found["callbacks"] = ", ".join(map(_class, _own(given["callbacks"]))) or "None"
    return found | config_of_data(given["data"])


def config_of_data(data: Any) -> dict[str, str]:
    """Describe the data that is trained on, as text: the entries `data` and `data.…`."""
    return {f"data{name}": text for name, text in _of_data(data).items()}


def _own(callbacks: Any) -> list[Callback]:
    return [item for item in callbacks if isinstance(item, Callback)]


def _of_data(data: Any) -> dict[str, str]:
    found = {"": _class(data)}
    with suppress(TypeError):  # of an iterable without a length
        found[".length"] = str(len(data))
    if isinstance(data, Loader):
        state = data.state_dict()
        found |= {f".{name}": str(state[name]) for name in state if name not in _POSITION}
    return found


def _class(value: Any) -> str:
    return type(value).__qualname__
