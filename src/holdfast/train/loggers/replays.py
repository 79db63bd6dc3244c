"""Detection of duplicate records of steps done again, for loggers that cannot delete any."""

from __future__ import annotations

import re

from holdfast.errors import FormatError

_POSITION = re.compile(r"([0-9]{1,18})/([0-9]{1,18})", re.ASCII)


class Replays:
    """Distinguishes new records from those that an earlier process logged.

    A resume does the steps after its checkpoint again, in the same order. So it is enough to keep
    a position in the sequence of records, with the records. Where training differs after a resume,
    say by its learning rate, the earlier records stay.

    >>> before = Replays()
    >>> [before.is_new(step) for step in (1, 2, 2)], before.position
    ([True, True, True], '2/2')
    >>> after = Replays(before.position)
    >>> [after.is_new(step) for step in (2, 2, 2, 3)]
    [False, False, True, True]
    """

    def __init__(self, position: str = "0/0", *, resumed_step: int = 0) -> None:
        """Start after an earlier process's `position`; `resumed_step` is done and will not be done
        again, so that later records of it are new.

        Raises:
            FormatError: `position` is invalid.
        """
        match = _POSITION.fullmatch(position)
        if match is None:
            raise FormatError(f"{position!r} is no position of a log such as '120/2'")
        self._reached = (int(match[1]), int(match[2]))
        self._now = self._reached if self._reached[0] == resumed_step else (0, 0)

    @property
    def position(self) -> str:
        """Position of the newest record: its step, and its number within that step."""
        step, count = max(self._now, self._reached)
        return f"{step}/{count}"

    def is_new(self, step: int) -> bool:
        """Count a record of `step`; returns whether it is new."""
        last, count = self._now
        self._now = (step, count + 1 if step == last else 1)
        return self._now > self._reached
