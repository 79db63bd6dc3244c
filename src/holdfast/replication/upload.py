"""Upload of one checkpoint from one root to another: its stored bytes, its manifest last.

The order in `upload_checkpoint` is rule 9 of docs/design.md (tests/replication/test_upload.py).
Every block is compared with its digest before it is sent, so damage is never uploaded. Encrypted
files are uploaded as stored; only the manifest is decrypted. A file appears in the other root once
it is whole: if a store shows files that are being written, they are written in a scratch folder and
linked to their name. So files that exist in full length need not be uploaded again. Files on other
hosts' disks are sent by those hosts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from holdfast.encryption.files import box_documents, boxes_of
from holdfast.encryption.store import bare, read_stored_manifest, sealed
from holdfast.errors import (
    AlreadyExists,
    CommitConflict,
    CorruptData,
    DeadlineExceeded,
    HoldfastError,
    NoCheckpoint,
    NotFound,
    NotSealed,
    StoreError,
    TransientStoreError,
    UnsupportedStore,
    some_of,
    time_limit,
)
from holdfast.format import layout
from holdfast.format.blocks import block_digest, digest_blocks, file_digest, list_blocks
from holdfast.format.envelope import Visible
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Aborted, Deleted, FileEntry, Manifest
from holdfast.root.byte_ranges import (
    FilePiece,
    Listing,
    PieceGroup,
    decode_listing,
    groups_of,
    pieces_of,
    pieces_of_sealed,
    read_listing,
)
from holdfast.root.commit import (
    SaveAttempt,
    check_ownership,
    publish,
    remove_scratch,
    sync_checkpoint,
)
from holdfast.root.documents import is_own_mark, read_document
from holdfast.store.base import BlockWriter, Store
from holdfast.threads.workers import Background, cancel

T = TypeVar("T")
PiecesOfFile: TypeAlias = Callable[[str], tuple[FilePiece, ...]]
"""Function that maps a file's name to its pieces."""

COPIES_QUIET_S = 30.0
"""How long no file of another host may arrive before copies of its files are sent from here."""
HOSTS_QUIET_S = 600.0
"""How long no file of another host may arrive before the upload of a checkpoint has failed."""
_PAUSE_S = 0.5
"""Shortest pause between two looks for files of other hosts; it doubles while none arrives."""
_PAUSE_MAX_S = 10.0

NICENESS = 10
"""Nice value of upload threads: less priority than training and saving, where supported."""


class UploadInterrupted(HoldfastError):
    """An upload was stopped because the process is closing; files already sent stay."""


@dataclass(slots=True, kw_only=True)
class Cost:
    """Cost of the upload of one checkpoint so far."""

    nbytes: int = 0
    """Bytes of files and documents that were sent."""
    requests: int = 0
    """Operations on the store, each counted once however often the store retried it."""
    seconds: float = 0.0
    is_all: bool = False
    """Whether every file was uploaded, as none existed in the remote root already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNames:
    """Names of the hosts of a run that has a local root on each of them."""

    own: str
    others: frozenset[str]
    is_leading: bool
    """Whether the own host sends what all hosts have, too: index and trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesHere:
    """Names of the files of a checkpoint that one local root has."""

    own: Set[str]
    """Files to send: those that no other host of the run sends."""
    copies: Set[str] = frozenset()
    """Copies of files that another host sends."""


class Sender:
    """Uploader of checkpoints from `local` to `remote`, a few blocks at a time."""

    def __init__(
        self,
        local: Store,
        remote: Store,
        *,
        num_threads: int,
        timeout_s: float,
        reads_back: bool = False,
        background: Background | None = None,
    ) -> None:
        """`timeout_s` limits the upload of one block, or the end of one file, in seconds; with
        `reads_back` each file is downloaded and compared before the commit. `background` has the
        upload threads; by default they are its own."""
        self._verifying_local = local
        self._local, self._remote = bare(local), bare(remote)
        self._reads_back = reads_back or not _shows_whole_files(self._remote)
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self.background = background or Background("holdfast-upload", num_threads=num_threads)
        """Upload threads; a request to stop interrupts the current upload."""
        self.hosts: HostNames | None = None
        """The hosts of the run, which each have and send some of the files; None: all are here."""
        self.nonce = ""
        """Nonce of the claim of another process, which must not remove temporary folders."""
        self._lock = threading.Lock()
        self._cost = Cost()
        self._on_progress: Callable[[Cost], None] = lambda cost: None

    def upload_checkpoint(
        self, folder: str, *, epoch: int, on_progress: Callable[[Cost], None], unclear: set[str]
    ) -> Cost:
        """Upload a checkpoint to the remote root, and commit it there under claim `epoch`.

        A checkpoint that it already has is made durable and compared. `on_progress` gets the cost,
        in several threads. The folder is added to `unclear` if a copy of the manifest's put
        may still arrive.

        Raises:
            NoCheckpoint: it is not committed locally, or was deleted remotely; do not retry.
            SealError: the keys do not decrypt it, or it is unencrypted in an encrypted run.
            CommitConflict: gc has aborted it in the remote root.
            CorruptData: it is damaged locally, or the remote root has other bytes.
            Superseded: a later writer owns the remote root.
            StoreError, DeadlineExceeded: a retry may work.
            UploadInterrupted: the threads were asked to stop.
        """
        began = time.perf_counter()
        self._cost, self._on_progress = Cost(), on_progress
        data, listing = self._listing(folder)
        if not self._is_committed(folder):
            self._send_files(folder, listing)
            self._expect_sizes(folder, listing)
            if isinstance(listing, Visible):
                self._send_keys(folder, listing)
            self._commit(folder, listing, data, epoch, unclear)
        else:
            self._expect_complete(folder, listing)
        self._confirm(folder, data)
        self._cost.seconds = time.perf_counter() - began
        return self._cost

    def upload_files(self, folder: str, names: Collection[str]) -> Cost:
        """Upload some files of a checkpoint that another process commits in the remote root.

        Nothing is done if it has been committed. Raises as `upload_checkpoint` does; damage in a
        file is raised when the others were sent.
        """
        began = time.perf_counter()
        self._cost = Cost()
        _, listing = self._listing(folder)
        if not self._is_committed(folder):
            self._remote.make_folder(folder)
            self._send_missing(folder, listing, names, self.list_pieces(folder, listing))
        self._cost.seconds = time.perf_counter() - began
        return self._cost

    def _listing(self, folder: str) -> tuple[bytes, Listing]:
        """Read and decode the local manifest; an encrypted one is authenticated by the keys."""
        where = f"{self._local.url}/{folder}"
        try:
            data = read_stored_manifest(self._verifying_local, folder)
        except NotFound as error:
            raise NoCheckpoint(f"{where}: it is not committed") from error
        listing = decode_listing(data, what=f"{where}/{layout.MANIFEST}")
        if isinstance(listing, Aborted | Deleted):
            raise NoCheckpoint(f"{where}: it was deleted")
        if isinstance(listing, Manifest) and sealed(self._verifying_local) is not None:
            raise NotSealed(
                f"{where}: saved before the run was encrypted, so it is not uploaded, as the "
                "upload would not be encrypted"
            )
        return data, listing

    def _is_committed(self, folder: str) -> bool:
        """Whether a checkpoint is committed in the remote root."""
        self._add_cost()
        register = read_listing(self._remote, folder)
        if register is None:
            return False
        if not isinstance(register, Aborted | Deleted):
            return True
        what = type(register).__name__.lower()
        where = f"{self._remote.url}/{folder}"
        error = f"{where}: it was {what} there by {register.by} ({register.reason})"
        raise CommitConflict(error) if what == "aborted" else NoCheckpoint(error)

    def _expect_complete(self, folder: str, listing: Listing) -> None:
        """Raise an error if the remote copy lacks keys, or files that retention has not dropped."""
        sizes = self._remote_sizes(folder)
        is_thinned = any(
            layout.parse_thinned(name) and is_own_mark(self._remote, f"{folder}/{name}")
            for name in sizes
        )
        wrong = [
            name for name, entry in listing.files.items() if sizes.get(name) != entry.stored_nbytes
        ]
        if wrong and not is_thinned:
            raise CorruptData(f"{self._remote.url}/{folder} lacks {', '.join(wrong)}")
        if isinstance(listing, Visible):
            self._add_cost(requests=2)
            boxes_of(self._remote, folder, listing)

    # Files

    def _send_files(self, folder: str, listing: Listing) -> None:
        self._remote.make_folder(folder)
        pieces_of_file = self.list_pieces(folder, listing)
        here = self.find_files(folder, listing)
        damage: CorruptData | None = None
        try:
            num_sent = self._send_missing(folder, listing, here.own, pieces_of_file)
            self._cost.is_all = num_sent == len(listing.files)
        except CorruptData as error:
            if self.hosts is None:
                raise
            damage = error  # another host may have a copy
        if self.hosts is not None:
            self._wait_for_hosts(folder, listing, here.copies, pieces_of_file, damage)

    def find_files(self, folder: str, listing: Listing) -> FilesHere:
        """Find out which files are here, and which of them are to be sent from here."""
        files, hosts = listing.files, self.hosts
        if hosts is None or not isinstance(listing, Manifest):
            return FilesHere(own={*files})
        sizes = list_sizes(self._local, folder)
        here = {name for name, file in files.items() if sizes.get(name) == file.stored_nbytes}
        others = {name for host in hosts.others for name in listing.hosts.get(host, ())}
        of_hosts = {name for names in listing.hosts.values() for name in names}
        return FilesHere(
            own=here - others if hosts.is_leading else here & of_hosts - others,
            copies=here & others,
        )

    def _send_missing(
        self,
        folder: str,
        listing: Listing,
        names: Collection[str],
        pieces_of_file: PiecesOfFile,
    ) -> int:
        """Send files that the remote root lacks, in the order of the manifest; count them."""
        sizes = self._remote_sizes(folder)
        num_sent = 0
        damaged: CorruptData | None = None
        for name, entry in listing.files.items():
            key, nbytes = f"{folder}/{name}", entry.stored_nbytes
            if name not in names:
                continue
            if sizes.get(name) == nbytes and self._matches(key, pieces_of_file(name)):
                continue
            try:
                self._send_file(key, nbytes, pieces_of_file(name), exists=name in sizes)
            except CorruptData as error:
                damaged = damaged or error
            num_sent += 1
        if damaged is not None:
            raise damaged
        return num_sent

    def _wait_for_hosts(
        self,
        folder: str,
        listing: Listing,
        copies: Set[str],
        pieces_of_file: PiecesOfFile,
        damage: CorruptData | None,
    ) -> None:
        """Wait for the files that other hosts send; they appear whole."""
        left = {*listing.files}
        pause_s, changed_s = _PAUSE_S, time.monotonic()
        while left:
            sizes = self._remote_sizes(folder)
            arrived = {
                name
                for name in left
                if sizes.get(name) == listing.files[name].stored_nbytes
                and self._matches(f"{folder}/{name}", pieces_of_file(name))
            }
            left -= arrived
            quiet_s = time.monotonic() - changed_s
            if arrived:
                pause_s, changed_s = _PAUSE_S, time.monotonic()
            elif left & copies and quiet_s >= COPIES_QUIET_S:
                self._send_missing(folder, listing, left & copies, pieces_of_file)
            elif quiet_s >= HOSTS_QUIET_S:
                raise damage or TransientStoreError(
                    f"{self._remote.url}/{folder}: no files arrived for "
                    f"{time_limit(HOSTS_QUIET_S)}; it lacks {describe_files(listing, left)}"
                )
            elif self.background.sleep(pause_s):
                self._check_interrupt(folder)
            else:
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def list_pieces(self, folder: str, listing: Listing) -> PiecesOfFile:
        """Divide the files of a checkpoint into pieces with digests."""
        if isinstance(listing, Visible):
            return partial(self._pieces_of_sealed, folder, listing.files)

        def read(name: str) -> bytes:
            return self._read_file(folder, name, listing.files[name], listing.block_nbytes)

        return pieces_of(listing, read, what=f"{self._local.url}/{folder}").__getitem__

    def _pieces_of_sealed(
        self, folder: str, files: Mapping[str, FileEntry], name: str
    ) -> tuple[FilePiece, ...]:
        key = f"{folder}/{name}"
        what = f"{self._local.url}/{key}"

        def digest(start: int, stop: int) -> bytes:
            _lower_priority()
            self._check_interrupt(key)
            return block_digest(self._local.get(key, start, stop - start))

        def digests() -> Iterator[bytes]:
            return self._run_in_order(
                (partial(digest, *span) for span in list_blocks(files[name].nbytes)), key
            )

        try:
            return pieces_of_sealed(files[name], digests(), what=what)
        except CorruptData:
            # Retried once: a transient read error is not damage.
            return pieces_of_sealed(files[name], digests(), what=what)

    def _send_keys(self, folder: str, visible: Visible) -> None:
        """Upload the current files of wrapped keys; others in the remote root are kept."""
        for name, data in box_documents(self._local, folder, visible).items():
            key = f"{folder}/{name}"
            self._upload_object(key, data)
            self._add_cost()
            if self._remote.get(key) != data:
                raise StoreError(
                    f"{self._remote.url}/{key}: reading back returned different keys from those "
                    "sent"
                )

    def _remote_sizes(self, folder: str) -> dict[str, int]:
        self._add_cost()
        return list_sizes(self._remote, folder)

    def _send_file(
        self, key: str, nbytes: int, pieces: tuple[FilePiece, ...], *, exists: bool
    ) -> None:
        # By one put, which replaces a file that exists, where `create` would put it whole too.
        if len(pieces) <= 1 or type(self._remote).create is Store.create:
            self._upload_object(
                key, b"".join(self._read_verified_piece(key, piece) for piece in pieces)
            )
            self._expect_match(key, pieces)
        elif exists:
            raise CorruptData(
                f"{self._remote.url}/{key}: differs from {self._local.url}, though only uploads of "
                "this run write there; it was not changed"
            )
        elif self._remote.has_links:
            self._send_aside(key, nbytes, pieces)
        else:
            with suppress(AlreadyExists):  # whole: files appear under their names when finished
                self._send_pieces(key, key, nbytes, pieces)
            self._expect_match(key, pieces)

    def replace_file(
        self, key: str, nbytes: int, pieces: tuple[FilePiece, ...], *, epoch: int
    ) -> None:
        """Replace a damaged or missing file, under claim `epoch`, once its bytes are all here."""
        if len(pieces) <= 1:
            content = b"".join(self._read_verified_piece(key, piece) for piece in pieces)
            check_ownership(self._remote, epoch, committed=True)
            self._remote.put(key, content)
        elif self._remote.has_links:
            self._send_aside(key, nbytes, pieces, replaced_under=epoch)
        else:
            raise StoreError(f"{self._remote.url}/{key}: this store cannot replace a large file")

    def _send_aside(
        self,
        key: str,
        nbytes: int,
        pieces: tuple[FilePiece, ...],
        *,
        replaced_under: int | None = None,
    ) -> None:
        """Upload a file into a scratch folder, and link it to its key, which may be replaced."""
        scratch = layout.sending_folder(os.urandom(8), self.nonce)
        aside = f"{scratch}/{key.rpartition('/')[2]}"
        self._remote.make_folder(scratch, exclusive=True)
        try:
            self._send_pieces(key, aside, nbytes, pieces)
            self._expect_match(aside, pieces)
            self._add_cost()
            if replaced_under is not None:
                check_ownership(self._remote, replaced_under, committed=True)
                self._remote.delete(key)
            with suppress(AlreadyExists) if replaced_under is None else nullcontext():
                if not self._remote.link(aside, key):
                    raise UnsupportedStore(
                        f"{self._remote.url}/{aside}: cannot be given its name {key}; without a "
                        "second name, a partly sent file could be mistaken for a complete one"
                    )
        finally:
            with suppress(StoreError):  # gc removes it
                remove_scratch(self._remote, scratch)

    def _send_pieces(
        self, source: str, key: str, nbytes: int, pieces: tuple[FilePiece, ...]
    ) -> None:
        self._add_cost()
        writer = self._remote.create(key, nbytes)
        send = partial(self._send_group, writer, source)
        try:
            with closing(
                self._run_in_order((partial(send, group) for group in groups_of(pieces)), source)
            ) as sent:
                for _ in sent:
                    continue
            self._wait_for_sending(self._submit_job(writer.finish, source), source)
        except BaseException:
            writer.abort()
            raise

    def _send_group(self, writer: BlockWriter, source: str, group: PieceGroup) -> None:
        _lower_priority()
        self._check_interrupt(source)
        first, data = (
            group.pieces[0].start,
            b"".join(self._read_verified_piece(source, p) for p in group.pieces),
        )
        sent = memoryview(data)[group.start - first : group.stop - first]
        writer.write(group.start, sent)
        self._add_cost(len(sent))

    def _matches(self, key: str, pieces: tuple[FilePiece, ...]) -> bool:
        """Whether the remote file has these bytes; True, unread, if nothing is to be read back."""
        if not self._reads_back:
            return True
        answers = self._run_in_order(
            (partial(self._has_piece, key, piece) for piece in pieces), key
        )
        with closing(answers):
            return all(answers)

    def _run_in_order(self, jobs: Iterable[Callable[[], T]], key: str) -> Generator[T, None, None]:
        """Run jobs, a few at once, and yield their results in order."""
        waiting = deque[Future[T]]()
        try:
            for job in jobs:
                waiting.append(self._submit_job(job, key))
                if len(waiting) >= 2 * self._num_threads:
                    yield self._wait_for_sending(waiting.popleft(), key)
            while waiting:
                yield self._wait_for_sending(waiting.popleft(), key)
        finally:
            cancel(waiting, timeout_s=self._timeout_s)

    def _has_piece(self, key: str, piece: FilePiece) -> bool:
        self._add_cost()
        data = self._remote.get(key, piece.start, piece.stop - piece.start)
        return block_digest(data) == piece.digest

    def _expect_match(self, key: str, pieces: tuple[FilePiece, ...]) -> None:
        if not self._matches(key, pieces):
            raise StoreError(
                f"{self._remote.url}/{key}: the uploaded file differs from the local one"
            )

    def _read_verified_piece(self, key: str, piece: FilePiece) -> bytes:
        """Read a piece of a local file and check its digest; one retry if it differs."""
        for _ in range(2):
            data = self._local.get(key, piece.start, piece.stop - piece.start)
            if block_digest(data) == piece.digest:
                return data
        raise CorruptData(
            f"{self._local.url}/{key}: bytes {piece.start} to {piece.stop} do not match their "
            "digest, so the file is not sent"
        )

    def _read_file(self, folder: str, name: str, entry: FileEntry, block_nbytes: int) -> bytes:
        """Read a whole local file, and check it against the manifest's digest; one retry."""
        key = f"{folder}/{name}"
        for _ in range(2):
            data = read_document(self._local, key, max_nbytes=layout.MAX_INDEX_NBYTES)
            if file_digest(len(data), digest_blocks(data, block_nbytes)) == entry.digest:
                return data
        raise CorruptData(
            f"{self._local.url}/{key}: the bytes differ from those that were written; "
            "it was not uploaded"
        )

    def _check_interrupt(self, key: str, *, done: str = "sent to its end") -> None:
        """Raise `UploadInterrupted` if the threads are to stop; `key` names what is not `done`."""
        if self.background.is_stopping:
            raise UploadInterrupted(f"{key}: not {done}, because the process is closing")

    def _upload_object(self, key: str, data: bytes) -> None:
        self._check_interrupt(key, done="sent")
        self._remote.put(key, data)
        self._add_cost(len(data))

    def _submit_job(self, job: Callable[[], T], key: str) -> Future[T]:
        self._check_interrupt(key)
        return self.background.submit(job)

    def _wait_for_sending(self, future: Future[T], key: str) -> T:
        try:
            return future.result(timeout=self._timeout_s)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"{self._remote.url}/{key}: sending one block took longer than "
                f"{time_limit(self._timeout_s)}"
            ) from None

    # The commit

    def _expect_sizes(self, folder: str, listing: Listing) -> None:
        sizes = self._remote_sizes(folder)
        for name, entry in listing.files.items():
            if sizes.get(name) == entry.stored_nbytes:
                continue
            key = f"{folder}/{name}"  # a list may lag
            self._add_cost()
            nbytes = self._remote.head(key).nbytes
            if nbytes != entry.stored_nbytes:
                raise StoreError(
                    f"{self._remote.url}/{key}: {entry.stored_nbytes} bytes were sent and the "
                    f"store now has {nbytes}; the checkpoint is not committed there"
                )

    def _commit(
        self, folder: str, listing: Listing, data: bytes, epoch: int, unclear: set[str]
    ) -> None:
        name = layout.attempt_name(listing.label, listing.epoch, listing.sequence, listing.save_id)
        attempt = SaveAttempt(name=name, save_id=listing.save_id)
        if attempt.folder != folder:
            raise CorruptData(
                f"{self._local.url}/{folder}: the manifest belongs to {attempt.folder}"
            )
        self._check_interrupt(folder, done="committed")
        try:
            publish(self._remote, attempt, data, epoch=epoch)
        finally:
            if attempt.is_unclear:
                unclear.add(folder)
        self._add_cost(len(data), requests=3)

    def _confirm(self, folder: str, data: bytes) -> None:
        """Make the remote checkpoint durable, and compare its manifest with the local one."""
        sync_checkpoint(self._remote, folder)
        key = f"{folder}/{layout.MANIFEST}"
        self._add_cost(requests=2)
        if read_document(self._remote, key, max_nbytes=MAX_MANIFEST_NBYTES) != data:
            raise CorruptData(
                f"{self._remote.url}/{key}: read back, it is not the manifest of "
                f"{self._local.url}/{folder}"
            )

    def _add_cost(self, nbytes: int = 0, *, requests: int = 1) -> None:
        with self._lock:
            self._cost.nbytes += nbytes
            self._cost.requests += requests
        if nbytes:
            self._on_progress(self._cost)


def describe_files(manifest: Listing, names: Collection[str]) -> str:
    """Name files of a checkpoint, with the hosts that wrote them."""
    wanted = {*names}
    hosts = manifest.hosts if isinstance(manifest, Manifest) else {}
    lines = [
        f"{some_of(found)}, written by {host}"
        for host, of_host in hosts.items()
        if (found := [name for name in of_host if name in wanted])
    ]
    return "; ".join(lines) or some_of(sorted(names))


def list_sizes(store: Store, folder: str) -> dict[str, int]:
    """List the files in a folder of a store, with their lengths in bytes."""
    start = len(folder) + 1
    return {info.key[start:]: info.nbytes for info in store.list(f"{folder}/")}


def _shows_whole_files(remote: Store) -> bool:
    """Whether a file of the right length is known to be whole in this kind of store."""
    return remote.has_links or not remote.writes_in_place


_thread = threading.local()


def _lower_priority() -> None:
    """Lower the scheduling priority of this thread, once, where the system allows it."""
    if not getattr(_thread, "done", False):
        _thread.done = True
        with suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
