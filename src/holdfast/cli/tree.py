"""`holdfast tree` and `cat`: the structure of a checkpoint or a file, and its values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any

import click
import msgspec
import numpy as np

from holdfast.cli import options
from holdfast.cli.options import argument, command, option
from holdfast.cli.output import Answer, TextTable, format_nbytes
from holdfast.cli.sources import (
    choose_components,
    items_of,
    limited,
    open_read,
    shape_text,
    split_name,
    tensors_of,
)
from holdfast.errors import UsageError
from holdfast.format.nodes import ArrayRef, GeneratorState, SubclassRef, TensorRef
from holdfast.interop.comparing.pairs import describe_spec, format_value
from holdfast.interop.lazy import LazyTensor
from holdfast.interop.source import LeftOut, Source, SourceComponent, lost_parameters


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
            left_out=(*opened.left_out, *lost_parameters(opened, names)),
        )
        step = "" if opened.step is None else f", step {opened.step}"
        parts: list[str | TextTable] = [f"{opened.url}  ({opened.format}{step})"]
        parts.append(_make_tree_table(opened, names, depth))
        parts += [f"not carried over: {one.path}: {one.why}" for one in opened.left_out]
        parts += [
            f"{name}: {len(frozen)} frozen parameters, only their digests are stored"
            for name in names
            if (frozen := opened.parts[name].frozen)
        ]
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
    if isinstance(node, SubclassRef):
        return node.type.rpartition(".")[2].rpartition(":")[2]
    return f"{node.kind} generator" if isinstance(node, GeneratorState) else type(node).__name__


def _format_count(things: Sized, word: str) -> str:
    return f"1 {word}" if len(things) == 1 else f"{len(things)} {word}s"


# Values


MAX_NUMBERS = 100_000
"""Most numbers of one answer."""
_SLICE = re.compile(r"(-?\d+)?(?:(:)(-?\d+)?)?", re.ASCII)


class CatAnswer(msgspec.Struct, frozen=True):
    """Answer of `holdfast cat`."""

    source: str
    """Path or URL of what was opened."""
    name: str
    """Component and path."""
    dtype: str | None
    """Type of the tensor; null for a plain value."""
    shape: tuple[int, ...] | None
    """Shape of what is printed; null for a plain value."""
    value: Any
    """Nested lists of numbers; complex numbers are pairs. A plain value is as in JSON, where that
    has it; else as Python writes it. A container has those of its members, tensors as shapes."""


@command(
    "cat",
    options.source,
    argument(
        "name",
        "NAME",
        "COMPONENT:PATH, such as model:h.0.weight, or PATH if there is only one component.",
    ),
    click.Option(
        ["--slice", "rows"], metavar="ROWS", help="Rows of the first dimension: 5, 0:2, :2, 2:."
    ),
    options.trust,
    answer=CatAnswer,
    wrap=limited("source"),
)
def show_value(source: str, name: str, rows: str | None) -> Answer:
    """Print a tensor, some of its rows, or a plain value."""
    with open_read(source) as opened:
        component, path = split_name(opened, name)
        part = opened.parts[component]
        node = _find(opened, component, path)
        if not isinstance(node, TensorRef | ArrayRef):
            if rows is not None:
                raise UsageError(f"--slice={rows!r}: {component}:{path} is no tensor")
            return _of_value(opened, part, f"{component}:{path}", node)
        tensor = _sliced(LazyTensor(opened, component, part.specs[node.key]), rows)
        if math.prod(tensor.shape) > MAX_NUMBERS:
            raise UsageError(
                f"{component}:{path} has {math.prod(tensor.shape):,} numbers, and at most "
                f"{MAX_NUMBERS:,} are printed; choose rows with --slice, or see holdfast stats"
            )
        values = tensor.numpy()
    answer = CatAnswer(
        source=opened.url,
        name=f"{component}:{path}",
        dtype=tensor.dtype,
        shape=tensor.shape,
        value=_convert_array(values),
    )
    shape = describe_spec(msgspec.structs.replace(part.specs[node.key], shape=tensor.shape))
    drawn = np.array2string(values, threshold=MAX_NUMBERS + 1, max_line_width=100)
    return Answer(document=answer, parts=[f"{component}:{path}  {shape}", drawn])


def _of_value(source: Source, part: SourceComponent, name: str, node: Any) -> Answer:
    value = _convert_node(part, node)
    answer = CatAnswer(source=source.url, name=name, dtype=None, shape=None, value=value)
    is_container = isinstance(node, Mapping | list | tuple | GeneratorState)
    if is_container:
        drawn = json.dumps(value, indent=2, ensure_ascii=False)
    else:
        drawn = repr(node)
    return Answer(document=answer, parts=[drawn])


def _find(source: Source, component: str, path: str) -> Any:
    """Return the node at a path, whose keys may have dots in them."""
    node = source.parts[component].tree
    if path:
        found = _candidates(node, path)
        if not found:
            near = _describe_names(node, path)
            raise UsageError(f"{source.url}: {component!r} has no {path!r}; {near}")
        if len(found) > 1:
            raise UsageError(f"{source.url}: {component!r} has {len(found)} values at {path!r}")
        return found[0]
    return node


def _candidates(node: Any, path: str) -> list[Any]:
    if not path:
        return [node]
    found = []
    for name, inner in items_of(node):
        if path == name:
            found.append(inner)
        elif path.startswith(f"{name}."):
            found += _candidates(inner, path[len(name) + 1 :])
    return found


def _describe_names(node: Any, path: str) -> str:
    """Say which names there are, as far as the path leads."""
    for name, inner in items_of(node):
        if path.startswith(f"{name}."):
            return _describe_names(inner, path[len(name) + 1 :])
    names = [name for name, _ in items_of(node)]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"there are {', '.join(map(repr, names[:10])) or 'no values'}{more}"


def _sliced(tensor: LazyTensor, rows: str | None) -> LazyTensor:
    if rows is None:
        return tensor
    match = _SLICE.fullmatch(rows)
    if not rows or match is None:
        raise UsageError(f"--slice={rows!r}: write rows as 5, 0:2, :2 or 2:")
    first, colon, last = match.groups()
    if not tensor.shape:
        raise UsageError(f"--slice={rows!r}: a scalar has no rows")
    if colon:
        bounds = [None if text is None else int(text) for text in (first, last)]
        return tensor[slice(*bounds)]
    try:
        return tensor[int(first)]
    except IndexError:
        raise UsageError(f"--slice={rows!r}: there are {tensor.shape[0]} rows") from None


def _convert_array(values: Any) -> Any:
    if values.dtype.kind == "c":
        values = np.stack([values.real, values.imag], axis=-1)
    return values.tolist()


def _convert_node(part: SourceComponent, node: Any) -> Any:
    if isinstance(node, TensorRef | ArrayRef):
        return describe_spec(part.specs[node.key])
    if isinstance(node, list | tuple):
        return [_convert_node(part, inner) for inner in node]
    if isinstance(node, Mapping | GeneratorState):
        return {name: _convert_node(part, inner) for name, inner in items_of(node)}
    if isinstance(node, bool | int | float | str) or node is None:
        return node
    return format_value(node) if not isinstance(node, bytes) else repr(node)
