"""What a save plans for given tensors, without any data: files, digests, manifest entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.format import blocks
from holdfast.format.layout import tree_file
from holdfast.format.manifest import FileEntry
from holdfast.format.tensors import TensorFile, TensorSpec, lay_out

_TREE = b"{}"
_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `encode_index` and `decode_index` take."""

    files: Mapping[str, Sequence[TensorFile]]
    digests: Mapping[str, bytes]
    entries: Mapping[str, FileEntry]


def plan(components: Mapping[str, Sequence[TensorSpec]]) -> Plan:
    """Lay the tensors out; every digest is zero."""
    files = {name: lay_out(name, specs) for name, specs in components.items()}
    nbytes = {file.name: file.nbytes for of_name in files.values() for file in of_name}
    nbytes |= {tree_file(name): len(_TREE) for name in components}
    digests = {name: _DIGEST * len(list(blocks.list_blocks(n))) for name, n in nbytes.items()}
    entries = {
        name: FileEntry(nbytes=n, digest=blocks.file_digest(n, digests[name]))
        for name, n in nbytes.items()
    }
    return Plan(files=files, digests=digests, entries=entries)
