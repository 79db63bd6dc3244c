"""The store on a local or mounted file system.

Every put is atomic, and durable when it returns. Every name is used in a folder that was opened
without following symbolic links. Nothing is touched before the first operation. What the file
system must support (folder syncs; hard links or renames that refuse to replace) is tried, not
assumed: one that lacks it is refused with `UnsupportedStore`. tests/crash/test_write_order.py
checks the order of writes and syncs in system calls.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial

from typing_extensions import override

from holdfast.errors import NotFound, UnsupportedStore, UsageError
from holdfast.store.base import (
    MAX_KEY_BYTES,
    BlockWriter,
    Buffer,
    FillCached,
    FreeSpace,
    ObjectInfo,
    Seen,
    Store,
    check_folder,
    check_key,
    expect_at_least,
    expect_positive,
    flatten_buffer,
    ignore,
    is_key,
)
from holdfast.store.local import folders, reads
from holdfast.store.local.blocks import DirectWrites, LocalBlockWriter, create_file
from holdfast.store.local.folders import (
    drafted,
    make_folder_in,
    make_root,
    names_below,
    names_of_no_objects,
    opened_folder,
    segments_of,
    sync_folder_fd,
)
from holdfast.store.local.reads import OpenFile, OpenFiles
from holdfast.store.local.syscalls import NO_DESCRIPTORS, Reporting, free_space_at, is_network
from holdfast.system import bytes_at


class LocalStore(Store):
    """Store of files in a folder: keys are paths below `root`, objects are read-only files.

    Args:
        root: the folder. It need not exist, and may be a symbolic link; nothing in it may be one.
        direct_io: whether `create` writes past the page cache (O_DIRECT). None tries it with the
            first write; True raises `UnsupportedStore` where that is impossible; False never does
            it. Large reads of uncached files bypass the cache too, where possible, unless False.

    Thread-safe. Does nothing on disk until an operation is called. Windows lacks what saving
    needs: there the store reads only, and what writes raises `UnsupportedStore`.
    """

    reads_origin = True
    has_folders = True
    has_links = True
    writes_in_place = True

    def __init__(self, root: str | os.PathLike[str], *, direct_io: bool | None = None) -> None:
        path = os.fspath(root)
        if not path or "\0" in path:
            raise UsageError(f"root {path!r}: must be the path of a folder")
        self._root = os.path.abspath(path)
        self._names = names_below(self._root)
        self._direct = DirectWrites(direct_io)
        self._reads_directly = direct_io is not False
        self._files = OpenFiles()
        self._has_links = True
        self._syncs_folders = False
        self._made_root = False

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    @override
    def url(self) -> str:
        """The absolute path of the root."""
        return self._root

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a temporary file, sync it, and give it its name."""
        folder, name = _split(key)
        content = flatten_buffer(data)
        report = Reporting("put", self._path(key), nbytes=len(content))
        with report, self._open_folder(folder) as folder_fd:
            self._check_folder_syncs(folder_fd)
            if if_absent:
                self._put_new(folder_fd, name, content, report)
            else:
                self._put_over(folder_fd, name, content, report)
            sync_folder_fd(folder_fd)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Read bytes of a file; its length is checked before memory is allocated."""
        expect_positive("get", key, start=start, nbytes=nbytes)
        with self._reading(key) as (file, file_nbytes):
            wanted = max(file_nbytes - start, 0) if nbytes is None else nbytes
            expect_at_least(file_nbytes, start + wanted, what=f"get {self._path(key)}")
            data = bytes_at(file.fd, wanted, start)
            if len(data) == wanted:
                return data
            rest = bytearray(wanted - len(data))
            at = start + len(data)
            folders.read_exactly(file.fd, memoryview(rest), at, what=self._path(key))
            return data + rest

    @override
    def read_into(
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        expect_positive("read_into", key, start=start)
        if afresh:
            self._files.forget_file(self._path(key))
        with self._reading(key) as (file, file_nbytes):
            expect_at_least(file_nbytes, start + buffer.nbytes, what=f"get {self._path(key)}")
            if buffer.nbytes:
                reads.fill_from_file(
                    file,
                    buffer.cast("B"),
                    start,
                    what=self._path(key),
                    seen=seen,
                    direct=self._reads_directly,
                    afresh=afresh,
                )

    @override
    def cached(self, key: str, start: int, nbytes: int) -> FillCached | None:
        """Return a function that copies cached bytes; None also if `read_into` is overridden."""
        expect_positive("cached", key, start=start, nbytes=nbytes)
        check_key(key)
        if type(self).read_into is not LocalStore.read_into:
            return None
        with self._reading(key) as (file, file_nbytes):
            expect_at_least(file_nbytes, start + nbytes, what=f"get {self._path(key)}")
            is_at_hand = reads.is_at_hand(file, start, nbytes)
        return partial(reads.fill_cached, file, start) if is_at_hand and file.is_open else None

    @override
    def keeping_open(self) -> AbstractContextManager[None]:
        return self._files.keep_open()

    @override
    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        path = self._path(key)
        with Reporting("head", path):
            found = self._names.status(key)
            nbytes = folders.regular_nbytes(found, what=path)
            return ObjectInfo(key=key, nbytes=nbytes, identity=f"{found.st_dev}-{found.st_ino}")

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`; each folder is read when the iteration reaches it."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        return self._walk(prefix)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        """List names; a symbolic link out of the folder counts as a folder, but cannot be read."""
        check_folder(folder)
        return tuple(sorted(name for name, _ in self._entries(folder, sizes=False)))

    @override
    def delete(self, key: str) -> None:
        """Remove a file or an empty folder; symbolic links are not followed."""
        if key.endswith("/"):
            check_key(key[:-1])
            self._delete_folder(key[:-1])
        else:
            self._delete_file(key)

    @override
    def make_folder(self, folder: str, *, exclusive: bool = False) -> None:
        check_folder(folder)
        segments = segments_of(folder)
        self._names.expect_writable()
        with Reporting("make folder", self._path(folder)) as report:
            is_root = not segments
            make_root(self._root, report, exclusive=exclusive and is_root, is_known=self._made_root)
            self._made_root = True
            for depth, name in enumerate(segments):
                is_last = depth == len(segments) - 1
                with opened_folder(self._root, segments[:depth]) as outer_fd:
                    make_folder_in(outer_fd, name, report, exclusive=exclusive and is_last)

    @override
    def sync_folder(self, folder: str) -> None:
        check_folder(folder)
        with Reporting("sync folder", self._path(folder)), self._open_folder(folder) as folder_fd:
            sync_folder_fd(folder_fd)

    @override
    def refresh_folder(self, folder: str) -> None:
        """Create and remove a file, which refreshes the cached names of a network file system."""
        check_folder(folder)
        report = Reporting("refresh folder", self._path(folder))
        # Without the right system it has nothing to refresh for: it only reads.
        with suppress(NotFound, UnsupportedStore), report, self._open_folder(folder) as folder_fd:
            if is_network(folder_fd):
                name = folders.temporary_name()
                os.close(os.open(name, folders.NEW_FILE, folders.FILE_MODE, dir_fd=folder_fd))
                os.unlink(name, dir_fd=folder_fd)

    @override
    def sweep(self, folder: str) -> int:
        """Remove temporary files; only for folders in which no put is under way."""
        check_folder(folder)
        num_removed = 0
        report = Reporting("sweep", self._path(folder))
        with suppress(NotFound), report, self._open_folder(folder) as folder_fd:
            for name in os.listdir(folder_fd):
                if folders.is_temporary_name(name):
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder_fd)
                        num_removed += 1
        return num_removed

    @override
    def unlisted(self, folder: str) -> tuple[str, ...]:
        check_folder(folder)
        report = Reporting("look into", self._path(folder))
        with suppress(NotFound), report, self._open_folder(folder) as folder_fd:
            names = names_of_no_objects(folder_fd)
            return tuple(name for name in names if not folders.is_temporary_name(name))
        return ()

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        """Return a writer of a new file; its space is allocated at once if the file system can."""
        folder, name = _split(key)
        expect_positive("create", key, nbytes=nbytes)
        path = self._path(key)
        with Reporting("create", path, nbytes=nbytes), self._open_folder(folder) as folder_fd:
            self._check_folder_syncs(folder_fd)
            with ExitStack() as undo:
                fd = create_file(folder_fd, name, nbytes)
                undo.callback(folders.remove_quietly, folder_fd, name)
                undo.callback(os.close, fd)
                own_folder_fd = os.dup(folder_fd)
                undo.callback(os.close, own_folder_fd)
                direct = self._direct.open_direct_file(folder_fd, name, nbytes)
                writer = LocalBlockWriter(
                    own_folder_fd,
                    fd,
                    direct,
                    path=path,
                    nbytes=nbytes,
                    at_most=at_most,
                    warn=self._direct.log_refusal,
                )
                undo.pop_all()
            return writer

    @override
    def link(self, source: str, key: str) -> bool:
        """Make a hard link `key` to the file `source`, durably; False if that is impossible."""
        (source_folder, source_name), (folder, name) = _split(source), _split(key)
        report = Reporting("link", self._path(key))
        with report, self._open_folder(folder) as folder_fd:
            self._check_folder_syncs(folder_fd)
            try:
                with self._open_folder(source_folder) as source_fd:
                    folders.link_file(source_fd, source_name, folder_fd, name)
            except FileNotFoundError:
                return False
            except OSError as err:
                if err.errno in folders.NO_LINKS:
                    return False
                raise
            report.effect = "done"
            sync_folder_fd(folder_fd)
        return True

    @override
    def point(self, name: str, target: str) -> None:
        """Make a relative symbolic link to `target`, or a text file if links are unsupported."""
        check_key(name)
        check_key(target)
        if "/" in name:
            raise UsageError(f"point {name}: the pointer must be in the root itself")
        aside = folders.temporary_name()
        with Reporting("point", self._path(name)) as report, self._open_folder("") as root_fd:
            try:
                os.symlink(target, aside, dir_fd=root_fd)
            except OSError as err:
                if err.errno not in folders.NO_LINKS:
                    raise
                self.put(name, f"{target}\n".encode())
                return
            folders.replace_with(root_fd, aside, name)
            report.effect = "done"
            sync_folder_fd(root_fd)

    @override
    def pointed(self, name: str) -> str | None:
        check_key(name)
        with suppress(NotFound), Reporting("read", self._path(name)):
            try:
                return self._names.read_link_target(name)
            except OSError as err:
                if err.errno != errno.EINVAL:
                    raise
            return super().pointed(name)  # a text file
        return None

    @override
    def outer(self) -> Iterator[Store]:
        """Yield stores of the parent folders, symbolic links resolved."""
        path = os.path.realpath(self._root)
        while (parent := os.path.dirname(path)) != path:
            path = parent
            yield LocalStore(path)

    @override
    def free_space(self) -> FreeSpace:
        """Return the free space of the file system; the root need not exist yet."""
        with Reporting("free space of", self._root):
            return free_space_at(self._root)

    @override
    def probe(self) -> str:
        """Try a folder sync, a put of a new file, and a direct write unless `direct_io` is False.

        Raises:
            StoreError: it cannot be tried, for instance because the root does not exist.
        """
        report = Reporting("probe", self._root)
        with report, self._open_folder("") as root_fd:
            sync_folder_fd(root_fd)
            name = folders.temporary_name()
            try:
                self._put_new(root_fd, name, memoryview(b"probe"), report)
                report.effect = "none"
            finally:
                folders.remove_quietly(root_fd, name)
            return self._direct.try_direct_writes(root_fd)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key) if key else self._root

    def _open_folder(self, folder: str) -> AbstractContextManager[int]:
        return self._names.open_folder(folder)

    @contextmanager
    def _reading(self, key: str) -> Iterator[tuple[OpenFile, int]]:
        path = self._path(key)
        with Reporting("get", path):
            kept = self._files.get(path)
            if kept is not None:
                yield kept, os.fstat(kept.fd).st_size
                return
            try:
                file = self._open_file(key)
            except OSError as err:
                if err.errno not in NO_DESCRIPTORS:
                    raise
                self._files.drop_all()
                file = self._open_file(key)
            is_kept = False
            try:
                file_nbytes = folders.regular_nbytes(os.fstat(file.fd), what=path)
                is_kept = self._files.keep(path, file)
                yield file, file_nbytes
            finally:
                if not is_kept:
                    file.close()

    def _open_file(self, key: str) -> OpenFile:
        check_key(key)
        return OpenFile(self._names.open(key))

    def _put_new(self, folder_fd: int, name: str, content: memoryview, report: Reporting) -> None:
        if self._has_links:
            with drafted(folder_fd, content) as draft:
                report.effect = "maybe"
                if draft.link_draft(name):
                    report.effect = "done"
                    return
            report.effect = "none"
            self._has_links = False
        with drafted(folder_fd, content, unnamed=False) as draft:
            report.effect = "maybe"
            draft.rename_new(name)
            report.effect = "done"

    def _put_over(self, folder_fd: int, name: str, content: memoryview, report: Reporting) -> None:
        with drafted(folder_fd, content, unnamed=self._has_links) as draft:
            report.effect = "maybe"
            if draft.rename_over(name):
                report.effect = "done"
                return
        report.effect = "none"
        self._has_links = False
        self._put_over(folder_fd, name, content, report)

    def _check_folder_syncs(self, folder_fd: int) -> None:
        # Before the first name appears: a put that cannot be durable must not be visible either.
        if not self._syncs_folders:
            sync_folder_fd(folder_fd)
            self._syncs_folders = True

    def _delete_file(self, key: str) -> None:
        folder, name = _split(key)
        report = Reporting("delete", self._path(key))
        with suppress(NotFound), report, self._open_folder(folder) as folder_fd:
            report.effect = "maybe"
            with suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=folder_fd)
            # Also if it was missing: whoever removed it may not have synced the folder yet.
            report.effect = "done"
            sync_folder_fd(folder_fd)

    def _delete_folder(self, folder: str) -> None:
        self._names.expect_writable()
        segments = segments_of(folder)
        self.sweep(folder)
        report = Reporting("delete", self._path(folder) + "/")
        with suppress(NotFound), report, opened_folder(self._root, segments[:-1]) as outer_fd:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.rmdir(segments[-1], dir_fd=outer_fd)
            report.effect = "done"
            sync_folder_fd(outer_fd)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        # In order of whole keys: a folder sorts as if its name ended with the slash.
        first = prefix.rpartition("/")[0]
        todo = [(f"{first}/" if first else "", 0)]
        while todo:
            key, nbytes = todo.pop()
            if key and not key.endswith("/"):
                yield ObjectInfo(key=key, nbytes=nbytes)
                continue
            inside = [(key + name, size) for name, size in self._entries(key[:-1], sizes=True)]
            todo += sorted((item for item in inside if _may_match(item[0], prefix)), reverse=True)

    def _entries(self, folder: str, *, sizes: bool) -> Sequence[tuple[str, int]]:
        with suppress(NotFound), Reporting("list", self._path(folder)):
            found = self._names.scan(folder, sizes=sizes)
            return [entry for entry in found if is_key(entry[0].removesuffix("/"))]
        return []


def _split(key: str) -> tuple[str, str]:
    check_key(key)
    folder, _, name = key.rpartition("/")
    return folder, name


def _may_match(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and len(key) <= MAX_KEY_BYTES
