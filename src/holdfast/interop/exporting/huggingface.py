"""Folders of a model as transformers writes them: weights, config and tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.errors import StoreError, UsageError
from holdfast.format.nodes import ArrayRef
from holdfast.interop.exporting.files import ExportPlan, PlannedFile
from holdfast.interop.exporting.weights import (
    SINGLE,
    Dtype,
    DtypeCast,
    ExportedTensors,
    Report,
    bytes_file,
    plan_safetensors,
)
from holdfast.interop.reading import read_pieces
from holdfast.interop.source import LeftOut, Source, SourceComponent

FILES = "files"
"""Component of small files that lay beside weights: name → bytes."""
_CONFIG = "config.json"
_PEFT = "base_model.model."
"""First part of all names in a model that PEFT has wrapped."""
_MAX_NBYTES = 64 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".index.json")
_CODE = (".py", ".pyc", ".so")
_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def plan_model(
    source: Source,
    weights: ExportedTensors,
    plan: ExportPlan,
    *,
    configs: Sequence[Path],
    dtype: Dtype | None,
    shard_nbytes: int,
    cast: DtypeCast,
    report: Report,
) -> list[PlannedFile]:
    """Plan the folder of a model, which `from_pretrained` reads: weights, config and tokenizer."""
    wrapped = next((one.name for one in weights.tensors if one.name.startswith(_PEFT)), None)
    if wrapped is not None:
        raise UsageError(
            f"{source.url}: {weights.component} is a PEFT model ({wrapped}), and from_pretrained "
            "reads its names neither as a model nor as an adapter. Load it with "
            "holdfast.load_weights(ROOT, model) and write it with model.save_pretrained(FOLDER), "
            "or rename it with --map"
        )
    beside = _beside(source, configs, plan)
    if _CONFIG not in beside:
        plan.notes.append(
            f"no {_CONFIG}: from_pretrained needs one beside the weights; --config PATH gives it"
        )
    elif dtype is not None:
        beside[_CONFIG] = bytes_file(_CONFIG, _with_dtype(beside[_CONFIG], _NAMES[dtype]))
    return [
        *plan_safetensors(
            source, weights, shard_nbytes=shard_nbytes, single=SINGLE, cast=cast, report=report
        ),
        *beside.values(),
    ]


def _beside(source: Source, configs: Sequence[Path], plan: ExportPlan) -> dict[str, PlannedFile]:
    found: dict[str, PlannedFile] = {}
    part = source.parts.get(FILES)
    if part is not None and isinstance(part.tree, Mapping):
        for name, ref in part.tree.items():
            if _is_plain_name(name) and isinstance(ref, ArrayRef):
                found[name] = _carried(source, part, name, ref.key)
            else:
                plan.left_out.append(LeftOut(path=f"{FILES}.{name}", why="no name of a file"))
    for path in configs:
        for one in _files_of(path):
            why = _why_left(one)
            if why is None:
                found[one.name] = bytes_file(one.name, _read_file_bytes(one))
            else:
                plan.left_out.append(LeftOut(path=str(one), why=why))
    return dict(sorted(found.items()))


def _is_plain_name(name: Any) -> bool:
    """Whether a name from a checkpoint is a plain file name, without a path, on any system."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 200
        and not name.startswith(".")
        and not {*name} & {*'/\\:*?"<>|'}
        and name.isprintable()
        and not name.endswith(_WEIGHTS)
    )


def _carried(source: Source, part: SourceComponent, name: str, key: str) -> PlannedFile:
    def write(file: BinaryIO) -> None:
        for piece in read_pieces(source, [(FILES, key)]):
            file.write(piece.memory)

    return PlannedFile(name=name, nbytes=part.specs[key].nbytes, write=write)


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(path.iterdir())
    elif path.is_file():
        yield path
    else:
        raise UsageError(f"--config {path}: neither a file nor a folder")


def _why_left(path: Path) -> str | None:
    if not path.is_file():
        return "no regular file"
    if path.name.startswith(".") or path.name.endswith(_CODE):
        return "hidden, or a program"
    if path.name.endswith(_WEIGHTS):
        return "weights, or a pickle"
    if os.path.getsize(path) > _MAX_NBYTES:
        return f"more than {_MAX_NBYTES >> 20} MiB"
    return None


def _read_file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def _with_dtype(config: PlannedFile, name: str) -> bytes:
    """Return a config that tells the dtype to which the weights are cast, as loading follows it."""
    import io

    text = io.BytesIO()
    config.write(text)
    try:
        found = json.loads(text.getvalue())
    except ValueError as error:
        raise UsageError(f"{config.name}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{config.name}: not an object")
    named = [key for key in ("dtype", "torch_dtype") if key in found] or ["dtype"]
    return (json.dumps(found | dict.fromkeys(named, name), indent=2) + "\n").encode()
