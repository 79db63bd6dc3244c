"""Components left of a checkpoint after retention dropped some of them (docs/design.md, rule 6)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.format.manifest import Manifest
from holdfast.root.catalog import Marks
from holdfast.root.documents import is_there
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Names of a checkpoint's components, sorted by how many of their files exist."""

    nbytes: int
    """Bytes of the files in the manifest that exist."""
    whole: tuple[str, ...]
    """Components with all files, or not marked for dropping: there a missing file is damage."""
    begun: tuple[str, ...] = ()
    """Components with some files dropped and some left."""
    gone: tuple[str, ...] = ()
    """Components with no file left."""


def parts_of(store: Store, folder: str, manifest: Manifest, marks: Marks) -> Parts:
    """Sort a checkpoint's components by which files exist; looks only for those to be dropped."""
    if not marks.thinned_by:
        return Parts(nbytes=manifest.nbytes, whole=tuple(manifest.components))
    whole: list[str] = []
    begun: list[str] = []
    gone: list[str] = []
    nbytes = manifest.nbytes
    for name, component in manifest.components.items():
        files = component.files if name in marks.thinned else ()
        missing = [file for file in files if not is_there(store, f"{folder}/{file}")]
        nbytes -= sum(manifest.files[file].stored_nbytes for file in missing)
        if not missing:
            whole.append(name)
        else:
            (begun if len(missing) < len(component.files) else gone).append(name)
    return Parts(nbytes=nbytes, whole=tuple(whole), begun=tuple(begun), gone=tuple(gone))
