"""Start of a `fit`: a resume, a checkpoint of another root, or a new run; managers without a root.

`StartingPoint` is `start_from="old@step=3"`; `NullManager` is the manager for `checkpoints=None`,
and `DryRunManager` is the one for a `fast_dev_run`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from holdfast.arguments import check_arguments
from holdfast.checkpoints import Checkpoints, StateHooks, best_rules
from holdfast.errors import NoCheckpoint, SaveSkipped, UsageError
from holdfast.events import Emitter, url_without_secrets
from holdfast.format.layout import parse_attempt
from holdfast.format.manifest import Timestamp
from holdfast.manager import CheckpointManager
from holdfast.ownership.access import open_address
from holdfast.ownership.annotations import checked_metrics, checked_tags
from holdfast.ownership.process import utc_text
from holdfast.ownership.tiered_catalog import catalog_of
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.clock import Time
from holdfast.policy.rule import SaveClass
from holdfast.policy.savers import Due
from holdfast.results import Checkpoint, CheckpointList, PendingSave, metrics_by_step
from holdfast.save_controller import check_saved_components
from holdfast.state.apply import OpaqueLoadFailed
from holdfast.state.components import PerRank
from holdfast.state.resizing import Resize
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.train.fit.saving import Saves, prepare_save
from holdfast.train.parts import TrainerParts

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """A checkpoint of another root, to start a run from. Nothing is read before `load`."""

    store: Store
    which: str

    @classmethod
    def resolve_source(
        cls,
        source: str | os.PathLike[str] | None,
        root: str | os.PathLike[str] | Store | Tiered | None,
    ) -> StartingPoint | None:
        """Resolve the checkpoint that `source` names, for a run in `root` (None: none)."""
        if source is None:
            return None
        if not isinstance(source, str | os.PathLike):
            raise UsageError(f"start_from={source!r}: must be ROOT or ROOT@WHICH, a path or a URL")
        store, which, folder = open_address(source)
        shown = url_without_secrets(os.fspath(source))
        if folder and parse_attempt(folder) is None:
            raise UsageError(
                f"start_from={shown!r}: this checkpoint's folder was renamed; give it "
                "its own name again"
            )
        tiers = (root.local, root.remote) if isinstance(root, Tiered) else (root,)
        if any(tier is not None and open_store(tier).url == store.url for tier in tiers):
            raise UsageError(
                f"start_from={shown!r}: this is the run's own root. To go back in it, "
                'call resume("step=…") of a CheckpointManager; to begin another run, give another '
                "root"
            )
        return cls(store=store, which=folder or which)

    def load_whole_state(
        self, parts: TrainerParts, hooks: StateHooks, resuming: Resuming
    ) -> Checkpoint:
        """Load the whole state without a claim, except the ids under which loggers record."""
        own = [(item, item.state_dict()) for item in parts.callbacks.recording]
        encryption = parts.checkpoints.encrypt
        try:
            with CheckpointManager(
                self.store, parts.state, hooks=hooks, encrypt=encryption, ranks=parts.ranks
            ) as other:
                found = other.load(
                    self.which,
                    strict=resuming.strict,
                    in_place=True,
                    override=resuming.override,
                    resize=resuming.resize,
                )
        except (OpaqueLoadFailed, KeyboardInterrupt):
            parts.status.has_begun = True  # the state is neither the old nor the stored one
            raise
        for item, state in own:
            item.load_state_dict(state)
        return found


class _NoRoot(UsageError, AttributeError):
    """Error for a manager without a root; an `AttributeError`, so that `hasattr` is False."""


class NullManager(CheckpointManager):
    """Manager of a Trainer without a root: calls that `fit` makes do nothing, others raise."""

    _WHY = (
        "this Trainer has no root (checkpoints=None): it saves nothing, so there is nothing to "
        "save, load, list or mark. Give it a root"
    )

    def __init__(self) -> None:
        """Set no attributes of a manager, so that using one calls `__getattr__`."""

    def __getattr__(self, name: str) -> Any:
        raise _NoRoot(self._WHY)

    def resume(self, *_args: Any, **_options: Any) -> None:
        """No-op: there is nothing to resume."""

    def start_new(self) -> None:
        """No-op: there is nothing to leave behind."""

    def count_from(self, timestamp: Timestamp) -> None:
        """No-op: there are no intervals between saves."""

    def maybe_save(self, step: int, **_options: Any) -> None:
        """No-op: nothing is saved, whatever is due."""

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """No-op: there is no history."""

    def is_quiet(self, step: int) -> bool:
        """Always True: no save is ever due."""
        return True

    def wait(self, timeout_s: float | None = None, *, uploads: bool = True) -> None:
        """No-op: no save is in progress."""

    def fence(self) -> None:
        """No-op: nothing is being copied."""

    def list(self) -> CheckpointList:
        """Always empty: there are no checkpoints."""
        return CheckpointList()

    @property
    def is_owner(self) -> bool:
        """Always False: there is no run to own."""
        return False

    def close(self) -> None:
        """No-op: nothing was opened."""

    def __exit__(self, *_error: object) -> None:
        """No-op: an error goes through."""


class DryRunManager(NullManager):
    """Manager of a `fast_dev_run`: checks each save like any other, and writes nothing."""

    _WHY = (
        "limits: fast_dev_run: nothing is saved, so there is no store and nothing to load. "
        "Skip this in a trial, or run it without fast_dev_run"
    )

    def __init__(self, parts: TrainerParts) -> None:
        """Check saves of the state of these parts."""
        self.state = parts.state
        self._parts = parts
        self._has_told = False

    @check_arguments()
    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Iterable[str] = (),
        epoch: int | None = None,
        cycle: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        components: Iterable[str] | None = None,
        reason: str = "manual",
        save_class: SaveClass = "permanent",
        wait: bool = False,
    ) -> PendingSave:
        """Check what a save checks, and return one that has committed nothing; says so once."""
        only = check_saved_components(components, self.state)
        due = Due(save_class, reason, components=only, tags=checked_tags(tags))
        now = msgspec.structs.replace(self._parts.counters.timestamp, step=step)
        measured = checked_metrics(metrics)
        try:
            unhealthy = prepare_save(self._parts, now, measured)
        except SaveSkipped as error:
            return PendingSave.skipped(step, due, error)
        if not self._has_told:
            logger.info("limits: fast_dev_run: step %d: save() is tried, and writes nothing", step)
        self._has_told = True
        pending = PendingSave(step, due, timeout_s=0.0)
        pending.staged.set_result(None)
        pending.committed.set_result(_nothing(now, due, measured, unhealthy))
        return pending

    def pin(self, which: str | int) -> None:
        """No-op, as all marks: there are no checkpoints."""

    def unpin(self, which: str | int) -> None:
        """No-op."""

    def tag(self, which: str | int, *tags: str) -> None:
        """No-op."""

    def untag(self, which: str | int, *tags: str) -> None:
        """No-op."""


def _nothing(
    now: Timestamp, due: Due, metrics: Mapping[str, float], unhealthy: tuple[str, ...]
) -> Checkpoint:
    """Describe the checkpoint that a save would have made; nothing is at its path."""
    return Checkpoint(
        root="fast_dev_run",
        folder="nothing-is-saved",
        step=now.step,
        timestamp=now,
        save_id="0" * 32,
        metrics=metrics,
        tags=due.tags,
        pinned=False,
        save_class=due.save_class,
        reason=due.reason,
        created=utc_text(),
        nbytes=0,
        unhealthy=unhealthy,
    )


_NEWEST = ("if_available", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resuming:
    """Arguments of `fit` about its resume."""

    how: str | int
    """"if_available", "always", "never", or the name of a checkpoint of the root."""
    start: StartingPoint | None = None
    """Checkpoint of another root, to load if this run has none."""
    strict: bool = True
    override: Collection[str] = ()
    resize: Resize = field(default_factory=dict)
    without: Collection[str] = ()
    """Components that the checkpoint may have and the Trainer does not."""

    def check_resume_arguments(self, *, has_root: bool) -> None:
        """Check them before anything is read."""
        is_named = self.how not in (*_NEWEST, "never")
        if is_named and self.start is not None:
            raise UsageError(
                f"resume={self.how!r} and start_from name two checkpoints: one in this root, one "
                "elsewhere. Omit one argument"
            )
        if not has_root and (is_named or (self.how == "always" and self.start is None)):
            raise UsageError(f"resume={self.how!r}: this Trainer has no root (checkpoints=None)")

    def resume_or_roll_back(self, manager: CheckpointManager) -> Checkpoint | None:
        """Resume from the newest checkpoint, or roll the run back to the named one."""
        if self.how in _NEWEST:
            required = self.how == "always" and self.start is None
            return manager.resume(
                strict=self.strict, override=self.override, resize=self.resize, required=required
            )
        newest = manager.list()[:1]
        try:
            found = manager.resume(
                self.how, strict=self.strict, override=self.override, resize=self.resize
            )
        except NoCheckpoint as error:
            raise NoCheckpoint(
                f'resume={self.how!r} is neither "if_available", "always" nor "never", so it names '
                f"a checkpoint: {error}"
            ) from error
        if found is not None and newest and newest[0].folder != found.folder:
            logger.warning(
                "resume=%r: the run is rolled back from step %d to step %d. Each start of this "
                "script rolls it back again: drop the argument to resume from newer checkpoints",
                self.how,
                newest[0].step,
                found.step,
            )
        return found


def make_manager(
    parts: TrainerParts, goal: Time, hooks: StateHooks, saves: Saves
) -> CheckpointManager:
    """Make the manager of a `fit`; `saves` gets its events."""
    checkpoints, stop = parts.checkpoints, parts.stop
    if checkpoints.root is None:
        if stop is not None and not parts.group.is_alone:
            stop.share()
        if parts.limits.fast_dev_run:
            return DryRunManager(parts)
        logger.warning("checkpoints=None: nothing of this training is saved")
        return NullManager()
    epoch = parts.epoch
    return CheckpointManager(
        replace(
            checkpoints,
            every=parts.every and epoch.resolved(parts.every, "every"),
            savers=tuple(
                epoch.resolved(saver, f"saver {saver.name!r}: every")
                for saver in checkpoints.savers
            ),
            overlap=parts.overlap,
            sinks=(*checkpoints.sinks, *parts.callbacks.sinks, saves),
        ),
        {n: PerRank(one) if n in parts.per_rank else one for n, one in parts.state.items()},
        max_duration=goal,
        on_failure="warn",
        hooks=hooks,
        stop=stop,
        counters=lambda: parts.counters.totals,
        config={**parts.config, "until": str(goal)},
        ranks=parts.ranks,
    )


def load_best_metrics(
    parts: TrainerParts, resumed: Checkpoint | None, manager: CheckpointManager
) -> None:
    """Read the metrics of what the run resumes from; all ranks call it, and use the leader's."""
    if parts.best:
        manager.expect_metrics()  # a validation that does not give them raises an error
        what = "reading the metrics of earlier checkpoints"
        parts.best.set_known_metrics(
            parts.group.from_leader(what, lambda: _read_earlier_metrics(parts.checkpoints, resumed))
        )


def _read_earlier_metrics(
    checkpoints: Checkpoints, resumed: Checkpoint | None
) -> dict[int, Mapping[str, float]]:
    if resumed is None or checkpoints.root is None:
        return {}
    catalog = catalog_of(checkpoints.root, Emitter(), checkpoints.encrypt)
    return metrics_by_step(catalog.lineage_entries(opens_all=False), resumed.step)


def check_load_best(checkpoints: Checkpoints, *, validates: bool) -> None:
    """Raise `UsageError` if no checkpoint of this run could be the best."""
    if checkpoints.root is None:
        raise UsageError("load_best=True: nothing is saved (checkpoints=None); give a root")
    if not validates and not best_rules(checkpoints):
        raise UsageError(
            "load_best=True: no rule or metric selects the best checkpoint; give validate=…, or "
            'keep=Best("loss")'
        )
