"""Claims about `holdfast save`, asked of a training in a process of its own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.cli import asked
from tests.cli.roots import Result, overwrite

import warm
from holdfast.cli import save as command
from holdfast.format.records import Alive, AnswerRecord, WriterRecord
from holdfast.ownership.process import this_process
from holdfast.store.local import LocalStore
from rights import read_only

Command = Callable[..., Result]
Training = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """Starts a training in `tmp_path / "run"` that runs until the test ends."""
    root = tmp_path / "run"
    started: list[subprocess.Popen[str]] = []

    def start(how: str = "") -> subprocess.Popen[str]:
        process = warm.Popen(
            [asked.__file__, root, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    if root.exists():
        (root / "stop").touch()
    for process in started:
        process.communicate(timeout=60)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if is_so():
            return
        pause.wait(0.005)
    raise AssertionError(f"never happened: {what}")


def in_requests(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "requests").iterdir())


def test_a_training_is_asked_and_its_checkpoint_is_there(
    holdfast: Command, training: Training, tmp_path: Path
) -> None:
    training()
    root = tmp_path / "run"
    result = holdfast("save", root, "--tag", "good", "--tag", "x", "--reason", "why not", "--json")
    assert result.code == 0, result
    document = result.document
    assert list(document) == ["holdfast", "root", "folder", "step", "tags", "waited_s"]
    assert document["tags"] == ["good", "x"]
    shown = holdfast("show", f"{root}@good", "--json").document["checkpoint"]
    assert (shown["folder"], shown["step"]) == (document["folder"], document["step"])
    assert shown["reason"] == "request: why not"
    assert in_requests(root) == []
    assert holdfast("verify", root).code == 0


def test_each_request_gets_a_checkpoint(
    holdfast: Command, training: Training, tmp_path: Path
) -> None:
    training()
    first = holdfast("save", tmp_path / "run")
    second = holdfast("save", tmp_path / "run")
    assert (first.code, second.code) == (0, 0)
    assert first.out.split()[0].startswith("step-")
    assert first.out.split()[0] != second.out.split()[0]


def test_a_touched_file_asks_too(holdfast: Command, training: Training, tmp_path: Path) -> None:
    training()
    root = tmp_path / "run"
    wait_until((root / "requests").is_dir, "the folder for requests")
    (root / "requests" / "now").touch()
    wait_until(lambda: in_requests(root) == [], "the file is removed")
    (checkpoint,) = holdfast("ls", root, "--json").document["checkpoints"]
    assert checkpoint["reason"] == "request"


def test_a_save_that_fails_is_told(holdfast: Command, training: Training, tmp_path: Path) -> None:
    training("broken")
    result = holdfast("save", tmp_path / "run", "--json")
    assert result.code == 1
    assert result.document["error"]["kind"] == "RequestFailed"
    assert "lock" in result.document["error"]["message"]
    assert in_requests(tmp_path / "run") == []


def test_without_an_answer_in_time_the_request_is_withdrawn(
    holdfast: Command, training: Training, tmp_path: Path
) -> None:
    training("stuck")
    result = holdfast("save", tmp_path / "run", "--timeout", "0.3s", "--json")
    assert result.code == 4
    assert result.document["error"]["kind"] == "DeadlineExceeded"
    assert in_requests(tmp_path / "run") == []


def test_a_training_that_dies_before_it_answers_is_noticed(
    holdfast: Command,
    training: Training,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_OWNER_S", 0.01)
    process = training("stuck")
    root = tmp_path / "run"
    results: list[Result] = []
    asking = threading.Thread(target=lambda: results.append(holdfast("save", root)))
    asking.start()
    wait_until((root / "requests").is_dir, "the folder for requests")
    wait_until(lambda: in_requests(root) != [], "the request")
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    asking.join(timeout=60)
    (result,) = results
    assert result.code == 1
    assert "is gone, so no process can save it. It ended before it saved" in result.err
    assert in_requests(root) == []


def test_ctrl_c_withdraws_the_request(training: Training, tmp_path: Path) -> None:
    training("stuck")
    root = tmp_path / "run"
    asking = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "save", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (root / "requests").is_dir() and in_requests(root) != [], "the request")
    asking.send_signal(signal.SIGINT)
    out, err = asking.communicate(timeout=60)
    assert asking.returncode == 130
    assert out == ""
    assert err == "holdfast: the request is withdrawn; a save that has started continues\n"
    assert in_requests(root) == []


def test_a_run_that_ended_cleanly_cannot_save(holdfast: Command, root: Path) -> None:
    result = holdfast("save", root, "--json")
    assert result.code == 3
    assert result.document["error"]["kind"] == "NotOwned"
    assert "has ended cleanly" in result.document["error"]["message"]
    assert not (root / "requests").exists()


def test_a_run_whose_process_is_gone_cannot_save(holdfast: Command, root: Path) -> None:
    owned_by(root, start="1")
    result = holdfast("save", root)
    assert result.code == 3
    assert "is gone, so no process can save it" in result.err


def test_a_run_without_a_claim_or_with_a_broken_one_cannot_save(
    holdfast: Command, root: Path
) -> None:
    overwrite(root / "writers" / "00000001.json", b"x")
    assert holdfast("save", root).code == 3
    (root / "writers" / "00000001.json").unlink()
    result = holdfast("save", root)
    assert result.code == 3
    assert "no process owns this run" in result.err


@pytest.mark.parametrize(
    "options",
    [
        ["--timeout", "soon"],
        ["--timeout", "5step"],
        ["--tag", "latest"],
        ["--reason", "a\nb"],
    ],
)
def test_a_wrong_call_asks_nobody(holdfast: Command, root: Path, options: list[str]) -> None:
    owned_by(root)
    assert holdfast("save", root, *options).code == 2
    assert not (root / "requests").exists()


def owned_by(root: Path, **changes: object) -> None:
    """Make the claim of the root that of a process that has not closed."""
    path = root / "writers" / "00000001.json"
    writer: WriterRecord = WriterRecord.decode(path.read_bytes(), what="claim")
    process = msgspec.structs.replace(this_process(), **changes)
    overwrite(path, msgspec.structs.replace(writer, process=process).encode())
    (root / "writers" / "00000001.closed.json").unlink()


def test_a_process_on_another_host_is_asked_until_its_heart_stands_still(
    holdfast: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_OWNER_S", 0.01)
    monkeypatch.setattr(command, "WATCH_S", 0.5)
    owned_by(root, host="elsewhere", boot_id="other")
    nonce = WriterRecord.decode((root / "writers" / "00000001.json").read_bytes(), what="w").nonce
    alive = Alive(epoch=1, nonce=nonce, beat=7).encode()
    (root / "writers" / "00000001.alive.json").write_bytes(alive)
    result = holdfast("save", root)
    assert result.code == 1
    assert "on another host, so it may have ended; asking it anyway" in result.err
    assert "has shown no sign of life" in result.err
    assert in_requests(root) == []


def answering(root: Path, data: bytes | None) -> threading.Thread:
    """An owner that answers whatever is asked with these bytes, or only removes it."""

    def answer() -> None:
        wait_until((root / "requests").is_dir, "the folder for requests")
        wait_until(lambda: in_requests(root) != [], "the request")
        (name,) = in_requests(root)
        store = LocalStore(root)
        if data is not None:
            store.put(f"requests/{name}.answer", data)
        store.delete(f"requests/{name}")

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (None, "removed without an answer"),
        (b"x" * 100_000, "at most 65536"),
        (b"{}", "cannot be read"),
    ],
)
def test_an_answer_that_is_broken_or_missing_is_an_error(
    holdfast: Command, root: Path, data: bytes | None, told: str
) -> None:
    owned_by(root)
    owner = answering(root, data)
    result = holdfast("save", root)
    owner.join(timeout=60)
    assert result.code == 1
    assert told in result.err
    assert in_requests(root) == []


def test_an_error_cannot_steer_the_terminal(holdfast: Command, root: Path) -> None:
    owned_by(root)
    data = AnswerRecord(folder=None, error="\x1b[2Jno", created="").encode()
    owner = answering(root, data)
    result = holdfast("save", root)
    owner.join(timeout=60)
    assert (result.code, "\x1b" in result.err) == (1, False)


def test_a_checkpoint_that_retention_has_deleted_already_is_named_all_the_same(
    holdfast: Command, root: Path
) -> None:
    owned_by(root)
    folder = "step-00000009.0001-000009-01234567"
    data = AnswerRecord(folder=folder, error=None, created="").encode()
    owner = answering(root, data)
    result = holdfast("save", root, "--json")
    owner.join(timeout=60)
    assert result.code == 0
    assert (result.document["folder"], result.document["step"]) == (folder, None)


def test_a_place_that_is_no_root_is_code_3(holdfast: Command, tmp_path: Path) -> None:
    assert holdfast("save", tmp_path / "nothing").code == 3


def test_where_one_may_not_write_it_says_so(holdfast: Command, root: Path, open_path: Path) -> None:
    owned_by(root)
    shown = Path(shutil.copytree(root, open_path / "run", symlinks=True))
    with read_only(shown):
        result = holdfast("save", shown)
    assert result.code == 1
