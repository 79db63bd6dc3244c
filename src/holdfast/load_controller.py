"""Training-thread part of `resume` and `load`: checks, the load, and how the run continues.

`loading.apply` chooses a checkpoint and applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from holdfast.errors import NoCheckpoint, UsageError
from holdfast.loading.optional_components import MissingComponentPolicy
from holdfast.loading.search import CheckpointSearch, LoadCandidate, LoadOptions, Search, Unhealthy
from holdfast.results import Checkpoint, KnownCommit, build_checkpoint
from holdfast.root.catalog import Entry
from holdfast.saving.settings_history import differences, numerics
from holdfast.session import NEVER_QUIET, Session
from holdfast.staging.device import refuse_capture
from holdfast.state.modules import note_loaded
from holdfast.state.patterns import convert_names
from holdfast.state.planning.overrides import OptimizerOptions
from holdfast.state.planning.schedulesettings import (
    Rates,
    ScriptSchedules,
    Settings,
    check_override,
)


class ScriptSettings:
    """Learning rates and settings in the live state, recorded before a load replaces them."""

    def __init__(self, state: Mapping[str, Any], override: Iterable[str]) -> None:
        """Record them; `override` names options that keep the script's value."""
        self._state = state
        self._rates = Rates(state)
        self._settings = Settings(state)
        self._options = OptimizerOptions(state)
        self._override = convert_names(override, "override")
        check_override(state, self._override)
        self._schedules = ScriptSchedules(state, self._override)

    def origins(self) -> dict[str, str]:
        """Return the options of optimizers with which a run begins, as text."""
        return self._options.origins(is_start=True)

    def restore_settings(self, found: LoadCandidate) -> tuple[tuple[str, ...], dict[str, str]]:
        """Restore, after a load, what goes by the script.

        Returns notes on settings that the script and the checkpoint have otherwise, and the origins
        of the optimizers' options from now on.
        """
        note_loaded(self._state.get(name) for name in found.prepared.needed)
        self._rates.restore_rates(found.one_sided.new)
        config = found.entry.manifest.config
        needed = found.prepared.needed
        notes, origins = self._options.apply_overrides(self._override, config, loaded=needed)
        notes += self._schedules.apply_overrides(needed)
        return (*notes, *self._settings.replaced()), origins


def describe_loaded(
    found: LoadCandidate, reader: CheckpointSearch, replaced: Sequence[str]
) -> Checkpoint:
    """Describe the checkpoint that was loaded, with notes, and those that were skipped for it."""
    manifest = found.entry.manifest
    notes = [*reader.notes, *found.one_sided.skip_notes, *found.prepared.notes]
    notes += (f"the state was not healthy: {why}" for why in manifest.unhealthy)
    if manifest.world_size != reader.world_size:
        notes.append(
            f"saved by {manifest.world_size} ranks, loaded by {reader.world_size}: rank r "
            "continues with the generators, and whatever is per rank, of r modulo the old number"
        )
    return build_checkpoint(
        reader.catalog.find_store(found.entry.folder),
        found.entry,
        rejected=reader.rejected,
        notes=(*notes, *replaced),
        new=found.one_sided.new,
    )


class LoadController:
    """Loads checkpoints for one manager, and continues its run. In the training thread."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def expect_ready(self, method: str) -> None:
        """Wait for the save under way, and raise its error, before a load by `method`."""
        session = self._session
        session.check_process()
        refuse_capture(f"{method}()")
        session.wait_for_save(session.saver.limit_s)
        session.raise_failure()
        if session.is_unused and session.capturer.frozen is not None:
            session.capturer.frozen.note_base()

    def sides(self, new: Iterable[str], without: Iterable[str]) -> MissingComponentPolicy:
        """Return the components that may be on one side only, by arguments and the hook."""
        session = self._session
        return MissingComponentPolicy.from_arguments(
            session.state, new, without, session.hooks.one_sided
        )

    def resume(
        self,
        which: str | int,
        options: LoadOptions,
        override: Iterable[str],
        *,
        unhealthy: Unhealthy,
        seen: KnownCommit | None,
        required: bool,
    ) -> Checkpoint | None:
        """Claim the run, and load the checkpoint to resume from; None: a new run starts."""
        session = self._session
        reader, script = self._make_search(), ScriptSettings(session.state, override)
        search = Search(
            reader,
            which,
            walks=True,
            options=options,
            unhealthy=unhealthy,
            seen=seen,
            refuse=partial(self._check_start, required=required),
        )
        found = session.applier.apply_checkpoint(search, claims=True)
        session.is_unused = found is None
        if found is None:
            self._log_fresh_start(script)
            return None
        if not search.is_rollback:
            session.warnings.of_lost_steps(session.clock.unsaved, found.entry)
        replaced = self._continue_from(found, script, is_rollback=search.is_rollback)
        self._compare_lives(found)
        session.saver.queue_claim_chores()
        session.warnings.of_workers()
        session.warnings.of_lacks()
        session.emit(
            "resumed",
            f"resuming from step {found.entry.step}: {found.entry.folder}",
            step=found.entry.step,
            folder=found.entry.folder,
            rejected=reader.rejected,
        )
        return self._loaded(found, reader, replaced)

    def start_new(self) -> None:
        """Claim the run, and start a new one beside the checkpoints of the run before."""
        session = self._session
        if session.owner.claim is not None or session.saver.standing is not None:
            raise UsageError(
                f"{session.store.url}: start_new() comes before resume(), a load of the whole "
                "state and the first save; this manager has already made such a call. Make a new "
                "manager"
            )
        refuse = partial(self._check_start, required=False)
        search = Search(self._make_search(), None, walks=False, refuse=refuse)
        session.applier.apply_checkpoint(search, claims=True)
        self._log_fresh_start(ScriptSettings(session.state, ()))

    def load(self, which: str | int, options: LoadOptions, override: Iterable[str]) -> Checkpoint:
        """Load a checkpoint, or parts of it, without a claim."""
        session = self._session
        reader, script = self._make_search(), ScriptSettings(session.state, override)
        session.catalog.look_again()
        with ExitStack() as holding:
            is_read_late = options.in_place or session.memory_budget is not None
            reader.holding = holding if is_read_late or not session.is_owner else None
            search = Search(reader, which, walks=False, options=options)
            found = session.applier.apply_checkpoint(search, claims=False)
        assert found is not None, "what is named is there, or an error says why not"
        session.is_unused = False
        replaced = self._continue_from(found, script, is_rollback=search.is_rollback)
        folder, step = found.entry.folder, found.entry.step
        session.emit("loaded", f"loaded {folder}", step=step, folder=folder)
        return self._loaded(found, reader, replaced)

    def _make_search(self) -> CheckpointSearch:
        session = self._session
        return session.applier.make_search(
            rank=session.ranks.rank,
            world_size=session.ranks.world_size,
            catalog=session.catalog,
            state=session.state,
            threads=session.saver.threads,
            timeout_s=session.saver.timeout_s,
            memory_budget=session.memory_budget,
            is_mixed=session.applier.half_loaded is not None,
            staged=session.find_staged_blocks() if session.saver.stager.is_shared else None,
        )

    def _check_start(self, entry: Entry | None, *, required: bool) -> None:
        """Raise an error if the run must not start from `entry`, or anew without one."""
        session = self._session
        if required and entry is None:
            raise NoCheckpoint(
                f"{session.store.url}: a checkpoint is required, and there is none to resume from. "
                "Check the root"
            )
        if session.refuses_existing:
            session.first_save.refuse_later(entry)

    def _log_fresh_start(self, script: ScriptSettings) -> None:
        """Log the start of a run that loaded nothing."""
        session = self._session
        session.history.origins = script.origins()
        session.first_save.look_around()
        session.emit("started", f"starting a new run in {session.store.url}")
        session.saver.queue_claim_chores()
        session.warnings.of_workers()

    def _compare_lives(self, found: LoadCandidate) -> None:
        """Log settings and shapes that have changed since the process that saved the checkpoint."""
        session, claim, entry = self._session, self._session.owner.claim, found.entry
        if claim is None or not session.ranks.is_leader:
            return
        session.untrained = (entry.step, session.history.changed_settings(entry.manifest))
        changes = session.history.compare_with_base(
            entry.manifest, claim.epoch, resized=found.prepared.resizes
        )
        if changes:
            text = "\n".join(f"  {line}" for line in changes)
            session.emit("changed", f"changed since {entry.folder}:\n{text}", step=entry.step)

    def _continue_from(
        self, found: LoadCandidate, script: ScriptSettings, *, is_rollback: bool
    ) -> tuple[str, ...]:
        """Log notes of a successful load; after a full load, continue the run from it.

        Returns the notes on settings that the script and the checkpoint have otherwise.
        """
        session = self._session
        try:
            replaced, origins = script.restore_settings(found)
        except BaseException as error:
            session.applier.half_loaded = f"{found.entry.folder} was loaded without override"
            if not isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{error}\n{found.entry.folder} is loaded without override. Before a save, load "
                "again: with another override, or without one"
            ) from error
        session.boundary.restart_after_load()
        session.warnings.loaded()
        prepared = found.prepared
        for note in (*found.one_sided.skip_notes, *prepared.lost, *prepared.tolerated, *replaced):
            session.emit("warning", f"{found.entry.folder}: {note}", folder=found.entry.folder)
        if not found.options.is_full:
            return replaced
        session.history.origins, session.quiet = origins, NEVER_QUIET
        session.saver.standing, session.saver.is_rollback = found.entry, is_rollback
        session.clock.continue_from_entry(found.entry)
        session.recorder.start_from(found.entry.step)
        session.validated.start_from_checkpoint(found.entry)
        session.warnings.positions.start_counting(found.entry.step)
        if found.is_proof:
            session.housekeeper.trust(found.entry)
        return replaced

    def _loaded(
        self, found: LoadCandidate, reader: CheckpointSearch, replaced: tuple[str, ...]
    ) -> Checkpoint:
        stored, world_size = found.entry.manifest.numerics, self._session.ranks.world_size
        return describe_loaded(
            found, reader, (*replaced, *differences(stored, numerics(world_size)))
        )
