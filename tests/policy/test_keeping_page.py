"""What docs/keeping.md shows works, and its table is that of the code."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.format.manifest import Timestamp
from holdfast.policy import rule, rules
from holdfast.policy.retention import decide
from holdfast.policy.rule import AnyRule, Candidate, Rule, ThenDrop
from holdfast.policy.rules import Last, parse_rule
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from runs import new_run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "keeping.md").read_text("utf-8")
LOOP, EVALUATION, _, OWN_RULE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = re.findall(r"^\| (`.*?`) \| (`.*?`) \| ", PAGE, re.MULTILINE)


def test_the_example_keeps_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(LOOP, dict(new_run().state))
    entries = Catalog(LocalStore(tmp_path / "runs" / "first")).checkpoints()
    thinned = {entry.step: bool(entry.marks.thinned_by) for entry in entries}
    assert thinned == {4000: False, 3500: False, 3000: False, 2000: True, 1000: True}


def test_the_program_of_an_evaluation_prints_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    with run.manager(tmp_path) as manager:
        manager.save(1, wait=True)
    monkeypatch.setattr("sys.argv", ["eval.py", str(tmp_path)])
    exec(EVALUATION, {"model": new_run().model, "evaluate": lambda model: 0.25})
    assert json.loads(capsys.readouterr().out) == {"eval/mmlu": 0.25}


def test_a_rule_of_ones_own_works_with_the_others() -> None:
    names: dict[str, Any] = {"__name__": "own"}
    exec(OWN_RULE, names)
    rule: Rule = Last(1) | names["Converged"](0.5).then_drop("optimizer")
    entries = [
        Candidate(
            order=(1, n),
            timestamp=Timestamp(step=n),
            metrics={"loss": loss},
            components=("model", "optimizer"),
        )
        for n, loss in enumerate((0.4, 0.6, 0.9), start=1)
    ]
    decisions = decide(entries, rule)
    assert [(d.keep, d.drop) for d in decisions] == [
        (True, ()),
        (False, ()),
        (True, ("optimizer",)),
    ]
    without = [replace(entry, metrics={}) for entry in entries]
    assert all(decision.keep and not decision.drop for decision in decide(without, rule))
    assert decisions[2].reason == "loss below 0.5 without optimizer"


def test_the_table_lists_every_rule_in_both_spellings() -> None:
    known = {**vars(rule), **vars(rules)}
    listed: set[type[Rule]] = set()
    for code, text in ROWS:
        if "then_drop" in code:
            continue
        made = [eval(one, known) for one in re.findall(r"`(.*?)`", code)]
        assert made == [parse_rule(one) for one in re.findall(r"`(.*?)`", text)], code
        listed |= {type(rule) for rule in made}
    every = {
        value for value in known.values() if isinstance(value, type) and issubclass(value, Rule)
    }
    # `Nothing` has no spelling: it is what `keep_local=0` of two tiers means.
    assert every - {Rule, AnyRule, ThenDrop, rules.OnePerPeriod, rules.Nothing} == listed
