"""Errors of the system at every call: reported, classed, and never a half success."""

import errno
import os
import random
import resource
import stat
import subprocess

import pytest

from each import each
from holdfast.errors import (
    AccessDenied,
    NotFound,
    OutcomeUnknown,
    StoreError,
    StoreFull,
    TransientStoreError,
)
from holdfast.store.local import LocalStore
from holdfast.store.local.folders import drafted
from holdfast.store.local.syscalls import Reporting
from holdfast.testing.store_contract import noise

CALLS = (
    "open",
    "pwrite",
    "fsync",
    "link",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
    "symlink",
    "close",
)
CLASSES = {
    errno.EIO: StoreError,
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EROFS: AccessDenied,
    errno.ESTALE: TransientStoreError,
    errno.ETIMEDOUT: TransientStoreError,
}
NBYTES = 300_000


class FailingCalls:
    """Lets one call of the system fail, and notes which file was synced how often."""

    def __init__(self, monkeypatch, number):
        self.number = number
        self.fail_at = None
        self.failed_call = None
        self.count = 0
        self.num_syncs = {}
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def arm(self, fail_at):
        """Fail at that call, counted from now."""
        self.count, self.fail_at, self.failed_call, self.num_syncs = 0, fail_at, None, {}

    def disarm(self):
        """Fail no more."""
        self.fail_at = None

    def _counted(self, name, really):
        def call(*args, **kwargs):
            if name == "fsync" and not stat.S_ISDIR(os.fstat(args[0]).st_mode):
                inode = os.fstat(args[0]).st_ino
                self.num_syncs[inode] = self.num_syncs.get(inode, 0) + 1
            is_chosen = self.count == self.fail_at
            self.count += 1
            if is_chosen:
                self.failed_call = name
                if name == "close":
                    really(*args, **kwargs)
                raise OSError(self.number, os.strerror(self.number))
            return really(*args, **kwargs)

        return call


def create(store, key, data):
    writer = store.create(key, len(data))
    try:
        for start in range(0, len(data), 100_000):
            writer.write(start, memoryview(data)[start : start + 100_000])
        writer.finish()
    except StoreError:
        writer.abort()
        raise


OPERATIONS = {
    "put_new": lambda store: store.put("f/new", noise(NBYTES), if_absent=True),
    "put_over": lambda store: store.put("f/old", noise(NBYTES)),
    "create": lambda store: create(store, "f/new", noise(NBYTES)),
    "delete": lambda store: store.delete("f/old"),
    "delete_folder": lambda store: store.delete("empty/"),
    "make_folder": lambda store: store.make_folder("g/h", exclusive=False),
    "point": lambda store: store.point("latest", "f"),
}


def state(root):
    """Everything below `root` but the store's own leftovers."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                found[path] = os.readlink(path)
            elif os.path.isdir(path):
                found[path] = "folder"
            elif not name.startswith(".tmp-"):
                with open(path, "rb") as file:
                    found[path] = file.read()
    return found


def prepared(root):
    store = LocalStore(root)
    store.make_folder("f")
    store.put("f/old", b"old")
    store.make_folder("empty")
    return store


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("number", CLASSES, ids=errno.errorcode.get)
def test_an_error_at_any_call_is_reported_or_harmless(tmp_path, monkeypatch, operation, number):
    """R6, R7: success means done, a plain error means unchanged, and no fsync is repeated."""
    calls = FailingCalls(monkeypatch, number)
    num_reported = 0
    for fail_at in range(1000):
        root = tmp_path / str(fail_at)
        store = prepared(root)
        before = state(root)
        calls.arm(fail_at)
        error = None
        try:
            OPERATIONS[operation](store)
        except StoreError as caught:
            error = caught
        calls.disarm()
        assert all(times == 1 for times in calls.num_syncs.values())
        after = state(root)
        if error is None:
            OPERATIONS[operation](prepared(tmp_path / f"{fail_at}-clean"))
            clean = state(tmp_path / f"{fail_at}-clean")
            assert list(after.values()) == list(clean.values())
        else:
            num_reported += 1
            assert os.strerror(number) in str(error)
            assert str(root) in str(error)
            if operation in ("put_new", "put_over", "point", "delete") and not isinstance(
                error, OutcomeUnknown
            ):
                assert type(error) is CLASSES[number]
                assert after == before, calls.failed_call
        if calls.failed_call is None:
            assert error is None
            break
    assert num_reported >= 3


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NotFound),
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.EAGAIN, TransientStoreError),
        (errno.EBUSY, TransientStoreError),
        (errno.EMFILE, TransientStoreError),
        (errno.ENAMETOOLONG, StoreError),
        (errno.EFBIG, StoreError),
        (errno.ENXIO, StoreError),
    ],
)
def test_the_class_is_by_what_a_handler_would_do(number, kind):
    with pytest.raises(StoreError) as caught, Reporting("put", "/root/a"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    for part in ("put", "/root/a", os.strerror(number), errno.errorcode[number]):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("effect", "number", "kind"),
    [
        ("none", errno.EIO, StoreError),
        ("maybe", errno.EIO, OutcomeUnknown),
        ("maybe", errno.ESTALE, OutcomeUnknown),
        ("maybe", errno.ETIMEDOUT, OutcomeUnknown),
        ("maybe", errno.ENOSPC, StoreFull),
        ("done", errno.EIO, OutcomeUnknown),
        ("done", errno.ENOSPC, OutcomeUnknown),
    ],
)
def test_what_may_have_happened_is_never_called_a_failure(effect, number, kind):
    """Invariant 1: an outcome that is not known is reported as such."""
    report = Reporting("put", "/root/a")
    report.effect = effect
    with pytest.raises(StoreError) as caught, report:
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind


REFUSALS = [
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
    errno.EMLINK,
    errno.EXDEV,
    errno.ENOSPC,
    errno.EDQUOT,
]


@each("number", [*errno.errorcode, 524, 4000])
def test_an_error_that_does_not_prove_a_refusal_leaves_the_outcome_open(number):
    """Invariant 1: network and user-space file systems pass on errors of every kind, some of them
    after the change was made; only what link(2) says of a name that was not made is proof."""
    report = Reporting("put", "/root/a")
    report.effect = "maybe"
    with pytest.raises(StoreError) as caught, report:
        raise OSError(number, os.strerror(number))
    assert isinstance(caught.value, OutcomeUnknown) == (number not in REFUSALS)


def test_other_errors_pass_through_unchanged():
    for error in (KeyError("x"), NotFound("x"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, Reporting("put", "/root/a"):
            raise error
        assert caught.value is error


def test_a_name_that_is_too_long_for_the_file_system_is_said(tmp_path, monkeypatch):
    store = LocalStore(os.path.join(tmp_path, *["x" * 200] * 25))
    with pytest.raises(StoreError, match="ENAMETOOLONG"):
        store.get("a")


def test_a_process_out_of_descriptors_may_try_again(tmp_path):
    store = prepared(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken = []

    def take_all():
        while True:
            store.create("f/new", 0).abort()
            taken.append(os.open(tmp_path, os.O_RDONLY))

    try:
        with pytest.raises(TransientStoreError, match="EMFILE"):
            take_all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert store.children("f") == ("old",)


# a full disk


def test_free_space_does_not_count_inodes_where_there_is_no_number(tmp_path, monkeypatch):
    """btrfs makes inodes as it goes, and reports none."""
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[5:8] = [0, 0, 0]
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    free = LocalStore(tmp_path).free_space()
    assert free.inodes is None
    assert free.nbytes == real.f_bavail * real.f_frsize


def test_free_space_that_cannot_be_told_does_not_hide_the_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "statvfs", refuse)
    with pytest.raises(StoreFull, match="asked for 5 bytes"), Reporting("put", "/a", nbytes=5):
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(AccessDenied):
        LocalStore(tmp_path).free_space()


def test_a_refusal_while_the_system_reports_free_space_names_other_limits(tmp_path):
    """A quota, or one full target of several: the free space of the whole tells nothing."""
    with pytest.raises(StoreFull, match="quota"), Reporting("put", str(tmp_path), nbytes=1):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 64 MiB and 200 inodes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=200", "holdfast-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        if os.environ.get("CI"):
            pytest.fail("mounting a tmpfs was refused, so this promise is not tested")
        pytest.skip("mounting a tmpfs was refused; that takes root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_reported_with_numbers_and_keeps_what_was_there(small_disk):
    """R8, D8: at every level of filling, for new and replaced objects; nothing is left over."""
    store = LocalStore(small_disk)
    store.put("old", noise(8 * 1024 * 1024))
    step_nbytes = 3_000_017
    for number in range(100):
        free = store.free_space().nbytes
        if free < step_nbytes:
            break
        store.put(f"{number:04d}", bytes(step_nbytes), if_absent=True)
    keys = store.children()
    free = store.free_space().nbytes
    for call in (
        lambda: store.put("new", bytes(step_nbytes), if_absent=True),
        lambda: store.put("old", bytes(step_nbytes)),
        lambda: create(store, "new", bytes(step_nbytes)),
    ):
        with pytest.raises(StoreFull, match=rf"asked for {step_nbytes} bytes.* reports \d+ b"):
            call()
        assert store.free_space().nbytes == free
        assert sorted(os.listdir(small_disk)) == list(keys)
    assert store.get("old") == noise(8 * 1024 * 1024)
    store.put("fits", b"x")


def test_a_disk_without_inodes_is_full_too(small_disk):
    """R8."""
    store = LocalStore(small_disk)

    def put_many():
        for number in range(300):
            store.put(f"{number:04d}", b"x", if_absent=True)

    with pytest.raises(StoreFull, match="0 inodes"):
        put_many()
    assert all(store.get(key) == b"x" for key in store.children())


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_folder_that_is_removed_while_something_is_put_there_is_gone_and_not_forbidden(
    tmp_path, unnamed
):
    """Two collectors meet at one attempt; Linux answers EPERM to a file without a name."""
    folder = tmp_path / "f"
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    folder.rmdir()
    with pytest.raises(FileNotFoundError), drafted(fd, memoryview(b"x"), unnamed=unnamed):
        pass
    os.close(fd)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_at_any_write_fails_the_whole(tmp_path, monkeypatch, number):
    """R8: here the room was not reserved, so it is the write that finds out."""
    really_write = os.pwrite
    allowed = random.Random(0).sample(range(NBYTES), 30)
    monkeypatch.setattr("holdfast.store.local.blocks.preallocate", lambda fd, nbytes: None)
    store = prepared(tmp_path)
    for left_nbytes in allowed:
        left = [left_nbytes]

        def pwrite(fd, data, start, left=left):
            if left[0] == 0:
                raise OSError(number, os.strerror(number))
            done = really_write(fd, data[: left[0]], start)
            left[0] -= done
            return done

        monkeypatch.setattr(os, "pwrite", pwrite)
        for name in ("put_new", "put_over", "create"):
            left[0] = left_nbytes
            with pytest.raises(StoreFull, match="asked for"):
                OPERATIONS[name](store)
        monkeypatch.setattr(os, "pwrite", really_write)
        assert sorted(os.listdir(tmp_path / "f")) == ["old"]
        assert store.get("f/old") == b"old"
