"""Catalog of a run in two tiers: a local root and a remote one, read as if they were one.

A checkpoint has the same name and the same bytes in both. It is read from the local tier, or from
the remote tier if the local copy is gone or damaged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from typing_extensions import override

from holdfast.encryption.store import sealed, sealing
from holdfast.errors import FormatError, NotFound, NotSealed, SealError, StoreError, UsageError
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Manifest
from holdfast.format.records import WriterRecord
from holdfast.keys import Encryption
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.naming import expect_filled
from holdfast.root.address import expect_root
from holdfast.root.attempts import latest_of
from holdfast.root.catalog import Catalog, Entry, Register
from holdfast.store import open_store
from holdfast.store.base import ObjectInfo, Store

T = TypeVar("T")
U = TypeVar("U")


def catalog_of(
    root: str | os.PathLike[str] | Store | Tiered,
    emit: Emitter,
    encryption: Encryption | None = None,
) -> Catalog:
    """Open the catalog of a root, or of both tiers of a `Tiered` root."""
    for place in (root.local, root.remote) if isinstance(root, Tiered) else (root,):
        if isinstance(place, str | os.PathLike):
            expect_filled(os.fspath(place))
            expect_root(os.fspath(place))
    if isinstance(root, Tiered):
        local, remote = open_store(root.local), open_store(root.remote)
        if local is remote or local.url == remote.url:
            raise UsageError(f"Tiered: local and remote are the same place, {local.url}")
        for inner, outer in ((local, remote), (remote, local)):
            if inner.url.startswith(f"{outer.url}/"):
                raise UsageError(f"Tiered: {inner.url} is inside of the other tier, {outer.url}")
        if sealed(local) is not None or sealed(remote) is not None:
            raise UsageError("Tiered: pass the stores without a wrapper; encrypt= applies to both")
        local = sealing(local, encryption)
        return TieredCatalog(local, sealing(remote, encryption, twin=local), emit)
    return Catalog(sealing(open_store(root), encryption))


def is_enough(store: Store) -> bool:
    """Whether this tier has the newest checkpoint that it names, or that cannot be decrypted."""
    catalog, latest = Catalog(store), layout.parse_attempt(latest_of(store))
    try:
        if latest is not None and not isinstance(catalog.read(str(latest)), Manifest):
            head = catalog.head()
            return head is not None and head.order >= latest.order
        return catalog.ever_committed() or catalog.fresh_epoch() > 0
    except (FormatError, SealError):
        return True


class TieredCatalog(Catalog):
    """Read-only catalog of both tiers of a run.

    If the remote tier cannot be reached, a warning is logged and only the local one is read. If
    the local one has nothing of the run, an error is raised: the run may be in the remote tier.
    """

    def __init__(self, local: Store, remote: Store, emit: Emitter) -> None:
        super().__init__(local)
        self.remote = Catalog(remote)
        self._local = Catalog(local)
        self._emit = emit
        self._homes: dict[str, Store] = {}
        self.cut_off: StoreError | None = None
        """Why only the local tier has been read since `look_again`; None: both were."""
        self.turned: set[str] = set()
        """Folders with a damaged local copy, which are read from the remote tier."""

    @override
    def look_again(self) -> None:
        """Begin a new query: clear caches, and retry a remote tier that failed before."""
        super().look_again()
        self.cut_off = None

    @override
    def find_store(self, folder: str) -> Store:
        """Return the store of the tier from which the folder's manifest was last read."""
        if folder not in self._homes:
            try:
                self.read(folder)
            except (FormatError, NotSealed):
                return self.store
        return self._homes[folder]

    @override
    def switch_tier(self, folder: str) -> bool:
        if folder in self.turned:
            return False
        try:
            if not isinstance(self._read_remote(folder), Manifest):
                return False
        except FormatError:
            return False
        self.turned.add(folder)
        self._homes[folder] = self.remote.store
        return True

    @override
    def copies(self, entry: Entry) -> Iterator[tuple[Store, Entry]]:
        """Yield a checkpoint's local copy, then the remote one, which is read only on request."""
        for catalog in (self._local, self.remote):
            found = catalog.entry(entry.name)
            if found is not None:
                yield catalog.store, found

    @override
    def _list_together(self, attempts: Sequence[AttemptName]) -> dict[str, list[ObjectInfo]]:
        return {}  # a checkpoint may be in either tier

    @override
    def attempts(self) -> tuple[AttemptName, ...]:
        here = super().attempts()
        there = self._ask_remote(self.remote.attempts, ())
        return tuple(sorted({*here, *there}, reverse=True))

    @override
    def open_attempts(self) -> tuple[AttemptName, ...]:
        # From both tiers: an attempt that has ended in one may be committed in the other.
        self._clear_caches()
        there = self._ask_remote(self.remote.open_attempts, ())
        return tuple(sorted({*self._local.open_attempts(), *there}, reverse=True))

    @override
    def has_skipped(self) -> bool:
        return any([self._local.has_skipped(), self.remote.has_skipped()])

    @override
    def read(self, folder: str) -> Register | None:
        """Read a manifest from either tier, else a record of abort or deletion; local first."""
        here: Register | None = None
        damage: FormatError | NotSealed | None = None
        if folder not in self.turned:
            try:
                here = self._local.read(folder)
            except (FormatError, NotSealed) as error:
                damage = error
        if isinstance(here, Manifest):
            self._homes[folder] = self.store
            return here
        there = self._read_remote(folder)
        if isinstance(there, Manifest):
            self._homes[folder] = self.remote.store
            if damage is not None:
                self.turned.add(folder)
            return there
        if folder in self.turned:
            self.turned.discard(folder)  # no whole remote copy: report the local damage
            return self.read(folder)
        self._homes[folder] = self.store
        if damage is not None:
            raise damage
        return here if here is not None else there

    @override
    def expect_own(self, manifest: Manifest, folder: str) -> None:
        """Check a manifest against the claims of the tier that it was read from: a claim that only
        one tier has may still be replaced there."""
        if self.find_store(folder) is self.store:
            self._local.expect_own(manifest, folder)
        else:
            self._ask_remote(lambda: self.remote.expect_own(manifest, folder), None)

    @override
    def writer(self, epoch: int) -> WriterRecord | None:
        """Read the claim of an epoch from either tier, the local one first."""
        here: WriterRecord | None = None
        damage: FormatError | None = None
        try:
            here = self._local.writer(epoch)
        except FormatError as error:
            damage = error
        there = self._ask_remote(lambda: self.remote.writer(epoch), None) if here is None else here
        if there is None and damage is not None:
            raise damage
        return there

    @override
    def claims(self) -> tuple[int, ...]:
        there = self._ask_remote(self.remote.claims, ())
        return tuple(sorted({*self._local.claims(), *there}, reverse=True))

    @override
    def epochs(self, attempts: Collection[AttemptName] | None = None) -> tuple[int, ...]:
        there = self._ask_remote(lambda: self.remote.epochs(attempts), ())
        return tuple(sorted({*self._local.epochs(attempts), *there}, reverse=True))

    @override
    def _has_deleted(self, *, since: int) -> bool:
        tiers = (self._local, self.remote)
        return any(tier._has_deleted(since=since) for tier in tiers)

    def _read_remote(self, folder: str) -> Register | None:
        return self._ask_remote(lambda: self.remote.read(folder), None)

    def _ask_remote(self, question: Callable[[], T], nothing: U) -> T | U:
        """Query the remote tier; return `nothing` if it cannot be reached, with a warning."""
        if self.cut_off is not None:
            return nothing
        try:
            return question()
        except StoreError as error:
            if not is_enough(self.store):
                raise explain_needed_remote(error, self.remote.store, self.store) from error
            self.cut_off = error
            self._emit(
                "warning",
                f"{self.remote.store.url} cannot be read, so only the local tier is used: {error}",
                tier="remote",
            )
            return nothing


def explain_needed_remote(error: StoreError, remote: Store, local: Store) -> StoreError:
    """Return an error of a remote tier with the reason why it ends the call."""
    kind = StoreError if isinstance(error, NotFound) else type(error)
    return kind(
        f"{remote.url}: the remote tier cannot be used, and {local.url} has nothing of the run, or "
        "not its newest checkpoint, so that the run may be in the remote tier. Check its URL, "
        f"mount and network: {error}"
    )


def remote_emitter(emit: Emitter, url: str, *, only_first: bool = False) -> Emitter:
    """Create an emitter that adds the remote tier, and with `only_first` forwards one event."""
    forwarded: list[Event] = []

    def forward(event: Event) -> None:
        if only_first and forwarded:
            return
        forwarded[:] = [event]
        fields = {**event.fields, "tier": "remote"}
        emit(event.kind, f"{url}: {event.message}", step=event.step, **fields)

    return Emitter((forward,))
