"""The fence between training and the copy of what training changes.

With overlap a save returns while parameters and optimizer slots are still being copied. Whoever
changes them waits here first: optimizers by a hook that torch calls before every step, all others
by a call of `Fence.wait`. What went past the fence is found when the copy ends, and fails the save.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.engine.device import DeviceCopy, is_capturing
from holdfast.engine.workers import raise_from
from holdfast.errors import DeadlineExceeded, UsageError, listing

SAMPLE_ITEMS = 4096
"""How many elements of a tensor are compared when overlap is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A tensor that is being copied, and how it was when the save was made."""

    component: str
    key: str
    tensor: Tensor
    """Held until the copy is done, also where training has no more use for it."""
    version: int
    address: int
    sample: bytes | None
    """Some of its elements; None: not asked for."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.component}.{self.key}"

    def change(self) -> str | None:
        """What has happened to it since."""
        if self.tensor.data_ptr() != self.address:
            return "was given other memory"
        if self.tensor._version != self.version:
            return "was changed"
        if self.sample is not None and sampled(self.tensor) != self.sample:
            return "was changed, in a way that torch does not count"
        return None


def guard(
    tensors: Iterable[tuple[str, str, Tensor]], *, takes_samples: bool = False
) -> tuple[Guarded, ...]:
    """Note how (component, key, tensor) are now, before their copy begins."""
    return tuple(
        Guarded(
            component=component,
            key=key,
            tensor=tensor,
            version=tensor._version,
            address=tensor.data_ptr(),
            sample=sampled(tensor) if takes_samples else None,
        )
        for component, key, tensor in tensors
    )


def sampled(tensor: Tensor) -> bytes:
    """Bytes of elements that are spread over a tensor. Waits for its device."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // SAMPLE_ITEMS)].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()


class Copying:
    """The copy of the guarded tensors of one save, until it is done and they were looked at."""

    def __init__(
        self,
        guarded: Sequence[Guarded],
        jobs: Sequence[Future[None]],
        *,
        step: int,
        copies: Mapping[tuple[str, str], Tensor] | None = None,
    ) -> None:
        """`copies` has the places to which samples are compared."""
        self.step = step
        self._guarded = tuple(guarded)
        self._jobs = tuple(jobs)
        self._on_device = tuple(job for job in jobs if isinstance(job, DeviceCopy))
        self._copies = copies or {}
        self._lock = threading.Lock()
        self._was_looked_at = False
        self._changed: list[str] = []
        self.is_done = False
        """Whether nobody need wait any more."""

    def pass_by(self, who: str, timeout_s: float) -> None:
        """Return when training may change the tensors: on a device what the current stream does
        next comes after the copy, and the host does not wait for it.

        Raises:
            DeadlineExceeded: after `timeout_s` seconds; says who waited for what.
        """
        for job in self._on_device:
            job.hold_current_stream()
        self._await([job for job in self._jobs if job not in self._on_device], who, timeout_s)
        self._look()
        self.is_done = self.is_done or not self._on_device

    def finish(self, timeout_s: float) -> None:
        """Return when all is copied as it was at the save.

        Raises:
            UsageError: tensors were changed meanwhile; names them.
            DeadlineExceeded: the copy was not done in time.
        """
        who = "the save"
        self._await(self._jobs, who, timeout_s)
        self._look()
        self._compare_copies()
        self.is_done, self._guarded = True, ()
        failed = next((job for job in self._jobs if job.exception() is not None), None)
        if failed is not None:
            raise_from(failed)
        if self._changed:
            raise UsageError(
                f"{len(self._changed)} tensors were not left alone while they were copied for the "
                f"save of step {self.step}; call fence() of the manager before you change weights "
                "or optimizer state other than by a torch optimizer's step:\n"
                + listing(self._changed)
            )

    def _await(self, jobs: Collection[Future[None]], who: str, timeout_s: float) -> None:
        if wait(jobs, timeout=timeout_s).not_done:
            raise DeadlineExceeded(
                f"{who} waits for the copy of {len(self._guarded)} tensors that the save of step "
                f"{self.step} overlaps with training: not done after {timeout_s:.0f} s"
            )

    def _look(self) -> None:
        """Compare the tensors with what they were, once: before the first who may change them."""
        with self._lock:
            if self._was_looked_at:
                return
            self._was_looked_at = True
            found = ((item, item.change()) for item in self._guarded)
            self._changed += [f"{item.name} {change}" for item, change in found if change]

    def _compare_copies(self) -> None:
        """Find what was changed and changed back while it was copied."""
        for item in self._guarded:
            copied = self._copies.get((item.component, item.key))
            if copied is not None and sampled(copied) != item.sample and not self._changed:
                self._changed.append(f"{item.name} was changed, and changed back")


class Fence:
    """Holds optimizers back while tensors are copied that they are about to change.

    One hook for all optimizers of the process, also those that are made later, from the first
    `watch` to `close`.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """`timeout_s` is the longest that an optimizer waits, in seconds."""
        self._timeout_s = timeout_s
        self._copying: Copying | None = None
        self._pid = os.getpid()
        self._handle: Any = None
        self.has_seen_capture = False
        """Whether a step was captured in a graph, whose replays no hook sees."""

    def watch(self) -> None:
        """Have torch call before every step of an optimizer, from now on."""
        if self._handle is not None:
            return
        own = weakref.ref(self)

        # A graph that is compiled calls it as it is: the wait must not become part of the graph.
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            fence = own()
            if fence is not None:
                fence.before_step(optimizer)

        hook = torch.compiler.disable(before_step)  # type: ignore[no-untyped-call]
        self._handle = register_optimizer_step_pre_hook(hook)
        weakref.finalize(self, self._handle.remove)

    def before_step(self, optimizer: Optimizer) -> None:
        """What the hook does.

        Raises:
            DeadlineExceeded: the copy was not done in time.
        """
        if is_capturing():
            # Torch has waited for all of the device before; and here nobody may.
            self.has_seen_capture = True
            return
        if self._copying is not None:
            self.wait(f"step() of {type(optimizer).__name__}")

    def put_up(self, copying: Copying) -> None:
        """Hold back who comes, until this copy is done."""
        self._copying = copying

    def wait(self, who: str = "fence()") -> None:
        """Return when parameters and optimizer slots may be changed. From any thread.

        Raises:
            DeadlineExceeded: the copy was not done in time; says who waited.
        """
        copying = self._copying
        # A forked child has its own memory, and none of the threads that copy.
        if copying is None or os.getpid() != self._pid:
            return
        copying.pass_by(who, self._timeout_s)
        if copying.is_done and self._copying is copying:
            self._copying = None

    def close(self) -> None:
        """Let optimizers be."""
        if self._handle is not None:
            self._handle.remove()
