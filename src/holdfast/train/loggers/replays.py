"""Records of steps that are done once more, for loggers that cannot take back what they logged."""

from __future__ import annotations

import re

from holdfast.errors import FormatError

_POSITION = re.compile(r"([0-9]{1,18})/([0-9]{1,18})", re.ASCII)


class Replays:
    """Tells new records from those that an earlier process logged already.

    A resume does the steps after its checkpoint once more, in the same order, so a position in
    the sequence of records, kept wherever the records go, is enough to tell. Where training is
    not the same after a resume, say at another learning rate, the records of before stand.

    >>> before = Replays()
    >>> [before.is_new(step) for step in (1, 2, 2)], before.position
    ([True, True, True], '2/2')
    >>> after = Replays(before.position)
    >>> [after.is_new(step) for step in (2, 2, 2, 3)]
    [False, False, True, True]
    """

    def __init__(self, position: str = "0/0", *, resumed_step: int = 0) -> None:
        """`position` is that of an earlier process; `resumed_step` is done and will not be done
        again, so that what is still logged of it is new.

        Raises:
            FormatError: it is none.
        """
        found = _POSITION.fullmatch(position)
        if found is None:
            raise FormatError(f"{position!r} is no position of a log such as '120/2'")
        self._reached = (int(found[1]), int(found[2]))
        self._now = self._reached if self._reached[0] == resumed_step else (0, 0)

    @property
    def position(self) -> str:
        """How far the records go: the last step, and how many of them belong to it."""
        step, count = max(self._now, self._reached)
        return f"{step}/{count}"

    def is_new(self, step: int) -> bool:
        """Count a record of `step`; whether it is to be made."""
        last, count = self._now
        self._now = (step, count + 1 if step == last else 1)
        return self._now > self._reached
