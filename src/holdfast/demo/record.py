"""What happened in the demo, as values: filled by `story`, shown by `report` and `figure`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass(slots=True, kw_only=True)
class Life:
    """One process, from its start to its end or to its kill. Times are seconds on one clock."""

    num_workers: int
    """Processes that fetch its data; changed from life to life, because it must not matter."""
    began_s: float
    began_at: int = 0
    """Step at which it went on: that of the checkpoint, or 0."""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Checkpoints that resume passed over, newest first, with the reason."""
    reached: int = 0
    """The last step that it did."""
    killed_in_save: int | None = None
    """Step of the save that was under way when it was killed."""
    was_killed: bool = False
    ended_s: float = 0.0
    digest: str | None = None
    """Digest of the whole state at the end; None where there was a kill."""
    flipped: str | None = None
    """What was damaged before it began, if anything."""
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    """(time, step, loss) of each step."""
    saves: list[tuple[float, int]] = field(default_factory=list)
    """(time, step) of each commit."""
    stalls_s: list[float] = field(default_factory=list)
    """How long the loop stood still for each save."""
    save_durations_s: list[float] = field(default_factory=list)
    """From the begin of each save, in the background, to its commit."""
    checkpoint_nbytes: int = 0
    """Size of the last checkpoint committed."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A run of training: one life if nobody disturbs it."""

    name: str
    lives: list[Life] = field(default_factory=list)

    @property
    def digest(self) -> str | None:
        """Digest of the state at the end of the run."""
        return self.lives[-1].digest if self.lives else None

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step; where a step was done again, the last one counts."""
        return {step: loss for life in self.lives for _, step, loss in life.steps}

    @property
    def num_kills(self) -> int:
        """Processes that were killed."""
        return sum(life.was_killed for life in self.lives)

    @property
    def num_redone(self) -> int:
        """Steps that were done more than once."""
        return sum(before.reached - after.began_at for before, after in pairwise(self.lives))

    @property
    def stall_s(self) -> float:
        """Median time that the loop stood still for a save."""
        return median([s for life in self.lives for s in life.stalls_s] or [0.0])


@dataclass(slots=True, kw_only=True)
class Record:
    """Both runs."""

    seed: int
    undisturbed: Run
    killed: Run
    took_s: float = 0.0

    @property
    def num_differing_losses(self) -> int:
        """Steps whose loss is not the same number, bit for bit, every time that they were done."""
        expected = self.undisturbed.losses
        seen = [pair for life in self.killed.lives for pair in life.steps]
        differing = {step for _, step, loss in seen if expected.get(step) != loss}
        return len(differing | (set(expected) - {step for _, step, _ in seen}))

    @property
    def is_identical(self) -> bool:
        """Whether the two runs ended in the same state and went the same way there."""
        ends = (self.undisturbed.digest, self.killed.digest)
        return None not in ends and ends[0] == ends[1] and self.num_differing_losses == 0

    def to_json(self) -> dict[str, Any]:
        """The whole record, with the verdict first."""
        return {
            "identical": self.is_identical,
            "digests": {run.name: run.digest for run in (self.undisturbed, self.killed)},
            "differing_losses": self.num_differing_losses,
            "steps_redone": self.killed.num_redone,
            **asdict(self),
        }
