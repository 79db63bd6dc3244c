"""`SaveParticipant`: a rank's side of a save, here in a run of one process, and its files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from holdfast.encryption.store import WrittenSeal
from holdfast.errors import UnsupportedState
from holdfast.format.index import StoredBlocks, TensorTable
from holdfast.format.manifest import FileEntry
from holdfast.ownership.owner import Ownership
from holdfast.ranks.coordinator import LEADER
from holdfast.results import SavePhase, SaveProgress
from holdfast.saving.probe import ProbeResult, SaveSize
from holdfast.staging.interfaces import Staged

if TYPE_CHECKING:
    from holdfast.state.capture.capture import Captured


class OwnFile(msgspec.Struct, frozen=True, kw_only=True):
    """A durable file of one rank: its names, manifest entry and block digests."""

    plain: str
    name: str
    entry: FileEntry
    digests: bytes
    stored: StoredBlocks | None
    sealed: WrittenSeal | None = None


class OwnPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of one rank in a save of all, as another process needs it to plan that save again."""

    rank: int = LEADER
    world_size: int = 1
    save: str = ""
    """Name of the save, which is the same on all ranks."""
    share: bytes = b""
    """Encoded share of the rank."""
    form: bytes = b""
    """Encoded form of the share."""
    layout: bytes = b""
    """Digest of the places of the boxes that the rank writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Files, trees and tables of all ranks, for the index and the manifest."""

    files: Sequence[OwnFile]
    trees: Mapping[str, bytes]
    tables: Mapping[str, TensorTable]
    writers: Mapping[str, Sequence[int]] | None = None
    """Number of tensor files of each rank, by component; None: the index is one document."""
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host → the files that its ranks have written to its own disk; empty: all are in one place."""
    elsewhere: frozenset[str] = frozenset()
    """Those that are not on the leader's disk."""


class SaveParticipant:
    """Save by the only rank: no message, no plan."""

    rank = LEADER
    world_size = 1
    leads = True
    compares = True
    patience_s = 0.0
    """Seconds after the deadline of a save, as this rank knows it, in which its end may come."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.progress = SaveProgress()
        self.is_under_way = False
        """Whether the background has it, and alone says what becomes of it."""

    def __enter__(self) -> SaveParticipant:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self.is_under_way:
            self.report_failure(error)

    def note_arguments(
        self, tags: Sequence[str], metrics: Mapping[str, float], config: Mapping[str, str]
    ) -> None:
        """In the training thread: note arguments for the leader to compare among ranks."""

    def note_warnings(self, texts: Sequence[str]) -> None:
        """Note what the script of this rank was warned of, for the leader to log if it differs."""

    def announce_wait(self) -> None:
        """In the training thread: tell followers that the leader waits for uploads first."""

    def propose(self, captured: Captured) -> None:
        """Tell the leader what this rank holds. In the training thread."""
        parts = captured.components.values()
        partial = [
            (f"{part.name}.{key}", "this process holds only a part of it, and knows of no others")
            for part in parts
            for key, held in part.shards.items()
            if held.local_shape != held.shape
        ]
        if partial:
            raise UnsupportedState(partial)

    def estimate_size(self, captured: Captured) -> SaveSize:
        """Return about how many bytes and files the save will have. In the training thread."""
        specs = [spec for part in captured.components.values() for spec in part.specs]
        trees = sum(len(part.tree) for part in captured.components.values())
        nbytes = sum(spec.nbytes for spec in specs) + 2 * trees + 200 * len(specs)
        return SaveSize(nbytes=nbytes, num_files=2 * len(captured.components) + 2)

    def probe_followers(self, folder: str) -> Sequence[ProbeResult]:
        """In the training thread: let the followers try the root; return what each found."""
        return ()

    def select_own_part(self, captured: Captured, owner: Ownership) -> Captured:
        """In the training thread: return what this rank writes of a captured state."""
        return captured

    def agree_on_plan(self, owner: Ownership) -> None:
        """End the agreement on the plan, if it is left to the background. In the save thread."""

    def set_known_checkpoint(self, folder: str) -> None:
        """In the training thread: say which checkpoint of this step this rank knows."""

    def begin_to_compare(self) -> None:
        """In the save thread: begin to compare the save with the checkpoint of its step."""

    def matches_checkpoint(
        self, staged: Staged, roots: Mapping[str, str], recorded: Mapping[str, str]
    ) -> bool:
        """Whether the save would write what that checkpoint has.

        In the save thread.

        Args:
            staged: what this rank would write.
            roots: digest of each file of that, by plain name; all ranks have all trees.
            recorded: those of the checkpoint, of all ranks.
        """
        return roots == recorded

    def announce_verdict(self, *, is_unchanged: bool) -> None:
        """Tell the followers what `matches_checkpoint` returns to them. In the save thread."""

    def describe_part(self, staged: Staged) -> OwnPart:
        """Describe what this rank writes, once the plan is agreed on. In any thread."""
        return OwnPart()

    def report_failure(self, error: BaseException, phase: SavePhase | None = None) -> None:
        """Tell the other ranks that this one failed, now or in `phase`; they fail too."""
