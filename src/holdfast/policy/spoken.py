"""Conversion of the argument `every`, such as an interval or "auto", to triggers."""

from __future__ import annotations

from holdfast.errors import UsageError
from holdfast.policy.auto import Auto
from holdfast.policy.clock import ALL_UNITS, Time, parse
from holdfast.policy.triggers import Every, SaveFunction, Trigger, When


def as_trigger(value: str | Time | Trigger | SaveFunction, *, what: str = "every") -> Trigger:
    """Convert "auto" to `Auto`, an interval to `Every`, a function to `When`; keep a trigger.

    Raises:
        UsageError: `value` is none of these.
    """
    if isinstance(value, Trigger):
        return value
    if callable(value):
        return When(value)
    if isinstance(value, str) and value.strip().lower() == "auto":
        return Auto()
    if isinstance(value, str | Time):
        return Every(parse(value, what=what, units=ALL_UNITS))
    raise UsageError(f"{what}={value!r}: must be an interval with a unit, a trigger or a function")
