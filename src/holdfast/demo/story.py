"""Course of the demo: train undisturbed, train again with three kills, record both.

The training happens in `worker` processes; this one starts them, reads their reports and kills.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from holdfast.demo.plan import DemoPlan, Kill, draw_kills
from holdfast.demo.process import Line, Worker
from holdfast.demo.record import DemoRecord, ProcessRecord, RunRecord
from holdfast.engine.roots.catalog import Catalog
from holdfast.errors import NoCheckpoint, UsageError
from holdfast.store import open_store

SILENCE_S = 120.0
MAX_TRIES = 4
MARKER = "demo.json"

Watch = Callable[[RunRecord, Line], None]


def prepare(out: Path) -> None:
    """Make the folder `out`, and empty it if an earlier demo made it.

    Raises:
        UsageError: `out` holds something else.
    """
    if out.exists():
        if not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).exists()):
            raise UsageError(f"{out} holds something that is not a demo's; name another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).write_text("{}\n", "utf-8")


def tell(out: Path, plan: DemoPlan, watch: Watch) -> DemoRecord:
    """Train both runs; `watch` is called with each report of a worker, after it was recorded.

    Raises:
        WorkerFailed: a training process failed without being killed.
        DeadlineExceeded: a training process reported nothing for two minutes.
    """
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
        _kill_until_it_fits(killed, root, plan, kill, delay_s, watch)
        flipped = flip_one_bit(root, chance) if kill.flip_bit else None
    live(killed, root, plan, flipped=flipped, watch=watch)
    record.took_s = time.monotonic() - began_s
    (out / MARKER).write_text(json.dumps(record.to_json(), indent=1) + "\n", "utf-8")
    return record


def _kill_until_it_fits(
    run: RunRecord, root: Path, plan: DemoPlan, kill: Kill, delay_s: float, watch: Watch
) -> None:
    """Kill once; if a save ended before its kill, try again without a delay."""
    for _ in range(MAX_TRIES):
        life = live(run, root, plan, kill=kill, delay_s=delay_s, watch=watch)
        if not kill.inside_save or life.killed_in_save is not None:
            return
        delay_s = 0.0


def flip_one_bit(root: Path, chance: random.Random) -> str:
    """Flip one bit in the newest checkpoint of a run; returns a description.

    Raises:
        NoCheckpoint: the run has no checkpoint.
    """
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
    """Train in one process until it ends, or until `delay_s` after its kill is due.

    `flipped` describes the damage done before, for the record.

    Raises:
        UsageError: the process ended before the kill.
    """
    number = len(run.lives)
    life = ProcessRecord(num_workers=number % 3, began_s=time.monotonic(), flipped=flipped)
    run.lives.append(life)
    log = root.parent / f"{root.name}-{number}.log"
    with Worker(root, plan, num_workers=life.num_workers, log=log) as worker:
        saving: dict[int, float] = {}
        while (line := worker.next_line(timeout_s=SILENCE_S)) is not None:
            _note(life, line, saving)
            watch(run, line)
            if kill is not None and _is_time(kill, line):
                time.sleep(delay_s)
                for last in worker.kill():
                    _note(life, last, saving)
                life.was_killed, life.ended_s = True, time.monotonic()
                life.killed_in_save = min(saving, default=None)
                watch(run, {"kind": "killed", "step": life.reached})
                return life
    life.ended_s = time.monotonic()
    if kill is not None:
        raise UsageError("the run ended before its kill: give the plan more steps")
    return life


def _is_time(kill: Kill, line: Line) -> bool:
    wanted = "save_started" if kill.inside_save else "step"
    return bool(line["kind"] == wanted and line["step"] >= kill.after_step)


def _note(life: ProcessRecord, line: Line, saving: dict[int, float]) -> None:
    """Add one report to the record. `saving` holds the start times of saves under way."""
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
