"""Descriptions of the values in a pickle that are no plain Python values, and bounds of their cost.

Text, numbers, bytes, lists, tuples, sets and dicts are themselves. Everything else is one of these
classes or a leaf of `holdfast.format.nodes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import LimitExceeded

LIFTED = "if you trust the file, --trust lifts this limit, or trust=True in Python"
_IS_TRUSTED = ContextVar("is_trusted", default=False)


@contextmanager
def trusting() -> Iterator[None]:
    """Open files of others without bounds on their number of values and on memory."""
    token = _IS_TRUSTED.set(True)
    try:
        yield
    finally:
        _IS_TRUSTED.reset(token)


def bound(most: int) -> int:
    """Return a bound; one that nothing reaches while a file is opened that the user trusts."""
    return 1 << 62 if _IS_TRUSTED.get() else most


@dataclass(slots=True, kw_only=True)
class PickleBudget:
    """Remaining operations and memory, never given back, for the pickles of one source."""

    operations: int = 6_000_000
    """Operations: about 100,000 tensors with all that belongs to them take as many as 4 million."""
    nbytes: int = 128 << 20

    def __post_init__(self) -> None:
        self.operations, self.nbytes = bound(self.operations), bound(self.nbytes)

    def charge(self, nbytes: int) -> None:
        """Take from the memory that is left."""
        self.nbytes -= nbytes
        if self.nbytes < 0:
            raise LimitExceeded(
                f"its values need more memory than a pickle may take here; {LIFTED}"
            )


MAX_LEAF_NBYTES = 16 << 20
"""Most bytes of one text or one `bytes` that is not left in the file."""
MAX_INT_NBYTES = 1_701
"""Bytes of an integer with 4,096 digits."""
MAX_NAME = 200
"""Most characters of a module's or a class's name."""
SPAN_NBYTES = 4096
"""`bytes` longer than this stay in the file."""
MAX_OTHER_KEYS = 4_000
"""Most keys that are neither text nor small integers: hashes of others can be made to collide."""
MAX_KEY_VALUES = 32
"""Most values in such a key."""


@dataclass(slots=True, eq=False)
class Global:
    """A name that a pickle refers to: a class or a function, which is never imported."""

    name: str
    """Module and name, such as "collections.OrderedDict"."""


@dataclass(slots=True, eq=False)
class Unknown:
    """A value that only a function or class outside the allow-list could make."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None


@dataclass(slots=True, eq=False)
class PickledObject(Unknown):
    """A value of a class that the caller asked for by name; its members are in `state`."""

    @property
    def members(self) -> dict[str, Any]:
        """The members by name: of objects, and of objects with slots."""
        state = self.state[1] if type(self.state) is tuple and len(self.state) == 2 else self.state
        return state if isinstance(state, dict) else {}


@dataclass(slots=True, eq=False)
class Refusal:
    """A value of a known kind that cannot be read, with the reason."""

    why: str
    is_tensor: bool = False


class OrderedItems(dict[Any, Any]):
    """The items of an OrderedDict; `attributes` are those of the object, such as `_metadata`."""

    __slots__ = ("attributes",)
    attributes: Any


class CountedItems(dict[Any, Any]):
    """The items of a Counter."""

    __slots__ = ()


class DefaultItems(dict[Any, Any]):
    """The items of a defaultdict, whose factory is left out."""

    __slots__ = ()


class NamespaceItems(dict[Any, Any]):
    """The attributes of an argparse.Namespace or a SimpleNamespace."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Span:
    """A range of bytes in the file, which is not read."""

    start: int
    nbytes: int
    is_mutable: bool = False


@dataclass(slots=True, eq=False)
class ByteArray:
    """A bytearray."""

    data: bytes


@dataclass(slots=True, eq=False)
class StorageKind:
    """A class of torch's storages; `dtype` as in the index, None where it is not readable."""

    name: str
    dtype: str | None


@dataclass(slots=True, eq=False)
class Storage:
    """Memory of `nbytes` that tensors are views of; `data` is set once its place is known."""

    dtype: str
    device: str
    nbytes: int
    data: Span | bytes | None = None


@dataclass(slots=True, eq=False)
class TensorView:
    """A torch tensor: a strided view of a storage, offset and strides in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    grad: bool = False
    parameter: bool = False

    def as_parameter(self, *, grad: bool) -> TensorView:
        """The same view as that of a parameter."""
        return TensorView(
            self.storage, self.dtype, self.offset, self.shape, self.strides, grad, True
        )


@dataclass(slots=True, eq=False)
class ArrayValue:
    """A numpy array, or with `is_tensor` a tensor of a generator's state."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_fortran: bool = False
    data: Span | bytes = b""
    refusal: str = "it was never filled"
    """Why it cannot be read; empty if it can."""
    is_tensor: bool = False


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype: its code without the byte order, such as "f4"."""

    code: str
    is_big_endian: bool = False


@dataclass(slots=True, eq=False)
class Generator:
    """A random generator: its kind in the format, and the members of its state."""

    kind: str
    members: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Seeds:
    """A numpy SeedSequence."""

    members: dict[str, Any] | None = None
