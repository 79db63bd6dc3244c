"""Hooks around saves and loads, as the caller passes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from holdfast.engine.checkpoint import PendingSave
from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.state.edits import StateView


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHooks:
    """Functions that a manager calls around each save and load, in the caller's thread.

    What one raises is raised by the call that it was made in, before anything was written or
    applied.
    """

    before_save: Callable[[Timestamp, Mapping[str, float]], Sequence[str] | None] | None = None
    """Called before the state is looked at, with the metrics of the save. What it returns are
    reasons why this state should not be gone on from; they are recorded. Raises `SaveSkipped` to
    leave the save out."""
    edit_save: Callable[[StateView], None] | None = None
    """May change what will be stored. The live state cannot be reached through the view."""
    save_begun: Callable[[PendingSave], None] | None = None
    """Called when the state was copied."""
    edit_load: Callable[[StateView], None] | None = None
    """May change what will be applied, before it is checked against the live state."""
    one_sided: Callable[[str], bool] | None = None
    """Whether a component may be in the state only, so that a load leaves it as it is, or in the
    checkpoint only, so that it is not loaded. Called with the name of each such component; for each
    that is allowed a warning is logged. A component that was left out of the checkpoint, or dropped
    from it, is not new."""

    def __post_init__(self) -> None:
        for item in fields(self):
            hook = getattr(self, item.name)
            if hook is not None and not callable(hook):
                raise UsageError(f"hooks: {item.name}={hook!r} cannot be called")
