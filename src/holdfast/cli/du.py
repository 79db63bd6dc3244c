"""`holdfast du`: what a root takes up, by checkpoint and component, with links counted once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

from holdfast.cli import options
from holdfast.cli.documents import unread_line
from holdfast.cli.options import command
from holdfast.cli.output import Answer, TextTable, format_nbytes
from holdfast.cli.target import open_root
from holdfast.encryption.store import bare
from holdfast.errors import HoldfastError, NotFound
from holdfast.format import layout
from holdfast.root.catalog import Catalog, Entry
from holdfast.store.base import ObjectInfo, Store

RECORDS = "records"
"""What a checkpoint has beside its components: manifest, index, pins, tags, marks."""


class Usage(msgspec.Struct, frozen=True):
    """Bytes of some files."""

    nbytes: int
    """Their bytes."""
    shared_nbytes: int
    """Those of them that are links to files of other checkpoints, too: deletion keeps these."""

    @property
    def freed_nbytes(self) -> int:
        """Bytes that deleting them frees."""
        return self.nbytes - self.shared_nbytes


class CheckpointUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, or what a save has left in its folder."""

    folder: str
    """Its folder."""
    step: int | None
    """Completed steps; null where there is no manifest that can be read."""
    is_checkpoint: bool
    """Whether it is committed."""
    nbytes: int
    """Bytes of its files, links to others included."""
    freed_nbytes: int
    """Bytes that deleting it alone frees."""
    components: dict[str, Usage]
    """By component; `records` is what belongs to none."""


class DuAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast du`."""

    root: str
    """Path or URL."""
    nbytes: int
    """Bytes of all files below the root, each file once."""
    linked_nbytes: int
    """Bytes more that it would take without links."""
    checkpoints: tuple[CheckpointUsage, ...]
    """Newest first."""
    components: dict[str, int]
    """Bytes by component over all checkpoints, each file once."""
    other_nbytes: int
    """Bytes that belong to no checkpoint: claims, logs, requests."""
    unread: tuple[str, ...]
    """Checkpoints whose manifest cannot be read, with the reason; their files are `records`."""


@command("du", options.root, answer=DuAnswer)
def usage(root: str) -> Answer:
    """Show the disk usage of a root, by checkpoint and component.

    Also how much space the deletion of each checkpoint would free.
    """
    store = open_root(root)
    entries, unread = Catalog(store).survey()
    known = {entry.folder: entry for entry in entries}
    failed = dict(unread)
    files = [*_list_stored(bare(store))]
    by_folder: dict[str, list[ObjectInfo]] = defaultdict(list)
    for info in files:
        by_folder[_folder(info)].append(info)
    other = sum(info.nbytes for info in by_folder.pop("", []))
    num_names = Counter(_identity(info) for info in files)
    folders = sorted(by_folder, key=_parse_order, reverse=True)
    component_of = {
        folder: _map_components(store, by_folder[folder], known.get(folder)) for folder in folders
    }
    checkpoints = tuple(
        _checkpoint(
            folder,
            by_folder[folder],
            component_of[folder],
            known.get(folder),
            num_names,
            is_checkpoint=folder in known or folder in failed,
        )
        for folder in folders
    )
    answer = DuAnswer(
        root=store.url,
        nbytes=_once(files),
        linked_nbytes=sum(info.nbytes for info in files) - _once(files),
        checkpoints=checkpoints,
        components=_by_component(by_folder, component_of),
        other_nbytes=other,
        unread=tuple(unread_line(folder, error) for folder, error in unread),
    )
    return Answer(document=answer, parts=_format_usage(answer, failed))


def _list_stored(store: Store) -> Iterator[ObjectInfo]:
    """Yield all files of a store, those of checkpoints with what links have in common."""
    for info in store.list():
        if store.has_links and _folder(info):
            with suppress(NotFound):  # deleted meanwhile
                yield store.head(info.key)
        else:
            yield info


def _folder(info: ObjectInfo) -> str:
    """Return the folder of the checkpoint or attempt that a file is in; "" for others."""
    first, slash, _ = info.key.partition("/")
    return first if slash and layout.parse_attempt(first) is not None else ""


def _parse_order(folder: str) -> tuple[int, int]:
    name = layout.parse_attempt(folder)
    assert name is not None
    return name.epoch, name.sequence


def _identity(info: ObjectInfo) -> str:
    return info.identity or info.key


def _once(files: Iterable[ObjectInfo]) -> int:
    return sum({_identity(info): info.nbytes for info in files}.values())


def _map_components(
    store: Store, files: Iterable[ObjectInfo], entry: Entry | None
) -> Mapping[str, str]:
    """Return the component of each file of a checkpoint, by its key."""
    if entry is None:
        return {}
    component_of = {
        file: name for name, one in entry.manifest.components.items() for file in one.files
    }
    plain = [info.key for info in files]
    if bare(store) is not store:
        # Both list the same files in one order; the names of encrypted ones say nothing.
        plain = [info.key for info in store.list(f"{entry.folder}/")]
    found = zip(files, plain, strict=False)
    return {
        info.key: component_of[name]
        for info, key in found
        if (name := key.partition("/")[2]) in component_of
    }


def _checkpoint(
    folder: str,
    files: Iterable[ObjectInfo],
    component_of: Mapping[str, str],
    entry: Entry | None,
    num_names: Mapping[str, int],
    *,
    is_checkpoint: bool,
) -> CheckpointUsage:
    nbytes: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    for info in files:
        component = component_of.get(info.key, RECORDS)
        nbytes[component] += info.nbytes
        shared[component] += info.nbytes if num_names[_identity(info)] > 1 else 0
    total = sum(nbytes.values())
    return CheckpointUsage(
        folder=folder,
        step=None if entry is None else entry.step,
        is_checkpoint=is_checkpoint,
        nbytes=total,
        freed_nbytes=total - sum(shared.values()),
        components={name: Usage(nbytes[name], shared[name]) for name in sorted(nbytes)},
    )


def _by_component(
    by_folder: Mapping[str, list[ObjectInfo]], component_of: Mapping[str, Mapping[str, str]]
) -> dict[str, int]:
    files: dict[str, list[ObjectInfo]] = defaultdict(list)
    for folder, infos in by_folder.items():
        for info in infos:
            files[component_of[folder].get(info.key, RECORDS)].append(info)
    return {name: _once(files[name]) for name in sorted(files)}


def _format_usage(answer: DuAnswer, failed: Mapping[str, HoldfastError]) -> list[str | TextTable]:
    names = [*answer.components]
    rows = [
        (
            "–" if one.step is None else str(one.step),
            one.folder,
            format_nbytes(one.nbytes),
            format_nbytes(one.freed_nbytes),
            *(_cell(one, name) for name in names),
            _describe_usage(one, failed),
        )
        for one in answer.checkpoints
    ]
    total = ("all", "", format_nbytes(sum(answer.components.values())), "")
    rows.append((*total, *(format_nbytes(nbytes) for nbytes in answer.components.values()), ""))
    table = TextTable(
        columns=("step", "folder", "size", "deleting it frees", *names, ""),
        rows=rows,
        right=frozenset({0, *range(2, 4 + len(names))}),
        whole=frozenset({1}),
    )
    saved = f"; links save {format_nbytes(answer.linked_nbytes)}" if answer.linked_nbytes else ""
    other = f", {format_nbytes(answer.other_nbytes)} of them in claims, logs and other records"
    return [table, f"{format_nbytes(answer.nbytes)} in {answer.root}{other}{saved}", *answer.unread]


def _cell(one: CheckpointUsage, name: str) -> str:
    used = one.components.get(name)
    if used is None:
        return ""
    return f"{format_nbytes(used.nbytes)}{' (shared)' if used.shared_nbytes else ''}"


def _describe_usage(one: CheckpointUsage, failed: Mapping[str, HoldfastError]) -> str:
    if one.folder in failed:
        return "unread"
    return "" if one.is_checkpoint else "not committed"
