"""Tags, pins, late metrics and rejections of committed checkpoints; checks of these.

`Marking` has the methods of the manager for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from holdfast.arguments import check_arguments, escaped
from holdfast.errors import (
    AlreadyExists,
    CommitConflict,
    NoCheckpoint,
    NotFound,
    NotSealed,
    UsageError,
)
from holdfast.format import layout
from holdfast.format.manifest import Manifest
from holdfast.format.records import Notes, Rejected
from holdfast.ownership.claim import dropped, is_being_deleted
from holdfast.root.catalog import Catalog, Entry, Marks
from holdfast.root.commit import put_once
from holdfast.store.base import Store

_MAX_RACES = 100


def annotate(
    store: Store,
    entry: Entry,
    *,
    add_tags: Iterable[str] = (),
    remove_tags: Iterable[str] = (),
    pinned: bool | None = None,
    metrics: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> None:
    """Add tags to a checkpoint, remove those of `remove_tags` that it has, pin or unpin it, and
    add metrics; with `replace` also in place of other values.

    The notes are put first; then a deletion under way is detected (docs/design.md, rule 4).
    """
    removed, new_tags, measured = (
        tuple(remove_tags),
        checked_tags(add_tags),
        checked_metrics(metrics),
    )
    for marks in read_marks(store, entry):
        if not replace:
            _expect_no_other_value(store, entry, marks, measured)
        notes, tags = marks.notes, dict.fromkeys((*marks.tags, *new_tags))
        changed = Notes(
            tags=tuple(tag for tag in tags if tag not in removed),
            pinned=marks.pinned if pinned is None else pinned,
            metrics={**notes.metrics, **measured},
            evaluating={n: by for n, by in notes.evaluating.items() if n not in measured},
        )
        if put_notes(store, entry, marks, changed):
            return


def read_marks(store: Store, entry: Entry) -> Iterator[Marks]:
    """Yield the marks of a checkpoint, read again for each try to put notes."""
    for _ in range(_MAX_RACES):
        yield Catalog(store).marks(entry.folder)
    raise CommitConflict(f"{store.url}/{entry.folder}: {_MAX_RACES} others wrote notes at once")


def put_notes(store: Store, entry: Entry, marks: Marks, notes: Notes) -> bool:
    """Put notes that follow those in `marks`; return False if others were put first.

    Raises:
        NoCheckpoint: the deletion of the checkpoint has begun.
    """
    key = f"{entry.folder}/{layout.notes_name(marks.notes_number + 1)}"
    try:
        put_once(store, key, notes.encode())
    except CommitConflict:
        return False
    except NotFound as error:
        raise NoCheckpoint(f"{store.url}/{entry.folder}: it is gone") from error
    _expect_kept(store, entry)
    return True


def _expect_no_other_value(
    store: Store, entry: Entry, marks: Marks, measured: Mapping[str, float]
) -> None:
    known = {**entry.manifest.metrics, **marks.notes.metrics}
    # As text, in which nan equals nan.
    others = [name for name, value in measured.items() if str(known.get(name, value)) != str(value)]
    if others:
        raise UsageError(
            f"{store.url}/{entry.folder} has other values of "
            + ", ".join(f"{name} ({known[name]:g}, not {measured[name]:g})" for name in others)
            + ". To replace them: `holdfast metric --replace`, or replace=True"
        )


def annotate_copies(catalog: Catalog, which: str | int, **notes: Any) -> None:
    """Annotate a checkpoint, by its name, in each tier that keeps it; `notes` as in `annotate`."""
    catalog.look_again()
    entry = catalog.find_checkpoint(which)
    expect_removable(entry, notes.get("remove_tags", ()))
    is_done, failure = False, None
    for found in catalog.copies(entry):
        try:
            annotate(*found, **notes)
            is_done = True
        except NoCheckpoint as error:  # retention may be deleting the copy in one tier
            failure = failure or error
    if failure is not None and not is_done:
        raise failure


def copy_marks(source: Store, target: Store, name: layout.AttemptName) -> None:
    """Copy the pin, tags and later metrics of a checkpoint to its copy, if that exists.

    Between tiers a pin is set in the local one first, and then in the remote one if that has a
    copy, so that either the pin or the upload sees the other. Pins of the copy alone stay.
    """
    marks = Catalog(source).marks(str(name))
    copy_metrics(marks, target, name)
    copy = Catalog(target).entry(name) if marks.pinned or marks.tags else None
    if copy is None:
        return
    if copy.marks.pinned >= marks.pinned and {*copy.marks.tags} >= {*marks.tags}:
        return
    try:
        annotate(target, copy, add_tags=marks.tags, pinned=marks.pinned or None)
    except NotSealed:
        annotate(target, copy, pinned=True)  # a pin keeps what the tags would keep


def copy_metrics(marks: Marks, target: Store, name: layout.AttemptName) -> None:
    """Copy the later metrics of a checkpoint to its copy, if that exists and can take them.

    Values that the copy was given itself stay.
    """
    metrics = marks.notes.metrics
    copy = Catalog(target).entry(name) if metrics else None
    known = copy.marks.notes.metrics if copy is not None else metrics
    new = {metric: value for metric, value in metrics.items() if metric not in known}
    if copy is not None and new:
        with suppress(NotSealed, NoCheckpoint):
            annotate(target, copy, metrics=new, replace=True)


def expect_removable(entry: Entry, tags: Iterable[str]) -> None:
    """Check that tags can be removed from a checkpoint."""
    given = tuple(tags)
    if fixed := [tag for tag in given if tag in entry.manifest.tags]:
        raise UsageError(
            f"{entry.folder}: {', '.join(fixed)} was given by the save and is part of the "
            "checkpoint, which never changes; only tags that were added later can be removed"
        )
    if unknown := [tag for tag in given if tag not in entry.marks.tags]:
        there = ", ".join(entry.marks.tags) or "none"
        raise UsageError(f"{entry.folder} has no tag {', '.join(unknown)}; added tags: {there}")


def checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Check and return tags: each one word that cannot be read as a step, folder or `latest`."""
    if isinstance(tags, str):
        raise UsageError(f"tags={tags!r}: give a list of tags, not one text")
    checked = tuple(tags)
    for tag in checked:
        is_text = isinstance(tag, str) and tag.isprintable() and 0 < len(tag) <= 200
        if not is_text or any(map(str.isspace, tag)):
            raise UsageError(f"tags: {tag!r}: 1 to 200 printable characters, without blanks")
        if tag == "latest" or tag.startswith("step=") or layout.parse_attempt(tag) is not None:
            raise UsageError(f"tags: {tag!r} has another meaning as a name of a checkpoint")
    return checked


def checked_reasons(reasons: Any) -> tuple[str, ...]:
    """Check and return the reasons for an unhealthy state, given by `before_save`, or None."""
    given = () if reasons is None else reasons
    if isinstance(given, list | tuple) and all(isinstance(reason, str) for reason in given):
        return tuple(map(escaped, given))
    raise UsageError(
        f"before_save returned {reasons!r}: must be None or a list of texts, the reasons not to "
        "resume from the state"
    )


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert metrics to floats; one-element tensors and NumPy scalars are accepted, too."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(f"metrics={metrics!r}: give a dict, such as {{'loss': 0.5}}")
    checked: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise UsageError(f"metrics: the name {name!r} is not text")
        if name != escaped(name):
            raise UsageError(f"metrics: the name {name!r} is not Unicode")
        try:
            # torch warns of a tensor with a graph, which the loss of a training loop is.
            checked[name] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"metrics[{name!r}]={value!r} is not one number") from error
        except OverflowError as error:
            raise UsageError(f"metrics[{name!r}] is too large for a float") from error
    return checked


def reject(store: Store, folder: str, *, by: str, reason: str) -> None:
    """Mark a checkpoint that resume could not use. It is not deleted, and may be tried again.

    A checkpoint from which retention dropped components is not marked: the rest is not damaged.
    """
    if Catalog(store).marks(folder).thinned_by:
        return
    record = Rejected(by=by, reasons=(reason,)).encode()
    try:
        store.put(f"{folder}/{layout.REJECTED}", record, if_absent=True)
    except (AlreadyExists, NotFound):
        return  # marked before, or gone: either way there is nothing to add


def _expect_kept(store: Store, entry: Entry) -> None:
    # Marks first: a deleter that is done has removed its mark, but has put the tombstone before.
    being_deleted = is_being_deleted(store, Catalog(store).marks(entry.folder))
    if being_deleted or not isinstance(Catalog(store).read(entry.folder), Manifest):
        raise NoCheckpoint(f"{store.url}/{entry.folder}: it is already being deleted")
    marks = Catalog(store).marks(entry.folder)
    before = dropped(store, entry.folder, entry.manifest, entry.marks)
    lost = set(dropped(store, entry.folder, entry.manifest, marks)).difference(before)
    if lost:
        raise NoCheckpoint(
            f"{store.url}/{entry.folder}: retention has just dropped {', '.join(sorted(lost))} of "
            "it; the rest is kept, and no run can resume from it"
        )


class Marking:
    """Pins, tags and late metrics of single checkpoints, as methods of the manager."""

    _catalog: Catalog

    @check_arguments()
    def pin(self, which: str | int) -> None:
        """Pin a checkpoint, so that retention keeps it whatever the rule says.

        Raises:
            NoCheckpoint: `which` names no checkpoint, or its deletion has begun.
        """
        annotate_copies(self._catalog, which, pinned=True)

    @check_arguments()
    def unpin(self, which: str | int) -> None:
        """Remove the pin of a checkpoint, so that the retention rule decides again."""
        annotate_copies(self._catalog, which, pinned=False)

    @check_arguments()
    def tag(self, which: str | int, *tags: str) -> None:
        """Add tags to a checkpoint; retention keeps it, and `which` may be its tag.

        Raises:
            UsageError: no tag is given, or one cannot be a tag.
            NoCheckpoint: `which` names no checkpoint, or its deletion has begun.
        """
        if not tags:
            raise UsageError(f"tag({which!r}): name at least one tag")
        annotate_copies(self._catalog, which, add_tags=tags)

    @check_arguments()
    def untag(self, which: str | int, *tags: str) -> None:
        """Remove tags from a checkpoint, so that the retention rule decides again.

        Raises:
            UsageError: no tag is given, the checkpoint lacks one, or it was given by the save.
            NoCheckpoint: `which` names no checkpoint, or its deletion has begun.
        """
        if not tags:
            raise UsageError(f"untag({which!r}): name at least one tag")
        annotate_copies(self._catalog, which, remove_tags=tags)

    @check_arguments(but=("metrics",))
    def add_metrics(
        self, which: str | int, metrics: Mapping[str, Any], *, replace: bool = False
    ) -> None:
        """Add metrics to a checkpoint after its save, for retention rules and `best`.

        With `replace`, also those of which the checkpoint has another value.

        Raises:
            UsageError: a value is no number, or another value is known.
            NoCheckpoint: `which` names no checkpoint, or its deletion has begun.
        """
        annotate_copies(self._catalog, which, metrics=metrics, replace=replace)
