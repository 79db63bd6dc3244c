"""Edits of a state by hooks before it is stored or loaded; the live state does not change.

A hook gets a `StateView`. Components that it does not read cost nothing; those that it does
not change stay the same byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from holdfast.errors import UnsupportedState, UsageError
from holdfast.format.objects import join_path
from holdfast.state.capture.capture import Captured
from holdfast.state.capture.views import ComponentView, OptimizerView
from holdfast.state.components import CapturedComponent, StoredComponent


class StateView(Mapping[str, ComponentView]):
    """Mapping from component names to views of them; `del view["optimizer"]` omits one."""

    def __init__(
        self,
        sources: Mapping[str, StoredComponent],
        tensors: Mapping[str, Mapping[str, Tensor]],
        where: str = "",
    ) -> None:
        """Make a view of `tensors`, by component and key; messages begin with `where`."""
        self._sources = dict(sources)
        self._tensors = tensors
        self._where = where
        self._views: dict[str, ComponentView] = {}
        self._left_out: list[str] = []

    def __getitem__(self, name: str) -> ComponentView:
        """Return the view of one component."""
        source = self._sources[name]
        if name not in self._views:
            kind = OptimizerView if source.kind == "optimizer" else ComponentView
            what = f"{self._where}tree of {name}"
            self._views[name] = kind(source, self._tensors, what)
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._sources))

    def __len__(self) -> int:
        return len(self._sources)

    def __setitem__(self, name: str, value: Any) -> None:
        """Raise `UsageError`: components cannot be added or replaced, only edited."""
        raise UsageError(
            f"{name}: assign to the paths of a component, as in view[{name!r}][path] = value; "
            "a new component belongs in the state of the manager"
        )

    def __delitem__(self, name: str) -> None:
        """Omit a component from the save or load."""
        del self._sources[name]
        view = self._views.pop(name, None)
        if view is not None:
            view.close()
        self._left_out.append(name)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the omitted components, in the order of their removal."""
        return tuple(self._left_out)

    def close(self) -> None:
        """Make all views unusable, as later edits would be lost."""
        for name in self._sources:
            self[name].close()


Edit: TypeAlias = Callable[[StateView], None]
"""Type of a hook: a function that changes the view it gets."""


def cast_floats(view: ComponentView, module: nn.Module) -> list[str]:
    """Cast stored floating-point tensors to the dtypes of a module's; returns the paths."""
    live: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    live |= dict(module.named_buffers(remove_duplicate=False))
    cast: list[str] = []
    for path, dtype in view.dtypes().items():
        wanted = live[path].dtype if path in live else dtype
        if wanted != dtype and wanted.is_floating_point and dtype.is_floating_point:
            view[path] = view[path].to(wanted)
            cast.append(path)
    return cast


def edited(captured: Captured, edit: Edit) -> Captured:
    """Return a copy of `captured` after `edit`; the live state and `captured` do not change."""
    parts = captured.components
    if any(part.shards for part in parts.values()):
        raise UsageError("edit_save: cannot edit DTensors, as each rank holds only a part of them")
    view = StateView(
        {name: part.stored for name, part in parts.items()},
        {name: _Savable(part) for name, part in parts.items()},
    )
    with closing(view):
        edit(view)
        if not view:
            raise UsageError("the edit removes every component, so nothing would be saved")
        components = {name: _recaptured(parts[name], view[name]) for name in view}
    left = [
        (join_path(part.name, key), reason)
        for part in components.values()
        for key, reason in part.refused.items()
    ]
    if left:
        raise UnsupportedState(left)
    left_out = (*captured.left_out, *view.left_out)
    return replace(captured, components=components, left_out=left_out)


def _recaptured(part: CapturedComponent, view: ComponentView) -> CapturedComponent:
    if not view.is_changed:
        # The hook may have run code that makes the cached addresses stale.
        return part if part.addresses is None else replace(part, addresses=None)
    changed = view.changed()
    keys = {spec.key for spec in changed.specs if spec.key not in changed.new}
    refused = {key: reason for key, reason in part.refused.items() if key in keys}
    specs = tuple(spec for spec in changed.specs if spec.key not in refused)
    every = {**part.tensors, **changed.new}
    tensors = {spec.key: every[spec.key] for spec in specs}
    same = part.may_overlap & (tensors.keys() - changed.new.keys())
    return replace(
        part,
        tree=changed.tree,
        tensors=tensors,
        specs=specs,
        may_overlap=frozenset(same),
        addresses=None,
        refused=refused,
    )


class _Savable(dict[str, Tensor]):
    """Tensors of a component, by key; reading one that cannot be saved is an error."""

    def __init__(self, part: CapturedComponent) -> None:
        super().__init__(part.tensors)
        self._part = part

    def __missing__(self, key: str) -> Tensor:
        raise UnsupportedState([(join_path(self._part.name, key), self._part.refused[key])])


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedLoad:
    """A stored state after an edit, to be loaded."""

    components: Mapping[str, StoredComponent]
    """Components that were not omitted, for `prepare`."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """Component -> key -> tensor that was assigned, or was read for the edit. The latter need not,
    and the assigned ones must not, be read from the checkpoint."""


def edited_load(
    stored: Mapping[str, StoredComponent],
    edit: Edit,
    *,
    where: str,
    read: Callable[[str], Mapping[str, Tensor]],
) -> EditedLoad:
    """Apply a hook's edit to a stored state, before it is compared with the live one.

    `read(component)` returns all tensors of a component, verified, on the CPU; it is called when
    the first of them is read. `where` names the checkpoint.
    """
    were_read = _ReadTensors(read)
    view = StateView(stored, were_read, f"{where}: ")
    components: dict[str, StoredComponent] = {}
    tensors: dict[str, Mapping[str, Tensor]] = {}
    with closing(view):
        edit(view)
        for name in view:
            components[name], new = _restored(stored[name], view[name])
            tensors[name] = {**were_read.get(name, {}), **new}
    return EditedLoad(components=components, tensors=tensors)


class _ReadTensors(dict[str, Mapping[str, Tensor]]):
    """Tensors by component and key; those of a component are read at the first access."""

    def __init__(self, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        self._read = read

    def __missing__(self, name: str) -> Mapping[str, Tensor]:
        return self.setdefault(name, self._read(name))


def _restored(
    part: StoredComponent, view: ComponentView
) -> tuple[StoredComponent, dict[str, Tensor]]:
    if not view.is_changed:
        return part, {}
    changed = view.changed()
    specs = {spec.key: spec for spec in changed.specs}
    new = {key: _packed(tensor) for key, tensor in changed.new.items()}
    return replace(part, tree=changed.tree, tensors=specs), new


def _packed(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, row-major, in memory of its own, as a reader returns it."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
