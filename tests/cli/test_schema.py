"""Claims about the JSON Schema of answers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from jsonschema import ValidationError
from tests.cli.page import commands
from tests.cli.roots import Result
from tests.cli.schemas import validated
from tests.cli.test_app import is_group

from holdfast.cli import schema

Command = Callable[..., Result]


ANSWERS = [name.removeprefix("holdfast ") for name, one in commands() if not is_group(one)]


@pytest.mark.parametrize("command", [*ANSWERS, "gc --damaged"])
def test_every_member_says_what_it_is(command: str) -> None:
    found = schema.schema_of(command)
    for part in (found, *found["$defs"].values()):
        assert part["properties"].keys() >= set(part["required"])
        members = {n: m for n, m in part["properties"].items() if n != "holdfast"}
        assert all(member["description"].endswith(".") for member in members.values()), part


def test_an_answer_that_differs_from_its_schema_is_found() -> None:
    whole = {"root": "r", "folder": "f", "step": 3, "tags": [], "waited_s": float("inf")}
    answer = {"holdfast": 1, **whole, "waited_s": "inf"}
    assert validated(["save", "r", "--json"], json.dumps(answer)) == "save"
    for wrong in ({**answer, "more": 1}, {**answer, "step": "3"}, {**answer, "holdfast": 2}):
        with pytest.raises(ValidationError):
            validated(["save", "r", "--json"], json.dumps(wrong))


def test_a_schema_is_shown_and_other_words_are_refused(holdfast: Command) -> None:
    shown = json.loads(holdfast("schema", "keys", "list").out)
    assert shown["title"] == "holdfast keys list"
    assert holdfast("schema", "ls", "--json").document["schema"] == schema.schema_of("ls")
    assert holdfast("schema", "no-such").code == 2


def test_structs_of_commands_are_frozen() -> None:
    for command in ANSWERS:
        kind = schema.struct_of(command)
        assert kind.__struct_config__.frozen, kind
