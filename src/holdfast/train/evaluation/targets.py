"""Checkpoints to validate: selection by names and patterns, and temporary loading."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import NoCheckpoint, UsageError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.keys import Encryption
from holdfast.loading.search import CheckpointSearch, LoadOptions
from holdfast.ownership.access import locate
from holdfast.ownership.leases import leased
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.ownership.tiered_options import Tiered
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.root.address import split_source
from holdfast.root.best import means_best
from holdfast.root.catalog import Catalog, Entry, is_root
from holdfast.state.capture.edits import Edit
from holdfast.store import is_web, open_store
from holdfast.store.base import Store
from holdfast.threads.workers import Threads
from holdfast.train.strategies import is_sharded, local

Which = str | int | os.PathLike[str]
READ_TIMEOUT_S = 1800.0
"""Longest time that reading the weights of one checkpoint may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """Metrics of one validated checkpoint."""

    checkpoint: Checkpoint
    metrics: Mapping[str, float]
    """Metrics by name, as a checkpoint of that step would record them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checkpoint to validate, with its store."""

    store: Store
    entry: Entry

    @property
    def sort_key(self) -> tuple[int, tuple[int, int], str]:
        """Sort key: by step, then in the order of commits."""
        return (self.entry.step, self.entry.order, self.store.url)

    def load_modules(self, weights: Mapping[str, nn.Module], edit: Edit | None) -> Checkpoint:
        """Load and verify the checkpoint's weights into modules, by component name; claims nothing.

        `edit` may change the stored state before it is compared with the modules.

        Raises:
            FormatError: the checkpoint is damaged.
            MismatchError: the checkpoint does not fit; nothing was changed.
        """
        threads = Threads()
        reader = CheckpointSearch(
            catalog=Catalog(self.store),
            state=weights,
            threads=threads,
            timeout_s=READ_TIMEOUT_S,
        )
        options = LoadOptions(components=tuple(weights), rng=False, edit=edit)
        try:
            loaded = reader.read_candidate(self.entry, options)
        finally:
            threads.close_pools()
        loaded.prepared.apply_values(loaded.tensors)
        return build_checkpoint(self.store, self.entry, notes=loaded.prepared.notes)


def select(
    root: str | os.PathLike[str] | Store | Tiered | None,
    which: Which | Iterable[Which] | None,
    encryption: Encryption | None = None,
) -> list[Target]:
    """Find the checkpoints that `which` names, each once, by step and then order of commits.

    Each of `which` (None: the newest of `root`) is what `CheckpointManager.load_modules` takes:
    "latest",
    a step, a folder, a tag or a label of `root`; or a path (a `Path`, or a text with a slash or an
    @ in it): `other/root`, `other/root@which`, the folder of one checkpoint. Names may be patterns
    of `fnmatch`, which are matched with folder, label, tags and `step=<n>`; every part of a path
    may be one, and roots in which nothing matches are skipped then.
    """
    if which is None:
        which = "latest"
    wanted = [which] if isinstance(which, str | int | os.PathLike) else list(which)
    if not wanted:
        raise UsageError("which=[]: names no checkpoint")
    own = None if root is None else catalog_of(root, Emitter(), encryption)
    found: dict[tuple[str, str], Target] = {}
    for item in wanted:
        if isinstance(item, bool) or not isinstance(item, str | int | os.PathLike):
            raise UsageError(f"which: {item!r} is neither a name nor a step")
        for target in _find_targets(own, item):
            found.setdefault((target.store.url, target.entry.folder), target)
    return sorted(found.values(), key=lambda target: target.sort_key)


@contextmanager
def kept_all(targets: Iterable[Target]) -> Iterator[None]:
    """Hold leases on all checkpoints during the block, so that none is deleted."""
    with ExitStack() as leases:
        for target in targets:
            leases.enter_context(leased(target.store, target.entry.folder))
        yield


@contextmanager
def borrowed(weights: Mapping[str, nn.Module]) -> Iterator[None]:
    """Restore the weights of the modules after the block, from a copy in host memory."""
    before = {name: _copy_state(module) for name, module in weights.items()}
    try:
        yield
    finally:
        for name, module in weights.items():
            _restore_module(module, before[name])


def _copy_state(module: nn.Module) -> dict[str, Any]:
    return {
        name: local(value.detach()).to("cpu", copy=True)
        if isinstance(value, Tensor)
        else deepcopy(value)
        for name, value in module.state_dict().items()
    }


@torch.no_grad()
def _restore_module(module: nn.Module, before: Mapping[str, Any]) -> None:
    if not is_sharded(module):
        module.load_state_dict(before)
        return
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            local(value).copy_(before[name])
    others = {name: value for name, value in before.items() if not isinstance(value, Tensor)}
    module.load_state_dict(others, strict=False)


def _find_targets(own: Catalog | None, item: Which) -> list[Target]:
    if not isinstance(item, str | int) or (isinstance(item, str) and _is_path(item)):
        return _find_at_path(os.fspath(item))
    if own is None:
        raise UsageError(
            f"which={item!r}: a checkpoint of the Trainer's own root, and it has none "
            "(checkpoints=None); name one by its path, as in other/root@latest"
        )
    return (
        [_make_target(own, own.find_checkpoint(item))]
        if isinstance(item, int)
        else _find_named(own, item)
    )


def _is_path(text: str) -> bool:
    return "@" in text or (os.sep in text and not means_best(text))


def _make_target(catalog: Catalog, entry: Entry) -> Target:
    return Target(store=catalog.find_store(entry.folder), entry=entry)


def _find_named(catalog: Catalog, which: str) -> list[Target]:
    try:
        return [_make_target(catalog, catalog.find_checkpoint(which))]
    except NoCheckpoint:
        if not glob.has_magic(which):
            raise
    entries = [entry for entry in catalog.lineage_entries() if _matches(entry, which)]
    if not entries:
        raise NoCheckpoint(f"{catalog.store.url}: no checkpoint of this run matches {which!r}")
    return [_make_target(catalog, entry) for entry in entries]


def _matches(entry: Entry, pattern: str) -> bool:
    names = (entry.folder, entry.name.label, f"step={entry.step}", *entry.tags)
    return any(fnmatchcase(name, pattern) for name in names)


def _find_at_path(text: str) -> list[Target]:
    path, which = split_source(text)
    if is_web(path) or not glob.has_magic(path) or os.path.exists(path):
        return _find_in_folder(path, which)
    found: list[Target] = []
    for folder in sorted(glob.glob(path, recursive=True)):
        if _is_checkpoint(folder) or (os.path.isdir(folder) and is_root(open_store(folder))):
            with suppress(NoCheckpoint):  # other roots that match the pattern may have some
                found += _find_in_folder(folder, which)
    if not found:
        raise NoCheckpoint(f"{text}: no checkpoint matches")
    return found


def _find_in_folder(path: str, which: str | None) -> list[Target]:
    if which is not None:
        return _find_named(Catalog(open_store(path)), which)
    store, entry = locate(path)
    return [Target(store=store, entry=entry)]


def _is_checkpoint(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, layout.MANIFEST))
