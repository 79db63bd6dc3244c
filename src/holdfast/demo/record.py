"""Records of the demo's course: filled by `story`, shown by `report` and `figure`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass(slots=True, kw_only=True)
class ProcessRecord:
    """Record of one training process, until its end or kill. All times share one clock."""

    num_workers: int
    """Number of data workers: varied between processes, as it must not change the result."""
    began_s: float
    began_at: int = 0
    """Step of the checkpoint that it resumed from, or 0."""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """(folder, reason) of each checkpoint that resume rejected, newest first."""
    reached: int = 0
    """Last step that it completed."""
    killed_in_save: int | None = None
    """Step of the save that was under way when it was killed."""
    was_killed: bool = False
    ended_s: float = 0.0
    digest: str | None = None
    """Digest of the whole state at the end; None after a kill."""
    flipped: str | None = None
    """Description of the bit flipped before it began, if any."""
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
        """Loss by step; for a step that was done again, the last loss."""
        return {step: loss for life in self.lives for _, step, loss in life.steps}

    @property
    def num_kills(self) -> int:
        """Number of processes that were killed."""
        return sum(life.was_killed for life in self.lives)

    @property
    def num_redone(self) -> int:
        """Number of steps that were done again."""
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
