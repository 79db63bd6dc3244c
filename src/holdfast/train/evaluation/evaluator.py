"""Evaluations of a Trainer: of its weights, or of those of checkpoints, loaded temporarily."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.checkpoints import best_rules
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
from holdfast.train.argument_checks import check_counted
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.evaluation.validation import (
    TrainerValidations,
    Validation,
    ValidationPart,
    Validator,
    WatchedMetricsCheck,
    plans_of,
    size_of,
)
from holdfast.train.parts import TrainerParts
from holdfast.train.status import Outcome
from holdfast.train.step.epoch_metrics import check_apart
from holdfast.train.step.undo import Boundary, modules_of
from holdfast.train.strategies import is_sharded, local

Which = str | int | os.PathLike[str]
logger = logging.getLogger("holdfast")

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
        """Load a checkpoint's verified, perhaps edited, weights into modules; claims nothing."""
        threads = Threads()
        reader = CheckpointSearch(
            catalog=Catalog(self.store), state=weights, threads=threads, timeout_s=READ_TIMEOUT_S
        )
        options = LoadOptions(components=tuple(weights), rng=False, edit=edit)
        try:
            loaded = reader.read_candidate(self.entry, options)
        finally:
            threads.close_pools()
        loaded.prepared.apply_values(loaded.tensors)
        return build_checkpoint(self.store, self.entry, notes=loaded.prepared.notes)


class Evaluator:
    """Validates, tests and predicts with the weights of a Trainer, or those of checkpoints."""

    def __init__(self, parts: TrainerParts, given: Any, data: Any) -> None:
        """Make the validations `given` to the Trainer; `data` is the loader that is trained on."""
        self._parts = parts
        self._given = given
        self._trained_data = data
        self.validations = self._make_validations(given)
        scores = parts.update.scores
        self.watched = WatchedMetricsCheck(
            self._list_watched, self.validations, [f"train/{name}" for name in scores.metric_names]
        )
        """Check of the metrics that retention rules and callbacks watch."""

    def use_data(self, data: Any) -> None:
        """Note another loader that is trained on."""
        self._check_held_out(plans_of(self._given), data)
        self._trained_data = data

    def evaluate(
        self, data: Any, which: Which | None, *, is_test: bool = False
    ) -> dict[str, float]:
        """Validate or test on `data`, with a checkpoint's weights, or if `which` is None as is."""
        if data is not None:
            parts = self._make_validations(data, kind="test" if is_test else "val").parts
        else:
            parts = self._own_parts
        targets = [] if which is None else self._find_one(which)
        status, callbacks = self._parts.status, self._parts.callbacks
        with ExitStack() as stack:
            if status.manager is None:
                stack.enter_context(callbacks.closing())
                stack.enter_context(status.running(None, callbacks))
            at = self._parts.counters.timestamp
            if targets:
                (of_target,) = self._validate_each(targets, parts)
                found, at = dict(of_target.metrics), of_target.checkpoint.timestamp
            else:
                found = self.run_parts(parts)
            # Before `fit` the run may be another process's.
            if is_test and status.ending is not None:
                callbacks.call_hook(Callback.test_end, at, found)
            return found

    def validate_all(self, which: Which | Iterable[Which] | None) -> tuple[Validated, ...]:
        """Validate checkpoints one after the other."""
        parts, targets = self._own_parts, self._find_all(which)
        callbacks = self._parts.callbacks
        with callbacks.closing(), self._parts.status.running(None, callbacks):
            return self._validate_each(targets, parts)

    @contextmanager
    def lend_weights(self, which: Which | None, *, use_ema: bool) -> Iterator[nn.Module]:
        """Yield the model, or its average; a checkpoint, if named, is loaded for the block."""
        parts = self._parts
        with ExitStack() as stack:
            if which is not None:
                targets = self._find_one(which)
                stack.enter_context(hold_leases(targets))
                stack.enter_context(restoring_weights(parts.weights))
                targets[0].load_modules(parts.weights, parts.make_edit(Callback.edit_load))
            parts.share_buffers()
            chosen = self._choose_model(use_ema=use_ema)
            stack.callback(parts.update.parallel.reshard, chosen)
            yield chosen

    def load_best(self, outcome: Outcome) -> Outcome:
        """Load the weights of the best checkpoint; adds a note on it to the outcome."""
        parts = self._parts
        found = parts.group.from_leader("finding the best checkpoint", lambda: outcome.best)
        if found is None:
            raise NoCheckpoint(
                f"load_best=True: no checkpoint has the metric that selects the best. The run "
                f"ended at step {outcome.step} ({outcome.reason}), and is saved"
            )
        targets = self._find_all(found.folder)
        stored = targets[0].entry.manifest.components
        weights = {name: module for name, module in parts.weights.items() if name in stored}
        with hold_leases(targets):
            best = targets[0].load_modules(weights, parts.make_edit(Callback.edit_load))
        note = (
            f"{' and '.join(weights)}: loaded from the best checkpoint, {best.folder}; the run "
            f"itself is at step {outcome.step}"
        )
        logger.info("%s", note)
        return replace(outcome, notes=(*outcome.notes, note))

    def run_parts(self, parts: Iterable[ValidationPart]) -> dict[str, float]:
        """Run validation parts, each on the weights that it validates; returns all metrics."""
        found: dict[str, float] = {}
        self._parts.status.fence()  # hooks of a validation may put other weights into the model
        self._parts.share_buffers()
        # No saves meanwhile: modes and generators are not those of training.
        with self._parts.status.refusing_saves():
            for part in parts:
                model = self._choose_model(use_ema=part.plan.use_ema)
                try:
                    found |= part.on(model, self._parts.model)
                finally:
                    self._parts.update.parallel.reshard(model)
        return found

    def check_sanity(self) -> None:
        """Try a validation on some batches of each loader; leaves no trace."""
        num_batches = self._parts.limits.sanity
        if not num_batches or not self.validations:
            return
        validations = self._make_validations(self._given, batches=num_batches, is_quiet=True)
        kept = Boundary(components={}, modules=modules_of(self._parts.state))
        try:
            self.run_parts(validations.parts)
        finally:
            kept.restore_snapshot()

    @property
    def _own_parts(self) -> tuple[ValidationPart, ...]:
        if not self.validations:
            raise UsageError("there is nothing to validate on: pass validate=… to the Trainer")
        return self.validations.parts

    def _choose_model(self, *, use_ema: bool) -> nn.Module:
        ema = self._parts.ema
        return self._parts.model if ema is None or not use_ema else ema.cast.update()

    def _find_all(self, which: Which | Iterable[Which] | None) -> list[Target]:
        if self._parts.status.manager is not None:
            raise UsageError(f"which={which!r}: while fit runs, only its weights can be used")
        return select(self._parts.checkpoints.root, which, self._parts.checkpoints.encrypt)

    def _find_one(self, which: Which) -> list[Target]:
        found = self._find_all(which)
        if len(found) > 1:
            raise UsageError(f"which={which!r}: {len(found)} checkpoints; use validate_all")
        return found

    def _validate_each(
        self, targets: Sequence[Target], parts: Sequence[ValidationPart]
    ) -> tuple[Validated, ...]:
        weights = self._parts.weights
        found = []
        with hold_leases(targets), restoring_weights(weights):
            for target in targets:
                edit = self._parts.make_edit(Callback.edit_load)
                checkpoint = target.load_modules(weights, edit)
                found.append(Validated(checkpoint=checkpoint, metrics=self.run_parts(parts)))
        return tuple(found)

    def _list_watched(self) -> dict[str, Sequence[str]]:
        """List the metrics that retention rules and callbacks watch, by name of the watcher."""
        found = best_rules(self._parts.checkpoints)
        rules = [item.rule for item in found if not item.rule.wait]
        watched = {f"keep: {rule}": [rule.metric] for rule in rules}
        return {**watched, **self._parts.callbacks.watched}

    def _make_validations(
        self, given: Any, *, kind: str = "val", batches: int | None = None, is_quiet: bool = False
    ) -> TrainerValidations:
        """Make validations on `given`, on so many batches or as many as the limits allow."""
        plans, counts, update = plans_of(given), self._parts.counts, self._parts.update
        if is_quiet:
            update = replace(update, callbacks=update.callbacks.without_any())
        self._check_held_out(plans, self._trained_data)
        for plan in plans:
            check_counted(plan.trigger.unit, f"validation every='{plan.every}'", counts.units)
        made = TrainerValidations(
            [
                Validator(
                    plan=plan if kind == "test" else self._limit_plan(plan, batches),
                    update=update,
                    kind=kind,
                    weigh=plan.weigh or counts.samples or size_of,
                    undo=self._parts.undo,
                )
                for plan in plans
            ]
        )
        check_apart(update.scores, [plan.metrics for plan in plans])
        return made

    def _limit_plan(self, plan: Validation, batches: int | None) -> Validation:
        limits = self._parts.limits
        at_end = plan.at_end or bool(limits.fast_dev_run)
        return replace(plan, data=limits.of_validation(plan.data, batches), at_end=at_end)

    def _check_held_out(self, plans: Sequence[Validation], trained: Any) -> None:
        """Check that the loader that is trained on is none of validations, nor of batch norm."""
        held_out = [("validate", plan.data) for plan in plans]
        if self._parts.swa is not None:
            held_out.append(("swa: batch_norm", self._parts.swa.plan.batch_norm))
        for what, given in held_out:
            loaders = given.values() if isinstance(given, Mapping) else [given]
            if trained is not None and any(loader is trained for loader in loaders):
                raise UsageError(
                    f"{what}: this loader is the one that is trained on, whose position would be "
                    "lost; make another Loader of the same dataset"
                )


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
def hold_leases(targets: Iterable[Target]) -> Iterator[None]:
    """Hold leases on all checkpoints during the block, so that none is deleted."""
    with ExitStack() as leases:
        for target in targets:
            leases.enter_context(leased(target.store, target.entry.folder))
        yield


@contextmanager
def restoring_weights(weights: Mapping[str, nn.Module]) -> Iterator[None]:
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
