"""Distributed saves: all ranks agree on a plan, write their files, and learn the outcome.

The leader plans, makes the folder and commits; if it is silent, the manifest's key decides
(decision 0035). Both sides send and receive the same messages in the same order. A rank that fails
must report it, or the others wait until the deadline (tests/saving/test_lost_ranks.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from blake3 import blake3
from torch import nn
from typing_extensions import override

from holdfast.errors import (
    DeadlineExceeded,
    Disconnected,
    FormatError,
    HoldfastError,
    NotShared,
    OutcomeUnknown,
    RanksError,
    RanksFailed,
    SealError,
    StoreError,
    UnsupportedState,
    listing,
    some_of,
)
from holdfast.format import blocks, layout
from holdfast.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Aborted,
    Manifest,
    manifest_digest,
)
from holdfast.ownership.owner import Ownership
from holdfast.ownership.tiered import claim_document
from holdfast.ranks.coordinator import (
    GRACE_S,
    LEADER,
    Coordinator,
    RankFailure,
    Watch,
    decode_message,
)
from holdfast.results import SavePhase
from holdfast.root.catalog import Catalog
from holdfast.root.commit import (
    SaveAttempt,
    abort_for_silent_leader,
    check_ownership,
    mark_aborted,
    put_once,
    remove_files,
)
from holdfast.root.documents import read_if_there
from holdfast.saving.links import LinkSource
from holdfast.saving.participants import Gathered, OwnFile, OwnPart, SaveParticipant
from holdfast.saving.probe import ProbeNote, ProbeResult, SaveSize
from holdfast.saving.save_messages import (
    MAX_BASE_NBYTES,
    NAMES_NBYTES,
    WARNING_NBYTES,
    CopiedPost,
    DigestsPost,
    FileNote,
    FilesPost,
    FolderNote,
    HostsNote,
    LeaderNote,
    OutcomeNote,
    PartNote,
    PlanNote,
    QuestionNote,
    RankAnswer,
    RankComparison,
    RankQuestion,
    Verdict,
    WaitNote,
    digest_records,
    digest_warning,
    expand_tree,
    shorten_tree,
)
from holdfast.saving.shares import (
    Difference,
    Form,
    OwnSamples,
    OwnShare,
    Part,
    Plan,
    Share,
    Unchanged,
    decode_form,
    list_files,
)
from holdfast.staging.interfaces import Content, Staged
from holdfast.state.capture.byrank import JOINED, difference, join_by_name, join_rank_trees
from holdfast.state.capture.capture import Captured
from holdfast.state.samples import has_name, synchronized_names
from holdfast.store.base import Store
from holdfast.threads.workers import Workers

if TYPE_CHECKING:
    from holdfast.loading.hosts import HostRecords
    from holdfast.ranks.hosts import Hosts
    from holdfast.saving.partner_copies import PartnerCopies

T = TypeVar("T")

_FAIL_S = 5.0
"""Limit on saying that this rank failed."""
_COMPARED_EVERY = 10
"""Saves of one plan from one comparison of what several ranks hold to the next."""
_NUM_EXPLAINED = 10
"""Most tensors whose differing values are collected for an error."""
_MOST_TOLD = 10
"""Most ranks that are asked in a save for what they record, or for warnings of their scripts."""

_CALL = ("save_class", "epoch", "cycle", "samples", "tokens", "tags")
"""Arguments of a save, besides step, components and tags, that must be equal on all ranks."""
_PHASES = {
    "probe": SavePhase.PREPARING,
    "comparison": SavePhase.DIGESTING,
    "folder": SavePhase.FOLDER,
    "files": SavePhase.WRITING,
    "outcome": SavePhase.COMMITTING,
    "written": SavePhase.WRITING,
    "copy": SavePhase.WRITING,
    "copied": SavePhase.COMMITTING,
}
"""Phase of the ranks whose message of this part is waited for; of all other parts, `SHARING`."""
_EQUAL_ADVICE = (
    "What several ranks have under one name must be equal, bit by bit. Parts of a model, such as "
    "pipeline stages and experts, need names of their own. Replicas must be kept equal, as DDP "
    "does. Or mark the component as holdfast.PerRank, and each rank saves its own"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownPlan:
    """The last plan for some components, as one rank knows it."""

    plan_id: str
    own: OwnShare
    part: Part


class _RanksSave(SaveParticipant):
    """Common part of a leader's and a follower's save."""

    def __init__(self, saves: DistributedSaves, step: int, call: Sequence[object]) -> None:
        super().__init__()
        self._call = tuple(map(repr, call))
        self._recorded: dict[str, str] = {}
        self._warnings: tuple[str, ...] = ()
        self._saves = saves
        self._ranks = saves.ranks
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self.leads = self._ranks.is_leader
        self._step = step
        self._name = saves.next_name()
        self._turn = saves.num_saves
        self._num_loads = saves.num_loads
        self._end = self._ranks.now_s() + saves.timeout_s
        waited_s = saves.timeout_s if saves.may_wait and not self.leads else 0.0
        self.patience_s = 2 * GRACE_S + waited_s
        self._fail_part = "shares"
        """Part of the save in which this rank says next that it failed."""
        self._num_notes = 0
        """Notes that the leader has announced until the plan."""
        self._plan_id = ""
        self._is_agreed = False
        self._components: tuple[str, ...] = ()
        self._standing = ""
        self._own: OwnShare
        self._samples: OwnSamples | None = None
        self._state: Mapping[str, Any] = {}
        self._part: Part | None = None
        """The part of the plan by which this rank stages."""

    @property
    def _plan_part(self) -> str:
        """Part in which the leader announces its next note, and at last the plan."""
        return f"plan {self._num_notes + 1}" if self._num_notes else "plan"

    @property
    def _hosts(self) -> Hosts | None:
        """The hosts, if there are several that have a disk each."""
        records = self._saves.records
        found = None if records is None else records.found
        return found if found is not None and len(found.names) > 1 else None

    def _tag(self, part: str) -> str:
        return f"{self._name}, {part}"

    @property
    def _copies(self) -> PartnerCopies | None:
        """Exchange of second copies with the next host; None: there are none."""
        return None if self._hosts is None else self._saves.copies

    def copy_to_partner(
        self,
        store: Store,
        attempt: SaveAttempt,
        files: Sequence[OwnFile],
        held: Mapping[str, Content],
        writers: Workers,
    ) -> None:
        """In the save thread: write second copies on the next host, if there are to be any."""
        if self._copies is not None and self._hosts is not None:
            self._meet_written()
            self._copies.copy_files(self._hosts, store, attempt.folder, files, held, writers)

    def _meet_written(self) -> None:
        """Wait until all ranks have written their files: a copy cannot wait for one that fails."""

    @override
    def note_arguments(
        self, tags: Sequence[str], metrics: Mapping[str, float], config: Mapping[str, str]
    ) -> None:
        self._call += (repr(sorted(tags)),)
        self._recorded = {f"metrics[{name!r}]": repr(value) for name, value in metrics.items()}
        if self._turn == 1:  # the script's settings are those of the whole run
            self._recorded |= {f"config[{name!r}]": text for name, text in config.items()}

    @override
    def note_warnings(self, texts: Sequence[str]) -> None:
        self._warnings = tuple(texts)

    def _start_deadline(self) -> None:
        """Begin the deadline, as the wait for the save before was not a part of this one."""
        why = self._saves.miscounted
        if why is not None:
            raise RanksError(
                f"{why}. Since then ranks number their saves differently: call resume() or load() "
                "on all of them, or restart them"
            )
        self._end = self._ranks.now_s() + self._saves.timeout_s

    def _left_s(self) -> float:
        return max(self._end - self._ranks.now_s(), 0.0)

    def _make_watch(self, part: str, *, begins: bool = False) -> Watch:
        """Watch a wait for ranks; it `begins` the save if they may not have called it yet."""
        tag = self._tag("shares") if begins else None
        call, phase = f"save of step {self._step}", _PHASES.get(part, SavePhase.SHARING)
        return Watch(self._saves.warn, call, tag, phase=phase)

    def _make_share(self, captured: Captured) -> Share | Unchanged:
        """Return this rank's share, or that it has not changed; sets what is known of it."""
        self._components, self._state = tuple(captured.components), captured.state
        recorded = digest_records(self._recorded)
        warnings = b"".join(map(digest_warning, self._warnings))
        known = self._saves.known.get(self._components)
        if known is not None and known.own.matches_state(captured):
            self._own, self._part = known.own, known.part
            self._plan_id = known.plan_id
            self._own.num_saves += 1
            digests = b""
            if self._own.num_saves % _COMPARED_EVERY == 0:
                digests = self._digest_classes(captured, known.part)
            return Unchanged(
                self._step,
                self._components,
                self._standing,
                self._call,
                recorded,
                warnings,
                digests,
            )
        self._own = self._saves.make_share(captured)
        return msgspec.structs.replace(
            self._own.share,
            step=self._step,
            standing=self._standing,
            call=self._call,
            recorded=recorded,
            warnings=warnings,
        )

    def _digests_post(self, captured: Captured | None) -> DigestsPost:
        if captured is None or self._part is None:
            return DigestsPost(b"")
        return DigestsPost(self._digest_classes(captured, self._part))

    def _digest_classes(self, captured: Captured, part: Part) -> bytes:
        """Sample the boxes that other ranks hold, too; return a digest of each class."""
        self._samples = self._own.sample(captured, part, self._turn)
        return self._samples.digest_classes()

    def _answer(self, question: RankQuestion | None) -> RankAnswer:
        """Answer what the leader asks this rank for; None: nothing."""
        if question is None:
            return RankAnswer()
        samples, rows = self._samples, question.rows
        names: list[str] = []
        if rows:
            modules = [value for value in self._state.values() if isinstance(value, nn.Module)]
            names = synchronized_names(modules)
        return RankAnswer(
            form=self._own.form if question.form else b"",
            recorded=self._recorded if question.recorded else {},
            warnings=self._warnings if question.warnings else (),
            digests={}
            if samples is None
            else {number: samples.digest_class(number) for number in question.classes},
            samples=() if samples is None else tuple(map(samples.get_sample, rows)),
            synchronized=tuple(has_name(self._own.name_of(row)[1], names) for row in rows),
        )

    def _post(self, part: str, message: msgspec.Struct) -> None:
        self._expect_time_left(part)
        data = msgspec.msgpack.encode(message)
        self._ranks.post(self._tag(part), data, timeout_s=self._left_s())

    def _expect_time_left(self, part: str) -> None:
        if self._left_s() == 0:
            raise DeadlineExceeded(
                f"{self._tag(part)} (step {self._step}): save_timeout_s="
                f"{self._saves.timeout_s:g} passed on rank {self.rank} while it waited for "
                "others. All ranks must call the same saves in the same order"
            )

    def _files_post(
        self, files: Sequence[OwnFile], staged: Staged, trees: Mapping[str, bytes]
    ) -> FilesPost:
        by_name = {file.plain: file for file in files}
        assert self._part is not None, "the plan is known"
        planned = list_files(self._components, self._part.files)
        if by_name.keys() != {*planned}:
            raise RanksError(
                f"rank {self.rank}: tensor files planned: {some_of(planned)}; written: "
                f"{some_of([*by_name])}"
            )
        return FilesPost(
            files=tuple(FileNote.of(by_name[plain]) for plain in planned),
            layout=self._own.digest_layout(staged.files),
            trees=dict(trees),
        )

    @override
    def set_known_checkpoint(self, folder: str) -> None:
        self._standing = folder

    @override
    def begin_to_compare(self) -> None:
        self._fail_part = "comparison"

    @override
    def describe_part(self, staged: Staged) -> OwnPart:
        return OwnPart(
            rank=self.rank,
            world_size=self.world_size,
            save=self._name,
            share=msgspec.msgpack.encode(self._own.share),
            form=self._own.form,
            layout=self._own.digest_layout(staged.files),
        )

    def _own_part(self, captured: Captured) -> Captured:
        assert self._part is not None, "the plan is known"
        return self._own.select_written(captured, self._part)

    def _take_part(self, plan_id: str, part: Part) -> None:
        """Take this rank's part of a new plan; `RanksError` if it has staged by another one."""
        staged = self._part
        self._plan_id, self._part = plan_id, part
        if staged is not None and (staged.written, staged.files) != (part.written, part.files):
            raise RanksError(
                f"rank {self.rank}: the tensors of another rank changed after this rank copied its "
                "share of the save. The next save makes a new plan"
            )

    def _keep_plan(self, plan_id: str) -> None:
        """Keep the plan for later saves of the same components."""
        if plan_id != self._plan_id or self._part is None:
            raise RanksError(
                f"rank {self.rank}: the leader uses a plan that this rank does not know. The next "
                "save makes a new plan"
            )
        known = _KnownPlan(plan_id=plan_id, own=self._own, part=self._part)
        self._saves.known[self._components] = known
        self._is_agreed = True

    @override
    def report_failure(self, error: BaseException, phase: SavePhase | None = None) -> None:
        self._saves.known.pop(self._components, None)
        self._saves.record_lost_count(error, self._num_loads)
        self._say_failed(RankFailure.from_error(error, phase=phase or self.progress.phase))

    def _say_failed(self, failure: RankFailure) -> None:
        # Ranks that this does not reach learn it at the deadline, from the register.
        with suppress(HoldfastError):
            self._ranks.fail(self._tag(self._fail_part), failure, timeout_s=_FAIL_S)
            self._drop_posts()

    def _drop_posts(self) -> None:
        """Drop what ranks have posted of a save that failed, and will, in the leader."""


class LeadingSave(_RanksSave):
    """The leader's part in a save by several ranks."""

    _plan: Plan
    _has_planned = False

    def __init__(self, saves: DistributedSaves, step: int, call: Sequence[object]) -> None:
        super().__init__(saves, step, call)
        self._fail_part = "plan"
        self._uncollected = {"shares", "comparison", "files"}
        """Parts in which followers may post or fail unread."""
        self.is_in_doubt = False
        """Whether this rank failed although its manifest may be in the register."""

    @property
    def num_files(self) -> int:
        """Number of tensor files of all ranks, once they are planned."""
        return self._plan.num_files

    @override
    def announce_wait(self) -> None:
        self._announce_note(WaitNote())

    @override
    def propose(self, captured: Captured) -> None:
        self._start_deadline()
        share = self._make_share(captured)
        self._post("shares", share)
        if isinstance(share, Share):
            self._collect_shares(captured)
            self._meet_hosts()

    def _meet_hosts(self) -> None:
        """Learn, before the first save, what each host has."""
        records = self._saves.records
        if records is not None and records.found is None:
            self._announce_note(HostsNote())
            records.lead()
        if self._saves.copies is not None and self._hosts is None and self._turn == 1:
            self._saves.warn(
                "partner=True: all ranks share one host, so there are no second copies"
            )

    @override
    def estimate_size(self, captured: Captured) -> SaveSize:
        trees = sum(len(part.tree) for part in captured.components.values())
        plan = self._saves.plans.get(self._components)
        if plan is None:
            return super().estimate_size(captured)
        nbytes = plan.nbytes + 2 * trees + 200 * plan.num_tensors
        num_files = plan.num_files + len(captured.components) + 2
        return SaveSize(nbytes=nbytes, num_files=num_files, of_ranks=plan.of_ranks)

    @override
    def probe_followers(self, folder: str) -> Sequence[ProbeResult]:
        self._announce_note(ProbeNote(folder))
        self._post("probe", ProbeResult(host=""))
        return self._collect_posts("probe", ProbeResult)[1:]

    @override
    def select_own_part(self, captured: Captured, owner: Ownership) -> Captured:
        if self._has_planned:
            self._announce_plan(owner)
        return self._own_part(captured)

    @override
    def agree_on_plan(self, owner: Ownership) -> None:
        if self._is_agreed:
            return
        self.progress.enter(SavePhase.AGREEING)
        self._collect_shares(None)
        self._announce_plan(owner)

    @override
    def matches_checkpoint(
        self, staged: Staged, roots: Mapping[str, str], recorded: Mapping[str, str]
    ) -> bool:
        own = RankComparison.of(staged, roots, recorded)
        self._post("comparison", own)
        found: list[RankComparison] = self._collect_posts("comparison", RankComparison)
        trees = [self._joined_digest(name, staged, found) for name in staged.kinds]
        files = [layout.tree_file(name) for name in staged.kinds]
        return (
            all(one.is_same for one in found)
            and None not in trees
            and trees == [recorded.get(file) for file in files]
            and len(recorded) == len(files) + sum(one.files for one in found)
        )

    def _joined_digest(
        self, name: str, staged: Staged, found: Sequence[RankComparison]
    ) -> str | None:
        """Return the digest of the tree of all ranks; None if they cannot be joined."""
        digests = {one.digests.get(name) for one in found}
        if name not in staged.by_rank and len(digests) == 1:
            return digests.pop()
        trees = [one.trees[name] for one in found if name in one.trees]
        if len(trees) < len(found):
            return None  # that of one rank is in the checkpoint, and that of another is not
        try:
            tree = self.join_trees(name, staged, trees)
        except UnsupportedState:
            return None
        return blocks.file_digest(len(tree), blocks.digest_blocks(tree))

    @override
    def announce_verdict(self, *, is_unchanged: bool) -> None:
        self._announce_part("comparison", Verdict(is_unchanged))
        self._fail_part = "folder"

    def announce_folder(
        self, store: Store, attempt: SaveAttempt, staged: Staged, links: LinkSource
    ) -> None:
        """Tell the followers where to write. In the save thread."""
        self._trees = trees = staged.trees
        self._bases = {
            name: trees[name] for name in staged.by_rank if len(trees[name]) <= MAX_BASE_NBYTES
        }
        digests = {name: blake3(tree).digest() for name, tree in trees.items()}
        claim = b"" if self._hosts is None else claim_document(store, attempt.name.epoch)
        note = FolderNote(attempt.folder, attempt.save_id, digests, self._bases, claim, links)
        self._announce_part("folder", note)
        self._fail_part = "outcome" if self._copies is None else "copy"
        if self._copies is not None:
            self._uncollected.add("written")

    @override
    def _meet_written(self) -> None:
        self._post("written", CopiedPost())
        self._collect_posts("written", CopiedPost)
        self._announce_part("copy", CopiedPost())
        self._fail_part = "outcome"

    def collect_written(self, files: Sequence[OwnFile], staged: Staged) -> Gathered:
        """Collect what all ranks have written, and join their trees. In the save thread."""
        self._post("files", self._files_post(files, staged, {}))
        posts: list[FilesPost] = self._collect_posts("files", FilesPost)
        files_of = [self._expand_files(rank, post.files) for rank, post in enumerate(posts)]
        trees = {
            name: self.join_trees(name, staged, [self._tree_of(post, name) for post in posts])
            for name in staged.kinds
        }
        by_host: dict[int, list[str]] = {}
        hosts = self._hosts
        for rank, of_rank in enumerate(files_of):
            host = -1 if hosts is None else hosts.of_rank[rank]
            by_host.setdefault(host, []).extend(file.name for file in of_rank)
        names = () if hosts is None else hosts.names
        return Gathered(
            files=[file for of_rank in files_of for file in of_rank],
            trees=trees,
            tables=self._plan.tables(
                [post.layout for post in posts],
                [[file.entry.nbytes for file in of_rank] for of_rank in files_of],
            ),
            writers=self._plan.writers,
            hosts={name: tuple(by_host[host]) for host, name in enumerate(names)},
            elsewhere=frozenset(name for host in by_host if host > 0 for name in by_host[host]),
        )

    def _tree_of(self, post: FilesPost, name: str) -> bytes:
        short, base = post.trees.get(name), self._bases.get(name, b"")
        return self._trees[name] if short is None else expand_tree(short, base)

    def _expand_files(self, rank: int, files: Sequence[FileNote]) -> list[OwnFile]:
        """Make the records of the files of one rank from its post and the plan."""
        names = self._plan.names_of(rank)
        if len(names) != len(files):
            failure = RankFailure(
                SavePhase.WRITING, f"it wrote {len(files)} tensor files, of {len(names)} planned"
            )
            raise RanksFailed(self._name, {rank: failure})
        return [file.expand(name) for file, name in zip(files, names, strict=True)]

    def succeed(self, store: Store, attempt: SaveAttempt, manifest: Manifest) -> None:
        """Tell the followers that the manifest was put. In the save thread.

        Hosts with a disk each then copy it, and this waits for them, so that the checkpoint is
        still found if this host is lost.
        """
        hosts, documents = self._hosts, dict[str, bytes]()
        doubt: RankFailure | None = None
        # The checkpoint stands, whether or not they hear of it.
        with suppress(HoldfastError):
            if hosts is not None:
                names = [name for name in manifest.files if layout.is_document(name)]
                keys = {name: f"{attempt.folder}/{name}" for name in (*names, layout.MANIFEST)}
                try:
                    documents = {name: store.get(key) for name, key in keys.items()}
                except StoreError as error:
                    doubt = RankFailure.from_error(error, phase=SavePhase.COMMITTING)
            note = OutcomeNote(doubt, documents, attempt.digest, manifest.nbytes)
            self._announce_part("outcome", note)
        if hosts is not None and doubt is None:
            self._await_copies(attempt, hosts)

    def _await_copies(self, attempt: SaveAttempt, hosts: Hosts) -> None:
        """Wait until all hosts have the documents of a committed save, else warn."""
        tag, problems = self._tag("copied"), dict[int, str]()
        try:
            self._post("copied", CopiedPost())
            watch = self._make_watch("copied")
            found = self._ranks.collect(tag, timeout_s=max(self._left_s(), _FAIL_S), watch=watch)
            for rank, data in found.came.items():
                problems[rank] = decode_message(data, CopiedPost, tag).problem
            problems |= {rank: failure.reason for rank, failure in found.failed.items()}
            problems |= dict.fromkeys(found.silent, "no answer")
        except HoldfastError as error:
            problems[self.rank] = str(error)
        texts = [
            f"{hosts.names[hosts.of_rank[rank]]} (rank {rank}): {problem}"
            for rank, problem in sorted(problems.items())
            if problem
        ]
        if texts:
            self._saves.warn(
                f"{attempt.folder} is committed, and some hosts may not have its index and "
                f"manifest:\n{listing(texts)}\nUntil it is uploaded it is lost with the leader's "
                "host"
            )

    @override
    def report_failure(self, error: BaseException, phase: SavePhase | None = None) -> None:
        if not self.is_in_doubt:
            super().report_failure(error, phase)
            return
        self._saves.known.pop(self._components, None)
        with suppress(HoldfastError):
            doubt = RankFailure.from_error(error, phase=phase or self.progress.phase)
            self._announce_part("outcome", OutcomeNote(doubt=doubt))

    @override
    def _drop_posts(self) -> None:
        for part in sorted(self._uncollected):
            self._uncollected.discard(part)
            self._ranks.collect(self._tag(part), timeout_s=0.0)

    @staticmethod
    def join_trees(name: str, staged: Staged, trees: Sequence[bytes]) -> bytes:
        """Join the trees of all ranks, or raise `UnsupportedState`."""
        if name in staged.by_rank:
            return join_rank_trees(trees)
        if staged.kinds[name] in JOINED:
            return join_by_name(name, staged.kinds[name], trees)
        odd = [rank for rank, tree in enumerate(trees) if tree != trees[LEADER]]
        if not odd:
            return trees[LEADER]
        others = f" (and {len(odd) - 1} more)" if len(odd) > 1 else ""
        why = (
            f"the leader and rank {odd[0]}{others} differ: "
            f"{difference(trees[LEADER], trees[odd[0]])}. Only generators, and the parameters in "
            "modules and optimizers, may differ by rank; make it equal on all, or mark it as "
            "holdfast.PerRank"
        )
        raise UnsupportedState([(name, why)])

    def _collect_shares(self, captured: Captured | None) -> None:
        """Collect shares, and plan if one has changed; `captured` if this rank has not staged."""
        self._has_planned = True
        shares: list[Share | Unchanged] = self._collect_posts("shares", Share | Unchanged)
        odd: dict[int, RankFailure] = {}
        for rank, share in enumerate(shares):
            theirs, ours = (
                {
                    "step": f"{of_step}",
                    "components": ", ".join(components),
                    **dict(zip(_CALL, call, strict=False)),
                }
                for of_step, components, call in (
                    (share.step, share.components, share.call),
                    (self._step, self._components, self._call),
                )
            )
            differing = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
            if differing:
                has, leader_has = (
                    ", ".join(f"{name}={of.get(name)}" for name in differing)
                    for of in (theirs, ours)
                )
                why = (
                    f"it saves with {has}; the leader with {leader_has}. All ranks must save alike"
                )
                odd[rank] = RankFailure(SavePhase.SHARING, why)
        if odd:
            raise RanksFailed(self._name, odd)
        self._ask_for_texts(shares)
        # Else some would wait for a comparison that others do not begin.
        self.compares = all(share.standing == self._standing for share in shares)
        digests = [share.digests if isinstance(share, Unchanged) else b"" for share in shares]
        if self._replan(shares):
            digests = self._announce_parts(captured, shares)
        self._expect_equal(digests)

    def _ask_for_texts(self, shares: Sequence[Share | Unchanged]) -> None:
        """Ask for forms that are not known, and for texts of which to warn."""
        saves, asked = self._saves, dict[int, RankQuestion]()
        logged = {digest_warning(text) for text in (*saves.logged, *self._warnings)}
        records = {digest_records(self._recorded)}
        form = self._own.share.form
        if form not in saves.forms:
            saves.forms[form] = decode_form(self._own.form, form)
        forms = {*saves.forms}
        num_told = num_untold = 0
        for rank, share in enumerate(shares):
            warnings = {
                share.warnings[at : at + WARNING_NBYTES]
                for at in range(0, len(share.warnings), WARNING_NBYTES)
            }
            question = RankQuestion(
                form=isinstance(share, Share) and share.form not in forms,
                recorded=share.recorded not in records and self._differs(share.recorded),
                warnings=not warnings <= logged,
            )
            if isinstance(share, Share):
                forms.add(share.form)
            records.add(share.recorded)
            logged |= warnings
            if question.recorded or question.warnings:
                num_told += 1
                if num_told > _MOST_TOLD:
                    num_untold += 1
                    question = RankQuestion(form=question.form)
            if question != RankQuestion():
                asked[rank] = question
        if num_untold:
            saves.warn(
                f"save of step {self._step}: metrics, settings or warnings of {num_untold} more "
                f"ranks differ from those of rank {LEADER}, and are not logged"
            )
        answers = self._ask(asked) if asked else {}
        for rank, answer in answers.items():
            if asked[rank].form:
                share = shares[rank]
                assert isinstance(share, Share), "it has a form"
                saves.forms[share.form] = decode_form(answer.form, share.form)
            if asked[rank].recorded:
                saves.recorded[digest_records(answer.recorded)[:NAMES_NBYTES]] = tuple(
                    sorted(answer.recorded)
                )
        self._compare_records({r: one.recorded for r, one in answers.items() if asked[r].recorded})
        self._log_warnings({rank: one.warnings for rank, one in answers.items()})

    def _differs(self, recorded: bytes) -> bool:
        """Whether a rank may record a value of which was not warned yet."""
        names = self._saves.recorded.get(recorded[:NAMES_NBYTES])
        if not recorded or names is None:
            return bool(recorded)
        return any(
            digest_records({name: self._recorded.get(name, "")})[NAMES_NBYTES:]
            != recorded[place : place + NAMES_NBYTES]
            for number, name in enumerate(names, 1)
            if name not in self._saves.differing
            for place in [number * NAMES_NBYTES]
        )

    def _ask(self, asked: Mapping[int, RankQuestion]) -> dict[int, RankAnswer]:
        """Ask some ranks, and collect their answers."""
        part = f"answers {self._num_notes + 1}"
        self._uncollected.add(part)
        self._announce_note(QuestionNote(dict(asked)))
        self._post(part, self._answer(asked.get(self.rank)))
        answers: list[RankAnswer] = self._collect_posts(part, RankAnswer)
        return {rank: answers[rank] for rank in asked}

    def _compare_records(self, others: Mapping[int, Mapping[str, str]]) -> None:
        """Warn, once for each, of metrics and settings that differ by rank."""
        own, texts = self._recorded, list[str]()
        for name in dict.fromkeys(name for one in others.values() for name in one):
            ranks = {own.get(name, "none"): LEADER}  # the first rank with each value
            for rank, one in others.items():
                if name in one:
                    ranks.setdefault(one[name], rank)
            if len(ranks) > 1 and name not in self._saves.differing:
                self._saves.differing.add(name)
                values = [f"{text} on rank {rank}" for text, rank in ranks.items()]
                texts.append(f"{name} is {some_of(values, 4)}")
        if texts:
            self._saves.warn(
                f"save of step {self._step}: ranks have different values, and checkpoints record "
                f"those of rank {LEADER}:\n{listing(texts)}\nReduce metrics before the save, "
                "for instance with torch.distributed.all_reduce. Leave out of config "
                "what differs on purpose"
            )

    def _log_warnings(self, texts: Mapping[int, Sequence[str]]) -> None:
        """Log the warnings of other ranks that this one has not logged, each once."""
        logged = self._saves.logged
        logged.update(self._warnings)
        for rank, of_rank in texts.items():
            for text in of_rank:
                if text not in logged:
                    logged.add(text)
                    self._saves.warn(f"rank {rank}: {text}")

    def _replan(self, shares: Sequence[Share | Unchanged]) -> bool:
        """Plan anew if a share has changed; return whether ranks need their parts."""
        saves = self._saves
        known = saves.shares.get(self._components)
        new = [share for share in shares if isinstance(share, Share)]
        if not new:
            self._plan = saves.plans[self._components]
            return False
        if known is None and len(new) < len(shares):
            lacking = next(r for r, share in enumerate(shares) if isinstance(share, Unchanged))
            why = "it uses a plan that the leader does not have; its next save sends all"
            raise RanksFailed(self._name, {lacking: RankFailure(SavePhase.SHARING, why)})
        whole = [
            _without_call(share) if isinstance(share, Share) else (known or [])[rank]
            for rank, share in enumerate(shares)
        ]
        if whole != known or self._components not in saves.plans:
            saves.plans.pop(self._components, None)
            self._plan = Plan(whole, {share.form: saves.forms[share.form] for share in whole})
            saves.shares[self._components] = whole
            saves.plans[self._components] = self._plan
            used = {share.form for of_all in saves.shares.values() for share in of_all}
            saves.forms = {form: saves.forms[form] for form in used}
        self._plan = saves.plans[self._components]
        return True

    def _announce_parts(
        self, captured: Captured | None, shares: Sequence[Share | Unchanged]
    ) -> list[bytes]:
        """Give each rank its part of a new plan; return the digests of the ranks' classes."""
        parts, plan_id = self._plan.make_parts(), os.urandom(16).hex()
        is_compared = self._plan.has_classes
        messages = [msgspec.msgpack.encode(PartNote(plan_id, part, is_compared)) for part in parts]
        self._uncollected.add("digests")
        self._ranks.announce_each(
            self._tag(self._plan_part), messages, timeout_s=max(self._left_s(), _FAIL_S)
        )
        self._num_notes += 1
        self._fail_part = self._plan_part
        self._take_part(plan_id, parts[self.rank])
        if not is_compared:
            self._uncollected.discard("digests")
            return [b""] * self.world_size
        self._post("digests", self._digests_post(captured))
        posts: list[DigestsPost] = self._collect_posts("digests", DigestsPost)
        return [post.digests for post in posts]

    def _expect_equal(self, digests: Sequence[bytes]) -> None:
        """Expect that what several ranks hold is equal, as far as they have sampled it."""
        skipped = self._saves.synchronized
        classes = self._plan.find_differing_classes(digests, skipped)
        if not classes:
            return
        questions = {rank: RankQuestion(classes=tuple(of)) for rank, of in classes.items()}
        answers = {rank: one.digests for rank, one in self._ask(questions).items()}
        found = [one for one in self._plan.differing(answers) if one.leaf[:2] not in skipped]
        # All buffers are asked for if only buffers differ: most of them turn out to be no error.
        found.sort(key=lambda one: one.is_buffer)
        asked = found if found and found[0].is_buffer else found[:_NUM_EXPLAINED]
        if not asked:
            return
        odd: list[tuple[str, str]] = []
        for one, (first, other) in zip(asked, self._ask_for_values(asked), strict=True):
            if one.is_buffer and first.synchronized[0]:
                skipped.add(one.leaf[:2])
            else:
                odd.append(one.explain(first.samples[0], other.samples[0], self._turn))
        if odd:
            path, reason = odd[0]
            rest = [one.path_and_ranks for one in found[len(asked) :]]
            raise UnsupportedState([(path, f"{reason}. {_EQUAL_ADVICE}"), *odd[1:], *rest])

    def _ask_for_values(self, asked: Sequence[Difference]) -> list[tuple[RankAnswer, RankAnswer]]:
        """Ask the first two holders of each box for its values."""
        rows: dict[int, list[int]] = {}
        for one in asked:
            for rank, row in one.holders[:2]:
                rows.setdefault(rank, []).append(row)
        found = self._ask({rank: RankQuestion(rows=tuple(of)) for rank, of in rows.items()})
        answers = {
            (rank, row): RankAnswer(samples=(one.samples[n],), synchronized=(one.synchronized[n],))
            for rank, one in found.items()
            for n, row in enumerate(rows[rank])
        }
        return [(answers[one.holders[0]], answers[one.holders[1]]) for one in asked]

    def _announce_plan(self, owner: Ownership) -> None:
        claim = owner.claim
        assert claim is not None, "the leader has claimed the run"
        self._announce_part(self._plan_part, PlanNote(self._plan_id, claim, self.compares))
        self._keep_plan(self._plan_id)
        self._fail_part = "folder"

    def _announce_note(self, message: msgspec.Struct) -> None:
        """Announce what followers answer before they hear the plan."""
        self._announce_part(self._plan_part, message)
        self._num_notes += 1
        self._fail_part = self._plan_part

    def _announce_part(self, part: str, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self._ranks.announce(self._tag(part), data, timeout_s=max(self._left_s(), _FAIL_S))

    def _collect_posts(self, part: str, kind: Any) -> list[Any]:
        tag = self._tag(part)
        self._uncollected.discard(part)
        watch = self._make_watch(part, begins=part == "shares")
        posts = self._ranks.collect(tag, timeout_s=self._left_s(), watch=watch).expect_all(
            f"{tag} (step {self._step})"
        )
        return [decode_message(post, kind, tag) for post in posts]


class FollowingSave(_RanksSave):
    """A follower's part in a save by several ranks."""

    _has_waited = False
    """Whether the leader has said that it waits for uploads, and nothing since."""
    _heard: OutcomeNote | None = None
    """The outcome, if it is not in doubt."""

    @override
    def propose(self, captured: Captured) -> None:
        self._start_deadline()
        share = self._make_share(captured)
        self._post("shares", share)
        self._fail_part = "files"

    @override
    def select_own_part(self, captured: Captured, owner: Ownership) -> Captured:
        if self._part is None:
            self._hear_plan(owner, captured)
        return self._own_part(captured)

    @override
    def agree_on_plan(self, owner: Ownership) -> None:
        if not self._is_agreed:
            self.progress.enter(SavePhase.AGREEING)
            self._hear_plan(owner, None)

    @override
    def matches_checkpoint(
        self, staged: Staged, roots: Mapping[str, str], recorded: Mapping[str, str]
    ) -> bool:
        self._post("comparison", RankComparison.of(staged, roots, recorded))
        self._fail_part = "files"
        return self._receive_part("comparison", Verdict).is_unchanged

    @property
    def is_apart(self) -> bool:
        """Whether this rank's host has a disk of its own, other than the leader's."""
        return self._hosts is not None and not self._hosts.is_leading

    def hear_folder(self, store: Store) -> SaveAttempt:
        """Wait until the leader has made the folder. In the save thread."""
        self.progress.enter(SavePhase.FOLDER)
        note = self._receive_part("folder", FolderNote)
        self._trees, self._bases, self.links = note.trees, note.bases, note.links
        name = layout.parse_attempt(note.folder)
        if name is None:
            raise FormatError(f"{self._name}: {note.folder!r} is no folder of a save")
        if self.is_apart:
            # First the claim, which proves whose the files are.
            store.make_folder(layout.WRITERS)
            put_once(store, layout.writer_key(name.epoch), note.claim)
            check_ownership(store, name.epoch, committed=False)
            store.make_folder(note.folder)
        if self._copies is not None:
            self._fail_part = "written"
        return SaveAttempt(name=name, save_id=note.save_id)

    @override
    def _meet_written(self) -> None:
        self._post("written", CopiedPost())
        self._receive_part("copy", CopiedPost)
        self._fail_part = "files"

    def remove_host_files(self, store: Store, attempt: SaveAttempt, error: Exception) -> None:
        """Remove the files of a save that certainly fails from this host's own disk."""
        if not self.is_apart or self._hosts is None or not self._hosts.is_host_leader:
            return
        with suppress(HoldfastError):  # gc removes what is left
            if mark_aborted(store, attempt.folder, by="the leader", reason=str(error)[:500]):
                remove_files(store, attempt.folder, whole=False)

    def raise_leader_failure(self, store: Store, attempt: SaveAttempt) -> None:
        """Raise why the leader has given up, if it has: it removes what others still write."""
        with suppress(FormatError, SealError, StoreError):
            store.refresh_folder(attempt.folder)
            if isinstance(Catalog(store).read(attempt.folder), Aborted):
                self._hear_outcome()

    def post_files(self, files: Sequence[OwnFile], staged: Staged) -> None:
        """Tell the leader what this rank has written. In the save thread."""
        differing = {
            name: shorten_tree(tree, self._bases.get(name, b""))
            for name, tree in staged.trees.items()
            if blake3(tree).digest() != self._trees[name]
        }
        message = self._files_post(files, staged, differing)
        self._expect_time_left("files")
        try:
            self._post("files", message)
        except (DeadlineExceeded, Disconnected) as error:
            # The post may still arrive, and the leader commit: only the outcome is certain.
            self._say_failed(RankFailure.from_error(error, phase=self.progress.phase))

    def wait_for_outcome(self, store: Store, attempt: SaveAttempt) -> Manifest:
        """In the save thread: wait for the outcome; a silent leader's is in the register."""
        self.progress.enter(SavePhase.COMMITTING, attempt.folder)
        if self.is_apart:
            return self._outcome_apart(store, attempt)
        error = self._hear_outcome()
        if error is not None and not abort_for_silent_leader(
            store, attempt, by=f"rank {self._ranks.rank}", reason=str(error)
        ):
            raise error
        store.refresh_folder(attempt.folder)
        try:
            found = self._read_manifest(store, attempt)
        except (FormatError, SealError, StoreError) as unread:
            raise OutcomeUnknown(
                f"{store.url}/{attempt.folder}: the leader has committed it, and this rank cannot "
                f"read its manifest: {unread}"
            ) from unread
        if found is None:
            check_ownership(store, attempt.name.epoch, committed=True)  # who deletes it has claimed
            raise NotShared(
                f"{store.url}/{attempt.folder}: rank {self._ranks.rank} does not see the manifest "
                f"that the leader has put. {NotShared.ADVICE}"
            )
        if error is None and self._hosts is not None:
            self._post_copied("")
        return found

    def _read_manifest(self, store: Store, attempt: SaveAttempt) -> Manifest | None:
        """Read the manifest that the leader has put; None if it is not there."""
        heard, key = self._heard, attempt.manifest_key
        if heard is not None:
            found = read_if_there(store, key, heard.decode_manifest, max_nbytes=MAX_MANIFEST_NBYTES)
            attempt.digest = heard.digest
            if found is not None:
                return found
        register = Catalog(store).read(attempt.folder)
        if heard or not isinstance(register, Manifest) or register.save_id != attempt.save_id:
            return None
        attempt.digest = manifest_digest(register)
        return register

    def _outcome_apart(self, store: Store, attempt: SaveAttempt) -> Manifest:
        """Wait for the outcome on another host, which cannot read the register."""
        hosts = self._hosts
        assert hosts is not None, "there are several hosts"
        try:
            error = self._hear_outcome()
        except RanksFailed as failure:
            self.remove_host_files(store, attempt, failure)
            raise
        if error is not None:
            raise OutcomeUnknown(
                f"{attempt.folder}: rank {self._ranks.rank} does not know the outcome of the save, "
                f"and cannot read the leader's disk on {hosts.names[0]}: {error}. The next resume "
                "uses the checkpoint if it is there"
            ) from error
        assert self._heard is not None, "it is not in doubt"
        problem, documents, data = "", self._heard.documents, self._heard.documents[layout.MANIFEST]
        found = self._heard.decode_manifest(data, what=f"the manifest of {attempt.folder}")
        attempt.digest = self._heard.digest
        if found is None or found.save_id != attempt.save_id:
            raise FormatError(f"{attempt.folder}: the leader sent another save's manifest")
        if hosts.is_host_leader:
            try:
                for name, document in documents.items():
                    if name != layout.MANIFEST:
                        store.put(f"{attempt.folder}/{name}", document)
                put_once(store, attempt.manifest_key, data)
            except HoldfastError as unwritten:
                problem = str(unwritten)
        self._post_copied(problem)
        return found

    def _post_copied(self, problem: str) -> None:
        with suppress(HoldfastError):  # the leader warns
            self._post("copied", CopiedPost(problem))

    def _hear_outcome(self) -> RanksError | None:
        """Hear the outcome; return why it is in doubt, or None after a commit."""
        tag = self._tag("outcome")
        try:
            heard = self._ranks.hear(
                tag, timeout_s=self._left_s() + GRACE_S, watch=self._make_watch("outcome")
            )
        except RanksFailed:
            raise
        except RanksError as error:
            return error
        note = decode_message(heard, OutcomeNote, tag)
        if note.doubt is not None:
            return RanksFailed(tag, {LEADER: note.doubt})
        self._heard = note
        return None

    def _hear_plan(self, owner: Ownership, captured: Captured | None) -> None:
        """Answer the leader's notes until it announces the plan.

        `captured` if this rank has not staged it: else its values may have changed since.
        """
        while not isinstance(note := self._receive_note(), PlanNote):
            fail_part = self._fail_part
            if isinstance(note, WaitNote):
                self._end = self._ranks.now_s() + 2 * self._saves.timeout_s
                continue
            if isinstance(note, ProbeNote):
                self._fail_part = "probe"
                self._post("probe", self._saves.look(note.folder))
            elif isinstance(note, HostsNote):
                assert self._saves.records is not None, "each host has a disk"
                self._saves.records.follow()
            elif isinstance(note, QuestionNote):
                self._fail_part = f"answers {self._num_notes}"
                self._post(self._fail_part, self._answer(note.asked.get(self.rank)))
            else:
                self._fail_part = "digests" if note.is_compared else fail_part
                self._take_part(note.plan_id, note.part)
                if note.is_compared:
                    self._post("digests", self._digests_post(captured))
            self._fail_part = fail_part
        self.compares = note.compares
        owner.adopt(note.claim)
        self._keep_plan(note.plan_id)

    def _receive_note(self) -> LeaderNote:
        kind: Any = LeaderNote
        note: LeaderNote = self._receive_part(self._plan_part, kind)
        if self._has_waited:
            self._end = self._ranks.now_s() + self._saves.timeout_s
        self._has_waited = isinstance(note, WaitNote)
        self._num_notes += 1
        return note

    def _receive_part(self, part: str, kind: type[T]) -> T:
        tag = self._tag(part)
        watch = self._make_watch(part, begins=part == "plan")
        heard = self._ranks.hear(tag, timeout_s=self._left_s() + GRACE_S, watch=watch)
        return decode_message(heard, kind, tag)


def _without_call(share: Share) -> Share:
    """Return what a plan is made from, which may be equal in the next save."""
    return msgspec.structs.replace(share, step=0, standing="", call=(), recorded=b"", warnings=b"")


class DistributedSaves:
    """Makes the saves of one manager; keeps what its ranks agreed on in earlier ones."""

    records: HostRecords | None = None
    """What the hosts have, if each has a disk."""
    copies: PartnerCopies | None = None
    """Exchange of second copies between hosts; None: there are none."""
    num_loads = 0
    _count = 0
    _is_due_known = _is_due = False
    """Whether this call of `maybe_save` has found out that a save is due, or that none is."""
    miscounted: str | None = None
    """Why some rank may number its saves otherwise than the others, until a load by all ranks;
    None: none does, as far as this rank knows."""
    _refused: BaseException | None = None
    """Error of a `start_joint_save` that raised on this rank before its step was recorded: this
    rank may find other saves due than the others."""

    def __init__(
        self,
        ranks: Coordinator,
        *,
        timeout_s: float,
        look: Callable[[str], ProbeResult],
        warn: Callable[[str], object],
        may_wait: bool = False,
    ) -> None:
        """Set up; a follower calls `look` to try the root in a scratch folder.

        `warn` gets the texts of warnings. `may_wait`: the leader may wait for uploads before a
        save, as long as for a save.
        """
        self.ranks = ranks
        self.look = look
        self.warn = warn
        self.timeout_s = timeout_s
        self.may_wait = may_wait
        self.known: dict[tuple[str, ...], _KnownPlan] = {}
        self.shares: dict[tuple[str, ...], list[Share]] = {}
        """The leader's: shares of all ranks behind its last plan, by components."""
        self.plans: dict[tuple[str, ...], Plan] = {}
        self.forms: dict[bytes, Form] = {}
        """The leader's: forms of these shares, by digest."""
        self.recorded: dict[bytes, tuple[str, ...]] = {}
        """The leader's: names of metrics and settings of ranks, sorted, by their digest."""
        self.differing: set[str] = set()
        """The leader's: metrics and settings of which it has warned that they differ by rank."""
        self.logged: set[str] = set()
        """The leader's: warnings of scripts that it has logged, of any rank."""
        self.synchronized: set[tuple[str, str]] = set()
        """The leader's: component and key of buffers that DDP copies from rank 0 to all others."""
        self._manager = ranks.number()

    def start_joint_save(self, step: int, *call: object) -> SaveParticipant:
        """In the training thread: begin a save; all ranks begin their n-th at the same point."""
        kind = LeadingSave if self.ranks.is_leader else FollowingSave
        return kind(self, step, call)

    def make_share(self, captured: Captured) -> OwnShare:
        """Make the share of this rank in a save of new leaves or boxes."""
        return OwnShare(captured, self.ranks.rank, socket.gethostname())

    def next_name(self) -> str:
        """Return the name of the next save, which all ranks count alike."""
        self._count += 1
        after = f" after load {self.num_loads}" if self.num_loads else ""
        return f"save {self._count}{after} of manager {self._manager}"

    @property
    def num_saves(self) -> int:
        """Number of the last save, which all ranks count alike."""
        return self._count

    def restart_count(self) -> None:
        """Number the saves from 1 again, at the beginning of a load by all ranks."""
        self.num_loads += 1
        self._count = 0
        self.miscounted = self._refused = None

    def record_lost_count(self, error: BaseException, num_loads: int) -> None:
        """Record that a rank has lost count, so that nobody waits for its part in later saves."""
        if not isinstance(error, RanksFailed) or num_loads != self.num_loads:
            return
        for rank, (phase, reason) in error.failed.items():
            if phase in (SavePhase.UNCOUNTED, SavePhase.UNRECORDED):
                self.miscounted = f"rank {rank} raised {reason} in {phase}"

    @contextmanager
    def counted_save(self) -> Iterator[None]:
        """Count exactly one save in the `with` block; if it fails to begin, tell the others."""
        before = self._count
        try:
            yield
        except BaseException as error:
            if self._count == before:
                self._refused = error
                self.start_joint_save(-1).report_failure(error, SavePhase.CALLED)
            raise

    def note_due(self, is_due: bool) -> None:
        """Note whether a save is due in this call of `maybe_save`, as all ranks find alike."""
        self._is_due_known, self._is_due = True, is_due

    @contextmanager
    def counted_call(self) -> Iterator[None]:
        """Tell the others if a `maybe_save` fails before it begins a save that may be due."""
        if self._refused is not None:
            self._lose_count(self._refused, SavePhase.UNRECORDED)
        self._is_due_known, before = False, self._count
        try:
            yield
        except BaseException as error:
            if not self._is_due_known:
                self._lose_count(error, SavePhase.UNCOUNTED)
            elif self._is_due_known and self._is_due and self._count == before:
                self.start_joint_save(-1).report_failure(error, SavePhase.DUE)
            raise

    def _lose_count(self, error: BaseException, phase: SavePhase) -> None:
        """Record, and tell the others, that this rank may number its saves otherwise than they."""
        if self.miscounted is None:
            self.miscounted = f"rank {self.ranks.rank} raised {error!r} in {phase}"
            self.start_joint_save(-1).report_failure(error, phase)
