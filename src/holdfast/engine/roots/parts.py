"""Parts left of a checkpoint from which retention dropped components (docs/design.md, rule 6)."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.roots.catalog import Marks
from holdfast.engine.roots.documents import is_there
from holdfast.format.manifest import Manifest
from holdfast.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of a checkpoint, by what is left of their files."""

    nbytes: int
    """Bytes of the files that are left, of those that the manifest lists."""
    whole: tuple[str, ...]
    """All files are there, or nobody began to drop it: then a missing file is damage."""
    begun: tuple[str, ...] = ()
    """Some files were dropped, some are left."""
    gone: tuple[str, ...] = ()
    """No file is left."""


def parts_of(store: Store, folder: str, manifest: Manifest, marks: Marks) -> Parts:
    """Look at the files of the components that somebody began to drop, and at no others."""
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
