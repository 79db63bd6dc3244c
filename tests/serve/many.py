"""A root with many checkpoints, made of one: its files are linked, its manifest is written anew."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from holdfast.format.layout import attempt_name
from holdfast.format.manifest import Manifest, decode_register, encode_manifest


def multiply(root: Path, number: int) -> None:
    """Give a root with one checkpoint `number` of them, with falling losses and some tags."""
    (first,) = root.glob("step-*")
    manifest = decode_register((first / "manifest.json").read_bytes(), what="the first")
    assert isinstance(manifest, Manifest)
    for sequence in range(manifest.sequence + 1, manifest.sequence + number):
        _copy(first, manifest, sequence)


def _copy(first: Path, manifest: Manifest, sequence: int) -> None:
    save_id = f"{sequence:032x}"
    step = manifest.timestamp.step * sequence
    made = msgspec.structs.replace(
        manifest,
        sequence=sequence,
        save_id=f"{sequence:08x}{save_id[8:]}",
        label=f"step-{step:08d}",
        timestamp=msgspec.structs.replace(manifest.timestamp, step=step),
        metrics={"loss": 3 / sequence**0.3, "val/loss": 3.2 / sequence**0.3},
        tags=(f"t{sequence}",) if sequence % 100 == 0 else (),
    )
    name = attempt_name(made.label, made.epoch, made.sequence, made.save_id)
    folder = first.parent / str(name)
    folder.mkdir()
    for path in first.iterdir():
        if path.name != "manifest.json":
            os.link(path, folder / path.name)
    (folder / "manifest.json").write_bytes(encode_manifest(made))
