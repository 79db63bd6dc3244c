"""The options that a manager shares with who makes one, and what they may be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

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
    label: str | LabelFunction,
    run_name: str | None,
    memory_budget: int | str | None,
    compress: Compress,
) -> None:
    """Let pass what a manager of a state with these components would take.

    Raises:
        UsageError: one of them is wrong.
    """
    combined_rule(keep, savers, components)
    compile_label(label, run_name=run_name)
    budget_of(memory_budget)
    choices(compress, components)


def budget_of(memory_budget: int | str | None) -> int | None:
    """The bytes that a save may take for its copy of the state.

    Raises:
        UsageError: it is no size, or less than a save can do with.
    """
    nbytes = memory_budget
    if isinstance(nbytes, str):
        nbytes = number_of_bytes(nbytes, what="memory_budget=")
    if nbytes is not None and nbytes < MIN_BUDGET:
        raise UsageError(f"memory_budget={memory_budget!r}: at least {MIN_BUDGET} bytes are needed")
    return nbytes
