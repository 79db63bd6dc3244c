"""`holdfast drift`: how much each layer changes from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from holdfast.cli.answers import history
from holdfast.cli.answers.base import Why
from holdfast.cli.documents import expect_something_opened
from holdfast.cli.output import Answer, TextTable, progress_bar
from holdfast.cli.shading import Shades, expect_drawable, logarithmic_block, write_shades
from holdfast.cli.sources import open_named
from holdfast.cli.target import open_root
from holdfast.engine.roots.catalog import Catalog, Entry
from holdfast.engine.roots.parts import parts_of
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.interop.comparing.drift import MODULE, Drift, drift
from holdfast.store.base import Store


def show_drift(
    root: str, *, components: Collection[str], last: int, depth: int | None, plot: Path | None
) -> Answer:
    """Compare the newest `last` checkpoints of a run, each with the one before.

    Raises:
        NoCheckpoint: not a root, or fewer than two checkpoints can be compared.
        FormatError: one of them is damaged.
        UsageError: no checkpoint has a component of a given name, or the file cannot be drawn.
    """
    if plot is not None:
        expect_drawable(plot)
    store = open_root(root)
    entries, skipped = _chosen(store, components, last)
    with progress_bar() as progress:
        found = drift(
            [entry.folder for entry in entries],
            lambda folder: open_named(f"{root}@{folder}"),
            components,
            depth=depth,
            progress=progress,
        )
    document = _document(store, entries, found, skipped, plot)
    parts = _parts(document)
    if plot is not None:
        write_shades(_shades(document), plot)
        parts.append(f"{plot}: {len(document.layers)} layers")
    return Answer(document=document, parts=parts)


def _chosen(store: Store, components: Collection[str], last: int) -> tuple[list[Entry], list[Why]]:
    """Return the newest checkpoints of the run that have the components, oldest first."""
    catalog = Catalog(store)
    entries, unread = catalog.survey()
    expect_something_opened(entries, unread)
    reasons = [Why(folder=folder, why=str(error)) for folder, error in unread]
    lineage = {str(name) for name in catalog.lineage()}
    chosen: list[Entry] = []
    for entry in entries:
        why = _why_not(store, entry, components, lineage)
        if why:
            reasons.append(Why(folder=entry.folder, why=why))
        elif len(chosen) < last:
            chosen.append(entry)
    if len(chosen) < 2:
        has = [entry.manifest.components for entry in entries]
        known = sorted({name for names in has for name in names})
        missing = [name for name in components if name not in known]
        if missing and entries:
            raise UsageError(
                f"{store.url}: no checkpoint has {', '.join(missing)}; there are {', '.join(known)}"
            )
        why = "".join(f"; {one.folder} is passed over: {one.why}" for one in reasons[:3])
        raise NoCheckpoint(f"{store.url}: drift needs two checkpoints to compare{why}")
    return chosen[::-1], reasons


def _why_not(
    store: Store, entry: Entry, components: Collection[str], lineage: Collection[str]
) -> str:
    """Return why a checkpoint is passed over; empty if it is compared."""
    if entry.folder not in lineage:
        return "left behind when the run went back"
    if entry.marks.retired:
        return "its deletion was begun"
    if entry.marks.rejected:
        return "rejected as damaged"
    whole = parts_of(store, entry.folder, entry.manifest, entry.marks).whole
    kinds = {name: entry.manifest.components[name].kind for name in whole}
    missing = [name for name in components if name not in kinds]
    if missing:
        return f"has no {', '.join(missing)}"
    return "" if components or MODULE in kinds.values() else "has no module"


def _document(
    store: Store,
    entries: Sequence[Entry],
    found: Drift,
    skipped: Sequence[Why],
    plot: Path | None,
) -> history.Drift:
    return history.Drift(
        root=store.url,
        depth=found.depth,
        checkpoints=[
            history.DriftedCheckpoint(
                folder=entry.folder, step=entry.step, created=entry.manifest.created
            )
            for entry in entries
        ],
        layers=[
            history.DriftedLayer(
                component=layer.component,
                layer=layer.name,
                num_tensors=len(layer.paths),
                changes=[*layer.changes],
            )
            for layer in found.layers
        ],
        total=[*found.total],
        num_read=found.num_read,
        num_unread=found.num_unread,
        not_finite=[*found.not_finite],
        skipped=[*skipped],
        plot=None if plot is None else str(plot),
    )


def _names(document: history.Drift) -> list[str]:
    is_one = len({layer.component for layer in document.layers}) <= 1
    return [
        layer.layer if is_one else f"{layer.component}:{layer.layer}" for layer in document.layers
    ]


def _shades(document: history.Drift) -> Shades:
    return Shades(
        title=document.root,
        rows=_names(document),
        columns=[str(one.step) for one in document.checkpoints[1:]],
        values=[layer.changes for layer in document.layers],
        label="relative change since the checkpoint before",
        below="step",
        is_logarithmic=True,
    )


def _parts(document: history.Drift) -> list[str | TextTable]:
    steps = [one.step for one in document.checkpoints]
    known = [value for layer in document.layers for value in layer.changes if value]
    table = TextTable(
        columns=("layer", "tensors", f"{steps[0]} to {steps[-1]}", *map(str, steps[1:])),
        rows=[
            (
                name,
                str(layer.num_tensors),
                "".join(logarithmic_block(value, known) * 2 for value in layer.changes),
                *map(_shown, layer.changes),
            )
            for name, layer in zip(_names(document), document.layers, strict=True)
        ]
        + [("together", "", "", *map(_shown, document.total))],
        right=frozenset({1, *range(3, 3 + len(steps))}),
        whole=frozenset({2}),
    )
    return [table, *_notes(document)]


def _shown(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.2g}"


def _notes(document: history.Drift) -> Iterator[str]:
    yield (
        "norm of the difference over the norm before; "
        f"{document.num_unread:,} of {document.num_unread + document.num_read:,} tensors are equal "
        "by their digests, unread"
    )
    if odd := document.not_finite:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        yield f"not finite, and left out there: {', '.join(odd[:3])}{more}"
    for one in document.skipped:
        yield f"passed over: {one.folder}: {one.why}"
