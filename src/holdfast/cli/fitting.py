"""Process of `holdfast train`: imports the script, makes the Trainer with overrides, and fits it.

An override is converted by the annotation of the parameter, or else by the type of its default.
"""

from __future__ import annotations

import ast
import difflib
import enum
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.output import Code, say
from holdfast.errors import UsageError
from holdfast.launched import present_ranks

DEFAULT_FUNCTION = "make_trainer"

_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def fit(arguments: Sequence[str]) -> int:
    """Fit as `arguments` say: script, goal, time limit, overrides; return the exit code.

    What the script raises is raised. A wrong argument is printed, and gives the code for it; so
    does one that the Trainer refuses, such as a goal in tokens that are not counted, with its
    traceback.
    """
    script, until, max_time, *sets = arguments
    try:
        make = load_function(script)
        given = overrides(make, sets)
    except UsageError as error:
        say(str(error))
        return Code.USAGE
    if present_ranks().rank == 0:
        for line in shown(script, make, given, until):
            say(line)
    try:
        return _fit(script, make(**given), until, max_time)
    except UsageError:  # a restart would raise it again
        traceback.print_exc()
        return Code.USAGE


def _fit(script: str, trainer: Any, until: str, max_time: str) -> int:
    if not hasattr(trainer, "fit"):
        say(f"{script}: gave a {type(trainer).__name__}, not a Trainer: it must return one")
        return Code.USAGE
    try:
        outcome = trainer.fit(until, max_time=max_time or None)
    except KeyboardInterrupt:
        return Code.INTERRUPTED
    return int(outcome.exit_code)


def load_function(script: str) -> Callable[..., Any]:
    """Import `path/script.py:function` or `package.module:function`, and return the function.

    Raises:
        UsageError: there is no such file, module or function.
    """
    place, _, name = script.partition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else _by_name(place)
    name = name or DEFAULT_FUNCTION
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(f"{place}: has no function {name!r}{_meant(name, functions)}")
    return function  # type: ignore[no-any-return]


def overrides(make: Callable[..., Any], sets: Sequence[str]) -> dict[str, Any]:
    """Convert `name=value` texts to arguments of `make`.

    Raises:
        UsageError: lists every override that has no parameter or does not fit its type, and each
            parameter without a value.
    """
    parameters = {
        name: item
        for name, item in inspect.signature(make).parameters.items()
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    }
    hints = _hints(make)
    found: dict[str, Any] = {}
    wrong = []
    for text in sets:
        name, sign, value = text.partition("=")
        name = name.strip()
        if not sign:
            wrong.append(f"--set {text}: write NAME=VALUE")
        elif name not in parameters:
            wrong.append(f"--set {text}: {make.__name__} has no {name!r}{_meant(name, parameters)}")
        elif name in found:
            wrong.append(f"--set {text}: {name} is given twice")
        else:
            hint = hints.get(name, _type_of(parameters[name].default))
            try:
                found[name] = convert(value, hint)
            except ValueError:
                wrong.append(f"--set {text}: must be {_described(hint)}")
    missing = [
        name
        for name, item in parameters.items()
        if item.default is item.empty and name not in {text.partition("=")[0] for text in sets}
    ]
    wrong += [f"{name} has no default: give --set {name}=VALUE" for name in missing]
    if wrong:
        raise UsageError("\n".join(wrong))
    return found


def convert(text: str, hint: Any) -> Any:
    """Convert a text to the type of an annotation.

    Raises:
        ValueError: it does not fit.
    """
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return convert(text, typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return _first(text, typing.get_args(hint))
    if origin is typing.Literal:
        for choice in typing.get_args(hint):
            if text == str(choice):
                return choice
        raise ValueError(text)
    if hint in (None, types.NoneType):
        if text.lower() not in ("none", "null"):
            raise ValueError(text)
        return None
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(text)
        return _BOOLEANS[text.lower()]
    if hint in (int, float, str, Path):
        return hint(text)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(text, hint)
    if hint in (inspect.Parameter.empty, Any):
        return _literal(text)
    return _container(text, hint, origin or hint)


def _first(text: str, hints: Sequence[Any]) -> Any:
    # A text fits `str` always, so it is tried last.
    for hint in sorted(hints, key=lambda hint: (hint is str, hint not in (None, types.NoneType))):
        try:
            return convert(text, hint)
        except ValueError:
            continue
    raise ValueError(text)


def _member(text: str, kind: type[enum.Enum]) -> enum.Enum:
    for member in kind:
        if text in (member.name, str(member.value)):
            return member
    raise ValueError(text)


def _container(text: str, hint: Any, kind: Any) -> Any:
    items = [item for item in typing.get_args(hint) if item is not Ellipsis]
    is_list = isinstance(kind, type) and issubclass(kind, list | tuple | set | Sequence)
    if is_list and kind is not str:
        inner = text.strip().removeprefix("[").removeprefix("(")
        parts = [part.strip() for part in inner.rstrip("])").split(",") if part.strip()]
        is_fixed = kind is tuple and bool(items) and Ellipsis not in typing.get_args(hint)
        if is_fixed and len(items) != len(parts):
            raise ValueError(text)
        kinds = items if is_fixed else items[:1] * len(parts)
        values = [
            convert(part.strip("'\""), one)
            for part, one in zip(parts, kinds or [Any] * len(parts), strict=True)
        ]
        return values if kind not in (tuple, set) else kind(values)
    value = _literal(text)
    if isinstance(kind, type) and not isinstance(value, kind):
        raise ValueError(text)
    return value


def _literal(text: str) -> Any:
    """Read a Python literal, such as 3, 0.1, None or [1, 2]; anything else is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def shown(script: str, make: Callable[..., Any], given: Mapping[str, Any], until: str) -> list[str]:
    """Describe what is run, in lines: the function, and each overridden value with its default."""
    parameters = inspect.signature(make).parameters
    lines = [f"train {script} until {until}"]
    for name, value in given.items():
        default = parameters[name].default
        before = "" if default is inspect.Parameter.empty else f" (default {default!r})"
        lines.append(f"  {name} = {value!r}{before}")
    return lines


def _from_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file")
    # As `python script.py` has it: what lies beside the script can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "__train__"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes of the script can be pickled
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> types.ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UsageError(f"{name}: there is no such module, and a file ends with .py") from error


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(make, include_extras=True)
    except NameError:  # imported for type checkers only
        return {}


def _type_of(default: Any) -> Any:
    if default is None or default is inspect.Parameter.empty:
        return Any
    return type(default)


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _meant(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return f"; is {close[0]!r} meant?" if close else f"; there are {', '.join(known) or 'none'}"


if __name__ == "__main__":
    sys.exit(fit(sys.argv[1:]))
