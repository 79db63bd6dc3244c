"""Copies from CUDA devices into pinned host memory, on separate streams.

Tensors of other accelerators are copied by plain torch. Nothing in this module initializes a device
before it gets a tensor that is on one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UsageError


def is_at_hand(value: Tensor) -> bool:
    """Whether a tensor's value can be read without waiting for a device."""
    return value.is_cpu


def is_capturing() -> bool:
    """Whether the current stream is recording its operations into a CUDA graph."""
    # Not is_available(): that may start the driver, and a forked child could not use it.
    is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_in_use and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Raise an error if a CUDA graph is being captured; `what` names the refused operation."""
    if is_capturing():
        raise UsageError(
            f"{what} while a CUDA graph is captured: its copies would become part of the graph; "
            "call it before the capture or after it"
        )


class DeviceCopy(Future[None]):
    """Future of copies on a CUDA stream; resolves when the bytes are in host memory."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        """`event` was recorded behind the copies, on a stream of `device`."""
        super().__init__()
        self._event = event
        self._device = device

    def hold_current_stream(self) -> None:
        """Make operations queued on the current stream from now on wait for the copies."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def arrive(self) -> None:
        """Block until the copies are done, and resolve the future."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self._event.synchronize()
        except BaseException as error:  # noqa: BLE001 - the future carries it to its owner
            self.set_exception(error)
        else:
            self.set_result(None)


def begin_copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[DeviceCopy]:
    """Begin copies (to, from) from CUDA devices, ordered after their current streams' work.

    Returns one `DeviceCopy` for each device, whose `arrive` must be called. Until it has arrived
    both tensors must live, and may be changed only on a stream that `hold_current_stream` held.
    """
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for to, source in pairs:
        by_device.setdefault(source.device, []).append((to, source))
    return [_start_copy(device, pairs) for device, pairs in by_device.items()]


def _start_copy(device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> DeviceCopy:
    stream, event = _side_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    # Behind what training has queued, which may still be computing the values.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
        targets, sources = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
        event.record(stream)
    return DeviceCopy(event, device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def pin(memory: Tensor, owner: object, device: torch.device) -> bool:
    """Pin host memory for CUDA devices until `owner`, which holds it, is collected.

    Returns whether it is pinned. A refusal is no error: copies to unpinned memory are only slower
    and block the host. `device` is one that is in use.
    """
    if memory.numel() == 0:
        return False
    address, is_pinned = memory.data_ptr(), threading.Event()

    def register() -> None:
        with torch.cuda.device(device):
            if int(_runtime().cudaHostRegister(address, memory.nbytes, 0)) == 0:
                # Not at exit: the driver unpins then, and may be gone before this would run.
                weakref.finalize(owner, _unpin, address, device, os.getpid()).atexit = False
                is_pinned.set()

    # In its own thread: the runtime keeps an error per thread, and the next kernel raises it.
    thread = threading.Thread(target=register, name="holdfast-pin", daemon=True)
    with suppress(RuntimeError):  # the interpreter exits
        thread.start()
        thread.join()
    return is_pinned.is_set()


def _unpin(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, in which nothing is registered and CUDA cannot be used
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
