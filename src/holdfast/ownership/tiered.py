"""Claims on a run that has two tiers (docs/design.md, rule 9).

Both roots hold the same claims. A claim is put in the remote tier first, which all machines share;
if it cannot be reached, the claim is put there before the first upload, if it is valid then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from typing_extensions import override

from holdfast.errors import (
    CommitConflict,
    DeadlineExceeded,
    Diverged,
    FormatError,
    HoldfastError,
    NotFound,
    OwnedElsewhere,
    StoreError,
    Superseded,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.ownership.claim import (
    Choice,
    Claim,
    ClaimHeartbeat,
    check_owner,
    epoch_after,
    is_settled,
    is_still_right,
    iterate_committed,
    new_writer,
    nothing_in_flight,
    put_closed,
)
from holdfast.ownership.owner import END_S, Ownership, left_s
from holdfast.ownership.process import liveness
from holdfast.ownership.tiered_catalog import (
    TieredCatalog,
    explain_needed_remote,
    is_enough,
    remote_emitter,
)
from holdfast.root.catalog import Catalog
from holdfast.root.commit import check_ownership, put_once
from holdfast.root.documents import read_document
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store

_MAX_RACES = 100
_SCRATCH_TIMEOUT_S = 600.0


@dataclass(slots=True, kw_only=True)
class RemoteSide:
    """A process's claim on the remote tier, under which uploads, retention and gc run there."""

    claim: Claim | None = None
    has_committed: bool = False
    """Whether the remote tier has a save of this claim from which the run would resume."""
    unclear: set[str] = field(default_factory=set)
    """Folders of uploads whose register must stay: a copy of its put may still arrive."""
    is_clean: bool = True
    """Whether this epoch may be closed in the remote tier, as far as is known: no call of this
    claim hangs there, and none of its saves will be uploaded later."""

    @property
    def is_over(self) -> bool:
        """Whether all puts of this process into the remote tier are known to have ended."""
        return self.is_clean and not self.unclear


class TieredOwnership(Ownership):
    """Ownership of a run in two tiers by one manager, with a claim and a heartbeat in each.

    `remote` has the claim once it is in the remote tier, too; without it nothing is uploaded.
    """

    def __init__(self, catalog: TieredCatalog, *, takeover: bool, emit: Emitter) -> None:
        super().__init__(catalog.store, takeover=takeover, emit=emit)
        self.catalog = catalog
        self._remote = catalog.remote.store
        self._remote_heartbeat: ClaimHeartbeat | None = None
        self._scratch = threading.Lock()
        self.remote = RemoteSide()

    @override
    def expect_no_live_owner(self) -> None:
        self.catalog.look_again()
        try:
            self._check_owners(is_reachable=self._is_reachable())
        except _CutOff as error:
            self._use_local_only(error.cause)
            self._check_tier_owner(self._store)

    @override
    def claim_ownership(self, choices: Iterator[Choice]) -> None:
        """Claim the run in both tiers. No save or upload of an earlier claim may be under way."""
        before = self.remote.claim
        self.remote.claim, self.remote.has_committed = None, False
        self.catalog.look_again()
        try:
            super().claim_ownership(choices)
        finally:
            self._end_remotely(before, END_S)
        self.remote.is_clean, self.remote.unclear = True, set()
        self._start_heartbeat()

    @contextmanager
    def remote_scratch(self) -> Iterator[None]:
        """Lock the making and removing of scratch folders in the remote tier, except of uploads."""
        if not self._scratch.acquire(timeout=_SCRATCH_TIMEOUT_S):
            raise DeadlineExceeded(
                f"{self._remote.url}: gc or a preflight there did not end in "
                f"{_SCRATCH_TIMEOUT_S:.0f} s"
            )
        try:
            yield
        finally:
            self._scratch.release()

    def attach(self) -> Claim:
        """Put this process's claim into the remote tier, unless it has it, and return the claim."""
        if self.remote.claim is not None:
            return self.remote.claim
        claim = self.claim
        assert claim is not None, "uploads follow a claim"
        expect_remote_root(self._store, self._remote)
        self._expect_no_later_claim(claim)
        self._check_remote()
        share_claims(self._store, self._remote, emit=self._emit)
        self._expect_no_later_claim(claim)
        self.remote.claim = claim
        self._start_heartbeat()
        return claim

    @override
    def release_run(self, timeout_s: float = END_S) -> None:
        end = time.monotonic() + timeout_s
        claim, self.remote.claim = self.remote.claim, None
        self._end_remotely(claim, min(timeout_s, END_S))
        super().release_run(left_s(end))

    @override
    def _claim_run(self, choices: Iterator[Choice]) -> Claim:
        is_reachable = self._is_reachable()
        put: list[Claim] = []
        try:
            for _ in range(_MAX_RACES):
                if is_reachable:
                    self.catalog.look_again()
                try:
                    claim = self._try_claim(choices, put, is_reachable=is_reachable)
                except _CutOff as error:
                    self._use_local_only(error.cause)
                    is_reachable = False
                    continue
                if claim is not None:
                    return claim
            raise OwnedElsewhere(f"{self._store.url}: lost the race for the run {_MAX_RACES} times")
        except BaseException:
            if put:
                with suppress(HoldfastError):  # the first error is raised
                    self._close_unused(put[-1])
            raise

    def _close_unused(self, claim: Claim) -> None:
        remote_claim, self.remote.claim = self.remote.claim, None
        put_closed(self._store, claim)
        if remote_claim == claim:
            put_closed(self._remote, claim)

    def _try_claim(
        self, choices: Iterator[Choice], put: list[Claim], *, is_reachable: bool
    ) -> Claim | None:
        """Try once to claim the run in both tiers; None: another process claimed meanwhile, or the
        choice is outdated. A claim that was put is added to `put`."""
        after = self._check_owners(is_reachable=is_reachable)
        choice = next(choices)
        if is_reachable and self.catalog.cut_off is not None:
            # A choice made without reading the remote tier must not be claimed there.
            raise _CutOff(self.catalog.cut_off)
        claim = self._put_claim(after, choice, is_reachable=is_reachable)
        if claim is None:
            return None
        put.append(claim)
        if not is_still_right(self.catalog, claim, choice):
            return None
        if self.remote.claim is not None and self.catalog.cut_off is not None:
            return None  # the second check read one tier only
        return claim

    def _put_claim(self, after: int, choice: Choice, *, is_reachable: bool) -> Claim | None:
        """Put the claim that follows epoch `after`; None if the caller has to choose again."""
        self.remote.claim = None
        if is_reachable:
            with _cutting_off():
                share_claims(self._store, self._remote, emit=self._emit)
        epoch = epoch_after(self.catalog, after, choice.point)
        if epoch is None or not is_settled(self.catalog, choice.point):
            return None
        record = new_writer(epoch, choice, takeover=self._takeover, tiered=True)
        claim = Claim(epoch=epoch, nonce=record.nonce, resumed_from=choice.point)
        data = record.encode()
        try:
            is_remote = is_reachable and self._put_remote(epoch, data)
            self._store.make_folder(layout.WRITERS)
            put_once(self._store, layout.writer_key(epoch), data)
        except CommitConflict:
            return None
        self.remote.claim = claim if is_remote else None
        return claim

    def _put_remote(self, epoch: int, data: bytes) -> bool:
        """Put a claim into the remote tier; False after a store error, which may hide a success:
        the claim is put again before the first upload."""
        try:
            self._remote.make_folder(layout.WRITERS)
            put_once(self._remote, layout.writer_key(epoch), data)
        except StoreError as error:
            self._use_local_only(error)
            return False
        return True

    def _is_reachable(self) -> bool:
        try:
            expect_remote_root(self._store, self._remote)
        except StoreError as error:
            self._use_local_only(error)
            return False
        return True

    def _use_local_only(self, error: StoreError) -> None:
        """Warn, and continue with the local tier only; raise an error if that tier has nothing, or
        not the newest checkpoint, as the run may be in the remote one."""
        if not is_enough(self._store):
            raise explain_needed_remote(error, self._remote, self._store) from error
        self.catalog.cut_off = error
        self._emit(
            "warning",
            f"{self._remote.url} cannot be reached, so the run is claimed in the local tier only; "
            f"uploads begin once it can be reached: {error}",
            tier="remote",
        )

    def _check_owners(self, *, is_reachable: bool) -> int:
        """Check that no live process owns either tier; return the epoch of the newest claim."""
        local = Catalog(self._store).highest_epoch()
        remote, is_one = 0, False
        if is_reachable:
            with _cutting_off():
                remote = Catalog(self._remote).highest_epoch()
                is_one = 0 < local == remote and self._is_same_claim(local)
        # A claim made on another machine has its heartbeat in the remote tier.
        is_foreign = is_one and self._is_foreign(local)
        if not is_foreign:
            self._check_tier_owner(self._store)
        if is_foreign or (remote and not is_one):
            with _cutting_off():
                self._check_tier_owner(self._remote)
        return max(local, remote)

    def _is_same_claim(self, epoch: int) -> bool:
        """Whether both tiers hold the same claim of an epoch."""
        return claim_document(self._store, epoch) == claim_document(self._remote, epoch)

    def _is_foreign(self, epoch: int) -> bool:
        try:
            writer = Catalog(self._store).writer(epoch)
        except FormatError:
            return False
        return writer is not None and liveness(writer.process) == "unknown"

    def _check_tier_owner(self, store: Store) -> None:
        check_owner(store, takeover=self._takeover, emit=self._emit)

    def _check_remote(self) -> None:
        """Raise `OwnedElsewhere` if a live process owns the run by the remote tier's claims."""
        epoch = Catalog(self._remote).highest_epoch()
        if not epoch or not self._is_same_claim(epoch) or self._is_foreign(epoch):
            self._check_tier_owner(self._remote)

    def _expect_no_later_claim(self, claim: Claim) -> None:
        """Raise `Superseded` if a machine with another local tier has claimed the run since."""
        try:
            check_ownership(self._remote, claim.epoch, committed=False)
        except Superseded:
            share_claims(self._store, self._remote, emit=self._emit)
            raise

    def _start_heartbeat(self) -> None:
        if self.remote.claim is None:
            return
        emit = remote_emitter(self._emit, self._remote.url, only_first=True)
        self._remote_heartbeat = ClaimHeartbeat(self._remote, self.remote.claim, emit)
        weakref.finalize(self, self._remote_heartbeat.ask_to_stop)

    def _end_remotely(self, claim: Claim | None, timeout_s: float) -> None:
        """Stop the remote heartbeat; close the claim's epoch if all of its saves were uploaded."""
        heartbeat, self._remote_heartbeat = self._remote_heartbeat, None
        is_over = claim is not None and self.remote.is_over
        self._stop_heartbeat(heartbeat, is_over=is_over, timeout_s=timeout_s, tier="remote")


def expect_remote_root(local: Store, remote: Store) -> None:
    """Raise `StoreError` if the remote root is unreadable, or gone: a put would create it."""
    known = Ledger(local).tiers()  # read first: another process may be starting the run
    claims = remote.children(layout.WRITERS)
    if not claims and known is not None and known.remote == remote.url and known.epoch:
        raise StoreError(
            f"{remote.url}: claim {known.epoch} of this run was there, and now there is nothing; "
            f"was the root moved, deleted or unmounted? To start it again, delete "
            f"{local.url}/{layout.UPLOADS}"
        )


class _CutOff(Exception):
    """Internal: a store error of the remote tier, `cause`, during a claim."""

    def __init__(self, cause: StoreError) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def _cutting_off() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        raise _CutOff(error) from error


def share_claims(local: Store, remote: Store, *, emit: Emitter = Emitter(())) -> None:
    """Copy each claim that only one of the tiers has into the other, oldest first.

    Claims are put in order, so it is enough to compare the newest that both have. A claim that is
    damaged in one tier is repaired from the other. Local claims under which nothing was saved, as
    to prune the root, are replaced by the remote ones of the same epoch.
    """
    ours, theirs = Catalog(local).claims(), Catalog(remote).claims()
    _replace_unused(local, remote, sorted({*ours} & {*theirs}, reverse=True), emit)
    unseen = sorted({*ours}.difference(theirs))
    _expect_one_branch(local, remote, unseen)
    for epoch in sorted({*ours} ^ {*theirs}):
        source, target = (local, remote) if epoch in ours else (remote, local)
        target.make_folder(layout.WRITERS)
        try:
            put_once(target, layout.writer_key(epoch), claim_document(source, epoch))
        except CommitConflict:
            raise _diverged(local, remote, epoch) from None
    _expect_one_branch(local, remote, unseen)  # commits from before these claims blocked them


def _replace_unused(local: Store, remote: Store, common: list[int], emit: Emitter) -> None:
    """Replace local claims that differ from the remote ones of `common` epochs (newest first), if
    nothing was saved under them. Damaged remote claims replace none."""
    differing: list[int] = []
    for epoch in common:
        is_same = claim_document(local, epoch) == claim_document(remote, epoch)
        if is_same or _repair(local, remote, epoch, emit) or _repair(remote, local, epoch, emit):
            break
        differing.append(epoch)
    if not differing:
        return
    if any(is_in_use(local, epoch) for epoch in Catalog(local).claims() if epoch >= differing[-1]):
        raise _diverged(local, remote, differing[-1])
    for epoch in reversed(differing):
        with suppress(FormatError):
            if Catalog(remote).writer(epoch) is not None:
                local.put(layout.writer_key(epoch), claim_document(remote, epoch))


def _repair(damaged: Store, sound: Store, epoch: int, emit: Emitter) -> bool:
    """Repair a damaged claim from the other tier if it is the same claim: truncated, or with the
    same nonce or digest. Returns whether it was repaired."""
    try:
        claim = Catalog(sound).writer(epoch)
    except FormatError:
        return False
    try:
        Catalog(damaged).writer(epoch)
    except FormatError as error:
        left, document = claim_document(damaged, epoch), claim_document(sound, epoch)
        known = (claim.nonce.encode(), document.splitlines()[-1]) if claim is not None else ()
        if not (document.startswith(left) or any(part in left for part in known)):
            return False
        damaged.put(layout.writer_key(epoch), document)
        emit("mended", f"a claim was repaired from {sound.url}: {error}", epoch=epoch)
        return True
    return False


def is_in_use(local: Store, epoch: int) -> bool:
    """Whether a save was begun under a local claim, or may still be."""
    is_used = any(name.epoch == epoch for name in Catalog(local).attempts())
    return is_used or not nothing_in_flight(local, epoch)


def _expect_one_branch(local: Store, remote: Store, unseen: list[int]) -> None:
    """Raise `Diverged` if the run continued locally under `unseen` epochs, beside a remote one."""
    epoch = next((epoch for epoch in unseen if is_in_use(local, epoch)), None)
    if epoch is None:
        return
    known = frozenset(map(str, Catalog(local).attempts()))
    newest = next(iterate_committed(Catalog(remote), below=epoch, but=known), None)
    name = layout.parse_attempt(newest) if newest is not None else None
    try:
        claim = Catalog(local).writer(epoch)
    except FormatError:
        claim = None
    if name is None or (claim is not None and claim.rollback):
        return
    point = claim.resumed_from if claim is not None else None
    if point is None or name.order > point.order:
        raise _diverged(local, remote, epoch)


def claim_document(store: Store, epoch: int) -> bytes:
    """Read the stored bytes of a claim; empty if there is none."""
    try:
        return read_document(store, layout.writer_key(epoch), max_nbytes=MAX_CHECKED_NBYTES)
    except NotFound:
        return b""


def _diverged(local: Store, remote: Store, epoch: int) -> Diverged:
    return Diverged(
        f"the run continued both in {local.url} and in {remote.url}, from epoch {epoch} on, while "
        "they could not see each other. Nothing is sent and nothing is lost. Resume from the "
        "remote tier with an empty local root, or from the local tier with another remote root"
    )
