"""Components made of attributes of the user's objects, which have no `state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import override

from holdfast.errors import UnsupportedState, UsageError

_MISSING: Any = object()


class Attributes:
    """Component made of attributes of any object, saved and loaded as a dict of their values.

        state = {"model": model, "episode": Attributes(self, "episode", "best")}

    A load sets all of them or none: arrays, tensors, lists, deques and dicts are refilled in
    place, other values are assigned.

    Raises:
        UsageError: an attribute does not exist, has no setter, or is named twice.
    """

    is_of_loop = True
    """A component of this class is not that of a trainer, whatever its name."""
    is_opaque = False
    """Whether values may be copies that are used only once they are assigned."""

    def __init__(self, owner: object, *names: str) -> None:
        wrong = [*_find_wrong_names(owner, names)]
        if wrong or not names:
            raise UsageError(
                f"Attributes of a {type(owner).__name__}: {'; '.join(wrong) or 'name at least one'}"
            )
        self._owner = owner
        self.names = names

    @staticmethod
    def of(getter: Callable[[], Any], setter: Callable[[Any], object]) -> Attributes:
        """Make a component of the value that `getter` returns and a load passes to `setter`.

        It is saved under the name `value`. Before anything is loaded, the setter is tried, and
        called again with the former value.
        """
        return _Accessor(getter, setter)

    def holds(self, owner: object, name: str) -> bool:
        """Whether an attribute of `owner` is one of these."""
        return owner is self._owner and name in self.names

    def read_value(self, name: str) -> Any:
        """Read one value."""
        return getattr(self._owner, name)

    def assign_value(self, name: str, value: Any) -> None:
        """Assign one value."""
        setattr(self._owner, name, value)


class _Accessor(Attributes):
    """A value behind two functions."""

    is_opaque = True

    def __init__(self, getter: Callable[[], Any], setter: Callable[[Any], object]) -> None:
        if not callable(getter) or not callable(setter):
            raise UsageError("Attributes.of(getter, setter): both must be functions")
        self._getter, self._setter = getter, setter
        self._owner, self.names = None, ("value",)

    @override
    def read_value(self, name: str) -> Any:
        return self._getter()

    @override
    def assign_value(self, name: str, value: Any) -> None:
        self._setter(value)


def _find_wrong_names(owner: object, names: tuple[str, ...]) -> Iterator[str]:
    settings = getattr(type(owner), "__dataclass_params__", None)
    if settings is not None and settings.frozen:
        yield "its dataclass is frozen, so a load could not assign to it"
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.isidentifier():
            yield f"{name!r} is not the name of an attribute"
            continue
        found = getattr(type(owner), name, None)
        if name in names[:number]:
            yield f"{name} is named twice"
        elif isinstance(found, property) and found.fset is None:
            yield f"its property {name} has no setter; use Attributes.of(getter, setter)"
        elif getattr(owner, name, _MISSING) is _MISSING:
            yield f"it has no {name} yet; set it before"


def content_of(component: str, value: Any) -> Any:
    """Return what a component of kind "tree" saves: itself, or a dict of its attributes.

    Raises:
        UnsupportedState: an attribute was deleted, or a getter failed.
    """
    if not isinstance(value, Attributes):
        return value
    values, lost = dict[str, Any](), []
    for name in value.names:
        try:
            values[name] = value.read_value(name)
        except Exception as error:  # noqa: BLE001 - code of the user
            lost.append((f"{component}.{name}", f"{type(error).__name__}: {error}"))
    if lost:
        raise UnsupportedState(lost)
    return values
