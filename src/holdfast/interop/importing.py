"""Imports a source as a checkpoint: components chosen, tensors renamed, committed like a save.

Only a few blocks are in memory at a time. The same source gives the same files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from holdfast.arguments import check_arguments
from holdfast.encryption.store import sealing
from holdfast.errors import MissingKey, NoCheckpoint, NotSealed, UsageError
from holdfast.format.blocks import num_blocks
from holdfast.format.layout import BLOCK_NBYTES, RNG, check_component, check_label
from holdfast.format.manifest import MAX_COUNT, Timestamp
from holdfast.format.nodes import SubclassRef, TensorRef
from holdfast.format.objects import document
from holdfast.format.tensors import TensorFile, TensorSpec, lay_out
from holdfast.interop.opening import open_source
from holdfast.interop.optimizers import Hints, is_torch_form, name_parameters
from holdfast.interop.renaming import RenameRules
from holdfast.interop.roots import WrittenRoot
from holdfast.interop.source import LeftOut, Source, SourceComponent, ahead, expect_no_loss
from holdfast.keys import Encryption
from holdfast.policy.naming import DEFAULT_LABEL
from holdfast.results import Checkpoint, build_checkpoint
from holdfast.root.catalog import Catalog
from holdfast.saving.participants import SaveParticipant
from holdfast.saving.save import SaveRequest, write
from holdfast.staging.interfaces import KnownFile, Staged, StagedContent, StagingTransfer
from holdfast.staging.pool import PooledContent
from holdfast.store import open_store
from holdfast.store.base import Store
from holdfast.threads.buffers import LimitedBuffers
from holdfast.threads.workers import Workers
from holdfast.version import environment

MAX_RECORDED = 1000
"""Most values left out that a manifest names."""
_EXTRA = "_extra_state"
_SCHEDULER = frozenset({"last_epoch", "_step_count"})
_TIMEOUT_S = 1800.0
_BLOCKS_AHEAD = 6
"""Most blocks that are read before they are asked for; the pool's others are hashed and written."""
_IN_ORDER = frozenset({"torch", "lightning", "ignite", "composer"})
"""Formats with a model as a pickled dict, in the order of its parameters; others sort them."""

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A component as it will be stored."""

    kind: str
    tree: Any
    specs: Mapping[str, TensorSpec]
    """Specs by key, in the order of the source's bytes."""
    keys: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(spec.nbytes for spec in self.specs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """Components that an import takes from a source, and what it leaves out."""

    source: Source
    taken: Mapping[str, Taken]
    left_out: Sequence[LeftOut]
    notes: Sequence[str]
    """Notes for the user on the conversion, such as an optimizer that stays as it was."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are taken."""
        return sum(one.nbytes for one in self.taken.values())


def plan_import(
    source: Source,
    *,
    components: Collection[str] = (),
    rename: RenameRules | None = None,
    optimizer: str | None = None,
    parameters: Sequence[str] = (),
    allow_loss: bool = False,
) -> ImportPlan:
    """Decide how each component of a source is stored, without reading a tensor.

    `components` are those to take, all if empty; `rename` applies to the names in modules;
    `optimizer` is the class of the optimizers whose options do not tell it. `parameters` are the
    new names of the model's parameters in its order, for files that do not keep it.
    """
    expect_no_loss(source, components, allow_loss=allow_loss)
    rules = rename or RenameRules()
    parts = (
        {name: source.get_component(name) for name in components} if components else source.parts
    )
    left = [*source.left_out]
    left += [
        LeftOut(path=name, why="not among the components asked for")
        for name in source.parts
        if name not in parts
    ]
    notes: list[str] = []
    modules = {name: part for name, part in parts.items() if _is_module(part)}
    taken = {name: _module(name, part, rules) for name, part in modules.items()}
    rules.expect_used()
    renamed = {
        name: SourceComponent(kind="module", tree=one.tree, specs=one.specs)
        for name, one in taken.items()
    }
    hints = Hints(
        is_ordered=source.format in _IN_ORDER, order=parameters, kind=optimizer, rename=rules
    )
    for name, part in parts.items():
        check_component(name)
        if name not in taken:
            taken[name] = _other(name, part, renamed, hints, notes)
    if (optimizer or parameters) and not any(is_torch_form(one.tree) for one in parts.values()):
        raise UsageError("--optimizer, --parameters: no torch optimizer is imported")
    in_order = {name: taken[name] for name in parts}
    return ImportPlan(source=source, taken=in_order, left_out=left, notes=notes)


def _is_module(part: SourceComponent) -> bool:
    tree = part.tree
    if part.kind not in ("module", "tree") or not isinstance(tree, dict):
        return False
    tensors = [isinstance(value, TensorRef | SubclassRef) for value in tree.values()]
    if part.kind == "tree":
        return bool(tree) and all(tensors) and all(isinstance(key, str) for key in tree)
    return all(
        isinstance(key, str) and (is_tensor or key.rpartition(".")[2] == _EXTRA)
        for key, is_tensor in zip(tree, tensors, strict=True)
    )


def _module(component: str, part: SourceComponent, rules: RenameRules) -> Taken:
    """Rename the tensors of a module, whose keys become the new names."""
    names = rules.map_names(part.tree, component)
    keys: dict[str, str] = {}
    """Key in the source → new key: of tied tensors the first name."""
    tree: dict[str, Any] = {}
    for old, new in names.items():
        tree[new] = _with_keys(part.tree[old], new, keys)
    inside = SourceComponent(kind="module", tree=tree, specs={}).leaves
    old_keys = {new: old for old, new in keys.items()}
    old_keys |= {ref.key: ref.key for ref in inside.values() if ref.key not in old_keys}
    return Taken(kind="module", tree=tree, specs=_rename_specs(part, old_keys), keys=old_keys)


def _with_keys(node: Any, name: str, keys: dict[str, str]) -> Any:
    """Return a node of a module with the keys of its new name; adds these to `keys`."""
    if isinstance(node, SubclassRef):
        inner = {
            part: _with_keys(one, f"{name}.{part}", keys) for part, one in node.tensors.items()
        }
        return SubclassRef(node.type, node.shape, node.dtype, inner, node.context)
    if not isinstance(node, TensorRef):
        return node
    key = keys.setdefault(node.key, name)
    return TensorRef(key, node.device, node.grad, node.parameter, node.order)


def _other(
    component: str,
    part: SourceComponent,
    modules: Mapping[str, SourceComponent],
    hints: Hints,
    notes: list[str],
) -> Taken:
    if is_torch_form(part.tree):
        found = name_parameters(part, modules, hints)
        if not isinstance(found, str):
            if found.note:
                notes.append(f"{component}: {found.note}")
            return Taken(
                kind="optimizer",
                tree=found.tree,
                specs=_rename_specs(part, found.keys),
                keys=found.keys,
            )
        notes.append(f"{component}: stored unchanged, so no optimizer can resume from it: {found}")
    keys = {ref.key: ref.key for ref in part.leaves.values()}
    return Taken(
        kind=_choose_kind(part), tree=part.tree, specs=_rename_specs(part, keys), keys=keys
    )


def _choose_kind(part: SourceComponent) -> str:
    tree = part.tree
    if part.kind in ("optimizer", "module") and (is_torch_form(tree) or part.kind == "module"):
        return "tree"
    if part.kind == "tree" and isinstance(tree, dict) and {*tree} >= _SCHEDULER:
        return "object"  # a scheduler's state_dict
    return part.kind


def _rename_specs(part: SourceComponent, old_keys: Mapping[str, str]) -> dict[str, TensorSpec]:
    new_keys: dict[str, list[str]] = {}
    for new, old in old_keys.items():
        new_keys.setdefault(old, []).append(new)
    return {
        new: TensorSpec(new, spec.dtype, spec.shape)
        for old, spec in part.specs.items()
        for new in new_keys.get(old, ())
    }


@check_arguments()
def import_checkpoint(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str] | Store,
    *,
    step: int | None = None,
    label: str | None = None,
    components: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    optimizer: str | None = None,
    parameters: Collection[str] = (),
    allow_loss: bool = False,
    encrypt: Encryption | None = None,
    trust: bool = False,
) -> Checkpoint:
    """Save a checkpoint or a file of weights of any known format as a new checkpoint of a run.

    `step` is needed where the source tells none; `components` are those to take, all by default.
    `rename` maps patterns of the names in modules to new ones: `{"module.**": "**"}`. `optimizer`
    is the class of an optimizer whose options do not tell it, `parameters` the names of the model's
    parameters in its order, where the file does not keep it: `[name for name, _ in
    model.named_parameters()]`. Keeps a few blocks in memory, and runs nothing of the source.
    `trust` lifts the bounds on the number of values in the source.
    `notes` say what was left out, and what cannot be resumed from. `allow_loss` skips tensors
    that cannot be read or named; without it they are an error. `encrypt` has the keys that the
    checkpoint is encrypted with; they also open an encrypted checkpoint that is the source.

    Raises:
        NoCheckpoint: nothing exists at `source`.
        FormatError: it is in no known format, or damaged.
        UsageError: the step is unknown, or a name or a rule fits nothing.
        UnsupportedState: a value of it has no form in a checkpoint.
        OwnedElsewhere: a live process owns the run.
        SealError: the run's checkpoints are encrypted with other keys, or not encrypted.
    """
    rules = RenameRules((rename or {}).items())
    with open_source(os.fspath(source), encrypt=encrypt, trust=trust) as opened:
        plan = plan_import(
            opened,
            components=components,
            rename=rules,
            optimizer=optimizer,
            parameters=[*parameters],
            allow_loss=allow_loss,
        )
        return commit_import(plan, root, step=step, label=label, encrypt=encrypt)


def step_of(plan: ImportPlan, step: int | None) -> int:
    """Return the step that the checkpoint gets: the one asked for, or that of the source."""
    found = plan.source.step if step is None else step
    if found is None:
        raise UsageError(f"{plan.source.url}: has no step; pass one: --step N, or step=N")
    if not 0 <= found <= MAX_COUNT:
        raise UsageError(f"step={found}: must be at least 0 and at most {MAX_COUNT}")
    return found


def commit_import(
    plan: ImportPlan,
    root: str | os.PathLike[str] | Store,
    *,
    step: int | None = None,
    label: str | None = None,
    encrypt: Encryption | None = None,
    report: Report | None = None,
) -> Checkpoint:
    """Write a planned import as a checkpoint and commit it; then release the run."""
    at = step_of(plan, step)
    if label is not None:
        check_label(label)
    if not plan.taken:
        raise UsageError(f"{plan.source.url}: nothing in it can be stored")
    trees = {name: document(one.tree).data for name, one in plan.taken.items()}
    files = {
        name: tuple(map(KnownFile, lay_out(name, [*one.specs.values()])))
        for name, one in plan.taken.items()
    }
    store = open_store(root)
    if encrypt is not None and not encrypt.accept_plain:
        _expect_sealed(store)
    written = WrittenRoot(sealing(store, encrypt))
    transfer = SourceTransfer(plan, files, written.pool, report)
    try:
        staged = Staged(
            files=files,
            trees=trees,
            kinds={name: one.kind for name, one in plan.taken.items()},
            transfer=transfer,
        )
        claim, sequence = written.claim_root(
            nbytes=staged.nbytes, num_files=len(staged.file_sizes), takeover=False
        )
        request = SaveRequest(
            label=label or DEFAULT_LABEL.format(step=at),
            claim=claim,
            sequence=sequence,
            timestamp=Timestamp(step=at),
            save_class="permanent",
            reason="import",
            tags=(),
            metrics={},
            numerics={},
            environment={**environment(), "imported": _origin(plan)},
            timings={"stage_s": 0.0},
            # So that a run goes on from it with generators of its own.
            left_out=() if RNG in plan.taken else (RNG,),
        )
        tools = written.tools(_TIMEOUT_S)
        attempt, _ = write(tools, staged, request, SaveParticipant())
        written.publish_attempt(attempt)
    finally:
        transfer.stop_reading_ahead()
        written.release_run()
        written.threads.close_pools()
    entry = Catalog(written.store).entry(attempt.name)
    if entry is None:
        raise NoCheckpoint(f"{written.store.url}/{attempt.folder}: deleted since it was committed")
    return build_checkpoint(written.store, entry, notes=(*plan.notes, *map(_line, plan.left_out)))


def _expect_sealed(store: Store) -> None:
    """Raise `NotSealed` if the newest checkpoint of a root is not encrypted."""
    try:
        newest = Catalog(store).newest()
    except MissingKey:
        return
    if newest is not None:
        raise NotSealed(
            f"{store.url}/{newest.folder}: is not encrypted, and the import would be. Pass no "
            "keys, another root, or --accept-plain (accept_plain=True)"
        )


def _line(left: LeftOut) -> str:
    return f"left out: {left.path}: {left.why}"


def _origin(plan: ImportPlan) -> dict[str, Any]:
    more = len(plan.left_out) - MAX_RECORDED
    lines = [f"{left.path}: {left.why}" for left in plan.left_out[:MAX_RECORDED]]
    if more > 0:
        lines.append(f"and {more} more")
    return {
        "from": plan.source.url,
        "format": plan.source.format,
        "left_out": lines,
        "notes": [*plan.notes],
    }


class SourceTransfer(StagingTransfer):
    """Blocks of tensor files that are read from a source when they are written."""

    is_early = True
    waited_s = 0.0

    def __init__(
        self,
        plan: ImportPlan,
        files: Mapping[str, Sequence[KnownFile]],
        pool: LimitedBuffers,
        report: Report | None = None,
    ) -> None:
        self.pool = pool
        self._filled = ahead(_fills(plan, files, pool), plan.source.url, most=_BLOCKS_AHEAD)
        self._num_read = 0
        self._nbytes = plan.nbytes
        self._report = report

    def stop_reading_ahead(self) -> None:
        """Stop reading ahead."""
        self._filled.close()

    @override
    def run_copies(self, workers: Workers, num_helpers: int, timeout_s: float) -> None:
        """No-op: no training waits."""

    @override
    def cancel_copying(self, error: BaseException) -> None:
        """No-op: no training goes on."""

    @override
    def wait_for_threads(self, timeout_s: float) -> None:
        """No-op: `close` waits for the threads that read."""

    @override
    def release_waiters(self) -> None:
        """No-op: nobody waits."""

    @override
    def content(self, known: KnownFile) -> StagedContent:
        return _SourceContent(known, self)

    def next_block(self, file: str, number: int) -> memoryview:
        """Return the buffer of the next block of all files, which must be this one."""
        found, buffer, num_read = next(self._filled)
        if found != (file, number):
            raise AssertionError(f"{file}: block {number} is asked for, and {found} was read")
        self._num_read += num_read
        if self._report is not None:
            self._report("import", self._num_read, self._nbytes)
        return buffer


def _fills(
    plan: ImportPlan, files: Mapping[str, Sequence[KnownFile]], pool: LimitedBuffers
) -> Iterator[Callable[[], tuple[tuple[str, int], memoryview, int]]]:
    """Yield a job for each block of all files; waits for its buffer first."""
    for name, of_component in files.items():
        for known in of_component:
            for number in range(num_blocks(known.file.nbytes)):
                # Not in the thread that reads: a job that waits cannot be cancelled.
                buffer = pool.acquire_buffer(_TIMEOUT_S)
                keys = plan.taken[name].keys
                yield partial(_fill_buffer, plan.source, name, keys, known.file, number, buffer)


def _fill_buffer(
    source: Source,
    component: str,
    keys: Mapping[str, str],
    file: TensorFile,
    number: int,
    buffer: memoryview,
) -> tuple[tuple[str, int], memoryview, int]:
    """Fill a buffer with a block of a file; return the block, the buffer, the source's bytes."""
    start = number * BLOCK_NBYTES
    num_read = 0
    memory = buffer[: min(BLOCK_NBYTES, file.nbytes - start)]
    for spec, first, part in file.fill_block(start, memory):
        source.read_into(component, keys[spec.key], first, part)
        num_read += len(part)
    return (file.name, number), buffer, num_read


class _SourceContent(PooledContent):
    """Content of a tensor file; its blocks are asked for in their order, after earlier files'."""

    def __init__(self, known: KnownFile, transfer: SourceTransfer) -> None:
        super().__init__(known, transfer.pool)
        self._source = transfer

    @override
    def block(self, number: int, timeout_s: float) -> memoryview:
        buffer = self._buffers[number] = self._source.next_block(self._file.name, number)
        return buffer[: self.block_nbytes(number)]
