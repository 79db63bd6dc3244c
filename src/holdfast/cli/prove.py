"""`holdfast prove`: run a training undisturbed and with kills, and compare both, bit for bit."""

from __future__ import annotations

import random
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click

from holdfast.cli.documents import Document
from holdfast.cli.options import PATH, argument, command, option
from holdfast.cli.output import Answer, Code, TextTable, number, one_line, write_message
from holdfast.cli.proving.findings import (
    ComparedPair,
    RunDifference,
    compare_runs,
    find_warnings,
    list_causes,
)
from holdfast.cli.proving.runs import ALL, RunResult, Workshop
from holdfast.cli.target import open_root_store, unlocked
from holdfast.errors import HoldfastError, UsageError
from holdfast.policy.clock import Unit, parse
from holdfast.root.catalog import Catalog

Verdict = Literal["equal", "resume", "anyway", "failed", "unproved"]
_CODES: Mapping[Verdict, Code] = {
    "equal": Code.OK,
    "resume": Code.FOUND,
    "unproved": Code.GAVE_UP,
    "anyway": Code.DIFFERS_ANYWAY,
    "failed": Code.COMMAND_FAILED,
}
_MAX_ROWS = 12
_TAIL_NBYTES, _TAIL_LINES = 8192, 15
_SIGNALS = [
    name for name in ("KILL", "TERM", "INT", "HUP", "USR1") if hasattr(signal, f"SIG{name}")
]


class Kill(Document, frozen=True):
    """A kill of the second run."""

    signal: str
    """The signal."""
    target: str
    """Whom it was sent to: `all processes`, or a rank."""
    after_step: int
    """Newest step that was committed before."""
    saving: int | None
    """Step of the save that it interrupted; null if none was being written."""


class FoundDifference(Document, frozen=True):
    """Values that differ: the tensors of a component together, and each other value alone."""

    component: str
    """Component; `metrics`, or `run` for the number of steps."""
    what: Literal["tensors", "values", "generators", "metrics", "steps"]
    """Kind of the values."""
    path: str
    """The value in the component, or its first tensor that differs."""
    a: str
    """Value in the undisturbed run; of a tensor its dtype and shape; empty of a generator."""
    b: str
    """The same of the other run."""
    num: int
    """Tensors that differ, or 1."""
    relative: float | None
    """Largest norm of the difference of a tensor, over the norm of the tensor."""


class Proof(Document, frozen=True):
    """Answer of `prove`."""

    verdict: Verdict
    """`equal`; `resume`: the runs differ since a resume; `anyway`: two undisturbed runs differ
    already; `failed`: the command failed; `unproved`: none of these could be shown."""
    reason: str
    """The verdict in words, with what to do."""
    seed: int
    """Seed of the kills."""
    kills: Sequence[Kill]
    """Kills that were made."""
    resumed_from: Sequence[int]
    """Steps from which the killed run was resumed, oldest first."""
    last_step: int | None
    """Step of the last checkpoint of the undisturbed run."""
    num_compared: int
    """Pairs of checkpoints that were compared."""
    num_tensors: int
    """Tensors of the last pair that are equal."""
    first_step: int | None
    """First step whose checkpoints differ; null if none do."""
    since_resume: int | None
    """Step from which the process that saved that checkpoint was resumed."""
    first: Sequence[FoundDifference]
    """Differences of these checkpoints."""
    last: Sequence[FoundDifference]
    """Differences of the last checkpoints."""
    causes: Sequence[str]
    """What commonly causes the first differences, the likeliest first."""
    ignored: Sequence[str]
    """Values that differ in any two runs, such as durations; they do not count."""
    warnings: Sequence[str]
    """Lines of the run's log in which Holdfast warns that a resume is not exact."""
    folder: str | None
    """Folder with both runs, their checkpoints and logs; null: it was removed."""


@command(
    "prove",
    argument("command", "COMMAND...", "The training, with {root} in place of its root.", nargs=-1),
    option("--kills", "N", "Kill it N times.", type=click.IntRange(min=1), default=3),
    option("--seed", "N", "Seed of the moments of the kills. [default: random]", type=int),
    option(
        "--signal", "NAME", "Signal to kill it with.", type=click.Choice(_SIGNALS), default="KILL"
    ),
    option("--timeout", "TIME", "Give up after this time, all runs together.", default="30min"),
    option("--folder", "FOLDER", "New folder for the runs, which is kept.", type=PATH),
    answer=Proof,
    # Options after the program's name are the program's own.
    context_settings={"allow_interspersed_args": False},
)
def prove_resume(
    command: Sequence[str],
    *,
    kills: int,
    seed: int | None,
    signal: str,
    timeout: str,
    folder: Path | None,
) -> Answer:
    """Run a training undisturbed and with kills, and compare both.

    One of the kills is inside a save. After each, the command is started again. Weights, optimizer
    state, generators, data position and metrics of all checkpoints of the same step are compared.
    If they differ, a second undisturbed run shows whether the resume is the cause.

    Without --folder, the runs are kept only if they differ.
    """
    _expect_root(command)
    limit_s = float(parse(timeout, what="--timeout", units={Unit.SECOND}).value)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    place = _make_folder(folder)
    shop = Workshop(command=command, folder=place, deadline_s=time.monotonic() + limit_s)
    proof = _Proving(shop=shop, timeout=timeout, seed=seed)
    is_kept = folder is not None
    try:
        try:
            proof.find_verdict(kills, signal)
        except UsageError:
            raise
        except HoldfastError as error:  # such as a full disk, or a missing key
            proof.set_verdict("unproved", f"the runs could not be compared: {error}")
        is_kept |= proof.verdict != "equal"
    finally:
        if not is_kept:
            shutil.rmtree(place, ignore_errors=True)
    return proof.make_answer(place if is_kept else None)


def _expect_root(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("COMMAND: missing, as in: holdfast prove -- python train.py {root}")
    if not any("{root}" in word for word in command):
        raise UsageError(
            f"COMMAND has no {{root}}: each run needs a root of its own. Let the script take its "
            "root as an argument, such as sys.argv[1], and write {root} in its place:\n"
            f"  holdfast prove -- {' '.join(command)} {{root}}\n"
            "or as an environment variable:\n"
            f"  holdfast prove -- env ROOT={{root}} {' '.join(command)}"
        )


def _make_folder(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="holdfast-prove-")).resolve()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"--folder {folder}: exists; name a new folder") from None
    except OSError as error:
        raise UsageError(f"--folder {folder}: {error.strerror}") from error
    return folder.resolve()


@dataclass(kw_only=True)
class _Proving:
    """The runs of a proof, and what they show."""

    shop: Workshop
    timeout: str
    seed: int
    verdict: Verdict = "unproved"
    reason: str = ""
    runs: list[RunResult] = field(default_factory=list)
    pairs: Sequence[ComparedPair] = ()
    resumed: dict[int, int | None] = field(default_factory=dict)
    """Step from which each claim of the killed run was resumed, by epoch."""
    counted: Mapping[int, list[RunDifference]] = field(default_factory=dict)
    """Differences that count, by the number of the pair."""
    causes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    timings: set[str] = field(default_factory=set)

    def find_verdict(self, num_kills: int, name: str) -> None:
        """Run the command until a verdict is found."""
        write_message(f"running {' '.join(self.shop.command)} undisturbed …")
        before = self._add_run(self.shop.run_undisturbed("undisturbed"))
        if not self._has_ended_well(before) or not self._can_be_killed(before):
            return
        number = getattr(signal, f"SIG{name}")
        dice = random.Random(self.seed)
        killed = self._add_run(self.shop.run_killed(before, num_kills, number, dice))
        if self._has_ended_well(killed) and self._has_resumed(killed, num_kills):
            self._compare_runs(before, killed)

    def _add_run(self, run: RunResult) -> RunResult:
        self.runs.append(run)
        num, last = len(run.record.committed()), run.record.newest_step
        saved = f"{num} checkpoints, the last at step {last}" if num else "no checkpoint"
        write_message(f"{run.name}: {run.duration_s:.1f} s, {saved}")
        return run

    def set_verdict(self, verdict: Verdict, reason: str) -> None:
        """Set the verdict and its reason."""
        self.verdict, self.reason = verdict, reason

    def _has_ended_well(self, run: RunResult) -> bool:
        if run.has_succeeded:
            return True
        where = f" when started again after kill {len(run.kills)}" if run.kills else ""
        if run.is_late:
            self.set_verdict(
                "unproved",
                f"the {run.name} run did not end within {self.timeout}{where}: train fewer steps "
                f"or a smaller model, or raise --timeout. Its output is in {run.log}",
            )
        else:
            self.set_verdict(
                "failed",
                f"the command failed{where}, in the {run.name} run: {run.endings[-1]}. The end of "
                f"{run.log}:\n{_tail_of(run.log)}",
            )
        return False

    def _can_be_killed(self, run: RunResult) -> bool:
        steps = sorted({save.step for save in run.record.committed()})
        if not steps:
            made = (
                ", ".join(path.name for path in run.folder.iterdir()) if run.folder.exists() else ""
            )
            self.set_verdict(
                "unproved",
                "the command committed no checkpoint in {root}"
                + (f", which has {made}" if made else ", which was not made")
                + ". Give it to holdfast.CheckpointManager as its root, with an interval such as "
                'every="100step"',
            )
        elif len(steps) == 1:
            self.set_verdict(
                "unproved",
                f"the command saved at step {steps[0]} only, so that a killed run has nothing to "
                "resume from: save at least twice, by a shorter interval in `every`",
            )
        return len(steps) > 1

    def _has_resumed(self, run: RunResult, num_kills: int) -> bool:
        self.resumed = _list_resumes(run)
        later = {epoch: step for epoch, step in self.resumed.items() if epoch > 1}
        was_restarted = len(run.endings) > 1 or any(kill.target != ALL for kill in run.kills)
        if not run.kills:
            self.set_verdict(
                "unproved",
                "the run ended before a kill: train more steps, or save earlier",
            )
        elif not (later and was_restarted):
            self.set_verdict(
                "unproved",
                f"{run.kills[0].signal} did not end the run, or no process has resumed it",
            )
        elif None in later.values():
            self.set_verdict(
                "unproved",
                "a restarted process started from step 0, although there were checkpoints. "
                "Call checkpoints.resume() before the loop, without a new root or a fresh start",
            )
        elif not any(save.name.epoch > 1 for save in run.record.committed()):
            self.set_verdict(
                "unproved",
                "nothing was saved after a resume: train more steps, or save earlier",
            )
        elif run.kept_roots != self.runs[0].kept_roots:
            self.set_verdict("unproved", "the killed run has other roots in {root} than the first")
        else:
            return True
        return False

    def _compare_runs(self, before: RunResult, killed: RunResult) -> None:
        self.pairs = compare_runs(before, killed)
        self.timings |= {
            one.path for pair in self.pairs for one in pair.differences if one.is_timing
        }
        early = [pair for pair in self.pairs if pair.epoch == 1]
        if self._differ_anyway(early, "the killed run before its first kill"):
            return
        self._count_differences(_find_noise(early))
        if self.counted:
            write_message("the runs differ; running undisturbed again, to see if that differs …")
            again = self._add_run(self.shop.run_undisturbed("again"))
            if not self._has_ended_well(again):
                return
            base = compare_runs(before, again)
            if self._differ_anyway(base, "a second undisturbed run"):
                return
            self._count_differences(_find_noise(early) | _find_noise(base))
        if self.counted:
            self._conclude_resume()
        elif not any(pair.has_weights for pair in self.pairs):
            self.set_verdict(
                "unproved",
                "the checkpoints have no tensors, apart from generators, so no weights could be "
                'compared: add them to the state, as in {"model": model}',
            )
        else:
            self._conclude_equal()

    def _count_differences(self, noise: Mapping[tuple[str, str], str]) -> None:
        """Count the differences that are no timings and no noise of undisturbed runs."""
        found = {
            at: [
                one
                for one in pair.differences
                if not one.is_timing and (one.component, one.path) not in noise
            ]
            for at, pair in enumerate(self.pairs)
        }
        self.counted = {at: differences for at, differences in found.items() if differences}
        self.ignored = sorted({*self.timings, *noise.values()})

    def _differ_anyway(self, pairs: Sequence[ComparedPair], other: str) -> bool:
        """Conclude that undisturbed runs differ, if their trainings do in these pairs."""
        if not any(one.is_of_training for pair in pairs for one in pair.differences):
            return False
        self.pairs = pairs
        self._count_differences({})
        pair, differences = self._first_difference()
        self.causes = list_causes(pair, differences, is_anyway=True)
        self.set_verdict(
            "anyway",
            f"even two undisturbed runs differ, from step {pair.step} on ({other} differs from the "
            "first), so nothing can be concluded about the resume",
        )
        return True

    def _conclude_resume(self) -> None:
        pair, differences = self._first_difference()
        self.causes = list_causes(pair, differences, is_anyway=False)
        since = self.resumed.get(pair.epoch)
        self.set_verdict(
            "resume",
            f"the runs differ from step {pair.step} on"
            + ("" if since is None else f", after the resume from step {since}")
            + "; two undisturbed runs are equal",
        )

    def _conclude_equal(self) -> None:
        kills = self.runs[1].kills
        inside = sum(kill.saving is not None for kill in kills)
        how = f"{inside} inside a save" if inside else "none inside a save: its saves are too short"
        self.set_verdict(
            "equal",
            f"equal, bit for bit, after {len(kills)} kill{'s' * (len(kills) > 1)} ({how}): "
            f"{len(self.pairs)} checkpoints, the last at step {self._last_step()}",
        )

    def _first_difference(self) -> tuple[ComparedPair, list[RunDifference]]:
        at, differences = next(iter(self.counted.items()))
        return self.pairs[at], differences

    def _last_step(self) -> int | None:
        return self.runs[0].record.newest_step if self.runs[0].record.committed() else None

    def make_answer(self, folder: Path | None) -> Answer:
        """Make the answer of the command."""
        first = self._first_difference() if self.counted else None
        last = [at for at, pair in enumerate(self.pairs) if pair.is_last and at in self.counted]
        kills = self.runs[1].kills if len(self.runs) > 1 else []
        document = Proof(
            verdict=self.verdict,
            reason=self.reason,
            seed=self.seed,
            kills=[
                Kill(
                    signal=kill.signal,
                    target=kill.target,
                    after_step=kill.step,
                    saving=None if kill.saving is None else kill.saving.step,
                )
                for kill in kills
            ],
            resumed_from=[step for step in self.resumed.values() if step is not None],
            last_step=self._last_step(),
            num_compared=len(self.pairs),
            num_tensors=self.pairs[-1].num_tensors if self.pairs else 0,
            first_step=first[0].step if first else None,
            since_resume=self.resumed.get(first[0].epoch) if first else None,
            first=_describe_differences(first[1] if first else []),
            last=_describe_differences(self.counted[last[-1]] if last else []),
            causes=self.causes,
            ignored=self.ignored,
            warnings=find_warnings([run.log for run in self.runs if run.log.exists()]),
            folder=None if folder is None else str(folder),
        )
        parts = [*_format_proof(document)]
        if first and folder is not None:
            parts.append(f"compare: holdfast diff {first[0].a} {first[0].b}")
        return Answer(document=document, parts=parts, code=_CODES[self.verdict])


def _find_noise(pairs: Sequence[ComparedPair]) -> dict[tuple[str, str], str]:
    """Return labels of all that differs although the trainings are equal, by place."""
    return {
        (one.component, one.path): one.label
        for pair in pairs
        for one in pair.differences
        if not one.is_of_training
    }


def _list_resumes(run: RunResult) -> dict[int, int | None]:
    """Return the step from which each claim was resumed, by epoch; None: from the beginning."""
    root = run.folder / run.record.roots[0]
    catalog = Catalog(unlocked(open_root_store(str(root))))
    steps = {folder: save.step for folder, save in run.record.saves.items()}
    found: dict[int, int | None] = {}
    for epoch in sorted(catalog.epochs()):
        try:
            claim = catalog.writer(epoch)
        except HoldfastError:
            continue
        if claim is not None:
            source = claim.resumed_from
            found[epoch] = None if source is None else steps.get(source.folder)
    return found


def _describe_differences(differences: Sequence[RunDifference]) -> list[FoundDifference]:
    return [
        FoundDifference(
            component=one.component,
            what=one.what,
            path=one.path,
            a=one.a,
            b=one.b,
            num=one.num,
            relative=one.relative if one.what == "tensors" else None,
        )
        for one in differences
    ]


def _format_proof(proof: Proof) -> list[str | TextTable]:
    parts: list[str | TextTable] = [proof.reason]
    for title, found in (
        (f"step {proof.first_step}, the first that differs:", proof.first),
        (f"step {proof.last_step}, the last:", proof.last),
    ):
        if found and not (found is proof.last and proof.first_step == proof.last_step):
            parts += [title, _table_of(found)]
    parts += [f"common cause: {cause}" for cause in proof.causes]
    parts += [f"logged: {line}" for line in proof.warnings]
    if proof.ignored:
        names = ", ".join(proof.ignored)
        parts.append(f"not counted, as undisturbed runs differ in it, too: {names}")
    if proof.folder is not None:
        parts.append(f"kept: {proof.folder}")
    return parts


def _table_of(found: Sequence[FoundDifference]) -> TextTable:
    rows = [(one.component, _value_of(one), *_sides_of(one)) for one in found[:_MAX_ROWS]]
    if len(found) > _MAX_ROWS:
        rows.append(("…", f"{len(found) - _MAX_ROWS} more", "", ""))
    return TextTable(columns=("component", "value", "undisturbed", "other"), rows=rows)


def _value_of(one: FoundDifference) -> str:
    if one.what == "tensors":
        return f"{one.num:,} tensor{'s' * (one.num > 1)}, such as {one.path}"
    return f"generator {one.path}" if one.what == "generators" else one.path


def _sides_of(one: FoundDifference) -> tuple[str, str]:
    if one.relative is not None and one.a == one.b:
        return "", f"differs by {number(100 * one.relative)}%"
    return one_line(one.a, 40), one_line(one.b, 40)


def _tail_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_NBYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
