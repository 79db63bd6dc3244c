"""Detects saves whose state is not a state between two optimizer steps.

Three kinds: gradients are under way (an accumulation window is open), an optimizer's step was cut
short or is running, or other weights are in the model for a while, such as an average. Per step
there are two short hooks, which read a few integers and items; all else is done at a save.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from holdfast.events import Emitter
from holdfast.staging.device import is_capturing
from holdfast.state.capture.capture import Captured
from holdfast.state.capture.lacking import Stepped
from holdfast.state.capture.outside import NUM_COMPARISONS
from holdfast.state.leaves import is_subclass, local_of, refusal

_GradMark: TypeAlias = "tuple[weakref.ref[Tensor], int] | None"
_WeakStepped: TypeAlias = "tuple[weakref.ref[Optimizer], Callable[[], GradScaler | None]]"
_NUM_GRADS = 4
"""Gradients that each step marks."""
_NUM_ITEMS = 16
"""Items of a weight that each step copies."""

HALF_A_STEP = "saved in the middle of an optimizer step"


@dataclass(frozen=True, slots=True)
class _Running:
    """An optimizer's step that has begun and not ended."""

    optimizer: Optimizer
    versions: list[int] | None
    """Versions of some of its tensors before the step, if it was given a closure, which may raise
    before anything is updated; else None."""

    def is_half_done(self) -> bool:
        """Whether the step may have changed anything, and is not merely ending."""
        if self.versions is not None and _versions(self.optimizer) == self.versions:
            return False
        # A hook of the optimizer's own, which runs after the update, may save.
        return not (self.optimizer._optimizer_step_post_hooks and _is_on_stack())


@dataclass(frozen=True, slots=True)
class _Suspected:
    """Gradients that were written between the last step and a save."""

    step: int
    gradients: list[tuple[Tensor, weakref.ref[Tensor]]]
    """Parameters, and their gradients at the save."""

    def are_used(self) -> bool:
        """Whether they are still the parameters' gradients."""
        return any(
            parameter.grad is not None and parameter.grad is grad()
            for parameter, grad in self.gradients
        )


class _Watched:
    """A weight, of which the first items are copied at each step."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._address, self._items = 0, torch.empty(0)

    def read(self) -> Tensor:
        """Copy the first items, on their device and without waiting for it, as bytes."""
        local = local_of(self._weight)
        address = local.data_ptr()
        if address != self._address:  # a wrapper may free the memory of a weight for a while
            length = _NUM_ITEMS if local.untyped_storage().nbytes() else 0
            self._address = address
            self._items = local.detach().reshape(-1)[:length].view(torch.uint8)
        return self._items.clone()


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Samples of a weight after the last step before a save, and at the save."""

    step: int
    after_step: Tensor
    at_save: Tensor

    def was_swapped(self, now: Tensor) -> bool:
        """Whether the weight had changed at the save, and has the value of the last step again.

        Other changes outside of steps are no swap: weights may be normalized after a step, and
        again before the next.
        """
        return not _are_equal(self.after_step, self.at_save) and _are_equal(self.after_step, now)


class StepBoundary:
    """Watches the optimizers of a state, and warns once of each kind of save off a boundary."""

    _num_left = NUM_COMPARISONS
    """Saves at which `stepped` still lists optimizers."""
    _drops_gradients = False
    """Whether gradients that a save found were dropped afterwards, so that none were lost."""

    def __init__(self, state: Mapping[str, Any], emit: Emitter) -> None:
        """Begin to watch."""
        driven = {name: one for name, one in state.items() if _groups(one)}
        self._state, self._components, self._driven = state, driven.keys(), [*driven.values()]
        self._emit = emit
        self._said: set[str] = set()
        self._known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether each optimizer that has stepped changes the state."""
        self._stepped: tuple[dict[int, _WeakStepped], dict[int, _WeakStepped]] = ({}, {})
        """Optimizers that have stepped before the last save, and since it, of any parameters."""
        self._running: dict[int, _Running] = {}
        self._marked: list[Tensor] = []
        """Parameters whose gradients each step marks."""
        self._marks: list[_GradMark] = []
        self._suspected: _Suspected | None = None
        self._watched: _Watched | None = None
        self._after_step: Tensor | None = None
        """Sample of the weight after the last step."""
        self._sampled: _Sampled | None = None
        self._before_step: Tensor | None = None
        """Sample of the weight before the first step after `_sampled`."""
        if self._driven:
            self._choose_parameters([parameter for one in self._driven for parameter in _ends(one)])
            # Schedule-free optimizers have two sets of weights, and a saved flag which is in.
            if not any(hasattr(one, "eval") for one in self._driven):
                last = [one for one in self._marked if _can_be_sampled(one)][-1:]
                self._watched = _Watched(last[0]) if last else None
        _watch_boundary(self)

    def stepped(self) -> list[Stepped]:
        """List the optimizers that step and that the state may lack, or their scalers or schedules.

        At the first saves only. An optimizer counts if it has stepped before an earlier save and
        again since: others are made for a while, such as one for each task. None that another
        manager may save is listed.
        """
        before, now = self._stepped
        self._stepped, self._num_left = (before | now, {}), max(self._num_left - 1, 0)
        if not (self._num_left or self._driven):
            _unregister(self)
        # An optimizer may have the id of a deleted one. Threads that step add to `now`.
        found = [
            (optimizer, now[key][1]())
            for key, (known, _) in before.items()
            if (optimizer := known()) is not None and key in now and now[key][0]() is optimizer
        ]
        return [(one, by) for one, by in found if self._may_lack(one, by)]

    def _may_lack(self, optimizer: Optimizer, scaler: GradScaler | None) -> bool:
        is_plain = scaler is None and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if is_plain and any(optimizer is one for one in self._driven):
            return False
        others = [one for known in _watching if (one := known()) is not None and one is not self]
        saved = [value for other in others for value in other._state.values()]
        return not (
            any(other._known.get(optimizer) for other in others)
            or (scaler is not None and any(value is scaler for value in saved))
        )

    def check_captured_step(self, captured: Captured, step: int) -> tuple[str, ...]:
        """Warn of a state that is not of a step boundary; return reasons not to resume from it."""
        if not self._driven or not self._components <= captured.components.keys():
            return ()
        half = [one for one in [*self._running.values()] if one.is_half_done()]
        if half:
            self._emit_warning(
                "half",
                f"the save of step {step} is in the middle of step() of "
                f"{type(half[0].optimizer).__name__}, so some parameters are updated and others "
                "not. The checkpoint is marked as unhealthy: a resume takes the one before, if "
                "there is one. Save between steps only",
            )
            return (HALF_A_STEP,)
        self._check_gradients(captured, step)
        self._check_weights(step)
        return ()

    def restart_after_load(self) -> None:
        """Begin anew, as a load has replaced the state."""
        self._running.clear()
        self._sampled = self._suspected = self._before_step = self._after_step = None
        self._mark_gradients()

    def stop_watching(self) -> None:
        """Stop watching, and warn of the last save."""
        _unregister(self)
        self._judge_gradients(is_last=True)
        self._judge_weights(None if self._sampled is None else self._sample())

    # Hooks

    def _is_own(self, optimizer: Optimizer) -> bool:
        """Whether a step of an optimizer changes the state.

        Others may run in other threads, which must not read the gradients of this one's parameters:
        torch crashes if one is freed by its own thread at that moment.
        """
        known = self._known.get(optimizer)
        if known is None:
            own = {id(parameter) for one in self._driven for parameter in _parameters(one)}
            known = any(id(parameter) in own for parameter in _parameters(optimizer))
            self._known[optimizer] = known
        return known

    def _note_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_own(optimizer):
            return
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        self._running[id(optimizer)] = _Running(
            optimizer, _versions(optimizer) if has_closure else None
        )
        if self._suspected is not None:
            self._judge_gradients()
        if self._sampled is not None and self._before_step is None:
            self._before_step = self._sample()

    def _end_step(self, optimizer: Optimizer) -> None:
        if self._num_left and id(optimizer) not in self._stepped[1]:
            self._stepped[1][id(optimizer)] = (weakref.ref(optimizer), _scaler_on_stack())
        if not self._is_own(optimizer):
            return
        self._running.pop(id(optimizer), None)
        self._mark_gradients()
        self._after_step = self._sample()

    def _choose_parameters(self, parameters: list[Tensor]) -> None:
        self._marked = parameters[:_NUM_GRADS]
        self._mark_gradients()

    def _mark_gradients(self) -> None:
        self._marks = [_grad_mark(parameter.grad) for parameter in self._marked]

    # Gradients

    def _check_gradients(self, captured: Captured, step: int) -> None:
        if "gradients" in self._said:
            return
        with_grad = [
            parameter
            for one in self._driven
            for group in _groups(one)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not with_grad:
            return
        changed = [
            (parameter, parameter.grad)
            for parameter, mark in zip(self._marked, self._marks, strict=True)
            if parameter.grad is not None and _grad_mark(parameter.grad) != mark
        ]
        if not changed:
            if all(parameter.grad is None for parameter in self._marked):
                self._choose_parameters(with_grad)
            return
        if self._suspected is not None or not _are_worth(grad for _, grad in changed):
            return
        saved = captured.addresses
        if not all(local_of(grad).data_ptr() in saved for _, grad in changed):
            self._suspected = _Suspected(step, [(one, weakref.ref(grad)) for one, grad in changed])

    def _judge_gradients(self, *, is_last: bool = False) -> None:
        """Warn if gradients that a save left out were not dropped since, by any step."""
        suspected, self._suspected = self._suspected, None
        if suspected is None:
            return
        if not suspected.are_used():
            self._drops_gradients = True
        elif not (is_last and self._drops_gradients):
            self._emit_warning(
                "gradients",
                f"the save of step {suspected.step} is inside an accumulation window: backward() "
                "had run since the last step of an optimizer, and gradients are not saved. A "
                "resume from it loses them. Save between optimizer.step() and the next backward()",
            )

    # Weights

    def _check_weights(self, step: int) -> None:
        now = self._sample()
        self._judge_weights(now)
        self._before_step = self._sampled = None
        if self._after_step is not None and now is not None:
            self._sampled = _Sampled(step, self._after_step, now)

    def _judge_weights(self, now: Tensor | None) -> None:
        """Warn if the last save had weights that were replaced afterwards.

        If no step has followed the save, only weights that are back are known to be such: a script
        may load the best ones after its last save.
        """
        sampled = self._sampled
        if self._before_step is not None:
            now = self._before_step
        if sampled is not None and now is not None and sampled.was_swapped(now):
            self._emit_warning(
                "weights",
                f"the save of step {sampled.step} has weights that training did not continue "
                "with: they were replaced before the save, and again after it, as by an average "
                "that was in the model for a validation. A resume would train on them. Save "
                "before such a swap, or after it is undone",
            )

    def _sample(self) -> Tensor | None:
        # What a CUDA graph captures is not computed, and would be at each of its replays.
        return None if self._watched is None or is_capturing() else self._watched.read()

    def _emit_warning(self, kind: str, message: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._emit("warning", message)


_watching: tuple[weakref.ref[StepBoundary], ...] = ()
"""Boundaries that watch steps. Weak, so that a manager that is dropped without a close is
collected. A tuple, which other threads may walk while it is replaced."""
_registering = threading.Lock()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for known in _watching:
        if (boundary := known()) is not None:
            boundary._note_optimizer_step(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for known in _watching:
        if (boundary := known()) is not None:
            boundary._end_step(optimizer)


@cache
def _register_hooks() -> None:
    """Register the two hooks once for the process: torch walks its hooks in any thread's step."""
    for hook in (_before_step, _after_step):
        # What torch.compiler.disable sets, without its import of the whole compiler.
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    torch_optimizer.register_optimizer_step_pre_hook(_before_step)
    torch_optimizer.register_optimizer_step_post_hook(_after_step)


def _watch_boundary(boundary: StepBoundary) -> None:
    global _watching
    with _registering:
        _register_hooks()
        _watching = (*(known for known in _watching if known()), weakref.ref(boundary))


def _unregister(boundary: StepBoundary) -> None:
    global _watching
    with _registering:
        _watching = tuple(known for known in _watching if known() not in (None, boundary))


def _groups(value: Any) -> list[dict[str, Any]]:
    groups = getattr(value, "param_groups", None)
    return groups if isinstance(groups, list) else []


def _parameters(driven: Any) -> list[Tensor]:
    return [parameter for group in _groups(driven) for parameter in group["params"]]


def _ends(driven: Any) -> list[Tensor]:
    """Return the first and the last parameter of an optimizer."""
    parameters = _parameters(driven)
    return [*parameters[:1], *parameters[1:][-1:]]


def _grad_mark(grad: Tensor | None) -> _GradMark:
    """Return what tells whether a gradient was changed or replaced."""
    # A reference and no id: the next gradient may get the same one.
    return None if grad is None else (weakref.ref(grad), local_of(grad)._version)


def _versions(optimizer: Optimizer) -> list[int]:
    """Return the versions of an optimizer's first parameter and its slots."""
    firsts = _parameters(optimizer)[:1]
    slots = [value for first in firsts for value in optimizer.state.get(first, {}).values()]
    held = [value for value in slots if isinstance(value, Tensor)]
    return [tensor._version for tensor in (*firsts, *held)]


def _is_on_stack() -> bool:
    """Whether this is called from within the step of an optimizer."""
    frame, code = sys._getframe(), Optimizer.profile_hook_step.__code__
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code.co_filename == code.co_filename and frame.f_code.co_name == "wrapper":
            return True
    return False


def _scaler_on_stack() -> Callable[[], GradScaler | None]:
    """Return a weak reference of the scaler in whose `step` this is called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            return weakref.ref(frame.f_locals["self"])
        frame = frame.f_back
    return lambda: None


def _can_be_sampled(parameter: Tensor) -> bool:
    local = local_of(parameter)
    if refusal(parameter) is not None or is_subclass(local):
        return False
    return local.is_contiguous() and not local.is_complex()


def _are_equal(before: Tensor, now: Tensor) -> bool:
    # Nothing is known of a weight whose memory was freed.
    return len(before) != len(now) or torch.equal(before, now)


def _are_worth(gradients: Iterable[Tensor]) -> bool:
    """Whether gradients can be lost: no zeros of zero_grad, nor those that a loss scaler drops."""
    values = [_get_local_values(grad) for grad in gradients]
    return any(map(torch.any, values)) and all(bool(one.isfinite().all()) for one in values)


def _get_local_values(grad: Tensor) -> Tensor:
    local = local_of(grad)
    return local.coalesce().values() if local.is_sparse else local
