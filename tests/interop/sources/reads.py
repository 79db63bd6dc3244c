"""What the tests of sources share: reading a component whole, and files that are made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from holdfast.interop.source import Source, read_pieces


def data_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(source: Source, component: str = "model") -> dict[str, bytes]:
    """The bytes of every tensor of a component, by key."""
    part = source.get_component(component)
    found: dict[str, bytes] = dict.fromkeys(part.specs, b"")
    for piece in read_pieces(source, [(component, key) for key in part.specs]):
        found[piece.key] += bytes(piece.memory)
    return found


def by_path(source: Source, component: str = "model") -> dict[str, bytes]:
    """The bytes of every leaf of a component, by path."""
    found = read(source, component)
    return {path: found[leaf.key] for path, leaf in source.get_component(component).leaves.items()}


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header, as text or as a value."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(path: Path, data: bytes) -> str:
    """Write a file, and return its path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)
