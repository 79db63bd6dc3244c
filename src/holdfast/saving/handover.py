"""Staging in the shared memory of `holdfast run --memory`, so that it outlives the process.

A record says that the memory holds one whole state (decision 0069). From it `saving.finish` commits
the save of a dead training, and `loading.staged_blocks` reads the memory. It must be withdrawn
before the memory changes (tests/loading/test_staged_blocks.py).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from typing_extensions import override

from holdfast.errors import CorruptData, HoldfastError, OutOfMemory
from holdfast.events import Emitter
from holdfast.format.codec import Compression
from holdfast.format.tensors import TensorFile
from holdfast.launched import memory_folder
from holdfast.loading.staged_blocks import is_ended
from holdfast.ownership.process import this_process
from holdfast.saving.participants import SaveParticipant
from holdfast.saving.save import STAGED_RECORDS, SaveRequest, StagedRecord
from holdfast.staging.arena import FileImage
from holdfast.staging.interfaces import Staged
from holdfast.staging.shared import (
    STAGED,
    SharedArena,
    SharedFolder,
    StagingFolder,
    read_record,
)
from holdfast.staging.stage import MakeFile, Stager
from holdfast.state.capture.capture import Captured
from holdfast.state.components import CapturedComponent
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.system import free_shared
from holdfast.threads.workers import Workers


class SharedImage(FileImage):
    """Image in shared memory, which records the digests of its blocks there."""

    def __init__(self, arena: SharedArena, *, is_apart: bool) -> None:
        super().__init__(arena.file, is_apart=is_apart, pages=arena.pages)
        self._shared = arena

    @override
    def digest_block(self, number: int) -> bytes:
        digests = self.digests
        is_new = digests[number] is None
        digest = super().digest_block(number)
        if is_new and digests is self.digests:  # else a failed save's, of bytes that have changed
            self._shared.note_digest(number, digest)
        return digest

    def note_digests(self) -> None:
        """Record the digests that are known, and which are not."""
        self._shared.note_digests(self.digests)


class SharedStager(Stager):
    """Stager whose images are in shared memory, as far as the budget allows."""

    is_shared = True

    def __init__(
        self,
        folder: SharedFolder,
        root: Store,
        compressions: Mapping[str, object],
        emit: Emitter,
        *,
        memory_budget: int | None,
    ) -> None:
        """`compressions` of the components; only fixed ones can be used by other processes."""
        super().__init__(memory_budget=memory_budget)
        self._shared = folder
        release = weakref.finalize(self, os.close, folder.hold())
        release.atexit = False  # a save may still be on its way
        self._root = root.url if type(root) is LocalStore else ""
        self._compressions = {
            name: one for name, one in compressions.items() if isinstance(one, Compression)
        }
        self._emit = emit
        self._own: StagingFolder | None = None
        self._is_partly_private = False
        """Whether some of the state is in ordinary memory."""
        self._thread = Workers(1, "holdfast-memory")
        self._lock = threading.Lock()
        self._current: object = None
        """The save that may be recorded as staged."""
        if not self._root:
            emit(
                "warning",
                f"{root.url}: a restart reads the newest state from the memory of holdfast run; "
                "but a save that the training leaves unfinished is lost: only saves in a local "
                "folder can be finished without it",
            )

    @override
    def prepare_staging(
        self,
        captured: Captured,
        *,
        overlapped: Mapping[str, Collection[str]] | None = None,
        is_awaited: bool = False,
    ) -> Staged:
        self._withdraw()
        if self.takes_waves(captured):
            self._use_ordinary_memory(
                "the state is larger than memory_budget, and is copied in waves"
            )
        staged = super().prepare_staging(
            captured, overlapped=overlapped or {}, is_awaited=is_awaited
        )
        self._drop_unused()
        return staged

    @override
    def lay_out_files(self, component: CapturedComponent, make: MakeFile) -> None:
        super().lay_out_files(component, self._make_image if make is FileImage else make)

    @override
    def discard_failed(self, staged: Staged) -> None:
        self._withdraw()
        super().discard_failed(staged)

    @override
    def record_changed_tensors(self, staged: Staged) -> None:
        with self._lock:
            self._current = None
            if self._own is not None:
                self._own.settle()
        super().record_changed_tensors(staged)

    @override
    def free_memory(self) -> None:
        if self._own is not None:
            self._own.record_close()
        super().free_memory()

    def record_when_staged(
        self,
        staged: Staged,
        request: SaveRequest,
        joint: SaveParticipant,
        is_staged: Future[None],
    ) -> None:
        """In the save thread: record the save, now or as soon as all of it is copied."""
        if self._own is None or self._is_partly_private:
            return
        with self._lock:
            self._current = staged
        record = partial(self._record_staged, staged, request, joint, is_staged)
        if is_staged.done():
            record()
        else:
            # Elsewhere, as training may wait for the thread that copies last; and at once: those
            # that hash may have seconds of work in their queue.
            is_staged.add_done_callback(lambda _: self._thread.submit(record))

    def _record_staged(
        self,
        staged: Staged,
        request: SaveRequest,
        joint: SaveParticipant,
        is_staged: Future[None],
    ) -> None:
        if is_staged.exception() is not None:
            return
        try:
            record = StagedRecord(
                process=this_process(),
                root=self._root,
                part=joint.describe_part(staged),
                request=request,
                files={
                    name: tuple(known.file.name for known in files)
                    for name, files in staged.files.items()
                },
                trees=dict(staged.trees),
                kinds=dict(staged.kinds),
                by_rank=tuple(sorted(staged.by_rank)),
                compressions=self._compressions,
            )
            with self._lock:
                # The save may have ended, and the memory may be in use for the next.
                if self._current is staged and self._own is not None:
                    for known in staged.all_files:
                        assert isinstance(known, SharedImage), "else nothing is recorded"
                        known.note_digests()
                    self._own.record_staged(record)
        except (OSError, HoldfastError) as error:
            self._use_ordinary_memory(str(error))

    def _withdraw(self) -> None:
        with self._lock:
            self._current = None
            if self._own is not None:
                self._own.withdraw()

    def _make_image(self, file: TensorFile, *, is_apart: bool) -> FileImage:
        if not self._is_partly_private:
            try:
                own = self._own = self._own or self._make_own_folder()
                self._drop_own(own, file.name)  # of another layout
                return SharedImage(self._shared.reserve(own, file), is_apart=is_apart)
            except (OSError, CorruptData, OutOfMemory) as error:
                self._use_ordinary_memory(str(error))
        return FileImage(file, is_apart=is_apart)

    def _make_own_folder(self) -> StagingFolder:
        """Make this manager's folder, in place of those that nobody needs any more."""
        for folder in self._shared.staging_folders():
            if is_ended(folder) and not self._may_be_finished(folder):
                folder.remove()
        return StagingFolder.make_below(self._shared.path, this_process())

    def _may_be_finished(self, folder: StagingFolder) -> bool:
        """Whether an ended folder has a save of another run, which this one has not claimed."""
        with suppress(OSError, CorruptData):
            root = read_record(folder.path / STAGED, STAGED_RECORDS).root
            return root not in ("", self._root)
        return False

    def _drop_unused(self) -> None:
        if self._own is not None:
            used = {known.file.name for files in self._files.values() for known in files}
            for name in self._own.arena_names():
                if name not in used:
                    self._drop_own(self._own, name)

    def _drop_own(self, own: StagingFolder, name: str) -> None:
        with suppress(OSError):  # not there
            free_shared(own.arena_path(name))  # workers of a data loader may have it mapped
        own.drop_arena(name)

    def _use_ordinary_memory(self, why: str) -> None:
        """Use ordinary memory from now on; what is in use stays mapped until it is replaced."""
        if not self._is_partly_private:
            self._is_partly_private = True
            self._emit(
                "warning",
                f"holdfast run --memory: {why}. The state is staged in ordinary memory: what is "
                "not committed is lost with this process, and a restart reads the storage",
            )
            with self._lock:
                if self._own is not None:
                    self._own.remove()
                    self._own = None


def stager_of(
    root: Store,
    compressions: Mapping[str, object],
    emit: Emitter,
    *,
    memory_budget: int | None,
    is_encrypted: bool,
) -> Stager:
    """Make the stager of a manager below `holdfast run --memory`, if that can be used."""
    path = memory_folder()
    assert path is not None, "the caller asks"
    folder = SharedFolder(Path(path))
    if is_encrypted:
        emit(
            "warning",
            "holdfast run --memory: not for encrypted runs, whose plain bytes would be left in "
            "shared memory; the state is staged in ordinary memory",
        )
        return Stager(memory_budget=memory_budget)
    try:
        _ = folder.supervisor
        return SharedStager(folder, root, compressions, emit, memory_budget=memory_budget)
    except (OSError, CorruptData) as error:
        emit("warning", f"holdfast run --memory: {error}; the state is staged in ordinary memory")
        return Stager(memory_budget=memory_budget)
