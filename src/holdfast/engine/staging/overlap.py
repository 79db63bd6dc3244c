"""Overlap: which copies run beside training, and the fence around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from holdfast.engine.staging.fence import Fence, Guarded, Overlapped, guard
from holdfast.engine.staging.image import Image
from holdfast.engine.staging.inmemory import ImageTransfer
from holdfast.engine.staging.known import LARGE_NBYTES
from holdfast.engine.staging.staged import Staged
from holdfast.events import Emitter
from holdfast.format.tensors import TensorSpec
from holdfast.state.capture import Captured, CapturedComponent

Mode: TypeAlias = Literal[True, False, "check"]
"""Whether saves overlap with training, and whether samples of the bytes are compared too."""


NUM_THREADS = 2
"""Threads that copy beside training: one does not fill the memory's bandwidth."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Which tensors of a component overlap, for as long as its structure is the same."""

    specs: tuple[TensorSpec, ...]
    may_overlap: frozenset[str]
    takes_small: bool
    """Whether small ones on the host are among them."""
    keys: tuple[str, ...]
    numbers: tuple[int, ...]
    """Their places among the tensors of the component."""


class Overlap:
    """Chooses what overlaps, and holds training back until it is copied."""

    def __init__(
        self, mode: Mode, state: Mapping[str, Any], emit: Emitter, *, timeout_s: float
    ) -> None:
        """`timeout_s` is the longest that an optimizer waits for a copy, in seconds."""
        self._mode = mode
        self._state = state
        self._emit = emit
        self._told: set[str] = set()
        self._kept: dict[str, _Kept] = {}
        self.fence = Fence(timeout_s=timeout_s)
        if mode:
            # From the start, and not for each copy: compiled steps are traced with it.
            self.fence.watch()

    def guard(self, captured: Captured) -> Guarded:
        """The tensors whose copies need not be waited for, as they are now.

        None of them where something that cannot be held back changes tensors; the first time an
        event says what.
        """
        if not self._mode:
            return Guarded(keys={})
        reason = why_not(self._state, self.fence)
        if reason is not None:
            self._tell(f"saves do not overlap with training: {reason}")
            return Guarded(keys={})
        components = captured.components.values()
        is_alone = not any(map(_is_on_device, components))
        kept = {one.name: self._kept_of(one, takes_small=is_alone) for one in components}
        found = self._guarded(components, kept)
        if found is None:
            kept = {one.name: _with_versions(one, kept[one.name]) for one in components}
            found = self._guarded(components, kept)
        assert found is not None, "all have versions"
        return found

    def _guarded(
        self, components: Collection[CapturedComponent], kept: Mapping[str, _Kept]
    ) -> Guarded | None:
        """The guard of what was chosen; None where some of that has no versions."""
        tensors: list[Tensor] = []
        addresses: list[int] = []
        for component in components:
            numbers, live = kept[component.name].numbers, list(component.tensors.values())
            tensors += [live[number] for number in numbers]
            if component.addresses is not None:
                addresses += [component.addresses[number] for number in numbers]
        try:
            return guard(
                {name: one.keys for name, one in kept.items()},
                tensors,
                addresses=addresses if len(addresses) == len(tensors) else None,
                takes_samples=self._mode == "check",
            )
        except RuntimeError:
            if not any(map(Tensor.is_inference, tensors)):
                raise
            return None

    def _kept_of(self, component: CapturedComponent, *, takes_small: bool) -> _Kept:
        """Which tensors of a component may overlap and are worth it.

        Of those that are copied by their addresses all are: nothing is done for each of the small
        ones, which are copied at once. What torch copies is staged first where it is small; and so
        is all that is small beside tensors on a device, for which no host need wait.
        """
        takes_small = takes_small and component.addresses is not None
        kept = self._kept.get(component.name)
        if kept is not None and kept.specs is component.specs and kept.takes_small == takes_small:
            may_overlap = kept.may_overlap
            if may_overlap is component.may_overlap or may_overlap == component.may_overlap:
                return kept
        chosen = [
            (number, key)
            for number, (key, tensor) in enumerate(component.tensors.items())
            if key in component.may_overlap and (takes_small or _is_worth_it(tensor))
        ]
        kept = self._kept[component.name] = _chosen(component, chosen, takes_small)
        return kept

    def begin(
        self,
        guarded: Guarded,
        staged: Staged,
        step: int,
        tell: Callable[[], None],
    ) -> Overlapped | None:
        """The copy of the guarded tensors, which is to be started; the fence is up until it is
        done, and `tell` is called then. None where nothing is guarded.
        """
        transfer = staged.transfer
        if not guarded.tensors or not isinstance(transfer, ImageTransfer):
            return None
        overlapped = Overlapped(
            guarded,
            transfer,
            step=step,
            on_device=transfer.on_device,
            places=_places(staged) if self._mode == "check" else None,
            tell=tell,
        )
        self.fence.put_up(overlapped)
        return overlapped

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._emit("warning", message)


def why_not(state: Mapping[str, Any], fence: Fence) -> str | None:
    """Why the copy of this state must not run beside training; None when it may."""
    if fence.has_seen_capture:
        return "an optimizer's step was captured in a CUDA graph, and replays call no hooks"
    for name, value in state.items():
        if not isinstance(value, Optimizer):
            if hasattr(value, "param_groups") and callable(getattr(value, "step", None)):
                return f"{name} is an optimizer that is not torch's, so no hook sees its steps"
        elif not getattr(type(value).step, "hooked", False):
            return f"{name}: the step of {type(value).__name__} calls no hooks of torch"
        elif any(group.get("capturable") for group in value.param_groups):
            return f"{name} is capturable: its steps may be replayed in a graph, without hooks"
    return None


def _chosen(
    component: CapturedComponent, chosen: Collection[tuple[int, str]], takes_small: bool
) -> _Kept:
    keys, numbers = tuple(key for _, key in chosen), tuple(number for number, _ in chosen)
    return _Kept(component.specs, component.may_overlap, takes_small, keys, numbers)


def _with_versions(component: CapturedComponent, kept: _Kept) -> _Kept:
    """Without those of inference mode, whose changes torch does not count."""
    live, pairs = component.tensors, zip(kept.numbers, kept.keys, strict=True)
    counted = [(i, key) for i, key in pairs if not live[key].is_inference()]
    return _chosen(component, counted, kept.takes_small)


def _is_on_device(component: CapturedComponent) -> bool:
    tensors = component.tensors.values() if component.addresses is None else ()
    return any(tensor.is_cuda for tensor in tensors)


def _places(staged: Staged) -> dict[tuple[str, str], Tensor]:
    return {
        (component, spec.key): view
        for component, images in staged.files.items()
        for image in images
        if isinstance(image, Image)
        for spec, view in zip(image.file.specs, image.views, strict=True)
    }


def _is_worth_it(tensor: Tensor) -> bool:
    """Whether a copy takes longer than to say that it may be made later."""
    return tensor.nbytes >= LARGE_NBYTES or tensor.is_cuda
