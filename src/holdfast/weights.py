"""Loading weights from a checkpoint or a file with one call, without a manager."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.arguments import check_arguments
from holdfast.errors import (
    FormatError,
    HoldfastError,
    NoCheckpoint,
    StoreError,
    UsageError,
    listing,
)
from holdfast.format.objects import decode_tree
from holdfast.interop.lazy import open_any
from holdfast.interop.opening import open_source
from holdfast.interop.source import Source, lost_parameters, lost_tensors, read_pieces
from holdfast.keys import Encryption
from holdfast.loading.open import open_checkpoint
from holdfast.loading.search import CheckpointSearch, LoadOptions
from holdfast.ownership.access import locate_with_lease
from holdfast.ownership.leases import KeptEntry
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.root.catalog import Catalog, Entry
from holdfast.staging.device import refuse_capture
from holdfast.state.capture.edits import Edit, StateView, cast_floats
from holdfast.state.components import refuse_other_sharding
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.state.modules import note_loaded
from holdfast.state.optimizers import TRAINING_WEIGHTS, find_modes
from holdfast.state.patterns import Entries, convert_names
from holdfast.state.planning.copying import bytes_of
from holdfast.state.resizing import NO_RESIZE, Resize
from holdfast.state.selection import RenameRule
from holdfast.store.base import Store
from holdfast.threads.workers import Threads

AVERAGES = ("ema", "swa")
"""Components of averages, which are kept in float32 and are loaded into models of any dtype."""
logger = logging.getLogger("holdfast")

READ_TIMEOUT_S = 1800.0
"""Longest time that reading one checkpoint may take."""


@overload
def load_weights(
    source: str | os.PathLike[str] | Store,
    model: None = None,
    *,
    which: int | str | None = None,
    component: str = "model",
    include: Iterable[str] = (),
    skip: Iterable[str] = (),
    encrypt: Encryption | None = None,
) -> dict[str, Tensor]: ...


@overload
def load_weights(
    source: str | os.PathLike[str] | Store,
    model: nn.Module,
    *,
    which: int | str | None = None,
    component: str = "model",
    strict: bool = True,
    rename: RenameRule = None,
    include: Iterable[str] = (),
    skip: Iterable[str] = (),
    edit: Edit | None = None,
    resize: Resize = NO_RESIZE,
    encrypt: Encryption | None = None,
    in_place: bool = False,
) -> Checkpoint: ...


@check_arguments()
def load_weights(
    source: str | os.PathLike[str] | Store,
    model: nn.Module | None = None,
    *,
    which: int | str | None = None,
    component: str = "model",
    strict: bool = True,
    rename: RenameRule = None,
    include: Iterable[str] = (),
    skip: Iterable[str] = (),
    edit: Edit | None = None,
    resize: Resize = NO_RESIZE,
    encrypt: Encryption | None = None,
    in_place: bool = False,
) -> Checkpoint | dict[str, Tensor]:
    """Load and verify a model's weights from a checkpoint; claims nothing, runs no code from it.

    `source` is a root (its newest checkpoint), `root@step=1000`, `root@best`, `root@tag`, the
    folder of one checkpoint, or a store, where `which` selects another than the newest. `include`
    and `skip` choose leaves by `component.path` or by patterns, `rename` maps stored names to the
    model's, `edit` changes the stored state before it is compared with the model, `resize` names
    tensors that have grown or shrunk, as in `CheckpointManager.resume`. `encrypt` has the keys of
    encrypted checkpoints. With `strict=False`, `notes` of the result lists missing and unexpected
    leaves. `in_place` reads straight into the model, without memory for a second
    copy of it; damage then leaves it mixed. The averages `ema` and `swa` of the Trainer are cast to
    the model's dtypes.

    Without a model it returns the tensors of the component by their paths, on the CPU, from any
    format that `load_file` opens. Tied tensors are one tensor under several paths.

    Raises:
        UsageError: an argument names nothing, an edit cannot be made, or a CUDA graph is being
            captured, or each rank saved its own weights; without a model: an argument needs one.
        UnsupportedState: DeepSpeed has other copies of the model's parameters.
        NoCheckpoint: no checkpoint matches `source` and `which`.
        FormatError: the checkpoint is damaged.
        SealError: it is encrypted for other keys, or not encrypted.
        MismatchError: it does not fit the model; nothing was changed.
        OpaqueLoadFailed: the model was replaced in part when something failed.
    """
    refuse_capture("load_weights()")
    if model is None:
        needs = {"rename": rename is not None, "edit": edit is not None, "in_place": in_place}
        needs["resize"] = bool(resize)
        _refuse_options(
            [name for name, is_given in (needs | {"strict": not strict}).items() if is_given]
        )
        with open_any(source, which=which, encrypt=encrypt) as opened:
            return _read_tensors(opened, component, include, skip)
    refuse_other_sharding({component: model}, allows_fsdp1=True)
    narrowed: list[str] = []
    if edit is None and component in AVERAGES:
        edit = partial(_cast, component, model, narrowed)
    options = LoadOptions(
        components=(component,),
        strict=strict,
        rename=rename,
        include=convert_names(include, "include"),
        skip=convert_names(skip, "skip"),
        edit=edit,
        resize=resize,
        rng=False,
        in_place=in_place,
    )
    threads = Threads()
    try:
        with _located(source, which, encrypt) as (store, kept):
            reader = CheckpointSearch(
                catalog=Catalog(store),
                state={component: model},
                threads=threads,
                timeout_s=READ_TIMEOUT_S,
            )
            loaded = reader.read_candidate(kept.entry, options)
            if component in loaded.by_rank:
                raise UsageError(
                    f"{kept.entry.folder}: each rank saved its own {component!r}, and the rank is "
                    "not known here. A CheckpointManager loads the state of its rank"
                )
            loaded.prepared.apply_values(loaded.tensors)
            note_loaded([model])
            for note in (*loaded.prepared.lost, *_of_mode(store, kept.entry, component)):
                logger.warning("%s: %s", kept.entry.folder, note)
    finally:
        threads.close_pools()
    notes = [f"{component}: {len(narrowed)} tensors were cast to the model's dtypes"]
    return build_checkpoint(
        store, kept.entry, notes=(*kept.notes, *loaded.prepared.notes, *notes[: len(narrowed)])
    )


def _of_mode(store: Store, entry: Entry, component: str) -> Iterator[str]:
    """Yield a warning if an optimizer was not in the mode whose weights are evaluated."""
    others = [name for name in entry.manifest.components if name != component]
    with suppress(FormatError, StoreError):  # of a component that is damaged, or was dropped
        opened = open_checkpoint(store, entry.folder, entry.manifest, components=others)
        trees = [one.tree for one in opened.components.values() if b'"train_mode"' in one.tree]
        if any(True in find_modes(decode_tree(tree, what=entry.folder)) for tree in trees):
            yield TRAINING_WEIGHTS


def _cast(component: str, model: nn.Module, cast: list[str], view: StateView) -> None:
    if component in view:
        cast += cast_floats(view[component], model)


@contextmanager
def _located(
    source: str | os.PathLike[str] | Store, which: int | str | None, encrypt: Encryption | None
) -> Iterator[tuple[Store, KeptEntry]]:
    """Open a checkpoint; of another library's file or folder say how to load it."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(locate_with_lease(source, which=which, encrypt=encrypt))
        except (NoCheckpoint, StoreError):
            if not isinstance(source, str | os.PathLike) or not _is_foreign(os.fspath(source)):
                raise
            raise UsageError(
                f"{os.fspath(source)}: not a checkpoint of Holdfast but another library's file. "
                f"Load it with model.load_state_dict(holdfast.load_weights({os.fspath(source)!r}))"
                ", or make a checkpoint of it with holdfast import"
            ) from None
        yield found


def _is_foreign(text: str) -> bool:
    if not os.path.exists(text):
        return False
    try:
        open_source(text).close()
    except HoldfastError:
        return False
    return True


def _refuse_options(names: Sequence[str]) -> None:
    if names:
        raise UsageError(f"load_weights(…, {names[0]}=…): without a model there is nothing to fit")


def _read_tensors(
    source: Source, component: str, include: Iterable[str], skip: Iterable[str]
) -> dict[str, Tensor]:
    """Read the chosen tensors of a component, by path."""
    part = source.get_component(component)
    if part.kind == "module" and any(True in find_modes(one.tree) for one in source.parts.values()):
        logger.warning("%s: %s", source.url, TRAINING_WEIGHTS)
    wanted = Entries(convert_names(include, "include"), "include")
    unwanted = Entries(convert_names(skip, "skip"), "skip")
    keys: dict[str, str] = {}
    for path, ref in part.leaves.items():
        name = f"{component}.{path}"
        is_wanted = wanted.cover(name) or not wanted
        if not unwanted.cover(name) and is_wanted:
            keys[path] = ref.key
    lost = [
        f"{left.path}: {left.why}"
        for left in lost_tensors(source, [component])
        if not unwanted.cover(left.path) and (wanted.cover(left.path) or not wanted)
    ]
    digests = [
        left.path
        for left in lost_parameters(source, [component])
        if not unwanted.cover(left.path) and (wanted.cover(left.path) or not wanted)
    ]
    if digests:
        raise UsageError(
            f"{source.url}: {len(digests)} frozen parameters were saved by digest, such as "
            f"{digests[0]}. Pass a model that is made on the same base, or omit them with skip=[…]"
        )
    if lost:
        raise UsageError(
            f"{source.url}: holds tensors that cannot be read. Skip them with skip=[…], or read "
            "the others with load_file(…, allow_loss=True):\n" + listing(lost)
        )
    if unused := [*wanted.unmatched(()), *unwanted.unmatched(())]:
        raise UsageError(f"{source.url}: {'; '.join(unused)}")
    if part.leaves and not keys:
        raise UsageError(f"{source.url}: include and skip leave no tensor of {component!r}")
    chosen = {*keys.values()}
    tensors = {
        key: torch.empty(part.specs[key].shape, dtype=TORCH_DTYPES[part.specs[key].dtype])
        for key in part.specs
        if key in chosen
    }
    memories = {key: bytes_of(tensor) for key, tensor in tensors.items()}
    for piece in read_pieces(source, [(component, key) for key in tensors]):
        stop = piece.start + piece.memory.nbytes
        memories[piece.key][piece.start : stop] = np.frombuffer(piece.memory, np.uint8)
    return {path: tensors[key] for path, key in keys.items()}
