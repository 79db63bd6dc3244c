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

A callback is a subclass of `holdfast.train.Callback` with the methods that it needs. This table
has all of them in the order in which they are called: from top to bottom, where a step repeats
its rows for each step, and a batch for each batch. The first argument, `training`, is the
`Trainer`.

```python
from holdfast.train import Callback


class StopWhenGood(Callback):
    def validation_end(self, training, name, metrics):
        if metrics["val/loss"] < 0.01:
            training.request_stop("good enough")
```

* Callbacks run by `priority`, higher first, then as they were given. A `Logger` runs after all
  others, but before them in `fit_start`, so that it is there for what they log. What the Trainer
  itself does between two hooks has a fixed place.
* A method that is no hook but looks like one (`on_…`, or misspelt), or takes other arguments, is
  refused when the Trainer is made.
* What a hook raises ends the training as `HookFailed`, which names class and hook; the error is
  its cause. An interrupt stays what it is.
* A callback with `state_dict` and `load_state_dict` is saved and resumed, as the component
  `callback-<name>`; the name is its `name`, or that of its class. Two of one class with a state
  need names, as each would get the other's state when they change places.
* `training.manager.save(training.counters.step)` works in `fit_start`, `step_end`, `epoch_end`,
  `log` and `fit_end`; elsewhere the parts of the state do not belong to one step, and it is
  refused. While `vetoes_ephemeral` is True, the Trainer makes no ephemeral checkpoints.
* `watches` lists the metrics that a callback needs. One that neither steps nor validations give is
  an error at the first validation.
* The save of a step comes after its validation and its log, so that callbacks, metrics and log
  of that step are complete when it is made. A run that goes on from one that was made in `step_end`
  makes up for the validation and logs the step; the other hooks are not called again for it. What
  a callback's `log` needs of the step, such as its learning rate, belongs into `step_numbers`, a
  new dict of numbers at each step: such a checkpoint holds them, and they are set before that log.
"""


def page() -> str:
    """The whole page."""
    return "".join([HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for title, hooks in MOMENTS.items():
        yield f"\n## {title}\n\n| hook | when |\n|---|---|\n"
        yield from map(_row, hooks)


def _row(hook: str) -> str:
    method = getattr(Callback, hook)
    parameters = ", ".join([*inspect.signature(method).parameters][1:])
    words = " ".join((inspect.getdoc(method) or "").split())
    return f"| `{hook}({parameters})` | {words} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
