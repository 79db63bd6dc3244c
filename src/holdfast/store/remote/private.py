"""Loads a copy of obstore that no other code of the process uses.

obstore has one network runtime per process, whose threads do not survive a fork. If this library
used the same copy as a dataset, forked DataLoader workers whose dataset reads with obstore would
hang. A second copy of the extension module has a runtime of its own. The dynamic linker loads a
file once only, so the copy is a file in memory, which only Linux has; other systems share obstore.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

from holdfast import system
from holdfast.events import logger

_PACKAGE, _EXTENSION = "obstore", "obstore._obstore"
# Stores may be opened in several threads, and the copy is made with obstore out of `sys.modules`.
_lock = threading.Lock()


def import_obstore(name: str) -> ModuleType:
    """Return the module `name` of the private copy, if there is one, or the shared one."""
    with _lock:
        shared = importlib.import_module(name)
        return _private_modules().get(name, shared)


@functools.cache
def _private_modules() -> dict[str, ModuleType]:
    """Load the copy; {} if this system cannot."""
    if not hasattr(os, "memfd_create"):
        return {}
    try:
        path = _copy_into_memory(str(importlib.import_module(_EXTENSION).__file__))
        return _import_extension(path)
    except (ImportError, OSError) as error:
        logger.warning(
            "obstore could not be loaded a second time (%s), so forked processes that use it hang "
            "from now on; start DataLoader workers with multiprocessing_context='forkserver'",
            error,
        )
        return {}


def _import_extension(path: str) -> dict[str, ModuleType]:
    """Import obstore with the extension module at `path`, and take it out of `sys.modules`.

    Its modules import each other by their absolute names. If another thread imports obstore now,
    it gets this copy, which works as well.
    """
    shared = _take_out()
    finder = _Finder(path)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("obstore.store")
        importlib.import_module("obstore.exceptions")
        return _take_out()
    finally:
        sys.meta_path.remove(finder)
        _take_out()
        sys.modules.update(shared)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def _copy_into_memory(path: str) -> str:
    """Copy a file into memory; return its path, kept open as the linker knows libraries by it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create(_PACKAGE)
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size
            while left:
                left -= os.sendfile(descriptor, file.fileno(), None, left)
        return f"{system.PROC}/{os.getpid()}/fd/{descriptor}"
    raise OSError("needs Linux")


class _Finder(MetaPathFinder):
    """Finds obstore's extension module at another path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != _EXTENSION:
            return None
        loader = ExtensionFileLoader(fullname, self._path)
        return spec_from_file_location(fullname, self._path, loader=loader)
