"""`holdfast pin`, `unpin`, `tag`, `untag` and `metric`: what is added to a checkpoint later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.cli import options
from holdfast.cli.documents import Document
from holdfast.cli.options import argument, command, flag
from holdfast.cli.output import Answer, number
from holdfast.cli.target import names_one, open_target, read_entry
from holdfast.errors import UsageError
from holdfast.ownership.annotations import annotate, expect_removable
from holdfast.root.upload_records import expect_leading_disk


class Marked(Document, frozen=True):
    """Answer of `pin`, `unpin`, `tag`, `untag` and `metric`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the checkpoint."""
    step: int
    """Its step."""
    pinned: bool
    """Whether it is pinned now."""
    tags: Sequence[str]
    """Its tags now."""
    metrics: Mapping[str, Any]
    """Its metrics now."""


@command("pin", options.one, answer=Marked)
def pin(target: str) -> Answer:
    """Protect a checkpoint from deletion by retention rules."""
    return _change_marks(target, pinned=True)


@command("unpin", options.one, answer=Marked)
def unpin(target: str) -> Answer:
    """Remove the pin of a checkpoint.

    Retention rules apply to it again.
    """
    return _change_marks(target, pinned=False)


@command("tag", options.one, argument("tags", "TAG...", "Tags to add.", nargs=-1), answer=Marked)
def tag(target: str, tags: Sequence[str]) -> Answer:
    """Add tags to a checkpoint.

    Retention rules keep tagged checkpoints, and ROOT@TAG names the checkpoint.
    """
    return _change_marks(target, tags=tags)


@command(
    "untag", options.one, argument("tags", "TAG...", "Tags to remove.", nargs=-1), answer=Marked
)
def untag(target: str, tags: Sequence[str]) -> Answer:
    """Remove tags from a checkpoint.

    Only tags that were added after the save can be removed.
    """
    return _change_marks(target, remove_tags=tags)


@command(
    "metric",
    options.one,
    argument("values", "NAME=VALUE...", "Metrics to add.", nargs=-1),
    flag("--replace", "Replace other values of these metrics."),
    answer=Marked,
)
def add_metrics(target: str, values: Sequence[str], *, replace: bool) -> Answer:
    """Add metrics to a checkpoint after its save.

    Retention rules, best and all commands count them as if they had been given to the save. It is
    an error if the checkpoint has another value of a metric.
    """
    return _change_marks(target, metrics=dict(map(_parse_metric, values)), replace=replace)


def _parse_metric(text: str) -> tuple[str, float]:
    name, equals, value = text.rpartition("=")
    try:
        if name and equals:
            return name, float(value)
    except ValueError:
        pass
    raise UsageError(f"{text!r}: expected NAME=VALUE, as in eval/mmlu=0.61")


def _change_marks(
    target: str,
    *,
    pinned: bool | None = None,
    tags: Sequence[str] = (),
    remove_tags: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    replace: bool = False,
) -> Answer:
    if not names_one(target):
        raise UsageError(f"{target!r}: name one checkpoint, as ROOT@WHICH")
    store, folder = open_target(target)
    entry = read_entry(store, folder)
    expect_leading_disk(store)
    expect_removable(entry, remove_tags)
    annotate(
        store,
        entry,
        add_tags=tags,
        remove_tags=remove_tags,
        pinned=pinned,
        metrics=metrics,
        replace=replace,
    )
    entry = read_entry(store, folder)
    marks = ["pinned" if entry.marks.pinned else "not pinned", *(f"#{t}" for t in entry.tags)]
    marks += [f"{name} {number(entry.metrics[name])}" for name in metrics or ()]
    document = Marked(
        root=store.url,
        folder=folder,
        step=entry.step,
        pinned=entry.marks.pinned,
        tags=entry.tags,
        metrics=entry.metrics,
    )
    return Answer(document=document, parts=[f"{folder}: {', '.join(marks)}"])
