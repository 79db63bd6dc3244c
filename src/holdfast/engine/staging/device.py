"""Copies from CUDA devices into pinned host memory, on streams of their own.

Tensors of other accelerators are copied as torch does it. Nothing in this module touches a device
before it is given a tensor that is on one.
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


def is_capturing() -> bool:
    """Whether what the current stream is given is recorded into a CUDA graph."""
    # Not is_available(): that may start the driver, and a forked child could not use it.
    is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_in_use and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Refuse `what`, which copies tensors, while a CUDA graph is captured.

    Raises:
        UsageError: the copies would be recorded and made at each replay, but not now.
    """
    if is_capturing():
        raise UsageError(
            f"{what} while a CUDA graph is captured: its copies would become part of the graph; "
            "call it before the capture or after it"
        )


class DeviceCopy(Future[None]):
    """A future of copies on a CUDA stream, resolved when they have arrived in host memory."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        """`event` comes after the copies on a stream of `device`."""
        super().__init__()
        self._event = event
        self._device = device

    def hold_current_stream(self) -> None:
        """Make the current stream wait for the copies before whatever it is given from now on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def arrive(self) -> None:
        """Wait for the copies and resolve. Blocks the calling thread."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self._event.synchronize()
        except BaseException as error:  # noqa: BLE001 - the future carries it to its owner
            self.set_exception(error)
        else:
            self.set_result(None)


def begin_copies(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[DeviceCopy]:
    """Begin to copy (to, from) from CUDA devices, after what their current streams do now.

    One `DeviceCopy` for each device; somebody has to let it arrive. Both tensors must live, and
    neither may be changed but on a stream that was held, until then.
    """
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for to, source in pairs:
        by_device.setdefault(source.device, []).append((to, source))
    return [_begin(device, pairs) for device, pairs in by_device.items()]


def _begin(device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> DeviceCopy:
    stream, event = _side_stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
    # After what training has queued, which may still be computing the values.
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

    Returns whether it is pinned. Copies to other memory are slower and block the host, no more than
    that, so a refusal is no error. `device` is one that is in use.
    """
    if memory.numel() == 0:
        return False
    address, is_pinned = memory.data_ptr(), threading.Event()

    def register() -> None:
        with torch.cuda.device(device):
            if int(_runtime().cudaHostRegister(address, memory.nbytes, 0)) == 0:
                # At exit the driver does it, and may be gone before.
                weakref.finalize(owner, _unpin, address, device, os.getpid()).atexit = False
                is_pinned.set()

    # The runtime keeps an error for the thread that made it, where the next kernel would raise it.
    thread = threading.Thread(target=register, name="holdfast-pin", daemon=True)
    with suppress(RuntimeError):  # the interpreter exits
        thread.start()
        thread.join()
    return is_pinned.is_set()


def _unpin(address: int, device: torch.device, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, in which nothing is registered and CUDA is not to be had
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
