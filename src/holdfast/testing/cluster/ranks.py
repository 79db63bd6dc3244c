"""Work of each simulated rank: it resumes, saves, and reports the outcomes.

The saves, the plan, the commit and the claim are the real code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from typing_extensions import override

from holdfast.errors import (
    HoldfastError,
    OutcomeUnknown,
    Superseded,
)
from holdfast.events import Emitter
from holdfast.format.manifest import Timestamp
from holdfast.maintenance.gc import collect_garbage
from holdfast.maintenance.retention import Deleter
from holdfast.ownership.claim import Choice, claim_run
from holdfast.ownership.owner import Following, Ownership
from holdfast.policy.rules import Last
from holdfast.ranks.coordinator import Coordinator, RankFailure
from holdfast.results import build_checkpoint
from holdfast.root.catalog import Catalog, Entry, Marks
from holdfast.saving.compression import Compressing
from holdfast.saving.distributed import DistributedSaves
from holdfast.saving.links import Links
from holdfast.saving.probe import ProbeResult
from holdfast.saving.save import SaveRequest, Tools, write
from holdfast.saving.shares import OwnShare
from holdfast.state.capture.capture import Captured
from holdfast.store.base import Store
from holdfast.testing.cluster.network import Event
from holdfast.testing.cluster.state import Cluster, ContentOf, VirtualShare, stage_part
from holdfast.threads.workers import Workers

_SILENT = Emitter(())
SaveOutcome = Literal["committed", "failed", "unknown"]
"""`failed` is certain: the save has not committed, and never will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """Outcome of one save, as one rank knows it."""

    life: int
    rank: int
    number: int
    """Number of the save in its life."""
    outcome: SaveOutcome
    folder: str = ""
    """Folder of the checkpoint, after a commit."""
    reason: str = ""


class SameThread(Workers):
    """Workers that do each job at once, in the thread that submits it."""

    def __init__(self) -> None:
        super().__init__(0, "virtual")

    @override
    def queue_task(self, task: Event) -> None:
        task()


class VirtualSaves(DistributedSaves):
    """Saves of a simulated rank."""

    share: VirtualShare | None = None
    """Share to use in place of a new one."""

    @override
    def make_share(self, captured: Captured) -> OwnShare:
        if self.share is None:
            self.share = VirtualShare(captured, self.ranks.rank, "host")
        return self.share


class _Owner(Ownership):
    """The leader's ownership, without a heartbeat: the simulation shows who lives."""

    @override
    def claim_ownership(self, choices: Iterator[Choice]) -> None:
        self.claim = claim_run(self._store, choices, takeover=True, emit=_SILENT)


class ResumeNote(msgspec.Struct, frozen=True):
    """Announcement of the leader: the checkpoint from which all ranks resume."""

    folder: str | None
    step: int


@dataclass(kw_only=True)
class VirtualRank:
    """Virtual rank in one life of the run."""

    layout: Cluster
    ranks: Coordinator
    store: Store
    timeout_s: float
    life: int = 1
    outcomes: list[RankOutcome] = field(default_factory=list)
    """Outcomes of its saves, as this rank knows them."""
    resumed_from: Entry | None = None
    """The leader's: checkpoint from which it resumed."""
    orders: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The leader's: epoch and sequence of its saves, by number."""

    def __post_init__(self) -> None:
        self.saves = VirtualSaves(
            self.ranks,
            timeout_s=self.timeout_s,
            look=lambda folder: ProbeResult(host=""),
            warn=lambda text: None,
        )
        kind = _Owner if self.ranks.is_leader else Following
        self.owner = kind(self.store, takeover=True, emit=_SILENT)
        pool = SameThread()
        self.tools = Tools(
            store=self.store,
            owner=self.owner,
            compressing=Compressing({}, _SILENT),
            links=Links(self.store, _SILENT),
            workers=pool,
            writers=pool,
            timeout_s=self.timeout_s,
        )
        self.captured = self.layout.capture_rank(self.ranks.rank)
        self._deleter = Deleter(self.store, Last(2), _SILENT)

    def resume(self, *, collects: bool) -> int:
        """Claim the run, in the leader, and learn in each rank from which step all continue.

        Args:
            collects: whether the leader removes what killed saves have left.
        """
        tag = "resume"
        if not self.ranks.is_leader:
            heard = self.ranks.hear(tag, timeout_s=2 * self.timeout_s)
            return msgspec.msgpack.decode(heard, type=ResumeNote).step
        try:
            self.owner.claim_ownership(iter(self._choose, None))
            if collects:
                collect_garbage(self.store)
        except HoldfastError as error:
            failure = RankFailure.from_error(error, phase="resume")
            self.ranks.fail(tag, failure, timeout_s=self.timeout_s)
            raise
        point = self.resumed_from
        step = 0 if point is None else point.step
        note = ResumeNote(None if point is None else point.folder, step)
        self.ranks.announce(tag, msgspec.msgpack.encode(note), timeout_s=self.timeout_s)
        return step

    def _choose(self) -> Choice:
        self.resumed_from = next(Catalog(self.store).lineage_entries(), None)
        return Choice(point=None if self.resumed_from is None else self.resumed_from.reference)

    def save(self, number: int, step: int, content_of: ContentOf | None) -> RankOutcome:
        """Save the state of a step; errors are part of the result."""
        life, rank = self.life, self.ranks.rank
        try:
            folder = self._save(number, step, content_of)
            told = RankOutcome(
                life=life, rank=rank, number=number, outcome="committed", folder=folder
            )
        except HoldfastError as error:
            is_doubtful = isinstance(error, OutcomeUnknown) or (
                # A follower may raise it without knowing whether the save was committed.
                isinstance(error, Superseded) and (error.committed or not self.ranks.is_leader)
            )
            told = RankOutcome(
                life=life,
                rank=rank,
                number=number,
                outcome="unknown" if is_doubtful else "failed",
                reason=f"{type(error).__name__}: {error}",
            )
        self.outcomes.append(told)
        return told

    def delete_old(self) -> None:
        """Let the leader's retention keep two checkpoints, after a commit."""
        claim = self.owner.claim
        if self.ranks.is_leader and claim is not None:
            with suppress(HoldfastError):  # as in a training, which goes on
                self._deleter.carry_out(claim, has_committed=True, unclear=self.owner.unclear)

    def _save(self, number: int, step: int, content_of: ContentOf | None) -> str:
        """Save a step as a manager does, in one thread; return the folder."""
        with self.saves.start_joint_save(step, "permanent") as joint:
            joint.note_arguments((), {}, {})
            joint.propose(self.captured)
            part = joint.select_own_part(self.captured, self.owner)
            staged = stage_part(part, content_of)
            claim = self.owner.claim
            assert claim is not None, "the plan has brought it"
            sequence = self.owner.next_sequence()
            self.orders[number] = (claim.epoch, sequence)
            request = SaveRequest(
                label="step",
                claim=claim,
                sequence=sequence,
                timestamp=Timestamp(step=step),
                save_class="permanent",
                reason="simulated",
                tags=(),
                metrics={},
                numerics={},
                environment={},
                timings={"stage_s": 0.0},
            )
        # Here the manager's save thread takes over; only it reports failures from now on.
        joint.is_under_way = True
        try:
            joint.agree_on_plan(self.owner)
            attempt, manifest = write(self.tools, staged, request, joint)
        except BaseException as error:
            joint.report_failure(error)
            raise
        entry = Entry(name=attempt.name, folder=attempt.folder, manifest=manifest, marks=Marks())
        return build_checkpoint(self.store, entry).folder
