"""Finding a checkpoint that can be used, and reading it, without changing anything.

`resume` walks back along the lineage over damaged candidates and says why each was passed over;
a checkpoint that was named explicitly is taken or the damage is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.catalog import Catalog, Entry
from holdfast.engine.claim import Choice, dropped, is_being_deleted
from holdfast.engine.load import Tensors, open_checkpoint, read_tensors
from holdfast.engine.workers import Workers
from holdfast.errors import (
    AccessDenied,
    CorruptData,
    FormatError,
    HoldfastError,
    NoCheckpoint,
    NotFound,
    NoUsableCheckpoint,
    StoreError,
    TransientStoreError,
    UnsupportedVersion,
)
from holdfast.format.layout import AttemptName
from holdfast.state.apply import Prepared, prepare
from holdfast.store.base import Store

Rename = Mapping[str, str] | Callable[[str], str] | None
_MAX_RELISTS = 10
_MAX_LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What part of a checkpoint goes where."""

    components: Collection[str] | None = None
    """Names to load; None: all."""
    strict: bool = True
    """Whether missing and unexpected leaves are an error."""
    rename: Rename = None
    """Stored path → live path."""
    skip: Collection[str] = ()
    """Components or `component.path` prefixes to leave alone."""
    verify: bool = True
    """Whether digests are checked."""
    rng: bool = True
    """Whether generator states are restored."""

    @property
    def is_full(self) -> bool:
        """Whether the whole state is loaded, so that the run stands where the checkpoint does."""
        return self.components is None and not self.skip and self.rename is None and self.strict


class Dropped(NoCheckpoint):
    """Retention has dropped components that are asked for; what is left is sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint that was read whole and fits: what is left is to apply it."""

    entry: Entry
    options: LoadOptions
    prepared: Prepared
    tensors: Tensors


@dataclass(slots=True)
class Reader:
    """Reads checkpoints of one store for one live state."""

    store: Store
    state: Mapping[str, Any]
    workers: Workers
    timeout_s: float
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """(folder, reason) of what the walk passed over, newest first."""

    def read(self, entry: Entry, options: LoadOptions) -> Candidate:
        """Read and check one checkpoint.

        Raises:
            Dropped: components that are asked for were dropped, and `options` are strict.
            FormatError, StoreError: it is damaged or cannot be read.
            MismatchError: it does not fit the live state.
        """
        gone = dropped(self.store, entry.folder, entry.manifest, entry.marks)
        asked = entry.manifest.components if options.components is None else options.components
        wanted = [name for name in asked if name not in options.skip]
        if options.strict:
            self._expect_there(entry, wanted, gone)
        try:
            return self._read(entry, options, [name for name in asked if name not in gone])
        except (FormatError, StoreError):
            # Files may have gone while they were read.
            marks = Catalog(self.store).marks(entry.folder)
            now = dropped(self.store, entry.folder, entry.manifest, marks)
            self._expect_there(entry, wanted, set(now) - set(gone))
            raise

    def _read(self, entry: Entry, options: LoadOptions, components: list[str]) -> Candidate:
        opened = open_checkpoint(
            self.store, entry.folder, entry.manifest, components=components, verify=options.verify
        )
        prepared = prepare(
            self.state,
            opened.components,
            where=entry.folder,
            components=options.components,
            strict=options.strict,
            rename=options.rename,
            skip=options.skip,
            rng=options.rng,
        )
        tensors = read_tensors(
            self.store,
            opened,
            prepared.needed,
            workers=self.workers,
            timeout_s=self.timeout_s,
            verify=options.verify,
        )
        return Candidate(entry=entry, options=options, prepared=prepared, tensors=tensors)

    def _expect_there(self, entry: Entry, wanted: list[str], gone: Collection[str]) -> None:
        missing = ", ".join(name for name in wanted if name in gone)
        if missing:
            raise Dropped(
                f"{self.store.url}/{entry.folder}: retention has dropped {missing} of it; a run "
                "cannot go on from what is left. Load the other components by name, or take "
                "another checkpoint"
            )

    def named(self, which: str | int, options: LoadOptions) -> Candidate:
        """Read what is named; when it is deleted meanwhile, what the name means by then.

        Raises:
            NoCheckpoint: nothing answers, or it is always gone before it is read.
            Dropped: components that are asked for were dropped.
            FormatError, StoreError: it is damaged or cannot be read.
        """
        catalog = Catalog(self.store)
        for _ in range(_MAX_LOOKS):
            entry = catalog.resolve(which)
            try:
                return self.read(entry, options)
            except (FormatError, NotFound):
                if catalog.entry(entry.name) is not None:
                    raise
        raise NoCheckpoint(f"{self.store.url}: {which!r} was deleted while it was read")

    def walk(self, options: LoadOptions) -> Candidate | None:
        """The newest usable checkpoint of the lineage; None when nothing was ever committed.

        Raises:
            NoUsableCheckpoint: something was committed and nothing can be used.
        """
        catalog = Catalog(self.store)
        for _ in range(_MAX_RELISTS):
            self.rejected.clear()
            before = _registers(catalog)
            for name, _ in before:
                candidate = self._try(catalog, name, options)
                if candidate is not None:
                    return candidate
            if _registers(catalog) == before:
                break
        if not self.rejected and not catalog.ever_committed():
            return None
        raise NoUsableCheckpoint(
            f"{self.store.url}: this run has committed checkpoints and none can be used. "
            "Nothing was changed; name another one explicitly, or use another root",
            self.rejected,
        )

    def _try(self, catalog: Catalog, name: AttemptName, options: LoadOptions) -> Candidate | None:
        try:
            return self._read_twice(catalog, name, options)
        except HoldfastError as error:
            if not (is_damage(error) or isinstance(error, Dropped)):
                raise
            self.rejected.append((str(name), str(error)))
            return None

    def _read_twice(
        self, catalog: Catalog, name: AttemptName, options: LoadOptions
    ) -> Candidate | None:
        """Read a candidate, once more when the first time fails: errors may pass."""
        try:
            return self._read_candidate(catalog, name, options)
        except (StoreError, CorruptData):
            return self._read_candidate(catalog, name, options)

    def _read_candidate(
        self, catalog: Catalog, name: AttemptName, options: LoadOptions
    ) -> Candidate | None:
        entry = catalog.entry(name)
        if entry is None:
            return None
        if is_being_deleted(self.store, entry.marks):
            self.rejected.append((str(name), "its deletion was begun"))
            return None
        return self.read(entry, options)


def _registers(catalog: Catalog) -> tuple[tuple[AttemptName, str], ...]:
    """The lineage with the state of each register: when that changes, look again."""
    return tuple((name, _register_state(catalog, name)) for name in catalog.lineage())


def _register_state(catalog: Catalog, name: AttemptName) -> str:
    try:
        return type(catalog.read(str(name))).__name__
    except FormatError:
        return "damaged"


class Search:
    """The choice that resume makes: read anew each time that the claim asks for it."""

    def __init__(self, reader: Reader, which: str | int) -> None:
        self._reader = reader
        self._which = which
        self.found: Candidate | None = None
        """What was chosen last; None for a fresh start."""

    def __call__(self) -> Choice:
        """See `engine.claim.claim_run`."""
        is_latest = self._which == "latest"
        options = LoadOptions()
        self.found = (
            self._reader.walk(options) if is_latest else self._reader.named(self._which, options)
        )
        return Choice(
            point=self.found.entry.reference if self.found is not None else None,
            passed_over=frozenset(folder for folder, _ in self._reader.rejected),
            is_rollback=not is_latest,
        )


class Settled:
    """A choice that was made already. When it no longer holds, that is an error."""

    def __init__(self, entry: Entry, *, is_rollback: bool) -> None:
        self._entry = entry
        self._is_rollback = is_rollback
        self._asked = False

    def __call__(self) -> Choice:
        """See `engine.claim.claim_run`.

        Raises:
            NoCheckpoint: it is asked for the second time.
        """
        if self._asked:
            raise NoCheckpoint(
                f"{self._entry.folder}: it is being deleted, or the run went on from a newer one "
                "meanwhile; resume again"
            )
        self._asked = True
        return Choice(point=self._entry.reference, is_rollback=self._is_rollback)


def is_damage(error: HoldfastError) -> bool:
    """Whether an error speaks of this checkpoint's bytes, so that an older one may serve.

    A newer format, a state that does not fit, missing rights and passing failures are not damage.
    """
    if isinstance(error, UnsupportedVersion | AccessDenied | TransientStoreError):
        return False
    return isinstance(error, FormatError | StoreError)
