"""Putting stored values into live containers: worked out first, then done in one go.

What is live keeps its identity wherever the stored value fits it: tensors and arrays are copied
into, containers refilled, generators set. Two stored values never end in one live object.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import MismatchError
from holdfast.format.objects import ArrayRef, EnumValue, GeneratorState, TensorRef, join
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.copying import StoredPair, are_plain, copy_tensors, in_parts
from holdfast.state.dtypes import DTYPE_NAMES, TORCH_DTYPES
from holdfast.state.leaves import identity, refusal
from holdfast.state.trees import (
    Lifting,
    check_fit,
    owned,
    placed,
    present_device,
    revived,
    with_flags,
)
from holdfast.state.unread import Fetching, Stored, Table, Unread, fetched

_T = TypeVar("_T")
_Owner = tuple[Tensor, str, str]
"""A live tensor, the component, and the key of what goes into it."""


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
        """In memory of its own, as it was laid out."""
        if ref.grad or ref.parameter or ref.order:
            return with_flags(placed(stored, ref, self.device(ref)), ref)
        return owned(stored, self.device(ref))


_STORED_PLACE = StoredPlace()

_SHARED = "shared with another name here, but not in the checkpoint: it became one of its own"
_OVERLAPS = "overlaps other live memory that is loaded, so it got memory of its own"
_OF_MODULE = "is the memory of a module here, so it got memory of its own"
_MOVED = "saved on another device, copied to where the live tensor is"
_MAX_NAMED = 3

_MANY = 16
_KEY, _SHAPE, _DTYPE, _CDATA = map(attrgetter, ("key", "shape", "dtype", "_cdata"))


class Claims:
    """What already takes a stored value; shared by all components of one load.

    A plain tree may hold live tensors of the model (`best = model.state_dict()`, before the
    first improvement). Copying the stored tree into them would overwrite the model.
    """

    def __init__(self, protected: Iterable[Tensor] = ()) -> None:
        """`protected`: tensors into whose memory only their own values go."""
        self._taken: set[Any] = set()
        self._first: dict[Hashable, tuple[str, Stored]] = {}
        self._states: dict[int, Any] = {}
        self._owners: dict[int, _Owner] = {}
        self._many: list[Iterable[tuple[int, _Owner]]] = []
        self._spans: dict[int, list[tuple[int, int, str]]] = {}
        self._lists: list[list[_Remark]] = []
        self._protected = {
            tensor.untyped_storage()._cdata for tensor in protected if refusal(tensor) is None
        }

    def take(self, who: Any) -> bool:
        """True the first time that `who` is asked for."""
        if who in self._taken:
            return False
        self._taken.add(who)
        return True

    def take_memory(self, tensor: Tensor, component: str, key: str) -> str | None:
        """As `take`, for the memory of a tensor; says why not. Disjoint views are fine."""
        storage = tensor.untyped_storage()._cdata
        if storage in self._protected:
            return _OF_MODULE
        claim = (tensor, component, key)
        owner = self._known_owners().setdefault(storage, claim)
        return None if owner is claim else self._take_part(storage, owner, claim)

    def take_memories(self, tensors: Sequence[Tensor], component: str, keys: Sequence[str]) -> bool:
        """As `take_memory` for plain tensors (see `copying.are_plain`), when each has a storage
        of its own; else for none."""
        storages = [*map(Tensor.untyped_storage, tensors)]
        if not all(map(torch.UntypedStorage.nbytes, storages)):
            return False
        owners = [*map(_CDATA, storages)]
        taken = {*owners}
        if len(taken) < len(owners) or not taken.isdisjoint(self._protected):
            return False
        if not taken.isdisjoint(self._known_owners()):
            return False
        self._many.append(zip(owners, zip(tensors, repeat(component), keys), strict=True))
        return True

    def _known_owners(self) -> dict[int, _Owner]:
        """Storage → what has it. Those of many are noted only when somebody asks."""
        for owners in self._many:
            self._owners.update(owners)
        self._many.clear()
        return self._owners

    def _take_part(self, storage: int, owner: _Owner, claim: _Owner) -> str | None:
        if storage not in self._spans:
            self._spans[storage] = [(*_span(owner[0]), join(*owner[1:]))]
        spans = self._spans[storage]
        start, stop = _span(claim[0])
        path = join(*claim[1:])
        at = bisect(spans, (start, stop, path))
        for other in spans[max(at - 1, 0) : at + 1]:
            if start < other[1] and other[0] < stop:
                return f"({other[2]}) {_OVERLAPS}"
        insort(spans, (start, stop, path))
        return None

    def take_state(self, live: Any, members: Any) -> Any:
        """The state that the generator `live` takes: the first that is claimed for it."""
        return self._states.setdefault(id(live), members)

    def remarks(self) -> list[_Remark]:
        """A new list for what one component has to say; it counts among the `notes`."""
        self._lists.append([])
        return self._lists[-1]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not restored as it was: sharing that was lost, and moved tensors."""
        paths: dict[str, list[str]] = {}
        for remark in (remark for remarks in self._lists for remark in remarks):
            paths.setdefault(remark.reason, []).append(join(remark.component, remark.path))
        return tuple(f"{_shown(names)}: {reason}" for reason, names in paths.items())

    def agree(self, path: str, live: Tensor, stored: Stored) -> None:
        """Several names of one live tensor, in several components, must bring the same bits.

        Raises:
            MismatchError: they do not.
        """
        first, known = self._first.setdefault(identity(live), (path, stored))
        if known is not stored and not _same_bits(fetched(known), fetched(stored)):
            raise MismatchError(
                "the checkpoint",
                hint=f"{first} and {path} are one tensor here, and had two values when saved",
            )


@dataclass(slots=True, kw_only=True)
class _Remark:
    component: str
    path: str
    reason: str

    stored: Any = None
    """What the path is to be continued from, towards the root."""


def _shown(paths: list[str]) -> str:
    more = len(paths) - _MAX_NAMED
    return ", ".join(paths[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the storage that the tensor reaches, and the one after the last."""
    item, start = tensor.element_size(), int(tensor.storage_offset())
    if tensor.is_contiguous():
        extent = tensor.numel()
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum(int((size - 1) * stride) for size, stride in steps)
    return start * item, (start + extent) * item


def is_writable_in_place(tensor: Tensor) -> bool:
    """Whether `copy_` into `tensor` reaches each element once."""
    if refusal(tensor) is not None or tensor.is_inference():
        return False
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) != 1


class Merge:
    """Collects what is to be done; `commit` does it. Nothing live changes before."""

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        specs: Mapping[str, TensorSpec],
        claims: Claims,
        component: str = "",
    ) -> None:
        self._claims = claims
        self._component = component
        self._remarks = claims.remarks()
        self._tensors = tensors
        self._specs = specs
        self._lifting = Lifting(Fetching(tensors))
        self._copies: list[StoredPair] = []
        self._in_bulk: tuple[list[Tensor], list[str]] = ([], [])
        self._edits: list[Callable[[], None]] = []
        self._made: dict[int, Any] = {}
        self._made_tensors: dict[str, Tensor] = {}
        self._flags: dict[str, tuple[bool, bool]] = {}
        self._made_arrays: dict[str, Any] = {}
        self._alive: list[Any] = []

    def then(self, edit: Callable[[], None]) -> None:
        """Do `edit` at the commit, after the tensors were copied."""
        self._edits.append(edit)

    def commit(self) -> None:
        """Copy the tensors, then change the containers."""
        if isinstance(self._tensors, Table):
            is_all = not self._copies
            self._copies += self._tensors.copy_into(*self._in_bulk, is_all=is_all)
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
        return (
            self._array(live, stored)
            if isinstance(stored, ArrayRef)
            else self._lifting.lift(stored)
        )

    def refill(self, live: Any, stored: Any, place: Place = _STORED_PLACE) -> Any:
        """As `merge`, for a container that must be refilled even when its class differs."""
        self._made[id(stored)] = live
        self._claims.take(id(live))
        self._fill(live, live, stored, place)
        return live

    def _container(self, live: Any, stored: Any, place: Place) -> Any:
        if id(stored) in self._made:
            return self._made[id(stored)]
        same = type(live) is type(stored)
        is_free = same and self._claims.take(id(live))
        if same and not is_free:
            self._remark(stored, _SHARED)
        target = live if is_free else type(stored)()
        self._alive.append(stored)
        self._made[id(stored)] = target
        self._fill(live, target, stored, place)
        return target

    def _remark(self, stored: Any, reason: str) -> None:
        self._remarks.append(
            _Remark(component=self._component, path="", reason=reason, stored=stored)
        )

    def _remark_tensor(self, key: str, reason: str) -> None:
        self._remarks.append(_Remark(component=self._component, path=key, reason=reason))

    def _fill(self, live: Any, target: Any, stored: Any, place: Place) -> None:
        before = len(self._remarks)
        self._fill_items(live, target, stored, place)
        if len(self._remarks) > before:
            self._continue_paths(self._remarks[before:], stored)

    def _continue_paths(self, remarks: list[_Remark], stored: Any) -> None:
        items = stored.items() if isinstance(stored, dict) else enumerate(stored)
        names = {id(value): name for name, value in items}
        for remark in remarks:
            if remark.stored is not None and id(remark.stored) in names:
                name = str(names[id(remark.stored)])
                remark.path = join(name, remark.path) if remark.path else name
                remark.stored = stored

    def _fill_items(self, live: Any, target: Any, stored: Any, place: Place) -> None:
        if isinstance(stored, dict):
            there = live if isinstance(live, dict) else {}
            # A defaultdict or Counter must not gain an entry, or answer 0, by being asked.
            here = [*map(dict.get, repeat(there), stored)]
            values = self._plain_tensors(here, [*stored.values()], place) or [
                self.merge(known, value, place)
                for known, value in zip(here, stored.values(), strict=True)
            ]
            if values is here and _has_names(target, stored):
                return  # it stays as it is, with other values in its tensors
            items = dict(zip(stored, values, strict=True))
            self._edits.append(lambda: _refill_dict(target, items))
        else:
            known = live[: len(stored)] if isinstance(live, list) else []
            here = [*known, *[None] * (len(stored) - len(known))]
            values = self._plain_tensors(here, stored, place) or [
                self.merge(known, value, place) for known, value in zip(here, stored, strict=True)
            ]
            self._edits.append(lambda: _refill_list(target, values))

    def _plain_tensors(
        self, live: Sequence[Any], stored: Sequence[Any], place: Place
    ) -> Sequence[Any] | None:
        """What `merge` gives for many plain tensors that all fit, in a few passes over them.

        None, and nothing is noted, when there is anything to be decided about any of them.
        """
        is_worth_it = len(stored) >= _MANY and place is _STORED_PLACE
        if not is_worth_it or {*map(type, stored)} != {TensorRef}:
            return None
        keys = [*map(_KEY, stored)]
        if stored != [*map(TensorRef, keys)]:
            return None
        if len({*keys}) < len(keys) or not self._made_tensors.keys().isdisjoint(keys):
            return None
        if not _all_fit(live, [*_values(self._specs, keys)]):
            return None
        if not self._claims.take_memories(live, self._component, keys):
            return None
        self._made_tensors.update(zip(keys, live, strict=True))
        if isinstance(self._tensors, Table):
            self._in_bulk[0].extend(live)
            self._in_bulk[1].extend(keys)
        else:
            self._copies += zip(live, map(self._tensors.__getitem__, keys), strict=True)
        return live

    def _immutable(self, live: Any, stored: Any, place: Place) -> Any:
        if type(stored) not in (tuple, set, frozenset):
            return stored
        if not isinstance(stored, tuple):
            return type(stored)(self.merge(None, value, place) for value in stored)
        known = (
            live if isinstance(live, tuple) and len(live) == len(stored) else (None,) * len(stored)
        )
        before = len(self._remarks)
        made = tuple(self.merge(a, b, place) for a, b in zip(known, stored, strict=True))
        self._continue_paths(self._remarks[before:], stored)
        return made

    def _tensor(self, live: Any, ref: TensorRef, place: Place) -> Tensor:
        made = self._made_tensors.get(ref.key)
        if made is None:
            made = self._made_tensors[ref.key] = self._new_tensor(live, ref, place)
            if ref.grad or ref.parameter:
                self._flags[ref.key] = (ref.grad, ref.parameter)
            return made
        if (ref.grad, ref.parameter) == self._flags.get(ref.key, (False, False)):
            return made
        if isinstance(live, Tensor) and refusal(live) is None and identity(live) == identity(made):
            return live
        return with_flags(made.detach(), ref)

    def _new_tensor(self, live: Any, ref: TensorRef, place: Place) -> Tensor:
        stored = self._tensors[ref.key]
        if ref.grad or ref.order:
            check_fit(ref, stored.empty("meta") if isinstance(stored, Unread) else stored)
        if not isinstance(live, Tensor) or not self._fits(live, ref, place):
            return self._made_at(place, ref, stored)
        self._copies.append((live, stored))
        if ref.grad and not live.requires_grad:
            self._edits.append(partial(_require_grad, live))
        return live

    def _made_at(self, place: Place, ref: TensorRef, stored: Stored) -> Tensor:
        if not isinstance(stored, Unread):
            return place.make(ref, stored)
        made = place.make(ref, stored.empty(place.device(ref)))
        self._copies.append((made.detach(), stored))
        return made

    def _fits(self, live: Tensor, ref: TensorRef, place: Place) -> bool:
        if not is_writable_in_place(live):
            return False
        spec = self._specs[ref.key]
        if DTYPE_NAMES[live.dtype] != spec.dtype or live.shape != spec.shape:
            self._check_not_trained(live, spec)
            return False
        is_there = self._is_there(live, ref, place)
        # Elsewhere the place has a reason: a kernel wants the tensor there.
        if not is_there and not isinstance(place, StoredPlace):
            return False
        lost = self._claims.take_memory(live, self._component, ref.key)
        if lost is not None:
            self._remark_tensor(ref.key, lost)
        elif not is_there:
            self._remark_tensor(ref.key, _MOVED)
        return lost is None

    @staticmethod
    def _is_there(live: Tensor, ref: TensorRef, place: Place) -> bool:
        if place is _STORED_PLACE and ref.device == "cpu" and live.is_cpu:
            return True
        return live.device.type == place.device(ref).type

    def _check_not_trained(self, live: Tensor, spec: TensorSpec) -> None:
        """An optimizer may hold a tensor that requires grad: another in its place is no load."""
        if live.requires_grad:
            path = join(self._component, spec.key)
            raise MismatchError(
                "the checkpoint",
                wrong_shape=[
                    f"{path}: stored {spec.dtype} {list(spec.shape)}, "
                    f"live {DTYPE_NAMES[live.dtype]} {list(live.shape)}, which requires grad"
                ],
            )

    def _generator(self, live: Any, node: GeneratorState) -> Any:
        fresh = self._lifting.generator(node)
        kind = generators.kind_of(live)
        same = kind == node.kind and generators.misfit(live, node, self._specs) is None
        if not same:
            return fresh
        members = self._lifting.members(node.members)
        first = self._claims.take_state(live, members)
        if first is members:
            self._edits.append(lambda: generators.write(live, members))
        elif not _same_state(first, members):
            self._remark(node, _SHARED)
            return fresh
        return live

    def _array(self, live: Any, ref: ArrayRef) -> Any:
        if ref.key not in self._made_arrays:
            self._made_arrays[ref.key] = self._new_array(live, ref)
        return self._made_arrays[ref.key]

    def _new_array(self, live: Any, ref: ArrayRef) -> Any:
        stored = self._lifting.lift(ref)
        if type(live) is not np.ndarray:
            return stored
        fits = live.dtype == stored.dtype and live.shape == stored.shape and live.flags.writeable
        if not fits:
            return stored
        if not self._claims.take(("array", id(_root(live)))):
            self._remark_tensor(ref.key, _OVERLAPS)
            return stored
        self._edits.append(lambda: np.copyto(live, stored))
        return live


def _all_fit(live: Sequence[Any], specs: Sequence[TensorSpec]) -> bool:
    """Whether all are plain tensors of the shapes and dtypes that were stored."""
    for some in in_parts(len(live)):
        if not are_plain(live[some]):
            return False
        if [*map(_SHAPE, live[some])] != [*map(_SHAPE, specs[some])]:
            return False
        # Few pairs differ from each other, and none of the many is kept.
        dtypes = {*zip(map(_DTYPE, live[some]), map(_DTYPE, specs[some]), strict=True)}
        if any(dtype != TORCH_DTYPES[name] for dtype, name in dtypes):
            return False
    return True


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return one.numel() == 0 or torch.equal(*flat)


def _same_state(one: Any, other: Any) -> bool:
    """Whether the members of two generator states are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_state(one[k], other[k]) for k in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and _same_bits(one, other)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _values(of: Mapping[str, _T], keys: Sequence[str]) -> Iterable[_T]:
    """The values of these keys; most often they are all, in the same order."""
    return of.values() if [*of] == keys else map(of.__getitem__, keys)


def _require_grad(tensor: Tensor) -> None:
    tensor.requires_grad_()


def _refill_dict(target: dict[Any, Any], items: dict[Any, Any]) -> None:
    target.clear()
    for key, value in items.items():
        target[key] = value


def _has_names(target: Any, stored: Mapping[Any, Any]) -> bool:
    """Whether it is a dict with the same texts as keys, in the same order."""
    return type(target) is dict and {*map(type, target)} == {str} and [*target] == [*stored]


def _refill_list(target: list[Any], values: Sequence[Any]) -> None:
    target[:] = values


def _root(array: np.ndarray[Any, Any]) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
