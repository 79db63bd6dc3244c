"""Settings of the demo, and records of its runs: filled by `story`, shown by `report`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from holdfast.errors import UsageError

Line = dict[str, Any]
"""Report of a training process, decoded from a line of JSON."""


@dataclass(slots=True, kw_only=True)
class ProcessRecord:
    """Record of one training process, until its end or kill. All times share one clock."""

    num_workers: int
    """Number of data workers: varied between processes, as it must not change the result."""
    began_s: float
    began_at: int = 0
    """Step of the checkpoint that the process resumed from, or 0."""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """(folder, reason) of each checkpoint that resume rejected, newest first."""
    reached: int = 0
    """Last completed step."""
    killed_in_save: int | None = None
    """Step of the save that was under way at the kill, if any."""
    was_killed: bool = False
    ended_s: float = 0.0
    digest: str | None = None
    """Digest of the whole state at the end; None after a kill."""
    flipped: str | None = None
    """Description of the bit that was flipped before the process began, if any."""
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    """(time, step, loss) of each step."""
    saves: list[tuple[float, int]] = field(default_factory=list)
    """(time, step) of each commit."""
    stalls_s: list[float] = field(default_factory=list)
    """Time that each save stopped the training loop."""
    save_durations_s: list[float] = field(default_factory=list)
    """Time from the start of each save, in the background, to its commit."""
    checkpoint_nbytes: int = 0
    """Size of the last checkpoint committed."""


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """Record of a training run: one process if it was never killed."""

    name: str
    lives: list[ProcessRecord] = field(default_factory=list)

    @property
    def digest(self) -> str | None:
        """Digest of the state at the end of the run."""
        return self.lives[-1].digest if self.lives else None

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step; for a step that was repeated, the last loss."""
        return {step: loss for life in self.lives for _, step, loss in life.steps}

    @property
    def num_kills(self) -> int:
        """Number of processes that were killed."""
        return sum(life.was_killed for life in self.lives)

    @property
    def num_redone(self) -> int:
        """Number of steps that were repeated after resumes."""
        return sum(before.reached - after.began_at for before, after in pairwise(self.lives))

    @property
    def stall_s(self) -> float:
        """Median time that a save stopped the training loop."""
        return median([s for life in self.lives for s in life.stalls_s] or [0.0])


@dataclass(slots=True, kw_only=True)
class DemoRecord:
    """Record of the demo: the undisturbed run and the killed one."""

    seed: int
    undisturbed: RunRecord
    killed: RunRecord
    took_s: float = 0.0

    @property
    def num_differing_losses(self) -> int:
        """Number of steps whose loss differs in any bit from that of the undisturbed run."""
        expected = self.undisturbed.losses
        seen = [pair for life in self.killed.lives for pair in life.steps]
        differing = {step for _, step, loss in seen if expected.get(step) != loss}
        return len(differing | (set(expected) - {step for _, step, _ in seen}))

    @property
    def is_identical(self) -> bool:
        """Whether both runs ended in the same state, with the same loss at each step."""
        ends = (self.undisturbed.digest, self.killed.digest)
        return None not in ends and ends[0] == ends[1] and self.num_differing_losses == 0

    def to_json(self) -> dict[str, Any]:
        """Convert the record to JSON values, the verdict first."""
        return {
            "identical": self.is_identical,
            "digests": {run.name: run.digest for run in (self.undisturbed, self.killed)},
            "differing_losses": self.num_differing_losses,
            "steps_redone": self.killed.num_redone,
            **asdict(self),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model. `width` is divisible by `num_heads`; `context` is in bytes of text."""

    width: int = 192
    num_heads: int = 6
    num_layers: int = 4
    context: int = 64
    dropout: float = 0.05
    vocabulary: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """Settings of one training run of the demo; the defaults are those of `make demo`."""

    seed: int
    """Seed of the model, the data, dropout, and the moments of the kills."""
    num_steps: int = 450
    """Optimizer steps of a whole run: about twenty seconds on two cores."""
    save_every: int = 20
    """Steps from one save to the next: about a second of training."""
    keep_last: int = 3
    """Checkpoints that retention keeps; more than one, as one may be damaged."""
    batch_size: int = 8
    """Windows of text in a step."""
    num_threads: int = 2
    """Threads that torch computes with. Float sums depend on it, so it is fixed."""
    text_nbytes: int = 4_000_000
    """Bytes of the standard library to learn from."""
    peak_lr: float = 2e-3
    """Learning rate after the warm-up."""
    warmup_steps: int = 40
    """Steps of linear warm-up; a cosine to zero follows."""
    shape: Shape = field(default_factory=Shape)
    """Size of the model."""

    def encoded(self) -> str:
        """Encode the plan as JSON, for another process's command line."""
        return msgspec.json.encode(self).decode()


def fast_plan(seed: int) -> DemoPlan:
    """Return a plan that takes seconds, for tests: its model learns little."""
    return DemoPlan(
        seed=seed,
        num_steps=300,
        save_every=20,
        batch_size=2,
        num_threads=1,
        text_nbytes=100_000,
        shape=Shape(width=128, num_heads=4, num_layers=2, context=16),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A planned SIGKILL: during the step or save after `after_step`, at the time `moment`."""

    after_step: int
    inside_save: bool
    """Whether to wait for the next save to begin, and kill during it."""
    moment: float
    """Time into the step or the save, as a fraction of its usual length: 0 to 1."""
    flip_bit: bool
    """Whether to flip a bit of the newest checkpoint before the next process starts."""


def draw_kills(plan: DemoPlan, draws: Sequence[float]) -> tuple[Kill, ...]:
    """Plan three kills, one in each third of the run, from six `draws` between 0 and 1.

    The second falls inside a save; after the third a bit is flipped.
    """
    if len(draws) != 6:
        raise UsageError(f"three kills need six draws, not {len(draws)}")
    kills = []
    for number in range(3):
        fraction = (0.15, 0.42, 0.68)[number] + 0.15 * draws[number]
        kills.append(
            Kill(
                after_step=round(plan.num_steps * fraction),
                inside_save=number == 1,
                moment=0.6 * draws[3 + number],
                flip_bit=number == 2,
            )
        )
    return tuple(kills)
