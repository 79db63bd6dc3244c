"""R38: one save by several ranks: who writes what, who decides, and what each rank is told."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typing_extensions import override

from allranks import Member, all_of, on_ranks, save_on
from holdfast import (
    At,
    Last,
    SideSaver,
    errors,
)
from holdfast.checkpoints import MIN_BUDGET, StateHooks
from holdfast.control.save_requests import answer_to, put_save_request
from holdfast.errors import SaveFailed, SaveSkipped
from holdfast.format import index, index_parts
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.manifest import Aborted, Manifest, decode_register, encode_manifest
from holdfast.maintenance.verify import verify
from holdfast.policy.savers import Due
from holdfast.root.catalog import Catalog
from holdfast.saving import distributed as together_module
from holdfast.saving import saver
from holdfast.store.base import Store, WrappedStore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore, Kind
from marks import full


@pytest.fixture(params=["local", *full("memory")])
def root(request: pytest.FixtureRequest, ram_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else LocalStore(ram_path / "run")


def whole(store: Store) -> list[int]:
    """Steps of the checkpoints, oldest first, after a check of every byte of them."""
    entries = Catalog(store).checkpoints()
    for entry in entries:
        report = verify(store, entry.folder)
        assert report.ok, report.problems
    return sorted(entry.step for entry in entries)


def cause(error: object) -> str:
    """What a failed save says, with its cause."""
    assert isinstance(error, errors.HoldfastError), error
    return f"{error} {error.__cause__}"


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_writes_some_files_and_their_numbers_have_no_gap(
    num_ranks: int, root: Store
) -> None:
    save_on(num_ranks, root, [1, 2])
    assert whole(root) == [1, 2]
    for entry in Catalog(root).checkpoints():
        assert entry.manifest.world_size == num_ranks
        assert entry.manifest.sharded
        for name, component in entry.manifest.components.items():
            numbers = [int(file[-17:-12]) for file in component.files[1:]]
            assert numbers == [*range(len(numbers))], name
        assert len(entry.manifest.components["rng"].files) == 1 + num_ranks


def test_a_follower_claims_nothing_deletes_nothing_and_puts_no_register() -> None:
    store = MemoryStore()
    views = [FaultyStore(store) for _ in range(3)]

    def work(member: Member) -> list[int]:
        with member.manager(views[member.rank], keep=Last(1)) as manager:
            manager.resume()
            for step in (1, 2, 3):
                manager.save(step).wait()
            manager.wait()
            member.coordinator.number()
        return [checkpoint.step for checkpoint in manager.list()]

    assert all_of(on_ranks(3, work))[0] == [3]
    changes = {"put", "delete", "link", "point", "create", "finish"}
    for view in views[1:]:
        changed = [(op, key) for op, key in view.ops if op in changes]
        assert {op for op, _ in changed} <= {"create", "finish"}
        assert all(key.endswith(".safetensors") for _, key in changed), changed


def test_metrics_label_tags_and_reason_are_those_of_the_leader() -> None:
    store = MemoryStore()

    def work(member: Member) -> tuple[Any, ...]:
        with member.manager(store, label=f"r{member.rank}-{{step}}") as manager:
            saved = manager.save(
                1, metrics={"loss": float(member.rank)}, reason=f"of {member.rank}"
            ).wait()
            (listed,) = manager.list()
        return saved.folder, dict(saved.metrics), saved.reason, listed.folder

    (first, second) = all_of(on_ranks(2, work))
    assert first == second
    assert first[1:3] == ({"loss": 0.0}, "of 0")
    assert first[0].startswith("r0-1")


def test_what_all_scripts_leave_out_is_logged_by_one_rank_and_the_rest_with_its_rank() -> None:
    root, told = MemoryStore(), list[tuple[int, str]]()

    def work(member: Member) -> None:
        steps = [member.optimizer.step]
        if member.rank:
            steps.append(torch.optim.SGD(member.model.parameters(), lr=0.0, momentum=0.5).step)
        options: dict[str, Any] = {
            "state": {"model": member.model},
            "sinks": (lambda event: told.append((member.rank, event.message)),),
        }
        with member.manager(root, **options) as manager:
            for number in range(1, 3):
                member.model(torch.ones(2, 8)).sum().backward()
                for step in steps:
                    step()
                manager.save(number, wait=True)

    all_of(on_ranks(2, work))
    texts = [(rank, text) for rank, text in told if "used in training" in text]
    assert [(rank, "rank 1:" in text, "SGD" in text) for rank, text in texts] == [
        (0, False, False),
        (0, True, True),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"compress": "zstd"},
        {"memory_budget": "64MiB"},
        *full({"overlap": "check"}, {"keep": Last(1)}, {"preflight": True}),
    ],
    ids=str,
)
def test_every_way_to_save_gives_a_whole_checkpoint(options: dict[str, Any], root: Store) -> None:
    save_on(3, root, [1, 2, 3], **options)
    assert whole(root)[-1] == 3


def test_tensors_that_do_not_change_are_linked_and_states_above_the_budget_go_in_waves(
    ram_path: Path,
) -> None:
    root = ram_path / "run"

    def values(number: float) -> torch.nn.ParameterDict:
        """A module, as the tensors of other kinds come from one rank, in one file."""
        tensors = {name: torch.full((3 * BLOCK_NBYTES // 4,), number) for name in "abcd"}
        frozen = {n: torch.nn.Parameter(one, requires_grad=False) for n, one in tensors.items()}
        return torch.nn.ParameterDict(frozen)

    def work(member: Member) -> None:
        state = {**member.state, "big": values(1.0)}
        options = {"memory_budget": MIN_BUDGET} if member.coordinator.world_size == 2 else {}
        with member.manager(root, state=state, **options) as manager:
            manager.resume()
            for step in range(1, 4):
                member.train()
                state["big"]["a"].add_(1)
                manager.save(step + 10 * member.coordinator.world_size, wait=True)

    def load(member: Member) -> bool:
        state = {**member.state, "big": values(0.0)}
        with member.manager(root, state=state) as manager:
            assert manager.resume() is not None
        return all(
            bool((value == (7 if name == "a" else 1)).all()) for name, value in state["big"].items()
        )

    all_of(on_ranks(2, work))
    all_of(on_ranks(3, work))
    assert whole(LocalStore(root)) == [21, 22, 23, 31, 32, 33]
    assert all_of(on_ranks(2, load)) == [True, True]
    files = root.glob("step-*33*/big*.safetensors")
    assert any(file.stat().st_nlink > 1 for file in files)


def test_all_ranks_link_to_the_checkpoint_that_the_leader_names(ram_path: Path) -> None:
    root = ram_path / "run"

    def work(member: Member) -> None:
        frozen = [torch.nn.Parameter(torch.ones(BLOCK_NBYTES // 4, 1)) for _ in range(4)]
        state = {"big": torch.nn.ParameterList(one.requires_grad_(False) for one in frozen)}
        with member.manager(root, state={**member.state, **state}) as manager:
            for step in range(1, 7):
                member.train()
                manager.save(step, wait=True)
                manager.wait()

    all_of(on_ranks(2, work))
    inodes = {
        step: {file.name: file.stat().st_ino for file in root.glob(f"step-*{step}.*/big*.safe*")}
        for step in range(1, 7)
    }
    assert len(inodes[6]) > 1
    for step in range(3, 7):
        assert inodes[step] == inodes[step - 2], "each rank has linked its files"
        assert not {*inodes[step].values()} & {*inodes[step - 1].values()}
    assert whole(LocalStore(root)) == [*range(1, 7)]


def test_a_follower_returns_and_emits_what_the_leader_has_committed() -> None:
    store = MemoryStore()

    def work(member: Member) -> list[Any]:
        events: list[Any] = []
        with member.manager(store, sinks=[events.append]) as manager:
            found = [manager.save(step, metrics={"x": 1.0}).wait() for step in (1, 1, 2)]
        told = [event.fields for event in events if event.kind == "committed"]
        assert [fields["nbytes"] for fields in told] == [one.nbytes for one in found]
        return [*found, *((one["is_new"], one["manifest"]) for one in told)]

    leader, follower = all_of(on_ranks(2, work))
    assert leader == follower


def test_a_follower_that_sees_another_manifest_than_the_leader_has_put_fails() -> None:
    class Other(WrappedStore):
        @override
        def get_whole(self, key: str, *, max_nbytes: int, afresh: bool = False) -> bytes:
            data = super().get_whole(key, max_nbytes=max_nbytes, afresh=afresh)
            if not key.endswith("manifest.json"):
                return data
            found = decode_register(data, what=key)
            assert isinstance(found, Manifest)
            return encode_manifest(msgspec.structs.replace(found, tags=("other",)))

    store = MemoryStore()
    views = [store, Other(store)]

    def work(member: Member) -> str:
        with member.manager(views[member.rank]) as manager:
            try:
                manager.save(1).wait()
            except errors.HoldfastError as error:
                return cause(error)
        return "committed"

    leader, follower = all_of(on_ranks(2, work))
    assert leader == "committed"
    assert "does not see the manifest" in follower


def test_a_structure_that_changes_is_planned_anew(root: Store) -> None:
    """The optimizer has its slots after the first step only."""

    def work(member: Member) -> None:
        with member.manager(root) as manager:
            manager.save(0).wait()
            member.train()
            manager.save(1, wait=True)
            manager.save(2, wait=True)

    all_of(on_ranks(3, work))
    assert whole(root) == [0, 1, 2]


def test_savers_and_components_have_plans_of_their_own(root: Store) -> None:
    savers = [SideSaver("weights", every="1step", components=["model"])]

    def work(member: Member) -> None:
        with member.manager(root, every="2step", savers=savers) as manager:
            for step in range(1, 5):
                member.train()
                pending = manager.maybe_save(step)
                assert pending is not None
                pending.wait()
            manager.save(5, components=["model"], wait=True)

    all_of(on_ranks(2, work))
    assert whole(root) == [1, 2, 3, 4, 5]


def test_an_unchanged_plan_waits_for_no_rank_in_the_callers_thread() -> None:
    store = MemoryStore()
    returned = threading.Event()

    def work(member: Member) -> None:
        with member.manager(store) as manager:
            member.train()
            manager.save(1).wait()
            if member.rank == 1:
                assert returned.wait(60)
            pending = manager.save(2)
            if member.rank == 0:
                assert not pending.done()
                returned.set()
            pending.wait()

    all_of(on_ranks(2, work))
    assert whole(store) == [1, 2]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("what", ["step", "components", "tree", "shape"])
def test_a_rank_that_differs_is_named_and_the_next_save_commits(what: str, is_first: bool) -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        odd = member.rank == 1
        values = {"n": 1}
        weight = {"w": torch.ones(4)}
        with member.manager(store, state={**member.state, "v": values, "w": weight}) as manager:
            if not is_first:
                manager.save(1).wait()
            if what == "tree":
                values["n"] = 1 + member.rank
            if what == "shape":
                weight["w"] = torch.ones(4 + member.rank)
            components = ["model"] if what == "components" and odd else None
            step = 11 if what == "step" and odd else 10
            try:
                manager.save(step, components=components).wait()
            except errors.HoldfastError as error:
                said = cause(error)
            else:
                said = "committed"
            values["n"], weight["w"] = 2, torch.ones(4)
            manager.save(20).wait()
        return said

    said = all_of(on_ranks(2, work))
    words = {"step": "rank 1", "components": "rank 1", "tree": "n is 1 and 2", "shape": "w.w"}[what]
    assert all(words in one for one in said), said
    assert whole(store) == ([20] if is_first else [1, 20])


@pytest.mark.parametrize("odd", [0, 1])
def test_a_skip_by_the_hook_of_one_rank_skips_the_save_of_all_at_once(odd: int) -> None:
    """A leader that fails before it has shared anything is heard, too."""
    store = MemoryStore()

    def work(member: Member) -> str:
        def skip(now: Any, metrics: Any) -> None:
            if now.step == 2 and member.rank == odd:
                raise SaveSkipped("not now")

        hooks = StateHooks(before_save=skip)
        with member.manager(store, hooks=hooks, save_timeout_s=300) as manager:
            manager.save(1).wait()
            try:
                manager.save(2).wait()
            except errors.HoldfastError as error:
                said = cause(error)
            manager.save(3).wait()
        return said

    said = all_of(on_ranks(2, work))
    assert "not now" in said[odd]
    assert f"rank {odd}, in before_save" in said[1 - odd], said
    assert whole(store) == [1, 3]


def test_a_leader_that_refuses_is_heard_at_once_in_the_first_save() -> None:
    store = MemoryStore()
    save_on(2, store, [1])

    def work(member: Member) -> str:
        options = {"on_existing": "error", "save_timeout_s": 300}
        with member.manager(store, **options) as manager:
            try:
                manager.save(1).wait()
            except errors.HoldfastError as error:
                return cause(error)
        return "committed"

    said = all_of(on_ranks(2, work))
    assert "rank 0, in preparing the save" in said[1], said
    assert whole(store) == [1]


def test_ranks_that_learn_of_a_failure_at_different_steps_count_the_same_saves() -> None:
    """Whoever raised the failure in `maybe_save` must not leave its save out."""
    store = MemoryStore()
    fault = Fault(kind="fail", op="finish", error=errors.StoreError("no"))
    late = Fault(kind="hang", op="finish")
    views = [FaultyStore(store, [fault]), FaultyStore(store, [late])]
    is_in_save = threading.Event()

    def work(member: Member) -> list[object]:
        def before_save(now: Any, metrics: Any) -> None:
            if member.rank == 1 and now.step == 2:
                is_in_save.set()

        said: list[object] = []
        options = {"every": "1step", "hooks": StateHooks(before_save=before_save)}
        with member.manager(views[member.rank], save_timeout_s=300, **options) as manager:
            pending = manager.maybe_save(1)
            assert pending is not None
            if member.rank == 0:
                assert pending.committed.exception(60) is not None
            for step in range(2, 6):
                try:
                    done = manager.maybe_save(step)
                    assert done is not None
                    done.wait()
                except SaveFailed as error:
                    said.append((step, error.step))
                if member.rank == 0 and is_in_save.wait(60):
                    late.release.set()
        return said

    assert all_of(on_ranks(2, work)) == [[(2, 1)], [(2, 1)]]
    assert whole(store) == [3, 4, 5]


def test_a_save_that_failed_is_due_again_on_all_ranks() -> None:
    """Invariant 8: the leader asks for it, and the ranks agree on the call."""
    store = MemoryStore()
    fault = Fault(kind="fail", op="put", key="*/index.json", error=errors.StoreError("no"), times=1)
    views = [FaultyStore(store, [fault]), store]

    def work(member: Member) -> list[int]:
        saved = []
        with member.manager(views[member.rank], every=At("10step"), on_failure="warn") as manager:
            for step in range(1, 1_000_000):
                pending = manager.maybe_save(step)
                if pending is not None:
                    saved.append(step)
                    pending.committed.exception(60)
                if len(saved) == 2:
                    break
        return saved

    first, second = all_of(on_ranks(2, work))
    assert first == second
    assert first[0] == 10
    assert whole(store) == first[1:]


def test_a_save_that_failed_and_was_made_up_for_is_not_made_once_more() -> None:
    """Invariant 8: as the Trainer does, before the ranks get what the leader asks for."""
    store = MemoryStore()
    fault = Fault(kind="fail", op="put", key="*/index.json", error=errors.StoreError("no"), times=1)
    views = [FaultyStore(store, [fault]), store]

    def work(member: Member) -> list[int]:
        saved = []
        with member.manager(views[member.rank], every=At("10step"), on_failure="warn") as manager:
            look, asked_again = manager._session.events.collect_events, threading.Event()

            def watched(*args: Any, **options: Any) -> Any:
                events, asked = look(*args, **options)
                if asked.failed is not None:
                    asked_again.set()
                return events, asked

            manager._session.events.collect_events = watched  # type: ignore[method-assign]
            for step in range(1, 1_000_000):
                wanted = Due("permanent", "again") if step == 11 else None
                pending = manager.maybe_save(step, wanted=wanted)
                if pending is not None:
                    saved.append(step)
                    pending.committed.exception(60)
                if asked_again.is_set():
                    break
        return saved

    assert all_of(on_ranks(2, work)) == [[10, 11], [10, 11]]
    assert whole(store) == [11]


@pytest.mark.parametrize("has_arrived", [True, False])
def test_a_leader_in_doubt_of_its_commit_lets_the_register_tell(has_arrived: bool) -> None:
    """Followers say what the register holds, not what the leader fears (rule 11)."""
    store = MemoryStore()
    kind: Kind = "lose_reply" if has_arrived else "fail"
    lost = Fault(
        kind=kind,
        op="put",
        key="*/manifest.json",
        times=None,
        error=errors.OutcomeUnknown("no reply"),
    )
    unread = Fault(kind="fail", op="get", key="*/manifest.json", times=None)
    views = [FaultyStore(store, [lost, unread]), FaultyStore(store), FaultyStore(store)]

    def work(member: Member) -> str:
        manager = member.manager(views[member.rank], save_timeout_s=300)
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return cause(error)
        return "committed"

    said = all_of(on_ranks(3, work))
    assert "may or may not have committed" in said[0]
    if has_arrived:
        assert said[1:] == ["committed"] * 2
        assert whole(store) == [1]
    else:
        assert all("rank 0, in committing" in one for one in said[1:]), said
        (folder,) = (name for name in store.children() if name.startswith("step"))
        assert isinstance(Catalog(store).read(folder.rstrip("/")), Aborted)


def test_a_plan_that_a_rank_does_not_know_is_not_gone_by() -> None:
    store = MemoryStore()

    def work(member: Member) -> str:
        with member.manager(store) as manager:
            manager.save(1).wait()
            if member.rank == 1:
                # As after a save whose plan this rank alone did not hear.
                known = manager._session.distributed.known
                for components, plan in known.items():
                    known[components] = replace(plan, plan_id="another")
            try:
                manager.save(2).wait()
            except errors.HoldfastError as error:
                said = cause(error)
            manager.save(3).wait()
        return said

    assert all("does not know" in said for said in all_of(on_ranks(2, work)))
    assert whole(store) == [1, 3]


def test_a_leader_that_is_too_slow_finds_the_register_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A follower gave up: what the leader goes on to do never commits."""
    monkeypatch.setattr(together_module, "GRACE_S", 0.1)
    store = MemoryStore()
    slow = Fault(kind="hang", op="put", key="*/index.json")
    views = [FaultyStore(store, [slow]), store]

    def work(member: Member) -> str:
        timeout_s = 60.0 if member.rank == 0 else 1.0
        with member.manager(views[member.rank], save_timeout_s=timeout_s) as manager:
            try:
                manager.save(1).wait(60)
            except errors.HoldfastError as error:
                return cause(error)
            finally:
                if member.rank == 1:
                    slow.release.set()
        return "committed"

    said = all_of(on_ranks(2, work))
    assert "nothing came by the deadline from rank 0" in said[1]
    assert "taken by an abort marker of rank 1" in said[0]
    assert whole(store) == []


@pytest.mark.parametrize("op", ["truncate", "lose"])
def test_a_file_of_a_follower_that_the_leader_does_not_see_whole_is_not_committed(op: str) -> None:
    """Each rank sees its own writes; the leader looks at those of all before it commits."""
    stores = [MemoryStore(), MemoryStore()]
    if op == "truncate":
        stores[1] = stores[0]

    class Short(FaultyStore):
        """Its files are cut after they were reported as written."""

        def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
            if key.endswith("index.json"):
                own = [info.key for info in self.inner.list() if "00001.safet" in info.key]
                for name in own:
                    self.inner.put(name, self.inner.get(name)[:-1])
            super().put(key, data, if_absent=if_absent)

    views = [Short(stores[0]) if op == "truncate" else stores[0], stores[1]]

    def work(member: Member) -> str:
        with member.manager(views[member.rank]) as manager:
            try:
                manager.save(1).wait()
            except errors.HoldfastError as error:
                return cause(error)
        return "committed"

    said = all_of(on_ranks(2, work))
    told = "bytes were written" if op == "truncate" else "must have the same storage"
    assert all(told in one for one in said), said
    assert whole(stores[0]) == whole(stores[1]) == []


def test_a_follower_whose_file_the_leader_has_removed_says_why(ram_path: Path) -> None:
    """The leader cleans up after a failure of its own, while others still write."""
    store = LocalStore(ram_path / "run")
    full = Fault(
        kind="fail", op="finish", key="*model*", error=errors.StoreFull("no space"), times=None
    )
    late = Fault(kind="hang", op="finish", key="*model*")
    views = [FaultyStore(store, [full]), FaultyStore(store, [late])]

    def work(member: Member) -> str:
        with member.manager(views[member.rank]) as manager:
            try:
                manager.save(1).wait()
            except errors.HoldfastError as error:
                return cause(error)
            finally:
                if member.rank == 0:
                    late.release.set()
        return "committed"

    said = all_of(on_ranks(2, work))
    assert "no space" in said[0]
    assert "rank 0, in writing" in said[1], said
    assert "no space" in said[1]


def test_ranks_that_know_other_checkpoints_of_the_step_do_not_wait_for_a_comparison() -> None:
    """The leader is in doubt of a commit that its followers have found."""
    store = MemoryStore()
    lost = Fault(
        kind="lose_reply",
        op="put",
        key="*/manifest.json",
        error=errors.OutcomeUnknown("no reply"),
    )
    unread = Fault(kind="fail", op="get", key="*/manifest.json", times=1)
    views = [FaultyStore(store, [lost, unread]), store]

    def work(member: Member) -> list[str]:
        said = []
        with member.manager(views[member.rank], save_timeout_s=20) as manager:
            for _ in range(3):
                try:
                    said.append(manager.save(1).wait().folder)
                except errors.HoldfastError as error:
                    said.append(cause(error))
        return said

    leader, follower = all_of(on_ranks(2, work))
    assert "may or may not have committed" in leader[0]
    assert leader[1] == follower[1] != follower[0]
    assert leader[2] == follower[2] == leader[1]
    assert whole(store) == [1, 1]


def test_a_rank_that_may_not_save_fails_the_save_of_all_and_the_next_commits() -> None:
    """It counts the save that it refuses: else every later one would be paired one off."""
    store = MemoryStore()

    def work(member: Member) -> list[str]:
        with member.manager(store, save_timeout_s=300) as manager:
            said = []
            for step in (1, 2, 3):
                if member.rank == 1:
                    manager._session.applier.half_loaded = (
                        "another rank failed" if step == 2 else None
                    )
                try:
                    manager.save(step).wait()
                except errors.HoldfastError as error:
                    said.append(cause(error))
        return said

    said = all_of(on_ranks(2, work))
    assert [len(of_rank) for of_rank in said] == [1, 1]
    assert all("half loaded" in of_rank[0] for of_rank in said), said
    assert whole(store) == [1, 3]


def test_a_tag_that_the_leader_cannot_write_fails_the_save_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others hear that nothing has changed only when the checkpoint has its tag."""
    store = MemoryStore()

    def refuse(*args: Any, **named: Any) -> None:
        raise errors.TransientStoreError("503")

    def work(member: Member) -> str:
        with member.manager(store, save_timeout_s=300) as manager:
            manager.save(1).wait()  # all have made their models, with the generators they share
            manager.save(2).wait()
            monkeypatch.setattr(saver, "annotate", refuse)
            try:
                manager.save(2, tags=["best"]).wait()
            except errors.HoldfastError as error:
                return cause(error)
        return "committed"

    said = all_of(on_ranks(2, work))
    assert all("503" in one for one in said), said


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_index_that_would_be_too_large_is_in_parts_or_refused_before_a_file_is_written(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    monkeypatch.setattr(index, "MAX_INDEX_VALUES", 50)
    if is_refused:
        monkeypatch.setattr(index_parts, "MAX_ALL_BOXES", 9)

    def work(member: Member) -> str:
        with member.manager(store) as manager:
            try:
                manager.save(1, wait=True)
            except errors.HoldfastError as error:
                return str(error)
        return "committed"

    for said in all_of(on_ranks(2, work)):
        assert said == "committed" or "10 tensors in 10 boxes" in said
        assert is_refused == ("Nothing was written" in said)
    if is_refused:
        assert not [key for key in store.list("") if key.endswith(".safetensors")]
    else:
        assert whole(store) == [1]
        (entry,) = Catalog(store).checkpoints()
        assert "index-0001.json" in entry.manifest.files


class Order:
    """A position of two tensors that belong together."""

    def __init__(self, value: int) -> None:
        self.state = {"a": torch.full((40_000,), value), "b": torch.full((40_000,), value)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state


def test_the_tensors_of_an_object_come_from_one_rank() -> None:
    """Where ranks differ between two comparisons, what is saved still belongs together."""
    store = MemoryStore()

    def work(member: Member) -> list[int]:
        order = Order(1)
        with member.manager(store, state={**member.state, "order": order}) as manager:
            manager.save(1).wait()
            for tensor in order.state.values():
                tensor.add_(member.rank)
            manager.save(2).wait()
            manager.load(2)
        return [int(tensor[0]) for tensor in order.state.values()]

    assert all_of(on_ranks(3, work)) == [[1, 1]] * 3


def test_a_manifest_that_a_follower_cannot_read_is_no_failure_of_the_save() -> None:
    store = MemoryStore()
    unread = Fault(kind="fail", op="get", key="*/manifest.json", times=None)
    views = [store, FaultyStore(store, [unread])]

    def work(member: Member) -> str:
        manager = member.manager(views[member.rank], save_timeout_s=300)
        try:
            manager.save(1).wait()
        except errors.HoldfastError as error:
            return str(error)
        return "committed"

    leader, follower = all_of(on_ranks(2, work))
    assert leader == "committed"
    assert "may or may not have committed" in follower
    assert "the leader has committed it" in follower


def test_a_request_whose_step_never_came_is_answered() -> None:
    store = MemoryStore()
    names: list[str] = []

    def work(member: Member) -> None:
        with member.manager(store, every="1000step", save_timeout_s=300) as manager:
            manager.save(1).wait()
            manager.maybe_save(2)
            if member.rank == 0:
                names.append(put_save_request(store, reason="look", tags=()))
                end = time.monotonic() + 60
                while not manager._session.events._held and time.monotonic() < end:
                    # Without the others, so that no call is reached at which all save.
                    manager._session.events.propose_save(None, is_owner=True)

    all_of(on_ranks(2, work))
    answer = answer_to(store, names[0])
    assert answer is not None
    assert "ended before all ranks saved" in str(answer.error)
