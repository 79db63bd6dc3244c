"""Snapshot of the state between two steps, so that an interrupted step can be undone.

Work that is interrupted (a fetch, a validation, a step that failed before its update) leaves
traces: data and generators have advanced, callbacks have counted, buffers were updated.
Restoring the snapshot makes the state that of the last step again, so that it can be saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.data import randomness
from holdfast.state.apply import prepare
from holdfast.state.capture import capture


class Boundary:
    """Snapshot that `put_back` restores, without parameters and optimizers."""

    def __init__(
        self,
        *,
        data: Any = None,
        components: Mapping[str, Any] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        """Copy the position of `data`, all of the small `components` and with them the global
        generators, and the buffers of `modules`."""
        self._depth, self._num_threads = randomness.depth(), torch.get_num_threads()
        self._data = data
        self._position = None if data is None else data.state_dict()
        # A capture of any component includes the generators.
        self._live = None if components is None else components or {"nothing": {}}
        captured = {} if self._live is None else capture(self._live).components
        self._stored = {name: part.stored for name, part in captured.items()}
        self._tensors = {
            name: {key: tensor.to("cpu", copy=True) for key, tensor in part.tensors.items()}
            for name, part in captured.items()
        }
        self._buffers = [
            (buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the snapshot."""
        randomness.end_blocks(self._depth)
        if torch.get_num_threads() != self._num_threads:  # a fetch runs with one
            torch.set_num_threads(self._num_threads)
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        if self._data is not None:
            self._data.load_state_dict(self._position)
        if self._live is not None:
            ready = prepare(self._live, self._stored, where="the state before the step")
            ready.apply(self._tensors)


def small(state: Mapping[str, Any], *without: str) -> dict[str, Any]:
    """Select the components that are neither modules nor optimizers, such as callbacks."""
    large = (nn.Module, torch.optim.Optimizer)
    return {
        name: value
        for name, value in state.items()
        if name not in without and not isinstance(value, large)
    }
