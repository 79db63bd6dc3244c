"""`holdfast gc --damaged`: show a checkpoint whose manifest cannot be read, and delete it."""

from __future__ import annotations

from contextlib import suppress

from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.health import GcDamaged
from holdfast.cli.output import Answer, Code, emitter, format_nbytes
from holdfast.cli.target import open_root, open_root_store
from holdfast.encryption.store import bare
from holdfast.errors import (
    FormatError,
    HoldfastError,
    NoCheckpoint,
    StoreError,
    UnsupportedVersion,
    UsageError,
)
from holdfast.format import layout
from holdfast.format.envelope import Visible
from holdfast.format.manifest import Manifest
from holdfast.format.records import TiersRecord
from holdfast.maintenance.delete import Damaged, delete_damaged, examine_damaged
from holdfast.root.byte_ranges import read_listing
from holdfast.root.catalog import Catalog, is_root
from holdfast.root.documents import read_if_there
from holdfast.store.base import Store


def remove(root: str, folder: str, *, is_sure: bool) -> Answer:
    """Show what is known of a checkpoint with a damaged manifest; delete it if `is_sure`."""
    folder = folder.rstrip("/")
    store = open_root(root)
    damaged = examine_damaged(store, folder)
    warnings = _other_tier(bare(store), folder)
    said: list[str] = []
    why = delete_damaged(store, folder, emit=emitter(said)) if is_sure else None
    has_marker = bool(store.children(folder)) and why == ""
    document = {
        "root": store.url,
        "folder": folder,
        "why": damaged.why,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in damaged.files],
        "nbytes": damaged.nbytes,
        "pinned": damaged.pinned,
        "tags": list(damaged.tags),
        "is_latest": damaged.is_latest,
        "goes_on_from": damaged.goes_on_from,
        "warnings": [*warnings, *said],
        "deleted": why == "",
        "kept_because": why or None,
        "marker": has_marker,
    }
    if why is None:
        end = f"nothing was deleted. To delete it: holdfast gc {root} --damaged {folder} --yes"
    elif why:
        end = f"kept: {why}"
    else:
        marker = "; a marker stays, as after `holdfast gc`" if has_marker else ""
        end = f"deleted; {format_nbytes(damaged.nbytes)} freed{marker}"
    code = Code.OK if why == "" else Code.FOUND
    return Answer(
        document=make_answer(GcDamaged, document),
        parts=[*_format_damage(damaged), *warnings, end],
        code=code,
    )


def _other_tier(store: Store, folder: str) -> list[str]:
    """Check the run's other tier; return warnings, or raise if it has or may have `folder`."""
    tiers = read_if_there(store, layout.TIERS, TiersRecord.decode)
    if tiers is None:
        return [_TIERED] if _is_tiered(store) else []
    try:
        remote = open_root_store(tiers.remote)
        if not is_root(remote):
            raise NoCheckpoint(f"{remote.url}: no root of Holdfast; is it mounted?")
        listing = read_listing(remote, folder)
    except UnsupportedVersion:
        raise
    except FormatError:
        return []  # damaged in the other tier, too
    except HoldfastError as error:
        raise StoreError(
            f"{folder}: nothing was deleted, for {tiers.remote}, which may have it whole, cannot "
            f"be asked: {error}"
        ) from error
    if isinstance(listing, Manifest | Visible):
        raise UsageError(
            f"{folder}: nothing was deleted, for {tiers.remote} has it: a resume with both tiers "
            "that reads it mends it from there"
        )
    return []


_TIERED = (
    "the run has two tiers, and nothing here names the other: look there first, and delete nothing "
    "that is whole there"
)


def _is_tiered(store: Store) -> bool:
    """Whether the newest readable claim is that of a run with two tiers."""
    catalog = Catalog(store)
    for epoch in catalog.claims():
        with suppress(FormatError):
            claim = catalog.writer(epoch)
            if claim is not None:
                return claim.tiered
    return False


def _format_damage(damaged: Damaged) -> list[str]:
    marks = [f"tagged {tag}" for tag in damaged.tags]
    marks += ["pinned"] if damaged.pinned else []
    marks += ["the latest"] if damaged.is_latest else []
    before = damaged.goes_on_from
    return [
        f"{damaged.folder}: {'; '.join([damaged.why, *marks])}",
        *(f"  {name}  {format_nbytes(nbytes)}" for name, nbytes in damaged.files),
        f"without it the run resumes from {before}"
        if before
        else "the run can resume from no other checkpoint",
    ]
