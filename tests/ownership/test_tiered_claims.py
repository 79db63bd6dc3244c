"""Who owns a run that has two tiers: machines meet in the remote one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import errors
from holdfast.errors import StoreFull, TransientStoreError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import WriterRecord
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.ownership.claim import Choice, is_closed
from holdfast.ownership.process import this_process
from holdfast.ownership.tiered import TieredOwnership, share_claims
from holdfast.ownership.tiered_catalog import TieredCatalog, catalog_of
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import Last
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Stopped
from marks import full
from runs import remove_folder
from tiers import Noted, Switch, opened, saved, steps_in, unopened, without_backoff
from ways import Tiny

QUIET = Emitter(())


@pytest.fixture
def machines(ram_path: Path) -> tuple[LocalStore, LocalStore]:
    """The local tiers of two machines."""
    return LocalStore(ram_path / "a"), LocalStore(ram_path / "b")


def disowned(store: Any, epoch: int) -> None:
    """Make a claim that of a process on another machine, of which nobody here knows anything."""
    key = layout.writer_key(epoch)
    writer = WriterRecord.decode(store.get(key), what=key)
    elsewhere = msgspec.structs.replace(this_process(), host="elsewhere", boot_id="other")
    store.put(key, msgspec.structs.replace(writer, process=elsewhere).encode())


def test_a_machine_with_an_empty_local_tier_goes_on(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    remote = MemoryStore("remote")
    first, second = Tiny(), Tiny()
    with opened(Tiered(machines[0], remote, keep_local=0), first) as manager:
        manager.resume()
        saved(manager, first, 1, 2)
    with opened(Tiered(machines[1], remote, keep_local=0), second) as manager:
        found = manager.resume()
        assert found is not None
        assert (found.step, found.root, second.step()) == (2, "memory://remote", 2)
        saved(manager, second, 3)
        assert [c.step for c in manager.list()] == [3, 2, 1]
    assert steps_in(machines[1]) == []
    parent = Catalog(remote).checkpoints()[0].manifest.parent
    assert parent is not None
    assert (parent.epoch, parent.sequence) == (1, 2)
    assert steps_in(remote) == [3, 2, 1]


def test_the_first_machine_comes_back_and_takes_the_newer_one(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """D36: where the run stands is not what lies nearest."""
    remote = MemoryStore("remote")
    for machine, step in ((0, 1), (1, 2), (0, 3)):
        tiny = Tiny()
        with opened(Tiered(machines[machine], remote), tiny) as manager:
            manager.resume()
            assert tiny.step() == step - 1
            saved(manager, tiny, step)
    assert steps_in(remote) == [3, 2, 1]
    assert steps_in(machines[0]) == [3, 1]


def test_a_run_that_another_process_just_begins_is_not_taken_for_one_that_is_gone(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """The other one claims while this one looks whether the remote root is there."""
    begun: list[int] = []

    class Looked(MemoryStore):
        def children(self, folder: str = "") -> tuple[str, ...]:
            found = super().children(folder)
            if folder == layout.WRITERS and not begun:
                begun.append(1)
                with opened(Tiered(machines[0], remote), Tiny()) as other:
                    other.resume()
            return found

    remote = Looked("remote")
    with opened(Tiered(machines[0], remote), Tiny()) as manager:
        assert manager.resume() is None
    assert begun


@pytest.mark.parametrize("event", ["another goes on", "it is deleted"])
def test_what_happens_between_choice_and_claim_makes_the_choice_anew(
    machines: tuple[LocalStore, LocalStore], event: str
) -> None:
    """Rules 2 and 9: neither a copy from another run nor a missing folder is complained of."""
    remote, tiny = MemoryStore("remote"), Tiny()
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    catalog = catalog_of(Tiered(machines[0], remote), QUIET, None)
    assert isinstance(catalog, TieredCatalog)
    owner = TieredOwnership(catalog, takeover=False, emit=QUIET)
    num_choices = 0

    def choose() -> Choice:
        nonlocal num_choices
        num_choices += 1
        if num_choices == 1 and event == "another goes on":
            with opened(Tiered(machines[1], remote), Tiny()) as other:
                other.resume()
                saved(other, tiny, 3)
        point = catalog.find_checkpoint(
            "latest" if event == "another goes on" else num_choices
        ).reference
        if num_choices == 1 and event == "it is deleted":
            remove_folder(machines[0], point.folder)
        return Choice(point=point)

    owner.claim_ownership(iter(choose, None))
    assert num_choices == 2
    assert owner.claim is not None
    assert owner.claim.resumed_from is not None
    expected = (2, 1) if event == "another goes on" else (1, 2)
    assert owner.claim.resumed_from.order == expected
    owner.release_run()


def test_a_forgotten_resume_does_not_begin_the_run_anew(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    remote, tiny = MemoryStore("remote"), Tiny()
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    with (
        opened(Tiered(machines[1], remote), tiny) as manager,
        pytest.raises(errors.UsageError, match=r"resume\(\)"),
    ):
        manager.save(2)
    assert not Catalog(machines[1]).claims()


def test_a_live_owner_on_another_machine_is_refused(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """R10: it is found in the remote tier; nothing is written in either."""
    remote, tiny, watched = Switch(), Tiny(), []
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        disowned(remote, 1)
        second = unopened(Tiered(machines[1], remote), Tiny())
        monkey = pytest.MonkeyPatch()
        monkey.setattr("holdfast.ownership.claim.threading.Event.wait", beating(remote, watched))
        with pytest.raises(errors.OwnedElsewhere):
            second.resume()
        monkey.undo()
        second.close()
        assert watched
    assert not Catalog(machines[1]).claims()


def beating(remote: MemoryStore, watched: list[float]) -> Any:
    """A wait in which the heartbeat of another process arrives."""
    from holdfast.format.records import Alive

    def wait(event: Any, seconds: float | None = None) -> bool:
        key = layout.alive_key(1)
        alive = Alive.decode(remote.get(key), what=key)
        remote.put(key, Alive(epoch=1, nonce=alive.nonce, beat=alive.beat + 1).encode())
        watched.append(seconds or 0)
        return False

    return wait


def test_takeover_by_another_machine_ends_the_uploads_and_the_run(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """R10: the first one's next upload finds it, its next save says so, and what either committed
    stays whole."""
    remote, first, second, noted = MemoryStore("remote"), Tiny(), Tiny(), Noted()
    manager = unopened(Tiered(machines[0], remote), first, sinks=(noted,))
    manager.resume()
    saved(manager, first, 1)
    manager.wait()
    with opened(Tiered(machines[1], remote), second, takeover=True) as taker:
        taker.resume()
        saved(taker, second, 2)
        taker.wait()
        first.become(7)
        manager.save(7).wait()
        assert "took the run over" in noted.wait_for("upload_failed").message
        with pytest.raises(errors.Superseded):
            manager.save(8)
        manager.close()
        saved(taker, second, 3)
    assert steps_in(remote) == [3, 2, 1]
    assert steps_in(machines[0]) == [7, 1]
    with opened(Tiered(machines[0], remote), first) as back:
        found = back.resume()
        assert found is not None
        assert found.step == 3


def test_without_the_remote_tier_the_run_is_claimed_locally_and_there_later(
    machines: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_backoff(monkeypatch)
    remote, tiny, noted = Switch(), Tiny(), Noted()
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    remote.error = TransientStoreError("no network")
    with opened(Tiered(machines[0], remote), tiny, sinks=(noted,)) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 1
        assert any("in the local tier only" in event.message for event in noted.of("warning"))
        saved(manager, tiny, 2, 3)
        noted.wait_for("upload_failed")
        remote.error = None
        manager.wait()
    assert steps_in(remote) == [3, 2, 1]
    assert Catalog(remote).claims() == Catalog(machines[0]).claims() == (2, 1)


def test_an_empty_local_tier_does_not_begin_anew_while_the_remote_one_is_away(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    remote = Switch()
    remote.error = TransientStoreError("no network")
    manager = unopened(Tiered(machines[0], remote), Tiny())
    with pytest.raises(TransientStoreError):
        manager.resume()
    with pytest.raises(TransientStoreError):
        manager.save(1)
    manager.close()
    assert not Catalog(machines[0]).claims()


def test_a_remote_tier_that_cannot_be_made_is_named_at_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    remote = tmp_path / "file" / "remote"
    manager = unopened(Tiered(tmp_path / "local", remote), Tiny())
    with manager, pytest.raises(errors.StoreError) as caught:
        manager.resume()
    assert not isinstance(caught.value, errors.NotFound)
    assert f"{remote}: the remote tier cannot be used" in str(caught.value)


@pytest.mark.parametrize("commits", [True, False])
def test_two_branches_are_told_and_nothing_is_sent(
    machines: tuple[LocalStore, LocalStore], commits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: both machines went on from the same checkpoint while they could not see each other."""
    without_backoff(monkeypatch)
    remote, first, second, noted = Switch(), Tiny(), Tiny(), Noted()
    with opened(Tiered(machines[0], remote), first) as manager:
        manager.resume()
        saved(manager, first, 1)
    remote.error = TransientStoreError("no network")
    manager = unopened(Tiered(machines[0], remote, close_timeout_s=0), first, sinks=(noted,))
    manager.resume()
    saved(manager, first, 2)
    noted.wait_for("upload_failed")
    with opened(Tiered(machines[1], remote.twin()), second) as other:
        other.resume()
        if commits:
            saved(other, second, 5)
    remote.error = None
    with pytest.raises(errors.Diverged):
        manager.wait()
    with pytest.raises(errors.Diverged, match="nothing is lost"):
        manager.save(3)
    manager.close()
    assert steps_in(remote) == ([5, 1] if commits else [1])
    assert steps_in(machines[0]) == [2, 1]
    with (
        opened(Tiered(machines[0], remote), first) as again,
        pytest.raises(errors.Diverged, match="an empty local root"),
    ):
        again.resume()


@pytest.mark.parametrize("kind", ["fail", "lose_reply"])
def test_a_claim_whose_reply_was_lost_is_one_claim(
    machines: tuple[LocalStore, LocalStore], kind: Any
) -> None:
    """R10: the same document is put again before the first upload."""
    remote, tiny = MemoryStore("remote"), Tiny()
    faulty = FaultyStore(remote, [Fault(kind=kind, op="put", key="writers/00000002.json")])
    for step in (1, 2):
        with opened(Tiered(machines[0], faulty), tiny) as manager:
            manager.resume()
            saved(manager, tiny, step)
    key = layout.writer_key(2)
    assert remote.get(key) == machines[0].get(key)
    assert steps_in(remote) == [2, 1]


def test_a_claim_of_another_machine_fences_a_local_process(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """Claims that were made elsewhere come before ours in the local tier, too, without a gap: a
    process that was paused here looks for the next one."""
    remote = MemoryStore("remote")
    for machine in (0, 1, 1, 1, 0):
        tiny = Tiny()
        with opened(Tiered(machines[machine], remote), tiny) as manager:
            manager.resume()
    assert Catalog(machines[0]).claims() == (5, 4, 3, 2, 1)


def test_claims_of_two_runs_are_not_mixed() -> None:
    a, b = MemoryStore("a"), MemoryStore("b")
    for store in (a, b):
        tiny = Tiny()
        with opened(store, tiny) as manager:
            manager.resume()
            saved(manager, tiny, 1)
    with pytest.raises(errors.Diverged):
        share_claims(a, b)
    with opened(Tiered(a, b), Tiny()) as manager, pytest.raises(errors.Diverged):
        manager.resume()


def flipped(data: bytes, at: int) -> bytes:
    return bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the nonce": lambda data: flipped(data, data.index(b"nonce") + 10),
    "a bit of the digest": lambda data: flipped(data, len(data) - 20),
    "a bit": lambda data: flipped(data, 20),
    "cut": lambda data: data[:30],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_damaged_claim_is_put_right_from_the_other_tier(
    machines: tuple[LocalStore, LocalStore], where: str, damage: str
) -> None:
    """One flipped bit must not look like two runs."""
    local, remote, tiny = machines[0], MemoryStore("remote"), Tiny()
    tiers = Tiered(local, remote)
    for first in (1, 3):
        with opened(tiers, tiny) as manager:
            manager.resume()
            saved(manager, tiny, first, first + 1)
    key, damaged = layout.writer_key(2), local if where == "local" else remote
    data = bytes(local.get(key))
    damaged.put(key, DAMAGES[damage](data))
    told: list[str] = []
    with opened(tiers, tiny, sinks=(lambda event: told.append(event.kind),)) as manager:
        found = manager.resume()
    assert found is not None
    assert (found.step, told.count("mended")) == (4, 1)
    assert local.get(key) == remote.get(key) == data


def test_a_sound_claim_gives_way_to_no_damaged_one(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """It is a rollback in whose name nothing was saved, and was the only copy of it."""
    local, remote, tiny = machines[0], MemoryStore("remote"), Tiny()
    tiers = Tiered(local, remote)
    for which in ("latest", "step=1"):
        with opened(tiers, tiny) as manager:
            found = manager.resume(which)
            saved(manager, tiny, *((1, 2) if found is None else ()))
    before = local.get(layout.writer_key(2))
    remote.put(layout.writer_key(2), b"no claim")
    with opened(tiers, tiny) as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == 1
    assert local.get(layout.writer_key(2)) == before


def test_an_older_claim_that_is_damaged_is_read_in_the_other_tier(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """The newest is the same in both, so that they are not compared any further."""
    local, remote, tiny = machines[0], MemoryStore("remote"), Tiny()
    tiers = Tiered(local, remote)
    for which in ("latest", "step=1", "latest"):
        with opened(tiers, tiny) as manager:
            found = manager.resume(which)
            saved(manager, tiny, *((1, 2) if found is None else ()))
    local.put(layout.writer_key(2), b"")
    told: list[str] = []
    with opened(tiers, tiny, sinks=(lambda event: told.append(event.message),)) as manager:
        found = manager.resume()
    assert found is not None
    assert found.step == 1
    assert not any(layout.writer_key(2) in message for message in told)


def test_a_rollback_holds_in_both_tiers(machines: tuple[LocalStore, LocalStore]) -> None:
    """D30."""
    remote, tiny = MemoryStore("remote"), Tiny()
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2, 3)
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume("step=1")
    with opened(Tiered(machines[1], remote), tiny) as manager:
        found = manager.resume()
        assert found is not None
        assert found.step == 1


def test_a_second_resume_of_a_manager_claims_again(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    remote, tiny = MemoryStore("remote"), Tiny()
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
        manager.resume("step=1")
        saved(manager, tiny, 9)
        manager.load("latest")
        saved(manager, tiny, 10)
    assert steps_in(remote) == [10, 9, 2, 1]
    assert Catalog(remote).claims() == (3, 2, 1)


def test_a_claim_that_comes_to_nothing_is_closed_in_both_tiers(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    remote, tiny = MemoryStore("remote"), Tiny()
    tiered = Tiered(machines[0], remote)
    with opened(tiered, tiny) as manager:
        saved(manager, tiny, 1)
    choices = iter([Choice(point=None)])  # which is found wrong when the claim is put

    def choose() -> Choice:
        for choice in choices:
            return choice
        raise errors.MismatchError("what is there")

    with opened(tiered, tiny) as manager:
        with pytest.raises(errors.MismatchError):
            manager._session.owner.claim_ownership(iter(choose, None))
        for store in (machines[0], remote):
            assert Catalog(store).highest_epoch() == 2
            assert is_closed(store, 2)
        manager.resume()
        saved(manager, tiny, 2)
    assert steps_in(remote) == [2, 1]


@pytest.mark.parametrize("op", ["get", *full("children", "head")])
def test_a_blip_while_it_is_chosen_does_not_set_the_run_back(
    machines: tuple[LocalStore, LocalStore], op: str
) -> None:
    """D36: a single request that fails must not hide what another machine has committed."""
    for at in range(6):
        local, other = (LocalStore(f"{m.url}-{op}-{at}") for m in machines)
        remote, tiny = MemoryStore("remote"), Tiny()
        with opened(Tiered(local, remote), tiny) as manager:
            manager.resume()
            saved(manager, tiny, 1)
        with opened(Tiered(other, remote), tiny) as manager:
            manager.resume()
            saved(manager, tiny, 2, 3)
        blip = FaultyStore(remote, [Fault(kind="fail", op=op, at=at)])  # type: ignore[arg-type]
        manager = unopened(Tiered(local, blip), Tiny())
        try:
            found = manager.resume()
            assert found is not None
            if found.step != 3:
                with pytest.raises(errors.Diverged):
                    manager.wait()
        finally:
            manager.close()
        with opened(Tiered(other, remote), tiny) as again:
            found = again.resume()
            assert found is not None
            assert found.step == 3, (op, at)


def unknown_branch(a: LocalStore, b: LocalStore, remote: Switch) -> None:
    """Machine a was killed while it claimed: it has heard of b's claim, and of nothing that b has
    committed since. It goes on while the remote tier is away."""
    first, second = Tiny(), Tiny()
    with opened(Tiered(a, remote), first) as manager:
        manager.resume()
        saved(manager, first, 1)
    with opened(Tiered(b, remote), second) as other:
        other.resume()
        share_claims(a, remote)
        saved(other, second, 2, 3, 4, 5)
    remote.error = TransientStoreError("no network")
    with opened(Tiered(a, remote, close_timeout_s=0), first) as manager:
        manager.resume()
        saved(manager, first, 100)


def test_a_branch_that_was_begun_unseen_is_told_by_a_later_process_too(
    machines: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: the one that began it may have ended before it could see the other tier."""
    without_backoff(monkeypatch)
    for is_back_at_claim in (True, False):
        a, b = (LocalStore(f"{m.url}-{is_back_at_claim}") for m in machines)
        remote = Switch()
        unknown_branch(a, b, remote)
        with opened(Tiered(a, remote, close_timeout_s=0), Tiny()) as manager:
            if is_back_at_claim:
                remote.error = None
                with pytest.raises(errors.Diverged):
                    manager.resume()
            else:
                manager.resume()
                remote.error = None
                with pytest.raises(errors.Diverged):
                    manager.wait()
        assert steps_in(remote.twin())[0] == 5


def test_a_machine_that_was_killed_while_it_claimed_does_not_begin_anew(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """R1: claims had arrived there, and nothing else; then the remote tier is away."""
    remote, tiny = Switch(), Tiny()
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    killed = FaultyStore(machines[1], [Fault(kind="stop_before", op="put", key="writers/*2.json")])
    manager = unopened(Tiered(killed, remote), Tiny())
    with pytest.raises(Stopped):
        manager.resume()
    assert Catalog(machines[1]).claims() == (1,)
    remote.error = TransientStoreError("no network")
    with (
        opened(Tiered(machines[1], remote), Tiny()) as manager,
        pytest.raises(TransientStoreError),
    ):
        manager.resume()


def test_a_prune_of_each_tier_does_not_part_them(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """Each claims its root for that long; neither commits anything."""
    for others in (0, 1):
        local, other = (LocalStore(f"{m.url}-{others}") for m in machines)
        remote, tiny = MemoryStore("remote"), Tiny()
        with opened(Tiered(local, remote), tiny) as manager:
            manager.resume()
            saved(manager, tiny, 1, 2)
        newest = 2
        for _ in range(others):
            with opened(Tiered(other, remote), tiny) as manager:
                manager.resume()
                newest += 1
                saved(manager, tiny, newest)
        prune_checkpoints(local, Last(1), emit=Emitter(()))
        prune_checkpoints(remote, Last(1), emit=Emitter(()))
        with opened(Tiered(local, remote), tiny) as manager:
            found = manager.resume()
            assert found is not None
            assert found.step == newest
            saved(manager, tiny, newest + 1)
        assert steps_in(remote)[:2] == [newest + 1, newest]


def test_a_full_remote_tier_does_not_keep_a_run_from_going_on(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    remote, tiny = MemoryStore("remote"), Tiny()
    with opened(Tiered(machines[0], remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    full = Fault(kind="fail", op="put", key="writers/*", times=None, error=StoreFull("quota"))
    root = Tiered(machines[0], FaultyStore(remote, [full]), close_timeout_s=0)
    with opened(root, tiny) as manager:
        assert manager.resume() is not None
        saved(manager, tiny, 2)
    assert steps_in(machines[0]) == [2, 1]


def test_a_rollback_takes_from_there_what_was_dropped_here(
    machines: tuple[LocalStore, LocalStore],
) -> None:
    """D30: the local rule thins, the remote one keeps all."""
    remote, tiny = MemoryStore("remote"), Tiny()
    rule = Last(1) | Last(5).then_drop("rng")
    with opened(Tiered(machines[0], remote, keep_local=rule), tiny) as manager:
        manager.resume()
        for step in (1, 2, 3):
            saved(manager, tiny, step)
            manager.wait()
    thinned = Catalog(machines[0]).checkpoints()[-1]
    assert thinned.marks.thinned == ("rng",)
    with opened(Tiered(machines[0], remote, keep_local=rule), tiny) as manager:
        found = manager.resume("step=1")
        assert found is not None
        assert (found.step, found.root) == (1, "memory://remote")
