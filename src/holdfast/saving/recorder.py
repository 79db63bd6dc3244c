"""Records the metrics of all steps, the saves and the deletions of a manager in the run's history.

The training thread only appends. The save thread puts what was recorded: before each commit, after
deletions, now and then between saves, and at the end. No failure of that stops a training or a save
(invariant 8).
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from holdfast.encryption.store import sealed
from holdfast.errors import DeadlineExceeded, HoldfastError, NotFound, time_limit
from holdfast.events import Emitter, Event
from holdfast.format import layout
from holdfast.format.history import HistoryEvent, to_number
from holdfast.ownership.claim import Claim, expect_claim
from holdfast.ownership.owner import Ownership
from holdfast.root.history_writer import MAX_WAITING, HistoryWriter
from holdfast.staging.device import is_at_hand, is_capturing
from holdfast.store.base import Store
from holdfast.threads.workers import Workers

PUT_S = 30.0
"""Longest time, in seconds, that a value of a running training waits to be put."""
_FIRST_PUT_S = 2.0
_MAX_ROWS = 20_000
"""Rows that are put sooner."""
_MAX_UNREAD = 512
"""Most values that wait on a device; then they are read together."""
_MAX_WHY = 500


class HistoryRecorder:
    """Recorder of one manager. Off in followers and encrypted roots."""

    def __init__(self, store: Store, owner: Ownership, emit: Emitter, threads: Workers) -> None:
        """Record nothing until `start_recording`; `threads` has the save thread."""
        self._store = store
        self._owner = owner
        self._emit = emit
        self._threads = threads
        self._is_on = False
        self._rows: deque[tuple[Claim | None, int, float, Mapping[str, float]]]
        self._rows = deque(maxlen=MAX_WAITING)
        self._unread: list[tuple[dict[str, Any], str, Tensor]] = []
        """Values that are still on their device, each with its row."""
        self._unread_rows: list[tuple[Claim | None, int, float, dict[str, Any]]] = []
        self._events: deque[tuple[Claim | None, HistoryEvent]] = deque(maxlen=MAX_WAITING)
        self._starts: dict[str, int] = {}
        self._writers: dict[str, HistoryWriter] = {}
        """Writers of claims by nonce; of earlier ones only until all is put."""
        self._merged = ("", 0)
        """Nonce and number of the open segment when segments were last merged."""
        self._has_deletions = self._is_queued = False
        self._num_left = 0
        """Rows that the last put could not hand to a writer."""
        self._next_put_s = time.time() + _FIRST_PUT_S

    # In the training thread

    def start_recording(self) -> None:
        """Begin to record; only the leader does."""
        if sealed(self._store) is not None:
            self._emit(
                "preflight",
                f"{self._store.url}: no history of metrics is recorded, as the checkpoints are "
                "encrypted; metrics are in the checkpoints only",
            )
            return
        self._is_on = True
        known = weakref.ref(self)  # threads know the emitter, and a dropped manager must end

        def forward(event: Event) -> None:
            if (recorder := known()) is not None:
                recorder.note_event(event)

        self._emit.add_sink(forward)

    def record_metrics(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """Record metrics of a step. Values on an accelerator are copied there, and read later."""
        if not metrics or not self._is_on:
            return
        row: dict[str, Any] = {}
        num_unread = len(self._unread)
        values: Mapping[str, Any] = getattr(metrics, "unread", metrics)  # of a lazy mapping
        for name, value in values.items():
            if type(value) is float:
                row[name] = value
                continue
            try:
                if isinstance(value, Tensor):
                    self._add_tensor(row, name, value)
                else:
                    row[name] = float(value)
            except Exception:  # noqa: BLE001 - code of the user
                continue  # the next save raises it
        if not row:
            return
        claim, now_s = self._owner.claim, time.time()
        if len(self._unread) > num_unread:
            self._unread_rows.append((claim, step, now_s, row))
        else:
            self._rows.append((claim, step, now_s, row))
        if claim is not None and (self._is_put_due(now_s) or self._is_much()):
            self._queue_put(now_s)
        elif len(self._unread) >= _MAX_UNREAD:
            self.read_devices()

    def start_from(self, step: int) -> None:
        """Note the step from which the present claim continues."""
        claim = self._owner.claim
        if claim is not None:
            self._starts[claim.nonce] = step

    def read_devices(self) -> None:
        """Read the values that are still on their devices, which waits for these."""
        if not self._unread or is_capturing():
            return
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str, Tensor]]]
        groups = {}
        for held in self._unread:
            groups.setdefault((held[2].device, held[2].dtype), []).append(held)
        for (device, _), group in groups.items():
            if device.type == "cuda":  # they may have been computed in other streams
                torch.cuda.synchronize(device)
            try:
                numbers = torch.stack([value for _, _, value in group]).tolist()
            except RuntimeError as error:
                numbers = [math.nan] * len(group)
                self._emit("housekeeping_failed", f"{len(group)} metrics were not read: {error}")
            for (row, name, _), number in zip(group, numbers, strict=True):
                row[name] = float(number)
        self._rows.extend(self._unread_rows)
        self._unread, self._unread_rows = [], []

    def _add_tensor(self, row: dict[str, Any], name: str, value: Tensor) -> None:
        # Reading a distributed tensor may need all ranks; its value is recorded at saves.
        if type(value) not in (Tensor, torch.nn.Parameter) or value.numel() != 1:
            return
        if value.is_complex() or value.is_meta:
            return
        if is_at_hand(value):
            row[name] = float(value.item())
        elif not is_capturing():
            row[name] = held = value.detach().clone().reshape(())
            self._unread.append((row, name, held))

    def _is_put_due(self, now_s: float) -> bool:
        return not self._next_put_s - PUT_S <= now_s < self._next_put_s  # clocks may be set back

    def _is_much(self) -> bool:
        return len(self._rows) - self._num_left >= _MAX_ROWS or len(self._unread) >= _MAX_UNREAD

    def _queue_put(self, now_s: float) -> None:
        self.read_devices()
        self._next_put_s = now_s + PUT_S
        if not self._is_queued:
            self._is_queued = True
            with suppress(RuntimeError, HoldfastError):  # the interpreter exits: the close puts it
                self._threads.submit(self.put_history)

    def put_at_close(self, timeout_s: float) -> None:
        """Put what is left, for at most `timeout_s` seconds."""
        if self._owner.claim is None or not self._is_on:
            return
        try:
            self.read_devices()
            job = self._threads.submit(self.put_history)
            if wait([job], timeout=timeout_s).not_done:
                raise DeadlineExceeded(f"not put after {time_limit(timeout_s)}")
        except Exception as error:  # noqa: BLE001 - invariant 8, and at exit no thread starts
            self._emit("housekeeping_failed", f"the end of the history of metrics: {error!r}")

    # In any thread

    def note_event(self, event: Event) -> None:
        """Record a save or a deletion, of which an event tells."""
        found = self._describe_event(event)
        if found is not None:
            self._has_deletions = self._has_deletions or found.what == "deleted"
            self._events.append((self._owner.claim, found))

    def _describe_event(self, event: Event) -> HistoryEvent | None:
        now_s, fields = round(time.time(), 3), event.fields
        if event.kind == "committed" and fields["is_new"]:
            manifest = fields["manifest"]
            return HistoryEvent(
                what="saved",
                time=now_s,
                step=event.step,
                folder=fields["folder"],
                why=manifest.reason[:_MAX_WHY],
                save_class=manifest.save_class,
                nbytes=manifest.nbytes,
            )
        if event.kind == "save_failed":
            why = event.message[:_MAX_WHY]
            return HistoryEvent(what="failed", time=now_s, step=event.step, why=why)
        if event.kind == "retracted":
            return HistoryEvent(
                what="deleted",
                time=now_s,
                step=event.step,
                folder=fields["folder"],
                why=fields["reason"][:_MAX_WHY],
                tier="" if fields["root"] == self._store.url else "remote",
                metrics={name: to_number(value) for name, value in fields["metrics"].items()},
            )
        return None

    # In the save thread

    def put_history(self) -> None:
        """Put what was recorded; an error is logged, and the next call tries again."""
        self._is_queued = False
        try:
            self._distribute_records()
            present = self._owner.claim
            for nonce, writer in [*self._writers.items()]:
                writer.from_step = self._starts.get(nonce, 0)
                try:
                    writer.put_segments()
                except NotFound:  # someone has removed the folder
                    if present is not None:
                        self._make_folder(present)
                    writer.put_segments()
                if present is not None and nonce != present.nonce:
                    del self._writers[nonce]
        except Exception as error:  # noqa: BLE001 - invariant 8
            self._emit(
                "housekeeping_failed",
                f"the history of metrics was not written, and will be tried again: {error!r}",
            )
        self._num_left = len(self._rows)

    def follow_commit(self) -> None:
        """Put new deletions, and merge segments if there are many."""
        if self._has_deletions:
            self._has_deletions = False
            self.put_history()
        for nonce, writer in self._writers.items():
            if self._merged != (nonce, writer.number):
                self._merged = nonce, writer.number
                try:
                    writer.merge_segments()
                except Exception as error:  # noqa: BLE001 - invariant 8
                    self._emit("housekeeping_failed", f"merging the history: {error!r}")

    def _distribute_records(self) -> None:
        """Hand what was recorded to the writer of its claim; before the first claim it waits."""
        present = self._owner.claim
        while self._rows and (claim := self._rows[0][0] or present) is not None:
            writer = self._find_writer(claim)
            writer.add_row(*self._rows.popleft()[1:])
        while self._events and (claim := self._events[0][0] or present) is not None:
            writer = self._find_writer(claim)
            writer.add_event(self._events.popleft()[1])

    def _find_writer(self, claim: Claim) -> HistoryWriter:
        if claim.nonce not in self._writers:
            self._make_folder(claim)
            self._writers[claim.nonce] = HistoryWriter(
                self._store, epoch=claim.epoch, nonce=claim.nonce, resumed_from=claim.resumed_from
            )
        return self._writers[claim.nonce]

    def _make_folder(self, claim: Claim) -> None:
        expect_claim(self._store, claim)  # a folder made in a moved root would make it anew
        self._store.make_folder(layout.HISTORY)
