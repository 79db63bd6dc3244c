"""One measurement in a process of its own, forked from a server that has all imports done."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

from bench.machine import back_memory
from bench.results import Figures, Outcome

TIMEOUT_S = 900.0


def in_child(
    work: Callable[..., Figures], *arguments: object, timeout_s: float = TIMEOUT_S
) -> Outcome:
    """`work(*arguments)` in a fresh process; an error is in the outcome."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.preload", "bench.child"])
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(work, arguments, send))
    child.start()
    send.close()
    try:
        if receive.poll(timeout_s):
            outcome: Outcome = receive.recv()
        else:
            outcome = Outcome(figures={}, error=f"no result after {timeout_s:g} s")
            child.kill()
    except EOFError:
        outcome = Outcome(figures={}, error="the process died")
    child.join()
    return outcome


def settle(nbytes: int) -> None:
    """Before a measured call: no garbage, no writes of others, and memory that exists.

    `nbytes` is what the call may newly take, for its copy and for pages of files.
    """
    gc.collect()
    os.sync()
    back_memory(nbytes)


def _run(work: Callable[..., Figures], arguments: tuple[object, ...], reply: Connection) -> None:
    warnings.simplefilter("ignore")
    importlib.import_module("bench.preload")  # should the server not have found it
    try:
        outcome = Outcome(figures=work(*arguments))
    except Exception as err:
        traceback.print_exc()
        outcome = Outcome(figures={}, error=f"{type(err).__name__}: {err}")
    reply.send(outcome)
    reply.close()
