"""Samples of tensors: few elements of each, by which ranks compare what they hold under one name.

Elements are chosen by shape alone, so that copies give the same sample, whatever their strides,
devices or the ranks that hold them. Bits are compared: NaN equals itself, and 0.0 is not -0.0.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.format.tensors import TensorSpec
from holdfast.state.leaves import TORCH_DTYPES

NUM_SAMPLED = 128
"""Most elements of a tensor that are compared at a time. Each is a cache miss."""
DIGEST_NBYTES = 8
_NUM_LEVELS = 9
"""References that are followed from a module to wrappers: up to three for each module around it."""
UNKNOWN = bytes(DIGEST_NBYTES)
"""In place of the digest of a tensor that was not sampled."""


def places_of(num_elements: int, turn: int) -> range:
    """Choose the elements to compare, others at each turn, of odd distance to vary columns."""
    if num_elements <= NUM_SAMPLED:
        return range(num_elements)
    step = -(-num_elements // NUM_SAMPLED) | 1
    # A prime, so that the turns reach all starts of most steps.
    return range(turn * 7919 % step, num_elements, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The sampled bytes of some tensors."""

    joined: memoryview
    ends: Sequence[int]
    """End of each sample in `joined`, behind a 0."""

    def __getitem__(self, number: int) -> bytes:
        return bytes(self.joined[self.ends[number] : self.ends[number + 1]])

    def digests(self) -> list[bytes]:
        """Return a digest of each sample, which is never `UNKNOWN`."""
        joined, ends = self.joined, self.ends
        found = [blake3(joined[a:b]).digest(DIGEST_NBYTES) for a, b in pairwise(ends)]
        return [digest if digest != UNKNOWN else b"\1" * DIGEST_NBYTES for digest in found]


def sample(tensors: Sequence[Tensor], turn: int) -> Samples:
    """Read the samples of tensors, each device's with one copy to the host."""
    taken = [_bytes_of(tensor, turn) for tensor in tensors]
    joined = torch.cat(_on_host(taken)) if taken else torch.empty(0, dtype=torch.uint8)
    ends = np.cumsum([0, *map(Tensor.numel, taken)]).tolist()
    return Samples(joined=memoryview(joined.numpy().data), ends=ends)


def _on_host(taken: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to host memory, in one copy from each device."""
    on_host = list(taken)
    by_device: dict[torch.device, list[int]] = {}
    for number, one in enumerate(taken):
        by_device.setdefault(one.device, []).append(number)
    by_device.pop(torch.device("cpu"), None)
    for numbers in by_device.values():
        joined = torch.cat([taken[number] for number in numbers]).cpu()
        parts = torch.split(joined, [taken[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            on_host[number] = part
    return on_host


def _bytes_of(tensor: Tensor, turn: int) -> Tensor:
    """Return the sampled elements of a tensor as bytes, on its device."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # some of these dtypes cannot be copied
    places = places_of(tensor.numel(), turn)
    if tensor.is_contiguous():
        tensor = tensor.view(-1)[places.start :: places.step]
    elif len(places) < tensor.numel():
        numbers = torch.arange(places.start, places.stop, places.step, device=tensor.device)
        tensor = tensor[torch.unravel_index(numbers, tensor.shape)]
    return tensor.contiguous().view(-1).view(torch.uint8)


def first_difference(
    spec: TensorSpec, turn: int, one: bytes, other: bytes, offsets: Sequence[int]
) -> str:
    """Describe the first element that differs in two samples of a box, with both values.

    Args:
        spec: dtype and shape of the box.
        turn: that of the samples.
        one: The first sample.
        other: The second sample.
        offsets: Those of the box in its tensor.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    item = dtype.itemsize
    bits = (np.frombuffer(data, np.uint8).reshape(-1, item) for data in (one, other))
    differs = np.logical_or.reduce(np.not_equal(*bits), axis=1)
    number, count = int(np.argmax(differs)), len(differs)
    at = np.unravel_index(places_of(math.prod(spec.shape), turn)[number], spec.shape)
    place = [int(n) + offset for n, offset in zip(at, offsets, strict=True)]
    span = slice(number * item, (number + 1) * item)
    values = [_format_sample(data[span], dtype) for data in (one, other)]
    if values[0] == values[1]:
        values = [f"{values[0]} (0x{data[span].hex()})" for data in (one, other)]
    few = f"{int(differs.sum())} of {count} elements compared differ"
    return f"at {place} {values[0]} and {values[1]} ({few})"


def _format_sample(data: bytes, dtype: torch.dtype) -> str:
    value = torch.frombuffer(bytearray(data), dtype=dtype)
    try:
        return f"{value.item()!r}"
    except (RuntimeError, NotImplementedError):  # a dtype without numbers, such as packed ones
        return f"0x{data.hex()}"


def synchronized_names(modules: Iterable[nn.Module]) -> list[str]:
    """List the buffers that DDP wrappers in or around `modules` copy from rank 0 each time."""
    wrappers = {
        id(item): item
        for top in _with_outer(modules)
        for item in top.modules()
        if isinstance(item, DistributedDataParallel) and item.broadcast_buffers
    }
    return [
        name
        for ddp in wrappers.values()
        for name, _ in ddp.module.named_buffers()
        if name not in ddp.parameters_to_ignore
    ]


def _with_outer(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all those around them, found without `gc.get_objects`."""
    level: list[Any] = list(modules)
    found = level
    for _ in range(_NUM_LEVELS):
        known = {*map(id, found)}
        level = [
            item
            for item in gc.get_referrers(*level)
            if _leads_outwards(item) and id(item) not in known
        ]
        if not level:
            break
        found = [*found, *level]
    return [item for item in found if isinstance(item, nn.Module)]


def _leads_outwards(item: Any) -> bool:
    """Whether an object is a module, its attributes, or its submodules by name."""
    if type(item) is not dict:
        return issubclass(type(item), nn.Module)
    return "_modules" in item or all(
        value is None or issubclass(type(value), nn.Module) for value in list(item.values())
    )


def has_name(key: str, names: Iterable[str]) -> bool:
    """Whether a key is one of `names` as seen from an outer or inner module."""
    return any(f".{key}".endswith(f".{one}") or f".{one}".endswith(f".{key}") for one in names)
