"""Facts that a root records for choosing a save interval: costs, and starts with their ends.

Reads only, and infers nothing that was not recorded; `holdfast.policy.auto` draws conclusions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.errors import FormatError
from holdfast.format import layout
from holdfast.format.manifest import Reference
from holdfast.format.records import Process, WriterRecord
from holdfast.ownership.claim import is_closed
from holdfast.ownership.process import liveness
from holdfast.policy.costs import MAX_S, History, SaveCost
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.upload_records import host_of
from holdfast.store.base import Store

Ending = Literal["closed", "failed", "running", "continued", "unknown"]
"""How a start ended. `continued`: the same process claimed again. `unknown`: the process ran on
another host, or was taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStart:
    """Recorded start of a process of the run: its claim, and how it ended."""

    created: str
    host: str
    ending: Ending
    resumed_from: Reference | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFacts:
    """Facts that a root records about one run."""

    saves: tuple[SaveCost, ...]
    """Costs of saves of the whole state that record how long they stopped training; oldest first.
    """
    trained_s: float
    """Longest training time that a checkpoint records, in seconds; excludes repeated work."""
    starts: tuple[RecordedStart, ...]
    """Starts of the run, oldest first."""
    unreadable: tuple[str, ...]
    """Manifests and claims that are damaged and not counted, each with the reason."""

    @property
    def history(self) -> History:
        """Costs and failures, which are starts of processes that died without ending cleanly."""
        num_failures = sum(start.ending == "failed" for start in self.starts)
        return History(saves=self.saves, num_failures=num_failures, trained_s=self.trained_s)


def read_recorded_costs(store: Store) -> RecordedFacts:
    """Read the recorded save costs and starts of a run; claims and writes nothing."""
    catalog = Catalog(store)
    survey, unread = catalog.survey()
    epochs = sorted(catalog.claims())
    claims, broken = _read_claims(catalog, epochs)
    manifests = [entry.manifest for entry in _of_this_run(survey, epochs)]
    costs = [
        SaveCost.read(manifest.timings, is_first=manifest.sequence == 1)
        for manifest in manifests
        if not manifest.lacks
    ]
    walls = [manifest.timestamp.wall_s for manifest in manifests]
    return RecordedFacts(
        saves=tuple(cost for cost in costs if cost is not None),
        trained_s=max((wall_s for wall_s in walls if 0 <= wall_s < MAX_S), default=0.0),
        starts=tuple(_starts(store, claims)),
        unreadable=(*(f"{folder}: {reason}" for folder, reason in unread), *broken),
    )


def _of_this_run(entries: Sequence[Entry], epochs: Sequence[int]) -> list[Entry]:
    """Select this run's checkpoints, oldest first: copies from other runs have unclaimed epochs."""
    claimed, first = set(epochs), min(epochs, default=None)
    own = (e for e in entries if first is None or e.order[0] < first or e.order[0] in claimed)
    return sorted(own, key=lambda entry: entry.order)


def _read_claims(catalog: Catalog, epochs: Sequence[int]) -> tuple[list[WriterRecord], list[str]]:
    claims: list[WriterRecord] = []
    broken: list[str] = []
    for epoch in epochs:
        try:
            claim = catalog.writer(epoch)
        except FormatError as error:
            broken.append(f"claim {epoch}: {error}")
        else:
            if claim is not None:
                claims.append(claim)
    return claims, broken


def _starts(store: Store, claims: Sequence[WriterRecord]) -> Iterator[RecordedStart]:
    for number, claim in enumerate(claims, start=1):
        following = claims[number] if number < len(claims) else None
        yield RecordedStart(
            created=claim.created,
            host=claim.process.host,
            resumed_from=claim.resumed_from,
            ending=ending_of(store, claim, following),
        )


def ending_of(store: Store, claim: WriterRecord, following: WriterRecord | None) -> Ending:
    """Say how the process of a claim ended; `following` is the next claim, if there is one."""
    if is_closed(store, claim.epoch, claim.nonce):
        return "closed"
    if following is not None and _is_same_process(claim.process, following.process):
        return "continued"
    if _may_lack_close(store, claim):
        return "unknown"
    state = liveness(claim.process)
    if state == "dead":
        return "failed"
    if following is None:
        return "unknown" if state == "unknown" else "running"
    # Without a takeover a run is claimed only once its owner was found gone.
    return "unknown" if following.takeover else "failed"


def _may_lack_close(store: Store, claim: WriterRecord) -> bool:
    """Whether the root is a disk of another host than the claim's, which has the close."""
    host, _, root = host_of(store).partition(":")
    if not host or host != claim.process.host:
        return bool(host)
    # Several roots of one host: only the leader puts heartbeats.
    heartbeat = layout.alive_key(claim.epoch).rpartition("/")[2]
    return bool(root) and heartbeat not in store.children(layout.WRITERS)


def _is_same_process(one: Process, other: Process) -> bool:
    return bool(one.start and one.boot_id) and one == other
