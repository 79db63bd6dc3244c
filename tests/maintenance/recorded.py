"""Roots with a record that is made up to the second: claims, closes and manifests, no tensors."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec

from holdfast.format import layout
from holdfast.format.manifest import (
    ComponentEntry,
    FileEntry,
    Manifest,
    Reference,
    Timestamp,
    encode_manifest,
)
from holdfast.format.records import Closed, Process, WriterRecord
from holdfast.ownership.process import this_process
from holdfast.store.base import Store

BEGIN = datetime(2026, 11, 20, 12, tzinfo=timezone.utc)
# Above the highest pid that Linux gives: there is no such process, and never was.
_NO_PID = 2**22 + 1


def dead(number: int = 0) -> Process:
    """A process of this boot that is gone."""
    return msgspec.structs.replace(this_process(), pid=_NO_PID + number, start=f"{number + 1}")


def elsewhere(number: int = 0) -> Process:
    """A process of which this host can tell nothing."""
    process = dead(number)
    return msgspec.structs.replace(process, host="other-host", boot_id="another boot")


def moment(at_s: float) -> str:
    """The time of a record, in seconds since the run began."""
    return (BEGIN + timedelta(seconds=at_s)).isoformat()


class RecordedRun:
    """Writes the records of a run. Times are seconds since it began."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.epoch = 0
        self.sequence = 0
        self.point: Reference | None = None
        store.make_folder(layout.WRITERS)

    def start(
        self,
        at_s: float,
        process: Process | None = None,
        *,
        point: Reference | None = None,
        takeover: bool = False,
        rollback: bool = False,
    ) -> None:
        """A process claims the run; by default one that is gone by now."""
        self.epoch, self.sequence, self.point = self.epoch + 1, 0, point
        claim = WriterRecord(
            epoch=self.epoch,
            nonce=f"{self.epoch:032x}",
            resumed_from=point,
            rollback=rollback,
            takeover=takeover,
            created=moment(at_s),
            process=process if process is not None else dead(self.epoch),
        )
        self.store.put(layout.writer_key(self.epoch), claim.encode())

    def close(self) -> None:
        """The start ends cleanly."""
        closed = Closed(epoch=self.epoch, nonce=f"{self.epoch:032x}")
        self.store.put(layout.closed_key(self.epoch), closed.encode())

    def lose(self, number: int = 1) -> None:
        """Saves whose checkpoints are not there any more, or never were."""
        self.sequence += number

    def save(
        self,
        step: int,
        wall_s: float,
        *,
        at_s: float | None = None,
        reason: str = "every 100step",
        nbytes: int = 1000,
        timings: dict[str, float] | None = None,
        **changes: Any,
    ) -> Reference:
        """A committed checkpoint; its save stopped training for 2 seconds, unless `timings` say."""
        self.sequence += 1
        label = f"step-{step:08d}"
        first = layout.first_digits(label, self.epoch, self.sequence, f"{self.epoch:032x}")
        save_id = first.ljust(32, "0")
        files = (layout.tree_file("state"), layout.tensor_file("state", 0))
        digest = f"blake3:{'0' * 64}"
        manifest = Manifest(
            save_id=save_id,
            label=label,
            epoch=self.epoch,
            sequence=self.sequence,
            parent=self.point,
            timestamp=Timestamp(step=step, wall_s=wall_s),
            created=moment(wall_s if at_s is None else at_s),
            save_class="permanent",
            reason=reason,
            tags=(),
            metrics={},
            world_size=1,
            components={
                "state": ComponentEntry(kind="tree", files=files, nbytes=nbytes, num_tensors=1)
            },
            block_nbytes=layout.BLOCK_NBYTES,
            files={
                files[0]: FileEntry(nbytes=100, digest=digest),
                files[1]: FileEntry(nbytes=nbytes - 200, digest=digest),
                layout.INDEX: FileEntry(nbytes=100, digest=digest),
            },
            numerics={},
            environment={},
            timings={"capture_s": 0.5, "stage_s": 1.5} if timings is None else timings,
        )
        manifest = msgspec.structs.replace(manifest, **changes)
        folder = str(
            layout.attempt_name(manifest.label, manifest.epoch, manifest.sequence, save_id)
        )
        self.store.make_folder(folder)
        self.store.put(f"{folder}/{layout.MANIFEST}", encode_manifest(manifest))
        return manifest.make_reference(folder)


def three_failures(store: Store) -> RecordedRun:
    """Twenty hours: a save each 100 steps of 3.6 s (2 s of them the stall), three failures.

    Each failure comes 50 steps after a save; the next start is 5 minutes later.
    """
    run = RecordedRun(store)
    point, step, wall_s, at_s = None, 0, 0.0, 0.0
    for number_of_saves in (60, 50, 50, 40):
        run.start(at_s, point=point)
        for _ in range(number_of_saves):
            step, wall_s, at_s = step + 100, wall_s + 360, at_s + 360
            point = run.save(step, wall_s, at_s=at_s)
        at_s += 180 + 300
    run.close()
    return run
