"""Results of a load for its caller: settings of the script that it replaced, and the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.loading.search import CheckpointSearch, LoadCandidate
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.state.modules import note_loaded
from holdfast.state.patterns import convert_names
from holdfast.state.planning.overrides import OptimizerOptions
from holdfast.state.planning.schedulesettings import ScriptSchedules, check_override
from holdfast.state.planning.settings import Rates, Settings


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


def loaded(found: LoadCandidate, reader: CheckpointSearch, replaced: Sequence[str]) -> Checkpoint:
    """Describe the checkpoint that was loaded, with notes, and those that were skipped for it."""
    manifest = found.entry.manifest
    notes = [*reader.notes, *found.one_sided.skip_notes, *found.prepared.notes]
    notes += (f"the state was not healthy: {why}" for why in manifest.unhealthy)
    if manifest.world_size != reader.world_size:
        notes.append(
            f"saved by {manifest.world_size} ranks, loaded by {reader.world_size}: rank r "
            "goes on with the generators, and whatever is per rank, of r modulo the old number"
        )
    return build_checkpoint(
        reader.catalog.find_store(found.entry.folder),
        found.entry,
        rejected=reader.rejected,
        notes=(*notes, *replaced),
        new=found.one_sided.new,
    )
