"""`holdfast diff`: what differs between two checkpoints or files, of any formats."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from holdfast.cli import options
from holdfast.cli.documents import is_timing
from holdfast.cli.options import argument, command, option, several
from holdfast.cli.output import Answer, Code, TextTable, number, one_line, progress_bar
from holdfast.cli.sources import limited, open_named
from holdfast.errors import UsageError
from holdfast.interop.comparing.differences import NotCompared, SourceDifference, compare_sources
from holdfast.interop.comparing.pairs import GeneratorDifference, TensorDifference, ValueDifference

MAX_ROWS = 50
"""Most lines of each table for people; JSON has all."""
_LANGUAGES: Mapping[str, str] = {"python": "Python", "numpy": "NumPy", "numpy-legacy": "NumPy"}


class DiffAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `holdfast diff`."""

    a: str
    """Path or URL of the first source."""
    b: str
    """The second source."""
    equal: bool
    """Whether everything was compared and nothing differs, or nothing by more than `fail_above`."""
    fail_above: float | None
    """The given limit; null: every bit counts."""
    ignored: tuple[str, ...]
    """Patterns of what was left out, as given."""
    num_equal: int
    """Tensors that are equal in every bit."""
    num_unread: int
    """Those of them that were not read, because their digests are equal."""
    tensors: tuple[TensorDifference, ...]
    """Those that differ, also within the limit."""
    values: tuple[ValueDifference, ...]
    """Plain values and parts of trees that differ."""
    generators: tuple[GeneratorDifference, ...]
    """Random generators whose state differs; `tensors` and `values` have nothing of them."""
    not_compared: tuple[NotCompared, ...]
    """Values with tensors that could not be read; with any, `equal` is false."""


@command(
    "diff",
    argument("a", "A", options.SOURCE),
    argument("b", "B", options.SOURCE),
    options.components,
    several(
        "--ignore",
        "ignored",
        "PATTERN",
        "Ignore values that match, such as rng or '**.eval_runtime'.",
    ),
    option("--fail-above", "X", "Tensors that differ by at most X count as equal.", type=float),
    options.trust,
    answer=DiffAnswer,
    wrap=limited("a", "b"),
)
def diff(
    a: str,
    b: str,
    *,
    components: Collection[str] = (),
    ignored: Sequence[str] = (),
    fail_above: float | None = None,
) -> Answer:
    """Compare two checkpoints or files.

    Structure, dtypes, numbers and plain values are compared. The exit code is 1 if they differ.
    """
    if fail_above is not None and not fail_above >= 0:
        raise UsageError(f"--fail-above={fail_above}: must be a number of at least 0")
    with open_named(a) as source_a, open_named(b) as source_b, progress_bar() as progress:
        found = compare_sources(source_a, source_b, components, ignore=ignored, progress=progress)
        urls = source_a.url, source_b.url
        models = [name for name, part in source_a.parts.items() if part.kind == "module"]
        models = [name for name in models if name in source_b.parts]
        is_one_step = source_a.step == source_b.step
    beyond = found.beyond(fail_above)
    is_equal = not (beyond or found.values or found.generators or found.not_compared)
    answer = DiffAnswer(
        a=urls[0],
        b=urls[1],
        equal=is_equal,
        fail_above=fail_above,
        ignored=tuple(ignored),
        num_equal=found.num_equal,
        num_unread=found.num_unread,
        tensors=found.tensors,
        values=found.values,
        generators=found.generators,
        not_compared=found.not_compared,
    )
    timings = [one for one in found.values if _is_timing(one)]
    others = [one for one in found.values if not _is_timing(one)]
    parts = [
        f"a: {urls[0]}",
        f"b: {urls[1]}",
        *_tables(found, others),
        *_not_compared(found.not_compared),
        _verdict(found, len(beyond), fail_above, len(timings)),
        *(_seeding(found, others, [] if components else models) if is_one_step else []),
        *_of_timings(timings),
        *([f"ignored: {', '.join(ignored)}"] if ignored else []),
    ]
    return Answer(document=answer, parts=parts, code=Code.OK if is_equal else Code.FOUND)


def _not_compared(found: Sequence[NotCompared]) -> list[str]:
    lines = [f"not compared: {one_line(one.path)} in {one.source}: {one.why}" for one in found]
    num_more = len(lines) - MAX_ROWS
    return lines[:MAX_ROWS] + ([f"and {num_more:,} more; --json lists all"] if num_more > 0 else [])


def _is_timing(one: ValueDifference) -> bool:
    """Whether a value says how long something took, which no two runs have alike."""
    name = _name_of(one)
    if not (is_timing(name) and name.isprintable()):
        return False
    return all(text is None or _is_number(text) for text in (one.a, one.b))


def _name_of(one: ValueDifference) -> str:
    return re.split("[.:]", one.path)[-1]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _tables(found: SourceDifference, values: Sequence[ValueDifference]) -> list[str | TextTable]:
    parts: list[str | TextTable] = []
    if found.tensors:
        parts.append(
            TextTable(
                columns=("tensor", "differs in", "differ", "max abs", "relative", "cosine", "odd"),
                rows=[_row(one) for one in found.tensors[:MAX_ROWS]],
                right=frozenset({2, 3, 4, 5, 6}),
            )
        )
    if values:
        parts.append(
            TextTable(
                columns=("value", "a", "b"),
                rows=[
                    (one.path, *("–" if text is None else text for text in (one.a, one.b)))
                    for one in values[:MAX_ROWS]
                ],
            )
        )
    num_more = sum(max(0, len(rows) - MAX_ROWS) for rows in (found.tensors, values))
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


def _verdict(
    found: SourceDifference, num_beyond: int, fail_above: float | None, num_timings: int
) -> str:
    unread = f" ({found.num_unread:,} by their digests)" if found.num_unread else ""
    texts = [f"{found.num_equal:,} tensors are equal{unread}"]
    if fail_above is not None and (num_within := len(found.tensors) - num_beyond):
        texts.append(f"{num_within:,} differ by at most {number(fail_above)}")
    texts += [f"{num_beyond:,} differ"] if num_beyond else []
    texts += _count_differing(len(found.values) - num_timings, "plain value")
    texts += _count_differing(len(found.generators), "generator")
    texts += _count_differing(num_timings, "timing")
    if num_lost := len(found.not_compared):
        texts.append(f"{num_lost:,} could not be compared")
    return "; ".join(texts)


def _count_differing(num: int, what: str) -> list[str]:
    return [f"{num:,} {what}{'s differ' if num > 1 else ' differs'}"] if num else []


def _seeding(
    found: SourceDifference, others: Sequence[ValueDifference], models: Sequence[str]
) -> Iterator[str]:
    """Explain why generators differ after equally many steps, and how to leave them out."""
    if not found.generators:
        return
    who = _join_with_and([*dict.fromkeys(map(_who, found.generators))])
    text = f"the generators of {who} differ: seed them in both runs"
    if not (found.tensors or others):
        alone = " ".join(f"--component {shlex.quote(name)}" for name in models)
        ignoring = _ignoring(one.path for one in found.generators)
        text += f", or {f'compare {alone}' if alone else ignoring}"
    yield text


def _of_timings(timings: Sequence[ValueDifference]) -> Iterator[str]:
    if timings:
        names = [*dict.fromkeys(map(_name_of, timings))]
        yield (
            f"{_join_with_and(names)} {'tell' if len(names) > 1 else 'tells'} how long something "
            "took, which no two runs have alike: " + _ignoring(f"**.{name}" for name in names)
        )


def _who(one: GeneratorDifference) -> str:
    is_global = one.path.startswith("rng:")
    return _LANGUAGES.get(one.kind, one.kind) if is_global else one_line(one.path)


def _join_with_and(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _ignoring(patterns: Iterable[str]) -> str:
    return "leave them out with " + " ".join(
        f"--ignore {shlex.quote(one_line(pattern))}" for pattern in patterns
    )
