"""Type checks for the arguments of public functions, and imports of optional libraries.

Only the outer type is checked: that `tags` is iterable, not that its items are text. All other
checks belong to the function that takes the argument.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, fields
from functools import cache, wraps
from importlib import import_module
from itertools import chain, repeat
from numbers import Real
from reprlib import Repr
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from holdfast.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_MODULES = re.compile(r"\b(?:[A-Za-z_]\w*\.)+")
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_short = Repr()
_short.maxstring = _short.maxother = 200


def check_arguments(*, but: Collection[str] = ()) -> Callable[[F], F]:
    """Decorator: raise `UsageError` when an argument is not of its annotated type.

    Of a class, the arguments of `__init__` are checked. An argument given both by position and by
    name is an error, too. The check runs before the function. Arguments in `but` are not checked:
    the function has a clearer message for them.
    """

    def decorated(target: F) -> F:
        if isinstance(target, type):
            target.__init__ = _checking(target.__init__, but)  # type: ignore[misc]
            return target
        return _checking(target, but)

    return decorated


def _checking(target: F, but: Collection[str]) -> F:
    @cache
    def hints() -> dict[str, Any]:
        # On the first call: an annotation may name the class that is still being defined.
        annotations = inspect.get_annotations(target, eval_str=True)
        return {name: hint for name, hint in annotations.items() if name not in but}

    fitting: set[tuple[str, type]] = set()
    """(argument, type) pairs that passed, so that calls in a loop check them once."""

    def check(name: str, value: object) -> None:
        argument = name, type(value)
        if argument not in fitting:
            _check_argument(name, value, hints())
            if "Literal" not in str(hints().get(name)):
                fitting.add(argument)

    title = target.__qualname__.removesuffix(".__init__")
    kinds = {name: item.kind for name, item in inspect.signature(target).parameters.items()}
    names = [name for name, kind in kinds.items() if kind in _BY_PLACE]
    others = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
    order = f"{title}({', '.join(name for name in names if name != 'self')})"

    @wraps(target)
    def checking(*args: Any, **named: Any) -> Any:
        for name, value in zip(chain(names, *map(repeat, others)), args, strict=False):
            if name in named:
                raise UsageError(
                    f"{name} is given twice, by its place as {shown(value)} and by its name as "
                    f"{shown(named[name])}; the order is {order}"
                )
            check(name, value)
        for name, value in named.items():
            check(name, value)
        return target(*args, **named)

    return checking  # type: ignore[return-value]


def escaped(text: str) -> str:
    """Escape what is no Unicode in a text, such as a path in another encoding.

    >>> escaped("caf\\udce9")
    'caf\\\\udce9'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def shown(value: object) -> str:
    """Format a value for an error message: its `repr`, shortened."""
    return _short.repr(value)


def format_call(record: Any) -> str:
    """Format the constructor call of a dataclass instance, without arguments at their defaults.

    Values that need a name after a default was left out are given by name.
    """
    parts, needs_name = [], False
    for field in fields(record):
        value = getattr(record, field.name)
        needs_name = needs_name or field.kw_only is True
        if field.default is not MISSING and value == field.default:
            needs_name = True
        else:
            parts.append(f"{field.name}={value!r}" if needs_name else repr(value))
    return f"{type(record).__qualname__}({', '.join(parts)})"


def _check_argument(name: str, value: object, hints: dict[str, Any]) -> None:
    hint = hints.get(name, Any)
    if not _fits(value, hint):
        raise UsageError(
            f"{name}={shown(value)}: must be {_describe_hint(hint)}{_unnamed(value, hint)}"
        )


def _fits(value: object, hint: Any) -> bool:
    if hint is Any or type(value) is hint:
        return True
    if hint in (None, NoneType):
        return value is None
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if hint is int else Real)
    return isinstance(value, origin or hint)


def _unnamed(value: object, hint: Any) -> str:
    """Return advice to derive from an abstract class whose methods the value has; else empty."""
    for part in get_args(hint) or (hint,):
        asked = getattr(part, "__abstractmethods__", ()) if inspect.isabstract(part) else ()
        if asked and all(hasattr(value, name) for name in asked):
            return f"; derive its class from it: class {type(value).__name__}({part.__name__})"
    return ""


def _describe_hint(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {get_args(hint)}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe_hint, get_args(hint)))
    if hint in (None, NoneType):
        return "None"
    is_class = isinstance(hint, type) and get_origin(hint) is None
    return _MODULES.sub("", hint.__name__ if is_class else str(hint))


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional dependency, which `extra` of Holdfast installs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{module} cannot be imported ({error}): pip install 'holdfast-torch[{extra}]'"
        ) from error


def expect_methods(name: str, value: object, methods: Sequence[str], what: str) -> None:
    """Raise `UsageError` unless an argument has the methods of what it must be; None has none."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    if missing:
        raise UsageError(f"{name}={shown(value)}: must be {what} (it has no method {missing[0]})")
