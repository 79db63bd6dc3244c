"""LocalStore meets the contract of stores, follows no links, and opens nothing odd."""

import errno
import mmap
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    NotFound,
    OutcomeUnknown,
    StoreError,
    TransientStoreError,
    UnsupportedStore,
    UsageError,
)
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.local.folders import temporary_name
from holdfast.testing.store_contract import StoreContract

NOBODY = 65534


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "root")


@pytest.mark.full
class TestLocalStoreThroughALink(StoreContract):
    """The root itself may be a symbolic link."""

    @pytest.fixture
    def store(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        return LocalStore(tmp_path / "link")


@pytest.mark.full
class TestLocalStoreWithoutUnnamedFiles(StoreContract):
    """As on file systems without O_TMPFILE."""

    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        monkeypatch.delattr(os, "O_TMPFILE")
        return LocalStore(tmp_path / "root")


@pytest.mark.full
class TestLocalStoreWithoutLinks(StoreContract):
    """As on file systems without hard links, where renameat2 has to do."""

    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
        return LocalStore(tmp_path / "root")


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    return root


@pytest.fixture
def store(root):
    return LocalStore(root)


def refusing(number):
    """A function that fails with that errno."""

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return refuse


def dot_names(root):
    """Every name below `root` that starts with a dot."""
    return [name for _, dirs, files in os.walk(root) for name in dirs + files if name[0] == "."]


def test_it_does_itself_what_others_leave_to_the_defaults(store):
    for name in ("make_folder", "read_into", "cached", "create", "link", "point", "probe"):
        assert getattr(type(store), name) is not getattr(Store, name)
    assert store.has_folders
    assert store.has_links


# what it touches


def test_reading_makes_nothing(tmp_path):
    """Invariant 11: reading never claims, and leaves no trace."""
    store = LocalStore(tmp_path / "a" / "root")
    assert list(store.list()) == []
    assert store.children() == ()
    assert store.free_space().nbytes > 0
    assert store.sweep("") == 0
    store.delete("x")
    store.delete("x/")
    for read in (lambda: store.get("x"), lambda: store.head("x"), lambda: store.get("x/y")):
        with pytest.raises(NotFound):
            read()
    assert os.listdir(tmp_path) == []


def test_a_put_without_a_root_names_the_missing_folder(tmp_path):
    with pytest.raises(NotFound, match=re.escape(str(tmp_path / "root" / "a"))):
        LocalStore(tmp_path / "root").put("a", b"x")


def test_make_folder_makes_the_root_and_its_ancestors(tmp_path):
    store = LocalStore(tmp_path / "a" / "b" / "root")
    store.make_folder("x/y")
    assert (tmp_path / "a" / "b" / "root" / "x" / "y").is_dir()


def test_a_root_that_is_a_file_is_an_error_and_never_empty(tmp_path):
    (tmp_path / "root").write_bytes(b"x")
    store = LocalStore(tmp_path / "root")
    for call in (store.children, lambda: list(store.list()), lambda: store.make_folder("")):
        with pytest.raises(StoreError, match="not a folder"):
            call()


@pytest.mark.parametrize("root", ["", "a\0b"])
def test_a_root_that_is_no_path_is_refused(root):
    with pytest.raises(UsageError, match="root"):
        LocalStore(root)


def test_objects_cannot_be_written_by_anybody(store, root):
    old = os.umask(0o027)
    try:
        store.put("a", b"x")
        store.put("b", b"x", if_absent=True)
        writer = store.create("c", 1)
        writer.write(0, memoryview(b"x"))
        writer.finish()
    finally:
        os.umask(old)
    assert [stat.S_IMODE((root / name).stat().st_mode) for name in "abc"] == [0o440] * 3


def test_nothing_is_left_open(store):
    before = os.listdir("/proc/self/fd")
    store.make_folder("f/g")
    store.put("f/a", b"x")
    store.put("f/b", b"x", if_absent=True)
    for number in range(3):
        writer = store.create(f"f/c{number}", 4096)
        writer.write(0, memoryview(bytes(4096)))
        (writer.finish, writer.abort)[number % 2]()
    for failing in (
        lambda: store.put("f/b", b"x", if_absent=True),
        lambda: store.get("f/a", 0, 2),
        lambda: store.create("f/a", 1),
        lambda: store.put("f", b"x"),
        lambda: store.get("f/g/x"),
    ):
        with pytest.raises(Exception, match=re.escape(store.url)):
            failing()
    iterator = store.list()
    next(iterator)
    store.point("latest", "f")
    store.probe()
    store.unlisted("f")
    for name in store.children("f"):
        store.delete(f"f/{name}")
    store.delete("f/")
    assert os.listdir("/proc/self/fd") == before


# links and other odd things


@pytest.fixture
def outside(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    return outside


def test_a_linked_folder_is_refused_by_every_operation(store, root, outside):
    """R28: no link leads out of the root."""
    (root / "link").symlink_to(outside)
    calls = [
        lambda: store.get("link/secret"),
        lambda: store.head("link/secret"),
        lambda: store.read_into("link/secret", 0, memoryview(bytearray(1))),
        lambda: store.put("link/new", b"x"),
        lambda: store.put("link/new", b"x", if_absent=True),
        lambda: store.create("link/new", 1),
        lambda: store.delete("link/secret"),
        lambda: store.delete("link/"),
        lambda: store.children("link"),
        lambda: list(store.list("link/")),
        lambda: store.make_folder("link"),
        lambda: store.make_folder("link/new"),
        lambda: store.sync_folder("link"),
        lambda: store.sweep("link"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="symbolic link"):
            call()
    assert os.listdir(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_linked_file_is_never_read(store, root, outside):
    """R28."""
    (root / "link").symlink_to(outside / "secret")
    (root / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        for call in (lambda n=name: store.get(n), lambda n=name: store.head(n)):
            with pytest.raises(StoreError, match="symbolic link") as caught:
                call()
            assert not isinstance(caught.value, NotFound)


def test_a_put_replaces_a_link_and_not_what_it_points_to(store, root, outside):
    (root / "a").symlink_to(outside / "secret")
    with pytest.raises(AlreadyExists):
        store.put("a", b"mine", if_absent=True)
    with pytest.raises(AlreadyExists):
        store.create("a", 1)
    store.put("a", b"mine")
    assert not (root / "a").is_symlink()
    assert (outside / "secret").read_bytes() == b"secret"


def test_deleting_removes_links_and_not_what_they_point_to(store, root, outside):
    (root / "f").mkdir()
    (root / "f" / "file").symlink_to(outside / "secret")
    (root / "f" / "folder").symlink_to(outside)
    for name in ("file", "folder"):
        store.delete(f"f/{name}")
    store.delete("f/")
    assert os.listdir(root) == []
    assert os.listdir(outside) == ["secret"]


def test_a_fifo_is_refused_and_never_waited_for(store, root):
    os.mkfifo(root / "fifo")
    for call in (lambda: store.get("fifo"), lambda: store.head("fifo")):
        with pytest.raises(StoreError, match="not a regular file"):
            call()


def test_listings_show_files_and_folders_that_keys_can_name(store, root, outside):
    (root / "file").write_bytes(b"x")
    (root / "folder").mkdir()
    (root / ".tmp-1").write_bytes(b"x")
    (root / ".hidden").mkdir()
    (root / "with space").write_bytes(b"x")
    (root / "é").write_bytes(b"x")
    (root / "link").symlink_to(outside / "secret")
    (root / "linked-folder").symlink_to(outside)
    os.mkfifo(root / "fifo")
    with open(os.fsencode(root) + b"/\xff", "wb"):
        pass
    assert store.children() == ("file", "folder/", "link/", "linked-folder/")
    assert [info.key for info in store.list()] == ["file"]


def test_a_very_deep_tree_is_listed_as_far_as_keys_go(ram_path):
    """R29: whoever made the tree, it takes no unbounded recursion or descriptors."""
    store, root = LocalStore(ram_path), ram_path
    descriptor = os.open(root, os.O_RDONLY)
    for _ in range(1050):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    assert list(store.list()) == []
    subprocess.run(["rm", "-rf", str(root / "d")], check=True)


def test_a_folder_with_anything_of_others_in_it_stays(store, root):
    folder = root / "f"
    names = (".hidden", ".tmp-1", "with space", "fifo", "link")
    folder.mkdir()
    (folder / ".hidden").mkdir()
    (folder / ".tmp-1").write_bytes(b"x")
    (folder / "with space").write_bytes(b"x")
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("nowhere")
    (folder / "file").write_bytes(b"x")
    (folder / temporary_name()).write_bytes(b"x")
    assert store.unlisted("f") == tuple(sorted(names))
    store.delete("f/file")
    with pytest.raises(StoreError, match="ENOTEMPTY"):
        store.delete("f/")
    assert sorted(os.listdir(folder)) == sorted(names)
    assert store.unlisted("missing") == ()


def test_putting_where_a_folder_is_fails(store, root):
    (root / "f").mkdir()
    with pytest.raises(AlreadyExists):
        store.put("f", b"x", if_absent=True)
    with pytest.raises(StoreError, match="EISDIR"):
        store.put("f", b"x")
    assert dot_names(root) == []


def test_sweep_removes_temporaries_of_that_folder_only(store, root):
    """R9: leftovers are reclaimed."""
    (root / "f").mkdir()
    mine = [".other", ".tmp-1", ".tmp-0123456789abcdef", ".tmp-0123456789abcdef-01234567"]
    for name in (temporary_name(), temporary_name(), *mine, f"f/{temporary_name()}"):
        (root / name).write_bytes(b"x")
    (root / temporary_name()).symlink_to("nowhere")
    assert store.sweep("") == 3
    assert sorted(name for name in os.listdir(root) if name != "f") == sorted(mine)
    assert store.sweep("f") == 1


# the pointer


def test_the_pointer_is_a_relative_link(store, root):
    """D9: it is replaced as one step, never removed first."""
    store.make_folder("a")
    store.make_folder("b")
    store.point("latest", "a")
    store.point("latest", "b")
    assert os.readlink(root / "latest") == "b"
    assert sorted(os.listdir(root)) == ["a", "b", "latest"]
    assert store.children() == ("a/", "b/")


def test_the_pointer_is_text_where_there_are_no_links(store, root, monkeypatch):
    monkeypatch.setattr(os, "symlink", refusing(errno.EPERM))
    store.point("latest", "a")
    assert (root / "latest").read_text() == "a\n"


def test_the_pointer_is_in_the_root(store):
    with pytest.raises(UsageError, match="root"):
        store.point("a/latest", "a")


def test_a_pointer_that_cannot_be_set_leaves_nothing(store, root):
    (root / "latest").mkdir()
    with pytest.raises(StoreError, match="latest"):
        store.point("latest", "a")
    assert os.listdir(root) == ["latest"]


# what a file system may lack


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EACCES])
@pytest.mark.parametrize("if_absent", [False, True])
def test_without_hard_links_renames_do(store, root, monkeypatch, number, if_absent):
    monkeypatch.setattr(os, "link", refusing(number))
    store.put("a", b"x", if_absent=if_absent)
    store.put("b", b"y", if_absent=if_absent)
    with pytest.raises(AlreadyExists):
        store.put("a", b"z", if_absent=True)
    assert (store.get("a"), store.get("b")) == (b"x", b"y")
    assert dot_names(root) == []
    store.probe()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_links_and_exclusive_renames_the_store_is_refused(store, root, monkeypatch, number):
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr("holdfast.store.local.folders.rename_noreplace", refusing(number))
    with pytest.raises(UnsupportedStore, match="hard links"):
        store.put("a", b"x", if_absent=True)
    with pytest.raises(UnsupportedStore, match="hard links"):
        store.probe()
    assert os.listdir(root) == []


def test_without_proc_files_get_a_temporary_name(store, root, monkeypatch):
    monkeypatch.setattr("holdfast.store.local.folders.OWN_FDS", "/nowhere")
    store.put("a", b"x", if_absent=True)
    store.put("a", b"y")
    assert store.get("a") == b"y"
    assert dot_names(root) == []


@pytest.mark.parametrize("number", [errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_refuses_unnamed_files_is_used_with_temporaries(
    store, root, monkeypatch, number
):
    really_open = os.open

    def open_named(path, flags, mode=0o777, *, dir_fd=None):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return really_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_named)
    store.put("a", b"x", if_absent=True)
    store.put("a", b"y")
    assert store.get("a") == b"y"
    assert dot_names(root) == []


def failing_fsync(monkeypatch, number, *, of_folders):
    """Make fsync fail for folders or for files; returns the list of inodes that were synced."""
    really_sync = os.fsync
    synced = []

    def fsync(fd):
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode) == of_folders:
            synced.append(found.st_ino)
            raise OSError(number, os.strerror(number))
        really_sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_without_folder_syncs_the_store_is_refused_before_a_name_appears(
    store, root, monkeypatch, number
):
    """Invariant 2: never silently weaker."""
    failing_fsync(monkeypatch, number, of_folders=True)
    for call in (
        lambda: store.put("a", b"x"),
        lambda: store.put("a", b"x", if_absent=True),
        lambda: store.create("a", 1),
        lambda: store.sync_folder(""),
        store.probe,
    ):
        with pytest.raises(UnsupportedStore, match="sync a folder"):
            call()
        assert os.listdir(root) == []
    with pytest.raises(UnsupportedStore, match="sync a folder"):
        store.make_folder("f")


def test_a_folder_sync_that_fails_leaves_the_outcome_open(store, root, monkeypatch):
    """Rule 5: the name is there, its durability is not known."""
    store.put("warm", b"up")
    store.make_folder("f")
    failing_fsync(monkeypatch, errno.EIO, of_folders=True)
    writer = store.create("c", 1)
    writer.write(0, memoryview(b"x"))
    for call in (
        writer.finish,
        lambda: store.put("a", b"x", if_absent=True),
        lambda: store.put("b", b"x"),
        lambda: store.link("b", "linked"),
        lambda: store.delete("warm"),
        lambda: store.delete("f/"),
        lambda: store.make_folder("g"),
        lambda: store.point("latest", "g"),
    ):
        with pytest.raises(OutcomeUnknown, match="EIO"):
            call()
    assert store.get("a") == b"x"
    with pytest.raises(StoreError, match="EIO") as caught:
        store.sync_folder("")
    assert not isinstance(caught.value, OutcomeUnknown)


@pytest.mark.parametrize("if_absent", [False, True])
@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_file_sync_is_final(store, root, monkeypatch, number, unnamed, if_absent):
    """R7, invariant 2: one fsync for each file, nothing of it stays, and the old value does."""
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE")
    store.put("old", b"old")
    synced = failing_fsync(monkeypatch, number, of_folders=False)
    key = "new" if if_absent else "old"
    for _ in range(2):
        with pytest.raises(StoreError, match=errno.errorcode[number]):
            store.put(key, b"x", if_absent=if_absent)
    assert len(synced) == 2
    assert os.listdir(root) == ["old"]
    assert store.get("old") == b"old"


def test_a_failed_sync_of_a_finished_file_is_final(store, root, monkeypatch):
    """R7."""
    writer = store.create("a", 3)
    writer.write(0, memoryview(b"abc"))
    synced = failing_fsync(monkeypatch, errno.EIO, of_folders=False)
    with pytest.raises(StoreError, match="EIO") as caught:
        writer.finish()
    assert not isinstance(caught.value, OutcomeUnknown)
    with pytest.raises(StoreError, match="already"):
        writer.finish()
    assert len(synced) == 1
    writer.abort()
    assert os.listdir(root) == []


def test_every_new_name_is_synced_in_its_parent(tmp_path, monkeypatch):
    """R5, rule 5: root and each new ancestor."""
    really_sync = os.fsync
    synced = set()

    def fsync(fd):
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        really_sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store = LocalStore(tmp_path / "x" / "root")
    store.make_folder("a/b")
    parts = ["", "/x", "/x/root", "/x/root/a", "/x/root/a/b"]
    assert synced == {str(tmp_path) + part for part in parts}
    synced.clear()
    LocalStore(tmp_path / "x" / "root").make_folder("a")
    assert {str(tmp_path / "x"), str(tmp_path / "x" / "root")} <= synced
    synced.clear()
    store.delete("a/b/")
    assert synced == {str(tmp_path / "x" / "root" / "a")}
    store.delete("a/missing")
    assert synced == {str(tmp_path / "x" / "root" / "a")}


# races with somebody who removes things


def racing(monkeypatch, name, before):
    """Run `before` once, just before the next call of that function of `os`."""
    really = getattr(os, name)
    pending = [before]

    def call(*args, **kwargs):
        while pending:
            pending.pop()()
        return really(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_put_into_a_folder_that_goes_meanwhile_is_not_found(store, root, monkeypatch, if_absent):
    store.make_folder("f")
    store.put("f/warm", b"up")
    racing(monkeypatch, "link", lambda: shutil.rmtree(root / "f"))
    with pytest.raises(NotFound):
        store.put("f/a", b"x", if_absent=if_absent)
    assert os.listdir(root) == []


def test_a_put_whose_temporary_is_swept_may_be_tried_again(store, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE")
    racing(monkeypatch, "link", lambda: store.sweep(""))
    with pytest.raises(TransientStoreError):
        store.put("a", b"x", if_absent=True)
    store.put("a", b"x", if_absent=True)
    assert store.get("a") == b"x"


def test_a_folder_that_fills_while_it_is_removed_may_be_tried_again(store, root, monkeypatch):
    store.make_folder("f")
    racing(monkeypatch, "rmdir", lambda: (root / "f" / "late").write_bytes(b"x"))
    with pytest.raises(TransientStoreError):
        store.delete("f/")
    store.delete("f/late")
    store.delete("f/")
    assert store.children() == ()


def test_a_file_that_shrinks_while_it_is_read_is_corrupt(store, root, monkeypatch):
    store.put("a", b"0123456789")
    (root / "a").chmod(0o644)
    racing(monkeypatch, "pread", lambda: os.truncate(root / "a", 5))
    with pytest.raises(Exception, match="ends at byte 5, expected 10"):
        store.get("a")


@pytest.fixture
def unprivileged():
    """A folder that this process owns without being root; root may do everything."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() != 0:
            yield folder
            return
        os.chown(folder, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(0)


def test_what_may_not_be_read_is_denied_and_never_empty(unprivileged):
    store = LocalStore(unprivileged)
    store.make_folder("f")
    store.put("f/a", b"x", if_absent=True)
    os.chmod(os.path.join(unprivileged, "f"), 0)
    calls = [
        lambda: store.children("f"),
        lambda: list(store.list()),
        lambda: store.get("f/a"),
        lambda: store.head("f/a"),
        lambda: store.put("f/b", b"x"),
        lambda: store.put("f/b", b"x", if_absent=True),
        lambda: store.create("f/b", 1),
        lambda: store.delete("f/a"),
        lambda: store.delete("f/"),
    ]
    try:
        for call in calls:
            with pytest.raises(AccessDenied, match="EACCES"):
                call()
    finally:
        os.chmod(os.path.join(unprivileged, "f"), 0o755)


def test_where_nothing_may_be_written_every_change_is_denied(unprivileged):
    store = LocalStore(unprivileged)
    store.put("a", b"x")
    os.chmod(unprivileged, 0o555)
    calls = [
        lambda: store.put("b", b"x"),
        lambda: store.put("b", b"x", if_absent=True),
        lambda: store.create("b", 1),
        lambda: store.delete("a"),
        lambda: store.make_folder("f"),
        lambda: store.point("latest", "f"),
        store.probe,
    ]
    try:
        for call in calls:
            with pytest.raises(AccessDenied, match="EACCES"):
                call()
    finally:
        os.chmod(unprivileged, 0o755)


def test_pieces_can_be_written_to_a_file_that_ends_up_read_only(unprivileged):
    store = LocalStore(unprivileged)
    with mmap.mmap(-1, 8192) as data:
        data[:] = b"x" * 8192
        writer = store.create("a", 8192)
        writer.write(0, memoryview(data))
        writer.finish()
    assert store.get("a") == b"x" * 8192


def test_a_network_folder_is_refreshed_by_a_file_that_comes_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 5: on NFS only a change of the folder makes the client look anew."""
    store = LocalStore(tmp_path)
    store.make_folder("writers")
    opened: list[str] = []
    real = os.open

    def watched(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_CREAT:
            opened.append(path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", watched)
    store.refresh_folder("writers")
    assert opened == []
    monkeypatch.setattr("holdfast.store.local.store.is_network", lambda fd: True)
    store.refresh_folder("writers")
    assert len(opened) == 1
    assert opened[0].startswith(".")
    assert os.listdir(tmp_path / "writers") == []
