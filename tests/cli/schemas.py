"""Real answers of commands, held against the JSON Schema of the command."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence

from jsonschema import Draft202012Validator

from holdfast.cli.schema import find_answers, schema_of


@functools.cache
def _validator(command: str) -> Draft202012Validator:
    schema = schema_of(command)
    for part in (schema, *schema["$defs"].values()):
        part["additionalProperties"] = False  # a member too many is not one of a later version
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def validated(words: Sequence[str], out: str) -> str | None:
    """Hold an answer against the schema of the command; return the command that it is of.

    Errors, and commands whose answer has no schema, are left out.
    """
    line = out if out.startswith("{\n") else out.splitlines()[-1]
    try:
        document = json.loads(line)
    except ValueError:
        return None  # a test about what is no JSON
    command = _command(words)
    if command is None or "error" in document:
        return None
    _validator(command).validate(document)
    return command


def _command(words: Sequence[str]) -> str | None:
    if "--damaged" in words:
        return "gc --damaged"
    pairs = [f"{one} {two}" for one, two in itertools.pairwise(words)]
    return next((name for name in (*pairs, *words) if find_answers(name)), None)
