"""A store that encrypts checkpoints as they are written and decrypts them as they are read.

It wraps any store. In the folders of checkpoints it maps names, lengths and bytes (docs/format.md,
section 10); claims, leases, requests and notes on uploads pass through. It keeps the order of the
caller's puts, and adds one: the box of wrapped keys right before the manifest, which needs it.
tests/encryption/test_store.py stops saves at operations of the wrapped store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
from typing_extensions import override

from holdfast.encryption.files import (
    REDACTED,
    SealedFile,
    SealedWriter,
    boxes_of,
    decrypt_manifest,
    plain_nbytes,
    redact_mark,
    redact_record,
    redact_sidecar,
)
from holdfast.errors import (
    AlreadyExists,
    CorruptData,
    FormatError,
    KeyUnavailable,
    MissingKey,
    NotFound,
    NotSealed,
    SealError,
    Tampered,
    UsageError,
)
from holdfast.format import blocks, layout
from holdfast.format.envelope import (
    MAX_MARK_NBYTES,
    Contents,
    FileSeal,
    KeyBox,
    decode_mark,
    encode_box,
    encode_mark,
    encode_sealed,
    is_mark,
    new_file_seal,
)
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, FileEntry, Manifest, decode_register
from holdfast.format.records import Notes
from holdfast.format.suites import FileCipher, Suite, fresh_secret, seal_whole, stored_nbytes
from holdfast.keys import Encryption, try_key, wrapped
from holdfast.ranks.coordinator import LEADER
from holdfast.root.catalog import Catalog
from holdfast.root.documents import read_document
from holdfast.store.base import (
    BlockWriter,
    Buffer,
    ObjectInfo,
    Seen,
    Store,
    WrappedStore,
    expect_at_least,
    expect_at_most,
    ignore,
)

_PASSED_THROUGH = frozenset({layout.WRITERS, layout.READERS, layout.REQUESTS, layout.UPLOADS})


def sealing(store: Store, encryption: Encryption | None, *, twin: Store | None = None) -> Store:
    """Wrap `store` to encrypt checkpoints if `encryption` is given; `twin` as for `SealedStore`."""
    if encryption is None:
        return store
    if not isinstance(encryption, Encryption):
        raise UsageError(f"encrypt={encryption!r}: must be a holdfast.Encryption, or None")
    if sealed(store) is not None:
        raise UsageError("encrypt: this store seals already")
    return SealedStore(store, encryption, twin=None if twin is None else sealed(twin))


def sealed(store: Store) -> SealedStore | None:
    """Return `store` if it encrypts checkpoints, else None."""
    return store if isinstance(store, SealedStore) else None


def bare(store: Store) -> Store:
    """Return the store that a `SealedStore` wraps, with raw encrypted bytes; any other as it is."""
    sealing_store = sealed(store)
    return store if sealing_store is None else sealing_store.inner


def read_stored_manifest(store: Store, folder: str) -> bytes:
    """Read a folder's manifest as stored; an encrypted one is authenticated first, or raises."""
    if (sealing_store := sealed(store)) is not None:
        return sealing_store.read_authenticated(folder)
    return read_document(store, f"{folder}/{layout.MANIFEST}", max_nbytes=MAX_MANIFEST_NBYTES)


@dataclass(slots=True)
class _Attempt:
    """Uncommitted checkpoint of this process: its data key, and its files so far."""

    data_key: bytes = field(default=b"", repr=False)
    """Empty in a follower, which puts no manifest."""
    box: bytes = b""
    """The stored box: the data key, wrapped for each key that may decrypt."""
    seals: dict[str, FileSeal] = field(default_factory=dict)
    """Stored name, length and secret of each file, by plain name."""
    stored: dict[str, FileEntry] = field(default_factory=dict)
    """Manifest entries of the finished files, by stored name."""
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers for the stored names of the next files."""


class WrittenSeal(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one file that a rank has encrypted, and of its stored bytes."""

    seal: FileSeal
    entry: FileEntry


class SealedStore(WrappedStore):
    """Encrypts and decrypts checkpoints in `inner`; only their writer may commit. Thread-safe."""

    def __init__(
        self, inner: Store, encryption: Encryption, *, twin: SealedStore | None = None
    ) -> None:
        """Wrap `inner`; reuse what `twin` decrypted, perhaps with keys that are public now."""
        super().__init__(inner)
        self._twin = twin
        self._encryption = encryption
        self._suite = Suite(name=encryption.suite)
        self._attempts: dict[str, _Attempt] = {}
        self._opened: dict[str, Contents] = {}
        self._readers: dict[str, dict[str, SealedFile]] = {}
        self._lock = threading.Lock()

    @property
    @override
    def reads_origin(self) -> bool:
        return self.inner.reads_origin

    @override
    def uncached(self) -> SealedStore:
        """Return a store that bypasses local copies; it shares attempts and decrypted manifests."""
        inner = self.inner.uncached()
        if inner is self.inner:
            return self
        twin = SealedStore(inner, self._encryption, twin=self._twin)
        twin._attempts, twin._opened, twin._lock = self._attempts, self._opened, self._lock
        return twin

    def useless_keys(self) -> Iterator[str]:
        """Yield a message for each key that does not decrypt what it encrypted."""
        for key in self._encryption.sealing:
            try:
                try_key(key, self._suite)
            except (KeyUnavailable, Tampered) as error:
                yield f"{key.name} cannot decrypt what it encrypted: {error}"

    # Operations

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        place = _split_key(key)
        if place is None:
            self.inner.put(key, redact_record(key, data), if_absent=if_absent)
            return
        folder, name = place
        if name == layout.MANIFEST:
            self._put_register(folder, bytes(data), if_absent=if_absent)
        elif layout.is_sidecar(name):
            stored, sealed = self._sealed_sidecar(folder, name, bytes(data))
            self.inner.put(f"{folder}/{stored}", sealed, if_absent=if_absent)
        elif _is_encrypted_name(name):
            self.inner.put(key, data, if_absent=if_absent)
        else:
            self._put_file(folder, name, data)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """Return decrypted bytes of an object; raises `SealError` or `Tampered`."""
        document = self._decrypt_document(key)
        if document is not None:
            return _byte_range(document, start, nbytes, what=f"{self.url}/{key}")
        reader = self.uncached()._open_reader(key)  # `get` bypasses local copies
        if reader is None:
            return self.inner.get(key, start, nbytes)
        stop = reader.seal.nbytes if nbytes is None else start + nbytes
        return reader.get(start, max(stop - start, 0))

    @override
    def head(self, key: str) -> ObjectInfo:
        """Return the key and the decrypted length of an object."""
        document = self._decrypt_document(key)
        if document is not None:
            return ObjectInfo(key, len(document))
        reader = self._open_reader(key)
        if reader is None:
            return self.inner.head(key)
        info = self.inner.head(reader.key)
        return replace(info, key=key, nbytes=plain_nbytes(info.nbytes, reader.seal))

    @override
    def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
        """Return all decrypted bytes of an object, of at most `max_nbytes`."""
        document = self._decrypt_document(key, afresh=afresh)
        what = f"{self.url}/{key}"
        if document is not None:
            expect_at_most(len(document), max_nbytes, what=what)
            return document
        reader = self.uncached()._open_reader(key)  # as for `get`
        if reader is None:
            return self.inner.get_whole(key, max_nbytes=max_nbytes, afresh=afresh)
        nbytes = self.head(key).nbytes
        expect_at_most(nbytes, max_nbytes, what=what)
        if nbytes != reader.seal.nbytes:  # a number that a manifest's author chose
            raise CorruptData(f"{what}: has {nbytes} bytes, expected {reader.seal.nbytes}")
        return reader.get(0, nbytes, afresh=afresh)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield objects by plain name, with decrypted lengths of files; other lengths as stored."""
        found: Iterable[ObjectInfo] = self.inner.list(prefix)
        folder, slash, _ = prefix.partition("/")
        if not slash or _split_key(f"{folder}/x") is None:
            yield from found
            return
        names = self._plain_names(folder)
        seals = {seal.name: seal for seal in self._seals(folder).values()}
        for info in found:
            name = info.key.partition("/")[2]
            nbytes = plain_nbytes(info.nbytes, seals[name]) if name in seals else info.nbytes
            yield ObjectInfo(f"{folder}/{names(name)}", nbytes)

    @override
    def children(self, folder: str = "") -> tuple[str, ...]:
        found = self.inner.children(folder)
        if not folder or "/" in folder or _split_key(f"{folder}/x") is None:
            return found
        return tuple(sorted(map(self._plain_names(folder), found)))

    @override
    def delete(self, key: str) -> None:
        place = None if key.endswith("/") else _split_key(key)
        if place is not None:
            folder, name = place
            self.inner.delete(f"{folder}/{self._stored_name(folder, name)}")
            return
        self.inner.delete(key)
        self._drop_state(key.rstrip("/"))

    @override
    def delete_many(self, keys: Sequence[str]) -> None:
        places = [(key, _split_key(key)) for key in keys]
        self.inner.delete_many(
            [key if at is None else f"{at[0]}/{self._stored_name(*at)}" for key, at in places]
        )

    @override
    def read_into(
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        reader = self._open_reader(key)
        if reader is None:
            self.inner.read_into(key, start, buffer, seen=seen, afresh=afresh)
        else:
            reader.decrypt_range(start, memoryview(buffer).cast("B"), seen=seen, afresh=afresh)

    @property
    @override
    def writes_in_place(self) -> bool:
        return self.inner.writes_in_place

    @override
    def create(self, key: str, nbytes: int, *, at_most: bool = False) -> BlockWriter:
        """Begin an encrypted file; pieces must be whole blocks, also without `at_most`."""
        place = _split_key(key)
        if place is None:
            return self.inner.create(key, nbytes, at_most=at_most)
        folder, name = place
        attempt, seal = self._new_file(folder, name, nbytes)
        stored = f"{folder}/{seal.name}"
        inner = self.inner.create(stored, stored_nbytes(nbytes), at_most=at_most)

        def done(length: int, entry: FileEntry) -> None:
            attempt.stored[seal.name] = entry
            attempt.seals[name] = msgspec.structs.replace(seal, nbytes=length)

        cipher = FileCipher(self._suite, bytes.fromhex(seal.secret))
        return SealedWriter(inner, cipher, nbytes, at_most=at_most, done=done)

    @property
    @override
    def has_links(self) -> bool:
        return self.inner.has_links

    @override
    def link(self, source: str, key: str) -> bool:
        """Hard-link an encrypted file into a checkpoint, whose manifest will record its secret."""
        from_folder, from_name = source.split("/")
        folder, name = key.split("/")
        contents = self._contents(from_folder)
        seal = contents.files.get(from_name) if contents is not None else None
        if contents is None or seal is None or contents.suite != self._suite:
            return False
        attempt = self._attempt(folder)
        with self._lock:
            stored = layout.stored_name(next(attempt.numbers))
        if not self.inner.link(f"{from_folder}/{seal.name}", f"{folder}/{stored}"):
            return False
        attempt.stored[stored] = contents.visible.files[seal.name]
        attempt.seals[name] = FileSeal(name=stored, nbytes=seal.nbytes, secret=seal.secret)
        return True

    # Several ranks

    def join_attempt(self, folder: str, rank: int, world_size: int) -> None:
        """Begin to write into an attempt with other ranks; rank r numbers r, r + world_size, …"""
        attempt = self._new_attempt() if rank == LEADER else _Attempt()
        attempt.numbers = count(rank, world_size)
        with self._lock:
            self._attempts[folder] = attempt

    def describe_sealing(self, folder: str, name: str) -> WrittenSeal:
        """Return how this rank has encrypted a file of an attempt, for the leader to include."""
        attempt = self._attempt(folder)
        seal = attempt.seals[name]
        return WrittenSeal(seal=seal, entry=attempt.stored[seal.name])

    def include(self, folder: str, name: str, written: WrittenSeal) -> None:
        """Add a file that another rank has written to an attempt."""
        attempt = self._attempt(folder)
        seal = written.seal
        if name in attempt.seals or seal.name in attempt.stored:
            raise AlreadyExists(f"{self.url}/{folder}/{name} ({seal.name}): written by two ranks")
        attempt.seals[name] = seal
        attempt.stored[seal.name] = written.entry

    # Manifests

    def _put_register(self, folder: str, data: bytes, *, if_absent: bool) -> None:
        key = f"{folder}/{layout.MANIFEST}"
        register = decode_register(data, what=key)
        if isinstance(register, Manifest):
            self._put_manifest(folder, register, data, if_absent=if_absent)
            return
        without_words = msgspec.structs.replace(register, reason=REDACTED)
        self.inner.put(key, without_words.encode(), if_absent=if_absent)
        self._drop_state(folder)

    def _put_manifest(
        self, folder: str, manifest: Manifest, data: bytes, *, if_absent: bool
    ) -> None:
        """Put the box of wrapped keys, then the manifest, which needs it for decryption."""
        attempt = self._attempt(folder)
        assert attempt.data_key, "the leader alone puts a manifest"
        contents = encode_sealed(
            manifest,
            data,
            attempt.seals,
            attempt.stored,
            suite=self._suite,
            data_key=attempt.data_key,
        )
        # Put only now, so that an attempt that never commits leaves no key behind.
        self.inner.put(f"{folder}/{layout.keys_name(1)}", attempt.box)
        with self._lock:
            # Used only while the same bytes are read back.
            self._opened[folder] = contents
        self.inner.put(f"{folder}/{layout.MANIFEST}", contents.document, if_absent=if_absent)
        with self._lock:
            self._attempts.pop(folder, None)

    def _read_manifest(self, folder: str, *, afresh: bool = False) -> tuple[bytes, Contents | None]:
        """Read a folder's manifest, decrypted, and its contents if it was; else a `SealError`."""
        key = f"{folder}/{layout.MANIFEST}"
        data = read_document(self.inner, key, max_nbytes=MAX_MANIFEST_NBYTES, afresh=afresh)
        known = self._cached_contents(folder, data)
        if known is not None:
            return known.manifest, known
        what = f"{self.url}/{key}"
        is_sealed, register = False, None
        try:
            register = decode_register(data, what=what)
        except MissingKey:
            is_sealed = True
        except FormatError:
            return data, None  # the caller's own decoding reports it
        if is_sealed:
            contents = decrypt_manifest(self.inner, folder, data, self._encryption.opening)
            with self._lock:
                self._opened[folder] = contents
                self._readers.pop(folder, None)
                self._attempts.pop(folder, None)  # another rank has committed it
            return contents.manifest, contents
        if isinstance(register, Manifest) and not self._encryption.accept_plain:
            raise NotSealed(
                f"{what}: this checkpoint is not encrypted, so it may be forged. If it is your "
                "own, pass Encryption(accept_plain=True), or --accept-plain"
            )
        return data, None

    def _cached_contents(self, folder: str, document: bytes) -> Contents | None:
        """Return cached contents that this store or its twin decrypted from the same bytes."""
        for store in (self, self._twin):
            if store is None:
                continue
            with store._lock:
                known = store._opened.get(folder)
            if known is not None and known.document == document:
                with self._lock:
                    self._opened[folder] = known
                return known
        return None

    def read_authenticated(self, folder: str) -> bytes:
        """Read a folder's manifest document as stored; an encrypted one is authenticated."""
        plain, contents = self._read_manifest(folder)
        return plain if contents is None else contents.document

    def lost_keys(self, folder: str) -> tuple[str, ...]:
        """Return the key file's name if no box of a checkpoint is readable any more, else ()."""
        contents = self._contents(folder)
        if contents is None:
            return ()
        try:
            boxes_of(self.inner, folder, contents.visible)
        except FormatError:
            return (layout.keys_name(1),)
        return ()

    def new_box(self, folder: str) -> KeyBox:
        """Wrap the data key of an encrypted checkpoint for the current encryption keys."""
        contents = self._contents(folder)
        if contents is None:
            raise NotFound(f"{self.url}/{folder}: no encrypted checkpoint")
        return wrapped(self._encryption.sealing, contents.data_key, contents.suite)

    # Names

    def _contents(self, folder: str) -> Contents | None:
        """Return the decrypted contents of a folder's encrypted checkpoint; None if it has none."""
        with self._lock:
            known = self._opened.get(folder)
        if known is not None:
            return known
        try:
            return self._read_manifest(folder)[1]
        except NotFound:
            return None

    def _seals(self, folder: str) -> Mapping[str, FileSeal]:
        """Return names, lengths and secrets of files by plain name; none if not decryptable."""
        with self._lock:
            attempt = self._attempts.get(folder)
            if attempt is not None:
                return dict(attempt.seals)
        try:
            contents = self._contents(folder)
        except (SealError, FormatError):
            return {}
        return contents.files if contents is not None else {}

    def _get_components(self, folder: str) -> tuple[str, ...]:
        with self._lock:
            known = self._opened.get(folder)
        return tuple(known.components) if known is not None else ()

    def _plain_names(self, folder: str) -> Callable[[str], str]:
        """Return a function that maps stored names to plain ones, and keeps unknown names."""
        names = {seal.name: plain for plain, seal in self._seals(folder).items()}
        components = self._get_components(folder)

        def plain(name: str) -> str:
            mark = layout.parse_thinned(name)
            if mark is None:
                return names.get(name, name)
            number = mark[0].removeprefix("c")
            is_component = number.isdecimal() and int(number) < len(components)
            return layout.thinned_name(components[int(number)], mark[1]) if is_component else name

        return plain

    def _stored_name(self, folder: str, name: str) -> str:
        if name == layout.MANIFEST or _is_encrypted_name(name):
            return name
        mark = layout.parse_thinned(name)
        if mark is not None:
            self._seals(folder)
            components = self._get_components(folder)
            if mark[0] in components:
                return layout.thinned_name(f"c{components.index(mark[0])}", mark[1])
            return name
        if layout.is_sidecar(name):
            return name
        seal = self._seals(folder).get(name)
        return seal.name if seal is not None else name

    def _drop_state(self, folder: str) -> None:
        with self._lock:
            self._attempts.pop(folder, None)
            self._opened.pop(folder, None)
            self._readers.pop(folder, None)

    # Sidecars

    def _sealed_sidecar(self, folder: str, name: str, data: bytes) -> tuple[str, bytes]:
        """Encrypt a sidecar, or redact it if it cannot be; returns its stored name and bytes."""
        try:
            register, contents = self._read_manifest(folder)
            is_plain = contents is None and isinstance(
                decode_register(register, what=name), Manifest
            )
        except (FormatError, NotFound):
            return name, redact_mark(name, data)  # the manifest is damaged or lost
        if is_plain:
            if layout.parse_notes(name) is not None:
                self._expect_no_new_text(folder, Notes.decode(data, what=name))
            return name, redact_sidecar(name, data)
        if contents is None:
            return name, redact_mark(name, data)
        stored = self._stored_name(folder, name)
        return stored, encode_mark(contents, stored, data)

    def _expect_no_new_text(self, folder: str, notes: Notes) -> None:
        known = Catalog(self.inner).marks(folder).notes
        if not {*notes.tags} <= {*known.tags} or str(notes.metrics) != str(known.metrics):
            raise NotSealed(
                f"{self.url}/{folder}: it was saved before the run was encrypted, so new tags and "
                "metrics would be in plain text. Pin it, or save a new checkpoint and tag that"
            )

    def _sidecar(self, folder: str, name: str, *, afresh: bool) -> bytes:
        stored = self._stored_name(folder, name)
        key = f"{folder}/{stored}"
        data = read_document(self.inner, key, max_nbytes=MAX_MARK_NBYTES, afresh=afresh)
        contents = self._contents(folder)
        if contents is None:
            return data
        if is_mark(data):
            return decode_mark(contents, stored, data, what=f"{self.url}/{key}")
        if layout.parse_notes(name) is not None:
            raise Tampered(f"{self.url}/{key}: not encrypted, but its checkpoint is")
        return data  # a mark is valid by its name alone, whoever put it

    def _decrypt_document(self, key: str, *, afresh: bool = False) -> bytes | None:
        """Read and decrypt a manifest or a sidecar; None for other keys."""
        place = _split_key(key)
        if place is None:
            return None
        if place[1] == layout.MANIFEST:
            return self._read_manifest(place[0], afresh=afresh)[0]
        return self._sidecar(*place, afresh=afresh) if layout.is_sidecar(place[1]) else None

    # Files

    def _attempt(self, folder: str) -> _Attempt:
        if layout.parse_attempt(folder) is None:
            # Its keys would never be stored, and it must not be stored unencrypted.
            raise UsageError(
                f"{self.url}/{folder}: an encrypted root accepts only folders of saves"
            )
        with self._lock:
            if folder not in self._attempts:
                self._attempts[folder] = self._new_attempt()
            return self._attempts[folder]

    def _new_attempt(self) -> _Attempt:
        # Before any byte is written, so that a refusing key service costs no time.
        data_key = fresh_secret()
        box = wrapped(self._encryption.sealing, data_key, self._suite)
        return _Attempt(data_key=data_key, box=encode_box(box))

    def _new_file(self, folder: str, name: str, nbytes: int) -> tuple[_Attempt, FileSeal]:
        attempt = self._attempt(folder)
        with self._lock:
            if name in attempt.seals or folder in self._opened:
                raise AlreadyExists(f"{self.url}/{folder}/{name}: it exists, or is being written")
            seal = attempt.seals[name] = new_file_seal(next(attempt.numbers), nbytes)
        return attempt, seal

    def _put_file(self, folder: str, name: str, data: Buffer) -> None:
        plain = memoryview(data).cast("B")
        attempt, seal = self._new_file(folder, name, plain.nbytes)
        sealed = seal_whole(self._suite, bytes.fromhex(seal.secret), plain)
        # Without `if_absent`: the name is new, and stores retry only puts without it.
        self.inner.put(f"{folder}/{seal.name}", sealed)
        digest = blocks.file_digest(len(sealed), blocks.digest_blocks(sealed))
        attempt.stored[seal.name] = FileEntry(nbytes=len(sealed), digest=digest)

    def _open_reader(self, key: str) -> SealedFile | None:
        """Return a cached reader that decrypts a file; None for a file that is not encrypted."""
        place = _split_key(key)
        if place is None or _is_encrypted_name(place[1]):
            return None
        folder, name = place
        with self._lock:
            known = self._readers.get(folder, {}).get(name)
            attempt = self._attempts.get(folder)
        if known is not None:
            return known
        suite = self._suite
        if attempt is not None:
            seal = attempt.seals.get(name)
        else:
            contents = self._contents(folder)
            if contents is None:
                return None
            seal, suite = contents.files.get(name), contents.suite
        if seal is None:
            raise NotFound(f"{self.url}/{key}: the checkpoint has no such file")
        reader = SealedFile(self.inner, f"{folder}/{seal.name}", seal, suite, f"{self.url}/{key}")
        with self._lock:
            self._readers.setdefault(folder, {})[name] = reader
        return reader


def _split_key(key: str) -> tuple[str, str] | None:
    """Split the key of a checkpoint's object into folder and name; None for other objects."""
    folder, slash, name = key.partition("/")
    if not slash or folder in _PASSED_THROUGH or layout.is_preflight(folder):
        return None
    return (folder, name) if name else None


def _is_encrypted_name(name: str) -> bool:
    """Whether a name is of an encrypted file or of wrapped keys, by its form."""
    return layout.is_stored_name(name) or layout.parse_keys(name) is not None


def _byte_range(document: bytes, start: int, nbytes: int | None, *, what: str) -> bytes:
    stop = len(document) if nbytes is None else start + nbytes
    expect_at_least(len(document), stop, what=what)
    return document[start:stop]
