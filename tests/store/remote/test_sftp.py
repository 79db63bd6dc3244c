"""The store on an SSH server, on a real sshd that these tests start."""

from __future__ import annotations

import getpass
import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import AccessDenied, HoldfastError, NotFound, SaveFailed, UsageError
from holdfast.root.catalog import Catalog
from holdfast.store import open_store
from holdfast.store.base import Buffer, Store
from holdfast.store.remote import RemoteOptions
from holdfast.store.remote.sftp import SftpStore
from holdfast.testing.store_contract import StoreContract
from servers.cache import Unavailable
from servers.fixtures import skip_or_fail
from servers.sshd import Sshd

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A running server."""
    if find_spec("paramiko") is None:
        skip_or_fail("paramiko is not installed")
    program = Sshd(tmp_path_factory.mktemp("sshd"))
    try:
        with program:
            yield program
    except Unavailable as error:
        skip_or_fail(f"sshd: {error}")


@pytest.fixture
def root(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder that does not exist yet."""
    monkeypatch.setenv("HOME", str(sshd.home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folder = f"{sshd.folder}/run-{next(_NUMBERS)}"
    return f"sftp://{getpass.getuser()}@127.0.0.1:{sshd.port}{folder}"


@pytest.mark.full
class TestSftp(StoreContract):
    @pytest.fixture
    def store(self, root: str) -> Store:
        return open_store(root)

    def test_no_temporary_file_and_no_empty_folder_is_left(self, store: Store, sshd: Sshd) -> None:
        store.put("a/b/c", b"x")
        store.put("a/d", b"x", if_absent=True)
        store.create("a/e", 10).write(0, memoryview(b"12345"))
        assert len([*store.uploads("a")]) == 1
        store.delete_many(["a/b/c", "a/d"])
        store.delete("a/")
        folder = sshd.folder / store.url.rpartition("/")[2]
        assert not (folder / "a").exists()


def test_a_run_is_saved_and_resumed(root: str) -> None:
    model = torch.nn.Linear(2, 2)
    with holdfast.CheckpointManager(root, {"model": model}) as manager:
        manager.save(1, wait=True)
        manager.save(2, wait=True)
    weights = holdfast.load_weights(f"{root}@step=1")
    assert torch.equal(weights["weight"], model.weight)


def test_an_unknown_host_is_refused_with_the_way_to_add_it(root: str, sshd: Sshd) -> None:
    known = sshd.home / ".ssh" / "known_hosts"
    kept = known.read_text("utf-8")
    known.write_text("", "utf-8")
    try:
        with pytest.raises(AccessDenied, match="ssh-keyscan -p"):
            open_store(root).get("a")
    finally:
        known.write_text(kept, "utf-8")


def test_a_changed_host_key_is_refused(root: str, sshd: Sshd) -> None:
    known, other = sshd.home / ".ssh" / "known_hosts", sshd.home / ".ssh" / "id_ed25519.pub"
    kept = known.read_text("utf-8")
    key = " ".join(other.read_text("utf-8").split()[:2])
    known.write_text(f"[127.0.0.1]:{sshd.port} {key}\n", "utf-8")
    try:
        with pytest.raises(AccessDenied, match="ssh-keygen -R"):
            open_store(root).get("a")
    finally:
        known.write_text(kept, "utf-8")


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(UsageError, match="password") as caught:
        open_store("sftp://me:secret@host/run")
    assert "secret" not in str(caught.value)


def test_a_lost_connection_is_made_again(root: str, sshd: Sshd) -> None:
    store = open_store(root)
    store.put("a", b"before")
    sessions = _descendants(sshd.pids[0])
    assert sessions
    for session in sessions:
        os.kill(session, signal.SIGKILL)
    assert store.get("a") == b"before"
    store.put("b", b"after", if_absent=True)
    assert store.get("b") == b"after"


def test_a_server_that_hangs_gets_a_new_connection(root: str, sshd: Sshd) -> None:
    store = SftpStore(root, options=RemoteOptions(timeout_s=1, connect_timeout_s=2, retry_s=20))
    store.put("a", b"before")
    sessions = _descendants(sshd.pids[0])
    assert sessions
    for session in sessions:
        os.kill(session, signal.SIGSTOP)
    store._idle.clear()  # so that a session is opened on the connection that hangs
    try:
        assert store.get("a") == b"before"
    finally:
        for session in sessions:
            os.kill(session, signal.SIGCONT)


def test_an_older_object_of_the_same_length_is_not_taken_for_the_new_one(root: str) -> None:
    open_store(root).put("a", b"old")
    with pytest.raises(NotFound):
        _Cleared(root).put("a", b"new")
    assert open_store(root).get("a") == b"old"


class _Cleared(SftpStore):
    """Loses its temporary files before they are renamed."""

    def sync(self, sftp: Any, handle: bytes) -> None:
        super().sync(sftp, handle)
        for path in self._temporaries(""):
            sftp.remove(self.path(path))


@pytest.mark.parametrize(
    "options", [{"max_upload_mb_s": 1}, {"max_download_mb_s": 1}, {"checksums": True}]
)
def test_options_without_effect_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no effect"):
        SftpStore("sftp://host/run", options=RemoteOptions(**options))


def test_a_server_is_no_local_tier(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="object store"):
        holdfast.Tiered("sftp://host/run", str(tmp_path))


@pytest.mark.full
def test_a_server_killed_during_a_commit_loses_no_earlier_one(root: str, sshd: Sshd) -> None:
    store = _Killing(root, sshd)
    manager = holdfast.CheckpointManager(store, {"model": torch.nn.Linear(256, 256)})
    manager.save(1, wait=True)
    store.is_armed = True
    try:
        with pytest.raises(SaveFailed, match="connect"):
            manager.save(2, wait=True)
        with suppress(HoldfastError):
            manager.close()
    finally:
        sshd.start()
    assert [entry.step for entry in Catalog(open_store(root)).checkpoints()] == [1]
    assert sorted(holdfast.load_weights(f"{root}@step=1")) == ["bias", "weight"]


class _Killing(SftpStore):
    """Kills the server and its sessions when the next manifest is put."""

    def __init__(self, url: str, sshd: Sshd) -> None:
        super().__init__(url, options=RemoteOptions(max_retries=1, retry_s=0.2))
        self.is_armed = False
        self._sshd = sshd

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        if self.is_armed and key.endswith("manifest.json"):
            self.is_armed = False
            sessions = _descendants(self._sshd.pids[0])
            self._sshd.kill()
            for session in sessions:
                with suppress(ProcessLookupError):
                    os.kill(session, signal.SIGKILL)
        super().put(key, data, if_absent=if_absent)


def _descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8")
    found = [int(word) for word in text.split()]
    return found + [each for child in found for each in _descendants(child)]
