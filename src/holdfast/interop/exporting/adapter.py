"""The folder of an adapter, such as LoRA, that PEFT's `PeftModel.from_pretrained` reads.

PEFT keeps adapters beside the weights of the base model, and the name of each within the names of
its tensors: `base_model.model.proj.lora_A.NAME.weight`. In a folder that part is left out. Of
several adapters, `default` is in the folder itself, and each other one in a folder of its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from holdfast.errors import UsageError
from holdfast.interop.exporting.weights import ExportedTensors, Weight

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
        for one in _list_names(weights)
        if one.name.endswith(_BIASES.get(bias, ".bias")) and _TENSOR.fullmatch(one.name) is None
    ]
    return ExportedTensors(component=weights.component, tensors=chosen, aliases={})


def expect_lora(config: Mapping[str, Any]) -> None:
    """Raise `UsageError` if an adapter is not of LoRA."""
    kind = config.get("peft_type")
    if kind != _KIND:
        raise UsageError(
            f"{CONFIG}: peft_type is {kind!r}, and exports know {_KIND} alone. Load it with "
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


def _list_names(weights: ExportedTensors) -> list[Weight]:
    """List the tensors under all their names."""
    by_name = {one.name: one for one in weights.tensors}
    aliases = [replace(by_name[kept], name=alias) for alias, kept in weights.aliases.items()]
    return [*weights.tensors, *aliases]


def _match_tensors(weights: ExportedTensors) -> list[tuple[Weight, re.Match[str]]]:
    """List the tensors of all adapters, with the parts of their names."""
    matches = ((one, _TENSOR.fullmatch(one.name)) for one in _list_names(weights))
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
