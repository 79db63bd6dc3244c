"""`holdfast diff`: what differs between two checkpoints or files, of any formats."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from holdfast.cli.output import Answer, Code, TextTable, number, progress_bar
from holdfast.cli.sources import open_named
from holdfast.errors import UsageError
from holdfast.interop.comparing.differences import SourceDifference, compare
from holdfast.interop.comparing.pairs import TensorDifference
from holdfast.interop.comparing.trees import ValueDifference

MAX_ROWS = 50
"""Most lines of each table for people; JSON has all."""


class DiffAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast diff`."""

    a: str
    """Path or URL of the first source."""
    b: str
    """The second source."""
    equal: bool
    """Whether nothing differs, or nothing by more than `fail_above`."""
    fail_above: float | None
    """The given limit; null: every bit counts."""
    num_equal: int
    """Tensors that are equal in every bit."""
    num_unread: int
    """Those of them that were not read, because their digests are equal."""
    tensors: tuple[TensorDifference, ...]
    """Those that differ, also within the limit."""
    values: tuple[ValueDifference, ...]
    """Plain values and parts of trees that differ."""


def diff(a: str, b: str, *, components: Collection[str], fail_above: float | None) -> Answer:
    """Compare two sources; the exit code is 0 where they are equal, and 1 where they differ.

    Raises:
        NoCheckpoint: nothing exists at one of the two.
        FormatError: one is in no known format, or damaged.
        UsageError: neither has a component of a given name, or the limit is no number >= 0.
    """
    if fail_above is not None and not fail_above >= 0:
        raise UsageError(f"--fail-above={fail_above}: must be a number of at least 0")
    with open_named(a) as source_a, open_named(b) as source_b, progress_bar() as progress:
        found = compare(source_a, source_b, components, progress=progress)
        urls = source_a.url, source_b.url
    beyond = found.beyond(fail_above)
    is_equal = not beyond and not found.values
    answer = DiffAnswer(
        a=urls[0],
        b=urls[1],
        equal=is_equal,
        fail_above=fail_above,
        num_equal=found.num_equal,
        num_unread=found.num_unread,
        tensors=found.tensors,
        values=found.values,
    )
    parts: list[str | TextTable] = [f"a: {urls[0]}", f"b: {urls[1]}"]
    parts += _tables(found)
    parts.append(_verdict(found, len(beyond), fail_above))
    return Answer(document=answer, parts=parts, code=Code.OK if is_equal else Code.FOUND)


def _tables(found: SourceDifference) -> list[str | TextTable]:
    parts: list[str | TextTable] = []
    if found.tensors:
        parts.append(
            TextTable(
                columns=("tensor", "differs in", "differ", "max abs", "relative", "cosine", "odd"),
                rows=[_row(one) for one in found.tensors[:MAX_ROWS]],
                right=frozenset({2, 3, 4, 5, 6}),
            )
        )
    if found.values:
        parts.append(
            TextTable(
                columns=("value", "a", "b"),
                rows=[
                    (one.path, *("–" if text is None else text for text in (one.a, one.b)))
                    for one in found.values[:MAX_ROWS]
                ],
            )
        )
    num_more = sum(max(0, len(rows) - MAX_ROWS) for rows in (found.tensors, found.values))
    return [*parts, *([f"and {num_more:,} more; --json lists all"] if num_more else [])]


def _row(one: TensorDifference) -> tuple[str, ...]:
    if one.what == "only in a":
        return one.tensor, f"only in a: {one.a}", "", "", "", "", ""
    if one.what == "only in b":
        return one.tensor, f"only in b: {one.b}", "", "", "", "", ""
    what = "values" if one.what == "values" else f"{one.what}: {one.a}, {one.b}"
    if one.what == "shape":
        return one.tensor, what, "", "", "", "", ""
    figures = (one.max_abs, one.relative_norm, one.cosine)
    odd = f"{one.non_finite_a:,} / {one.non_finite_b:,}"
    return (
        one.tensor,
        what,
        f"{one.different:,} of {one.count:,}",
        *("–" if figure is None else number(figure) for figure in figures),
        odd if one.non_finite_a or one.non_finite_b else "",
    )


def _verdict(found: SourceDifference, num_beyond: int, fail_above: float | None) -> str:
    unread = f" ({found.num_unread:,} by their digests)" if found.num_unread else ""
    texts = [f"{found.num_equal:,} tensors are equal{unread}"]
    if fail_above is not None and (num_within := len(found.tensors) - num_beyond):
        texts.append(f"{num_within:,} differ by at most {number(fail_above)}")
    texts += [f"{num_beyond:,} differ"] if num_beyond else []
    if num_values := len(found.values):
        texts.append(f"{num_values:,} plain value{'s differ' if num_values > 1 else ' differs'}")
    return "; ".join(texts)
