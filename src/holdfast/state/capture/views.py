"""Views of stored components as mappings from paths to values, without access to live objects.

The tree is decoded at the first access; tensors stay nodes of it. Reading a value
returns a copy; assigning a value copies it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import UnsupportedState, UsageError
from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.format.objects import decode_tree, join_path
from holdfast.format.tensors import TensorSpec
from holdfast.state.collecting import Leaves
from holdfast.state.components import StoredComponent
from holdfast.state.leaves import TORCH_DTYPES
from holdfast.state.optimizers import check_tree
from holdfast.state.selection import names_of_keys
from holdfast.state.trees import Lifting, Skeleton, decode_skeleton, encoded, keys_in, uses_in

_WHOLE = "value"
_SLOTS, _GROUPS, _EXTRA = "slots", "param_groups", "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """An edited component: its tree, specs and assigned tensors."""

    tree: bytes
    """The typed tree."""
    specs: tuple[TensorSpec, ...]
    """Specs of the tensors that the tree names, in its order."""
    new: Mapping[str, Tensor]
    """The tensors that were assigned, by key; the others are the source's."""


class ComponentView(MutableMapping[str, Any]):
    """Mapping from paths to values of one component's leaves.

    Iteration yields leaves: tensors, numbers, texts, tuples, sets, … A dict or a list can be read,
    replaced and left out as a whole under its own path. Reading returns a copy. Assigning replaces
    the value at the path, or adds a key to the dict in which the path ends.
    """

    def __init__(
        self, source: StoredComponent, tensors: Mapping[str, Mapping[str, Tensor]], what: str
    ) -> None:
        """Make a view of the tree named `what`; its `tensors` are read when first accessed."""
        self._source = source
        self._tensors = tensors
        self._what = what
        self._specs = dict(source.tensors)
        self._new: dict[str, Tensor] = {}
        self._skeleton: Skeleton | None = None
        self._holder: dict[str, Any] = {}
        self._places: dict[str, tuple[Any, Any]] | None = None
        self._has_shared = False
        self._uses: Counter[str] = Counter()
        self._is_changed = False
        self._is_open = True

    # The mapping

    def __getitem__(self, path: str) -> Any:
        """Return a copy of the value at `path`; tensors are detached, on their saved device."""
        container, key = self._place(path)
        return self._copy(container[key])

    def __iter__(self) -> Iterator[str]:
        places = self._opened()
        return iter([path for path, (box, key) in places.items() if _is_leaf(box[key])])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, path: object) -> bool:
        return path in self._opened()

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes of all tensors by path, without reading the tensors."""
        nodes = {path: box[key] for path, (box, key) in self._opened().items()}
        return {
            path: TORCH_DTYPES[self._specs[node.key].dtype]
            for path, node in nodes.items()
            if isinstance(node, TensorRef)
        }

    def __setitem__(self, path: str, value: Any) -> None:
        """Replace the value at `path`, or add one; tied weights of a module change together."""
        places = self._opened()
        place = places.get(path) or self._place_for_new(path)
        container, key = place
        old = _peek(container, key)
        is_tied = isinstance(old, TensorRef) and self._uses[old.key] > 1
        container[key] = new = self._convert_to_node(path, value, old)
        self._is_changed = True
        if is_tied and self._source.kind == "module":
            self._replace_ties(old, new)
        if path not in places and container is self._holder[_WHOLE] and _is_leaf(new):
            places[path] = place
        elif path not in places or not (_is_leaf(old) and _is_leaf(new)):
            self._places = None
            self._has_shared = self._has_shared or _has_shared(new)

    def _replace_ties(self, old: TensorRef, new: Any) -> None:
        """Replace all other uses of the tensor `old`, which are tied to it, by `new`."""
        for box, key in self._opened().values():
            tied = box[key]
            if isinstance(tied, TensorRef) and tied.key == old.key:
                box[key] = new
                self._release(old)
                self._uses.update(uses_in({_WHOLE: new}))

    def __delitem__(self, path: str) -> None:
        """Remove the value at `path`."""
        container, key = self._place(path)
        if container is self._holder:
            raise UsageError(f"{self._at(path)}: leave out the component itself")
        if isinstance(container, list):
            raise UsageError(f"{self._at(path)}: one item of a list; assign the list without it")
        value = container.pop(key)
        self._release(value)
        self._is_changed = True
        if _is_leaf(value) and not self._has_shared and f"{path}#2" not in self._opened():
            del self._opened()[path]
        else:
            self._places = None

    def __repr__(self) -> str:
        return f"<component {self._source.name}: {self._source.kind}>"

    # The result

    @property
    def is_changed(self) -> bool:
        """Whether anything was assigned or removed."""
        return self._is_changed

    def close(self) -> None:
        """Make the view unusable, as later assignments would be lost."""
        self._is_open = False

    def changed(self) -> Changed:
        """Encode the component with all changes."""
        source, (tree, skeleton) = self._source, self._decoded()
        leaves = Leaves(component=source.name)
        document = encoded(
            tree[_WHOLE],
            leaves,
            versions=skeleton.versions,
            unsaved=skeleton.unsaved,
            frozen=skeleton.frozen,
        )
        if document is None:
            raise UnsupportedState(leaves.offenders)
        order: dict[str, None] = {}

        def note(node: Any) -> Any:
            if isinstance(node, TensorRef | ArrayRef):
                order[node.key] = None
            return node

        decode_tree(document.data, lift=note, what=self._what)
        return Changed(
            tree=document.data,
            specs=tuple(self._specs[key] for key in order),
            new={key: self._new[key] for key in order if key in self._new},
        )

    # Decoding

    def _decoded(self) -> tuple[dict[str, Any], Skeleton]:
        if not self._is_open:
            raise UsageError(f"{self._source.name}: a view can be used only inside its hook")
        if self._skeleton is None:
            source = self._source
            self._skeleton = decode_skeleton(source.tree, source.tensors, what=self._what)
            self._holder = {_WHOLE: self._skeleton.value}
            self._uses.update(uses_in(self._holder))
            self._has_shared = _has_shared(self._holder)
        return self._holder, self._skeleton

    def _opened(self) -> dict[str, tuple[Any, Any]]:
        """Map paths to (container, key) of every leaf and container, in the order of the tree."""
        holder, _ = self._decoded()
        if self._places is None:
            self._places = {}
            self._add_paths(holder)
        return self._places

    def _add_paths(self, holder: dict[str, Any]) -> None:
        """Collect the paths of all leaves and containers."""
        whole = holder[_WHOLE]
        if isinstance(whole, dict | list):
            self._walk(whole, "")
        else:
            self._add(_WHOLE, holder, _WHOLE)

    def _walk(self, container: Any, path: str) -> None:
        names: dict[Any, str] = (
            names_of_keys(container)
            if isinstance(container, dict)
            else {i: str(i) for i in range(len(container))}
        )
        for key, name in names.items():
            unique = self._add(join_path(path, name), container, key)
            if isinstance(container[key], dict | list):
                self._walk(container[key], unique)

    def _add(self, path: str, container: Any, key: Any) -> str:
        assert self._places is not None
        unique, number = path, 1
        while unique in self._places:
            # Keys may have dots: {"a.b": 1, "a": {"b": 2}}.
            number += 1
            unique = f"{path}#{number}"
        self._places[unique] = (container, key)
        return unique

    def _place(self, path: str) -> tuple[Any, Any]:
        place = self._opened().get(path)
        if place is None:
            raise KeyError(self._at(path))
        return place

    def _at(self, path: str) -> str:
        return join_path(self._source.name, path)

    # Copying out and in

    def _copy(self, value: Any) -> Any:
        keys = keys_in(value)
        tensors = {key: self._tensor(key).detach().clone() for key in keys}
        return _CopyForReading(tensors).lift_tree(value)

    def _tensor(self, key: str) -> Tensor:
        return self._new[key] if key in self._new else self._tensors[self._source.name][key]

    def _convert_to_node(self, path: str, value: Any, old: Any) -> Any:
        """Convert `value` to a node of the tree, with copies of its tensors."""
        with self._key_freed(old), torch.no_grad():
            leaves = Leaves(
                component=self._source.name,
                key_of=lambda inner: path + inner.removeprefix(_WHOLE),
                taken=self._specs.keys(),
            )
            document = encoded({_WHOLE: value}, leaves)
            if document is None:
                raise UnsupportedState(leaves.offenders)
            new = {key: tensor.clone() for key, tensor in leaves.tensors.items()}
            specs = {spec.key: spec for spec in leaves.specs}
            node = decode_skeleton(document.data, specs, what=self._at(path)).value[_WHOLE]
        self._release(old)
        self._new.update(new)
        self._specs.update(specs)
        self._uses.update(uses_in({_WHOLE: node}))
        return self._with_old_flags(node, old)

    @contextmanager
    def _key_freed(self, old: Any) -> Iterator[None]:
        """Free the key of the replaced leaf `old` for reuse during the block."""
        is_alone = isinstance(old, TensorRef | ArrayRef) and self._uses[old.key] == 1
        kept = {old.key: self._specs.pop(old.key)} if is_alone else {}
        try:
            yield
        finally:
            self._specs.update(kept)

    def _release(self, old: Any) -> None:
        """Count a removed use of a leaf, and drop its tensor if nothing else refers to it."""
        if not isinstance(old, TensorRef | ArrayRef):
            return
        self._uses[old.key] -= 1
        if not self._uses[old.key]:
            self._specs.pop(old.key, None)
            self._new.pop(old.key, None)

    def _with_old_flags(self, node: Any, old: Any) -> Any:
        """Return `node` with the device and the flags of the tensor that it replaces."""
        if not isinstance(node, TensorRef):
            return node
        if self._source.kind == "module":
            device = old.device if isinstance(old, TensorRef) else node.device
            return TensorRef(node.key, device, order=node.order)
        if not isinstance(old, TensorRef):
            return node
        grad = old.grad and self._can_have_grad(node.key)
        return TensorRef(node.key, old.device, grad, old.parameter, node.order)

    def _can_have_grad(self, key: str) -> bool:
        tensor = self._new[key]
        return tensor.is_floating_point() or tensor.is_complex()

    # Adding

    def _place_for_new(self, path: str) -> tuple[Any, Any]:
        container, name = self._parent(path)
        if not isinstance(container, dict):
            raise UsageError(
                f"{self._at(path)}: nothing can be added to a list or leaf; assign the whole"
            )
        if container and not any(type(key) is str for key in container):
            raise UsageError(
                f"{self._at(path)}: the keys of this dict are not text; assign the whole dict"
            )
        has_dots = self._source.kind == "module" or any("." in str(key) for key in container)
        if "." in name and not has_dots:
            raise UsageError(f"{self._at(path)}: there is no {path.rpartition('.')[0]!r}")
        return container, name

    def _parent(self, path: str) -> tuple[Any, str]:
        """Find the innermost existing container on `path`, and the rest of the path."""
        whole = self._decoded()[0][_WHOLE]
        if self._source.kind == "module":
            return whole, path
        places, parts = self._opened(), path.split(".")
        for i in range(len(parts) - 1, 0, -1):
            place = places.get(".".join(parts[:i]))
            if place is not None:
                return place[0][place[1]], ".".join(parts[i:])
        return whole, path


class OptimizerView(ComponentView):
    """View of an optimizer: `<parameter>.<slot>`, `param_groups.<n>.<option>`, `extra.<name>`.

    Removing a parameter removes its name, too. If a slot with its parameter's shape gets
    another shape, the parameter is taken to have that shape; its other slots must then follow.
    """

    def __init__(
        self, source: StoredComponent, tensors: Mapping[str, Mapping[str, Tensor]], what: str
    ) -> None:
        super().__init__(source, tensors, what)
        self._shapes_before: dict[str, tuple[int, ...]] = {}
        self._is_checked = False

    def __setitem__(self, path: str, value: Any) -> None:
        before = self._shape_at(path)
        super().__setitem__(path, value)
        parameter = self._parameter_of(path)
        after = self._shape_at(path)
        if parameter is None or not before or after is None or before == after:
            return
        known = self._shapes_before.get(parameter, tuple(self._member("shapes")[parameter]))
        if before == known:
            self._shapes_before[parameter] = known
            self._member("shapes")[parameter] = list(after)

    def __delitem__(self, path: str) -> None:
        if path not in self._member("shapes"):
            super().__delitem__(path)
            return
        for member in (_SLOTS, "shapes", "devices"):
            self._member(member).pop(path, None)
        for group in self._member("groups"):
            if path in group:
                group.remove(path)
        self._is_changed = True
        self._places = None

    def changed(self) -> Changed:
        """Encode the component with all changes, checking the shapes of slots."""
        for parameter, before in self._shapes_before.items():
            self._check_shapes(parameter, before)
        return super().changed()

    def _check_shapes(self, parameter: str, before: tuple[int, ...]) -> None:
        slots = self._member(_SLOTS).get(parameter)
        for slot, ref in slots.items() if isinstance(slots, dict) else ():
            if isinstance(ref, TensorRef) and self._specs[ref.key].shape == before:
                now = self._member("shapes")[parameter]
                raise UsageError(
                    f"{self._at(parameter)}.{slot}: still {list(before)}, and another slot of "
                    f"this parameter became {now}; all must follow, or leave the parameter out"
                )

    def _add_paths(self, holder: dict[str, Any]) -> None:
        self._walk(self._member(_SLOTS), "")
        for member in (_GROUPS, _EXTRA):
            if self._member(member):
                self._walk(self._member(member), member)

    def _parent(self, path: str) -> tuple[Any, str]:
        parameter = self._parameter_of(path)
        if parameter is not None:
            slots = self._member(_SLOTS).setdefault(parameter, {})
            return slots, path.removeprefix(parameter + ".")
        first, _, rest = path.partition(".")
        if first == _EXTRA and rest:
            return self._member(_EXTRA), rest
        container, name = super()._parent(path)
        if container is self._decoded()[0][_WHOLE]:
            raise UsageError(f"{self._at(path)}: no parameter and no option has this path")
        return container, name

    def _parameter_of(self, path: str) -> str | None:
        """Return the parameter whose slot is at `path`."""
        parts = path.split(".")
        heads = (".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1))
        return next((head for head in heads if head in self._member("shapes")), None)

    def _shape_at(self, path: str) -> tuple[int, ...] | None:
        container, key = self._opened().get(path, (None, None))
        value = None if container is None else container[key]
        return self._specs[value.key].shape if isinstance(value, TensorRef) else None

    def _member(self, name: str) -> Any:
        tree = self._decoded()[0][_WHOLE]
        if not self._is_checked:
            check_tree(tree, self._what)
            self._is_checked = True
        return tree[name]


class _CopyForReading(Lifting):
    """Copies values for reading; tensors do not require grad."""

    def lift(self, node: Any) -> Any:
        if isinstance(node, TensorRef):
            node = TensorRef(node.key, node.device, order=node.order)
        return super().lift(node)


def _peek(container: Any, key: Any) -> Any:
    return dict.get(container, key) if isinstance(container, dict) else container[key]


def _is_leaf(value: Any) -> bool:
    return not (isinstance(value, dict | list) and value)


def _has_shared(value: Any) -> bool:
    """Whether a dict or list of a decoded tree has several paths."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            if id(item) in seen:
                return True
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
    return False
