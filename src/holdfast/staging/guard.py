"""Guards tensors that are copied during training: optimizer steps wait until the copy is done.

With overlap a save returns while parameters and optimizer slots are still being copied. Code that
changes them has to wait first: optimizers in a hook that torch calls before every step, all others
by `StepGuard.wait_before_change` (the manager's `fence()`). A change without that wait is detected
when the copy ends, and fails the save (tests/staging/test_guard.py).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.errors import DeadlineExceeded, UsageError, listing, time_limit
from holdfast.staging.device import DeviceCopy, is_capturing
from holdfast.threads.workers import Job, Workers, hand_over

Place: TypeAlias = tuple[str, str]
"""Component and key of a tensor."""

SAMPLE_ITEMS = 4096
"""Approximate number of elements of each tensor that `overlap="check"` compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """Tensors that are being copied, with their versions and addresses before the copy."""

    keys: Mapping[str, Sequence[str]]
    """Keys of the tensors by component, in the order of `tensors`."""
    tensors: Sequence[Tensor] = ()
    """The tensors themselves, kept alive until the copy is done even if training drops them."""
    versions: Sequence[int] = ()
    addresses: Sequence[int] = ()
    samples: Sequence[bytes] | None = None
    """Bytes of some elements of each tensor; None if they are not compared."""
    storages: Sequence[torch.UntypedStorage] = ()
    """The tensors' storages, kept alive: copies use addresses, and `tensor.data = …` drops them."""

    @property
    def places(self) -> list[Place]:
        """Component and key of each tensor."""
        return [(component, key) for component, keys in self.keys.items() for key in keys]

    def changes(self) -> list[str]:
        """List the tensors that have changed, each as `component.key` and how it changed."""
        changes = [
            *self._differing(map(Tensor.data_ptr, self.tensors), self.addresses, _MOVED),
            *self._differing(map(_VERSION, self.tensors), self.versions, _CHANGED),
        ]
        if self.samples is not None:
            changes += self._differing(map(sampled, self.tensors), self.samples, _NOT_COUNTED)
        first: dict[str, str] = {}
        for name, change in changes:
            first.setdefault(name, change)
        return [f"{name} {change}" for name, change in first.items()]

    def _differing(
        self, now: Iterable[object], then: Sequence[object], change: str
    ) -> list[tuple[str, str]]:
        # Mapped in C: this runs for every tensor before an optimizer may step.
        is_same = list(map(eq, now, then))
        if all(is_same):
            return []
        pairs = zip(self.places, is_same, strict=True)
        return [(".".join(place), change) for place, same in pairs if not same]


_VERSION = attrgetter("_version")
_MOVED = "was given other memory"
_CHANGED = "was changed"
_NOT_COUNTED = "was changed, in a way that torch does not count"


def guard(
    keys: Mapping[str, Sequence[str]],
    tensors: Sequence[Tensor],
    *,
    addresses: Sequence[int] | None = None,
    takes_samples: bool = False,
) -> Guarded:
    """Record versions and addresses of tensors before their copy."""
    return Guarded(
        keys=keys,
        tensors=tensors,
        versions=list(map(_VERSION, tensors)),
        addresses=list(map(Tensor.data_ptr, tensors)) if addresses is None else addresses,
        samples=list(map(sampled, tensors)) if takes_samples else None,
        storages=list(map(Tensor.untyped_storage, tensors)),
    )


def sampled(tensor: Tensor) -> bytes:
    """Return the bytes of evenly spaced elements of a tensor; waits for its device."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // SAMPLE_ITEMS)].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()


class Copies(Protocol):
    """Copies that several threads can make together."""

    def run_later(self) -> None:
        """Make copies until each one is made, or being made by another thread."""
        ...


class Overlapped:
    """The copy of the guarded tensors of one save, made during training."""

    def __init__(
        self,
        guarded: Guarded,
        copies: Copies,
        *,
        step: int,
        on_device: Sequence[DeviceCopy] = (),
        places: Mapping[Place, Tensor] | None = None,
        on_success: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a copy; `places` are its targets, if samples of them are compared too."""
        self.step = step
        self.copied: Future[None] = Future()
        """Resolves when all is copied and no tensor was changed meanwhile; else has the error."""
        self.copied.set_running_or_notify_cancel()
        self._guarded = guarded
        self._num_guarded = len(guarded.tensors)
        self._copies = copies
        self._on_device = tuple(on_device)
        # The tensors are checked only if a device copies any: there are many.
        self._is_all_on_device = bool(on_device) and all(one.is_cuda for one in guarded.tensors)
        self._places = places or {}
        self._on_success = on_success
        self._lock = threading.Lock()
        self._is_begun = False
        self._was_cancelled = False
        self._num_parts = 0
        self._error: BaseException | None = None
        self._was_checked = False
        self._changed: list[str] = []

    def start_copying(
        self, workers: Workers, num_threads: int, *others: tuple[Workers, Job]
    ) -> list[Future[Any]]:
        """Start copying on `num_threads` workers; queue `others` and return their futures."""
        self._num_parts = num_threads
        parts = [(workers, self._take_part)] * num_threads
        return hand_over(*parts, *others)[num_threads:]

    def cancel_copy(self, error: BaseException) -> None:
        """Cancel a copy that has not started, and release its waiters; a started one continues."""
        with self._lock:
            self._was_cancelled = not self._is_begun
        if self._was_cancelled:
            self.copied.set_exception(error)

    def hold(self, who: str, timeout_s: float) -> None:
        """Wait, or let the current stream wait, until training may change the guarded tensors."""
        for copy in self._on_device:
            copy.hold_current_stream()
        if self._is_all_on_device:
            self._check_unchanged()
        else:
            self.wait_for_copy(who, timeout_s)

    def wait_for_copy(self, who: str, timeout_s: float) -> None:
        """Wait until the copy has ended, with or without success."""
        if wait([self.copied], timeout=timeout_s).not_done:
            raise DeadlineExceeded(
                f"{who} waits for the copy of {self._num_guarded} tensors that the save of step "
                f"{self.step} overlaps with training: not done after {time_limit(timeout_s)}"
            )

    def expect_copied(self, timeout_s: float) -> None:
        """Wait for the copy; raise its error, such as a tensor that was changed meanwhile."""
        self.wait_for_copy("the save", timeout_s)
        self.copied.result()

    def _take_part(self) -> None:
        with self._lock:
            if self._was_cancelled:
                return
            self._is_begun = True
        error: BaseException | None = None
        try:
            self._copies.run_later()
        except BaseException as raised:  # noqa: BLE001 - the future carries it to its owner
            error = raised
        with self._lock:
            self._error = self._error or error
            self._num_parts -= 1
            is_last = self._num_parts == 0
        if is_last:
            self._finish_copy()

    def _finish_copy(self) -> None:
        try:
            self._check_unchanged()
            self._compare_copies()
        except BaseException as raised:  # noqa: BLE001 - the future carries it to its owner
            self._error = self._error or raised
        if self._error is None and self._changed:
            self._error = UsageError(
                f"{len(self._changed)} tensors were changed while they were being copied for the "
                f"save of step {self.step}; call fence() of the manager before you change weights "
                "or optimizer state other than by a torch optimizer's step:\n"
                + listing(self._changed)
            )
        # Dropped before waiters wake up: training may need the memory of old tensors at once.
        self._guarded = Guarded(keys={})
        if self._error is None:
            self._on_success()
            self.copied.set_result(None)
        else:
            self.copied.set_exception(self._error)

    def _check_unchanged(self) -> None:
        """Compare the tensors with what was recorded before the copy; no-op on later calls."""
        with self._lock:
            # The first call comes before changes are allowed: from a step that goes on while a
            # device still copies, or from the end of the copy. Changes after it are allowed.
            if self._was_checked:
                return
            self._was_checked = True
            self._changed += self._guarded.changes()

    def _compare_copies(self) -> None:
        """Find tensors whose copy differs, as they were changed and changed back meanwhile."""
        guarded = self._guarded
        if self._changed or guarded.samples is None:
            return
        for (component, key), sample in zip(guarded.places, guarded.samples, strict=True):
            place = self._places.get((component, key))
            if place is not None and sampled(place) != sample:
                self._changed.append(f"{component}.{key} was changed, and changed back")


class StepGuard:
    """Delays optimizer steps until the copy of the tensors that they change is done.

    One hook serves all optimizers of the process, also later ones, from the first `register_hook`
    to `remove_hook`.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` is the longest that an optimizer waits, in seconds."""
        self._timeout_s = timeout_s
        self._overlapped: Overlapped | None = None
        self._pid = os.getpid()
        self._handle: Any = None
        self.has_seen_capture = False
        """Whether a step was captured in a CUDA graph, whose replays call no hook."""

    def register_hook(self) -> None:
        """Register the hook that torch calls before every optimizer step."""
        if self._handle is not None:
            return
        # Weak, because torch keeps the hook for ever: a manager that is dropped without a close
        # must be collected, and the hook removed with it.
        own = weakref.ref(self)

        # Not traced by torch.compile: the wait must not become part of a graph.
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            step_guard = own()
            if step_guard is not None:
                step_guard.before_step(optimizer)

        hook = torch.compiler.disable(before_step)  # type: ignore[no-untyped-call]
        self._handle = register_optimizer_step_pre_hook(hook)
        weakref.finalize(self, self._handle.remove)

    def before_step(self, optimizer: Optimizer) -> None:
        """Wait for the copy before an optimizer step; called by the hook of `register_hook`."""
        if is_capturing():
            # A capture begins with a wait for the whole device, so it copies nothing any
            # more; and during a capture nothing may wait.
            self.has_seen_capture = True
            return
        if self._overlapped is not None:
            self.wait_before_change(f"step() of {type(optimizer).__name__}")

    def hold_for(self, overlapped: Overlapped) -> None:
        """Delay optimizer steps, from now on, until the copy `overlapped` is done."""
        self._overlapped = overlapped

    def wait_before_change(self, who: str = "fence()") -> None:
        """Wait until parameters and optimizer slots may be changed; callable from any thread."""
        overlapped = self._overlapped
        # A forked child has its own memory, and none of the threads that copy.
        if overlapped is None or os.getpid() != self._pid:
            return
        overlapped.hold(who, self._timeout_s)
        # A device may still be copying: then each further step has to hold its stream as well.
        if overlapped.copied.done() and self._overlapped is overlapped:
            self._overlapped = None

    def remove_hook(self) -> None:
        """Remove the hook; if a copy is under way it stays until this guard is collected."""
        overlapped = self._overlapped
        is_over = overlapped is None or overlapped.copied.done()
        if self._handle is not None and is_over:
            self._handle.remove()
