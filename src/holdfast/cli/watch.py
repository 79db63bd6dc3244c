"""`holdfast watch`: a live view of a run: checkpoints, saves under way, uploads, owner."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone

import click
import msgspec

from holdfast.cli import options
from holdfast.cli.documents import Owner, OwnerState, describe_owner
from holdfast.cli.options import command, flag, option
from holdfast.cli.output import (
    Code,
    TextTable,
    aligned,
    format_nbytes,
    format_time,
    give_line,
    printable,
)
from holdfast.cli.target import open_root
from holdfast.encryption.store import bare
from holdfast.errors import FormatError, NotFound, SealError, StoreError
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Aborted, Deleted, Manifest
from holdfast.format.records import WriterRecord
from holdfast.ownership.claim import WATCH_S, is_closed
from holdfast.ownership.process import liveness, utc_text
from holdfast.policy.clock import Unit, parse
from holdfast.policy.rules import recorded_time
from holdfast.root.byte_ranges import Listing, read_listing
from holdfast.root.catalog import Catalog, is_root
from holdfast.root.documents import read_if_there
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store

_READ_AGAIN_S = 60.0
"""How often all manifests are read again: where deletions leave a tombstone, a list does not show
them."""
_MOST_SHOWN = 12


class WatchedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint."""

    folder: str
    """Its folder."""
    step: int | None
    """Completed optimizer windows; null where it is encrypted and no key was given."""
    nbytes: int
    """Bytes of its files, as stored."""
    created: str
    """When it was saved, in UTC."""
    reason: str
    """Why it was saved; empty where it is encrypted and no key was given."""


class WatchedSave(msgspec.Struct, frozen=True, kw_only=True):
    """A save under way."""

    folder: str
    """Its folder."""
    nbytes: int
    """Bytes of its files so far."""


class WatchedUpload(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that waits for its upload or is being sent."""

    folder: str
    """Folder of the checkpoint."""
    state: str
    """`waiting`, `sending`, `failed` or `refused`."""
    sent_nbytes: int
    """Bytes that were sent so far."""


class WatchedRun(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run at one moment."""

    root: str
    """Path or URL of the run."""
    at: str
    """When this was seen, in UTC."""
    owner: Owner | None
    """The newest claim, or null."""
    last_step: int | None
    """Step of the newest checkpoint, or null."""
    last_age_s: float | None
    """Seconds since the newest checkpoint was saved, by the clock of this host."""
    nbytes: int
    """Bytes of all checkpoints."""
    checkpoints: tuple[WatchedCheckpoint, ...]
    """All checkpoints, newest first."""
    saves: tuple[WatchedSave, ...]
    """Saves of the owner under way, newest first."""
    left_behind: int
    """Number of attempts that never became checkpoints, which `holdfast gc` removes."""
    uploads: tuple[WatchedUpload, ...]
    """What waits for its upload, oldest first."""


@command(
    "watch",
    options.root,
    option("--every", "TIME", "Time between updates. [default: 2s; 10s for an object store]"),
    flag("--once", "Show the current state and exit."),
    answer=WatchedRun,
    json_lines="Print a JSON object at each change.",
)
def watch_root(root: str, *, every: str | None, once: bool, as_json: bool) -> int:
    """Show the state of a run as it changes.

    Shown are the newest checkpoints, unfinished saves, uploads and the owner. Nothing is claimed,
    and no key is needed.
    """
    store = open_root(root)
    default = "2s" if store.has_folders else "10s"
    pause_s = float(parse(every or default, what="--every", units={Unit.SECOND}).value)
    watcher = Watcher(store)
    state = watcher.observe_root()
    if as_json or once or not sys.stdout.isatty():
        _print_changes(watcher, state, None if once else pause_s, as_json=as_json)
    else:
        _show_live(watcher, state, pause_s)
    return Code.OK


class Watcher:
    """Polls a root with few requests: records that never change are read once.

    `clock` returns monotonic seconds.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[str, WatchedCheckpoint | None] = {}
        """Folder → its checkpoint; None for one that is deleted or aborted."""
        self._read_at_s = clock()
        self._beat: tuple[int, bytes, float] = (0, b"", 0.0)
        """Epoch, last heartbeat and the time when it was first seen."""

    def observe_root(self) -> WatchedRun:
        """Look at the root now; `StoreError` if it cannot be read, or has vanished."""
        if self._clock() - self._read_at_s > _READ_AGAIN_S:
            self._known, self._read_at_s = {}, self._clock()
        catalog = Catalog(self._store)
        names = catalog.open_attempts()
        there = {*map(str, names)}
        self._known = {folder: found for folder, found in self._known.items() if folder in there}
        open_names = [name for name in names if not self._is_settled(str(name))]
        owner = self._owner(catalog, names)
        if not names and owner is None and not is_root(self._store):
            raise NotFound(f"{self._store.url}: there is no longer a run here")
        is_live = owner is not None and owner.state not in ("dead", "closed")
        saving = [n for n in open_names if is_live and owner is not None and n.epoch == owner.epoch]
        known = (self._known.get(str(name)) for name in names)
        checkpoints = tuple(found for found in known if found is not None)
        newest = checkpoints[0] if checkpoints else None
        return WatchedRun(
            root=self._store.url,
            at=utc_text(),
            owner=owner,
            last_step=None if newest is None else newest.step,
            last_age_s=None if newest is None else _age_s(newest.created),
            nbytes=sum(found.nbytes for found in checkpoints),
            checkpoints=checkpoints,
            saves=tuple(self._observe_save(name) for name in saving),
            left_behind=len(open_names) - len(saving),
            uploads=self._observe_uploads(),
        )

    def _is_settled(self, folder: str) -> bool:
        """Whether an attempt is committed, deleted or aborted; reads it if that is not known."""
        if folder not in self._known:
            try:
                listing = self._listing(folder)
            except FormatError:
                return False
            if listing is None:
                return False
            if isinstance(listing, Aborted | Deleted):
                self._known[folder] = None
            else:
                self._known[folder] = _describe_checkpoint(folder, listing)
        return True

    def _listing(self, folder: str) -> Listing | Aborted | Deleted | None:
        try:
            return read_listing(self._store, folder)
        except SealError:
            return read_listing(bare(self._store), folder)

    def _observe_save(self, name: AttemptName) -> WatchedSave:
        nbytes = sum(info.nbytes for info in self._store.list(f"{name}/"))
        return WatchedSave(folder=str(name), nbytes=nbytes)

    def _owner(self, catalog: Catalog, names: Sequence[AttemptName]) -> Owner | None:
        epoch = max(catalog.epochs(names), default=0)
        try:
            claim = catalog.writer(epoch) if epoch else None
        except FormatError:
            return None
        if claim is None:
            return None
        return describe_owner(claim, self._find_owner_state(claim))

    def _find_owner_state(self, claim: WriterRecord) -> OwnerState:
        if is_closed(self._store, claim.epoch, claim.nonce):
            return "closed"
        state = liveness(claim.process)
        if state != "unknown":
            return "alive" if state == "ours" else state
        beat = read_if_there(self._store, layout.alive_key(claim.epoch), _copy_bytes) or b""
        epoch, last, since_s = self._beat
        if (epoch, last) != (claim.epoch, beat):
            self._beat = (claim.epoch, beat, self._clock())
            return "alive" if epoch == claim.epoch else "unknown"
        return "silent" if self._clock() - since_s > WATCH_S else "alive" if last else "unknown"

    def _observe_uploads(self) -> tuple[WatchedUpload, ...]:
        return tuple(
            WatchedUpload(
                folder=folder,
                state="waiting" if note is None else note.state,
                sent_nbytes=0 if note is None else note.sent_nbytes or 0,
            )
            for folder, note in Ledger(bare(self._store)).waiting().items()
        )


def _copy_bytes(data: bytes, *, what: str) -> bytes:
    return bytes(data)


def _describe_checkpoint(folder: str, listing: Listing) -> WatchedCheckpoint:
    manifest = listing if isinstance(listing, Manifest) else None
    return WatchedCheckpoint(
        folder=folder,
        step=None if manifest is None else manifest.timestamp.step,
        nbytes=sum(file.stored_nbytes for file in listing.files.values()),
        created=listing.created,
        reason="" if manifest is None else manifest.reason,
    )


def _age_s(created: str) -> float | None:
    moment = recorded_time(created)
    if moment is None:
        return None
    return max((datetime.now(timezone.utc) - moment).total_seconds(), 0.0)


def _print_changes(
    watcher: Watcher, state: WatchedRun, pause_s: float | None, *, as_json: bool
) -> None:
    """Print the state after each change; once if `pause_s` is None."""
    shown: WatchedRun | None = None
    while True:
        if shown is None or _has_changed(shown, state):
            if as_json:
                give_line(state)
            else:
                click.echo("\n".join(_format_run(state)))
                sys.stdout.flush()
            shown = state
        if pause_s is None:
            return
        time.sleep(pause_s)
        with suppress(StoreError):  # looked at again after the next pause
            state = watcher.observe_root()


def _has_changed(one: WatchedRun, other: WatchedRun) -> bool:
    """Whether two states differ in anything except their times."""
    return msgspec.structs.replace(other, at=one.at, last_age_s=one.last_age_s) != one


def _show_live(watcher: Watcher, state: WatchedRun, pause_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(Text("\n".join(_format_run(state))), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(pause_s)
            trouble: list[str] = []
            try:
                state = watcher.observe_root()
            except StoreError as error:
                trouble = ["", printable(f"cannot be read now: {error}")]
            live.update(Text("\n".join([*_format_run(state), *trouble])), refresh=True)


def _format_run(state: WatchedRun) -> list[str]:
    owner = state.owner
    who = "no process owns the run"
    if owner is not None:
        who = f"writer {owner.epoch}: {owner.pid} on {owner.host}, {owner.state}"
    step = "none yet" if state.last_step is None else f"step {state.last_step}"
    past = "" if state.last_age_s is None else f", {age(state.last_age_s)} ago"
    table = TextTable(
        columns=("step", "folder", "size", "saved (UTC)", "why"),
        rows=[*_make_checkpoint_rows(state)],
        right=frozenset({0, 2}),
    )
    lines = [
        f"{state.root}  {format_time(state.at)}",
        who,
        f"last: {step}{past}; {len(state.checkpoints)} checkpoints, {format_nbytes(state.nbytes)}",
        *([f"left behind by killed saves: {state.left_behind}"] if state.left_behind else []),
    ]
    return [*map(printable, lines), *aligned(table)]


def _make_checkpoint_rows(state: WatchedRun) -> list[tuple[str, ...]]:
    uploads = {upload.folder: upload for upload in state.uploads}
    rows: list[tuple[str, ...]] = [
        ("", save.folder, format_nbytes(save.nbytes), "under way", "") for save in state.saves
    ]
    for found in state.checkpoints[:_MOST_SHOWN]:
        upload = uploads.get(found.folder)
        sent = (
            f"; upload {upload.state}, {format_nbytes(upload.sent_nbytes)} sent" if upload else ""
        )
        step = "?" if found.step is None else str(found.step)
        saved = format_time(found.created)
        why = f"{found.reason}{sent}"
        rows.append((step, found.folder, format_nbytes(found.nbytes), saved, why))
    more = len(state.checkpoints) - _MOST_SHOWN
    if more > 0:
        rows.append(("", f"… and {more} older", "", "", ""))
    return rows


def age(seconds: float) -> str:
    """Format an age in its largest unit, such as "2.5 h"."""
    for nbr_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= nbr_s:
            return f"{seconds / nbr_s:.1f} {unit}"
    return f"{seconds:.0f} s"
