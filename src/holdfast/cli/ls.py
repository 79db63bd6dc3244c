"""`holdfast ls`: list the checkpoints of a root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.cli import options
from holdfast.cli.answers.base import make_answer
from holdfast.cli.answers.checkpoints import Ls
from holdfast.cli.documents import (
    checkpoint_document,
    codecs,
    expect_something_opened,
    is_timing,
    nbytes_left,
    origin_marks,
    unread_documents,
    unread_line,
)
from holdfast.cli.options import command
from holdfast.cli.output import Answer, Code, TextTable, format_nbytes, number, one_line
from holdfast.cli.target import open_root
from holdfast.errors import FormatError, HoldfastError, NoCheckpoint
from holdfast.format.manifest import Manifest
from holdfast.maintenance.resume_plan import missing_files
from holdfast.ownership.claim import is_closed
from holdfast.ownership.leases import FoundLease, find_leases
from holdfast.ownership.process import liveness
from holdfast.root.catalog import Catalog, Entry
from holdfast.store.base import Store
from holdfast.threads.buffers import collector_paused

MAX_METRICS = 3
"""Most metrics of a checkpoint for people; JSON has all."""
MAX_NAME = 40
"""Most characters of a metric's name for people."""
_STATES: Mapping[str, str] = {"ours": "alive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RootContents:
    """Checkpoints of a root, newest first, and its owner, readers and unfinished saves."""

    entries: Sequence[Entry]
    unread: Sequence[tuple[str, HoldfastError]]
    lineage: frozenset[str]
    head: str | None
    best: str | None
    """Folder of what `@best` names."""
    unfinished: Sequence[str]
    owner: Mapping[str, Any] | None
    readers: Sequence[FoundLease]
    missing: Mapping[str, Sequence[str]]
    """Files that are missing or have the wrong length, by folder."""


@command("ls", options.root, answer=Ls)
@collector_paused()
def list_root(root: str) -> Answer:
    """List the checkpoints of a root, newest first.

    The last column has marks: latest and best (the checkpoints that ROOT@latest and ROOT@best
    name), rejected (a resume found damage), left behind (a rollback went back to an older
    checkpoint), unhealthy (a resume skips it), by NAME (the saver), and #tag. Unreadable manifests,
    unfinished saves, the owner of the run and readers are listed below the table.
    """
    store = open_root(root)
    contents = _read_root_contents(store)
    expect_something_opened(contents.entries, contents.unread)
    if not contents.entries and not contents.unread:
        raise NoCheckpoint(f"{store.url}: no checkpoints yet{_unfinished_note(contents)}")
    document = {
        "root": store.url,
        "head": contents.head,
        "best": contents.best,
        "owner": contents.owner,
        "readers": [_describe_reader(lease) for lease in contents.readers],
        "checkpoints": [
            {
                **checkpoint_document(store, entry),
                "in_lineage": entry.folder in contents.lineage,
                "missing": contents.missing[entry.folder],
            }
            for entry in contents.entries
        ],
        **unread_documents(contents.unread),
        "unfinished": list(contents.unfinished),
    }
    is_damaged = contents.unread or any(contents.missing.values())
    code = Code.FOUND if is_damaged else Code.OK
    return Answer(
        document=make_answer(Ls, document), parts=_format_listing(store, contents), code=code
    )


def _read_root_contents(store: Store) -> _RootContents:
    catalog = Catalog(store)
    entries, unread = catalog.survey()
    files = catalog.files
    lineage = [str(name) for name in catalog.lineage()]
    known = {entry.folder: entry for entry in entries}
    standing = [known[folder] for folder in lineage if folder in known]
    latest, best = catalog.latest(standing), catalog.best(standing)
    others = [str(name) for name in catalog.attempts()]
    committed = {*known, *(folder for folder, _ in unread)}
    return _RootContents(
        entries=entries,
        unread=unread,
        lineage=frozenset(lineage),
        head=None if latest is None else latest.folder,
        best=None if best is None else best.folder,
        unfinished=[
            name for name in others if name not in committed and catalog.read(name) is None
        ],
        owner=owner_of(store, catalog),
        readers=[lease for lease in find_leases(store) if lease.state != "dead"],
        missing={
            entry.folder: missing_files(store, entry, files.get(entry.folder)) for entry in entries
        },
    )


def owner_of(store: Store, catalog: Catalog) -> Mapping[str, Any] | None:
    """Describe the newest claim, and whether its process is alive, dead, closed or unknown."""
    epoch = catalog.highest_epoch()
    try:
        writer = catalog.writer(epoch) if epoch else None
    except FormatError:
        return None
    if writer is None:
        return None
    state = "closed" if is_closed(store, epoch) else liveness(writer.process)
    return {
        "epoch": epoch,
        "host": writer.process.host,
        "pid": writer.process.pid,
        "since": writer.created,
        "state": _STATES.get(state, state),
    }


def _describe_reader(found: FoundLease) -> Mapping[str, Any]:
    """Describe a reader for JSON; only its folder and state if its lease cannot be read."""
    lease = found.lease
    return {
        "folder": found.folder,
        "host": lease.process.host if lease is not None else None,
        "pid": lease.process.pid if lease is not None else None,
        "since": lease.created if lease is not None else None,
        "state": _STATES.get(found.state, found.state),
    }


def _format_listing(store: Store, contents: _RootContents) -> list[str | TextTable]:
    parts: list[str | TextTable] = []
    if contents.entries:
        parts.append(
            TextTable(
                columns=("step", "folder", "size", "created (UTC)", "metrics", "marks"),
                rows=[_row(store, entry, contents) for entry in contents.entries],
                right=frozenset({0, 2}),
                whole=frozenset({0, 1, 2, 3}),
            )
        )
    parts += [unread_line(folder, error) for folder, error in contents.unread]
    if contents.unfinished:
        parts.append(f"not committed: {len(contents.unfinished)} (under way, or left for gc)")
    owner = contents.owner
    if owner is not None and owner["state"] in ("alive", "unknown"):
        parts.append(
            f"writer {owner['epoch']}: process {owner['pid']} on {owner['host']} "
            f"since {owner['since']} ({owner['state']})"
        )
    parts += [f"{lease.folder} is read by {lease.who}" for lease in contents.readers]
    return parts


def _row(store: Store, entry: Entry, contents: _RootContents) -> tuple[str, ...]:
    flags = (
        ("latest", entry.folder == contents.head),
        ("best", entry.folder == contents.best),
        ("pinned", entry.marks.pinned),
        ("rejected", bool(entry.marks.rejected)),
        ("being deleted", entry.marks.retired),
        ("left behind", entry.folder not in contents.lineage),
    )
    lost = contents.missing[entry.folder]
    marks = [
        *([f"{len(lost)} files missing or cut: {lost[0]}"] if lost else []),
        *(name for name, is_set in flags if is_set),
        *origin_marks(entry.manifest),
        *codecs(entry.manifest),
        *(f"without {name}" for name in entry.marks.thinned),
        *(f"#{tag}" for tag in entry.tags),
    ]
    return (
        str(entry.step),
        entry.folder,
        format_nbytes(nbytes_left(store, entry)),
        entry.manifest.created[:16].replace("T", " "),
        _metrics(entry.manifest),
        ", ".join(marks),
    )


def _metrics(manifest: Manifest) -> str:
    """Format the metrics: those of rules first, then losses, timings last; the rest is counted."""
    watched = [one.metric for one in manifest.best]

    def rank(name: str) -> tuple[bool, bool, bool, str]:
        return (name not in watched, "loss" not in name.lower(), is_timing(name), name)

    names = sorted(manifest.metrics, key=rank)
    shown = names[:MAX_METRICS]
    texts = [f"{one_line(name, MAX_NAME)} {number(manifest.metrics[name])}" for name in shown]
    num_more = len(names) - MAX_METRICS
    return ", ".join([*texts, *([f"{num_more} more"] if num_more > 0 else [])])


def _unfinished_note(contents: _RootContents) -> str:
    if not contents.unfinished:
        return ""
    return f" ({len(contents.unfinished)} not committed: under way, or left for gc)"
