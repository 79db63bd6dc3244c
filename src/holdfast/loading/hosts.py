"""Finds which host has which record and file, if each host has a local tier (decision 0068).

The leader learns what each host has, copies into its own root the records that it lacks, and says
from where each file of a candidate is read. A `HostView` reads them so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import TypeAlias

import msgspec
from typing_extensions import override

from holdfast.errors import (
    CommitConflict,
    CorruptData,
    Diverged,
    FormatError,
    NotFound,
    StoreError,
    TransientStoreError,
    is_damage,
    listing,
    some_of,
)
from holdfast.events import Emitter
from holdfast.format import blocks, layout
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    Deleted,
    FileEntry,
    Manifest,
    decode_register,
    encode_manifest,
)
from holdfast.format.records import Closed, WriterRecord
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.loading.plan import FileSources
from holdfast.loading.search import LoadOptions, PassedOver
from holdfast.ownership.claim import Claim, dropped
from holdfast.ownership.tiered import expect_remote_root
from holdfast.ownership.tiered_catalog import TieredCatalog
from holdfast.ranks.coordinator import Coordinator, decode_message
from holdfast.ranks.hosts import HostRounds, Hosts, find_hosts
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import put_once
from holdfast.root.documents import read_document, was_made_by
from holdfast.store.base import FillCached, ObjectInfo, Seen, Store, WrappedStore, ignore

_REMOTE = -1
"""Number of the remote tier among the hosts."""
_ORDER = ("", "aborted", "damaged", "committed", "deleted")
"""States of a register, the one that counts last; the first is that of an absent one."""
MAX_ASKED = 50
"""Most small records of one round: one host may have all, and a message has at most 1 GiB."""


class LostHost(PassedOver):
    """Error: files of a checkpoint were only on a host that does not take part."""

    is_warned = True


class _Find(msgspec.Struct, frozen=True, tag="find"):
    """Announcement: all ranks find out which of them share a disk."""


class _List(msgspec.Struct, frozen=True, tag="list"):
    """Announcement: host leaders list what they have."""


class _Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Announcement: these ranks send these records of their hosts."""

    keys: dict[int, tuple[str, ...]]


class _Done(msgspec.Struct, frozen=True, tag="done"):
    """Announcement: the leader knows enough."""


_Note: TypeAlias = _Find | _List | _Fetch | _Done


class _Listed(msgspec.Struct, frozen=True):
    """Post of a host leader: the claims, registers and files of its root."""

    claims: dict[str, str]
    """Nonce of each claim and close, by key; empty: it cannot be read."""
    registers: dict[str, str]
    """State of the register of each attempt that has one, by folder."""
    files: dict[str, dict[str, int]]
    """Lengths of the data files and notes of each attempt, by folder and name."""
    led: tuple[int, ...]
    """Epochs whose leader has, or had, its registers in this root."""


class HostRecords:
    """Lists of what each host's disk has; all ranks call `lead` or `follow` at the same points."""

    def __init__(
        self, ranks: Coordinator, catalog: TieredCatalog, emit: Emitter, *, timeout_s: float
    ) -> None:
        self._rounds = HostRounds(ranks, emit, timeout_s=timeout_s)
        self._is_leader = ranks.is_leader
        self._catalog, self._store = catalog, catalog.store
        self._emit = emit
        self.found: Hosts | None = None
        """The hosts; None before the first `lead` or `follow`."""
        self._listed: list[_Listed] = []
        """The leader's: what each host has."""
        self._damaged: set[tuple[int, str, str]] = set()
        """The leader's: host, folder and name of files that are not as they were written."""
        self._copied: dict[tuple[str, str], int] = {}
        """The leader's: by folder and name, the host from which a document of its root came."""

    @property
    def hosts(self) -> Hosts:
        """The hosts, which are found before the first save or load."""
        assert self.found is not None, "all ranks have met"
        return self.found

    def lead(self) -> None:
        """List records and files of all hosts, and copy records that the leader's root lacks."""
        with self._failing_together():
            if self.found is None:
                self._announce(_Find())
                self._find(tries_remote=self._is_remote_there())
            self._announce(_List())
            self._rounds.post_answer(self._list_own())
            answers = self._rounds.collect_answers()
            leaders = [self.hosts.ranks_of(host)[0] for host in range(len(self.hosts.names))]
            self._listed = [
                decode_message(answers[rank], _Listed, "what a host has") for rank in leaders
            ]
            self._leave_out_branches()
            self._merge(leaders)
            self._announce(_Done())
        self._catalog.look_again()

    def follow(self) -> None:
        """Answer the messages of the leader's `lead`, in a follower."""
        with self._failing_together():
            while not isinstance(note := self._receive(), _Done):
                if isinstance(note, _Find):
                    self._find(tries_remote=False)
                elif isinstance(note, _List):
                    self._rounds.post_answer(self._list_own())
                else:
                    self._rounds.post_answer(self._read_asked(note))

    def _find(self, *, tries_remote: bool) -> None:
        remote = self._catalog.remote.store
        self.found = find_hosts(self._rounds, self._store, remote, tries_remote=tries_remote)

    def _is_remote_there(self) -> bool:
        with suppress(StoreError):  # the claim says why
            expect_remote_root(self._store, self._catalog.remote.store)
            return True
        return False

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._rounds.report_failure(error)
            raise

    def _announce(self, note: _Note) -> None:
        self._rounds.announce_note(msgspec.msgpack.encode(note))

    def _receive(self) -> _Note:
        kind: type[_Note] = _Find | _List | _Fetch | _Done  # type: ignore[assignment]
        return decode_message(self._rounds.receive_note(), kind, "a message about hosts")

    # What a host has

    def _list_own(self) -> bytes:
        """List the claims, registers and files of this host, in its leader."""
        if not self.hosts.is_host_leader:
            return b""
        store, catalog = self._store, Catalog(self._store)
        names = store.children(layout.WRITERS)
        led = (layout.parse_alive(name) or layout.parse_closed(name) for name in names)
        claims = {
            f"{layout.WRITERS}/{name}": self._read_nonce(name)
            for name in names
            if layout.parse_writer(name) is not None or layout.parse_closed(name) is not None
        }
        registers: dict[str, str] = {}
        files: dict[str, dict[str, int]] = {}
        for folder in map(str, catalog.attempts()):
            try:
                found = [*store.list(f"{folder}/")]
            except StoreError as error:
                if type(error) is not StoreError:
                    raise  # may be temporary
                self._emit("warning", str(error), folder=folder)  # such as a link
                continue
            infos = {info.key.rpartition("/")[2]: info.nbytes for info in found}
            kept = [n for n in infos if layout.is_data_name(n) or layout.parse_notes(n)]
            files[folder] = {name: infos[name] for name in kept}
            if layout.MANIFEST in infos:
                registers[folder] = self._state_of(folder)
        return msgspec.msgpack.encode(_Listed(claims, registers, files, tuple(filter(None, led))))

    def _read_nonce(self, name: str) -> str:
        key = f"{layout.WRITERS}/{name}"
        kind = WriterRecord if layout.parse_closed(name) is None else Closed
        try:
            return kind.decode(self._read(key), what=key).nonce
        except (FormatError, StoreError):
            return ""

    def _state_of(self, folder: str) -> str:
        try:
            register = decode_register(self._read(f"{folder}/{layout.MANIFEST}"), what=folder)
        except (FormatError, StoreError):
            return "damaged"
        kinds = {Manifest: "committed", Deleted: "deleted", Aborted: "aborted"}
        return kinds[type(register)]

    def _read(self, key: str) -> bytes:
        most = max(MAX_MANIFEST_NBYTES, MAX_CHECKED_NBYTES, layout.MAX_INDEX_NBYTES)
        return read_document(self._store, key, max_nbytes=most)

    def _read_asked(self, note: _Fetch) -> bytes:
        found: dict[str, bytes] = {}
        for key in note.keys.get(self.hosts.rank, ()):
            with suppress(NotFound):
                found[key] = self._read(key)
        return msgspec.msgpack.encode(found)

    # Claims of other runs

    def _leave_out_branches(self) -> None:
        """Leave out claims under which a host has saved nothing, if the run has others instead.

        Raises:
            Diverged: something was saved under both.
        """
        chains = [_claims_of(listed) for listed in self._listed]
        remote = self._read_remote_claims(chains)
        while True:
            every = sorted({epoch for of_host in chains for epoch in of_host})
            nonces = {e: {c[e] for c in (*chains, remote) if e in c} for e in every}
            epoch = next((e for e in every if len(nonces[e]) > 1), None)
            if epoch is None:
                return
            used = {c[epoch]: host for host, c in enumerate(chains) if self._saved(host, c, epoch)}
            if epoch in remote:
                used.setdefault(remote[epoch], _REMOTE)
            if len(used) > 1:
                raise Diverged(self._explain_branches(epoch, [*used.values()]))
            kept = next(iter(used), None) or next(c[epoch] for c in chains if epoch in c)
            for host, of_host in enumerate(chains):
                if of_host.get(epoch, kept) != kept:
                    self._leave_out(host, epoch)
                    chains[host] = {e: nonce for e, nonce in of_host.items() if e < epoch}

    def _read_remote_claims(self, chains: Sequence[Mapping[int, str]]) -> dict[int, str]:
        """Return the nonces of the remote tier's claims, from the newest to one that hosts have.

        Claims are put in order, so a host that has one claim of a run has those before it.
        """
        found: dict[int, str] = {}
        hosts = [of_host for of_host in chains if of_host]
        with suppress(StoreError):  # the claim warns that it cannot be reached
            for epoch in self._catalog.remote.claims() if hosts else ():
                with suppress(FormatError):
                    claim = self._catalog.remote.writer(epoch)
                    if claim is not None and any(epoch in of_host for of_host in hosts):
                        found[epoch] = claim.nonce
                        hosts = [one for one in hosts if one.get(epoch) != claim.nonce]
                if not hosts:
                    break
        return found

    def _saved(self, host: int, claims: Mapping[int, str], epoch: int) -> bool:
        """Whether a host has a save that was begun under its claims from `epoch` on."""
        listed = self._listed[host]
        return any(
            epoch <= name.epoch
            and was_made_by(name, claims.get(name.epoch))
            and listed.registers.get(str(name)) != "aborted"
            for name in filter(None, map(layout.parse_attempt, listed.files))
        )

    def _leave_out(self, host: int, epoch: int) -> None:
        """Ignore the claims of a host from `epoch` on; the leader's own are to be replaced."""
        names, claims = self.hosts.names, self._listed[host].claims
        for key in [*claims]:
            name = key.rpartition("/")[2]
            if (layout.parse_writer(name) or layout.parse_closed(name) or 0) >= epoch:
                claims[key] = ""
        self._emit(
            "warning",
            f"{names[host]} has different claims from this run's from {epoch} on, without saves: "
            "they are ignored",
        )

    def _explain_branches(self, epoch: int, hosts: Sequence[int]) -> str:
        url = self._catalog.remote.store.url
        places = [url if host == _REMOTE else self.hosts.names[host] for host in hosts]
        return (
            f"{self._store.url}: claim {epoch} is not the same on {' and '.join(places)}, and each "
            "has saves under its own. One of them is of another run, or the run was continued "
            "twice. Nothing was changed. Move the local root of each host that is not to be used "
            "out of the way, and start the run again"
        )

    # What the leading root lacks

    def _merge(self, leaders: Sequence[int]) -> None:
        """Copy into the leading root the claims, registers and documents that it lacks."""
        claims, registers, documents = self._lacking()
        small = [*claims, *registers]
        batches = [small[at : at + MAX_ASKED] for at in range(0, len(small), MAX_ASKED)]
        batches += ([one] for one in documents)  # may be long
        found: dict[str, bytes] = {}
        for batch in batches:
            asked: dict[int, list[str]] = {}
            for host, key in batch:
                asked.setdefault(leaders[host], []).append(key)
            self._announce(_Fetch({rank: tuple(keys) for rank, keys in asked.items()}))
            self._rounds.post_answer(msgspec.msgpack.encode({}))
            for answer in self._rounds.collect_answers():
                found |= decode_message(answer, dict[str, bytes], "records of a host")
        # Manifests last, so that a root in which this ended half-way has no more than before.
        for host, key in chain(claims, documents, registers):
            if key in found:
                self._put_record(key, found[key], host)

    def _lacking(self) -> tuple[list[tuple[int, str]], ...]:
        """Return (host, key) of claims, registers and documents that the leading root lacks."""
        own, others = self._listed[0], [*enumerate(self._listed)][1:]
        claims: dict[str, int] = {}
        registers: dict[str, int] = {}
        documents: dict[str, int] = {}
        states = dict(own.registers)
        for host, listed in others:
            for key, nonce in listed.claims.items():
                if nonce and not own.claims.get(key):
                    claims.setdefault(key, host)
            for folder, state in listed.registers.items():
                is_known = folder in own.registers and own.registers[folder] != "damaged"
                known = _ORDER.index(states.get(folder, ""))
                if not is_known and state != "damaged" and _ORDER.index(state) > known:
                    registers[f"{folder}/{layout.MANIFEST}"], states[folder] = host, state
        for host, listed in others:
            for folder, names in listed.files.items():
                for name in names if states.get(folder) == "committed" else ():
                    key, there = f"{folder}/{name}", own.files.get(folder, {})
                    is_lacking = name not in there or (0, folder, name) in self._damaged
                    is_sound = (host, folder, name) not in self._damaged
                    if is_lacking and is_sound and layout.is_document(name):
                        documents.setdefault(key, host)
        return tuple(
            [(host, key) for key, host in of.items()] for of in (claims, registers, documents)
        )

    def _put_record(self, key: str, data: bytes, host: int) -> None:
        """Put a record of another host into the leading root; replaces only a damaged one."""
        folder, _, name = key.partition("/")
        self._copied[folder, name] = host
        self._store.make_folder(folder)
        own = self._listed[0]
        is_bad_register = name == layout.MANIFEST and own.registers.get(folder) == "damaged"
        if (0, folder, name) in self._damaged or is_bad_register or own.claims.get(key) == "":
            self._store.put(key, data)
            self._emit("mended", f"{key} was repaired from another host", folder=folder)
            self._damaged.discard((0, folder, name))
        else:
            with suppress(CommitConflict):  # its own stays
                put_once(self._store, key, data)
        if layout.is_document(name):
            own.files.setdefault(folder, {})[name] = len(data)
        elif name == layout.MANIFEST:
            own.registers[folder] = self._state_of(folder)

    # Sources of a candidate

    @property
    def num_damaged(self) -> int:
        """Number of copies that are known to be damaged, and are not used."""
        return len(self._damaged)

    def find_sources(self, entry: Entry, options: LoadOptions) -> FileSources:
        """Return the sources from which all ranks read a checkpoint's files, in the leader.

        Raises:
            LostHost: no source of a file is left; names the host that wrote it.
        """
        folder, manifest = entry.folder, entry.manifest
        gone = dropped(self._store, folder, manifest, entry.marks)
        components = [n for n in manifest.components if n not in gone and options.is_asked(n)]
        names = [*filter(layout.is_index_name, manifest.files)]
        names += chain.from_iterable(manifest.components[n].files for n in components)
        numbers: dict[tuple[int, ...], int] = {}
        of_file: dict[str, int] = {}
        for name in names:
            hosts = self._having(folder, name, manifest.files[name])
            if hosts:
                of_file[name] = numbers.setdefault(hosts, len(numbers))
        rest = [name for name in names if name not in of_file]
        if rest:
            self._expect_remote(entry, rest)
        sources = FileSources(tuple(numbers), of_file, {})
        return msgspec.structs.replace(sources, documents=self._documents(entry, names, sources))

    def _having(self, folder: str, name: str, file: FileEntry) -> tuple[int, ...]:
        """Return the hosts that have a file in its full length, and not damaged."""
        return tuple(
            host
            for host, listed in enumerate(self._listed)
            if listed.files.get(folder, {}).get(name) == file.stored_nbytes
            and (host, folder, name) not in self._damaged
        )

    def _expect_remote(self, entry: Entry, names: Sequence[str]) -> None:
        """Raise `LostHost` unless the remote tier has these files, as far as is known.

        If it cannot be read now, the error is no `LostHost`: the run must not go back for that.
        """
        folder, remote = entry.folder, self._catalog.remote
        try:
            found = remote.read(folder)
            why = "is not there"
        except (FormatError, StoreError) as error:
            if not is_damage(error):
                raise TransientStoreError(
                    self._explain_lost(entry, names, f"cannot be read now: {error}")
                ) from error
            found, why = None, f"cannot be read: {error}"
        is_same = isinstance(found, Manifest) and found.save_id == entry.manifest.save_id
        lost = [n for n in names if not is_same or (_REMOTE, folder, n) in self._damaged]
        if not lost:
            return
        raise LostHost(self._explain_lost(entry, lost, why))

    def _explain_lost(self, entry: Entry, lost: Sequence[str], why: str) -> str:
        wrote = {n: host for host, of_host in entry.manifest.hosts.items() for n in of_host}
        lines = [f"{name}, written by {wrote.get(name, 'the leader')}" for name in lost]
        return (
            f"{entry.folder}: no host of this run ({some_of(self.hosts.names)}) has {len(lost)} of "
            f"its files, and the checkpoint {why} in {self._catalog.remote.store.url}. To use it, "
            "start the run with the disk of the host that wrote them:\n" + listing(lines)
        )

    def _documents(
        self, entry: Entry, names: Sequence[str], sources: FileSources
    ) -> dict[str, bytes]:
        """Return the manifest, the index and the trees that some host lacks."""
        everyone = set(range(len(self.hosts.names)))
        documents: dict[str, bytes] = {}
        states = [listed.registers.get(entry.folder) for listed in self._listed]
        marks = [(host, entry.folder, layout.MANIFEST) for host in range(len(states))]
        self.note_damage(
            [mark for mark, state in zip(marks, states, strict=True) if state == "damaged"]
        )
        if any(state != "committed" for state in states) or not self._damaged.isdisjoint(marks):
            documents[layout.MANIFEST] = encode_manifest(entry.manifest)
        for name in names:
            if layout.is_document(name) and {*sources.hosts_of(name)} != everyone:
                documents[name] = self._read_sound(entry, name, sources)
        return documents

    def _read_sound(self, entry: Entry, name: str, sources: FileSources) -> bytes:
        """Read a document from the leading root, else from the remote tier."""
        file, key = entry.manifest.files[name], f"{entry.folder}/{name}"
        is_here = 0 in sources.hosts_of(name)
        store = self._store if is_here else self._catalog.remote.store
        try:
            data = store.get_whole(key, max_nbytes=file.stored_nbytes, afresh=True)
            if file.stored is None:
                digests = blocks.digest_blocks(data, entry.manifest.block_nbytes)
                if blocks.file_digest(len(data), digests) != file.digest:
                    raise CorruptData(f"{store.url}/{key}: its bytes have changed")
        except (CorruptData, StoreError) as error:
            if is_damage(error):
                self.note_damage([(0 if is_here else _REMOTE, entry.folder, name)])
            raise
        return data

    def list_undecided(self, claim: Claim) -> list[str]:
        """In the leader: list saves of which no host here knows whether they were committed.

        They are newer than the checkpoint that the run has resumed from, and the disk with the
        registers of their session takes no part.
        """
        point = (0, 0) if claim.resumed_from is None else claim.resumed_from.order
        led = {epoch for listed in self._listed for epoch in listed.led}
        known = {folder for listed in self._listed for folder in listed.registers}
        there = {folder for listed in self._listed for folder in listed.files} - known
        names = filter(None, map(layout.parse_attempt, sorted(there)))
        return [
            str(name)
            for name in names
            if point < name.order and name.epoch < claim.epoch and name.epoch not in led
        ]

    def list_lost(self, entry: Entry) -> list[str]:
        """In the leader: list files of a checkpoint that were on no host's disk at the last look.

        None of a checkpoint that was saved since.
        """
        folder, manifest = entry.folder, entry.manifest
        if not any(folder in listed.files for listed in self._listed):
            return []
        gone = {f for name in entry.marks.thinned for f in manifest.components[name].files}
        return [
            name
            for name, file in manifest.files.items()
            if name not in gone and not self._having(folder, name, file)
        ]

    def note_suspects(
        self, rank: int, names: Sequence[str], folder: str, sources: FileSources
    ) -> bool:
        """Exclude copies that a rank found damaged; return whether one is new. In the leader."""
        own = self.hosts.of_rank[rank]
        found: list[tuple[int, str, str]] = []
        for name in names:
            hosts = sources.hosts_of(name)
            is_own = own in hosts or name == layout.MANIFEST
            is_sent = name in sources.documents and 0 in hosts  # as the leader has it
            found.append((own if is_own else 0 if is_sent else _REMOTE, folder, name))
        return self.note_damage(found)

    def note_damage(self, found: Sequence[tuple[int, str, str]]) -> bool:
        """Note damaged files, and warn of them; return whether one was not known."""
        copied = {(self._copied.get(one[1:], 0), *one[1:]) for one in found if one[0] == 0}
        fresh = [one for one in {*found, *copied} if one not in self._damaged]
        for host, folder, name in fresh:
            where = self._catalog.remote.store.url if host == _REMOTE else self.hosts.names[host]
            text = f"{folder}/{name} is damaged or missing on {where}, and read from elsewhere"
            self._emit("warning", text, folder=folder)
        self._damaged.update(fresh)
        return bool(fresh)

    def make_view(self, folder: str, manifest: Manifest, sources: FileSources) -> HostView:
        """Return a store through which this rank reads a checkpoint from these sources."""
        remote = self._catalog.remote.store
        return HostView(self._store, remote, folder, manifest, sources, self.hosts.own)


def _claims_of(listed: _Listed) -> dict[int, str]:
    """Return the nonces of a host's claims by epoch, without those that cannot be read."""
    epochs = {key: layout.parse_writer(key.rpartition("/")[2]) for key in listed.claims}
    return {e: listed.claims[key] for key, e in epochs.items() if e and listed.claims[key]}


class HostView(WrappedStore):
    """Store through which a rank reads one checkpoint: its host's disk, else the remote tier.

    The blocks of a file that only other hosts have come from their ranks; here it has a length.
    """

    def __init__(
        self,
        inner: Store,
        remote: Store,
        folder: str,
        manifest: Manifest,
        sources: FileSources,
        own: int,
    ) -> None:
        super().__init__(inner)
        self._remote = remote
        self._folder = folder
        self._nbytes = {name: file.stored_nbytes for name, file in manifest.files.items()}
        self._sources = sources
        self._own = own
        self.suspects: set[str] = set()
        """Names of files that were read and are damaged, or may be."""
        self._sent = {n: d for n, d in sources.documents.items() if own not in sources.hosts_of(n)}

    def is_own(self, name: str) -> bool:
        """Whether this rank needs no other one to read a file of the checkpoint."""
        return name in self._sent or self._own in self._sources.hosts_of(name)

    @override
    def head(self, key: str) -> ObjectInfo:
        name = self._name_of(key)
        if name is None:
            return self.inner.head(key)
        if name in self._sent:
            return ObjectInfo(key, len(self._sent[name]))
        if not self.is_own(name) and self._sources.hosts_of(name):
            return ObjectInfo(key, self._nbytes[name])
        with self._suspecting(name):
            info = self._store_of(name).head(key)
        if info.nbytes != self._nbytes[name]:
            self.suspects.add(name)
        return info

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        name = self._name_of(key)
        if name is None:
            return self.inner.get(key, start, nbytes)
        document = self._sent.get(name)
        if document is not None:
            return document[start:] if nbytes is None else document[start : start + nbytes]
        with self._suspecting(name):
            return self._store_of(name).get(key, start, nbytes)

    @override
    def read_into(
        self, key: str, start: int, buffer: memoryview, *, seen: Seen = ignore, afresh: bool = False
    ) -> None:
        """Read from the source of the file; with `afresh`, its last bytes were not right."""
        name = self._name_of(key)
        if name is None or name in self._sent:
            super().read_into(key, start, buffer, seen=seen, afresh=afresh)
            return
        if afresh:
            self.suspects.add(name)
        with self._suspecting(name):
            self._store_of(name).read_into(key, start, buffer, seen=seen, afresh=afresh)

    @override
    def cached(self, key: str, start: int, nbytes: int) -> FillCached | None:
        name = self._name_of(key)
        return self.inner.cached(key, start, nbytes) if name and self.is_own(name) else None

    @override
    @contextmanager
    def keeping_open(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.inner.keeping_open())
            stack.enter_context(self._remote.keeping_open())
            yield

    def _name_of(self, key: str) -> str | None:
        """Return the name of a file of the checkpoint; None for all other keys."""
        folder, _, name = key.partition("/")
        return name if folder == self._folder and name in self._nbytes else None

    def _store_of(self, name: str) -> Store:
        return self.inner if self._own in self._sources.hosts_of(name) else self._remote

    @contextmanager
    def _suspecting(self, name: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            self.suspects.add(name)
            raise
