"""Names from templates or functions: labels of checkpoints, and roots of runs.

A label is never parsed, so it may be anything that a folder name allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from string import Formatter
from typing import TypeAlias

from holdfast.errors import UsageError
from holdfast.format.layout import MAX_LABEL_BYTES, check_label
from holdfast.format.manifest import Timestamp
from holdfast.launched import Ranks, present_ranks

LabelFunction: TypeAlias = Callable[[Timestamp], str]

DEFAULT_LABEL = "step-{step:08d}"
COUNTERS: Mapping[str, str] = {
    **{name: name for name in Timestamp.__struct_fields__},
    "batch": "step",
    "sample": "samples",
    "token": "tokens",
    "batch_in_epoch": "step_in_epoch",
    "sample_in_epoch": "samples_in_epoch",
    "token_in_epoch": "tokens_in_epoch",
    "batch_in_cycle": "step_in_cycle",
    "total_wct": "wall_s",
    "epoch_wct": "epoch_wall_s",
    "batch_wct": "step_wall_s",
}
"""Name in a template → field of the Timestamp. Those with `wall` and `wct` are seconds."""
_MOMENTS = {"date": "%Y-%m-%d", "time": "%Y%m%dT%H%M%SZ"}

_TRIALS = (
    Timestamp(**dict.fromkeys(Timestamp.__struct_fields__, 0)),
    Timestamp(
        step=10**9,
        epoch=10**6,
        samples=10**12,
        tokens=10**15,
        wall_s=1e9 / 3,
        step_in_epoch=10**9,
        samples_in_epoch=10**12,
        tokens_in_epoch=10**15,
        epoch_wall_s=1e7 / 3,
        step_wall_s=1e4 / 3,
        cycle=10**6,
        step_in_cycle=10**9,
    ),
)


_NAMES = "|".join((*COUNTERS, *_MOMENTS, "run_name", *Ranks.__dataclass_fields__))
_NAME_IN_BRACES = re.compile(r"\{(?:" + _NAMES + r")(?::[^{}]*)?\}")


def utc_now() -> datetime:
    """Return the current date and time, in UTC."""
    return datetime.now(timezone.utc)


def compile_label(
    label: str | LabelFunction,
    *,
    run_name: str | None = None,
    ranks: Ranks | None = None,
    clock: Callable[[], datetime] = utc_now,
) -> LabelFunction:
    """Make the function that labels a checkpoint from its Timestamp; checked by trial calls.

    `label` is a template or a function of the Timestamp. A template has names in braces, each
    with a format spec if need be: those of `COUNTERS`, `run_name`, the fields of `Ranks` (None:
    those of this process), and `date` and `time` from `clock` (`{time:%H%M}`). The result raises
    `UsageError` when a label is invalid (`check_label`) or uses a counter that is not known.

    >>> compile_label("ep{epoch}-{step:06d}")(Timestamp(step=1200, epoch=3))
    'ep3-001200'

    Raises:
        UsageError: an unknown name, an attribute or an index, or a trial gave an invalid label.
    """
    if isinstance(label, str):
        constants = _constants(run_name, ranks)
        fields = _fields("label", label, constants, others=(*COUNTERS, *_MOMENTS))
        render = _wrap_label_function(_template_function(label, fields, constants, clock))
    elif callable(label):
        render = _wrap_label_function(label)
    else:
        raise UsageError(f"label={label!r}: must be a template or a function of the Timestamp")
    for trial in _TRIALS:
        render(trial)
    return render


def fill_root(
    root: str | Callable[[], str], *, run_name: str | None = None, ranks: Ranks | None = None
) -> str:
    """Make the root of a run from a template such as "runs/{run_name}", or from a function.

    A root is the same for the whole run, so it has no counters and no time. Literal braces are
    doubled. `ranks` (None: those of this process) are for runs that have a root on each rank.

    >>> fill_root("runs/{run_name}/checkpoints", run_name="gpt")
    'runs/gpt/checkpoints'

    Raises:
        UsageError: an unknown name, an attribute or an index; a run name that is not a single part
            of a path; an empty root, or one that is not text.
    """
    if callable(root):
        text: object = root()
        if not isinstance(text, str) or not text:
            raise UsageError(f"the function for the root returned {text!r}, not a path")
        return text
    constants = _constants(run_name, ranks)
    fields = _fields("root", root, constants)
    if run_name is not None and "run_name" in fields:
        check_label(run_name)
    text = _format("root", root, constants)
    if not text:
        raise UsageError("root='': must name a place")
    return text


def expect_filled(root: str) -> None:
    """Raise `UsageError` if a root is a template."""
    match = _NAME_IN_BRACES.search(root)
    if match is not None:
        raise UsageError(
            f"root={root!r}: {match[0]} is not filled in a root. "
            f"Pass holdfast.policy.naming.fill_root({root!r}, run_name=…), which fills run_name "
            "and the ranks"
        )


def _constants(run_name: str | None, ranks: Ranks | None) -> dict[str, object]:
    """Map the names that are the same for a whole run to their values; None: not known here."""
    return {"run_name": run_name, **asdict(present_ranks() if ranks is None else ranks)}


def _fields(
    what: str, template: str, constants: Mapping[str, object], others: tuple[str, ...] = ()
) -> frozenset[str]:
    """List the names that a template uses: known constants, or `others`; refuse all else."""
    known = (*others, *constants)
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise UsageError(f"{what}={template!r}: {error}") from None
    for name, spec, conversion in fields:
        if name not in known:
            raise UsageError(
                f"{what}={template!r}: {{{name}}} is unknown; choose from {', '.join(known)}"
            )
        if conversion or any(mark in (spec or "") for mark in "{}"):
            raise UsageError(
                f"{what}={template!r}: {{{name}}}: only a plain format spec may follow"
            )
        # A width of a billion would fill the memory before check_label sees the result.
        if any(int(number) > MAX_LABEL_BYTES for number in re.findall("[0-9]{1,18}", spec or "")):
            raise UsageError(
                f"{what}={template!r}: a label has at most {MAX_LABEL_BYTES} characters"
            )
    used = frozenset(str(name) for name, _, _ in fields)
    unknown = [name for name in sorted(used & constants.keys()) if constants[name] is None]
    if "run_name" in unknown:
        raise UsageError(f"{what}={template!r}: run_name was not given")
    if unknown:
        raise UsageError(
            f"{what}={template!r}: {', '.join(unknown)} is known only where a launcher sets "
            "LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK in the environment, as torchrun does"
        )
    return used


def _template_function(
    template: str,
    used: frozenset[str],
    constants: Mapping[str, object],
    clock: Callable[[], datetime],
) -> LabelFunction:
    counters = {name: of for name, of in COUNTERS.items() if name in used}
    moments = {name: spec for name, spec in _MOMENTS.items() if name in used}

    def render(now: Timestamp) -> str:
        values: dict[str, object] = {name: getattr(now, of) for name, of in counters.items()}
        if unknown := sorted(name for name, value in values.items() if value is None):
            raise UsageError(
                f"label={template!r}: {', '.join(unknown)} was not given, or is not known: counts "
                "within an epoch or a cycle are known once a new one has begun"
            )
        if moments:
            at = clock()
            values |= {name: _Moment(at, spec) for name, spec in moments.items()}
        return _format("label", template, {**constants, **values})

    return render


def _wrap_label_function(function: LabelFunction) -> LabelFunction:
    def render(now: Timestamp) -> str:
        text: object = function(now)
        if not isinstance(text, str):
            raise UsageError(f"the label function returned {text!r}, which is not text")
        check_label(text)
        return text

    return render


def _format(what: str, template: str, values: Mapping[str, object]) -> str:
    try:
        return template.format_map(values)
    except ValueError as error:
        raise UsageError(f"{what}={template!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Moment:
    """A time that is formatted with a format spec of strftime."""

    at: datetime
    default_spec: str

    def __format__(self, spec: str) -> str:
        return self.at.astimezone(timezone.utc).strftime(spec or self.default_spec)
