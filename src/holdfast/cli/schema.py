"""JSON Schema of the commands' answers, and the tables of docs/cli.md, made from the structs.

`python -m holdfast.cli.schema docs/cli.md` writes the tables between the two marks of the page.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.answers.base import Document, of
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
    "uploads": "answers.uploads:Uploads",
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
    "watch": "watch:Watched",
    "serve": "web.serve:ServeAnswer",
    "doctor": "doctor:DoctorAnswer",
    "completion": "completion:CompletionAnswer",
    "schema": "schema:SchemaShown",
    "run": "answers.training:RunEnd",
    "train": "answers.training:RunEnd",
    "keys generate": "answers.keys:KeysGenerate",
    "keys list": "answers.keys:KeysList",
    "keys rotate": "answers.keys:KeysRotate",
}
"""Command → module of `holdfast.cli` and struct of its answer (of `run` and `train`: the last
line). `demo` answers with the record of its own `demo.json`."""
BEGIN, END = "<!-- answers: made by holdfast.cli.schema -->", "<!-- answers end -->"

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
    return Answer(document=of(SchemaShown, {"schema": found}), parts=[text])


def tables() -> str:
    """Return the tables of all answers in Markdown; parts stand behind the answer they are in."""
    seen: set[type] = set()
    commands: dict[type[msgspec.Struct], list[str]] = {}
    for command in ANSWERS:
        commands.setdefault(struct_of(command), []).append(f"`{command}`")
    lines: list[str] = []
    for root, names in commands.items():
        for kind in _all(root).values():
            if kind not in seen:
                seen.add(kind)
                title = f"Answer of {', '.join(names)}" if kind is root else _title(kind)
                lines += [f"**{title}**", "", "| member | type | meaning |", "|---|---|---|"]
                lines += [*_rows(kind), ""]
    return "\n".join(lines)


def _title(kind: type[msgspec.Struct]) -> str:
    return f"{kind.__name__}: {(kind.__doc__ or '').splitlines()[0].rstrip('.')}"


def _rows(kind: type[msgspec.Struct]) -> Iterator[str]:
    texts = _docstrings(kind)
    for field in msgspec.structs.fields(kind):
        text = texts[field.name].replace("|", "\\|")
        yield f"| `{field.encode_name}` | {_word(field.type)} | {text} |"


def _word(kind: Any) -> str:
    """Return a type in words, as `list of Reader, or null`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind.__name__
    if kind in _WORDS:
        return _WORDS[kind]
    origin = getattr(kind, "__origin__", None)
    inside: tuple[Any, ...] = getattr(kind, "__args__", ())
    if origin in (list, tuple):
        return f"list of {_word(inside[0])}"
    if origin is dict:
        return "object"
    if inside and all(isinstance(one, str) for one in inside):
        return ", ".join(f"`{one}`" for one in inside)
    words = [_word(one) for one in inside if one not in (type(None), msgspec.UnsetType)]
    words += ["or null"] if type(None) in inside else []
    words += ["may be missing"] if msgspec.UnsetType in inside else []
    return ", ".join(words)


_WORDS: Mapping[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Any: "any",
    dict: "object",
}


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


def write_tables(page: Path) -> None:
    """Put the tables between the two marks of a page."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    write_tables(Path(sys.argv[1]))
