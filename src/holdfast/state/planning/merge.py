"""Merging of stored values into live containers: first planned, then applied at once.

A live object keeps its identity wherever the stored value fits it: tensors and arrays are copied
into, containers refilled, generators set. Two stored values are never put into one live object.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from holdfast.errors import MismatchError, listing
from holdfast.format.nodes import (
    ArrayRef,
    EnumValue,
    GeneratorState,
    SubclassRef,
    TensorRef,
)
from holdfast.format.objects import DequeItems, join_path
from holdfast.format.tensors import TensorSpec
from holdfast.state import generators
from holdfast.state.leaves import (
    DTYPE_NAMES,
    NUMPY_DTYPES,
    TORCH_DTYPES,
    identity,
    is_subclass,
    local_of,
    plain_parts,
    refusal,
    span,
)
from holdfast.state.planning.copying import (
    Fetching,
    LazyTensors,
    Stored,
    StoredPair,
    UnreadTensor,
    are_plain,
    copy_tensors,
    fetched,
    slices_for_cache,
)
from holdfast.state.planning.inner import InnerPair, match_inner, stored_for
from holdfast.state.planning.livevalues import placed_as, revived
from holdfast.state.selection import Problems, shortened
from holdfast.state.trees import (
    Lifting,
    check_fit,
    is_torch_memory,
    owned,
    placed,
    present_device,
    rebuilt,
    with_flags,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_T = TypeVar("_T")
_Owner = tuple[Tensor, str, str]
"""A live tensor, and the component and key of the stored one for it."""


class Placement:
    """Device and layout of new tensors, made where no live one can be copied into: as saved."""

    needs_device = False
    """Whether a live tensor on another device is replaced, not copied into."""

    def choose_device(self, ref: TensorRef) -> torch.device:
        """Return the stored device, or the CPU if this machine lacks it."""
        return present_device(ref.device)

    def make_tensor(self, ref: TensorRef, stored: Tensor) -> Tensor:
        """Make a tensor in newly allocated memory, with its saved layout."""
        if ref.grad or ref.parameter or ref.order:
            return with_flags(placed(stored, ref, self.choose_device(ref)), ref)
        return owned(stored, self.choose_device(ref))


_STORED_PLACE = Placement()

_SHARED = "shared with another name here, but not in the checkpoint: it became a separate tensor"
_OVERLAPS = "overlapped another live value and now has memory of its own, no longer shared"
_OF_MODULE = "is the memory of a module here, so it got memory of its own"
_MOVED = "saved on another device, copied to where the live tensor is"

_MAXLEN = "the deque keeps maxlen"
CASTS = "gives it a dtype that differs from the saved one, so the resumed training differs"

_ALIGNMENT = 16
"""A multiple of the size of every element."""
_MANY = 16
_KEY, _SHAPE, _DTYPE, _CDATA = map(attrgetter, ("key", "shape", "dtype", "_cdata"))


class Claims:
    """Record of live objects that a stored value is assigned to; shared by all parts of a load.

    A plain tree may hold live tensors of the model (`best = model.state_dict()`, before the
    first improvement). Copying the stored tree into them would overwrite the model.
    """

    def __init__(self, protected: Iterable[Tensor] = ()) -> None:
        """Start an empty record; the memory of `protected` tensors cannot be claimed."""
        self._taken: set[Any] = set()
        self._of_modules: dict[int, list[tuple[str, Tensor, Stored]]] = {}
        self._states: dict[int, Any] = {}
        self._owners: dict[int, _Owner] = {}
        self._many: list[Iterable[tuple[int, _Owner]]] = []
        self._spans: dict[int, list[tuple[int, int, str]]] = {}
        self._lists: list[list[_Remark]] = []
        self._messages: list[str] = []
        self._protected = {
            part.untyped_storage()._cdata
            for tensor in protected
            if refusal(tensor) is None
            for part in plain_parts(tensor)
        }

    def claim_identity(self, who: Any) -> bool:
        """Claim the hashable identity `who`; False if it was claimed before."""
        if who in self._taken:
            return False
        self._taken.add(who)
        return True

    def take_memory(self, tensor: Tensor, component: str, key: str) -> str | None:
        """Claim a tensor's memory; returns the refusal, or None. Disjoint views may both claim."""
        tensor = local_of(tensor)
        storage = tensor.untyped_storage()._cdata
        if storage in self._protected:
            return _OF_MODULE
        claim = (tensor, component, key)
        owner = self._known_owners().setdefault(storage, claim)
        return None if owner is claim else self._take_part(storage, owner, claim)

    def take_memories(self, tensors: Sequence[Tensor], component: str, keys: Sequence[str]) -> bool:
        """Claim the memory of plain tensors, all if it is theirs alone and free, or none."""
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
        """Map storages to their owners; those claimed in bulk are added on the first call."""
        for owners in self._many:
            self._owners.update(owners)
        self._many.clear()
        return self._owners

    def _take_part(self, storage: int, owner: _Owner, claim: _Owner) -> str | None:
        if storage not in self._spans:
            self._spans[storage] = [(*span(owner[0]), join_path(*owner[1:]))]
        spans = self._spans[storage]
        start, stop = span(claim[0])
        path = join_path(*claim[1:])
        at = bisect(spans, (start, stop, path))
        for other in spans[max(at - 1, 0) : at + 1]:
            if start < other[1] and other[0] < stop:
                return f"{_OVERLAPS} with {other[2]}"
        insort(spans, (start, stop, path))
        return None

    def take_state(self, live: Any, members: Any) -> Any:
        """Assign a state to the generator `live`; returns the first one assigned to it."""
        return self._states.setdefault(id(live), members)

    def remarks(self) -> list[_Remark]:
        """Return a new list, to which one component adds remarks for `notes`."""
        self._lists.append([])
        return self._lists[-1]

    def add_note(self, message: str) -> None:
        """Add a message to `notes`."""
        self._messages.append(message)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about inexact restores: memory no longer shared, tensors on other devices."""
        paths: dict[str, list[str]] = {}
        for remark in (remark for remarks in self._lists for remark in remarks):
            paths.setdefault(remark.reason, []).append(join_path(remark.component, remark.path))
        shared = (f"{shortened(names)}: {reason}" for reason, names in paths.items())
        return (*shared, *self._messages)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notes on memory that is shared no more, other limits of deques, and other dtypes."""
        texts = (_OVERLAPS, _MAXLEN, CASTS)
        return tuple(note for note in self.notes if any(text in note for text in texts))

    def assign(self, path: str, live: Tensor, stored: Stored) -> None:
        """Record the stored value of a module's tensor, for `expect_agreement`."""
        storage = local_of(live).untyped_storage()._cdata
        self._of_modules.setdefault(storage, []).append((path, live, stored))

    def expect_agreement(self) -> None:
        """Check that module tensors in the same memory, in all components, have the same bits."""
        lost = [
            text
            for of_storage in self._of_modules.values()
            if len(of_storage) > 1
            for text in _contradictions(of_storage)
        ]
        if lost:
            raise MismatchError("the checkpoint", hint=listing(lost))


def _contradictions(of_storage: Sequence[tuple[str, Tensor, Stored]]) -> Iterator[str]:
    """Yield a message for each group of overlapping tensors that cannot all get their values."""
    distinct: dict[Hashable, tuple[str, Tensor, Stored]] = {}
    for path, live, stored in of_storage:
        first, _, known = distinct.setdefault(identity(live), (path, live, stored))
        if known is not stored and not _same_bits(fetched(known), fetched(stored)):
            yield f"{first} and {path} are one tensor here, and had two values when saved"
    in_place = (
        (path, local_of(live), stored)
        for path, live, stored in distinct.values()
        if is_writable_in_place(live)
    )
    group: list[tuple[str, Tensor, Stored]] = []
    stop = 0
    for one in sorted(in_place, key=lambda one: span(one[1])):
        start, end = span(one[1])
        if group and start >= stop:
            yield from _contradiction(group)
            group = []
        group.append(one)
        stop = max(stop, end)
    yield from _contradiction(group)


def _contradiction(group: Sequence[tuple[str, Tensor, Stored]]) -> Iterator[str]:
    """Yield a message if copying the values into memory as the live one loses some of them."""
    if len(group) < 2:
        return
    spans = [span(live) for _, live, _ in group]
    base = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    memory = torch.zeros(max(stop for _, stop in spans) - base, dtype=torch.uint8)
    copies = []
    for _, live, stored in group:
        offset = int(live.storage_offset()) - base // live.element_size()
        view = torch.empty(0, dtype=live.dtype).set_(
            memory.untyped_storage(), offset, live.shape, live.stride()
        )
        view = view.conj() if live.is_conj() else view
        view = torch._neg_view(view) if live.is_neg() else view
        copies.append((view, fetched(stored)))
    for view, values in copies:
        view.copy_(values)
    lost = [
        path
        for (path, _, _), (view, values) in zip(group, copies, strict=True)
        if not _same_bits(view.resolve_conj().resolve_neg(), values)
    ]
    if lost:
        others = [path for path, _, _ in group if path not in lost]
        yield (
            f"{shortened([*lost, *others])} share memory here, and the values that were saved for "
            "it differ"
        )


@dataclass(slots=True, kw_only=True)
class _Remark:
    component: str
    path: str
    reason: str
    stored: Any = None
    """Container that the path starts at; the path is extended from it towards the root."""


def is_writable_in_place(tensor: Tensor) -> bool:
    """Whether `copy_` can write into `tensor`: none of its elements share memory."""
    tensor = local_of(tensor)
    if refusal(tensor) is not None or tensor.is_inference() or is_subclass(tensor):
        return False
    return tensor.is_contiguous() or torch._debug_has_internal_overlap(tensor) != 1


class Merge:
    """A planned merge: collects changes; `commit` makes them. Nothing live changes before."""

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        specs: Mapping[str, TensorSpec],
        claims: Claims,
        component: str = "",
        layouts: Mapping[str, DTensor] | None = None,
    ) -> None:
        """`layouts`: DTensors that tell how those of some keys are placed over the ranks."""
        self._layouts = layouts or {}
        self._claims = claims
        self._component = component
        self._remarks = claims.remarks()
        self._tensors = tensors
        self._specs = specs
        self._lifting = Lifting(Fetching(tensors))
        self._copies: list[StoredPair] = []
        self._in_bulk: tuple[list[Tensor], list[str]] = ([], [])
        self._edits: list[Callable[[], object]] = []
        self._made: dict[int, Any] = {}
        self._made_tensors: dict[str, Tensor] = {}
        self._flags: dict[str, tuple[bool, bool]] = {}
        self._made_arrays: dict[str, Any] = {}
        self._alive: list[Any] = []

    def then(self, edit: Callable[[], object]) -> None:
        """Register a callback that `commit` calls after it has copied the tensors."""
        self._edits.append(edit)

    def commit(self) -> None:
        """Make the planned changes: copy the tensors, then run the callbacks."""
        if isinstance(self._tensors, LazyTensors):
            is_all = not self._copies
            self._copies += self._tensors.copy_into(*self._in_bulk, is_all=is_all)
        copy_tensors(self._copies)
        with torch.no_grad():
            for edit in self._edits:
                edit()

    def merge(self, live: Any, stored: Any, place: Placement = _STORED_PLACE) -> Any:
        """Plan the replacement of `live` by `stored`; returns `live` itself where possible."""
        if isinstance(stored, TensorRef):
            return self._merge_tensor(live, stored, place)
        if isinstance(stored, dict | list):
            return self._container(live, stored, place)
        if isinstance(stored, tuple | set | frozenset):
            return self._immutable(live, stored, place)
        if isinstance(stored, SubclassRef):
            return self._merge_subclass(live, stored)
        if isinstance(stored, GeneratorState):
            return self._merge_generator(live, stored)
        if isinstance(stored, EnumValue):
            return revived(live, stored)
        return (
            self._merge_array(live, stored)
            if isinstance(stored, ArrayRef)
            else self._lifting.lift(stored)
        )

    def refill(self, live: Any, stored: Any) -> Any:
        """Plan to refill the container `live`, even if its class differs from the stored one."""
        self._made[id(stored)] = live
        self._claims.claim_identity(id(live))
        if isinstance(live, deque) and isinstance(stored, DequeItems):
            self._compare_maxlen(live, stored)
        self._fill_container(live, live, stored, _STORED_PLACE)
        return live

    def _container(self, live: Any, stored: Any, place: Placement) -> Any:
        if id(stored) in self._made:
            return self._made[id(stored)]
        is_deque = isinstance(stored, DequeItems)
        same = type(live) is (deque if is_deque else type(stored))
        is_free = same and self._claims.claim_identity(id(live))
        if same and not is_free:
            self._remark(stored, _SHARED)
        if same and is_deque:
            self._compare_maxlen(live, stored)
        new = deque(maxlen=stored.maxlen) if is_deque and not is_free else type(stored)()
        target = live if is_free else new
        self._alive.append(stored)
        self._made[id(stored)] = target
        self._fill_container(live, target, stored, place)
        return target

    def _compare_maxlen(self, live: deque[Any], stored: DequeItems) -> None:
        """Remark another maxlen, which the live deque keeps; refuse one that would drop items."""
        if live.maxlen == stored.maxlen:
            return
        if live.maxlen is not None and len(stored) > live.maxlen:
            raise MismatchError(
                "the checkpoint",
                hint=f"{self._component}: a deque(maxlen={live.maxlen}) cannot take the "
                f"{len(stored)} items of the one that was saved, of maxlen={stored.maxlen}: make "
                f"it with maxlen={stored.maxlen}, or drop items in edit_load",
            )
        self._remark(stored, f"{_MAXLEN}={live.maxlen}, saved with maxlen={stored.maxlen}")

    def _remark(self, stored: Any, reason: str) -> None:
        self._remarks.append(
            _Remark(component=self._component, path="", reason=reason, stored=stored)
        )

    def _remark_tensor(self, key: str, reason: str) -> None:
        self._remarks.append(_Remark(component=self._component, path=key, reason=reason))

    def _fill_container(self, live: Any, target: Any, stored: Any, place: Placement) -> None:
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
                remark.path = join_path(name, remark.path) if remark.path else name
                remark.stored = stored

    def _fill_items(self, live: Any, target: Any, stored: Any, place: Placement) -> None:
        if isinstance(stored, dict):
            live_items = live if isinstance(live, dict) else {}
            # By `dict.get`: a lookup adds an entry to a defaultdict, and gives 0 in a Counter.
            known = [*map(dict.get, repeat(live_items), stored)]
            values = self._plain_tensors(known, [*stored.values()], place) or [
                self.merge(item, value, place)
                for item, value in zip(known, stored.values(), strict=True)
            ]
            if values is known and _has_names(target, stored):
                return  # the dict stays as it is; only the values of its tensors change
            items = dict(zip(stored, values, strict=True))
            self._edits.append(lambda: _refill_dict(target, items))
        else:
            known = [*live][: len(stored)] if isinstance(live, list | deque) else []
            known = [*known, *[None] * (len(stored) - len(known))]
            values = self._plain_tensors(known, stored, place) or [
                self.merge(item, value, place) for item, value in zip(known, stored, strict=True)
            ]
            self._edits.append(lambda: _refill_list(target, values))

    def _plain_tensors(
        self, live: Sequence[Any], stored: Sequence[Any], place: Placement
    ) -> Sequence[Any] | None:
        """Plan the merge of many plain tensors at once; None if any must be separate."""
        is_worth_it = len(stored) >= _MANY and place is _STORED_PLACE
        if not is_worth_it or {*map(type, stored)} != {TensorRef}:
            return None
        keys = [*map(_KEY, stored)]
        if stored != [*map(TensorRef, keys)]:
            return None
        if len({*keys}) < len(keys) or not self._made_tensors.keys().isdisjoint(keys):
            return None
        if not _all_fit(live, [*_select_values(self._specs, keys)]):
            return None
        if not self._claims.take_memories(live, self._component, keys):
            return None
        self._made_tensors.update(zip(keys, live, strict=True))
        if isinstance(self._tensors, LazyTensors):
            self._in_bulk[0].extend(live)
            self._in_bulk[1].extend(keys)
        else:
            self._copies += zip(live, map(self._tensors.__getitem__, keys), strict=True)
        return live

    def _immutable(self, live: Any, stored: Any, place: Placement) -> Any:
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

    def _merge_tensor(self, live: Any, ref: TensorRef, place: Placement) -> Tensor:
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

    def _merge_subclass(self, live: Any, stored: SubclassRef) -> Tensor:
        """Plan copies into the inner tensors of `live`; make a new one if they are taken."""
        path = join_path(self._component, _first_key(stored).rpartition(".")[0])
        pairs = self._match_inner(path, live, stored)
        taken = [self._claims.take_memory(one, self._component, ref.key) for _, one, ref in pairs]
        if any(taken) or not all(is_writable_in_place(one) for _, one, _ in pairs):
            return rebuilt(live, stored, Fetching(self._tensors))
        self._copies += [
            (one, stored_for(path, one, self._tensors, ref)) for path, one, ref in pairs
        ]
        return live  # type: ignore[no-any-return]

    def _match_inner(self, path: str, live: Any, stored: Any) -> list[InnerPair]:
        problems = Problems()
        pairs = match_inner(path, stored, live, self._specs, problems, {})
        problems.raise_if_any("the checkpoint")
        return pairs

    def _new_tensor(self, live: Any, ref: TensorRef, place: Placement) -> Tensor:
        stored = self._tensors[ref.key]
        if ref.grad or ref.order:
            check_fit(ref, stored.empty("meta") if isinstance(stored, UnreadTensor) else stored)
        if not isinstance(live, Tensor) or not self._fits(live, ref, place):
            return self._made_at(place, ref, stored)
        self._copies.append((local_of(live), stored))
        if ref.grad and not live.requires_grad:
            self._edits.append(live.requires_grad_)
        return live

    def _made_at(self, place: Placement, ref: TensorRef, stored: Stored) -> Tensor:
        layout = self._layouts.get(ref.key)
        plain = ref if layout is None else TensorRef(ref.key, ref.device)
        if not isinstance(stored, UnreadTensor):
            made = place.make_tensor(plain, stored)
        else:
            # Read with all others at `commit`: one by one, blocks would be read several times.
            made = place.make_tensor(plain, stored.empty(place.choose_device(plain)))
            self._copies.append((made.detach(), stored))
        return made if layout is None else with_flags(placed_as(layout, made), ref)

    def _fits(self, live: Tensor, ref: TensorRef, place: Placement) -> bool:
        if not is_writable_in_place(live):
            if is_subclass(local_of(live)):
                self._match_inner(join_path(self._component, ref.key), live, ref)
            return False
        spec = self._specs[ref.key]
        if DTYPE_NAMES[live.dtype] != spec.dtype or live.shape != spec.shape:
            self._check_not_trained(live, spec)
            return False
        is_on_device = self._is_on_device(live, ref, place)
        if not is_on_device and place.needs_device:
            return False
        lost = self._claims.take_memory(live, self._component, ref.key)
        if lost is not None:
            self._remark_tensor(ref.key, lost)
        elif not is_on_device:
            self._remark_tensor(ref.key, _MOVED)
        return lost is None

    @staticmethod
    def _is_on_device(live: Tensor, ref: TensorRef, place: Placement) -> bool:
        if place is _STORED_PLACE and ref.device == "cpu" and live.is_cpu:
            return True
        return live.device.type == place.choose_device(ref).type

    def _check_not_trained(self, live: Tensor, spec: TensorSpec) -> None:
        """Refuse to replace a live tensor that requires grad, as an optimizer may hold it."""
        if live.requires_grad:
            path = join_path(self._component, spec.key)
            raise MismatchError(
                "the checkpoint",
                wrong_shape=[
                    f"{path}: stored {spec.dtype} {list(spec.shape)}, "
                    f"live {DTYPE_NAMES[live.dtype]} {list(live.shape)}, which requires grad"
                ],
            )

    def _merge_generator(self, live: Any, node: GeneratorState) -> Any:
        fresh = self._lifting.lift_generator(node)
        kind = generators.kind_of(live)
        same = kind == node.kind and generators.misfit(live, node, self._specs) is None
        if not same:
            return fresh
        members = self._lifting.lift_members(node.members)
        first = self._claims.take_state(live, members)
        if first is members:
            self._edits.append(lambda: generators.write_generator_state(live, members))
        elif not _same_state(first, members):
            self._remark(node, _SHARED)
            return fresh
        return live

    def _merge_array(self, live: Any, ref: ArrayRef) -> Any:
        if ref.key not in self._made_arrays:
            self._made_arrays[ref.key] = self._new_array(live, ref)
        return self._made_arrays[ref.key]

    def _new_array(self, live: Any, ref: ArrayRef) -> Any:
        spec = self._specs[ref.key]
        dtype = NUMPY_DTYPES[spec.dtype]
        fits = type(live) is np.ndarray and (live.dtype, live.shape) == (dtype, spec.shape)
        if not fits or not is_torch_memory(live):
            live = np.empty(spec.shape, dtype)
        elif not self._claims.claim_identity(("array", id(_find_base_array(live)))):
            self._remark_tensor(ref.key, _OVERLAPS)
            live = np.empty(spec.shape, dtype)
        self._copies.append((torch.from_numpy(live), self._tensors[ref.key]))
        return live


def _all_fit(live: Sequence[Any], specs: Sequence[TensorSpec]) -> bool:
    """Whether all of `live` are plain tensors with the shapes and dtypes of `specs`."""
    for some in slices_for_cache(len(live)):
        if not are_plain(live[some]):
            return False
        if [*map(_SHAPE, live[some])] != [*map(_SHAPE, specs[some])]:
            return False
        # As a set: there are few distinct pairs among many.
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


def _select_values(of: Mapping[str, _T], keys: Sequence[str]) -> Iterable[_T]:
    """Return the values of `keys`; fast if these are all keys in the same order."""
    return of.values() if [*of] == keys else map(of.__getitem__, keys)


def _refill_dict(target: dict[Any, Any], items: dict[Any, Any]) -> None:
    target.clear()
    for key, value in items.items():
        target[key] = value


def _has_names(target: Any, stored: Mapping[Any, Any]) -> bool:
    """Whether `target` is a dict with the same string keys as `stored`, in the same order."""
    return type(target) is dict and {*map(type, target)} == {str} and [*target] == [*stored]


def _refill_list(target: list[Any] | deque[Any], values: Sequence[Any]) -> None:
    target.clear()
    target.extend(values)


def _first_key(stored: SubclassRef | TensorRef) -> str:
    """Return the key of the first inner tensor."""
    if isinstance(stored, TensorRef):
        return stored.key
    return _first_key(next(iter(stored.tensors.values())))


def _find_base_array(array: np.ndarray[Any, Any]) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
