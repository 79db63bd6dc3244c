"""Heartbeats of ranks in a group's store, by which others notice a process or host that was lost.

A rank on the host of another sees its process, and needs none. A heartbeat stops, too, if a process
is stopped, or is in a call of C that keeps Python's lock. So short silence is only worth a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from threading import Condition, Event, Thread

BEAT_S = 5.0
"""Seconds between two heartbeats of a rank."""
BEAT_A_RANK_S = 0.001
"""The same for each rank of the group, which spares the one server of the store."""
LOST_S = 300.0
"""Seconds of silence after which a rank of another host counts as lost.

Longer than any usual call that keeps Python's lock: a large pickle, an index of a data set.
"""


class RankHeartbeat:
    """Daemon thread that sends a number now and then, until it is stopped or the store is gone."""

    def __init__(self, send: Callable[[bytes], object], turn: Condition, *, every_s: float) -> None:
        """Start the thread.

        Args:
            send: sends a value that differs from the one before; raises `RuntimeError` if that is
                no longer possible.
            turn: held while it is called.
            every_s: seconds between two calls.
        """
        self._stopped = Event()
        Thread(
            target=_beat,
            args=(send, turn, every_s, self._stopped),
            name="holdfast-heartbeat",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """End the thread, which sends nothing more; does not wait for it."""
        self._stopped.set()


def _beat(send: Callable[[bytes], object], turn: Condition, every_s: float, stopped: Event) -> None:
    for number in count():
        # With a limit: at exit the turn is taken for good.
        if turn.acquire(timeout=every_s):
            try:
                if stopped.is_set():
                    return
                send(b"%d" % number)
            except RuntimeError:  # of torch: no later message of this rank arrives, either
                return
            finally:
                turn.release()
        if stopped.wait(every_s):
            return


class Silences:
    """Seconds for which heartbeats of other ranks have not changed while this rank looked."""

    def __init__(self, *, most_s: float) -> None:
        """Set up; between two looks at most `most_s` seconds count.

        This process, or the store, may have been stopped between them.
        """
        self._most_s = most_s
        self._values: Mapping[int, bytes] = {}
        self._looked_s = 0.0
        self.by_rank: Mapping[int, float] = {}

    def record_heartbeats(self, values: Mapping[int, bytes], now_s: float) -> None:
        """Note the heartbeats of ranks at a time of the monotonic clock."""
        passed_s = min(now_s - self._looked_s, self._most_s)
        self.by_rank = {
            rank: self.by_rank[rank] + passed_s if self._values.get(rank) == value else 0.0
            for rank, value in values.items()
        }
        self._values, self._looked_s = dict(values), now_s
