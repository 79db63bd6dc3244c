"""Requests for saves from other processes: by `holdfast save`, or by a file in `requests/`.

The process that owns the run polls for requests between two steps, and answers them. The files were
written by others: they are read with limits, and none of them may stop training. The answer is
written before the request is removed, so a crash loses none (tests/control/test_save_requests.py).
"""

from __future__ import annotations

import getpass
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice

from holdfast.errors import AccessDenied, FormatError, NotFound, StoreError, UsageError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import AnswerRecord, Process, RequestRecord
from holdfast.format.strictjson import MAX_CHECKED_NBYTES
from holdfast.ownership.annotations import checked_tags
from holdfast.ownership.process import this_process, utc_text
from holdfast.root.documents import is_own_json, is_there, read_document, read_if_there
from holdfast.store.base import Store
from holdfast.system import user_number
from holdfast.threads.workers import Background

POLL_S = 1.0
"""Seconds between two polls of the training process, in a store with folders."""
REMOTE_POLL_S = 5.0
"""Seconds between two polls of an object store, where each is a paid request."""
MAX_REQUESTS = 100
"""Most new requests that one poll reads; the others wait for the next poll."""
MAX_LISTED = 2000
"""Most names that one poll reads."""
MAX_TAGS = 20
MAX_REASON = 200
"""Longest reason of a request, in characters."""
_MAX_ERROR = 4000
_TRIES = 3
_PAUSE_S = 1.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for a save, as read from its file."""

    name: str
    """Name of its file inside `requests/`."""
    tags: tuple[str, ...] = ()
    reason: str = "request"
    """Reason of the save for its manifest; never the reason of a trigger."""
    asker: Process | None = None
    """The process that waits for an answer; None if none does."""


class Requests:
    """Poller of requests for saves, in the process that owns the run; it also answers them.

    If the store has folders, a poll is one listing of a folder, in the caller's thread. Otherwise a
    background thread polls, every 5 seconds by default. Answers are written in the background.
    """

    def __init__(
        self, store: Store, *, poll_s: float | None = None, emit: Emitter | None = None
    ) -> None:
        self._is_local = store.has_folders
        default_s = POLL_S if self._is_local else REMOTE_POLL_S
        self._poll_s = poll_s if poll_s is not None else default_s
        num_threads = 1 if self._is_local else 2
        self._background = Background("holdfast-requests", num_threads=num_threads)
        self._tray = _Tray(store, emit if emit is not None else Emitter(), self._background)
        self._next_look = 0.0
        self._looking: Future[None] | None = None
        self._lock = threading.Lock()
        self._under_way: list[Future[None]] = []
        # An instance that is dropped without being closed must not poll for ever.
        weakref.finalize(self, self._background.ask_to_stop)

    def poll(self) -> tuple[Request, ...]:
        """Return the new requests since the last call. Cheap, and never raises."""
        if self._background.is_stopping:
            return ()
        if not self._is_local:
            self._start_looking()
        elif time.monotonic() >= self._next_look:
            for refused in self._tray.queue_new_requests():
                self._submit_answer(refused)
            self._next_look = time.monotonic() + self._poll_s
        found = self._tray.pop_queued_requests()
        if found:
            # The answer may be due while the interpreter exits, when no thread can be started.
            self._background.start()
        return found

    def answer(
        self, request: Request, *, folder: str | None = None, error: str | None = None
    ) -> None:
        """Answer a request with a checkpoint or an error, and remove it, in the background."""
        assert (folder is None) is not (error is None), "a request has one outcome"
        answer = (
            None if request.asker is None else _make_answer_record(request.asker, folder, error)
        )
        self._submit_answer(partial(self._tray.answer_request, request.name, answer))

    def stop_answering(self) -> None:
        """Stop polling; wait a few seconds for answers under way. May be called twice."""
        with self._lock:
            self._background.ask_to_stop()
            under_way = list(self._under_way)
        self._background.stop_jobs(under_way, timeout_s=_CLOSE_S)

    def _start_looking(self) -> None:
        if self._looking is None:
            keep_polling = partial(_keep_polling, self._tray, self._background, self._poll_s)
            self._looking = self._background.submit(keep_polling)

    def _submit_answer(self, job: Callable[[], None]) -> None:
        with self._lock:
            if not self._background.is_stopping:
                self._under_way = [future for future in self._under_way if not future.done()]
                self._under_way.append(self._background.submit(job))
                return
        job()  # closed: the threads take no more work


class _Tray:
    """Inbox of requests: reads new ones, writes answers, removes requests. Thread-safe."""

    def __init__(self, store: Store, emit: Emitter, background: Background) -> None:
        self._store = store
        self._emit = emit
        self._background = background
        self._lock = threading.Lock()
        self._known: set[str] = set()
        """Names not to read again: queued, being answered, or impossible to remove."""
        self._waiting: list[Request] = []
        self._has_folder = False
        self._trouble = ""

    def pop_queued_requests(self) -> tuple[Request, ...]:
        """Return the requests that `queue_new_requests` queued since the last call."""
        with self._lock:
            found, self._waiting = tuple(self._waiting), []
        return found

    def queue_new_requests(self) -> list[Callable[[], None]]:
        """Read new requests and queue them; return jobs that refuse those that are not valid."""
        trouble, self._trouble = self._trouble, ""
        try:
            new = self._new_names()
        except StoreError as error:
            self._trouble = str(error)
            new = []
        jobs = [self._read_request_file(name) for name in new]
        if self._trouble not in ("", trouble):  # once, not at every look
            self._emit("warning", f"cannot look for requests for a save: {self._trouble}")
        return [job for job in jobs if job is not None]

    def answer_request(self, name: str, answer: AnswerRecord | None) -> None:
        """Write the answer, unless withdrawn meanwhile, and remove the request; retry on errors."""
        problem = ""
        for _ in range(_TRIES):
            try:
                self._write_answer(name, answer)
            except StoreError as error:
                problem = str(error)
                self._background.sleep(_PAUSE_S)
            else:
                return
        self._emit("housekeeping_failed", f"the answer to request {name}: {problem}")

    def _write_answer(self, name: str, answer: AnswerRecord | None) -> None:
        key, answer_key = layout.request_key(name), layout.answer_key(name)
        if answer is not None and answer_key is not None and is_there(self._store, key):
            self._store.put(answer_key, answer.encode())
        self._store.delete(key)
        with self._lock:
            self._known.discard(name)

    def _new_names(self) -> list[str]:
        """List the names of requests not listed before, and record them as known."""
        names = self._list_requests()
        with self._lock:
            if len(names) < MAX_LISTED:
                self._known.intersection_update(names)
            new = [name for name in names if name not in self._known][:MAX_REQUESTS]
            self._known.update(new)
        return new

    def _list_requests(self) -> list[str]:
        if self._store.has_folders:
            if not self._has_folder and f"{layout.WRITERS}/" in self._store.children():
                # So that `touch` can make a request. Before the first claim nothing is written.
                self._store.make_folder(layout.REQUESTS)
                self._has_folder = True
            names: Iterable[str] = self._store.children(layout.REQUESTS)
        else:
            prefix = f"{layout.REQUESTS}/"
            infos = islice(self._store.list(prefix), MAX_LISTED)
            names = (info.key[len(prefix) :] for info in infos)
        return list(islice(filter(layout.is_request, names), MAX_LISTED))

    def _read_request_file(self, name: str) -> Callable[[], None] | None:
        """Read a request and queue it; return a job that refuses it if it is not valid."""
        try:
            request = _read_request(self._store, name)
        except NotFound:
            self._mark_unread(name)  # withdrawn meanwhile
        except UsageError as error:
            self._emit("warning", f"a request for a save cannot be fulfilled: {error}")
            return partial(self.answer_request, name, _make_answer_record(None, None, str(error)))
        except (FormatError, AccessDenied) as error:  # not known to be a request
            self._emit("warning", f"left alone, because it is not a request for a save: {error}")
        except StoreError as error:
            self._mark_unread(name)  # tried again at the next look
            self._trouble = str(error)
        else:
            with self._lock:
                self._waiting.append(request)
        return None

    def _mark_unread(self, name: str) -> None:
        with self._lock:
            self._known.discard(name)


def new_id() -> str:
    """Create a random id for a new request."""
    return os.urandom(16).hex()


def put_save_request(
    store: Store, request_id: str | None = None, *, reason: str = "", tags: Iterable[str] = ()
) -> str:
    """Put a request for a save into the root; return its name inside `requests/`."""
    request_id = request_id if request_id is not None else new_id()
    record = RequestRecord(
        id=request_id,
        who=_user(),
        process=this_process(),
        created=utc_text(),
        reason=reason,
        tags=checked_tags(tags),
    )
    _check_request(record)
    data = record.encode()
    store.make_folder(layout.REQUESTS)
    name = layout.request_name(request_id)
    store.put(layout.request_key(name), data, if_absent=True)
    return name


def answer_to(store: Store, name: str) -> AnswerRecord | None:
    """Read the answer to a request, or raise `FormatError`; None while there is none."""
    key = layout.answer_key(name)
    assert key is not None, "`put_save_request` gives names that leave room for an answer"
    return read_if_there(store, key, AnswerRecord.decode)


def is_open(store: Store, name: str) -> bool:
    """Whether a request is neither answered nor removed."""
    return is_there(store, layout.request_key(name))


def withdraw(store: Store, name: str) -> None:
    """Remove a request, and its answer if there is one."""
    store.delete(layout.request_key(name))
    key = layout.answer_key(name)
    if key is not None:
        store.delete(key)


def _keep_polling(tray: _Tray, background: Background, poll_s: float) -> None:
    while True:
        for refuse in tray.queue_new_requests():
            refuse()
        if background.sleep(poll_s):
            return


def _read_request(store: Store, name: str) -> Request:
    key = layout.request_key(name)
    data = read_document(store, key, max_nbytes=MAX_CHECKED_NBYTES)
    if name == layout.TOUCHED and not data:
        return Request(name=name)
    try:
        record = RequestRecord.decode(data, what=f"{store.url}/{key}")
    except FormatError as error:
        if is_own_json(data):
            raise UsageError(str(error)) from error
        raise
    _check_request(record)
    reason = f"request: {record.reason}" if record.reason else "request"
    return Request(name=name, tags=record.tags, reason=reason, asker=record.process)


def _check_request(record: RequestRecord) -> None:
    """Raise `UsageError` unless the tags and reason of a request are valid in a manifest."""
    checked_tags(record.tags)
    if len(record.tags) > MAX_TAGS:
        raise UsageError(f"{len(record.tags)} tags: a request has at most {MAX_TAGS}")
    if len(record.reason) > MAX_REASON or not record.reason.isprintable():
        raise UsageError(
            f"reason {record.reason[:40]!r}: printable text of at most {MAX_REASON} characters"
        )


def _make_answer_record(
    asker: Process | None, folder: str | None, error: str | None
) -> AnswerRecord:
    # The text of an error may hold names from a file system, which need not be valid text.
    text = None if error is None else error[:_MAX_ERROR].encode("utf-8", "replace").decode()
    return AnswerRecord(folder=folder, error=text, created=utc_text(), asker=asker)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"user {user_number()}"
