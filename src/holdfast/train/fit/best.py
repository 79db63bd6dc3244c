"""Rules `Best` of a Trainer's run: saves for them, and the best checkpoint at the end of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.checkpoints import Checkpoints, best_rules
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.events import Emitter
from holdfast.manager import CheckpointManager
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.policy.best import BestSaves
from holdfast.results import Checkpoint, build_checkpoint, metrics_by_step
from holdfast.root.best import BEST
from holdfast.train.evaluation.watching import OF_VALIDATION
from holdfast.train.parallel.group import Group


def saves_of_validations(checkpoints: Checkpoints) -> BestSaves:
    """Decide on saves for those rules `Best` that are about metrics of validations."""
    rules = best_rules(checkpoints)
    return BestSaves([item for item in rules if item.rule.metric.startswith(OF_VALIDATION)])


def load_best_metrics(
    best: BestSaves,
    checkpoints: Checkpoints,
    resumed: Checkpoint | None,
    manager: CheckpointManager,
    group: Group,
) -> None:
    """Read the metrics of what the run goes on from; all ranks call it, and use the leader's."""
    if best:
        manager.expect_metrics()  # a validation that does not give them raises an error
        what = "reading the metrics of earlier checkpoints"
        best.set_known_metrics(
            group.from_leader(what, lambda: _read_earlier_metrics(checkpoints, resumed))
        )


def _read_earlier_metrics(
    checkpoints: Checkpoints, resumed: Checkpoint | None
) -> dict[int, Mapping[str, float]]:
    if resumed is None or checkpoints.root is None:
        return {}
    catalog = catalog_of(checkpoints.root, Emitter(), checkpoints.encrypt)
    return metrics_by_step(catalog.lineage_entries(opens_all=False), resumed.step)


def finder(checkpoints: Checkpoints) -> Callable[[], Checkpoint | None]:
    """Return a function that finds the best checkpoint in a root, or None; claims nothing."""
    root = checkpoints.root

    def find() -> Checkpoint | None:
        if root is None:
            return None
        catalog = catalog_of(root, Emitter(), checkpoints.encrypt)
        try:
            entry = catalog.find_checkpoint(BEST)
        except NoCheckpoint:
            return None
        return build_checkpoint(catalog.find_store(entry.folder), entry)

    return find


def check_load_best(checkpoints: Checkpoints, *, validates: bool) -> None:
    """Raise `UsageError` if no checkpoint of this run could be the best."""
    if checkpoints.root is None:
        raise UsageError("load_best=True: nothing is saved (checkpoints=None); give a root")
    if not validates and not best_rules(checkpoints):
        raise UsageError(
            "load_best=True: nothing says which checkpoint is the best; give validate=…, or "
            'keep=Best("loss")'
        )
