"""Runs the demo: train undisturbed, train again with three kills, record both.

The training happens in `worker` processes, which this one starts and kills; their reports come
through a pipe. `run` is what `holdfast demo` calls.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console

from holdfast.demo import report
from holdfast.demo.record import (
    DemoPlan,
    DemoRecord,
    Kill,
    Line,
    ProcessRecord,
    RunRecord,
    draw_kills,
    fast_plan,
)
from holdfast.engine.roots.catalog import Catalog
from holdfast.errors import DeadlineExceeded, HoldfastError, NoCheckpoint, UsageError
from holdfast.store import open_store

SILENCE_S = 120.0
MAX_TRIES = 4
RECORD = "demo.json"
PICTURE = "demo.png"

Watch = Callable[[RunRecord, Line], None]


def run(out: Path, *, seed: int | None = None, fast: bool = False, as_json: bool = False) -> int:
    """Run the demo in the folder `out`; returns 0 if both runs are the same, bit for bit, else 1.

    Writes `demo.json` (the record), `demo.png` (the plot), and the roots and logs of both
    runs. With `as_json` the record also goes to standard
    output, and all else to standard error. A seed of None is drawn; `fast` takes a tiny model.
    """
    report.check_library()
    prepare(out)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    plan = fast_plan(seed) if fast else DemoPlan(seed=seed)
    console = Console(stderr=as_json)
    console.print(
        f"A small GPT learns the source of Python's standard library in {plan.num_steps} steps: "
        f"once undisturbed,\nand once killed at three random moments (seed {seed}).",
        highlight=False,
    )
    shown = report.Live(console, plan)
    with shown.progress:
        record = tell(out, plan, shown.watch)
    report.draw(record, out / PICTURE)
    report.show(console, record)
    console.print(f"Picture: {out / PICTURE}   took {record.took_s:.0f} s", highlight=False)
    if as_json:
        print(json.dumps(record.to_json()))
    return 0 if record.is_identical else 1


def prepare(out: Path) -> None:
    """Make the folder `out`."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(
            f"{out}: exists already, perhaps from an earlier demo. Delete it, or name another "
            "folder: holdfast demo --out FOLDER"
        )
    out.mkdir(parents=True, exist_ok=True)


def tell(out: Path, plan: DemoPlan, watch: Watch) -> DemoRecord:
    """Train both runs; `watch` is called with each report of a worker, after it was recorded."""
    began_s = time.monotonic()
    record = DemoRecord(
        seed=plan.seed,
        undisturbed=RunRecord(name="undisturbed"),
        killed=RunRecord(name="killed"),
    )
    live(record.undisturbed, out / "undisturbed", plan, watch=watch)
    life = record.undisturbed.lives[0]
    step_s = (life.steps[-1][0] - life.steps[0][0]) / len(life.steps)
    save_s = median(life.save_durations_s)
    chance = random.Random(plan.seed)
    killed, root = record.killed, out / "killed"
    flipped: str | None = None
    for kill in draw_kills(plan, [chance.random() for _ in range(6)]):
        delay_s = kill.moment * (save_s if kill.inside_save else step_s)
        _kill_as_planned(killed, root, plan, kill, delay_s, watch)
        flipped = flip_one_bit(root, chance) if kill.flip_bit else None
    live(killed, root, plan, flipped=flipped, watch=watch)
    record.took_s = time.monotonic() - began_s
    (out / RECORD).write_text(json.dumps(record.to_json(), indent=1) + "\n", "utf-8")
    return record


def _kill_as_planned(
    run: RunRecord, root: Path, plan: DemoPlan, kill: Kill, delay_s: float, watch: Watch
) -> None:
    """Train until a kill; if it was to strike a save and came too late, try again at once."""
    for _ in range(MAX_TRIES):
        life = live(run, root, plan, kill=kill, delay_s=delay_s, watch=watch)
        if not kill.inside_save or life.killed_in_save is not None:
            return
        delay_s = 0.0


def flip_one_bit(root: Path, chance: random.Random) -> str:
    """Flip one bit in the newest checkpoint of a run; returns a description."""
    newest = Catalog(open_store(root)).head()
    if newest is None:
        raise NoCheckpoint(f"{root}: no checkpoint to damage")
    name = next(n for n in sorted(newest.manifest.files) if n.startswith("model-0") and "safe" in n)
    path = root / newest.folder / name
    at, bit = chance.randrange(newest.manifest.files[name].stored_nbytes), chance.randrange(8)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
    path.chmod(0o444)
    return f"bit {bit} of byte {at} of {newest.folder}/{name}"


def live(
    run: RunRecord,
    root: Path,
    plan: DemoPlan,
    *,
    kill: Kill | None = None,
    delay_s: float = 0.0,
    flipped: str | None = None,
    watch: Watch = lambda _run, _line: None,
) -> ProcessRecord:
    """Train in one process until it ends, or kill it `delay_s` after the kill is due.

    `flipped` describes the damage done before, for the record.
    """
    number = len(run.lives)
    life = ProcessRecord(num_workers=number % 3, began_s=time.monotonic(), flipped=flipped)
    run.lives.append(life)
    log = root.parent / f"{root.name}-{number}.log"
    with Worker(root, plan, num_workers=life.num_workers, log=log) as worker:
        saving: dict[int, float] = {}
        while (line := worker.next_line(timeout_s=SILENCE_S)) is not None:
            _record_line(life, line, saving)
            watch(run, line)
            if kill is not None and _is_due(kill, line):
                time.sleep(delay_s)
                for last in worker.kill():
                    _record_line(life, last, saving)
                life.was_killed, life.ended_s = True, time.monotonic()
                life.killed_in_save = min(saving, default=None)
                watch(run, {"kind": "killed", "step": life.reached})
                return life
    life.ended_s = time.monotonic()
    if kill is not None:
        raise UsageError("the run ended before its kill: give the plan more steps")
    return life


def _is_due(kill: Kill, line: Line) -> bool:
    wanted = "save_started" if kill.inside_save else "step"
    return bool(line["kind"] == wanted and line["step"] >= kill.after_step)


def _record_line(life: ProcessRecord, line: Line, saving: dict[int, float]) -> None:
    """Add a report to the process record; `saving` holds the start times of saves under way."""
    match line["kind"]:
        case "begins":
            life.began_at = life.reached = line["step"]
            life.rejected = [(folder, reason) for folder, reason in line["rejected"]]
        case "step":
            life.reached = line["step"]
            life.steps.append((line["at_s"], line["step"], line["loss"]))
        case "stalled":
            life.stalls_s.append(line["stall_s"])
        case "save_started":
            saving[line["step"]] = line["at_s"]
        case "committed":
            life.save_durations_s.append(line["at_s"] - saving.pop(line["step"], line["at_s"]))
            life.saves.append((line["at_s"], line["step"]))
            life.checkpoint_nbytes = line["nbytes"] or life.checkpoint_nbytes
        case "ends":
            life.digest = line["digest"]


class WorkerFailed(HoldfastError):
    """A training process ended with an error; the message ends with its log."""


class Worker:
    """A running `holdfast.demo.worker` with its data workers, in their own process group.

    A context manager: at its end the group is killed, if it still runs.
    """

    def __init__(self, root: Path, plan: DemoPlan, *, num_workers: int, log: Path) -> None:
        command = [sys.executable, "-m", "holdfast.demo.worker", str(root), plan.encoded()]
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*command, str(num_workers)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)
        self._partial = b""
        self._lines: deque[Line] = deque()

    @property
    def group(self) -> int:
        """Id of the process group."""
        return self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill_group()
        self._selector.close()
        self._pipe.close()

    def next_line(self, *, timeout_s: float) -> Line | None:
        """Wait for the next report of the process; None when it has ended."""
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceeded(
                    f"the training process reported nothing for {timeout_s:g} s; see {self._log}"
                )
            if not self._read():
                self._check_end(timeout_s)
                return None
        return self._lines.popleft()

    def kill(self) -> list[Line]:
        """Send SIGKILL to the whole group; returns what was reported before."""
        self._kill_group()
        while self._read():
            pass
        rest = list(self._lines)
        self._lines.clear()
        return rest

    def _read(self) -> bool:
        """Wait for data on the pipe and read it; False at the end of the pipe."""
        data = os.read(self._pipe.fileno(), 1 << 16)
        *whole, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(json.loads(line) for line in whole)
        return bool(data)

    def _kill_group(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.group, signal.SIGKILL)
            self._process.wait()

    def _check_end(self, timeout_s: float) -> None:
        code = self._process.wait(timeout_s)
        if code:
            tail = self._log.read_text("utf-8", "replace")[-2000:]
            raise WorkerFailed(f"the training process ended with exit code {code}:\n{tail}")
