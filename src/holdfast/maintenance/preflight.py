"""Checks before the first save (accidental restart, free space, store operations); the claim.

`preflight` tries the operations of a save on a few bytes instead of trusting what a file system
claims to be, and reports every problem.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from holdfast.encryption.store import sealed
from holdfast.errors import (
    AlreadyExists,
    CommitConflict,
    CorruptData,
    DeadlineExceeded,
    FormatError,
    NotFound,
    NotShared,
    OutcomeUnknown,
    PreflightFailed,
    StoreError,
    UsageError,
    listing,
)
from holdfast.events import Emitter
from holdfast.format import layout
from holdfast.ownership.claim import Choice, settled_choice
from holdfast.ownership.owner import Ownership
from holdfast.ownership.process import utc_text
from holdfast.ownership.tiered import TieredOwnership
from holdfast.ownership.tiered_options import TierRules
from holdfast.policy.rule import Rule
from holdfast.policy.rules import recorded_time
from holdfast.ranks.coordinator import LEADER
from holdfast.ranks.hosts import Hosts
from holdfast.root.catalog import Catalog, Entry
from holdfast.root.commit import put_once, remove_scratch
from holdfast.saving.probe import (
    Ask,
    ProbeResult,
    SaveSize,
    lack_of_room,
    measure_usage,
    nobody,
)
from holdfast.store.base import Store
from holdfast.threads.workers import Workers, gather_results

_FIRST, _SECOND = b"first", b"second"
_PIECE = b"holdfast" * 512
_RACERS, _RACES = 8, 6
"""Threads and rounds of the test of concurrent puts. Where puts are not atomic, three rounds of
four show more than one winner among eight threads."""
_RACE_TIMEOUT_S = 120.0


def preflight(
    store: Store,
    *,
    nbytes_per_save: int,
    saves_kept: int | None,
    num_files: int,
    of_ranks: Sequence[tuple[int, int]] = (),
    ask: Ask = nobody,
) -> str | None:
    """Check free space, the store's operations and the encryption keys before a first save.

    Space is needed for `saves_kept` checkpoints beside this one; for one save if that is None.
    `ask` lets the other ranks try the same. Creates the root if it is missing; a scratch folder is
    removed again. Returns how large files will be written, if the store chooses that by trying.

    Raises:
        PreflightFailed: lists every problem that was found.
        NotShared: a rank does not see what another has written; lists all problems, too.
    """
    others = _OtherRanks(store, ask)
    refusals = [*_refusals(store, others)]
    problems = [
        *lack_of_room(
            store,
            SaveSize(nbytes=nbytes_per_save, num_files=num_files, of_ranks=of_ranks),
            saves_kept or 0,
            others.looks,
        ),
        *refusals,
        *others.problems(),
    ]
    if others.apart:
        raise NotShared(
            f"{store.url}: some ranks do not see what others write. {NotShared.ADVICE}:\n"
            + listing([*others.apart, *problems])
        )
    problems += _useless_keys(store)
    chosen = ""
    if not problems:
        try:
            chosen = store.probe()
        except StoreError as error:
            problems.append(f"trying how to write: {error}")
    if problems:
        raise PreflightFailed(problems)
    return chosen or None


class _OtherRanks:
    """Findings of the other ranks in this rank's scratch folder."""

    def __init__(self, store: Store, ask: Ask) -> None:
        self._store = store
        self._ask = ask
        self.looks: Sequence[ProbeResult] = ()
        self.apart: list[str] = []
        """Which rank does not see what, a line each."""

    def probe_each_other(self, folder: str) -> None:
        """Let all other ranks look at what this one has written, and look for what they have."""
        self.looks = self._ask(folder)
        if not self.looks:
            return
        self._store.refresh_folder(folder)
        keys = {info.key for info in self._store.list(f"{folder}/")}
        for rank, found in self._by_rank():
            who = f"rank {rank} on {found.host}"
            if not found.sees:
                self.apart.append(f"{who} does not see what the leader has written")
            elif found.held is None and not found.problems and _key_of(folder, rank) not in keys:
                self.apart.append(f"the leader does not see what {who} has written")

    def problems(self) -> Iterator[str]:
        """Yield the problems of all other ranks."""
        for rank, found in self._by_rank():
            for problem in found.problems:
                yield f"rank {rank} on {found.host}: {problem}"

    def _by_rank(self) -> Iterator[tuple[int, ProbeResult]]:
        return enumerate(self.looks, start=1)


def probe_as_follower(
    store: Store, rank: int, emit: Emitter, hosts: Hosts | None, folder: str
) -> ProbeResult:
    """Try the operations of a save, as a follower, in the scratch folder of the leader.

    On another of `hosts`, which have a disk each, in a folder of its own.
    """
    found = ProbeResult(host=socket.gethostname())
    if hosts is not None and not hosts.is_leading:
        return _probe_own_disk(store, emit, found)
    try:
        store.refresh_folder(folder)
        sees = store.get(_key_of(folder, LEADER)) == _SECOND
        free = store.free_space()
    except NotFound:
        return msgspec.structs.replace(found, sees=False)
    except (StoreError, FormatError) as error:
        return msgspec.structs.replace(found, problems=(f"looking into {folder}: {error}",))
    refusals = [*_register_refusals(store, _key_of(folder, rank))]
    refusals += _file_refusals(store, f"{folder}/file-{rank}")
    refusals += _useless_keys(store)
    if not refusals:
        try:
            _tell_chosen(store, store.probe(), emit)
        except StoreError as error:
            refusals.append(f"trying how to write: {error}")
    return msgspec.structs.replace(
        found,
        sees=sees,
        problems=tuple(refusals),
        free_nbytes=free.nbytes,
        free_inodes=free.inodes,
        file_system=free.file_system,
    )


def _probe_own_disk(store: Store, emit: Emitter, found: ProbeResult) -> ProbeResult:
    refusals = [*_refusals(store, _OtherRanks(store, nobody))]
    try:
        if not refusals:
            _tell_chosen(store, store.probe(), emit)
        free, held = store.free_space(), measure_usage(store)
    except StoreError as error:
        refusals.append(f"trying how to write: {error}")
        return msgspec.structs.replace(found, problems=tuple(refusals), held=(0, 0))
    return msgspec.structs.replace(
        found,
        problems=tuple(refusals),
        free_nbytes=free.nbytes,
        free_inodes=free.inodes,
        file_system=free.file_system,
        held=held,
    )


def _useless_keys(store: Store) -> Iterator[str]:
    sealing_store = sealed(store)
    for problem in sealing_store.useless_keys() if sealing_store is not None else ():
        yield f"keys: {problem}"


def _key_of(folder: str, rank: int) -> str:
    return f"{folder}/register" if rank == LEADER else f"{folder}/register-{rank}"


def _tell_chosen(store: Store, chosen: str | None, emit: Emitter) -> None:
    if chosen:
        emit("preflight", f"{store.url}: large files are written {chosen}")


def _refusals(store: Store, others: _OtherRanks) -> Iterator[str]:
    """Try the operations of a run in a scratch folder, then on other ranks; yield problems."""
    folder = layout.scratch_folder(os.urandom(8))
    try:
        store.make_folder(folder, exclusive=True)
    except StoreError as error:
        yield f"making a folder: {error}"
        return
    try:
        refusals = [*_register_refusals(store, _key_of(folder, LEADER))]
        if not refusals:
            others.probe_each_other(folder)
        if not refusals and not store.has_folders:
            refusals += _race_refusals(store, folder)
        yield from refusals
        yield from _file_refusals(store, f"{folder}/file")
    finally:
        left = _removal_refusal(store, folder)
    if left:
        yield left


def _register_refusals(store: Store, key: str) -> Iterator[str]:
    """Check that a put with `if_absent` fails on an existing key, and that a put replaces it."""
    try:
        put_once(store, key, _FIRST)
    except (StoreError, CommitConflict) as error:
        yield f"putting an object that is not there yet: {error}"
        return
    try:
        store.put(key, _SECOND, if_absent=True)
    except (AlreadyExists, OutcomeUnknown):
        yield from _read_refusals(store, key, _FIRST)
    except StoreError as error:
        yield f"putting over a taken key: refused with the wrong error: {error}"
    else:
        yield (
            f"{store.url} replaced an object that was to be put only if absent: "
            "two writers would destroy each other's checkpoints here"
        )
    try:
        store.put(key, _SECOND)
    except StoreError as error:
        yield f"replacing an object: {error}"
    else:
        yield from _read_refusals(store, key, _SECOND)


def _read_refusals(store: Store, key: str, expected: bytes) -> Iterator[str]:
    try:
        found = store.get(key)
    except (StoreError, FormatError) as error:
        yield f"reading back: {error}"
        return
    if found != expected:
        yield f"reading back returned different bytes from those written: {store.url}"


def _race_refusals(store: Store, folder: str) -> Iterator[str]:
    """Check that of concurrent puts with `if_absent` one succeeds, as some services only look."""
    workers = Workers(_RACERS, "holdfast-preflight")
    try:
        for number in range(_RACES):
            key = f"{folder}/race-{number}"
            jobs = [workers.submit(partial(_wins, store, key, racer)) for racer in range(_RACERS)]
            won = sum(
                gather_results(jobs, timeout_s=_RACE_TIMEOUT_S, what="preflight: puts at once")
            )
            if won != 1:
                yield (
                    f"{store.url}: {won} of {_RACERS} puts of one key at once, each only if it is "
                    "absent, succeeded: two writers would destroy each other's checkpoints here"
                )
                return
    except (StoreError, FormatError, DeadlineExceeded) as error:
        yield f"putting one object from several threads: {error}"
    finally:
        workers.close_pool()


def _wins(store: Store, key: str, racer: int) -> bool:
    ours = b"%d" % racer
    try:
        put_once(store, key, ours)  # a lost reply may be the winner's
    except CommitConflict:
        return False
    return True


def _file_refusals(store: Store, key: str) -> Iterator[str]:
    """Check that a file can be written in pieces, in any order."""
    try:
        writer = store.create(key, 2 * len(_PIECE))
    except StoreError as error:
        yield f"creating a file: {error}"
        return
    try:
        writer.write(len(_PIECE), memoryview(_PIECE))
        writer.write(0, memoryview(_PIECE))
        writer.finish()
    except StoreError as error:
        writer.abort()
        yield f"writing a file: {error}"
        return
    refusals = [*_read_refusals(store, key, _PIECE + _PIECE)]
    yield from refusals or _range_refusals(store, key, _PIECE + _PIECE)


def _range_refusals(store: Store, key: str, expected: bytes) -> Iterator[str]:
    """Check that a range of a file is read exactly, and that reading past its end fails."""
    middle = len(expected) // 2 - 3
    try:
        if store.get(key, middle, 100) != expected[middle : middle + 100]:
            yield (
                "reading a part of a file returned different bytes from those requested: "
                f"{store.url}"
            )
        store.get(key, len(expected) - 1, 2)
    except CorruptData:
        return
    except StoreError as error:
        yield f"reading a part of a file: {error}"
    else:
        yield f"reading past the end of a file: was not refused: {store.url}"


def _removal_refusal(store: Store, folder: str) -> str:
    try:
        remove_scratch(store, folder)
        left = store.children(folder)
    except StoreError as error:
        return f"deleting: {error}"
    return f"deleting: {left[0]} of {folder} is still there: {store.url}" if left else ""


_CLOCK_SKEW_S = 60.0
"""Difference between the clocks of two hosts for which no warning is logged, in seconds."""


class FirstSaveChecks:
    """Checks whether a run may begin to save, and claims the run."""

    def __init__(
        self,
        catalog: Catalog,
        owner: Ownership,
        rules: TierRules,
        emit: Emitter,
        *,
        preflight: bool,
    ) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._owner = owner
        self._rules = rules
        self._emit = emit
        self.preflight_due = preflight
        """Whether the next save must first check space and permissions."""
        self._has_compared_clocks = False

    def check_first_save(
        self, size: SaveSize, standing: Entry | None, *, is_rollback: bool, ask: Ask = nobody
    ) -> None:
        """Check that a save of `size` can be made, and claim the run if it is not claimed yet.

        Raises `UsageError` if the root holds a run that was neither resumed nor loaded, else as
        `preflight` or the claim does.
        """
        if self._owner.claim is None:
            self._owner.expect_no_live_owner()
            self._refuse_accidental_restart(standing)
        if self.preflight_due:
            self._check_room(size, self._store, self._rules.local, ask)
            if isinstance(self._owner, TieredOwnership):
                self._check_remote(size, self._owner)
            self.preflight_due = False
        if self._owner.claim is None:
            self._owner.claim_ownership(
                settled_choice(standing, is_rollback=is_rollback)
                if standing is not None
                else self._fresh_starts()
            )

    def refuse_existing(self, step: int, standing: Entry | None) -> None:
        """Raise `UsageError` if this step has a checkpoint, except `standing` or other parts."""
        if standing is not None and standing.step == step:
            return
        found = [entry for entry in self._catalog.checkpoints() if entry.step == step]
        there = [entry.folder for entry in found if not self._is_part_of_this_pass(entry)]
        if there:
            raise UsageError(
                f'{self._store.url}: on_existing="error", and there is a checkpoint of step '
                f"{step} already: {', '.join(there)}"
            )

    def refuse_later(self, standing: Entry | None) -> None:
        """Raise `UsageError` for checkpoints of later steps, as their saves would be refused."""
        step = -1 if standing is None else standing.step
        whole = (e for e in self._catalog.checkpoints() if not e.manifest.lacks)
        later = sorted({entry.step for entry in whole if entry.step > step})
        if later:
            shown = ", ".join(map(str, later[:10])) + (", …" if len(later) > 10 else "")
            raise UsageError(
                f'{self._store.url}: on_existing="error", and the run would resume from '
                f"{standing.folder if standing else 'its beginning'}, but there already are "
                f'checkpoints of the steps {shown}. Pass on_existing="keep" or "replace", or use '
                "another root"
            )

    def look_around(self) -> None:
        """Warn if this root, which has no checkpoint, directly contains the root of a run."""
        if not self._store.has_folders:
            return
        folders = [name[:-1] for name in self._store.children() if name.endswith("/")]
        for name in folders:
            is_ours = name in layout.FOLDERS or layout.parse_attempt(name) is not None
            # A link, or a folder that may not be read, is no reason to stop a run.
            with suppress(StoreError):
                if not is_ours and f"{layout.WRITERS}/" in self._store.children(name):
                    self._emit(
                        "warning",
                        f"{self._store.url}: there is no checkpoint here, but {name!r} in it "
                        f"holds a run: did you mean {self._store.url}/{name}?",
                    )

    def compare_clocks(self, standing: Entry | None) -> None:
        """Warn, once, if this host's clock is behind the time at which `standing` was saved."""
        if standing is None or self._has_compared_clocks:
            return
        now = utc_text()
        if _seconds_between(now, standing.manifest.created) > _CLOCK_SKEW_S:
            self._has_compared_clocks = True
            self._emit(
                "warning",
                f"the clock of this host shows {now}, but {standing.folder} was saved at "
                f"{standing.manifest.created}: one of them is wrong. Hourly() and Daily() use "
                "these times; nothing else does",
            )

    def _is_part_of_this_pass(self, entry: Entry) -> bool:
        """Whether a checkpoint of this claim is partial: another saver of this process made it."""
        claim = self._owner.claim
        is_ours = claim is not None and entry.name.epoch == claim.epoch
        return is_ours and bool(entry.manifest.lacks)

    def _fresh_starts(self) -> Iterator[Choice]:
        while True:
            self._refuse_accidental_restart(None)
            self.look_around()
            yield Choice(point=None)

    def _refuse_accidental_restart(self, standing: Entry | None) -> None:
        """Raise `UsageError` on a fresh start over a saved run, which retention would delete."""
        if standing is None and self._catalog.ever_committed():
            raise UsageError(
                f"{self._store.url} holds the checkpoints of a run. Call resume() to continue it, "
                "load() a whole checkpoint to start from there (part of one is not enough), "
                "start_new() to start another run in the same root (a Trainer: "
                'fit(…, resume="never")), or use another root'
            )

    def _check_remote(self, size: SaveSize, owner: TieredOwnership) -> None:
        remote = owner.catalog.remote.store
        try:
            remote.children()
        except StoreError:
            return  # the claim reports that it is unreachable, and the first upload the rest
        with owner.remote_scratch():
            self._check_room(size, remote, self._rules.remote)

    def _check_room(self, size: SaveSize, store: Store, keep: Rule, ask: Ask = nobody) -> None:
        chosen = preflight(
            store,
            nbytes_per_save=size.nbytes,
            saves_kept=keep.quota(),
            num_files=size.num_files,
            of_ranks=size.of_ranks,
            ask=ask,
        )
        _tell_chosen(store, chosen, self._emit)


def _seconds_between(first: str, second: str) -> float:
    """Compute the seconds from one recorded time to another; 0 if one cannot be parsed."""
    begin, end = recorded_time(first), recorded_time(second)
    return 0.0 if begin is None or end is None else (end - begin).total_seconds()
