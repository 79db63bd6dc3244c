"""Store in a folder of an SSH server, over SFTP.

An object is written to a temporary file beside its key, synced, and then renamed over the key, or
linked to it if the key must be absent: a link fails if its name exists. Both are extensions of
OpenSSH, as are syncs of files and of folders. Folders are made and removed as keys need them, so
that the store has none, as an object store.
"""

from __future__ import annotations

import importlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from typing_extensions import override

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    CorruptData,
    HoldfastError,
    InvalidKey,
    NotFound,
    OutcomeUnknown,
    StoreError,
    TransientStoreError,
    UnsupportedStore,
    UsageError,
)
from holdfast.events import logger, url_without_secrets
from holdfast.store.base import (
    BlockWriter,
    Buffer,
    ObjectInfo,
    Store,
    check_folder,
    check_key,
    expect_at_least,
    expect_inside,
    expect_positive,
    final_nbytes,
    flatten_buffer,
    is_key,
    proof_of,
)
from holdfast.store.remote.api import Patience
from holdfast.store.remote.opening import RemoteOptions

if TYPE_CHECKING:
    from paramiko import SFTPClient, SSHClient

T = TypeVar("T")

_MAX_CHANNELS = 8
"""Most concurrent requests; sshd allows ten sessions of a connection (MaxSessions)."""
_EXTENDED = 200
"""Type of a request for an extension of the protocol."""
_PIECE_NBYTES = 1 << 20
_TEMPORARY = ".upload-"
_MAKE_FOLDER_TRIES = 10


class SftpStore(Store):
    """Store of the files below `sftp://[user@]host[:port]/absolute/path` on an OpenSSH server.

    Logs in as `ssh` does: with the agent, the keys in `~/.ssh` and the hosts of `~/.ssh/config`.
    The server's key must be in `~/.ssh/known_hosts`. Thread-safe. Of `options`, the limits on time,
    retries and concurrency apply. A forked process cannot use a store that its parent has used.
    """

    reads_origin = True
    writes_in_place = False

    def __init__(self, url: str, *, options: RemoteOptions | None = None) -> None:
        self._given = (url, options)
        self._options = options if options is not None else RemoteOptions()
        for name in ("max_upload_mb_s", "max_download_mb_s", "unsigned_payload", "checksums"):
            if getattr(self._options, name) not in (None, False):
                raise UsageError(f"{name}: has no effect on sftp://; leave it out")
        try:
            parts = urlsplit(url)
            self._host, self._port, self._user = parts.hostname or "", parts.port, parts.username
            self._folder = parts.path.strip("/")
            check_key(self._folder)
            if not self._host or parts.password is not None or parts.query or parts.fragment:
                raise ValueError("a password, a query or no host")
        except (ValueError, InvalidKey) as error:
            raise UsageError(
                f"root {url_without_secrets(url)!r}: must be sftp://USER@HOST:PORT/path, with an "
                f"absolute path and without a password; use a key of SSH ({error})"
            ) from None
        self._url = url.rstrip("/")
        try:
            self._paramiko: Any = importlib.import_module("paramiko")
        except ImportError as error:
            raise UsageError(
                f"sftp:// needs paramiko, which is not installed ({error}): "
                "pip install 'holdfast-torch[sftp]'"
            ) from error
        self._client: SSHClient | None = None
        self._pid = os.getpid()
        self._idle: list[SFTPClient] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(min(self._options.concurrency, _MAX_CHANNELS))
        self._has_warned: set[str] = set()

    def __repr__(self) -> str:
        return f"SftpStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments: another process opens its own connection."""
        return _reopen, self._given

    @property
    @override
    def url(self) -> str:
        return self._url

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Put an object; after a lost connection, one with `if_absent` may be `OutcomeUnknown`."""
        check_key(key)
        writer = _Writer(
            self, key, flatten_buffer(data).nbytes, at_most=False, whole=flatten_buffer(data)
        )
        writer.write(0, flatten_buffer(data))
        writer.publish(if_absent=if_absent)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        check_key(key)
        expect_positive("get", key, start=start, nbytes=nbytes)

        def read(sftp: SFTPClient) -> bytes:
            with sftp.open(self.path(key), "r") as file:
                found = self._info(key, file.stat())
                stop = max(found.nbytes, start) if nbytes is None else start + nbytes
                expect_at_least(found.nbytes, stop, what=f"get {self.url}/{key}")
                if stop == start:
                    return b""
                data = b"".join(file.readv([(start, stop - start)]))
            if len(data) != stop - start:
                raise CorruptData(f"get {self.url}/{key}: {len(data)} of {stop - start} bytes came")
            return data

        return self.retry("get", key, read)

    @override
    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return self.retry("head", key, lambda sftp: self._info(key, sftp.stat(self.path(key))))

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        found = self.retry(
            "list", prefix, lambda sftp: [*self._walk(sftp, prefix.rpartition("/")[0])]
        )
        wanted = (info for info in found if info.key.startswith(prefix) and is_key(info.key))
        return iter(sorted(wanted, key=lambda info: info.key))

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        check_folder(folder)
        found = self.retry("list", folder, lambda sftp: self._entries(sftp, folder))
        return tuple(
            sorted(
                f"{name}/" if stat.S_ISDIR(mode) else name
                for name, mode, _ in found
                if is_key(name) and (stat.S_ISDIR(mode) or stat.S_ISREG(mode))
            )
        )

    @override
    def delete(self, key: str) -> None:
        """Remove an object, or the temporary files in a folder without objects."""
        check_key(key.removesuffix("/"))
        if not key.endswith("/"):
            self.delete_many([key])
            return
        left = next(self.list(key), None)
        if left is not None:
            raise StoreError(f"delete {self.url}/{key}: {left.key} is still in it")
        self.abort_uploads(key.removesuffix("/"))

    @override
    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        self._remove_objects(keys)

    def _remove_objects(self, keys: Iterable[str]) -> None:
        folders: dict[str, None] = {}
        for key in keys:
            self.retry("delete", key, partial(_unlink, path=self.path(key)))
            folders[key.rpartition("/")[0]] = None
        for folder in folders:
            self.retry("delete", folder, partial(self._remove_if_empty, folder=folder))

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        check_key(key)
        expect_positive("create", key, nbytes=nbytes)
        with suppress(NotFound):
            self.head(key)
            raise AlreadyExists(f"create {self.url}/{key}: the key is taken")
        return _Writer(self, key, nbytes, at_most=at_most)

    @override
    def uploads(self, folder: str = "") -> Iterator[str]:
        """Yield the temporary files of this store, without the dot that begins their names."""
        check_folder(folder)
        for path in self._temporaries(folder):
            inside, _, name = path.rpartition("/")
            yield f"{inside}/{name[1:]}".lstrip("/")

    @override
    def abort_uploads(self, folder: str) -> int:
        check_key(folder)
        found = self._temporaries(folder)
        self._remove_objects(found)
        self.retry("delete", folder, lambda sftp: self._remove_if_empty(sftp, folder))
        return len(found)

    def _temporaries(self, folder: str) -> Sequence[str]:
        found = self.retry("list", folder, lambda sftp: [*self._walk(sftp, folder)])
        return [info.key for info in found if _is_temporary(info.key.rpartition("/")[2])]

    # Requests

    def path(self, key: str) -> str:
        """Return the path of a key, or of the root for an empty one."""
        return f"/{self._folder}/{key}".rstrip("/")

    def retry(self, operation: str, key: str, request: Callable[[SFTPClient], T]) -> T:
        """Call `request` with a session, again on a new connection if one is lost."""
        patience = Patience(self._options)
        while True:
            try:
                with self._session() as sftp:
                    return request(sftp)
            except Exception as error:
                refused = self.translate_error(operation, key, error)
                if not isinstance(refused, TransientStoreError) or patience.is_used_up():
                    raise refused from error
                self.warn_once(f"{refused}. Retrying for up to {self._options.retry_s:g} s")
            patience.pause()

    def translate_error(self, operation: str, key: str, error: Exception) -> HoldfastError:
        """Translate an error of paramiko."""
        if isinstance(error, HoldfastError):
            return error
        what = f"{operation} {self.url}/{key}".rstrip("/")
        if isinstance(error, FileNotFoundError):
            return NotFound(f"{what}: no such file")
        ssh = self._paramiko.ssh_exception
        is_login = isinstance(error, (ssh.AuthenticationException, ssh.PasswordRequiredException))
        if isinstance(error, PermissionError) or is_login:
            return AccessDenied(f"{what}: {error}")
        host = f"[{self._host}]:{self._port}" if self._port else self._host
        if isinstance(error, ssh.BadHostKeyException):
            return AccessDenied(
                f"{what}: the host key of {host} is not the one in ~/.ssh/known_hosts. If the key "
                f"was changed on purpose: ssh-keygen -R '{host}', then add the new one"
            )
        if "not found in known_hosts" in str(error):
            port = f"-p {self._port} " if self._port else ""
            return AccessDenied(
                f"{what}: {host} is not in ~/.ssh/known_hosts. Compare its key with the "
                f"administrator's, and add it: ssh-keyscan {port}{self._host} >> ~/.ssh/known_hosts"
            )
        if _is_lost(error, ssh.SSHException):
            return TransientStoreError(f"{what}: {error or type(error).__name__}")
        return StoreError(f"{what}: the server says {str(error)!r}")

    def warn_once(self, text: str) -> None:
        """Log a warning, unless this store has logged one with the same last sentence."""
        kind = text.rpartition(". ")[2]
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            logger.warning("%s", text)

    def sync(self, sftp: SFTPClient, handle: bytes) -> None:
        """Make an open file or folder durable; warns once if the server cannot."""
        try:
            sftp._request(_EXTENDED, "fsync@openssh.com", handle)
        except OSError as error:
            if not _is_unsupported(error):
                raise
            self.warn_once(
                f"{self.url}: the server lacks fsync@openssh.com. If its machine crashes, "
                "checkpoints may be lost"
            )

    def sync_names(self, sftp: SFTPClient, path: str) -> None:
        """Make the names in a folder durable."""
        with sftp.open(path, "r") as folder:
            self.sync(sftp, folder.handle)

    def make_folders(self, sftp: SFTPClient, path: str) -> None:
        """Make a folder and its ancestors, durably; existing ones are no error."""
        with suppress(FileNotFoundError):
            sftp.stat(path)
            return
        above = path.rpartition("/")[0]
        if above:
            self.make_folders(sftp, above)
        with suppress(OSError):  # another writer made it; if nobody did, the caller's open fails
            sftp.mkdir(path)
        self.sync_names(sftp, above or "/")

    @contextmanager
    def _session(self) -> Iterator[SFTPClient]:
        """Borrow an SFTP session, which one thread uses at a time."""
        if self._client is not None and self._pid != os.getpid():
            raise UnsupportedStore(
                f"{self.url}: this process was forked from one ({self._pid}) that had used the "
                "store; start it with spawn or forkserver"
            )
        timeout_s = self._options.timeout_s + self._options.retry_s
        if not self._slots.acquire(timeout=timeout_s):
            raise TransientStoreError(f"{self.url}: no session was free in {timeout_s:.0f} s")
        try:
            sftp = self._acquire_client()
            try:
                yield sftp
            except Exception as error:
                if _is_lost(error, self._paramiko.SSHException):
                    sftp.close()
                raise
            finally:
                self._idle.append(sftp)
        finally:
            self._slots.release()

    def _acquire_client(self) -> SFTPClient:
        with self._lock:
            while self._idle:
                sftp = self._idle.pop()
                if not sftp.get_channel().closed and sftp.get_channel().get_transport().is_active():
                    return sftp
            client = self._client
            transport = client.get_transport() if client is not None else None
            if client is None or transport is None or not transport.is_active():
                client, self._pid = self._connect(), os.getpid()
                self._client = client
            transport = client.get_transport()
            # Paramiko waits without limit for the reply of a server that hangs.
            watchdog = threading.Timer(self._options.timeout_s, transport.close)
            watchdog.daemon = True
            watchdog.start()
            try:
                sftp = client.open_sftp()
            finally:
                watchdog.cancel()
            sftp.get_channel().settimeout(self._options.timeout_s)
            return sftp

    def _connect(self) -> SSHClient:
        config = self._paramiko.SSHConfig()
        with suppress(FileNotFoundError):
            config = config.from_path(os.path.expanduser("~/.ssh/config"))
        found = config.lookup(self._host)
        client = self._paramiko.SSHClient()
        client.load_system_host_keys()
        client.connect(
            found.get("hostname", self._host),
            port=self._port or int(found.get("port", 22)),
            username=self._user or found.get("user"),
            key_filename=found.get("identityfile"),
            timeout=self._options.connect_timeout_s,
            banner_timeout=self._options.connect_timeout_s,
            auth_timeout=self._options.connect_timeout_s,
        )
        return client

    def _info(self, key: str, found: Any) -> ObjectInfo:
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{self.url}/{key}: is not a file")
        return ObjectInfo(key=key, nbytes=found.st_size)

    def _entries(self, sftp: SFTPClient, folder: str) -> Sequence[tuple[str, int, int]]:
        """Return names, modes and lengths directly in a folder; nothing if it is none."""
        try:
            found = sftp.listdir_attr(self.path(folder))
        except FileNotFoundError:
            return []
        return [(item.filename, item.st_mode or 0, item.st_size or 0) for item in found]

    def _walk(self, sftp: SFTPClient, folder: str) -> Iterator[ObjectInfo]:
        """Yield all files in a folder and below, also temporary ones."""
        for name, mode, nbytes in self._entries(sftp, folder):
            key = f"{folder}/{name}".lstrip("/")
            if stat.S_ISREG(mode):
                yield ObjectInfo(key=key, nbytes=nbytes)
            elif stat.S_ISDIR(mode) and is_key(name):
                yield from self._walk(sftp, key)

    def _remove_if_empty(self, sftp: SFTPClient, folder: str) -> None:
        """Make removals in a folder durable, and remove it and its ancestors while empty."""
        try:
            while folder:
                sftp.rmdir(self.path(folder))
                folder = folder.rpartition("/")[0]
        except FileNotFoundError:
            folder = folder.rpartition("/")[0]
        except OSError:  # it is not empty
            pass
        with suppress(FileNotFoundError):
            self.sync_names(sftp, self.path(folder))


class _Writer:
    """`BlockWriter` into a temporary file, whose pieces may be sent again after a lost reply."""

    def __init__(
        self,
        store: SftpStore,
        key: str,
        nbytes: int,
        *,
        at_most: bool,
        whole: memoryview | None = None,
    ) -> None:
        self._store, self._key, self._nbytes, self._at_most = store, key, nbytes, at_most
        self._whole = whole
        self._folder = store.path(key).rpartition("/")[0]
        token = secrets.token_hex(8)
        self._path = f"{self._folder}/{_TEMPORARY}{token}-{proof_of(token)}"
        self._is_made = self._is_closed = False
        self._written_nbytes = 0
        self._lock = threading.Lock()

    def write(self, start: int, data: memoryview) -> None:
        expect_inside(self._key, start, data.nbytes, self._nbytes)
        if self._is_closed:
            raise StoreError(f"write {self._key}: this was finished or aborted before")
        with self._lock:
            if not self._is_made:
                self._store.retry("put", self._key, self._make)
                self._is_made = True
        self._store.retry(
            "put", self._key, lambda sftp: self._send(sftp, start, flatten_buffer(data))
        )
        with self._lock:
            self._written_nbytes += data.nbytes

    def finish(self, nbytes: int | None = None) -> None:
        length = final_nbytes(nbytes, self._nbytes, at_most=self._at_most, what=self._key)
        if self._is_closed:
            raise StoreError(f"finish {self._key}: this was finished or aborted before")
        if length != self._written_nbytes:
            raise StoreError(
                f"finish {self._key}: {length - self._written_nbytes} of {length} bytes were not "
                "written"
            )
        if not self._is_made:
            self.write(0, memoryview(b""))
        self.publish(if_absent=False)

    def abort(self) -> None:
        if self._is_made and not self._is_closed:
            self._is_closed = True
            with suppress(StoreError):
                self._store.retry("delete", self._key, self._discard)

    def publish(self, *, if_absent: bool) -> None:
        """Sync the file and give it its key."""
        try:
            self._store.retry("put", self._key, self._sync)
            if not if_absent:
                self._store.retry("put", self._key, self._rename)
            else:
                self._store.retry("put", self._key, self._link)
        finally:
            self.abort()

    def _make(self, sftp: SFTPClient) -> None:
        for _ in range(_MAKE_FOLDER_TRIES):
            try:
                sftp.open(self._path, "w").close()
                return
            except FileNotFoundError:  # no folder yet, or a deletion has just removed it
                self._store.make_folders(sftp, self._folder)
        sftp.open(self._path, "w").close()

    def _send(self, sftp: SFTPClient, start: int, data: memoryview) -> None:
        with sftp.open(self._path, "r+") as file:
            file.set_pipelined(True)
            file.seek(start)
            for at in range(0, data.nbytes, _PIECE_NBYTES):
                file.write(bytes(data[at : at + _PIECE_NBYTES]))

    def _sync(self, sftp: SFTPClient) -> None:
        with sftp.open(self._path, "r+") as file:
            self._store.sync(sftp, file.handle)
            found = file.stat().st_size
        if found != self._written_nbytes:
            raise StoreError(
                f"put {self._key}: {found} of {self._written_nbytes} bytes arrived; the server's "
                "disk may be full"
            )

    def _rename(self, sftp: SFTPClient) -> None:
        try:
            sftp.posix_rename(self._path, self._store.path(self._key))
        except FileNotFoundError:  # renamed before the connection was lost, or gone
            if not self._is_there(sftp):
                raise
        except OSError as error:
            self._expect_supported(error)
            raise
        self._is_closed = True
        self._store.sync_names(sftp, self._folder)

    def _is_there(self, sftp: SFTPClient) -> bool:
        """Whether the key has this object; of one written in blocks, only the length is known."""
        with sftp.open(self._store.path(self._key), "r") as file:
            if file.stat().st_size != self._written_nbytes:
                return False
            return self._whole is None or file.read(self._written_nbytes) == self._whole

    def _link(self, sftp: SFTPClient) -> None:
        path = self._store.path(self._key)
        try:
            sftp._request(_EXTENDED, "hardlink@openssh.com", self._path, path)
            self._store.sync_names(sftp, self._folder)
        except Exception as error:
            refused = self._store.translate_error("put", self._key, error)
            if isinstance(refused, TransientStoreError):
                raise OutcomeUnknown(str(refused)) from error
            self._expect_supported(error)
            with suppress(FileNotFoundError):
                sftp.lstat(path)
                raise AlreadyExists(
                    f"put {self._store.url}/{self._key}: the key is taken"
                ) from None
            raise

    def _discard(self, sftp: SFTPClient) -> None:
        _unlink(sftp, self._path)

    def _expect_supported(self, error: Exception) -> None:
        if _is_unsupported(error):
            raise UnsupportedStore(
                f"{self._store.url}: the server lacks posix-rename@openssh.com or "
                "hardlink@openssh.com, which a commit needs; use OpenSSH's sftp-server"
            ) from error


def _reopen(url: str, options: RemoteOptions | None) -> SftpStore:
    return SftpStore(url, options=options)


def _unlink(sftp: SFTPClient, path: str) -> None:
    """Remove a file; a missing one is no error, and neither is a folder, which stays."""
    try:
        sftp.remove(path)
    except FileNotFoundError:
        pass
    except OSError:
        if not stat.S_ISDIR(sftp.lstat(path).st_mode):
            raise


def _is_temporary(name: str) -> bool:
    """Whether this store made the name of a temporary file."""
    token, _, proof = name.removeprefix(_TEMPORARY).partition("-")
    return name.startswith(_TEMPORARY) and proof == proof_of(token)


def _is_lost(error: Exception, ssh_error: type[Exception]) -> bool:
    """Whether an error is about the connection: a server's refusal of a request is an OSError."""
    if isinstance(error, (EOFError, ConnectionError, TimeoutError, ssh_error)):
        return True
    # The replies of a server are of these two classes, or are an OSError with a text alone.
    is_reply = isinstance(error, (FileNotFoundError, PermissionError)) or len(error.args) == 1
    return isinstance(error, OSError) and (not is_reply or "ocket is closed" in str(error))


def _is_unsupported(error: Exception) -> bool:
    return "unsupported" in str(error).lower()
