"""Reads the folder in which a trainer has saved a step: several files, one source.

Folders of Accelerate (`save_state`) and of transformers' Trainer (`checkpoint-<step>`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import FormatError
from holdfast.format import strictjson
from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop.files import read_small_file
from holdfast.interop.layouts import STATE_FILE, FolderLayout, folder_layout, make_layout
from holdfast.interop.pickles.parts import convert
from holdfast.interop.source import LeftOut, Source, SourceComponent
from holdfast.interop.sources import safetensors
from holdfast.interop.sources.huggingface import ADAPTER, FILES, HuggingFaceFolder
from holdfast.interop.sources.torchfile import TorchFile

MAX_FILES = 10_000
_MAX_STATE_NBYTES = 32 << 20
_MAX_STATE_VALUES = 1_000_000


def recognises(path: Path) -> bool:
    """Whether a folder holds the state of a training, by the names in it."""
    return path.is_dir() and folder_layout(_list_files(path)) is not None


def _list_files(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return [entry.name for entry, _ in zip(entries, range(MAX_FILES), strict=False)]


class TrainerFolder(Source):
    """Folder of a trainer's step as components; each file is opened as a source of its own."""

    def __init__(self, path: Path, open_file: Callable[[str], Source]) -> None:
        """Open every file that holds a component; `open_file` opens one file of weights."""
        self.url = str(path)
        layout = folder_layout(_list_files(path))
        if layout is None:
            raise FormatError(f"{path}: not the folder of a known trainer")
        self.format = layout.format
        self.parts: dict[str, SourceComponent] = {}
        self.left_out: list[LeftOut] = []
        self._owners: dict[str, dict[str, tuple[Source, str]]] = {}
        self._stack = ExitStack()
        with self.closing_on_error():
            self._add_all(path, layout, open_file)

    def _add_all(
        self, path: Path, layout: FolderLayout, open_file: Callable[[str], Source]
    ) -> None:
        weights = layout.components.pop(safetensors.MODEL, [])
        known = {*layout.files, *layout.others, *chain(*layout.components.values())}
        folder = self._stack.enter_context(HuggingFaceFolder(path, open_file, without=known))
        if weights and safetensors.MODEL not in folder.parts:
            raise FormatError(
                f"{path}: {weights[0]} is a shard, and the index that names all shards is missing"
            )
        self._add_beside(folder, [safetensors.MODEL, ADAPTER, safetensors.METADATA])
        for component, names in layout.components.items():
            self._add_component(component, path, _without_twins(names, layout.others))
        if (path / STATE_FILE).exists():
            self._add_state(path / STATE_FILE)
        self._add_beside(folder, [FILES])
        self.left_out += folder.left_out
        self.left_out += [LeftOut(name, why) for name, why in layout.others.items()]
        if not self.parts:
            raise FormatError(f"{path}: none of its files can be carried over")

    def _add_beside(self, folder: Source, components: Sequence[str]) -> None:
        for name in components:
            if name in folder.parts:
                self.parts[name] = folder.parts[name]
                self._owners[name] = dict.fromkeys(folder.parts[name].specs, (folder, name))

    def _add_component(self, component: str, folder: Path, names: Sequence[str]) -> None:
        opened = {name: self._open_component(component, folder / name) for name in names}
        for name, source in opened.items():
            self.left_out += [
                LeftOut(f"{name}: {one.path}", one.why, component if one.tensors_of else "")
                for one in source.left_out
            ]
        found = {name: source for name, source in opened.items() if component in source.parts}
        if found:
            self.parts[component] = self._join_shards(component, found)

    def _open_component(self, component: str, path: Path) -> Source:
        if safetensors.recognises(path):
            weights = safetensors.SafetensorsFile(path)
            self._stack.callback(weights.close)
            if component != safetensors.MODEL:
                weights.parts = {component: weights.parts[safetensors.MODEL]}
            return weights
        source = TorchFile(path, layout=make_layout(component))
        self._stack.callback(source.close)
        return source

    def _join_shards(self, component: str, opened: Mapping[str, Source]) -> SourceComponent:
        """Join the shards of a component; each tensor is in one of them."""
        owners = self._owners.setdefault(component, {})
        tree: dict[str, Any] = {}
        specs: dict[str, TensorSpec] = {}
        parts = {name: source.parts[component] for name, source in opened.items()}
        for name, part in parts.items():
            if len(parts) > 1 and not isinstance(part.tree, dict):
                raise FormatError(f"{self.url}/{name}: a shard that is no dict of tensors")
            twice = sorted(specs.keys() & part.specs.keys())
            if twice:
                raise FormatError(f"{self.url}: {twice[:10]} are in {name} and in another shard")
            specs |= part.specs
            owners |= dict.fromkeys(part.specs, (opened[name], component))
        if len(parts) == 1:
            return next(iter(parts.values()))
        for part in parts.values():
            tree |= part.tree
        is_module = all(type(value) is TensorRef for value in tree.values())
        return SourceComponent(kind="module" if is_module else "tree", tree=tree, specs=specs)

    def _add_state(self, path: Path) -> None:
        """Add the Trainer's own state, of which the step is a part."""
        state = _read_json(path)
        made = convert("trainer", state, kind="tree", where=path.name)
        self.parts["trainer"] = made.part
        self.left_out += made.left_out
        step = state.get("global_step") if isinstance(state, dict) else None
        self.step = step if type(step) is int and step >= 0 else None

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        source, inner = self._owners[component][key]
        source.read_into(inner, key, start, memory)

    @override
    def close(self) -> None:
        self._stack.close()


def _without_twins(names: Sequence[str], others: dict[str, str]) -> Sequence[str]:
    """Drop pickled weights that the folder also has as safetensors."""
    safe = [name for name in names if name.endswith(".safetensors")]
    if not safe:
        return names
    for name in names:
        if name not in safe:
            others[name] = f"the same weights as {safe[0]}, which is read instead"
    return safe


def _read_json(path: Path) -> Any:
    data = read_small_file(path, _MAX_STATE_NBYTES)
    strictjson.check_limits(
        data, what=str(path), max_nbytes=_MAX_STATE_NBYTES, max_values=_MAX_STATE_VALUES
    )
    try:
        return json.loads(data)  # not strictly: a loss may be NaN
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{path}: not JSON: {str(err)[:200]}") from err
