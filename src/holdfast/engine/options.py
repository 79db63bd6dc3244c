"""The options that a manager shares with who makes one, and what they may be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

from holdfast.engine.control.stop import Stop
from holdfast.engine.saving.compressing import Compress, choices
from holdfast.errors import UsageError
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.policy.amounts import number_of_bytes
from holdfast.policy.naming import LabelFunction, compile_label
from holdfast.policy.rule import Rule
from holdfast.policy.savers import SideSaver, combined_rule

OnExisting = Literal["keep", "replace", "error"]
MIN_BUDGET = 4 * BLOCK_NBYTES
"""So that some blocks are written while others are copied."""
OnFailure = Literal["raise", "warn"]


def check_options(
    components: Collection[str],
    *,
    keep: Rule | str | None,
    savers: Sequence[SideSaver],
    on_existing: OnExisting,
    label: str | LabelFunction,
    run_name: str | None,
    takeover: bool,
    memory_budget: int | str | None,
    compress: Compress,
    stop: Stop | None,
) -> None:
    """Let pass what a manager of a state with these components would take.

    Raises:
        UsageError: one of them is wrong.
    """
    combined_rule(keep, savers, components)
    compile_label(label, run_name=run_name)
    check_choice("on_existing", on_existing, OnExisting)
    check_is("takeover", takeover, bool)
    budget_of(memory_budget)
    choices(compress, components)
    check_is("stop", stop, Stop | None)


def budget_of(memory_budget: int | str | None) -> int | None:
    """The bytes that a save may take for its copy of the state.

    Raises:
        UsageError: it is no size, or less than a save can do with.
    """
    if isinstance(memory_budget, str):
        memory_budget = number_of_bytes(memory_budget)
    if memory_budget is not None and memory_budget < MIN_BUDGET:
        raise UsageError(f"memory_budget={memory_budget}: at least {MIN_BUDGET} bytes are needed")
    return memory_budget


def check_is(name: str, value: object, kind: Any) -> None:
    """Raise `UsageError` unless an option is of this type."""
    if not isinstance(value, kind):
        raise UsageError(f"{name}={value!r}: must be {getattr(kind, '__name__', kind)}")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise `UsageError` unless an option is one of a `Literal`'s."""
    if value not in get_args(choices):
        raise UsageError(f"{name}={value!r} must be one of {get_args(choices)}")
