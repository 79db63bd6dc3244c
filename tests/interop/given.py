"""A source made of live values, for what a conversion makes of any tree."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop.source import LeftOut, Source, SourceComponent
from holdfast.state.leaves import DTYPE_NAMES

ARRAYS = {"uint8": "U8", "uint32": "U32", "float32": "F32", "float64": "F64", "int64": "I64"}


class GivenSource(Source):
    """Components given as (kind, value); tensors that are one object are tied."""

    format = "torch"  # which keeps the order of a model
    url = "given"

    def __init__(
        self,
        components: Mapping[str, tuple[str, Any]],
        *,
        step: int | None = None,
        left_out: Sequence[LeftOut] = (),
    ) -> None:
        self.step, self.left_out = step, left_out
        self._bytes: dict[tuple[str, str], bytes] = {}
        self.parts = {name: self._part(name, *one) for name, one in components.items()}

    def _part(self, name: str, kind: str, value: Any) -> SourceComponent:
        specs: dict[str, TensorSpec] = {}
        keys: dict[int, str] = {}

        def add(path: str, leaf: Any, dtype: str, data: bytes) -> str:
            key = keys.setdefault(id(leaf), path)
            specs[key] = TensorSpec(key, dtype, tuple(leaf.shape))
            self._bytes[name, key] = data
            return key

        def lower(node: Any, path: str) -> Any:
            if isinstance(node, torch.Tensor):
                data = node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                return TensorRef(add(path, node, DTYPE_NAMES[node.dtype], data.tobytes()))
            if isinstance(node, np.ndarray):
                return ArrayRef(add(path, node, ARRAYS[str(node.dtype)], node.tobytes()))
            if isinstance(node, dict):
                made = {key: lower(one, f"{path}.{key}".lstrip(".")) for key, one in node.items()}
                return OrderedDict(made) if isinstance(node, OrderedDict) else made
            if type(node) in (list, tuple):
                return type(node)(lower(one, f"{path}.{at}") for at, one in enumerate(node))
            return node

        return SourceComponent(kind=kind, tree=lower(value, ""), specs=specs)

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        memory[:] = self._bytes[component, key][start : start + memory.nbytes]

    @override
    def close(self) -> None:
        """Nothing is open."""
