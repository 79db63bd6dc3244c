"""What is sent to the remote tier, when, and what may then go in the local one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import errors
from holdfast.errors import AccessDenied, NoUsableCheckpoint, TransientStoreError
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.format.records import Retired
from holdfast.maintenance.delete import prune_checkpoints
from holdfast.ownership.annotations import annotate
from holdfast.ownership.claim import is_closed
from holdfast.ownership.tiered_options import Tiered
from holdfast.policy.rules import All, Best, EveryNth, Last
from holdfast.policy.savers import SideSaver
from holdfast.root.catalog import Catalog
from holdfast.root.upload_records import Ledger
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from marks import full
from runs import remove_folder
from tiers import (
    LARGE,
    Noted,
    Switch,
    opened,
    saved,
    sent_nbytes,
    steps_in,
    unopened,
    without_backoff,
)
from ways import Tiny


@pytest.fixture(params=["memory", *full("folder")])
def remote(request: pytest.FixtureRequest, ram_path: Path) -> Store:
    """A remote tier of either kind."""
    return LocalStore(ram_path / "remote") if request.param == "folder" else MemoryStore("remote")


@pytest.fixture
def local(ram_path: Path) -> LocalStore:
    """The local tier."""
    return LocalStore(ram_path / "local")


@pytest.mark.parametrize("size", [64, LARGE])
def test_a_checkpoint_is_the_same_bytes_in_both_tiers(
    local: LocalStore, remote: Store, size: int
) -> None:
    tiny = Tiny(size)
    with opened(Tiered(local, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    for store in (local, remote):
        assert steps_in(store) == [2, 1]
    files = [info.key for info in local.list("step-")]
    assert files == [info.key for info in remote.list("step-")]
    assert all(local.get(key) == remote.get(key) for key in files)
    assert [n for n in remote.children() if n.startswith("sending-")] == []


def test_both_roots_hold_the_same_claims(local: LocalStore, remote: Store) -> None:
    for step in (1, 2, 3):
        tiny = Tiny()
        with opened(Tiered(local, remote), tiny) as manager:
            manager.resume()
            saved(manager, tiny, step)
    claims = [f"writers/{epoch:08d}.json" for epoch in (1, 2, 3)]
    assert [local.get(key) for key in claims] == [remote.get(key) for key in claims]


def test_each_tier_keeps_what_its_own_rule_says(local: LocalStore, remote: Store) -> None:
    tiny = Tiny()
    tiered = Tiered(local, remote, keep_local=Last(1), keep_remote=Last(3) | EveryNth("2step"))
    with opened(tiered, tiny) as manager:
        manager.resume()
        for step in range(1, 8):
            saved(manager, tiny, step)
            manager.wait()
    assert steps_in(local) == [7]
    assert steps_in(remote) == [7, 6, 5, 4, 2]


def test_with_none_kept_locally_the_newest_goes_and_a_resume_reads_the_remote_tier(
    local: LocalStore, remote: Store
) -> None:
    """Invariant 4: the same checkpoint is verified in the remote tier."""
    for number in (0, 1):
        tiny = Tiny()
        with opened(Tiered(local, remote, keep_local=0), tiny) as manager:
            found = manager.resume()
            assert (0 if found is None else found.step) == number * 3
            saved(manager, tiny, *range(3 * number + 1, 3 * number + 4))
            manager.wait()
            assert steps_in(local) == []
    assert steps_in(remote) == [6, 5, 4, 3, 2, 1]
    assert local.pointed("latest") == Catalog(remote).checkpoints()[0].folder
    with pytest.raises(NoUsableCheckpoint, match="uploaded to"), opened(local, tiny) as manager:
        manager.resume()


def test_a_restart_without_the_remote_tier_does_not_go_back_to_an_older_local_copy(
    local: LocalStore,
) -> None:
    remote, tiny = Switch(), Tiny()
    with opened(Tiered(local, remote, keep_local=0), tiny) as manager:
        manager.resume()
        tiny.become(1)
        manager.save(1, tags=["kept"]).wait()
        saved(manager, tiny, 2)
    remote.error = TransientStoreError("no network")
    for kept in (1, 0):
        root = Tiered(local, remote, keep_local=0, close_timeout_s=0)
        with pytest.raises(TransientStoreError), opened(root, tiny) as manager:
            manager.resume()
        assert len(Catalog(local).checkpoints()) == kept
        for entry in Catalog(local).checkpoints():
            remove_folder(local, entry.folder)


def test_a_pin_holds_in_the_remote_tier_while_the_local_copy_is_deleted(
    local: LocalStore, remote: Store
) -> None:
    tiny = Tiny()
    with opened(Tiered(local, remote), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
        folder = manager.list()[-1].folder
        mark = f"{folder}/{layout.retired_name(1)}"
        local.put(mark, Retired(by="test", reason="uploaded").encode())
        manager.pin(folder)
    (there,) = [one for one in Catalog(remote).checkpoints() if one.folder == folder]
    assert there.marks.pinned


def test_the_newest_stays_locally_until_the_remote_one_was_read_back(
    local: LocalStore, remote: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that did not see it arrive reads it back, and takes no damaged copy for one."""
    tiny = Tiny()
    with opened(Tiered(local, remote), tiny) as manager:
        saved(manager, tiny, 1, 2)
        manager.pin("step=1")
    (file,) = [i for i in remote.list() if "/model" in i.key or "tiny" in i.key][-1:]
    data = bytearray(remote.get(file.key))
    data[-1] ^= 1
    remote.put(file.key, bytes(data))
    noted = Noted()
    with opened(Tiered(local, remote, keep_local=0), tiny, sinks=(noted,)) as manager:
        manager.resume()
        manager.wait()
    assert [entry.step for entry in Catalog(local).checkpoints()] == [2, 1]
    assert any("stays in the local tier" in event.message for event in noted.of("warning"))
    data[-1] ^= 1
    remote.put(file.key, bytes(data))
    with opened(Tiered(local, remote, keep_local=0), tiny) as manager:
        manager.resume()
        manager.wait()
    assert steps_in(local) == [1]  # pinned


def test_with_none_kept_locally_those_of_side_savers_go_too(
    local: LocalStore, remote: Store
) -> None:
    """keep_local is about all checkpoints of the root, also those of a saver that has gone."""
    for number in (0, 1):
        weights = SideSaver(f"weights{number}", every="1step", components=["tiny"])
        tiny = Tiny()
        tiered = Tiered(local, remote, keep_local=0)
        with opened(tiered, tiny, every="4step", savers=[weights]) as manager:
            manager.resume()
            for step in range(1 + 5 * number, 6 + 5 * number):
                tiny.become(step)
                manager.maybe_save(step)
                manager.wait()
    assert steps_in(local) == []
    assert steps_in(remote) == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]


def test_a_mistyped_metric_of_one_tier_deletes_nothing_there_and_is_told_once(
    local: LocalStore, remote: Store
) -> None:
    """Each tier has its own rule; all is sent that the remote one does not know how to judge."""
    told: list[str] = []
    tiny = Tiny()
    tiered = Tiered(
        local, remote, keep_local=Last(1), keep_remote=Last(1) | Best("los", mode="min")
    )
    sinks = [lambda event: told.append(event.message) if event.kind == "warning" else None]
    with opened(tiered, tiny, sinks=sinks) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2, 3)
    assert steps_in(local) == [3]
    assert steps_in(remote) == [3, 2, 1]
    (warned,) = told
    assert warned.startswith(f"{remote.url}: the rule 'best los (min)' needs the metric 'los'")


def test_nothing_goes_locally_while_the_remote_tier_is_away(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D19, D41: training goes on, all that is wanted there stays here, and goes when it may."""
    without_backoff(monkeypatch)
    remote, tiny, noted = Switch(), Tiny(), Noted()
    # Were something still waiting at the end, it would wait for long.
    root = Tiered(local, remote, keep_local=0, close_timeout_s=5)
    with opened(root, tiny, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 2, 3, 4)
        noted.wait_for("upload_failed", 3)
        assert steps_in(local)[:3] == [4, 3, 2]
        assert {*Ledger(local).waiting()} >= {e.folder for e in Catalog(local).checkpoints()[:3]}
        remote.error = None
        manager.wait()
        assert steps_in(local) == []
    assert steps_in(remote) == [4, 3, 2, 1]
    assert Ledger(local).waiting() == {}
    assert [*Ledger(local).read_notes()] == [entry.folder for entry in Catalog(local).checkpoints()]


def test_what_the_remote_rule_would_drop_at_once_is_not_sent(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_backoff(monkeypatch)
    remote, tiny, noted = Switch(), Tiny(), Noted()
    tiered = Tiered(local, remote, keep_local=Last(1), keep_remote=Last(1) | Best("loss"))
    with opened(tiered, tiny, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        for step, loss in ((2, 0.5), (3, 0.1), (4, 0.3), (5, 0.2)):
            tiny.become(step)
            manager.save(step, metrics={"loss": loss}).wait()
        noted.wait_for_step("upload_failed", 5)  # no upload of step 4 is in flight any more
        remote.error = None
        manager.wait()
    assert {event.step for event in noted.of("uploaded")} == {1, 5, 3}
    assert steps_in(remote) == [5, 3]
    assert steps_in(local) == [5]


def test_latest_moves_forward_only(local: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """D21: the newest is sent first; an older one that follows does not become the latest."""
    without_backoff(monkeypatch)
    remote, tiny, noted = Switch(), Tiny(), Noted()
    with opened(Tiered(local, remote), tiny, sinks=(noted,)) as manager:
        manager.resume()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 1, 2, 3)
        remote.error = None
        manager.wait()
        newest = manager.list()[0].folder
    assert {event.step for event in noted.of("uploaded")} == {1, 2, 3}
    assert remote.get("latest").decode() == newest


def test_a_restarted_process_sends_what_its_forerunner_had_not(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of a file that is whole there, not one byte again."""
    remote, tiny = MemoryStore("remote"), Tiny(LARGE)
    faulty = FaultyStore(remote, [Fault(kind="fail", op="put", key="*/index.json", times=None)])
    tiered = Tiered(local, faulty, close_timeout_s=0, tries=1)
    noted = Noted()
    with opened(tiered, tiny, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        noted.wait_for("upload_failed")
    assert steps_in(remote) == []
    arrived = sum(info.nbytes for info in remote.list("step-"))
    assert arrived > 10 * LARGE
    again = Noted()
    with opened(Tiered(local, remote), Tiny(LARGE), sinks=(again,)) as manager:
        assert manager.resume() is not None
        manager.wait()
    assert steps_in(remote) == [1]
    entry = Catalog(remote).checkpoints()[0]
    assert sent_nbytes(again) + arrived < entry.manifest.nbytes + 10_000


def test_a_failure_is_told_and_training_goes_on(local: LocalStore) -> None:
    remote, tiny, noted = Switch(), Tiny(), Noted()
    with opened(Tiered(local, remote, tries=1, close_timeout_s=0), tiny, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = AccessDenied("403")
        saved(manager, tiny, 2)
        failed = noted.wait_for("upload_failed")
        assert failed.step == 2
        assert failed.fields["tier"] == "remote"
        assert "403" in failed.message
        saved(manager, tiny, 3)
    assert "not uploaded: 2 checkpoints" in noted.of("upload_failed")[-1].message
    assert steps_in(local) == [3, 2, 1]


def test_a_failure_is_raised_if_that_is_wanted(local: LocalStore) -> None:
    """By the next save and by close, when the checkpoint is committed locally."""
    remote, tiny, noted = Switch(), Tiny(), Noted()
    tiered = Tiered(local, remote, tries=1, on_upload_failure="raise", close_timeout_s=0)
    manager = unopened(tiered, tiny, sinks=(noted,))
    manager.resume()
    saved(manager, tiny, 1)
    manager.wait()
    remote.error = AccessDenied("403")
    saved(manager, tiny, 2)
    noted.wait_for("upload_failed")
    with pytest.raises(errors.UploadFailed, match="403"):
        manager.save(3)
    with pytest.raises(errors.UploadFailed, match="not uploaded: 2 checkpoints"):
        manager.close()
    assert steps_in(local) == [3, 2, 1]


def test_wait_has_a_deadline_and_names_what_is_left(local: LocalStore) -> None:
    """Invariant 9."""
    remote, tiny = Switch(), Tiny()
    with opened(Tiered(local, remote, close_timeout_s=0), tiny) as manager:
        manager.resume()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 1)
        with pytest.raises(errors.DeadlineExceeded, match=r"1 checkpoints .*step-00000001"):
            manager.wait(timeout_s=0.2)


@pytest.mark.parametrize(("max_lag", "last"), [("3step", 3), ("10B", 1), ("1000s", 7)])
def test_the_next_save_waits_when_the_remote_tier_is_too_far_behind(
    local: LocalStore, max_lag: str, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: not for ever."""
    without_backoff(monkeypatch)
    remote, tiny = Switch(), Tiny()
    tiered = Tiered(local, remote, max_lag=max_lag, close_timeout_s=0)
    with opened(tiered, tiny, save_timeout_s=4) as manager:  # saves on a busy machine take seconds
        manager.resume()
        saved(manager, tiny, 0)
        manager.wait(60)
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, *range(1, last + 1))
        if last < 7:
            with pytest.raises(errors.DeadlineExceeded, match="max_lag"):
                saved(manager, tiny, last + 1)
        remote.error = None
        saved(manager, tiny, last + 2)
    assert {*range(last + 3)} - {last + 1} <= {*steps_in(local)}
    assert last == 7 or last + 1 in steps_in(local), "the save is made before the error is raised"


def test_damage_is_never_sent(local: LocalStore) -> None:
    """D14: and the local copy stays to be looked at."""
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    faulty = FaultyStore(local, [Fault(kind="flip", op="get", key="*.safetensors", times=None)])
    with opened(Tiered(faulty, remote, keep_local=0), tiny, sinks=(noted,)) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        refused = noted.wait_for("upload_failed")
    assert "do not match their digest" in refused.message
    assert steps_in(remote) == []
    assert [note.state for note in Ledger(local).waiting().values() if note] == ["refused"]
    assert steps_in(local) == [1]


def test_what_arrives_damaged_is_found_where_it_is_read_back(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R17: a store that spoils what it is given, and says nothing."""
    without_backoff(monkeypatch)
    remote, tiny = MemoryStore("remote"), Tiny(LARGE)
    spoils = FaultyStore(
        remote,
        [
            Fault(kind="flip", op="write", key="sending-*"),
            Fault(kind="flip", op="put", key="*/tiny-00000.json"),
        ],
    )
    with opened(Tiered(local, spoils, keep_local=0, read_back=True), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
    assert steps_in(remote) == [1]


def test_pins_and_tags_are_in_both_tiers(local: LocalStore, remote: Store) -> None:
    """R20: a pin that was given while the upload waited holds in the remote tier, too."""
    tiny = Tiny()
    tiered = Tiered(local, remote, keep_local=Last(1), keep_remote=Last(1))
    with opened(tiered, tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.pin("latest")
        manager.tag("latest", "good")
        saved(manager, tiny, 2, 3)
        manager.wait()
        assert manager.list()[-1].tags == ("good",)
        manager.tag(3, "last")
        assert Catalog(remote).find_checkpoint("step=3").tags == (
            "last",
        )  # at once, before any upload
        saved(manager, tiny, 4, 5)
    assert steps_in(remote) == [5, 3, 1]
    assert steps_in(local) == [5, 3, 1]


def test_metrics_that_are_added_in_one_tier_count_in_both(local: LocalStore, remote: Store) -> None:
    """Also if the local copy is deleted before the next upload."""
    tiny, keep = Tiny(), "last:1,best:acc:max:1:wait=9"
    tiered = Tiered(local, remote, keep_local=keep, keep_remote=keep)
    with opened(tiered, tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2, 3)
        manager.wait()
        for store, step, value in ((local, 1, 0.5), (remote, 2, 0.9), (local, 3, 0.1)):
            annotate(store, Catalog(store).find_checkpoint(step), metrics={"acc": value})
        saved(manager, tiny, 4, 5)
        manager.wait()
        saved(manager, tiny, 6)
    for store in (local, remote):
        assert steps_in(store) == [6, 5, 4, 2]
        assert Catalog(store).find_checkpoint(2).metrics == {"acc": 0.9}


def test_a_prune_from_outside_leaves_what_waits(local: LocalStore) -> None:
    remote, tiny = Switch(), Tiny()
    with opened(Tiered(local, remote, close_timeout_s=0), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 2, 3, 4)
    report = prune_checkpoints(local, Last(1), emit=Emitter(()))
    assert steps_in(local) == [4, 3, 2]
    assert [why for _, why in report.postponed] == [
        "it waits for its upload to memory://remote"
    ] * 2


def test_what_was_deleted_there_on_purpose_is_not_sent_again(local: LocalStore) -> None:
    remote, tiny, noted = MemoryStore("remote"), Tiny(), Noted()
    for steps in ((1, 2, 3), (4,)):
        with opened(Tiered(local, remote), tiny, sinks=(noted,)) as manager:
            manager.resume()
            saved(manager, tiny, *steps)
        prune_checkpoints(remote, Last(1), emit=Emitter(()))
        assert steps_in(remote) == [steps[-1]]
    assert sorted(event.step or 0 for event in noted.of("uploaded")) == [1, 2, 3, 4]
    assert steps_in(local) == [4, 3, 2, 1]


def test_an_epoch_is_closed_there_when_all_of_it_was_sent(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: the markers of closed epochs may be removed, so nobody commits in one any more."""
    without_backoff(monkeypatch)
    remote, tiny, noted = Switch(), Tiny(), Noted()
    tiered = Tiered(local, remote, keep_remote=Last(1), close_timeout_s=0)
    with opened(tiered, tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
        manager.wait()
        remote.error = TransientStoreError("no network")
        saved(manager, tiny, 2, 3)
    remote.error = None
    assert not is_closed(remote, 1)
    with opened(tiered, tiny) as manager:
        manager.resume()
        manager.wait()
    assert not is_closed(remote, 1)
    assert is_closed(remote, 2)
    assert steps_in(remote) == [3]
    for step in (4, 5):
        with opened(tiered, tiny) as manager:
            manager.resume()
            saved(manager, tiny, step)
            manager.wait()
    assert is_closed(remote, 3)
    folder = Catalog(local).checkpoints()[1].folder  # of step 4; as if it had been unwanted
    Ledger(local).remove_note(folder)
    remove_folder(remote, folder)
    with opened(Tiered(local, remote), tiny, sinks=(noted,)) as manager:
        manager.resume()
        manager.wait()
    assert any("closed the remote tier" in event.message for event in noted.of("warning"))
    assert 4 not in steps_in(remote)


def test_a_root_that_was_local_gets_a_remote_tier(local: LocalStore, remote: Store) -> None:
    tiny = Tiny()
    with opened(local, tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1, 2)
    with opened(Tiered(local, remote), tiny) as manager:
        assert manager.resume() is not None
    assert steps_in(remote) == [2, 1]


def test_a_remote_root_that_vanished_is_not_made_anew(ram_path: Path) -> None:
    """As when it was unmounted: what is written there would be lost in the folder below."""
    local, place, tiny, noted = LocalStore(ram_path / "l"), ram_path / "r", Tiny(), Noted()
    with opened(Tiered(local, place), tiny) as manager:
        manager.resume()
        saved(manager, tiny, 1)
    place.rename(ram_path / "elsewhere")
    with opened(Tiered(local, place, close_timeout_s=0), tiny, sinks=(noted,)) as manager:
        assert manager.resume() is not None
        saved(manager, tiny, 2)
        assert "unmounted" in noted.wait_for("upload_failed").message
    assert not place.exists()
    (ram_path / "elsewhere").rename(place)
    with opened(Tiered(local, place), tiny) as manager:
        manager.resume()
    assert steps_in(LocalStore(place)) == [2, 1]


@pytest.mark.parametrize("keep_local", [None, All()])
def test_side_savers_are_mirrored_by_their_own_rules(
    local: LocalStore, remote: Store, keep_local: Any
) -> None:
    from holdfast.policy.savers import SideSaver

    tiny = Tiny()
    side = SideSaver("rng-only", every="1step", components=["rng"], keep=Last(2))
    tiered = Tiered(local, remote, keep_local=keep_local, keep_remote=Last(1))
    with opened(tiered, tiny, every="3step", savers=[side]) as manager:
        manager.resume()
        for step in range(1, 8):
            tiny.become(step)
            manager.maybe_save(step)
            manager.wait()
    assert steps_in(remote) == [7, 6]
