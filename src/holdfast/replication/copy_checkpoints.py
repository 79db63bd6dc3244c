"""Copies checkpoints to another root: the stored bytes, committed like an upload.

The other root gets the claims under which the checkpoints were saved, so that it holds the same
run, and this process claims it for as long as it copies (docs/design.md, rule 9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

from holdfast.encryption.store import bare, sealed
from holdfast.errors import (
    CommitConflict,
    CorruptData,
    DeadlineExceeded,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    OutcomeUnknown,
    SealError,
    UsageError,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import MAX_MANIFEST_NBYTES, Aborted, Deleted, Manifest
from holdfast.maintenance.resume_plan import standing
from holdfast.ownership.annotations import copy_marks
from holdfast.ownership.claim import Choice, Claim, check_owner
from holdfast.ownership.leases import leased
from holdfast.ownership.owner import Ownership
from holdfast.ownership.tiered import claim_document, is_in_use
from holdfast.replication.upload import Cost, Sender
from holdfast.root.attempts import latest_of
from holdfast.root.byte_ranges import Listing, read_listing
from holdfast.root.catalog import Catalog
from holdfast.root.commit import name_latest, put_once, sync_checkpoint
from holdfast.root.documents import read_document
from holdfast.root.history_writer import copy_segments
from holdfast.store.base import Store

NUM_THREADS = 4
_BLOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Outcome of copying one checkpoint."""

    folder: str
    step: int | None
    """Completed optimizer windows; None where the checkpoint is encrypted and no key was given."""
    nbytes: int
    """Bytes of its files, as stored."""
    sent_nbytes: int
    """Bytes that were sent; fewer where an earlier copy was interrupted."""
    was_there: bool
    """Whether the other root had it already."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCopy:
    """A checkpoint that is to be copied."""

    name: AttemptName
    listing: Listing
    manifest: Manifest | None
    """None where it is encrypted and the keys do not decrypt it."""
    was_there: bool
    missing_nbytes: int
    """Bytes of the files that the other root lacks."""

    @property
    def is_complete(self) -> bool:
        """Whether the other root already has all of it."""
        return self.was_there and not self.missing_nbytes

    @property
    def folder(self) -> str:
        """Name of its folder, in both roots."""
        return str(self.name)

    @property
    def completed_steps(self) -> int | None:
        """Completed optimizer windows; None where it cannot be decrypted."""
        return None if self.manifest is None else self.manifest.timestamp.step

    @property
    def nbytes(self) -> int:
        """Bytes of its files, as stored."""
        return sum(file.stored_nbytes for file in self.listing.files.values())


def plan_copies(
    source: Store,
    target: Store,
    folders: Sequence[str],
    *,
    passed_over: Callable[[str, HoldfastError], None] | None = None,
) -> tuple[PlannedCopy, ...]:
    """Plan copies, oldest first; `passed_over` gets the impossible ones, which else raise."""
    planned = []
    for folder in folders:
        try:
            planned.append(_planned(source, target, folder))
        except (NoCheckpoint, CorruptData) as error:
            if passed_over is None:
                raise
            passed_over(folder, error)
    planned.sort(key=lambda item: item.name)
    _expect_same_run(source, target, planned)
    return tuple(planned)


def _planned(source: Store, target: Store, folder: str) -> PlannedCopy:
    where = f"{source.url}/{folder}"
    name = layout.parse_attempt(folder)
    listing = read_listing(bare(source), folder)
    if listing is None or isinstance(listing, Aborted | Deleted):
        raise NoCheckpoint(f"{where}: not committed, or deleted")
    own = layout.attempt_name(listing.label, listing.epoch, listing.sequence, listing.save_id)
    if name is None or name != own:
        raise UsageError(f"{where}: this folder was renamed from {own}; rename it back to copy it")
    if dropped := Catalog(source).marks(folder).thinned:
        raise UsageError(
            f"{where}: {', '.join(dropped)} was dropped from it, and only whole checkpoints are "
            "copied; `holdfast export` writes what is left of one"
        )
    there = read_listing(bare(target), folder)
    if isinstance(there, Aborted | Deleted):
        what = type(there).__name__.lower()
        raise NoCheckpoint(
            f"{target.url}/{folder}: {what} there by {there.by} ({there.reason}) and cannot be "
            "copied there again; copy it to another root"
        )
    if there is not None:
        _expect_same_bytes(source, target, folder)
    sizes = {info.key: info.nbytes for info in target.list(f"{folder}/")}
    files = listing.files.items()
    lacking = (e for n, e in files if sizes.get(f"{folder}/{n}") != e.stored_nbytes)
    return PlannedCopy(
        name=name,
        listing=listing,
        manifest=_manifest(source, folder),
        was_there=there is not None,
        missing_nbytes=sum(file.stored_nbytes for file in lacking),
    )


def _expect_same_bytes(source: Store, target: Store, folder: str) -> None:
    key = f"{folder}/{layout.MANIFEST}"
    ours, theirs = (
        read_document(bare(store), key, max_nbytes=MAX_MANIFEST_NBYTES)
        for store in (source, target)
    )
    if ours != theirs:
        raise CorruptData(
            f"{target.url}/{key}: not the manifest of {source.url}/{folder}; nothing was copied "
            "or changed. `holdfast verify` says which of the two is damaged"
        )


def copy_checkpoints(
    source: Store,
    target: Store,
    planned: Sequence[PlannedCopy],
    *,
    emit: Emitter,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[Copied]:
    """Copy checkpoints as planned; yield the outcome of each. Encrypted ones stay encrypted.

    Claims the target meanwhile. Every block is compared with its digest on the way. What an
    interrupted copy has sent is not sent again; pins and tags are copied, too. `on_progress` gets
    a folder, its bytes so far and all its bytes, in several threads.
    """
    if all(item.is_complete for item in planned):
        for item in planned:
            with suppress(SealError):  # without a key there are none
                copy_marks(source, target, item.name)
            yield Copied(
                folder=item.folder,
                step=item.completed_steps,
                nbytes=item.nbytes,
                sent_nbytes=0,
                was_there=True,
                seconds=0.0,
            )
        return
    above = max(item.name.epoch for item in planned)
    # Before the look for a live owner: a claim that is put later is neither replaced nor passed.
    known, differing = {*Catalog(target).claims()}, _differing(source, target)
    _expect_free(source, target, emit)
    _expect_same_run(source, target, planned)
    _give_claims(source, target, upto=above, known=known, differing=differing)
    # `takeover`: copied claims may be of live processes that know nothing of this root, and
    # `_expect_free` has checked the others. `is_tiered`: as in two tiers, the root may have files
    # of checkpoints that were never committed in it.
    owner = Ownership(target, takeover=True, emit=Emitter(()), is_tiered=True, above=above)
    owner.claim_ownership(_choose_standing(source, target, emit))
    claim = owner.claim
    assert claim is not None
    sender = Sender(source, target, num_threads=NUM_THREADS, timeout_s=_BLOCK_TIMEOUT_S)
    warned = ""
    try:
        for item in planned:
            with leased(source, item.folder, emit=emit):
                copied = _copy_one(sender, source, target, item, owner, claim, on_progress)
                warning = _point_latest(target)
                if warning and not warned:
                    warned = warning
                    emit("warning", warning)
                yield copied
        if sealed(source) is None and sealed(target) is None:
            copy_segments(source, target)
    except (OutcomeUnknown, DeadlineExceeded):
        owner.is_clean = False
        raise
    finally:
        sender.background.stop_jobs()
        owner.release_run()


def _copy_one(
    sender: Sender,
    source: Store,
    target: Store,
    item: PlannedCopy,
    owner: Ownership,
    claim: Claim,
    on_progress: Callable[[str, int, int], None] | None,
) -> Copied:
    folder, total = item.folder, item.nbytes

    def report(cost: Cost) -> None:
        if on_progress is not None:
            on_progress(folder, min(cost.nbytes, total), total)

    cost = sender.upload_checkpoint(
        folder, epoch=claim.epoch, on_progress=report, unclear=owner.unclear
    )
    with suppress(SealError):  # without a key there are none
        copy_marks(source, target, item.name)
    return Copied(
        folder=folder,
        step=item.completed_steps,
        nbytes=total,
        sent_nbytes=cost.nbytes,
        was_there=item.was_there,
        seconds=cost.seconds,
    )


def _point_latest(target: Store) -> str:
    """Point `latest` to the checkpoint of a resume there; return a warning if it is no pointer."""
    with suppress(SealError):
        point = standing(target).point
        if point is not None and latest_of(target) != point.folder:
            sync_checkpoint(target, point.folder)
            return name_latest(target, point.folder)
    return ""


# The claims


def _choose_standing(source: Store, target: Store, emit: Emitter) -> Iterator[Choice]:
    while True:
        _expect_free(source, target, emit)
        try:
            yield standing(target)
        except SealError:
            yield Choice(point=None, passed_over=frozenset(map(str, Catalog(target).attempts())))


def _expect_free(source: Store, target: Store, emit: Emitter) -> None:
    """Raise `OwnedElsewhere` if a live process, other than the source's, owns the target."""
    newest = Catalog(target).highest_epoch()
    document = claim_document(target, newest) if newest else b""
    if document and document == claim_document(source, newest):
        with suppress(FormatError):
            claim = Catalog(target).writer(newest)
            if claim is not None and not claim.tiered:
                return
    check_owner(target, takeover=False, emit=emit)


def _give_claims(
    source: Store, target: Store, *, upto: int, known: Set[int], differing: Sequence[int]
) -> None:
    """Give the target the source's claims, oldest first; unused `differing` ones are replaced."""
    theirs = {epoch: _sound_claim(source, epoch) for epoch in Catalog(source).claims()}
    theirs = {epoch: data for epoch, data in theirs.items() if data and epoch <= upto}
    for epoch in sorted(differing):
        if epoch in theirs:
            target.put(layout.writer_key(epoch), theirs[epoch])
    target.make_folder(layout.WRITERS)
    for epoch in sorted({*theirs} - known):
        try:
            put_once(target, layout.writer_key(epoch), theirs[epoch])
        except CommitConflict:
            raise _other_run(source, target, epoch) from None


def _sound_claim(store: Store, epoch: int) -> bytes:
    with suppress(FormatError):
        if Catalog(store).writer(epoch) is not None:
            return claim_document(store, epoch)
    return b""


def _differing(source: Store, target: Store) -> list[int]:
    """List the epochs whose claims differ; claims are put in order, so all above the first do."""
    theirs = {*Catalog(source).claims()}
    differing: list[int] = []
    for epoch in Catalog(target).claims():
        if epoch not in theirs:
            continue
        if claim_document(source, epoch) == claim_document(target, epoch):
            break
        differing.append(epoch)
    return differing


def _expect_same_run(source: Store, target: Store, planned: Sequence[PlannedCopy]) -> None:
    """Raise `UsageError` if the target holds another run than the source."""
    differing = _differing(source, target)
    upto = max((item.name.epoch for item in planned), default=0)
    wrong = [epoch for epoch in differing if epoch <= upto]
    for epoch in Catalog(target).claims():
        if wrong and epoch >= wrong[-1] and _is_in_use(target, epoch):
            raise _other_run(source, target, epoch)
    nonces = {item.name.epoch: _nonce(source, item.name.epoch) for item in planned}
    for item in planned:
        epoch = item.name.epoch
        writer = item.manifest.writer if item.manifest is not None else None
        there = nonces[epoch] if epoch in differing else _nonce(target, epoch)
        if writer and there and writer != there:
            raise _other_run(source, target, epoch)
    for name in Catalog(target).attempts():
        # Checkpoints that were copied by hand lie there without their claims.
        nonce = nonces.get(name.epoch) if not _nonce(target, name.epoch) else None
        other = _manifest(target, str(name)) if nonce else None
        if other is not None and other.writer not in (None, nonce):
            raise _other_run(source, target, name.epoch)


def _is_in_use(target: Store, epoch: int) -> bool:
    """Whether anything was, or may be, saved under a claim; of a copy only attempts count."""
    with suppress(FormatError):
        claim = Catalog(target).writer(epoch)
        if claim is not None and claim.tiered and claim.takeover:
            return any(name.epoch == epoch for name in Catalog(target).attempts())
    return is_in_use(target, epoch)


def _nonce(store: Store, epoch: int) -> str:
    with suppress(FormatError):
        claim = Catalog(store).writer(epoch)
        return "" if claim is None else claim.nonce
    return ""


def _manifest(store: Store, folder: str) -> Manifest | None:
    """Read the manifest of a checkpoint; None where it cannot be read or decrypted."""
    with suppress(FormatError, SealError):
        register = Catalog(store).read(folder)
        return register if isinstance(register, Manifest) else None
    return None


def _other_run(source: Store, target: Store, epoch: int) -> UsageError:
    return UsageError(
        f"{target.url} holds another run than {source.url}: writer {epoch} is not the same in "
        "both. Nothing was copied; a run could not tell its checkpoints from the others. Give "
        "the copy a root of its own"
    )
