"""Record the system calls of a run with strace: of our own code, and of broken versions of it.

    python tests/crash/traced.py FOLDER clean no_file_sync overlap links.no_file_sync ...

For each variant a child is forked from a warm parent, strace is attached to it, and the child
then makes a root, saves three times or more with one checkpoint or more kept, tags, closes and runs
gc. A variant that begins with a way to save (tests/ways.py, which PYTHONPATH must have) saves so.
The trace is `FOLDER/<variant>.trace`. A write of `committed <folder>` marks where the caller was
told, and one of `went <way>` that a save went that way.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import storm
import torch

from holdfast.format import layout
from holdfast.format.manifest import Deleted
from holdfast.maintenance.gc import collect_garbage
from holdfast.ownership import deletion
from holdfast.root import commit as commit_module
from holdfast.root.catalog import Catalog
from holdfast.saving import save as save_module
from holdfast.store.local import LocalStore
from holdfast.version import environment
from runs import begun
from ways import PLAIN, WAYS, Trained, Way, save_and_go_on

NUM_ELEMENTS = 1 << 20  # of 3 tensors: one file of two blocks, so that two threads write
CALLS = (
    "openat,?open,?creat,mkdirat,?mkdir,unlinkat,?unlink,?rmdir,linkat,?link,symlinkat,"
    "?symlink,?renameat,renameat2,?rename,write,pwrite64,?pwritev,?pwritev2,fsync,fdatasync,"
    "ftruncate,fallocate"
)
TEXT_NBYTES = 16384
"""How much of each write is recorded: manifests must be whole."""

_told = os.open(os.devnull, os.O_WRONLY)


def tell(folder: str) -> None:
    """What a caller does who relies on the checkpoint, as a line in the trace."""
    os.write(_told, f"committed {folder}".encode())


def run(root: Path, way: Way) -> None:
    """The life that is recorded."""
    state = way.new_state()
    with way.manager(root, state) as manager:
        manager.resume()
        for step in range(1, 4 + way.num_before):
            tell(save_and_go_on(manager, state, step).folder)
        manager.wait()
        manager.tag("latest", "last")
    store = LocalStore(root)
    left = begun(store, label="left", epoch=1, sequence=9)
    store.put(f"{left.folder}/{layout.INDEX}", b'{"holdfast":1')
    collect_garbage(store)


def _without_sync(is_skipped: Callable[[int], bool]) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if not is_skipped(os.fstat(fd).st_mode):
            real(fd)

    os.fsync = fsync  # type: ignore[assignment]


def no_file_sync() -> None:
    """Files are written and not synced."""
    _without_sync(stat.S_ISREG)


def no_folder_sync() -> None:
    """Names are given and not synced."""
    _without_sync(stat.S_ISDIR)


def tombstone_last() -> None:
    """Files go while the manifest still says that they are there."""
    real = deletion._put_tombstone

    def put_tombstone(store: Any, folder: str, tombstone: Deleted) -> None:
        commit_module.remove_files(store, folder, whole=False)
        real(store, folder, tombstone)

    deletion._put_tombstone = put_tombstone


def acknowledge_early() -> None:
    """The caller is told when the manifest has its name, before that is durable."""
    real = LocalStore._put_new

    def put_new(self: LocalStore, folder_fd: int, name: str, *rest: Any) -> None:
        real(self, folder_fd, name, *rest)
        if name == layout.MANIFEST:
            tell(os.path.basename(os.readlink(f"/proc/self/fd/{folder_fd}")))

    LocalStore._put_new = put_new  # type: ignore[method-assign]


def delete_before_commit() -> None:
    """The old checkpoint goes to make room for the new one."""
    real = save_module.commit

    def commit(store: Any, attempt: Any, manifest: Any) -> None:
        for entry in Catalog(store).checkpoints():
            gone = Deleted(save_id=entry.manifest.save_id, by="mutant", reason="room")
            deletion._put_tombstone(store, entry.folder, gone)
        real(store, attempt, manifest)

    save_module.commit = commit


def write_again() -> None:
    """A file of a committed checkpoint is replaced by an equal one."""
    real = save_module.commit

    def commit(store: Any, attempt: Any, manifest: Any) -> None:
        real(store, attempt, manifest)
        key = f"{attempt.folder}/{layout.INDEX}"
        store.put(key, store.get(key))

    save_module.commit = commit


VARIANTS: dict[str, Callable[[], object]] = {
    "clean": lambda: None,
    "manifest_first": storm.manifest_first,
    **{
        mutant.__name__: mutant
        for mutant in (
            no_file_sync,
            no_folder_sync,
            tombstone_last,
            acknowledge_early,
            delete_before_commit,
            write_again,
        )
    },
}


def record(folder: Path, variant: str) -> None:
    """One forked child under strace, from its first call in the store to its end."""
    go, let_go = os.pipe()
    first, _, second = variant.partition(".")
    way = WAYS.get(first, PLAIN)
    mutant = (second or "clean") if first in WAYS else first

    def child() -> None:
        VARIANTS[mutant]()
        way.have_noted(setattr, lambda: os.write(_told, f"went {first}".encode()))
        os.read(go, 1)
        run(
            folder / variant / "new" / "root",
            replace(way, num_elements=max(way.num_elements, NUM_ELEMENTS)),
        )

    pid = storm.forked(child)
    options = ["-f", "-yy", "-s", str(TEXT_NBYTES), "-e", f"trace={CALLS}", "-e", "signal=none"]
    strace = subprocess.Popen(
        ["strace", *options, "-o", str(folder / f"{variant}.trace"), "-p", str(pid)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert strace.stderr is not None
    said = strace.stderr.readline()
    os.write(let_go, b".")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said += strace.communicate()[1]
    if status != 0 or strace.returncode != 0:
        sys.exit(f"{variant}: exit status {status}; strace {strace.returncode}: {said}")


def main(folder: Path, variants: list[str]) -> None:
    torch.set_num_threads(1)
    environment()  # asks git once; a process of its own has no place in the traces
    if any(variant.partition(".")[0] in WAYS for variant in variants):
        Trained(1).become(1)  # nor have files that are imported
    for variant in variants:
        record(folder, variant)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
