"""DCP's storage writer: each rank writes its tensors, and the coordinator commits in `finish`."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.errors import NoCheckpoint, NotFound, NotShared, UnsupportedState, UsageError
from holdfast.format.layout import AttemptName, check_label, parse_attempt
from holdfast.format.manifest import MAX_COUNT, Reference, Timestamp
from holdfast.format.nodes import TensorRef
from holdfast.format.tensors import TensorSpec
from holdfast.interop.dcp.items import (
    Item,
    Value,
    kind_of,
    paths_of,
    pickle_of,
    specs_of,
    tree_of,
    value_of,
)
from holdfast.interop.dcp.plans import (
    DcpLayout,
    Note,
    PlacedPart,
    WrittenBox,
    places_of,
    specs_by_component,
    tables_of,
    whole_plans,
    write_tensors,
)
from holdfast.interop.roots import WrittenRoot, expect_path, written_root
from holdfast.ownership.claim import Claim
from holdfast.policy.naming import DEFAULT_LABEL
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import SaveAttempt, commit, create_attempt
from holdfast.saving.participants import Gathered, OwnFile, SaveParticipant
from holdfast.saving.save import AttemptFiles, SaveRequest, manifest_of, write_index
from holdfast.saving.settings_history import numerics
from holdfast.staging.interfaces import Staged
from holdfast.staging.waves import WaveTransfer
from holdfast.state.leaves import TORCH_DTYPES, is_subclass, refusal
from holdfast.store.base import Store
from holdfast.version import environment

_NUMBER = re.compile(r"([0-9]+)\D*\Z", re.ASCII)
_SUBCLASS = "DCP cannot save a tensor subclass; a CheckpointManager can"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """Report of one rank to the coordinator: what it has written."""

    files: Sequence[OwnFile]
    parts: Sequence[PlacedPart]
    values: Sequence[Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """The save under way, as its coordinator knows it."""

    attempt: SaveAttempt
    layouts: Mapping[str | None, DcpLayout]
    """By the cache of the planner; see `whole_plans`."""
    step: int
    claim: Claim
    sequence: int
    world_size: int
    began_s: float


class HoldfastWriter(StorageWriter):
    """Storage of `dcp.save` and `dcp.async_save`: each save becomes a checkpoint of a run.

        dcp.save(state, storage_writer=HoldfastWriter(root, step=1000))

    What is below one key at the top of the state is a component of that name. The checkpoint
    commits at the end of the save, on rank 0; a save that fails anywhere leaves none. The process
    that commits owns the run until it ends or `close` is called.

    Args:
        root: path or URL of the run.
        step: completed optimizer windows. None: the last number in the `checkpoint_id`.
        unsafe_pickle: save values that are no typed trees as DCP's pickles. Whoever loads them
            runs what is in them.
        takeover: save although a live process owns the run.
        timeout_s: longest time that writing one file may take.
    """

    @check_arguments()
    def __init__(
        self,
        root: str | os.PathLike[str] | Store,
        *,
        step: int | None = None,
        unsafe_pickle: bool = False,
        takeover: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        self.step = step
        """Step of the next save; may be set between two saves."""
        self._saved: AttemptName | None = None
        self._where = root
        self._given: str | None = None
        """Label for the next save, until that begins: DCP does not reset without an id."""
        self._label: str | None = None
        self._unsafe_pickle = unsafe_pickle
        self._takeover = takeover
        self._timeout_s = timeout_s
        self._save: _Save | None = None
        self._cache: str | None = None
        """In which of its caches the planner had the plan of this save."""
        self._loaded: Reference | None = None
        self._root  # noqa: B018 - a wrong root is refused here

    @property
    def _root(self) -> WrittenRoot:
        return written_root(self._where)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which goes on from the checkpoint loaded here."""
        expect_path(self._where)
        loaded, self._root.loaded = self._root.loaded, None
        self._given = None  # DCP resets the copy
        self._root.release_run()
        return {**self.__dict__, "_save": None, "_loaded": loaded}

    @override
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; the last part of `checkpoint_id` becomes the checkpoint's label."""
        self._given = None
        if checkpoint_id is not None:
            label = os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2]
            check_label(label)
            self._given = label

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._label, self._given = self._given, None
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False: then each rank would commit for itself. One checkpoint of "
                "all ranks needs use_collectives=True"
            )
        self._step_now()

    def _step_now(self) -> int:
        step = self.step
        if step is None:
            found = _NUMBER.search(self._label or "")
            if found is None:
                raise UsageError(
                    "the step is unknown: pass HoldfastWriter(root, step=…), or a checkpoint_id "
                    "with a number in it"
                )
            step = int(found[1])
        if not 0 <= step <= MAX_COUNT:
            raise UsageError(f"step={step}: must be at least 0 and at most {MAX_COUNT}")
        return step

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the run before its first save, make the folder, and tell each rank of it."""
        root = self._root
        root.clean()
        whole = whole_plans(plans)
        layouts = {cache: DcpLayout(of_cache) for cache, of_cache in whole.items()}
        if self._loaded is not None:
            root.loaded, self._loaded = self._loaded, None
        claim, sequence = root.claim_root(
            nbytes=max(layout.nbytes for layout in layouts.values()),
            num_files=max(layout.num_files for layout in layouts.values()),
            takeover=self._takeover,
        )
        step = self._step_now()
        label = self._label or DEFAULT_LABEL.format(step=step)
        attempt = create_attempt(
            root.store, label=label, epoch=claim.epoch, nonce=claim.nonce, sequence=sequence
        )
        root.record_attempt(attempt, is_alone=len(plans) == 1)
        self._save = _Save(
            attempt=attempt,
            layouts=layouts,
            step=step,
            claim=claim,
            sequence=sequence,
            world_size=len(plans),
            began_s=time.perf_counter(),
        )
        return [
            dataclasses.replace(
                plan,
                storage_data=Note(
                    folder=attempt.folder,
                    save_id=attempt.save_id,
                    tasks={
                        cache: layouts[cache].task(rank, of_cache[rank])
                        for cache, of_cache in whole.items()
                    },
                ),
            )
            for rank, plan in enumerate(next(iter(whole.values())))
        ]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, and wait until they are durable."""
        try:
            share = self._written(plan, planner)
        except BaseException as error:
            if self._save is not None:
                self._give_up(error)
            else:
                self._root.drop_pool()
            raise
        future: Future[list[WriteResult]] = Future()
        nbytes = sum(file.entry.nbytes for file in share.files)
        future.set_result([WriteResult(MetadataIndex("holdfast"), nbytes, share)])
        return future

    def _written(self, plan: SavePlan, planner: SavePlanner) -> _Share:
        note, root = plan.storage_data, self._root
        assert isinstance(note, Note), "the plan was made for this writer"
        name = parse_attempt(note.folder)
        assert name is not None, "the coordinator made the folder"
        self._cache = note.cache_of(planner)
        task = note.tasks[self._cache]
        write_items = {item.index: item for item in task.write_items}
        sources = {
            (part.component, part.stored.key): write_items[index]
            for index, part in task.parts.items()
        }
        values = [
            self._value(task.values[index.fqn], write_item, planner)
            for index, write_item in write_items.items()
            if index.fqn in task.values
        ]
        try:
            files = write_tensors(
                SaveAttempt(name=name, save_id=note.save_id),
                specs_by_component(task.parts.values()),
                first=task.first,
                resolve=lambda component, spec: _resolved(
                    planner, sources[component, spec.key], spec
                ),
                tools=root.tools(self._timeout_s),
                pool=root.pool,
            )
        except NotFound as error:
            if self._save is not None:
                raise
            raise NotShared(
                f"{root.store.url}/{note.folder}: the coordinator has made this folder, and this "
                f"rank does not see it: {error}. All ranks must have the same storage under this "
                "root"
            ) from error
        return _make_own_share(files, task.parts.values(), values)

    def _value(self, item: Item, write_item: WriteItem, planner: SavePlanner) -> Value:
        try:
            return value_of(item, write_item, planner)
        except UnsupportedState:
            if not self._unsafe_pickle:
                raise
        kept = dataclasses.replace(item, is_pickled=True)
        return Value(item=kept, tree=pickle_of(write_item, planner), tensors={})

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, once all ranks have written."""
        save = self._save
        assert save is not None, "DCP plans before it finishes"
        shares = [result.storage_data for of_rank in results for result in of_rank]
        try:
            self._commit(save, metadata, shares)
        except BaseException as error:
            self._give_up(error)
            raise
        self._save, self._saved = None, save.attempt.name
        self._root.publish_attempt(save.attempt)
        self._root.release_if_in_daemon()

    def _commit(self, save: _Save, metadata: Metadata, shares: Sequence[_Share]) -> None:
        root, layout, attempt = self._root, save.layouts[self._cache], save.attempt
        _expect_all(layout, metadata)
        values = [value for share in shares for value in share.values]
        inner, counts = self._write_inner(save, values)
        shares = [*shares, inner]
        kinds = {name: kind_of(items) for name, items in layout.components.items()}
        trees = _trees(layout, values, is_flat=metadata.planner_data is not None)
        files = AttemptFiles(
            attempt,
            Staged(files={}, trees=trees, kinds=kinds, transfer=WaveTransfer({}, root.pool)),
            root.tools(self._timeout_s),
            SaveParticipant(),
        )
        placed_parts = [part for share in shares for part in share.parts]
        files.add_gathered(
            Gathered(
                files=[file for share in shares for file in share.files],
                trees=trees,
                tables=tables_of([*trees], placed_parts, counts),
            )
        )
        files.write_attempt_files(files.trees(trees))
        write_index(files)
        request = self._request(save)
        commit(root.store, attempt, manifest_of(attempt, kinds, request, files, save.world_size))

    def _write_inner(self, save: _Save, values: Sequence[Value]) -> tuple[_Share, dict[str, int]]:
        """Write the tensors inside values, into the last files; return the counts of all files."""
        specs, counts = specs_of(values), dict(save.layouts[self._cache].counts)
        tensors = {
            (value.item.component, key): tensor
            for value in values
            for key, tensor in value.tensors.items()
        }
        files = write_tensors(
            save.attempt,
            specs,
            first=counts,
            resolve=lambda component, spec: tensors[component, spec.key],
            tools=self._root.tools(self._timeout_s),
            pool=self._root.pool,
        )
        for name, of_component in files.staged.files.items():
            counts[name] += len(of_component)
        parts = [
            WrittenBox(component=name, tensor=spec, offsets=(0,) * len(spec.shape), stored=spec)
            for name, some in specs.items()
            for spec in some
        ]
        return _make_own_share(files, parts, []), counts

    def _request(self, save: _Save) -> SaveRequest:
        return SaveRequest(
            label=save.attempt.name.label,
            claim=save.claim,
            sequence=save.sequence,
            timestamp=Timestamp(step=save.step),
            save_class="permanent",
            reason="dcp",
            tags=(),
            metrics={},
            numerics=numerics(save.world_size),
            environment=environment(),
            timings={"write_s": time.perf_counter() - save.began_s},
        )

    def _give_up(self, error: BaseException) -> None:
        self._save = None
        self._root.drop_pool()
        self._root.clean(error)
        self._root.release_if_in_daemon()

    def saved(self) -> tuple[Store, Entry]:
        """Return the last checkpoint that was committed through this writer in this process.

        Raises:
            NoCheckpoint: there is none, or it was deleted since.
        """
        store = self._root.store
        entry = None if self._saved is None else Catalog(store).entry(self._saved)
        if entry is None:
            raise NoCheckpoint(f"{store.url}: no checkpoint that this writer saved still exists")
        return store, entry

    def close(self) -> None:
        """Release the run, and remove what a failed save left behind. The writer stays usable.

        A save in the background must have ended, as before the next save: it would fail.
        """
        self._root.release_run()

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id can be a label."""
        try:
            check_label(os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2])
        except UsageError:
            return False
        return True


def _resolved(planner: SavePlanner, write_item: WriteItem, spec: TensorSpec) -> Tensor:
    """Return the tensor of a box, as the planner gives it."""
    tensor = planner.resolve_data(write_item)
    name, planned = write_item.index.fqn, (TORCH_DTYPES[spec.dtype], spec.shape)
    if not isinstance(tensor, Tensor):
        raise UnsupportedState([(name, "planned as a tensor, and the planner gives another type")])
    if tensor.numel() == 0 and 0 in spec.shape:
        return tensor.new_empty(spec.shape)
    tensor = tensor.detach()
    reason = _SUBCLASS if is_subclass(tensor) else refusal(tensor)
    if reason is not None:
        raise UnsupportedState([(name, reason)])
    if (tensor.dtype, tuple(tensor.shape)) != planned:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise UnsupportedState(
            [(name, f"planned as {planned[0]} {list(planned[1])}, and the planner gives {found}")]
        )
    return tensor


def _make_own_share(
    files: AttemptFiles, parts: Iterable[WrittenBox], values: Sequence[Value]
) -> _Share:
    places = places_of(files)
    return _Share(
        files=files.own,
        parts=[
            PlacedPart(part=part, file=file, start=start)
            for part in parts
            for file, start in [places[part.component, part.stored.key]]
        ],
        values=values,
    )


def _expect_all(layout: DcpLayout, metadata: Metadata) -> None:
    """Raise `UsageError` if other items were planned than those that the planner knows."""
    odd = sorted(layout.items.keys() ^ metadata.state_dict_metadata.keys())
    if odd:
        raise UsageError(
            f"{odd[0]!r}: the plan and its planner disagree about it. With enable_plan_caching, "
            "all saves of a process must use the same planner class"
        )
    paths_of(layout.items, metadata.planner_data)


def _trees(layout: DcpLayout, values: Iterable[Value], *, is_flat: bool) -> dict[str, bytes]:
    """Encode the tree of each component."""
    by_name = {value.item.name: value for value in values}
    trees = {}
    for component, items in layout.components.items():
        nodes: dict[Item, Any] = {}
        for item in items:
            value = by_name.get(item.name)
            if value is not None:
                nodes[value.item] = value.node
            elif item.is_tensor:
                nodes[item] = TensorRef(item.tensor_key)
        trees[component] = tree_of(nodes, is_flat=is_flat)
    return trees
