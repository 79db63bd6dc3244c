"""Metrics that retention rules and callbacks watch: reports those that are not logged."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.errors import UsageError, listing
from holdfast.train.evaluation.validation import TrainerValidations
from holdfast.train.training import Metrics

logger = logging.getLogger("holdfast")

OF_VALIDATION = "val/"
"""Beginning of the names of all metrics of validations."""
Watchers = Callable[[], Mapping[str, Sequence[str]]]
"""Function that returns who watches, as text, with the names of metrics."""


class WatchedMetricsCheck:
    """Checks, after validations or else epochs, that all watched metrics are known by then."""

    def __init__(
        self, watchers: Watchers, validations: TrainerValidations, of_epochs: Sequence[str] = ()
    ) -> None:
        """`watchers` is called at each check, as some find out late what they watch.

        `of_epochs` are names of metrics that come at the end of an epoch.
        """
        self._watchers = watchers
        self._validations = validations
        self._of_epochs = of_epochs
        self._waits_for_epoch = bool(of_epochs)
        """Whether metrics of an epoch are still to come."""
        self._seen: set[str] = set()
        self._is_checked = False
        """Whether the first check was made."""
        if not validations and (wrong := [text for _, text in self._unseen()]):
            raise UsageError(f"there is nothing to validate on; give validate=…:\n{listing(wrong)}")

    def saw(self, metrics: Metrics, *, has_epoch: bool = False) -> None:
        """Record the names of a step's metrics, until the first validation and end of an epoch.

        `has_epoch`: those of an epoch are among them.
        """
        if not self._is_checked or self._waits_for_epoch:
            self._seen.update(metrics)
        self._waits_for_epoch &= not has_epoch

    def check_watched_metrics(self, metrics: Metrics, *, but_of_steps: bool = False) -> None:
        """Check what is watched after a validation; `metrics` are those of its step.

        A metric of a validation that has not run yet may still come, or of the first epoch.
        `but_of_steps`: metrics of steps may still come, too. Without validations they always may,
        so that a missing one is a warning.
        """
        self._seen.update(metrics)
        wrong = list(self._unseen(but_of_steps=but_of_steps or self._is_checked))
        self._is_checked |= not but_of_steps
        if not wrong:
            return
        known = ", ".join(sorted(self._seen))
        found = f"{listing([text for _, text in wrong])}\nThere are: {known}"
        if self._validations or any(name.startswith(OF_VALIDATION) for name, _ in wrong):
            raise UsageError(f"metrics are watched that are never logged:\n{found}")
        logger.warning("metrics are watched that were not logged in this epoch:\n%s", found)

    def _unseen(self, *, but_of_steps: bool = False) -> Iterator[tuple[str, str]]:
        """Yield name and text of each metric that is not known and not expected later."""
        for who, names in self._watchers().items():
            for name in names:
                is_of_step = not name.startswith(OF_VALIDATION)
                is_of_epoch = any(f"{name}/".startswith(f"{one}/") for one in self._of_epochs)
                if name in self._seen or (is_of_epoch and self._waits_for_epoch):
                    continue
                may_come = but_of_steps and not (is_of_epoch and self._validations)
                if is_of_step and (may_come or not self._seen):
                    continue
                if is_of_step or self._validations.has_run(name):
                    meant = difflib.get_close_matches(name, self._seen, 1, 0.6)
                    hint = f"; is {meant[0]!r} meant?" if meant else ""
                    yield name, f"{who}: {name!r}{hint}"
