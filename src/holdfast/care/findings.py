"""Result records of verification: problems found, reports of a checkpoint and of a root."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError, SealError, is_damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem with a file, or with one block of it: damaged, missing or unreadable."""

    file: str
    message: str
    block: int | None = None
    start: int | None = None
    """Offset of the first damaged byte, where it is known."""
    nbytes: int | None = None
    tensors: tuple[str, ...] = ()
    """Keys of the tensors that have bytes in the damaged part."""
    expected: str = ""
    found: str = ""
    is_damage: bool = True
    """Whether bytes are wrong or lost (`errors.is_damage`). False: they could not be read now, or
    not by this version, and may be intact."""

    def __str__(self) -> str:
        place = "" if self.block is None else f" block {self.block} (byte {self.start})"
        against = f": expected {self.expected}, found {self.found}" if self.expected else ""
        shown = ", ".join(self.tensors[:3])
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        tensors = f"; tensors: {shown}{more}" if self.tensors else ""
        return f"{self.file}{place}: {self.message}{against}{tensors}"


def problem_of(file: str, what: str | HoldfastError, **more: Any) -> Problem:
    """Build the `Problem` of a file from a text, or from the error that reading it raised."""
    message = str(what).removeprefix(f"{file}: ")
    damage = isinstance(what, str) or is_damage(what)
    return Problem(file=file, message=message, is_damage=damage, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of verifying one checkpoint. `nbytes` counts the bytes that were read and compared."""

    folder: str
    step: int | None
    """Step of the checkpoint; None where the manifest cannot be read."""
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    nbytes: int
    num_files: int
    num_tensors: int

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class RootReport:
    """Result of verifying a root: its checkpoints newest first, and its claims."""

    checkpoints: tuple[VerifyReport, ...]
    problems: tuple[Problem, ...]
    """Damaged records in `writers/`."""
    notes: tuple[str, ...]
    unopened: tuple[tuple[str, SealError], ...] = ()
    """(folder, why) of checkpoints that the given keys do not decrypt; these were not checked."""

    @property
    def ok(self) -> bool:
        """Whether everything was read and nothing is damaged."""
        is_whole = all(report.ok for report in self.checkpoints)
        return is_whole and not self.problems and not self.unopened
