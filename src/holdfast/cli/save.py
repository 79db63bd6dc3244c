"""`holdfast save`: ask the process that owns a run for a checkpoint, and wait for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from holdfast.cli import options
from holdfast.cli.documents import Document
from holdfast.cli.options import command, option, several
from holdfast.cli.output import Answer, printable, write_message
from holdfast.cli.target import open_root
from holdfast.control.save_requests import answer_to, is_open, new_id, put_save_request, withdraw
from holdfast.errors import (
    DeadlineExceeded,
    FormatError,
    NotOwned,
    RequestFailed,
    SealError,
    StoreError,
    TransientStoreError,
)
from holdfast.format import layout
from holdfast.format.manifest import Manifest
from holdfast.format.records import Alive, AnswerRecord, WriterRecord
from holdfast.ownership.claim import WATCH_S, is_closed
from holdfast.ownership.process import liveness
from holdfast.policy.clock import Unit, parse
from holdfast.root.catalog import Catalog
from holdfast.root.documents import read_if_there
from holdfast.store.base import Store

_LOOK_S = 0.2
"""Seconds between two checks for the answer."""
_OWNER_S = 2.0
"""Seconds between two checks that the owner is alive."""


class Save(Document, frozen=True):
    """Answer of `save`."""

    root: str
    """Path or URL of the root."""
    folder: str
    """Folder of the new checkpoint."""
    step: int | None
    """Its step; null where retention has deleted it already."""
    tags: Sequence[str]
    """Tags that were asked for."""
    waited_s: float
    """Seconds from the request to the answer."""


@command(
    "save",
    options.root,
    several("--tag", "tags", "TAG", "Tag for the checkpoint; tagged checkpoints are kept."),
    option(
        "--reason", "TEXT", "Reason to record in the checkpoint.", default="", show_default=False
    ),
    option("--timeout", "TIME", "Withdraw the request after this time.", default="10min"),
    answer=Save,
)
def save(root: str, *, tags: Sequence[str], reason: str, timeout: str) -> Answer:
    """Ask a running training for a checkpoint, and wait for it.

    The training saves at the end of the current step, when it calls maybe_save; the Trainer always
    does. The command is refused if no live process owns the run. Creating the file
    ROOT/requests/now also asks for a checkpoint, without waiting.
    """
    timeout_s = float(parse(timeout, what="--timeout", units={Unit.SECOND}).value)
    store = open_root(root)
    owner = _RunOwner(store)
    owner.expect_live_owner()
    began = time.monotonic()
    request_id = new_id()
    name = layout.request_name(request_id)
    try:
        put_save_request(store, request_id, reason=reason, tags=tags)
        with _waiting(owner):
            answer = _wait_for_answer(store, name, owner, timeout_s=timeout_s)
    except KeyboardInterrupt:
        write_message("the request is withdrawn; a save that has started continues")
        raise
    finally:
        # However the wait ended, remove the request and its answer.
        with suppress(StoreError):
            withdraw(store, name)
    if answer.folder is None:
        raise RequestFailed(f"{store.url}: not saved: {answer.error}")
    return _format_saved(store, answer.folder, tags, waited_s=time.monotonic() - began)


def _format_saved(store: Store, folder: str, tags: Sequence[str], *, waited_s: float) -> Answer:
    step = _read_saved_step(store, folder)
    document = Save(root=store.url, folder=folder, step=step, tags=tags, waited_s=waited_s)
    suffix = "" if step is None else f"  step {step}"
    return Answer(document=document, parts=[f"{folder}{suffix}"])


def _read_saved_step(store: Store, folder: str) -> int | None:
    """Return the step of the new checkpoint; None if retention has already deleted it."""
    with suppress(FormatError, SealError, StoreError):
        register = Catalog(store).read(folder)
        if isinstance(register, Manifest):
            return register.timestamp.step
    return None


def _wait_for_answer(
    store: Store, name: str, owner: _RunOwner, *, timeout_s: float
) -> AnswerRecord:
    deadline = time.monotonic() + timeout_s
    next_look = time.monotonic() + _OWNER_S
    pause = threading.Event()
    while True:
        # In this order: the owner puts the answer before it removes the request.
        was_open = is_open(store, name)
        answer = _read_answer(store, name)
        if answer is not None:
            return answer
        if not was_open:
            raise RequestFailed(f"{store.url}: the request was removed without an answer")
        now = time.monotonic()
        if now >= deadline:
            raise DeadlineExceeded(
                f"{store.url}: not saved within {timeout_s:g} s by {owner.text}: is it in a long "
                "step, or does its loop not call maybe_save? The request is withdrawn"
            )
        if now >= next_look:
            answer = _look_at_owner(store, name, owner)
            if answer is not None:
                return answer
            next_look = now + _OWNER_S
        pause.wait(min(_LOOK_S, deadline - now))


def _look_at_owner(store: Store, name: str, owner: _RunOwner) -> AnswerRecord | None:
    """Check the owner; return None while it may be alive, its answer if it has ended, or raise."""
    with suppress(TransientStoreError):
        store.refresh_folder(layout.REQUESTS)
    try:
        owner.expect_live_owner()
    except NotOwned as error:
        answer = _read_answer(store, name)
        if answer is not None:
            return answer
        raise RequestFailed(f"{error}. It ended before it saved") from error
    return None


def _read_answer(store: Store, name: str) -> AnswerRecord | None:
    try:
        return answer_to(store, name)
    except FormatError as error:
        raise RequestFailed(f"the answer cannot be read: {error}") from error


class _RunOwner:
    """Watches whether the process that owns the run is alive; a later owner inherits requests."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._epoch = 0
        self._beat = 0
        self._beat_seen = 0.0
        self.text = ""
        """Description of the process, for messages."""

    def expect_live_owner(self) -> None:
        """Check the owner; raise `NotOwned` if no process owns the run or the owner is dead."""
        epoch = Catalog(self._store).highest_epoch()
        try:
            writer = Catalog(self._store).writer(epoch) if epoch else None
        except FormatError as error:
            raise NotOwned(f"the owner of the run is unknown: {error}") from error
        if writer is None:
            raise NotOwned(f"{self._store.url}: no process owns this run, so none can save it")
        is_new, self._epoch = epoch != self._epoch, epoch
        process = writer.process
        self.text = f"process {process.pid} on {process.host} (writer {epoch})"
        if is_closed(self._store, epoch, writer.nonce):
            raise self._gone(writer, "has ended cleanly")
        state = liveness(process)
        if state == "dead":
            raise self._gone(writer, "is gone")
        if state == "unknown":
            self._check_heartbeat(writer, is_new=is_new)

    def _check_heartbeat(self, writer: WriterRecord, *, is_new: bool) -> None:
        """Check the heartbeat of an owner on another host; raise `NotOwned` if it has stopped."""
        now = time.monotonic()
        beat = _beat(self._store, writer.epoch)
        if is_new or beat != self._beat:
            self._beat, self._beat_seen = beat, now
        elif now - self._beat_seen > WATCH_S:
            raise self._gone(writer, f"has shown no sign of life for {WATCH_S:.0f} s")
        if is_new:
            write_message(f"{self.text}: on another host, so it may have ended; asking it anyway")

    def _gone(self, writer: WriterRecord, what: str) -> NotOwned:
        return NotOwned(
            f"{self._store.url}: {self.text}, which has owned this run since {writer.created}, "
            f"{what}, so no process can save it"
        )


def _beat(store: Store, epoch: int) -> int:
    try:
        alive = read_if_there(store, layout.alive_key(epoch), Alive.decode)
    except FormatError:
        return 0
    return alive.beat if alive is not None else 0


@contextmanager
def _waiting(owner: _RunOwner) -> Iterator[None]:
    """Show a status line on a terminal while the command waits for the owner."""
    text = f"asked {owner.text}; Ctrl-C withdraws"
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(printable(text))):
        yield
