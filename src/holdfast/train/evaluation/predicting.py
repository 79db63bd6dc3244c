"""Predictions for all samples of a loader, written by parts into a folder.

The folder has safetensors files, each with the outputs of some batches in the order of the samples,
and `predictions.json`, which is written last and lists them: a folder without it is incomplete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from holdfast.data import Loader, Stream
from holdfast.errors import UsageError, some_of
from holdfast.format.tensors import TensorSpec, lay_out, parse_header
from holdfast.state.leaves import DTYPE_NAMES, TORCH_DTYPES
from holdfast.system import replace_file
from holdfast.train.argument_checks import check_range
from holdfast.train.evaluation.validation import undisturbed
from holdfast.train.group import Group
from holdfast.train.step.step import Update, moved
from holdfast.train.strategies import is_sharded
from holdfast.train.training import evaluating

_INDEX = "predictions.json"
_ONLY = "output"
"""Name of the tensor, where the outputs are one."""
_NOT_IN_ORDER = (
    "predict: outputs could not be matched with samples: make a loader with shuffle=False, and "
    "leave the sampler out, as well as batch_sampler, batches_per_epoch and a Mixture"
)
_OF_RANKS = (
    "predict: with several ranks give a holdfast.data.Loader(…, shuffle=False), or, unless the "
    "model is sharded, a loader that gives every rank all batches"
)
_DROPS = "predict: drop_last=True leaves out samples"

Outputs = Callable[[nn.Module, Any], Any]
Batch = tuple[int, int, dict[str, Tensor]]
"""Number of a batch of all ranks, the rank that has a part of it, its outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Outputs of a model in a folder, in the order of the samples."""

    folder: Path
    num_samples: int
    files: tuple[Path, ...]
    """The parts, in order: safetensors files."""

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> Predictions:
        """Open the predictions in a folder.

        Raises:
            UsageError: the folder has none, or they are not complete.
        """
        try:
            index = json.loads((Path(folder) / _INDEX).read_text("utf-8"))
        except FileNotFoundError as error:
            raise UsageError(
                f"{folder}: has no complete predictions; call predict with another folder"
            ) from error
        files = tuple(Path(folder) / name for name in index["files"])
        return cls(folder=Path(folder), num_samples=index["num_samples"], files=files)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Read one part after the other: tensors by name."""
        return map(_read_part_file, self.files)

    def load(self) -> dict[str, Tensor]:
        """Read all parts into memory: tensors by name; a single output is called `output`."""
        parts = [*self]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def predict(
    model: nn.Module,
    data: Any,
    *,
    folder: Path,
    outputs: Outputs | None,
    update: Update,
    batches_per_part: int,
) -> Predictions:
    """Write the outputs for all batches of a loader."""
    check_range("batches_per_part", batches_per_part, 1, 2**31)
    source = _Source(data, update.parallel.group, is_sharded=is_sharded(model))
    whole = _Folder(folder, update.parallel.group)
    with undisturbed(), evaluating(model), torch.no_grad():
        whole.prepare_folder()
        batches, at = source.batches(), 0
        while True:
            own: list[Batch] = []
            count = 0
            for number, batch in enumerate(islice(batches, batches_per_part), at):
                count += 1
                if source.is_mine(number):
                    with update.numerics.autocast():
                        found = (outputs or _call_model)(model, moved(batch, update.device))
                    own.append(
                        (number, source.rank_in_batch, source.drop_neighbor(_name_outputs(found)))
                    )
            if not count:
                break
            whole.write_next_part(own)
            at += count
        return whole.mark_complete()


class _Source:
    """Loader to predict for, in the order of the samples, divided among the ranks."""

    def __init__(self, data: Any, group: Group, *, is_sharded: bool) -> None:
        self._data = data
        self._group = group
        self._is_split = isinstance(data, Loader) and data.ranks.world_size > 1
        if isinstance(data, Loader | Stream):
            _rewind(data)
        else:
            _check_foreign(data)
        if self._is_split and tuple(data.ranks) != (group.rank, group.world_size):
            raise UsageError("predict: the Loader was made for other ranks than those that predict")
        if is_sharded and not group.is_alone and not self._is_split:
            raise UsageError(_OF_RANKS)

    @property
    def rank_in_batch(self) -> int:
        """Place of this rank's outputs within a batch."""
        return self._group.rank if self._is_split else 0

    def is_mine(self, number: int) -> bool:
        """Whether this rank computes a part of this batch."""
        return self._is_split or number % self._group.world_size == self._group.rank

    def drop_neighbor(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Drop the outputs for a neighbor's sample, of a batch with fewer samples than ranks."""
        if not self._is_split:
            return found
        return {name: value[: self._data.own_samples] for name, value in found.items()}

    def batches(self) -> Iterator[Any]:
        """Iterate over all batches from the beginning of the data."""
        return iter(self._data)


def _rewind(data: Loader | Stream) -> None:
    """Set a Loader or Stream to its first position."""
    state: dict[str, Any] = {**data.state_dict()}
    if state["shuffle"] or {"batches_per_epoch", "num_batches"} & state.keys():
        raise UsageError(_NOT_IN_ORDER)
    if isinstance(data, Stream) and data.ranks.world_size > 1:
        raise UsageError(_OF_RANKS)
    first: dict[str, Any] = {"epoch": 0, "batch": 0}
    if isinstance(data, Stream):
        first |= {"next_worker": 0, "at_end": False, "workers": [None] * len(state["workers"])}
    data.load_state_dict({**state, **first})
    begin: dict[str, Any] = {**data.state_dict()}
    if begin["drop_last"] and (
        isinstance(data, Stream) or begin["num_samples"] % begin["batch_size"]
    ):
        raise UsageError(_DROPS)


def _check_foreign(data: Any) -> None:
    """Raise `UsageError` if a loader, such as torch's, does not give all samples in their order."""
    batches = getattr(data, "batch_sampler", None)
    sampler = getattr(data if batches is None else batches, "sampler", None)
    if hasattr(sampler, "num_replicas"):
        raise UsageError(_OF_RANKS)
    has_order = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    is_sequential = isinstance(sampler, SequentialSampler)
    if isinstance(sampler, RandomSampler) or (has_order and not is_sequential):
        raise UsageError(_NOT_IN_ORDER)
    if getattr(data, "drop_last", False) or getattr(batches, "drop_last", False):
        raise UsageError(_DROPS)


class _Folder:
    """Folder of predictions; the leader writes, after it has gathered the outputs of all ranks."""

    def __init__(self, folder: Path, group: Group) -> None:
        self._folder = folder
        self._group = group
        self._files: list[str] = []
        self._num_samples = 0

    def prepare_folder(self) -> None:
        """Make the folder, which must have no predictions of an earlier call."""
        self._group.from_leader("preparing the folder of predictions", self._clear_folder)

    def _clear_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if found := sorted(path.name for path in self._folder.glob("predictions[-.]*")):
            raise UsageError(
                f"{self._folder}: has predictions of an earlier call, which may be of other data, "
                f"weights or outputs ({some_of(found)}). Open them with Predictions.of, delete "
                "them, or choose another folder"
            )

    def write_next_part(self, own: Sequence[Batch]) -> None:
        """Write the next part from the outputs of all ranks."""
        gathered = self._group.gather_values(list(own))
        batches = sorted(
            (batch for of_rank in gathered for batch in of_rank), key=lambda item: item[:2]
        )
        self._group.from_leader(
            "writing predictions", lambda: self._write([found for _, _, found in batches])
        )

    def _write(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        joined = _join_batches(batches)
        path = self._folder / f"predictions-{len(self._files):05d}.safetensors"
        _write(path, joined, len(self._files))
        self._files.append(path.name)
        self._num_samples += len(next(iter(joined.values())))

    def mark_complete(self) -> Predictions:
        """Record in the folder that all parts are complete."""
        self._group.from_leader("recording that all parts are complete", self._complete)
        return Predictions.of(self._folder)

    def _complete(self) -> None:
        if not self._files:
            raise UsageError("predict: the loader gave no batch")
        index = {"format": 1, "files": self._files, "num_samples": self._num_samples}
        replace_file(self._folder / _INDEX, [json.dumps(index, indent=1).encode()])


def _call_model(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def _name_outputs(found: Any) -> dict[str, Tensor]:
    named = {_ONLY: found} if isinstance(found, Tensor) else found
    if not isinstance(named, Mapping) or not named:
        raise UsageError(
            f"predict: outputs are a {type(found).__name__}: must be a tensor or a dict of "
            "tensors; give outputs=… that makes it of the model and a batch"
        )
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or not value.dim():
            raise UsageError(
                f"predict: output {name!r} must be a tensor with a row for each sample"
            )
    rows = {name: len(value) for name, value in named.items()}
    if len({*rows.values()}) > 1:
        raise UsageError(f"predict: the outputs of a batch differ in their number of rows: {rows}")
    return {name: value.detach().to("cpu") for name, value in named.items()}


def _join_batches(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = {tuple(sorted(found)) for found in batches}
    if len(names) > 1:
        raise UsageError(f"predict: batches give outputs of different names: {sorted(names)}")
    try:
        return {name: torch.cat([found[name] for found in batches]) for name in batches[0]}
    except RuntimeError as error:
        raise UsageError(
            f"predict: outputs of different shapes cannot be joined: {error}"
        ) from error


def _write(path: Path, tensors: Mapping[str, Tensor], number: int) -> None:
    specs = [
        TensorSpec(key=name, dtype=DTYPE_NAMES[value.dtype], shape=tuple(value.shape))
        for name, value in tensors.items()
    ]
    files = lay_out("predictions", specs, first_number=number)
    if len(files) != 1:
        raise UsageError("predict: a part is too large for one file; give fewer batches_per_part")
    file, end = files[0], len(files[0].header)
    pieces: list[Any] = [file.header]
    for spec, start in zip(file.specs, file.starts, strict=True):
        data = tensors[spec.key].contiguous().reshape(-1).view(torch.uint8).numpy()
        pieces += [bytes(start - end), data]
        end = start + spec.nbytes
    pieces.append(bytes(file.nbytes - end))
    replace_file(path, pieces)


def _read_part_file(path: Path) -> dict[str, Tensor]:
    data = bytearray(path.read_bytes())
    found = {}
    header = parse_header(data, file_nbytes=len(data), what=str(path))
    for name, (dtype, shape, start, stop) in header.items():
        tensor = (
            torch.frombuffer(data, dtype=torch.uint8, offset=start, count=stop - start)
            if (stop > start)
            else torch.empty(0, dtype=torch.uint8)
        )
        found[name] = tensor.view(TORCH_DTYPES[dtype]).view(shape)
    return found
