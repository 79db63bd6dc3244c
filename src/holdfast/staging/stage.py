"""Stages a captured state: copies it to host memory, laid out as the tensor files will be.

The images are kept between saves while the structure of the state is the same. Later saves copy
only the bytes that changed, into memory that was touched before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor, UntypedStorage

from holdfast.errors import UnsupportedState
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorFile, TensorSpec, lay_out
from holdfast.staging.arena import FileImage
from holdfast.staging.in_memory import (
    ImageTransfer,
    Runs,
    SmallCopy,
    SmallRuns,
    Work,
    arrivals_of,
    copy_of,
    small_runs_of,
)
from holdfast.staging.interfaces import KnownFile, Staged, StagingTransfer
from holdfast.staging.waves import WaveTransfer
from holdfast.state.capture.capture import Captured
from holdfast.state.components import CapturedComponent
from holdfast.threads.buffers import LimitedBuffers

MIN_NBYTES = 8 << 20
MIN_SHARE = 0.1
"""Least amount of tensors that is moved to files of their own: bytes, and share of a component."""
_MOST_SAVES = 64


class Grouping:
    """Learns which tensors of a component do not change between saves, and groups them in files.

    `apart` holds the keys of these tensors, which get files of their own. A wrong guess only costs
    time: bytes are compared before a file is linked instead of written.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._sizes: Mapping[str, int] = {spec.key: spec.nbytes for spec in specs}
        self._num_unchanged = dict.fromkeys(self._sizes, 0)
        self._required: dict[str, int] = {}
        self.apart: frozenset[str] = frozenset()
        self.has_moved = False
        """Whether `apart` has changed since the last `finish_layout`."""

    def finish_layout(self) -> frozenset[str]:
        """Return `apart` for a new layout of the files, and reset `has_moved`."""
        self.has_moved = False
        return self.apart

    def observe(self, changed: Collection[str]) -> None:
        """Update `apart` after a commit; `changed`: keys that differ from the commit before."""
        for key in self._num_unchanged:
            self._num_unchanged[key] = 0 if key in changed else self._num_unchanged[key] + 1
        wrong = self.apart & frozenset(changed)
        for key in wrong:
            # Twice as long each time: a move rewrites the files of the component, so a tensor that
            # changes now and then must not move to and fro.
            self._required[key] = min(2 * self._required.get(key, 1), _MOST_SAVES)
        still = frozenset(
            key for key, count in self._num_unchanged.items() if count >= self._required.get(key, 1)
        )
        if still == self._sizes.keys():
            return  # every file is as it was, however they are grouped
        if wrong or self._is_worthwhile(still - self.apart):
            self.has_moved = self.has_moved or self.apart != still
            self.apart = still

    def _is_worthwhile(self, keys: Collection[str]) -> bool:
        nbytes = sum(self._sizes[key] for key in keys)
        return nbytes >= max(MIN_NBYTES, MIN_SHARE * sum(self._sizes.values()))


class MakeFile(Protocol):
    """Makes what is kept of a tensor file between saves."""

    def __call__(self, file: TensorFile, *, is_apart: bool) -> KnownFile:
        """Make it; `is_apart` as in `KnownFile`."""
        ...


_NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})


class Stager:
    """Copies captured states to reused host memory, one at a time. Not thread-safe."""

    is_shared = False
    """Whether it is a `SharedStager`, which records what is staged whole."""

    def __init__(self, *, memory_budget: int | None = None) -> None:
        """`memory_budget`: most bytes of memory to use; None: as many as the state has."""
        self._budget = memory_budget
        self._is_in_waves = False
        self._pool: LimitedBuffers | None = None
        self._specs: dict[str, tuple[tuple[TensorSpec, ...], range | None, frozenset[str]]] = {}
        self._groups: dict[str, Grouping] = {}
        self._files: dict[str, tuple[KnownFile, ...]] = {}
        self._plans: dict[str, _CopyPlan] = {}

    def takes_waves(self, captured: Captured) -> bool:
        """Whether the state, or an earlier one, is larger than the memory budget."""
        if self._budget is None or self._is_in_waves:
            return self._is_in_waves
        parts = captured.components
        wanted = sum(spec.nbytes for part in parts.values() for spec in part.specs)
        others = (files for name, files in self._files.items() if name not in parts)
        kept = sum(known.file.nbytes for files in others for known in files)
        return wanted + kept > self._budget

    def prepare_staging(
        self,
        captured: Captured,
        *,
        overlapped: Mapping[str, Collection[str]] = _NOTHING,
        is_awaited: bool = False,
    ) -> Staged:
        """Copy the small tensors that are not in `overlapped`, and plan the copies of the others.

        The next call overwrites the images. Images of components that it lacks are kept for a save
        that has them again. Tensors in `overlapped`, keys by component, are copied by
        `ImageTransfer.run_later`, the others by `ImageTransfer.run_now`. With `is_awaited`
        writing begins during the copies, which delays them and shortens the whole save.
        """
        if self.takes_waves(captured):
            return self._in_waves(captured)
        components = captured.components
        for component in components.values():
            self.lay_out_files(component, FileImage)
        now: list[Work] = []
        later: list[Work] = []
        held: list[object] = []
        for name, component in components.items():
            keys = overlapped.get(name, ())
            images = cast(tuple[FileImage, ...], self._files[name])
            if component.addresses is None:
                held += _add_all(images, component.tensors, frozenset(keys), now, later)
                # A device may be copying them already, and training may drop them.
                held += (tensor for tensor in component.tensors.values() if tensor.is_cuda)
                continue
            plan = self._plan_of(component, keys, images)
            for image in images:
                image.clear_for_staging()
            for runs in plan.small_now:
                runs.copy_tensors(component.addresses)
            later += (SmallCopy(runs, component.addresses) for runs in plan.small_later)
            now += (Runs(*some, component.addresses) for some in plan.now)
            held += _storages(plan, component.tensors)
            later += (Runs(*some, component.addresses) for some in plan.later)
        # Files apart are compared and linked rather than written, so they come last.
        for works in (now, later):
            works.sort(key=_is_apart)
        is_early = is_awaited or any(
            known.is_apart for name in components for known in self._files[name]
        )
        return self._staged(components, ImageTransfer(now, later, held=held, is_early=is_early))

    def _staged(
        self, components: Mapping[str, CapturedComponent], transfer: StagingTransfer
    ) -> Staged:
        return Staged(
            files={name: self._files[name] for name in components},
            trees={name: component.tree for name, component in components.items()},
            kinds={name: component.kind for name, component in components.items()},
            by_rank=frozenset(name for name, one in components.items() if one.by_rank),
            transfer=transfer,
        )

    def _plan_of(
        self, component: CapturedComponent, keys: Collection[str], images: Sequence[FileImage]
    ) -> _CopyPlan:
        known = self._plans.get(component.name)
        if known is None or known.keys is not keys or known.images is not images:
            known = self._plans[component.name] = _plan_copies(component.specs, keys, images)
        return known

    def _in_waves(self, captured: Captured) -> Staged:
        assert self._budget is not None
        if not self._is_in_waves:
            self._is_in_waves = True
            self._specs.clear()
            self._files.clear()
            self._plans.clear()
        if self._pool is None:
            num_buffers = self._budget // BLOCK_NBYTES
            self._pool = LimitedBuffers(num_buffers, BLOCK_NBYTES, at_once=True)
        components = captured.components
        for component in components.values():
            self.lay_out_files(component, KnownFile)
        tensors = {
            known.file.name: component.tensors
            for name, component in components.items()
            for known in self._files[name]
        }
        return self._staged(components, WaveTransfer(tensors, self._pool))

    def discard_failed(self, staged: Staged) -> None:
        """Discard digests and buffers that the threads of a failed save may still use."""
        for known in staged.all_files:
            known.discard_digests()
        self._pool = None

    def record_changed_tensors(self, staged: Staged) -> None:
        """Record which tensors a commit changed, to group the unchanging ones in files."""
        for name, files in staged.files.items():
            changed = [known.record_commit() for known in files]
            if None not in changed:
                self._groups[name].observe({key for keys in changed for key in keys or ()})

    def free_memory(self) -> None:
        """Free all images and buffers. No save may be under way."""
        self._pool = None
        self._specs.clear()
        self._groups.clear()
        self._files.clear()
        self._plans.clear()

    def lay_out_files(self, component: CapturedComponent, make: MakeFile) -> None:
        """Lay out a component's files anew if its structure or its grouping has changed."""
        name, specs, numbers = component.name, component.specs, component.numbers
        planned = (specs, numbers, component.apart)
        if self._specs.get(name) != planned:
            self._groups[name] = Grouping(specs)
        elif not self._groups[name].has_moved or numbers is not None:
            return
        self._files.pop(name, None)
        self._plans.pop(name, None)
        # Set last: if there is no memory for the new files, the next call plans again.
        self._specs.pop(name, None)
        unchanging = self._groups[name].finish_layout()
        first = 0 if numbers is None else numbers.start
        files = lay_out(name, specs, apart=unchanging or component.apart, first_number=first)
        if numbers is not None and len(files) != len(numbers):
            raise UnsupportedState([(name, "its keys are too long for the header of one file")])
        self._files[name] = tuple(
            make(file, is_apart=file.specs[0].key in unchanging) for file in files
        )
        self._specs[name] = planned


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyPlan:
    """Positions in the file and numbers of tensors that are copied now, or later in training."""

    keys: Collection[str]
    images: Sequence[FileImage]
    small_now: Sequence[SmallRuns]
    small_later: Sequence[SmallRuns]
    now: Sequence[tuple[FileImage, Sequence[tuple[int, int]]]]
    later: Sequence[tuple[FileImage, Sequence[tuple[int, int]]]]


def _plan_copies(
    specs: Sequence[TensorSpec], keys: Collection[str], images: Sequence[FileImage]
) -> _CopyPlan:
    numbers = {spec.key: number for number, spec in enumerate(specs)}
    overlapped = frozenset(keys)

    def places(image: FileImage, some: Sequence[int], *, is_later: bool) -> list[tuple[int, int]]:
        keyed = ((position, image.file.specs[position].key) for position in some)
        return [(i, numbers[key]) for i, key in keyed if (key in overlapped) == is_later]

    def small(*, is_later: bool) -> list[SmallRuns]:
        by_image = ((image, places(image, image.small, is_later=is_later)) for image in images)
        return [runs for pair in by_image for runs in small_runs_of(*pair)]

    def large(*, is_later: bool) -> list[tuple[FileImage, list[tuple[int, int]]]]:
        by_image = ((image, places(image, image.large, is_later=is_later)) for image in images)
        return [pair for pair in by_image if pair[1]]

    return _CopyPlan(
        keys=keys,
        images=images,
        small_now=small(is_later=False),
        small_later=small(is_later=True),
        now=large(is_later=False),
        later=large(is_later=True),
    )


def _storages(plan: _CopyPlan, tensors: Mapping[str, Tensor]) -> Iterator[UntypedStorage]:
    """Yield the storages that must be kept alive, as `plan.now` copies from them by address."""
    live = list(tensors.values()) if plan.now else []
    return (live[number].untyped_storage() for _, places in plan.now for _, number in places)


def _add_all(
    images: Sequence[FileImage],
    tensors: Mapping[str, Tensor],
    overlapped: Collection[str],
    now: list[Work],
    later: list[Work],
) -> list[UntypedStorage]:
    """Copy small tensors and begin all other copies; return storages to keep alive for them."""
    held: list[UntypedStorage] = []
    with torch.inference_mode(False), torch.no_grad():
        for image in images:
            image.clear_for_staging()
            image.overwrite_small(tensors)
            for position, key in image.large_keys:
                source = tensors[key]
                if source.is_cuda:
                    continue
                work = copy_of(image, position, source)
                (later if key in overlapped else now).append(work)
                if key not in overlapped and isinstance(work, Runs):
                    held.append(source.untyped_storage())
            if torch.cuda.is_available():
                specs = image.file.specs
                sources = enumerate(tensors[spec.key] for spec in specs)
                on_device = {position: source for position, source in sources if source.is_cuda}
                is_later = {position: specs[position].key in overlapped for position in on_device}
                now += arrivals_of(image, {i: t for i, t in on_device.items() if not is_later[i]})
                later += arrivals_of(image, {i: t for i, t in on_device.items() if is_later[i]})
    return held


def _is_apart(work: Work) -> bool:
    return work.image.is_apart
