"""Runs of a simulated cluster, and the invariants that are checked after each run.

A run has several lives: when a process has ended, a new group of ranks begins, claims the run and
resumes, while ranks of the life before may still be running.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from operator import itemgetter

from holdfast.errors import FormatError, HoldfastError, NotFound
from holdfast.format import blocks, layout
from holdfast.format.manifest import Manifest, decode_register
from holdfast.format.tensors import parse_header
from holdfast.ranks.coordinator import LEADER
from holdfast.store.memory import MemoryStore
from holdfast.testing.cluster.network import (
    NOTICED_S,
    Faults,
    Network,
    VirtualClock,
    VirtualCoordinator,
    VirtualProcess,
    VirtualStore,
)
from holdfast.testing.cluster.ranks import RankOutcome, VirtualRank
from holdfast.testing.cluster.state import Cluster, bytes_at
from holdfast.testing.faulty import Stopped

NO_FAULTS = Faults()
_NEXT = {
    "absent": {"manifest", "aborted"},
    "manifest": {"deleted"},
}
"""Values of a register, and what may follow each."""


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Result of one run: outcomes of the saves, and the invariants that were broken."""

    seed: int
    store: MemoryStore
    outcomes: list[RankOutcome] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    """What every rank has done, with the virtual time in seconds."""
    seconds: float = 0.0
    """Virtual time at the end."""

    @property
    def committed(self) -> list[str]:
        """Folders of the committed checkpoints, oldest first."""
        return sorted({told.folder for told in self.outcomes if told.outcome == "committed"})


def simulate(
    cluster: Cluster,
    *,
    seed: int = 0,
    faults: Faults = NO_FAULTS,
    num_saves: int = 3,
    num_lives: int = 2,
    timeout_s: float = 60.0,
) -> Simulation:
    """Run a cluster in memory and virtual time, and check the invariants of its saves.

    The ranks plan, write and commit by the real code. The last life has no faults, so that all
    of its saves must commit. The same arguments give the same run.

    Args:
        cluster: Ranks, and what they hold.
        seed: Decides the order of events and the faults.
        faults: Probabilities of faults, in all lives except the last.
        num_saves: Saves of each life.
        num_lives: Groups of ranks that run one after another.
        timeout_s: Deadline of a save, in seconds of virtual time.

    Returns:
        The result; `violations` is empty if every invariant held.
    """
    return _Run(cluster, seed, faults, num_saves, num_lives, timeout_s).run_lives()


class _Life:
    """Group of ranks, with their processes."""

    def __init__(self, number: int, ranks: list[VirtualRank], network: Network) -> None:
        self.number = number
        self.ranks = ranks
        self.network = network
        self.num_done = 0
        self.has_successor = False


class _Run:
    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        faults: Faults,
        num_saves: int,
        num_lives: int,
        timeout_s: float,
    ) -> None:
        self._cluster, self._faults, self._timeout_s = cluster, faults, timeout_s
        self._num_saves, self._num_lives = num_saves, num_lives
        self._clock = VirtualClock()
        self._store = MemoryStore("cluster")
        # Of its own, so that a draw of one rank does not change those of the others.
        self._chance = random.Random(f"{seed}")
        self._result = Simulation(seed=seed, store=self._store)
        self._registers: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        """Step of each committed checkpoint, by folder."""
        self._lives: list[_Life] = []

    def run_lives(self) -> Simulation:
        self._start_life()
        try:
            self._clock.run_all()
        except HoldfastError as error:
            self._report(f"{error}")
        self._result.outcomes = [
            told for life in self._lives for rank in life.ranks for told in rank.outcomes
        ]
        self._result.seconds = self._clock.now_s
        self._check_registers()
        self._check_outcomes()
        self._check_resumes()
        return self._result

    # The ranks

    def _start_life(self) -> None:
        number = len(self._lives) + 1
        is_last = number == self._num_lives
        faults = NO_FAULTS if is_last else self._faults
        processes = [
            VirtualProcess(
                f"{number}.{rank}",
                self._clock,
                random.Random(f"{self._result.seed} {number} {rank}"),
                faults,
                timeout_s=self._timeout_s,
                trace=self._result.trace,
            )
            for rank in range(self._cluster.num_ranks)
        ]
        network = Network(processes, ranks_per_host=self._cluster.ranks_per_host)
        ranks = [
            VirtualRank(
                layout=self._cluster,
                ranks=VirtualCoordinator(rank, network),
                store=VirtualStore(self._store, process, self._note_change),
                timeout_s=self._timeout_s,
                life=number,
            )
            for rank, process in enumerate(processes)
        ]
        life = _Life(number, ranks, network)
        self._lives.append(life)
        windows_s = [self._chance.uniform(1.0, 100.0) for _ in range(self._num_saves)]
        collects = self._chance.random() < 0.5
        if self._chance.random() < faults.takeover:
            wait_s = self._chance.uniform(0.0, sum(windows_s) + self._timeout_s)
            self._plan_successor(life, wait_s, kills=False)
        for rank, process in zip(ranks, processes, strict=True):
            process.task = self._clock.start_task(
                process.name,
                lambda rank=rank, process=process: self._live(  # type: ignore[misc]
                    life, rank, process, windows_s, collects
                ),
                at_s=self._clock.now_s + process.chance.random(),
            )

    def _live(
        self,
        life: _Life,
        rank: VirtualRank,
        process: VirtualProcess,
        windows_s: list[float],
        collects: bool,
    ) -> None:
        """The program of one rank: resume, then train and save."""
        try:
            step = rank.resume(collects=collects)
            process.note(f"resumes at step {step}")
            for number, window_s in enumerate(windows_s, 1):
                self._clock.pause(process.task, window_s + process.short_s())
                process.expect_running()
                told = rank.save(number, step + number, bytes_at(step + number))
                process.note(f"save {number}: {told.outcome} {told.reason}")
                if told.outcome == "committed":
                    rank.delete_old()
        except Stopped:
            process.note("has ended")
        except HoldfastError as error:
            process.note(f"exits: {error}")
            process.end_process()
        except Exception as error:  # noqa: BLE001 - no error of another kind may come
            self._report(f"rank {process.name} raised {error!r}")
        finally:
            life.num_done += 1
            if process.ended_s is not None or life.num_done == len(life.ranks):
                wait_s = NOTICED_S + self._chance.uniform(0.0, 3 * self._timeout_s)
                self._plan_successor(life, wait_s, kills=self._chance.random() < 0.5)

    def _plan_successor(self, life: _Life, wait_s: float, *, kills: bool) -> None:
        """Let the next life begin after a time, and perhaps end the processes of this one."""
        if life.has_successor or len(self._lives) == self._num_lives:
            return
        life.has_successor = True

        def succeed() -> None:
            for process in life.network.processes if kills else ():
                process.end_process()
            self._start_life()

        self._clock.call_at(self._clock.now_s + wait_s, succeed)

    # What must hold

    def _report(self, violation: str) -> None:
        self._result.violations.append(f"seed {self._result.seed}: {violation}")

    def _note_change(self, operation: str, key: str) -> None:
        """Check a register after each change of it."""
        folder, _, name = key.rpartition("/")
        if name != layout.MANIFEST:
            return
        before = self._registers.get(folder, "absent")
        if operation == "delete":
            if before == "manifest":
                self._report(f"{folder}: the manifest was deleted without a tombstone")
            self._registers[folder] = f"{before}, then removed"
            return
        register = decode_register(self._store.get(key), what=key)
        after = type(register).__name__.lower()
        if after not in _NEXT.get(before, ()):
            self._report(f"{folder}: its register went from {before} to {after}")
        self._registers[folder] = after
        if isinstance(register, Manifest):
            self._steps[folder] = register.timestamp.step
            self._check_files(folder, register)

    def _check_registers(self) -> None:
        for folder, register in self._registers.items():
            if register == "manifest":
                data = self._store.get(f"{folder}/{layout.MANIFEST}")
                manifest = decode_register(data, what=folder)
                assert isinstance(manifest, Manifest)
                self._check_files(folder, manifest)

    def _check_files(self, folder: str, manifest: Manifest) -> None:
        """Check that every byte of a committed checkpoint is that of its step."""
        content_of = bytes_at(manifest.timestamp.step)
        num_tensors = 0
        for name, entry in manifest.files.items():
            try:
                data = self._store.get(f"{folder}/{name}")
            except NotFound:
                self._report(f"{folder}/{name} is in the manifest, and is missing")
                continue
            if blocks.file_digest(len(data), blocks.digest_blocks(data)) != entry.digest:
                self._report(f"{folder}/{name} differs from its digest")
            if name.endswith(".safetensors"):
                for key, (_, _, start, stop) in parse_header(
                    data, file_nbytes=len(data), what=name
                ).items():
                    num_tensors += 1
                    if data[start:stop] != content_of(key, stop - start):
                        self._report(f"{folder}/{name}: {key} is not that of the step")
        wanted = self._cluster.num_distinct
        if num_tensors != wanted:
            self._report(f"{folder} has {num_tensors} boxes in its files, not {wanted}")

    def _check_outcomes(self) -> None:
        """Check that all ranks know the same and right outcome of each save."""
        by_save: dict[tuple[int, int], list[RankOutcome]] = {}
        for told in self._result.outcomes:
            by_save.setdefault((told.life, told.number), []).append(told)
        for (number, save), all_told in sorted(by_save.items()):
            what = f"save {save} of life {number}"
            folders = {told.folder for told in all_told if told.outcome == "committed"}
            order = self._lives[number - 1].ranks[LEADER].orders.get(save)
            if order is not None:
                folders |= {folder for folder in self._steps if _order_of(folder) == order}
            for folder in folders:
                if folder not in self._steps:
                    self._report(f"{what}: was told of a commit of {folder}, but there was none")
            failed = [told for told in all_told if told.outcome == "failed"]
            if failed and folders:
                ranks = [told.rank for told in failed]
                self._report(
                    f"{what}: ranks {ranks} were told that it failed ({failed[0].reason}), and "
                    f"{folders} was committed"
                )
            if number == self._num_lives and any(t.outcome != "committed" for t in all_told):
                odd = next(t for t in all_told if t.outcome != "committed")
                self._report(
                    f"{what}, without faults: {odd.outcome} on rank {odd.rank}: {odd.reason}"
                )
        if len(self._lives) == self._num_lives:
            expected = self._num_saves * self._cluster.num_ranks
            found = sum(told.life == self._num_lives for told in self._result.outcomes)
            if found != expected:
                self._report(f"the last life has {found} outcomes, not {expected}")

    def _check_resumes(self) -> None:
        """Check that each life resumed from the newest checkpoint of earlier claims.

        Two lives may begin at once, so the later one may be the first to claim the run.
        """
        newest = (0, 0)
        claims = [
            (claim.epoch, life)
            for life in self._lives
            if (claim := life.ranks[LEADER].owner.claim) is not None
        ]
        for _, life in sorted(claims, key=itemgetter(0)):
            leader = life.ranks[LEADER]
            order = (0, 0) if leader.resumed_from is None else leader.resumed_from.order
            if order < newest:
                self._report(f"life {life.number} resumed from {order}, not from {newest}")
            told = [_order_of(t.folder) for t in leader.outcomes if t.outcome == "committed"]
            newest = max([newest, *told])


def _order_of(folder: str) -> tuple[int, int]:
    name = layout.parse_attempt(folder)
    if name is None:
        raise FormatError(f"{folder!r} is no folder of a save")
    return name.order
