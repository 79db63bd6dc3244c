"""Candidates of a resume in the order in which it walks them, and why some are passed over.

Reads manifests and sizes; all bytes only on request. The walk itself is in
`holdfast.loading.search`; what depends on the live state is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from holdfast.errors import FormatError, NotSealed, SealError, is_damage
from holdfast.format.layout import AttemptName
from holdfast.format.manifest import Aborted, Deleted
from holdfast.ownership.claim import Choice, dropped, is_being_deleted
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.upload_records import find_elsewhere
from holdfast.store.base import ObjectInfo, Store

Obstacle: TypeAlias = Literal[
    "damaged", "not opened", "not committed", "being deleted", "part", "thinned", "unhealthy"
]
"""Why a resume passes a candidate over. `part`: saved without a component. `thinned`: components
were dropped. `not opened`: encrypted for other keys, of a newer version, or not encrypted where
that is refused."""
Outcome: TypeAlias = Literal["taken", "passed over", "in reserve", "left behind"]
_UNCOMMITTED = "a save in progress, or leftovers of a killed one, which gc removes"
Check: TypeAlias = Callable[[str], str]
"""Reads a checkpoint in full and says what is wrong with it; empty if nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A candidate of a resume, and what becomes of it."""

    folder: str
    entry: Entry | None
    """None: it cannot be read, or there is none."""
    outcome: Outcome
    obstacle: Obstacle | None = None
    why: str = ""
    is_verified: bool = False
    """Whether every byte of it was read and found right."""
    ends_resume: bool = False
    """Whether a resume raises the error of this one, and goes no further."""


def obstacle_of(store: Store, entry: Entry) -> tuple[Obstacle, str] | None:
    """Return why no run can resume from a checkpoint, by its manifest and marks; None: it can."""
    manifest = entry.manifest
    if is_being_deleted(store, entry.marks):
        return "being deleted", "a writer began to delete it, and may still be running"
    if manifest.lacks:
        return "part", f"saved without {', '.join(manifest.lacks)}"
    lost = dropped(store, entry.folder, manifest, entry.marks)
    return ("thinned", f"{', '.join(lost)} was dropped") if lost else None


def missing_files(
    store: Store, entry: Entry, listed: Sequence[ObjectInfo] | None = None
) -> list[str]:
    """List files that a checkpoint should have and that are missing or have a wrong length."""
    if entry.marks.retired:
        return []
    infos = store.list(f"{entry.folder}/") if listed is None else listed
    nbytes = {info.key.rpartition("/")[2]: info.nbytes for info in infos}
    files = entry.manifest.files
    elsewhere = find_elsewhere(store, entry.manifest, nbytes)
    of_others = {name for names in elsewhere.values() for name in names}
    return sorted(
        name
        for component, part in entry.manifest.components.items()
        for name in part.files
        if component not in entry.marks.thinned
        and name not in of_others
        and nbytes.get(name) != files[name].stored_nbytes
    )


def resume_steps(store: Store, check: Check | None = None) -> list[Step]:
    """List the candidates of a resume, newest first; `check` reads them until one is whole."""
    catalog = Catalog(store)
    catalog.expect_rollback_target()
    steps: list[Step] = []
    is_decided = False
    for name in catalog.lineage():
        step = _judged(store, catalog, name, check, looks=not is_decided)
        if step is None:
            continue
        if is_decided and step.outcome == "taken":
            step = replace(step, outcome="in reserve")
        is_decided = is_decided or step.outcome == "taken" or step.ends_resume
        steps.append(step)
    if not is_decided:
        steps = _with_unhealthy(steps, check)
    known = {step.folder for step in steps}
    return [*steps, *_others(catalog, known)]


def _judged(
    store: Store, catalog: Catalog, name: AttemptName, check: Check | None, *, looks: bool
) -> Step | None:
    """Judge one candidate; None for one that was deleted or given up. `looks`: also at files."""
    folder = str(name)

    def passed(obstacle: Obstacle, why: str, entry: Entry | None = None) -> Step:
        return Step(folder=folder, entry=entry, outcome="passed over", obstacle=obstacle, why=why)

    try:
        entry = catalog.entry(name)
    except (FormatError, SealError) as error:
        is_skipped = is_damage(error) or isinstance(error, NotSealed)
        step = passed("damaged" if is_damage(error) else "not opened", str(error))
        return replace(step, ends_resume=not is_skipped)
    if entry is None:
        ended = isinstance(catalog.read(folder), Aborted | Deleted)
        return None if ended else passed("not committed", _UNCOMMITTED)
    found = obstacle_of(store, entry)
    if found is not None:
        return passed(*found, entry)
    if looks and (lost := missing_files(store, entry)):
        return passed("damaged", f"{len(lost)} files missing or cut: {lost[0]}", entry)
    if catalog.is_avoided(entry):
        return passed("unhealthy", "; ".join(entry.manifest.unhealthy), entry)
    reads = looks and check is not None
    if reads and check is not None and (fault := check(folder)):
        return passed("damaged", fault, entry)
    return Step(folder=folder, entry=entry, outcome="taken", is_verified=reads)


def _with_unhealthy(steps: list[Step], check: Check | None) -> list[Step]:
    """Take the newest unhealthy one that is whole: a resume does where nothing else is left."""
    found: list[Step] = []
    is_taken = False
    for step in steps:
        if step.obstacle == "unhealthy" and not is_taken:
            fault = check(step.folder) if check is not None else ""
            is_taken = not fault
            step = replace(
                step,
                outcome="taken" if is_taken else "passed over",
                obstacle="damaged" if fault else "unhealthy",
                why=fault or f"{step.why}; used because no other can be",
                is_verified=check is not None and is_taken,
            )
        found.append(step)
    return found


def _others(catalog: Catalog, known: set[str]) -> Iterator[Step]:
    """Yield what is in the root and not on the way of a resume, newest first."""
    entries, unread = catalog.survey()
    found = {entry.folder: entry for entry in entries}
    reasons = {folder: str(error) for folder, error in unread}
    for folder in map(str, catalog.open_attempts()):
        if folder in known:
            continue
        if folder in found or folder in reasons:
            why = reasons.get(folder, "the run was rolled back to an earlier one")
            yield Step(folder=folder, entry=found.get(folder), outcome="left behind", why=why)
        elif catalog.read(folder) is None:
            yield Step(
                folder=folder,
                entry=None,
                outcome="left behind",
                obstacle="not committed",
                why=_UNCOMMITTED,
            )


def standing(store: Store, *, without: str = "") -> Choice:
    """Find the checkpoint from which the run would resume, as if `without` were deleted."""
    catalog = Catalog(store)
    catalog.expect_rollback_target()
    passed_over: set[str] = set()
    unhealthy: Entry | None = None
    for name in catalog.lineage():
        if str(name) == without:
            passed_over.add(without)
            continue
        try:
            entry = catalog.entry(name)
        except (FormatError, NotSealed):
            passed_over.add(str(name))
            continue
        if entry is None:
            continue
        if obstacle_of(store, entry) is None:
            if not catalog.is_avoided(entry):
                return Choice(point=entry.reference, passed_over=frozenset(passed_over))
            unhealthy = unhealthy or entry
        passed_over.add(entry.folder)
    if unhealthy is None:
        return Choice(point=None, passed_over=frozenset(passed_over))
    passed_over.remove(unhealthy.folder)
    return Choice(point=unhealthy.reference, passed_over=frozenset(passed_over))
