"""Waits for other ranks that last: late ranks are named, and a rank that has ended fails it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from holdfast.errors import DeadlineExceeded, RanksFailed, RanksSilent
from holdfast.events import Emitter, Event
from holdfast.format.records import Process
from holdfast.ranks import c10d, chosen, coordinator
from holdfast.ranks.c10d import C10d
from holdfast.ranks.chosen import GroupAlarm
from holdfast.ranks.coordinator import Processes, RankFailure, Watch
from holdfast.ranks.messages import Silences
from ranks.together import PATIENCE_S, Server, client, coordinators, in_thread, until

KINDS = ("threads", "encrypted", "tcp")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look, and warn, after moments."""
    monkeypatch.setattr(coordinator, "FIRST_S", 0.05)
    monkeypatch.setattr(c10d, "FIRST_S", 0.05)
    monkeypatch.setattr(c10d, "LOOK_S", 0.02)
    monkeypatch.setattr(c10d, "BEAT_S", 0.01)


@pytest.fixture
def server() -> Iterator[Server]:
    """A process that hosts a TCPStore."""
    with Server() as started:
        yield started


class Heard:
    """Warnings, of which a test waits for the first."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.came = threading.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.came.set()


@pytest.mark.parametrize("kind", KINDS)
def test_the_leader_names_the_ranks_that_have_not_called_and_still_waits(
    kind: str, tmp_path: Path
) -> None:
    ranks, heard = coordinators(kind, 3, tmp_path), Heard()
    for rank in ranks[:2]:
        rank_post = in_thread(partial(rank.post, "begin", b"", timeout_s=PATIENCE_S))
    watch = Watch(heard, "save of step 1", "begin")
    waits = in_thread(partial(ranks[0].collect, "begin", timeout_s=PATIENCE_S, watch=watch))
    assert heard.came.wait(PATIENCE_S)
    assert "save of step 1: waiting for 0 s" in heard.texts[0]
    assert "rank 2" in heard.texts[0]
    assert "Every rank must call" in heard.texts[0]
    ranks[2].post("begin", b"", timeout_s=PATIENCE_S)
    assert sorted(waits.result(PATIENCE_S).came) == [0, 1, 2]
    rank_post.result(PATIENCE_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_names_the_leader_only_if_it_has_not_called(kind: str, tmp_path: Path) -> None:
    leader, follower = coordinators(kind, 2, tmp_path)
    heard, quiet = Heard(), Heard()
    watch = Watch(heard, "resume()", "begin")
    first = in_thread(partial(follower.hear, "first", timeout_s=PATIENCE_S, watch=watch))
    if kind != "encrypted":  # there it waits for the leader's key, which is a call as well
        assert heard.came.wait(PATIENCE_S)
        assert "rank 0" in heard.texts[0]
    leader.post("begin", b"", timeout_s=PATIENCE_S)
    watch = Watch(quiet, "resume()", "begin")
    second = in_thread(partial(follower.hear, "second", timeout_s=PATIENCE_S, watch=watch))
    assert not quiet.came.wait(0.3)
    for tag, hearing in (("first", first), ("second", second)):
        leader.announce(tag, b"said", timeout_s=PATIENCE_S)
        assert hearing.result(PATIENCE_S) == b"said"


@pytest.mark.parametrize("late", [0, 1])
def test_a_meeting_with_broadcast_names_the_rank_that_is_late(late: int) -> None:
    store, heard = dist.HashStore(), Heard()

    def member(rank: int) -> C10d:
        return C10d(store, rank, 2, timeout_s=PATIENCE_S, warn=heard, is_default=True)

    others = in_thread(partial(member, 1))
    ranks = [member(0), others.result(PATIENCE_S)]
    waits = in_thread(partial(ranks[1 - late].exchange, timeout_s=PATIENCE_S))
    assert heard.came.wait(PATIENCE_S)
    until(lambda: any("broadcast=True" in text for text in heard.texts))
    text = next(text for text in heard.texts if "broadcast=True" in text)
    assert f"rank {late}" in text
    assert "py-spy" in text
    tag = f"meeting {ranks[late].number()} for HostTiers or broadcast=True"
    ranks[late].fail(tag, RankFailure("meeting", "not here"), timeout_s=PATIENCE_S)
    assert isinstance(waits.exception(PATIENCE_S), RanksFailed)


def test_warnings_come_at_growing_intervals() -> None:
    heard = Heard()
    watch = Watch(heard, "save of step 1", "begin")
    due = []
    for _ in range(3):
        due.append(round(watch.next_s, 2))
        watch.warn_of_late_ranks(watch.next_s, {1: "rank 1"})
    assert due == [0.05, 0.15, 0.45]
    assert len(heard.texts) == 3
    assert Watch(heard, "save of step 1").next_s == coordinator.ANSWER_S


def met(
    hosts: Sequence[str],
    ended: set[int],
    store: dist.Store | None = None,
    *,
    is_default: bool = False,
) -> list[C10d]:
    """Ranks on these hosts; the process of a rank has its number, and those of `ended` are gone."""
    store = dist.HashStore() if store is None else store

    def make(rank: int) -> C10d:
        own = Process(
            host=hosts[rank], pid=rank, start="", boot_id=hosts[rank], pid_namespace="one"
        )
        processes = Processes(own=own, has_ended=lambda process: process.pid in ended)
        return C10d(
            store,
            rank,
            len(hosts),
            timeout_s=PATIENCE_S,
            processes=processes,
            is_default=is_default,
        )

    futures = [in_thread(make, rank) for rank in range(len(hosts))]
    return [future.result(PATIENCE_S) for future in futures]


def test_a_rank_whose_process_has_ended_fails_the_round_long_before_the_deadline() -> None:
    ended: set[int] = set()
    ranks = met(["a", "a", "a"], ended)
    for rank in (ranks[0], ranks[2]):
        rank.post("files", b"", timeout_s=PATIENCE_S)
    ended |= {1, 2}  # rank 2 has posted before its end
    found = ranks[0].collect("files", timeout_s=1800, watch=Watch(print, "save of step 1"))
    assert (sorted(found.came), found.silent) == ([0, 2], [])
    assert found.failed[1].reason.startswith("process 1 on a has ended")


def test_followers_of_a_leader_that_has_ended_do_not_wait_for_it() -> None:
    ended: set[int] = set()
    ranks = met(["a", "a"], ended)
    ended.add(0)
    with pytest.raises(RanksSilent, match="from rank 0, in its script: process 0 on a has ended"):
        ranks[1].hear("outcome", timeout_s=1800, watch=Watch(print, "save of step 1"))


def test_a_rank_on_another_host_is_reported_by_its_neighbor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", 2), ("WORLD_SIZE", 3), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, f"{value}")
    ended: set[int] = set()
    ranks = met(["a", "b", "b"], ended)
    ended.add(1)
    hearing = in_thread(
        partial(ranks[2].hear, "plan", timeout_s=1800, watch=Watch(print, "save of step 1"))
    )
    found = ranks[0].collect("shares", timeout_s=1800, watch=Watch(print, "save of step 1"))
    assert "process 1 on b has ended" in found.failed[1].reason
    ranks[0].announce("plan", b"", timeout_s=PATIENCE_S)
    assert hearing.result(PATIENCE_S) == b""


def test_a_silent_rank_of_another_host_fails_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "LOST_S", 0.3)
    ranks, heard = met(["a", "b", "c", "c"], set()), Heard()
    for rank in (ranks[0], ranks[2]):
        rank.post("files", b"", timeout_s=PATIENCE_S)
    for rank in ranks[1:3]:
        rank.close()  # sends no heartbeats any more, as if its host were lost
    watch = Watch(heard, "save of step 1")
    found = ranks[0].collect("files", timeout_s=1800, watch=watch)
    assert (sorted(found.came), sorted(found.failed), found.silent) == ([0, 2], [1], [3])
    assert "process 1 on b has shown no sign of life for 0 s" in found.failed[1].reason
    assert "rank 1 (process 1 on b, no sign of life" in heard.texts[0]
    assert not any("rank 3" in text for text in heard.texts)


def test_followers_notice_a_silent_leader_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "LOST_S", 0.3)
    leader, follower = met(["a", "b"], set())
    leader.close()
    with pytest.raises(RanksSilent, match="process 0 on a has shown no sign of life"):
        follower.hear("outcome", timeout_s=1800, watch=Watch(print, "save of step 1"))


@pytest.mark.parametrize("odd", [0, 1])
def test_a_silent_rank_of_the_own_host_is_named_once_and_waited_for(
    odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d, "LOST_S", 0.05)
    ranks, heard = met(["a", "a"], set()), Heard()
    ranks[odd].close()
    watch = Watch(heard, "save of step 1")
    if odd == 0:
        wait = in_thread(partial(ranks[1].hear, "part", timeout_s=PATIENCE_S, watch=watch))
        say = partial(ranks[0].announce, "part", b"", timeout_s=PATIENCE_S)
    else:
        ranks[0].post("part", b"", timeout_s=PATIENCE_S)
        wait = in_thread(partial(ranks[0].collect, "part", timeout_s=PATIENCE_S, watch=watch))
        say = partial(ranks[1].post, "part", b"", timeout_s=PATIENCE_S)
    assert heard.came.wait(PATIENCE_S)
    assert not wait.done()
    say()
    wait.result(PATIENCE_S)
    (text,) = heard.texts
    assert f"rank {odd} (process {odd} on a, no sign of life for 0 s)" in text


def test_time_in_which_this_rank_did_not_look_is_no_silence() -> None:
    silences = Silences(most_s=4.0)
    for now_s, values in ((10.0, {1: b"1", 2: b"1"}), (12.0, {1: b"1"}), (900.0, {1: b"1"})):
        silences.record_heartbeats(values, now_s)
    assert silences.by_rank == {1: 6.0}
    silences.record_heartbeats({1: b"2", 2: b"1"}, 902.0)
    assert silences.by_rank == {1: 0.0, 2: 0.0}


def num_heartbeats() -> int:
    return sum(thread.name == "holdfast-heartbeat" for thread in threading.enumerate())


def test_heartbeats_end_with_their_manager_and_with_its_store(server: Server) -> None:
    gc.collect()  # threads of earlier tests end
    kept = met(["a", "b"], set(), client(server.port))
    closed = met(["a", "b"], set())
    until(lambda: num_heartbeats() == 4)
    for rank in closed:
        rank.close()
    until(lambda: num_heartbeats() == 2)
    server.process.kill()
    until(lambda: num_heartbeats() == 0)
    del kept
    dropped = met(["a", "b"], set())
    del dropped
    until(lambda: num_heartbeats() == 0)


def test_nothing_is_sent_after_the_end_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, store = threading.Semaphore(0), dist.HashStore()

    def is_initialized() -> bool:
        asked.release()
        return False

    monkeypatch.setattr(dist, "is_initialized", is_initialized)
    ranks = met(["a", "b"], set(), store, is_default=True)
    num_keys = store.num_keys()
    for _ in range(6):
        assert asked.acquire(timeout=PATIENCE_S)
    assert store.num_keys() == num_keys
    for rank in ranks:
        rank.close()


def test_a_store_in_a_file_gets_no_heartbeats(tmp_path: Path) -> None:
    """Each would make the file longer."""
    before = num_heartbeats()
    kept = met(["a", "b"], set(), dist.FileStore(str(tmp_path / "store"), 2))
    assert num_heartbeats() <= before, "those of earlier tests may end in between"
    del kept


def test_processes_of_closed_managers_leave_no_keys() -> None:
    store, numbers = dist.HashStore(), []
    for _ in range(4):
        ranks = met(["a", "a"], set(), store)
        for rank in ranks:
            rank.close()
        numbers.append(store.num_keys())
    # A heartbeat on its way at a close may put one key again; a leak adds several at each meeting.
    assert max(numbers) - min(numbers) <= 1


def test_a_call_whose_time_is_over_does_not_blame_the_store() -> None:
    (rank, _) = met(["a", "a"], set())
    with pytest.raises(DeadlineExceeded, match="time limit"):
        rank.post("files", b"", timeout_s=0.0)


def test_a_group_that_comes_after_the_manager_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Event] = []
    alarm = GroupAlarm("group", Emitter((seen.append,)))
    alone = GroupAlarm(None, Emitter((seen.append,)))
    alarm.warn_if_grouped()
    assert seen == []
    monkeypatch.setattr(chosen, "has_group", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for one in (alarm, alarm, alone):
        one.warn_if_grouped()
    (event,) = seen
    assert (event.kind, "made before it" in event.message) == ("warning", True)
