"""Callback that keeps parameters from being trained for a part of the run."""

from __future__ import annotations

from collections.abc import MutableMapping
from fnmatch import fnmatchcase

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.arguments import check_arguments
from holdfast.errors import UsageError, listing
from holdfast.format.manifest import Timestamp
from holdfast.launched import present_ranks
from holdfast.policy.clock import Time, Unit, argument_name, parse
from holdfast.train.callbacks.hooks import Callback
from holdfast.train.training import Metrics, Training

_TRAINABLE: MutableMapping[nn.Parameter, bool] = WeakIdKeyDictionary()
"""Parameters that a Freeze has frozen, of a Trainer that is perhaps gone: they can be trained."""


class Freeze(Callback):
    """Freezes parameters by name, from one moment of the run to another.

        Freeze("encoder.*", until="1ep")

    A frozen parameter gets no gradient, so that no optimizer changes it, by weight decay neither;
    what the optimizer has for it stays. What is frozen follows from the counters alone, so a resume
    is exact. Modules keep their mode: batch norm of a frozen module goes on with its statistics.

    A parameter that several of them name is frozen while one of them freezes it. When `fit` ends,
    gradients are required again. A parameter that required none when the Trainer was made is left
    alone.
    """

    priority = 100
    """High priority: others see the state of the next step."""

    @check_arguments(but=("since", "until"))
    def __init__(
        self, *patterns: str, until: str | Time | None = None, since: str | Time | None = None
    ) -> None:
        """Freeze parameters whose names match one of `patterns`, such as "encoder.*".

        Args:
            patterns: of names in `model.named_parameters()`, as in `fnmatch`.
            until: when they are trained again, such as "1ep"; None: never.
            since: when they are frozen; None: from the beginning.
        """
        if not patterns:
            raise UsageError(
                'Freeze: name what to freeze, such as Freeze("encoder.*", until="1ep")'
            )
        self._patterns = patterns
        self._since = _parse_counted_time("since", since)
        self._until = _parse_counted_time("until", until)
        self._frozen: dict[str, nn.Parameter] = {}
        self._is_frozen = False
        self._drops_gradients = False

    def setup(self, training: Training) -> None:
        """Find the parameters, and freeze them if it is time."""
        named = dict(training.model.named_parameters())
        wrong = [
            pattern
            for pattern in self._patterns
            if not any(fnmatchcase(name, pattern) for name in named)
        ]
        if wrong:
            raise UsageError(
                f"Freeze: {wrong} match no parameter of the model; there are:\n{listing([*named])}"
            )
        self._frozen = {
            name: item
            for name, item in named.items()
            if (item.requires_grad or item in _TRAINABLE)
            and any(fnmatchcase(name, one) for one in self._patterns)
        }
        # What DDP and FSDP exchange is settled when they are made: there gradients are dropped.
        self._drops_gradients = present_ranks().world_size > 1
        self._update_frozen(training)

    def fit_start(self, training: Training) -> None:
        """Freeze what is frozen at the step from which training goes on."""
        now = training.counters.timestamp
        for what, time in (("since", self._since), ("until", self._until)):
            if time is not None and time.unit.read_progress(now) is None:
                raise UsageError(
                    f"Freeze: {what}='{time}': {argument_name(time.unit)} are not counted; give "
                    "the Trainer counts=Counts(…)"
                )
        self._update_frozen(training)

    def after_backward(self, training: Training) -> None:
        """Drop the gradients of frozen parameters, where several ranks train."""
        if self._is_frozen and self._drops_gradients:
            for item in self._frozen.values():
                item.grad = None

    def step_end(self, training: Training, metrics: Metrics) -> None:
        """Freeze or unfreeze, if it is time."""
        self._update_frozen(training)

    def epoch_end(self, training: Training) -> None:
        """Freeze or unfreeze, if it is time."""
        self._update_frozen(training)

    def close(self, training: Training) -> None:
        """Require gradients again, for whoever trains the model next."""
        self._is_frozen = False
        self._require_gradients(training)

    @property
    def is_frozen(self) -> bool:
        """Whether the parameters are frozen now."""
        return self._is_frozen

    def _update_frozen(self, training: Training) -> None:
        now = training.counters.timestamp
        has_begun = self._since is None or _is_reached(self._since, now)
        is_over = self._until is not None and _is_reached(self._until, now)
        self._is_frozen = has_begun and not is_over
        self._require_gradients(training)

    def _require_gradients(self, training: Training) -> None:
        """Let each parameter require a gradient unless one of the training's Freezes holds it."""
        if self._drops_gradients:
            return
        holding = [
            item for item in training.callbacks if isinstance(item, Freeze) and item.is_frozen
        ]
        held = {id(one) for item in holding for one in item._frozen.values()}
        for item in self._frozen.values():
            item.requires_grad_(id(item) not in held)
            if id(item) in held:
                _TRAINABLE[item] = True
            else:
                _TRAINABLE.pop(item, None)


def _is_reached(time: Time, now: Timestamp) -> bool:
    return (time.unit.read_progress(now) or 0) >= time.value


def _parse_counted_time(what: str, given: str | Time | None) -> Time | None:
    if given is None:
        return None
    time = parse(given, what=f"Freeze: {what}")
    if time.unit in (Unit.SECOND, Unit.DURATION):
        raise UsageError(
            f"Freeze: {what}={str(given)!r}: must be counted, such as '1ep' or '1_000step', so "
            "that it is the same after a resume"
        )
    return time
