"""Keeping of parts of plain trees that a load leaves alone: live values replace stored ones."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from holdfast.format.objects import join
from holdfast.state.selection import Selection, names_of_keys
from holdfast.state.trees import LiveValue

_ABSENT: Any = object()


def keep_live(stored: Any, live: Any, component: str, selection: Selection) -> bool:
    """Put live values into a decoded tree where `selection` leaves them alone.

    A tuple or a set is one value. Returns whether anything stored is wanted.
    """
    if not isinstance(stored, dict | list):
        return not selection.leaves(component)
    keeping = _Keeping(component, selection)
    keeping.container(stored, live, "")
    return keeping.num_wanted > 0 or selection.includes(component)


class _Keeping:
    """Puts live values into a stored tree where a selection leaves them alone."""

    def __init__(self, component: str, selection: Selection) -> None:
        self._component = component
        self._choice = selection
        self.num_wanted = 0
        """Number of stored values that will be loaded, so far."""

    def container(self, stored: Any, live: Any, path: str) -> None:
        """Put live values into the dict or list `stored`, in place."""
        if isinstance(stored, dict):
            self._dict(stored, live if isinstance(live, dict) else {}, path)
        else:
            self._list(stored, live if isinstance(live, list) else [], path)

    def _dict(self, stored: dict[Any, Any], live: dict[Any, Any], path: str) -> None:
        for key, name in names_of_keys(dict.fromkeys([*stored, *live])).items():
            # For a missing key a Counter returns 0, and a defaultdict makes an entry.
            known = dict.get(live, key, _ABSENT)
            value = self._chosen(dict.get(stored, key, _ABSENT), known, join(path, name))
            if value is not _ABSENT:
                stored[key] = value
            elif key in stored:
                del stored[key]

    def _list(self, stored: list[Any], live: list[Any], path: str) -> None:
        values = []
        for i in range(max(len(stored), len(live))):
            value = stored[i] if i < len(stored) else _ABSENT
            known = live[i] if i < len(live) else _ABSENT
            values.append(self._chosen(value, known, join(path, i)))
        stored[:] = [value for value in values if value is not _ABSENT]

    def _chosen(self, value: Any, known: Any, path: str) -> Any:
        """Choose the value at `path`: the stored value, the live one, or none."""
        shown = value if value is not _ABSENT else known
        if isinstance(shown, dict | list) and not self._choice.skips(self._component, path):
            return self._chosen_inside(value, known, path)
        if self._choice.leaves(self._component, path):
            return _kept(known)
        self.num_wanted += value is not _ABSENT
        return value

    def _chosen_inside(self, value: Any, known: Any, path: str) -> Any:
        is_included = self._choice.includes(self._component, path)
        inside = value if value is not _ABSENT else _empty_like(known)
        before = self.num_wanted
        self.container(inside, known, path)
        if not is_included:
            return inside if self.num_wanted > before else _kept(known)
        self.num_wanted += value is not _ABSENT
        return inside if inside or value is not _ABSENT else _ABSENT


def _kept(known: Any) -> Any:
    return known if known is _ABSENT else LiveValue(known)


def _empty_like(live: Any) -> Any:
    if type(live) in (OrderedDict, Counter):
        return type(live)()
    return {} if isinstance(live, dict) else []
