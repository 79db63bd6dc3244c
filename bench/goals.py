"""The goals, and how each is found in the results: `python -m bench` prints them.

A ratio is the median of the ratios within each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bench.report import seconds, table
from bench.results import Results

_LIMITS = "local/gpt/limits"
_SAVE = "local/gpt/save/"
_LOAD = "local/gpt/load/"
_SLOWDOWN = "slowdown/"
_MIB = 1024 * 1024

Find: TypeAlias = Callable[[Results], float | None]
"""What was found; None where the cases for it were not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One row: a figure and what it should be. `form` shows both."""

    measure: str
    find: Find
    bound: float
    is_lower_bound: bool = False
    form: Callable[[float], str]

    @property
    def text(self) -> str:
        """The goal for people."""
        return f"{'at least' if self.is_lower_bound else 'at most'} {self.form(self.bound)}"

    def is_met(self, found: float) -> bool:
        """Whether a figure reaches the goal."""
        return found >= self.bound if self.is_lower_bound else found <= self.bound


def goals_table(results: Results, wanted: Sequence[Goal]) -> list[str]:
    """Markdown lines: measure, goal, found, met."""
    goals = {goal.measure: goal for goal in wanted}

    def row(measure: str) -> list[str]:
        goal = goals[measure]
        found = goal.find(results)
        if found is None:
            return [goal.text, "not measured", "–"]
        return [goal.text, goal.form(found), "yes" if goal.is_met(found) else "**no**"]

    names = {measure: measure for measure in goals}
    return table(["measure", "goal", "found", "met"], names, row)


def quotient(over: str, under: str) -> Find:
    """Of two figures of the same round; each is `case:figure`."""
    return lambda results: results.ratio(_split(over), _split(under))


def value(figure: str) -> Find:
    """The median of a figure `case:figure`."""
    return lambda results: results.median(*_split(figure))


def worst(*finds: Find) -> Find:
    """The highest of some; None as soon as one is."""

    def find(results: Results) -> float | None:
        found = [value for find in finds if (value := find(results)) is not None]
        return max(found) if len(found) == len(finds) else None

    return find


def least(*finds: Find) -> Find:
    """The lowest of those that were measured."""

    def find(results: Results) -> float | None:
        return min((value for find in finds if (value := find(results)) is not None), default=None)

    return find


def best_of(*figures: str, over: str) -> Find:
    """`over` beside the lowest of the figures that were measured."""

    def find(results: Results) -> float | None:
        found = [ratio for name in figures if (ratio := quotient(over, name)(results)) is not None]
        return max(found, default=None)

    return find


def _overlap_call(results: Results) -> float | None:
    """Time in the call, as a share of 1 ms and 1 µs a tensor."""
    call_s = results.median(f"{_SAVE}holdfast-overlap", "stall_s")
    num_tensors = results.median(f"{_SAVE}holdfast-overlap", "num_tensors")
    return None if call_s is None or num_tensors is None else call_s / (1e-3 + 1e-6 * num_tensors)


def _slowdown(place: str) -> Find:
    """Seconds that Holdfast's best set-up adds, less those of the best peer."""

    def find(results: Results) -> float | None:
        added: dict[bool, list[float]] = {True: [], False: []}
        for case in results.names(place):
            found = results.median(case, "added_s")
            if found is not None and case not in (f"{place}none", f"{place}plain"):
                added[case.startswith(f"{place}holdfast")].append(found)
        return min(added[True]) - min(added[False]) if added[True] and added[False] else None

    return find


def _split(figure: str) -> tuple[str, str]:
    case, _, name = figure.rpartition(":")
    return case, name


def _times(found: float) -> str:
    return f"{found:.2f}×"


def _millis(found: float) -> str:
    return f"{found * 1e3:,.0f} ms"


def _mebibytes(found: float) -> str:
    return f"{found / _MIB:,.0f} MiB"


def _count(found: float) -> str:
    return f"{found:.0f}"


def _difference(found: float) -> str:
    return f"{found:+.2f} s"


def _at_most(measure: str, bound: float, find: Find, form: Callable[[float], str] = _times) -> Goal:
    return Goal(measure=measure, bound=bound, find=find, form=form)


def _at_least(measure: str, bound: float, find: Find) -> Goal:
    return Goal(measure=measure, bound=bound, find=find, form=_times, is_lower_bound=True)


def _loads(title: str, *, verified: str, unverified: str) -> list[Goal]:
    """Goals of two readers of a load."""
    return [
        _at_least(
            f"{title}, cold: share of the cold-read ceiling",
            0.95,
            quotient(f"{_LOAD}{verified}:disk_s", f"{_LOAD}{verified}:cold_s"),
        ),
        _at_least(
            f"{title}, warm: share of copy and digest",
            0.8,
            quotient(f"{_LIMITS}:ceiling_warm_s", f"{_LOAD}{verified}:warm_s"),
        ),
        _at_most(
            f"{title}, `verify=False`: vs. safetensors, the worse of cold and warm",
            1,
            worst(
                *(
                    quotient(f"{_LOAD}{unverified}:{way}", f"{_LOAD}safetensors:{way}")
                    for way in ("cold_s", "warm_s")
                )
            ),
        ),
    ]


_FULL = f"{_SAVE}holdfast:durable_s"
_DURABLE = f"{_SAVE}holdfast-awaited:durable_s"
_STALL = f"{_SAVE}holdfast:stall_s"
_STAGERS = ("dcp-async", "dcp-async-kept", "dcp-async-shared")

_RESUMES = [
    f"{slots}, {memory}" for slots in ("stepped", "new") for memory in ("ready", "given back")
]
RESUME_GOALS: Sequence[Goal] = (
    _at_most(
        "first `resume()`, warm: vs. a plain read with digests, the worst of four",
        1.25,
        worst(
            *(
                quotient(f"resumes/warm, {way}/default:took_s", f"resumes/warm, {way}/plain:took_s")
                for way in _RESUMES
            )
        ),
    ),
    _at_least(
        "… cold: share of the cold-read ceiling, the worst of four",
        0.9,
        least(
            *(
                quotient(
                    f"resumes/cold, {way}/default:disk_s", f"resumes/cold, {way}/default:took_s"
                )
                for way in _RESUMES
            )
        ),
    ),
)
GOALS: Sequence[Goal] = (
    _at_least(
        "durable save, `wait=True`, 2.5 GB: share of the O_DIRECT + fsync ceiling",
        0.9,
        quotient(f"{_SAVE}holdfast-awaited:disk_s", _DURABLE),
    ),
    _at_least(
        "… times faster than safetensors + fsync",
        1.4,
        quotient(f"{_SAVE}safetensors:durable_s", _DURABLE),
    ),
    _at_least("… times faster than `dcp.save`", 3, quotient(f"{_SAVE}dcp:durable_s", _DURABLE)),
    _at_most(
        "stall of a staged save: vs. a memcpy of the same tensors, 1 thread",
        1.1,
        quotient(_STALL, f"{_LIMITS}:copy_state_s"),
    ),
    _at_most(
        "… vs. a memcpy of memory that was copied just before",
        1.1,
        quotient(_STALL, f"{_LIMITS}:copy_touched_s"),
    ),
    _at_most("… vs. `dcp.async_save`", 0.35, quotient(_STALL, f"{_SAVE}dcp-async:stall_s")),
    _at_most(
        "… vs. its best stager",
        1,
        best_of(*(f"{_SAVE}{name}:stall_s" for name in _STAGERS), over=_STALL),
    ),
    _at_most("`save()` with overlap: share of 1 ms + 1 µs a tensor", 1, _overlap_call),
    _at_least(
        "… done, times sooner than torch_checkpointing",
        3,
        quotient(f"{_SAVE}torch_checkpointing:durable_s", f"{_SAVE}holdfast-overlap:durable_s"),
    ),
    _at_most(
        "slow-down of a training by a save: compared with the best peer",
        0,
        _slowdown(_SLOWDOWN),
        _difference,
    ),
    _at_most(
        "20,000 small tensors: save vs. a bare safetensors file",
        0.5,
        quotient("metadata/small:save_s", "metadata/small:bare_save_s"),
    ),
    _at_most("… load vs. it", 0.6, quotient("metadata/small:load_s", "metadata/small:bare_load_s")),
    *_loads(
        "verified load in place, 2.5 GB",
        verified="holdfast-in-place",
        unverified="holdfast-in-place-unverified",
    ),
    *_loads(
        "the same, verified before anything changes (default)",
        verified="holdfast",
        unverified="holdfast-unverified",
    ),
    _at_most(
        "90% frozen: time vs. a full save",
        0.25,
        quotient(f"{_SAVE}holdfast-frozen:durable_s", _FULL),
    ),
    _at_most(
        "… bytes written vs. a full save",
        0.11,
        quotient(f"{_SAVE}holdfast-frozen:written_nbytes", f"{_SAVE}holdfast:written_nbytes"),
    ),
    _at_most(
        "extra memory of a save with `memory_budget=256MiB`",
        300 * _MIB,
        value(f"{_SAVE}holdfast-budget:peak_extra_nbytes"),
        _mebibytes,
    ),
    _at_most(
        "one tensor out of 2.5 GB, cold, verified", 0.03, value("metadata/one/load:cold_s"), _millis
    ),
    _at_most("100,000 shards: index written", 0.5, value("metadata/index/write:write_s"), _millis),
    _at_most("… read", 0.5, value("metadata/index/read:read_s"), _millis),
    _at_most(
        "… memory, the larger of both",
        200 * _MIB,
        worst(*(value(f"metadata/index/{way}:peak_extra_nbytes") for way in ("write", "read"))),
        _mebibytes,
    ),
    _at_most("1,000 checkpoints: `holdfast ls`", 0.5, value("metadata/run/commands:ls_s"), _millis),
    _at_most("… `resume()`", 0.05, value("metadata/run/resume:resume_s"), _millis),
    _at_most("… manifests read", 1, value("metadata/run/resume:manifests_count"), _count),
    _at_most(
        "`holdfast --help` vs. `import torch`",
        0.12,
        quotient("metadata/run/commands:help_s", "metadata/run/commands:import_torch_s"),
    ),
)
"""In the order in which they are printed; a measure with `…` goes on from the one above."""

_CODECS = "codecs/save/"
CODEC_GOALS: Sequence[Goal] = (
    _at_most(
        "durable save sealed by AES-256-GCM: vs. a plain one",
        1.25,
        value(f"{_CODECS}disk/aes-256-gcm:save_ratio"),
    ),
    # 1, and what two equal saves differ by.
    _at_most(
        '`compress="auto"`: durable save vs. a plain one, the worse of both stores',
        1.05,
        worst(*(value(f"{_CODECS}{where}/auto:save_ratio") for where in ("disk", "slow"))),
    ),
)
"""Of `bench.codecs`."""

_REMOTE = "remote/"


def _beside(way: str, *others: str, ours: str = "holdfast") -> Find:
    """The time of the fastest of the others beside that of ours."""
    ours = f"{_REMOTE}{ours}:{way}_s"
    return least(*(quotient(f"{_REMOTE}{name}:{way}_s", ours) for name in others))


_BARE = ("obstore", "boto3", "s3torchconnector")
REMOTE_GOALS: Sequence[Goal] = (
    _at_least("upload: share of the fastest bare client", 0.95, _beside("upload", *_BARE)),
    _at_least(
        "… payload not signed, as over https: share of obstore",
        0.95,
        _beside("upload", "obstore-unsigned", ours="holdfast-unsigned"),
    ),
    _at_least("… times faster than `dcp.save` over s3fs", 2, _beside("upload", "dcp-fsspec")),
    _at_least(
        "verified download: share of the fastest bare client", 0.95, _beside("download", *_BARE)
    ),
    _at_least("… times faster than `dcp.load` over s3fs", 2, _beside("download", "dcp-fsspec")),
    _at_most(
        "extra memory of an upload with `memory_budget=256MiB`",
        512 * _MIB,
        value(f"{_REMOTE}holdfast-budget:upload_extra_nbytes"),
        _mebibytes,
    ),
    _at_most(
        "slow-down of a training by a save to the store: compared with the best peer",
        0,
        _slowdown("remoteslowdown/"),
        _difference,
    ),
)
"""Of `bench.remote`."""

RANKS_GOALS: Sequence[Goal] = (
    _at_least(
        "durable save of several ranks: throughput vs. bare writers",
        0.9,
        quotient("ranks/save/bare:durable_s", "ranks/save/holdfast:durable_s"),
    ),
    _at_least(
        "… vs. bare writers with O_DIRECT",
        0.9,
        quotient("ranks/save/direct:durable_s", "ranks/save/holdfast:durable_s"),
    ),
    _at_least(
        "… vs. `dcp.save`",
        1.5,
        quotient("ranks/save/dcp:durable_s", "ranks/save/holdfast:durable_s"),
    ),
    _at_most(
        "… stall vs. `dcp.async_save`",
        1 / 3,
        quotient("ranks/save/holdfast:stall_s", "ranks/save/dcp-async:stall_s"),
    ),
    _at_most(
        "… with `overlap=True`",
        1 / 3,
        quotient("ranks/save/holdfast-overlap:stall_s", "ranks/save/dcp-async:stall_s"),
    ),
    _at_most(
        "… vs. its kept stager",
        1.0,
        quotient("ranks/save/holdfast:stall_s", "ranks/save/dcp-async-kept:stall_s"),
    ),
    Goal(
        measure="… agreement: durable save of a tiny state, plan unchanged",
        find=lambda results: results.median("ranks/tiny/ranks", "durable_s"),
        bound=0.05,
        form=seconds,
    ),
    _at_most(
        "… written bytes, largest over mean of the ranks",
        1.1,
        lambda results: results.median("ranks/save/holdfast", "largest_over_mean"),
    ),
    _at_most(
        "… samples of copies, vs. a durable save",
        0.02,
        quotient("ranks/copies:compared_s", "ranks/copies:durable_s"),
    ),
    _at_least(
        "cold load of several ranks: times faster than `dcp.load`",
        1.3,
        quotient("ranks/load/dcp:cold_s", "ranks/load/holdfast:cold_s"),
    ),
)

HOSTS_GOALS: Sequence[Goal] = tuple(
    _at_most(
        f"{name} of a save to disks of hosts: vs. one shared folder",
        1.0,
        quotient(f"hosts/save/apart:{figure}", f"hosts/save/shared:{figure}"),
    )
    for name, figure in (("stall", "stall_s"), ("durable", "durable_s"))
)

_TOOLS = ("diff", "stats", "verify", "export", "import")
TOOLS_GOALS: Sequence[Goal] = (
    *(
        _at_least(
            f"`holdfast {name}`, cold, 2.5 GB: share of the cold-read ceiling",
            0.7,
            quotient(f"tools/large/{name}:disk_s", f"tools/large/{name}:work_s"),
        )
        for name in _TOOLS
    ),
    *(
        _at_least(
            f"… `holdfast {name}`: share of a read and a write",
            0.7,
            quotient(f"tools/large/{name}:read_and_write_s", f"tools/large/{name}:work_s"),
        )
        for name in ("export", "import")
    ),
    _at_most(
        "… peak memory, the worst of five",
        512 * _MIB,
        worst(*(value(f"tools/large/{name}:peak_nbytes") for name in _TOOLS)),
        _mebibytes,
    ),
    *(
        _at_most(
            f"`holdfast {name}` of 20,000 tensors, whole command",
            2.0,
            value(f"tools/many/{name}:took_s"),
            seconds,
        )
        for name in ("tree", "diff", "stats", "export", "import")
    ),
)
