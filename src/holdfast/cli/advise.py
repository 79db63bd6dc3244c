"""`holdfast advise`: recommend a save interval, and print the costs and rates it follows from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, TypeAlias

from holdfast.care.advise import Ending, Measured, RecordedFacts, RecordedStart, Spacing, gather
from holdfast.cli.answers.base import of
from holdfast.cli.answers.history import Advise
from holdfast.cli.output import Answer, TextTable, size
from holdfast.cli.target import open_root
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.policy.advisor import (
    CREDIBLE,
    DEFAULT_OVERHEAD_CAP,
    DEFAULT_PRIOR_MTBF_S,
    Advice,
    FailureRate,
    Limit,
    advise,
    given_rate,
    learnt_rate,
    shares,
    span,
)
from holdfast.policy.auto import Auto, IntervalPlan
from holdfast.policy.clock import Time, Unit, parse
from holdfast.policy.costs import ASSUMED_RESTART_S, MIN_DELAYS, Costs, typical_costs

Source: TypeAlias = Literal["measured", "given", "assumed"]

MIN_SAVES = 2
"""Saves needed for advice: the first one of a process also allocates memory, so is no measure."""
_TITLES: Mapping[str, str] = {
    "stall_s": "a save stops training",
    "background_s": "it delays training more",
    "commit_s": "until it is committed",
    "restart_s": "a failure until it resumes",
    "mtbf_s": "one failure in",
    "prior_mtbf_s": "before anything was seen",
    "overhead_cap": "part that saving may take",
    "step_s": "a step takes",
}
"""Readable names of the inputs, in the order of the table."""
_DAY_S = 86_400.0
_NO_CHANGE = 0.0005
"""Smallest difference of the goodput, as a share, that is worth a change of settings."""
_ENDINGS: Mapping[Ending, str] = {
    "failed": "failed",
    "closed": "ended cleanly",
    "running": "running",
    "continued": "claimed again by the same process",
    "unknown": "with an unknown end",
}
_BECAUSE: Mapping[Limit, str] = {
    "optimum": "there saves and the work that failures undo cost least together",
    "overhead_cap": "saves would take more than the overhead cap otherwise",
    "one_save_at_a_time": "each save would wait for the commit of the one before otherwise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of `holdfast advise` that override recorded values, as typed; None is unset."""

    failures_per_day: float | None = None
    mtbf: str | None = None
    overhead_cap: str | None = None
    stall: str | None = None
    background: str | None = None
    commit: str | None = None
    restart: str | None = None


@dataclass(frozen=True, slots=True)
class _Input:
    """An input of the advice, such as a cost or a failure rate, and its source."""

    name: str
    value: float
    source: Source
    basis: str

    @property
    def text(self) -> str:
        return f"{100 * self.value:.4g}%" if self.name == "overhead_cap" else span(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Today(Spacing):
    """Expected goodput and shares of lost time at the run's present save interval."""

    goodput: float
    saving: float
    lost: float
    down: float


def advise_root(root: str, options: Options) -> Answer:
    """Compute the best save interval for the run in `root` from its recorded costs."""
    inputs = {item.name: item for item in _given(options)}
    store = open_root(root)
    facts = gather(store)
    for item in _costs(facts):
        inputs.setdefault(item.name, item)
    if "stall_s" not in inputs:
        raise NoCheckpoint(f"{store.url}: {_missing(facts)}")
    rate = _rate(facts, inputs)
    advice = advise(
        Costs(**{n: inputs[n].value for n in ("stall_s", "background_s", "commit_s", "restart_s")}),
        rate,
        overhead_cap=inputs["overhead_cap"].value,
        step_s=facts.step.seconds if facts.step is not None else None,
    )
    today, auto = _today(facts, advice), _auto(facts, inputs)
    rows = [inputs[name] for name in _TITLES if name in inputs]
    notes = [*_notes(facts, advice, today), _auto_note(auto)]
    return Answer(
        document=of(
            Advise,
            {
                **_document(store.url, rows, facts, advice, today),
                "auto": None
                if auto is None
                else {"interval_s": auto.interval_s, "limit": auto.limit, "text": str(auto)},
                "notes": notes,
            },
        ),
        parts=[
            _input_table(rows),
            "",
            _outcome_table(advice, today),
            "",
            *notes,
            f'every="{advice.every}"',
        ],
    )


def _given(options: Options) -> list[_Input]:
    inputs = [
        _Input(name, _seconds(text, what=flag), "given", flag)
        for name, flag, text in (
            ("stall_s", "--stall", options.stall),
            ("background_s", "--background", options.background),
            ("commit_s", "--commit", options.commit),
            ("restart_s", "--restart", options.restart),
        )
        if text is not None
    ]
    if options.overhead_cap is not None:
        share = _share(options.overhead_cap)
        inputs.append(_Input("overhead_cap", share, "given", "--overhead-cap"))
    mtbf_s = _given_mtbf_s(options)
    if mtbf_s is not None:
        flag = "--mtbf" if options.mtbf is not None else "--failures-per-day"
        inputs.append(_Input("mtbf_s", mtbf_s, "given", flag))
    return inputs


def _given_mtbf_s(options: Options) -> float | None:
    per_day = options.failures_per_day
    if per_day is not None and options.mtbf is not None:
        raise UsageError("--failures-per-day and --mtbf exclude each other")
    if options.mtbf is not None:
        return float(parse(options.mtbf, what="--mtbf", units={Unit.SECOND}).value)
    if per_day is None:
        return None
    if not 0 < per_day < float("inf"):
        raise UsageError(f"--failures-per-day={per_day!r} must be a number above zero")
    return _DAY_S / per_day


def _seconds(text: str, *, what: str) -> float:
    if re.fullmatch(r"\s*0+\s*s?\s*", text):
        return 0.0
    return float(parse(text, what=what, units={Unit.SECOND}).value)


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(%?)\s*", text, re.ASCII)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value < 1:
        raise UsageError(f"--overhead-cap={text!r} must be a share between 0 and 1, such as 1%")
    return value


def _costs(facts: RecordedFacts) -> list[_Input]:
    """List recorded costs, and assumed ones for those that were not recorded."""
    costs = typical_costs(facts.saves, facts.history.resumes_s)
    stall = facts.stall if len(facts.saves) >= MIN_SAVES else None
    delay = facts.delay if facts.delay is not None and facts.delay.count >= MIN_DELAYS else None
    inputs: list[_Input] = []
    if costs is not None:
        recorded = (
            ("stall_s", costs.stall_s, stall, "save", "capture_s + stage_s"),
            ("background_s", costs.background_s, delay, "save", "delay_s"),
            ("commit_s", costs.commit_s, facts.write, "save", "write_s"),
            ("restart_s", costs.restart_s, facts.resume, "resume", "resume_s"),
        )
        inputs += [
            _Input(name, value, "measured", f"{_median(measured, what)}: {timings}")
            for name, value, measured, what, timings in recorded
            if measured is not None
        ]
    assumed = {"background_s": 0.0, "commit_s": 0.0, "restart_s": ASSUMED_RESTART_S}
    inputs += [
        _Input(name, value, "assumed", f"not recorded: --{name.removesuffix('_s')}")
        for name, value in assumed.items()
    ]
    inputs.append(_Input("overhead_cap", DEFAULT_OVERHEAD_CAP, "assumed", "--overhead-cap"))
    if facts.step is not None:
        basis = f"{_median(facts.step, 'stretch', 'es')} between saves"
        inputs.append(_Input("step_s", facts.step.seconds, "measured", basis))
    return inputs


def _median(measured: Measured, what: str, plural: str = "s") -> str:
    return f"median of {measured.count} {what}{'' if measured.count == 1 else plural}"


def _rate(facts: RecordedFacts, inputs: dict[str, _Input]) -> FailureRate:
    """Return the failure rate, given or learnt; a learnt one is added to `inputs`."""
    if "mtbf_s" in inputs:
        return given_rate(inputs["mtbf_s"].value)
    rate = learnt_rate(facts.num_failures, facts.trained_s)
    seen = f"{_count(facts.num_failures, 'failure')} in {span(facts.trained_s)} of training"
    is_learnt = facts.num_failures > 0 or facts.trained_s > 0
    inputs["mtbf_s"] = _Input(
        "mtbf_s",
        rate.mtbf_s,
        "measured" if is_learnt else "assumed",
        f"{seen}; {CREDIBLE:.0%}: {span(rate.low_s)} to {span(rate.high_s)}",
    )
    inputs["prior_mtbf_s"] = _Input(
        "prior_mtbf_s",
        DEFAULT_PRIOR_MTBF_S,
        "assumed",
        "weighs half a failure: --mtbf, --failures-per-day",
    )
    return rate


def _missing(facts: RecordedFacts) -> str:
    count = facts.stall.count if facts.stall is not None else 0
    return (
        f"too little to go by: {count} of {_count(facts.num_saves, 'checkpoint')} "
        f"{'records' if count == 1 else 'record'} how long the save stopped training, "
        f"{MIN_SAVES} are needed; save more, or give --stall"
    )


def _auto(facts: RecordedFacts, inputs: Mapping[str, _Input]) -> IntervalPlan | None:
    """Compute the interval that `every="auto"` would choose from recorded costs and failures."""
    costs = typical_costs(facts.saves, facts.history.resumes_s)
    rate, cap = inputs["mtbf_s"], inputs["overhead_cap"].value
    mtbf = Time(rate.value, Unit.SECOND) if rate.source == "given" else None
    auto = Auto(overhead=cap, mtbf=mtbf)
    failures = auto.rate(facts.num_failures, facts.trained_s)
    return None if costs is None else auto.decide(costs, failures)


def _auto_note(auto: IntervalPlan | None) -> str:
    if auto is None:
        return f'every="auto" would save after {span(Auto().at_least.value)} first, to measure'
    return f'every="auto" would save {auto}'


def _today(facts: RecordedFacts, advice: Advice) -> _Today | None:
    if facts.spacing is None:
        return None
    goodput, saving, lost, down = shares(
        facts.spacing.interval_s, advice.costs, advice.failures.mtbf_s
    )
    return _Today(**asdict(facts.spacing), goodput=goodput, saving=saving, lost=lost, down=down)


def _input_table(inputs: Sequence[_Input]) -> TextTable:
    return TextTable(
        columns=("input", "value", "", "from"),
        rows=[(_TITLES[item.name], item.text, item.source, item.basis) for item in inputs],
        right=frozenset({1}),
        whole=frozenset({0, 1, 2}),
    )


def _outcome_table(advice: Advice, today: _Today | None) -> TextTable:
    by_steps = advice.every.unit is Unit.STEP
    rows = [_outcome("advised", advice, float(advice.every.value) if by_steps else None)]
    if today is not None:
        rows.insert(0, _outcome("today", today, today.steps))
    return TextTable(
        columns=("", "interval", "", "saves take", "done again", "restarts", "goodput"),
        rows=rows,
        right=frozenset(range(1, 7)),
        whole=frozenset(range(7)),
    )


def _outcome(name: str, shares: Advice | _Today, steps: float | None) -> tuple[str, ...]:
    parts = (shares.saving, shares.lost, shares.down, shares.goodput)
    length = "" if steps is None else f"{steps:.10g} steps"
    return (name, span(shares.interval_s), length, *(f"{part:.2%}" for part in parts))


def _notes(facts: RecordedFacts, advice: Advice, today: _Today | None) -> list[str]:
    notes = [f"why: {_BECAUSE[advice.limit]}"]
    if advice.failures.observed_s is not None:
        notes.append(
            f"as well as failures are known ({CREDIBLE:.0%}), the best is between "
            f"{span(advice.shortest_s)} and {span(advice.longest_s)}"
        )
    if today is None:
        notes.append("today's interval is unknown: no two consecutive saves were recorded")
    else:
        kind = "interval saves" if today.is_by_interval else "saves of any reason"
        gain = advice.goodput - today.goodput
        change = f"goodput changes by {gain:+.2%}" if abs(gain) >= _NO_CHANGE else "it is as good"
        notes.append(
            f"today: median distance of {_count(today.num_pairs, 'pair')} of {kind}; {change}"
        )
    if facts.step is None:
        notes.append("in seconds, as no two saves of a start tell how long a step takes")
    if facts.nbytes is not None:
        notes.append(f"a checkpoint has {size(facts.nbytes)}")
    notes += _start_notes(facts.starts)
    return notes + [f"cannot be read, not counted: {item}" for item in facts.unreadable]


def _start_notes(starts: Sequence[RecordedStart]) -> list[str]:
    endings = Counter(start.ending for start in starts)
    counts = ", ".join(f"{endings[e]} {text}" for e, text in _ENDINGS.items() if endings[e])
    notes = [f"{_count(len(starts), 'start')}: {counts}"] if starts else ["no start is recorded"]
    if endings["closed"]:
        notes.append(
            "a program that ends with an exception also ends cleanly; if that was a failure, "
            "give --failures-per-day"
        )
    gaps = [start.resume_gap_s for start in starts if start.resume_gap_s is not None]
    if gaps:
        notes.append(
            f"from the last commit to the next start: median {span(median(gaps))}, at most "
            f"{span(max(gaps))} ({_count(len(gaps), 'failure')}); lost work and downtime together"
        )
    steps = sum(start.steps_left_behind or 0 for start in starts)
    if steps:
        notes.append(f"{_count(steps, 'committed step')} left behind after failures")
    return notes


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _document(
    url: str,
    inputs: Sequence[_Input],
    facts: RecordedFacts,
    advice: Advice,
    today: _Today | None,
) -> dict[str, Any]:
    return {
        "root": url,
        "every": str(advice.every),
        "inputs": [asdict(item) for item in inputs],
        "advice": advice.as_dict(),
        "today": None if today is None else asdict(today),
        "starts": [_start_document(start) for start in facts.starts],
        "num_saves": facts.num_saves,
        "nbytes": facts.nbytes,
        "trained_s": facts.trained_s,
        "unreadable": list(facts.unreadable),
    }


def _start_document(start: RecordedStart) -> dict[str, Any]:
    point = start.resumed_from
    return {**asdict(start), "resumed_from": point.folder if point is not None else None}
