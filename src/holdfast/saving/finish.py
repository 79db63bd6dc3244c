"""Commits a save that a dead training has staged whole in shared memory (decision 0069).

`holdfast run --memory` starts `python -m holdfast.saving.finish FOLDER` after its command, and for
the folder of a killed `holdfast run`. It uses the dead process's claim: only if all ranks are
proven dead and nobody has claimed since (tests/saving/test_finish.py).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from holdfast.errors import (
    CorruptData,
    FormatError,
    HoldfastError,
    OutOfMemory,
    SealError,
    StoreError,
)
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.manifest import Aborted
from holdfast.format.records import Alive, Process
from holdfast.ownership.claim import is_closed
from holdfast.ownership.owner import Ownership
from holdfast.ownership.process import liveness, this_process
from holdfast.ranks.coordinator import decode_message
from holdfast.root.catalog import Catalog
from holdfast.root.commit import check_ownership, name_latest
from holdfast.saving.compression import Compressing
from holdfast.saving.distributed import LeadingSave
from holdfast.saving.handover import SharedImage
from holdfast.saving.links import Links
from holdfast.saving.participants import Gathered, OwnFile, SaveParticipant
from holdfast.saving.save import STAGED_RECORDS, StagedRecord, Tools, write
from holdfast.saving.shares import Plan, Share, decode_form
from holdfast.staging.in_memory import ImageTransfer
from holdfast.staging.interfaces import KnownFile, Staged
from holdfast.staging.shared import (
    ALL_DEAD,
    FINISH_S,
    SharedArena,
    SharedFolder,
    StagingFolder,
    read_record,
)
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.system import signals_of
from holdfast.threads.workers import Threads

_DEAD_S = 10.0
"""How long to wait until all processes of the training have ended, in seconds."""

_MAY_PASS = (StoreError, OSError, OutOfMemory)
"""Errors after which another try may succeed."""

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadRank:
    """State that one dead rank has staged whole, with its record."""

    folder: StagingFolder
    record: StagedRecord


class _NotFinished(Exception):
    """Reason to leave a staged save alone."""


def finish_saves(folder: SharedFolder, say: Say, *, are_dead: bool = False) -> None:
    """Finish the saves that dead processes have staged whole; `say` why one is left alone.

    With `are_dead` the caller has proof that all are, as it holds the folder alone.
    """
    try:
        saves = _saves_in(folder, say)
    except OSError as error:
        # Without one rank's record the others would count as incomplete.
        say(f"no staged save was finished: {error}")
        return
    for ranks in saves:
        if all(rank.folder.is_settled for rank in ranks):
            continue
        records = [rank.record for rank in ranks]
        request = records[0].request
        what = f"the save of step {request.timestamp.step} that the training had staged"
        try:
            if not are_dead:
                _expect_dead(ranks)
        except _NotFinished as why:
            say(f"{what} is left alone: {why}")
            continue  # those processes may still end it, or stage the next
        try:
            if not any(rank.folder.is_settled for rank in ranks):
                found = _finish_save(ranks)
                say(f"finished {what}: {records[0].root}/{found}")
        except _NotFinished as why:
            say(f"{what} is left alone: {why}")
        except Exception as error:  # noqa: BLE001 - other saves are still to be finished
            say(f"{what} was not finished: {error}")
            if isinstance(error, _MAY_PASS) or not isinstance(error, HoldfastError):
                continue  # tried again, if no training takes the run over before
        for rank in ranks:
            rank.folder.settle()


def _saves_in(folder: SharedFolder, say: Say) -> list[list[DeadRank]]:
    """Group the records by save, and within each by rank."""
    saves: dict[object, list[DeadRank]] = {}
    for own in folder.staging_folders():
        path = own.record_path
        if path is None:
            continue
        try:
            record = read_record(path, STAGED_RECORDS)
        except FileNotFoundError:
            continue  # its process has withdrawn it
        except CorruptData as error:
            say(f"a staged save is abandoned: {error}")
            own.settle()
            continue
        step, claim = record.request.timestamp.step, record.request.claim
        key = (record.root, claim.nonce, record.part.save, step)
        saves.setdefault(key, []).append(DeadRank(folder=own, record=record))
    return [sorted(ranks, key=lambda one: one.record.part.rank) for ranks in saves.values()]


def _finish_save(ranks: Sequence[DeadRank]) -> str:
    """Write and commit a save; returns its folder."""
    first = ranks[0].record
    if not first.root:
        raise _NotFinished("only saves in a local folder can be finished without their process")
    world_size = first.part.world_size
    if [rank.record.part.rank for rank in ranks] != [*range(world_size)]:
        raise _NotFinished(
            f"{len(ranks)} of {world_size} ranks had staged it whole on this host; all have to"
        )
    root = Path(first.root)
    if not root.is_dir() or not any(root.iterdir()):
        raise StoreError(f"{root}: absent or empty. Is its disk mounted?")
    store = LocalStore(root)
    sequence = _next_sequence(store, first, [rank.record.process for rank in ranks])
    claim = first.request.claim
    # Before the attempt exists: gc must not take the epoch for one with nothing in flight.
    alive = Alive(epoch=claim.epoch, nonce=claim.nonce, beat=1, process=this_process())
    store.put(layout.alive_key(claim.epoch), alive.encode())
    check_ownership(store, claim.epoch, committed=False)
    emit = Emitter((_warn,))
    threads = Threads()
    threads.start()
    try:
        tools = Tools(
            store=store,
            owner=Ownership(store, takeover=False, emit=emit),
            compressing=Compressing(first.compressions, emit),
            links=Links(store, emit),
            workers=threads.workers,
            writers=threads.waiters,
            timeout_s=FINISH_S,
        )
        request = replace(first.request, sequence=sequence)
        attempt, manifest = write(tools, _staged(ranks), request, _participant(ranks))
    finally:
        threads.close_pools()
    if not manifest.lacks and not manifest.unhealthy:
        name_latest(store, attempt.folder)
    return attempt.folder


def _expect_dead(ranks: Sequence[DeadRank]) -> None:
    end = time.monotonic() + _DEAD_S
    while left := [one for one in ranks if liveness(one.record.process) != "dead"]:
        if time.monotonic() > end:
            process = left[0].record.process
            raise _NotFinished(
                f"process {process.pid} on {process.host}, of rank {left[0].record.part.rank}, may "
                "still run"
            )
        time.sleep(0.05)


def _next_sequence(store: Store, record: StagedRecord, dead: Sequence[Process]) -> int:
    """Return the sequence that follows the dead one's, if it may be used."""
    claim, sequence = record.request.claim, record.request.sequence
    catalog = Catalog(store)
    writer = catalog.writer(claim.epoch)
    if writer is None or writer.nonce != claim.nonce:
        raise StoreError(f"{store.url} lacks the claim of writer {claim.epoch}")
    if is_closed(store, claim.epoch, claim.nonce):
        raise _NotFinished(f"writer {claim.epoch} is closed")
    if writer.process not in dead and liveness(writer.process) != "dead":
        raise StoreError(f"process {writer.process.pid}, writer {claim.epoch}, is not dead")
    check_ownership(store, claim.epoch, committed=False)
    for name in catalog.attempts():
        if name.epoch != claim.epoch or name.sequence < sequence:
            continue
        try:
            register = catalog.read(str(name))
        except (FormatError, SealError) as error:
            raise _NotFinished(f"{store.url}/{name} cannot be read: {error}") from error
        if register is not None and not isinstance(register, Aborted):
            raise _NotFinished(f"it is committed: {name}")
        sequence = max(sequence, name.sequence)
    return sequence + 1


def _staged(ranks: Sequence[DeadRank]) -> Staged:
    """Return the state of all ranks, as if one had staged it."""
    files: dict[str, list[KnownFile]] = {}
    for rank in ranks:
        for component, names in rank.record.files.items():
            images = (DeadImage(rank.folder, name) for name in names)
            files.setdefault(component, []).extend(images)
    transfer = ImageTransfer([], [])
    transfer.run_now(FINISH_S)  # nothing is left to copy
    first = ranks[0].record
    return Staged(
        files={name: tuple(images) for name, images in files.items()},
        trees=first.trees,
        kinds=first.kinds,
        by_rank=frozenset(first.by_rank),
        transfer=transfer,
    )


def _participant(ranks: Sequence[DeadRank]) -> SaveParticipant:
    records = [rank.record for rank in ranks]
    return SaveParticipant() if len(records) == 1 else RecordedRanks(records)


class RecordedRanks(SaveParticipant):
    """Save of a leader, for `write`, in which the records of dead ranks replace their messages."""

    is_in_doubt = False

    def __init__(self, records: Sequence[StagedRecord]) -> None:
        super().__init__()
        self._records = records
        self.world_size = len(records)
        parts = [record.part for record in records]
        shares = [decode_message(part.share, Share, "a staged share") for part in parts]
        forms = {
            share.form: decode_form(part.form, share.form)
            for share, part in zip(shares, parts, strict=True)
        }
        self._plan = Plan(shares, forms)

    @property
    def num_files(self) -> int:
        """Number of tensor files of all ranks."""
        return self._plan.num_files

    def announce_folder(
        self, store: object, attempt: object, staged: object, links: object
    ) -> None:
        """No-op: nobody else writes."""

    def copy_to_partner(self, *_: object) -> None:
        """No-op: all files are on this host."""

    def collect_written(self, files: Sequence[OwnFile], staged: Staged) -> Gathered:
        """Join the trees of all ranks, as they were planned again from their shares."""
        plan, parts = self._plan, [record.part for record in self._records]
        nbytes = {file.plain: file.entry.nbytes for file in files}
        lengths = [[nbytes[name] for name in plan.names_of(part.rank)] for part in parts]
        trees = {
            name: LeadingSave.join_trees(
                name, staged, [record.trees[name] for record in self._records]
            )
            for name in staged.kinds
        }
        tables = plan.tables([part.layout for part in parts], lengths)
        return Gathered(files=files, trees=trees, tables=tables, writers=plan.writers)

    def succeed(self, store: object, attempt: object, manifest: object) -> None:
        """No-op: nobody else waits."""


class DeadImage(SharedImage):
    """Image that a dead process has staged; digests that it knew are compared."""

    def __init__(self, folder: StagingFolder, name: str) -> None:
        super().__init__(SharedArena.open_arena(folder.path, name), is_apart=False)
        self._known = dict(enumerate(folder.read_digests(name)))

    @override
    def digest_block(self, number: int) -> bytes:
        digest = super().digest_block(number)
        if self._known.get(number) not in (None, digest):
            raise CorruptData(
                f"block {number} of {self.file.name} in shared memory is not what was staged. If "
                "this happens again, test the memory of this host"
            )
        return digest


def _say(text: str) -> None:
    sys.stderr.write(f"holdfast: {text}\n")


def _warn(event: Event) -> None:
    if event.kind == "warning":
        _say(event.message)


def main(path: str, *, are_dead: bool = False) -> None:
    """Finish the saves in a supervisor's folder; signals do not end it, its supervisor may."""
    folder = SharedFolder(Path(path))
    if not are_dead:
        folder.hold()  # until the end of this process, which may outlive the supervisor
    for number in signals_of("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
        signal.signal(number, signal.SIG_IGN)
    finish_saves(folder, _say, are_dead=are_dead)


if __name__ == "__main__":
    main(sys.argv[1], are_dead=sys.argv[2:] == [ALL_DEAD])
