"""R38: simulated clusters keep the invariants of a save by many ranks; broken protocols do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.format import layout
from holdfast.format.manifest import LazyTable
from holdfast.root import catalog
from holdfast.root import commit as commit_module
from holdfast.saving import distributed, save, save_messages
from holdfast.saving.distributed import FollowingSave, LeadingSave
from holdfast.store.base import GatheringWriter
from holdfast.store.memory import MemoryStore
from holdfast.testing.cluster import Cluster, Faults, Simulation, measure_saves, simulate
from holdfast.testing.cluster.network import VirtualStore

EIGHT = Cluster(num_ranks=8, num_replicas=2, ranks_per_host=2)
MANY = Cluster(num_ranks=64, num_replicas=2)


def faults(rate: float) -> Faults:
    """Every kind of fault, at one rate."""
    return Faults(
        crash=rate,
        stop=rate / 2,
        cut=rate,
        lost=rate,
        store_error=rate,
        lost_reply=rate,
        late_put=rate,
        takeover=0.3,
    )


def play(cluster: Cluster, seeds: range, rate: float) -> list[Simulation]:
    """Run seeds of three lives, and expect no violation."""
    runs = [simulate(cluster, seed=seed, faults=faults(rate), num_lives=3) for seed in seeds]
    assert [violation for run in runs for violation in run.violations] == []
    return runs


def test_without_faults_all_ranks_commit_every_save_and_resume_from_the_last() -> None:
    run = simulate(EIGHT, num_saves=3, num_lives=2)
    assert run.violations == []
    assert {told.outcome for told in run.outcomes} == {"committed"}
    assert len(run.outcomes) == 2 * 3 * 8
    assert len(run.committed) == 6
    assert sum("resumes at step 3" in line for line in run.trace) == 8


def test_a_seed_gives_the_same_run_again() -> None:
    one, two = (simulate(EIGHT, seed=5, faults=faults(0.002)) for _ in range(2))
    assert one.trace == two.trace
    assert simulate(EIGHT, seed=6, faults=faults(0.002)).trace != one.trace


def test_faults_and_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="crash"):
        Faults(crash=2)
    with pytest.raises(UsageError, match="num_replicas"):
        Cluster(num_ranks=8, num_replicas=3)
    with pytest.raises(UsageError, match="num_boxes"):
        Cluster(num_ranks=8, num_boxes=0)


def test_no_fault_in_a_few_seeds_breaks_an_invariant() -> None:
    told = [told.outcome for run in play(EIGHT, range(12), 0.002) for told in run.outcomes]
    assert {"committed", "failed"} <= {*told}
    play(MANY, range(1), 0.0002)


def test_of_two_lives_that_begin_at_once_the_second_may_be_the_first_to_claim_the_run() -> None:
    (run,) = play(MANY, range(182, 183), 0.0002)
    first = {told.life: told.folder for told in reversed(run.outcomes) if told.folder}
    assert layout.parse_attempt(first[1]).epoch == 2  # type: ignore[union-attr]


@pytest.mark.full
def test_no_fault_in_many_seeds_breaks_an_invariant() -> None:
    play(EIGHT, range(12, 300), 0.002)
    play(MANY, range(1, 20), 0.0002)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_no_fault_in_a_thousand_seeds_of_64_ranks_breaks_an_invariant(first: int) -> None:
    play(MANY, range(first, first + 100), 0.0002)


# Broken on purpose


def _leader_does_not_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks post before their files are there, and the leader does not look."""

    def put_later(self: GatheringWriter, content: bytearray) -> None:
        view = self._store
        assert isinstance(view, VirtualStore)
        clock, data = view._process.clock, bytes(content)
        clock.call_at(clock.now_s + 1.0, lambda: view._put_now(self._key, data, if_absent=False))

    monkeypatch.setattr(GatheringWriter, "put_content", put_later)
    monkeypatch.setattr(save, "check_sizes", lambda files: None)


def _follower_puts_no_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower takes a silent leader for one that failed."""
    monkeypatch.setattr(distributed, "abort_for_silent_leader", lambda *arguments, **options: False)


def _manifest_is_put_over_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest replaces whatever is in the register."""

    def put(store: Any, key: str, data: bytes) -> bool:
        store.put(key, data)
        return False

    monkeypatch.setattr(commit_module, "put_once", put)


def _leader_is_never_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader announces a failure although its manifest may be there."""
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(LeadingSave, "is_in_doubt", never, raising=False)


def _owner_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader whose run was taken over does not notice."""
    monkeypatch.setattr(commit_module, "check_ownership", lambda *arguments, **options: None)


def _follower_trusts_its_own_post(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower whose post raises says that the save failed."""

    def post(self: FollowingSave, files: Any, staged: Any) -> None:
        self._post("files", self._files_post(files, staged, {}))

    monkeypatch.setattr(FollowingSave, "post_files", post)


@pytest.mark.parametrize(
    ("mutant", "some", "violation"),
    [
        (_leader_does_not_wait_for_files, Faults(), "is missing"),
        pytest.param(
            *(_follower_puts_no_marker, Faults(cut=0.06), "told that it failed"),
            marks=pytest.mark.full,
        ),
        (_manifest_is_put_over_all_else, Faults(stop=0.02), "its register went from"),
        pytest.param(
            *(_leader_is_never_in_doubt, Faults(store_error=0.04), "told that it failed"),
            marks=pytest.mark.full,
        ),
        (_owner_is_not_checked, Faults(stop=0.02, takeover=1.0), "resumed from"),
        (_follower_trusts_its_own_post, Faults(cut=0.03), "told that it failed"),
    ],
)
def test_a_broken_protocol_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None],
    some: Faults,
    violation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    for seed in range(400):
        run = simulate(Cluster(num_ranks=3), seed=seed, faults=some, num_lives=2)
        if any(violation in one for one in run.violations):
            return
    pytest.fail("400 seeds, and no violation")


# Sizes


def test_costs_of_saves_by_many_ranks_are_measured() -> None:
    first, later = measure_saves(
        Cluster(num_ranks=64, num_boxes=200, num_replicas=4, box_nbytes=1 << 20)
    )
    assert 1 <= first.imbalance < 1.1
    assert 0 < later.received_nbytes < first.received_nbytes
    assert 0 < later.sent_nbytes < first.sent_nbytes
    assert first.plan_s <= first.leader_s
    assert 0 < first.rank_s <= first.longest_rank_s
    assert first.index_nbytes > 0


def test_a_follower_decodes_no_table_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 16,384 ranks would each decode the names of 83,000 files, several times in a save."""
    calls, saved = Counter[str](), Counter[str]()
    real = save._write_as_follower

    def count(place: Any, name: str) -> None:
        function = getattr(place, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(place, name, counted)

    def follow(*arguments: Any) -> Any:
        before = calls.copy()
        result = real(*arguments)
        saved.update(calls - before)
        saved["saves"] += 1
        return result

    monkeypatch.setattr(save, "_write_as_follower", follow)
    count(save_messages, "decode_committed")
    count(catalog, "decode_register")
    count(MemoryStore, "get")
    count(LazyTable, "_read")
    found = []
    for num_ranks in (64, 256):
        calls.clear()
        saved.clear()
        measure_saves(Cluster(num_ranks=num_ranks))
        found.append(saved.copy())
        assert calls["_read"] == 0
    few, many = found
    assert few["saves"] >= 64
    assert few["decode_committed"] == few["saves"]
    assert set(few) == {"saves", "decode_committed", "get"}
    assert few == many


@pytest.mark.full
@pytest.mark.parametrize("num_replicas", [1, 32])
def test_messages_grow_no_faster_than_n_log_n(num_replicas: int) -> None:
    few, many = (
        measure_saves(Cluster(num_ranks=num_ranks, num_boxes=200, num_replicas=num_replicas))
        for num_ranks in (64, 512)
    )
    for low, high in zip(few, many, strict=True):
        nbytes = [one.received_nbytes + one.sent_nbytes for one in (low, high)]
        assert nbytes[1] <= nbytes[0] * 8 * 9 / 6
