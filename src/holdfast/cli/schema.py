"""JSON Schema of the commands' answers, made from their structs."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from holdfast.cli.answers.base import Document, make_answer
from holdfast.cli.output import SCHEMA, Answer
from holdfast.errors import UsageError

ANSWERS: Mapping[str, str] = {
    "ls": "answers.checkpoints:Ls",
    "show": "answers.checkpoints:Show",
    "resume-plan": "answers.checkpoints:ResumePlan",
    "log": "answers.history:Log",
    "verify": "answers.health:Verify",
    "prune": "answers.retention:Prune",
    "forecast": "answers.retention:Forecast",
    "pin": "answers.checkpoints:Marked",
    "unpin": "answers.checkpoints:Marked",
    "tag": "answers.checkpoints:Marked",
    "untag": "answers.checkpoints:Marked",
    "import": "convert:ImportAnswer",
    "export": "convert:ExportAnswer",
    "save": "answers.training:Save",
    "uploads": "answers.uploads:UploadsAnswer",
    "gc": "answers.health:Gc",
    "gc --damaged": "answers.health:GcDamaged",
    "advise": "answers.history:Advise",
    "plot": "answers.history:Plot",
    "tree": "tree:TreeAnswer",
    "cat": "cat:CatAnswer",
    "diff": "diff:DiffAnswer",
    "stats": "stats:StatsAnswer",
    "du": "du:DuAnswer",
    "cp": "cp:CopyAnswer",
    "rm": "rm:RemovedAnswer",
    "thin": "rm:RemovedAnswer",
    "scrub": "scrub:ScrubAnswer",
    "watch": "watch:WatchedRun",
    "serve": "web.serve:ServeAnswer",
    "doctor": "doctor:DoctorAnswer",
    "completion": "completion:CompletionAnswer",
    "schema": "schema:SchemaShown",
    "run": "answers.training:RunEnd",
    "keys generate": "answers.keys:KeysGenerate",
    "keys list": "answers.keys:KeysList",
    "keys rotate": "answers.keys:KeysRotate",
}
"""Command → module of `holdfast.cli` and struct of its answer (of `run`: the last line)."""

_NO_NUMBER = {"enum": ["nan", "inf", "-inf"]}


class SchemaShown(Document, frozen=True):
    """Answer of `schema`."""

    schema: dict[str, Any]
    """The JSON Schema, draft 2020-12."""


def struct_of(command: str) -> type[msgspec.Struct]:
    """Return the struct with which a command answers."""
    if command not in ANSWERS:
        raise UsageError(f"{command!r}: no command with a schema; those are {', '.join(ANSWERS)}")
    module, _, name = ANSWERS[command].partition(":")
    found: type[msgspec.Struct] = getattr(import_module(f"holdfast.cli.{module}"), name)
    return found


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a command's answer, its docstrings included."""
    root = struct_of(command)
    _, parts = msgspec.json.schema_components([root], ref_template="#/$defs/{name}")
    kinds = _all(root)
    defs = {name: _completed(part, kinds) for name, part in parts.items()}
    whole = defs.pop(root.__name__)
    whole["properties"] = {"holdfast": {"const": SCHEMA}, **whole["properties"]}
    whole["required"] = ["holdfast", *whole["required"]]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **whole,
        "title": f"holdfast {command}",
        "$defs": defs,
    }


def show_schema(command: str) -> Answer:
    """Show the JSON Schema of a command's answer."""
    found = schema_of(command)
    text = json.dumps(found, indent=2)
    return Answer(document=make_answer(SchemaShown, {"schema": found}), parts=[text])


def _all(root: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return a struct and those in its fields, by name, each before its own parts."""
    found: dict[str, type[msgspec.Struct]] = {}

    def visit(kind: Any) -> None:
        is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        if is_struct and kind.__name__ not in found:
            found[kind.__name__] = kind
            for field in msgspec.structs.fields(kind):
                visit(field.type)
        for inside in getattr(kind, "__args__", ()):
            visit(inside)

    visit(root)
    return found


def _completed(part: dict[str, Any], kinds: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    """Add the docstrings of the fields, and allow what stands for floats without a number."""
    kind = kinds.get(part.get("title", ""))
    texts = _docstrings(kind) if kind else {}
    names = (
        {field.encode_name: field.name for field in msgspec.structs.fields(kind)} if kind else {}
    )
    done: dict[str, Any] = _with_odd_floats(part)
    done.pop("additionalProperties", None)  # later versions add members
    for name, value in done.get("properties", {}).items():
        value["description"] = texts[names[name]]
    return done


def _with_odd_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_odd_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "number":
        return {"anyOf": [value, _NO_NUMBER]}
    return {name: _with_odd_floats(one) for name, one in value.items()}


def _docstrings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text under each field of a struct, those of its bases included."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not issubclass(one, msgspec.Struct) or one.__module__.startswith("msgspec"):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found
