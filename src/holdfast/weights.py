"""Loading a model's weights from a checkpoint with one call, without a manager."""

from __future__ import annotations

import os
from collections.abc import Iterable

from torch import nn

from holdfast.arguments import checked
from holdfast.engine.access import located
from holdfast.engine.checkpoint import Checkpoint, describe
from holdfast.engine.loading.resume import LoadOptions, Reader, Rename
from holdfast.engine.roots.catalog import Catalog
from holdfast.engine.staging.device import refuse_capture
from holdfast.engine.threads import Threads
from holdfast.errors import UsageError
from holdfast.keys import Encryption
from holdfast.state.edits import Edit
from holdfast.state.modules import note_loaded
from holdfast.state.selection import listed
from holdfast.store.base import Store

READ_TIMEOUT_S = 1800.0
"""Longest time that reading one checkpoint may take."""


@checked()
def load_weights(
    source: str | os.PathLike[str] | Store,
    model: nn.Module,
    *,
    which: int | str | None = None,
    component: str = "model",
    strict: bool = True,
    rename: Rename = None,
    include: Iterable[str] = (),
    skip: Iterable[str] = (),
    edit: Edit | None = None,
    encrypt: Encryption | None = None,
    in_place: bool = False,
) -> Checkpoint:
    """Load and verify a model's weights from a checkpoint; claims nothing, runs no code from it.

    `source` is a root (its newest checkpoint), `root@step=1000`, `root@best`, `root@tag`, the
    folder of one checkpoint, or a store, where `which` selects another than the newest. `include`
    and `skip` choose leaves by `component.path` or by patterns, `rename` maps stored names to the
    model's, `edit` changes the stored state before it is compared with the model. `encrypt` has the
    keys of encrypted checkpoints. With `strict=False`, `notes` of the result lists what was
    missing or unexpected. `in_place` reads straight into the model, without memory for a second
    copy of it; damage then leaves it mixed.

    Raises:
        UsageError: an argument names nothing, an edit cannot be made, or a CUDA graph is being
            captured, or each rank saved its own weights.
        NoCheckpoint: no checkpoint matches `source` and `which`.
        FormatError: the checkpoint is damaged.
        SealError: it is encrypted for other keys, or not encrypted.
        MismatchError: it does not fit the model; nothing was changed.
        OpaqueLoadFailed: the model was replaced in part when something failed.
    """
    refuse_capture("load_weights()")
    options = LoadOptions(
        components=(component,),
        strict=strict,
        rename=rename,
        include=listed(include, "include"),
        skip=listed(skip, "skip"),
        edit=edit,
        rng=False,
        in_place=in_place,
    )
    threads = Threads()
    try:
        with located(source, which=which, encrypt=encrypt) as (store, kept):
            reader = Reader(
                catalog=Catalog(store),
                state={component: model},
                threads=threads,
                timeout_s=READ_TIMEOUT_S,
            )
            loaded = reader.read(kept.entry, options)
            if component in loaded.by_rank:
                raise UsageError(
                    f"{kept.entry.folder}: each rank saved its own {component!r}, and this cannot "
                    "know which one to load. A CheckpointManager loads that of its rank"
                )
            loaded.prepared.apply(loaded.tensors)
            note_loaded([model])
    finally:
        threads.close()
    return describe(store, kept.entry, notes=(*kept.notes, *loaded.prepared.notes))
