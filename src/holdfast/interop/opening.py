"""Opens what a user names as a `Source`, recognised by its first bytes or its file names."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

from holdfast.errors import FormatError, NoCheckpoint, StoreError
from holdfast.interop.pickles.values import trusting
from holdfast.interop.source import Source
from holdfast.interop.sources import (
    cerebras,
    checkpoint,
    dcpfolder,
    deepspeed,
    huggingface,
    mindspore,
    safetensors,
    tars,
    torchfile,
    web,
)
from holdfast.keys import Encryption
from holdfast.store import is_web


def open_source(
    text: str, *, encrypt: Encryption | None = None, key: bytes | None = None, trust: bool = False
) -> Source:
    """Open a checkpoint or a file of weights of any known format.

    `text` is `ROOT`, `ROOT@which` or the folder of a checkpoint, also as a URL, or a local file or
    folder of another library. A web address is that of a checkpoint's folder or of its manifest,
    or of a file of safetensors or `torch.save`. `encrypt` has the keys of encrypted checkpoints,
    `key` is that of a file which another library encrypted. `trust` lifts the bounds on the number
    of values in a file, and on the memory that they take; it still runs nothing.
    """
    if checkpoint.recognises(text):
        return checkpoint.CheckpointSource(text, encrypt=encrypt)
    if is_web(text):
        with trusting() if trust else nullcontext():
            return web.open_web(text)
    if not os.path.exists(text):  # unlike `Path.exists`, of a name that is too long, too
        raise NoCheckpoint(f"{text}: there is no such file or folder")
    try:
        with trusting() if trust else nullcontext():
            return _open_file(Path(text), key)
    except OSError as err:
        raise StoreError(f"{text}: cannot be read: {err.strerror}") from err


def _open_file(path: Path, key: bytes | None) -> Source:
    if dcpfolder.recognises(path):
        return dcpfolder.DcpSource(path)
    if deepspeed.recognises(path):
        return deepspeed.DeepSpeedFolder(path)
    if huggingface.recognises_step(path):
        return huggingface.TrainerFolder(path, open_source)
    if safetensors.recognises(path):
        return safetensors.SafetensorsFile(path)
    if cerebras.recognises(path):
        return cerebras.CerebrasFile(path)
    if torchfile.recognises(path):
        return torchfile.TorchFile(path)
    if tars.recognises(path):
        return tars.open_archive(path)
    if mindspore.recognises(path):
        return mindspore.MindSporeFile(path, key=key)
    if huggingface.recognises(path):
        return huggingface.HuggingFaceFolder(path, open_source)
    raise FormatError(f"{path}: no known format; docs/converting.md lists those that can be read")
