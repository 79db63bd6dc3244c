"""Search for a usable checkpoint, and reading of it, without changes to the live state.

Its tensors are read into fresh memory; or only while they are applied, if the load is in place, or
if memory is bounded, and then all of them are read and checked once before.

`resume` walks back along the lineage, skips damaged candidates and records why; a checkpoint that
was named explicitly is used, or its damage is raised. tests/crash/test_damage.py flips bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal, get_args

from torch import Tensor

from holdfast.errors import (
    CorruptData,
    FormatError,
    HoldfastError,
    MismatchError,
    NoCheckpoint,
    NotFound,
    NotSealed,
    NotShared,
    NoUsableCheckpoint,
    StoreError,
    UsageError,
    is_damage,
)
from holdfast.events import Emitter
from holdfast.format.layout import RNG, AttemptName, parse_attempt, writer_key
from holdfast.format.manifest import Manifest
from holdfast.loading.open import Opened, open_checkpoint
from holdfast.loading.optional_components import (
    MissingComponentPolicy,
    SkippedComponents,
    with_hint,
)
from holdfast.loading.plan import Sharing
from holdfast.loading.staged_blocks import StagedBlocks
from holdfast.loading.tensor_reader import Held, TensorReader
from holdfast.ownership.claim import Choice, dropped
from holdfast.ownership.leases import BeingDeleted, expect_kept, hold_lease
from holdfast.results import KnownCommit
from holdfast.root.catalog import Catalog, Entry, Marks
from holdfast.state.apply import OpaqueLoadFailed, Prepared, prepare
from holdfast.state.capture.edits import Edit, EditedLoad, edited_load
from holdfast.state.planning.copying import Stored
from holdfast.state.resizing import ResizedTensor, fit_tensors
from holdfast.state.selection import StateLoadOptions
from holdfast.store.base import Store
from holdfast.threads.workers import Threads

Unhealthy = Literal["avoid", "accept"]
"""How resume treats an unhealthy checkpoint: "avoid" uses it only if there is no other."""
StoredTensors = Mapping[str, Mapping[str, Stored]]
_STREAMED = frozenset({"module", "optimizer", "tree"})
"""Kinds of components whose tensors are mostly copied into live ones. The others have few bytes, or
pass them to code that needs them in memory."""
_MAX_RELISTS = 10
_MAX_LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(StateLoadOptions):
    """Options of a load: which part of a checkpoint is loaded, and how it is read."""

    edit: Edit | None = None
    """Callback that edits the stored values before they are compared with the live state. It may
    be called again with a new view: for an older checkpoint, when this one proves damaged."""
    verify: bool = True
    in_place: bool = False
    """Whether bytes are read straight into the live tensors, before all of them were checked.
    Damage that is found later leaves the state partly old and partly stored."""
    sides: MissingComponentPolicy = field(default_factory=MissingComponentPolicy)
    """Components that only the state or only the checkpoint may have; the load is still full."""

    @property
    def is_full(self) -> bool:
        """Whether the whole state is loaded, so that training continues as from the checkpoint."""
        is_all = self.components is None and not self.include and not self.skip
        return is_all and self.rename is None and self.strict

    @property
    def proves_whole(self) -> bool:
        """Whether a load with these options reads and checks every byte of a checkpoint."""
        is_unchanged = self.edit is None and not self.resize and not self.is_grown
        return self.is_full and self.verify and is_unchanged

    def is_asked(self, component: str) -> bool:
        """Whether the options select a component for loading."""
        is_named = self.components is None or component in self.components
        return is_named and not self.selection.omits(component)


class PassedOver(NoCheckpoint):
    """Error: a checkpoint is not damaged, but a run must not resume from it."""

    is_warned = False
    """Whether a resume from an older checkpoint is worth a warning."""


class Dropped(PassedOver):
    """Error: requested components were not saved, or retention has removed them."""

    def __init__(self, message: str, *, folder: str, left: Collection[str]) -> None:
        super().__init__(message)
        self.way_on = (
            f"load({folder!r}, components={[*left]}) loads the remaining components of the newest, "
            "to continue in another root; remove components that you no longer want from the state"
        )


class Avoided(PassedOver):
    """Error: the checkpoint was recorded as unhealthy when it was saved."""

    is_warned = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCandidate:
    """Checkpoint that fits the live state, ready to be applied; read whole, or later in place."""

    entry: Entry
    options: LoadOptions
    prepared: Prepared
    tensors: StoredTensors
    reader: TensorReader
    one_sided: SkippedComponents
    """Components that are not loaded, because only the state or only the checkpoint has them."""
    by_rank: frozenset[str]
    """Components of which each rank has its own state."""
    is_proof: bool
    """Whether every byte was read from the root itself and is correct, so that retention may delete
    older checkpoints. Bytes from a host's cache or from the other tier do not count."""

    def cause_of(self, error: Exception) -> StoreError | CorruptData | None:
        """Return the storage or damage error that made `apply` fail; None for other causes."""
        cause = error.__cause__ if isinstance(error, OpaqueLoadFailed) else error
        is_ours = cause is self.reader.failure  # not that of an object which reads its own files
        return cause if is_ours and isinstance(cause, StoreError | CorruptData) else None


@dataclass(slots=True)
class CheckpointSearch:
    """Finds, reads and checks checkpoints of one run, to be applied to one live state."""

    catalog: Catalog
    state: Mapping[str, Any]
    threads: Threads
    timeout_s: float
    passed_over: dict[str, HoldfastError] = field(default_factory=dict)
    """Folder → why resume skipped it, newest first."""
    memory_budget: int | None = None
    """Bytes for tensors that wait to be applied; larger states are read twice."""
    unusable: dict[str, HoldfastError] = field(default_factory=dict)
    """Folder → damage that showed only after it was chosen; resume skips these folders."""
    holding: ExitStack | None = None
    """Stack that gets the lease on a named checkpoint until it is applied. None: no lease, since
    the owner of the run reads it at once."""
    notes: tuple[str, ...] = ()
    """Reasons why no lease could be taken, if one was needed."""
    doubles: tuple[tuple[str, str], ...] = ()
    """Pairs of folders in the lineage with the same epoch and sequence: one of them is a copy."""
    is_mixed: bool = False
    """Whether a failed load has left the live state partly old and partly stored."""
    rank: int = 0
    world_size: int = 1
    sharing: Sharing | None = None
    """How ranks read for each other; None: each reads what it needs."""
    staged: StagedBlocks | None = None
    """Blocks in shared memory that are read in place of stored ones."""
    view: Store | None = None
    """Store through which a candidate is read; None: the tier that it was found in."""

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """(folder, reason) of each checkpoint that resume skipped, newest first."""
        return tuple((folder, str(error)) for folder, error in self.passed_over.items())

    def read_candidate(self, entry: Entry, options: LoadOptions) -> LoadCandidate:
        """Read one checkpoint; raises if it is damaged or does not fit the live state."""
        store = self.view or self.catalog.find_store(entry.folder)
        # By the marks, before anything is read: a missing file alone would look like damage.
        gone = dropped(store, entry.folder, entry.manifest, entry.marks)
        unsaved = _may_lack(entry.manifest, options)
        everything = (*entry.manifest.components, *self._lacks(entry, but=unsaved))
        asked = everything if options.components is None else options.components
        selection = options.selection
        wanted = [name for name in asked if not selection.omits(name)]
        if options.strict:
            self._expect_saved(entry, wanted)
            self._expect_not_dropped(entry, wanted, gone)
        one_sided = options.sides.one_sided(self.state, entry.manifest, options.is_asked)
        try:
            components = [name for name in wanted if name not in {*gone, *one_sided.without}]
            candidate = self._open_candidate(store, entry, options, components, unsaved, one_sided)
        except MismatchError as error:
            raise with_hint(error, entry.manifest) from error
        except (FormatError, StoreError):
            # Files may have been deleted while they were read.
            marks = Catalog(store).marks(entry.folder)
            now = dropped(store, entry.folder, entry.manifest, marks)
            self._expect_not_dropped(entry, wanted, set(now) - set(gone))
            raise
        if not self.passed_over:  # older checkpoints may well have other components
            try:
                options.sides.check_newest_manifest(
                    entry.manifest, gone, where=self._format_url(entry)
                )
            except UsageError:
                candidate.reader.verify_all()  # raises if damaged: then it is skipped
                raise
        return candidate

    def _open_candidate(
        self,
        store: Store,
        entry: Entry,
        options: LoadOptions,
        components: list[str],
        unsaved: Collection[str],
        one_sided: SkippedComponents,
    ) -> LoadCandidate:
        if self.sharing is not None and self.sharing.is_own is None and options.in_place:
            raise UsageError("in_place=True: not with broadcast=True, which needs fresh memory")
        if not options.verify:
            store = store.uncached()  # a damaged copy would not be noticed
        opened = open_checkpoint(
            store,
            entry.folder,
            entry.manifest,
            components=components,
            verify=options.verify,
            rank=self.rank,
            world_size=self.world_size,
        )
        reader = TensorReader(
            store,
            opened,
            threads=self.threads,
            timeout_s=self.timeout_s,
            verify=options.verify,
            sharing=self.sharing,
        )
        if self.staged is not None:
            reader.use_staged_blocks(self.staged)
        edited = _edited(opened, options.edit, reader)
        prepared = prepare(
            self.state,
            edited.components,
            where=entry.folder,
            options=options,
            unread=[name for name in entry.manifest.components if name not in components],
            unsaved=unsaved,
            one_sided=one_sided.component_names,
            divided=opened.components.keys() - opened.by_rank if self.world_size > 1 else (),
        )
        rest = partial(self._read_rest, opened, reader, options, shards=prepared.shards)
        changed = _resized(prepared.resized, edited.tensors, reader)
        tensors = _completed(_as_held(changed, prepared.shards), prepared.needed, rest)
        # Several ranks read only their own boxes.
        has_read_all = options.proves_whole and not one_sided.without and self.world_size == 1
        has_read_all = has_read_all and self.staged is None
        return LoadCandidate(
            entry=entry,
            options=options,
            prepared=prepared,
            tensors=tensors,
            reader=reader,
            one_sided=one_sided,
            by_rank=opened.by_rank,
            is_proof=has_read_all and store.reads_origin and store is self.catalog.store,
        )

    def _lacks(self, entry: Entry, *, but: Collection[str] = ()) -> tuple[str, ...]:
        """Return components of the live state that the checkpoint was saved without."""
        live = {*self.state, RNG}.difference(but)
        return tuple(name for name in entry.manifest.left_out if name in live)

    def _expect_saved(self, entry: Entry, wanted: Collection[str]) -> None:
        missing = ", ".join(name for name in wanted if name in entry.manifest.left_out)
        if missing:
            raise Dropped(
                f"{self._format_url(entry)}: saved without {missing}; a run cannot resume "
                "from it. Load its components by name, or use another checkpoint",
                folder=entry.folder,
                left=entry.manifest.components,
            )

    def _read_rest(
        self,
        opened: Opened,
        reader: TensorReader,
        options: LoadOptions,
        needed: Mapping[str, Iterable[str]],
        shards: Held,
    ) -> StoredTensors:
        """Return the tensors to apply, read now or while they are applied; `shards`: held boxes."""
        kinds = {name: opened.components[name].kind for name in needed}
        streamed = {name: keys for name, keys in needed.items() if kinds[name] in _STREAMED}
        if not options.in_place and not self._is_too_large(opened, streamed):
            return reader.read_tensors(needed, shards)
        unread = reader.unread(streamed, shards)
        if options.verify and not options.in_place:
            # Later each block is copied as it is read, so damage must be found now: two reads of
            # everything are the price of bounded memory.
            reader.verify_all()
        others = {name: keys for name, keys in needed.items() if name not in streamed}
        return {**reader.read_tensors(others, shards), **unread}

    def _is_too_large(self, opened: Opened, needed: Mapping[str, Iterable[str]]) -> bool:
        if self.memory_budget is None:
            return False
        tensors = ((opened.index.components[name].specs, keys) for name, keys in needed.items())
        nbytes = sum(specs[key].nbytes for specs, keys in tensors for key in keys)
        return nbytes > self.memory_budget

    def _expect_not_dropped(self, entry: Entry, wanted: list[str], gone: Collection[str]) -> None:
        missing = ", ".join(name for name in wanted if name in gone)
        if missing:
            raise Dropped(
                f"{self._format_url(entry)}: retention has dropped {missing} of it; a run "
                "cannot resume from the rest. Load the other components by name, or use another "
                "checkpoint",
                folder=entry.folder,
                left=[name for name in entry.manifest.components if name not in gone],
            )

    def _format_url(self, entry: Entry) -> str:
        return f"{self.catalog.find_store(entry.folder).url}/{entry.folder}"

    def read_named(self, which: str | int, options: LoadOptions) -> LoadCandidate:
        """Resolve a name and read that checkpoint; again if it is deleted meanwhile."""
        catalog = self.catalog
        for _ in range(_MAX_LOOKS):
            with self._hold_checkpoint(which) as entry:
                try:
                    if self.holding is None and options.is_full:
                        expect_kept(catalog.find_store(entry.folder), entry.folder, entry.marks)
                    return self.read_candidate(entry, options)
                except BeingDeleted:
                    if not catalog.switch_tier(entry.folder):
                        raise
                except Dropped:
                    if entry.manifest.left_out or not catalog.switch_tier(entry.folder):
                        raise  # the other tier does not keep what was dropped here
                except (FormatError, StoreError) as error:
                    if is_damage(error) and catalog.switch_tier(entry.folder):
                        continue
                    is_gone = isinstance(error, FormatError | NotFound)
                    if not is_gone or catalog.entry(entry.name) is not None:
                        raise
        raise NoCheckpoint(f"{catalog.store.url}: {which!r} was deleted while it was read")

    @contextmanager
    def _hold_checkpoint(self, which: str | int) -> Iterator[Entry]:
        if self.holding is None:
            yield self.catalog.find_checkpoint(which)
            return
        with ExitStack() as stack:
            leased = stack.enter_context(hold_lease(self.catalog, which))
            self.notes = leased.notes
            yield leased.entry
            self.holding.push(stack.pop_all())

    def read_newest(
        self, options: LoadOptions, *, unhealthy: Unhealthy = "avoid"
    ) -> LoadCandidate | None:
        """Read the newest usable checkpoint of the run; None if no whole state was saved yet.

        Parts that side savers saved before the first whole state do not count. Unless `unhealthy`
        is "accept", an unhealthy one is taken only when no other can be used.
        """
        if unhealthy not in get_args(Unhealthy):
            raise UsageError(f"unhealthy={unhealthy!r}: choose from {get_args(Unhealthy)}")
        catalog = self.catalog
        for _ in range(_MAX_RELISTS):
            self.passed_over.clear()
            names = [*catalog.lineage()]
            catalog.expect_rollback_target(anew=False)
            self.doubles = _doubles(names)
            before: list[tuple[AttemptName, str]] = []
            candidate = self._first(catalog, names, options, unhealthy, seen=before)
            if candidate is None and _registers(catalog) == before:
                avoided = [n for n in names if isinstance(self.passed_over.get(str(n)), Avoided)]
                candidate = self._first(catalog, avoided, options, "accept")
            if candidate is not None:
                return candidate
            # Read before the second look at the registers, so that a commit in between leads to
            # another round and not to NoUsableCheckpoint.
            is_new = not catalog.ever_committed(by_main=True)
            if _registers(catalog) == before and not catalog.has_skipped():
                break
        self._expect_sealed()
        if is_new:
            return None
        changed = "The state is mixed" if self.is_mixed else "Nothing was changed"
        others = (error.way_on for error in self.passed_over.values() if isinstance(error, Dropped))
        way_on = next(others, "Name another one explicitly, or use another root")
        if not self.passed_over and (remote := catalog.uploaded_to()):
            way_on = f"They were uploaded to {remote}: resume with Tiered(…, {remote!r})"
        raise NoUsableCheckpoint(
            f"{catalog.store.url}: there are committed checkpoints, and none can be used. "
            f"{changed}. {way_on}",
            self.rejected,
        )

    def _expect_sealed(self) -> None:
        """Raise `NotSealed` if all skipped checkpoints are unencrypted; the user may allow that."""
        errors = [*self.passed_over.values()]
        if errors and all(isinstance(error, NotSealed) for error in errors):
            raise errors[0]

    def _first(
        self,
        catalog: Catalog,
        names: Sequence[AttemptName],
        options: LoadOptions,
        unhealthy: Unhealthy,
        *,
        seen: list[tuple[AttemptName, str]] | None = None,
    ) -> LoadCandidate | None:
        """Return the first usable one of `names`; record those before it in `passed_over`."""
        for name in names:
            if seen is not None:
                seen.append((name, _register_state(catalog, name)))
            if str(name) in self.unusable:
                self.passed_over[str(name)] = self.unusable[str(name)]
                continue
            try:
                candidate = self._read_twice(catalog, name, options, unhealthy)
            except HoldfastError as error:
                if not (is_damage(error) or isinstance(error, PassedOver | NotSealed)):
                    raise
                self.passed_over[str(name)] = error
                continue
            if candidate is not None:
                self.passed_over.pop(str(name), None)
                return candidate
        return None

    def _read_twice(
        self, catalog: Catalog, name: AttemptName, options: LoadOptions, unhealthy: Unhealthy
    ) -> LoadCandidate | None:
        """Read a candidate; on failure retry once, from the other tier if there is one."""
        # Errors may be transient, and a checkpoint damaged in one tier may be whole in the other.
        try:
            return self._read_candidate(catalog, name, options, unhealthy)
        except (StoreError, FormatError) as error:
            is_switched = is_damage(error) and catalog.switch_tier(str(name))
            if not is_switched and not isinstance(error, StoreError | CorruptData):
                raise
            return self._read_candidate(catalog, name, options, unhealthy)

    def _read_candidate(
        self, catalog: Catalog, name: AttemptName, options: LoadOptions, unhealthy: Unhealthy
    ) -> LoadCandidate | None:
        entry = catalog.entry(name)
        if entry is None:
            return None
        try:
            expect_kept(catalog.find_store(entry.folder), entry.folder, entry.marks)
        except BeingDeleted as error:
            if catalog.switch_tier(entry.folder):
                return self._read_candidate(catalog, name, options, unhealthy)
            raise PassedOver(str(error)) from error
        self._expect_saved(entry, self._lacks(entry, but=(RNG,)))
        if unhealthy == "avoid" and catalog.is_avoided(entry):
            raise Avoided(f"not healthy: {', '.join(entry.manifest.unhealthy)}")
        return self.read_candidate(entry, options)


def _may_lack(manifest: Manifest, options: LoadOptions) -> tuple[str, ...]:
    """Return the components that a checkpoint omits and a full load may lack: `rng`, or none."""
    is_asked_for = options.components is not None or options.include
    if RNG not in manifest.left_out or is_asked_for or options.selection.omits(RNG):
        return ()
    return (RNG,)


def _edited(opened: Opened, edit: Edit | None, reader: TensorReader) -> EditedLoad:
    if edit is None:
        return EditedLoad(components=opened.components, tensors={})
    return edited_load(
        opened.components,
        edit,
        where=opened.folder,
        read=lambda name: reader.read_tensors({name: opened.components[name].tensors})[name],
    )


def _resized(
    made: Mapping[str, Mapping[str, ResizedTensor]],
    edited: Mapping[str, Mapping[str, Tensor]],
    reader: TensorReader,
) -> Mapping[str, Mapping[str, Tensor]]:
    """Add resized tensors to edited ones; those that no edit has read are read."""
    if not made:
        return edited
    rest = {
        name: [key for key in of_name if key not in edited.get(name, {})]
        for name, of_name in made.items()
    }
    read = reader.read_tensors({name: keys for name, keys in rest.items() if keys})
    stored = {name: {**edited.get(name, {}), **read.get(name, {})} for name in made}
    return {
        **edited,
        **{name: {**edited.get(name, {}), **of} for name, of in fit_tensors(made, stored).items()},
    }


def _as_held(edited: Mapping[str, Mapping[str, Tensor]], shards: Held) -> StoredTensors:
    """Cut edited tensors to what the live ones hold of them."""
    if not edited or not shards:
        return edited
    return {
        name: {
            key: shards[name][key].of_whole(tensor) if key in shards.get(name, {}) else tensor
            for key, tensor in tensors.items()
        }
        for name, tensors in edited.items()
    }


def _completed(
    edited: StoredTensors,
    needed: Mapping[str, Iterable[str]],
    read: Callable[[Mapping[str, Iterable[str]]], StoredTensors],
) -> StoredTensors:
    """Return the needed tensors: those that an edit changed, and the rest as stored."""
    if not edited:
        return read(needed)
    from_edit = {
        name: {key: edited[name][key] for key in keys if key in edited.get(name, {})}
        for name, keys in needed.items()
    }
    rest = read(
        {name: [key for key in keys if key not in from_edit[name]] for name, keys in needed.items()}
    )
    return {name: {**from_edit[name], **rest[name]} for name in needed}


def _registers(catalog: Catalog) -> list[tuple[AttemptName, str]]:
    """Return the lineage with the state of each register, to detect changes meanwhile."""
    return [(name, _register_state(catalog, name)) for name in catalog.lineage()]


def _doubles(newest_first: Sequence[AttemptName]) -> tuple[tuple[str, str], ...]:
    """Return pairs of neighbouring attempts with the same epoch and sequence, as folder names."""
    pairs = pairwise(newest_first)
    return tuple((str(one), str(other)) for one, other in pairs if one.order == other.order)


def _register_state(catalog: Catalog, name: AttemptName) -> str:
    try:
        return type(catalog.read(str(name))).__name__
    except FormatError:
        return "damaged"
    except NotSealed:
        return "not sealed"


class Search:
    """Chooses the checkpoint of a load, and chooses again for each retry of a claim.

    For "latest", a search that `walks` takes an older checkpoint where the newest cannot be used,
    as a resume does; any other takes the named one, or raises its error. None chooses nothing: a
    fresh start.
    """

    def __init__(
        self,
        reader: CheckpointSearch,
        which: str | int | None,
        *,
        walks: bool,
        options: LoadOptions | None = None,
        unhealthy: Unhealthy = "avoid",
        seen: KnownCommit | None = None,
        refuse: Callable[[Entry | None], None] | None = None,
    ) -> None:
        """`refuse` raises an error for a choice that the run must not continue from."""
        self._seen = seen
        self._refuse = refuse
        self._reader = reader
        self._which = which
        self._walks = walks and which == "latest"
        self._options = options if options is not None else LoadOptions()
        self._unhealthy = unhealthy
        self._announced: dict[str, str] = {}
        self._failed: set[str] = set()
        self.is_rollback = which != "latest"
        """Whether a user chose the checkpoint by name, so that the run is rolled back to it."""
        self.candidate: LoadCandidate | None = None
        """The last choice; None for a fresh start."""

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """(folder, reason) of each checkpoint that was skipped, newest first."""
        return self._reader.rejected

    def use_view(self, view: Store) -> None:
        """Read the next candidate through this store."""
        self._reader.view = view

    def adopt_choice(self, folder: str, *, is_remote: bool, known: Manifest | None = None) -> None:
        """Set `candidate` to the checkpoint that the leader has chosen, from the same tier.

        `known` is its manifest, if the leader has sent it.
        """
        self.candidate = None
        catalog, name = self._reader.catalog, parse_attempt(folder)
        catalog.look_again()
        if is_remote:
            catalog.switch_tier(folder)
        if name is not None and known is not None:
            entry: Entry | None = Entry(name=name, folder=folder, manifest=known, marks=Marks())
        else:
            entry = None if name is None else catalog.entry(name)
        if entry is None:
            raise NotShared(
                f"{catalog.store.url}/{folder}: the leader sees this checkpoint, and this rank "
                f"does not. {NotShared.ADVICE}"
            )
        candidate = self._reader.read_candidate(entry, self._options)
        candidate.prepared.ready(candidate.tensors)
        self.candidate = candidate

    def adopt_rejections(self, rejected: Sequence[tuple[str, str]]) -> None:
        """Record which checkpoints the leader has skipped."""
        self._reader.passed_over = {folder: CorruptData(reason) for folder, reason in rejected}

    def choices(self) -> Iterator[Choice]:
        """Yield a new choice for each try to claim the run; for `ownership.claim.claim_run`."""
        while True:
            yield self.choose()

    def choose(self) -> Choice:
        """Choose a checkpoint, and set `candidate` to it."""
        while not self._try_choose():
            pass
        if self._walks and self._seen is not None:
            entry = self.candidate.entry if self.candidate is not None else None
            self._seen.expect_no_rollback(entry, where=self._reader.catalog.store.url)
        if self._refuse is not None:
            self._refuse(self.candidate.entry if self.candidate is not None else None)
        return Choice(
            point=self.candidate.entry.reference if self.candidate is not None else None,
            passed_over=frozenset(self._reader.passed_over),
            is_rollback=self.is_rollback,
        )

    def _try_choose(self) -> bool:
        """Choose and prepare a candidate; False if that failed and the caller should retry."""
        if self._which is None:
            return True
        self.candidate = (
            self._reader.read_newest(self._options, unhealthy=self._unhealthy)
            if self._walks
            else self._reader.read_named(self._which, self._options)
        )
        if self.candidate is not None:
            try:
                # Before the claim: a run must not resume from a state that an object refuses.
                self.candidate.prepared.ready(self.candidate.tensors)
            except (FormatError, StoreError) as error:
                if not self.record_failure(error):
                    raise
                return False
        return True

    def record_failure(
        self,
        error: Exception,
        *,
        cause: StoreError | CorruptData | None = None,
        has_other_source: bool = False,
    ) -> bool:
        """Record that the chosen checkpoint could not be read; return whether to choose again.

        The same one is retried first, as errors may be transient, and as often as another host
        has what was damaged; then an older one. Until one is applied, the state may be partly old
        and partly stored. `cause` is why one of the ranks that were applying it could not read it.
        """
        if self.candidate is None:
            return False
        is_applying = cause is not None or isinstance(error, OpaqueLoadFailed)
        self._reader.is_mixed |= is_applying or bool(self.candidate.prepared.unrestored)
        cause = cause or self.candidate.cause_of(error)
        if cause is None or has_other_source:
            return has_other_source
        folder = self.candidate.entry.folder
        is_first = folder not in self._failed
        self._failed.add(folder)
        if is_damage(cause) and self._reader.catalog.switch_tier(folder):
            return True
        if not self._walks or not (is_first or is_damage(cause)):
            return False
        if not is_first:
            self._reader.unusable[folder] = self._reader.passed_over[folder] = cause
        return True

    def newly_passed_over(self) -> Iterator[tuple[str, HoldfastError]]:
        """Yield each skipped folder and the reason, unless both were yielded before."""
        for folder, error in self._reader.passed_over.items():
            if self._announced.get(folder) != str(error):
                self._announced[folder] = str(error)
                yield folder, error

    def log_problems(self, emit: Emitter) -> None:
        """Log a warning for each known problem of the chosen checkpoint and its run."""
        for one, other in self._reader.doubles:
            emit(
                "warning",
                f"{one} and {other} have the same place in the order of this run, so one of them "
                "was copied here. Move it out of the root",
            )
        if self._walks:
            catalog, entry = self._reader.catalog, self.candidate.entry if self.candidate else None
            removed = catalog.removed_latest(entry)
            if removed:
                way = f"continues from {entry.folder}" if entry is not None else "starts over"
                emit(
                    "warning",
                    f"{catalog.store.url}/{removed} was committed, but is missing: it was moved, "
                    f"renamed or removed by hand. The run {way}; to continue from the missing one, "
                    "put it back under its name first",
                    folder=removed,
                )
        if self.candidate is not None and self.candidate.entry.manifest.unhealthy:
            entry = self.candidate.entry
            reasons = ", ".join(entry.manifest.unhealthy)
            emit(
                "warning",
                f"the run continues from {entry.folder}, which is not healthy: {reasons}",
                folder=entry.folder,
            )
        unread = self._reader.catalog.unread
        if self._walks and unread:
            key = f"{self._reader.catalog.store.url}/{writer_key(unread)}"
            start = self.candidate.entry.folder if self.candidate is not None else "the beginning"
            emit(
                "warning",
                f"{key} is damaged or missing. If that process resumed an older checkpoint by "
                f"name, that may be recorded nowhere else. The run continues from {start}; if "
                "that is wrong, resume the right one by name",
                epoch=unread,
            )
