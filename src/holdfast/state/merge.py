"""Putting stored values into live containers: worked out first, then done in one go.

What is live keeps its identity wherever the stored value fits it: tensors and arrays are copied
into, containers refilled, generators set. Two stored values never end in one live object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import MismatchError
from holdfast.format.objects import EnumValue, GeneratorState, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.dtypes import DTYPE_NAMES
from holdfast.state.leaves import identity, refusal
from holdfast.state.trees import Kept, Lifting, owned, present_device, revived


class Place(Protocol):
    """Where and how a tensor is made that cannot be copied into a live one."""

    def device(self, ref: TensorRef) -> torch.device:
        """The device for it; a live tensor elsewhere is not copied into."""
        ...

    def make(self, ref: TensorRef, stored: Tensor) -> Tensor:
        """A new tensor with the values of `stored`."""
        ...


class StoredPlace:
    """On the device that the tensor was saved from, or the CPU when that is not present."""

    def device(self, ref: TensorRef) -> torch.device:
        """The stored device, if it is here."""
        return present_device(ref.device)

    def make(self, ref: TensorRef, stored: Tensor) -> Tensor:
        """Contiguous, in memory of its own."""
        return owned(stored, self.device(ref))


_STORED_PLACE = StoredPlace()


class Claims:
    """What already takes a stored value; shared by all components of one load.

    A plain tree may hold live tensors of the model (`best = model.state_dict()`, before the
    first improvement). Copying the stored tree into them would overwrite the model.
    """

    def __init__(self, protected: Iterable[Tensor] = ()) -> None:
        """`protected`: tensors into whose memory only their own values go."""
        self._taken: set[Any] = set()
        self._first: dict[Hashable, tuple[str, Tensor]] = {}
        for tensor in protected:
            if refusal(tensor) is None:
                self.take_storage(tensor)

    def take(self, who: Any) -> bool:
        """True the first time that `who` is asked for."""
        if who in self._taken:
            return False
        self._taken.add(who)
        return True

    def take_storage(self, tensor: Tensor) -> bool:
        """As `take`, for the memory of a tensor: views of one storage may overlap."""
        return self.take(("storage", tensor.untyped_storage()._cdata))

    def agree(self, path: str, live: Tensor, stored: Tensor) -> None:
        """Several names of one live tensor, in several components, must bring the same bits.

        Raises:
            MismatchError: they do not.
        """
        first, known = self._first.setdefault(identity(live), (path, stored))
        if known is not stored and not _same_bits(known, stored):
            raise MismatchError(
                "the checkpoint",
                hint=f"{first} and {path} are one tensor here, and had two values when saved",
            )


def copy_tensors(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first; shapes and dtypes are equal."""
    with torch.no_grad():
        if pairs:
            live, stored = zip(*pairs, strict=True)
            torch._foreach_copy_(list(live), list(stored))


def is_writable_in_place(tensor: Tensor) -> bool:
    """Whether `copy_` into `tensor` reaches each element once."""
    overlaps = torch._debug_has_internal_overlap(tensor) == 1
    return refusal(tensor) is None and not tensor.is_inference() and not overlaps


class Merge:
    """Collects what is to be done; `commit` does it. Nothing live changes before."""

    def __init__(
        self, tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], claims: Claims
    ) -> None:
        self._claims = claims
        self._tensors = tensors
        self._specs = specs
        self._lifting = Lifting(tensors)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._edits: list[Callable[[], None]] = []
        self._made: dict[int, Any] = {}
        self._made_tensors: dict[str, Tensor] = {}
        self._alive: list[Any] = []

    def then(self, edit: Callable[[], None]) -> None:
        """Do `edit` at the commit, after the tensors were copied."""
        self._edits.append(edit)

    def commit(self) -> None:
        """Copy the tensors, then change the containers."""
        copy_tensors(self._copies)
        with torch.no_grad():
            for edit in self._edits:
                edit()

    def merge(self, live: Any, stored: Any, place: Place = _STORED_PLACE) -> Any:
        """The value that shall stand where `live` stands: `live` itself where it can."""
        if isinstance(stored, TensorRef):
            return self._tensor(live, stored, place)
        if isinstance(stored, dict | list):
            return self._container(live, stored, place)
        if isinstance(stored, tuple | set | frozenset):
            return self._immutable(live, stored, place)
        if isinstance(stored, GeneratorState):
            return self._generator(live, stored)
        if isinstance(stored, EnumValue):
            return revived(live, stored)
        if isinstance(stored, Kept):
            return stored.value
        return self._plain(live, self._lifting.lift(stored))

    def refill(self, live: Any, stored: Any, place: Place = _STORED_PLACE) -> Any:
        """As `merge`, for a container that must be refilled even when its class differs."""
        self._made[id(stored)] = live
        self._claims.take(id(live))
        self._fill(live, live, stored, place)
        return live

    def _container(self, live: Any, stored: Any, place: Place) -> Any:
        if id(stored) in self._made:
            return self._made[id(stored)]
        target = (
            live if type(live) is type(stored) and self._claims.take(id(live)) else type(stored)()
        )
        self._alive.append(stored)
        self._made[id(stored)] = target
        self._fill(live, target, stored, place)
        return target

    def _fill(self, live: Any, target: Any, stored: Any, place: Place) -> None:
        if isinstance(stored, dict):
            there = live if isinstance(live, dict) else {}
            items = {k: self.merge(_peek(there, k), v, place) for k, v in stored.items()}
            self._edits.append(lambda: _refill_dict(target, items))
        else:
            known = live if isinstance(live, list) else []
            values = [
                self.merge(known[i] if i < len(known) else None, value, place)
                for i, value in enumerate(stored)
            ]
            self._edits.append(lambda: _refill_list(target, values))

    def _immutable(self, live: Any, stored: Any, place: Place) -> Any:
        if type(stored) not in (tuple, set, frozenset):
            return stored
        if not isinstance(stored, tuple):
            return type(stored)(self.merge(None, value, place) for value in stored)
        known = (
            live if isinstance(live, tuple) and len(live) == len(stored) else (None,) * len(stored)
        )
        return tuple(self.merge(a, b, place) for a, b in zip(known, stored, strict=True))

    def _tensor(self, live: Any, ref: TensorRef, place: Place) -> Tensor:
        made = self._made_tensors.get(ref.key)
        if made is None:
            made = self._new_tensor(live, ref, place)
            self._made_tensors[ref.key] = made
        return made

    def _new_tensor(self, live: Any, ref: TensorRef, place: Place) -> Tensor:
        stored = self._tensors[ref.key]
        if isinstance(live, Tensor) and self._fits(live, ref, place.device(ref)):
            self._copies.append((live, stored))
            return live
        return place.make(ref, stored)

    def _fits(self, live: Tensor, ref: TensorRef, device: torch.device) -> bool:
        if not is_writable_in_place(live) or live.device.type != device.type:
            return False
        spec = self._specs[ref.key]
        if (DTYPE_NAMES[live.dtype], tuple(live.shape)) != (spec.dtype, spec.shape):
            return False
        return self._claims.take_storage(live)

    def _generator(self, live: Any, node: GeneratorState) -> Any:
        fresh = self._lifting.generator(node)
        kind = generators.kind_of(live)
        same = kind == node.kind and generators.misfit(live, node, self._specs) is None
        if not same or not self._claims.take(id(live)):
            return fresh
        members = self._lifting.members(node.members)
        self._edits.append(lambda: generators.write(live, members))
        return live

    def _plain(self, live: Any, stored: Any) -> Any:
        if not isinstance(stored, np.ndarray) or type(live) is not np.ndarray:
            return stored
        fits = live.dtype == stored.dtype and live.shape == stored.shape and live.flags.writeable
        if not fits or not self._claims.take(("array", id(_root(live)))):
            return stored
        self._edits.append(lambda: np.copyto(live, stored))
        return live


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.numel() == 0 or torch.equal(*flat)


def _peek(container: dict[Any, Any], key: Any) -> Any:
    # A defaultdict or Counter must not gain an entry, or answer 0, by being asked.
    return dict.get(container, key)


def _refill_dict(target: dict[Any, Any], items: dict[Any, Any]) -> None:
    target.clear()
    for key, value in items.items():
        target[key] = value


def _refill_list(target: list[Any], values: list[Any]) -> None:
    target[:] = values


def _root(array: np.ndarray[Any, Any]) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
