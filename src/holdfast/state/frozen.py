"""Parameters that are saved as digests only: chosen at each save, compared in each load.

A parameter is omitted only if the script creates the same value in each process. So checksums of
all parameters are taken before training, and each save compares them: code may write to
`parameter.data`, which torch does not count. Digests, which prove equality, are computed once for
each value in a process (decision 0063).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from holdfast.format.blocks import block_digest, digest_blocks, file_digest, list_blocks
from holdfast.format.objects import join_path
from holdfast.format.tensors import format_record
from holdfast.state.components import cleaner_of, unwrap_module
from holdfast.state.leaves import (
    DTYPE_NAMES,
    inner_tensors,
    is_dtensor,
    is_subclass,
    plain_name,
    plain_parts,
    refusal,
)
from holdfast.state.planning.copying import bytes_of
from holdfast.state.planning.inner import describe_context
from holdfast.state.selection import shortened
from holdfast.state.trees import decoded_context
from holdfast.threads.progress import watch_all
from holdfast.threads.workers import Workers, gather_results, num_threads

_NUM_COLUMNS = 8191
"""Words in a row of a checksum; prime, so that no two rows of a usual matrix can be swapped."""
_MULTIPLIER = 0x1E3779B97F4A7C15
_TIMEOUT_S = 1800.0

Checksum: TypeAlias = tuple[object, ...]
"""Dtype, sizes and checksums of the parts of a tensor, of which a subclass has several."""
_known: MutableMapping[Tensor, tuple[Checksum, str]] = WeakTensorKeyDictionary()
"""Tensor -> its checksum, and its record as text."""


def compute_checksums(tensors: Sequence[Tensor]) -> list[Checksum]:
    """Compute 64-bit checksums of the bytes of each tensor, on its device."""
    parts = [plain_parts(tensor) for tensor in tensors]
    flat = [part for of_tensor in parts for part in of_tensor]
    by_device: dict[torch.device, list[int]] = {}
    for number, part in enumerate(flat):
        by_device.setdefault(part.device, []).append(number)
    found = [0] * len(flat)
    with torch.no_grad():
        for numbers in by_device.values():
            sums = torch.stack([_compute_checksum(flat[number]) for number in numbers])
            for number, value in zip(numbers, sums.tolist(), strict=True):
                found[number] = value
    values = iter(found)
    return [
        tuple((part.dtype, part.shape, next(values)) for part in of_tensor) for of_tensor in parts
    ]


def _compute_checksum(tensor: Tensor) -> Tensor:
    data = _flat_bytes(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    num_words = len(data) // 8
    words = data[: num_words * 8].view(torch.int64)
    num_rows = num_words // _NUM_COLUMNS
    rest = words[num_rows * _NUM_COLUMNS :]
    rows = words[: num_rows * _NUM_COLUMNS].view(num_rows, _NUM_COLUMNS)
    tail = data[num_words * 8 :].to(torch.int64)
    return _sum_weighted(torch.cat([rows.sum(0), rows.sum(1), rest, tail]))


def _sum_weighted(words: Tensor) -> Tensor:
    """Add up words, each times an odd number of its own.

    The upper half of each word is added to it: two changes of bit 63 would add up to none.
    """
    factors = torch.arange(1, 2 * len(words), 2, device=words.device) * _MULTIPLIER
    return ((words + (words >> 32)) * factors).sum()


def _flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order; a copy unless it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A single element may have any stride, of which `contiguous` takes no notice.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def describe_tensors(tensors: Sequence[Tensor], sums: Sequence[Checksum]) -> list[str]:
    """Return dtype, sizes and digest of each tensor as text; digests are kept for later calls.

    `sums`: the checksums of the tensors.
    """
    due = {
        id(tensor): (tensor, checksum)
        for tensor, checksum in zip(tensors, sums, strict=True)
        if tensor not in _known or _known[tensor][0] != checksum
    }
    if due:
        parts = [_list_parts(tensor) for tensor, _ in due.values()]
        digests = iter(_compute_digests([part for of_tensor in parts for _, part in of_tensor]))
        for (tensor, checksum), of_tensor in zip(due.values(), parts, strict=True):
            records = [(name, _describe_part(part, next(digests))) for name, part in of_tensor]
            text = records[0][1] if records[0][0] == "" else _join_records(tensor, records)
            _known[tensor] = (checksum, text)
    return [_known[tensor][1] for tensor in tensors]


def _list_parts(tensor: Tensor, name: str = "") -> list[tuple[str, Tensor]]:
    """List the plain tensors inside a subclass with their names; a plain tensor itself."""
    if not is_subclass(tensor):
        return [(name, tensor)]
    inner = inner_tensors(tensor)
    return [one for key, part in inner.items() for one in _list_parts(part, join_path(name, key))]


def _describe_part(part: Tensor, digest: str) -> str:
    return format_record(DTYPE_NAMES[part.dtype], part.shape, digest)


def _join_records(tensor: Tensor, records: Sequence[tuple[str, str]]) -> str:
    """Return the record of a subclass: the digest is of lines of inner tensors and context."""
    settings = (
        "context",
        f"{plain_name(tensor.dtype)} {describe_context(decoded_context(tensor))}",
    )
    lines = "".join(f"{name} {text}\n" for name, text in [*records, settings]).encode()
    nbytes = sum(part.nbytes for part in plain_parts(tensor))
    digest = file_digest(len(lines), digest_blocks(lines))
    return format_record(type(tensor).__name__, tensor.shape, digest, nbytes=nbytes)


def _compute_digests(tensors: Sequence[Tensor]) -> list[str]:
    """Hash tensors as files of their bytes, block by block in several threads."""
    workers = Workers(num_threads(), "holdfast-digest")
    parts = [list_blocks(tensor.nbytes) for tensor in tensors]
    try:
        futures = [
            workers.submit(partial(_digest_block, tensor, start, stop))
            for tensor, blocks in zip(tensors, parts, strict=True)
            for start, stop in blocks
        ]
        what = "digests of frozen parameters"
        watch_all(futures, timeout_s=_TIMEOUT_S, what=what)
        digests = iter(gather_results(futures, timeout_s=_TIMEOUT_S, what=what))
    finally:
        workers.close_pool()
    return [
        file_digest(tensor.nbytes, b"".join(next(digests) for _ in blocks))
        for tensor, blocks in zip(tensors, parts, strict=True)
    ]


def _digest_block(tensor: Tensor, start: int, stop: int) -> bytes:
    with torch.no_grad():
        return block_digest(bytes_of(_flat_bytes(tensor)[start:stop].cpu()).data)


def find_differences(
    component: str, live: Mapping[str, Tensor], recorded: Mapping[str, str]
) -> str | None:
    """Return, as text, how live parameters differ from those that a checkpoint records.

    None if none does. Those that `live` lacks are not compared.
    """
    found: dict[str, str] = {}
    whole = {}
    for name in recorded:
        if name in live:
            reason = _reason_against(live[name])
            if reason is None:
                whole[name] = live[name]
            else:
                found[name] = f"cannot be compared here: {reason}"
    tensors = [*whole.values()]
    texts = describe_tensors(tensors, compute_checksums(tensors))
    for name, text in zip(whole, texts, strict=True):
        if text != recorded[name]:
            (spec, digest), (old_spec, old) = (_split_record(text), _split_record(recorded[name]))
            here, then = (digest, old) if spec == old_spec else (spec, old_spec)
            found[name] = f"{here} here, {then} when saved"
    if not found:
        return None
    shown = shortened([f"{name} ({how})" for name, how in found.items()])
    return (
        f"{component}: {len(found)} of {len(recorded)} frozen parameters, saved by digest, "
        f"differ from the base model that the run was trained on: {shown}"
    )


def _split_record(text: str) -> tuple[str, str]:
    """Return dtype and sizes of a record, and its digest in short."""
    spec, _, digest = text[:200].rpartition(" ")
    return spec, f"{digest.removeprefix('blake3:')[:8]}…"


def _reason_against(parameter: Tensor) -> str | None:
    """Return why a parameter cannot be recorded by digest, or None if it can."""
    if is_dtensor(parameter):
        return "a DTensor, of which each rank holds a part"
    reason = refusal(parameter)
    if reason is None and is_subclass(parameter):
        try:
            decoded_context(parameter)
        except ValueError as err:
            return f"{err} in its context"
    return reason


class FrozenParameters:
    """Parameters of the modules of a state that a save may record by digest."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._base: MutableMapping[Tensor, Checksum] = WeakTensorKeyDictionary()
        self._records: dict[str, dict[str, str]] = {}
        self.ids: frozenset[int] = frozenset()
        """`id()` of each parameter that the last call of `find_unchanged` has returned."""
        self.written: dict[str, str] = {}
        """Parameters without gradient that the last save has written all the same -> the reason."""
        self.note_base()

    def note_base(self) -> None:
        """Record the values that parameters have now, which the script makes in each session."""
        tensors = [
            parameter
            for _, _, _, parameter in self._iterate_parameters()
            if _reason_against(parameter) is None
        ]
        sums = compute_checksums(tensors)
        self._base = WeakTensorKeyDictionary(dict(zip(tensors, sums, strict=True)))

    def find_unchanged(self) -> Mapping[str, Mapping[str, str]]:
        """Return component -> name -> text of each parameter that still has the base's value.

        The mapping of a component is the same object while nothing in it changes.
        """
        stepped = {id(parameter) for parameter in _list_stepped(self._state.values())}
        places: list[tuple[str, str, Tensor]] = []
        self.written = {}
        trained = {
            component
            for component, value in self._state.items()
            if isinstance(value, nn.Module) and any(one.requires_grad for one in value.parameters())
        }
        for component, name, parameter, tensor in self._iterate_parameters():
            if parameter.requires_grad or parameter.grad is not None or id(parameter) in stepped:
                continue
            if tensor in self._base:
                places.append((component, name, tensor))
            else:
                reason = "created after the manager"
                if _reason_against(tensor) is not None:
                    reason = f"a {type(parameter).__name__} has no digest"
                self.written[f"{component}.{name}"] = reason
        sums = compute_checksums([parameter for _, _, parameter in places])
        same, kept = [], []
        for (component, name, parameter), checksum in zip(places, sums, strict=True):
            if self._base[parameter] == checksum:
                same.append((component, name, parameter))
                kept.append(checksum)
            elif component in trained:  # others are averages, which are meant to change
                self.written[f"{component}.{name}"] = "its value has changed"
        self.ids = frozenset(id(parameter) for _, _, parameter in same)
        texts = describe_tensors([parameter for _, _, parameter in same], kept)
        found: dict[str, dict[str, str]] = {}
        for (component, name, _), text in zip(same, texts, strict=True):
            found.setdefault(component, {})[name] = text
        for component, record in found.items():
            if self._records.get(component) == record:
                found[component] = self._records[component]
        self._records = found
        return found

    def _iterate_parameters(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Yield component, name, parameter, and the tensor that is compared and recorded."""
        for component, value in self._state.items():
            if isinstance(value, nn.Module):
                module = unwrap_module(value)
                clean = cleaner_of(module).clean
                adapters = {id(parameter) for parameter in _list_adapters(module)}
                quantized = _list_quantized(module)
                for raw, parameter in module.named_parameters(remove_duplicate=False):
                    if id(parameter) not in adapters:
                        for name, tensor in quantized.get(raw, {raw: parameter}).items():
                            yield component, clean(name), parameter, tensor


def _list_quantized(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return name of the weight -> name -> tensor of the entries of bitsandbytes' layers."""
    if "bitsandbytes" not in sys.modules:
        return {}
    from holdfast.state.bnb_layers import read_entries

    found = {}
    for raw, inner in module.named_modules(remove_duplicate=False):
        prefix = f"{raw}." if raw else ""
        if entries := read_entries(inner):
            found[f"{prefix}weight"] = {f"{prefix}{name}": one for name, one in entries.items()}
    return found


def entries_of_layers(module: nn.Module) -> dict[str, Tensor]:
    """Return the entries of bitsandbytes' layers by clean name, as they are recorded by digest."""
    clean = cleaner_of(module).clean
    layers = _list_quantized(module).values()
    return {clean(raw): one for entries in layers for raw, one in entries.items()}


def _list_stepped(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the parameters for which an optimizer of the state has a state."""
    for value in values:
        if isinstance(value, Optimizer):
            yield from value.state


def _list_adapters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of PEFT's adapters: an inactive one is frozen, and of no base."""
    for inner in module.modules():
        for name in getattr(inner, "adapter_layer_names", ()):
            part = getattr(inner, name, None)
            if isinstance(part, nn.Module):
                yield from part.parameters()
            elif isinstance(part, Tensor):
                yield part
