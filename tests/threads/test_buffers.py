"""Memory of our own, here and in forked children."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from holdfast.threads.buffers import Buffers, allocate_pages

NBYTES = 4 << 20


def in_a_child(job: Callable[[], bool]) -> bool:
    """Whether `job` is true in a forked child."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            status = 0 if job() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_has_it_empty_and_its_own() -> None:
    """Nothing is copied for a child, and the parent does not see what it writes."""
    memory = allocate_pages(NBYTES)
    memory[:] = b"p" * NBYTES

    def job() -> bool:
        was_empty = memory[:] == bytes(NBYTES)
        memory[:] = b"c" * NBYTES
        return was_empty

    assert in_a_child(job)
    assert memory[:] == b"p" * NBYTES


def test_a_child_that_lets_go_of_what_it_inherited_keeps_its_own() -> None:
    """Its new memory is not where the parent's was."""
    inherited = [allocate_pages(NBYTES) for _ in range(8)]

    def job() -> bool:
        own = [mmap.mmap(-1, NBYTES) for _ in range(8)]
        for memory in own:
            memory[:] = b"c" * NBYTES
        inherited.clear()
        return all(memory[:] == b"c" * NBYTES for memory in own)

    assert in_a_child(job)


def test_buffers_are_used_again_unless_they_are_too_small() -> None:
    buffers = Buffers()
    small = buffers.acquire_buffer(4096)
    buffers.release_buffer(small)
    assert buffers.acquire_buffer(1000) is small
    buffers.release_buffer(small)
    assert buffers.acquire_buffer(8192).nbytes == 8192
