"""Layers of bitsandbytes, whose `state_dict` has entries that their own loading code refuses.

`Linear4bit` saves scales and settings beside its weight and has no code to load them, and
`Linear8bitLt` loads its scales only before its first forward pass. Both are recognized by the names
of their saving code. Scales are copied into the live ones; settings must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from holdfast.errors import FormatError, MismatchError
from holdfast.format import strictjson

_ENTRIES = {
    "Linear4bit._save_to_state_dict": {
        "weight.absmax": True,
        "weight.nested_absmax": True,
        "weight.quant_map": False,
        "weight.nested_quant_map": False,
    },
    "Linear8bitLt._save_to_state_dict": {"SCB": True, "weight_format": False},
}
"""Saving code -> entries beside its parameters -> whether they are memory of it, or settings."""
_PACKED = "weight.quant_state.bitsandbytes__"
_OFFSET = "nested_offset"
_kept: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""Layer -> entry -> the tensor that `read_entries` returns for it at each call."""
_LIMITS = {"max_nbytes": 1 << 16, "max_values": 1000}
_DIFFERS = "differs from the checkpoint. Quantize the live layer as the saved one"


def read_layers(
    inners: Iterable[tuple[str, nn.Module]], entries: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor | None], frozenset[str]]:
    """Find the quantized layers among submodules, which are given as (clean path, submodule).

    Returns:
        Entries that are memory of a layer, by clean name; names of settings, with the live tensor
        of a number in them, if any; and the paths of the layers.
    """
    scales: dict[str, Tensor] = {}
    settings: dict[str, Tensor | None] = {}
    layers = {path: inner for path, inner in inners if _saving_code(inner) in _ENTRIES}
    for path, inner in layers.items():
        offset = getattr(_quant_state(inner), "offset", None)
        are_scales = _ENTRIES[_saving_code(inner)]
        for name in [name for name in entries if name.startswith(f"{path}.".lstrip("."))]:
            inside = name.removeprefix(path).lstrip(".")
            if inside.startswith(_PACKED):
                settings[name] = offset
            elif are_scales.get(inside):
                scales[name] = entries[name]
            elif inside in are_scales:
                settings[name] = None
    return scales, settings, frozenset(layers)


def add_scales(module: nn.Module, state: MutableMapping[str, Any]) -> None:
    """Add the entries of 4-bit layers whose weight is sharded: `fully_shard` drops its scales.

    The layer itself still has them, and computes with them.
    """
    for path, inner in module.named_modules():
        if _saving_code(inner).startswith("Linear4bit."):
            known = getattr(inner.weight, "quant_state", None)
            if known is None and (scales := _quant_state(inner)) is not None:
                for name, value in scales.as_dict(packed=True).items():
                    state.setdefault(f"{path}.weight.{name}".lstrip("."), value.detach())


def _quant_state(inner: nn.Module) -> Any:
    known = getattr(inner.weight, "quant_state", None)
    return getattr(inner, "quant_state", None) if known is None else known


def read_entries(inner: nn.Module) -> Mapping[str, Tensor]:
    """Return the weight of a quantized layer and the entries beside it, by name in the layer.

    The tensors are the same objects at each call while dtypes and devices stay, and have the
    current memory. Empty for other modules, and if an entry is no plain tensor.
    """
    if (code := _saving_code(inner)) not in _ENTRIES:
        return {}
    found: dict[str, Tensor] = {}
    inner._save_to_state_dict(found, "", False)
    beside = {"weight", *_ENTRIES[code]}
    entries = {name: one for name, one in found.items() if name in beside or _PACKED in name}
    if any(type(one) is not Tensor for one in entries.values()):
        return {}
    kept = _kept.setdefault(inner, {})
    for name, value in entries.items():
        known = kept.get(name)
        if known is None or (known.dtype, known.device) != (value.dtype, value.device):
            kept[name] = value
        else:
            known.data = value
    return {name: kept[name] for name in entries}


def _saving_code(inner: nn.Module) -> str:
    code = type(inner)._save_to_state_dict
    return code.__qualname__ if code.__module__.startswith("bitsandbytes.") else ""


def match_settings(
    path: str, stored: Tensor, live: Tensor, number: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Check stored settings against live ones; return a live number and the stored one for it.

    Raises:
        MismatchError: they differ.
        FormatError: the stored ones are no JSON object.
    """
    if _PACKED not in path:
        if stored.dtype != live.dtype or not torch.equal(stored, live.cpu()):
            raise MismatchError("the checkpoint", hint=f"{path} {_DIFFERS}")
        return None
    ours, theirs = _unpack(path, live), _unpack(path, stored)
    offset = theirs.pop(_OFFSET, None)
    is_nested = ours.pop(_OFFSET, None) is not None
    for name in {**theirs, **ours}:
        sides = [one.get(name, "absent") for one in (theirs, ours)]
        if repr(sides[0]) != repr(sides[1]):
            hint = f"{path}: {name}: stored {sides[0]!r:.80}, live {sides[1]!r:.80}; {_DIFFERS}"
            raise MismatchError("the checkpoint", hint=hint)
    if is_nested != isinstance(offset, int | float) or is_nested != (number is not None):
        raise MismatchError("the checkpoint", hint=f"{path}: {_OFFSET} {_DIFFERS}")
    return None if number is None else (number, torch.full_like(number, offset, device="cpu"))


def _unpack(path: str, packed: Tensor) -> dict[str, Any]:
    if packed.dtype is not torch.uint8 or packed.dim() != 1:
        raise FormatError(f"{path}: expected the packed settings of a layer, as JSON")
    data = bytes(packed.detach().cpu().contiguous().numpy())
    found = strictjson.loads(data, what=path, **_LIMITS)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected the packed settings of a layer, as JSON")
    return found
