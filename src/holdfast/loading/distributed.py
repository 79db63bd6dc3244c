"""Distributed loads: all ranks must be able to use a candidate before any of them applies it.

The leader searches, and announces each candidate; damage on any rank is damage for all, and a
misfit on any rank changes nothing anywhere (decision 0035). If each host has a disk, the leader
also says from where each file is read (decision 0068).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from typing_extensions import override

from holdfast.errors import (
    CorruptData,
    Disconnected,
    FormatError,
    HoldfastError,
    MismatchError,
    RanksError,
    RanksFailed,
    StoreError,
    TransientStoreError,
    is_damage,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_register
from holdfast.loading.apply import CheckpointApplier
from holdfast.loading.plan import NO_HOLDERS, BlockTurn, FileSources, Runs, Sharing, turns_of
from holdfast.loading.search import CheckpointSearch, LoadCandidate, LoadOptions, Search
from holdfast.ownership.claim import Claim
from holdfast.ownership.owner import Ownership
from holdfast.ranks.coordinator import GRACE_S, Coordinator, RankFailure, Watch, decode_message
from holdfast.root.catalog import Entry
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.store.base import Store

if TYPE_CHECKING:
    from holdfast.loading.hosts import HostRecords, HostView

_FAIL_S = 5.0
"""Limit on saying that this rank failed."""


class _Read(msgspec.Struct, frozen=True, tag="read"):
    """Announcement: all ranks read this checkpoint."""

    folder: str
    is_remote: bool
    """Whether they read the remote tier's copy, as that in the local one is missing or damaged."""
    sources: FileSources | None = None
    """From where they read each file, if each host has a disk."""


class _Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Announcement: all ranks say what their hosts have."""


class _Turns(msgspec.Struct, frozen=True, tag="turns"):
    """Announcement of the blocks that ranks need; each rank computes the turns from it."""

    needs: tuple[Runs, ...]
    of_rank: tuple[int, ...]
    """Number among these of each rank's needs; negative where it has read all."""


class _Apply(msgspec.Struct, frozen=True, tag="apply"):
    """Announcement: all ranks apply what they have read; without a folder the run starts anew."""

    folder: str | None
    claim: Claim | None
    rejected: tuple[tuple[str, str], ...]
    """(folder, reason) of each checkpoint that was skipped."""
    untaken: tuple[str, ...] = ()
    """Leaves of the checkpoint that no rank takes, as a load that is not strict allows."""


_Note: TypeAlias = _Read | _Turns | _Apply | _Meet


class _Call(msgspec.Struct, frozen=True, tag="call"):
    """First post of a rank in a load: what it calls, with the arguments that must be equal."""

    method: str
    arguments: dict[str, str]


_Kind: TypeAlias = Literal["ready", "damaged", "unread", "misfit", "failed"]
"""`unread`: it could not be read this time, which is no damage."""


class _Needs(msgspec.Struct, frozen=True, tag="needs"):
    """Post of a rank: the blocks that it needs now."""

    runs: Runs


class _Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer of a rank: whether it can use a candidate, and why not."""

    kind: _Kind
    reason: str = ""
    untaken: tuple[str, ...] = ()
    """Leaves of the checkpoint that this rank does not take."""
    suspects: tuple[str, ...] = ()
    """Files whose copies this rank has found damaged."""


def _ready(candidate: LoadCandidate) -> _Answer:
    return _Answer("ready", untaken=candidate.prepared.untaken)


class _Unreadable(CorruptData):
    """Error: the manifest of a candidate cannot be read on this host."""


class _Interrupted(Exception):
    """Signal: the leader has announced something else while this rank was reading."""

    def __init__(self, note: _Note) -> None:
        super().__init__()
        self.note = note


def make_applier(
    ranks: Coordinator,
    store: Store,
    owner: Ownership,
    emit: Emitter,
    *,
    timeout_s: float,
    broadcasts: bool = False,
    records: HostRecords | None = None,
) -> CheckpointApplier:
    """Return the `CheckpointApplier` of this rank; with `broadcasts`, each block is read once.

    `records` are of the hosts, if each of them has a disk.
    """
    if ranks.world_size == 1 and records is None:
        return CheckpointApplier(store, owner, emit)
    kind = LeaderLoad if ranks.is_leader else FollowingApplying
    return kind(
        store, owner, emit, ranks, timeout_s=timeout_s, broadcasts=broadcasts, records=records
    )


class _RanksApplying(CheckpointApplier):
    """Common part of a leader's and a follower's loads."""

    def __init__(
        self,
        store: Store,
        owner: Ownership,
        emit: Emitter,
        ranks: Coordinator,
        *,
        timeout_s: float,
        broadcasts: bool,
        records: HostRecords | None,
    ) -> None:
        super().__init__(store, owner, emit)
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._records = records
        self._view: HostView | None = None
        """The files of the candidate, if each host has a disk."""
        self._holders: Mapping[str, Sequence[int]] = NO_HOLDERS
        """Ranks on hosts with a file of the candidate, by name."""
        shares = broadcasts or (records is not None and ranks.world_size > 1)
        self._exchange = ranks.exchange(timeout_s=timeout_s) if shares else None
        self.is_sharing = broadcasts
        self._exchange_end = 0.0
        """When the last exchange of blocks of this load is over, in monotonic seconds; 0: none."""
        self._manager = ranks.number()
        self._num_loads = 0
        self._call = _Call("load", {})
        self._is_applying = False
        self._has_begun = False
        """Whether `apply` was reached in this load."""
        self._num_messages = 0

    @override
    def make_search(self, **parts: Any) -> CheckpointSearch:
        sharing = None
        if self._exchange is not None:
            sharing = Sharing(
                rank=self._ranks.rank,
                exchange=self._exchange,
                agree=self._agree_on_turns,
                timeout_s=self._timeout_s,
                is_own=None if self._records is None else self._is_own,
            )
        elif self._records is not None and self._ranks.world_size > 1:
            raise RanksError(
                f"{self._store.url}: ranks were lost while they exchanged blocks. Start the run "
                "again"
            )
        return self._make_reader(**parts, sharing=sharing)

    def _is_own(self, file: str) -> bool:
        return self._view is not None and self._view.is_own(file)

    def _use_sources(self, folder: str, manifest: Manifest, sources: FileSources) -> Store:
        """Read a candidate from these sources from now on; return it as a store."""
        assert self._records is not None, "each host has a disk"
        hosts = self._records.hosts
        ranks_of = [tuple(map(hosts.ranks_of, of_set)) for of_set in sources.hosts]
        ranks = [sorted(rank for of_host in of for rank in of_host) for of in ranks_of]
        self._holders = {name: ranks[number] for name, number in sources.of_file.items()}
        self._view = self._records.make_view(folder, manifest, sources)
        return self._view

    def _make_reader(self, **parts: Any) -> CheckpointSearch:
        return CheckpointSearch(**parts)

    def _agree_on_turns(self, needs: Runs) -> Sequence[BlockTurn]:
        """Tell the leader what blocks this rank needs; return the turns in which it takes part."""
        raise NotImplementedError

    def _turns(self, note: _Turns) -> Sequence[BlockTurn]:
        self._exchange_end = time.monotonic() + self._timeout_s
        return turns_of(self._ranks.rank, note.needs, note.of_rank, self._holders)

    def _read_for_others(self, candidate: LoadCandidate, note: _Turns) -> None:
        """Take part in turns after this rank has read all blocks that it needs itself."""
        if turns := self._turns(note):
            candidate.reader.read_for_others(turns)

    @override
    @contextmanager
    def counted_load(self, method: str, arguments: Mapping[str, str]) -> Iterator[None]:
        """Count the load in the `with` block; tell the others if it fails before it begins."""
        self._call = _Call(method, dict(arguments))
        self._num_loads += 1
        self._num_messages = 0
        self._is_applying = False
        self._has_begun = False
        self._exchange_end = 0.0
        try:
            yield
        except BaseException as error:
            if not self._has_begun:
                tag = self._tag_of(1 if self._ranks.is_leader else 0)
                self._send_failure(tag, error, "beginning the load")
            if self._exchange_end > 0 and isinstance(error, RanksError):
                self._leave_exchange()
            raise

    def _leave_exchange(self) -> None:
        """Exchange no more blocks, as a failed exchange may have closed connections."""
        self._exchange, self.is_sharing = None, False
        self._emit(
            "warning",
            f"{self._store.url}: ranks were lost while they exchanged blocks. From now on this "
            "rank reads all that it needs by itself, as without broadcast=True, and with HostTiers "
            "it loads nothing",
        )

    @property
    def _message_tag(self) -> str:
        return self._tag_of(self._num_messages)

    def _tag_of(self, message: int) -> str:
        return f"load {self._num_loads} of manager {self._manager}, message {message}"

    def _send_failure(self, tag: str, error: BaseException, phase: str) -> None:
        """Tell the other ranks that this one failed, in place of the message `tag`."""
        # Ranks that this does not reach notice at the deadline.
        with suppress(HoldfastError):
            self._ranks.fail(tag, RankFailure.from_error(error, phase=phase), timeout_s=_FAIL_S)

    def _limit_s(self, error: HoldfastError | None) -> float:
        """Return the limit on a wait for other ranks; after a failed exchange, until its end."""
        if isinstance(error, Disconnected):
            return max(self._exchange_end - time.monotonic(), 0.0)
        return self._timeout_s

    def _make_watch(self) -> Watch:
        """Watch a wait for ranks, of which some may not have called it before message 1."""
        begins = self._tag_of(0) if self._num_messages < 2 else None
        phase = (
            "reading" if self._num_messages > (not self._ranks.is_leader) else "beginning the load"
        )
        return Watch(
            partial(self._emit, "warning"),
            f"{self._call.method}()",
            begins,
            phase="applying" if self._is_applying else phase,
        )

    @override
    def _apply_candidate(self, candidate: LoadCandidate) -> None:
        self._is_applying = True
        super()._apply_candidate(candidate)

    def _post(self, said: _Answer | _Needs | _Call) -> None:
        data = msgspec.msgpack.encode(said)
        self._ranks.post(self._message_tag, data, timeout_s=self._timeout_s)

    def _try_reading(self, candidate: LoadCandidate) -> StoreError | CorruptData | None:
        """Apply a checkpoint; return why a load in place could not read it, or None."""
        try:
            self._apply_candidate(candidate)
        except OpaqueLoadFailed as error:
            cause = candidate.cause_of(error)
            if cause is None:
                raise
            return cause
        return None

    def _answer_of(self, error: BaseException) -> _Answer:
        kind: _Kind = "failed"
        if isinstance(error, MismatchError):
            kind = "misfit"
        elif is_damage(error):
            kind = "damaged"
        elif isinstance(error, TransientStoreError):
            kind = "unread"
        suspects = () if self._view is None else tuple(sorted(self._view.suspects))
        if isinstance(error, _Unreadable):
            suspects = (layout.MANIFEST,)
        return _Answer(kind, str(error) or repr(error), suspects=suspects)


class LeaderLoad(_RanksApplying):
    """The leader's part in loads by all ranks."""

    _refusal: HoldfastError | None = None
    """Error that another rank's answer has raised while this one was reading."""
    _sources: FileSources | None = None
    _has_other_source = False
    """Whether a copy was found damaged of which there may be another one."""

    @override
    def _make_reader(self, **parts: Any) -> CheckpointSearch:
        return _LeadingReader(**parts, loads=self)

    @override
    def apply_checkpoint(self, search: Search, *, claims: bool) -> LoadCandidate | None:
        self._has_begun = True
        try:
            self._post(self._call)
            self._expect_same_calls(self._collect_posts(_Call))
            self.meet()
            found = super().apply_checkpoint(search, claims=claims)
            if found is None:
                self._announce_note(self._apply_note(search))
        except BaseException as error:
            self._send_failure(self._tag_of(self._num_messages + 1), error, "loading")
            raise
        return found

    def _expect_same_calls(self, calls: Sequence[_Call]) -> None:
        """Raise `RanksFailed` if another rank has called something else than this one."""
        own = self._call
        odd: dict[int, RankFailure] = {}
        for rank, call in enumerate(calls):
            names = [
                name
                for name in own.arguments
                if call.method == own.method and call.arguments.get(name) != own.arguments[name]
            ]
            if call.method == own.method and not names:
                continue
            theirs, ours = (
                f"{of.method}({', '.join(f'{name}={of.arguments.get(name)}' for name in names)})"
                for of in (call, own)
            )
            why = f"it calls {theirs}; the leader calls {ours}. All ranks must call the same"
            odd[rank] = RankFailure("calling it", why)
        if odd:
            raise RanksFailed(f"{own.method}(), {self._message_tag}", odd)

    def meet(self) -> None:
        """List the records and files of each host, if each has a disk."""
        if self._records is not None:
            self._announce_note(_Meet())
            self._records.lead()

    def ask_to_read(self, entry: Entry, options: LoadOptions, *, is_remote: bool) -> Store | None:
        """Let all followers read a candidate, from the same tier; return this rank's view of it."""
        view, sources = None, None
        self._refusal, self._has_other_source = None, False
        if self._records is not None:
            known = self._records.num_damaged
            try:
                sources = self._records.find_sources(entry, options)
            finally:
                self._has_other_source = self._records.num_damaged > known
            view = self._use_sources(entry.folder, entry.manifest, sources)
        self._entry, self._sources = entry, sources
        self._announce_note(_Read(entry.folder, is_remote, sources))
        return view

    def has_other_source(self, error: HoldfastError) -> bool:
        """Whether a candidate that proved damaged may be read anew, from other copies."""
        if not self._has_other_source or not is_damage(error):
            return False
        self.meet()
        return True

    def expect_ready(self, entry: Entry, found: LoadCandidate | HoldfastError) -> None:
        """Wait until all ranks have read a candidate; `found` is what this rank has read of it."""
        if isinstance(found, HoldfastError):
            if self._refusal is None:
                self._post(self._answer_of(found))
                self._collected(found)
            raise found
        posts = self._after(_ready(found))
        while any(isinstance(post, _Needs) for post in posts):
            note = self._announce_needs(posts)
            try:
                self._read_for_others(found, note)
            except HoldfastError as error:
                self._post(self._answer_of(error))
                self._collected(error)
                raise
            posts = self._after(_ready(found))
        others = [{*answer.untaken} for answer in posts if isinstance(answer, _Answer)]
        untaken = [path for path in found.prepared.untaken if all(path in of for of in others)]
        if untaken and found.options.strict and not found.options.is_grown:
            raise MismatchError(entry.folder, unexpected=untaken)
        found.prepared.note_untaken(untaken)

    @override
    def _agree_on_turns(self, needs: Runs) -> Sequence[BlockTurn]:
        try:
            posts = self._after(_Needs(needs))
        except HoldfastError as error:
            self._refusal = error
            raise
        return self._turns(self._announce_needs(posts))

    def _after(self, said: _Answer | _Needs) -> list[_Answer | _Needs]:
        """Post an answer or needs; return the posts of all ranks, if none refuses the candidate."""
        self._post(said)
        posts = self._collected()
        for rank, answer in enumerate(posts):
            if isinstance(answer, _Needs):
                continue
            text = f"{self._entry.folder}, on rank {rank}: {answer.reason}"
            if answer.kind == "misfit":
                raise MismatchError(text)
            if answer.kind == "damaged":
                raise CorruptData(text)
            if answer.kind == "unread":
                raise TransientStoreError(text)
            if answer.kind == "failed":
                raise RanksFailed("the load", {rank: RankFailure("reading", answer.reason)})
        return posts

    def _announce_needs(self, posts: Sequence[_Answer | _Needs]) -> _Turns:
        """Announce the blocks that all ranks need."""
        runs = [post.runs if isinstance(post, _Needs) else None for post in posts]
        numbers = {of: n for n, of in enumerate(dict.fromkeys(of for of in runs if of is not None))}
        note = _Turns(tuple(numbers), tuple(-1 if of is None else numbers[of] for of in runs))
        self._announce_note(note)
        return note

    @override
    def _try_apply(self, candidate: LoadCandidate, search: Search) -> bool:
        self._announce_note(self._apply_note(search))
        failure = self._try_reading(candidate)
        folder = candidate.entry.folder
        try:
            if failure is None:
                self._after(_Answer("ready"))
                self._announce_note(self._apply_note(search))
                return True
            self._post(self._answer_of(failure))
            self._collected()
        except (CorruptData, TransientStoreError) as error:
            failure = error
        except BaseException as error:
            self.half_loaded = f"loading {folder} failed on another rank: {error}"
            raise
        self.half_loaded = f"loading {folder} failed: {failure}"
        may_retry = search.record_failure(
            failure, cause=failure, has_other_source=self.has_other_source(failure)
        )
        self._emit_skipped(search)
        if not may_retry:
            raise failure
        return False

    def _apply_note(self, search: Search) -> _Apply:
        claim, candidate = self._owner.claim, search.candidate
        return _Apply(
            None if candidate is None else candidate.entry.folder,
            claim,
            search.rejected,
            () if candidate is None else candidate.prepared.untaken,
        )

    def _announce_note(self, note: _Note) -> None:
        data = msgspec.msgpack.encode(note)
        tag = self._tag_of(self._num_messages + 1)
        self._ranks.announce(tag, data, timeout_s=self._timeout_s)
        self._num_messages += 1

    def _collected(self, error: HoldfastError | None = None) -> list[_Answer | _Needs]:
        """Return the posts of all ranks, after an own `error` or without one."""
        timeout_s = self._limit_s(error)
        if isinstance(error, Disconnected):
            timeout_s += GRACE_S / 2  # the others have ended by then, and still listen
        kind: Any = _Answer | _Needs
        posts: list[_Answer | _Needs] = self._collect_posts(kind, timeout_s)
        if self._records is not None and self._sources is not None:
            for rank, post in enumerate(posts):
                if isinstance(post, _Answer) and post.kind == "damaged":
                    self._has_other_source |= self._records.note_suspects(
                        rank, post.suspects, self._entry.folder, self._sources
                    )
        return posts

    def _collect_posts(self, kind: Any, timeout_s: float | None = None) -> list[Any]:
        tag = self._message_tag
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        posts = self._ranks.collect(tag, timeout_s=limit_s, watch=self._make_watch()).expect_all(
            f"{self._call.method}(), {tag}"
        )
        return [decode_message(post, kind, tag) for post in posts]


@dataclass(slots=True)
class _LeadingReader(CheckpointSearch):
    """Reader whose candidates all ranks must be able to use."""

    loads: LeaderLoad = None  # type: ignore[assignment]  # fields before it have defaults

    @override
    def read_candidate(self, entry: Entry, options: LoadOptions) -> LoadCandidate:
        while True:
            is_remote = self.catalog.find_store(entry.folder) is not self.catalog.store
            try:
                self.view = self.loads.ask_to_read(entry, options, is_remote=is_remote)
                return self._read_jointly(entry, options)
            except HoldfastError as error:
                if not self.loads.has_other_source(error):
                    raise

    def _read_jointly(self, entry: Entry, options: LoadOptions) -> LoadCandidate:
        try:
            candidate = CheckpointSearch.read_candidate(self, entry, options)
        except HoldfastError as error:
            self.loads.expect_ready(entry, error)
            raise
        self.loads.expect_ready(entry, candidate)
        return candidate


class FollowingApplying(_RanksApplying):
    """A follower's part in loads by all ranks."""

    _lost: HoldfastError | None = None
    """Why the leader could not be heard while this rank was reading."""
    _unread: HoldfastError | None = None
    """Why this rank could not read the candidate."""

    @override
    def apply_checkpoint(self, search: Search, *, claims: bool) -> LoadCandidate | None:
        self._has_begun = True
        phase = "reading"
        try:
            self._post(self._call)
            note = self._receive_note()
            while True:
                order = self._read_until_ordered(search, note)
                self._adopt(order, search)
                if order.folder is None:
                    search.candidate = None
                    return None
                candidate = search.candidate
                assert candidate is not None, "the leader applies what all have read"
                phase = "applying"
                note = self._apply_jointly(candidate)
                if isinstance(note, _Apply):
                    return candidate
                phase = "reading"
        except RanksFailed:
            raise
        except BaseException as error:
            self._send_failure(self._message_tag, error, phase)
            raise

    def _read_until_ordered(self, search: Search, note: _Note) -> _Apply:
        """Read the candidates that the leader announces, until it orders to apply the last."""
        answer = _Answer("failed", "the leader has named no checkpoint")
        while not isinstance(note, _Apply):
            try:
                if isinstance(note, _Meet):
                    assert self._records is not None, "each host has a disk"
                    self._records.follow()
                    note = self._receive_note()
                    continue
                if isinstance(note, _Read):
                    self._unread = None
                    answer = self._read_named_by_leader(search, note)
                elif answer.kind == "ready" and search.candidate is not None:
                    answer = self._answer_after_turns(search.candidate, note, answer)
                # again after turns of others, when this rank is done
                note = self._post_and_receive(answer, search)
            except _Interrupted as other:
                note = other.note
        return note

    def _post_and_receive(self, answer: _Answer, search: Search) -> _Note:
        """Post an answer, and wait for the leader's next note, which may be the order to apply."""
        try:
            self._post(answer)
            return self._receive_note(self._limit_s(self._unread))
        except RanksFailed:
            raise  # the leader has not ordered it
        except BaseException as error:
            if answer.kind == "ready" and search.candidate is not None:
                self.half_loaded = (
                    f"other ranks may have loaded {search.candidate.entry.folder}, and rank "
                    f"{self._ranks.rank} has not: {error!r}"
                )
            raise

    def _answer_after_turns(
        self, candidate: LoadCandidate, note: _Turns, answer: _Answer
    ) -> _Answer:
        try:
            self._read_for_others(candidate, note)
        except HoldfastError as error:
            self._unread = error
            return self._answer_of(error)
        return answer

    def _read_named_by_leader(self, search: Search, note: _Read) -> _Answer:
        self._view = None
        try:
            manifest = None
            if note.sources is not None:
                manifest = self._read_manifest(note.folder, note.sources)
                search.use_view(self._use_sources(note.folder, manifest, note.sources))
            search.adopt_choice(note.folder, is_remote=note.is_remote, known=manifest)
        except HoldfastError as error:
            if error is self._lost:
                raise
            self._unread = error
            return self._answer_of(error)
        assert search.candidate is not None, "it was chosen"
        return _ready(search.candidate)

    def _read_manifest(self, folder: str, sources: FileSources) -> Manifest:
        """Return the manifest as the leader has sent it, or as this host has it."""
        data = sources.documents.get(layout.MANIFEST)
        try:
            if data is None:
                data = self._store.get_whole(
                    f"{folder}/{layout.MANIFEST}", max_nbytes=MAX_MANIFEST_NBYTES
                )
            found = decode_register(data, what=f"{folder}/{layout.MANIFEST}")
        except (FormatError, StoreError) as error:
            raise _Unreadable(str(error)) from error
        if not isinstance(found, Manifest):
            raise _Unreadable(f"{folder}: its manifest on this host is not valid")
        return found

    @override
    def _agree_on_turns(self, needs: Runs) -> Sequence[BlockTurn]:
        self._post(_Needs(needs))
        try:
            note = self._receive_note()
        except HoldfastError as error:
            self._lost = error
            raise
        if isinstance(note, _Turns):
            return self._turns(note)
        raise _Interrupted(note)

    def _adopt(self, note: _Apply, search: Search) -> None:
        if note.claim is not None:
            self._owner.adopt(note.claim)
        search.adopt_rejections(note.rejected)
        if search.candidate is not None:
            search.candidate.prepared.note_untaken(note.untaken)

    def _apply_jointly(self, candidate: LoadCandidate) -> _Note:
        """Apply a checkpoint, and wait until all ranks have, or one could not read it."""
        failure = self._try_reading(candidate)
        why = "failed on another rank" if failure is None else f"failed: {failure}"
        try:
            self._post(_Answer("ready") if failure is None else self._answer_of(failure))
            note = self._receive_note()
        except BaseException as error:
            self.half_loaded = f"loading {candidate.entry.folder} {why}: {error}"
            raise
        if not isinstance(note, _Apply):
            self.half_loaded = f"loading {candidate.entry.folder} {why}"
        return note

    def _receive_note(self, timeout_s: float | None = None) -> _Note:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._num_messages += 1
        kind: Any = _Note
        note: _Note = decode_message(
            self._ranks.hear(
                self._message_tag, timeout_s=timeout_s + GRACE_S, watch=self._make_watch()
            ),
            kind,
            self._message_tag,
        )
        return note
