"""Sources that a user names on the command line, of any format, read within limits.

A file from elsewhere may be made to take all memory or to crash a decoder. Such a command runs
once more in a child process, with limits on memory and opening time; `--trust` runs it in this one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar

import click

from holdfast.cli.output import write_message
from holdfast.cli.target import named_file_key, named_keys, open_root_store
from holdfast.errors import LimitExceeded, OutOfMemory, UsageError, listing
from holdfast.format.nodes import ArrayRef, GeneratorState, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop.source import Source, lost_tensors
from holdfast.root.address import split_source
from holdfast.system import IS_LINUX, signal_name

T = TypeVar("T")

VARIABLE = "HOLDFAST_LIMITED"
"""Environment variable of the child: it limits itself, and starts no further child."""
DATA_NBYTES = 2 << 30
"""Most private memory of the child; a conversion takes about 400 MiB."""
OPENING_S = 60.0
"""Longest time in which a file must be opened."""
_END_S = 10.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
# Not `-m`: that would look for modules in the current folder, which may be the file's.
_PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; from holdfast.cli import main; main()"
)


def limited(*arguments: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator: run a command in a limited child if one of `arguments` is another's file."""

    def decorated(function: Callable[..., T]) -> Callable[..., T]:
        @wraps(function)
        def command(*, trust: bool, **given: Any) -> T:
            foreign = [text for name in arguments for text in _texts(given[name])]
            foreign = [text for text in foreign if is_foreign(text)]
            if trust:
                from holdfast.interop.pickles.values import trusting

                with trusting():
                    return function(**given)
            if not foreign or not _has_limits():
                return function(**given)
            if VARIABLE not in os.environ:
                click.get_current_context().exit(_run_in_child(foreign))
            _limit()
            try:
                return function(**given)
            except (MemoryError, OutOfMemory) as error:
                raise LimitExceeded(_too_much(foreign)) from error

        return command

    return decorated


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [*(value or ())]


def is_foreign(text: str) -> bool:
    """Whether a text names a local file or folder that is neither a root nor a checkpoint."""
    from holdfast.interop.sources.checkpoint import recognises
    from holdfast.store import is_web

    # As `open_source` decides, or files of ours beside others would lift the limits.
    return (is_web(text) or os.path.exists(text)) and not recognises(text)


def _open_limited(text: str) -> Source:
    """Open a source with the named keys, first in a limited child within `OPENING_S`."""
    from holdfast.interop.opening import open_source

    with _deadline():
        return open_source(text, encrypt=named_keys(), key=named_file_key())


@contextmanager
def _deadline() -> Iterator[None]:
    """End this process by SIGALRM if the block takes too long; without limits, do nothing."""
    if VARIABLE not in os.environ or not _has_limits():
        yield
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, OPENING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _has_limits() -> bool:
    return sys.platform != "win32"


def _limit() -> None:
    """Limit this process's memory, and let it end with its parent."""
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    nbytes = DATA_NBYTES if most == resource.RLIM_INFINITY else min(DATA_NBYTES, most)
    with suppress(ValueError, OSError):  # macOS knows the limit and may refuse it
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run_in_child(foreign: list[str]) -> int:
    """Run this command line in a child, with our streams; return its exit code."""
    command = [sys.executable, "-c", _PROGRAM, *sys.argv[1:]]
    sys.stdout.flush()
    environment = {**os.environ, VARIABLE: "1"}
    with subprocess.Popen(command, env=environment, preexec_fn=_die_with_parent()) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)  # the terminal has told it, too
            child.kill()
            raise
    if code >= 0:
        return code
    if code == -getattr(signal, "SIGALRM", 0):
        raise LimitExceeded(
            f"{', '.join(foreign)}: opening took more than {OPENING_S:.0f} s. Files of other "
            "libraries are read within limits; if you trust this file, pass --trust to lift them"
        )
    raise LimitExceeded(f"{_too_much(foreign)} (the process ended by {signal_name(-code)})")


def _die_with_parent() -> Callable[[], None] | None:
    """Return what a child of Linux calls to be killed when this process dies."""
    if not IS_LINUX:
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)


def _too_much(foreign: list[str]) -> str:
    return (
        f"{', '.join(foreign)}: reading it crashed or took more than "
        f"{DATA_NBYTES >> 30} GiB of memory. Files of others are read within limits; if you trust "
        "it, --trust lifts them"
    )


# Sources


def open_named(text: str) -> Source:
    """Open a source, with the keys that were named before the command."""
    if "://" in text:
        open_root_store(split_source(text)[0])
    return _open_limited(text)


def open_read(text: str) -> Source:
    """Open a source for a command that reads its tensors; name those that cannot be read."""
    source = open_named(text)
    if lost := lost_tensors(source):
        lines = [f"{one.path}: {one.why}" for one in lost]
        write_message(f"{source.url}: holds tensors that cannot be read:\n{listing(lines)}")
    return source


def choose_components(source: Source, components: Collection[str]) -> tuple[str, ...]:
    """Return the named components, or all."""
    for name in components:
        source.get_component(name)
    return tuple(components or source.parts)


def tensors_of(
    source: Source, components: Collection[str]
) -> Iterator[tuple[str, TensorRef | ArrayRef, TensorSpec]]:
    """Yield the tensors of components, in the order of the trees, by "component:path"."""
    for name in components:
        part = source.parts[name]
        for path, ref in part.leaves.items():
            yield f"{name}:{path}", ref, part.specs[ref.key]


def split_name(source: Source, name: str) -> tuple[str, str]:
    """Split "component:path"; a source of one component needs no name of it."""
    component, colon, path = name.partition(":")
    if colon and component in source.parts:
        return component, path
    if len(source.parts) == 1:
        return next(iter(source.parts)), name
    has = ", ".join(map(repr, source.parts))
    raise UsageError(f"{source.url}: {name!r}: write COMPONENT:PATH; the components are {has}")


def items_of(node: Any) -> list[tuple[str, Any]]:
    """List the members of a container of a typed tree by their names; none for other nodes."""
    if isinstance(node, GeneratorState):
        return items_of(node.members)
    if isinstance(node, Mapping):
        return [(str(name), inner) for name, inner in node.items()]
    if isinstance(node, list | tuple):
        return [(str(number), inner) for number, inner in enumerate(node)]
    return []


def shape_text(spec: TensorSpec) -> str:
    """Write a shape for people."""
    return "×".join(map(str, spec.shape)) or "scalar"
