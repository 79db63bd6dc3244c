"""JSON answers: two spaces a level, as `json.dumps` writes them, also of numbers JSON lacks."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from holdfast.cli.output import SCHEMA, Answer, give, json_safe


@pytest.mark.parametrize("figure", [0.1, 1e-300, math.nan, -math.inf])
def test_an_answer_is_written_as_json_dumps_does(
    capsys: pytest.CaptureFixture[str], figure: float
) -> None:
    members = {
        "figure": figure,
        "text": 'é"\\\n\x01',
        "none": None,
        "empty": [],
        "nothing": {},
        "exponents": {-3: 4, 0: 1},
        "rows": [{"a": [1, 2]}, {}],
    }
    document = msgspec.defstruct("Members", [*members])(**members)
    give(Answer(document=document, parts=[]), as_json=True)
    expected = json_safe({"holdfast": SCHEMA, **members})
    assert capsys.readouterr().out == json.dumps(expected, indent=2) + "\n"
