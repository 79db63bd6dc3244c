"""`holdfast import` and `export` of folders of PyTorch Distributed Checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.cli import answers
from holdfast.cli.output import Answer, size
from holdfast.cli.target import named_keys, open_target, opened
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.engine.checkpoint import Checkpoint


def import_dcp(
    folder: str, root: str, *, step: int | None, label: str | None, unsafe_pickle: bool
) -> Answer:
    """Save what a folder of DCP holds as a new checkpoint.

    Raises:
        FormatError: the folder is damaged, or its metadata holds more than metadata.
        UnsupportedState: a value in it is no typed tree.
        UsageError: keys are given, which an import cannot use.
    """
    from holdfast.interop.dcp import import_folder

    if named_keys() is not None:
        raise UsageError("import does not encrypt; give it a root of its own, and no keys")
    if step is None:
        raise UsageError(f"{folder}: a folder of DCP tells no step; give one: --step N")
    opened(root)
    found = import_folder(folder, root, step=step, label=label, unsafe_pickle=unsafe_pickle)
    return _answer(found, folder, f"{found.folder}: {size(found.nbytes)} from {folder}")


def export_dcp(target: str, folder: str, *, out: str, unsafe_pickle: bool) -> Answer:
    """Write a checkpoint as a folder of DCP, which is called `out` in the answer.

    Raises:
        NoCheckpoint: no checkpoint matches.
        UsageError: the folder is not empty, or a value is a pickle.
        CorruptData: the checkpoint is damaged.
    """
    from holdfast.interop.dcp import export_folder

    open_target(target)
    found = export_folder(target, folder, unsafe_pickle=unsafe_pickle, encrypt=named_keys())
    return _answer(found, out, f"{out}: {size(found.nbytes)} from {found.folder}")


def _answer(found: Checkpoint, path: str, text: str) -> Answer:
    document = {"root": found.root, "folder": found.folder, "step": found.step, "path": path}
    return Answer(document=answers.of(answers.Carried, document), parts=[text])
