"""`holdfast cat`: print one tensor, some rows of it, or a plain value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import click
import msgspec
import numpy as np

from holdfast.cli import options
from holdfast.cli.child import limited
from holdfast.cli.options import argument, command
from holdfast.cli.output import Answer
from holdfast.cli.sources import items_of, open_read, split_name
from holdfast.errors import UsageError
from holdfast.format.nodes import ArrayRef, GeneratorState, TensorRef
from holdfast.interop.comparing.pairs import describe_spec
from holdfast.interop.comparing.trees import format_value
from holdfast.interop.lazy import LazyTensor
from holdfast.interop.source import Source, SourceComponent

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
