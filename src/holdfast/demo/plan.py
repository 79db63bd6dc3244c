"""Settings of the demo, shared by the process that runs it and its training processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import UsageError


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
    """A planned SIGKILL: once `after_step` is done, at the time given by `moment`."""

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
