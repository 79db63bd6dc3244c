"""Reads folders of DeepSpeed: ZeRO stages 0 to 3, and universal checkpoints.

The parameters of a group are joined to a flat vector. Stages 1 and 2 divide this vector among the
ranks, stage 3 divides each parameter. The layout follows `zero_to_fp32.py` of DeepSpeed 0.19.
Nothing in a file is run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from holdfast.errors import CorruptData, FormatError, LimitExceeded
from holdfast.format.nodes import SizeTuple
from holdfast.format.tensors import ITEM_NBYTES, TensorSpec
from holdfast.interop.boxes import row_major
from holdfast.interop.files import first_bytes
from holdfast.interop.layouts import ComponentLayout
from holdfast.interop.pickles.parts import TensorLocation, check_claims
from holdfast.interop.pickles.values import PickleBudget, Refusal, Span, Storage, TensorView
from holdfast.interop.sources.dcpchunks import MAX_FILES, FolderFiles, Region, expect_inside
from holdfast.interop.sources.dcpfolder import FileSpan, anchor_spans
from holdfast.interop.sources.torchfile import ConvertedSource, gather_place, read_saved

_LATEST = ("latest", "latest_universal")
_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r".*zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{1,6})_optim_states\.pt")
_PARTS = "single_partition_of_fp32_groups"
_PARTS_OF_STAGE_3 = "fp32_flat_groups"
_OF_MODEL = ("module", "buffer_names", "param_shapes", "shared_params", "lr_scheduler", "optimizer")
_OF_FROZEN = ("frozen_param_shapes", "frozen_param_fragments")
_OWN = (
    *("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size"),
    *("data_sampler", "random_ltd", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("sparse_tensor_module_names", "ds_batch_config", "universal_checkpoint_info"),
)


def recognises(path: Path) -> bool:
    """Whether a folder, or the one that its file `latest` names, has DeepSpeed's model states."""
    return path.is_dir() and any(map(_MODEL.fullmatch, _list_names(_latest_of(path))))


def _latest_of(path: Path) -> Path:
    for name in _LATEST:
        if (path / name).is_file():
            text = first_bytes(path / name, 200).decode(errors="replace").strip()
            if text and "\0" not in text:
                return path / text
    return path


def _list_names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of a flat tensor."""

    view: TensorView
    start: int
    count: int


@dataclass(slots=True, eq=False, kw_only=True)
class _FlatSpan(Span):
    """Stands for the bytes of a tensor that is assembled from pieces."""

    pieces: Sequence[_Piece]


class DeepSpeedFolder(ConvertedSource):
    """A folder of DeepSpeed as components: `model` in float32, `optimizer`, `scheduler`, …"""

    format = "deepspeed"
    _keeps_empty = False

    def __init__(self, path: Path) -> None:
        """Read everything except the tensors."""
        folder = expect_inside(path, _latest_of(path))
        self.url = str(folder)
        names = _list_names(folder)
        slots = sorted(
            one.relative_to(folder).as_posix() for one in (folder / "zero").glob("**/*.pt")
        )
        models = self._order(names, _MODEL, is_joined=bool(slots))
        optimizers = self._order(names, _OPTIMIZER, is_joined=bool(slots))
        files = [*models, *slots, *([] if slots else optimizers)]
        if len(files) > MAX_FILES:
            raise LimitExceeded(f"{folder}: more than {MAX_FILES:,} files")
        self._files = FolderFiles(folder, files)
        self._budget, self._nbytes = PickleBudget(), 0
        with self.closing_on_error():
            read = {name: self._read_file(number) for number, name in enumerate(files)}
            states = [self._expect(read[name], dict, name) for name in models]
            given = (self.url, states, models[0].startswith("zero_pp_rank_"))
            if slots:
                parts: _Parts = _Universal(*given, {name: read[name] for name in slots})
            elif optimizers:
                parts = _Divided(*given, [read[name] for name in optimizers])
            else:
                parts = _Parts(*given)
            self._convert(_make_layout(parts))
            check_claims(self._converted, file_nbytes=self._nbytes, what=self.url)

    def _order(
        self, names: Sequence[str], pattern: re.Pattern[str], *, is_joined: bool
    ) -> list[str]:
        """Return the files of a kind in the order of their ranks, all of which must be there."""
        matches = [match for name in names if (match := pattern.fullmatch(name))]
        if is_joined:  # the parts of tensor parallelism
            matches = [match for match in matches if not int(match[2])]
            names = [match.string for match in matches]
        found = {int(match[1] or 0): match for match in matches}
        others = [name for name in names if name.endswith("_states.pt")]
        known = [name for name in others if _MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name)]
        if len(known) < len(others) or any(int(match[2]) for match in matches):
            raise FormatError(
                f"{self.url}: the model is divided by tensor, pipeline or expert parallelism. "
                "Convert it with DeepSpeed's ds_to_universal, and import the resulting folder"
            )
        if missing := sorted({*range(len(found))} - {*found}):
            raise CorruptData(f"{self.url}: the file of rank {missing[0]} is missing")
        return [found[rank].string for rank in sorted(found)]

    def _expect(self, value: Any, kind: type, name: str) -> Any:
        if not isinstance(value, kind):
            raise FormatError(f"{self.url}: {name} does not hold a {kind.__name__}")
        return value

    def _read_file(self, number: int) -> Any:
        with self._files.open_numbered(number) as file:
            self._nbytes += file.nbytes
            value = read_saved(Region(file, 0, file.nbytes), self._budget)
        anchor_spans([value], number, 0)
        return value

    @override
    def _read_place(
        self, spec: TensorSpec, place: TensorLocation, start: int, memory: memoryview
    ) -> None:
        data = place.data
        if isinstance(data, _FlatSpan):
            self._read_pieces(data.pieces, ITEM_NBYTES[spec.dtype], start, memory)
        elif isinstance(data, FileSpan):
            with self._files.open_numbered(data.file) as file:
                gather_place(file, spec, place, start, memory)
        else:
            gather_place(None, spec, place, start, memory)

    def _read_pieces(
        self, pieces: Sequence[_Piece], item_nbytes: int, start: int, memory: memoryview
    ) -> None:
        at = -start  # of the piece in the memory
        for piece in pieces:
            low, high = max(at, 0), min(at + piece.count * item_nbytes, memory.nbytes)
            if low < high:
                span = piece.view.storage.data
                assert isinstance(span, FileSpan), "checked when it was assembled"
                first = span.start + (piece.view.offset + piece.start) * item_nbytes
                with self._files.open_numbered(span.file) as file:
                    file.read_into(first + low - at, memory[low:high])
            at += piece.count * item_nbytes

    @override
    def close(self) -> None:
        self._files.close_all_files()


class _Parts:
    """Files of a checkpoint without ZeRO: whole weights, and an optimizer in torch's form."""

    def __init__(self, url: str, states: Sequence[Mapping[Any, Any]], is_divided: bool) -> None:
        self.url, self.states = url, states
        self.is_divided = is_divided
        """Whether each rank's file of the model has parts of parameters, as in stage 3."""

    def weights(self) -> dict[str, Any]:
        """Trained parameters by name, whole."""
        return {}

    def optimizer(self) -> Any:
        """The optimizer's state in torch's form; None: there is none."""
        return self.states[0].get("optimizer")

    def frozen(self) -> dict[str, Any]:
        """Frozen parameters of stage 3 by name, whole."""
        found = {}
        for shapes in self._list_shapes("frozen_param_shapes") if self.is_divided else ():
            for name, shape in shapes.items():
                parts = [(one.get("frozen_param_fragments") or {}).get(name) for one in self.states]
                flats = [self._flat(one, f"the frozen {name!r:.100}") for one in parts]
                found[name] = self._join([*_cut(flats, 0, math.prod(shape))], shape, name)
        return found

    def _wrong(self, what: str) -> FormatError:
        return FormatError(f"{self.url}: {what}, which is not a layout of DeepSpeed 0.19")

    def _list_shapes(self, name: str) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of parameters by name, for each group."""
        groups = self.states[0].get(name)
        groups = groups if isinstance(groups, list) else [groups or {}]
        if not all(isinstance(group, dict) for group in groups):
            raise self._wrong(f"a group of {name!r} is not a dict")
        return [
            {str(key): self._dims(shape, key) for key, shape in group.items()} for group in groups
        ]

    def _dims(self, shape: Any, name: Any) -> tuple[int, ...]:
        dims = shape.dims if isinstance(shape, SizeTuple) else shape
        if not isinstance(dims, tuple | list) or any(type(n) is not int or n < 0 for n in dims):
            raise self._wrong(f"the shape of {name!r:.100} is not a list of sizes")
        return tuple(dims)

    def _flat(self, value: Any, what: str) -> TensorView:
        """Expect a vector that lies in a file."""
        if type(value) is not TensorView or len(value.shape) != 1:
            raise self._wrong(f"{what} is not a vector")
        end = value.offset + value.shape[0]
        if (
            (value.strides != (1,) and value.shape[0] > 1)
            or end * ITEM_NBYTES[value.dtype] > value.storage.nbytes
            or not isinstance(value.storage.data, FileSpan)
        ):
            raise self._wrong(f"{what} is not contiguous in its file")
        return value

    def _join(self, pieces: Sequence[_Piece], shape: tuple[int, ...], name: str) -> TensorView:
        """Return the tensor that pieces are, one after the other."""
        kinds = {piece.view.dtype for piece in pieces}
        count = sum(piece.count for piece in pieces)
        if count != math.prod(shape) or len(kinds) > 1:
            raise CorruptData(
                f"{self.url}: {name!r:.200}: its parts have {count:,} elements of {sorted(kinds)}, "
                f"expected {math.prod(shape):,} of one dtype"
            )
        dtype = kinds.pop() if kinds else "F32"
        nbytes, start = math.prod(shape) * ITEM_NBYTES[dtype], 0
        if pieces:
            first = pieces[0].view.storage.data
            assert isinstance(first, FileSpan), "checked when it was found"
            start = (first.file << 48) + first.start + pieces[0].start
        storage = Storage(
            dtype, "cpu", nbytes, _FlatSpan(start=start, nbytes=nbytes, pieces=pieces)
        )
        return TensorView(storage, dtype, 0, shape, row_major(shape))


class _Divided(_Parts):
    """Files that the ranks of ZeRO 1 to 3 have written."""

    def __init__(
        self, url: str, states: Sequence[Mapping[Any, Any]], is_divided: bool, files: Sequence[Any]
    ) -> None:
        super().__init__(url, states, is_divided)
        found = [
            one.get("optimizer_state_dict") if isinstance(one, dict) else None for one in files
        ]
        if not all(isinstance(one, dict) for one in found):
            raise self._wrong("a file of optimizer states has no 'optimizer_state_dict'")
        self._ranks: list[dict[Any, Any]] = [one for one in found if isinstance(one, dict)]
        self._is_stage_3 = _PARTS_OF_STAGE_3 in self._ranks[0]
        count = self._ranks[0].get("partition_count")
        expected = max(count, default=0) if isinstance(count, list) else count
        if expected != len(files):
            raise CorruptData(
                f"{url}: {expected} ranks saved, but {len(files)} files have optimizer states"
            )
        self._shapes = self._list_shapes("param_shapes")

    @override
    def weights(self) -> dict[str, Any]:
        key = _PARTS_OF_STAGE_3 if self._is_stage_3 else _PARTS
        groups = [rank.get(key) for rank in self._ranks]
        if not all(isinstance(one, list) and len(one) == len(self._shapes) for one in groups):
            raise self._wrong(f"{key!r} and 'param_shapes' have different groups")
        found: dict[str, Any] = {}
        for number in range(len(self._shapes)):
            found |= self._divide([one[number] for one in groups if one], number, key)
        return found

    def _divide(self, vectors: Sequence[Any], number: int, what: str) -> dict[str, TensorView]:
        """Return the parameters of a group, or slots of them, from the vectors of all ranks."""
        flats = [self._flat(one, f"{what} {number}") for one in vectors]
        paddings = self._ranks[0].get("param_alignment_paddings")
        gaps: list[Any] = [0] * len(self._shapes[number])
        if isinstance(paddings, list) and paddings:
            gaps = paddings[number] if number < len(paddings) else []
        if len(gaps) != len(self._shapes[number]) or any(type(n) is not int or n < 0 for n in gaps):
            raise self._wrong("'param_alignment_paddings' does not match 'param_shapes'")
        found, at = {}, 0
        for (name, shape), gap in zip(self._shapes[number].items(), gaps, strict=True):
            numel = math.prod(shape)
            if self._is_stage_3:
                own = -(-numel // len(flats))
                pieces = [
                    _Piece(flat, at, max(min(own, numel - rank * own, flat.shape[0] - at), 0))
                    for rank, flat in enumerate(flats)
                ]
                at += own
            else:
                pieces = [*_cut(flats, at, numel)]
                at += numel + gap
            found[name] = self._join([one for one in pieces if one.count], shape, name)
        return found

    @override
    def optimizer(self) -> Any:
        key = "optimizer_state_dict" if self._is_stage_3 else "base_optimizer_state"
        bases = [rank.get(key) for rank in self._ranks]
        states = [base.get("state") if isinstance(base, dict) else None for base in bases]
        if not all(isinstance(one, dict) for one in states):
            why = "saved with elastic_checkpoint, without parameter groups"
            return Refusal(why, is_tensor=True)
        slots: dict[str, dict[Any, Any]] = {}
        for number, shapes in enumerate(self._shapes):
            of_group = [one.get(number) or {} for one in states if one is not None]
            for slot, value in of_group[0].items():
                if type(value) is not TensorView or len(value.shape) != 1 or slot == "step":
                    found: Mapping[str, Any] = dict.fromkeys(shapes, value)
                else:
                    found = self._divide([one.get(slot) for one in of_group], number, str(slot))
                for name, one in found.items():
                    slots.setdefault(name, {})[slot] = one
        assert isinstance(bases[0], dict), "checked above"
        return _name_groups(bases[0].get("param_groups"), [[*one] for one in self._shapes], slots)


class _Universal(_Parts):
    """Files of `ds_to_universal`: one for each parameter and slot."""

    def __init__(
        self,
        url: str,
        states: Sequence[Mapping[Any, Any]],
        is_divided: bool,
        files: Mapping[str, Any],
    ) -> None:
        super().__init__(url, states, is_divided)
        self._slots: dict[str, dict[str, Any]] = {}
        self._base = files.get("zero/optimizer_state.pt")
        for name, value in files.items():
            folder, _, slot = name.removeprefix("zero/").removesuffix(".pt").rpartition("/")
            if folder:
                held = value.get("param") if isinstance(value, dict) else value
                self._slots.setdefault(folder, {})[slot] = held
        groups = self._list_shapes("param_shapes")
        self._names = [[*group] for group in groups]
        for name, shape in (item for group in groups for item in group.items()):
            for slot, held in self._slots.get(name, {}).items():
                if type(held) is TensorView and held.shape == (math.prod(shape),):
                    self._slots[name][slot] = replace(
                        self._flat(held, f"{slot} of {name!r:.100}"),
                        shape=shape,
                        strides=row_major(shape),
                    )
        lost = [name for names in self._names for name in names if name not in self._slots]
        if lost:
            raise CorruptData(f"{url}: the files of the parameter {lost[0]!r:.200} are missing")

    @override
    def weights(self) -> dict[str, Any]:
        return {name: slots.get("fp32") for name, slots in self._slots.items()}

    @override
    def optimizer(self) -> Any:
        base = self._base if isinstance(self._base, dict) else {}
        inner = base.get("optimizer_state_dict", base.get("base_optimizer_state", base))
        groups = inner.get("param_groups") if isinstance(inner, dict) else None
        steps = (inner.get("state") or {}) if isinstance(inner, dict) else {}
        slots: dict[str, dict[Any, Any]] = {}
        for number, names in enumerate(self._names):
            shared = steps.get(number) if isinstance(steps, dict) else None
            step = {"step": shared["step"]} if isinstance(shared, dict) and "step" in shared else {}
            for name in names:
                own = {key: one for key, one in self._slots[name].items() if key != "fp32"}
                slots[name] = {**step, **own}
        return _name_groups(groups, self._names, slots)


def _cut(flats: Sequence[TensorView], start: int, count: int) -> Iterator[_Piece]:
    """Yield the elements from `start` on of vectors that follow each other."""
    for flat in flats:
        size = flat.shape[0]
        taken = max(min(size - start, count), 0)
        if taken:
            yield _Piece(flat, start, taken)
            count -= taken
            start = size
        start -= size


def _name_groups(
    groups: Any, names: Sequence[Sequence[str]], slots: Mapping[str, Mapping[Any, Any]]
) -> Any:
    """Return an optimizer in torch's form, whose groups have the names of parameters."""
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return Refusal("it has no 'param_groups'", is_tensor=True)
    numbers = {name: number for number, name in enumerate(one for each in names for one in each)}
    named = []
    for group in groups:
        held = group.get("params")
        if not isinstance(held, list) or any(
            type(one) is not int or not 0 <= one < len(names) for one in held
        ):
            return Refusal("its parameter groups do not match the model's", is_tensor=True)
        own = [name for one in held for name in names[one]]
        named.append({**group, "params": [numbers[name] for name in own], "param_names": own})
    return {"state": {numbers[name]: one for name, one in slots.items()}, "param_groups": named}


def _make_layout(parts: _Parts) -> ComponentLayout:
    state = parts.states[0]
    module = state.get("module")
    if not isinstance(module, dict):
        raise FormatError(f"{parts.url}: the file of model states has no dict 'module'")
    weights = {**parts.frozen(), **parts.weights()}
    shared = state.get("shared_params")
    owners = shared if isinstance(shared, dict) else {}
    buffers = state.get("buffer_names")
    model: dict[Any, Any] = {}
    for name, value in module.items():
        found = weights.get(str(owners.get(name, name)))
        if found is None and parts.is_divided and name not in (buffers or ()):
            found = Refusal("no file has its parts", is_tensor=True)
        model[name] = value if found is None else found
    model |= {name: one for name, one in weights.items() if name not in model}
    known = {*_OF_MODEL, *_OF_FROZEN, *_OWN}
    step = state.get("global_steps")
    components = {
        "model": model,
        "optimizer": parts.optimizer(),
        "scheduler": state.get("lr_scheduler"),
        "trainer": {name: state[name] for name in _OWN if state.get(name) is not None},
        "state": {name: one for name, one in state.items() if name not in known},
    }
    return ComponentLayout(
        format="deepspeed",
        components={name: one for name, one in components.items() if one},
        step=step if type(step) is int and step >= 0 else None,
        kinds={"model": "module"},
    )
