"""Chooses tensors that saves copy during training, and delays optimizer steps until then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from holdfast.events import Emitter
from holdfast.format.tensors import TensorSpec
from holdfast.staging.arena import FileImage
from holdfast.staging.guard import Guarded, Overlapped, StepGuard, guard
from holdfast.staging.in_memory import ImageTransfer
from holdfast.staging.interfaces import LARGE_NBYTES, Staged
from holdfast.state.capture.capture import Captured
from holdfast.state.components import CapturedComponent

Mode: TypeAlias = Literal[True, False, "check"]
"""Whether saves overlap with training; "check" compares samples of the bytes too."""


NUM_THREADS = 2
"""Threads that copy during training; one alone does not use the whole memory bandwidth."""


@dataclass(frozen=True, slots=True)
class _Eligible:
    """Tensors of a component to copy during training; valid while its structure stays the same."""

    specs: tuple[TensorSpec, ...]
    may_overlap: frozenset[str]
    takes_small: bool
    """Whether small tensors in host memory are among them."""
    keys: tuple[str, ...]
    numbers: tuple[int, ...]
    """Numbers of these tensors among those of the component."""


class Overlap:
    """Chooses tensors to copy during training, and delays optimizer steps until they are copied."""

    def __init__(
        self, mode: Mode, state: Mapping[str, Any], emit: Emitter, *, timeout_s: float
    ) -> None:
        """`timeout_s` is the longest that an optimizer waits for a copy, in seconds."""
        self._mode = mode
        self._state = state
        self._emit = emit
        self._warned: set[str] = set()
        self._eligible: dict[str, _Eligible] = {}
        self.step_guard = StepGuard(timeout_s=timeout_s)
        if mode:
            # Registered at the start, not for each copy: compiled steps are traced with the hook.
            self.step_guard.register_hook()

    def guard(self, captured: Captured) -> Guarded:
        """Record the tensors that are copied in training: none if some cannot be made to wait."""
        if not self._mode:
            return Guarded(keys={})
        reason = why_not_overlap(self._state, self.step_guard)
        if reason is not None:
            self._warn_once(f"saves do not overlap with training: {reason}")
            return Guarded(keys={})
        components = captured.components.values()
        is_alone = not any(map(_is_on_device, components))
        chosen = {one.name: self._choose(one, takes_small=is_alone) for one in components}
        guarded = self._try_guard(components, chosen)
        if guarded is None:
            # Inference tensors are rare, so they are looked for only after a failure.
            chosen = {one.name: _without_inference(one, chosen[one.name]) for one in components}
            guarded = self._try_guard(components, chosen)
        assert guarded is not None, "all have versions"
        return guarded

    def _try_guard(
        self, components: Collection[CapturedComponent], chosen: Mapping[str, _Eligible]
    ) -> Guarded | None:
        """Record the chosen tensors; None if torch keeps no version counter for one of them."""
        tensors: list[Tensor] = []
        addresses: list[int] = []
        for component in components:
            numbers, live = chosen[component.name].numbers, list(component.tensors.values())
            tensors += [live[number] for number in numbers]
            if component.addresses is not None:
                addresses += [component.addresses[number] for number in numbers]
        try:
            return guard(
                {name: one.keys for name, one in chosen.items()},
                tensors,
                addresses=addresses if len(addresses) == len(tensors) else None,
                takes_samples=self._mode == "check",
            )
        except RuntimeError:
            if not any(map(Tensor.is_inference, tensors)):
                raise
            return None

    def _choose(self, component: CapturedComponent, *, takes_small: bool) -> _Eligible:
        """Choose the tensors of a component that are worth copying during training; cached."""
        # Tensors that are copied by address are all worth it: a small one costs nothing extra.
        # Small tensors that torch copies are not, nor are small host tensors beside ones on a
        # device: with device tensors alone a step need not wait on the host.
        takes_small = takes_small and component.addresses is not None
        eligible = self._eligible.get(component.name)
        if (
            eligible is not None
            and eligible.specs is component.specs
            and eligible.takes_small == takes_small
        ):
            may_overlap = eligible.may_overlap
            if may_overlap is component.may_overlap or may_overlap == component.may_overlap:
                return eligible
        chosen = [
            (number, key)
            for number, (key, tensor) in enumerate(component.tensors.items())
            if key in component.may_overlap and (takes_small or _is_worth_it(tensor))
        ]
        eligible = self._eligible[component.name] = _as_eligible(component, chosen, takes_small)
        return eligible

    def prepare_copy(
        self, guarded: Guarded, staged: Staged, step: int, on_success: Callable[[], None]
    ) -> Overlapped | None:
        """Prepare the copy of the guarded tensors, which delays steps; None if there are none."""
        transfer = staged.transfer
        if not guarded.tensors or not isinstance(transfer, ImageTransfer):
            return None
        overlapped = Overlapped(
            guarded,
            transfer,
            step=step,
            on_device=transfer.on_device,
            places=_views_by_place(staged) if self._mode == "check" else None,
            on_success=on_success,
        )
        self.step_guard.hold_for(overlapped)
        return overlapped

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._emit("warning", message)


def why_not_overlap(state: Mapping[str, Any], step_guard: StepGuard) -> str | None:
    """Explain why a state must not be copied during training; None if it may be."""
    if step_guard.has_seen_capture:
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


def _as_eligible(
    component: CapturedComponent, chosen: Collection[tuple[int, str]], takes_small: bool
) -> _Eligible:
    keys, numbers = tuple(key for _, key in chosen), tuple(number for number, _ in chosen)
    return _Eligible(component.specs, component.may_overlap, takes_small, keys, numbers)


def _without_inference(component: CapturedComponent, eligible: _Eligible) -> _Eligible:
    """Remove inference tensors, whose changes torch does not count, from the chosen ones."""
    live, pairs = component.tensors, zip(eligible.numbers, eligible.keys, strict=True)
    counted = [(i, key) for i, key in pairs if not live[key].is_inference()]
    return _as_eligible(component, counted, eligible.takes_small)


def _is_on_device(component: CapturedComponent) -> bool:
    tensors = component.tensors.values() if component.addresses is None else ()
    return any(tensor.is_cuda for tensor in tensors)


def _views_by_place(staged: Staged) -> dict[tuple[str, str], Tensor]:
    return {
        (component, spec.key): view
        for component, images in staged.files.items()
        for image in images
        if isinstance(image, FileImage)
        for spec, view in zip(image.file.specs, image.views, strict=True)
    }


def _is_worth_it(tensor: Tensor) -> bool:
    """Whether copying a tensor now takes longer than planning a copy for later."""
    return tensor.nbytes >= LARGE_NBYTES or tensor.is_cuda
