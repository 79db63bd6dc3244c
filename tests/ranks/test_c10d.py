"""R38 and invariant 9: what torch's stores do, and what `C10d` makes of it; with real servers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from datetime import timedelta
from functools import partial

import msgspec
import pytest
import torch.distributed as dist

import warm
from children import environment
from holdfast.encryption.messages import encrypted
from holdfast.errors import (
    DeadlineExceeded,
    Disconnected,
    FormatError,
    HoldfastError,
    RanksSilent,
    UsageError,
)
from holdfast.keys import Encryption, SecretKey
from holdfast.ranks import c10d, messages
from holdfast.ranks.c10d import READ_S, C10d
from holdfast.ranks.coordinator import LEADER, NUM_KEPT_ROUNDS, Coordinator, RankFailure
from ranks.together import BRIEF_S, PATIENCE_S, Server, client, in_thread, meet, new_server, until

MIB = 2**20


@pytest.fixture(scope="module")
def store() -> dist.Store:
    """A client of a TCPStore whose server is in this process."""
    return new_server()


@pytest.fixture
def server() -> Iterator[Server]:
    """A process that hosts a TCPStore."""
    with Server() as started:
        yield started


def pair(store: dist.Store) -> list[C10d]:
    """A leader and its follower."""
    return meet(lambda: store, 2)


def num_threads() -> int:
    """Threads of the coordinators of this process."""
    return sum(thread.name == "holdfast-ranks" for thread in threading.enumerate())


def put_and_check(store: dist.Store, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # its stub knows only text
    store.check([key])


def full_round(leader: Coordinator, follower: Coordinator, tag: str, data: bytes = b"data") -> None:
    for rank in (leader, follower):
        rank.post(tag, data, timeout_s=PATIENCE_S)
    assert leader.collect(tag, timeout_s=PATIENCE_S).expect_all(tag) == [data, data]
    leader.announce(tag, data, timeout_s=PATIENCE_S)
    assert follower.hear(tag, timeout_s=PATIENCE_S) == data


def test_a_value_of_more_than_8_mib_cuts_the_connection_so_messages_go_in_pieces(
    server: Server,
) -> None:
    with pytest.raises(dist.DistNetworkError):
        put_and_check(client(server.port), "key", bytes(9 * MIB))
    full_round(*pair(client(server.port)), "save", bytes(20 * MIB))


def test_a_message_longer_than_all_pieces_is_refused(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_NUM_PIECES", 3)
    leader, _ = pair(store)
    with pytest.raises(UsageError, match="786433 bytes are too long"):
        leader.post("save", bytes(3 * messages.PIECE_NBYTES + 1), timeout_s=PATIENCE_S)


def test_posts_of_more_ranks_than_keys_in_a_call_are_all_read() -> None:
    """Also when some are missing."""
    store, num_ranks = dist.HashStore(), 2 * messages.MAX_NUM_KEYS + 3
    ranks = meet(lambda: store, num_ranks)
    for rank in ranks:
        rank.post("all", b"%d" % rank.rank, timeout_s=PATIENCE_S)
    for rank in ranks[:-2]:
        rank.post("some", b"", timeout_s=PATIENCE_S)
    came = ranks[LEADER].collect("all", timeout_s=PATIENCE_S).expect_all("all")
    assert came == [b"%d" % n for n in range(num_ranks)]
    silent = ranks[LEADER].collect("some", timeout_s=BRIEF_S).silent
    assert silent == [num_ranks - 2, num_ranks - 1]


def test_a_wait_blocks_all_callers_of_its_client_so_rounds_go_on_beside_it(
    server: Server,
) -> None:
    group = client(server.port)
    leader, follower = pair(group)
    waiting = in_thread(partial(group.wait, ["come"], timedelta(seconds=PATIENCE_S)))
    blocked = in_thread(partial(group.check, ["come"]))
    while not wait([blocked], BRIEF_S).not_done:  # it came before the wait
        blocked = in_thread(partial(group.check, ["come"]))
    hearing = in_thread(partial(follower.hear, "other", timeout_s=PATIENCE_S))
    full_round(leader, follower, "save")
    leader.announce("other", b"", timeout_s=PATIENCE_S)
    assert hearing.result(PATIENCE_S) == b""
    client(server.port).set("come", "")
    waiting.result(PATIENCE_S)
    assert blocked.result(PATIENCE_S) is True


def test_a_stopped_server_does_not_keep_timeouts_so_deadlines_are_kept_here(
    server: Server,
) -> None:
    """Each verb ends at its own deadline, and works again when the server goes on."""
    raw = client(server.port)
    leader, follower = pair(client(server.port))
    with server.stopped():
        stuck = in_thread(partial(raw.wait, ["never"], timedelta(seconds=BRIEF_S)))
        calls = [
            partial(follower.post, "save", b"", timeout_s=BRIEF_S),
            partial(follower.fail, "save", RankFailure("write", "why"), timeout_s=BRIEF_S),
            partial(leader.announce, "save", b"", timeout_s=BRIEF_S),
            partial(leader.collect, "save", timeout_s=BRIEF_S),
        ]
        for call in [in_thread(call) for call in calls]:
            assert type(call.exception(PATIENCE_S)) is DeadlineExceeded
        with pytest.raises(RanksSilent, match="rank 0"):
            follower.hear("save", timeout_s=BRIEF_S)
        with pytest.raises(RanksSilent, match="meeting"):
            C10d(raw, 1, 2, timeout_s=BRIEF_S)
        assert not stuck.done(), f"it obeyed a timeout of {BRIEF_S} s for {READ_S} s"
        for number in range(20):
            with pytest.raises(DeadlineExceeded):
                leader.announce(f"unsaid {number}", b"", timeout_s=0.0)
        # Held by the store: of leader and follower, and of two lives. Of three, some are spare.
        until(lambda: num_threads() <= 2 + 2 + 3 * 2)
    full_round(leader, follower, "next save")
    with pytest.raises(RanksSilent, match="nothing came"):
        follower.hear("unsaid 19", timeout_s=BRIEF_S)


def test_a_process_ends_while_a_stopped_server_holds_its_thread(server: Server) -> None:
    code = (
        "import sys; from datetime import timedelta; import torch.distributed as dist\n"
        "from holdfast.ranks.c10d import C10d\n"
        f"store = dist.TCPStore('127.0.0.1', {server.port}, wait_for_workers=False)\n"
        "leader = C10d(store, 0, 1)\n"
        "print(flush=True); input()\n"
        "try:\n    leader.post('save', b'', timeout_s=0.3)\n"
        "except TimeoutError as error:\n    print(type(error).__name__)\n"
    )
    pipe = subprocess.PIPE
    with warm.Popen(["-c", code], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with server.stopped():
            out, err = process.communicate("\n", timeout=PATIENCE_S)
    assert (out, err, process.returncode) == ("DeadlineExceeded\n", "", 0)


HOST = """\
import threading
from functools import partial
import torch.distributed as dist
from holdfast.ranks.c10d import C10d
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
"""


@pytest.mark.full
def test_a_process_ends_in_peace_while_its_threads_use_the_store() -> None:
    """Python 3.11 aborts it when a thread returns from torch while the interpreter ends."""
    code = (
        "leader = C10d(store, 0, 1)\n"
        "def look():\n"
        "    while True: leader.collect(str(leader.number()), timeout_s=0.01)\n"
        "for _ in range(4): threading.Thread(target=look, daemon=True).start()\n"
        "leader.post('other', bytes(2**20), timeout_s=60)\n"
    )
    for _ in range(5):
        done = warm.run(["-c", HOST + code])
        assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("comes", "starts_threads"),
    [
        pytest.param("first", True, marks=pytest.mark.full),
        ("last", False),
        pytest.param("last", True, marks=pytest.mark.full),
        pytest.param("first", False, marks=pytest.mark.full),
    ],
)
def test_a_save_that_is_finished_at_exit_still_has_its_coordinator(
    comes: str, starts_threads: bool
) -> None:
    """The last turn is taken after the exit handlers of managers, whatever was imported first.

    It is taken when `weakref` calls its finalizers, which here nobody has used before. From Python
    3.12 on no thread starts any more by then.
    """
    refusing = (
        "import atexit, threading\n"
        "def refuse(*_, **__): raise RuntimeError('no new thread at interpreter shutdown')\n"
        "atexit.register(setattr, threading, '_start_new_thread', refuse)\n"
    )
    importing = "from holdfast.control import exits\n"
    never_used = "import weakref; weakref.finalize._registered_with_atexit = False\n"
    code = (
        (never_used + importing + HOST if comes == "first" else HOST + importing)
        + "class Manager:\n"
        "    def finish_at_exit(self):\n"
        "        leader.post('save', b'', timeout_s=60)\n"
        "        return str(leader.collect('save', timeout_s=60).came)\n"
        "manager = Manager()\n"
        "exits.register(manager)\n"
        "leader = C10d(store, 0, 1)\n"
        "listen = partial(leader.collect, 'other', timeout_s=60)\n"
        "threading.Thread(target=listen, daemon=True).start()\n"
        "while ('collect', 'other') not in leader._uses: pass\n"
        + ("" if starts_threads else refusing)
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), text=True, capture_output=True, check=False
    )
    assert (done.stderr, done.returncode) == ("holdfast: {0: b''}\n", 0)


def test_a_fork_does_not_use_the_connection_of_its_parent() -> None:
    """It would take the messages of its parent, and mix its own words with those on the way."""
    code = (
        "import os, sys\n"
        "leader = C10d(store, 0, 1)\n"
        "leader.post('save', b'', timeout_s=60)\n"
        "if os.fork() == 0:\n"
        "    try: leader.collect('save', timeout_s=60)\n"
        "    except ValueError as error: print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(leader.collect('save', timeout_s=60).came)\n"
    )
    done = warm.run(["-c", HOST + code])
    refusal, came = done.stdout.splitlines()
    assert "is a fork of it, which must not use its connection" in refusal
    assert came == "{0: b''}"


def test_a_dead_server_is_an_error_at_once(server: Server) -> None:
    leader, follower = pair(client(server.port))
    hearing = in_thread(partial(follower.hear, "save", timeout_s=10 * PATIENCE_S))
    collecting = in_thread(partial(leader.collect, "save", timeout_s=10 * PATIENCE_S))
    server.kill()
    for call in (hearing, collecting):
        with pytest.raises(Disconnected, match="rank 0 or torchrun, has probably ended"):
            call.result(PATIENCE_S)
    with pytest.raises(Disconnected, match="Broken pipe") as raised:
        follower.post("save", b"", timeout_s=10 * PATIENCE_S)
    assert isinstance(raised.value, HoldfastError)


def test_a_set_succeeds_when_the_server_is_dead_so_a_message_ends_with_a_reply(
    server: Server,
) -> None:
    raw = client(server.port)
    leader, _ = pair(client(server.port))
    server.kill()
    raw.set("key", "value")
    with pytest.raises(Disconnected):
        leader.announce("save", b"", timeout_s=PATIENCE_S)


def test_keys_survive_a_restart_so_each_life_of_a_group_has_a_nonce(store: dist.Store) -> None:
    leader, follower = pair(store)
    follower.post("save", b"of a former life", timeout_s=PATIENCE_S)
    leader.announce("save", b"of a former life", timeout_s=PATIENCE_S)
    leader, follower = pair(store)
    assert leader.collect("save", timeout_s=BRIEF_S).came == {}
    with pytest.raises(RanksSilent):
        follower.hear("save", timeout_s=BRIEF_S)
    full_round(leader, follower, "save again")


def test_a_follower_that_comes_before_its_new_leader_does_not_join_the_former_life(
    store: dist.Store,
) -> None:
    """It has already read what the former leader wrote, and still gets the nonce of the new one."""
    pair(store)
    joining = in_thread(partial(C10d, store, 1, 2, timeout_s=PATIENCE_S))
    former = store.get("holdfast/leader").decode()
    until(lambda: store.check([f"holdfast/hello/{former}/1"]))
    leader = C10d(store, 0, 2, timeout_s=PATIENCE_S)
    full_round(leader, joining.result(PATIENCE_S), "save")
    assert not store.check([f"holdfast/hello/{former}/1"]), "nothing of it stays in the store"


def test_a_follower_whom_no_leader_answers_joins_no_former_life(store: dist.Store) -> None:
    """Whatever a former leader has left in the store, and whoever comes first."""
    store.set("holdfast/leader", "the nonce of a former life")
    with pytest.raises(RanksSilent, match="meeting of all ranks"):
        C10d(store, 1, 2, timeout_s=2.0)


def test_ranks_that_do_not_come_are_named(store: dist.Store) -> None:
    come = [in_thread(partial(C10d, store, rank, 4, timeout_s=PATIENCE_S)) for rank in (1, 3)]
    with pytest.raises(RanksSilent, match="meeting of all ranks") as raised:
        C10d(store, 0, 4, timeout_s=2.0)
    assert raised.value.ranks == [2]
    assert [future.result(PATIENCE_S).rank for future in come] == [1, 3]


def test_the_store_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not by posts that come too late or are not read, failures, and what nobody hears."""
    monkeypatch.setattr(c10d, "KEPT_S", 0.0)
    store = dist.HashStore()
    leader, follower = pair(store)
    sizes = []
    for number in range(5 * NUM_KEPT_ROUNDS):
        full_round(leader, follower, f"whole {number}", bytes(messages.PIECE_NBYTES + 1))
        assert leader.collect(f"late {number}", timeout_s=0.0).silent == [0, 1]
        follower.post(f"late {number}", b"", timeout_s=PATIENCE_S)
        leader.announce(f"unheard {number}", b"", timeout_s=PATIENCE_S)
        leader.announce_each(f"unheard of {number}", [b"", b"plan"], timeout_s=PATIENCE_S)
        leader.announce_each(f"each {number}", [b"", b"plan"], timeout_s=PATIENCE_S)
        assert follower.hear(f"each {number}", timeout_s=PATIENCE_S) == b"plan"
        follower.fail(f"failed {number}", RankFailure("write", "why"), timeout_s=PATIENCE_S)
        assert leader.collect(f"failed {number}", timeout_s=PATIENCE_S).silent == [0]
        follower.post(f"unread {number}", b"", timeout_s=PATIENCE_S)
        leader.fail(f"unread {number}", RankFailure("write", "why"), timeout_s=PATIENCE_S)
        leader.post(f"failed late {number}", b"", timeout_s=PATIENCE_S)
        follower.post(f"failed late {number}", b"", timeout_s=PATIENCE_S)
        leader.collect(f"failed late {number}", timeout_s=PATIENCE_S)
        follower.fail(f"failed late {number}", RankFailure("write", "why"), timeout_s=PATIENCE_S)
        sizes.append(store.num_keys())
    assert len({*sizes[NUM_KEPT_ROUNDS:]}) == 1


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_a_closed_coordinator_has_left_is_deleted_when_all_meet_again(
    is_encrypted: bool,
) -> None:
    """A search over settings makes a thousand of them, each in use for less than a minute."""
    seals = Encryption(keys=SecretKey(bytes(32))) if is_encrypted else None
    store, sizes = dist.HashStore(), []
    for _ in range(4):
        leader, follower = (encrypted(one, seals) for one in pair(store))
        for number in range(5):
            full_round(leader, follower, f"save {number}")
            follower.post(f"unread {number}", b"", timeout_s=PATIENCE_S)
            leader.fail(f"unread {number}", RankFailure("write", "why"), timeout_s=PATIENCE_S)
        for one in (leader, leader, follower):
            one.close()
        sizes.append(store.num_keys())
    assert sizes == [sizes[0]] * 4


@pytest.mark.parametrize("is_closed", [False, True])
def test_an_announcement_is_heard_after_a_close_alone_and_after_a_new_meeting_alone(
    store: dist.Store, is_closed: bool
) -> None:
    leader, follower = pair(store)
    leader.announce("outcome", b"committed", timeout_s=PATIENCE_S)
    if is_closed:
        leader.close()
    else:
        pair(store)
    assert follower.hear("outcome", timeout_s=PATIENCE_S) == b"committed"


def test_what_was_announced_a_moment_ago_is_heard_whatever_was_said_since(
    store: dist.Store,
) -> None:
    """A rank that has waited long looks once a second; short saves make many rounds in that."""
    leader, follower = pair(store)
    leader.announce("question", b"where", timeout_s=PATIENCE_S)
    for number in range(2 * NUM_KEPT_ROUNDS):
        full_round(leader, follower, f"save {number}")
    assert follower.hear("question", timeout_s=PATIENCE_S) == b"where"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"num_more": 10**12, "failure": None, "data": b""}),
        msgspec.msgpack.encode({"num_more": -1, "failure": None, "data": b""}),
        msgspec.msgpack.encode({"num_more": 0, "failure": None, "data": "text"}),
        msgspec.msgpack.encode({"num_more": 0, "failure": ["only a phase"], "data": b""}),
    ],
)
def test_a_value_that_is_no_message_is_refused(store: dist.Store, value: bytes) -> None:
    """R29: a number of pieces is not believed before it is compared with the most there may be."""
    leader, _ = pair(store)
    nonce = store.get("holdfast/leader").decode()
    store.set(f"holdfast/{nonce}/0/1/save", value)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="1/save: not a message of a rank"):
        leader.collect("save", timeout_s=BRIEF_S)


def test_what_is_no_message_does_not_fail_a_later_round(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would, when what is left of an old round is deleted."""
    monkeypatch.setattr(c10d, "KEPT_S", 0.0)
    leader, follower = pair(store)
    leader.announce("old", b"", timeout_s=PATIENCE_S)
    nonce = store.get("holdfast/leader").decode()
    store.set(f"holdfast/{nonce}/0/announced/old", "")
    for number in range(2 * NUM_KEPT_ROUNDS):
        full_round(leader, follower, f"save {number}")


@pytest.mark.full
def test_a_message_that_lacks_a_piece_is_an_error_of_the_ranks(store: dist.Store) -> None:
    """Not one of torch's classes, which nobody handles."""
    leader, follower = pair(store)
    leader.announce("save", bytes(messages.PIECE_NBYTES + 1), timeout_s=PATIENCE_S)
    nonce = store.get("holdfast/leader").decode()
    store.delete_key(f"holdfast/{nonce}/1/announced/save")
    with pytest.raises(Disconnected, match="wait timeout"):
        follower.hear("save", timeout_s=PATIENCE_S)


@pytest.mark.full
def test_a_deadline_is_kept_by_a_rank_that_waits_for_its_turn(store: dist.Store) -> None:
    """It names who is silent, though a long message of another thread held it up."""
    leader, _ = pair(store)
    with leader._turn:
        collecting = in_thread(partial(leader.collect, "save", timeout_s=READ_S))
        time.sleep(READ_S)
    assert collecting.result(READ_S).silent == [0, 1]


class OldStore:
    """A store of torch 2.7."""


def test_a_store_that_cannot_be_cloned_names_the_torch_that_is_needed() -> None:
    with pytest.raises(UsageError, match=r"torch .* cannot clone OldStore: install torch 2\.8"):
        C10d(OldStore(), 0, 1)  # type: ignore[arg-type]


def test_a_group_that_is_not_initialised_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no default process group"):
        C10d.of_default_group()
