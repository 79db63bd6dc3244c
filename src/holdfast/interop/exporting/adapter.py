"""The folder of an adapter, such as LoRA, that PEFT's `PeftModel.from_pretrained` reads.

PEFT keeps adapters beside the weights of the base model, and the name of each within the names of
its tensors: `base_model.model.proj.lora_A.NAME.weight`. In a folder that part is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.interop.exporting.weights import ExportedTensors, Weight

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""First part of all names in a model that PEFT has wrapped."""
DEFAULT = "default"
_KIND = "LORA"
_BIASES: Mapping[Any, str | tuple[str, ...]] = {"none": (), "lora_only": ".base_layer.bias"}
"""End of the names of biases that belong to an adapter, by its setting; else all do."""
_TENSOR = re.compile(
    r"(?P<module>.+\.)?(?:(?P<part>lora_\w+|trainable_tokens_delta)\.(?P<name>[^.]+)(?P<end>\.\w+)?"
    r"|modules_to_save\.(?P<saved>[^.]+)\.(?P<of_saved>.+))"
)


def select_adapter(
    weights: ExportedTensors, name: str | None, config: Mapping[str, Any], *, where: str
) -> ExportedTensors:
    """Return the tensors of an adapter, under the names of PEFT's files; `None`: of the only one.

    Raises:
        UsageError: there is no such adapter, or its kind has other names.
    """
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    if kind != _KIND:
        raise UsageError(
            f"{CONFIG}: peft_type is {kind!r}, and --to peft writes {_KIND} alone. Load it with "
            "holdfast.load_weights(ROOT, model) and write it with model.save_pretrained(FOLDER)"
        )
    tensors = [*weights.tensors, *_list_aliases(weights)]
    matches = [(one, _TENSOR.fullmatch(one.name)) for one in tensors]
    found = sorted({found["name"] or found["saved"] for _, found in matches if found is not None})
    if name not in found and (name is not None or len(found) != 1):
        has = f"it has {', '.join(found)}: name one with --adapter" if found else "it has none"
        asked = "which adapter" if name is None else f"no adapter {name!r}"
        raise UsageError(f"{where}: {weights.component}: {asked}: {has}")
    name = name or found[0]
    chosen = [
        replace(one, name=_with_prefix(_name_in_file(match)))
        for one, match in matches
        if match is not None and name in (match["name"], match["saved"])
    ]
    chosen += [
        replace(one, name=_with_prefix(one.name))
        for one, match in matches
        if match is None and one.name.endswith(_BIASES.get(bias, ".bias"))
    ]
    return ExportedTensors(component=weights.component, tensors=chosen, aliases={})


def find_config(folders: Sequence[Path], adapter: str | None) -> list[Path]:
    """Return the folders with those of the adapter, which PEFT puts below them if not the first."""
    below = [path / adapter for path in folders if adapter is not None]
    return [*folders, *(path for path in below if path.is_dir())]


def parse_config(text: bytes | None) -> Mapping[str, Any]:
    """Parse the adapter's configuration, which no tensor can replace."""
    if text is None:
        raise UsageError(
            f"--to peft: needs {CONFIG}, as a checkpoint holds tensors: write it with "
            "model.peft_config['default'].save_pretrained(FOLDER), and give --config FOLDER"
        )
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{CONFIG}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{CONFIG}: not an object")
    return found


def _list_aliases(weights: ExportedTensors) -> list[Weight]:
    by_name = {one.name: one for one in weights.tensors}
    return [replace(by_name[kept], name=alias) for alias, kept in weights.aliases.items()]


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
