"""`holdfast tree`: the structure of a checkpoint or a file, without reading its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sized
from typing import Any

import click
import msgspec

from holdfast.cli import options
from holdfast.cli.child import limited
from holdfast.cli.options import command, option
from holdfast.cli.output import Answer, TextTable, format_nbytes
from holdfast.cli.sources import choose_components, items_of, open_read, shape_text, tensors_of
from holdfast.format.nodes import ArrayRef, GeneratorState, TensorRef
from holdfast.interop.comparing.trees import format_value
from holdfast.interop.source import LeftOut, Source, SourceComponent


class TensorLine(msgspec.Struct, frozen=True):
    """A tensor of the tree."""

    path: str
    """Keys and positions, joined by dots."""
    dtype: str
    """Name of the type, as in a safetensors file."""
    shape: tuple[int, ...]
    """Its sizes."""
    nbytes: int
    """Bytes; of tied tensors, each time."""
    key: str
    """Its key in the component. Tied tensors have one."""


class ValueLine(msgspec.Struct, frozen=True):
    """A plain value of the tree."""

    path: str
    """Path of the value in its component."""
    value: str
    """As Python writes it, shortened to 60 characters."""


class ComponentTree(msgspec.Struct, frozen=True):
    """A component."""

    name: str
    """Name of the component."""
    kind: str
    """`module`, `optimizer`, `object`, `tree`, `generator` or `rng`."""
    nbytes: int
    """Bytes of its tensors; tied ones count once."""
    num_tensors: int
    """Tensors; tied ones count once."""
    tensors: tuple[TensorLine, ...]
    """Its tensors, in the order of the tree."""
    values: tuple[ValueLine, ...]
    """Its plain values, in the order of the tree."""


class TreeAnswer(msgspec.Struct, frozen=True):
    """Answer of `holdfast tree`."""

    source: str
    """Path or URL of what was opened."""
    format: str
    """Its format, such as `holdfast` or `safetensors`."""
    step: int | None
    """Completed steps; null if the source does not tell."""
    components: tuple[ComponentTree, ...]
    """Its components."""
    left_out: tuple[LeftOut, ...]
    """What the source holds and cannot give."""


@command(
    "tree",
    options.source,
    option("--depth", "N", "Levels to show below each component.", type=click.IntRange(min=0)),
    options.components,
    options.trust,
    answer=TreeAnswer,
    wrap=limited("source"),
)
def show_tree(source: str, *, depth: int | None, components: Collection[str]) -> Answer:
    """Show the structure of a checkpoint or a file.

    That is dtype, shape and size of tensors, and plain values. No tensor is read.
    """
    with open_read(source) as opened:
        names = choose_components(opened, components)
        answer = TreeAnswer(
            source=opened.url,
            format=opened.format,
            step=opened.step,
            components=tuple(_describe_component(opened, name) for name in names),
            left_out=tuple(opened.left_out),
        )
        step = "" if opened.step is None else f", step {opened.step}"
        parts: list[str | TextTable] = [f"{opened.url}  ({opened.format}{step})"]
        parts.append(_make_tree_table(opened, names, depth))
        parts += [f"not carried over: {one.path}: {one.why}" for one in opened.left_out]
    return Answer(document=answer, parts=parts)


def _describe_component(source: Source, name: str) -> ComponentTree:
    part = source.parts[name]
    return ComponentTree(
        name=name,
        kind=part.kind,
        nbytes=sum(spec.nbytes for spec in part.specs.values()),
        num_tensors=len(part.specs),
        tensors=tuple(
            TensorLine(path.partition(":")[2], spec.dtype, spec.shape, spec.nbytes, ref.key)
            for path, ref, spec in tensors_of(source, [name])
        ),
        values=tuple(
            ValueLine(".".join(path), format_value(value)) for path, value in _values(part.tree, ())
        ),
    )


def _values(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what is no container and no tensor, empty containers, and lists of plain values."""
    items = items_of(node)
    if items and not _is_flat(node):
        for name, inner in items:
            yield from _values(inner, (*path, name))
    elif not isinstance(node, TensorRef | ArrayRef):
        yield path, node


def _is_flat(node: Any) -> bool:
    """Whether a node is a list or tuple of plain values, which is shown on one line."""
    if not isinstance(node, list | tuple):
        return False
    return not any(items_of(one) or isinstance(one, TensorRef | ArrayRef) for one in node)


def _make_tree_table(source: Source, names: Collection[str], depth: int | None) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for name in names:
        part = source.parts[name]
        nbytes = sum(spec.nbytes for spec in part.specs.values())
        rows.append((name, part.kind, _format_count(part.specs, "tensor"), format_nbytes(nbytes)))
        rows += _make_component_rows(part, part.tree, 1, depth)
    return TextTable(columns=("name", "type", "shape", "size"), rows=rows, right=frozenset({3}))


def _make_component_rows(
    part: SourceComponent, node: Any, level: int, depth: int | None
) -> Iterator[tuple[str, ...]]:
    if depth is not None and level > depth:
        return
    for name, inner in items_of(node):
        label = "  " * level + name
        if isinstance(inner, TensorRef | ArrayRef):
            spec = part.specs[inner.key]
            yield label, spec.dtype, shape_text(spec), format_nbytes(spec.nbytes)
        elif (items := items_of(inner)) and not _is_flat(inner):
            tensors = {ref.key for ref in _refs(inner)}
            nbytes = sum(part.specs[key].nbytes for key in tensors)
            about = _format_count(tensors, "tensor") if tensors else _format_count(items, "value")
            yield label, _kind(inner), about, format_nbytes(nbytes) if tensors else ""
            yield from _make_component_rows(part, inner, level + 1, depth)
        else:
            yield label, type(inner).__name__, format_value(inner), ""


def _refs(node: Any) -> Iterator[TensorRef | ArrayRef]:
    if isinstance(node, TensorRef | ArrayRef):
        yield node
    for _, inner in items_of(node):
        yield from _refs(inner)


def _kind(node: Any) -> str:
    return f"{node.kind} generator" if isinstance(node, GeneratorState) else type(node).__name__


def _format_count(things: Sized, word: str) -> str:
    return f"1 {word}" if len(things) == 1 else f"{len(things)} {word}s"
