"""`holdfast keys`: create keys; list and rotate the keys that decrypt a root's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import click
import msgspec
from msgspec import UNSET, UnsetType

from holdfast.cli import options
from holdfast.cli.documents import Document
from holdfast.cli.options import (
    DECLARED,
    NAMED,
    PATH,
    Commands,
    KeySources,
    argument,
    command,
    flag,
    several,
)
from holdfast.cli.output import Answer, Code
from holdfast.cli.target import keys_of, open_root
from holdfast.encryption.store import bare
from holdfast.errors import UsageError
from holdfast.keys import PrivateKey
from holdfast.keys import generate as new_key
from holdfast.maintenance.encrypted import Rekeyed, Sealed, sealed_in
from holdfast.maintenance.encrypted import rotate as rotate_root
from holdfast.system import CLOSED_ON_EXEC, sync, sync_folder_path


class KeysGenerate(Document, frozen=True):
    """Answer of `keys generate`."""

    path: str
    """File of the key."""
    key: str
    """What it is, and its id."""
    public_path: str | UnsetType = UNSET
    """File of the public key, with `--pair`."""


class Encrypted(Document, frozen=True):
    """Encrypted checkpoint."""

    folder: str
    """Its folder."""
    suite: str
    """Name of the cipher suite."""
    recipients: Sequence[str]
    """Keys that open it."""
    boxes: Sequence[int]
    """Numbers of its boxes of keys."""


class Rotated(Document, frozen=True):
    """Checkpoint of `keys rotate`."""

    folder: str
    """Its folder."""
    outcome: Literal["done", "was so", "failed"]
    """What became of it."""
    reason: str
    """Why it failed; else empty."""


class KeysList(Document, frozen=True):
    """Answer of `keys list`."""

    root: str
    """Path or URL of the root."""
    checkpoints: Sequence[Encrypted]
    """Encrypted checkpoints, newest first."""
    failed: Sequence[Rotated]
    """Those that cannot be read."""


class KeysRotate(Document, frozen=True):
    """Answer of `keys rotate`."""

    root: str
    """Path or URL of the root."""
    checkpoints: Sequence[Rotated]
    """Encrypted checkpoints, newest first."""


@click.group(no_args_is_help=True, cls=Commands)
def keys() -> None:
    """Generate, list and replace the keys of encrypted checkpoints."""


DECLARED.add_command(keys)


@command(
    "generate",
    argument("path", "PATH", "A new file, which only you can read.", type=PATH),
    flag("--pair", "Write a key pair; PATH.pub is the public key, which only encrypts."),
    answer=KeysGenerate,
    group=keys,
)
def generate(path: Path, *, pair: bool) -> Answer:
    """Write a new secret key to a new file."""
    key = new_key("private" if pair else "secret")
    _write_key_file(path, key.text, mode=0o600)
    lines = [f"{path}: {key.name}", "Keep a copy in a safe place: nothing is decrypted without it"]
    public = path.with_name(f"{path.name}.pub") if isinstance(key, PrivateKey) else None
    if isinstance(key, PrivateKey) and public is not None:
        _write_key_file(public, key.public.text, mode=0o644)
        lines.insert(1, f"{public}: {key.public.name}")
    document = KeysGenerate(
        path=str(path), key=key.name, public_path=UNSET if public is None else str(public)
    )
    return Answer(document=document, parts=lines)


@command("list", options.root, answer=KeysList, group=keys)
def list_recipients(root: str) -> Answer:
    """List the keys that decrypt each encrypted checkpoint.

    No key is needed.
    """
    store = bare(open_root(root))
    items = [*sealed_in(store)]
    lines = [
        f"{item.folder}  {item.visible.suite}  {', '.join(item.recipients)}"
        if isinstance(item, Sealed)
        else f"UNREADABLE  {item.folder}: {item.reason}"
        for item in items
    ]
    document = KeysList(
        root=store.url,
        checkpoints=[
            Encrypted(
                folder=item.folder,
                suite=item.visible.suite,
                recipients=item.recipients,
                boxes=sorted(item.boxes),
            )
            for item in items
            if isinstance(item, Sealed)
        ],
        failed=_list_rotated(item for item in items if isinstance(item, Rekeyed)),
    )
    code = Code.FOUND if document.failed else Code.OK
    return Answer(document=document, parts=lines or ["nothing here is sealed"], code=code)


@command(
    "rotate",
    options.root,
    several("--to-file", "to_files", "PATH", "File with the new keys."),
    several("--to-env", "to_variables", "NAME", "Environment variable that holds the new keys."),
    several("--to-command", "to_commands", "COMMAND", "Command that prints the new keys."),
    flag("--keep-old", "Keep the old keys valid."),
    answer=KeysRotate,
    group=keys,
)
def rotate(
    root: str,
    *,
    to_files: Sequence[str],
    to_variables: Sequence[str],
    to_commands: Sequence[str],
    keep_old: bool,
) -> Answer:
    """Replace the keys of all encrypted checkpoints.

    The current keys are named before the command (holdfast --key-file OLD keys rotate). Only the
    key records are rewritten. After an interruption, run the command again. Give a running training
    the new keys first.
    """
    to = KeySources(files=to_files, variables=to_variables, commands=to_commands)
    old, new = keys_of(NAMED.get(KeySources())), keys_of(to)
    if not old:
        raise UsageError("keys rotate: pass the current keys with --key-file before the command")
    if not new:
        raise UsageError("keys rotate: pass the new keys with --to-file, --to-env or --to-command")
    store = bare(open_root(root))
    done = [*rotate_root(store, old, new, keeps_old=keep_old)]
    lines = [f"{item.outcome:<6}  {item.folder}  {item.reason}".rstrip() for item in done]
    failed = any(item.outcome == "failed" for item in done)
    lines.append(
        "some failed: fix the cause, run it again, and keep the old keys until then"
        if failed
        else f"{len(done)} checkpoints can be opened by {', '.join(key.name for key in new)}"
    )
    document = KeysRotate(root=store.url, checkpoints=_list_rotated(done))
    return Answer(document=document, parts=lines, code=Code.FOUND if failed else Code.OK)


def _list_rotated(items: Iterable[Rekeyed]) -> list[Rotated]:
    return msgspec.convert([*items], list[Rotated], from_attributes=True)


def _write_key_file(path: Path, text: str, *, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED_ON_EXEC, mode)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(f"{text}\n")
            file.flush()
            sync(fd)
        # Sync the folder too: data encrypted with the key outlasts a power cut, so must the key.
        sync_folder_path(path.parent)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; a key is written into a new file") from error
