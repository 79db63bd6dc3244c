"""`load_file`: tensors of a checkpoint or a file of any format, read when they are asked for."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self, override

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError
from holdfast.format.nodes import NUMPY_DTYPES, ArrayRef, GeneratorState, SubclassRef, TensorRef
from holdfast.format.objects import DequeItems
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.comparing.numbers import floats
from holdfast.interop.opening import open_source
from holdfast.interop.source import LeftOut, Source, expect_no_loss, read_whole
from holdfast.interop.sources.checkpoint import CheckpointSource
from holdfast.keys import Encryption
from holdfast.root.address import make_which_error
from holdfast.store.base import Store

if TYPE_CHECKING:
    import torch


@check_arguments()
def load_file(
    source: str | os.PathLike[str] | Store,
    *,
    which: int | str | None = None,
    encrypt: Encryption | None = None,
    trust: bool = False,
    allow_loss: bool = False,
) -> LazyFile:
    """Open a checkpoint, or a file of weights of any known format; no code in it is run.

    `source` is a root (its newest checkpoint), `root@which`, the folder of a checkpoint, a store,
    where `which` selects another than the newest, or a file or folder of another library. No
    tensor is read before it is asked for. `encrypt` has the keys of encrypted checkpoints.
    `trust` lifts the bounds on the number of values in a file of another library. With
    `allow_loss`, tensors that cannot be read, such as sparse ones, are only listed in `left_out`.
    Close the file, or use it in a `with` statement: a checkpoint is kept from deletion while it is
    open.

    Raises:
        NoCheckpoint: nothing exists there.
        FormatError: it is in no known format, or damaged.
        SealError: it is encrypted for other keys, or not encrypted.
        UsageError: `which` is given for a source that is not a store, or a tensor cannot be read.
    """
    opened = open_any(source, which=which, encrypt=encrypt, trust=trust)
    try:
        expect_no_loss(opened, (), allow_loss=allow_loss)
    except UsageError:
        opened.close()
        raise
    return LazyFile(opened)


def open_any(
    source: str | os.PathLike[str] | Store,
    *,
    which: int | str | None,
    encrypt: Encryption | None,
    trust: bool = False,
) -> Source:
    """Open what `load_file` takes; raises as it does."""
    if not isinstance(source, str | os.PathLike):
        return CheckpointSource(source, which=which, encrypt=encrypt)
    text = os.fspath(source)
    if which is not None:
        raise make_which_error(text, which)
    return open_source(text, encrypt=encrypt, trust=trust)


class LazyFile(Mapping[str, "LazyTensor"]):
    """An open checkpoint or file, as a mapping of names to tensors that are not read yet.

    A name is "component:path", or the path alone if there is one component. Tied tensors have a
    name each. Thread-safe, except `close`.
    """

    def __init__(self, source: Source) -> None:
        """Wrap an open source, which `close` closes."""
        self._source = source
        is_single = len(source.parts) == 1
        self._tensors = {
            path if is_single else f"{name}:{path}": LazyTensor(source, name, part.specs[ref.key])
            for name, part in source.parts.items()
            for path, ref in part.leaves.items()
        }

    @property
    def format(self) -> str:
        """Name of the format, such as "safetensors"."""
        return self._source.format

    @property
    def step(self) -> int | None:
        """Completed optimizer steps; None if the source does not tell."""
        return self._source.step

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components."""
        return tuple(self._source.parts)

    @property
    def left_out(self) -> Sequence[LeftOut]:
        """Values of the source that cannot be read, with the reasons."""
        return self._source.left_out

    def tree(self, component: str | None = None) -> Any:
        """Return the plain values of a component, or the only one, with `LazyTensor` objects."""
        if component is None:
            if len(self.components) != 1:
                raise UsageError(f"choose a component: {', '.join(self.components)}")
            component = self.components[0]
        part = self._source.get_component(component)
        return _lifted(self._source, component, part.tree)

    def close(self) -> None:
        """Close the files; nothing can be read any more."""
        self._source.close()

    def __getitem__(self, name: str) -> LazyTensor:
        found = self._tensors.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"<{self.format} {self._source.url!r}: {len(self)} tensors>"


class LazyTensor:
    """A tensor that is not read yet, or some of its leading rows. Slice it before it is read."""

    def __init__(self, source: Source, component: str, spec: TensorSpec) -> None:
        """Refer to a tensor of an open source."""
        self._source = source
        self._component = component
        self._spec = spec
        self._start = 0
        self.shape = spec.shape

    @property
    def dtype(self) -> str:
        """Name of the type as in a safetensors file, such as "F32" or "BF16"."""
        return self._spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that reading it takes."""
        return math.prod(self.shape) * ITEM_NBYTES[self.dtype]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar has no length")
        return self.shape[0]

    def __getitem__(self, rows: int | slice) -> LazyTensor:
        """Select leading rows, by a number or a slice without a step; reads nothing."""
        if not self.shape:
            raise IndexError("a scalar has no rows")
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.shape[0])
            if step != 1:
                raise UsageError(
                    f"[{rows.start}:{rows.stop}:{rows.step}]: only slices of step 1 are read"
                )
            return self._slice_rows(start, max(start, stop))
        number = rows + self.shape[0] if rows < 0 else rows
        if not 0 <= number < self.shape[0]:
            raise IndexError(f"row {rows} of {self.shape[0]}")
        found = self._slice_rows(number, number + 1)
        found.shape = self.shape[1:]
        return found

    def numpy(self) -> Any:
        """Read it as a numpy array, widened exactly if numpy lacks its type."""
        raw: Any = np.empty(self.nbytes, np.uint8)
        self._read_all_into(memoryview(raw))
        native = NUMPY_DTYPES.get(self.dtype)
        if native is not None:
            return raw.view(native).reshape(self.shape)
        numbers = floats(raw, self.dtype)
        if self.dtype == "F4_X2":
            *rows, size = self.shape or (1,)
            return numbers.reshape(*rows, 2 * size)
        return numbers.view("<c8" if self.dtype == "C32" else numbers.dtype).reshape(self.shape)

    def torch(self) -> torch.Tensor:
        """Read it as a torch tensor of its own type."""
        import torch

        from holdfast.state.leaves import TORCH_DTYPES

        found = torch.empty(self.shape, dtype=TORCH_DTYPES[self.dtype])
        if self.nbytes:
            target: Any = found.reshape(-1).view(torch.uint8).numpy()
            self._read_all_into(memoryview(target))
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Read it for numpy's functions; there is always a copy."""
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    @override
    def __repr__(self) -> str:
        return f"<{self.dtype} {'×'.join(map(str, self.shape)) or 'scalar'}, not read>"

    def _slice_rows(self, start: int, stop: int) -> LazyTensor:
        found = LazyTensor(self._source, self._component, self._spec)
        row_nbytes = math.prod(self.shape[1:]) * ITEM_NBYTES[self.dtype]
        found._start = self._start + start * row_nbytes
        found.shape = (stop - start, *self.shape[1:])
        return found

    def _read_all_into(self, memory: memoryview) -> None:
        read_whole(self._source, self._component, self._spec.key, self._start, memory)


def _lifted(source: Source, component: str, node: Any) -> Any:
    """Return a tree with `LazyTensor` objects in place of its references."""
    if isinstance(node, TensorRef | ArrayRef):
        return LazyTensor(source, component, source.parts[component].specs[node.key])
    if isinstance(node, dict | SubclassRef):
        return {name: _lifted(source, component, inner) for name, inner in node.items()}
    if isinstance(node, DequeItems):
        return deque((_lifted(source, component, inner) for inner in node), node.maxlen)
    if isinstance(node, list | tuple):
        return type(node)(_lifted(source, component, inner) for inner in node)
    if isinstance(node, GeneratorState):
        return GeneratorState(node.kind, _lifted(source, component, node.members))
    return node
