"""Claims about `holdfast uploads`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.roots import Result

from holdfast.errors import AccessDenied
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import Last
from holdfast.store.local import LocalStore
from holdfast.testing.faulty import Fault, FaultyStore
from tiers import Noted, opened, saved
from ways import Tiny

Command = Callable[..., Result]


@pytest.fixture
def mirrored(tmp_path: Path) -> Path:
    """A local root with three checkpoints, of which the remote one has two, and one failed."""
    remote = LocalStore(tmp_path / "remote")
    denied = AccessDenied("403: the policy of the bucket")
    faulty = FaultyStore(
        remote, [Fault(kind="fail", op="put", key="x-*", times=None, error=denied)]
    )
    tiny, noted = Tiny(), Noted()
    with opened(Tiered(tmp_path / "local", remote), tiny, sinks=(noted,)) as manager:
        manager.resume()
        for step in (1, 2):  # of two that wait the newer one would be sent first
            saved(manager, tiny, step)
            noted.wait_for("uploaded", step)
    tiered = Tiered(tmp_path / "local", faulty, close_timeout_s=0)
    with opened(tiered, tiny, sinks=(noted,), label="x-{step}") as manager:
        manager.resume()
        saved(manager, tiny, 3)
        noted.wait_for("upload_failed")
    return tmp_path / "local"


def test_it_shows_what_is_there_what_waits_and_why(holdfast: Command, mirrored: Path) -> None:
    result = holdfast("uploads", mirrored)
    assert result.code == 1
    rows = [line.split() for line in result.out.splitlines()[1:4]]
    assert [(row[0], row[4]) for row in rows] == [
        ("3", "failed,"),
        ("2", "uploaded"),
        ("1", "uploaded"),
    ]
    assert "403: the policy of the bucket" in result.out
    assert "1 waiting" in result.out
    assert "last: step-00000002" in result.out


def test_json_has_what_the_text_says(holdfast: Command, mirrored: Path) -> None:
    document = holdfast("uploads", mirrored, "--json").document
    assert [one["state"] for one in document["checkpoints"]] == ["failed", "uploaded", "uploaded"]
    assert document["waiting"] == 1
    assert document["waiting_nbytes"] == document["checkpoints"][0]["nbytes"]


def test_what_was_deleted_there_and_what_is_not_wanted_is_said(
    holdfast: Command, tmp_path: Path
) -> None:
    tiny = Tiny()
    local, remote = tmp_path / "local", tmp_path / "remote"
    with opened(LocalStore(local), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    with opened(Tiered(local, remote, keep_remote=Last(1)), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 2)
        manager.wait()
        saved(manager, tiny, 3)
    document = holdfast("uploads", local, "--json").document
    states = {one["step"]: one["state"] for one in document["checkpoints"]}
    assert states[3] == "uploaded"
    assert states[2] == "deleted"
    assert states[1] in ("unwanted", "deleted")  # sent before the second save, or not wanted then
    assert document["waiting"] == 0


def test_a_remote_root_that_cannot_be_opened_is_no_obstacle(
    holdfast: Command, mirrored: Path
) -> None:
    remote = mirrored.parent / "remote"
    remote.rename(mirrored.parent / "away")
    remote.write_bytes(b"not a folder")
    document = holdfast("uploads", mirrored, "--json").document
    assert document["unreachable"]
    assert [one["state"] for one in document["checkpoints"]] == ["failed", "uploaded", "uploaded"]
    assert "cannot be read" in holdfast("uploads", mirrored).out


def test_a_root_that_is_not_mirrored_says_so(holdfast: Command, root: Path) -> None:
    result = holdfast("uploads", root)
    assert result.code == 3
    assert "nothing is uploaded from here" in result.err


def test_nothing_is_changed(holdfast: Command, mirrored: Path) -> None:
    """Invariant 11."""
    before = sorted((path, path.stat().st_mtime_ns) for path in mirrored.parent.rglob("*"))
    holdfast("uploads", mirrored)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in mirrored.parent.rglob("*"))


def test_it_needs_no_key_and_tells_no_step_of_what_is_sealed(
    holdfast: Command, tmp_path: Path
) -> None:
    """R31, R34."""
    from holdfast.keys import Encryption, generate

    tiny, noted = Tiny(), Noted()
    local, remote = tmp_path / "local", LocalStore(tmp_path / "remote")
    seals = Encryption(keys=generate())
    with opened(Tiered(local, remote), tiny, encrypt=seals, label="a-{epoch}") as manager:
        manager.resume()
        tiny.become(1)
        manager.save(1, epoch=1).wait()
        manager.wait()
    denied = AccessDenied("403: no tiny.tensors")
    faulty = FaultyStore(
        remote, [Fault(kind="fail", op="put", key="a-2*", times=None, error=denied)]
    )
    tiered = Tiered(local, faulty, close_timeout_s=0)
    with opened(tiered, tiny, encrypt=seals, label="a-{epoch}", sinks=(noted,)) as manager:
        manager.resume()
        tiny.become(2)
        manager.save(2, epoch=2).wait()
        noted.wait_for("upload_failed")
    result = holdfast("uploads", local)
    assert result.code == 1
    rows = [line.split() for line in result.out.splitlines()[1:3]]
    assert [(row[0], row[4]) for row in rows] == [("sealed", "failed,"), ("sealed", "uploaded")]
    assert "tensors" not in result.out
    assert [
        one["step"] for one in holdfast("uploads", local, "--json").document["checkpoints"]
    ] == [
        None,
        None,
    ]
