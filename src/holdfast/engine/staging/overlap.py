"""Overlap: which copies run beside training, and the fence around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from holdfast.engine.options import check_choice
from holdfast.engine.staging.fence import Fence, Guarded, Overlapped, guard
from holdfast.engine.staging.image import Image
from holdfast.engine.staging.known import LARGE_NBYTES
from holdfast.engine.staging.staged import Staged, StagedInMemory
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
    keys: tuple[str, ...]


class Overlap:
    """Chooses what overlaps, and holds training back until it is copied."""

    def __init__(
        self, mode: Mode, state: Mapping[str, Any], emit: Emitter, *, timeout_s: float
    ) -> None:
        """`timeout_s` is the longest that an optimizer waits for a copy, in seconds.

        Raises:
            UsageError: there is no such mode.
        """
        check_choice("overlap", mode, Mode)
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
        keys: dict[str, tuple[str, ...]] = {}
        tensors: list[Tensor] = []
        for name, component in captured.components.items():
            mine, live = self._keys_of(component), component.tensors
            found = [live[key] for key in mine]
            if any(map(Tensor.is_inference, found)):  # they have no versions
                mine = tuple(key for key in mine if not live[key].is_inference())
                found = [live[key] for key in mine]
            keys[name] = mine
            tensors += found
        return guard(keys, tensors, takes_samples=self._mode == "check")

    def _keys_of(self, component: CapturedComponent) -> tuple[str, ...]:
        """Keys of the tensors of a component that may overlap and are worth it."""
        kept = self._kept.get(component.name)
        if kept is not None and kept.specs is component.specs:
            may_overlap = kept.may_overlap
            if may_overlap is component.may_overlap or may_overlap == component.may_overlap:
                return kept.keys
        keys: tuple[str, ...] = ()
        if component.may_overlap:
            found = component.tensors.items()
            keys = tuple(k for k, t in found if k in component.may_overlap and _is_worth_it(t))
        self._kept[component.name] = _Kept(component.specs, component.may_overlap, keys)
        return keys

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
        if not guarded.tensors or not isinstance(staged, StagedInMemory):
            return None
        overlapped = Overlapped(
            guarded,
            staged.copying,
            step=step,
            on_device=staged.on_device,
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
