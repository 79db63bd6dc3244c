"""Adapters of PEFT, such as LoRA: their folders, and a model with one, read as the merged model.

PEFT keeps adapters beside the weights of the base model, and the name of each within the names of
its tensors: `base_model.model.proj.lora_A.NAME.weight`. In a folder that part is left out. Of
several adapters, `default` is in the folder itself, and each other one in a folder of its name.

The base is in the checkpoint, or in another source if the checkpoint has only its digests. Each
tensor of the base is compared with its digest before a byte is given out. Formula and dtypes are
those of `merge_and_unload` of PEFT 0.21, so that the results are equal bit for bit.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from holdfast.errors import UsageError, listing
from holdfast.format.blocks import digest_blocks, file_digest
from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import TensorSpec, format_record
from holdfast.interop.exporting.weights import (
    CAST_FROM,
    ExportedTensors,
    Weight,
    iterate_left_out,
    model_of,
)
from holdfast.interop.files import copy_bytes
from holdfast.interop.source import Source, SourceComponent, read_whole
from holdfast.interop.sources.huggingface import FILES
from holdfast.state.leaves import DTYPE_NAMES, TORCH_DTYPES

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""First part of all names in a model that PEFT has wrapped."""
WRAPPERS = ("base_layer.", "original_module.")
"""Parts of the names of the base, which adapters alone, as in a file, do not have beside them."""
DEFAULT = "default"
_KIND = "LORA"
_BIASES: Mapping[Any, str | tuple[str, ...]] = {"none": (), "lora_only": ".base_layer.bias"}
"""End of the names of biases that belong to an adapter, by its setting; else all do."""
_TENSOR = re.compile(
    r"(?P<module>.+\.)?(?:(?P<part>lora_\w+|trainable_tokens_delta)\.(?P<name>[^.]+)(?P<end>\.\w+)?"
    r"|modules_to_save\.(?P<saved>[^.]+)\.(?P<of_saved>.+))"
)


def list_adapters(weights: ExportedTensors, name: str | None, *, where: str) -> list[str]:
    """Return the names of the adapters of a model, or the one that is named, which must exist.

    Raises:
        UsageError: there is no such adapter, or none.
    """
    found = sorted({found["name"] or found["saved"] for _, found in _match_tensors(weights)})
    if not found or name not in (None, *found):
        asked = "no adapter" if name is None else f"no adapter {name!r}"
        has = ", ".join(found) or "none"
        raise UsageError(f"{where}: {weights.component}: {asked}; it has {has}")
    return found if name is None else [name]


def select_adapter(
    weights: ExportedTensors, name: str, config: Mapping[str, Any]
) -> ExportedTensors:
    """Return the tensors of an adapter, under the names of PEFT's files.

    Raises:
        UsageError: its kind has other names.
    """
    expect_lora(config)
    bias = config.get("bias", "none")
    chosen = [
        replace(one, name=_with_prefix(_name_in_file(match)))
        for one, match in _match_tensors(weights)
        if name in (match["name"], match["saved"])
    ]
    chosen += [
        replace(one, name=_with_prefix(one.name))
        for one in _list_aliased(weights)
        if one.name.endswith(_BIASES.get(bias, ".bias")) and _TENSOR.fullmatch(one.name) is None
    ]
    return ExportedTensors(component=weights.component, tensors=chosen, aliases={})


def expect_lora(config: Mapping[str, Any]) -> None:
    """Raise `UsageError` if an adapter is not of LoRA."""
    kind = config.get("peft_type")
    if kind != _KIND:
        raise UsageError(
            f"{CONFIG}: peft_type is {kind!r}, and exports support only {_KIND}. Load it with "
            "holdfast.load_weights(ROOT, model) and write it with model.save_pretrained(FOLDER), "
            "or with model.merge_and_unload().save_pretrained(FOLDER)"
        )


def match_names(names: Iterable[str]) -> dict[str, re.Match[str]]:
    """Return the names of tensors of adapters, with their parts."""
    matches = ((name, _TENSOR.fullmatch(name)) for name in names)
    return {name: match for name, match in matches if match is not None}


def parse_config(text: bytes | None, name: str) -> Mapping[str, Any]:
    """Parse the configuration of an adapter, which no tensor can replace."""
    if text is None:
        folder = "FOLDER" if name == DEFAULT else f"FOLDER/{name}"
        raise UsageError(
            f"adapter {name!r}: {CONFIG} is not in checkpoints: write it with model.peft_config["
            f"{name!r}].save_pretrained({folder!r}), and pass --config FOLDER"
        )
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{CONFIG}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{CONFIG}: not an object")
    return found


def _list_aliased(weights: ExportedTensors) -> list[Weight]:
    """List the tensors under all their names."""
    by_name = {one.name: one for one in weights.tensors}
    aliases = [replace(by_name[kept], name=alias) for alias, kept in weights.aliases.items()]
    return [*weights.tensors, *aliases]


def _match_tensors(weights: ExportedTensors) -> list[tuple[Weight, re.Match[str]]]:
    """List the tensors of all adapters, with the parts of their names."""
    matches = ((one, _TENSOR.fullmatch(one.name)) for one in _list_aliased(weights))
    return [(one, match) for one, match in matches if match is not None]


def _name_in_file(match: re.Match[str]) -> str:
    """The name of an adapter's tensor without the name of the adapter."""
    module = match["module"] or ""
    if match["saved"] is not None:
        return f"{module}{match['of_saved']}"
    # DoRA's vector was a parameter once, and its name in files still is.
    end = "" if match["part"] == "lora_magnitude_vector" else match["end"] or ""
    return f"{module}{match['part']}{end}"


def _with_prefix(name: str) -> str:
    """Return the name as of a wrapped model, without the wrappers around that."""
    _, prefix, rest = name.partition(PREFIX)
    return f"{PREFIX}{rest if prefix else name}"


WAY = (
    "Load the checkpoint with holdfast.load_weights(ROOT, model) into the model with its adapter, "
    "and write model.merge_and_unload().save_pretrained(FOLDER)"
)
_HARMLESS = """
    auto_mapping base_model_name_or_path revision peft_type peft_version task_type inference_mode
    r rank_pattern target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out
    use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern
    layer_replication loftq_config eva_config corda_config lora_ga_config qalora_group_size
    megatron_core runtime_config
"""
"""Settings that a merge follows, or that only matter when an adapter is made or trained."""
_MOST_KEPT_NBYTES = 64 << 20
"""Bytes of computed tensors that are kept, or two, as several threads read the next pieces."""
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delta:
    """Update of one weight by an adapter: scale · B · A."""

    first: str
    """Key of A."""
    second: str
    """Key of B."""
    scale: float
    is_transposed: bool
    is_embedding: bool


@dataclass(slots=True, kw_only=True)
class _Origin:
    """Where a tensor comes from, and what is added to it."""

    source: Source
    component: str
    key: str
    names: list[str] = field(default_factory=list)
    record: str | None = None
    """Record of a frozen parameter, with which the base must agree."""
    dtype: str
    deltas: list[_Delta] = field(default_factory=list)


class MergedSource(Source):
    """A source whose model is merged with an adapter, and complete."""

    format = "merged"

    def __init__(
        self,
        source: Source,
        component: str,
        *,
        base: Source | None,
        adapter: str | None,
        config: Mapping[str, Any],
    ) -> None:
        """Plan without reading a tensor. `adapter` is None if the model has none.

        Raises:
            UsageError: the base lacks a parameter, or the adapter is of a kind that is not merged.
        """
        self.url, self.step = source.url, source.step
        self._source, self._component, self._base = source, component, base
        self._part = source.get_component(component)
        self.left_out = [*source.left_out, *iterate_left_out(self._part.tree, component)]
        self._origins: dict[str, _Origin] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._lock = threading.Lock()
        self._made: dict[str, memoryview] = {}
        self._leaves = self._part.leaves
        self._names = {} if base is None else _list_names(base.get_component(model_of(base, ())))
        matches = match_names(self._leaves)
        tree = self._add_tensors(adapter, matches)
        if adapter is not None:
            self._add_deltas(adapter, config, matches, tree)
        merged = SourceComponent(kind=self._part.kind, tree=tree, specs=self._specs)
        beside = {} if base is None or FILES not in base.parts else {FILES: base.parts[FILES]}
        self.parts = {**beside, **source.parts, component: merged}

    def _add_tensors(
        self, adapter: str | None, matches: Mapping[str, re.Match[str]]
    ) -> dict[str, TensorRef]:
        """Add the tensors of the model but the adapters' own; return its tree."""
        layers = {match["module"] or "" for match in matches.values() if match["part"]}
        replaced = {
            match["module"] or "" for match in matches.values() if match["saved"] == adapter
        }
        wrapped = {match["module"] or "" for match in matches.values() if match["saved"]}
        tree: dict[str, TensorRef] = {}
        wrong = []
        for path in [*self._leaves, *self._part.frozen]:
            match, name = matches.get(path), path
            layer, of_layer, rest = path.rpartition("base_layer.")
            module, of_module, inner = path.rpartition("original_module.")
            if match is not None:
                if match["saved"] != adapter or match["saved"] is None:
                    continue
                name = f"{match['module'] or ''}{match['of_saved']}"
            elif of_layer and layer in layers:
                name = f"{layer}{rest}"
            elif of_module and module in wrapped:
                if module in replaced:
                    continue
                name = f"{module}{inner}"
            name = _without_prefix(name)
            try:
                key = (
                    self._add_own(path)
                    if path in self._leaves
                    else self._add_base(name, self._part.frozen[path])
                )
            except UsageError as error:
                wrong.append(str(error))
                continue
            if name in tree:
                wrong.append(f"{name}: two tensors of the merged model have this name")
            self._origins[key].names.append(name)
            tree[name] = TensorRef(key)
        if wrong:
            url = self.url if self._base is None else self._base.url
            raise UsageError(
                f"{url}: {len(wrong)} parameters differ from the base model of {self.url}. Give "
                f"the folder of the model that was trained. {WAY}:\n{listing(wrong)}"
            )
        return tree

    def _add_own(self, path: str) -> str:
        old = self._leaves[path].key
        key, spec = f"own {old}", self._part.specs[old]
        if key not in self._origins:
            self._specs[key] = TensorSpec(key, spec.dtype, spec.shape)
            self._origins[key] = _Origin(
                source=self._source, component=self._component, key=old, dtype=spec.dtype
            )
        return key

    def _add_base(self, name: str, record: str) -> str:
        assert self._base is not None  # expect_no_loss
        component = model_of(self._base, ())
        part = self._base.parts[component]
        old_key = self._names.get(name) or self._names.get(name.partition(".")[2])
        if old_key is None:
            raise UsageError(f"{name}: not in the base")
        spec = part.specs[old_key]
        dtype = record.partition(" ")[0]
        is_cast = {dtype, spec.dtype} <= CAST_FROM
        if not record.startswith(format_record(dtype, spec.shape, "")) or not (
            is_cast or dtype == spec.dtype
        ):
            here = format_record(spec.dtype, spec.shape, "")
            raise UsageError(f"{name}: {here}in the base, {record.rpartition(' ')[0]} when saved")
        key = f"base {old_key} {record}"
        if key not in self._origins:
            self._specs[key] = TensorSpec(key, dtype, spec.shape)
            self._origins[key] = _Origin(
                source=self._base,
                component=component,
                key=old_key,
                record=record,
                dtype=dtype,
            )
        return key

    def _add_deltas(
        self,
        adapter: str,
        config: Mapping[str, Any],
        matches: Mapping[str, re.Match[str]],
        tree: Mapping[str, TensorRef],
    ) -> None:
        expect_lora(config)
        wrong = [
            f"{CONFIG}: {key} is {value!r}"
            for key, value in config.items()
            if value and key not in _HARMLESS.split() and (key, value) != ("bias", "none")
        ]
        alpha = config.get("lora_alpha")
        if not isinstance(alpha, int | float):
            wrong.append(f"{CONFIG}: lora_alpha is {alpha!r}")
        layers: dict[str, dict[str, str]] = {}
        for path, match in matches.items():
            if match["name"] == adapter:
                end = match["end"] or ""
                part = match["part"] + ("" if end == ".weight" else end)
                layers.setdefault(match["module"] or "", {})[part] = path
        oriented: dict[str, bool | None] = {}
        for layer, paths in layers.items():
            names = [pair for pair in _PAIRS if {*pair} == paths.keys()]
            ref = tree.get(_without_prefix(f"{layer}weight"))
            if not names or ref is None or self._origins[ref.key].dtype not in CAST_FROM:
                why = f"has {', '.join(sorted(paths))}" if not names else "quantized, or no weight"
                wrong.append(f"{layer.removesuffix('.')}: {why}")
                continue
            first, second = (self._leaves[paths[name]].key for name in names[0])
            sizes = [self._part.specs[key].shape for key in (first, second)]
            shape = self._specs[ref.key].shape
            is_embedding = names[0] == _PAIRS[1]
            fits = [
                is_transposed
                for is_transposed in ((True,) if is_embedding else (False, True))
                if [len(one) for one in sizes] == [2, 2]
                and (sizes[1][0], sizes[0][1]) == (shape[::-1] if is_transposed else shape)
                and sizes[0][0] == sizes[1][1] > 0
            ]
            if not fits:
                wrong.append(f"{layer.removesuffix('.')}: {sizes} for a weight of {shape}")
                continue
            if not is_embedding:
                oriented[layer] = fits[0] if len(fits) == 1 else None
            is_transposed = fits[0] if len(fits) == 1 else bool(config.get("fan_in_fan_out"))
            rank = sizes[0][0]
            scale = float(alpha or 0) / (math.sqrt(rank) if config.get("use_rslora") else rank)
            self._origins[ref.key].deltas.append(
                _Delta(
                    first=first,
                    second=second,
                    scale=scale,
                    is_transposed=is_transposed,
                    is_embedding=is_embedding,
                )
            )
        known = {one for one in oriented.values() if one is not None}
        if known - {bool(config.get("fan_in_fan_out"))}:
            # PEFT looks at the class of each layer; here only shapes tell, and those of squares do
            # not.
            wrong += [
                f"{layer.removesuffix('.')}: square, and fan_in_fan_out of {CONFIG} is "
                "wrong for other layers"
                for layer, one in oriented.items()
                if one is None
            ]
        if wrong:
            raise UsageError(
                f"{self.url}: adapter {adapter!r} cannot be merged here. {WAY}:\n{listing(wrong)}"
            )

    @override
    def read_into(self, component: str, key: str, start: int, memory: memoryview) -> None:
        if component != self._component:
            is_own = component in self._source.parts
            source = self._source if is_own or self._base is None else self._base
            source.read_into(component, key, start, memory)
            return
        origin = self._origins[key]
        if not origin.deltas and origin.record is None:
            origin.source.read_into(component, origin.key, start, memory)
            return
        # One tensor at a time, as the threads that read ahead would compute several.
        with self._lock:
            made = self._made.pop(key, None)
            if made is None:
                made = _bytes_of(self._compute_tensor(origin))
            self._made[key] = made
            while len(self._made) > 2 and sum(map(len, self._made.values())) > _MOST_KEPT_NBYTES:
                del self._made[next(iter(self._made))]
            copy_bytes(made[start : start + memory.nbytes], memory)

    def _compute_tensor(self, origin: _Origin) -> Tensor:
        tensor = _read_origin(origin)
        if origin.record is not None and not _agrees(tensor, origin.record):
            self._refuse_base()
        for delta in origin.deltas:
            tensor += self._compute_delta(delta, tensor.dtype)
        return tensor

    def _compute_delta(self, delta: _Delta, dtype: torch.dtype) -> Tensor:
        first, second = (
            _read_tensor(self._source, self._component, key) for key in (delta.first, delta.second)
        )
        own_dtype = (first if delta.is_embedding else second).dtype
        is_half = own_dtype in (torch.float16, torch.bfloat16)
        if is_half:
            first, second = first.float(), second.float()
        product = second @ first
        made = (product.T if delta.is_transposed else product) * delta.scale
        if is_half:
            made = made.to(own_dtype)
        return made.to(dtype) if delta.is_embedding else made

    def _refuse_base(self) -> None:
        wrong = [
            ", ".join(origin.names)
            for origin in self._origins.values()
            if origin.record is not None and not _agrees(_read_origin(origin), origin.record)
        ]
        assert self._base is not None
        raise UsageError(
            f"{self._base.url}: {len(wrong)} parameters differ from their digests in {self.url}, "
            f"so it is not the base that was trained:\n{listing(wrong)}"
        )

    @override
    def close(self) -> None:
        """Do nothing: the sources belong to the caller."""


def _without_prefix(name: str) -> str:
    return name.replace(PREFIX, "", 1)


def _list_names(part: SourceComponent) -> dict[str, str]:
    """Return the key of each tensor, also by its name without a first part such as `model.`.

    Files of a base may have that or not. Digests are compared, so a wrong one is refused.
    """
    keys = {name: ref.key for name, ref in part.leaves.items()}
    return {name.partition(".")[2]: key for name, key in keys.items()} | keys


def _read_tensor(source: Source, component: str, key: str) -> Tensor:
    spec = source.parts[component].specs[key]
    data = bytearray(spec.nbytes)
    read_whole(source, component, key, 0, memoryview(data))
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def _read_origin(origin: _Origin) -> Tensor:
    """Read a tensor in the dtype that it had in the run."""
    found = _read_tensor(origin.source, origin.component, origin.key)
    return found.to(TORCH_DTYPES[origin.dtype])


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _agrees(tensor: Tensor, record: str) -> bool:
    digest = file_digest(tensor.nbytes, digest_blocks(_bytes_of(tensor)))
    return format_record(DTYPE_NAMES[tensor.dtype], tensor.shape, digest) == record
