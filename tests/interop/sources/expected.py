"""What a peer reads back of its own file, as its script in tests/golden/peers has recorded it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from tests.interop.sources.reads import read

from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.format.tensors import ITEM_NBYTES
from holdfast.interop.source import Source

PEERS = Path(__file__).parents[2] / "golden" / "peers"


def expected(peer: str, file: str) -> Any:
    """The recorded tree; tensors and arrays as (dtype, shape, bytes), pickled objects as None."""
    nodes = json.loads((PEERS / peer / "expected.json").read_text())
    with np.load(PEERS / peer / "expected.npz") as arrays:
        return _value(nodes[file], arrays["bytes"].tobytes())


def _value(node: Any, data: bytes) -> Any:
    if isinstance(node, list):
        return [_value(one, data) for one in node]
    if not isinstance(node, dict):
        return node
    kind = next(iter(node), "")
    if kind in ("$tensor", "$array"):
        dtype, shape, start = node[kind]
        stop = start + math.prod(shape) * ITEM_NBYTES[dtype]
        return dtype, tuple(shape), data[start:stop]
    if kind == "$object":
        return None
    if kind == "$tuple":
        return tuple(_value(one, data) for one in node[kind])
    if kind in ("$ordered", "$dict"):
        return {key: _value(one, data) for key, one in node[kind]}
    return {key: _value(one, data) for key, one in node.items()}


def found(source: Source, component: str) -> Any:
    """The tree of a component in the same form."""
    part, data = source.get_component(component), read(source, component)

    def value(node: Any) -> Any:
        if isinstance(node, TensorRef | ArrayRef):
            spec = part.specs[node.key]
            return spec.dtype, spec.shape, data[node.key]
        if isinstance(node, dict):
            return {key: value(one) for key, one in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(value(one) for one in node)
        return node

    return value(part.tree)
