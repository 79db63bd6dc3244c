"""`holdfast ls`: list the checkpoints of a root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.cli import options
from holdfast.cli.documents import (
    DescribedCheckpoint,
    Document,
    Owner,
    Unopened,
    UnreadableCheckpoint,
    describe_checkpoint,
    expect_something_opened,
    is_timing,
    origin_marks,
    owner_of,
    split_unread,
    unread_line,
)
from holdfast.cli.options import command
from holdfast.cli.output import (
    Answer,
    Code,
    TextTable,
    format_nbytes,
    format_time,
    number,
    one_line,
)
from holdfast.cli.target import open_root
from holdfast.errors import HoldfastError, NoCheckpoint
from holdfast.format.manifest import Manifest
from holdfast.maintenance.resume_plan import missing_files
from holdfast.ownership.leases import FoundLease, find_leases
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.upload_records import find_elsewhere
from holdfast.store.base import Store
from holdfast.threads.buffers import collector_paused

MAX_METRICS = 3
"""Most metrics of a checkpoint for people; JSON has all."""
MAX_NAME = 40
"""Most characters of a metric's name for people."""


class LeaseHolder(Document, frozen=True):
    """Process that keeps a checkpoint from deletion. What its lease does not say is null."""

    folder: str
    """Checkpoint that is read."""
    host: str | None
    """Host of the process."""
    pid: int | None
    """Number of the process on that host."""
    since: str | None
    """UTC time of the lease, ISO 8601."""
    state: str
    """`alive` or `unknown`."""


class Listed(DescribedCheckpoint, frozen=True):
    """Checkpoint of `ls`."""

    components: Sequence[str]
    """Names of its components."""
    in_lineage: bool
    """Whether the run stands on it; false where the run went back before it."""
    missing: Sequence[str]
    """Files that are missing or have the wrong length."""
    elsewhere: Mapping[str, int]
    """Number of files that are only on the disk of another host, by host."""


class Ls(Document, frozen=True):
    """Answer of `ls`."""

    root: str
    """Path or URL of the root."""
    head: str | None
    """Folder from which the run would resume."""
    best: str | None
    """Folder that `@best` names; null: none, as no metric or tag says which."""
    owner: Owner | None
    """Newest claim; null if there is none, or it cannot be read."""
    readers: Sequence[LeaseHolder]
    """Processes that read checkpoints."""
    checkpoints: Sequence[Listed]
    """Checkpoints, newest first."""
    damaged: Sequence[UnreadableCheckpoint]
    """Manifests that cannot be read."""
    unopened: Sequence[Unopened]
    """Checkpoints that the keys do not open."""
    unfinished: Sequence[str]
    """Folders of saves that are not committed."""


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
    owner: Owner | None
    readers: Sequence[FoundLease]
    missing: Mapping[str, Sequence[str]]
    """Files that are missing or have the wrong length, by folder."""
    elsewhere: Mapping[str, Mapping[str, int]]
    """Number of files that are only on the disk of another host, by folder and host."""


@command("ls", options.root, answer=Ls)
@collector_paused()
def list_root(root: str) -> Answer:
    """List the checkpoints of a root, newest first.

    The last column has marks: latest and best (as in ROOT@latest and ROOT@best), rejected (a resume
    found damage), left behind (by a rollback), unhealthy (a resume skips it), by NAME (the saver),
    and #tag. Unreadable manifests, unfinished saves, the owner of the run and readers are listed
    below the table.
    """
    store = open_root(root)
    contents = _read_root_contents(store)
    expect_something_opened(contents.entries, contents.unread)
    if not contents.entries and not contents.unread:
        raise NoCheckpoint(f"{store.url}: no checkpoints yet{_unfinished_note(contents)}")
    damaged, unopened = split_unread(contents.unread)
    document = Ls(
        root=store.url,
        head=contents.head,
        best=contents.best,
        owner=contents.owner,
        readers=[_describe_reader(lease) for lease in contents.readers],
        checkpoints=[
            Listed(
                **describe_checkpoint(store, entry),
                components=sorted(entry.manifest.components),
                in_lineage=entry.folder in contents.lineage,
                missing=contents.missing[entry.folder],
                elsewhere=contents.elsewhere[entry.folder],
            )
            for entry in contents.entries
        ],
        damaged=damaged,
        unopened=unopened,
        unfinished=contents.unfinished,
    )
    is_damaged = contents.unread or any(contents.missing.values())
    code = Code.FOUND if is_damaged else Code.OK
    return Answer(document=document, parts=_format_listing(document, contents), code=code)


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
        elsewhere={entry.folder: _count_elsewhere(store, entry) for entry in entries},
    )


def _count_elsewhere(store: Store, entry: Entry) -> dict[str, int]:
    manifest = entry.manifest
    names = store.children(entry.folder) if manifest.hosts else ()
    return {host: len(files) for host, files in find_elsewhere(store, manifest, names).items()}


def _describe_reader(found: FoundLease) -> LeaseHolder:
    """Describe a reader; only its folder and state if its lease cannot be read."""
    lease = found.lease
    return LeaseHolder(
        folder=found.folder,
        host=lease.process.host if lease is not None else None,
        pid=lease.process.pid if lease is not None else None,
        since=lease.created if lease is not None else None,
        state="alive" if found.state == "ours" else found.state,
    )


def _format_listing(document: Ls, contents: _RootContents) -> list[str | TextTable]:
    parts: list[str | TextTable] = []
    if document.checkpoints:
        described = zip(document.checkpoints, contents.entries, strict=True)
        parts.append(
            TextTable(
                columns=("step", "folder", "size", "created (UTC)", "metrics", "marks"),
                rows=[_row(one, entry.manifest, document) for one, entry in described],
                right=frozenset({0, 2}),
                whole=frozenset({0, 1, 2, 3}),
            )
        )
    parts += [unread_line(folder, error) for folder, error in contents.unread]
    if document.unfinished:
        parts.append(f"not committed: {len(document.unfinished)} (under way, or left for gc)")
    owner = document.owner
    if owner is not None and owner.state in ("alive", "unknown"):
        parts.append(
            f"writer {owner.epoch}: process {owner.pid} on {owner.host} "
            f"since {owner.since} ({owner.state})"
        )
    parts += [f"{lease.folder} is read by {lease.who}" for lease in contents.readers]
    return parts


def _row(one: Listed, manifest: Manifest, document: Ls) -> tuple[str, ...]:
    flags = (
        ("latest", one.folder == document.head),
        ("best", one.folder == document.best),
        ("pinned", one.pinned),
        ("rejected", bool(one.rejected)),
        ("being deleted", one.retired),
        ("left behind", not one.in_lineage),
    )
    lost = one.missing
    marks = [
        *([f"{len(lost)} files missing or cut: {lost[0]}"] if lost else []),
        *([f"files on other hosts: {sum(one.elsewhere.values())}"] if one.elsewhere else []),
        *(name for name, is_set in flags if is_set),
        *origin_marks(manifest),
        *one.codecs,
        *(f"without {name}" for name in one.thinned),
        *(f"#{tag}" for tag in one.tags),
    ]
    return (
        str(one.step),
        one.folder,
        format_nbytes(one.nbytes),
        format_time(one.created, nchars=16),
        _format_metrics(one, manifest),
        ", ".join(marks),
    )


def _format_metrics(one: Listed, manifest: Manifest) -> str:
    """Format the metrics: those of rules first, then losses, timings last; the rest is counted."""
    watched = [best.metric for best in manifest.best]

    def rank(name: str) -> tuple[bool, bool, bool, str]:
        return (name not in watched, "loss" not in name.lower(), is_timing(name), name)

    names = sorted(one.metrics, key=rank)
    shown = names[:MAX_METRICS]
    texts = [f"{one_line(name, MAX_NAME)} {number(one.metrics[name])}" for name in shown]
    num_more = len(names) - MAX_METRICS
    return ", ".join([*texts, *([f"{num_more} more"] if num_more > 0 else [])])


def _unfinished_note(contents: _RootContents) -> str:
    if not contents.unfinished:
        return ""
    return f" ({len(contents.unfinished)} not committed: under way, or left for gc)"
