"""`holdfast gc --damaged`: show a checkpoint whose manifest cannot be read, and delete it."""

from __future__ import annotations

import click

from holdfast.care.damaged import Damaged, delete, examine
from holdfast.cli.output import Answer, Code, printable, size
from holdfast.cli.target import open_root, opened
from holdfast.cli.unlocking import inner
from holdfast.engine.roots.catalog import is_root
from holdfast.engine.tiers.ledger import Ledger
from holdfast.engine.tiers.pieces import read_listing
from holdfast.errors import FormatError, HoldfastError, NoCheckpoint, StoreError, UsageError
from holdfast.events import Emitter, Event
from holdfast.format.envelope import Visible
from holdfast.format.manifest import Manifest
from holdfast.store.base import Store


def remove(root: str, folder: str, *, is_sure: bool) -> Answer:
    """Show what is known of the checkpoint in `folder`; where `is_sure`, delete it.

    Raises:
        NoCheckpoint: not a root, or no such folder.
        UsageError: its manifest is sound, or the other tier has it.
        StoreError: the other tier cannot be asked.
        OwnedElsewhere: a live process owns the run.
    """
    folder = folder.rstrip("/")
    store = inner(open_root(root))  # no key is needed to see that it is damaged
    found = examine(store, folder)
    _expect_not_elsewhere(store, folder)
    is_deleted = is_sure and delete(store, folder, emit=Emitter((_tell,)))
    document = {
        "root": store.url,
        "folder": folder,
        "why": found.why,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in found.files],
        "nbytes": found.nbytes,
        "pinned": found.pinned,
        "tags": list(found.tags),
        "is_latest": found.is_latest,
        "goes_on_from": found.goes_on_from,
        "deleted": is_deleted,
    }
    if is_deleted:
        end = f"deleted; {size(found.nbytes)} given back"
    elif is_sure:
        end = "kept, because somebody reads it"
    else:
        end = f"nothing was deleted. To delete it: holdfast gc {root} --damaged {folder} --yes"
    code = Code.OK if is_deleted else Code.FOUND
    return Answer(document=document, parts=[*_lines(found), end], code=code)


def _expect_not_elsewhere(store: Store, folder: str) -> None:
    tiers = Ledger(store).tiers()
    if tiers is None:
        return
    try:
        remote = opened(tiers.remote)
        if not is_root(remote):
            raise NoCheckpoint(f"{remote.url}: no root of Holdfast; is it mounted?")
        listing = read_listing(remote, folder)
    except FormatError:
        return  # damaged there, too
    except HoldfastError as error:
        raise StoreError(
            f"{folder}: nothing was deleted, for {tiers.remote}, which may have it whole, cannot "
            f"be asked: {error}"
        ) from error
    if isinstance(listing, Manifest | Visible):
        raise UsageError(
            f"{folder}: nothing was deleted, for {tiers.remote} has it; a resume with both tiers "
            "mends it from there"
        )


def _lines(found: Damaged) -> list[str]:
    marks = [f"tagged {tag}" for tag in found.tags]
    marks += ["pinned"] if found.pinned else []
    marks += ["the latest"] if found.is_latest else []
    before = found.goes_on_from
    return [
        f"{found.folder}: {'; '.join([found.why, *marks])}",
        *(f"  {name}  {size(nbytes)}" for name, nbytes in found.files),
        f"without it the run goes on from {before}"
        if before
        else "no other checkpoint can be resumed; without it the run starts from nothing",
    ]


def _tell(event: Event) -> None:
    if event.kind != "claimed":
        click.echo(printable(event.message), err=True)
