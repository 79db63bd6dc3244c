"""Undo of an interrupted fetch or validation, or of a failed step, from a snapshot."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from holdfast.data import Loader
from holdfast.engine.control.stop import Interrupted, Stop
from holdfast.train.callbacks.calling import Callbacks
from holdfast.train.window.boundary import Boundary, small
from holdfast.train.window.weights import Weights

logger = logging.getLogger("holdfast")


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class WayBack:
    """Keeps the snapshot of the last step boundary, while the state can be restored from it."""

    def __init__(
        self,
        *,
        stop: Stop | None,
        is_exact: bool,
        data: Any,
        state: Mapping[str, Any],
        callbacks: Callbacks,
    ) -> None:
        """Start without a snapshot; `is_exact`: take complete ones, for a save after an error."""
        self.is_exact = is_exact
        self._stop = stop
        self._data = data
        self._can_interrupt = stop is not None and isinstance(data, Loader)
        self._has_hooks = callbacks.are_told("epoch_start", "before_data")
        self._small = small(state, "data")
        self._state = state
        self._modules = [value for value in state.values() if isinstance(value, nn.Module)]
        self._boundary: Boundary | None = None
        self._weights: Weights | None = None
        self._is_validating = False
        # One context for all waits, as it has no state of its own.
        self._interruptible: AbstractContextManager[None] = (
            _AS_IT_IS if stop is None else stop.interruptible()
        )

    def begin_step(self) -> None:
        """Take the snapshot, as the step that begins will change the state."""
        if self.is_exact:
            self._boundary = Boundary(
                data=self._data, components=self._small, modules=self._modules
            )
            self._weights = Weights(self._state)
        elif self._can_interrupt:
            components = self._small if self._has_hooks else None
            self._boundary = Boundary(data=self._data, components=components)

    def begin_update(self) -> None:
        """Drop the snapshot, as the update that begins cannot be undone."""
        self._boundary = self._weights = None

    def changed(self) -> list[str]:
        """List components whose weights, which the snapshot lacks, have changed since it.

        For errors, after `go`.
        """
        return [] if self._weights is None else self._weights.changed()

    def go(self) -> bool:
        """Restore the snapshot; False if none is kept."""
        boundary, self._boundary = self._boundary, None
        if boundary is not None:
            boundary.put_back()
        return boundary is not None

    def fetching(self) -> AbstractContextManager[None]:
        """Return a context for a fetch, which a stop interrupts if the data can go back."""
        return self._interruptible if self._can_interrupt else _AS_IT_IS

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a part of a validation, which a stop interrupts in `validating`."""
        return self._interruptible if self._is_validating else _AS_IT_IS

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Restore the state after the block if it is interrupted.

        Raises:
            Interrupted: a stop was requested.
        """
        if self._stop is None and not self.is_exact:
            yield
            return
        kept = Boundary(components=self._small, modules=self._modules)
        weights = Weights(self._state if self.is_exact else {})
        self._is_validating = self._stop is not None
        try:
            yield
        except Interrupted:
            kept.put_back()
            raise
        except Exception:
            self._after_error(kept, weights)
            raise
        finally:
            self._is_validating = False

    def _after_error(self, kept: Boundary, weights: Weights) -> None:
        """Restore the state after an error, if it will be saved; the error is raised anyway."""
        if not self.is_exact:
            return
        try:
            kept.put_back()
            changed = weights.changed()
        except Exception:
            self.is_exact = False
            logger.exception("the state before the validation cannot be put back, nor saved")
            return
        if changed:
            self.is_exact = False
            logger.error(
                "a validation failed when it had changed %s, whose state from before it is not "
                "kept, so nothing is saved",
                ", ".join(changed),
            )
