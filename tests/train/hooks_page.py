"""Makes docs/hooks.md from the code: `python tests/train/hooks_page.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

from holdfast.train.callbacks.hooks import MOMENTS, Callback

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "hooks.md"

HEAD = """\
# Hooks of the Trainer

<!-- Made by tests/train/hooks_page.py; edit src/holdfast/train/callbacks/hooks.py instead. -->

Subclass `holdfast.train.Callback`, override the hooks that you need, and pass an instance in
`callbacks`. The argument `training` is the `Trainer`.

```python
from holdfast.train import Callback


class StopWhenGood(Callback):
    def validation_end(self, training, name, metrics):
        if metrics["val/loss"] < 0.01:
            training.request_stop("good enough")
```

The tables list all hooks in the order of the calls.

* Callbacks with a higher `priority` run first, equal ones in the order of `callbacks`. A `Logger`
  runs after all others, except in `fit_start`.
* An unknown method that looks like a hook (`on_…`, or misspelled), or a hook with other arguments,
  is an error.
* If a hook raises an error, training ends with `HookFailed`, which names class and hook. An
  interrupt is raised unchanged.
* A callback with `state_dict` and `load_state_dict` is saved and resumed as the component
  `callback-<name>`. `name` defaults to the name of the class. Several callbacks of one class with
  state need names.
* `watches` lists the metrics that a callback needs. The first validation raises an error if one is
  not logged. Without validations, a name that begins with `val/` is an error, and other missing
  names cause a warning at the end of the first epoch.
* Call `training.manager.save(training.counters.step)` only in `fit_start`, `step_end`,
  `epoch_end`, `log` and `fit_end`. While `vetoes_ephemeral` is True, the Trainer makes no
  ephemeral checkpoints.
* A step is saved after its validation and its log. If you save in `step_end`, a resume from there
  runs that validation and logs the step; other hooks are not called again. If `log` needs numbers
  of the step, such as its learning rate, assign a new dict to `step_numbers` at each step. It is
  saved, and restored before that log.
"""


def page() -> str:
    """The whole page."""
    return "".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for title, hooks in MOMENTS.items():
        yield f"\n## {title}\n\n| hook | called |\n|---|---|\n"
        yield from map(_row, hooks)


def _row(hook: str) -> str:
    method = getattr(Callback, hook)
    parameters = ", ".join([*inspect.signature(method).parameters][1:])
    words = " ".join((inspect.getdoc(method) or "").split()).removeprefix("Called ")
    return f"| `{hook}({parameters})` | {words} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
