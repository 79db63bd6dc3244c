"""R38: the first save is tried by every rank, and one error says all that will not work."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from allranks import Breaking, Member, all_of, on_ranks
from holdfast import Encryption, Tiered, errors
from holdfast.events import Event
from holdfast.keys import SecretKey
from holdfast.ranks.coordinator import Coordinator
from holdfast.root.catalog import Catalog
from holdfast.store.base import Buffer, FreeSpace, Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.testing.ranks import ThreadCoordinator

HOST = socket.gethostname()


class Cramped(FaultyStore):
    """A view of a store that sees only so much room."""

    def __init__(self, inner: Store, nbytes: int, file_system: str = "") -> None:
        super().__init__(inner)
        self._space = FreeSpace(nbytes, None, file_system)

    @override
    def free_space(self) -> FreeSpace:
        return self._space


class WritingElsewhere(FaultyStore):
    """A view of a store whose puts of one rank's own objects are seen by nobody else."""

    @override
    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        if "register-" in key:
            self._own.put(key, data, if_absent=if_absent)
        else:
            super().put(key, data, if_absent=if_absent)

    @override
    def get(self, key: str, start: int = 0, nbytes: int | None = None) -> bytes:
        source: Store = self._own if "register-" in key else self.inner
        return source.get(key, start, nbytes)

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._own = MemoryStore()


def first_save(
    views: Sequence[Store], ranks: Sequence[Coordinator] | None = None, **options: Any
) -> list[Any]:
    """What a first save of a rank for each view says, after which another is tried."""

    def work(member: Member) -> tuple[str, str]:
        given = {"preflight": True, "save_timeout_s": 300.0, **options}
        manager = member.manager(views[member.rank], **given)
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return type(error).__name__, f"{error} {error.__cause__}"
        finally:
            manager.close()
        return "", "committed"

    return on_ranks(ranks if ranks is not None else len(views), work)


def is_clean(store: Store) -> bool:
    """Whether no scratch folder and no checkpoint is left."""
    return not [key for key in store.children() if key.startswith(("preflight", "step"))]


def test_all_problems_of_all_ranks_are_one_error_on_all() -> None:
    store = MemoryStore()
    cannot = [
        Fault(kind="fail", op="create", key=key, error=errors.AccessDenied(why), times=None)
        for key, why in (("*/file-1", "no files"), ("*/file-2", "no files, either"))
    ]
    views = [Cramped(store, 1), FaultyStore(store, cannot[:1]), FaultyStore(store, cannot[1:])]
    found = first_save(views)
    assert [kind for kind, _ in found] == ["PreflightFailed", "RanksFailed", "RanksFailed"]
    for _, said in found:
        assert "room:" in said
        assert f"rank 1 on {HOST}: creating a file: no files" in said
        assert f"rank 2 on {HOST}: creating a file: no files, either" in said
    assert is_clean(store)
    assert [said for _, said in first_save([store] * 3)] == ["committed"] * 3


def test_a_preflight_that_failed_is_made_again_by_all() -> None:
    store = MemoryStore()
    once = Fault(kind="fail", op="create", key="*/file-1", error=errors.AccessDenied("not yet"))
    views = [store, FaultyStore(store, [once])]

    def work(member: Member) -> tuple[str, str]:
        view = views[member.rank]
        with member.manager(view, preflight=True, save_timeout_s=300) as manager:
            with pytest.raises(errors.HoldfastError) as caught:
                manager.save(1)
            return str(caught.value), manager.save(2).wait().folder

    for said, _ in all_of(on_ranks(2, work)):
        assert "not yet" in said
    assert [entry.step for entry in Catalog(store).checkpoints()] == [2]


@pytest.mark.parametrize("odd", [0, 2])
def test_a_save_of_all_ranks_must_fit_into_the_least_room_that_any_sees(odd: int) -> None:
    store = MemoryStore()
    views = [Cramped(store, 5_000 if rank == odd else 1 << 40) for rank in range(3)]
    found = first_save(views)
    assert found[0][0] == "PreflightFailed"
    assert all("5000 are free" in said for _, said in found)


def test_a_rank_that_sees_too_little_room_for_its_part_is_named_to_all() -> None:
    store = MemoryStore()
    views = [Cramped(store, 1 << 40, "7"), Cramped(store, 1000, "8"), Cramped(store, 30_000, "9")]
    found = first_save(views)
    assert [kind for kind, _ in found] == ["PreflightFailed", "RanksFailed", "RanksFailed"]
    for _, said in found:
        assert f"on file system 8 of {HOST} needs" in said
        assert "of rank 1, and" in said
        assert "rank 2" not in said


def test_a_rank_with_other_storage_is_named() -> None:
    store = MemoryStore()
    found = first_save([store, store, MemoryStore(), MemoryStore()])
    assert [kind for kind, _ in found] == ["NotShared", *["RanksFailed"] * 3]
    for _, said in found:
        assert f"rank 2 on {HOST} does not see what the leader has written" in said
        assert f"rank 3 on {HOST} does not see" in said
        assert "rank 1 on" not in said
    assert is_clean(store)


def test_a_folder_of_another_host_is_named(tmp_path: Path) -> None:
    roots = [LocalStore(tmp_path / "shared"), LocalStore(tmp_path / "apart")]
    found = first_save(roots)
    assert found[0][0] == "NotShared"
    assert f"rank 1 on {HOST} does not see" in found[0][1]
    assert is_clean(roots[0])
    assert not (tmp_path / "apart").exists()


def test_what_the_leader_does_not_see_is_named() -> None:
    store = MemoryStore()
    found = first_save([store, WritingElsewhere(store), store])
    assert found[0][0] == "NotShared"
    assert f"the leader does not see what rank 1 on {HOST} has written" in found[0][1]
    assert "rank 2" not in found[0][1]
    assert is_clean(store)


def test_every_rank_finds_how_it_writes(tmp_path: Path) -> None:
    events: list[list[Event]] = [[], []]

    def work(member: Member) -> None:
        sinks = (events[member.rank].append,)
        with member.manager(tmp_path, preflight=True, sinks=sinks) as manager:
            manager.save(1).wait()

    all_of(on_ranks(2, work))
    said = [[e.message for e in one if e.kind == "preflight"] for one in events]
    assert len(said[0]) == len(said[1]) == 1
    assert all("large files are written" in one[0] for one in said)


def test_without_a_preflight_no_rank_tries_anything() -> None:
    views = [FaultyStore(store) for store in [MemoryStore()] * 2]
    assert [said for _, said in first_save(views, preflight=False)] == ["committed"] * 2
    assert not [key for view in views for _, key in view.ops if "preflight" in key]


@pytest.mark.parametrize("how", ["die", "raise"])
@pytest.mark.parametrize("verb", ["hear", "post"])
def test_a_rank_that_is_lost_while_it_tries_is_named(how: Any, verb: Any) -> None:
    store = MemoryStore()
    part = "probe" if verb == "post" else "plan 3"
    ranks: list[Coordinator] = [*ThreadCoordinator.for_ranks(3)]
    ranks[1] = Breaking(ranks[1], verb, part, how)
    timeout_s = 2.0 if how == "die" else 300.0
    found = first_save([store] * 3, ranks, save_timeout_s=timeout_s)
    for rank in (0, 2):
        assert "rank 1" in found[rank][1], found
    assert not Catalog(store).checkpoints()


def test_a_leader_that_may_not_begin_is_heard_after_the_probe_too() -> None:
    """The claim comes after it."""
    taken = Fault(kind="fail", op="put", key="writers/*", times=None, error=errors.StoreError("x"))
    store = MemoryStore()
    found = first_save([FaultyStore(store, [taken]), store])
    assert all("x" in said for _, said in found)
    assert "rank 0, in preparing the save" in found[1][1]


def test_encrypted_ranks_try_the_root_too() -> None:
    store = MemoryStore()
    found = first_save([store] * 3, encrypt=Encryption(keys=[SecretKey(bytes(range(32)))]))
    assert [said for _, said in found] == ["committed"] * 3
    assert not [key for key in store.children() if key.startswith("preflight")]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_local_tier_that_each_host_has_for_itself_is_refused(
    is_shared: bool, tmp_path: Path
) -> None:
    def work(member: Member) -> str:
        host = 0 if is_shared else member.rank
        root = Tiered(tmp_path / f"local-{host}", tmp_path / "remote")
        manager = member.manager(root, preflight=True, save_timeout_s=300)
        try:
            manager.save(1).wait()
            manager.close()
        except errors.HoldfastError as error:
            return f"{type(error).__name__} {error}"
        return "committed"

    leader, follower = all_of(on_ranks(2, work))
    if is_shared:
        assert (leader, follower) == ("committed", "committed")
    else:
        assert leader.startswith("NotShared")
        assert "rank 1 on" in follower
