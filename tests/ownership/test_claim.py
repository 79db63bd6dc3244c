"""Claims: exact, looked at again, and what proves a process dead."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest

import warm
from holdfast import errors
from holdfast.errors import StoreError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import Alive, Process, Retired, WriterRecord
from holdfast.ownership import process as process_module
from holdfast.ownership.claim import (
    Choice,
    Claim,
    check_owner,
    claim_run,
    is_closed,
    is_still_right,
    nothing_in_flight,
    put_closed,
)
from holdfast.ownership.owner import Ownership
from holdfast.ownership.process import liveness, this_process
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.root.commit import put_once
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from runs import begun, new_run, remove_folder

QUIET = Emitter(())


def put_writer(store: Store, epoch: int, process: Process, **members: Any) -> None:
    """A claim by some process."""
    store.make_folder(layout.WRITERS)
    record = WriterRecord(
        epoch=epoch,
        nonce="0" * 32,
        **{"resumed_from": None, "rollback": False, "takeover": False, "created": ""} | members,
        process=process,
    )
    store.put(layout.writer_key(epoch), record.encode(), if_absent=True)


def elsewhere() -> Process:
    return Process(host="other", pid=1, start="1", boot_id="another", pid_namespace="pid:[1]")


def test_only_one_of_two_that_judged_the_same_claim_gets_the_run(tmp_path: Path) -> None:
    """R10: the second one's put finds the key taken, and it looks again."""
    store = LocalStore(tmp_path)
    judged: list[str] = []

    def slow_choice() -> Choice:
        if not judged:
            judged.append("slow")
            claim_run(store, repeat(Choice(point=None)), takeover=False, emit=QUIET)
        else:
            judged.append("again")
        return Choice(point=None)

    claim = claim_run(store, iter(slow_choice, None), takeover=False, emit=QUIET)
    assert judged == ["slow", "again"]
    assert claim.epoch == 2


def test_what_was_committed_before_the_claim_is_not_left_behind(tmp_path: Path) -> None:
    """Rule 2: an acknowledged checkpoint between choice and claim makes the claimer choose anew."""
    run = new_run()
    owner = run.manager(tmp_path, preflight=False)
    owner.save(1).wait()
    first = Catalog(owner.store).find_checkpoint()
    choices: list[int] = []

    def choose() -> Choice:
        if not choices:
            choices.append(1)
            run.train()
            owner.save(2).wait()
            return Choice(point=first.reference)
        newest = Catalog(owner.store).find_checkpoint()
        choices.append(newest.step)
        return Choice(point=newest.reference)

    claim = claim_run(owner.store, iter(choose, None), takeover=True, emit=QUIET)
    assert choices == [1, 2]
    assert claim.resumed_from is not None
    assert claim.resumed_from.order == (1, 2)
    owner.close()


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_choice_of_what_another_has_committed_since_the_look_at_the_owner_is_made_again(
    tmp_path: Path, has_begun: bool
) -> None:
    """Rule 2: its epoch is later than the one that was judged, as that of a copy would be."""
    run = new_run()
    if has_begun:
        with run.manager(tmp_path, preflight=False) as first:
            first.save(1).wait()
    store = LocalStore(tmp_path)
    num_choices = 0

    def choose() -> Choice:
        nonlocal num_choices
        num_choices += 1
        if num_choices == 1:
            with run.manager(tmp_path, preflight=False) as other:
                other.resume()
                run.train()
                other.save(2).wait()
        return Choice(point=Catalog(store).find_checkpoint().reference)

    claim = claim_run(store, iter(choose, None), takeover=False, emit=QUIET)
    assert (num_choices, claim.epoch) == (2, 3 if has_begun else 2)
    assert claim.resumed_from is not None
    assert claim.resumed_from.epoch == claim.epoch - 1


def test_an_owner_that_came_since_the_look_is_not_passed_over(tmp_path: Path) -> None:
    """Invariant 11: in a root without claims the folder of its first save looks like a copy."""
    store = LocalStore(tmp_path)
    num_choices = 0

    def choose() -> Choice:
        nonlocal num_choices
        num_choices += 1
        if num_choices == 1:
            live = msgspec.structs.replace(this_process(), pid=os.getppid())
            stat = Path(f"/proc/{live.pid}/stat").read_text().rpartition(")")[2].split()
            put_writer(store, 1, msgspec.structs.replace(live, start=stat[19]))
            begun(store, label="step-00000001", epoch=1, sequence=1)
        return Choice(point=None)

    with pytest.raises(errors.OwnedElsewhere):
        claim_run(store, iter(choose, None), takeover=False, emit=QUIET)
    assert num_choices == 1
    assert Catalog(store).claims() == (1,)


def test_a_choice_that_was_deleted_before_the_claim_is_made_again(tmp_path: Path) -> None:
    """Rule 2: its folder is gone when it is to be made durable."""
    run = new_run()
    with run.manager(tmp_path, preflight=False) as manager:
        first = manager.save(1).wait()
        run.train()
        manager.save(2).wait()
    store = LocalStore(tmp_path)
    steps = iter((1, 2))

    def choose() -> Choice:
        point = Catalog(store).find_checkpoint(next(steps)).reference
        if point.folder == first.folder:
            remove_folder(store, first.folder)
        return Choice(point=point)

    claim = claim_run(store, iter(choose, None), takeover=False, emit=QUIET)
    assert claim.resumed_from is not None
    assert claim.resumed_from.order == (1, 2)
    assert next(steps, None) is None


@pytest.mark.parametrize("is_rollback", [True, False])
def test_a_choice_that_is_being_deleted_does_not_stand(tmp_path: Path, is_rollback: bool) -> None:
    """Rule 4: the claimer puts its claim, and then reads the marks."""
    run = new_run()
    with run.manager(tmp_path, preflight=False) as manager:
        manager.save(1).wait()
    catalog = Catalog(manager.store)
    choice = Choice(point=catalog.find_checkpoint().reference, is_rollback=is_rollback)
    assert choice.point is not None
    claim = Claim(epoch=2, nonce="", resumed_from=choice.point)
    assert is_still_right(catalog, claim, choice)
    mark = Retired(by="writer 9", reason="test").encode()
    manager.store.put(f"{choice.point.folder}/{layout.retired_name(9)}", mark)
    assert not is_still_right(catalog, claim, choice)


def test_a_claim_that_comes_to_nothing_keeps_nobody_away(tmp_path: Path) -> None:
    """Its process may live on for long, and others on its host would be refused."""
    run, store = new_run(), LocalStore(tmp_path)
    with run.manager(tmp_path, preflight=False) as manager:
        manager.save(1).wait()
    choices = iter([Choice(point=None)])  # which is found wrong when the claim is put

    def choose() -> Choice:
        for choice in choices:
            return choice
        raise errors.MismatchError("what is there")

    owner = Ownership(store, takeover=False, emit=QUIET)
    with pytest.raises(errors.MismatchError):
        owner.claim_ownership(iter(choose, None))
    assert owner.claim is None
    assert Catalog(store).highest_epoch() == 2
    another = (
        "import sys\n"
        "from holdfast.ownership.claim import check_owner\n"
        "from holdfast.events import Emitter\n"
        "from holdfast.store.local import LocalStore\n"
        "check_owner(LocalStore(sys.argv[1]), takeover=False, emit=Emitter(()))\n"
    )
    done = warm.run(["-c", another, tmp_path])
    assert done.returncode == 0, done.stderr


def test_an_uncommitted_claim_of_the_latest_moves_nothing(tmp_path: Path) -> None:
    """Rule 2: it read step 1, step 2 was committed, and it died."""
    run = new_run()
    with run.manager(tmp_path, preflight=False) as owner:
        owner.save(1).wait()
        point = Catalog(owner.store).find_checkpoint().reference
        run.train()
        owner.save(2).wait()
    store = LocalStore(tmp_path)
    put_writer(store, 2, elsewhere(), resumed_from=point)
    assert Catalog(store).find_checkpoint().step == 2
    put_writer(store, 3, elsewhere(), resumed_from=point, rollback=True)
    assert Catalog(store).find_checkpoint().step == 1


def test_a_copied_checkpoint_of_a_later_epoch_is_not_of_this_run(tmp_path: Path) -> None:
    """D5: it does not outrank our own, is never deleted by us, and is not resumed here."""
    other = new_run(seed=9)
    for _ in range(3):
        with other.manager(tmp_path / "other", preflight=False) as manager:
            manager.resume()
            other.train()
            manager.save(40 + other.counters["step"]).wait()
    run = new_run()
    with run.manager(tmp_path / "run", keep=Last(1), preflight=False) as manager:
        manager.save(1).wait()
        copied = sorted(p.name for p in (tmp_path / "other").glob("step-*.0003-*"))[0]
        shutil.copytree(tmp_path / "other" / copied, tmp_path / "run" / copied)
        run.train()
        saved = manager.save(2).wait()
        manager.wait()
        assert {c.folder for c in manager.list()} == {copied, saved.folder}
    with run.manager(tmp_path / "run", preflight=False) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        with pytest.raises(errors.UsageError, match="another run"):
            manager.resume(copied)


def test_copies_alone_make_a_root_that_can_be_resumed(tmp_path: Path) -> None:
    """Invariant 10: without their claims they keep their order."""
    run = new_run()
    with run.manager(tmp_path / "one", preflight=False) as manager:
        for step in (1, 2):
            run.train()
            manager.save(step).wait()
    shutil.copytree(
        tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("writers", "latest")
    )
    with run.manager(tmp_path / "two", preflight=False) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 2
        run.train()
        manager.save(3).wait()
        assert Catalog(manager.store).find_checkpoint().step == 3


def test_a_claim_that_cannot_be_read_fences_all_the_same(tmp_path: Path) -> None:
    """Rule 3: presence is what counts."""
    run = new_run()
    manager = run.manager(tmp_path, preflight=False)
    manager.save(1).wait()
    (tmp_path / layout.writer_key(2)).write_bytes(b"garbage")
    run.train()
    with pytest.raises(errors.Superseded, match="cannot be read"):
        manager.save(2).wait()
    manager.close()


def test_a_heartbeat_of_another_host_that_stands_still_binds_nobody() -> None:
    """Invariant 11, over hosts: no clock is compared, only whether the record changes."""
    store = MemoryStore()
    put_writer(store, 1, elsewhere())
    store.put(layout.alive_key(1), Alive(epoch=1, nonce="0" * 32, beat=4).encode())
    waits: list[float] = []
    assert check_owner(store, takeover=False, emit=QUIET, watch=waits.append) == 1
    assert len(waits) == 3

    def beating(seconds: float) -> None:
        beat = Alive(epoch=1, nonce="0" * 32, beat=5)
        store.put(layout.alive_key(1), beat.encode())

    with pytest.raises(errors.OwnedElsewhere, match="takeover"):
        check_owner(store, takeover=False, emit=QUIET, watch=beating)


def test_a_closed_epoch_has_nothing_in_flight_and_a_dead_process_only_locally(
    tmp_path: Path,
) -> None:
    """Rule 1: a request to an object store may outlive its sender."""
    done = subprocess.run(
        [sys.executable, "-c", IDENTITY], capture_output=True, text=True, check=True
    )
    dead = Process(**eval(done.stdout))
    local, remote = LocalStore(tmp_path), MemoryStore()
    for store in (local, remote):
        put_writer(store, 1, dead)
    assert nothing_in_flight(local, 1)
    assert not nothing_in_flight(remote, 1)
    claim = claim_run(remote, repeat(Choice(point=None)), takeover=False, emit=QUIET)
    assert not nothing_in_flight(remote, claim.epoch)
    put_closed(remote, claim)
    assert nothing_in_flight(remote, claim.epoch)


def test_the_close_of_another_claim_of_the_epoch_does_not_count() -> None:
    """A claim of the remote tier replaces an unused local one, whose close stays."""
    store = MemoryStore()
    claim = claim_run(store, repeat(Choice(point=None)), takeover=False, emit=QUIET)
    put_closed(store, replace(claim, nonce="0" * 32))
    assert is_closed(store, 1)
    assert is_closed(store, 1, "0" * 32)
    assert not is_closed(store, 1, claim.nonce)


IDENTITY = """
from holdfast.ownership.process import this_process
p = this_process()
print({name: getattr(p, name) for name in p.__struct_fields__}, flush=True)
"""


def test_a_pid_that_another_process_has_got_by_now_proves_no_life() -> None:
    """R1: pids are given again; a process is known by the time of its start, too."""
    ours = this_process()
    assert liveness(ours) == "ours"
    assert liveness(msgspec.structs.replace(ours, start="1")) == "dead"


def test_what_cannot_be_read_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: without descriptors left, say, only the kernel's "no" is proof."""
    child = subprocess.Popen(
        [sys.executable, "-c", IDENTITY + "input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        record = told(child)
        assert liveness(record) == "alive"

        really_look = process_module._stat

        def refuse(folder: str) -> Any:
            if folder == f"/proc/{child.pid}":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return really_look(folder)

        with monkeypatch.context() as patched:
            patched.setattr(process_module, "_stat", refuse)
            assert liveness(record) == "unknown"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert liveness(record) == "dead"  # a zombie does nothing any more
    finally:
        child.kill()
        child.communicate()
    assert liveness(record) == "dead"


def told(child: subprocess.Popen[str]) -> Process:
    """The identity that a child has printed."""
    assert child.stdout is not None
    return Process(**eval(child.stdout.readline()))


LEADERLESS = """
import ctypes, os, sys, threading

def go_on():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    exec(IDENTITY, {})
    sys.stdin.readline()
    os._exit(0)

exec(IDENTITY, {})
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_is_dead_when_its_last_thread_has_ended(tmp_path: Path) -> None:
    """Rule 1: after a kill the leader is a zombie while another thread may still be in a write, an
    fsync or a link. The same is to be seen where only the leader has ended."""
    store = LocalStore(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", f"IDENTITY = {IDENTITY!r}\n{LEADERLESS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            record = told(child)
            assert told(child) == record  # what it says of itself once the leader is a zombie
            assert liveness(record) == "unknown"
            put_writer(store, 1, record)
            assert not nothing_in_flight(store, 1)

            def beating(seconds: float) -> None:
                beat = Alive(epoch=1, nonce="0" * 32, beat=1)
                store.put(layout.alive_key(1), beat.encode())

            with pytest.raises(errors.OwnedElsewhere):
                check_owner(store, takeover=False, emit=QUIET, watch=beating)

            def ending(seconds: float) -> None:
                assert child.stdin is not None
                child.stdin.close()
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
                waits.append(seconds)

            waits: list[float] = []
            assert check_owner(store, takeover=False, emit=QUIET, watch=ending) == 1
            assert len(waits) == 1  # its death is proof, and nothing else is waited for
            assert nothing_in_flight(store, 1)
        finally:
            child.kill()
    assert liveness(record) == "dead"


HIDDEN = """
import os, sys
from holdfast.ownership.process import liveness
from holdfast.format.records import Process

record = Process(**eval(sys.argv[1]))
assert liveness(record) == "dead"  # the pid is that of a stranger, which is seen
os.setgroups([])
os.setgid(65534)  # with hidepid the group 0 sees everything
os.setuid(65534)
assert not os.path.exists(f"/proc/{record.pid}")
print(liveness(record))
"""


def test_whether_a_hidden_process_is_the_one_of_a_record_is_unknown(tmp_path: Path) -> None:
    """R1: with hidepid only the pid can be asked for, and a stranger may have it by now; the
    heartbeat decides, or nobody could ever claim the run."""
    ours = this_process()
    stranger = {name: getattr(ours, name) for name in ours.__struct_fields__} | {"start": "1"}
    script = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if os.geteuid() != 0 or subprocess.run([*command, "true"], capture_output=True).returncode:
        if os.environ.get("CI"):
            pytest.fail("mounting /proc was refused, so this promise is not tested")
        pytest.skip("mounting /proc was refused; that takes root")
    done = subprocess.run(
        [*command, sys.executable, "-c", HIDDEN, repr(stranger)], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("unknown\n", "")


def test_a_folder_in_the_place_of_a_claim_is_named(tmp_path):
    """Line 26 of the review: the error was private, and said that the put may still take effect."""
    store = LocalStore(tmp_path)
    store.make_folder("writers/00000001.json")
    with pytest.raises(StoreError, match="a folder is in the place") as caught:
        put_once(store, "writers/00000001.json", b"claim")
    assert type(caught.value) is StoreError
