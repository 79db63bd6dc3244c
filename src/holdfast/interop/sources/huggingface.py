"""Reads folders of Hugging Face's libraries: models, adapters, and steps that a trainer has saved.

The weights are opened as single files; whatever is beside them is carried along as bytes. A step is
one source of several files: `save_state` of Accelerate, `checkpoint-<step>` of transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import FormatError
from holdfast.format import strictjson
from holdfast.format.nodes import ArrayRef, TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop.files import LocalFile, read_small_file
from holdfast.interop.layouts import STATE_FILE, FolderLayout, folder_layout, make_layout
from holdfast.interop.pickles.parts import convert
from holdfast.interop.source import LeftOut, Source, SourceComponent, expect_none_wrong
from holdfast.interop.sources import safetensors
from holdfast.interop.sources.safetensors import METADATA, MODEL
from holdfast.interop.sources.torchfile import TorchFile

FILES = "files"
"""Component of the files beside the weights, such as config and tokenizer: name -> bytes."""
ADAPTER = "adapter"
"""Component of an adapter's weights in a folder that has a model, too."""

MAX_CARRIED_FILES = 256
MAX_CARRIED_NBYTES = 64 << 20
"""Most bytes of one file that is carried along."""
MAX_SHARDS = 2_000
_MAX_INDEX_NBYTES = 64 << 20
_MAX_INDEX_VALUES = 2_000_000

_MODELS = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL_FILE = re.compile(
    r"(model|diffusion_pytorch_model|pytorch_model|adapter_model)"
    r"(-[0-9]{5}-of-[0-9]{5})?(\.[a-z0-9]+)?(-[0-9]{5}-of-[0-9]{5})?\.(safetensors|bin)"
)
_OTHER_WEIGHTS = (".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".tflite", ".pth", ".ckpt")
_PICKLES = (".bin", ".pt", ".pkl", ".pickle")
_OF_A_TRAINER = ("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt")


def recognises(path: Path) -> bool:
    """Whether a folder holds a model's weights under their usual names, and no trainer's state."""
    if not path.is_dir() or any((path / name).exists() for name in _OF_A_TRAINER):
        return False
    return _weights_of(path, (*_MODELS, *_ADAPTERS)) is not None


class HuggingFaceFolder(Source):
    """The weights in a model folder, as the component `model`, and the files beside them.

    Several files of weights are one component. Names that the config ties to one of their tensors,
    and that no file has, are added to the tree.
    """

    format = "huggingface"

    def __init__(
        self, path: Path, open_file: Callable[[str], Source], *, without: Collection[str] = ()
    ) -> None:
        """Open the folder; `open_file` opens one file of weights. Ignore files in `without`."""
        self.url = str(path)
        self._stack = ExitStack()
        self._weights: dict[tuple[str, str], tuple[Source, str]] = {}
        self._carried: dict[str, LocalFile] = {}
        self._texts: dict[str, Any] = {}
        self.parts: dict[str, SourceComponent] = {}
        self.left_out: list[LeftOut] = []
        with self.closing_on_error():
            used = self._add_weights(path, open_file)
            self._add_files(path, used.union(without))

    def _add_weights(self, folder: Path, open_file: Callable[[str], Source]) -> set[str]:
        """Add the parts of weights; return the names of the files that they use."""
        used: set[str] = set()
        model, adapter = _weights_of(folder, _MODELS), _weights_of(folder, _ADAPTERS)
        if model is not None:
            used |= self._add_part(folder, MODEL, model, open_file)
        if adapter is not None:
            name = MODEL if model is None else ADAPTER
            used |= self._add_part(folder, name, adapter, open_file)
        return used

    def _add_part(
        self, folder: Path, component: str, name: str, open_file: Callable[[str], Source]
    ) -> set[str]:
        index = _read_index(folder / name) if name.endswith(".json") else None
        names = [name] if index is None else sorted({*index.values()})
        opened = {file: self._stack.enter_context(open_file(str(folder / file))) for file in names}
        parts = {file: _weights_in(source) for file, source in opened.items()}
        tree: dict[str, Any] = {}
        specs: dict[str, TensorSpec] = {}
        owners = _owners(f"{self.url}/{name}", {file: part.tree for file, part in parts.items()})
        if index is not None:
            _check_index(f"{self.url}/{name}", index, owners)
        for file, part in parts.items():
            renamed = {key: key if key not in specs else f"{key}@{file}" for key in part.specs}
            for key, spec in part.specs.items():
                specs[renamed[key]] = TensorSpec(renamed[key], spec.dtype, spec.shape)
                self._weights[component, renamed[key]] = opened[file], key
            tree |= {path: _with_key(node, renamed) for path, node in part.tree.items()}
            if METADATA in opened[file].parts:
                self._texts[file] = opened[file].parts[METADATA].tree
            self.left_out += [
                LeftOut(f"{file}: {one.path}", one.why, component if one.tensors_of else "")
                for one in opened[file].left_out
            ]
        if component == MODEL:
            config = _config(folder)
            tied = tied_names(config, tree.keys())
            tree |= {path: tree[other] for path, other in tied.items()}
        self.parts[component] = SourceComponent(kind="module", tree=tree, specs=specs)
        if self._texts:
            self.parts[METADATA] = SourceComponent(kind="tree", tree=self._texts, specs={})
        return {name, *names}

    def _add_files(self, folder: Path, used: set[str]) -> None:
        """Add the small files beside the weights as one part; list what is not carried along."""
        tree: dict[str, ArrayRef] = {}
        specs: dict[str, TensorSpec] = {}
        for path in sorted(folder.iterdir()):
            if path.name in used:
                continue
            why = _why_left(folder, path, len(specs))
            if why is not None:
                self.left_out.append(LeftOut(path=path.name, why=why))
                continue
            file = LocalFile.open_regular(path)
            self._stack.callback(file.close)
            self._carried[path.name] = file
            specs[path.name] = TensorSpec(path.name, "U8", (file.nbytes,))
            tree[path.name] = ArrayRef(path.name)
        if tree:
            self.parts[FILES] = SourceComponent(kind="tree", tree=tree, specs=specs)

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        if component == FILES:
            self._carried[key].read_into(start, memory)
        else:
            source, own_key = self._weights[component, key]
            source.read_into(MODEL, own_key, start, memory)

    @override
    def close(self) -> None:
        self._stack.close()


def _weights_of(folder: Path, names: Sequence[str]) -> str | None:
    """Return the first of the files, or of the indexes of their shards, that a folder has."""
    candidates = [each for name in names for each in (name, f"{name}.index.json")]
    return next((name for name in candidates if (folder / name).is_file()), None)


def _weights_in(source: Source) -> SourceComponent:
    part = source.parts.get(MODEL)
    if part is None or not isinstance(part.tree, Mapping):
        has = ", ".join(map(repr, source.parts)) or "nothing"
        raise FormatError(f"{source.url}: expected a model's weights; it holds {has}")
    return part


def _with_key(node: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(node, TensorRef) and renamed[node.key] != node.key:
        return TensorRef(renamed[node.key], node.device, node.grad, node.parameter, node.order)
    return node


def _owners(what: str, trees: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the file of each name; refuse names that are in several."""
    owners: dict[str, str] = {}
    wrong = []
    for file, tree in trees.items():
        for name in tree:
            if name in owners:
                wrong.append(f"{name!r} is in {owners[name]} and in {file}")
            owners.setdefault(name, file)
    expect_none_wrong(what, wrong)
    return owners


def _check_index(what: str, index: Mapping[str, str], owners: Mapping[str, str]) -> None:
    wrong = [
        f"{name!r} is not in {file}" for name, file in index.items() if owners.get(name) != file
    ]
    wrong += [
        f"{name!r} in {file} is not listed" for name, file in owners.items() if name not in index
    ]
    expect_none_wrong(what, wrong)


def _read_index(path: Path) -> dict[str, str]:
    """Read which tensor is in which file beside the index."""
    index = _read_json(path, _MAX_INDEX_NBYTES)
    found: dict[str, str] = index.get("weight_map", {}) if isinstance(index, dict) else {}
    is_map = isinstance(found, dict) and all(type(name) is str for name in found.values())
    if not found or not is_map:
        raise FormatError(f"{path}: no `weight_map` of tensors and files")
    files = sorted({*found.values()})
    # A name with a separator, such as "../other" or "C:\\x", could lie outside of the folder.
    outside = [
        f"{name[:200]!r} is not a name in this folder"
        for name in files
        if not _is_weights_name(name)
    ]
    expect_none_wrong(f"{path}", outside)
    if len(files) > MAX_SHARDS:
        raise FormatError(f"{path}: names {len(files):,} files; at most {MAX_SHARDS:,} are read")
    missing = [f"{name} is missing" for name in files if not (path.parent / name).is_file()]
    expect_none_wrong(f"{path}", missing)
    return found


def _is_weights_name(name: str) -> bool:
    return (
        not name.startswith(".")
        and not {*name} & {*"/\\:\0"}
        and name.endswith((".safetensors", ".bin"))
    )


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    found = _read_json(path, MAX_CARRIED_NBYTES) if path.is_file() else {}
    if not isinstance(found, dict):
        raise FormatError(f"{path}: not an object")
    return found


def _read_json(path: Path, max_nbytes: int) -> Any:
    data = read_small_file(path, max_nbytes)
    return strictjson.loads(
        data, what=str(path), max_nbytes=max_nbytes, max_values=_MAX_INDEX_VALUES
    )


def _why_left(folder: Path, path: Path, num_carried: int) -> str | None:
    """Return why a file beside the weights is not carried along, or None if it is."""
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return "not a regular file"
    if path.name.startswith("."):
        return "a hidden file"
    if _leads_out(folder, path):
        return "a link that leads out of the folder"
    if _MODEL_FILE.fullmatch(path.name) or path.name.endswith((*_OTHER_WEIGHTS, ".index.json")):
        return "not the weights that were opened"
    if path.name.endswith(_PICKLES):
        return "a pickle, which is not opened"
    nbytes = path.stat().st_size
    if nbytes > MAX_CARRIED_NBYTES:
        return f"{nbytes:,} bytes; files up to {MAX_CARRIED_NBYTES:,} are carried along"
    if num_carried >= MAX_CARRIED_FILES:
        return f"more than {MAX_CARRIED_FILES} files"
    return None


def _leads_out(folder: Path, path: Path) -> bool:
    """Whether a file, other than in huggingface_hub's cache, lies outside of its folder."""
    inside, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    return not real.is_relative_to(inside) and not any(
        real.parent == cache / "blobs" for cache in inside.parents
    )


_OUTPUT = "lm_head.weight"
_DECODERS = (
    *("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    *("transformer.wte.weight", "transformer.word_embeddings.weight", "backbone.embeddings.weight"),
    *("model.decoder.embed_tokens.weight", "model.text_model.embed_tokens.weight"),
)
_Ties = Mapping[str, tuple[str, ...]]
_T5: _Ties = {
    "encoder.embed_tokens.weight": ("shared.weight",),
    "decoder.embed_tokens.weight": ("shared.weight",),
    _OUTPUT: ("shared.weight",),
}
_BART: _Ties = {
    "model.encoder.embed_tokens.weight": ("model.shared.weight",),
    "model.decoder.embed_tokens.weight": ("model.shared.weight",),
    _OUTPUT: ("model.shared.weight",),
}
_BERT: _Ties = {
    "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
}
_ROBERTA: _Ties = {
    "lm_head.decoder.weight": ("roberta.embeddings.word_embeddings.weight",),
    "lm_head.decoder.bias": ("lm_head.bias",),
}
_BY_ENDING: Mapping[str, _Ties] = {
    "WhisperForConditionalGeneration": {"proj_out.weight": ("model.decoder.embed_tokens.weight",)},
    "T5ForConditionalGeneration": _T5,
    "BartForConditionalGeneration": _BART,
    "BertForMaskedLM": _BERT,
    "BertForPreTraining": _BERT,
    "RobertaForMaskedLM": _ROBERTA,
    "ForConditionalGeneration": {_OUTPUT: ("model.language_model.embed_tokens.weight",)},
    "ForCausalLM": {_OUTPUT: _DECODERS},
    "LMHeadModel": {_OUTPUT: _DECODERS},
}


def tied_names(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Map names without a tensor to those that the config ties them to; None if it cannot."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or config.get("tie_word_embeddings") is False:
        return {}
    for architecture in architectures[:1]:
        for ending, ties in _BY_ENDING.items():
            if isinstance(architecture, str) and architecture.endswith(ending):
                return _present(ties, names)
    return {}


def _present(ties: _Ties, names: Collection[str]) -> dict[str, str]:
    found = {}
    for name, others in ties.items():
        other = next((other for other in others if other in names), None)
        if other is not None and name not in names:
            found[name] = other
    return found


MAX_FILES = 10_000
_MAX_STATE_NBYTES = 32 << 20
_MAX_STATE_VALUES = 1_000_000


def recognises_step(path: Path) -> bool:
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
                raise FormatError(f"{self.url}/{name}: a shard that is not a dict of tensors")
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
        state = _read_state(path)
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


def _read_state(path: Path) -> Any:
    data = read_small_file(path, _MAX_STATE_NBYTES)
    strictjson.check_limits(
        data, what=str(path), max_nbytes=_MAX_STATE_NBYTES, max_values=_MAX_STATE_VALUES
    )
    try:
        return json.loads(data)  # not strictly: a loss may be NaN
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{path}: not JSON: {str(err)[:200]}") from err
