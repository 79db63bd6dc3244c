"""How a checkpoint is called: labels for people, made from a template or by a function.

A label is never parsed, so it may say anything that a folder name allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import TypeAlias

from holdfast.errors import UsageError
from holdfast.format.layout import MAX_LABEL_BYTES, check_label
from holdfast.format.manifest import Timestamp

LabelFunction: TypeAlias = Callable[[Timestamp], str]

DEFAULT_LABEL = "step-{step:08d}"
_COUNTERS = ("step", "epoch", "samples", "tokens")
_TRIALS = (
    Timestamp(step=0, epoch=0, samples=0, tokens=0),
    Timestamp(step=10**9, epoch=10**6, samples=10**12, tokens=10**15),
)


def compile_label(label: str | LabelFunction, *, run_name: str | None = None) -> LabelFunction:
    """The function that names a checkpoint from its Timestamp; checked by trial renderings.

    `label` is a template with `{step}`, `{epoch}`, `{samples}`, `{tokens}` and `{run_name}`,
    each with a format spec if need be, or a function of the Timestamp. The result raises
    `UsageError` when a label is not one (`check_label`) or uses a counter that is not known.

    >>> compile_label("ep{epoch}-{step:06d}")(Timestamp(step=1200, epoch=3))
    'ep3-001200'

    Raises:
        UsageError: an unknown name, an attribute or an index, or a trial gave an unusable label.
    """
    if isinstance(label, str):
        _check_template(label, run_name)
        render = _template_function(label, run_name)
    elif callable(label):
        render = _checked_function(label)
    else:
        raise UsageError(f"label={label!r}: must be a template or a function of the Timestamp")
    for trial in _TRIALS:
        render(trial)
    return render


def _check_template(template: str, run_name: str | None) -> None:
    known = (*_COUNTERS, "run_name")
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise UsageError(f"label={template!r}: {error}") from None
    for name, spec, conversion in fields:
        if name not in known:
            raise UsageError(f"label={template!r}: {{{name}}} is not one of {', '.join(known)}")
        if conversion or any(mark in (spec or "") for mark in "{}"):
            raise UsageError(f"label={template!r}: {{{name}}}: only a plain format spec may follow")
        # A width of a billion would fill the memory before check_label sees the result.
        if any(int(number) > MAX_LABEL_BYTES for number in re.findall("[0-9]{1,18}", spec or "")):
            raise UsageError(
                f"label={template!r}: a label has at most {MAX_LABEL_BYTES} characters"
            )
        if name == "run_name" and run_name is None:
            raise UsageError(f"label={template!r}: run_name was not given")


def _template_function(template: str, run_name: str | None) -> LabelFunction:
    used = {name for _, name, _, _ in Formatter().parse(template) if name is not None}

    def render(now: Timestamp) -> str:
        values: Mapping[str, int | str | None] = {
            **{name: getattr(now, name) for name in _COUNTERS},
            "run_name": run_name,
        }
        unknown = sorted(name for name in used if values[name] is None)
        if unknown:
            raise UsageError(f"label={template!r}: {', '.join(unknown)} was not given")
        try:
            text = template.format_map(values)
        except ValueError as error:
            raise UsageError(f"label={template!r}: {error}") from None
        check_label(text)
        return text

    return render


def _checked_function(function: LabelFunction) -> LabelFunction:
    def render(now: Timestamp) -> str:
        text: object = function(now)
        if not isinstance(text, str):
            raise UsageError(f"the label function returned {text!r}, which is not text")
        check_label(text)
        return text

    return render
