"""The roots that this process writes for other libraries: threads, the claim, a failed attempt.

DCP makes a writer for each save, or sends one to another process; what must outlive the save is
kept here, by root. An import claims and releases its root here, too.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import suppress

from holdfast.errors import HoldfastError, UsageError
from holdfast.events import Emitter
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import Reference
from holdfast.maintenance.preflight import preflight
from holdfast.ownership.claim import Choice, Claim
from holdfast.ownership.owner import Ownership
from holdfast.root.catalog import Catalog
from holdfast.root.commit import SaveAttempt, name_latest
from holdfast.saving.compression import Compressing
from holdfast.saving.links import Links
from holdfast.saving.save import Tools, clean_up
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.threads.buffers import LimitedBuffers
from holdfast.threads.workers import Threads

NUM_BUFFERS = 16
"""Most blocks that are copied, hashed and written at a time."""

_roots: dict[tuple[int, str], WrittenRoot] = {}


class WrittenRoot:
    """A root that this process writes; a coordinator owns its run from the first save on."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.threads = Threads()
        self._emit = Emitter()
        self._owner = Ownership(store, takeover=False, emit=self._emit)
        self.loaded: Reference | None = None
        """The checkpoint that was loaded, unless a claim has gone on from it."""
        self._pool: LimitedBuffers | None = None
        self._attempt: tuple[SaveAttempt, bool] | None = None
        """The attempt under way, and whether other ranks write into it."""
        self._is_checked = False
        self._warned = False

    @property
    def pool(self) -> LimitedBuffers:
        """Buffers for blocks, allocated once."""
        if self._pool is None:
            self._pool = LimitedBuffers(NUM_BUFFERS, BLOCK_NBYTES)
        return self._pool

    def drop_pool(self) -> None:
        """Forget the buffers after a failure: threads may still use some."""
        self._pool = None

    def tools(self, timeout_s: float) -> Tools:
        """Return the store, threads and limits with which one save is written."""
        return Tools(
            store=self.store,
            owner=self._owner,
            compressing=Compressing({}, self._emit),
            links=Links(self.store, self._emit),
            workers=self.threads.workers,
            writers=self.threads.waiters,
            timeout_s=timeout_s,
        )

    def claim_root(self, *, nbytes: int, num_files: int, takeover: bool) -> tuple[Claim, int]:
        """Return this process's claim and the save's number; claim the run before the first."""
        owner = self._owner
        if owner.claim is None:
            owner = self._owner = Ownership(self.store, takeover=takeover, emit=self._emit)
            owner.expect_no_live_owner()
            if not self._is_checked:
                preflight(self.store, nbytes_per_save=nbytes, saves_kept=None, num_files=num_files)
                self._is_checked = True
            owner.claim_ownership(self._choose_newest())
            self.loaded = None
        assert owner.claim is not None, "it was just taken"
        return owner.claim, owner.next_sequence()

    def _choose_newest(self) -> Iterator[Choice]:
        loaded = self.loaded
        while True:
            newest = Catalog(self.store).newest()
            found = None if newest is None else newest.reference
            if loaded is not None and loaded != found:
                self._emit(
                    "warning",
                    f"{self.store.url}: the run continues from {loaded.folder}, which was loaded; "
                    "later checkpoints are left behind",
                )
                yield Choice(point=loaded, is_rollback=True)
            else:
                yield Choice(point=found)

    def record_attempt(self, attempt: SaveAttempt, *, is_alone: bool) -> None:
        """Record an attempt, so that it is removed unless `publish_attempt` is called for it."""
        self._attempt = (attempt, is_alone)

    def publish_attempt(self, attempt: SaveAttempt) -> None:
        """Forget an attempt that has committed, and point `latest` to it."""
        self._attempt = None
        self._owner.has_committed = True
        if attempt.is_unclear:
            self._owner.unclear.add(attempt.folder)
        try:
            warning = name_latest(self.store, attempt.folder)
            if warning and not self._warned:
                self._warned = True
                self._emit("warning", warning)
        except HoldfastError as error:
            self._emit("housekeeping_failed", f"latest: {error}")

    def clean(self, error: BaseException | None = None) -> None:
        """Remove the files of a failed attempt before the next save, or leave them to gc."""
        found, self._attempt = self._attempt, None
        if found is not None:
            attempt, is_alone = found
            if attempt.is_unclear:
                self._owner.unclear.add(attempt.folder)
            why = error or HoldfastError("DCP abandoned the save, because a rank failed")
            clean_up(self.store, attempt, why, is_alone=is_alone)

    def release_run(self) -> None:
        """Release the run, and remove what a failed save left behind."""
        with suppress(HoldfastError):
            self.clean()
        if self._owner.claim is not None:
            self._owner.release_run()

    def release_if_in_daemon(self) -> None:
        """Release the run after `async_save`: the training's own process may save next."""
        if multiprocessing.current_process().daemon:
            self.release_run()


def written_root(root: str | os.PathLike[str] | Store) -> WrittenRoot:
    """Return what this process keeps about a root, the same for all its writers and readers."""
    store = open_store(root)
    key = os.getpid(), f"{store.url}#{id(root)}" if isinstance(root, Store) else store.url
    found = _roots.get(key)
    if found is None:
        if not _roots:
            atexit.register(release_all)
        found = _roots[key] = WrittenRoot(store)
    return found


def release_all() -> None:
    """Release every run that this process owns through this module."""
    for (pid, _), one in [*_roots.items()]:
        if pid == os.getpid():
            one.release_run()


def expect_path(root: object) -> None:
    """Raise `UsageError` if a root is a Store object, which no other process can open."""
    if isinstance(root, Store):
        raise UsageError(
            "a writer or reader of a Store object cannot be sent to another process; give the "
            "root as a path or a URL"
        )
