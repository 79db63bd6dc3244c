"""Exports a source in another library's format: planned first, then whole or not at all."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from holdfast.arguments import check_arguments
from holdfast.errors import StoreError, UsageError, listing
from holdfast.format.nodes import ArrayRef, SubclassRef
from holdfast.interop.exporting.files import (
    ExportPlan,
    PlannedFile,
    expect_free,
    write_plan,
)
from holdfast.interop.exporting.merging import (
    CONFIG,
    DEFAULT,
    PREFIX,
    WEIGHTS,
    WRAPPERS,
    list_adapters,
    match_names,
    parse_config,
    select_adapter,
)
from holdfast.interop.exporting.weights import (
    SINGLE,
    Dtype,
    DtypeCast,
    ExportedTensors,
    Report,
    bytes_file,
    model_of,
    plan_safetensors,
    weights_of,
)
from holdfast.interop.opening import open_source
from holdfast.interop.renaming import RenameRules
from holdfast.interop.source import (
    LeftOut,
    Source,
    SourceComponent,
    expect_no_loss,
    lost_parameters,
    read_pieces,
)
from holdfast.interop.sources.huggingface import FILES
from holdfast.state.optimizers import TRAINING_WEIGHTS, find_modes

Form: TypeAlias = Literal["hf", "peft", "safetensors", "pt"]
SHARD_NBYTES = 5_000_000_000
"""Most bytes of a file of weights in a folder of a model, as transformers has it."""
_OF_WEIGHTS = ("hf", "peft", "safetensors")
_OF_FOLDERS = ("hf", "peft")

Progress: TypeAlias = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export: format, components, names and files."""

    to: Form
    components: Sequence[str] = ()
    """Components to write; empty: all that the format can hold."""
    rename: RenameRules
    """Rules for the names in the model."""
    configs: Sequence[Path] = ()
    """Files, or folders of them, that are copied beside the weights."""
    adapter: str | None = None
    """The adapter of a PEFT model to write or merge; None: all, or the only one."""
    base: Source | None = None
    """Weights of the base, of which the checkpoint has only digests."""
    dtype: Dtype | None = None
    """Type to which floats of the model are cast; None: they stay."""
    shard_nbytes: int | None = None
    """Largest size of a file of weights; None: the default of the format."""
    allow_loss: bool = False
    """Leave out weights whose names cannot be used; False: they are an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Result of an export, which is whole and durable."""

    path: str
    """The file or folder."""
    nbytes: int
    """Bytes of its files, small headers left out."""
    left_out: Sequence[LeftOut]
    """Parts of the source that the export leaves out."""
    notes: Sequence[str]
    """Values in another form than in the source."""


class Export:
    """A planned export: `plan` says what will be written, `write_files` writes it."""

    def __init__(
        self, source: Source, options: ExportOptions, progress: Progress | None = None
    ) -> None:
        """Plan without reading a tensor, but for the few inside generators."""
        self._source = source
        self._options = options
        self._progress = progress
        self._cast = DtypeCast()
        self._num_done = 0
        self.names: Collection[str] = ()
        """Names of the weights in a file of `safetensors`; empty for the other forms."""
        _refuse_unused_options(options)
        expect_no_loss(
            source,
            options.components,
            allow_loss=options.allow_loss,
            needs_frozen=options.to != "peft" and options.base is None,
        )
        self._is_merged = False
        if options.to == "hf":
            source = self._source = self._merge_source(source)
        lost = lost_parameters(source, options.components)
        self.plan = ExportPlan(files=[], left_out=[*source.left_out, *lost])
        if options.to in _OF_WEIGHTS:
            self.plan.files = self._with_weights()
            if any(True in find_modes(part.tree) for part in source.parts.values()):
                self.plan.notes.append(TRAINING_WEIGHTS)
        else:
            self.plan.files = [self._torch_file()]

    def write_files(self, out: Path) -> Exported:
        """Write the files; `out`, which must not exist, appears when it is whole and durable."""
        write_plan(self.plan, out)
        plan = self.plan
        if self._cast.num_overflows:
            plan.notes.append(
                f"values too large for {self._options.dtype}, which became infinite: "
                f"{self._cast.num_overflows:,}"
            )
        return Exported(
            path=os.fspath(out), nbytes=plan.nbytes, left_out=plan.left_out, notes=plan.notes
        )

    def _report_progress(self, nbytes: int) -> None:
        self._num_done += nbytes
        if self._progress is not None:
            self._progress("export", self._num_done, self.plan.nbytes)

    def _with_weights(self) -> list[PlannedFile]:
        options, plan, source = self._options, self.plan, self._source
        component = model_of(source, options.components)
        weights = weights_of(
            source,
            component,
            rename=options.rename,
            dtype=options.dtype,
            left_out=plan.left_out,
        )
        if options.to == "safetensors":
            self.names = [one.name for one in weights.tensors]
            return self._plan_safetensors(weights)
        if options.to == "peft":
            return self._plan_adapters(weights)
        files = plan_model(
            source,
            weights,
            plan,
            configs=options.configs,
            dtype=options.dtype,
            shard_nbytes=options.shard_nbytes or SHARD_NBYTES,
            cast=self._cast,
            report=self._report_progress,
            without={CONFIG} if self._is_merged else (),
        )
        self._leave({component, FILES}, "a folder of a model holds only its weights")
        return files

    def _merge_source(self, source: Source) -> Source:
        """Return the source with its adapter merged, and with the base that it lacks."""
        options = self._options
        component = model_of(source, options.components)
        part = source.parts[component]
        _refuse_subclasses(source, component)
        if options.base is not None and not part.frozen:
            raise UsageError(f"--base: does nothing, as {source.url} has all weights")
        name: str | None = None
        config: Mapping[str, Any] = {}
        leaves = part.leaves
        self._is_merged = bool(match_names(leaves)) and any(
            wrapper in path for path in (*leaves, *part.frozen) for wrapper in WRAPPERS
        )
        if self._is_merged or options.adapter is not None:
            found = weights_of(source, component, rename=RenameRules(), dtype=None, left_out=[])
            name, *others = list_adapters(found, options.adapter, where=source.url)
            if others:
                has = ", ".join((name, *others))
                raise UsageError(f"{source.url}: has adapters {has}; name one with --adapter")
            config = self._find_config(source, name)
        elif options.base is None:
            return source
        # Inside, as it imports torch.
        from holdfast.interop.exporting.merging import MergedSource

        return MergedSource(source, component, base=options.base, adapter=name, config=config)

    def _find_config(self, source: Source, name: str) -> Mapping[str, Any]:
        below = [path / name for path in self._options.configs]
        found = [*self._options.configs, *(path for path in below if path.is_dir())]
        config = _list_beside(source, found, ExportPlan(files=[])).get(CONFIG)
        return parse_config(None if config is None else _read_planned(config), name)

    def _plan_safetensors(self, weights: ExportedTensors) -> list[PlannedFile]:
        self._leave({weights.component}, "the file holds the weights of one component")
        shard_nbytes = self._options.shard_nbytes
        plan = self.plan
        plan.notes += [
            f"{alias}: tied to {kept}, under which it is written: load by load_model of "
            "safetensors or with strict=False, or export --to hf"
            for alias, kept in weights.aliases.items()
        ]
        return plan_safetensors(
            self._source,
            weights,
            shard_nbytes=shard_nbytes,
            single="" if shard_nbytes is None else SINGLE,
            cast=self._cast,
            report=self._report_progress,
        )

    def _plan_adapters(self, weights: ExportedTensors) -> list[PlannedFile]:
        """Plan a folder for one adapter, or PEFT's folders for several."""
        # What the base model holds is not of the adapter, and no loss.
        self.plan.left_out.clear()
        names = list_adapters(weights, self._options.adapter, where=self._source.url)
        self._leave({weights.component, FILES}, "a folder of an adapter holds only its weights")
        configs = self._options.configs
        if len(names) == 1:
            below = [path / names[0] for path in configs]
            found = [*configs, *(path for path in below if path.is_dir())]
            beside = _list_beside(self._source, found, self.plan)
            return self._plan_adapter(weights, names[0], beside)
        wrong = [name for name in names if not _is_plain_name(name)]
        if wrong:
            raise UsageError(f"adapters {wrong} cannot name folders; choose one with --adapter")
        beside = _list_beside(self._source, configs, self.plan)
        left = [one for one in self.plan.left_out if Path(one.path).name not in names]
        self.plan.left_out[:] = left
        files = [*beside.values()] if DEFAULT not in names else []
        for name in names:
            if name == DEFAULT:
                files += self._plan_adapter(weights, name, beside)
                continue
            below = [path / name for path in configs if (path / name).is_dir()]
            own = _list_configs(below, self.plan)
            files += [
                replace(one, name=f"{name}/{one.name}")
                for one in self._plan_adapter(weights, name, own)
            ]
        return files

    def _plan_adapter(
        self, weights: ExportedTensors, name: str, beside: Mapping[str, PlannedFile]
    ) -> list[PlannedFile]:
        config = beside.get(CONFIG)
        found = parse_config(None if config is None else _read_planned(config), name)
        files = plan_safetensors(
            self._source,
            select_adapter(weights, name, found),
            shard_nbytes=None,
            single=WEIGHTS,
            cast=self._cast,
            report=self._report_progress,
        )
        return [*files, *beside.values()]

    def _leave(self, written: Collection[str], why: str) -> None:
        self.plan.left_out += [
            LeftOut(path=name, why=why) for name in self._source.parts if name not in written
        ]

    def _torch_file(self) -> PlannedFile:
        # Inside, as they import torch, which takes longer than a small export of weights.
        from holdfast.interop.exporting.torchfile import Values, plan_torch_file

        source = self._source
        values = Values(source, self.plan.notes)
        for name in self._options.components:
            source.get_component(name)
        names = [*self._options.components] or [*source.parts]
        self._leave(names, "not among the components asked for")
        made = {name: values.read_component(name) for name in names}
        value = made[names[0]] if len(names) == 1 else made
        return plan_torch_file(source, "", value, self._report_progress)


def _refuse_subclasses(source: Source, component: str) -> None:
    """Refuse quantized weights, whose inner tensors `from_pretrained` would not find."""
    tree = source.parts[component].tree
    nodes = tree.items() if isinstance(tree, Mapping) else ()
    kinds = {name: node.type for name, node in nodes if isinstance(node, SubclassRef)}
    if kinds:
        raise UsageError(
            f"{source.url}: transformers cannot read the inner tensors of quantized weights. "
            "Dequantize the model, or use --to safetensors:\n"
            + listing([f"{name}: {kind}" for name, kind in kinds.items()])
        )


def _refuse_unused_options(options: ExportOptions) -> None:
    """Refuse options that would do nothing in this form."""
    to = options.to
    unused = {
        "--map": bool(options.rename) and to not in _OF_WEIGHTS,
        "--config": bool(options.configs) and to not in _OF_FOLDERS,
        "--adapter": options.adapter is not None and to not in _OF_FOLDERS,
        "--base": options.base is not None and to != "hf",
        "--dtype": options.dtype is not None and to not in _OF_WEIGHTS,
        "--shard-size": options.shard_nbytes is not None and to not in ("hf", "safetensors"),
    }
    wrong = [name for name, is_unused in unused.items() if is_unused]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: does nothing with --to {to}")
    if options.shard_nbytes is not None and options.shard_nbytes < 1:
        raise UsageError(f"--shard-size: {options.shard_nbytes} bytes; must be at least 1")


@check_arguments()
def export_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: Form,
    components: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    config: str | os.PathLike[str] | None = None,
    adapter: str | None = None,
    base: str | os.PathLike[str] | None = None,
    dtype: Dtype | None = None,
    shard_nbytes: int | None = None,
    allow_loss: bool = False,
    trust: bool = False,
) -> Exported:
    """Write a checkpoint, or a file of weights of any known format, in another library's format.

    `to`: `hf` (a folder for `from_pretrained`), `peft` (all LoRA adapters, or the one called
    `adapter`, for `PeftModel.from_pretrained`), `safetensors`, `pt` (for `torch.load`).
    `components` are the ones to write, `rename` maps patterns of the names in the model to new
    names, `config` is a file or a folder of files to copy, `dtype` is the dtype for floats.
    With `hf`, a LoRA adapter is merged into the weights of `base`, or into those of the checkpoint.
    `out` must not exist; it appears when it is whole. Keeps a few pieces in memory.
    `allow_loss` skips tensors that cannot be read or named; without it they are an error. `trust`
    lifts the bounds on the number of values in a file of another library.

    Raises:
        NoCheckpoint: nothing exists at `source`.
        FormatError: it is in no known format, or damaged.
        UsageError: `out` exists, or an option fits nothing.
        StoreError: a file cannot be read or written.
    """
    expect_free(Path(out))
    with ExitStack() as stack:
        opened = stack.enter_context(open_source(os.fspath(source), trust=trust))
        options = ExportOptions(
            to=to,
            components=[*components],
            rename=RenameRules((rename or {}).items()),
            configs=[] if config is None else [Path(config)],
            adapter=adapter,
            base=None
            if base is None
            else stack.enter_context(open_source(os.fspath(base), trust=trust)),
            dtype=dtype,
            shard_nbytes=shard_nbytes,
            allow_loss=allow_loss,
        )
        return Export(opened, options).write_files(Path(out))


_CONFIG = "config.json"
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
    without: Collection[str] = (),
) -> list[PlannedFile]:
    """Plan the folder of a model, which `from_pretrained` reads: weights, config and tokenizer."""
    names = (one.name for one in weights.tensors)
    wrapped = next((name for name in names if name.startswith(PREFIX)), None)
    if wrapped is not None:
        raise UsageError(
            f"{source.url}: {weights.component} is a PEFT model ({wrapped}): write its adapter "
            "with --to peft, or the merged model with model.merge_and_unload().save_pretrained(…)"
        )
    found = _list_beside(source, configs, plan)
    beside = {name: file for name, file in found.items() if name not in without}
    if _CONFIG not in beside and without:
        raise UsageError(
            f"{source.url}: the merged model needs the {_CONFIG} of its base: pass --config FOLDER "
            "of the base, too, or write the adapter with --to peft"
        )
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


def _list_beside(
    source: Source, configs: Sequence[Path], plan: ExportPlan
) -> dict[str, PlannedFile]:
    found: dict[str, PlannedFile] = {}
    part = source.parts.get(FILES)
    if part is not None and isinstance(part.tree, Mapping):
        for name, ref in part.tree.items():
            if _is_plain_name(name) and isinstance(ref, ArrayRef):
                found[name] = _carried(source, part, name, ref.key)
            else:
                plan.left_out.append(LeftOut(path=f"{FILES}.{name}", why="no name of a file"))
    return dict(sorted((found | _list_configs(configs, plan)).items()))


def _list_configs(configs: Sequence[Path], plan: ExportPlan) -> dict[str, PlannedFile]:
    found: dict[str, PlannedFile] = {}
    for path in configs:
        for one in _files_of(path):
            why = _why_left(one)
            if why is None:
                found[one.name] = bytes_file(one.name, _read_file_bytes(one))
            else:
                plan.left_out.append(LeftOut(path=str(one), why=why))
    return found


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


def _read_planned(file: PlannedFile) -> bytes:
    text = io.BytesIO()
    file.write(text)
    return text.getvalue()


def _with_dtype(config: PlannedFile, name: str) -> bytes:
    """Return a config that tells the dtype to which the weights are cast, as loading follows it."""
    try:
        found = json.loads(_read_planned(config))
    except ValueError as error:
        raise UsageError(f"{config.name}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{config.name}: not an object")
    named = [key for key in ("dtype", "torch_dtype") if key in found] or ["dtype"]
    return (json.dumps(found | dict.fromkeys(named, name), indent=2) + "\n").encode()
