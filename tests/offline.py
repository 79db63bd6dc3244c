"""What trackers have recorded on this machine, read as their own tools would."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(folder: Path, kind: str) -> list[Any]:
    """The records of one kind in the files of offline runs under a folder, in order."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.rglob("*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == kind:
                found.append(getattr(record, kind))
    return found


def wandb_references(folder: Path) -> list[tuple[str, dict[str, Any], list[str]]]:
    """(name, metadata, references) of each artifact that was logged, in order."""
    return [
        (item.name, json.loads(item.metadata), [entry.ref for entry in item.manifest.contents])
        for item in wandb_records(folder, "artifact")
    ]


def tensorboard_texts(folder: Path, name: str) -> list[tuple[int, str]]:
    """(step, text) of each text of this name in a folder of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    items = events.Tensors(f"{name}/text_summary")
    return [(item.step, item.tensor_proto.string_val[0].decode()) for item in items]


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, behind a header of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        left = 32_768 - position % 32_768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield parts
            parts = b""
