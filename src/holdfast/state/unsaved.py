"""Non-persistent buffers, which a checkpoint does not hold: it records some values, to compare.

A table that is computed when a model is made has garbage in it after `to_empty`, and other values
after a change of the script. Caches that training changes are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.state.components import cleaner_of, unwrap_module
from holdfast.state.leaves import PLAIN_TYPES, refusal

_NUM_VALUES = 32
_NUM_AVERAGED = 2**20
_TOLERANCE = 0.02
"""Relative difference that another device or dtype may make."""


def _summarize_buffer(tensor: Tensor) -> str | None:
    """Return sizes, some values and the mean of many as text; None if the buffer has none."""
    if type(tensor) not in PLAIN_TYPES or refusal(tensor) is not None or not tensor.numel():
        return None
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    last = len(flat) - 1
    num = min(_NUM_VALUES, len(flat))
    at = [last * i // max(num - 1, 1) for i in range(num)]
    chosen = flat[torch.tensor(at, device=flat.device)].double()
    spread = flat[:: max(1, len(flat) // _NUM_AVERAGED)]  # a mask may have a billion items
    values = torch.cat([chosen, spread.double().mean().reshape(1)]).tolist()
    return " ".join([str([*tensor.shape]).replace(" ", ""), *(f"{value:.4g}" for value in values)])


def other_size(stored: str, live: Tensor) -> str | None:
    """Return how a live buffer's size differs from the saved one's, as a cache's may; or None."""
    shown = _summarize_buffer(live) or stored
    sizes, live_sizes = (text.partition(" ")[0] for text in (stored, shown))
    return None if sizes == live_sizes else f"{live_sizes} here, {sizes} when saved"


def difference(stored: str, live: Tensor) -> str | None:
    """Return how a live buffer of the saved size differs from the saved one; None: it does not."""
    shown = _summarize_buffer(live)
    if stored == shown:
        return None
    if shown is None:
        return refusal(live)
    values, live_values = stored.split(" ")[1:], shown.split(" ")[1:]
    try:
        pairs = [(float(a), float(b)) for a, b in zip(values, live_values, strict=True)]
    except ValueError:
        return None
    finite = [abs(number) for pair in pairs for number in pair if math.isfinite(number)]
    margin = _TOLERANCE * max(finite, default=0.0) / 10
    if all(
        a == b or math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=margin) or a != a != b
        for a, b in pairs
    ):
        return None
    return f"{', '.join(live_values[:3])}, … here, {', '.join(values[:3])}, … when saved"


def buffers_of(wrapped: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (clean path, submodule, name, buffer) of each non-persistent buffer."""
    module = unwrap_module(wrapped)
    cleaner = cleaner_of(module)
    for raw, inner in module.named_modules():
        for name in sorted(inner._non_persistent_buffers_set):
            buffer = inner._buffers.get(name)
            if buffer is not None:
                yield cleaner.clean(f"{raw}.{name}".lstrip(".")), inner, name, buffer


@dataclass(slots=True)
class _Watched:
    inner: nn.Module
    name: str
    stamp: object
    shown: str | None


class UnsavedBuffers:
    """Non-persistent buffers of one module that have not changed since it was first seen."""

    def __init__(self, module: nn.Module) -> None:
        """Read them; a buffer that has other values at a save is taken for a cache."""
        self._module = module
        self._watched: dict[str, _Watched] = {}
        self._changed: set[str] = set()
        self._record: Mapping[str, str] | None = None
        self.watch_new_buffers()

    def watch_new_buffers(self) -> None:
        """Also watch buffers that were added to the module since."""
        for path, inner, name, buffer in buffers_of(self._module):
            if path not in self._changed and path not in self._watched:
                self._watched[path] = _Watched(
                    inner, name, _stamp(buffer), _summarize_buffer(buffer)
                )
                self._record = None

    def find_unchanged(self) -> Mapping[str, str]:
        """Return path -> text of those that are unchanged; the same dict while none changes."""
        changed = [path for path, one in self._watched.items() if not _is_buffer_unchanged(one)]
        for path in changed:
            del self._watched[path]
        self._changed.update(changed)
        if self._record is None or changed:
            found = {path: one.shown for path, one in sorted(self._watched.items())}
            self._record = {path: shown for path, shown in found.items() if shown is not None}
        return self._record


def _is_buffer_unchanged(watched: _Watched) -> bool:
    buffer = watched.inner._buffers.get(watched.name)
    if buffer is None or watched.name not in watched.inner._non_persistent_buffers_set:
        return False
    stamp = _stamp(buffer)
    if stamp == watched.stamp:
        return True
    watched.stamp = stamp
    return _summarize_buffer(buffer) == watched.shown


def _stamp(buffer: Tensor) -> object:
    version = None if buffer.is_inference() else buffer._version
    return (id(buffer), version, buffer.device)
