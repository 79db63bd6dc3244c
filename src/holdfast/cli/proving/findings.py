"""Differences of two runs, checkpoint by checkpoint, and what commonly causes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.cli.documents import is_timing
from holdfast.cli.output import number, one_line
from holdfast.cli.proving.runs import RunResult
from holdfast.cli.sources import open_named
from holdfast.cli.target import open_root_store, unlocked
from holdfast.format.layout import RNG
from holdfast.interop.comparing.differences import SourceDifference, compare_sources
from holdfast.interop.comparing.pairs import TensorDifference
from holdfast.interop.source import Source
from holdfast.root.catalog import Catalog, Entry

_POSITIONS = ("data", "loader", "sampler")
_RATES = re.compile(r"(?:^|\.)(?:lr|initial_lr|momentum|betas|weight_decay)(?:\.|$)")
_ROUNDING = 1e-4
"""Relative difference below which rounding is the likely cause, and above which it is not."""
_WARNINGS = re.compile(
    r"not in the state|no data-loader position|no component holds|resume skips"
    r"|differ from then on|[Aa] resumed run|[Aa]fter a resume"
)
"""Parts of those of Holdfast's warnings that say why a resume cannot be exact."""
_MAX_WARNINGS = 5

What = Literal["tensors", "values", "generators", "metrics", "steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """Values of a checkpoint that differ in two runs: of one component, and of one kind."""

    component: str
    what: What
    path: str
    """The first of them."""
    a: str
    b: str
    num: int = 1
    """How many tensors of the component differ; 1 for anything else."""
    relative: float = 0.0
    """Largest relative norm of the difference of a tensor."""

    @property
    def is_timing(self) -> bool:
        """Whether it is a metric of a duration, which no two runs have alike."""
        return self.what == "metrics" and is_timing(re.split("[.:]", self.path)[-1])

    @property
    def is_of_training(self) -> bool:
        """Whether it shows another training, as a metric or an unused generator does not."""
        return self.what in ("tensors", "steps")

    @property
    def label(self) -> str:
        """Its name in a list of differences."""
        is_generator = self.what == "generators"
        return f"the generator {self.path}, which is not seeded" if is_generator else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPair:
    """Checkpoints of one step in two runs, and their differences."""

    step: int
    epoch: int
    """Claim under which the second run saved it."""
    a: Path
    b: Path
    is_last: bool
    differences: tuple[RunDifference, ...]
    components: tuple[str, ...]
    has_position: bool
    has_schedule: bool
    has_weights: bool
    """Whether a component other than the generators has tensors."""
    num_tensors: int
    """Tensors that are equal."""


def compare_runs(a: RunResult, b: RunResult) -> list[ComparedPair]:
    """Compare all checkpoints of equal steps, by step; after a difference only the last ones.

    Both runs have the same roots.
    """
    pairs: list[ComparedPair] = []
    for root in a.kept_roots:
        pairs += _compare_roots(a.kept / root, b.kept / root)
    return pairs


def _compare_roots(a: Path, b: Path) -> Iterator[ComparedPair]:
    ours, others = _list_entries(a), _list_entries(b)
    by_key = {_key_of(entry): entry for entry in ours}  # of several saves of a step the last
    pairs = [(by_key[key], entry) for entry in others if (key := _key_of(entry)) in by_key]
    pairs.sort(key=lambda pair: (pair[1].step, pair[1].order))
    last = ours[-1], others[-1]
    if last not in pairs:
        pairs.append(last)
    has_differed = False
    for one, other in pairs:
        is_last = (one, other) == last
        if not has_differed or is_last:
            pair = _compare_pair(a / one.folder, one, b / other.folder, other, is_last=is_last)
            has_differed |= any(found.is_of_training for found in pair.differences)
            yield pair


def _list_entries(kept: Path) -> list[Entry]:
    """List the checkpoints that were kept of a root, in the order of commits."""
    entries, unread = Catalog(unlocked(open_root_store(str(kept)))).survey()
    for _, error in unread:  # one that is not compared must not count as equal
        raise error
    return sorted(entries, key=lambda entry: entry.order)


def _key_of(entry: Entry) -> tuple[int, tuple[str, ...]]:
    return entry.step, tuple(sorted(entry.manifest.components))


def _compare_pair(a: Path, one: Entry, b: Path, other: Entry, *, is_last: bool) -> ComparedPair:
    with open_named(str(a)) as source_a, open_named(str(b)) as source_b:
        found = compare_sources(source_a, source_b)
        names = tuple(source_a.parts)
        has_position, has_schedule = _has_position(source_a), _has_schedule(source_a)
        has_weights = any(part.specs for name, part in source_a.parts.items() if name != RNG)
    differences = [*_of_source(found), *_of_metrics(one, other)]
    if one.step != other.step:
        steps = str(one.step), str(other.step)
        differences.insert(
            0,
            RunDifference(component="run", what="steps", path="last step", a=steps[0], b=steps[1]),
        )
    return ComparedPair(
        step=one.step,
        epoch=other.manifest.epoch,
        a=a,
        b=b,
        is_last=is_last,
        differences=tuple(differences),
        components=names,
        has_position=has_position,
        has_schedule=has_schedule,
        has_weights=has_weights,
        num_tensors=found.num_equal,
    )


def _of_source(found: SourceDifference) -> Iterator[RunDifference]:
    """Yield the differences of components; the tensors of a component together."""
    tensors: dict[str, list[TensorDifference]] = {}
    for one in found.tensors:
        tensors.setdefault(one.tensor.partition(":")[0], []).append(one)
    for value in found.values:
        component, _, path = value.path.partition(":")
        yield RunDifference(
            component=component, what="values", path=path, a=value.a or "–", b=value.b or "–"
        )
    for lost in found.not_compared:
        component, _, path = lost.path.partition(":")
        yield RunDifference(
            component=component, what="values", path=path, a="not compared", b=one_line(lost.why)
        )
    for generator in found.generators:
        component, _, path = generator.path.partition(":")
        yield RunDifference(component=component, what="generators", path=path, a="", b="")
    for component, differing in tensors.items():
        norms = [one.relative_norm for one in differing if one.relative_norm is not None]
        yield RunDifference(
            component=component,
            what="tensors",
            path=differing[0].tensor.partition(":")[2],
            a=differing[0].a or "–",
            b=differing[0].b or "–",
            num=len(differing),
            relative=max(norms) if len(norms) == len(differing) else 1.0,
        )


def _of_metrics(one: Entry, other: Entry) -> Iterator[RunDifference]:
    a, b = one.manifest.metrics, other.manifest.metrics
    for name in dict.fromkeys([*a, *b]):
        texts = [repr(side[name]) if name in side else "–" for side in (a, b)]
        if texts[0] != texts[1]:
            yield RunDifference(
                component="metrics", what="metrics", path=name, a=texts[0], b=texts[1]
            )


def _has_position(source: Source) -> bool:
    """Whether a component is a position in the data, as far as names and members show."""
    return any(
        any(word in name for word in _POSITIONS)
        or (isinstance(part.tree, Mapping) and "batch" in part.tree)
        for name, part in source.parts.items()
    )


def _has_schedule(source: Source) -> bool:
    return any(_holds_name(part.tree, "last_epoch", 3) for part in source.parts.values())


def _holds_name(tree: object, name: str, depth: int) -> bool:
    if isinstance(tree, Mapping) and name in tree:
        return True
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    return depth > 0 and any(_holds_name(one, name, depth - 1) for one in inner)


# Causes ------------------------------------------------------------------------------------------


def list_causes(
    pair: ComparedPair, differences: Sequence[RunDifference], *, is_anyway: bool
) -> list[str]:
    """List common causes of the first differences of two runs, the likeliest first."""
    return [*(_causes_anyway(differences) if is_anyway else _causes_of_resume(pair, differences))]


def _causes_anyway(differences: Sequence[RunDifference]) -> Iterator[str]:
    generators = [one.path for one in differences if one.what == "generators"]
    if generators:
        yield (
            f"rng: the generators {', '.join(generators)} are not seeded, or are not used equally "
            "often. Call random.seed(0), numpy.random.seed(0) and torch.manual_seed(0) at the "
            "top of the script"
        )
    relative = max((one.relative for one in differences if one.what == "tensors"), default=0.0)
    if not generators and relative < _ROUNDING:
        yield (
            f"a nondeterministic kernel or number of threads: the tensors differ by rounding "
            f"({number(relative)}). Try torch.use_deterministic_algorithms(True) and "
            "torch.set_num_threads(1)"
        )
    elif not generators:
        yield (
            "a generator that is not seeded and not in the state, such as random.Random(), "
            "numpy.random.default_rng() or torch.Generator() with seed(): the global ones are equal"
        )
        yield (
            "an order that differs from process to process: of files (sort os.listdir and glob), "
            "or of a set of texts (set PYTHONHASHSEED)"
        )
        yield "the time, a process number or a path that the training uses"


def _causes_of_resume(pair: ComparedPair, differences: Sequence[RunDifference]) -> Iterator[str]:
    found = {one.what for one in differences}
    rates = [one for one in differences if one.what == "values" and _RATES.search(one.path)]
    moved = [one for one in differences if _is_position(one)]
    if "steps" in found:
        yield "steps: the loop must start at the step that was resumed, found.step, not at 0"
    if rates:
        missing = "does not set it" if pair.has_schedule else "is not in the state"
        yield (
            f"scheduler: the learning rate differs ({rates[0].component}:{rates[0].path} is "
            f"{rates[0].a} and {rates[0].b}), and a scheduler {missing}. Add it: "
            '{"scheduler": scheduler}'
        )
    if not pair.has_position:
        yield (
            "data: the state has no data-loader position, so the resumed run gets "
            'other samples. Use holdfast.data.Loader, and add it: {"data": data}'
        )
    if moved:
        yield (
            f"{moved[0].component}: the position ({moved[0].path}) differs after as many steps, so "
            "batches were skipped or repeated. Does a prefetcher or another wrapper take batches "
            "before they are trained on, or does the loop skip batches although the loader "
            "resumes by itself?"
        )
    if "generators" in found:
        yield (
            "rng: the resumed run draws other random numbers. Is a generator seeded after "
            "resume(), or drawn from in each process, as by a DataLoader at the start of an epoch?"
        )
    if not (found & {"tensors", "generators", "steps"} or rates or moved):
        texts = ", ".join(f"{one.component}:{one.path}" for one in differences[:3])
        yield (
            f"metrics: the training is equal, but not {texts}: computed from something outside "
            "of the state, such as an EMA of the weights or a running mean. Add it to the state"
        )
    elif pair.has_position and not (moved or rates or found & {"steps", "generators"}):
        yield (
            "outside of the state: the training uses something that no component holds, such as "
            "an EMA or teacher, a hidden state, a prefetched batch, a replay buffer or an "
            "environment. Add it to the state"
        )


def _is_position(one: RunDifference) -> bool:
    """Whether an integer of a component of the data differs."""
    is_data = any(word in one.component for word in _POSITIONS)
    return is_data and one.what == "values" and one.a.isdecimal() and one.b.isdecimal()


def find_warnings(logs: Collection[Path]) -> list[str]:
    """Return the lines of logs in which Holdfast says why a resume cannot be exact."""
    found: dict[str, None] = {}
    for path in logs:
        with path.open(encoding="utf-8", errors="replace") as file:
            found |= {line.strip(): None for line in file if _WARNINGS.search(line)}
    return [one_line(line, 400) for line in found][:_MAX_WARNINGS]
