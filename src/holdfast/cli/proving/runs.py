"""Runs of a training for a proof: one undisturbed, one killed at random moments and restarted.

Hard links keep the checkpoints that a run commits from its own deletions. They are found by names
of folders only, so a proof depends on nothing that the script does.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from holdfast.cli.output import write_message
from holdfast.cli.supervisor import ChildEnding, ChildProcess
from holdfast.errors import StoreError
from holdfast.format import layout
from holdfast.format.layout import AttemptName
from holdfast.system import IS_LINUX, PROC, signal_name

_DISCOVER_S = 0.2
"""Seconds between searches for roots: scripts make them below the given folder, too."""
_DEPTH = 3
_HEAD_NBYTES = 2048
_COMMITTED = re.compile(rb'"kind": "(?:checkpoint|sealed)"')
_STEP = re.compile(rb'"timestamp": \{\s*"step": (\d+)')
_LABEL_STEP = re.compile(r"step-(\d+)", re.ASCII)


@dataclass(slots=True, kw_only=True)
class SeenSave:
    """A save as seen from outside: when its folder and its manifest were first seen."""

    name: AttemptName
    folder: Path
    began_s: float
    step: int = 0
    """Step of its manifest, or of its label before the commit; 0 if neither shows it."""
    committed_s: float | None = None


class CheckpointRecord:
    """All saves of a run below a folder; times are of `time.monotonic`."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self._folder = folder
        self._kept = kept
        self._next_search_s = 0.0
        self.roots: list[Path] = []
        """Roots in the folder, relative to it, in the order of their first saves."""
        self.saves: dict[str, SeenSave] = {}
        """Saves of the first root, by folder."""
        self._others: dict[Path, dict[str, SeenSave]] = {}

    def look_again(self) -> None:
        """Note new saves and commits, and link the files of what is committed."""
        if time.monotonic() >= self._next_search_s:
            self._next_search_s = time.monotonic() + _DISCOVER_S
            self._find_roots()
        for root in self.roots:
            self._look_into(root, self.saves_of(root))

    def saves_of(self, root: Path) -> dict[str, SeenSave]:
        """Return the saves of a root by folder."""
        return self.saves if root == self.roots[0] else self._others.setdefault(root, {})

    def is_unfinished(self, save: SeenSave) -> bool:
        """Whether a save of the first root has no manifest at this moment."""
        return not read_manifest(self._folder / save.folder)

    def committed(self) -> list[SeenSave]:
        """List the committed saves of the first root, in the order of commits."""
        done = [save for save in self.saves.values() if save.committed_s is not None]
        return sorted(done, key=lambda save: save.name.order)

    def unfinished(self, epoch: int) -> list[SeenSave]:
        """List the saves of a claim that have begun and not committed."""
        return [
            save
            for save in self.saves.values()
            if save.committed_s is None and save.name.epoch == epoch
        ]

    @property
    def newest_step(self) -> int:
        """Highest step of a committed save; -1 if there is none."""
        return max((save.step for save in self.committed()), default=-1)

    @property
    def newest_epoch(self) -> int:
        """Epoch of the newest claim; 0 if there is none."""
        if not self.roots:
            return 0
        names = _list_names(self._folder / self.roots[0] / layout.WRITERS)
        return max((layout.parse_writer(name) or 0 for name in names), default=0)

    def _find_roots(self) -> None:
        for found in _folders_below(self._folder, _DEPTH):
            if found not in self.roots and (self._folder / found / layout.WRITERS).is_dir():
                self.roots.append(found)

    def _look_into(self, root: Path, saves: dict[str, SeenSave]) -> None:
        for folder in _list_names(self._folder / root):
            if folder not in saves and (name := layout.parse_attempt(folder)) is not None:
                labelled = _LABEL_STEP.fullmatch(name.label)
                saves[folder] = SeenSave(
                    name=name,
                    folder=root / folder,
                    began_s=time.monotonic(),
                    step=int(labelled[1]) if labelled else 0,
                )
        for save in saves.values():
            if save.committed_s is None and (head := read_manifest(self._folder / save.folder)):
                save.committed_s = time.monotonic()
                if found := _STEP.search(head):
                    save.step = int(found[1])
                _link_files(self._folder / save.folder, self._kept / save.folder)


def read_manifest(folder: Path) -> bytes:
    """Read the beginning of a save's manifest; empty if it has none, or has a marker of gc."""
    try:
        with (folder / layout.MANIFEST).open("rb") as file:
            head = file.read(_HEAD_NBYTES)
    except OSError:
        return b""
    return head if _COMMITTED.search(head) else b""


def _link_files(folder: Path, kept: Path) -> None:
    try:
        kept.mkdir(parents=True, exist_ok=True)
        for name in _list_names(folder):
            if (folder / name).is_file():
                _link_or_copy(folder / name, kept / name)
    except FileNotFoundError:  # Deleted in the meantime.
        shutil.rmtree(kept, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be kept for the comparison: {error}") from error


def _link_or_copy(file: Path, kept: Path) -> None:
    try:
        os.link(file, kept)
    except FileNotFoundError:
        raise
    except OSError:  # Another file system, or one without hard links.
        shutil.copyfile(file, kept)


def _folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield a folder and those inside, relative to it, without attempts and records."""
    pending = [(Path(), depth)]
    while pending:
        path, left = pending.pop(0)
        yield path
        for name in sorted(_list_names(folder / path)) if left else []:
            is_own = name in layout.FOLDERS or layout.parse_attempt(name) is not None
            if not is_own and (folder / path / name).is_dir():
                pending.append((path / name, left - 1))


def _list_names(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


VARIABLE = "HOLDFAST_PROVE"
"""Environment variable by which all processes of a run are found, whatever their group is."""
ALL = "all processes"
"""Target of a kill that is not of one rank alone, which its launcher may start again."""
_GRACE_S = 10.0
_POLL_S = 0.004
_POLL_IN_SAVE_S = 0.0005
_LEFTOVERS_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedKill:
    """A kill that is due once a step is committed and the process has claimed the run."""

    step: int
    inside_save: bool
    share: float
    """Share of the usual time between two saves, or of a save, after which it comes."""
    until: int
    """Step from which a kill inside a save comes at any moment instead, if it missed the saves."""


@dataclass(slots=True, kw_only=True)
class DoneKill:
    """A kill that was made."""

    signal: str
    target: str
    step: int
    """Newest step that was committed before."""
    epoch: int
    saving: SeenSave | None
    """Save that had begun and was not committed; after SIGKILL, that never was."""


@dataclass(slots=True, kw_only=True)
class RunResult:
    """A run of the training to its end, from one or several processes."""

    name: str
    folder: Path
    """The folder that stands for {root} in its command."""
    kept: Path
    """All of its checkpoints, by root and folder."""
    log: Path
    record: CheckpointRecord
    endings: list[ChildEnding] = field(default_factory=list)
    kills: list[DoneKill] = field(default_factory=list)
    is_late: bool = False
    """Whether the time limit ended it."""
    duration_s: float = 0.0

    @property
    def kept_roots(self) -> list[Path]:
        """The roots with a checkpoint, relative to `kept`."""
        return sorted(root for root in self.record.roots if (self.kept / root).is_dir())

    @property
    def has_succeeded(self) -> bool:
        """Whether its last process ended with status 0."""
        return not self.is_late and self.endings[-1].returncode == 0


@dataclass(kw_only=True)
class Workshop:
    """Folder, command and limits of all runs of a proof."""

    command: Sequence[str]
    folder: Path
    deadline_s: float
    """Value of `time.monotonic` at which a run is ended."""

    def run_undisturbed(self, name: str) -> RunResult:
        """Run the command once in a fresh root."""
        return self._run_command(name, [], signal.SIGKILL, random.Random(0), {})

    def run_killed(
        self, before: RunResult, num_kills: int, number: signal.Signals, dice: random.Random
    ) -> RunResult:
        """Run the command, kill it at random moments, and restart it until it ends by itself."""
        saves = before.record.committed()
        usual = {
            "save": statistics.median(save.committed_s - save.began_s for save in saves),  # type: ignore[operator]
            "interval": _usual_interval_s(saves),
        }
        plan = plan_kills(sorted({save.step for save in saves}), num_kills, dice)
        return self._run_command(
            "killed", plan, number, dice, usual, goal=max(save.step for save in saves)
        )

    def _run_command(
        self,
        name: str,
        plan: list[PlannedKill],
        number: signal.Signals,
        dice: random.Random,
        usual: Mapping[str, float],
        goal: int = 0,
    ) -> RunResult:
        # Every run has the same path, so that paths that a script saves are no difference.
        root, kept, log = self.folder / "run", self.folder / "kept" / name, f"{name}.log"
        result = RunResult(
            name=name,
            folder=self.folder / name,
            kept=kept,
            log=self.folder / log,
            record=CheckpointRecord(root, kept),
        )
        token = os.urandom(16).hex()
        killer = Killer(result, plan, number, dice, usual, token, self.deadline_s)
        began_s = time.monotonic()
        with result.log.open("ab") as output:
            child = ChildProcess(
                [word.replace("{root}", str(root)) for word in self.command],
                grace_s=_GRACE_S,
                environment={**os.environ, VARIABLE: token},
                output=output.fileno(),
            )
            with child:
                try:
                    _run_until_done(child, killer, result, goal)
                finally:
                    _end_leftovers(killer)
        result.duration_s = time.monotonic() - began_s
        if root.exists():
            root.rename(result.folder)
        return result


def plan_kills(steps: Sequence[int], num_kills: int, dice: random.Random) -> list[PlannedKill]:
    """Draw kills between the first and the last committed step, one of them inside a save."""
    between, last = steps[:-1], steps[-2]
    if num_kills <= len(between):
        after = sorted(dice.sample(between, num_kills))
    else:
        after = sorted(dice.choices(between, k=num_kills))
    # Not in the last interval, if possible: then a later save can be hit if the first is missed.
    chosen = dice.choice([at for at, step in enumerate(after) if step < last] or [num_kills - 1])
    return [
        PlannedKill(step=step, inside_save=at == chosen, share=dice.uniform(0.0, 0.5), until=last)
        for at, step in enumerate(after)
    ]


class Killer:
    """Watcher of a run that kills it as planned, and ends it at the time limit."""

    def __init__(
        self,
        result: RunResult,
        plan: list[PlannedKill],
        number: signal.Signals,
        dice: random.Random,
        usual: Mapping[str, float],
        token: str,
        deadline_s: float,
    ) -> None:
        self._result = result
        self._plan = plan
        self._signal = number
        self._dice = dice
        self._usual = usual
        self._token = token.encode()
        self._deadline_s = deadline_s
        self._due_s: float | None = None
        self._haste = 1.0
        """Factor of the wait inside a save, which each missed save makes shorter."""
        self._processes: list[int] = []
        self.poll_s = _POLL_S

    def look_around(self, leader: int) -> None:
        """Record saves; kill the run if a kill is due."""
        record = self._result.record
        record.look_again()
        if time.monotonic() > self._deadline_s:
            self._result.is_late = True
            self.kill_all(leader)
        elif self._plan and not self._result.is_late:
            epoch, last = record.newest_epoch, self._result.kills[-1:]
            if epoch > (last[0].epoch if last else 0) and record.newest_step >= self._plan[0].step:
                self._kill_if_due(leader, epoch)

    def kill_all(self, leader: int) -> None:
        """Kill every process of the run by SIGKILL."""
        _send_signal([leader, *self.find_processes()], signal.SIGKILL)

    def find_processes(self) -> list[int]:
        """List the processes of the run; on other systems than Linux the group stands for them."""
        return [int(path.parent.name) for path, _ in self._environments()]

    def _kill_if_due(self, leader: int, epoch: int) -> None:
        kill, now_s = self._plan[0], time.monotonic()
        record = self._result.record
        saving = record.unfinished(epoch)
        if not kill.inside_save or record.newest_step >= kill.until > kill.step:
            if self._due_s is None:
                self._due_s = now_s + kill.share * self._usual["interval"]
            if now_s >= self._due_s:
                self._kill_run(leader, epoch, saving)
        elif not saving:
            if not self._processes:
                self._processes, self.poll_s = self.find_processes(), _POLL_IN_SAVE_S
            if self._due_s is not None:
                self._due_s, self._haste = None, self._haste / 4
        elif self._due_s is None:
            self._due_s = now_s + kill.share * self._haste * self._usual["save"]
        elif now_s >= self._due_s:
            # Stopped first: the save cannot end between this look and the kill.
            stopped = [leader, *self._processes]
            _send_signal(stopped, signal.SIGSTOP)
            if record.is_unfinished(saving[-1]):
                self._kill_run(leader, epoch, saving[-1:])
            _send_signal(stopped, signal.SIGCONT)

    def _kill_run(self, leader: int, epoch: int, saving: Sequence[SeenSave]) -> None:
        ranks = self._find_ranks()
        target, processes = ALL, [leader, *self.find_processes()]
        if self._signal is not signal.SIGKILL:
            # As a scheduler sends it: launchers forward it themselves.
            with suppress(ProcessLookupError):
                os.killpg(leader, self._signal)
        else:
            if len(ranks) > 1 and self._dice.random() < 0.5:
                rank = self._dice.choice(sorted(ranks))
                target, processes = f"rank {rank} of {len(ranks)}", [ranks[rank]]
            _send_signal(processes, signal.SIGKILL)
        self._result.kills.append(
            DoneKill(
                signal=signal_name(self._signal),
                target=target,
                step=self._result.record.newest_step,
                epoch=epoch,
                saving=saving[-1] if saving else None,
            )
        )
        self._plan.pop(0)
        self._due_s, self._processes, self.poll_s = None, [], _POLL_S

    def _find_ranks(self) -> dict[int, int]:
        """Return the process of each rank that a launcher has started."""
        found: dict[int, int] = {}
        of_rank = {
            int(path.parent.name): int(variables["RANK"])
            for path, variables in self._environments()
            if "LOCAL_RANK" in variables and variables.get("RANK", "").isdecimal()
        }
        for process, number in of_rank.items():
            if _parent_of(process) not in of_rank:  # and is no data worker
                found[number] = process
        return found

    def _environments(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """Yield the files of processes that have our variable, with their variables."""
        for path in Path(PROC).glob("[0-9]*/environ") if IS_LINUX else ():
            with suppress(OSError):
                data = path.read_bytes()
                if self._token in data:
                    pairs = (
                        item.partition("=") for item in data.decode("utf-8", "replace").split("\0")
                    )
                    yield path, {name: value for name, _, value in pairs}


def _run_until_done(child: ChildProcess, killer: Killer, result: RunResult, goal: int) -> None:
    """Start the command again after each kill, until it ends by itself or has saved step `goal`."""
    while True:
        num_kills = len(result.kills)
        ending = child.run_to_end(watcher=killer)
        result.endings.append(ending)
        _end_leftovers(killer)
        result.record.look_again()
        new = result.kills[num_kills:]
        for kill in new:
            has_committed = kill.saving is not None and kill.saving.committed_s is not None
            if has_committed and kill.signal == signal.SIGKILL.name:
                kill.saving = None
        if ending.asked is not None:
            raise KeyboardInterrupt
        for number, kill in enumerate(new, num_kills + 1):
            write_message(describe_kill(number, kill))
        has_finished = ending.returncode == 0 and result.record.newest_step >= goal
        if not new or result.is_late or has_finished:
            return


def describe_kill(number: int, kill: DoneKill) -> str:
    """Describe a kill in one line."""
    saving = "" if kill.saving is None else f", inside the save of step {kill.saving.step}"
    return f"kill {number}: {kill.signal} to {kill.target} after step {kill.step}{saving}"


def _usual_interval_s(saves: Sequence[SeenSave]) -> float:
    times = sorted(save.began_s for save in saves)
    return statistics.median(later - sooner for sooner, later in pairwise(times))


def _end_leftovers(killer: Killer) -> None:
    """Kill the processes that are left, such as the workers of a killed launcher."""
    until_s = time.monotonic() + _LEFTOVERS_S
    while (left := killer.find_processes()) and time.monotonic() < until_s:
        _send_signal(left, signal.SIGKILL)
        time.sleep(0.01)


def _send_signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in dict.fromkeys(processes):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _parent_of(process: int) -> int:
    with suppress(OSError):
        return int(Path(PROC, str(process), "stat").read_text().rpartition(")")[2].split()[1])
    return 0
