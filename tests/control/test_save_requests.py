"""Claims about requests for a save: what is honoured, answered, refused and removed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.control import save_requests
from holdfast.control.save_requests import (
    Request,
    Requests,
    answer_to,
    is_open,
    put_save_request,
    withdraw,
)
from holdfast.errors import AccessDenied, StoreError, TransientStoreError, UsageError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import AnswerRecord, RequestRecord
from holdfast.maintenance.gc import collect_garbage
from holdfast.ownership.process import this_process, utc_text
from holdfast.store.base import Buffer, Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.threads.workers import Background
from runs import Recorder, new_run

FOLDER = "step-00000001.0001-000001-01234567"


@pytest.fixture
def store(ram_path: Path) -> LocalStore:
    store = LocalStore(ram_path)
    store.make_folder("requests")
    return store


@pytest.fixture
def folder(ram_path: Path, store: LocalStore) -> Path:
    return ram_path / "requests"


@pytest.fixture
def found(store: LocalStore, recorder: Recorder) -> Iterator[Requests]:
    """The owner's side, which looks whenever it is asked."""
    side = Requests(store, poll_s=0.0, emit=Emitter((recorder,)))
    yield side
    side.stop_answering()


def names(requests: tuple[Request, ...]) -> list[str]:
    return [request.name for request in requests]


def record(**changes: Any) -> RequestRecord:
    members = {
        "id": "0" * 32,
        "who": "jo",
        "process": this_process(),
        "created": utc_text(),
    }
    return RequestRecord(**{**members, **changes})


def test_what_was_asked_is_found_once(store: LocalStore, found: Requests) -> None:
    name = put_save_request(store, reason="before the change", tags=["good", "better"])
    (request,) = found.poll()
    assert request.name == name
    assert request.tags == ("good", "better")
    assert request.reason == "request: before the change"
    assert found.poll() == ()


def test_an_empty_file_asks_without_tags_and_has_no_answer(found: Requests, folder: Path) -> None:
    (folder / "now").touch()
    (request,) = found.poll()
    assert request == Request(name="now", tags=(), reason="request", asker=None)
    found.answer(request, folder=FOLDER)
    found.stop_answering()
    assert list(folder.iterdir()) == []


def test_the_folder_for_files_is_there_when_the_run_is_claimed(ram_path: Path) -> None:
    store = LocalStore(ram_path / "run")
    side = Requests(store, poll_s=0.0)
    assert side.poll() == ()
    assert not (ram_path / "run").exists()
    store.make_folder("writers")
    assert side.poll() == ()
    assert (ram_path / "run" / "requests").is_dir()
    side.stop_answering()


def test_an_answered_request_is_gone_and_its_asker_is_told(
    store: LocalStore, found: Requests
) -> None:
    first, second = put_save_request(store), put_save_request(store)
    by_name = {request.name: request for request in found.poll()}
    found.answer(by_name[first], folder=FOLDER)
    found.answer(by_name[second], error="the disk is full")
    found.stop_answering()
    for name, folder, error in ((first, FOLDER, None), (second, None, "the disk is full")):
        answer = answer_to(store, name)
        assert answer is not None
        assert (answer.folder, answer.error, answer.asker) == (folder, error, this_process())
        assert not is_open(store, name)


def test_a_name_can_ask_again_when_it_was_answered(found: Requests, folder: Path) -> None:
    for _ in range(3):
        (folder / "now").touch()
        (request,) = found.poll()
        (folder / "now").touch()  # the same demand: its save is under way
        assert found.poll() == ()
        found.answer(request, folder=FOLDER)
        wait_until_gone(folder / "now")


def wait_until_gone(path: Path) -> None:
    deadline = threading.Event()
    for _ in range(2000):
        if not path.exists():
            return
        deadline.wait(0.005)
    raise AssertionError(f"{path} is still there")


def test_a_withdrawn_request_is_not_answered(
    store: LocalStore, found: Requests, folder: Path
) -> None:
    name = put_save_request(store)
    (request,) = found.poll()
    withdraw(store, name)
    found.answer(request, folder=FOLDER)
    found.stop_answering()
    assert list(folder.iterdir()) == []


def test_a_request_that_lay_there_before_is_honoured_by_the_next_owner(
    store: LocalStore, found: Requests
) -> None:
    name = put_save_request(store)
    assert names(found.poll()) == [name]
    found.stop_answering()
    later = Requests(store)
    assert names(later.poll()) == [name]
    later.stop_answering()


def test_looks_are_rare(store: LocalStore) -> None:
    side = Requests(store, poll_s=1e6)
    assert side.poll() == ()
    put_save_request(store)
    assert side.poll() == ()
    side.stop_answering()


def test_after_the_close_nothing_is_found_and_answers_still_arrive(
    store: LocalStore, found: Requests
) -> None:
    name = put_save_request(store)
    (request,) = found.poll()
    put_save_request(store)
    found.stop_answering()
    found.stop_answering()
    assert found.poll() == ()
    found.answer(request, folder=FOLDER)
    assert answer_to(store, name) is not None


@pytest.mark.parametrize(
    "data",
    [
        b'{"holdfast": 1, "kind": "request"}\n',
        record().encode()[:-1],
        AnswerRecord(folder=FOLDER, error=None, created="").encode(),
        record(tags=("latest",)).encode(),
        record(tags=("a\nb",)).encode(),
        record(tags=tuple(map(str, range(21)))).encode(),
        record(reason="x" * 201).encode(),
        record(reason="\x1b[2J").encode(),
    ],
    ids=lambda data: repr(data[:12]) + str(len(data)),
)
def test_a_broken_request_is_refused_and_removed(
    store: LocalStore, found: Requests, folder: Path, recorder: Recorder, data: bytes
) -> None:
    name = f"{'b' * 32}.json"
    (folder / name).write_bytes(data)
    assert found.poll() == ()
    found.stop_answering()
    assert [path.name for path in folder.iterdir()] == [f"{name}.answer"]
    answer = answer_to(store, name)
    assert answer is not None
    assert answer.folder is None
    assert len(recorder.of("warning")) == 1


def test_files_of_others_are_no_requests(found: Requests, folder: Path, recorder: Recorder) -> None:
    """Of any name and content; one that is named like a request is reported, once."""
    named = (f"{'a' * 32}.json", f"{'b' * 32}.json", f"{'c' * 32}.json", "now")
    contents = (b"please", b'{"mine": 1}', b"", b"x" * 100_000)
    mine = {**dict(zip(named, contents, strict=True)), "README": b"", "x.json": b"{}"}
    for name, data in mine.items():
        (folder / name).write_bytes(data)
    for _ in range(3):
        assert found.poll() == ()
    found.stop_answering()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == mine
    assert len(recorder.of("warning")) == 4
    assert all("left alone" in event.message for event in recorder.of("warning"))


def test_what_is_no_file_is_passed_over(found: Requests, folder: Path, recorder: Recorder) -> None:
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "fifo")
    (folder / ".hidden").touch()
    (folder / "two words").touch()
    assert found.poll() == ()
    assert recorder.events == []
    assert len(list(folder.iterdir())) == 6


def test_a_folder_that_is_a_link_is_told_once_and_harms_nothing(
    ram_path: Path, tmp_path: Path, recorder: Recorder
) -> None:
    (tmp_path / "now").touch()
    (ram_path / "requests").symlink_to(tmp_path)
    side = Requests(LocalStore(ram_path), poll_s=0.0, emit=Emitter((recorder,)))
    for _ in range(3):
        assert side.poll() == ()
    side.stop_answering()
    assert len(recorder.of("warning")) == 1
    assert (tmp_path / "now").exists()


def test_of_many_at_once_some_are_read_at_each_look(found: Requests, store: LocalStore) -> None:
    asked = {put_save_request(store) for _ in range(250)}
    seen = [names(found.poll()) for _ in range(4)]
    assert [len(some) for some in seen] == [100, 100, 50, 0]
    assert set().union(*seen) == asked


class Failing(MemoryStore):
    """A store without folders that refuses operations while told to."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, StoreError] = {}
        self.puts = 0

    def _check(self, operation: str) -> None:
        error = self.refused.get(operation)
        if error is not None:
            raise error

    def list(self, prefix: str = "") -> Iterator[Any]:
        self._check("list")
        return super().list(prefix)

    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self._check("get")
        return super().get(key, start, nbytes)

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self.puts += 1
        if self.puts == 2:
            raise TransientStoreError("once")
        self._check("put")
        super().put(key, data, if_absent=if_absent)


def poll_until_found(side: Requests) -> tuple[Request, ...]:
    pause = threading.Event()
    for _ in range(2000):
        found = side.poll()
        if found:
            return found
        pause.wait(0.005)
    raise AssertionError("nothing was found")


def test_without_folders_a_thread_looks_and_sees_what_comes_later() -> None:
    store: Store = MemoryStore()
    side = Requests(store, poll_s=0.001)
    side.poll()
    name = put_save_request(store, tags=["a"])
    (request,) = poll_until_found(side)
    assert (request.name, request.tags) == (name, ("a",))
    side.answer(request, folder=FOLDER)
    side.stop_answering()
    assert answer_to(store, name) is not None
    assert not is_open(store, name)


def test_the_thread_ends_with_a_manager_that_was_dropped() -> None:
    side = Requests(MemoryStore(), poll_s=1e6)
    side.poll()
    looking = side._looking
    assert looking is not None
    del side
    looking.result(timeout=120)


def test_keys_below_a_request_are_passed_over() -> None:
    store = MemoryStore()
    store.put("requests/a/b", b"")
    store.put("requests/now", b"")
    side = Requests(store, poll_s=0.001)
    assert names(poll_until_found(side)) == ["now"]
    side.stop_answering()


def test_a_store_that_fails_is_told_once_and_looked_at_again(recorder: Recorder) -> None:
    store = Failing()
    tray = save_requests._Tray(store, Emitter((recorder,)), Background("tray"))
    name = put_save_request(store)
    store.refused["list"] = TransientStoreError("slow down")
    for _ in range(3):
        assert tray.queue_new_requests() == []
    store.refused = {"get": TransientStoreError("slow down more")}
    for _ in range(3):
        assert tray.queue_new_requests() == []
    assert [event.message.rpartition(": ")[2] for event in recorder.of("warning")] == [
        "slow down",
        "slow down more",
    ]
    store.refused = {}
    tray.queue_new_requests()
    assert names(tray.pop_queued_requests()) == [name]


def test_a_request_that_cannot_be_opened_is_left_alone_and_not_tried_for_ever(
    recorder: Recorder,
) -> None:
    store = Failing()
    tray = save_requests._Tray(store, Emitter((recorder,)), Background("tray"))
    put_save_request(store)
    store.refused["get"] = AccessDenied("not yours")
    assert tray.queue_new_requests() == tray.queue_new_requests() == []
    assert len(store.children("requests")) == len(recorder.of("warning")) == 1


def test_an_answer_is_tried_again(recorder: Recorder) -> None:
    store = Failing()
    tray = save_requests._Tray(store, Emitter((recorder,)), ended())
    name = put_save_request(store)
    tray.answer_request(name, AnswerRecord(folder=FOLDER, error=None, created=utc_text()))
    assert answer_to(store, name) is not None
    assert recorder.events == []


def test_an_answer_that_cannot_be_given_is_told_and_stops_nothing(recorder: Recorder) -> None:
    store = Failing()
    tray = save_requests._Tray(store, Emitter((recorder,)), ended())
    name = put_save_request(store)
    store.refused["put"] = AccessDenied("read-only")
    tray.answer_request(name, AnswerRecord(folder=FOLDER, error=None, created=utc_text()))
    (event,) = recorder.of("housekeeping_failed")
    assert "read-only" in event.message
    assert is_open(store, name)


def ended() -> Background:
    """Of a manager that is closing: nothing pauses any more."""
    background = Background("tray")
    background.ask_to_stop()
    return background


@pytest.mark.parametrize(
    "options",
    [
        {"tags": ["latest"]},
        {"tags": "word"},
        {"tags": list(map(str, range(21)))},
        {"reason": "x" * 201},
        {"reason": "two\nlines"},
    ],
)
def test_a_wrong_request_is_not_put(
    store: LocalStore, folder: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        put_save_request(store, **options)
    assert list(folder.iterdir()) == []


def test_the_error_in_an_answer_may_be_any_text(store: LocalStore, found: Requests) -> None:
    name = put_save_request(store)
    (request,) = found.poll()
    found.answer(request, error="bad name \udc80 " + "x" * 100_000)
    found.stop_answering()
    answer = answer_to(store, name)
    assert answer is not None
    assert answer.error is not None
    assert answer.error.startswith("bad name ? xxx")
    assert len(answer.error) == 4000


def put_answer(store: LocalStore, name: str, **changes: Any) -> None:
    members = {"folder": FOLDER, "error": None, "created": utc_text(), "asker": None}
    store.put(f"requests/{name}.answer", AnswerRecord(**{**members, **changes}).encode())


def test_gc_removes_answers_for_which_nobody_waits(store: LocalStore, folder: Path) -> None:
    ours = this_process()
    put_answer(store, "alive", asker=ours)
    put_answer(store, "dead", asker=msgspec.structs.replace(ours, start="1"))
    put_answer(store, "elsewhere", asker=msgspec.structs.replace(ours, boot_id="other"))
    put_answer(store, "nobody")
    (folder / "damaged.answer").write_bytes(b"x")
    (folder / "now").touch()
    planned = collect_garbage(store, dry_run=True).removed
    assert len(list(folder.iterdir())) == 6
    assert collect_garbage(store).removed == planned
    assert sorted(path.name for path in folder.iterdir()) == [
        "alive.answer",
        "damaged.answer",  # not known to be an answer
        "now",
    ]


def test_gc_says_what_it_cannot_remove_and_goes_on(ram_path: Path, tmp_path: Path) -> None:
    (ram_path / "requests").symlink_to(tmp_path)
    report = collect_garbage(LocalStore(ram_path))
    assert report.failed[0][0] == "requests"


def test_what_lay_there_before_the_claim_is_honoured_once_with_all_its_tags(
    ram_path: Path,
) -> None:
    run = new_run()
    with run.manager(ram_path, sinks=()) as manager:
        manager.save(1).wait()
    store = LocalStore(ram_path)
    put_save_request(store, tags=["a"])
    asked = put_save_request(store, tags=["b", "a"])
    (ram_path / "requests" / "now").touch()
    with run.manager(ram_path, sinks=()) as manager:
        assert manager.resume() is not None
        run.train()
        pending = manager.maybe_save(2)
        assert pending is not None
        checkpoint = pending.wait()
        assert set(checkpoint.tags) == {"a", "b"}
        assert checkpoint.reason == "request"
        run.train()
        assert manager.maybe_save(3) is None
    answer = answer_to(store, asked)
    assert answer is not None
    assert answer.folder == checkpoint.folder
    assert [name for name in store.children("requests") if not layout.is_answer(name)] == []


def test_a_request_joins_the_save_that_is_due(ram_path: Path) -> None:
    run = new_run()
    with run.manager(ram_path, sinks=(), every="1step") as manager:
        manager.resume()
        name = put_save_request(manager.store, tags=["a"], reason="mine")
        run.train()
        pending = manager.maybe_save(1)
        assert pending is not None
        checkpoint = pending.wait()
    assert checkpoint.tags == ("a",)
    assert checkpoint.reason == "every 1step, request: mine"
    answer = answer_to(LocalStore(ram_path), name)
    assert answer is not None
    assert answer.folder == checkpoint.folder


def test_a_request_by_another_format_stops_no_training(ram_path: Path) -> None:
    run = new_run()
    with run.manager(ram_path, sinks=()) as manager:
        manager.save(1).wait()
        (ram_path / "requests").mkdir()
        (ram_path / "requests" / "now").write_bytes(b"save, please")
        run.train()
        assert manager.maybe_save(2) is None
    assert [path.name for path in (ram_path / "requests").iterdir()] == ["now"]
