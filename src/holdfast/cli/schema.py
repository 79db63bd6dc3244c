"""`holdfast schema` and `completion`: JSON Schemas of answers, and completion in a shell."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
from click.shell_completion import get_completion_class
from msgspec import UNSET

from holdfast.cli.app import MODULES, app, load_command
from holdfast.cli.documents import Document
from holdfast.cli.options import DescribedCommand, argument, command
from holdfast.cli.output import SCHEMA, Answer
from holdfast.errors import UsageError

_NO_NUMBER = {"enum": ["nan", "inf", "-inf"]}


_NAME, _VARIABLE = "holdfast", "_HOLDFAST_COMPLETE"


class SchemaShown(Document, frozen=True):
    """Answer of `schema`."""

    schema: Mapping[str, Any]
    """The JSON Schema, draft 2020-12."""


def struct_of(name: str) -> type[msgspec.Struct]:
    """Return the struct with which a command answers, such as `ls` or `gc --damaged`."""
    words, _, option = name.partition(" --")
    answers = find_answers(words)
    found = answers.get(f"--{option}" if option else "")
    if found is None:
        raise UsageError(
            f"{name!r}: no command with a schema; choose from holdfast --help, gc --damaged, or a "
            "subcommand, such as keys list"
        )
    return found


def find_answers(name: str) -> Mapping[str, type[msgspec.Struct]]:
    """Return the structs of a command's answers; none if there is no such command."""
    first, _, second = name.partition(" ")
    found = load_command(first) if first in MODULES else None
    if isinstance(found, click.Group):
        found = found.commands.get(second)
    elif second:
        found = None
    return found.answers if isinstance(found, DescribedCommand) else {}


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


@command(
    "schema",
    argument("command", "COMMAND...", "A command, such as ls or keys list.", nargs=-1),
    answer=SchemaShown,
)
def show_schema(command: Sequence[str]) -> Answer:
    """Print the JSON Schema of a command's --json output."""
    found = schema_of(" ".join(command))
    text = json.dumps(found, indent=2)
    return Answer(document=SchemaShown(schema=found), parts=[text])


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
    done: dict[str, Any] = _with_odd_floats(part)
    done.pop("additionalProperties", None)  # later versions add members
    if kind is not None:
        texts, fields = _docstrings(kind), msgspec.structs.fields(kind)
        for field in fields:
            value = done["properties"][field.encode_name]
            value.pop("default", None)
            value["description"] = texts[field.name]
        # Defaults are printed, too.
        done["required"] = [one.encode_name for one in fields if one.default is not UNSET]
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


# Completion


class CompletionAnswer(Document, frozen=True):
    """Answer of `holdfast completion`."""

    shell: str
    """`bash`, `zsh` or `fish`."""
    script: str
    """What the shell has to run, such as `eval "$(holdfast completion bash)"` in its start-up
    file."""


@command(
    "completion",
    argument("shell", "SHELL", "bash, zsh or fish.", type=click.Choice(["bash", "zsh", "fish"])),
    answer=CompletionAnswer,
)
def write_completion(shell: str) -> Answer:
    """Print the completion script for a shell.

    For bash, add to ~/.bashrc: eval "$(holdfast completion bash)"
    """
    found = get_completion_class(shell)
    assert found is not None, "the option allows the shells that click knows"
    completion = found(app, {}, _NAME, _VARIABLE)
    # Not `source()`, which runs bash to look at its version.
    text = completion.source_template % completion.source_vars()
    return Answer(document=CompletionAnswer(shell=shell, script=text), parts=[text])
