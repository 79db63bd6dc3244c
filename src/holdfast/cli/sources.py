"""Sources that a user names on the command line, of any format, and names of tensors in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast.cli.child import open_limited
from holdfast.cli.output import write_message
from holdfast.cli.target import open_root_store
from holdfast.errors import UsageError, listing
from holdfast.format.nodes import ArrayRef, GeneratorState, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop.source import Source, lost_tensors
from holdfast.root.address import split_source


def open_named(text: str) -> Source:
    """Open a source, with the keys that were named before the command."""
    if "://" in text:
        open_root_store(split_source(text)[0])
    return open_limited(text)


def open_read(text: str) -> Source:
    """Open a source for a command that reads its tensors; name those that cannot be read."""
    source = open_named(text)
    if lost := lost_tensors(source):
        lines = [f"{one.path}: {one.why}" for one in lost]
        write_message(f"{source.url}: holds tensors that cannot be read:\n{listing(lines)}")
    return source


def choose_components(source: Source, components: Collection[str]) -> tuple[str, ...]:
    """Return the named components, or all."""
    for name in components:
        source.get_component(name)
    return tuple(components or source.parts)


def tensors_of(
    source: Source, components: Collection[str]
) -> Iterator[tuple[str, TensorRef | ArrayRef, TensorSpec]]:
    """Yield the tensors of components, in the order of the trees, by "component:path"."""
    for name in components:
        part = source.parts[name]
        for path, ref in part.leaves.items():
            yield f"{name}:{path}", ref, part.specs[ref.key]


def split_name(source: Source, name: str) -> tuple[str, str]:
    """Split "component:path"; a source of one component needs no name of it."""
    component, colon, path = name.partition(":")
    if colon and component in source.parts:
        return component, path
    if len(source.parts) == 1:
        return next(iter(source.parts)), name
    has = ", ".join(map(repr, source.parts))
    raise UsageError(f"{source.url}: {name!r}: write COMPONENT:PATH; the components are {has}")


def items_of(node: Any) -> list[tuple[str, Any]]:
    """List the members of a container of a typed tree by their names; none for other nodes."""
    if isinstance(node, GeneratorState):
        return items_of(node.members)
    if isinstance(node, Mapping):
        return [(str(name), inner) for name, inner in node.items()]
    if isinstance(node, list | tuple):
        return [(str(number), inner) for number, inner in enumerate(node)]
    return []


def shape_text(spec: TensorSpec) -> str:
    """Write a shape for people."""
    return "×".join(map(str, spec.shape)) or "scalar"
