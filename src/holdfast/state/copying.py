"""Values into live tensors: large ones on the CPU in pieces on several threads, the rest by torch.

torch's own parallel copy waits at barriers, for threads that a busy machine has taken away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Pair: TypeAlias = tuple[Tensor, Tensor]
"""A live tensor and what goes into it; shape and dtype are equal."""

LARGE_NBYTES = 1 << 20
"""Tensors of this size and more are copied in pieces."""
PIECE_NBYTES = 4 << 20
"""What a thread copies at a time."""


def copy_tensors(pairs: Sequence[Pair]) -> None:
    """Copy the second of each pair into the first. When this returns, devices have it too."""
    large, others = _parted(pairs)
    with torch.no_grad():
        if large:
            with ThreadPoolExecutor(torch.get_num_threads(), "holdfast-copy") as threads:
                copies = [threads.submit(np.copyto, *piece) for p in large for piece in _pieces(*p)]
                _copy_by_torch(others)
                for copy in copies:
                    copy.result()
            for live, _ in large:
                # numpy does not tell autograd that a tensor has changed.
                torch.autograd.graph.increment_version(live)
        else:
            _copy_by_torch(others)
    _synchronize({live.device for live, _ in others})


def _parted(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    large: list[Pair] = []
    others: list[Pair] = []
    for pair in pairs:
        is_large = pair[0].nbytes >= LARGE_NBYTES and all(_is_plain(tensor) for tensor in pair)
        (large if is_large else others).append(pair)
    return large, others


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values are the bytes that lie at its address."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def _pieces(live: Tensor, stored: Tensor) -> Iterator[tuple[Any, Any]]:
    target, source = _bytes(live), _bytes(stored)
    for start in range(0, len(target), PIECE_NBYTES):
        yield target[start : start + PIECE_NBYTES], source[start : start + PIECE_NBYTES]


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _copy_by_torch(pairs: Sequence[Pair]) -> None:
    # `_foreach_copy_` raises for a view that negates or conjugates, after it wrote others.
    odd = [pair for pair in pairs if pair[0].is_neg() or pair[0].is_conj()]
    plain = (
        [pair for pair in pairs if not (pair[0].is_neg() or pair[0].is_conj())] if odd else pairs
    )
    if plain:
        live, stored = zip(*plain, strict=True)
        torch._foreach_copy_(list(live), list(stored), non_blocking=True)
    for view, values in odd:
        view.copy_(values)


def _synchronize(devices: Collection[torch.device]) -> None:
    """Wait for copies to accelerators: what they come from may go now."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
