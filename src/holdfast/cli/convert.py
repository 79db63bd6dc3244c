"""`holdfast import` and `export`: convert checkpoints from and to other libraries."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import msgspec

from holdfast.cli import options
from holdfast.cli.options import PATH, argument, command, flag, option, several
from holdfast.cli.output import Answer, TextTable, format_nbytes, progress_bar
from holdfast.cli.sources import is_foreign, limited, open_named
from holdfast.cli.target import named_keys, open_root_store, open_target, read_entry
from holdfast.errors import UsageError
from holdfast.events import url_without_secrets
from holdfast.interop.source import LeftOut, expect_no_loss

if TYPE_CHECKING:
    from holdfast.interop.exporting.export import Form
    from holdfast.interop.exporting.weights import Dtype
    from holdfast.interop.importing import ImportPlan

_SHOWN = 20
_DCP = ".metadata"
_AVERAGED = "n_averaged"
"""Buffer of torch's AveragedModel, whose other names begin with module."""
_WRAPPERS = frozenset({"module", "_orig_mod"})
_STATE = ("optimizer", "scheduler", "data", "rng", "trainer")
"""Usual names of components that are no modules."""


class Component(msgspec.Struct, frozen=True):
    """A component that is converted."""

    name: str
    """Its name in the checkpoint."""
    kind: str
    """What its tree is: `module`, `optimizer`, `object`, `tree`, `generator` or `rng`."""
    num_tensors: int
    """Number of its tensors."""
    nbytes: int
    """Bytes of its tensors."""


class ImportAnswer(msgspec.Struct, frozen=True):
    """Answer of `holdfast import`."""

    root: str
    """The root that got the checkpoint."""
    folder: str | None
    """The checkpoint's folder; null for a dry run."""
    step: int
    """Completed steps."""
    path: str
    """What was imported."""
    format: str
    """The format that it was recognised as."""
    components: list[Component]
    """What was taken."""
    left_out: Sequence[LeftOut] = ()
    """What the source holds and the checkpoint does not, with the reason."""
    notes: Sequence[str] = ()
    """What to know about what was taken."""
    dry_run: bool = False
    """Whether nothing was written."""


class OutputFile(msgspec.Struct, frozen=True):
    """A file of an export."""

    name: str
    """Its name in the folder; empty where the export is one file."""
    nbytes: int
    """Its bytes; of a file of torch without the headers of its records."""


class ExportAnswer(msgspec.Struct, frozen=True):
    """Answer of `holdfast export`."""

    source: str
    """The checkpoint or file that was exported."""
    step: int | None
    """Completed steps, if the source tells."""
    path: str
    """The file or folder that was written."""
    to: str
    """Its form."""
    files: list[OutputFile]
    """What was written."""
    left_out: Sequence[LeftOut] = ()
    """What the source holds and the export does not, with the reason."""
    notes: Sequence[str] = ()
    """What is in another form than in the source."""
    dry_run: bool = False
    """Whether nothing was written."""


_RULES = several(
    "--map", "rules", "OLD=NEW", "Rename tensors by patterns; or a file with one rule per line."
)
_ALLOW_LOSS = flag("--allow-loss", "Skip tensors that cannot be read or named, instead of failing.")
_UNSAFE_PICKLE = flag(
    "--unsafe-pickle", "For DCP: allow values that can only be pickled. Loading them runs code."
)


@command(
    "import",
    argument("source", "SOURCE", "A file or folder of another library, or ROOT@WHICH."),
    options.root,
    option(
        "--step",
        "N",
        "Step of the new checkpoint. [default: the step in the source]",
        type=click.IntRange(min=0),
    ),
    option("--label", "TEXT", "Label of the new checkpoint. [default: from the step]"),
    _RULES,
    options.components,
    option(
        "--optimizer",
        "CLASS",
        "Class of the optimizer, such as AdamW, if the source does not record it.",
    ),
    option(
        "--parameters",
        "FILE",
        "File with the names of the model's parameters in order, one per line.",
        type=PATH,
    ),
    _ALLOW_LOSS,
    options.dry_run,
    _UNSAFE_PICKLE,
    options.trust,
    answer=ImportAnswer,
    wrap=limited("source"),
)
def import_source(
    source: str,
    root: str,
    *,
    step: int | None,
    label: str | None,
    rules: Sequence[str],
    components: Sequence[str],
    optimizer: str | None,
    parameters: Path | None,
    allow_loss: bool,
    dry_run: bool,
    unsafe_pickle: bool,
) -> Answer:
    """Save a file or folder of another library as a new checkpoint.

    No code in the file runs. The file is read in a child process with at most 2 GiB of memory. The
    output lists which values were skipped, and why.
    """
    if (Path(source) / _DCP).is_file() and not (
        rules or components or optimizer or parameters or dry_run or allow_loss or named_keys()
    ):
        return _import_dcp(source, root, step=step, label=label, unsafe_pickle=unsafe_pickle)
    if unsafe_pickle:
        raise UsageError("--unsafe-pickle: only a folder of DCP can be imported with its pickles")
    from holdfast.interop.importing import commit_import, plan_import, step_of
    from holdfast.interop.renaming import read_rules

    with open_named(source) as found:
        plan = plan_import(
            found,
            components=components,
            rename=read_rules(rules),
            optimizer=optimizer,
            parameters=_names_in(parameters),
            allow_loss=allow_loss,
        )
        at = step_of(plan, step)
        if dry_run:
            return _build_import_answer(plan, source, root=root, folder=None, step=at)
        open_root_store(root)
        with progress_bar() as report:
            made = commit_import(
                plan, root, step=at, label=label, encrypt=named_keys(), report=report
            )
        return _build_import_answer(plan, source, root=made.root, folder=made.folder, step=at)


def _import_dcp(
    folder: str, root: str, *, step: int | None, label: str | None, unsafe_pickle: bool
) -> Answer:
    """Import a DCP folder, with the names that an export to DCP needs again."""
    from holdfast.interop.dcp import import_folder

    if step is None:
        raise UsageError(f"{folder}: a folder of DCP has no step; pass one: --step N")
    store = open_root_store(root)
    made = import_folder(folder, root, step=step, label=label, unsafe_pickle=unsafe_pickle)
    manifest = read_entry(store, made.folder).manifest
    document = ImportAnswer(
        root=made.root,
        folder=made.folder,
        step=step,
        path=folder,
        format="dcp",
        components=[
            Component(name=name, kind=one.kind, num_tensors=one.num_tensors, nbytes=one.nbytes)
            for name, one in manifest.components.items()
        ],
    )
    first = f"{made.folder}: {format_nbytes(made.nbytes)} from {folder} (dcp)"
    return Answer(document=document, parts=[first])


def _names_in(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--parameters {path}: cannot be read: {error}") from error


def _build_import_answer(
    plan: ImportPlan, source: str, *, root: str, folder: str | None, step: int
) -> Answer:
    components = [
        Component(name=name, kind=one.kind, num_tensors=len(one.specs), nbytes=one.nbytes)
        for name, one in plan.taken.items()
    ]
    document = ImportAnswer(
        root=root,
        folder=folder,
        step=step,
        path=url_without_secrets(source),
        format=plan.source.format,
        components=components,
        left_out=plan.left_out,
        notes=plan.notes,
        dry_run=folder is None,
    )
    done = f"{folder}: " if folder else f"would be step {step} of {root}: "
    origin = f"{url_without_secrets(source)} ({plan.source.format})"
    first = f"{done}{format_nbytes(plan.nbytes)} from {origin}"
    return Answer(
        document=document,
        parts=[first, format_components(components), *plan.notes, *lines_left_out(plan.left_out)],
    )


@command(
    "export",
    argument(
        "target", "ROOT[@WHICH]", f"{options.WHICH} Also a file or folder of another library."
    ),
    argument("output", "OUT", "A new file or folder."),
    option(
        "--to",
        None,
        "Format to write.",
        type=click.Choice(["hf", "peft", "safetensors", "pt", "dcp"]),
        required=True,
    ),
    options.components,
    _RULES,
    several(
        "--config",
        "configs",
        "PATH",
        "Also copy this file, or the files in this folder.",
        type=PATH,
    ),
    option(
        "--adapter", "NAME", "Name of the adapter. [default: all for peft; the only one for hf]"
    ),
    option("--base", "PATH", "Weights that the checkpoint has only as digests, for hf."),
    option(
        "--dtype",
        None,
        "Cast floating-point tensors of the model to this type.",
        type=click.Choice(["f32", "f16", "bf16"]),
    ),
    option(
        "--shard-size", "SIZE", "Split the weights into files of at most this size, such as 5GB."
    ),
    _ALLOW_LOSS,
    options.dry_run,
    _UNSAFE_PICKLE,
    options.trust,
    answer=ExportAnswer,
    wrap=limited("target"),
)
def export_checkpoint(
    target: str,
    output: str,
    *,
    to: str,
    components: Sequence[str],
    rules: Sequence[str],
    configs: Sequence[Path],
    adapter: str | None,
    base: str | None,
    dtype: Dtype | None,
    shard_size: str | None,
    allow_loss: bool,
    dry_run: bool,
    unsafe_pickle: bool,
) -> Answer:
    """Write a checkpoint in the format of another library.

    hf is a folder for from_pretrained, peft one for PeftModel.from_pretrained, safetensors a file
    (a folder with --shard-size), pt a file for torch.load, and dcp a folder for PyTorch Distributed
    Checkpoint. hf merges a LoRA adapter; this and peft need --config with the adapter_config.json.
    Without @WHICH, the latest.
    --component is by default model, or the only module. The output lists which values were skipped
    or converted.
    """
    from holdfast.interop.exporting.files import expect_free

    out = Path(output)
    expect_free(out)
    if to == "dcp":
        if components or rules or configs or adapter or base or dtype or shard_size or dry_run:
            raise UsageError("--to dcp: writes the whole checkpoint and takes no other option")
        if not is_foreign(target):
            return _export_dcp(target, out, unsafe_pickle=unsafe_pickle)
        if unsafe_pickle:
            raise UsageError("--unsafe-pickle only applies to a checkpoint of a root")
        return _export_file_to_dcp(target, out, allow_loss=allow_loss)
    if unsafe_pickle:
        raise UsageError("--unsafe-pickle only applies to --to dcp")
    from holdfast.interop.exporting.export import Export, ExportOptions
    from holdfast.interop.renaming import read_rules

    with (
        open_named(target) as source,
        nullcontext() if base is None else open_named(base) as opened,
        progress_bar() as report,
    ):
        options = ExportOptions(
            to=cast("Form", to),
            components=components,
            rename=read_rules(rules),
            configs=configs,
            adapter=adapter,
            base=opened,
            dtype=dtype,
            shard_nbytes=None if shard_size is None else nbytes_of(shard_size),
            allow_loss=allow_loss,
        )
        export = Export(source, options, report)
        if not dry_run:
            export.write_files(out)
        plan = export.plan
        is_one_file = to == "safetensors" and not (shard_size or dry_run)
        document = ExportAnswer(
            source=source.url,
            step=source.step,
            path=output,
            to=to,
            files=[OutputFile(name=file.name, nbytes=file.nbytes) for file in plan.files],
            left_out=plan.left_out,
            notes=plan.notes,
            dry_run=dry_run,
        )
    loading = [_loading(output, components, export.names)] if is_one_file else []
    if to == "peft":
        loading = [_loading_adapters(out, [file.name for file in plan.files])]
    return _build_export_answer(document, plan.nbytes, target, loading)


def _build_export_answer(
    document: ExportAnswer, nbytes: int, origin: str, loading: Sequence[str] = ()
) -> Answer:
    done = "would be " if document.dry_run else ""
    is_shown = document.to != "dcp" and len(document.files) > 1
    return Answer(
        document=document,
        parts=[
            f"{document.path}: {done}{format_nbytes(nbytes)} from {origin}",
            *([_file_table(document.files)] if is_shown else []),
            *document.notes,
            *lines_left_out(document.left_out),
            *loading,
        ],
    )


def _loading(output: str, components: Sequence[str], names: Collection[str]) -> str:
    """Return the lines of Python that load a file of weights with these names."""
    from_file = "load it: from safetensors.torch import load_file;"
    wrappers = {name.partition(".")[0] for name in names if name != _AVERAGED}
    if any(name in _STATE for name in components):
        return f"{from_file} load_file({output!r})"
    if wrappers == {"module"} and _AVERAGED in names:
        return (
            f"{from_file} from torch.optim.swa_utils import AveragedModel; "
            f"average = AveragedModel(model); average.load_state_dict(load_file({output!r})); "
            "averaged = average.module"
        )
    if _AVERAGED in names:
        return f"{from_file} model.load_state_dict(load_file({output!r}), strict=False)"
    loading = f"from safetensors.torch import load_model; load_model(model, {output!r})"
    if len(wrappers) == 1 and wrappers <= _WRAPPERS:
        [wrapper] = wrappers
        return (
            f"load it into a model that is wrapped like the saved one: {loading}; or write the "
            f"names of the bare model with --map '{wrapper}.**=**'"
        )
    return f"load it: {loading}"


def _loading_adapters(out: Path, files: Sequence[str]) -> str:
    """Return the lines of Python that load the adapters of a folder."""
    from holdfast.interop.exporting.merging import DEFAULT, WEIGHTS

    folders = [Path(name).parent for name in files if name.endswith(WEIGHTS)]
    (first, name), *others = [(str(out / one), one.name or DEFAULT) for one in folders]
    named = "" if name == DEFAULT else f", adapter_name={name!r}"
    lines = [
        "load it: from peft import PeftModel",
        f"model = PeftModel.from_pretrained(base, {first!r}{named})",
        *(f"model.load_adapter({path!r}, {name!r})" for path, name in others),
    ]
    return "; ".join(lines)


def _export_dcp(target: str, out: Path, *, unsafe_pickle: bool) -> Answer:
    """Write a folder of DCP under a temporary name, and rename it."""
    from holdfast.interop.dcp import export_folder
    from holdfast.interop.exporting.files import new_output

    open_target(target)
    with new_output(out, is_folder=True) as path:
        made = export_folder(target, str(path), unsafe_pickle=unsafe_pickle, encrypt=named_keys())
        files = _files_in(path)
    document = ExportAnswer(source=target, step=made.step, path=str(out), to="dcp", files=files)
    return _build_export_answer(document, made.nbytes, made.folder)


def _export_file_to_dcp(target: str, out: Path, *, allow_loss: bool) -> Answer:
    """Write a file or a folder of another library as a folder of DCP."""
    from holdfast.interop.dcp.folders import export_source
    from holdfast.interop.exporting.files import new_output

    with open_named(target) as source:
        expect_no_loss(source, (), allow_loss=allow_loss)
        with new_output(out, is_folder=True) as path:
            notes = export_source(source, path).notes
            files = _files_in(path)
        document = ExportAnswer(
            source=source.url,
            step=source.step,
            path=str(out),
            to="dcp",
            files=files,
            left_out=source.left_out,
            notes=notes,
        )
    return _build_export_answer(document, sum(file.nbytes for file in files), target)


def _files_in(folder: Path) -> list[OutputFile]:
    return [
        OutputFile(name=file.name, nbytes=file.stat().st_size) for file in sorted(folder.iterdir())
    ]


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]?)(i?)B", re.IGNORECASE)


def nbytes_of(text: str) -> int:
    """Parse a size such as "5GB" or "512MiB", and return its bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--shard-size {text!r}: not a size such as 5GB or 512MiB")
    number, unit, is_binary = found.groups()
    base = 1024 if is_binary else 1000
    return int(float(number) * base ** " KMGT".index(unit.upper() or " "))


def _file_table(files: Sequence[OutputFile]) -> TextTable:
    return TextTable(
        columns=("file", "size"),
        rows=[(file.name, format_nbytes(file.nbytes)) for file in files],
        right=frozenset({1}),
    )


def format_components(components: Sequence[Component]) -> TextTable:
    """Format what is converted, for people."""
    return TextTable(
        columns=("component", "kind", "tensors", "size"),
        rows=[
            (one.name, one.kind, str(one.num_tensors), format_nbytes(one.nbytes))
            for one in components
        ],
        right=frozenset({2, 3}),
    )


def lines_left_out(left_out: Sequence[LeftOut]) -> list[str]:
    """Format what is left out, for people: a line for each reason, and how many more there are."""
    paths: dict[str, list[str]] = {}
    for left in left_out[:_SHOWN]:
        paths.setdefault(left.why, []).append(left.path)
    lines = [f"skipped: {', '.join(names)}: {why}" for why, names in paths.items()]
    if len(left_out) > _SHOWN:
        lines.append(f"skipped: {len(left_out) - _SHOWN} more; --json lists them all")
    return lines
