"""Hooks around saves and loads: callbacks that the caller passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from holdfast.errors import UsageError
from holdfast.format.manifest import Timestamp
from holdfast.results import PendingSave
from holdfast.state.capture.edits import StateView


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHooks:
    """Callbacks that a manager calls around each save and load, in the caller's thread.

    An error of a callback is raised by the manager's call, before anything is written or applied.
    """

    before_save: Callable[[Timestamp, Mapping[str, float]], Sequence[str] | None] | None = None
    """Called before the state is read, with the timestamp and the metrics of the save. It returns
    reasons not to resume from this state, which are recorded, and raises `SaveSkipped` to skip the
    save."""
    edit_save: Callable[[StateView], None] | None = None
    """Called to change what will be stored, through a view that cannot reach the live state."""
    save_begun: Callable[[PendingSave], None] | None = None
    """Called once the state was copied, with the save under way."""
    edit_load: Callable[[StateView], None] | None = None
    """Called to change what will be applied, before it is checked against the live state."""
    one_sided: Callable[[str], bool] | None = None
    """Called with the name of each component that only the state or only the checkpoint has.

    True: a load leaves a component of the state as it is, or does not load one of the checkpoint,
    and a warning is logged. A component that a checkpoint omitted, or that was dropped from it, is
    not new."""

    def __post_init__(self) -> None:
        for item in fields(self):
            hook = getattr(self, item.name)
            if hook is not None and not callable(hook):
                raise UsageError(f"hooks: {item.name}={hook!r} cannot be called")
