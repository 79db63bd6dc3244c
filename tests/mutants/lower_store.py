"""Mutants of `store/`: writes that are not durable, not complete, or not by one writer only."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOCAL = ("tests/store/local/test_store.py", "tests/store/local/test_failures.py")
ORDER = ("tests/store/local/test_crashes.py", "tests/crash/test_write_order.py")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="put-without-fsync",
        promise="R5: bytes are synced before they get their name",
        file="store/local/files.py",
        before="        sync(fd)\n        yield Draft(folder_fd, fd, temporary)",
        after="        yield Draft(folder_fd, fd, temporary)",
        near=(*LOCAL, *ORDER),
    ),
    Mutant(
        name="failed-fsync-tried-again",
        promise="R7: a failed sync is never tried again on the same file",
        file="store/local/files.py",
        before="        sync(fd)\n        yield",
        after=(
            "        try:\n            sync(fd)\n        except OSError:\n"
            "            sync(fd)\n        yield"
        ),
        near=LOCAL,
    ),
    Mutant(
        name="put-without-sync-of-folder",
        promise="I2: a name is durable before it is acknowledged",
        file="store/local/store.py",
        before=(
            "                self._put_over(folder_fd, name, content, report)\n"
            "            sync_folder_fd(folder_fd)\n"
        ),
        after="                self._put_over(folder_fd, name, content, report)\n",
        near=(*LOCAL, *ORDER),
    ),
    Mutant(
        name="link-without-sync-of-folder",
        promise="I2: the name of a shared file is durable before the manifest",
        file="store/local/store.py",
        before='report.effect = "done"\n            sync_folder_fd(folder_fd)\n        return',
        after='report.effect = "done"\n        return',
        near=("tests/store/local/test_store.py",),
    ),
    Mutant(
        name="put-if-absent-replaces",
        promise="R10: one key has one winner",
        file="store/local/store.py",
        before="            if if_absent:\n                self._put_new",
        after="            if if_absent and not self._has_links:\n                self._put_new",
        near=LOCAL,
    ),
    Mutant(
        name="memory-put-if-absent-replaces",
        promise="R10: one key has one winner",
        file="store/memory.py",
        before="if if_absent and key in self._objects:",
        after="if if_absent and not self._objects:",
        near=("tests/store/test_memory.py",),
    ),
    Mutant(
        name="blocks-without-fsync",
        promise="I2: the bytes of a large file are durable before the manifest",
        file="store/local/blocks.py",
        before='            sync(self._fd)\n            report.effect = "done"\n',
        after='            report.effect = "done"\n',
        near=("tests/store/local/test_blocks.py", *ORDER),
    ),
    Mutant(
        name="blocks-without-sync-of-folder",
        promise="I2: the name of a large file is durable before the manifest",
        file="store/local/blocks.py",
        before="            sync_folder_fd(self._folder_fd)\n",
        after="",
        near=("tests/store/local/test_store.py",),
    ),
    Mutant(
        name="finish-with-missing-bytes",
        promise="I2: a file that is not all written is not finished",
        file="store/local/blocks.py",
        before="        if missing_nbytes:\n",
        after="        if missing_nbytes < 0:\n",
        near=("tests/store/local/test_blocks.py", "tests/store/local/test_store.py"),
    ),
    Mutant(
        name="tail-of-direct-write-at-wrong-offset",
        promise="R15: what is read back is what was written",
        file="store/local/blocks.py",
        before="write_all(self._fd, piece[direct_nbytes:], start + direct_nbytes)",
        after="write_all(self._fd, piece[direct_nbytes:], direct_nbytes)",
        near=("tests/store/local/test_blocks.py", "tests/store/local/test_store.py"),
    ),
    Mutant(
        name="given-up-file-stays",
        promise="R9: what a failed save leaves behind is bounded",
        file="store/local/blocks.py",
        before="        if self._state is _WriterState.ABORTED:\n            remove_quietly",
        after="        if self._state is _WriterState.WRITING:\n            remove_quietly",
        near=("tests/store/local/test_blocks.py", "tests/store/local/test_store.py"),
    ),
    Mutant(
        name="new-folder-without-sync-of-parent",
        promise="R5: each new folder is durable in its parent",
        file="store/local/folders.py",
        before='        sync_folder_fd(outer_fd)\n        report.effect = "none"',
        after='        report.effect = "none"',
        near=(*LOCAL, *ORDER),
    ),
    Mutant(
        name="folders-that-are-links-are-entered",
        promise="I5: no name leads out of the root",
        file="store/local/folders.py",
        before="os.open(name, _FOLDER | _NOFOLLOW, dir_fd=folder_fd)",
        after="os.open(name, _FOLDER, dir_fd=folder_fd)",
        near=("tests/store/local/test_store.py",),
    ),
    Mutant(
        name="short-write-taken-as-whole",
        promise="I2: files are durable with the planned size",
        file="store/local/files.py",
        before="        done += write_at(fd, data[done:], start + done)",
        after="        write_at(fd, data[done:], start + done)\n        done = len(data)",
        near=("tests/store/local/test_failures.py", "tests/store/local/test_blocks.py"),
    ),
    Mutant(
        name="short-read-taken-as-whole",
        promise="R16: a file that was cut is found",
        file="store/local/files.py",
        before="            )\n        done += got\n\n\ndef write_all",
        after="            )\n        done = len(buffer)\n\n\ndef write_all",
        near=("tests/store/local/test_reads.py",),
    ),
    Mutant(
        name="cached-read-of-too-few-bytes",
        promise="R15: bytes that did not come from the file are not loaded",
        file="store/local/reads.py",
        before="        if got < sum(map(len, piece)):\n            return False\n",
        after="        if got < 1:\n            return False\n",
        near=("tests/store/local/test_reads.py",),
    ),
    Mutant(
        name="copy-of-a-piece-from-another-offset",
        promise="R15: a copy on the host's disk gives the bytes of the object",
        file="store/local/pieces.py",
        before="file, memory, start - piece.start, what=path",
        after="file, memory, start % 2, what=path",
        near=("tests/store/local/test_pieces.py",),
    ),
    Mutant(
        name="lock-on-a-renamed-draft-counts",
        promise="I9: of processes that fetch the same piece one does, and none gets half of it",
        file="store/local/pieces.py",
        before="        if try_lock(fd) and _is_at(fd, path):\n            os.ftruncate(fd, 0)",
        after="        if try_lock(fd):\n            os.ftruncate(fd, 0)",
        near=("tests/store/local/test_pieces.py",),
    ),
    Mutant(
        name="copies-take-any-room",
        promise="R9: copies on the host's disk take no more room than they may",
        file="store/local/pieces.py",
        before=(
            "            if count is None or count + needed > self._max_nbytes:\n"
            "                count = self._clear(self._max_nbytes - needed)\n"
            "            has_room = count + needed <= self._max_nbytes\n"
        ),
        after=(
            "            if count is None:\n"
            "                count = self._clear(self._max_nbytes - needed)\n"
            "            has_room = True\n"
        ),
        near=("tests/store/local/test_pieces.py",),
    ),
    Mutant(
        name="existence-taken-for-being-whole",
        promise="D20: an object that is there need not be whole",
        file="store/remote/api.py",
        before="            return self.nbytes(key) == nbytes\n",
        after="            return self.nbytes(key) >= 0\n",
        near=("tests/store/remote/test_store.py",),
    ),
    Mutant(
        name="conditional-put-sent-unconditionally",
        promise="R10: one key has one winner",
        file="store/remote/api.py",
        before='self._obs.put(store, key, content, mode="create", use_multipart=False)',
        after='self._obs.put(store, key, content, mode="overwrite", use_multipart=False)',
        near=("tests/stores/test_contract.py",),
    ),
    Mutant(
        name="unclear-put-sent-again",
        promise="R24: a put of which one may win is sent again only when nothing was done",
        file="store/remote/errors.py",
        before="            return self.code in _BUSY\n",
        after="            return True\n",
        near=("tests/store/remote/test_errors.py", "tests/store/remote/test_store.py"),
    ),
    Mutant(
        name="upload-in-the-order-of-arrival",
        promise="R24: no object is torn, in whatever order its pieces come",
        file="store/remote/writes.py",
        before="                copy = self._pieces.pop(self._position, None)\n",
        after=(
            "                first = next(iter(self._pieces), self._position)\n"
            "                copy = self._pieces.pop(first, None)\n"
        ),
        near=("tests/store/remote/test_writes.py",),
    ),
)
