"""Shared parts of loggers with an optional library: its import, and the id of the run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.errors import UsageError
from holdfast.train.callbacks.hooks import Logger
from holdfast.train.training import Metrics, Training

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint


def import_extra(module: str, extra: str) -> Any:
    """Import a module that an extra of Holdfast installs.

    Raises:
        UsageError: the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} cannot be imported ({error}): pip install 'holdfast[{extra}]'"
        ) from error


class RunLogger(Logger):
    """Logs to one run of a service; the run's id is in the checkpoints."""

    _id: str | None = None

    def checkpoint_loaded(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Log the cost of the load."""
        self._log(cost, checkpoint.step)

    def checkpoint_saved(self, training: Training, checkpoint: Checkpoint, cost: Metrics) -> None:
        """Log the cost of the save."""
        self._log(cost, checkpoint.step)

    def state_dict(self) -> dict[str, str | None]:
        """Return the id of the run."""
        return {"id": self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the id of a run.

        Raises:
            UsageError: the members are not those of this state.
        """
        if set(state) != {"id"} or not isinstance(state["id"], str | None):
            raise UsageError(f"not the state of {type(self).__name__}: {sorted(state)}")
        self._id = state["id"]

    def _log(self, metrics: Metrics, step: int) -> None:
        raise NotImplementedError
