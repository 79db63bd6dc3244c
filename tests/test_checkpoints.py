"""Checkpoints: the options of a manager in one record."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from holdfast import Best, CheckpointManager, Checkpoints, Every, Last, SideSaver, Tiered
from holdfast.errors import UsageError
from holdfast.events import log_event
from holdfast.store.memory import MemoryStore
from runs import Recorder, new_run

DOCS = Path(__file__).resolve().parents[1] / "docs"
OF_A_LOOP = ("max_duration", "on_failure", "hooks", "stop", "counters", "ranks", "config")
"""Arguments of a manager that a Trainer gives itself."""
WEIGHTS = SideSaver("weights", every="1h", components=["model"])


def test_its_fields_are_the_arguments_of_a_manager_with_the_same_defaults() -> None:
    """One list of options in two places: a new one belongs to both."""
    arguments = dict(inspect.signature(CheckpointManager).parameters)
    del arguments["state"]
    for name in OF_A_LOOP:
        del arguments[name]
    empty = inspect.Parameter.empty
    expected = {
        field.name: (field.type, empty if field.default is MISSING else field.default)
        for field in fields(Checkpoints)
    }
    found = {name: (item.annotation, item.default) for name, item in arguments.items()}
    assert found.pop("root") == (
        f"{str(expected.pop('root')[0]).removesuffix('None')}Checkpoints",
        empty,
    )
    assert found == expected
    assert all(item.kind is item.KEYWORD_ONLY for item in list(arguments.values())[1:])


def test_every_field_is_in_the_table_of_the_documents_and_in_those_of_the_manager() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| .* \|$", (DOCS / "saving.md").read_text("utf-8"), re.M)
    names = [field.name for field in fields(Checkpoints)]
    assert [name for name in rows if name in names] == names
    said = inspect.getdoc(CheckpointManager) or ""
    assert [name for name in names if not re.search(rf"^    {name}: ", said, re.M)] == []


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (Checkpoints("a"), "Checkpoints('a')"),
        (Checkpoints(None, every="auto"), "Checkpoints(None, every='auto')"),
        (
            Checkpoints("a", keep=Last(3) | Best("loss"), every=Every("500step")),
            "Checkpoints('a', every=Every(interval='500step'), "
            "keep=Last(3) | Best('loss', 1, 'min'))",
        ),
        (
            Checkpoints("a", keep=(Last(3) | Best("loss")).then_drop("optimizer"), preflight=False),
            "Checkpoints('a', keep=(Last(3) | Best('loss', 1, 'min')).then_drop('optimizer'), "
            "preflight=False)",
        ),
        (Checkpoints("a", sinks=[log_event], savers=[]), "Checkpoints('a')"),
    ],
)
def test_it_prints_as_one_would_write_it(record: Checkpoints, text: str) -> None:
    assert repr(record) == text
    import holdfast

    assert (
        eval(text, vars(holdfast) | {n: getattr(holdfast, n) for n in holdfast.__all__}) == record
    )


def test_it_is_frozen_and_has_what_was_given() -> None:
    savers = [WEIGHTS]
    record = Checkpoints("runs/{x}", every="2step", savers=savers)
    savers.clear()
    assert (record.every, record.savers) == ("2step", (WEIGHTS,))
    with pytest.raises(FrozenInstanceError):
        record.every = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"savers": [WEIGHTS, WEIGHTS]}, "savers: two are named 'weights'"),
        ({"keep": "other=last:3"}, "keep=.*no saver is called other"),
        ({"root": Tiered("a", "b", keep_local=Last(2)), "keep": Last(3)}, "keep= and Tiered"),
        ({"label": "{run_name}"}, "run_name"),
        ({"memory_budget": "1MiB"}, "memory_budget='1MiB': at least"),
    ],
)
def test_what_goes_together_is_checked_where_it_is_made(
    options: dict[str, Any], message: str
) -> None:
    """The messages are those of a manager."""
    with pytest.raises(UsageError, match=message):
        Checkpoints(**{"root": "a", **options})
    with pytest.raises(UsageError, match=message):
        CheckpointManager(options.pop("root", "a"), new_run().state, **options)


def test_a_manager_of_a_record_is_that_of_its_options() -> None:
    """Whatever an option does, it does from the record."""
    found = []
    for given in (False, True):
        store, heard = MemoryStore(), Recorder()
        options: dict[str, Any] = {
            "every": "2step",
            "keep": Last(2),
            "label": "s{step}",
            "sinks": [heard],
        }
        run = new_run()
        root, options = (Checkpoints(store, **options), {}) if given else (store, options)
        with CheckpointManager(root, run.state, **options) as manager:
            for step in range(1, 7):
                run.train()
                manager.maybe_save(step)
                manager.wait()
            labels = [c.folder.split(".")[0] for c in manager.list()]
        found.append((labels, sorted({event.kind for event in heard.events})))
    assert found[0] == found[1]
    assert found[0][0] == ["s6", "s4"]


def test_options_beside_a_record_are_refused_by_name() -> None:
    """They would silently do nothing, or it would."""
    record = Checkpoints(MemoryStore(), every="2step")
    with pytest.raises(
        UsageError, match=r"keep, label: cannot be combined with a Checkpoints; .*keep=…, label"
    ):
        CheckpointManager(record, new_run().state, keep=Last(1), label="x{step}")
    options: Any = {"max_duration": "5step", "on_failure": "warn"}
    CheckpointManager(record, new_run().state, **options).close()


def test_a_manager_needs_a_root() -> None:
    with pytest.raises(UsageError, match="root=None"):
        CheckpointManager(Checkpoints(None), new_run().state)
